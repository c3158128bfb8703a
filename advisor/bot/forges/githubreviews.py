"""Suggestions on GitHub: comments of a review, each known by a hidden marker, none of them lost by another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from advisor.bot.forge import ChangedFile, Suggestion
from advisor.bot.forges.fitting import fence_for, fitted
from advisor.bot.forges.githubapi import Api, Nothing
from advisor.bot.forges.githubshapes import CommentView, author
from advisor.errors import ForgeConflict

_LONGEST = 65_536
_RIGHT = "pull requests: write"
_KEY = re.compile(r"[A-Za-z0-9_.:/]+(?:-[A-Za-z0-9_.:/]+)*")

Body: TypeAlias = "dict[str, Any]"


class Reviews:
    """The review comments of a repository. `path` is that of the repository, `account` the login that acts."""

    def __init__(self, api: Api, path: str, account: Callable[[], str]) -> None:
        self._api = api
        self._path = path
        self._account = account

    def post(self, number: int, head_sha: str, suggestions: Sequence[Suggestion], files: Iterable[ChangedFile]) -> int:
        """Post as one review what is not there yet and lies in the diff; returns how many suggestions that were.

        Where GitHub refuses one nevertheless, it refuses the whole review: it is then posted in halves. Raises
        ForgeConflict if it refuses every one.
        """
        there = self._there(number)
        shown = {file.path: file.lines for file in files}
        new = {marker_of(suggestion): suggestion for suggestion in suggestions}
        comments = {
            marker: comment
            for marker, suggestion in new.items()
            if marker not in there
            and set(range(suggestion.start_line, suggestion.end_line + 1)) <= shown.get(suggestion.path, frozenset())
            and (comment := _comment(marker, suggestion)) is not None
        }
        if not comments:
            return 0
        posted, refusal = self._halves(number, head_sha, comments)
        if refusal is not None and not posted:
            raise refusal
        return posted

    def _there(self, number: int) -> set[str]:
        """The markers of our comments, those of outdated ones too."""
        path = f"{self._path}/pulls/{number}/comments"
        pages = self._api.pages(path, list[CommentView], right="pull requests: read")
        ours = (c for page in pages for c in page if author(c.user).lower() == self._account().lower())
        return {(comment.body or "").split("\n", 1)[0].strip() for comment in ours}

    def _halves(self, number: int, head_sha: str, comments: dict[str, Body]) -> tuple[int, ForgeConflict | None]:
        try:
            self._review(number, head_sha, comments)
        except ForgeConflict as refusal:
            if len(comments) == 1:
                return 0, refusal
            every, middle = list(comments.items()), len(comments) // 2
            first, told = self._halves(number, head_sha, dict(every[:middle]))
            second, told_too = self._halves(number, head_sha, dict(every[middle:]))
            return first + second, told or told_too
        return len(comments), None

    def _review(self, number: int, head_sha: str, comments: dict[str, Body]) -> None:
        def done() -> Nothing | None:
            return Nothing() if set(comments) <= self._there(number) else None

        body = {"commit_id": head_sha, "event": "COMMENT", "comments": list(comments.values())}
        self._api.send("POST", f"{self._path}/pulls/{number}/reviews", body, Nothing, right=_RIGHT, done=done)


def marker_of(suggestion: Suggestion) -> str:
    """The HTML comment that a suggestion's comment begins with; a key that could end it early is hashed."""
    safe = _KEY.fullmatch(suggestion.key) and len(suggestion.key) <= 200
    key = suggestion.key if safe else hashlib.sha256(suggestion.key.encode(errors="replace")).hexdigest()
    return f"<!-- advisor:suggestion {key} -->"


def _comment(marker: str, suggestion: Suggestion) -> Body | None:
    """A comment with a suggestion block; None for one that is longer than a comment may be."""
    lines = "".join(f"{line}\n" for line in suggestion.lines)
    fence = fence_for(lines)
    block = f"{fence}suggestion\n{lines}{fence}\n"
    room = _LONGEST - len(marker) - len(block) - 3
    if room < 300:
        return None
    body = f"{marker}\n{fitted(suggestion.remark, room)}\n\n{block}"
    comment: Body = {"path": suggestion.path, "body": body, "side": "RIGHT", "line": suggestion.end_line}
    if suggestion.start_line < suggestion.end_line:
        comment |= {"start_line": suggestion.start_line, "start_side": "RIGHT"}
    return comment
