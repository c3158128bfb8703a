"""What the bot reads of GitHub's answers, and the forge's nouns made of it."""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec

from advisor.bot.forge import ChangedFile, Comment, Issue, PullRequest
from advisor.bot.forges.hunks import shown_lines

_STATUS: dict[str, Literal["added", "modified", "removed", "renamed"]] = {
    "added": "added",
    "copied": "added",
    "removed": "removed",
    "renamed": "renamed",
}


class User(msgspec.Struct):
    login: str


class Named(msgspec.Struct):
    name: str


class RepositoryView(msgspec.Struct):
    id: int
    full_name: str


class FullRepository(msgspec.Struct):
    full_name: str
    clone_url: str
    default_branch: str
    archived: bool = False


class End(msgspec.Struct):
    """The base or head of a pull request."""

    ref: str
    sha: str
    repo: RepositoryView | None = None


class PullView(msgspec.Struct):
    number: int
    title: str
    state: str
    html_url: str
    created_at: datetime.datetime
    base: End
    head: End
    body: str | None = None
    draft: bool | None = None
    user: User | None = None
    labels: list[Named] = []
    closed_at: datetime.datetime | None = None
    merged_at: datetime.datetime | None = None

    @property
    def inside(self) -> bool:
        """Whether its branch is one of the repository itself."""
        head, base = self.head.repo, self.base.repo
        return head is not None and base is not None and head.id == base.id

    def noun(self) -> PullRequest:
        return PullRequest(
            number=self.number,
            title=self.title,
            body=self.body or "",
            state="merged" if self.merged_at else "open" if self.state == "open" else "closed",
            draft=bool(self.draft),
            author=author(self.user),
            base_ref=self.base.ref,
            base_sha=self.base.sha,
            head_ref=self.head.ref,
            head_sha=self.head.sha,
            head_repository=self.head.repo.full_name if self.head.repo else None,
            labels=tuple(label.name for label in self.labels),
            url=self.html_url,
            created=self.created_at,
            ended=self.merged_at or self.closed_at,
        )


class FileView(msgspec.Struct):
    filename: str
    status: str
    patch: str | None = None
    previous_filename: str | None = None

    def noun(self) -> ChangedFile:
        lines, added = shown_lines(self.patch or "")
        return ChangedFile(
            path=self.filename,
            status=_STATUS.get(self.status, "modified"),
            previous=self.previous_filename,
            lines=lines,
            added=added,
        )


class CommentView(msgspec.Struct):
    id: int
    html_url: str
    body: str | None = None
    user: User | None = None

    def noun(self) -> Comment:
        return Comment(id=self.id, author=author(self.user), body=self.body or "", url=self.html_url)


class IssueView(msgspec.Struct):
    number: int
    title: str
    state: str
    html_url: str
    body: str | None = None
    user: User | None = None
    pull_request: dict[str, object] | None = None

    def noun(self) -> Issue:
        return Issue(
            number=self.number,
            title=self.title,
            body=self.body or "",
            state="open" if self.state == "open" else "closed",
            url=self.html_url,
        )


class Permission(msgspec.Struct):
    permission: str


class Target(msgspec.Struct):
    sha: str


class Reference(msgspec.Struct):
    object: Target


class ContentView(msgspec.Struct):
    type: str
    size: int = 0
    encoding: str = ""
    content: str = ""


class App(msgspec.Struct):
    slug: str | None = None


class Output(msgspec.Struct):
    title: str | None = None
    summary: str | None = None
    annotations_count: int = 0


class CheckView(msgspec.Struct):
    id: int
    name: str
    status: str
    output: Output
    conclusion: str | None = None
    external_id: str | None = None
    html_url: str | None = None
    app: App | None = None


class CheckList(msgspec.Struct):
    check_runs: list[CheckView]


class AnnotationView(msgspec.Struct):
    path: str
    start_line: int
    end_line: int
    annotation_level: str | None = None
    title: str | None = None
    message: str | None = None


def author(user: User | None) -> str:
    """Login of who wrote something; that of a deleted account is ghost, as GitHub shows it."""
    return user.login if user else "ghost"


def same_text(one: str | None, other: str | None) -> bool:
    """Whether GitHub holds the same text: it may have changed the ends of lines and of the text."""
    return _plain(one) == _plain(other)


def _plain(text: str | None) -> str:
    return (text or "").replace("\r\n", "\n").strip()
