"""SARIF of a whole report: valid by the official schema, fixes only of what is proven, within GitHub's limits."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import Any

import pytest
from gfm import poisoned
from hostile_texts import TEXTS
from test_sarif import results, valid

from advisor.model import Report, ReportedEdit, RulePage
from advisor.reports.sarif import render_sarif, sarif_of

EDIT = ReportedEdit(path="samples/nano_gpt/model.py", line=42, column=8, end_line=45, end_column=23, text="y = 1")


def fixed(report: Report) -> Report:
    """The report with edits in every finding."""
    entries = (dataclasses.replace(entry, edits=(EDIT,), fingerprint="ab12") for entry in report.findings)
    return dataclasses.replace(report, findings=tuple(entries))


def test_a_proven_rewrite_is_a_warning_with_its_fix(report: Report) -> None:
    document = valid(json.loads(render_sarif(fixed(report))))
    found = results(document)
    assert [each["level"] for each in found] == ["warning"] * 4 + ["note"] * 2
    assert ["fixes" in each for each in found] == [True] * 4 + [False] * 2
    assert found[0]["message"]["text"] == "attention spells out its score matrix; saves 182.4 ms per step, measured"
    assert found[0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 42, "endLine": 45}
    assert [each["partialFingerprints"]["primaryLocationLineHash"] for each in found[:2]] == ["ab12:1", "ab12:2"]
    change = found[0]["fixes"][0]["artifactChanges"][0]
    assert change["replacements"][0]["deletedRegion"]["startColumn"] == 9
    (run,) = document["runs"]
    assert run["automationDetails"] == {"id": "advisor/samples/nano_gpt/train.py/"}
    assert run["tool"]["driver"]["semanticVersion"] == "0.1.0"
    assert run["tool"]["driver"]["rules"][found[5]["ruleIndex"]]["id"] == found[5]["ruleId"]
    told = [each["message"]["text"] for each in run["invocations"][0]["toolExecutionNotifications"]]
    assert "ncu is not known: Nsight Compute was not asked for" in told


@pytest.mark.parametrize("outcome", ["inconclusive", "neutral", "wrong", "failed"])
def test_what_is_not_proven_has_no_fix(report: Report, outcome: str) -> None:
    found = results(valid(sarif_of(dataclasses.replace(fixed(report), outcome=outcome))))
    assert {each["level"] for each in found} == {"note"}
    assert not any("fixes" in each for each in found)


def test_rules_carry_their_pages_where_they_are_given(report: Report) -> None:
    page = RulePage(id="naive-attention", title="Attention is written out.", safety="numerics", page="## What")
    rules = valid(sarif_of(report, (page,)))["runs"][0]["tool"]["driver"]["rules"]
    assert rules[0]["help"] == {"text": "Attention is written out.", "markdown": "## What"}
    assert rules[1]["help"] == {"text": "unfused-layernorm"}
    assert rules[1]["properties"]["tags"] == ["performance", "pytorch", "safety-numerics"]


def test_a_report_that_knows_nothing(bare: Report) -> None:
    assert results(valid(sarif_of(bare))) == []


@pytest.mark.parametrize("hostile", TEXTS)
def test_hostile_text_is_valid_and_links_nothing(report: Report, hostile: str) -> None:
    document: dict[str, Any] = valid(json.loads(render_sarif(poisoned(fixed(report), hostile))))
    for each in results(document):
        text = each["message"]["text"]
        assert "](" not in text and "\n" not in text and "\x1b" not in text


def test_limits_of_code_scanning(report: Report) -> None:
    """docs.github.com, "SARIF support for code scanning": 25,000 results, 10 MB compressed, 20 tags of a rule."""
    document = sarif_of(dataclasses.replace(fixed(report), findings=fixed(report).findings[:1] * 25_001))
    (run,) = document["runs"]
    assert len(run["results"]) == 25_000
    assert len(run["tool"]["driver"]["rules"]) == 1
    assert len(gzip.compress(json.dumps(document).encode(), 1)) < 10_000_000
