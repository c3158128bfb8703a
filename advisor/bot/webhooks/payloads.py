"""Fields that the webhook payloads of both forges share: headers, names, commits, times, and how a body is decoded."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from advisor.errors import UsageError

Payload = TypeVar("Payload")
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
Sha: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")]
Login: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.-]{1,255}(?:\[bot\])?\Z")]
Ref: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024, pattern=r"\A[^\x00-\x20\x7f]+\Z")]
Name: TypeAlias = Annotated[
    str, msgspec.Meta(max_length=512, pattern=r"\A(?!\.\.?/)[A-Za-z0-9_.-]+(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9_.-]+)+\Z")
]

_DELIVERY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_EVENT = re.compile(r"[A-Za-z0-9_ ]{1,64}")
BRANCHES = "refs/heads/"
GHOST = "ghost"  # both forges' name for a deleted account


def delivery_of(headers: Mapping[str, str], *names: str) -> str:
    """What tells a delivery apart: the first of some headers that is there. Raises UsageError without one."""
    value = next((headers[name] for name in names if name in headers), None)
    if value is None or not _DELIVERY.fullmatch(value):
        raise UsageError(f"a delivery without a usable header {names[0]}; only a forge's webhooks are taken")
    return value


def event_of(headers: Mapping[str, str], name: str) -> str:
    """The event that a header names; raises UsageError without one."""
    value = headers.get(name, "")
    if not _EVENT.fullmatch(value):
        raise UsageError(f"a delivery without a usable header {name}; only a forge's webhooks are taken")
    return value


def decoded(body: bytes, event: str, kind: type[Payload]) -> Payload:
    """The fields of a body; raises UsageError, with a message that quotes nothing of it."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is no payload of {event}: {error}; set the webhook to JSON") from error
    except RecursionError as error:
        raise UsageError(f"the body is no payload of {event}: nested too deeply") from error


def moment(text: str | int | None) -> datetime.datetime | None:
    """A moment as the forges write it: ISO 8601, GitLab's `2015-05-17 18:08:09 UTC`, or seconds since the epoch.

    Raises UsageError for what is none.
    """
    if text is None:
        return None
    try:
        if isinstance(text, int):
            return datetime.datetime.fromtimestamp(text, datetime.timezone.utc)
        text = text.replace(" ", "T", 1) if text[10:11] == " " else text
        aware = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
        found: datetime.datetime = msgspec.convert(re.sub(r" (?:UTC|\+0000)\Z", "Z", text), type=aware)
        return found.astimezone(datetime.timezone.utc)
    except (msgspec.ValidationError, ValueError, OverflowError, OSError) as error:
        raise UsageError("the body holds a time that is none") from error
