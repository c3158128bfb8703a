"""The HTML report in a real browser: it asks for nothing, says nothing, and axe finds nothing."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from advisor.model import Outcome, Report
from advisor.reports.html import render_html

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "<script>alert(1)</script><img src=https://x.example/y onerror=alert(1)>\u202e\x00" + "long" * 25_000

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@dataclasses.dataclass
class Visit:
    """What happened while a page was open."""

    page: Any
    requests: list[str]
    messages: list[str]


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def go(report: Report, *, scheme: str = "light", width: int = 1280) -> Visit:
        path = tmp_path / "report.html"
        path.write_text(render_html(report), encoding="utf-8")
        context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        seen = Visit(context.new_page(), [], [])
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.on("console", lambda message: seen.messages.append(message.text))
        seen.page.on("pageerror", lambda error: seen.messages.append(str(error)))
        seen.page.on("dialog", lambda dialog: seen.messages.append(dialog.message))
        seen.page.goto(path.as_uri(), wait_until="load")
        seen.requests.remove(path.as_uri())
        seen.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        return seen

    yield go
    for context in contexts:
        context.close()


def assert_clean(seen: Visit) -> None:
    axe = importlib.import_module("axe_playwright_python.sync_playwright")  # has no types
    found = axe.Axe().run(seen.page)
    assert found.violations_count == 0, found.generate_report()
    assert seen.requests == []
    assert seen.messages == []


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
