"""Stage 6: apply rewrites to the sources as found and write them as a diff that git applies."""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable, Mapping, Sequence

from advisor.codemod import Conflict, apply
from advisor.model import Patch, Rewrite, Span
from advisor.source import Source, parsed


def build(rewrites: Sequence[Rewrite], read: Callable[[str], Source]) -> Patch:
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


def steps(patch: Patch, read: Callable[[str], Source]) -> list[tuple[Rewrite, str]]:
    """One diff per rewrite, to be applied in order."""
    found: list[tuple[Rewrite, str]] = []
    before: Mapping[str, str] = {path: read(path).text for path in patch.sources}
    for count, rewrite in enumerate(patch.rewrites, start=1):
        after = {**before, **_texts(patch.rewrites[:count], read)}
        found.append((rewrite, "".join(unified(path, before[path], after[path]) for path in sorted(after))))
        before = after
    return found


def _texts(rewrites: Sequence[Rewrite], read: Callable[[str], Source]) -> dict[str, str]:
    edits: dict[str, list[tuple[Span, str]]] = {}
    for rewrite in rewrites:
        for span, text in rewrite.edits:
            edits.setdefault(span.path, []).append((span, text))
    texts = {path: apply(read(path), wanted) for path, wanted in sorted(edits.items())}
    for path, text in texts.items():
        parsed(text, path)
    return texts


def unified(path: str, before: str, after: str) -> str:
    """A unified diff in git's form, whose lines end with a line feed only; empty when nothing changed."""
    if before == after:
        return ""
    lines: list[str] = [f"diff --git a/{path} b/{path}\n"]
    old, new = (list(io.StringIO(text, newline="\n")) for text in (before, after))
    for line in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", n=3):
        lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)
