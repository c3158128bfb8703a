"""When threads of the host went on in one step after they had waited for the device or for each other, and for what.

Which stream `cudaStreamSynchronize` names and which event `cudaEventSynchronize`, a trace does not say: a call counts
as waiting for the latest work of all streams that had been launched before it and that ended in time. That may be too
much but never too little. What the host does between waits takes as long as it took.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from advisor.columns.intervals import Intervals, clipped, complement, intervals, length, merged
from advisor.columns.schema import ANNOTATION
from advisor.columns.table import Ints, Table
from advisor.metrics.hosttime import SYNCHRONISING, Flags, blocking_calls, matching
from advisor.metrics.stepwork import Launched, Window, Work
from advisor.metrics.totals import STEP

OF_DEVICE = re.compile(r"^(cuda|hip|cu)(Device|Ctx)Synchronize")
OF_EVENT = re.compile(r"^(cuda|hip|cu)EventSynchronize")
ENGINE = re.compile(r"^autograd::engine::")

# Work may seem to end after the call that waited for it returned, because the clocks of host and device disagree: by
# 50 us in a recording of an MI300X (sdpa-short-seq of TraceLens). More is taken for work of another device.
MOST_SKEW_US = 100.0

AFTER, SINCE, EARLIER, HOST = 0, 1, 2, 3  # kinds of reasons


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that a moment of a host thread waits for; `delay` in microseconds.

    AFTER: an activity (`place`) ended `delay` before. SINCE: it began. EARLIER: the work before the step on a stream
    (`place`) ended. HOST: `thread` worked since another moment (`place`), the last `entry` microseconds in a call.
    """

    kind: int
    place: int
    delay: float
    thread: int = -1
    entry: float = 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """When a host thread went on after all of several reasons."""

    thread: int
    time: float
    reasons: tuple[Reason, ...]


@dataclass(slots=True)
class Host:
    """The moments of all threads in order of time; the first is the begin of the step and belongs to every thread."""

    moments: list[Moment]
    _times: dict[int, list[float]] = field(default_factory=dict)
    _places: dict[int, list[int]] = field(default_factory=dict)

    def add(self, moment: Moment) -> None:
        """Append a moment that is not before the last one."""
        self._times.setdefault(moment.thread, []).append(moment.time)
        self._places.setdefault(moment.thread, []).append(len(self.moments))
        self.moments.append(moment)

    def last(self, thread: int, time: float) -> int:
        """The place of the last moment of a thread up to a time."""
        place = bisect_right(self._times.get(thread, ()), time) - 1
        return self._places[thread][place] if place >= 0 else 0

    def since(self, thread: int, time: float, entry: float = 0.0, extra: float = 0.0) -> Reason:
        """The reason that a thread worked from its last moment until `time`, `extra` longer and `entry` in a call."""
        place = self.last(thread, time)
        return Reason(HOST, place, time - self.moments[place].time + extra + entry, thread, entry)


@dataclass(frozen=True, slots=True)
class _Pause:
    """A thread goes on at `end`, after a call that began at `begin` or after `other` handed over at `left`.

    `reasons` are of the device; the first decided where `bound`. `entry` is what the call takes without waiting.
    """

    thread: int
    begin: float
    end: float
    entry: float
    reasons: tuple[Reason, ...] = ()
    bound: bool = False
    other: int = -1
    left: float = 0.0


def host_of(table: Table, launches: Ints, work: Work, window: Window, main: int | None, full: Flags) -> Host:
    """The moments at which host threads went on in a window after a call that blocks or after another thread.

    `launches` has the row of the call behind each activity; `main` is the thread that runs the step; `full` tells which
    calls are launches that waited for room in the queue. While a thread of autograd runs a backward pass the main one
    waits in `backward()` (https://docs.pytorch.org/docs/stable/notes/autograd.html).
    """
    pauses = _blocked(table, launches, work, window, full)
    if main is not None:
        pauses += _handed_over(table, window, main)
    host = Host([Moment(-1, window[0], ())])
    for pause in sorted(pauses, key=lambda pause: (pause.end, pause.thread)):
        own = host.since(pause.thread, pause.begin, pause.entry)
        if pause.other >= 0:
            over = host.since(pause.other, pause.left, extra=pause.end - pause.left)
            host.add(Moment(pause.thread, pause.end, (over, own)))
        else:
            host.add(Moment(pause.thread, pause.end, (*pause.reasons, own)))
    return host


