"""The line numbers that the hunks of one file's unified diff show."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A line of the new text that a hunk shows: its number there, and that of the old text.

    For an added line, `old` is the number of the next line of the old text.
    """

    old: int
    new: int
    added: bool


def new_lines(patch: str) -> tuple[ShownLine, ...]:
    """The lines of the new text in the order of the patch of one file, with or without its `---` and `+++` header.

    What stands outside of a hunk is passed over; a hunk ends early at a line that belongs in none.
    """
    shown: list[ShownLine] = []
    old = new = old_left = new_left = 0
    for line in patch.removesuffix("\n").split("\n"):
        if old_left <= 0 and new_left <= 0:
            if found := _HUNK.match(line):
                old, new = int(found[1]), int(found[3])
                old_left, new_left = (1 if found[n] is None else int(found[n]) for n in (2, 4))
            continue
        kind = line[:1] if line.rstrip("\r") else " "  # some tools strip the blank of an empty context line
        if kind == "\\":
            continue
        taken_old, taken_new = int(kind in " -"), int(kind in " +")
        if kind not in " +-" or taken_old > old_left or taken_new > new_left:
            old_left = new_left = 0
            continue
        if taken_new:
            shown.append(ShownLine(old, new, kind == "+"))
        old, new = old + taken_old, new + taken_new
        old_left, new_left = old_left - taken_old, new_left - taken_new
    return tuple(shown)


def shown_lines(patch: str) -> tuple[frozenset[int], frozenset[int]]:
    """The lines of the new text that the hunks show, and those of them that are added."""
    lines = new_lines(patch)
    return frozenset(line.new for line in lines), frozenset(line.new for line in lines if line.added)
