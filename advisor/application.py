"""`advisor apply`: put the proven patch of a run into the user's tree, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.diffs import edited
from advisor.errors import ArtifactError, DirtyTreeError, OutputError, UsageError
from advisor.machine import git
from advisor.model import Patch
from advisor.proposals import FileEdit
from advisor.redact import Redactor
from advisor.rundir import RunDir, request_of, root_of
from advisor.source import Source


def apply_run(folder: Path, *, allow_dirty: bool = False) -> list[str]:
    """Apply the edits of a run; returns the changed paths, relative to the project root.

    Raises UsageError when the run proved nothing, DirtyTreeError when the tree has uncommitted changes, ArtifactError
    when a file is not the one the patch was proved on. Nothing is changed unless everything can be.
    """
    run = RunDir(folder, Redactor.of_machine())
    request = request_of(run)
    if not run.has("patch.json"):
        raise UsageError(
            f"run {run.id} has no proven patch, because it did not reach its verdict: go on with "
            f"`advisor optimize --resume {run.id}`, or start again"
        )
    files = _files_of(run)
    if not files:
        raise UsageError(f"run {run.id} has no proven patch: `advisor report {run.id}` says why")
    root = root_of(run, request)
    texts = {path: _patched(root, path, file, run.id) for path, file in files.items()}
    if not allow_dirty:
        _check_clean(root)
    for path, text in texts.items():
        _write(root / path, text)
    return sorted(texts)


def _files_of(run: RunDir) -> dict[str, dict[str, Any]]:
    """The edits of every file as they are stored; raises ArtifactError where they are not of the form written."""
    stored = run.read_json("patch.json")
    files = stored.get("files") if isinstance(stored, dict) else None
    if not isinstance(files, dict) or not all(_is_file(file) for file in files.values()):
        raise ArtifactError(f"patch.json of run {run.id} is damaged: run `advisor optimize` again")
    return files


def _is_file(file: Any) -> bool:
    return (
        isinstance(file, dict)
        and isinstance(file.get("base"), str)
        and isinstance(file.get("result"), str)
        and isinstance(file.get("replacements"), list)
        and all(isinstance(each, list) and list(map(type, each)) == [int, int, str] for each in file["replacements"])
    )


def apply_patch(root: Path, patch: Patch) -> list[str]:
    """Put a patch that has just been proved into a clean tree; the sources must still be those it was proved on."""
    for path, digest in patch.base.items():
        if Source.read(root, path).sha256 != digest:
            raise ArtifactError(f"{path} has changed while the run went on: run `advisor optimize` on it again")
    _check_clean(root)
    for path, text in patch.sources.items():
        _write(root / path, text)
    return sorted(patch.sources)


def _patched(root: Path, path: str, file: Mapping[str, Any], run: str) -> str:
    """The text of one file with its edits, checked against the text they were proved on and the text that was
    proved."""
    text = Source.read(root, path).text
    if Source(path, text).sha256 != file["base"]:
        raise ArtifactError(f"{path} has changed since run {run}: run `advisor optimize` on it again")
    replacements = tuple((begin, end, new) for begin, end, new in file["replacements"])
    try:
        text = edited(text, FileEdit(base=file["base"], result=file["result"], replacements=replacements))
    except ValueError as error:
        raise ArtifactError(f"patch.json of run {run} is damaged: run `advisor optimize` again") from error
    if Source(path, text).sha256 != file["result"]:
        raise ArtifactError(
            f"the stored patch of {path} is not the text that was proved, because it held what looks like a secret or "
            "a private path: run `advisor optimize --apply`, which stores nothing in between"
        )
    return text


def _check_clean(root: Path) -> None:
    changed = git(root, "status", "--porcelain", "--untracked-files=no")
    if changed is None:
        raise DirtyTreeError(
            "this is no git work tree, so the patch could not be taken back: commit first, or --allow-dirty"
        )
    if changed.strip():
        first = changed.splitlines()[0][3:]
        raise DirtyTreeError(f"the work tree has uncommitted changes ({first}): commit or stash them, or --allow-dirty")


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, keeping its mode; a link stays one, its target is written."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.advisor")
    try:
        beside.write_text(text, encoding="utf-8", newline="")
        beside.chmod(path.stat().st_mode & 0o7777)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path.name}: {error.strerror}") from error
