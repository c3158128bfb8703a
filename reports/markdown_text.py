"""Text that others wrote, as Markdown that shows it and does nothing else on GitHub and GitLab.

A forge acts twice on a text. The Markdown parser sees the characters as written; filters then look through the text of
the rendered page for mentions, references, addresses and emoji, and a character reference such as `&#x40;` is a plain
character to them. So what means something to the parser becomes a character reference, and what means something to the
filters is broken by a ZERO WIDTH SPACE behind its sign: no filter takes that for a part of a name, a number or an
address. Dependabot (dependabot-core, pull request 3157) and Renovate do the same, after code spans had turned out not
to be enough: answers by e-mail quote the text without its markup. The filters of GitLab are Banzai's
(gitlab.com/gitlab-org/gitlab, lib/banzai/filter).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from .untrusted import clip, diff_lines, visible_line

BREAK = "&#x200b;"
ZERO_WIDTH = "\u200b"
DOLLAR = "<span>&#x24;</span>"  # opens no formula: docs.github.com, "Writing mathematical expressions"
_NO_COMMIT = 6  # digits that name no commit
_LONGEST = 2_000  # characters of one text that are shown where nothing else is asked for

_SIGNS = re.compile(
    r"""
      (?P<inside>(?<=[0-9A-Za-z])_(?=[0-9A-Za-z]))      # emphasises nothing
    | (?P<scheme>:)(?=//)                               # https://
    | (?P<host>[wW]{3})(?=\.)                           # www.
    | (?P<emoji>:)(?=[\w+-]+(?::|$))                    # :tada: also with a colon of ours
    | (?P<name>[@#])(?!\s)                              # a mention, an issue, somebody@example.org
    | (?P<reference>[!~^%&])(?=["'\w])                  # of GitLab: !1, ~label, ^alert, %milestone, &epic
    | (?P<cadence>\*)(?=iteration)
    | (?P<bracket>\[)(?=[A-Za-z_]+(?:[:\]]|$)|[\[^])    # of GitLab: [issue:1], [[_TOC_]]
    | (?P<key>\b(?:[A-Z][A-Z0-9_]*|[gG][hH])-)(?=\d)    # GH-1, and keys of other trackers
    | (?P<commit>(?<![0-9A-Za-z])[0-9a-f]{7,}(?![0-9A-Za-z]))
    | (?P<dollar>\$)
    | (?P<markup>[\\`*_{}\[\]<>|~&@\#])
    """,
    re.VERBOSE,
)
_BEGINS_BLOCK = re.compile(r"[-+=:]|\d{1,9}[.)](?=\s|$)")
_CODE_SPAN = re.compile(r"[^`|\\@#$\s](?:[^`|\\@#$]*[^`|\\@#$\s])?")
_CLOSING = re.compile(  # of docs.github.com, "Linking a pull request to an issue", and of GitLab's default pattern
    r"""
    \b(?P<first>(?i:[cfri]))(?P<rest>(?i:los(?:e[sd]?|ing)|ix(?:e[sd]|ing)?|esolv(?:e[sd]?|ing)
    |mplement(?:s|ed|ing)?))(?=:?\s+(?:issues?\s+)?(?:\S{0,100}[\#!]\d|(?i:gh)-\d|https?://|[A-Z][A-Z0-9_]+-\d))
    """,
    re.VERBOSE,
)


# ----------------------------------------------------------------------------------------------------------- Markdown


def text(said: str, most: int = _LONGEST) -> str:
    """One line of prose, right in a paragraph, a list, a table and between HTML tags; at most `most` characters of it.

    Every character is shown as it is, what hides or reorders others as its escape.
    """
    shown = clip(said, most).strip()
    if shown.startswith("/"):
        return BREAK + _SIGNS.sub(_marked, shown)  # GitLab runs a line that begins with /close
    first = _BEGINS_BLOCK.match(shown)
    if first is None:
        return _SIGNS.sub(_marked, shown)
    at = first.end()
    number, rest = _SIGNS.sub(_marked, shown[: at - 1]), _SIGNS.sub(_marked, shown[at:])
    return f"{number}{_reference(shown[at - 1])}{BREAK}{rest}"


def _marked(found: re.Match[str]) -> str:
    sign = found.group()
    match found.lastgroup:
        case "inside":
            return sign
        case "dollar":
            return DOLLAR
        case "markup":
            return _reference(sign)
        case "commit":
            return BREAK.join(sign[at : at + _NO_COMMIT] for at in range(0, len(sign), _NO_COMMIT))
        case "scheme" | "host" | "emoji" | "key":
            return sign + BREAK
        case _:
            return (sign if sign in "!^%" else _reference(sign)) + BREAK


def _reference(sign: str) -> str:
    """The character in hexadecimal: in a decimal one a commit message made of the source would show an issue, #64."""
    return f"&#x{ord(sign):x};"


def cell(said: str, most: int = 300) -> str:
    """A text in a cell of a table; a dash where there is none."""
    return text(said, most) or "-"


def code(said: str, most: int = 300) -> str:
    """A name, a path or a command, right in a paragraph, a list and a table, but not between HTML tags alone."""
    shown = clip(said, most).strip()
    if not shown:
        return "(empty)"
    if _CODE_SPAN.fullmatch(shown) and not _CLOSING.search(shown):
        return f"`{shown}`"
    return f"<code>{text(said, most).replace(DOLLAR, '&#x24;')}</code>"


def fence(body: str, language: str = "") -> str:
    """Lines as a block of code that nothing in them ends; `language` is ours."""
    assert re.fullmatch(r"[a-z]*", language)
    lines = [fenced(visible_line(line.removesuffix("\r"))) for line in body.removesuffix("\n").split("\n")]
    longest = max((len(run) for line in lines for run in re.findall(r"`{3,}", line)), default=2)
    ticks = "`" * (longest + 1)
    return "\n".join((f"{ticks}{language}", *lines, ticks))


def diff(patch: str, *, lines: int, width: int = 400) -> str:
    """The first lines of a unified diff as a block of code; what is left out is counted in its last line."""
    return fence("\n".join(line for _, line in diff_lines(patch, lines=lines, width=width)), "diff")


def fenced(line: str) -> str:
    """A line of a block of code: GitLab looks for closing keywords in sources, for quick actions where lines begin."""
    broken = _CLOSING.sub(rf"\g<first>{ZERO_WIDTH}\g<rest>", line)
    return ZERO_WIDTH + broken if re.match(r"\s*/[A-Za-z]", broken) else broken


def folded(summary: str, body: str) -> str:
    """A part that opens when it is clicked; `summary` is made by `text`, `body` is Markdown."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...] = ()) -> str:
    """A table of cells that are Markdown already; the columns of `right` are set to the right."""
    rule = tuple("---:" if column in right else "---" for column in range(len(head)))
    assert all(len(row) == len(head) for row in rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def size(markdown: str) -> int:
    """Bytes in UTF-8.

    GitHub's "65536 characters" are characters for a pull request and bytes of a larger limit for an issue or a comment;
    bytes are at least as many as characters and as UTF-16 units, so that a text within the limit in bytes is within it
    however it is counted.
    """
    return len(markdown.encode("utf-8"))


# --------------------------------------------------------------------------------------------------------- plain text

_SKIPS = re.compile(r"\[([^\[\]]*(?:skip|no)[^\[\]]*)\]", re.IGNORECASE)  # [skip ci]: the forge would run no tests
_TRAILER = re.compile(r"(?i:\b([a-z]+(?:-[a-z]+)+|breaking change))\s*:")  # Co-authored-by: Somebody


def plain(said: str, most: int = 300) -> str:
    """One line for a title or a commit message, where nothing is escaped: what a forge would act on has a gap."""
    shown = clip(said, most).strip().replace("`", "'")
    shown = _SKIPS.sub(r"(\1)", shown).replace("***", "* * *")
    shown = _TRAILER.sub(r"\1 -", shown)
    shown = re.sub(r"[@#](?=[^\s])|[!~^%$&](?=[\"'\w])|:(?=//|[\w+-]+:)", lambda sign: sign.group() + " ", shown)
    return re.sub(r"\b(gh|[A-Z][A-Z0-9_]*)-(?=\d)", r"\1- ", re.sub(r"\b[gG][hH]-(?=\d)", "GH- ", shown))


def paragraph(said: str, *, indent: str = "", width: int = 72) -> str:
    """Words in lines of at most `width` characters, all but the first indented."""
    return textwrap.fill(said, width, subsequent_indent=indent, break_on_hyphens=False)
