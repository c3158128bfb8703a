"""Turns chunks of trace events into columns, one growing set of columns for each kind of event.

What a reader of profiles needs is kept: operator calls, launches, device activities, host ranges and modules. The
rest (Python frames, flows, instants, metadata) is only counted. Repeated texts are stored once.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, Union

import msgspec

from advisor.columns.schema import ANNOTATION, COLUMNS, KERNEL, MEMCPY, MEMSET, MODULE, WINDOW, Collective, Signature
from advisor.ingest.events import mended, scan, with_null

NOTHING = msgspec.Raw(b"")
_WORD = 1 << 63
Word = Annotated[int, msgspec.Meta(ge=-_WORD, le=_WORD - 1)]
NAN = float("nan")
FAR = 1e18  # microseconds; no clock counts so many

DEVICE = {
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), MEMCPY),
    **dict.fromkeys(("gpu_memset", "Memset"), MEMSET),
}
CALLS = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "Driver", "runtime"})
OPERATORS = frozenset({"cpu_op", "Operator"})
SKIPPED_LIMIT = 500_000  # each costs some microseconds
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


class _Frame(msgspec.Struct, gc=False, tag_field="cat", tag="python_function"):
    ph: str = ""
    name: str = ""
    pid: Word | str | None = None
    tid: Word | str | None = None
    ts: float = NAN
    dur: float | None = None


def _counted(category: str) -> Any:
    """The class of a category that is only counted: nothing else of its events is read."""
    return msgspec.defstruct("_Counted", [("ph", str, "")], tag_field="cat", tag=category, gc=False)


def _kept(category: str) -> Any:
    """The class of a category that is kept: the fields of `_Event`."""
    return msgspec.defstruct("_Kept", _FIELDS, tag_field="cat", tag=category, gc=False)


_FIELDS: list[Any] = [
    ("ph", str, ""),
    ("name", str, ""),
    ("pid", Word | str | None, None),
    ("tid", Word | str | None, None),
    ("ts", float, NAN),
    ("dur", float | None, None),
    ("args", msgspec.Raw, NOTHING),
]
_COUNTED = (
    *("ac2g", "async", "async_cpu_to_gpu", "async_gpu", "cpu_instant_event", "cuda_sync", "fwdbwd"),
    *("gpu_user_annotation", "overhead"),
)


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


class _Reader(NamedTuple):
    """Decodes the arguments of many events at once, or of one alone when those of another are damaged."""

    many: msgspec.json.Decoder[list[Any]]
    one: msgspec.json.Decoder[Any]
    lenient: msgspec.json.Decoder[Any]


def _reader(kind: type[Any]) -> _Reader:
    return _Reader(
        msgspec.json.Decoder(list[kind]),  # type: ignore[valid-type]
        msgspec.json.Decoder(kind),
        msgspec.json.Decoder(kind, strict=False),
    )


_EVENTS = _reader(_Event)
_CLASSES: Any = tuple(map(_counted, _COUNTED))
_ONLY_COUNTED: Any = msgspec.json.Decoder(Union[(*_CLASSES,)])
_KNOWN: Any = Union[(_Frame, *_CLASSES, *map(_kept, sorted(_KEPT)))]
_USUAL: Any = msgspec.json.Decoder(list[_KNOWN])  # half again as fast, where every event has one of these categories
_OPERATOR = _reader(_OperatorArguments)
_CALL = _reader(_CallArguments)
_ACTIVITY = _reader(_DeviceArguments)


Item = TypeVar("Item")


class _Codes(dict[Item, int]):
    """Numbers texts in the order of their first appearance; `size` is about the bytes they take."""

    size = 0

    def __missing__(self, item: Item) -> int:
        self[item] = number = len(self)
        self.size += sys.getsizeof(item) + (sum(sys.getsizeof(part) for part in item) if isinstance(item, tuple) else 0)
        return number


@dataclass
class Part:
    """The columns of some chunks and the texts their numbers stand for; times are microseconds as recorded.

    `counts` has the events by category, all phases; `skipped` counts events or places that could not be read. `torn`
    says that a chunk may not have been cut between events, `stopped` why not all chunks were taken.
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
    torn: bool = False
    stopped: str = ""


