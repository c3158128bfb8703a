"""What the bot needs of a forge: its nouns and one protocol, behind which GitHub and GitLab stand."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

State: TypeAlias = Literal["open", "closed", "merged"]
Level: TypeAlias = Literal["notice", "warning", "failure"]
Conclusion: TypeAlias = Literal["success", "neutral", "failure"]
Reaction: TypeAlias = Literal["eyes", "+1", "confused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What git needs to read and write the repository; never part of a URL, a command line or a message."""

    user: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository: `name` is owner/name (GitLab: with all groups), `clone_url` holds no credentials."""

    name: str
    clone_url: str
    default_branch: str
    archived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """A pull or merge request. `head_repository` is None once the fork has been deleted; times are aware, in UTC."""

    number: int
    title: str
    body: str
    state: State
    draft: bool
    author: str
    base_ref: str
    base_sha: str
    head_ref: str
    head_sha: str
    head_repository: str | None
    labels: tuple[str, ...]
    url: str
    created: datetime.datetime
    ended: datetime.datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A file of a pull request's diff: `lines` are the line numbers of the new text that the diff shows.

    `added` are those of them that the pull request added or changed. Both are empty for a file without a text diff.
    """

    path: str
    status: Literal["added", "modified", "removed", "renamed"]
    previous: str | None = None
    lines: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """A comment of the conversation."""

    id: int
    author: str
    body: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A remark at lines of the head commit; plain text."""

    path: str
    start_line: int
    end_line: int
    level: Level
    title: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome shown beside a commit; `conclusion` None means that it is still being worked on. Markdown summary.

    The check of one `name` and commit is edited in place.
    """

    name: str
    head_sha: str
    conclusion: Conclusion | None
    title: str
    summary: str
    annotations: tuple[Annotation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Lines of the head commit and the lines to stand in their place; `key` tells it apart from others, for good."""

    key: str
    path: str
    start_line: int
    end_line: int
    remark: str  # Markdown
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """An issue."""

    number: int
    title: str
    body: str
    state: Literal["open", "closed"]
    url: str


class Forge(Protocol):
    """One repository on one forge, with the rights of one account.

    Every method raises ForgeError: ForgeRefused (401, 403), ForgeMissing (404), ForgeConflict (409, 422),
    ForgeUnavailable (5xx, time-outs, rate limits that outlast the patience). What may be tried again has been. A
    method that writes is idempotent: called again after a failure, also one after which nobody knows whether the
    forge did it, it doubles nothing.
    """

    kind: Literal["github", "gitlab"]

    def account(self) -> str:
        """Login of the account that acts."""

    def credentials(self) -> Credentials:
        """For git, valid for at least ten minutes."""

    def repository(self) -> Repository:
        """The repository."""

    def pull_request(self, number: int) -> PullRequest:
        """One pull request; raises ForgeMissing."""

    def pull_requests(self, *, state: Literal["open", "all"], branch_prefix: str) -> tuple[PullRequest, ...]:
        """Those from branches of this repository (not of forks) with the prefix, newest first."""

    def pull_request_at(self, head_sha: str) -> PullRequest | None:
        """The open pull request whose head is a commit, from a fork or not; None without one."""

    def changed_files(self, number: int) -> tuple[ChangedFile, ...]:
        """The files of a pull request's diff, in the forge's order."""

    def may_write(self, user: str) -> bool:
        """Whether a user may push to the repository; False for one unknown."""

    def read_file(self, path: str, ref: str) -> bytes | None:
        """A file at a commit or branch; None where there is none. Raises ForgeConflict for more than 1 MiB."""

    def branch_head(self, branch: str) -> str | None:
        """The commit of a branch; None where there is none."""

    def delete_branch(self, branch: str) -> None:
        """Delete a branch; one that is gone already is no error."""

    def upsert_comment(self, number: int, marker: str, body: str) -> Comment:
        """Edit our comment that begins with `marker` (an HTML comment that `body` begins with), or write it.

        Comments of others are never edited, whatever they begin with. Of several of ours the oldest is kept.
        """

    def add_comment(self, number: int, marker: str, body: str) -> Comment:
        """Answer in the conversation, unless a comment of ours begins with the marker already."""

    def react(self, number: int, comment: int, reaction: Reaction) -> None:
        """Put an emoji on a comment of the conversation."""

    def post_check(self, check: Check) -> str:
        """Create or edit a check with all its annotations; returns its URL, empty where the forge has none."""

    def post_suggestions(self, number: int, head_sha: str, suggestions: Sequence[Suggestion]) -> int:
        """Post those that are not there yet as one review with suggestion blocks; returns how many those were."""

    def open_pull_request(
        self, *, branch: str, base: str, title: str, body: str, labels: Sequence[str], draft: bool
    ) -> PullRequest:
        """Open one, or edit the open one of that branch."""

    def edit_pull_request(self, number: int, *, title: str, body: str) -> None:
        """Change title and body, where they differ."""

    def close_pull_request(self, number: int, marker: str, reason: str) -> None:
        """Say why (once) and close it; one that is not open is left alone."""

    def upsert_issue(self, marker: str, title: str, body: str) -> Issue:
        """Edit our open issue whose body begins with the marker, or open it."""

    def upload_sarif(self, document: str, *, head_sha: str, ref: str) -> None:
        """Hand a SARIF document to code scanning; a forge or repository without it is no error."""
