"""Reads text that another tool wrote line by line, within limits, with errors that name the file and the line."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

from advisor.errors import ArtifactError

MAX_BYTES = 64 * 2**20  # of a file; memory stays at a few times this
MAX_LINE = 4 * 2**20  # characters of a line; the widest tables have lines of some hundred kilobytes


class TextLines:
    """The lines of a text file, each with its line end.

    `number` counts from 1 and `cut` says that the line end is missing; both belong to the line given last.

    UTF-8 is read, and UTF-16 where the file says so in its first two bytes (the form a PowerShell redirection writes).
    Iterating raises ArtifactError for a file that cannot be opened, is larger than `MAX_BYTES`, has a line longer than
    `MAX_LINE` or is no text; `advice` ends every message and says how to get a file that can be read.
    """

    def __init__(self, path: Path, advice: str) -> None:
        self.name = path.name
        self.number = 0
        self.cut = False
        self._advice = advice
        self._lines = self._read(path)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines)

    def error(self, what: str) -> ArtifactError:
        """The error for something wrong in the line given last."""
        return ArtifactError(f"{self.name}, line {self.number}: {what}; {self._advice}")

    def refusal(self, what: str) -> ArtifactError:
        """The error for a file that is refused as a whole."""
        return ArtifactError(f"{self.name} {what}: {self._advice}")

    def _read(self, path: Path) -> Iterator[str]:
        try:
            if not path.is_file():
                raise self.refusal("is not a file" if path.exists() else "does not exist")
            if path.stat().st_size > MAX_BYTES:
                raise self.refusal(f"is larger than {MAX_BYTES >> 20} MiB")
            with path.open("rb") as file:
                marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                file.seek(0)
                text = io.TextIOWrapper(file, encoding="utf-16" if marked else "utf-8-sig")
                while line := text.readline(MAX_LINE + 1):
                    self.number += 1
                    if len(line) > MAX_LINE:
                        raise self.refusal(f"has a line longer than {MAX_LINE >> 20} MiB")
                    if "\0" in line:
                        raise self.refusal("is no text")
                    self.cut = not line.endswith("\n")
                    yield line
        except UnicodeError:
            raise self.refusal("is no text") from None
        except OSError as error:
            raise self.refusal(f"cannot be read ({error.strerror or error})") from None


def read_records(lines: TextLines, keep: Callable[[str], bool]) -> Iterator[list[str]]:
    """The CSV records of the rest of a file; lines that `keep` does not want are left out unless inside a quoted field.

    Raises ArtifactError for what is no CSV: a quote that is never closed, text after a closing quote, a field of more
    than 128 KiB (the limit of the csv module).
    """

    def wanted() -> Iterator[str]:
        inside = False
        for line in lines:
            if inside or (line.strip() and keep(line)):
                inside ^= line.count('"') % 2 == 1
                yield line

    records = csv.reader(wanted(), strict=True, skipinitialspace=True)
    while True:
        try:
            record = next(records, None)
        except csv.Error as error:
            raise lines.error(f"the table is damaged or truncated ({error})") from None
        if record is None:
            return
        yield record