def worked_until(table: Table, window: Window, thread: int) -> float:
    """End of a thread's last operator or call in a window, in microseconds; the begin where it has none."""
    found = _busy(table, window, thread)
    return float(found[-1, 1]) if len(found) else window[0]


def main_thread(table: Table, window: Window) -> int | None:
    """The thread that runs the step: that of the ProfilerStep ranges, else the one with most time in operators and
    calls outside gradient functions; None where the window holds neither."""
    ranges = table.ranges
    marked = ranges.thread[(ranges.kind == ANNOTATION) & matching(table, STEP, ranges.name)]
    if len(marked):
        return int(marked[0])
    times: dict[int, float] = {}
    for rows, chosen in (
        (table.operators, ~_gradient_operators(table)),
        (table.calls, np.ones(len(table.calls), dtype=bool)),
    ):
        inside = chosen & (rows.start < window[1]) & (rows.start + rows.duration > window[0])
        for thread in np.unique(rows.thread[inside]).tolist():
            own = inside & (rows.thread == thread)
            busy = length(merged(intervals(rows.start[own], rows.duration[own])))
            times[thread] = times.get(thread, 0.0) + busy
    return max(times, key=lambda thread: (times[thread], -thread)) if times else None


# ------------------------------------------------------------------------------------------------ waits for the device


def _blocked(table: Table, launches: Ints, work: Work, window: Window, full: Flags) -> list[_Pause]:
    """Pauses of all calls of a window that may have waited for the device."""
    calls = table.calls
    blocking = np.zeros(len(calls), dtype=bool)
    blocking[blocking_calls(table, launches)] = True
    synchronizing = matching(table, SYNCHRONISING, calls.name)
    inside = (calls.start >= window[0]) & (calls.start + calls.duration <= window[1])
    launched, late = Launched(work), _skew(table, launches)
    found: list[_Pause] = []
    queued: list[_Pause] = []
    reached: dict[int, float] = {}
    for row in np.flatnonzero((blocking | full) & inside).tolist():
        thread, begin = int(calls.thread[row]), float(calls.start[row])
        pause = _Pause(thread, begin, begin + float(calls.duration[row]), float(calls.duration[row]))
        if begin < reached.get(thread, -np.inf):
            continue  # a call inside a call that blocks
        reached[thread] = pause.end
        if synchronizing[row]:
            of_event = OF_EVENT.match(table.names[calls.name[row]]) is not None
            found.append(_after(pause, work, _awaited(work, launched, pause, pause.end + late, of_event)))
        elif blocking[row]:
            found.append(_copied(pause, work, np.flatnonzero(work.call == row).tolist()))
        else:
            pause = _after(pause, work, launched.ended_in(begin, pause.end))
            queued.append(replace(pause, entry=0.0))
    return _with_usual_delays([pause for pause in found if pause.reasons]) + queued


def _skew(table: Table, launches: Ints) -> float:
    """How much later than calls that wait for a whole device its work seems to end, at most, in microseconds."""
    calls, rows = table.calls, table.activities
    waits = matching(table, OF_DEVICE, calls.name)
    called = np.append(calls.start, -np.inf)[launches]
    order = np.argsort(called, kind="stable")
    reached = np.append(-np.inf, np.maximum.accumulate(rows.end[order]))
    last = reached[np.searchsorted(called[order], calls.start[waits], side="left")]
    late = last - (calls.start + calls.duration)[waits]
    return float(late[late <= MOST_SKEW_US].max(initial=0.0))


def _awaited(work: Work, launched: Launched, pause: _Pause, until: float, of_event: bool) -> list[int]:
    """What a synchronizing call may have waited for: of each stream the last work launched before, if it ended in time.

    For an event, which may stand before later work, it is the last work that ended in time.
    """
    streams = range(len(work.earlier))
    found = [launched.last(stream, pause.begin, until if of_event else np.inf) for stream in streams]
    return [place for place in found if place is not None and work.end(place) <= until]


