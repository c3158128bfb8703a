"""The formats on the command line: `advisor report` of a run that is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gfm import harmless
from test_sarif import valid

from advisor.cli import cli
from advisor.model import Report
from advisor.reports.html import render_html
from advisor.reports.jsonform import from_document, render_json


@pytest.fixture
def runs(tmp_path: Path, report: Report) -> Path:
    """A folder with one run that has ended."""
    run = tmp_path / report.run
    run.mkdir()
    (run / "run.json").write_text("{}", encoding="utf-8")
    (run / "report.json").write_text(render_json(report), encoding="utf-8")
    return tmp_path


def said(runs: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["report", "--out", str(runs), *more])


def test_every_format_is_its_document(runs: Path, report: Report) -> None:
    text = said(runs, "--output-format", "text").output
    assert text == said(runs).output and "2.37x faster" in text
    assert said(runs, "--output-format", "json").output == said(runs, "--json").output
    assert from_document(json.loads(said(runs, "--output-format", "json").output)).run == report.run
    harmless(said(runs, "--output-format", "markdown").output)
    valid(json.loads(said(runs, "--output-format", "sarif").output))
    assert json.loads(said(runs, "--output-format", "rdjson").output)["source"] == {"name": "advisor"}
    read = from_document(json.loads(render_json(report)))
    assert said(runs, "--output-format", "html").output == render_html(read)


def test_the_schema_needs_no_run(tmp_path: Path) -> None:
    done = said(tmp_path / "none", "--output-format", "schema")
    assert done.exit_code == 0
    assert json.loads(done.output)["$id"] == "urn:advisor:report:1"


@pytest.mark.parametrize(
    "more",
    [
        ("--json", "--output-format", "sarif"),
        ("--html", "--output-format", "markdown"),
        ("--why", "train.py:3", "--output-format", "json"),
    ],
)
def test_two_formats_exclude_each_other(runs: Path, more: tuple[str, ...]) -> None:
    done = said(runs, *more)
    assert done.exit_code == 2
    assert re.search(r"exclude each other: leave one out", done.output)


def test_an_unknown_format_is_refused(runs: Path) -> None:
    for command in ("report", "optimize", "check"):
        done = CliRunner().invoke(cli, [command, "--output-format", "yaml"])
        assert done.exit_code == 2
        assert "markdown" in done.output and "rdjson" in done.output
