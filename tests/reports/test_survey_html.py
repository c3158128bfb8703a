"""The page of `advisor analyze`: complete, self-contained, and inert whatever its texts say."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import surveys
from browsing import CHROMIUM, Visit, assert_clean
from figures import with_figures
from pages import CONTROLS, Page, assert_inert, assert_linked, assert_plain_coordinates
from surveys import EVERY

from advisor.measured import Survey
from advisor.redact import Redactor
from advisor.reports.survey_html import render_html

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'[red]\x1b[31m\x00\u202eabc\u2066\ud800\r\n{{ 7*7 }}"


def sections(survey: Survey) -> list[str | None]:
    return [attrs["id"] for tag, attrs in Page(render_html(survey)).elements if tag == "section"]


def text_of(survey: Survey) -> str:
    return Page(render_html(survey)).text()


def test_every_section_is_there() -> None:
    assert sections(EVERY["training"]) == ["summary", "ladder", "step", "costs", "end", "gaps"]
    assert sections(EVERY["ranks"]) == ["summary", "ranks", "files", *(f"file-{i}-file" for i in (1, 2, 3, 4))]
    assert sections(EVERY["mixed"]) == ["summary", "files", *(f"file-{i}-file" for i in (1, 2, 3, 4))]
    assert sections(EVERY["refused"]) == sections(EVERY["empty"]) == ["summary"]


def test_what_the_reader_of_one_file_sees() -> None:
    text = text_of(EVERY["training"])
    for said in (
        "535.3 ms per step",
        "384.2 ms (71.8 % of the mean step) above the floor",
        "of the steps on the device",
        "GPU busy, of the ProfilerStep window",
        "of 989.4 TFLOP/s (datasheet, dense bfloat16)",
        "causal not halved, recomputation not counted; peak 989.4 TFLOP/s",
        "535.3 ms median on the device, steps that end with the optimizer; 293.8 ms mean of 5 ProfilerStep ranges",
        "limited by warps 51.0 %, shared memory 29.0 %, registers 20.0 %",
        "data loader1.10 ms0.2 %",
        "12 per step, occupancy 18.8 % shared memory",
        "sm_active 99.7 %, tensor_active 20.3 % (from gpm replay)",
        "Critical path of 535.3 ms: compute 524.2 ms, calls that launch 8.00 ms",
        "if attention took its floor, the step would take 334.3 ms instead of 535.3 ms",
        "said all the same, with care",
        "record with torch.profiler.profile(with_stack=True, with_modules=True)",
        "it is 2.31 times as long as the median",
    ):
        assert said in text, said


def test_what_the_reader_of_ranks_sees() -> None:
    text = text_of(EVERY["ranks"])
    for said in (
        "8 ranks, the others wait for rank 7",
        "the slowest computes 21.4 % longer than the mean",
        "19.9 ms1.25 ms11.1 ms1.75 ms9.59 ms",
        "7 straggler",
        "median16.1 ms1.06 ms5.87 ms1.75 ms4.28 ms",
        "one step only: a rank can be late by chance",
        "not known: the dense peak of Tesla V100-SXM2-32GB is not known",
    ):
        assert said in text, said


def test_many_ranks_are_all_there_and_charted_at_both_ends() -> None:
    page = Page(render_html(EVERY["many"]))
    assert "The 8 ranks that compute longest and the 8 that compute least; 112 lie between." in page.text()
    charts = [attrs for tag, attrs in page.elements if tag == "svg" and "rank-" in (attrs["aria-labelledby"] or "")]
    assert len(charts) == 16
    assert all(f"rank{rank}.json.gz" in page.text() for rank in range(131) if rank not in (5, 6, 90))
    assert "not among the files: 5-6, 90" in page.text()


def test_the_parts_of_a_step_fill_their_chart() -> None:
    for survey in (EVERY["training"], surveys.one(surveys.rank_file(3))):
        text = render_html(survey)
        chart = text[text.index('<svg class="phases"') :]
        ends = [
            (float(x), float(width))
            for x, width in re.findall(r'<rect class="phase-\w+" x="([^"]+)" y="0" width="([^"]+)"', chart)
        ]
        assert ends[0][0] == 0
        assert all(later[0] >= earlier[0] for earlier, later in pairwise(ends))
        assert sum(ends[-1]) == pytest.approx(1000, abs=2)


def test_idle_time_without_a_cause_is_charted_as_idle() -> None:
    file = surveys.training()
    assert file.breakdown is not None
    partly = dataclasses.replace(file.breakdown, idle_by_cause_us={"data": 1_100.0})
    text = render_html(surveys.one(dataclasses.replace(file, breakdown=partly)))
    chart = text.partition('<svg class="phases"')[2].partition("</svg>")[0]
    assert 'class="phase-idle"' in chart
    assert 'class="phase-data"' in chart


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_loaded_nothing_runs_and_links_lead_somewhere(name: str) -> None:
    text = render_html(EVERY[name])
    assert_inert(text)
    assert_linked(Page(text))
    assert ("html", {"lang": "en"}) in Page(text).elements


@pytest.mark.parametrize("name", EVERY)
def test_nothing_known_is_not_called_none_or_zero(name: str) -> None:
    text = text_of(EVERY[name])
    assert "None" not in text
    assert re.search(r"\b(nan|inf)\b", text) is None
    if name == "bare":
        assert re.search(r"(?<![\d.])0(\.0)? (ms|us|%)", text.replace("x.json", "")) is None
        assert "no reason was recorded" in text


def test_a_percentage_is_never_called_x() -> None:
    for survey in EVERY.values():
        assert re.search(r"%\s*x\b|\dx\s*%", text_of(survey)) is None


@pytest.mark.parametrize("name", EVERY)
def test_hostile_text_is_shown_and_not_obeyed(name: str, poison: Callable[[Survey, str], Survey]) -> None:
    text = render_html(poison(EVERY[name], HOSTILE))
    text.encode("utf-8")
    assert not CONTROLS.search(text)
    assert_inert(text)
    page = Page(text)
    assert_linked(page)
    if name != "empty":
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "\\x1b[31m\\x00\\u202eabc\\u2066\\ud800" in page.text()
        assert "{{ 7*7 }}" in page.text()
    plain = Page(render_html(poison(EVERY[name], "x")))
    assert [x for x, _ in page.elements if x != "wbr"] == [x for x, _ in plain.elements if x != "wbr"]


def test_a_kind_and_a_status_of_no_one_are_shown() -> None:
    strange = surveys.training(status=HOSTILE, costs=(surveys.cost(HOSTILE, "a", 3.0, 1.0),), steps_from=HOSTILE)
    for survey in (surveys.one(strange), Survey(files=(strange, strange))):
        text = render_html(survey)
        assert_inert(text)
        assert "&lt;script&gt;" in text


def test_very_long_names_are_cut_and_counted(poison: Callable[[Survey, str], Survey]) -> None:
    for name, most in (("training", 200_000), ("many", 800_000), ("mixed", 400_000)):
        text = render_html(poison(EVERY[name], "n" * 100_000))
        assert len(text) < most
        titles = [attrs["title"] or "" for tag, attrs in Page(text).elements if tag == "th" and "title" in attrs]
        assert titles
        assert max(map(len, titles)) < 440
        assert "... (+99,880 characters)" in Page(text).text()


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1.7e308])
@pytest.mark.parametrize("name", EVERY)
def test_figures_that_no_machine_has(name: str, figure: float) -> None:
    text = render_html(with_figures(EVERY[name], figure))
    if "<rect" in text:
        assert_plain_coordinates(text)
    assert re.search(r"\b(nan|inf)\b|[\d,]{30}", Page(text).text()) is None


def test_equal_surveys_give_the_same_page() -> None:
    assert all(render_html(survey) == render_html(survey) for survey in EVERY.values())


def test_what_the_redactor_took_stays_out(poison: Callable[[Survey, str], Survey]) -> None:
    text = "/home/jane/run on box17 with hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
    redactor = Redactor(home="/home/jane", user="jane", host="box17")
    for survey in EVERY.values():
        assert not re.search(r"jane|box17|hf_a", render_html(redactor.value(poison(survey, text))))


# ------------------------------------------------------------------------------------------------------------- browser

in_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")


@in_browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1280)])
@pytest.mark.parametrize("name", EVERY)
def test_in_a_browser(open_page: Callable[..., Visit], name: str, scheme: str, width: int) -> None:
    seen = open_page(render_html(EVERY[name]), scheme=scheme, width=width)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert_clean(seen)


@in_browser
@pytest.mark.parametrize("name", ["training", "ranks", "mixed"])
def test_hostile_text_in_a_browser(
    open_page: Callable[..., Visit], name: str, poison: Callable[[Survey, str], Survey]
) -> None:
    for text in (HOSTILE, "long" * 25_000):
        seen = open_page(render_html(poison(EVERY[name], text)), width=400)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 400
        assert seen.page.locator("script, img").count() == 0
        assert_clean(seen)