def _after(pause: _Pause, work: Work, places: Sequence[int]) -> _Pause:
    """A call that returned after work had ended, what ended last first."""
    ordered = sorted(places, key=lambda place: (-work.end(place), place))
    reasons = [
        Reason(AFTER if place >= 0 else EARLIER, max(place, -1 - place), pause.end - work.end(place))
        for place in ordered
    ]
    return replace(pause, reasons=tuple(reasons), bound=bool(ordered) and work.end(ordered[0]) > pause.begin)


def _copied(pause: _Pause, work: Work, places: Sequence[int]) -> _Pause:
    """A copy that blocks: it returned after its end or, to the device, once the source was read, after its begin."""
    reasons = [
        Reason(AFTER, place, pause.end - work.end(place))
        if work.end(place) <= pause.end
        else Reason(SINCE, place, pause.end - float(work.begin[place]))
        for place in places
        if work.begin[place] < pause.end
    ]
    return replace(pause, reasons=tuple(reasons), bound=bool(reasons))


def _with_usual_delays(pauses: Sequence[_Pause]) -> list[_Pause]:
    """Give what did not decide a moment the delay that is usual where it does: median to return after the device, and
    least time of a call that found nothing to wait for; none where there is no such call."""
    back = [pause.reasons[0].delay for pause in pauses if pause.bound and pause.reasons[0].kind != SINCE]
    calls = [pause.entry for pause in pauses if not pause.bound]
    usual, least = float(np.median(back)) if back else 0.0, min(calls, default=0.0)
    found = []
    for pause in pauses:
        first = pause.reasons[: int(pause.bound)]
        rest = [replace(item, delay=min(usual, item.delay)) for item in pause.reasons[len(first) :]]
        entry = min(least, pause.entry) if pause.bound else pause.entry
        found.append(replace(pause, entry=entry, reasons=(*first, *rest)))
    return found


# ------------------------------------------------------------------------------------------------ waits between threads


def _handed_over(table: Table, window: Window, main: int) -> list[_Pause]:
    """Pauses in which the main thread hands over to a thread that runs backward passes, and in which it goes on."""
    gaps = complement(_busy(table, window, main), *window)
    found = []
    for worker in _backward_threads(table, window, main):
        own = _busy(table, window, worker)
        place = np.searchsorted(gaps[:, 0], own[:, 0], side="right") - 1
        inside = (place >= 0) & (own[:, 1] <= gaps[np.maximum(place, 0), 1]) if len(gaps) else np.zeros(len(own), bool)
        reached = window[0]
        for number in np.unique(place[inside]).tolist():
            stretch = own[inside & (place == number)]
            (left, back), first, last = gaps[number].tolist(), float(stretch[0, 0]), float(stretch[-1, 1])
            if left > window[0]:
                found.append(_Pause(worker, reached, first, 0.0, other=main, left=left))
            if back < window[1]:
                found.append(_Pause(main, left, back, 0.0, other=worker, left=last))
            reached = last
    return found


def _busy(table: Table, window: Window, thread: int) -> Intervals:
    """When a thread was in an operator or a call of the runtime, cut to a window."""
    found = [
        intervals(rows.start[chosen], rows.duration[chosen])
        for rows in (table.operators, table.calls)
        for chosen in [(rows.thread == thread) & (rows.start < window[1]) & (rows.start + rows.duration > window[0])]
    ]
    return clipped(merged(np.concatenate(found)), *window)


def _backward_threads(table: Table, window: Window, main: int) -> list[int]:
    """Threads other than the main one that spend most of their time in operators on gradient functions."""
    rows = table.operators
    inside = (rows.start < window[1]) & (rows.start + rows.duration > window[0]) & (rows.thread != main)
    backward = inside & _gradient_operators(table)
    found = []
    for thread in np.unique(rows.thread[backward]).tolist():
        part, whole = (
            length(merged(intervals(rows.start[chosen], rows.duration[chosen])))
            for chosen in (backward & (rows.thread == thread), inside & (rows.thread == thread))
        )
        if part > whole / 2:
            found.append(int(thread))
    return found


def _gradient_operators(table: Table) -> Flags:
    """For each operator whether autograd ran it: it names the thread of its forward call, or is the engine's own."""
    rows = table.operators
    return (rows.forward_thread > 0) | matching(table, ENGINE, rows.name)
