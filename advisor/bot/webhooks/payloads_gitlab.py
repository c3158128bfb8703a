"""GitLab's webhook payloads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from advisor.bot.webhooks.commands import commands
from advisor.bot.webhooks.event_types import (
    Change,
    CommandGiven,
    Event,
    Ignored,
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

_BOT = re.compile(r"(?:project|group)_\d+_bot(?:\d+|_[0-9a-f]+)?|service_account_\w+|[\w.-]+\[bot\]")


class _User(msgspec.Struct):
    username: Login


class _Project(msgspec.Struct):
    path_with_namespace: Name


class _Commit(msgspec.Struct):
    id: Sha


class _Merge(msgspec.Struct):
    iid: Number
    source_branch: Ref
    target_branch: Ref
    last_commit: _Commit
    action: str = ""
    updated_at: str | None = None
    oldrev: str | None = None
    draft: bool = False


class _Flip(msgspec.Struct):
    previous: Any = None
    current: Any = None


class _MergeChanges(msgspec.Struct):
    draft: _Flip | None = None
    target_branch: Any = None


class _MergePayload(msgspec.Struct):
    user: _User
    project: _Project
    object_attributes: _Merge
    changes: _MergeChanges = msgspec.field(default_factory=_MergeChanges)


class _Note(msgspec.Struct):
    id: Number
    note: str
    noteable_type: str | None
    created_at: str
    action: str = "create"  # absent before GitLab 16.11, which told of new notes only
    system: bool = False


class _Numbered(msgspec.Struct):
    iid: Number


class _NotePayload(msgspec.Struct):
    user: _User
    project: _Project
    object_attributes: _Note
    merge_request: _Numbered | None = None


class _PushPayload(msgspec.Struct):
    ref: Ref
    before: Sha
    after: Sha
    project: _Project
    user_username: Login | None = None


def read(headers: Mapping[str, str], body: bytes, account: str | None) -> Event | Ignored:
    """The event of a delivery; names of headers in lower case."""
    event = event_of(headers, "x-gitlab-event")
    delivery = delivery_of(headers, "idempotency-key", "x-gitlab-event-uuid")
    if "idempotency-key" not in headers:  # the UUID alone is shared with events that the event gave rise to
        delivery = f"{delivery[:87]}:{hashlib.sha256(body).hexdigest()[:40]}"
    if event == "Merge Request Hook":
        return _merge_request(delivery, decoded(body, event, _MergePayload), account)
    if event == "Note Hook":
        return _note(delivery, decoded(body, event, _NotePayload), account)
    if event == "Push Hook":
        return _push(delivery, decoded(body, event, _PushPayload), account)
    return Ignored(delivery=delivery, reason=f"the event {event} is not used")


def _origin(project: _Project, sender: str | None, account: str | None, occurred: str | None) -> dict[str, Any]:
    return {
        "repository": project.path_with_namespace,
        "sender": sender or GHOST,
        "sender_is_bot": sender is not None and _is_bot(sender, account),
        "occurred": moment(occurred),
    }


def _is_bot(username: str, account: str | None) -> bool:
    return username == account or _BOT.fullmatch(username) is not None


def _merge_request(delivery: str, payload: _MergePayload, account: str | None) -> Event | Ignored:
    merge = payload.object_attributes
    origin = _origin(payload.project, payload.user.username, account, merge.updated_at) | {"delivery": delivery}
    if merge.action in ("close", "merge"):
        merged = merge.action == "merge"
        return PullRequestClosed(**origin, number=merge.iid, merged=merged, head_ref=merge.source_branch)
    change = _merge_change(merge, payload.changes)
    if change is None:
        return Ignored(delivery=delivery, reason="nothing of the merge request changed that is measured")
    return PullRequestChanged(
        **origin,
        number=merge.iid,
        change=change,
        head_sha=merge.last_commit.id,
        head_ref=merge.source_branch,
        base_ref=merge.target_branch,
        draft=merge.draft,
    )


def _merge_change(merge: _Merge, changes: _MergeChanges) -> Change | None:
    if merge.action in ("open", "reopen"):
        return "opened" if merge.action == "open" else "reopened"
    if merge.action != "update":
        return None
    if merge.oldrev:
        return "synchronize"
    if changes.target_branch is not None:
        return "base"
    flip = changes.draft
    return "ready_for_review" if flip and flip.previous is True and flip.current is False else None


def _note(delivery: str, payload: _NotePayload, account: str | None) -> Event | Ignored:
    note, author, merge = payload.object_attributes, payload.user.username, payload.merge_request
    if note.action != "create":
        return Ignored(delivery=delivery, reason="only new comments are read")
    if note.noteable_type != "MergeRequest" or merge is None:
        return Ignored(delivery=delivery, reason="the comment is on no merge request")
    if note.system or _is_bot(author, account):
        return Ignored(delivery=delivery, reason="the comment is a bot's")
    given = commands(note.note)
    if not given:
        return Ignored(delivery=delivery, reason="the comment holds no command")
    return CommandGiven(
        delivery=delivery,
        **_origin(payload.project, author, account, note.created_at),
        number=merge.iid,
        comment=note.id,
        author=author,
        is_pull_request=True,
        commands=given,
    )


def _push(delivery: str, payload: _PushPayload, account: str | None) -> Event | Ignored:
    if not payload.ref.startswith(BRANCHES):
        return Ignored(delivery=delivery, reason="the push is of no branch")
    return Pushed(
        delivery=delivery,
        **_origin(payload.project, payload.user_username, account, None),
        branch=payload.ref.removeprefix(BRANCHES),
        before=payload.before,
        after=payload.after,
        deleted=not payload.after.strip("0"),
    )
