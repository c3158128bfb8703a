"""The whole report in Markdown: what it says, that nothing in it acts, that it stays under the limit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gfm import Page, harmless, poisoned
from hostile_texts import TEXTS, texts
from hypothesis import HealthCheck, given, settings

from advisor.model import CheckedFile, CheckReport, Evidence, Report, RulePage
from advisor.reports.jsonform import from_document
from advisor.reports.markdown import render_check_markdown, render_markdown
from advisor.reports.markdown_fit import Block, fitted
from advisor.reports.markdown_text import size

SAMPLES = Path(__file__).parents[2] / "samples"
SETTINGS = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def checked(report: Report) -> CheckReport:
    """The findings of a report as those of `advisor check`."""
    findings = tuple(
        dataclasses.replace(entry, status="found" if entry.status == "applied" else entry.status)
        for entry in report.findings
        if entry.status != "declined"
    )
    declines = tuple(entry for entry in report.findings if entry.status == "declined")
    file = CheckedFile(
        path="train.py", run="r", status="partial", reason="it ended early", step_ms=12.5, device="CPU",
        linked_share=0.9, missing={"mfu": "no peak"}, findings=findings, declines=declines, rule_errors=("it raised",),
    )  # fmt: skip
    lost = dataclasses.replace(file, status="not measured", reason="it raised", findings=(), declines=(), step_ms=None)
    pages = (RulePage(id="naive-attention", title="t", safety="numerics", page="p"),)
    return CheckReport(schema_version=1, advisor="0.1.0", files=(file, lost), rules=pages)


def large(report: Report, text: str, count: int = 700) -> Report:
    """The report with everything many times, and texts that are long."""
    entries = [dataclasses.replace(entry, evidence=entry.evidence * 50) for entry in report.findings]
    return dataclasses.replace(
        report,
        findings=tuple(entries * (count // len(entries))),
        trials=report.trials * 200,
        baselines=report.baselines * 200,
        regions=report.regions * 100,
        reasons=(text * 5_000,) * 50,
        rule_errors=(text * 3_000,) * 50,
        diff=report.diff * 500 + "".join(f"+{text * 1_000}\n" for _ in range(500)),
        missing={f"{text * 100}{i}": text * 1_000 for i in range(100)},
        script=text * 10_000,
        run=text * 10_000,
        hardware=dataclasses.replace(report.hardware, name=text * 10_000),
        environment=dataclasses.replace(report.environment, variables={str(i): text * 999 for i in range(200)}),
    )


# ------------------------------------------------------------------------------------------------------------- content


def test_the_report_says_what_the_others_say(report: Report) -> None:
    page = harmless(render_markdown(report))
    text = page.text
    for said in (
        "2.37x faster",
        "535.3 ms",
        "72,495",
        "15.0 %",
        "35.5 %",
        "38.4 GiB",
        "95 % interval 2.35x to 2.39x",
        "12 quads A B B A, A/A control +/- 0.4 %",
        "saves 182.4 ms",
        "297 quantities compared with the float32 reference",
        "the vocabulary of 50257 misses the fast matmul",
        "no device idle time follows the read of the loss",
        "(needs ncu, gpm)",
        "989.4 TFLOP/s (datasheet, dense bfloat16)",
        "Nsight Compute was not asked for",
        "attention in fp16",
        "as found + torch.compile",
    ):
        assert said in text, said
    assert text.count("y = F.scaled_dot_product_attention(q, k, v, is_causal=True)") == 1
    assert "Shortened" not in text


def test_a_report_that_knows_nothing(bare: Report) -> None:
    page = harmless(render_markdown(bare))
    assert "inconclusive: the measurement does not settle it" in page.text
    assert "not known" in page.text
    assert "table" in page.shape()


def test_figures_of_a_wrong_patch_are_not_shown(report: Report) -> None:
    text = Page(render_markdown(dataclasses.replace(report, outcome="wrong"))).text
    assert "rejected: the rewrites change the numbers" in text
    assert "226.0 ms |" not in text and "2.37x" not in text.partition("For comparison")[0]


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*/h200/report.json")), ids=lambda path: path.parts[-3])
def test_recorded_reports(path: Path) -> None:
    recorded = from_document(json.loads(path.read_text(encoding="utf-8")))
    page = harmless(render_markdown(recorded))
    assert size(page.source) < 30_000


def test_what_check_found(report: Report) -> None:
    page = harmless(render_check_markdown(checked(report)))
    for said in ("7 findings, 5 left alone, 2 files", "12.5 ms a step, on CPU, in part", "not measured: it raised"):
        assert said in page.text, said
    assert "not rewritten: changes the optimization" in page.text


# ------------------------------------------------------------------------------------------------------------- hostile


@pytest.mark.parametrize("hostile", TEXTS)
def test_hostile_text_changes_no_element(report: Report, hostile: str) -> None:
    benign = Page(render_markdown(poisoned(report, "word"))).shape()
    assert harmless(render_markdown(poisoned(report, hostile))).shape() == benign
    check = checked(report)
    benign = Page(render_check_markdown(poisoned(check, "word"))).shape()
    assert harmless(render_check_markdown(poisoned(check, hostile))).shape() == benign


@given(texts)
@SETTINGS
def test_no_text_acts(report: Report, hostile: str) -> None:
    harmless(render_markdown(poisoned(report, hostile)))
    harmless(render_check_markdown(poisoned(checked(report), hostile)))


def test_a_hostile_outcome_and_status(report: Report, poison: Callable[[Report, str], Report]) -> None:
    for hostile in TEXTS:
        changed = poison(report, hostile)
        changed = dataclasses.replace(
            changed, findings=tuple(dataclasses.replace(entry, status=hostile) for entry in changed.findings)
        )
        harmless(render_markdown(changed))


# -------------------------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("a", 8_000),
        ("@", 8_000),
        ("$", 8_000),
        ("\u202e", 8_000),
        ("\ud800", 65_000),
        ("\N{ROCKET}", 65_000),
        ("`|", 20_000),
    ],
)
def test_a_huge_report_is_shortened(report: Report, text: str, limit: int) -> None:
    for shown in (
        render_markdown(large(report, text), limit=limit),
        render_check_markdown(checked(large(report, text)), limit=limit),
    ):
        assert size(shown) <= limit
        assert len(shown.encode("utf-16-le")) // 2 <= limit
        page = harmless(shown)
        assert "Shortened to fit: " in page.text
        assert "```" not in page.text
    first = Page(render_markdown(large(report, text), limit=limit))
    assert "2.37x faster" in first.text
    assert first.shape()[:4] == ["h2", "p", "code", "table"] or "table" in first.shape()[:6]


def test_what_matters_least_goes_first(report: Report) -> None:
    many = dataclasses.replace(report, trials=report.trials * 60)
    whole = render_markdown(many)
    page = Page(render_markdown(many, limit=size(whole) - 1))
    assert "Shortened to fit: trials." in page.text
    assert "Evidence: naive-attention" in page.text
    evident = Evidence(what="x" * 250, value=1.0, unit="us")
    wide = dataclasses.replace(
        report, findings=tuple(dataclasses.replace(e, evidence=(evident,) * 30) for e in report.findings)
    )
    page = Page(render_markdown(wide, limit=20_000))
    assert "no recomputation was seen" not in page.text and "y = F.scaled_dot_product_attention" in page.text


def test_a_long_diff_is_clipped_with_a_count(report: Report) -> None:
    lines = "".join(f"-old line {i}\n+new line {i}\n" for i in range(5_000))
    patch = f"--- a/m.py\n+++ b/m.py\n@@ -1,5000 +1,5000 @@\n{lines}"
    text = Page(render_markdown(dataclasses.replace(report, diff=patch))).text
    assert "The patch (10,003 lines)" in text
    assert "(9,603 more lines)" in text
    assert "Saved" not in text


def test_a_limit_has_to_hold_the_verdict(report: Report) -> None:
    with pytest.raises(ValueError, match="give 8000 or more"):
        render_markdown(report, limit=7_999)


def test_blocks_are_shortened_by_weight_and_from_the_end() -> None:
    blocks = [
        Block(name="kept", weight=9, forms=("k" * 100,)),
        *(Block(name=f"{i}", weight=1, forms=("x" * 3_000, "y" * 10)) for i in range(4)),
        Block(name="heavy", weight=5, forms=("h" * 2_000, "")),
    ]
    shown = fitted(blocks, 9_000, elsewhere="There.")
    assert shown.count("x" * 3_000) == 1
    assert shown.endswith("Shortened to fit: 1, 2, 3. There.\n")
    assert "h" * 2_000 in shown


def test_texts_are_the_same_for_equal_reports(report: Report) -> None:
    turned: Any = dataclasses.replace(report, missing=dict(reversed(list(report.missing.items()))))
    assert render_markdown(turned) == render_markdown(report)
