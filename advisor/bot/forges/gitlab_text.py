"""What GitLab makes of the text of a note: commands it would carry out, suggestion blocks, positions in a diff."""

from __future__ import annotations

import hashlib
import html
import re
from typing import Any

from advisor.bot.forge import Suggestion
from advisor.bot.forges.gitlab_api import Diff, DiffRefs
from advisor.bot.forges.hunks import ShownLine, new_lines

_DRAFT = re.compile(r"\s*(?:(?:\[draft\]|\(draft\)|draft:)\s*)+", re.IGNORECASE)
_KEY = re.compile(r"<!-- advisor:suggestion ([0-9a-f]{64}) -->")
_REFERENCE = re.compile(
    r"(?P<code>^ {0,3}(?P<fence>`{3,}|~{3,}).*?^ {0,3}(?P=fence)|(?P<span>`+).*?(?P=span)|<!--.*?-->)"
    r"|(?<![\w&/#])#(?=\d)",
    re.MULTILINE | re.DOTALL,
)
_LONGEST_TITLE = 255  # characters
_MOST_ABOVE = 100  # lines above its own that a suggestion block may replace


def inert(text: str) -> str:
    """Markdown in which no line begins with a slash.

    GitLab carries out lines such as `/merge` of notes and descriptions with their author's rights. It drops carriage
    returns before it looks for them.
    """
    return re.sub(r"(?m)^/", " /", text.replace("\r\n", "\n").replace("\r", "\n"))


def with_references(markdown: str) -> str:
    """The bot's own Markdown, which names pull requests as `#1`, with GitLab's sign for merge requests, `!1`.

    Code and comments stay as they are; in what others said the sign is broken already (`reports.markdown_text`).
    """
    return _REFERENCE.sub(lambda found: "!" if found["code"] is None else found[0], markdown)


def same_text(one: str | None, other: str) -> bool:
    """Whether GitLab's copy of a text is that text: it drops blanks at the end and carriage returns."""
    return (one or "").replace("\r", "").rstrip() == other.replace("\r", "").rstrip()


def title_of(text: str, *, draft: bool) -> str:
    """A title as GitLab keeps it, where a prefix is what makes a draft."""
    bare = _DRAFT.sub("", text, count=1) if _DRAFT.match(text) else text
    whole = f"Draft: {bare}" if draft else bare
    return whole if len(whole) <= _LONGEST_TITLE else whole[: _LONGEST_TITLE - 3] + "..."


def bare_title(text: str) -> str:
    """A title without the prefix of a draft."""
    return title_of(text, draft=False)


def described(title: str, summary: str) -> str:
    """The description of a status, which GitLab shows as plain text: the title, and a summary of one line behind it."""
    if not summary.strip() or "\n" in summary.strip():
        return title
    plain = html.unescape(re.sub(r"</?span>", "", summary)).replace("\u200b", "")
    return f"{title}: {plain.strip()}"


def key_mark(key: str) -> str:
    """The hidden mark of a suggestion, as the beginning of its note."""
    return f"<!-- advisor:suggestion {hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()} -->"


def mark_in(body: str) -> str | None:
    """The hidden mark that a note begins with."""
    found = _KEY.match(body)
    return found and found[0]


def discussion(suggestion: Suggestion, diff: Diff, refs: DiffRefs) -> dict[str, Any] | None:
    """The request that posts a suggestion; None where GitLab cannot show it.

    That is so for lines outside of the diff, for more than 101 lines, and for a new line that begins with a slash,
    which GitLab might carry out as a command.
    """
    shown = {line.new: line for line in new_lines(diff.diff)}
    wanted = range(suggestion.start_line, suggestion.end_line + 1)
    if not 1 <= len(wanted) <= _MOST_ABOVE + 1 or not all(number in shown for number in wanted):
        return None
    if any(re.match(r"\r*/", line) or "\n" in line for line in suggestion.lines):
        return None
    first, last = shown[suggestion.start_line], shown[suggestion.end_line]
    position: dict[str, Any] = {
        "position_type": "text",
        "base_sha": refs.base_sha,
        "start_sha": refs.start_sha,
        "head_sha": refs.head_sha,
        "old_path": diff.old_path,
        "new_path": diff.new_path,
        "new_line": last.new,
    }
    if not last.added:
        position["old_line"] = last.old
    if first is not last:
        position["line_range"] = {"start": _end(diff, first), "end": _end(diff, last)}
    return {"body": _body(suggestion, above=len(wanted) - 1), "position": position}


def _end(diff: Diff, line: ShownLine) -> dict[str, Any]:
    code = f"{hashlib.sha1(diff.new_path.encode(), usedforsecurity=False).hexdigest()}_{line.old}_{line.new}"
    end: dict[str, Any] = {"line_code": code, "type": "new" if line.added else None, "new_line": line.new}
    return end if line.added else {**end, "old_line": line.old}


def _body(suggestion: Suggestion, *, above: int) -> str:
    longest = max((len(run) for line in suggestion.lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    block = "\n".join([f"{fence}suggestion:-{above}+0", *suggestion.lines, fence])
    return f"{key_mark(suggestion.key)}\n{inert(suggestion.remark)}\n\n{block}\n"
