"""The HTML report: complete, self-contained, and inert whatever its texts say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from pages import CONTROLS, Page, assert_inert, assert_linked, assert_plain_coordinates

from advisor.model import Outcome, Region, Report, Utilisation
from advisor.reports.html import render_html
from advisor.reports.jsonform import from_document, to_document

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'[red]\x1b[31m\x00\u202eabc\u2066\ud800\r\n{{ 7*7 }}"
SECTIONS = "verdict ladder step findings declines numerics trials baselines patch environment missing stages".split()


def test_every_section_is_there(report: Report) -> None:
    page = Page(render_html(report))
    assert [attrs["id"] for tag, attrs in page.elements if tag == "section"] == SECTIONS
    assert ("html", {"lang": "en"}) in page.elements
    assert len(page.ids()) == len(set(page.ids()))


def test_what_the_reader_sees(report: Report) -> None:
    text = Page(render_html(report)).text()
    for said in (
        "2.37x faster",
        "95 % interval 2.35x to 2.39x",
        "Safe: the numbers agree.",
        "worst error 1.9e-03, limit 2.7e-03, as found 1.8e-03: gradient of blocks.3.attention.qkv.weight",
        "advisor apply 20261129-101500-3f2a",
        "samples/nano_gpt/model.py:42-45",
        "saves 182.4 ms per step",
        "costs 6.90 ms per step",
        "masked_fill, softmax, bmm",
        "the loop waits 0.1 ms of 535.3 ms per step",
        "cannot tell without counters",
        "Nsight Compute was not asked for",
        "peak 989.4 TFLOP/s (datasheet, dense bfloat16)",
        "recomputation not counted",
        "not measured: ran out of memory",
        "torch._dynamo.exc.InternalTorchDynamoError",
    ):
        assert said in text, said
    assert "None" not in text.replace("-> None", "")


def test_nothing_is_loaded_and_nothing_runs(report: Report) -> None:
    assert_inert(render_html(report))


def test_links_lead_somewhere_and_labels_exist(report: Report) -> None:
    assert_linked(Page(render_html(report)))


def test_hostile_text_is_shown_and_not_obeyed(report: Report, poison: Callable[[Report, str], Report]) -> None:
    text = render_html(poison(report, HOSTILE))
    text.encode("utf-8")
    assert not CONTROLS.search(text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    shown = page.text()
    assert "\\x1b[31m\\x00\\u202eabc\\u2066\\ud800" in shown
    assert "{{ 7*7 }}" in shown
    plain = Page(render_html(poison(report, "x")))
    texts = {"wbr", "span"}  # break opportunities and diff lines follow the text, every other element does not
    assert [x for x, _ in page.elements if x not in texts] == [x for x, _ in plain.elements if x not in texts]


def test_very_long_text_is_cut_and_counted(report: Report, poison: Callable[[Report, str], Report]) -> None:
    text = render_html(poison(report, "n" * 100_000))
    assert len(text) < 1_000_000
    assert "... (+98,000 characters)" in text


def test_a_long_diff_is_cut_and_counted(report: Report) -> None:
    diff = "--- a/x\n+++ b/x\n@@ -0,0 +1,5000 @@\n" + "".join(f"+line {i}\n" for i in range(5000))
    text = render_html(dataclasses.replace(report, diff=diff))
    assert "(4,603 more lines)" in text
    assert '<span class="add">+line 396</span>' in text
    assert "+line 397<" not in text


def test_diff_lines_are_told_apart_by_the_hunk_and_not_by_their_look(report: Report) -> None:
    diff = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- a/y\n+++ b/y\n \x0c\n\\ No newline at end of file\n"
    text = render_html(dataclasses.replace(report, diff=diff))
    for line in (
        '<span class="file">--- a/x</span>',
        '<span class="del">--- a/y</span>',
        '<span class="add">+++ b/y</span>',
        '<span class="same"> \\x0c</span>',
        '<span class="note">\\ No newline at end of file</span>',
    ):
        assert line in text


def test_the_report_that_knows_nothing(bare: Report) -> None:
    page = Page(render_html(bare))
    text = page.text()
    assert "None" not in text
    assert "0 ms" not in text
    assert "Inconclusive: the measurement does not settle it" in text
    assert "no reason was recorded" in text
    assert [attrs["id"] for tag, attrs in page.elements if tag == "section"] == [x for x in SECTIONS if x != "patch"]


@pytest.mark.parametrize("outcome", [*(each.value for each in Outcome), "analysed", ""])
def test_every_outcome_has_its_own_headline(report: Report, outcome: str) -> None:
    text = Page(render_html(dataclasses.replace(report, outcome=outcome))).text()
    assert ("To apply the proven patch" in text) == (outcome == "improved")
    assert "no gain" not in text


def test_what_is_not_known_says_why(bare: Report) -> None:
    said = {"peak_flops": "no datasheet entry for this device", "counters": "needs a newer device"}
    text = Page(render_html(dataclasses.replace(bare, missing=said))).text()
    assert text.count("no datasheet entry for this device") >= 3
    assert "not known: needs a newer device" in text


def test_figures_that_no_machine_has(report: Report) -> None:
    huge = 1.7e308
    strange = dataclasses.replace(
        report,
        speedup=float("inf"),
        interval=(float("nan"), 1.0),
        phases_us={"forward": huge, "backward": huge, "idle": -1.0, "data": float("nan")},
        regions=(
            Region(name="a", measured_us=huge, floor_us=-huge),
            Region(name="b", measured_us=float("nan"), floor_us=1.0),
            Region(name="c", measured_us=5.0, floor_us=float("inf")),
        ),
        before=Utilisation(busy=3.0, mfu=-1.0, achieved_flops=huge, peak_flops=0.0),
    )
    text = render_html(strange)
    assert_plain_coordinates(text)
    assert re.search(r"[\d,]{30}", Page(text).text()) is None


def test_a_page_made_from_the_document_is_the_same(report: Report, bare: Report) -> None:
    for each in (report, bare):
        assert render_html(from_document(to_document(each))) == render_html(each)


def test_how_figures_came_about_is_said(report: Report) -> None:
    said = "operator times are scaled by 0.50 <i>, because the profiler slows the CPU"
    text = render_html(dataclasses.replace(report, notes=(said,)))
    assert said in Page(text).text() and said not in text
    assert "Notes on the figures" not in render_html(dataclasses.replace(report, notes=()))
