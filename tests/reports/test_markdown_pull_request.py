"""What the bot writes: the comment, the check, the pull request, the commit, the dashboard, answers."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from gfm import OPEN, Page, comparison, entry, examination, harmless, poisoned, proposal, use
from hostile_texts import TEXTS, texts
from hypothesis import HealthCheck, given, settings
from test_markdown import large

from advisor.model import Evidence, Report
from advisor.proposals import Dashboard, Examined, FileEdit
from advisor.reports.markdown_text import size
from advisor.reports.pull_request import (
    annotations,
    check_output,
    command_help,
    comment,
    commit_message,
    conclusion,
    dashboard,
    pull_request_body,
    pull_request_title,
    suggestion_remark,
)

SETTINGS = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MARKER = "<!-- advisor:report -->"
COMMIT = "1f" * 20


def script(report: Report, outcome: str, now: float = 12.0, *, proven: bool = False, **more: Any) -> Examined:
    raced = comparison(report, outcome, use(12.0), use(now))
    return Examined(command="train.py --batch-size 8", comparison=raced, report=report if proven else None, **more)


def body(given: Any, **more: Any) -> str:
    wanted: dict[str, Any] = {
        "marker": MARKER,
        "base_branch": "main",
        "commit": COMMIT,
        "command": "advisor optimize train.py -- --batch-size 8",
    }
    return pull_request_body(given, **(wanted | more))


# ------------------------------------------------------------------------------------------------------------- comment


def test_a_neutral_result_is_quiet(report: Report) -> None:
    shown = comment(examination(script(report, "neutral")), marker=MARKER)
    assert shown.startswith(f"{MARKER}\n**no difference in speed worth having**: `train.py --batch-size 8`, 1.002x, ")
    assert len([line for line in shown.splitlines() if line]) <= 5
    page = harmless(shown, markers=1)
    assert "table" not in page.shape()
    assert "12.0 ms a step" in page.text and "NVIDIA H200, torch 2.11.0" in page.text


def test_a_neutral_result_that_takes_more_memory_has_its_table(report: Report) -> None:
    raced = comparison(report, "neutral", use(), use(peak_gib=2.5))
    shown = comment(examination(Examined(command="train.py", comparison=raced)), marker=MARKER)
    assert "| peak memory | 1.50 GiB | 2.50 GiB |" in shown


def test_a_regression_has_its_table_and_its_reasons(report: Report) -> None:
    page = harmless(comment(examination(script(report, "regressed", 13.0)), marker=MARKER), markers=1)
    for said in (
        "0.923x, slower",
        "95 % interval 0.914x to 0.932x",
        "the whole interval lies on one side",
        "12.0 ms",
        "13.0 ms",
        "1,000",
        "30.0 %",
        "1.50 GiB",
        "driver 580.65",
        "MFU of 989.4 TFLOP/s (datasheet, dense bfloat16)",
        "whether both commits compute the same is not compared",
    ):
        assert said in page.text, said


def test_proven_rewrites_are_listed_with_their_diffs(report: Report) -> None:
    page = harmless(comment(examination(script(report, "neutral", proven=True)), marker=MARKER), markers=1)
    assert "On the head, 4 rewrites are proven, together 2.37x" in page.text
    assert "saves 182.4 ms" in page.text
    assert page.text.count("y = F.scaled_dot_product_attention") == 2
    assert page.shape().count("details") == 5
    assert "Looked at and left alone (6)" in page.text
    assert "the numbers agree: 297 quantities" in page.text


def test_what_is_not_proven_is_not_offered(report: Report) -> None:
    unproven = dataclasses.replace(report, outcome="inconclusive")
    shown = comment(examination(script(unproven, "neutral", proven=True)), marker=MARKER)
    assert "proven" not in shown and "table" not in Page(shown.partition("<details>")[0]).shape()
    assert annotations(examination(script(unproven, "neutral", proven=True)))[0][3] == "notice"


def test_several_scripts_and_one_that_failed(report: Report) -> None:
    found = examination(
        script(report, "improved", 10.0),
        script(report, "neutral"),
        Examined(command="eval.py", error="the script raised ValueError: no data"),
        script(report, "failed"),
        script(report, "inconclusive"),
    )
    shown = comment(found, marker=MARKER, notes=("the base branch moved meanwhile",))
    page = harmless(shown, markers=1)
    assert "5 scripts: 1 faster, 1 no difference in speed worth having, 1 not measured, 1 base and head" in page.text
    assert "It could not be measured: the script raised ValueError: no data" in page.text
    assert "1.20x, faster" in page.text
    assert "the base branch moved meanwhile" in page.text
    assert "base 1f1f1f1f1f1f, head 2e2e2e2e2e2e, advisor 0.1.0" in page.text


def test_nothing_to_measure() -> None:
    assert "no script is configured" in harmless(comment(examination(), marker=MARKER), markers=1).text
    assert check_output(examination())[0] == "nothing was measured"
    assert conclusion(examination(), "regression") == "neutral"


def test_rules_that_were_not_settled_are_named(report: Report) -> None:
    shown = comment(examination(script(report, "neutral", proven=True, undecided=("unfused-gelu",))), marker=MARKER)
    assert "Not settled by the measurement, each alone: `unfused-gelu`" in shown


# --------------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("outcomes", "never", "regression"),
    [
        (("improved",), "success", "success"),
        (("neutral",), "success", "success"),
        (("neutral", "regressed"), "neutral", "failure"),
        (("inconclusive",), "neutral", "neutral"),
        (("failed",), "neutral", "neutral"),
        (("improved", "failed"), "neutral", "neutral"),
    ],
)
def test_the_conclusion(report: Report, outcomes: tuple[str, ...], never: str, regression: str) -> None:
    found = examination(*(script(report, outcome, 12.0) for outcome in outcomes))
    assert (conclusion(found, "never"), conclusion(found, "regression")) == (never, regression)


def test_a_script_that_could_not_be_measured_is_no_success(report: Report) -> None:
    found = examination(script(report, "neutral"), Examined(command="x.py", error="it raised"))
    assert conclusion(found, "regression") == "neutral"


def test_the_check_has_a_title_and_the_page(report: Report) -> None:
    title, summary = check_output(examination(script(report, "improved", 10.0, proven=True)))
    assert title == "1.20x, faster; 4 proven rewrites"
    assert "<!--" not in summary
    harmless(summary)


def test_annotations_stand_on_lines_of_the_repository(report: Report) -> None:
    named = tuple(dataclasses.replace(entry, fingerprint=f"f{at}") for at, entry in enumerate(report.findings))
    edits = {"sub/samples/nano_gpt/model.py": FileEdit(base="a", result="b", replacements=())}
    outside = entry("naive-attention", "/usr/lib/python3/x.py", 3, "suggested", "in a package")
    climbing = entry("naive-attention", "../x.py", 3, "suggested", "elsewhere")
    found = annotations(
        examination(
            script(
                dataclasses.replace(report, findings=(*named, outside, climbing)),
                "neutral",
                proven=True,
                rewrites={"f0": edits},
            )
        )
    )
    assert [note[:5] for note in found][:2] == [
        ("sub/samples/nano_gpt/model.py", 42, 45, "warning", "naive-attention"),
        ("sub/samples/nano_gpt/model.py", 21, 26, "warning", "unfused-layernorm"),
    ]
    assert found[0][5] == "attention spells out its score matrix; saves 182.4 ms per step, measured; level: numerics"
    assert {note[3] for note in found[4:]} == {"notice"}
    assert all(note[0].startswith("sub/") for note in found)


# -------------------------------------------------------------------------------------------------------- pull request


def test_the_body_has_every_part(report: Report) -> None:
    noted = dataclasses.replace(
        report.findings[0], evidence=(Evidence(what="not compared", value="inputs of another dtype", unit=""),)
    )
    given = proposal(dataclasses.replace(report, findings=(noted, *report.findings[1:])))
    page = harmless(body(given), markers=1)
    for said in (
        "2.37x faster",
        "535.3 ms",
        "226.0 ms",
        "95 % interval 2.35x to 2.39x",
        "NVIDIA H200, torch 2.11.0, CUDA 13.0, driver 580.65",
        "MFU of 989.4 TFLOP/s (datasheet, dense bfloat16)",
        "gradient of blocks.3.attention.qkv.weight",
        "1.8e-03",
        "Equivalence class: numerics, the same maths in another rounding order",
        "one process on one device ran",
        "the loss after the 20 steps that were compared",
        "dropout is off in the script: nothing random differs",
        "clocks held between 1,965 and 1,980 MHz in both arms",
        "naive-attention, compared alone: inputs of another dtype",
        "Nsight Compute was not asked for",
        "advisor optimize train.py -- --batch-size 8",
        "On main at 1f1f1f1f1f1f",
        "git revert",
        'ignore = ["naive-attention"]',
        "Tensor active",
    ):
        assert said in page.text, said
    assert body(given).startswith(f"{MARKER}\n**2.37x faster**")
    assert "**" not in page.text  # the line behind the marker is Markdown, too


def test_operators_gone_and_new_are_named(report: Report) -> None:
    assert report.numerics is not None
    ran = dataclasses.replace(report.numerics, operators_gone=("aten::bmm",) * 50, operators_new=("aten::gelu",))
    page = harmless(body(proposal(dataclasses.replace(report, numerics=ran))), markers=1)
    assert "new: aten::gelu" in page.text
    assert page.text.count("aten::bmm") == 40 and "and 10 more" in page.text
    assert "Operators" not in body(proposal(report))


def test_the_body_of_a_report_that_knows_nothing(bare: Report) -> None:
    page = harmless(body(proposal(bare, rule=None, rules=())), markers=1)
    for said in ("the numbers: none were compared", "the speed: nothing was timed", "Equivalence class: not known"):
        assert said in page.text, said


def test_the_settings_to_turn_a_rule_off_are_toml(report: Report) -> None:
    shown = body(proposal(report, rule=None, rules=('a"b', "é")))
    told = re.search(r"```toml\n(.*?)\n```", shown, re.DOTALL)
    assert told is not None
    table, _, rules = told[1].partition("\nignore = ")
    assert (table, json.loads(rules)) == ("[tool.advisor]", ['a"b', "é"])  # lists of plain strings read alike


def test_a_commit_message_is_plain_and_narrow(report: Report) -> None:
    message = commit_message(proposal(report))
    lines = message.split("\n")
    assert lines[0] == "Use F.scaled_dot_product_attention: 2.37x faster"
    assert lines[1] == ""
    assert all(len(line) <= 72 for line in lines)
    assert "Measured: 535.3 ms to 226.0 ms a step, 2.37x, 95 % interval 2.35x to" in message
    assert not re.search(r"[`*<]|\*\*", message)


@pytest.mark.parametrize("hostile", TEXTS)
def test_titles_and_commit_messages_call_for_nobody(report: Report, hostile: str) -> None:
    given = poisoned(proposal(report), hostile)
    title, message = pull_request_title(given), commit_message(given)
    assert 0 < len(title) <= 120 and "\n" not in title
    assert not re.match(r"\W*(?:draft|wip)\b", title, re.IGNORECASE)
    for shown in (title, message):
        assert not re.search(r"[@#]\w|\b[gG][hH]-\d|://", shown), shown
        assert not re.search(r"\[[^\]]*(?:skip|no)[ -]?\w*[^\]]*\]", shown, re.IGNORECASE), shown
    lines = message.split("\n")
    assert all(len(line) <= 72 for line in lines)
    assert not any(re.match(r"[\w-]+-(?:by|checks):|[#/]|---|diff |Index:", line) for line in lines), message
    assert lines[1] == ""


def test_a_long_title_is_cut(report: Report) -> None:
    given = proposal(report, title="word " * 100)
    assert len(pull_request_title(given)) <= 120
    assert len(commit_message(given).split("\n")[0]) <= 72
    assert pull_request_title(proposal(report, title="")) == "Proven rewrites"
    assert pull_request_title(proposal(report, title="Draft: x")) == "Rewrite: Draft: x"


# ------------------------------------------------------------------------------------------------------------- answers


def board(report: Report) -> Dashboard:
    return Dashboard(
        commit=COMMIT,
        date="2026-11-30",
        proposals=(OPEN, dataclasses.replace(OPEN, state="off", number=None)),
        scripts=(script(report, "improved", 10.0), Examined(command="eval.py", error="it raised")),
        settings={"fail-on": "never", "schedule": "weekly"},
        notes=("at most two pull requests a week",),
    )


def test_the_dashboard(report: Report) -> None:
    shown = dashboard(board(report), marker="<!-- advisor:dashboard -->")
    assert "| `naive-attention` | open | #12 | waits for a review |" in shown
    page = harmless(shown, markers=1, pull_requests=True)
    for said in ("State of 1f1f1f1f1f1f on 2026-11-30", "1.20x, faster", "it raised", "weekly", "two pull requests"):
        assert said in page.text, said


def test_help_names_every_command_the_bot_knows() -> None:
    from advisor.bot.webhooks.commands import _ARGUMENTS

    told = set(re.findall(r"`/advisor (\w+)", command_help()))
    assert told == set(_ARGUMENTS)
    harmless(command_help())


def test_the_remark_above_a_suggestion(report: Report) -> None:
    assert suggestion_remark(report.findings[3]) == (
        "`optimizer-not-fused`: AdamW updates its parameters without the fused kernel; saves 9.20 ms per step, "
        "measured; level numerics"
    )


# --------------------------------------------------------------------------------------------------- hostile and large


def pages(report: Report, hostile: str) -> list[tuple[str, bool]]:
    found = examination(
        script(report, "regressed", 13.0, proven=True, undecided=("x",)), Examined(command="e", error="it raised")
    )
    found = poisoned(found, hostile)
    return [
        (comment(found, marker=MARKER, notes=(hostile,)), False),
        (body(poisoned(proposal(report), hostile), base_branch=hostile, command=hostile, commit=hostile), False),
        (dashboard(poisoned(board(report), hostile), marker=MARKER), True),
    ]


@pytest.mark.parametrize("hostile", TEXTS)
def test_hostile_text_changes_no_element(report: Report, hostile: str) -> None:
    for (shown, numbers), (benign, _) in zip(pages(report, hostile), pages(report, "word"), strict=True):
        assert harmless(shown, markers=1, pull_requests=numbers).shape() == Page(benign).shape()
        assert shown.startswith(f"{MARKER}\n")
    found = poisoned(examination(script(report, "regressed", 13.0, proven=True)), hostile)
    for note in annotations(found):
        assert "\n" not in note[4] + note[5] and len(note[4]) < 255 and len(note[5]) < 4_000
        assert not re.search("[\x00-\x1f\u202a-\u202e\ud800-\udfff]", note[4] + note[5])
    harmless(suggestion_remark(poisoned(report.findings[0], hostile)))


@given(texts)
@SETTINGS
def test_no_text_acts(report: Report, hostile: str) -> None:
    for shown, numbers in pages(report, hostile):
        harmless(shown, markers=1, pull_requests=numbers)
    commit_message(poisoned(proposal(report), hostile))


@pytest.mark.parametrize("outcome", TEXTS[:6])
def test_an_outcome_of_another_version(report: Report, outcome: str) -> None:
    found = examination(
        dataclasses.replace(script(report, "neutral"), comparison=comparison(report, outcome, use(), use()))
    )
    harmless(comment(found, marker=MARKER), markers=1)
    title, _ = check_output(found)
    assert "\n" not in title and not re.search(r"[@#]\w", title)
    assert conclusion(found, "regression") == "neutral"


@pytest.mark.parametrize(("text", "limit"), [("a", 8_000), ("$", 8_000), ("\N{ROCKET}", 65_000)])
def test_what_is_too_long_is_shortened(report: Report, text: str, limit: int) -> None:
    huge = large(report, text)
    many = [script(huge, "regressed", 13.0, proven=True), *(script(report, "neutral") for _ in range(400))]
    failing = [Examined(command=text * 999, error=text * 99_999) for _ in range(20)]
    shown = [
        comment(examination(*many, *failing), marker=MARKER, notes=(text * 9_999,) * 50, limit=limit),
        check_output(examination(*many, *failing), limit=limit)[1],
        body(proposal(huge), command=text * 900, base_branch=text * 99, limit=limit),
        dashboard(
            dataclasses.replace(
                board(report), proposals=(OPEN,) * 2_000, scripts=(*failing,), notes=(text * 999,) * 99
            ),
            marker=MARKER,
            limit=limit,
        ),
    ]
    for each, markers in zip(shown, (1, 0, 1, 1), strict=True):
        assert size(each) <= limit
        page = harmless(each, markers=markers, pull_requests=True)
        assert "Shortened to fit: " in page.text
    assert "421 scripts: 1 slower, 400 no difference" in shown[0]
    assert "2.37x faster" in shown[2] and "| step | 535.3 ms | 226.0 ms |" in shown[2]


def test_a_very_long_command_to_reproduce(report: Report) -> None:
    shown = body(proposal(report), command="x" * 100_000)
    assert size(shown) <= 65_000
    assert "how to reproduce" in shown
