"""Texts before and after: a unified diff of the two, and the edits of one file made again."""

from __future__ import annotations

import difflib
import io

from advisor.proposals import FileEdit


def unified(path: str, before: str, after: str) -> str:
    """A unified diff in git's form, whose lines end with a line feed only; empty when nothing changed."""
    if before == after:
        return ""
    lines: list[str] = [f"diff --git a/{path} b/{path}\n"]
    old, new = (list(io.StringIO(text, newline="\n")) for text in (before, after))
    for line in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", n=3):
        lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)


def edited(text: str, edit: FileEdit) -> str:
    """The text with the edits of a file made; raises ValueError where they are not in order and inside the text."""
    last = len(text) + 1
    for begin, end, new in reversed(edit.replacements):
        if not 0 <= begin <= end <= min(last, len(text)):
            raise ValueError("the edits are out of order or outside of the text")
        text, last = text[:begin] + new + text[end:], begin
    return text
