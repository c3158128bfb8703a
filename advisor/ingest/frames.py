"""Turns recorded file positions into spans: paths relative to the project root, columns in characters of the file."""

from __future__ import annotations

import os
from pathlib import Path

from advisor.model import Span
from advisor.source import split_lines

_PORTABLE = (
    "site-packages/",
    "dist-packages/",
    "lib/python3/",
    "outside/",
)  # how capture writes what is not the user's
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3")


class Frames:
    """Makes spans for one project root; reads the user's files (only those) to place columns, each at most once."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._lines: dict[str, list[str]] = {}

    def relative(self, path: str) -> str | None:
        """The path below the root with forward slashes, None for a file that is not the user's own.

        Recorded paths are relative to the root already; absolute ones come from traces recorded elsewhere.
        """
        plain = path.replace("\\", "/")
        if plain.startswith(("<", *_PORTABLE)):
            return None
        if not os.path.isabs(path):
            return plain
        inside = os.path.relpath(os.path.realpath(path), self._root).replace(os.sep, "/")
        if inside.startswith("../") or any(part in f"/{inside}" for part in _LIBRARY):
            return None
        return inside

    def span(
        self,
        path: str,
        line: int,
        function: str | None = None,
        text: str | None = None,
        column: int | None = None,
        end_column: int | None = None,
    ) -> Span:
        """The span of one traceback frame.

        `column` counts from the start of `text`, the line as the traceback shows it, without its indentation. Columns
        are kept only where the file still holds that line, so that a span never points beside its expression.
        """
        inside = self.relative(path)
        if inside is None:
            return Span(path=path, line=line, function=function)
        indent = self._indent(inside, line, text)
        if indent is None or column is None or end_column is None:
            return Span(path=inside, line=line, function=function)
        return Span(
            path=inside,
            line=line,
            column=indent + column,
            end_line=line,
            end_column=indent + end_column,
            function=function,
        )

    def position(
        self, path: str, line: int, function: str | None, columns: tuple[int | None, int | None, int | None, int | None]
    ) -> Span:
        """The span of a code position (line, end line, column, end column), columns in bytes as Python keeps them."""
        first, last, begin, end = columns
        inside = self.relative(path)
        shown = path if inside is None else inside
        if first is None or last is None or begin is None or end is None:
            return Span(path=shown, line=line, function=function)
        return Span(
            path=shown,
            line=first,
            column=self._characters(inside, first, begin),
            end_line=last,
            end_column=self._characters(inside, last, end),
            function=function,
        )

    def _indent(self, inside: str, line: int, text: str | None) -> int | None:
        source = self._line(inside, line)
        if source is None or text is None or source.strip() != text.strip():
            return None
        return len(source) - len(source.lstrip()) - (len(text) - len(text.lstrip()))

    def _characters(self, inside: str | None, line: int, column: int) -> int:
        source = self._line(inside, line) if inside is not None else None
        return column if source is None else len(source.encode()[:column].decode(errors="ignore"))

    def _line(self, inside: str, line: int) -> str | None:
        if inside not in self._lines:
            try:
                self._lines[inside] = split_lines((Path(self._root) / inside).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                self._lines[inside] = []
        lines = self._lines[inside]
        return lines[line - 1] if 0 < line <= len(lines) else None