class Decoder:
    """Collects chunks into one `Part`, as long as they take no more than `limit_bytes`; `exact` as of `Events`."""

    def __init__(self, limit_bytes: int, *, exact: bool) -> None:
        self._limit_bytes = limit_bytes
        self._exact = exact
        self._part = Part()
        self._names: _Codes[str] = _Codes()
        self._threads: _Codes[tuple[Any, Any]] = _Codes()
        self._signatures: _Codes[tuple[bytes, bytes, bytes, bytes]] = _Codes()
        self._collectives: _Codes[Collective] = _Codes()

    def part(self) -> Part:
        """What the chunks held."""
        part = self._part
        part.names = list(self._names)
        part.threads = [(str(process), str(thread)) for process, thread in self._threads]
        part.signatures, part.collectives = [Signature(*item) for item in self._signatures], list(self._collectives)
        return part

    @property
    def done(self) -> bool:
        """Whether more chunks are of no use."""
        return self._part.torn or bool(self._part.stopped)

    def _size(self) -> int:
        rows = sum(values.itemsize * len(values) for table in self._part.tables.values() for values in table.values())
        return rows + self._names.size + self._threads.size + self._signatures.size + self._collectives.size

    def feed(self, chunk: bytes) -> None:
        """Add the events of a chunk `{...},{...}`; what cannot be read is counted, never raised."""
        if self._size() > self._limit_bytes:
            self._part.stopped = "its events take too much memory"
        if self._part.skipped > SKIPPED_LIMIT:
            self._part.stopped = "too many of its events cannot be read"
        if self._part.stopped:
            return
        usual = _usual(chunk)
        kept, modules = self._sorted(usual) if usual is not None else self._sorted_by_name(self._events(chunk))
        for category, events in kept.items():
            self._keep(category, _timed(events), len(events))
        modules = [event for event in modules if event.ph == "X" and event.name.startswith(MODULE_PREFIX)]
        self._ranges(_timed(modules), MODULE)

    def _sorted(self, events: Sequence[Any]) -> tuple[dict[str, list[Any]], list[Any]]:
        """Count events by category; those to keep, and those that may be modules."""
        by_kind: dict[Any, list[Any]] = defaultdict(list)
        for event in events:
            by_kind[event.__class__].append(event)
        part = self._part
        part.events += len(events)
        for kind, chosen in by_kind.items():
            category = kind.__struct_config__.tag
            part.counts[category] = part.counts.get(category, 0) + len(chosen)
        found = {kind.__struct_config__.tag: chosen for kind, chosen in by_kind.items()}
        kept = {name: [event for event in chosen if event.ph == "X"] for name, chosen in found.items() if name in _KEPT}
        return kept, [event for event in found.get("python_function", ()) if event.name[:3] == MODULE_PREFIX[:3]]

    def _sorted_by_name(self, events: Sequence[_Event]) -> tuple[dict[str, list[Any]], list[Any]]:
        """The same for events of any category, or of none."""
        part = self._part
        part.events += len(events)
        kept: dict[str, list[Any]] = {}
        modules = []
        for event in events:
            category = event.cat or f"phase {event.ph}"
            part.counts[category] = part.counts.get(category, 0) + 1
            if event.ph == "X" and event.cat in _KEPT:
                kept.setdefault(category, []).append(event)
            elif category == "python_function":
                modules.append(event)
        return kept, modules

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
            columns["thread"].extend([threads[event.pid, event.tid] for event in events])
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
                signatures[bytes(item.dims), bytes(item.types), bytes(item.concrete), bytes(item.strides)]
                for item in arguments
            ]
        )

    def _activities(self, events: Sequence[_Event], kind: int) -> None:
        events, arguments = self._arguments(events, _ACTIVITY)
        columns = self._common("activities", events)
        columns["kind"].extend([kind] * len(events))
        pairs = list(zip(events, arguments, strict=True))
        columns["device"].extend([item.device if item.device >= 0 else _number(event.pid) for event, item in pairs])
        columns["stream"].extend([item.stream if item.stream >= 0 else _number(event.tid) for event, item in pairs])
        for name in ("correlation", "registers", "shared", "occupancy", "blocks_per_sm", "bytes"):
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
            return _EVENTS.many.decode(b"[" + chunk + b"]")
        except (msgspec.DecodeError, RecursionError):
            mended = with_null(chunk)
        try:
            return _EVENTS.many.decode(b"[" + mended + b"]")
        except (msgspec.DecodeError, RecursionError):
            return list(self._one_by_one(mended))

    def _one_by_one(self, chunk: bytes) -> Iterable[_Event]:
        found = scan(chunk, last=True)
        if not self._exact and (found.cut or found.ended or found.wasted > len(chunk)):
            self._part.torn = True
            return
        self._part.skipped += found.skipped
        for text in found.events:
            event = _decoded(text, _EVENTS) or _counted_only(text)
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
            arguments = _decoded(b"{}" if text in (b"null", b"[]") else text, reader)
            if arguments is None:
                self._part.skipped += 1
            else:
                pairs.append((event, arguments))
        return [event for event, _ in pairs], [item for _, item in pairs]


