"""Lines of a terminal report: untrusted text made plain, wrapped, cut and aligned by the cells it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from . import wording
from .untrusted import visible

STYLES: Mapping[wording.Tone, str] = {"good": "bold green", "flat": "bold", "bad": "bold red", "open": "bold yellow"}
LABEL = 11  # cells of a label column


def plain(text: str) -> str:
    """Untrusted text as one visible line; no line of a terminal shows more than its first thousand characters."""
    return visible(text[:1000])


def headline(said: wording.Headline, width: int) -> Iterator[Text]:
    """The answer and the figures behind it, on one line where they fit."""
    first = Text.assemble((plain(said.lead), STYLES[said.tone]))
    rest = Text(plain(said.rest))
    if cell_len(first.plain) + cell_len(rest.plain) + 3 <= width:
        yield Text.assemble(first, *(("   ", rest) if rest.plain else ()))
    else:
        yield first
        yield Text.assemble("  ", rest)


def row(label: str, value: str, rest: str = "", *, style: str = "bold", cells: int = LABEL) -> Text:
    """A label and what belongs to it; the value of a row without a label stands under the one before it."""
    return Text.assemble("  ", (label.ljust(cells), "dim"), (value, style if label else ""), rest)


def wrapped(text: str, first: int, rest: int) -> list[str]:
    """A text in lines of whole words: `first` cells for the first line, `rest` for every other."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if not lines[-1] or cell_len(longer) <= (first if len(lines) == 1 else rest):
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def column(texts: Iterable[str], limit: int) -> list[str]:
    """Texts of one column, cut at the left (the end of a path tells most) and padded to the same number of cells."""
    cut = []
    for text in texts:
        end = text
        while cell_len(end) > (limit if end is text else limit - 3):
            end = end[1:]
        cut.append(text if end is text else f"...{end}")
    most = max((cell_len(text) for text in cut), default=0)
    return [text + " " * (most - cell_len(text)) for text in cut]


def print_line(console: Console, line: Text, width: int) -> None:
    """Print one line in what the terminal's encoding has, cut where it is wider than `width` cells."""
    shown = encodable(line, console.encoding)
    if cell_len(shown.plain) > width:
        shown.truncate(width - 3, overflow="crop")
        shown.append("...")
    console.print(shown, highlight=False, no_wrap=True, overflow="crop")


def encodable(line: Text, encoding: str) -> Text:
    """The line in characters that the terminal's encoding has; the others become escapes."""
    try:
        line.plain.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        line.plain = line.plain.encode("ascii", "backslashreplace").decode("ascii")
    return line
