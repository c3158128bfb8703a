"""Finds the training steps of a trace: marked by the profiler, by optimizers, or by what the device repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from advisor.columns.intervals import NO_INTERVALS, Intervals
from advisor.columns.joins import step_of
from advisor.columns.table import Floats, Ints, Table
from advisor.metrics.hosttime import Flags
from advisor.metrics.optimizers import optimizer_steps
from advisor.metrics.periods import periods
from advisor.metrics.totals import STEP, first_ranges

MARKED, OPTIMIZER, REPEATED = "ProfilerStep", "optimizer", "device gaps"
DIGITS = 18  # of a step number that the profiler can have written


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """The steps of one trace, in order; times in microseconds, one row of `host`, `windows`, `extents` per step.

    `source` is "ProfilerStep", "optimizer", "device gaps", or None where no step was found. `host` are the stretches of
    host time in which a step was launched. `windows` are disjoint stretches of device time: from the end of the work
    before a step to the end of its own, so that adjacent steps leave nothing out; without device activity they equal
    `host` and `on_device` is False. `extents` reach from the first start to the last end of what a step launched.
    `activity` tells for each activity the row of its step, -1 for none. `without_work` are the numbers of marked steps
    that launched nothing that was recorded; they have no row.
    """

    source: str | None = None
    numbers: tuple[int, ...] = ()
    host: Intervals = field(default_factory=NO_INTERVALS.copy)
    windows: Intervals = field(default_factory=NO_INTERVALS.copy)
    extents: Intervals = field(default_factory=NO_INTERVALS.copy)
    activity: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    on_device: bool = False
    without_work: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def duration_us(self) -> Floats:
        """Length of each step's window in microseconds."""
        return self.windows[:, 1] - self.windows[:, 0]

    @property
    def median_us(self) -> float | None:
        """Median duration in microseconds, None without steps."""
        return float(np.median(self.duration_us)) if len(self) else None


def find_steps(table: Table, calls: Ints) -> Steps:
    """The steps of a trace, from the first of three sources that has any; `calls` comes from `launching_calls`.

    1. `ProfilerStep#N` ranges of the host, each number once, whatever thread they stand on.
    2. `Optimizer.step#` ranges (`optimizers.optimizer_steps`): a step ends where its last optimizer does.
    3. A sequence of kernels that makes up the whole trace by exact repetition (`periods.periods`).

    An activity belongs to the step in which the host launched it. One without a recorded launch belongs to none: at the
    start of a trace it is left over from work that was launched before the recording.
    """
    for source, numbers, host in _sources(table, calls):
        if numbers:
            launched = _launched(table, calls)
            moments = table.activities.start if source == REPEATED and np.isnan(launched).all() else launched
            return _placed(table, source, numbers, host, moments, spill_over(table, calls))
    return Steps(activity=np.full(len(table.activities), -1, dtype=np.int64))


def _sources(table: Table, calls: Ints) -> Iterator[tuple[str, tuple[int, ...], Intervals]]:
    yield MARKED, *_marked(table)
    yield OPTIMIZER, *optimizer_steps(table, calls)
    yield REPEATED, *periods(table, calls)


def trimmed(steps: Steps) -> Steps:
    """The steps between half and twice the median length; a first step that warms up would speak for all others.

    Activities of the others belong to no step.
    """
    lengths = steps.duration_us
    median = float(np.median(lengths)) if len(steps) else 0.0
    kept = (lengths >= median / 2) & (lengths <= 2 * median)
    if kept.all():
        return steps
    place = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
    return replace(
        steps,
        numbers=tuple(number for number, keep in zip(steps.numbers, kept.tolist(), strict=True) if keep),
        host=steps.host[kept],
        windows=steps.windows[kept],
        extents=steps.extents[kept],
        activity=place[steps.activity],
    )