def decode(chunks: Iterable[bytes], decoder: Decoder) -> Part:
    """The columns of some chunks, as far as the decoder takes them."""
    for chunk in chunks:
        decoder.feed(chunk)
        if decoder.done:
            break
    return decoder.part()


def _usual(chunk: bytes) -> list[Any] | None:
    """The events of a chunk whose categories are all known here, None when it holds anything else."""
    try:
        found: list[Any] = _USUAL.decode(b"[" + chunk + b"]")
    except (msgspec.DecodeError, RecursionError):
        return None
    return found


def _timed(events: list[Any]) -> list[Any]:
    """The events whose times can be right."""
    if not events:
        return events
    columns = [event.ts for event in events], [event.dur or 0.0 for event in events]
    # A sum is no number where a part is none: minimum and maximum do not tell.
    if all((total := sum(values)) - total == 0.0 and min(values) > -FAR and max(values) < FAR for values in columns):
        return events
    return [e for e in events if -FAR < e.ts < FAR and (e.dur is None or -FAR < e.dur < FAR)]


def _decoded(text: bytes, reader: _Reader) -> Any | None:
    """One item out of its text, if need be with numbers written as texts or characters that are none; else None."""
    try:
        return reader.one.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return reader.lenient.decode(text)
    except msgspec.ValidationError:  # a wrong type, which mending does not change
        return None
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return reader.lenient.decode(mended(text))
    except (ValueError, RecursionError):
        return None


def _counted_only(text: bytes) -> _Event | None:
    """An event of a category that is only counted, whatever else it holds."""
    try:
        found = _ONLY_COUNTED.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Event(ph=found.ph, cat=found.__struct_config__.tag)


def _number(lane: int | str | None) -> int:
    """Kineto writes the device of an activity as its process and the stream as its thread (output_json.cpp)."""
    return lane if isinstance(lane, int) and lane >= 0 else -1


def _sequence(number: int) -> int:
    """Gradient accumulators carry the largest unsigned number instead of a place in the sequence."""
    return number if 0 <= number < 1 << 62 else -1


def _size(sizes: list[int] | None, place: int) -> int:
    return sizes[place] if sizes is not None and place < len(sizes) else -1


def _collective(item: _DeviceArguments) -> Collective:
    return Collective(item.collective, item.elements, item.elements_out, item.dtype, item.group, item.group_size)
