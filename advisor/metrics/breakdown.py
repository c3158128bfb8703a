"""What one device did at every moment: compute, communication, copies, and idle time by what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.columns.intervals import (
    NO_INTERVALS,
    Intervals,
    complement,
    covered,
    intersection,
    intervals,
    length,
    merged,
    without,
)
from advisor.columns.schema import KERNEL
from advisor.columns.table import Floats, Ints, Table
from advisor.measured import Breakdown
from advisor.metrics.hosttime import COMMUNICATION, DATA, LAUNCH, SYNC, host_time
from advisor.metrics.totals import communicates

QUEUED, OTHER = "queued", "other"
LATENCY_US = 100.0  # more than any launch needs to reach an idle device
CAUSES = (DATA, COMMUNICATION, SYNC, LAUNCH, QUEUED, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phases:
    """The windows of one device, cut into disjoint stretches by what it did; microseconds.

    A moment counts for the first of these that covers it: `compute` (kernels that do not communicate), `comm`
    (collectives that nothing hides), `copy` (copies and memsets that nothing hides), `idle`. `idle` has every cause.
    """

    windows: Intervals
    compute: Intervals
    comm: Intervals
    copy: Intervals
    idle: Mapping[str, Intervals]

    def total(self) -> Breakdown:
        """All windows together."""
        idle = {cause: length(found) for cause, found in self.idle.items()}
        return Breakdown(
            length_us=length(self.windows),
            compute_us=length(self.compute),
            exposed_comm_us=length(self.comm),
            exposed_copy_us=length(self.copy),
            idle_us=sum(idle.values()),
            idle_by_cause_us=idle,
        )

    def each(self) -> tuple[Breakdown, ...]:
        """Each window on its own."""
        parts = [covered(found, *self.windows.T) for found in (self.compute, self.comm, self.copy)]
        causes = np.array([covered(found, *self.windows.T) for found in self.idle.values()]).T
        return tuple(
            Breakdown(
                length_us=float(end - begin),
                compute_us=float(compute),
                exposed_comm_us=float(comm),
                exposed_copy_us=float(copy),
                idle_us=float(idle.sum()),
                idle_by_cause_us=dict(zip(self.idle, idle.tolist(), strict=True)),
            )
            for (begin, end), compute, comm, copy, idle in zip(self.windows, *parts, causes, strict=True)
        )


def breakdown(
    table: Table, calls: Ints, windows: Intervals | None = None, device: int | None = None
) -> Breakdown | None:
    """The sum over some windows of one device, as `phases` splits them; None where `phases` is None."""
    found = phases(table, calls, windows, device)
    return None if found is None else found.total()


def phases(table: Table, calls: Ints, windows: Intervals | None = None, device: int | None = None) -> Phases | None:
    """Split windows [n, 2] of a device, disjoint and in order (default: from its first activity to its last).

    `calls` comes from `launching_calls`; `device` is that which was active longest unless given. None where the trace
    has no activity of it or no window has a length; windows without a length are left out.

    Idle time is put down to what the thread did that launched the next activity of the device: that launch is what the
    device waits for. Moment by moment the first of these that holds counts:

    - data: the thread waits for the data loader;
    - communication: it waits in a barrier or for a collective that runs on the host;
    - sync: it waits for the device in a synchronising call, or in a copy that returns when it is done;
    - launch: it is inside an operator or a call of the runtime, so the device waits for work that is being issued;
      what is left of the gap when the launch has returned counts as launch, too: it is the latency of that launch;
    - queued: the launch had returned before the device ran dry, so the gap is one between queued activities; and what
      is left when the launch has returned where that is more than 100 us, since no launch takes that long to arrive;
    - other: nothing is recorded of the thread (Python between operators, code without annotation). Before that is said,
      the first four are tried on all threads that launch: autograd's own thread, say, has nothing to do until the
      thread that called `backward` comes to it. Other also stands in front of activities without a recorded launch.
    """
    rows = table.activities
    if not len(rows):
        return None
    mine = rows.device == (busiest_device(table) if device is None else device)
    spans = intervals(rows.start[mine], np.maximum(0.0, rows.duration[mine]))
    if not len(spans):
        return None
    windows = np.array([[spans[0, 0], spans[:, 1].max()]]) if windows is None else windows
    windows = windows[windows[:, 1] > windows[:, 0]]
    if not len(windows):
        return None
    comm = communicates(table)[mine]
    compute = merged(spans[(rows.kind[mine] == KERNEL) & ~comm])
    alone = without(merged(spans[comm]), compute)
    busy = merged(spans)
    copy = without(busy, merged(np.concatenate((compute, alone))))
    gaps = _gaps(busy, windows)
    return Phases(
        windows=windows,
        compute=intersection(compute, windows),
        comm=intersection(alone, windows),
        copy=intersection(copy, windows),
        idle=_causes(table, calls, gaps, *_next_launch(table, gaps, np.flatnonzero(mine), calls)),
    )


def busiest_device(table: Table) -> int:
    """Number of the device that was active longest, the smallest of several; -1 where the trace names none."""
    rows = table.activities
    numbers, place = np.unique(rows.device, return_inverse=True)
    return int(numbers[np.argmax(np.bincount(place.reshape(-1), weights=rows.duration))]) if len(rows) else -1


def _gaps(busy: Intervals, windows: Intervals) -> Intervals:
    """The moments of the windows in which nothing runs; an activity without a duration ends a gap, too."""
    return intersection(complement(busy, float(windows[0, 0]), float(windows[-1, 1])), windows)


def _next_launch(table: Table, gaps: Intervals, mine: Ints, calls: Ints) -> tuple[Ints, Floats]:
    """For each gap the thread that launched the activity after it, and when that launch returned; -1, NaN if unknown.

    A graph replays many activities from one launch.
    """
    following = np.searchsorted(table.activities.start[mine], gaps[:, 1], side="left")
    call = np.append(calls[mine], -1)[following]
    thread = np.append(table.calls.thread, -1)[call].astype(np.int64)
    return thread, np.append(table.calls.start + table.calls.duration, np.nan)[call]


def _causes(table: Table, calls: Ints, gaps: Intervals, thread: Ints, returned: Floats) -> dict[str, Intervals]:
    """Gaps by cause, see `phases`; together they are the gaps."""
    found: dict[str, list[Intervals]] = {cause: [] for cause in CAUSES}
    known = thread >= 0
    until = np.minimum(gaps[:, 1], np.maximum(gaps[:, 0], returned))
    queued = known & ((returned <= gaps[:, 0]) | (gaps[:, 1] - until > LATENCY_US))
    found[QUEUED].append(_between(until, gaps[:, 1])[queued])
    found[LAUNCH].append(_between(until, gaps[:, 1])[known & ~queued])
    found[OTHER].append(gaps[~known])
    host = host_time(table, calls)
    left = []
    for number in np.unique(thread[known]).tolist():
        rest = _joined([_between(gaps[:, 0], until)[thread == number]])
        left.append(_take(rest, host.of(np.array([number])), found))
    rest = _take(merged(np.concatenate((NO_INTERVALS, *left))), host.of_launching(), found)
    found[OTHER].append(rest)
    return {cause: _joined(parts) for cause, parts in found.items()}


def _between(begin: Floats, end: Floats) -> Intervals:
    return np.column_stack((begin, end))


def _take(rest: Intervals, layers: Iterator[tuple[str, Intervals]], found: dict[str, list[Intervals]]) -> Intervals:
    """Move the moments of each layer from `rest` to its cause; what no layer covers is returned."""
    for cause, layer in layers:
        if not len(rest):
            break
        found[cause].append(intersection(rest, layer))
        rest = without(rest, layer)
    return rest


def _joined(parts: list[npt.NDArray[np.float64]]) -> Intervals:
    """Stretches that do not overlap, in order and without empty ones."""
    every = np.concatenate((NO_INTERVALS, *parts))
    every = every[every[:, 1] > every[:, 0]]
    return every[np.argsort(every[:, 0], kind="stable")]
