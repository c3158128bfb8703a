"""The JSON document: stable names, null for what is not a number, and the way back."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from figures import with_figures

from advisor.model import Metric, Outcome, Report
from advisor.reports.jsonform import from_document, render_json, to_document

STABLE = (
    "schema outcome speedup interval mfu_before mfu_after step_ms_before step_ms_after tokens_per_s_before "
    "tokens_per_s_after environment findings declines baselines"
).split()
FINDING = "rule path line end_line status reason estimate_us saved_us safety needs".split()
BASELINE = "label step_ms speedup mfu reason".split()


def test_stable_fields(report: Report) -> None:
    document = to_document(report)
    assert set(STABLE) <= set(document)
    assert (document["schema"], document["outcome"]) == (1, "improved")
    assert document["interval"] == [2.345, 2.392]
    assert document["mfu_after"] == 0.355
    assert document["environment"]["torch"] == "2.11.0"
    for finding in document["findings"]:
        assert set(FINDING) <= set(finding)
    for baseline in document["baselines"]:
        assert set(BASELINE) <= set(baseline)
    assert document["baselines"][0]["step_ms"] == 535.3
    assert document["baselines"][-1]["step_ms"] is None


def test_findings_hold_every_status_and_declines_repeat_theirs(report: Report) -> None:
    document = to_document(report)
    assert {finding["status"] for finding in document["findings"]} == {"applied", "rejected", "suggested", "declined"}
    assert len(document["findings"]) == len(report.findings)
    assert document["declines"] == [each for each in document["findings"] if each["status"] == "declined"]
    assert document["declines"][-1]["needs"] == ["ncu", "gpm"]
    assert document["findings"][0]["estimate_us"] == [142_000.0, 201_000.0]
    assert document["declines"][0]["estimate_us"] is None


def test_every_field_of_the_report_has_a_place(report: Report) -> None:
    assert len(to_document(report)) == len(dataclasses.fields(Report)) + 1  # and the declines


def test_rates_and_shares_are_named_by_their_unit(report: Report) -> None:
    document = to_document(report)
    assert document["utilisation_before"]["achieved_flops_per_s"] == pytest.approx(0.15 * 989.4e12)
    assert document["hardware"]["hbm_bytes_per_s"] == 4.8e12
    assert document["regions"][0]["recoverable_us"] == 201_000.0
    assert document["regions"][-1]["recoverable_us"] is None


@pytest.mark.parametrize("name", ["report", "bare"])
def test_round_trip(name: str, request: pytest.FixtureRequest) -> None:
    report: Report = request.getfixturevalue(name)
    text = render_json(report)
    again = from_document(json.loads(text))
    assert render_json(again) == text
    if name == "bare":
        assert again == report


def test_round_trip_is_equal_but_for_what_is_not_a_number(report: Report) -> None:
    finite = dataclasses.replace(report, trials=report.trials[:4])
    again = from_document(json.loads(render_json(finite)))
    assert again == finite
    assert again.trials[0].outcome is Outcome.IMPROVED


def test_round_trip_of_hostile_text(report: Report, poison: Callable[[Report, str], Report]) -> None:
    text = '"\\</script>\x00\x1b[31m\u202e\ud800\r\n\u2028' * 3
    finite = poison(dataclasses.replace(report, trials=report.trials[:4]), text)
    written = render_json(finite)
    assert written.isascii()
    assert from_document(json.loads(written)) == finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_null(report: Report, bad: float) -> None:
    text = render_json(with_figures(report, bad))
    assert re.search(r"\b(NaN|Infinity)\b", text) is None
    document = json.loads(text)
    assert document["speedup"] is None
    assert document["interval"] is None
    assert document["findings"][0]["estimate_us"] is None
    assert document["regions"][0]["recoverable_us"] is None
    assert render_json(from_document(document)) == text


def test_equal_reports_give_the_same_text(report: Report) -> None:
    def turned(values: Any) -> Any:
        return dict(reversed(list(values.items())))

    other = dataclasses.replace(
        report,
        phases_us=turned(report.phases_us),
        missing=turned(report.missing),
        stage_seconds=turned(report.stage_seconds),
        hardware=dataclasses.replace(report.hardware, peak_flops=turned(report.hardware.peak_flops)),
    )
    assert other == report
    assert render_json(other) == render_json(report)


def test_whole_numbers_in_place_of_fractions_read_alike(report: Report) -> None:
    written = dataclasses.replace(report, speedup=2, counters_before=(Metric(name="n", value=3, unit="W", source="x"),))
    text = render_json(written)
    assert json.loads(text)["speedup"] == 2.0
    assert render_json(from_document(json.loads(text))) == text


def test_unknown_fields_are_ignored_and_absent_ones_take_their_default(bare: Report) -> None:
    document = to_document(bare)
    document["later"] = {"more": [1]}
    document["environment"]["later"] = 3
    del document["rule_errors"], document["environment"]["variables"]
    assert from_document(document) == bare


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("schema",), 99, "schema 99"),
        (("schema",), None, "schema: expected an integer, found null"),
        (("schema",), True, "schema: expected an integer, found true or false"),
        (("findings", 0, "line"), "42", "report.findings[0].line: expected an integer, found a string"),
        (("findings", 0, "line"), 10**30, "report.findings[0].line: the number is too large"),
        (("findings", 0, "rule"), None, "report.findings[0].rule: expected a string, found null"),
        (("speedup",), "fast", "report.speedup: expected an integer or a number, found a string"),
        (("speedup",), 10**400, "report.speedup: the number is too large"),
        (("interval",), [1.0], "report.interval: expected 2 entries, found 1"),
        (("reasons",), "abc", "report.reasons: expected a list, found a string"),
        (("trials", 0, "outcome"), "splendid", "report.trials[0].outcome: 'splendid' is none of improved"),
        (("phases_us_before",), [], "report.phases_us_before: expected an object, found a list"),
        (("hardware",), None, "report.hardware: expected an object, found null"),
    ],
)
def test_a_wrong_document_is_refused_by_its_field(report: Report, path: Any, value: Any, said: str) -> None:
    document = to_document(report)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        from_document(document)


def test_a_missing_field_is_named(report: Report) -> None:
    document = to_document(report)
    del document["findings"][2]["status"]
    with pytest.raises(ValueError, match=r"report\.findings\[2\]: the field 'status' is missing"):
        from_document(document)


@pytest.mark.parametrize("document", [None, [], "x", 3])
def test_a_document_is_an_object(document: Any) -> None:
    with pytest.raises(ValueError, match="report: expected an object"):
        from_document(document)
