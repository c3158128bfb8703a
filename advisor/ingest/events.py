"""Cuts the text of a Chrome trace into chunks of whole events, whatever stands before and after them.

Kineto writes `{ "ph"` first in every event, and that sequence cannot occur inside a JSON string, where quotes are
escaped: searching backwards for it finds a boundary at once, unless the arguments of an event hold such objects, too.
Whoever decodes the chunks notices when a cut was none (`Scan.cut`); reading exactly, event by event, is the way then,
and for text laid out otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from advisor.errors import ArtifactError

HEAD_LIMIT_BYTES = 64 << 20  # what may stand before the events
EVENT_LIMIT_BYTES = 4 << 20  # longest event; read one by one, an event takes up to 20 times its size in memory
TAIL_LIMIT_BYTES = 64 << 20
WASTE_LIMIT = 32 << 20  # characters of damaged events that are looked at, some of them more than once
VALUE_LIMIT_BYTES = 4 << 20  # longest text that is made objects of

HEAD = (  # of what a document says besides its events: nothing that names people, paths or machines
    "schemaVersion",
    "deviceProperties",
    "computeProperties",
    "distributedInfo",
    "cuda_runtime_version",
    "cuda_driver_version",
    "hip_runtime_version",
    "hip_driver_version",
    "record_shapes",
    "with_stack",
)
_NOTHING = msgspec.Raw(b"")
_HEAD = msgspec.json.Decoder(
    msgspec.defstruct("_Head", [(name, msgspec.Raw, _NOTHING) for name in (*HEAD, "traceEvents")])
)

_ANY = msgspec.json.Decoder(Any)

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_SCANNER = json.JSONDecoder(strict=False, parse_int=float)  # control characters and any number of digits
_LENIENT = json.JSONDecoder(strict=False)
_SPACE = b" \t\r\n"

# Kineto writes bytes divided by a duration of 0. A quote before the colon that no backslash escapes closes a key: no
# such text is inside a string, and an opening quote stands behind a separator.
_NOT_A_NUMBER = re.compile(rb'"(?<![\\\s:,\[{]")\s*:\s*[-+]?(?:inf|nan|Infinity|NaN)(?=\s*[,}])')


def with_null(text: bytes) -> bytes:
    """The text with null for values that JSON has no number for."""
    return _NOT_A_NUMBER.sub(b'": null', text)


def mended(text: bytes) -> bytes:
    """The text of the same JSON value without what only some readers accept: control characters, halves of surrogate
    pairs, bytes that are no UTF-8. Raises ValueError or RecursionError for what is no JSON.
    """
    value = _LENIENT.decode(text.decode("utf-8", "replace"))
    return with_null(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


class Events:
    """The events of one trace, in chunks.

    `chunks` yields texts like `{...},{...}` of whole events. Afterwards `head` holds what the document says besides
    its events, and `lost` what could not be read. With `exact` no place to cut is taken on trust.
    """

    def __init__(self, name: str, blocks: Iterable[bytes], *, exact: bool = False) -> None:
        self._name = name
        self._blocks = iter(blocks)
        self._exact = exact
        self._in_object = False
        self._wasted = 0
        self.head: dict[str, Any] = {}
        self.lost: list[str] = []
        self.skipped = 0  # pieces of text between events that are no event

    def chunks(self) -> Iterator[bytes]:
        """Chunks of whole events; raises ArtifactError when there is no list of events."""
        text = self._open()
        ended = False
        for block in self._blocks:
            text += block
            cut = -1 if self._exact else _boundary(text)
            if cut > 0:
                yield text[:cut]
                text = text[cut + 1 :]
            elif self._exact or len(text) > EVENT_LIMIT_BYTES or not _kineto_like(text):
                found, text, ended = self._whole(text)
                if found:
                    yield found
                if ended:
                    break
                if self._wasted > WASTE_LIMIT:
                    self.lost.append("it is damaged in too many places and is not read on")
                    return
        if not ended:
            found, text, ended = self._whole(text, last=True)
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
            match = _ARRAY.search(start)
            if match and start[:1] == b"{":
                self._in_object = True
                self._read_head(start[: match.end()] + b"]}", "before")
                return start[match.end() :]
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

    def _whole(self, text: bytes, *, last: bool = False) -> tuple[bytes, bytes, bool]:
        """Whole events at the start of a text, what is left, and whether the list ended there."""
        found = scan(with_null(text), last=last)
        self.skipped += found.skipped
        self._wasted += found.wasted
        note = f"an event is longer than {EVENT_LIMIT_BYTES >> 20} MiB"
        if found.long and note not in self.lost:
            self.lost.append(note)
        return b",".join(found.events), found.rest, found.ended

    def _close(self, text: bytes) -> None:
        for block in self._blocks:
            text += block
            if len(text) > TAIL_LIMIT_BYTES:
                self.lost.append("what stands after the events is too long and was not read")
                return
        rest = text.strip(_SPACE)
        if rest == (b"}" if self._in_object else b""):
            return
        if not rest:
            self.lost.append("truncated: the text ends right after the events")
        elif self._in_object:
            self._read_head(b"{" + rest.lstrip(b"," + _SPACE), "after")
        else:
            self.lost.append("what stands after the events cannot be read")

    def _read_head(self, text: bytes, where: str) -> None:
        """Keep what `HEAD` names; the rest is passed over without an object made of it."""
        values: Any = _decoded(_HEAD, with_null(text))
        if values is None:
            self.lost.append(f"what stands {where} the events cannot be read")
            return
        if where == "after" and bytes(values.traceEvents):
            self.lost.append("a second list of traceEvents was not read")
        for name in HEAD:
            text = bytes(getattr(values, name))
            value = _decoded(_ANY, text) if len(text) <= VALUE_LIMIT_BYTES else None
            if value is not None:
                self.head[name] = value
            elif text not in (b"", b"null"):
                self.lost.append(f"{name} cannot be read")


def _decoded(decoder: msgspec.json.Decoder[Any], text: bytes) -> Any | None:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        if len(text) > VALUE_LIMIT_BYTES:
            return None
    try:
        return decoder.decode(mended(text))
    except (ValueError, RecursionError):
        return None


class Scan(NamedTuple):
    """What a text holds: the texts of whole events, what follows them, whether the list ended, damaged places.

    `cut` says that an event goes on where the text ends, `long` that one is longer than the limit; `wasted` is how many
    characters were read in vain.
    """

    events: list[bytes]
    rest: bytes
    ended: bool
    skipped: int
    cut: bool
    long: bool
    wasted: int


_WINDOW = 1 << 14  # telling where a text is damaged costs as much as the text is long


def scan(text: bytes, *, last: bool) -> Scan:
    """Read a text event by event; damaged text is skipped up to the next event that can be read.

    Unless this is the `last` text, an event that is not whole stays in `rest`, because more may come.
    """
    whole = text.decode("utf-8", "surrogateescape")  # lossless, also for what is no UTF-8
    found: list[bytes] = []
    place, skipped, wasted, long, rest = 0, 0, 0, False, ""
    while True:
        if len(rest) > EVENT_LIMIT_BYTES:  # it is too long, or is not closed and holds all that follow
            long, skipped, wasted = True, skipped + 1, wasted + len(rest)
            following = _following_events(rest, 1, first=True)
            rest = rest[following[0] :] if following else ""
        window = rest + whole[place : place + max(_WINDOW, min(len(rest), EVENT_LIMIT_BYTES - len(rest)))]
        place += len(window) - len(rest)
        final = place >= len(whole)
        part = _scan_window(window, last=last and final)
        found += [event.encode("utf-8", "surrogateescape") for event in part.events]
        skipped += part.skipped
        wasted += part.wasted
        if part.ended or final:
            after = (part.rest + whole[place:]).encode("utf-8", "surrogateescape")
            return Scan(found, after, part.ended, skipped, part.cut, long, wasted)
        rest = part.rest


class _Window(NamedTuple):
    events: list[str]
    rest: str
    ended: bool
    skipped: int
    cut: bool
    wasted: int


def _scan_window(text: str, *, last: bool) -> _Window:
    found: list[str] = []
    place, skipped, cut, wasted = 0, 0, False, 0
    patience = 64 + len(text) // 64  # so that damage costs linear time
    while True:
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if place >= len(text):
            return _Window(found, "", False, skipped, cut, wasted)
        if text[place] == "]":
            return _Window(found, text[place + 1 :], True, skipped, cut, wasted)
        end, reached = _event_end(text, place)
        if end is not None:
            if not cut or _is_event(text[place:end]):
                found.append(text[place:end])
            place = end
            continue
        goes_on = reached >= len(text) - _TOKEN
        if goes_on and not last:
            return _Window(found, text[place:], False, skipped, True, wasted)
        counted = not cut  # what is in an event that goes on is not damaged, too
        cut |= goes_on
        wasted += _LOOK + reached - place
        patience -= 1 + (reached - place) // 64
        following = _following_events(text, place + 1, first=patience > 0)
        if not following:
            return _Window(found, "" if last else text[place:], False, skipped + (last and counted), cut, wasted)
        skipped += counted * len(following)
        place = following[-1]


_BETWEEN = re.compile(r"[ \t\r\n,]*")
_LOOK = 32  # characters that could be read in the time that finding the next event takes
_TOKEN = 16  # characters; an error this near to the end may be a word or number that goes on


def _event_end(text: str, place: int) -> tuple[int | None, int]:
    """Where the object that begins at a place ends, None when it is damaged or not whole; how far it can be read."""
    if text[place] != "{":
        return None, place
    try:
        end = _SCANNER.raw_decode(text, place)[1]
    except json.JSONDecodeError as error:
        return None, len(text) if error.msg.startswith("Unterminated string") else error.pos
    except RecursionError:
        return None, len(text) - _TOKEN - 1  # it may have been read to here
    return end, end


_EVENT = re.compile(r'\{\s*"(?:(?:ph|name|cat)"\s*:\s*"|(?:ts|dur|pid|tid|id|args)"\s*:)')
_NAME, _PHASE = re.compile(r'"name"\s*:\s*"'), re.compile(r'"ph"\s*:\s*"')


def _is_event(text: str) -> bool:
    """Whether an object that may stand in the arguments of an event that is cut is an event itself."""
    return _NAME.search(text) is not None and _PHASE.search(text) is not None


def _following_events(text: str, place: int, *, first: bool) -> list[int]:
    """Where the next event may begin, else where all that follow do; a value of a key is none."""
    found = []
    for match in _EVENT.finditer(text, place):
        before = match.start() - 1
        while before > 0 and text[before] in " \t\r\n":
            before -= 1
        if text[before] not in ":[":
            found.append(match.start())
            if first:
                break
    return found


def _kineto_like(text: bytes) -> bool:
    return text[:4096].lstrip(b"," + _SPACE)[1:].lstrip(_SPACE)[:4] == b'"ph"'


def _boundary(text: bytes) -> int:
    """Place of the comma before the last event that begins in a text, -1 where none is near its end."""
    place = text.rfind(b'"ph"')
    for _ in range(_TRIES):
        brace = text.rfind(b"{", 0, max(place, 0))
        comma = text.rfind(b",", 0, brace) if brace > 0 else -1
        if comma < 0:
            return -1
        if not text[brace + 1 : place].strip(_SPACE) and not text[comma + 1 : brace].strip(_SPACE):
            return comma
        place = text.rfind(b'"ph"', 0, place)
    return -1


_TRIES = 16
