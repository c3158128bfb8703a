"""No format brings back what the redactor took: secrets in every text field of a report are in no document."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gfm import OPEN, comparison, examination, poisoned, proposal, use
from test_markdown import checked

from advisor.model import Report
from advisor.proposals import Dashboard, Examined
from advisor.redact import Redactor
from advisor.reports.html import render_html
from advisor.reports.jsonform import render_json
from advisor.reports.markdown import render_check_markdown, render_markdown
from advisor.reports.pull_request import (
    annotations,
    check_output,
    comment,
    commit_message,
    dashboard,
    pull_request_body,
    pull_request_title,
)
from advisor.reports.rdjson import render_rdjson
from advisor.reports.sarif import render_sarif

TOKEN = "ghp_" + "a1B2" * 9
OTHER = "hf_" + "Qx7z" * 8
SECRETS = (TOKEN, OTHER, "correct-horse-battery", "someone", "build-host-7")
TEXT = (
    f"{TOKEN} of /home/someone/run on build-host-7 with HF_TOKEN={OTHER}, "
    "https://me:correct-horse-battery@example.org/x"
)
MARKER = "<!-- advisor:report -->"
REDACTOR = Redactor(home="/home/someone", user="someone", host="build-host-7")


def examined(report: Report) -> list[str]:
    raced = comparison(report, "regressed", use(), use(13.0))
    given = examination(Examined(command=TEXT, comparison=raced, report=report), Examined(command=TEXT, error=TEXT))
    found = REDACTOR.value(poisoned(given, TEXT))
    proposed = REDACTOR.value(poisoned(proposal(report), TEXT))
    board = REDACTOR.value(
        poisoned(
            Dashboard(
                commit="c", date="d", proposals=(OPEN,), scripts=given.scripts, settings={"a": "b"}, notes=("n",)
            ),
            TEXT,
        )
    )
    clean = REDACTOR.text(TEXT)
    return [
        comment(found, marker=MARKER, notes=(clean,)),
        *check_output(found),
        repr(annotations(found)),
        pull_request_title(proposed),
        pull_request_body(proposed, marker=MARKER, base_branch=clean, commit=clean, command=clean),
        commit_message(proposed),
        dashboard(board, marker=MARKER),
    ]


FORMATS: dict[str, Callable[[Report], list[str]]] = {
    "markdown": lambda report: [render_markdown(report)],
    "sarif": lambda report: [render_sarif(report)],
    "rdjson": lambda report: [render_rdjson(report)],
    "json": lambda report: [render_json(report)],
    "html": lambda report: [render_html(report)],
    "check": lambda report: [each(checked(report)) for each in (render_check_markdown, render_sarif, render_rdjson)],
    "bot": examined,
}


@pytest.mark.parametrize("name", FORMATS)
def test_secrets_are_in_no_document(report: Report, name: str) -> None:
    report = REDACTOR.value(poisoned(report, TEXT))
    for document in FORMATS[name](report):
        bare = document.replace("&#x200b;", "").replace("\u200b", "").replace("&#x5f;", "_").replace("&#x40;", "@")
        for secret in SECRETS:
            assert secret not in bare, secret
    assert all("redacted" in document or name == "bot" for document in FORMATS[name](report))


def test_the_secrets_would_be_found(report: Report) -> None:
    shown = render_markdown(poisoned(report, TEXT)).replace("&#x5f;", "_").replace("&#x200b;", "")
    assert all(secret in shown for secret in SECRETS)
