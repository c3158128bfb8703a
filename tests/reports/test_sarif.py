"""The forms of `advisor check` for other programs: SARIF by its official schema, GitHub's workflow commands, text."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from advisor.model import (
    CheckedFile,
    CheckReport,
    Evidence,
    Explanation,
    Looked,
    ReportedEdit,
    ReportedFinding,
    RulePage,
)
from advisor.reports.check_terminal import render_explanation, render_github, render_terminal
from advisor.reports.jsonform import check_document
from advisor.reports.sarif import render_sarif, sarif_document

SCHEMA = Path(__file__).parents[1] / "data" / "sarif" / "sarif-2.1.0-rtm.5.json"


def entry(rule: str = "naive-attention", status: str = "found", **more: Any) -> ReportedFinding:
    given: dict[str, Any] = {
        "path": "src/model.py",
        "line": 12,
        "end_line": 13,
        "title": "softmax attention is written out",
        "reason": None,
        "estimate_us": (0.0, 1500.0),
        "saved_us": None,
        "safety": "numerics",
        "fingerprint": "ab12",
    }
    return ReportedFinding(rule=rule, status=status, **(given | more))


EDITS = (
    ReportedEdit(path="src/model.py", line=12, column=0, end_line=13, end_column=0, text=""),
    ReportedEdit(path="src/model.py", line=1, column=0, end_line=1, end_column=0, text="import torch\n"),
)


def report(*findings: ReportedFinding, **more: Any) -> CheckReport:
    given: dict[str, Any] = {
        "path": "train.py",
        "run": "20260101-000000-abcd",
        "status": "measured",
        "reason": None,
        "step_ms": 12.5,
        "device": "CPU",
        "linked_share": 0.98,
        "missing": {"mfu": "the dense peak is not known"},
        "declines": (entry(status="declined", title="it takes 0.1% of the step", reason="it takes 0.1% of the step"),),
    }
    return CheckReport(
        schema_version=1,
        advisor="0.1.0",
        files=(CheckedFile(findings=findings, **(given | more)),),
        rules=(
            RulePage(
                id="naive-attention", title="Softmax attention is written out.", safety="numerics", page="## What"
            ),
            RulePage(id="unfused-gelu", title="GELU is written out.", safety="numerics", page="## What\n- a"),
        ),
    )


def valid(document: dict[str, Any]) -> dict[str, Any]:
    """The document, checked against the official schema."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(document)
    return document


def results(document: dict[str, Any]) -> list[dict[str, Any]]:
    return list(document["runs"][0]["results"])


def test_the_schema_refuses_what_is_wrong() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = sarif_document(report(entry()))
    document["runs"][0]["results"][0]["level"] = "critical"
    with pytest.raises(jsonschema.ValidationError):
        valid(document)


def test_a_finding_with_a_rewrite_is_a_warning_with_a_fix() -> None:
    document = valid(json.loads(render_sarif(report(entry(column=8, end_column=30, edits=EDITS)))))
    (found,) = results(document)
    assert (found["level"], found["ruleId"], found["ruleIndex"]) == ("warning", "naive-attention", 0)
    assert found["message"]["text"].endswith("could save up to 1.50 ms per step")
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/model.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 12, "endLine": 13, "startColumn": 9, "endColumn": 31}
    (change,) = found["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 1, "startColumn": 1, "endLine": 1, "endColumn": 1},
            "insertedContent": {"text": "import torch\n"},
        },
        {"deletedRegion": {"startLine": 12, "startColumn": 1, "endLine": 13, "endColumn": 1}},
    ]


def test_other_findings_are_notes_and_declines_are_no_results() -> None:
    suggested = entry("unfused-gelu", "suggested", reason="installed packages are never edited")
    unmeasured = entry(status="not measured", estimate_us=None)
    document = valid(sarif_document(report(suggested, unmeasured, entry(status="rejected"))))
    assert [(r["ruleId"], r["level"]) for r in results(document)] == [
        ("unfused-gelu", "note"),
        ("naive-attention", "note"),
    ]
    assert "not rewritten: installed packages" in results(document)[0]["message"]["text"]
    assert results(document)[1]["message"]["text"].endswith("; not measured")


