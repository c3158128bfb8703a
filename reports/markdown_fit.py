"""A Markdown text of whole blocks that is kept under a size by giving shorter forms of the least important ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markdown_text import size

LIMIT = 65_000
"""Bytes of a text that every forge takes: GitHub refuses more than 65,536 characters."""
LEAST = 8_000  # bytes in which the shortest forms of what must stay have room


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a text: its forms from the fullest to the shortest, an empty one to leave it out.

    Every form is whole Markdown. Of two blocks the one with the smaller `weight` is shortened first, of equal ones the
    later. `name` says in our words what is missing then.
    """

    name: str
    weight: int
    forms: tuple[str, ...]


def fitted(blocks: Sequence[Block], limit: int, *, elsewhere: str) -> str:
    """The blocks in their order, in their fullest forms that fit into `limit` bytes; ends with a newline.

    `elsewhere` is a sentence that says where the whole is; it is told where something was shortened. The shortest
    forms together have to fit; ValueError for a limit below 8,000 bytes.
    """
    if limit < LEAST:
        raise ValueError(f"a limit of {limit} bytes is too small: give {LEAST} or more")
    chosen = [0] * len(blocks)
    sizes = [[size(form) + 2 for form in block.forms] for block in blocks]
    order = sorted(range(len(blocks)), key=lambda index: (blocks[index].weight, -index))
    room = limit - size(elsewhere) - 1_000  # for what is said of the shortening: every name is short, and told once
    total = sum(each[0] for each in sizes)
    for index in order:
        while total > (room if any(chosen) else limit) and chosen[index] + 1 < len(sizes[index]):
            chosen[index] += 1
            total += sizes[index][chosen[index]] - sizes[index][chosen[index] - 1]
    forms = [block.forms[at] for block, at in zip(blocks, chosen, strict=True)]
    shortened = dict.fromkeys(block.name for block, at in zip(blocks, chosen, strict=True) if at)
    if shortened:
        forms.append(f"Shortened to fit: {', '.join(shortened)}. {elsewhere}")
    whole = "\n\n".join(form for form in forms if form) + "\n"
    assert size(whole) <= limit, f"{size(whole)} bytes, limit {limit}"
    return whole


def few(rows: int) -> tuple[int, ...]:
    """How many of `rows` rows the forms of a table show: all, then fewer, then none."""
    return tuple(dict.fromkeys(min(rows, most) for most in (500, 100, 25, 8, 0)))
