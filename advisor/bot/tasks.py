"""What the bot has to do, as one noun that survives a restart, and which event asks for which."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from advisor.bot.policy import PREFIX
from advisor.bot.webhooks.event_types import (
    CommandGiven,
    Event,
    Ignored,
    Ping,
    PullRequestChanged,
    PullRequestClosed,
    Pushed,
)
from advisor.errors import ArtifactError

Kind: TypeAlias = Literal["examine", "propose", "maintain", "command"]
ForgeKind: TypeAlias = Literal["github", "gitlab"]

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work on one repository.

    `number` is the pull request (of a command with `on_issue` the issue), None for what concerns the repository as a
    whole. `branch` and `head_sha` are what the event spoke of: the branch may have moved since. `installation` is
    GitHub's, of the App. `comment`, `verb` and `argument` belong to a command. `occurred` is when the forge says it
    happened, aware.
    """

    kind: Kind
    forge: ForgeKind
    repository: str
    number: int | None = None
    branch: str | None = None
    head_sha: str | None = None
    installation: int | None = None
    requested_by: str | None = None
    comment: int | None = None
    verb: str | None = None
    argument: str | None = None
    on_issue: bool = False
    occurred: datetime.datetime | None = None

    @property
    def slot(self) -> str:
        """Tasks of one repository and slot ask for the same: the later one can stand for both.

        Who gives a command belongs to it: what a stranger asks for must not take the place of what an owner asked for.
        """
        parts: list[str | int | None] = [self.kind, self.number]
        if self.kind == "command":
            parts += [self.on_issue, self.verb, self.argument, self.requested_by]
        elif self.number is None:
            parts.append(self.branch)
        return msgspec.json.encode(parts).decode()


def tasks_of(forge: ForgeKind, event: Event | Ignored) -> tuple[Task, ...]:
    """What an event asks for.

    A push asks for maintenance of the branch it moved: which one is the default branch the payload does not say. What
    the bot itself does to its own branches asks for nothing; what others do to them does.
    """
    if isinstance(event, Ping | Ignored):
        return ()

    def task(kind: Kind, **more: Any) -> Task:
        return Task(
            kind=kind,
            forge=forge,
            repository=event.repository,
            installation=event.installation,
            requested_by=event.sender,
            occurred=event.occurred,
            **more,
        )

    match event:
        case CommandGiven():
            # the bot has nothing but help for what it does not know
            where = {"number": event.number, "comment": event.comment, "on_issue": not event.is_pull_request}
            given = ((one.verb, one.argument) if one.known else ("help", None) for one in event.commands)
            return tuple(task("command", verb=verb, argument=argument, **where) for verb, argument in given)
        case PullRequestChanged() if not (event.sender_is_bot and event.head_ref.startswith(PREFIX)):
            return (task("examine", number=event.number, branch=event.head_ref, head_sha=event.head_sha),)
        case PullRequestClosed() if event.head_ref.startswith(PREFIX):
            return (task("maintain"),)
        case Pushed() if not event.deleted and not event.branch.startswith(PREFIX):
            return (task("maintain", branch=event.branch, head_sha=event.after),)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    version: int
    task: Task


def to_json(task: Task) -> bytes:
    """A task as a versioned JSON document."""
    return msgspec.json.encode(_Stored(version=VERSION, task=task))


def from_json(document: bytes) -> Task:
    """The task of a document; raises ArtifactError for one of another version or shape."""
    try:
        stored = msgspec.json.decode(document, type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"the task is not one that this version writes: {error}") from error
    if stored.version != VERSION:
        raise ArtifactError(f"the task has version {stored.version}, this advisor reads version {VERSION}")
    return stored.task
