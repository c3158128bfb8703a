"""The published schemas of our documents: made from the nouns, compared with the files, and holding for real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from advisor.model import Report
from advisor.reports.jsonform import check_document, from_document, render_json, to_document, written
from advisor.reports.schema import check_schema, report_schema

PUBLISHED = Path(__file__).parents[1] / "data" / "schemas"
SAMPLES = Path(__file__).parents[2] / "samples"
FILES = {"report-1.json": report_schema, "check-1.json": check_schema}


def faults(schema: dict[str, Any], document: Any) -> list[str]:
    """Where a document breaks a schema."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("name", FILES)
def test_the_published_schema_is_that_of_the_nouns(name: str) -> None:
    assert written(FILES[name]()) == (PUBLISHED / name).read_text(encoding="utf-8")


def test_reports_are_valid(report: Report, bare: Report) -> None:
    for each in (report, bare):
        assert faults(report_schema(), json.loads(render_json(each))) == []


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*/h200/report.json")), ids=lambda path: path.parts[-3])
def test_recorded_reports_are_valid(path: Path) -> None:
    assert faults(report_schema(), json.loads(path.read_text(encoding="utf-8"))) == []


def test_a_checked_document_is_valid(report: Report) -> None:
    from test_markdown import checked

    document = json.loads(json.dumps(check_document(checked(report))))
    assert faults(check_schema(), document) == []
    del document["findings"][0]["script"]
    assert faults(check_schema(), document) == ["$.findings[0]"]


WRONG = [
    (("schema",), 2, "$.schema"),
    (("speedup",), "fast", "$.speedup"),
    (("interval",), [1.0], "$.interval"),
    (("findings", 0, "rule"), None, "$.findings[0].rule"),
    (("findings", 0, "line"), 1.5, "$.findings[0].line"),
    (("trials", 0, "outcome"), "splendid", "$.trials[0].outcome"),
    (("phases_us_before",), [], "$.phases_us_before"),
    (("hardware",), None, "$.hardware"),
    (("environment", "command"), "python", "$.environment.command"),
]


@pytest.mark.parametrize(("path", "value", "where"), WRONG)
def test_the_schema_refuses_what_the_reader_refuses(report: Report, path: Any, value: Any, where: str) -> None:
    document = json.loads(render_json(report))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert faults(report_schema(), document) == [where]
    with pytest.raises(ValueError, match=r"report|schema"):
        from_document(document)


def test_fields_without_a_default_are_required_and_unknown_ones_allowed(report: Report) -> None:
    document = to_document(report)
    document = json.loads(json.dumps(document)) | {"later": 1}
    del document["rule_errors"], document["declines"]
    assert faults(report_schema(), document) == []
    del document["outcome"]
    assert faults(report_schema(), document) == ["$"]


if __name__ == "__main__":
    for name, make in FILES.items():
        (PUBLISHED / name).write_text(written(make()), encoding="utf-8")
