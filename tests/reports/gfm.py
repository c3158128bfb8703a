"""Markdown rendered by GitHub's own parser, and what the filters of GitHub and GitLab would make of the page.

cmark-gfm is the parser of GitHub; raw HTML is let through, so that whatever gets past the escaping shows as an element.
The filters behind it are not public for GitHub today. Those here are of html-pipeline and github/markup as they were
published, and of GitLab's Banzai; they look at the text of the page outside of code, as those do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

import pytest

from advisor.model import Outcome, ReportedFinding
from advisor.proposals import Comparison, Examination, Examined, OpenProposal, Proposal, Use

cmarkgfm = pytest.importorskip("cmarkgfm")

FILTERS: Mapping[str, re.Pattern[str]] = {
    "mention": re.compile(r"(?:^|\W)@[a-z0-9]", re.IGNORECASE),
    "issue": re.compile(r"#\d|\bgh-\d", re.IGNORECASE),
    "reference of GitLab": re.compile(r"[!&~^%]\w|~\"|%\"|\[[a-z_]+:\d|\[\[|\[TOC\]", re.IGNORECASE),
    "address": re.compile(r"[a-z]://|www\.\w|\w@\w", re.IGNORECASE),
    "emoji": re.compile(r":[\w+-]+:"),
    "commit": re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{7,40}(?![0-9A-Za-z])"),
    "formula": re.compile(r"\$."),
    "hidden": re.compile("[\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f]"),
}
CLOSING = re.compile(
    r"\b(?:clos(?:e[sd]?|ing)|fix(?:e[sd]|ing)?|resolv(?:e[sd]?|ing)|implement(?:s|ed|ing)?):?\s+(?:issues? +)?"
    r"(?:\S*#\d|https?://)",
    re.IGNORECASE,
)
VOID = {"br", "hr", "img", "input", "wbr"}
TAGS = set(
    "h2 h3 p ul ol li table thead tbody tr th td details summary pre code strong em sub span a blockquote".split()
)


class Page(HTMLParser):
    """The elements of a page with their attributes, its texts with the elements around them, its comments."""

    def __init__(self, markdown: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[tuple[str, tuple[str, ...]]] = []
        self.comments: list[str] = []
        self.stack: list[str] = []
        self.source = markdown
        options = cmarkgfm.cmark.Options.CMARK_OPT_UNSAFE
        self.feed(cmarkgfm.github_flavored_markdown_to_html(markdown, options))
        self.close()
        assert self.stack == [], f"left open: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append((data, tuple(self.stack)))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(f"a declaration: {decl}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")

    @property
    def text(self) -> str:
        """All text of the page."""
        return "".join(text for text, _ in self.texts)

    def shape(self) -> list[str]:
        """The elements in their order, without those that a dollar sign is put in."""
        return [tag for tag, _ in self.elements if tag != "span"]


def harmless(markdown: str, *, markers: int = 0, pull_requests: bool = False) -> Page:
    """The page, after checking that nothing on it acts."""
    page = Page(markdown)
    assert {tag for tag, _ in page.elements} <= TAGS - {"a"}
    allowed = {"align", "lang"}
    for tag, attributes in page.elements:
        assert {name for name, _ in attributes} <= allowed, (tag, attributes)
    assert len(page.comments) == markers
    for text, around in page.texts:
        if {"code", "pre"} & set(around):
            continue
        for name, pattern in FILTERS.items():
            if not (pull_requests and name == "issue"):
                assert not pattern.search(text), (name, text)
        if "$" in text:
            assert text == "$" and around[-1] == "span"
    assert not re.search(r"(?m)^/[A-Za-z]", markdown)
    assert not CLOSING.search(markdown), CLOSING.search(markdown)
    markdown.encode("utf-8")
    return page


KEPT = {"status", "kind", "outcome", "throughput_unit", "purpose", "state"}


def poisoned(value: Any, text: str, kept: frozenset[str] = frozenset(KEPT)) -> Any:
    """A noun with a text in every text field, however deep, but those that decide what is shown."""
    if isinstance(value, Outcome):
        return value
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(poisoned(item, text, kept) for item in value)
    if isinstance(value, Mapping):
        return {f"{text}{i}": poisoned(item, text, kept) for i, item in enumerate(value.values())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name not in kept]
        return dataclasses.replace(value, **{name: poisoned(getattr(value, name), text, kept) for name in names})
    return value


def entry(rule: str, path: str | None, line: int | None, status: str, title: str, **more: Any) -> ReportedFinding:
    """A finding with everything optional absent."""
    given: dict[str, Any] = {"end_line": line, "reason": None, "estimate_us": None, "saved_us": None, "safety": None}
    return ReportedFinding(rule=rule, path=path, line=line, status=status, title=title, **(given | more))


def use(step_ms: float = 12.0, **more: Any) -> Use:
    """What a commit makes of a device."""
    given: dict[str, Any] = {
        "step_ms": step_ms,
        "tokens_per_s": 12_000 / step_ms,
        "peak_gib": 1.5,
        "mfu": 0.3,
        "peak_flops": 989.4e12,
        "peak_source": "datasheet, dense bfloat16",
    }
    return Use(**(given | more))


def comparison(report: Any, outcome: str, before: Use, after: Use) -> Comparison:
    """Two commits that were raced, on the machine of a report."""
    timing = dataclasses.replace(report.timing, speedup=1.002, interval=(0.996, 1.008))
    if before.step_ms and after.step_ms and outcome in ("improved", "regressed"):
        ratio = before.step_ms / after.step_ms
        timing = dataclasses.replace(timing, speedup=ratio, interval=(ratio * 0.99, ratio * 1.01))
    return Comparison(
        outcome=outcome,
        reasons=("the whole interval lies on one side",),
        timing=None if outcome == "failed" else timing,
        before=before,
        after=after,
        environment=report.environment,
        hardware=report.hardware,
    )


def examination(*scripts: Examined) -> Examination:
    """An examination of a pull request."""
    return Examination(
        schema=1, advisor="0.1.0", purpose="examine", base="1f" * 20, head="2e" * 20, scripts=tuple(scripts)
    )


def proposal(report: Any, **more: Any) -> Proposal:
    """The attention rewrite of the example report."""
    given: dict[str, Any] = {
        "rule": "naive-attention",
        "fingerprint": "ab12",
        "title": "Use F.scaled_dot_product_attention: 2.37x faster",
        "files": {},
        "report": report,
        "rules": ("naive-attention",),
    }
    return Proposal(**(given | more))


OPEN = OpenProposal(rule="naive-attention", state="open", number=12, note="waits for a review")