def test_rules_carry_their_pages_and_few_tags() -> None:
    rules = valid(sarif_document(report()))["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["naive-attention", "unfused-gelu"]
    assert rules[1]["help"]["markdown"] == "## What\n- a"
    assert all(len(rule["properties"]["tags"]) <= 20 for rule in rules)


def test_equal_fingerprints_are_counted() -> None:
    found = results(valid(sarif_document(report(entry(), entry(line=40, end_line=40), entry(fingerprint="cd")))))
    hashes = [each["partialFingerprints"]["primaryLocationLineHash"] for each in found]
    assert hashes == ["ab12:1", "ab12:2", "cd:1"]


def test_a_script_that_could_not_run_is_a_failed_invocation() -> None:
    failed = report(status="not measured", reason="the script raised ValueError", step_ms=None, missing={})
    (invocation,) = valid(sarif_document(failed))["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "train.py: the script raised ValueError"


def test_text_of_others_hides_and_links_nothing() -> None:
    hostile = entry(title="a\x1b[2J [click](http://example.org)\nb", path="a b/\u202e%.py")
    (found,) = results(valid(sarif_document(report(hostile))))
    assert "\x1b" not in found["message"]["text"]
    assert "](" not in found["message"]["text"]
    assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/%E2%80%AE%25.py"


# --------------------------------------------------------------------------------------------------------- other forms


def test_github_commands_are_escaped() -> None:
    hostile = entry(title="100% of\r\nthe step::error::x", path="a,b:c%.py")
    (line,) = render_github(report(hostile)).splitlines()
    assert line.startswith(
        "::warning file=a%2Cb%3Ac%25.py,line=12,endLine=13,title=naive-attention::100%25 of the step"
    )
    assert render_github(report(entry(status="suggested", reason="x"))).startswith(
        "::notice file=src/model.py,line=12,"
    )


def test_github_names_scripts_that_were_not_measured() -> None:
    said = render_github(report(status="not measured", reason="it raised: 5%"))
    assert said == "::notice file=train.py::train.py was not measured: it raised: 5%25\n"


def test_the_document_keeps_findings_and_declines_apart() -> None:
    document = check_document(report(entry(evidence=(Evidence(what="time", value=3.0, unit="us"),), edits=EDITS)))
    json.dumps(document, allow_nan=False)
    assert [each["status"] for each in document["findings"]] == ["found"]
    assert [each["status"] for each in document["declines"]] == ["declined"]
    assert document["findings"][0]["script"] == "train.py"
    assert document["findings"][0]["edits"][0]["end_line"] == 13
    names = {field.name for field in dataclasses.fields(ReportedFinding)} | {"script"}
    assert set(document["findings"][0]) == set(document["declines"][0]) == names
    assert document["files"][0]["missing"] == {"mfu": "the dense peak is not known"}
    assert "findings" not in document["files"][0]


def printed(render: Any, value: Any) -> str:
    stream = io.StringIO()
    render(value, Console(file=stream, width=100, highlight=False))
    return stream.getvalue()


def test_the_terminal_tells_all_and_hides_nothing() -> None:
    hostile = entry(title="a\x1b[2Jb", reason="no\u202e", status="suggested")
    text = printed(render_terminal, report(entry(), hostile, entry(status="not measured")))
    assert "src/model.py:12: naive-attention  softmax attention is written out" in text
    assert "12.5 ms a step, on CPU" in text
    assert "2 findings, 1 decline in 1 file; 1 more seen in the source, not measured" in text
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    assert "not known: mfu: the dense peak is not known" in text


def test_an_explanation_in_lines() -> None:
    miss = Looked(
        rule="naive-attention", kind="near miss", path="m.py", line=4, reason="the mask\x00", node="a", seen="a = add"
    )
    given: dict[str, Any] = {"path": "m.py", "line": 5, "recorded": ("b = mul",), "nearest": None, "missing": {}}
    text = printed(render_explanation, Explanation(looked=(miss,), closest=None, **given))
    assert "near miss (line 4): the mask\\x00" in text
    assert "recorded at this line (1):\n    b = mul" in text
    none = Explanation(looked=(), closest=miss, **(given | {"recorded": (), "nearest": 9, "missing": {"graph": "no"}}))
    text = printed(render_explanation, none)
    assert "no rule's pattern starts here\n  the closest place a rule looked at (naive-attention):" in text
    assert "the nearest line with recorded operations is 9" in text
    assert "the graph is not known: no" in text
