"""Turns chunks of trace events into columns, one growing set of columns for each kind of event.

What a reader of profiles needs is kept: operator calls, launches, device activities, host ranges and modules. The
rest (Python frames, flows, instants, metadata) is only counted. Repeated texts are stored once.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from advisor.columns.table import ANNOTATION, COLUMNS, KERNEL, MEMCPY, MEMSET, MODULE, WINDOW, Collective, Signature
from advisor.ingest.events import NOT_A_NUMBER, scan

NOTHING = msgspec.Raw(b"")
_WORD = 1 << 63
Word = Annotated[int, msgspec.Meta(ge=-_WORD, le=_WORD - 1)]
NAN = float("nan")

DEVICE = {
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), MEMCPY),
    **dict.fromkeys(("gpu_memset", "Memset"), MEMSET),
}
CALLS = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "Driver", "runtime"})
OPERATORS = frozenset({"cpu_op", "Operator"})
MODULE_PREFIX = "nn.Module: "
_RANGE_NAME = re.compile(r"ProfilerStep#\d|Optimizer\.\w+#|enumerate\(DataLoader\)#|DistributedDataParallel\.|## ")
_KEPT = frozenset({*DEVICE, *CALLS, *OPERATORS, "user_annotation", "Trace"})


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: Word | str | None = None
    tid: Word | str | None = None
    ts: float = NAN
    dur: float | None = None
    args: msgspec.Raw = NOTHING


class _OperatorArguments(msgspec.Struct, gc=False):
    order: Word = msgspec.field(default=0, name="Ev Idx")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Word = msgspec.field(default=0, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    strides: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Strides")
    collective: str = msgspec.field(default="", name="Collective name")


class _CallArguments(msgspec.Struct, gc=False):
    correlation: Word = -1


class _DeviceArguments(msgspec.Struct, gc=False):
    correlation: Word = -1
    device: Word = -1
    stream: Word = -1
    grid: list[Word] | None = None
    block: list[Word] | None = None
    registers: Word = msgspec.field(default=-1, name="registers per thread")
    shared: Word = msgspec.field(default=-1, name="shared memory")
    occupancy: float = msgspec.field(default=NAN, name="est. achieved occupancy %")
    blocks_per_sm: float = msgspec.field(default=NAN, name="blocks per SM")
    bytes: float = NAN
    graph: Word = msgspec.field(default=-1, name="graph id")
    collective: str = msgspec.field(default="", name="Collective name")
    elements: float = msgspec.field(default=NAN, name="In msg nelems")
    elements_out: float = msgspec.field(default=NAN, name="Out msg nelems")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    group_size: Word = msgspec.field(default=-1, name="Group size")


Arguments = TypeVar("Arguments")


class _Reader(NamedTuple):
    """Decodes the arguments of many events at once, and of a damaged one alone."""

    many: msgspec.json.Decoder[list[Any]]
    one: Callable[[object], Any]
    empty: Any


def _reader(kind: type[Any]) -> _Reader:
    return _Reader(
        msgspec.json.Decoder(list[kind]),  # type: ignore[valid-type]
        lambda value: msgspec.convert(value, kind, strict=False),
        kind(),
    )


_EVENTS = msgspec.json.Decoder(list[_Event])
_OPERATOR = _reader(_OperatorArguments)
_CALL = _reader(_CallArguments)
_ACTIVITY = _reader(_DeviceArguments)


Item = TypeVar("Item")


class _Codes(dict[Item, int]):
    """Numbers texts in the order of their first appearance."""

    def __missing__(self, item: Item) -> int:
        self[item] = number = len(self)
        return number


@dataclass
class Part:
    """The columns of some chunks and the texts their numbers stand for; times are microseconds as recorded.

    `counts` has the events by category, all phases; `skipped` counts events or places that could not be read.
    """

    tables: dict[str, dict[str, array[Any]]] = field(
        default_factory=lambda: {
            table: {column: array(code) for column, code in columns.items()} for table, columns in COLUMNS.items()
        }
    )
    names: list[str] = field(default_factory=list)
    threads: list[tuple[str, str]] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    events: int = 0
    skipped: int = 0


class Decoder:
    """Collects chunks into one `Part`."""

    def __init__(self) -> None:
        self._part = Part()
        self._names: _Codes[str] = _Codes()
        self._threads: _Codes[tuple[str, str]] = _Codes()
        self._signatures: _Codes[Signature] = _Codes()
        self._collectives: _Codes[Collective] = _Codes()

    def part(self) -> Part:
        """What the chunks held."""
        part = self._part
        part.names, part.threads = list(self._names), list(self._threads)
        part.signatures, part.collectives = list(self._signatures), list(self._collectives)
        return part

    def feed(self, chunk: bytes) -> None:
        """Add the events of a chunk `{...},{...}`; what cannot be read is counted, never raised."""
        events = self._events(chunk)
        part = self._part
        part.events += len(events)
        kept: dict[str, list[_Event]] = {}
        for event in events:
            category = event.cat
            if event.ph == "X" and category is not None:
                kept.setdefault(category, []).append(event)
            else:
                key = category or f"phase {event.ph}"
                part.counts[key] = part.counts.get(key, 0) + 1
        for category, chosen in kept.items():
            part.counts[category] = part.counts.get(category, 0) + len(chosen)
            if category in _KEPT:
                self._keep(category, [event for event in chosen if _timed(event)], len(chosen))
            elif category == "python_function":
                modules = [event for event in chosen if event.name.startswith(MODULE_PREFIX) and _timed(event)]
                self._ranges(modules, MODULE)

    def _keep(self, category: str, events: list[_Event], total: int) -> None:
        self._part.skipped += total - len(events)
        if category in DEVICE:
            self._activities(events, DEVICE[category])
        elif category in CALLS:
            self._calls(events)
        elif category in OPERATORS:
            named = [_RANGE_NAME.match(event.name) is not None for event in events]
            self._ranges([event for event, found in zip(events, named, strict=True) if found], ANNOTATION)
            self._operators([event for event, found in zip(events, named, strict=True) if not found])
        else:
            self._ranges(events, WINDOW if category == "Trace" else ANNOTATION)

    # -- columns

    def _common(self, table: str, events: Sequence[_Event]) -> dict[str, array[Any]]:
        columns = self._part.tables[table]
        names = self._names
        columns["name"].extend([names[event.name] for event in events])
        columns["start"].extend([event.ts for event in events])
        columns["duration"].extend([event.dur or 0.0 for event in events])
        if "thread" in columns:
            threads = self._threads
            columns["thread"].extend([threads[str(event.pid), str(event.tid)] for event in events])
        return columns

    def _ranges(self, events: Sequence[_Event], kind: int) -> None:
        columns = self._common("ranges", events)
        columns["kind"].extend([kind] * len(events))

    def _calls(self, events: Sequence[_Event]) -> None:
        events, arguments = self._arguments(events, _CALL)
        columns = self._common("calls", events)
        columns["correlation"].extend([item.correlation for item in arguments])

    def _operators(self, events: Sequence[_Event]) -> None:
        events, arguments = self._arguments(events, _OPERATOR)
        columns = self._common("operators", events)
        signatures = self._signatures
        columns["order"].extend([item.order for item in arguments])
        columns["sequence"].extend([_sequence(item.sequence) for item in arguments])
        columns["forward_thread"].extend([item.forward_thread for item in arguments])
        columns["signature"].extend(
            [
                signatures[Signature(bytes(item.dims), bytes(item.types), bytes(item.concrete), bytes(item.strides))]
                for item in arguments
            ]
        )

    def _activities(self, events: Sequence[_Event], kind: int) -> None:
        events, arguments = self._arguments(events, _ACTIVITY)
        columns = self._common("activities", events)
        columns["kind"].extend([kind] * len(events))
        for name in ("device", "stream", "correlation", "registers", "shared", "occupancy", "blocks_per_sm", "bytes"):
            columns[name].extend([getattr(item, name) for item in arguments])
        columns["graph"].extend([item.graph for item in arguments])
        for place, axis in enumerate("xyz"):
            columns[f"grid_{axis}"].extend([_size(item.grid, place) for item in arguments])
            columns[f"block_{axis}"].extend([_size(item.block, place) for item in arguments])
        collectives = self._collectives
        columns["collective"].extend([collectives[_collective(item)] if item.collective else -1 for item in arguments])

    # -- reading

    def _events(self, chunk: bytes) -> list[_Event]:
        try:
            return _EVENTS.decode(b"[" + chunk + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        repaired = NOT_A_NUMBER.sub(b": null", chunk)
        try:
            return _EVENTS.decode(b"[" + repaired + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return list(self._one_by_one(repaired))

    def _one_by_one(self, chunk: bytes) -> Iterable[_Event]:
        found = scan(chunk.decode("utf-8", errors="replace"), last=True)
        self._part.skipped += found.skipped
        for text in found.events:
            event = _lenient(text)
            if event is None:
                self._part.skipped += 1
            else:
                yield event

    def _arguments(self, events: Sequence[_Event], reader: _Reader) -> tuple[Sequence[_Event], list[Any]]:
        """The arguments of events, and the events whose arguments could be read."""
        texts = [bytes(event.args) or b"{}" for event in events]
        try:
            return events, reader.many.decode(b"[" + b",".join(texts) + b"]")
        except (msgspec.DecodeError, RecursionError):
            pass
        pairs = []
        for event, text in zip(events, texts, strict=True):
            try:
                pairs.append((event, reader.one(json.loads(text) or {})))
            except (msgspec.ValidationError, ValueError, RecursionError, OverflowError):
                self._part.skipped += 1
        return [event for event, _ in pairs], [item for _, item in pairs]


def _timed(event: _Event) -> bool:
    return -1e18 < event.ts < 1e18 and (event.dur is None or -1e18 < event.dur < 1e18)


def _lenient(text: str) -> _Event | None:
    """An event with numbers written as texts or without its optional parts; None when its time cannot be read."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            return None
        arguments = value.pop("args", None)
        event = msgspec.convert(value, _Event, strict=False)
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError):
        return None
    if isinstance(arguments, dict):
        event.args = msgspec.Raw(json.dumps(arguments).encode())
    return event


def _sequence(number: int) -> int:
    """Gradient accumulators carry the largest unsigned number instead of a place in the sequence."""
    return number if 0 <= number < 1 << 62 else -1


def _size(sizes: list[int] | None, place: int) -> int:
    return sizes[place] if sizes is not None and place < len(sizes) else -1


def _collective(item: _DeviceArguments) -> Collective:
    return Collective(item.collective, item.elements, item.elements_out, item.dtype, item.group, item.group_size)
