"""Pages in a real browser: what they ask for, what they say, and what axe finds."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from pathlib import Path
from typing import Any

CHROMIUM = Path(shutil.which("chromium") or "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclasses.dataclass
class Visit:
    """What happened while a page was open."""

    page: Any
    requests: list[str]
    messages: list[str]


def visit_page(context: Any, path: Path) -> Visit:
    """Open a page with everything in it unfolded."""
    seen = Visit(context.new_page(), [], [])
    seen.page.on("request", lambda request: seen.requests.append(request.url))
    seen.page.on("console", lambda message: seen.messages.append(message.text))
    seen.page.on("pageerror", lambda error: seen.messages.append(str(error)))
    seen.page.on("dialog", lambda dialog: seen.messages.append(dialog.message))
    seen.page.goto(path.as_uri(), wait_until="load")
    seen.requests.remove(path.as_uri())
    seen.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    return seen


def assert_clean(seen: Visit) -> None:
    """Nothing was asked for, nothing was said, and axe finds nothing."""
    axe = importlib.import_module("axe_playwright_python.sync_playwright")  # has no types
    found = axe.Axe().run(seen.page)
    assert found.violations_count == 0, found.generate_report()
    assert seen.requests == []
    assert seen.messages == []
