"""Markdown that is cut still renders, and is never longer than asked."""

from __future__ import annotations

import cmarkgfm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.bot.forges.fitting import cut, fence_for, fitted


def test_what_fits_is_left_alone() -> None:
    assert fitted("```\nx", 5) == "```\nx"
    assert cut("title", 5) == "title"


@pytest.mark.parametrize(
    "opening",
    [
        "",
        "```python\n",
        "~~~~\n",
        "````\n```\n",
        "<details>\n\n```\n",
        "<details><details>\n",
        "<!-- hidden\n",
        "| a |\n| - |\n",
    ],
)
def test_a_cut_closes_what_is_open_and_says_so(opening: str) -> None:
    text = opening + "a line of text\n" * 1000
    shown = fitted(text, 2000)
    assert len(shown) <= 2000
    html = cmarkgfm.github_flavored_markdown_to_html(shown)
    assert "<em>Cut here: " in html.rpartition("</pre>")[2], html[-300:]
    assert shown.count("<details>") == shown.count("</details>")
    left = int(shown.rpartition("Cut here: ")[2].split(" ")[0].replace(",", ""))
    assert 13_000 < left < 14_000


def test_one_long_line_is_cut_too() -> None:
    assert len(fitted("x" * 10_000, 1000)) <= 1000


@given(st.text(alphabet="`~<>-!/ab \n", max_size=3000), st.integers(300, 600))
def test_it_is_never_longer_than_asked(text: str, limit: int) -> None:
    assert len(fitted(text, limit)) <= limit


@given(st.text(max_size=300), st.integers(4, 50))
def test_plain_text_is_cut_by_characters_and_bytes(text: str, limit: int) -> None:
    shown = cut(text, limit)
    assert len(shown.encode(errors="replace")) <= limit


@given(st.text(alphabet="`a\n", max_size=60))
def test_a_fence_is_longer_than_any_run_inside(text: str) -> None:
    fence = fence_for(text)
    assert len(fence) >= 3
    assert fence not in text
