"""Markdown cut to the length that a forge takes, so that what is left still renders."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_DETAILS = re.compile(r"<(/?)details\b", re.IGNORECASE)


def fitted(markdown: str, limit: int) -> str:
    """`markdown` in at most `limit` characters: whole lines, open fences and `<details>` closed, with a note."""
    if len(markdown) <= limit:
        return markdown
    room = limit - 200  # for the note and what must be closed
    lines = markdown[: max(room, 0)].split("\n")
    kept = lines[:-1] if len(lines) > 1 else lines
    while True:
        shown = "\n".join(kept)
        note = f"\n{_closing(kept)}\n\n_Cut here: {len(markdown) - len(shown):,} more characters._\n"
        if len(shown) + len(note) <= limit or not kept:
            return (shown + note)[:limit]
        kept = kept[:-1]


def cut(text: str, limit: int) -> str:
    """Plain text in at most `limit` characters and `limit` bytes of UTF-8, ending in three dots where it was cut."""
    data = text.encode(errors="replace")
    if len(text) <= limit and len(data) <= limit:
        return text
    return data[: limit - 3].decode(errors="ignore") + "..."


def fence_for(text: str) -> str:
    """Backticks enough to fence a text: more than stand together anywhere in it, three at least."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))


def _closing(lines: list[str]) -> str:
    """What closes the fence, the HTML comment and the `<details>` that are open after some lines."""
    fence = ""
    details = 0
    for line in lines:
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2].strip():
                fence = ""
        elif found and not (found[1][0] == "`" and "`" in found[2]):
            fence = found[1]
        else:
            for tag in _DETAILS.finditer(line):
                details = max(0, details + (-1 if tag[1] else 1))
    _, opened, hidden = "\n".join(lines).rpartition("<!--")
    comment = "-->\n" if opened and "-->" not in hidden else ""
    return (f"{fence}\n" if fence else comment) + "</details>\n" * min(details, 8)
