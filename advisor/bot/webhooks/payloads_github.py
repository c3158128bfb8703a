"""GitHub's webhook payloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from advisor.bot.webhooks.commands import commands
from advisor.bot.webhooks.event_types import (
    Change,
    CommandGiven,
    Event,
    Ignored,
    Ping,
    PullRequestChanged,
    PullRequestClosed,
    Pushed,
)
from advisor.bot.webhooks.payloads import (
    BRANCHES,
    GHOST,
    Login,
    Name,
    Number,
    Ref,
    Sha,
    decoded,
    delivery_of,
    event_of,
    moment,
)


class _User(msgspec.Struct):
    login: Login
    type: str = "User"


class _Repository(msgspec.Struct):
    full_name: Name
    pushed_at: int | str | None = None


class _Installation(msgspec.Struct):
    id: Number


class _GitHub(msgspec.Struct, kw_only=True):
    repository: _Repository
    sender: _User | None = None
    installation: _Installation | None = None


class _Head(msgspec.Struct):
    ref: Ref
    sha: Sha


class _Base(msgspec.Struct):
    ref: Ref


class _Pull(msgspec.Struct):
    number: Number
    head: _Head
    base: _Base
    updated_at: str
    draft: bool = False
    merged: bool | None = None


class _PullChanges(msgspec.Struct):
    base: Any = None


class _PullPayload(_GitHub, kw_only=True):
    action: str
    pull_request: _Pull
    changes: _PullChanges | None = None


class _Issue(msgspec.Struct):
    number: Number
    pull_request: Any = None


class _IssueComment(msgspec.Struct):
    id: Number
    created_at: str
    body: str | None = None
    user: _User | None = None


class _CommentPayload(_GitHub, kw_only=True):
    action: str
    issue: _Issue
    comment: _IssueComment


class _PushPayload(_GitHub, kw_only=True):
    ref: Ref
    before: Sha
    after: Sha
    deleted: bool


_CHANGES: dict[str, Change] = {
    "opened": "opened",
    "reopened": "reopened",
    "synchronize": "synchronize",
    "ready_for_review": "ready_for_review",
}


def read(headers: Mapping[str, str], body: bytes, account: str | None) -> Event | Ignored:
    """The event of a delivery; names of headers in lower case."""
    delivery, event = delivery_of(headers, "x-github-delivery"), event_of(headers, "x-github-event")
    if event == "ping":
        decoded(body, event, dict[str, msgspec.Raw])
        return Ping(delivery=delivery)
    if event == "pull_request":
        return _pull_request(delivery, decoded(body, event, _PullPayload), account)
    if event == "issue_comment":
        return _issue_comment(delivery, decoded(body, event, _CommentPayload), account)
    if event == "push":
        return _push(delivery, decoded(body, event, _PushPayload), account)
    return Ignored(delivery=delivery, reason=f"the event {event} is not used")


def _origin(delivery: str, payload: _GitHub, account: str | None, occurred: str | int | None) -> dict[str, Any]:
    sender = payload.sender
    return {
        "delivery": delivery,
        "repository": payload.repository.full_name,
        "installation": payload.installation.id if payload.installation else None,
        "sender": sender.login if sender else GHOST,
        "sender_is_bot": sender is not None and _is_bot(sender, account),
        "occurred": moment(occurred),
    }


def _is_bot(user: _User, account: str | None) -> bool:
    return user.type == "Bot" or user.login.endswith("[bot]") or user.login == account


def _pull_request(delivery: str, payload: _PullPayload, account: str | None) -> Event | Ignored:
    pull = payload.pull_request
    origin = _origin(delivery, payload, account, pull.updated_at)
    if payload.action == "closed":
        return PullRequestClosed(**origin, number=pull.number, merged=bool(pull.merged), head_ref=pull.head.ref)
    change = _CHANGES.get(payload.action)
    if payload.action == "edited" and payload.changes is not None and payload.changes.base is not None:
        change = "base"
    if change is None:
        return Ignored(delivery=delivery, reason="nothing of the pull request changed that is measured")
    return PullRequestChanged(
        **origin,
        number=pull.number,
        change=change,
        head_sha=pull.head.sha,
        head_ref=pull.head.ref,
        base_ref=pull.base.ref,
        draft=pull.draft,
    )


def _issue_comment(delivery: str, payload: _CommentPayload, account: str | None) -> Event | Ignored:
    comment = payload.comment
    if payload.action != "created":
        return Ignored(delivery=delivery, reason="only new comments are read")
    if comment.user is None or _is_bot(comment.user, account):
        return Ignored(delivery=delivery, reason="the comment is a bot's")
    given = commands(comment.body or "")
    if not given:
        return Ignored(delivery=delivery, reason="the comment holds no command")
    return CommandGiven(
        **_origin(delivery, payload, account, comment.created_at),
        number=payload.issue.number,
        comment=comment.id,
        author=comment.user.login,
        is_pull_request=payload.issue.pull_request is not None,
        commands=given,
    )


def _push(delivery: str, payload: _PushPayload, account: str | None) -> Event | Ignored:
    if not payload.ref.startswith(BRANCHES):
        return Ignored(delivery=delivery, reason="the push is of no branch")
    return Pushed(
        **_origin(delivery, payload, account, payload.repository.pushed_at),
        branch=payload.ref.removeprefix(BRANCHES),
        before=payload.before,
        after=payload.after,
        deleted=payload.deleted,
    )
