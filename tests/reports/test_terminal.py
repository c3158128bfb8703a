"""The terminal report: the answer first, one screen, and nothing that a terminal obeys."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from advisor.model import Outcome, Report
from advisor.reports.terminal import render_terminal

HOSTILE = "<script>[red]bold[/red]\x1b[31m\x1b]8;;http://evil.example\x07\x00\x9b2J\u202eabc\u2066\ud800\r\n:smile:[/]"


def shown(report: Report, width: int = 100, *, folder: str | None = None, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, color_system="truecolor" if color else None)
    render_terminal(report, console, folder=folder)
    return stream.getvalue()


def test_the_answer_comes_first(report: Report) -> None:
    lines = shown(report).splitlines()
    assert lines[0] == "2.37x faster   535.3 ms -> 226.0 ms per step; 95 % interval 2.35x to 2.39x"
    head = "\n".join(lines[:10])
    assert "30,607 -> 72,495" in head
    assert "15.0 % -> 35.5 % of 989.4 TFLOP/s" in head
    assert "safe: the numbers agree" in head
    assert "297 quantities compared with the float32 reference" in head
    assert "worst error 1.9e-03, limit 2.7e-03" in head


def test_what_changed_and_what_did_not(report: Report) -> None:
    text = shown(report, 140)
    assert re.search(r"naive-attention +samples/nano_gpt/model.py:42 +saves 182.4 ms per step, numerics", text)
    assert "0.97x on top of the kept rewrites (95 % interval 0.96x to 0.98x)" in text
    assert re.search(r"misaligned-dims .* up to 71.0 ms per step: changes the shape", text)
    assert "the loop waits 0.1 ms of 535.3 ms per step" in text
    assert "as found + torch.compile" in text


def test_how_to_go_on(report: Report) -> None:
    assert "advisor apply 20261129-101500-3f2a\n" in shown(report, 40)
    assert shown(report, 40).endswith(".advisor/runs/20261129-101500-3f2a/report.html\n")
    assert shown(report, folder="out/here/").endswith("report  out/here/report.html\n")


def test_no_colour_and_no_markup_without_a_terminal(report: Report) -> None:
    assert "\x1b" not in shown(report)
    assert "\x1b[" in shown(report, color=True)


@pytest.mark.parametrize("outcome", [*(each.value for each in Outcome), "analysed", ""])
def test_the_first_line_is_clear_for_every_outcome(report: Report, outcome: str) -> None:
    said = dataclasses.replace(report, outcome=outcome, speedup=1.004, interval=(0.998, 1.011))
    text = shown(said)
    first = text.splitlines()[0]
    expected = {
        "improved": "1.004x faster",
        "neutral": "no change in speed",
        "regressed": "slower",
        "wrong": "rejected: the rewrites change the numbers",
        "inconclusive": "inconclusive: the measurement does not settle it",
        "failed": "failed: the gain could not be verified",
        "": "no outcome was recorded",
    }
    assert first.startswith(expected.get(outcome, outcome))
    assert ("advisor apply" in text) == (outcome == "improved")
    assert ("1.004x" in text.split("changed")[0]) == (outcome not in ("wrong", "failed"))
    assert "no gain" not in text
    if outcome != "improved":
        assert report.reasons[0] in text


def test_a_percentage_is_never_called_x(report: Report) -> None:
    assert re.search(r"%\s*x|\dx\s*%", shown(report)) is None


def test_numbers_that_differ_are_said_to(report: Report) -> None:
    wrong = dataclasses.replace(report, outcome="wrong", numerics=report.trials[4].numerics)
    text = shown(wrong)
    assert "not safe: the numbers differ" in text
    assert "226.0 ms" not in text.split("for comparison")[0]
    assert "worst error not finite" in text
    assert "the loss of step 3 is not finite" in text


def test_numbers_that_were_not_compared_are_not_said_to_differ(report: Report) -> None:
    assert report.numerics is not None
    numerics = dataclasses.replace(
        report.numerics, ok=False, compared=0, worst=(), reasons=("the rewritten script fails",)
    )
    text = shown(dataclasses.replace(report, outcome="wrong", numerics=numerics))
    assert "not proved: the numbers were not compared" in text
    assert "the rewritten script fails" in text
    assert "the numbers differ" not in text


def test_unknown_mfu_says_why(report: Report) -> None:
    unknown = dataclasses.replace(
        report, mfu_before=None, mfu_after=None, missing={"mfu": "the peak of this device is not known"}
    )
    assert "MFU        not known (the peak of this device is not known)" in shown(unknown)


def test_the_report_that_knows_nothing(bare: Report) -> None:
    text = shown(bare)
    assert text.startswith("inconclusive: the measurement does not settle it\n")
    assert "None" not in text
    assert "not proved: no numbers were compared" in text


@pytest.mark.parametrize("width", [20, 60, 80, 100, 200])
def test_one_screen_and_no_wider_than_it(report: Report, width: int) -> None:
    lines = shown(report, width).splitlines()
    assert len(lines) <= 40
    kept = [line for line in lines if not line.startswith(("apply ", "report "))]
    assert all(cell_len(line) <= max(width, 40) for line in kept) or width < 40


def test_one_screen_however_much_was_found(report: Report, poison: Callable[[Report, str], Report]) -> None:
    more = tuple(dataclasses.replace(each, status=f"{each.status}-{i}") for i, each in enumerate(report.findings))
    crowded = dataclasses.replace(
        poison(report, "x" * 100_000),
        outcome="wrong",
        numerics=report.trials[4].numerics,
        findings=report.findings * 50 + more,
        baselines=report.baselines * 9,
        rule_errors=("a rule raised",) * 30,
        reasons=("because",) * 30,
    )
    lines = shown(crowded, 100).splitlines()
    assert len(lines) <= 40
    assert "and 199 more in the HTML report" in "\n".join(lines)


def test_hostile_text_is_shown_and_not_obeyed(report: Report, poison: Callable[[Report, str], Report]) -> None:
    text = shown(poison(report, HOSTILE), 300)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert "[red]bold[/red]" in text
    assert "\\x1b[31m" in text
    assert ":smile:" in text
    assert "\\u202e" in text
    assert len(text.splitlines()) <= 40


def test_colour_is_ours_alone(report: Report, poison: Callable[[Report, str], Report]) -> None:
    text = shown(poison(report, HOSTILE), 300, color=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in bare
    assert "\x07" not in bare


def test_a_run_name_cannot_smuggle_a_command(report: Report) -> None:
    assert "advisor apply 'a; rm -rf x'" in shown(dataclasses.replace(report, run="a; rm -rf x"))


def test_a_terminal_without_unicode(report: Report) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    render_terminal(dataclasses.replace(report, script="träin\u4e2d.py"), Console(file=stream, width=100))
    assert b"tr\\xe4in\\u4e2d.py" in raw.getvalue()
