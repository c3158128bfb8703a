"""Text that others wrote (paths, names, reasons, source lines), made safe and honest to show."""

from __future__ import annotations

import re

# Controls, lone surrogates, line separators and every format character that can hide or reorder text; the zero-width
# joiners stay, because words and emoji of living scripts need them.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)
_HIDDEN_KEEPING_TABS = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x08\x0a-\x1f"))
_HUNK = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_BLANKS = re.compile(r"[ \t\r\n\f\v]+")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """One line of `text` with nothing hidden: blanks collapse, control characters become their escapes."""
    return _HIDDEN.sub(_escape, _BLANKS.sub(" ", text))


def visible_line(text: str) -> str:
    """A source line with its indentation kept and nothing hidden."""
    return _HIDDEN_KEEPING_TABS.sub(_escape, text)


def clip(text: str, limit: int) -> str:
    """The beginning of `text`, visible, in about `limit` characters; what is left out is counted."""
    if len(text) <= limit:
        return visible(text)
    return f"{visible(text[:limit])}... (+{len(text) - limit:,} characters)"


def clip_path(path: str, limit: int) -> str:
    """The end of `path`, visible: its last parts tell more than its first."""
    return visible(path) if len(path) <= limit else f"...{visible(path[-limit:])}"


def diff_lines(diff: str, *, lines: int, width: int) -> list[tuple[str, str]]:
    """A unified diff as (kind, text): kind is file, hunk, add, del, same or note; long diffs end with a note."""
    every = diff.removesuffix("\n").split("\n") if diff else []
    shown: list[tuple[str, str]] = []
    old = new = 0  # lines the current hunk still announces; a line outside every hunk belongs to a file header
    for line in every[:lines]:
        kind = "file"
        if old > 0 or new > 0:
            kind = {"+": "add", "-": "del", "\\": "note"}.get(line[:1], "same")
            old -= kind in ("del", "same")
            new -= kind in ("add", "same")
        elif found := _HUNK.match(line):
            kind = "hunk"
            old, new = (int(count) if count is not None else 1 for count in found.groups())
        elif line.startswith("\\"):
            kind = "note"
        cut = line if len(line) <= width else f"{line[:width]}... (+{len(line) - width:,} characters)"
        shown.append((kind, visible_line(cut.removesuffix("\r"))))
    if len(every) > lines:
        shown.append(("note", f"({len(every) - lines:,} more lines)"))
    return shown
