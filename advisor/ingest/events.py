"""Cuts the text of a Chrome trace into chunks of whole events, whatever stands before and after them.

Kineto writes `{ "ph"` first in every event, and that sequence cannot occur inside a JSON string, where quotes are
escaped, nor in the arguments it writes: searching backwards for it finds a boundary exactly. Text laid out otherwise
is read event by event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from advisor.errors import ArtifactError

HEAD_LIMIT_BYTES = 64 << 20  # what may stand before the events
EVENT_LIMIT_BYTES = 32 << 20  # longest event
TAIL_LIMIT_BYTES = 64 << 20

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_SCANNER = json.JSONDecoder()
NOT_A_NUMBER = re.compile(rb":\s*-?(?:inf|nan|Infinity|NaN)\b")  # Kineto writes bytes divided by a duration of 0
_SPACE = b" \t\r\n"


class Events:
    """The events of one trace, in chunks.

    `chunks` yields texts like `{...},{...}` of whole events. Afterwards `head` holds what the document says besides
    its events, and `lost` what could not be read.
    """

    def __init__(self, name: str, blocks: Iterable[bytes]) -> None:
        self._name = name
        self._blocks = iter(blocks)
        self.head: dict[str, Any] = {}
        self.lost: list[str] = []
        self.skipped = 0  # pieces of text between events that are no event

    def chunks(self) -> Iterator[bytes]:
        """Chunks of whole events; raises ArtifactError when there is no list of events."""
        text = self._open()
        ended = False
        for block in self._blocks:
            text += block
            cut = _boundary(text)
            if cut > 0:
                yield text[:cut]
                text = text[cut + 1 :]
            elif len(text) > EVENT_LIMIT_BYTES or not _kineto_like(text):
                found, text, ended = self._whole(text)
                if found:
                    yield found
                if ended:
                    break
                if len(text) > EVENT_LIMIT_BYTES:
                    self.lost.append(f"an event is longer than {EVENT_LIMIT_BYTES >> 20} MiB")
                    return
        found, text, ended = self._whole(text, last=True) if not ended else (b"", text, True)
        if found:
            yield found
        if ended:
            self._close(text)
        else:
            self.lost.append("truncated: the text ends inside the list of events")

    def _open(self) -> bytes:
        """The text after the opening bracket of the list of events."""
        text = b""
        for block in self._blocks:
            text += block
            start = text.lstrip(b"\xef\xbb\xbf" + _SPACE)
            if start[:1] == b"[":
                return start[1:]
            match = _ARRAY.search(text)
            if match:
                self._read_head(text[: match.end()] + b"]}")
                return text[match.end() :]
            if start and start[:1] != b"{":
                raise ArtifactError(f"{self._name} is no JSON: give a trace that torch.profiler exported")
            if len(text) > HEAD_LIMIT_BYTES:
                break
        raise ArtifactError(self._foreign(text))

    def _foreign(self, text: bytes) -> str:
        if not text.strip():
            return f"{self._name} is empty: record the run again"
        if b"rocprofiler-sdk-tool" in text[:4096]:
            return (
                f"{self._name} is an export of rocprofv3, not of torch.profiler: record with torch.profiler, which "
                "uses roctracer on AMD"
            )
        return f"{self._name} has no list of traceEvents: give a trace that torch.profiler exported"

    def _read_head(self, text: bytes) -> None:
        try:
            head = json.loads(NOT_A_NUMBER.sub(b": null", text))
        except (ValueError, RecursionError):
            self.lost.append("what stands before the events cannot be read")
            return
        if isinstance(head, dict):
            head.pop("traceEvents", None)
            self.head.update(head)

    def _whole(self, text: bytes, *, last: bool = False) -> tuple[bytes, bytes, bool]:
        """Whole events at the start of a text, what is left, and whether the list ended there."""
        found = scan(NOT_A_NUMBER.sub(b": null", text).decode("utf-8", errors="replace"), last=last)
        self.skipped += found.skipped
        return ",".join(found.events).encode(), found.rest.encode(), found.ended

    def _close(self, text: bytes) -> None:
        for block in self._blocks:
            text += block
            if len(text) > TAIL_LIMIT_BYTES:
                self.lost.append("what stands after the events is too long and was not read")
                return
        rest = text.strip(_SPACE)
        if rest in (b"", b"}"):
            if not rest and self.head:
                self.lost.append("truncated: the text ends right after the events")
            return
        try:
            tail = json.loads(b"{" + NOT_A_NUMBER.sub(b": null", rest.lstrip(b"," + _SPACE)))
        except (ValueError, RecursionError):
            self.lost.append("what stands after the events cannot be read")
            return
        self.head.update(tail)


class Scan(NamedTuple):
    """What a text holds: the texts of whole events, what follows them, whether the list ended, damaged places."""

    events: list[str]
    rest: str
    ended: bool
    skipped: int


def scan(text: str, *, last: bool) -> Scan:
    """Read a text event by event; damaged text is skipped up to the next event that can be read.

    Unless this is the `last` text, an event that is not whole stays in `rest`, because more may come.
    """
    found: list[str] = []
    place, skipped = 0, 0
    while True:
        place = _skip(text, place)
        if place >= len(text):
            return Scan(found, "", False, skipped)
        if text[place] == "]":
            return Scan(found, text[place + 1 :], True, skipped)
        end = _event_end(text, place)
        if end is not None:
            found.append(text[place:end])
            place = end
            continue
        following = _next_event(text, place + 1, skipped)
        if following is None:
            return Scan(found, "" if last else text[place:], False, skipped + last)
        skipped += 1
        place = following


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    return place


def _event_end(text: str, place: int) -> int | None:
    """Where the object that begins at a place ends, None when it is damaged or not whole."""
    if text[place] != "{":
        return None
    try:
        return _SCANNER.raw_decode(text, place)[1]
    except (ValueError, RecursionError):
        return None


_EVENT = re.compile(r'\{\s*"(?:ph|name|cat|ts|pid)"\s*:')
_PATIENCE = 64  # every damaged event can cost a look at all of the text


def _next_event(text: str, place: int, failures: int) -> int | None:
    """Where the next event may begin; after many failures the last one, so that damage costs linear time."""
    match = _EVENT.search(text, place)
    if match is None or failures < _PATIENCE:
        return match.start() if match else None
    starts = [found.start() for found in _EVENT.finditer(text, place)]
    return starts[-1] if failures == _PATIENCE else None


def _kineto_like(text: bytes) -> bool:
    return text[:4096].lstrip(b"," + _SPACE)[1:].lstrip(_SPACE)[:4] == b'"ph"'


def _boundary(text: bytes) -> int:
    """Place of the comma before the last event that begins in a text, -1 where none is certain."""
    place = text.rfind(b'"ph"')
    while place > 0:
        brace = text.rfind(b"{", 0, place)
        comma = text.rfind(b",", 0, brace) if brace > 0 else -1
        if comma > 0 and not text[brace + 1 : place].strip(_SPACE) and not text[comma + 1 : brace].strip(_SPACE):
            return comma
        place = text.rfind(b'"ph"', 0, place)
    return -1


def properties(head: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """The first of some lists of objects that a document has."""
    for name in names:
        value = head.get(name)
        if isinstance(value, list):
            return [item for item in value if isinstance(item, dict)]
    return []
