"""The Reviewdog Diagnostic Format: valid by its schema, and suggestions that give the proven text when applied."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from gfm import entry as finding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_markdown import checked

from advisor.model import Report, ReportedEdit, ReportedFinding
from advisor.patch import unified
from advisor.reports.rdjson import quoted, rdjson_document, render_rdjson

SCHEMA = Path(__file__).parents[1] / "data" / "rdformat" / "DiagnosticResult.json"
SOURCE = 'import torch\n\n\ndef f(x):\n    größe = "\N{ROCKET}"; y = x.exp()\n    return y / y.sum()\n\n\nlast = 1\n'


def valid(document: dict[str, Any]) -> dict[str, Any]:
    """The document, checked against reviewdog's schema."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(document)
    return document


def edited(source: str, edits: tuple[ReportedEdit, ...]) -> str:
    """The source with edits made, in characters."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    for edit in sorted(edits, key=lambda each: (each.line, each.column), reverse=True):
        begin, end = starts[edit.line - 1] + edit.column, starts[edit.end_line - 1] + edit.end_column
        source = source[:begin] + edit.text + source[end:]
    return source


def suggested(source: str, suggestion: dict[str, Any]) -> str:
    """The source with a suggestion applied as reviewdog.proto has it: columns in bytes from 1, lines whole without."""
    lines = [line.encode() for line in source.split("\n")]
    start, end = suggestion["range"]["start"], suggestion["range"]["end"]
    text = suggestion["text"].encode()
    if "column" not in start:
        replaced = [text] if text else []
        return b"\n".join([*lines[: start["line"] - 1], *replaced, *lines[end["line"] :]]).decode()
    before = b"\n".join([*lines[: start["line"] - 1], lines[start["line"] - 1][: start["column"] - 1]])
    after = b"\n".join([lines[end["line"] - 1][end["column"] - 1 :], *lines[end["line"] :]])
    return (before + text + after).decode()


def rewritten(source: str, *edits: ReportedEdit, path: str = "m.py", **more: Any) -> ReportedFinding:
    diff = unified(path, source, edited(source, edits))
    given: dict[str, Any] = {"diff": diff, "edits": edits, "safety": "numerics"}
    return finding("r", path, edits[0].line, "found", "a title", **(given | more))


def edit(line: int, column: int, end_line: int, end_column: int, text: str, path: str = "m.py") -> ReportedEdit:
    return ReportedEdit(path=path, line=line, column=column, end_line=end_line, end_column=end_column, text=text)


def diagnostics(report: Report, *entries: ReportedFinding) -> list[dict[str, Any]]:
    both = checked(report)
    only = dataclasses.replace(both, files=(dataclasses.replace(both.files[0], findings=entries),))
    return list(valid(json.loads(render_rdjson(only)))["diagnostics"])


@pytest.mark.parametrize(
    "edits",
    [
        (edit(5, 17, 5, 28, "y = F.softmax(x)"),),  # behind characters of several bytes
        (edit(5, 17, 5, 28, "y = 1"), edit(6, 11, 6, 22, "y")),  # two edits, what is between is quoted
        (edit(5, 0, 7, 0, "    return F.softmax(x)\n"),),  # whole lines
        (edit(5, 0, 6, 0, ""),),  # a line that goes
        (edit(5, 0, 6, 0, "\n"),),  # a line that becomes empty
        (edit(5, 0, 5, 0, "    x = x.float()\n"),),  # a line that comes
        (edit(4, 0, 4, 0, "# a\n"), edit(5, 0, 7, 0, "    return 1\n")),
    ],
)
def test_a_suggestion_gives_the_proven_text(report: Report, edits: tuple[ReportedEdit, ...]) -> None:
    (told,) = diagnostics(report, rewritten(SOURCE, *edits))
    assert told["severity"] == "WARNING"
    (suggestion,) = told["suggestions"]
    assert suggested(SOURCE, suggestion) == edited(SOURCE, edits)


def test_columns_count_bytes_from_one(report: Report) -> None:
    entry = rewritten(SOURCE, edit(5, 17, 5, 28, "y"), column=17, end_column=28, end_line=5)
    (told,) = diagnostics(report, entry)
    assert told["location"] == {
        "path": "m.py",
        "range": {"start": {"line": 5, "column": 23}, "end": {"line": 5, "column": 34}},
    }
    unknown = dataclasses.replace(entry, diff="")
    (told,) = diagnostics(report, unknown)
    assert told["location"]["range"] == {"start": {"line": 5}, "end": {"line": 5}}
    assert "suggestions" not in told
    assert told["message"].endswith("the rewrite is in the report: it edits more than these lines")


def test_a_rewrite_of_two_places_is_no_suggestion(report: Report) -> None:
    long = "import torch\n" + "x = 1\n" * 50
    far = rewritten(long, edit(1, 0, 1, 0, "import os\n"), edit(40, 0, 41, 0, "y = 1\n"))
    files = rewritten(SOURCE, edit(5, 0, 6, 0, ""))
    files = dataclasses.replace(files, edits=(*files.edits, edit(1, 0, 1, 0, "import os\n", path="other.py")))
    for told in diagnostics(report, far, files):
        assert "suggestions" not in told
        assert told["severity"] == "WARNING"


def test_a_report_suggests_what_is_proven(report: Report) -> None:
    change = (edit(5, 17, 5, 28, "y = F.softmax(x)"),)
    applied = dataclasses.replace(rewritten(SOURCE, *change), status="applied", diff="", saved_us=1_500.0)
    given = dataclasses.replace(
        report, findings=(applied, *report.findings[1:]), diff=unified("m.py", SOURCE, edited(SOURCE, change))
    )
    document = valid(json.loads(render_rdjson(given)))
    told = document["diagnostics"]
    assert suggested(SOURCE, told[0]["suggestions"][0]) == edited(SOURCE, change)
    assert told[0]["message"] == "a title; saves 1.50 ms per step"
    assert [each["severity"] for each in told] == ["WARNING"] * 4 + ["INFO"] * 2
    assert "not rewritten: changes the shape of two parameters" in told[4]["message"]
    unproven = valid(rdjson_document(dataclasses.replace(given, outcome="inconclusive")))["diagnostics"]
    assert not any("suggestions" in each for each in unproven)
    assert {each["severity"] for each in unproven} == {"INFO"}


def test_hostile_text_hides_nothing(report: Report) -> None:
    hostile = finding("r\x1b", "a\\b \u202e.py", 3, "suggested", "t\x00\n" * 9, reason="\ud800")
    (told,) = diagnostics(report, hostile)
    assert told["location"]["path"] == "a/b \u202e.py"
    assert "\n" not in told["message"] and "\x00" not in told["message"] and "\ud800" not in told["message"]


LINES = st.lists(
    st.text(st.sampled_from("ab \u00e9\N{EURO SIGN}\N{ROCKET}\r\x0c\u2028"), max_size=6), min_size=3, max_size=9
)


@given(LINES, st.data())
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_edits_of_one_hunk_give_the_proven_text(report: Report, lines: list[str], data: st.DataObject) -> None:
    source = "\n".join([*lines, ""])
    places = sorted(
        data.draw(st.lists(st.integers(0, len(source)), min_size=2, max_size=4).filter(lambda p: len(p) % 2 == 0))
    )
    texts = [data.draw(st.sampled_from(["", "x", "\n", "y\nz\n", "\N{ROCKET}"])) for _ in places[::2]]
    edits = []
    for begin, end, text in zip(places[::2], places[1::2], texts, strict=True):
        (line, column), (last, until) = (
            (source.count("\n", 0, at) + 1, at - (source.rfind("\n", 0, at) + 1)) for at in (begin, end)
        )
        edits.append(edit(line, column, last, until, text))
    if len(edits) == 2 and (edits[1].line, edits[1].column) == (edits[0].line, edits[0].column):
        return  # two texts put in at one place have no order
    after = edited(source, tuple(edits))
    (told,) = diagnostics(report, rewritten(source, *edits))
    for suggestion in told.get("suggestions", ()):
        assert suggested(source, suggestion) == after


def test_quoted_lines_are_those_of_the_old_text() -> None:
    found = quoted(
        unified("m.py", SOURCE, SOURCE.replace("exp", "log")) + "--- a/n.py\n+++ b/n.py\n@@ -7 +7 @@\n-x\n+y\n"
    )
    assert found["m.py", 5] == SOURCE.split("\n")[4]
    assert found["n.py", 7] == "x"
    assert all(SOURCE.split("\n")[line - 1] == text for (path, line), text in found.items() if path == "m.py")
    assert quoted("--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n-y") == {("x", 1): "y"}
    assert quoted("") == {}
