"""Escaping for Markdown: what others wrote is shown as it is and does nothing, by GitHub's own parser."""

from __future__ import annotations

import re

import pytest
from gfm import CLOSING, Page, harmless
from hostile_texts import TEXTS, texts
from hypothesis import given, settings

from advisor.reports.markdown_page import neutralised
from advisor.reports.markdown_text import cell, code, diff, fence, folded, paragraph, plain, size, table, text
from advisor.reports.untrusted import visible

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
ZERO_WIDTH = "\u200b"


def said(page: Page) -> str:
    return " ".join(page.text.replace(ZERO_WIDTH, "").split())


@pytest.mark.parametrize("hostile", TEXTS)
@pytest.mark.parametrize("around", ["{}", "- {}", "1. {}", "a {} b", "**x**: {}", "> {}"])
def test_a_text_is_shown_as_it_is(hostile: str, around: str) -> None:
    page = harmless(around.format(text(hostile)))
    assert visible(hostile).strip() in said(page)
    benign = Page(around.format("word"))
    assert page.shape() == benign.shape()


@given(texts)
@SETTINGS
def test_any_text_acts_nowhere(hostile: str) -> None:
    inline = text(hostile)
    assert "\n" not in inline
    shown = " ".join(visible(hostile).split())
    for around in ("{}", "- {}", "a {} b"):
        page = harmless(around.format(inline))
        assert shown in said(page)
    summary = harmless(folded(inline, "body"))
    assert summary.shape() == ["details", "summary", "p"]
    assert shown in said(summary)


@given(texts)
@SETTINGS
def test_any_text_stays_in_its_cell(hostile: str) -> None:
    page = harmless(table(("a", "b"), [(cell(hostile), code(hostile)), ("x", "y")]))
    assert [tag for tag in page.shape() if tag != "code"] == [
        *("table thead tr th th tbody tr td td tr td td".split()),
    ]
    assert "y" in page.texts[-2][0] or "y" in page.text


@given(texts)
@SETTINGS
def test_any_name_is_code(hostile: str) -> None:
    page = harmless(f"see {code(hostile)}.")
    shown = visible(hostile).strip()
    assert page.shape() == (["p", "code"] if shown else ["p"])
    assert " ".join(shown.split()) in said(page)


@given(texts)
@SETTINGS
def test_nothing_ends_a_fence(hostile: str) -> None:
    for block in (fence(hostile, "diff"), diff(hostile, lines=50), folded("x", fence(hostile))):
        page = Page(f"{block}\n\nafter")
        assert [tag for tag in page.shape() if tag not in ("details", "summary")] == ["pre", "code", "p"]
        assert not CLOSING.search(block)
        assert not re.search(r"(?m)^/[A-Za-z]", block)


@given(texts)
@SETTINGS
def test_plain_text_calls_for_nobody(hostile: str) -> None:
    line = plain(hostile)
    assert "\n" not in line
    assert not re.search(r"[@#]\w|\b[gG][hH]-\d|\w-by:|://", line)
    assert not CLOSING.search(line)
    assert not re.search(r"\[[^\]]*\b(?:skip|no)\b[^\]]*\]", line, re.IGNORECASE)
    assert all(len(each) <= 72 for each in paragraph(f"- {line}", indent="  ").split("\n"))


def test_names_and_paths_stay_readable_in_the_source() -> None:
    assert text("the score_matrix of 8 x 16 is read 6 times (1.5 ms)") == (
        "the score_matrix of 8 x 16 is read 6 times (1.5 ms)"
    )
    assert code("samples/nano_gpt/train.py:68") == "`samples/nano_gpt/train.py:68`"
    assert code("a|b") == "<code>a&#x7c;b</code>"
    assert code("") == "(empty)"
    assert text("x" * 3_000).endswith("... (+1,000 characters)")


def test_a_decorator_in_a_diff_can_be_copied() -> None:
    patch = "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n @torch.no_grad()\n-def f(x): # see #12\n+def f(y):\n"
    assert diff(patch, lines=20) == f"```diff\n{patch}```"
    assert "(4 more lines)" in diff(patch, lines=2)


def test_a_closing_keyword_is_broken_in_a_fence_only_before_a_reference() -> None:
    assert fence("# fix the mask\n# fixes #12") == f"```\n# fix the mask\n# f{ZERO_WIDTH}ixes #12\n```"


def test_size_counts_bytes() -> None:
    assert size("a\N{EURO SIGN}\N{ROCKET}") == 1 + 3 + 4


# ---------------------------------------------------------------------------------------------------------------- pages


@given(texts)
@SETTINGS
def test_a_page_calls_for_nobody(hostile: str) -> None:
    page = Page(neutralised(f"## What\n\n{hostile}\n\nend"))
    assert page.comments == []
    assert not {"img", "script", "input"} & {tag for tag, _ in page.elements}
    for shown, around in page.texts:
        if not {"code", "pre", "a"} & set(around):
            assert not re.search(r"(?:^|\W)@\w|#\d", shown), shown
    assert not re.search(r"(?m)^/[A-Za-z]", page.source)


def test_a_page_keeps_its_code_and_its_links() -> None:
    page = neutralised(
        "Use `@torch.compile` as in pytorch/pytorch#12 and https://github.com/pytorch/pytorch/issues/34, "
        "of `a =\nb @ c` too.\n\n```python\n@torch.no_grad()\nx = 1  # 5\n```\n"
    )
    assert "`@torch.compile`" in page
    assert "pytorch#&#x200b;12" in page
    assert "https://redirect.github.com/pytorch/pytorch/issues/34" in page
    assert "`a = b @ c`" in page
    assert "```python\n@torch.no_grad()\nx = 1  # 5\n```" in page


def test_every_page_of_a_rule_is_explained() -> None:
    from advisor.registry import load
    from advisor.reports.pull_request import explained

    rules, _ = load(None)
    for name, item in rules.items():
        page = Page(explained(item.page, name))
        assert {"h2", "h3", "p"} <= {tag for tag, _ in page.elements}
        assert "&#" not in re.sub(r"(?s)```.*?```", "", page.source).replace("&#x200b;", "")
