"""Where a run is kept: `.advisor/runs/<id>/`, ignored by git, every text in it redacted."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.errors import ArtifactError, OutputError, UsageError
from advisor.machine import project_root
from advisor.redact import Redactor

FOLDER = ".advisor"
REQUEST = "run.json"
CHECKED = "check.json"  # of a run that `advisor check` recorded: it has findings and no verdict
TRACE = "trace.json.gz"  # of the profiled steps
TENSORBOARD = "tensorboard"
TRACE_NAMES = re.compile(rb'("(?:name|traceName|hostname|cwd|user)":\s*)("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class RunDir:
    """One run's folder. Every text written through it passes the redactor."""

    path: Path
    redactor: Redactor

    @property
    def id(self) -> str:
        """Name of the run."""
        return self.path.name

    def write(self, name: str, text: str) -> None:
        """Write a redacted text file; raises OutputError."""
        try:
            (self.path / name).write_text(self.redactor.text(text), encoding="utf-8", newline="")
        except OSError as error:
            raise OutputError(
                f"cannot write {name} in the run directory: {error.strerror}: choose another with --out"
            ) from error

    def write_json(self, name: str, value: Any) -> None:
        """Write a redacted JSON document."""
        self.write(name, json.dumps(self.redactor.value(value), indent=1, sort_keys=False, allow_nan=False))

    def read_json(self, name: str) -> Any:
        """Read a document of this run; raises ArtifactError."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ArtifactError(
                f"run {self.id} has no {name}: it ended before that stage; run `advisor optimize` again"
            ) from error
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{name} of run {self.id} cannot be read: {error}") from error

    def has(self, name: str) -> bool:
        """Whether the run holds a file."""
        return (self.path / name).is_file()

    def folder(self, name: str) -> Path:
        """A folder inside the run, made when missing."""
        try:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot write in the run directory: {error.strerror}: choose another with --out"
            ) from error
        return self.path / name

    def seal_trace(self, name: str) -> None:
        """Redact names and file paths inside a recorded trace; event times and shapes stay as they are."""
        path = self.path / name
        if not path.is_file():
            return

        def clean(match: re.Match[bytes]) -> bytes:
            text = json.loads(match[2])
            redacted = self.redactor.text(text)
            return match[0] if redacted == text else match[1] + json.dumps(redacted).encode()

        data = gzip.decompress(path.read_bytes())
        cleaned = TRACE_NAMES.sub(clean, data)
        if cleaned != data:
            path.write_bytes(gzip.compress(cleaned, 6))

    def show_in_tensorboard(self, name: str, rank: int = 0) -> Path | None:
        """Lay out a sealed trace of this run for `tensorboard --logdir RUN/tensorboard` and give its path there.

        torch-tb-profiler 0.4.3 takes every folder under the log directory that holds a file
        `WORKER[.TIME].pt.trace.json[.gz]` for a run (`consts.WORKER_PATTERN`), each such file for a process, and a
        worker `NODE_NUMBER` for that process of that node (`consts.NODE_PROCESS_PATTERN`). The trace becomes
        `tensorboard/ID/rank_0.pt.trace.json.gz`: a further name of the same file, a copy where the file system has no
        links. None where the run has no such trace; raises OutputError.
        """
        if not self.has(name):
            return None
        shown = self.folder(f"{TENSORBOARD}/{self.id}") / f"rank_{rank}.pt.trace.json.gz"
        try:
            shown.unlink(missing_ok=True)
            try:
                os.link(self.path / name, shown)
            except OSError:
                shutil.copyfile(self.path / name, shown)
        except OSError as error:
            raise OutputError(
                f"cannot write in the run directory: {error.strerror}: choose another with --out"
            ) from error
        return shown


def base_folder(out: Path | None) -> Path:
    """The folder that holds runs: `--out`, or `.advisor/runs` in the working directory."""
    return out if out is not None else Path.cwd() / FOLDER / "runs"


def create(out: Path | None, redactor: Redactor) -> RunDir:
    """A new, empty run; the ids sort by time."""
    base = base_folder(out)
    name = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    try:
        (base / name).mkdir(parents=True)
        if out is None:
            (base.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    except FileExistsError as error:
        raise OutputError(f"{base} exists and is no directory: choose another with --out") from error
    except OSError as error:
        raise OutputError(
            f"cannot write {_short(base)}: {error.strerror}: choose a writable directory with --out"
        ) from error
    return RunDir(base / name, redactor)


def find(name: str | None, out: Path | None, redactor: Redactor) -> RunDir:
    """A run by path, id or unambiguous beginning of its id; where none is named the latest of `advisor optimize`."""
    if name is not None and Path(name).is_dir() and (Path(name) / REQUEST).is_file():
        return RunDir(Path(name), redactor)
    base = base_folder(out)
    runs = sorted(p.name for p in base.iterdir() if (p / REQUEST).is_file()) if base.is_dir() else []
    if name is None:
        runs = [r for r in runs if not (base / r / CHECKED).is_file()]
    if not runs:
        raise UsageError(f"there is no run in {_short(base)}: start one with `advisor optimize SCRIPT`")
    chosen = [r for r in runs if name is None or r.startswith(name)]
    if not chosen:
        raise UsageError(f"there is no run {name}: the latest is {runs[-1]}")
    if name is not None and len(chosen) > 1:
        raise UsageError(f"{name} names {len(chosen)} runs: {', '.join(chosen[:5])}")
    return RunDir(base / chosen[-1], redactor)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def root_of(run: RunDir, request: Mapping[str, Any]) -> Path:
    """The project a run belongs to; raises UsageError where it is not where it was."""
    stored = (run.path / str(request["root"])).resolve()
    script = str(request["script"])
    for root in (stored, project_root(Path.cwd() / script)):  # the stored path is redacted where it names a home folder
        if (root / script).is_file():
            return root
    raise UsageError(f"{script} of run {run.id} is not found: run this inside its project")


def request_of(run: RunDir) -> Mapping[str, Any]:
    """What the run was asked to do."""
    found = run.read_json(REQUEST)
    kinds = {"script": str, "arguments": list, "root": str, "entry": str | None}
    if not isinstance(found, dict) or not all(k in found and isinstance(found[k], t) for k, t in kinds.items()):
        raise ArtifactError(f"{REQUEST} of run {run.id} is of another version: run `advisor optimize` again")
    return found
