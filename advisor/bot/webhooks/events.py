"""What a webhook delivery of GitHub or GitLab asks of the bot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from advisor.bot.webhooks import payloads_github, payloads_gitlab
from advisor.bot.webhooks.commands import Command, commands
from advisor.bot.webhooks.event_types import (
    CommandGiven,
    Event,
    Ignored,
    Origin,
    Ping,
    PullRequestChanged,
    PullRequestClosed,
    Pushed,
)

__all__ = [
    "Command",
    "CommandGiven",
    "Event",
    "Ignored",
    "Origin",
    "Ping",
    "PullRequestChanged",
    "PullRequestClosed",
    "Pushed",
    "commands",
    "parse",
]


def parse(
    forge: Literal["github", "gitlab"], headers: Mapping[str, str], body: bytes, *, account: str | None = None
) -> Event | Ignored:
    """The event of a delivery. `account`, the login we act with, counts as a bot; comments of bots are ignored.

    Nothing is checked that only a signature can show. Raises UsageError for a body that is no payload of the event
    that the headers name, with a message that quotes nothing of it.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    if forge == "github":
        return payloads_github.read(lower, body, account)
    return payloads_gitlab.read(lower, body, account)
