"""The columns of one whole trace: what was called, launched, run and marked, in time order.

Times are microseconds from the first operator, call, activity or annotation. Absent numbers are -1 in identifiers and
sizes and NaN in figures; names, threads, signatures and collectives are numbers into the tuples beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from advisor.columns.schema import Collective, Signature

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


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


ROWS: Mapping[str, Any] = {
    "operators": OperatorRows,
    "calls": CallRows,
    "activities": ActivityRows,
    "ranges": RangeRows,
}
