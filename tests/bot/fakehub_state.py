"""What the fake of GitHub keeps: accounts, repositories, and everything that was written to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Json = Any


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, errors: list[Json] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"message": message, "documentation_url": "https://docs.github.com/rest"}
        if errors is not None:
            self.body["errors"] = errors


@dataclass(slots=True, kw_only=True)
class Account:
    """Who a token acts as. `kind`: user, workflow (a GITHUB_TOKEN) or app (an installation); `rights` of the token."""

    login: str
    kind: Literal["user", "workflow", "app"]
    rights: dict[str, str]
    repositories: tuple[str, ...] | None = None  # None: every one
    ends: float | None = None  # epoch

    @property
    def slug(self) -> str:
        return self.login.removesuffix("[bot]")


@dataclass(slots=True, kw_only=True)
class App:
    """A registered GitHub App; `public_key` is PEM."""

    id: int
    slug: str
    public_key: str
    installation: int
    rights: dict[str, str]


@dataclass(slots=True, kw_only=True)
class Pull:
    """A pull request. While it is open, `head_sha` follows the head branch; `head_repo` None is a deleted fork."""

    number: int
    title: str
    body: str | None
    author: str
    base: str
    head: str
    head_repo: str | None
    base_sha: str = ""
    head_sha: str = ""
    state: str = "open"
    merged_at: str | None = None
    closed_at: str | None = None
    created_at: str = ""
    draft: bool = False
    labels: list[str] = field(default_factory=list)
    edits: int = 0  # requests that changed title, body, base or state
    review_comments: list[Json] = field(default_factory=list)
    reviews: list[Json] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Issue:
    """An issue that is no pull request."""

    number: int
    title: str
    body: str | None
    author: str
    state: str = "open"
    created_at: str = ""
    labels: list[str] = field(default_factory=list)
    edits: int = 0


@dataclass(slots=True, kw_only=True)
class Comment:
    """A comment in the conversation of an issue or pull request; `reactions` are (login, content)."""

    id: int
    number: int
    author: str
    body: str
    edits: int = 0
    edited_by: list[str] = field(default_factory=list)
    reactions: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class CheckRun:
    """A check run; annotations only ever grow, as on GitHub."""

    id: int
    app: str
    name: str
    head_sha: str
    external_id: str
    status: str
    conclusion: str | None
    title: str | None = None
    summary: str | None = None
    annotations: list[Json] = field(default_factory=list)
    edits: int = 0


@dataclass(slots=True, kw_only=True)
class Repo:
    """A repository: settings, and everything that was written to it, in order."""

    name: str
    bare: Path
    clone_url: str
    default_branch: str
    archived: bool = False
    permissions: dict[str, str] = field(default_factory=dict)  # login -> admin, write, read, none
    protected: set[str] = field(default_factory=set)  # branches that nobody deletes
    has_issues: bool = True
    code_scanning: bool = True
    pulls: dict[int, Pull] = field(default_factory=dict)
    issues: dict[int, Issue] = field(default_factory=dict)
    comments: list[Comment] = field(default_factory=list)
    checks: list[CheckRun] = field(default_factory=list)
    sarifs: list[Json] = field(default_factory=list)  # {"commit_sha", "ref", "document"}

    def check(self, name: str, head_sha: str) -> CheckRun | None:
        """The check run that GitHub shows: the newest of a name and commit."""
        return next((c for c in reversed(self.checks) if (c.name, c.head_sha) == (name, head_sha)), None)

    def of(self, number: int) -> list[Comment]:
        """The comments of one conversation, oldest first."""
        return [comment for comment in self.comments if comment.number == number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request as it arrived: path and query decoded, header names lower case, `body` decoded JSON or None."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Json
    account: str | None


@dataclass(slots=True, kw_only=True)
class Planned:
    """A failure to come; see FakeHub.fail."""

    method: str
    path: re.Pattern[str]
    status: int | Literal["drop", "hang"]
    headers: Mapping[str, str]
    body: Json
    times: int
    skip: int
    after_doing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request on its way to a handler."""

    account: Account | None
    app: App | None
    values: dict[str, str]
    query: dict[str, str]
    body: dict[str, Json]
    repo: Repo | None
