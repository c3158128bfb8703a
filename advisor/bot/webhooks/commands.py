"""The `/advisor` commands of a comment, as a reader of the rendered comment sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 3  # commands read of one comment

_ARGUMENTS = {  # verb -> fewest and most arguments
    "optimize": (0, 1),
    "profile": (0, 0),
    "rebase": (0, 0),
    "explain": (1, 1),
    "status": (0, 0),
    "help": (0, 0),
}
_COMMAND = re.compile(r"/advisor(?:[ \t]+(.*))?")
_WORD = re.compile(r"[a-z0-9-]{1,64}")
# A fence at the left edge, or one that is all of the first line of a list item.
_FENCE = re.compile(r"( {0,3})((?:(?:[-*+]|1[.)]) )?)(`{3,}|~{3,})(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command; `known` is False for what the bot can only answer with help: another verb, other arguments.

    `verb` and `argument` hold lower-case letters, digits and dashes; a verb of anything else is the empty string.
    """

    verb: str
    argument: str | None = None
    known: bool = True


def commands(text: str) -> tuple[Command, ...]:
    """The first three commands of a comment in Markdown.

    One stands at the very start of a line, outside of code fences, quotes (with the lines that continue them) and
    HTML comments. In doubt a line is no command: text that a person only shows must start nothing.
    """
    found: list[Command] = []
    for line in _plain_lines(text):
        match = _COMMAND.fullmatch(line.rstrip())
        if match:
            found.append(_command((match[1] or "").split()))
        if len(found) == MOST:
            break
    return tuple(found)


def _command(words: list[str]) -> Command:
    verb = words[0].lower() if words else ""
    if not _WORD.fullmatch(verb):
        return Command(verb="", known=False)
    fewest, most = _ARGUMENTS.get(verb, (1, 0))
    arguments = words[1:]
    if not fewest <= len(arguments) <= most or not all(_WORD.fullmatch(word) for word in arguments):
        return Command(verb=verb, known=False)
    return Command(verb=verb, argument=arguments[0] if arguments else None)


def _plain_lines(text: str) -> Iterator[str]:
    """The lines outside of fences, quotes and HTML comments, each from its first column."""
    fence = ""
    indent = 0  # of the fence
    item = 0  # indentation of a list item that begins with a fence: what is indented by it belongs to that fence
    block_comment = inline_comment = torn = quoted = long_quoted = False  # torn: a code span may be open
    for line in re.split(r"\r\n|\n|\r", text):
        bare = line.strip(" \t")
        if fence:
            if bare and not line.startswith(" " * indent):
                return  # whether an indented fence goes on here depends on the lists around it
            fence = "" if _closes(line, fence) else fence
        elif block_comment:
            block_comment = "-->" not in line
        elif item and line.startswith(" " * item):
            item = 0 if _FENCE.fullmatch(line[item:]) else item
        elif re.match(" {0,3}<!--", line):
            block_comment = "-->" not in line
            item = 0
            torn = inline_comment = quoted = False
        elif (opening := _FENCE.fullmatch(line)) and not (opening[3][0] == "`" and "`" in opening[4]):
            fence, item = ("", opening.end(2)) if opening[2] else (opening[3], 0)
            indent = opening.end(1)
            torn = inline_comment = quoted = False
        elif not bare:
            torn = inline_comment = quoted = False
        else:
            item = 0
            long_quoted ^= bare == ">>>"  # GitLab's quote over several lines
            quoted = bare != ">>>" and (quoted or bare.startswith(">"))  # a line may go on with the quoted paragraph
            hidden = torn or inline_comment or quoted or long_quoted
            inline_comment = not quoted and _leaves_comment_open(line, inline_comment)
            torn = torn or _leaves_span_open(line)
            if not hidden:
                yield line


def _closes(line: str, fence: str) -> bool:
    found = re.fullmatch(r" {0,3}(`+|~+)[ \t]*", line)
    return found is not None and found[1].startswith(fence)


def _leaves_comment_open(line: str, commented: bool) -> bool:
    while True:
        _, mark, line = line.partition("-->" if commented else "<!--")
        if not mark:
            return commented
        commented = not commented


def _leaves_span_open(line: str) -> bool:
    span = 0  # backticks of the one that is open
    for run in re.findall("`+", line):
        span = len(run) if not span else 0 if len(run) == span else span
    return bool(span)
