"""The device activities of one step, stream after stream, and what had been launched by a moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.columns.table import Floats, Ints, Table

# Launches block while too many are pending: 1015 to 1017 of them in the H200 recording of the naive bf16 GPT, where
# launch calls last up to 14.8 ms instead of 6 us.
PENDING = 1000
LONG_CALL = 10.0  # medians of a launch call from which it counts as blocked

Flags = npt.NDArray[np.bool_]
Window = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The device activities of a step, stream after stream and in order of start on each; times in microseconds.

    `row` is the row among the activities of the table, `call` that of the launching call and `thread` the thread that
    made it, -1 where it is not recorded. `launched` is when the call began or, where it had been blocked, returned; NaN
    where it is not recorded. `earlier` has for each stream when the work before the step ended, NaN for none. The place
    of an activity is its index here; -1 - stream stands for the work before the step.
    """

    row: Ints
    begin: Floats
    duration: Floats
    stream: Ints
    launched: Floats
    thread: Ints
    call: Ints
    earlier: Floats

    def __len__(self) -> int:
        return len(self.row)

    @property
    def ends(self) -> Floats:
        """End of each activity."""
        return self.begin + self.duration

    def end(self, place: int) -> float:
        """End of one activity, or of the work before the step on a stream."""
        return float(self.begin[place] + self.duration[place] if place >= 0 else self.earlier[-1 - place])

    def streams(self) -> list[slice]:
        """The places of each stream's activities."""
        bounds = np.searchsorted(self.stream, np.arange(len(self.earlier) + 1)).tolist()
        return [slice(bounds[number], bounds[number + 1]) for number in range(len(self.earlier))]


def work_of(table: Table, launches: Ints, window: Window, full: Flags, repeats: bool) -> Work:
    """The activities that the host launched in a window, and those without a recorded launch that lie between them.

    `launches` has the row of the call behind each activity, -1 for none; `full` tells which calls are launches that
    waited for room in the queue. Where none was launched in the window it is what began there. Only what `repeats` has
    work before it.
    """
    rows, calls = table.activities, table.calls
    called = np.append(calls.start, np.nan)[launches]
    own = (called >= window[0]) & (called < window[1])
    if not own.any():
        own = (rows.start >= window[0]) & (rows.start < window[1])
    _, stream = np.unique(np.column_stack((rows.device, rows.stream)), axis=0, return_inverse=True)
    stream = stream.reshape(-1)
    used = np.unique(stream[own])
    earlier = np.full(len(used), np.nan)
    for place, number in enumerate(used.tolist()):
        here = stream == number
        first, last = float(rows.start[own & here].min()), float(rows.end[own & here].max())
        own |= here & (launches < 0) & (rows.start >= first) & (rows.end <= last)
        before = rows.end[here & ~own & (rows.start < first)]
        if repeats and len(before):
            earlier[place] = min(first, float(before.max()))
    row = np.flatnonzero(own)
    row = row[np.lexsort((rows.end[row], rows.start[row], stream[row]))]
    call = launches[row]
    waited = np.append(np.where(full, calls.duration, 0.0), 0.0)[call]
    launched = called[row] + waited
    return Work(
        row=row,
        begin=rows.start[row],
        duration=rows.duration[row],
        stream=np.searchsorted(used, stream[row]),
        launched=np.where(launched <= rows.start[row], launched, np.nan),  # else the clocks disagree
        thread=np.append(calls.thread, -1)[call],
        call=call,
        earlier=earlier,
    )


def full_queue(table: Table, launches: Ints) -> Flags:
    """For each call whether it is a launch that had to wait for room in the queue of the device."""
    calls, rows = table.calls, table.activities
    found = np.zeros(len(calls), dtype=bool)
    launching = np.unique(launches[launches >= 0])
    if not len(launching) or len(rows) < PENDING:
        return found
    begins = np.sort(np.append(calls.start, -np.inf)[launches])
    moments = calls.start[launching]
    started = np.searchsorted(np.sort(rows.start), moments, side="right")
    long = calls.duration[launching] > LONG_CALL * float(np.median(calls.duration[launching]))
    found[launching[(np.searchsorted(begins, moments, side="left") - started >= PENDING) & long]] = True
    return found


class Launched:
    """Looks up which work of each stream had been launched by a moment. A stream runs its work in order of launch."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._streams = work.streams()
        begins = np.where(np.isnan(work.launched), -np.inf, work.launched)
        self._launched = [np.maximum.accumulate(begins[places]) for places in self._streams]
        self._ends = [np.maximum.accumulate(work.ends[places]) for places in self._streams]
        self._by_end = np.argsort(work.ends, kind="stable")
        self._sorted_ends = work.ends[self._by_end]

    def last(self, stream: int, moment: float, until: float = np.inf) -> int | None:
        """The place of the last work of a stream launched before a moment that ended by `until`; None for none."""
        count = int(np.searchsorted(self._launched[stream], moment, side="left"))
        count = min(count, int(np.searchsorted(self._ends[stream], until, side="right")))
        if count:
            return int(self._streams[stream].start) + count - 1
        return -1 - stream if self._work.earlier[stream] <= until else None

    def ended_in(self, begin: float, end: float) -> list[int]:
        """The place of the activity that ended last in a stretch of time, if one did."""
        place = int(np.searchsorted(self._sorted_ends, end, side="right")) - 1
        return [int(self._by_end[place])] if place >= 0 and self._sorted_ends[place] > begin else []
