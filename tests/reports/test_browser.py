"""The HTML report in a real browser: it asks for nothing, says nothing, and axe finds nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from browsing import CHROMIUM, Visit, assert_clean

from advisor.model import Outcome, Report
from advisor.reports.html import render_html

HOSTILE = "<script>alert(1)</script><img src=https://x.example/y onerror=alert(1)>\u202e\x00" + "long" * 25_000

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")


@pytest.fixture
def visit(open_page: Callable[..., Visit]) -> Callable[..., Visit]:
    """Opens the page of a report."""
    return lambda report, **options: open_page(render_html(report), **options)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_example(visit: Callable[..., Visit], report: Report, scheme: str, width: int) -> None:
    seen = visit(report, scheme=scheme, width=width)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.locator("h1").inner_text() == "2.37x faster"
    assert_clean(seen)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_that_knows_nothing(visit: Callable[..., Visit], bare: Report, scheme: str) -> None:
    assert_clean(visit(bare, scheme=scheme))


@pytest.mark.parametrize("outcome", [each.value for each in Outcome])
def test_every_outcome(visit: Callable[..., Visit], report: Report, outcome: str) -> None:
    wrong = report.trials[4].numerics
    assert_clean(visit(dataclasses.replace(report, outcome=outcome, numerics=wrong), scheme="dark"))


def test_hostile_text(visit: Callable[..., Visit], report: Report, poison: Callable[[Report, str], Report]) -> None:
    for width in (400, 1280):
        seen = visit(poison(report, HOSTILE), width=width)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.locator("script, img").count() == 0
        assert_clean(seen)
