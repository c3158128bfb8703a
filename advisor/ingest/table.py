"""The columns of one whole trace: what was called, launched, run and marked, in time order.

Times are microseconds from the first operator, call, activity or annotation. Absent numbers are -1 in identifiers and
sizes and NaN in figures; names, threads, signatures and collectives are numbers into the tuples beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from advisor.ingest.decode import ANNOTATION, COLUMNS, Collective, Part, Signature

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_TYPES: Mapping[str, Any] = {"i": np.int32, "q": np.int64, "d": np.float64, "b": np.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRows:
    """Calls of operators on the host; an outer call comes before what it calls.

    `thread` is a number into the table's threads, `sequence` the autograd sequence number, `forward_thread` is not 0
    in the backward pass, `order` is the profiler's own numbering, `signature` tells the recorded inputs.
    """

    name: Ints
    start: Floats
    duration: Floats
    thread: Ints
    order: Ints
    sequence: Ints
    forward_thread: Ints
    signature: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRows:
    """Calls of the device's runtime and driver; an activity carries the correlation id of the call that launched it."""

    name: Ints
    start: Floats
    duration: Floats
    thread: Ints
    correlation: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityRows:
    """What ran on a device: `kind` is KERNEL, MEMCPY or MEMSET of `decode`.

    `grid_*` and `block_*` are the launch's dimensions, `registers` per thread, `shared` bytes per block,
    `occupancy` (percent) and `blocks_per_sm` as the profiler estimated them, `bytes` of a copy, `graph` the id of the
    device graph that was replayed.
    """

    name: Ints
    start: Floats
    duration: Floats
    kind: Ints
    device: Ints
    stream: Ints
    correlation: Ints
    graph: Ints
    grid_x: Ints
    grid_y: Ints
    grid_z: Ints
    block_x: Ints
    block_y: Ints
    block_z: Ints
    registers: Ints
    shared: Ints
    occupancy: Floats
    blocks_per_sm: Floats
    bytes: Floats
    collective: Ints

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Floats:
        """End of each activity in microseconds."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRows:
    """Named stretches of host time: `kind` is ANNOTATION, MODULE or WINDOW of `decode`."""

    name: Ints
    start: Floats
    duration: Floats
    thread: Ints
    kind: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One trace. `origin_us` is the time of its first kept event as recorded.

    `head` is what the document says of devices and ranks; `counts` has the events by category; `lost` says what could
    not be read, `skipped` how many single events.
    """

    operators: OperatorRows
    calls: CallRows
    activities: ActivityRows
    ranges: RangeRows
    names: tuple[str, ...] = ()
    threads: tuple[tuple[str, str], ...] = ()  # process, thread
    signatures: tuple[Signature, ...] = ()
    collectives: tuple[Collective, ...] = ()
    origin_us: float = 0.0
    events: int = 0
    skipped: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    head: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def named(self, rows: Ints) -> list[str]:
        """The texts of name numbers."""
        return [self.names[number] for number in rows.tolist()]


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
Rows = TypeVar("Rows", OperatorRows, CallRows, ActivityRows, RangeRows)
TABLES: Mapping[str, Any] = {
    "operators": OperatorRows,
    "calls": CallRows,
    "activities": ActivityRows,
    "ranges": RangeRows,
}
_ORDER = {  # the last key decides first
    "operators": ("order", "thread", "-duration", "start"),
    "calls": ("duration", "correlation", "thread", "start"),
    "activities": ("name", "duration", "correlation", "stream", "device", "start"),
    "ranges": ("name", "thread", "-duration", "start"),
}


def assemble(parts: Sequence[Part], head: Mapping[str, Any], lost: Sequence[str]) -> Table:
    """Merge the columns of all chunks; the result does not depend on the order of the events."""
    names = _Merged([part.names for part in parts])
    threads = _Merged([part.threads for part in parts])
    signatures = _Merged([part.signatures for part in parts])
    collectives = _Merged([part.collectives for part in parts])
    numbered = {"name": names, "thread": threads, "signature": signatures, "collective": collectives}
    columns = {table: _columns(parts, table, numbered) for table in COLUMNS}
    origin = _origin(columns)
    for column in columns.values():
        column["start"] -= origin
    counts: dict[str, int] = {}
    for part in parts:
        for category, count in part.counts.items():
            counts[category] = counts.get(category, 0) + count
    return Table(
        **{table: TABLES[table](**_sorted(column, _ORDER[table])) for table, column in columns.items()},
        names=tuple(names.items),
        threads=tuple(threads.items),
        signatures=tuple(signatures.items),
        collectives=tuple(collectives.items),
        origin_us=origin,
        events=sum(part.events for part in parts),
        skipped=sum(part.skipped for part in parts),
        counts=dict(sorted(counts.items())),
        head={key: head[key] for key in HEAD if key in head},
        lost=tuple(lost),
    )


def _origin(columns: Mapping[str, Any]) -> float:
    """The earliest event; windows and modules may begin before anything is recorded."""
    marked = columns["ranges"]["start"][columns["ranges"]["kind"] == ANNOTATION]
    starts = [marked, *(columns[table]["start"] for table in ("operators", "calls", "activities"))]
    known = [float(values.min()) for values in starts if len(values)]
    return min(known, default=0.0)


class _Merged:
    """The texts of several parts as one sorted list, and for each part where its own went."""

    def __init__(self, lists: Sequence[Sequence[Any]]) -> None:
        self.items: list[Any] = sorted({item for items in lists for item in items}, key=repr)
        places = {item: place for place, item in enumerate(self.items)}
        self.places = [np.array([places[item] for item in items] + [-1], dtype=np.int32) for items in lists]


def _columns(parts: Sequence[Part], table: str, numbered: Mapping[str, _Merged]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, code in COLUMNS[table].items():
        pieces = [np.array(part.tables[table][column], dtype=_TYPES[code]) for part in parts]
        if column in numbered:  # -1 stays -1: it addresses the last place
            pieces = [numbered[column].places[place][piece] for place, piece in enumerate(pieces)]
        found[column] = np.concatenate(pieces) if pieces else np.empty(0, dtype=_TYPES[code])
        for part in parts:
            del part.tables[table][column]
    return found


def _sorted(columns: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    order = np.lexsort([-columns[key[1:]] if key.startswith("-") else columns[key] for key in keys])
    return {name: values[order] for name, values in columns.items()}


def column_names(kind: type[Any]) -> tuple[str, ...]:
    """The columns of a class of rows, in order."""
    return tuple(item.name for item in fields(kind))
