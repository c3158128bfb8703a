"""Pages as a reader and a browser take them, without a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "wbr"}


class Page(HTMLParser):
    """Every element with its attributes, the text, and whether the tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.elements if "id" in attrs]


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def assert_inert(text: str) -> None:
    """The page loads nothing and runs nothing."""
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "embed", "form", "base"}
    for _, attrs in page.elements:
        assert not [name for name in attrs if name.startswith("on") or name in ("src", "srcset", "action", "style")]
        assert re.match(r"#|data:,$", attrs.get("href") or "#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert re.search(r"url\(|@import|https?:", style) is None
    policy = next(attrs["content"] for tag, attrs in page.elements if "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "script-src" not in policy


def assert_linked(page: Page) -> None:
    """Every link within the page leads somewhere, and every label exists."""
    ids = set(page.ids())
    assert len(page.ids()) == len(ids)
    for tag, attrs in page.elements:
        href = attrs.get("href")
        if href is not None and href.startswith("#"):
            assert href[1:] in ids
        assert set((attrs.get("aria-labelledby") or "").split()) <= ids
        if tag == "svg":
            assert attrs["role"] == "img"
            assert attrs["aria-labelledby"]


def assert_plain_coordinates(text: str) -> None:
    """Every coordinate of every chart is a number that a browser draws."""
    coordinates = re.findall(r' (?:x|y|width|height|cx|cy|x1|x2|y1|y2)="([^"]*)"', text)
    assert coordinates
    assert all(re.fullmatch(r"-?\d+(\.\d+)?(e-\d+)?", each) for each in coordinates)
