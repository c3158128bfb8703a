"""A page that was written in Markdown, such as a rule's, made fit for a conversation: it calls for nobody."""

from __future__ import annotations

import re

from .markdown_text import BREAK, DOLLAR, fenced
from .untrusted import visible_line

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.*?[^`])\1(?!`)")
_ADDRESS = re.compile(
    r"((?<!\w)https?://[a-z0-9-]+(?:\.[a-z0-9-]+)+(?:/(?:[\w./?=&;%~+-]|#(?=[A-Za-z]))*)?)(?![^\s()<>\[\],:])"
)
_SIGNS = re.compile(r"[@#~!%](?=[\"'\w])|\$")
_KEY = re.compile(r"\b([gG][hH]-|[A-Z][A-Z0-9_]*-)(?=\d)")


def neutralised(page: str) -> str:
    """The page with its headings, lists, links and code, but without mentions, references, HTML and images.

    Code is kept as it is but for what GitLab looks for in sources. A code span stands in one line, or in two, which
    become one; a line with other backticks shows them.
    """
    done: list[str] = []
    inside: str | None = None  # the fence that is open
    lines = [visible_line(line) for line in page.replace("\r\n", "\n").split("\n")]
    for at, line in enumerate(lines):
        found = _FENCE.match(line)
        if inside is not None:
            closing = found is not None and found[1].startswith(inside) and not line[found.end() :].strip(" \t")
            done.append(inside if closing else fenced(line))
            inside = None if closing else inside
        elif found:
            inside = found[1]
            done.append(inside + re.sub(r"[^a-z]", "", line[found.end() :]))
        elif at + 1 < len(lines) and _wraps(line, lines[at + 1]):
            lines[at + 1] = f"{line} {lines[at + 1].lstrip()}"
        else:
            done.append(_line(line))
    return "\n".join([*done, inside] if inside is not None else done).strip("\n")


def _clear(line: str) -> bool:
    """Whether no other reading of the backticks of a line is possible than as code spans inside it."""
    return "`" not in "".join(_SPAN.split(line)[::3]) and "\\`" not in line


def _wraps(line: str, following: str) -> bool:
    """Whether a code span of a line goes on in the next line of its paragraph."""
    begins = re.match(r"\s*(?:[-+*>|#]|\d+[.)]|$)", following)
    return (
        not _clear(line) and begins is None and not _FENCE.match(following) and _clear(f"{line} {following.lstrip()}")
    )


def _line(line: str) -> str:
    """A line outside of code blocks; its code spans are kept where they are clear."""
    if not _clear(line):
        whole = _prose(line.replace("\\", "&#x5c;"), entities=True).replace("`", "&#x60;")
    else:
        parts, at = [], 0
        for span in _SPAN.finditer(line):
            parts += [_prose(line[at : span.start()]), span.group()]
            at = span.end()
        whole = "".join((*parts, _prose(line[at:])))
    return BREAK + whole if re.match(r"\s*/[A-Za-z]", whole) else whole


def _prose(words: str, *, entities: bool = False) -> str:
    """Words between code spans; `entities` says that they hold character references of ours already."""
    if not entities:
        words = re.sub(r"\\(?=[$<&!@#~%])", "&#x5c;", words.replace("&", "&amp;"))
    words = re.sub(r"<(?!https?://[^\s<>]*>)", "&lt;", words).replace("![", f"!{BREAK}[")
    pieces = _ADDRESS.split(words)
    return "".join(_address(piece) if at % 2 else _signs(piece) for at, piece in enumerate(pieces))


def _signs(words: str) -> str:
    broken = _SIGNS.sub(lambda sign: DOLLAR if sign.group() == "$" else sign.group() + BREAK, words)
    return _KEY.sub(rf"\1{BREAK}", broken)


def _address(address: str) -> str:
    """A link to an issue of GitHub would be noted there: its own redirecting host is passed over."""
    return re.sub(r"^https?://(?:www\.)?github\.com/", "https://redirect.github.com/", address)