def spill_over(table: Table, calls: Ints) -> Flags:
    """For each activity whether it was launched before the recording: it has no launch and runs before what has.

    A stream runs what it is given in order, so whatever stands before the first recorded launch of a stream was
    launched earlier. On a stream none of whose launches was recorded this is told by the first of all streams.
    """
    rows = table.activities
    launched = calls >= 0
    if not launched.any():
        return np.zeros(len(rows), dtype=bool)
    _, stream = np.unique(np.column_stack((rows.device, rows.stream)), axis=0, return_inverse=True)
    stream = stream.reshape(-1)
    first = np.full(int(stream.max()) + 1, np.inf)
    np.minimum.at(first, stream[launched], rows.start[launched])
    first[np.isinf(first)] = float(rows.start[launched].min())
    return ~launched & (rows.start < first[stream])


def _marked(table: Table) -> tuple[tuple[int, ...], Intervals]:
    """Numbers and host ranges of `ProfilerStep#N`, in order of time; a number that stands twice counts once."""
    rows = table.ranges
    matches = ((place, STEP.match(name)) for place, name in enumerate(table.names))
    found = {place: int(match[1]) for place, match in matches if match is not None and len(match[1]) <= DIGITS}
    kept = first_ranges(table, list(found))
    host = np.column_stack((rows.start[kept], rows.start[kept] + rows.duration[kept]))
    return tuple(found[name] for name in rows.name[kept].tolist()), host


def _launched(table: Table, calls: Ints) -> Floats:
    """When the host launched each activity, NaN where the trace does not say."""
    moments = np.append(table.calls.start, np.nan)
    return moments[calls]


def _placed(
    table: Table, source: str, numbers: Sequence[int], host: Intervals, launched: Floats, spilled: Flags
) -> Steps:
    """Steps with their device windows, or with those of the host where the trace has no device activity."""
    rows = table.activities
    if not len(rows):
        nothing = np.empty(0, dtype=np.int64)
        return Steps(source=source, numbers=tuple(numbers), host=host, windows=host, extents=host, activity=nothing)
    step = step_of(host, launched)
    first, last = np.full(len(host), np.inf), np.full(len(host), -np.inf)
    inside = step >= 0
    np.minimum.at(first, step[inside], rows.start[inside])
    np.maximum.at(last, step[inside], rows.end[inside])
    worked = np.flatnonzero(last > -np.inf)
    place = np.full(len(host) + 1, -1, dtype=np.int64)
    place[worked] = np.arange(len(worked))
    before = np.where(spilled, -np.inf, np.where(inside, np.inf, launched))
    return Steps(
        source=source,
        numbers=tuple(numbers[row] for row in worked.tolist()),
        host=host[worked],
        windows=_windows(rows.end, before, host[worked], last[worked], _restarts(numbers, worked)),
        extents=np.column_stack((first[worked], last[worked])),
        activity=place[step],
        on_device=True,
        without_work=tuple(number for row, number in enumerate(numbers) if place[row] < 0),
    )


def _restarts(numbers: Sequence[int], worked: Ints) -> Flags:
    """Which of the steps that worked follow no other: the first, and those after a hole in the recording."""
    hole = [True, *(later - earlier != 1 for earlier, later in pairwise(numbers))]
    since = np.cumsum(hole)[worked]  # steps without a hole between them share a number
    return np.asarray(np.diff(since, prepend=-1) != 0)


def _windows(end: Floats, before: Floats, host: Intervals, last: Floats, restart: Flags) -> Intervals:
    """Device windows of steps: each begins where the work before it ended and ends with the last of its own.

    `end` are the ends of all activities and `before` when each was launched that belongs to no step (minus infinity:
    before the recording). The first step begins with its host range, or where the device ended what came before it. A
    step that is alone ends with its host range, if that is later.
    """
    until = np.maximum.accumulate(last)
    if len(until) == 1:  # no next step holds the time in which the device waits for the rest of this one
        until = np.maximum(until, host[:, 1])
    begin = np.concatenate(([-np.inf], until[:-1]))
    for row in np.flatnonzero(restart).tolist():
        earlier = end[before < host[row, 0]]
        begin[row] = max(begin[row], host[row, 0], float(earlier.max(initial=-np.inf)))
    return np.column_stack((np.minimum(begin, until), until))
