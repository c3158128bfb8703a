"""Findings as rdjson, the Reviewdog Diagnostic Format (github.com/reviewdog/reviewdog, proto/rdf/reviewdog.proto)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from advisor.model import CheckReport, Report, ReportedEdit, ReportedFinding

from . import wording
from .untrusted import clip

Lines: TypeAlias = Mapping[tuple[str, int], str]
"""Lines of the sources as found, without their line feeds, by path and number."""

_MESSAGE = 1_000
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")


def render_rdjson(report: CheckReport | Report) -> str:
    """The document as text."""
    return json.dumps(rdjson_document(report), indent=2, allow_nan=False) + "\n"


def rdjson_document(report: CheckReport | Report) -> dict[str, Any]:
    """A diagnostic for every finding that has a place: a warning with a suggestion where there is a rewrite, else info.

    Columns count bytes of UTF-8 from 1; they are taken from the source lines that the diffs quote, and left out where
    those are not known. reviewdog takes the suggestions of a diagnostic for alternatives, so that a rewrite is one
    suggestion or, where it edits several files or lines far apart, none.
    """
    if isinstance(report, Report):
        proven = report.outcome == "improved"
        lines = quoted(report.diff)
        found = [(entry, lines, proven and entry.status == "applied") for entry in report.findings]
        shown = [each for each in found if each[0].status in ("applied", "suggested")]
    else:
        every = [entry for file in report.files for entry in file.findings if entry.status != "rejected"]
        shown = [(entry, quoted(entry.diff), entry.status == "found") for entry in every]
    diagnostics = [_diagnostic(entry, lines, rewritten) for entry, lines, rewritten in shown if entry.path]
    return {"source": {"name": "advisor"}, "severity": "INFO", "diagnostics": diagnostics}


def _diagnostic(entry: ReportedFinding, lines: Lines, rewritten: bool) -> dict[str, Any]:
    path = (entry.path or "").replace("\\", "/").encode("utf-8", "replace").decode()  # JSON has no lone surrogates
    location: dict[str, Any] = {"path": path}
    if entry.line is not None:
        location["range"] = _place(entry, lines)
    suggestion = _suggestion(entry, lines) if rewritten else None
    return {
        "message": _message(entry, rewritten, suggestion is not None),
        "location": location,
        "severity": "WARNING" if rewritten else "INFO",
        "code": {"value": entry.rule},
        **({"suggestions": [suggestion]} if suggestion is not None else {}),
    }


def _message(entry: ReportedFinding, rewritten: bool, suggested: bool) -> str:
    said = [entry.title or entry.reason or entry.rule]
    if saved := wording.saving(entry):
        said.append(f"{saved} per step")
    if entry.status == "suggested" and entry.reason:
        said.append(f"not rewritten: {entry.reason}")
    if entry.status == "not measured":
        said.append("not measured")
    if rewritten and not suggested:
        said.append("the rewrite is in the report: it edits more than these lines")
    return clip("; ".join(said), _MESSAGE)


# -------------------------------------------------------------------------------------------------------------- places


def _place(entry: ReportedFinding, lines: Lines) -> dict[str, Any]:
    """The range of a finding: by columns where both are known, else by lines, the last one included."""
    path, line, last = entry.path or "", entry.line or 1, entry.end_line or entry.line or 1
    if entry.column is not None and entry.end_column is not None:
        start = _position(lines, path, line, entry.column)
        end = _position(lines, path, last, entry.end_column)
        if start is not None and end is not None:
            return {"start": start, "end": end}
    return {"start": {"line": line}, "end": {"line": last}}


def _position(lines: Lines, path: str, line: int, column: int) -> dict[str, int] | None:
    """A position whose column counts bytes from 1, of one that counts characters from 0; None without the line."""
    if column == 0:
        return {"line": line, "column": 1}
    text = lines.get((path, line))
    if text is None or column > len(text):
        return None
    return {"line": line, "column": len(text[:column].encode("utf-8", "surrogatepass")) + 1}


# --------------------------------------------------------------------------------------------------------- suggestions


def _suggestion(entry: ReportedFinding, lines: Lines) -> dict[str, Any] | None:
    """All edits of a rewrite as one; None where they are not in the file of the finding or what is between is unknown.

    Whole lines are given by their numbers alone, which every client of the format can apply.
    """
    edits = sorted(entry.edits, key=lambda edit: (edit.line, edit.column, edit.end_line, edit.end_column))
    if not edits or any(edit.path != entry.path for edit in edits):
        return None
    first, last, text = edits[0], edits[-1], _joined(edits, lines)
    if text is None:
        return None
    if first.column == last.end_column == 0 and last.end_line > first.line and (not text or text[-1:] == "\n" != text):
        return {"range": {"start": {"line": first.line}, "end": {"line": last.end_line - 1}}, "text": text[:-1]}
    start = _position(lines, first.path, first.line, first.column)
    end = _position(lines, last.path, last.end_line, last.end_column)
    return None if start is None or end is None else {"range": {"start": start, "end": end}, "text": text}


def _joined(edits: Sequence[ReportedEdit], lines: Lines) -> str | None:
    """The text of edits in order, with what stands between them; None where that is not known."""
    text = edits[0].text
    for before, edit in itertools.pairwise(edits):
        between = _between(lines, before, edit)
        if between is None:
            return None
        text += between + edit.text
    return text


def _between(lines: Lines, before: ReportedEdit, edit: ReportedEdit) -> str | None:
    if (before.end_line, before.end_column) > (edit.line, edit.column):
        return None
    numbers = range(before.end_line, edit.line + (edit.column > 0))
    known = [lines.get((edit.path, number)) for number in numbers]
    if any(line is None for line in known):
        return None
    whole = "".join(f"{line}\n" for line in known)
    trailing = len(known[-1] or "") + 1 - edit.column if edit.column else 0
    return whole[before.end_column : len(whole) - trailing]


def quoted(diff: str) -> dict[tuple[str, int], str]:
    """The lines of the old text that a unified diff shows, by path and number."""
    found: dict[tuple[str, int], str] = {}
    path, number, old, new = "", 0, 0, 0
    for line in _split(diff):
        if old > 0 or new > 0:
            kind = line[:1]
            old -= kind in ("", " ", "-")
            new -= kind in ("", " ", "+")
            if kind in ("", " ", "-"):
                found[path, number] = line[1:]
                number += 1
        elif line.startswith("--- a/"):
            path = line[len("--- a/") :]
        elif hunk := _HUNK.match(line):
            number = int(hunk[1])
            old, new = (1 if hunk[group] is None else int(hunk[group]) for group in (2, 3))
    return found


def _split(diff: str) -> Iterable[str]:
    return diff.removesuffix("\n").split("\n") if diff else ()
