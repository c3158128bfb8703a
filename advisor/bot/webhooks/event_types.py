"""The events that the bot acts on, of whichever forge."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal, TypeAlias

from advisor.bot.webhooks.commands import Command

Change: TypeAlias = Literal["opened", "reopened", "synchronize", "ready_for_review", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What every event has: `delivery` is the same for every delivery of one event.

    `repository` is owner/name (GitLab: with all groups), `installation` that of the GitHub App. `occurred` (aware) is
    the forge's own clock, None where the payload holds no time that only the forge sets.
    """

    delivery: str
    repository: str
    installation: int | None = None
    sender: str
    sender_is_bot: bool
    occurred: datetime.datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequestChanged(Origin):
    """A pull request was opened or reopened, has other commits or another base, or is a draft no more."""

    number: int
    change: Change
    head_sha: str
    head_ref: str
    base_ref: str
    draft: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequestClosed(Origin):
    """A pull request was merged, or closed without."""

    number: int
    merged: bool
    head_ref: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandGiven(Origin):
    """Somebody who is no bot wrote a comment with commands.

    On GitLab only merge requests are listened to: its issues have numbers of their own, which a Forge cannot tell.
    """

    number: int
    comment: int
    author: str
    is_pull_request: bool
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(Origin):
    """A branch was moved, made (`before` is all zeros) or deleted (`after` is all zeros)."""

    branch: str
    before: str
    after: str
    deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """The forge tries out the webhook."""

    delivery: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A delivery that asks nothing of the bot; `reason` holds nothing that a stranger wrote."""

    delivery: str
    reason: str


Event: TypeAlias = PullRequestChanged | PullRequestClosed | CommandGiven | Pushed | Ping
