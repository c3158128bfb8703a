"""Stage 6: apply rewrites to the sources as found and write them as a diff that git applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from advisor.codemod import Conflict, apply, replacements
from advisor.diffs import unified
from advisor.model import Patch, Rewrite, Span
from advisor.proposals import FileEdit
from advisor.source import Source, parsed

Read: TypeAlias = Callable[[str], Source]


def build(rewrites: Sequence[Rewrite], read: Read) -> Patch:
    """A patch of the rewrites that fit together; one that overlaps an earlier one is skipped with the reason."""
    kept: list[Rewrite] = []
    skipped: list[tuple[Rewrite, str]] = []
    for rewrite in rewrites:
        try:
            _texts([*kept, rewrite], read)
        except Conflict:
            skipped.append((rewrite, "it edits lines that another rewrite has changed"))
        except SyntaxError as error:
            skipped.append((rewrite, f"the result does not parse: {error.msg} at line {error.lineno}"))
        else:
            kept.append(rewrite)
    texts = _texts(kept, read)
    return Patch(
        base={path: read(path).sha256 for path in texts},
        rewrites=tuple(kept),
        diff="".join(unified(path, read(path).text, text) for path, text in texts.items()),
        sources=texts,
        skipped=tuple(skipped),
    )


def steps(patch: Patch, read: Read) -> list[tuple[Rewrite, str]]:
    """One diff per rewrite, to be applied in order."""
    found: list[tuple[Rewrite, str]] = []
    before: Mapping[str, str] = {path: read(path).text for path in patch.sources}
    for count, rewrite in enumerate(patch.rewrites, start=1):
        after = {**before, **_texts(patch.rewrites[:count], read)}
        found.append((rewrite, "".join(unified(path, before[path], after[path]) for path in sorted(after))))
        before = after
    return found


def edits(patch: Patch, read: Read) -> dict[str, FileEdit]:
    """What the patch does to every file, exactly: enough to repeat it on the same text, and to know that it is."""
    files: dict[str, FileEdit] = {}
    for path, text in patch.sources.items():
        source = read(path)
        mine = [edit for rewrite in patch.rewrites for edit in rewrite.edits if edit[0].path == path]
        files[path] = FileEdit(
            base=source.sha256,
            result=Source(path, text).sha256,
            replacements=tuple(replacements(source, mine)),
        )
    return files


def _texts(rewrites: Sequence[Rewrite], read: Read) -> dict[str, str]:
    edits: dict[str, list[tuple[Span, str]]] = {}
    for rewrite in rewrites:
        for span, text in rewrite.edits:
            edits.setdefault(span.path, []).append((span, text))
    texts = {path: apply(read(path), wanted) for path, wanted in sorted(edits.items())}
    for path, text in texts.items():
        parsed(text, path)
    return texts
