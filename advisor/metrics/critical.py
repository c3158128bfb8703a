"""The critical path of a step, and how long the step would take if some of its work took less time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from advisor.columns.intervals import NO_INTERVALS, Intervals, covered, intervals, merged
from advisor.columns.schema import KERNEL
from advisor.columns.table import Floats, Ints, Table
from advisor.measured import CriticalPath, Gap, WhatIf
from advisor.metrics.devicewaits import waits_of
from advisor.metrics.hosttime import SYNCHRONISING, data_ranges, matching
from advisor.metrics.hostwaits import host_of, main_thread, worked_until
from advisor.metrics.schedule import LIMIT, Piece, Schedule
from advisor.metrics.steps import Steps
from advisor.metrics.stepwork import Window, full_queue, work_of
from advisor.metrics.totals import communicates

PARTS = ("compute", "communication", "copy", "launch", "host", "data", "sync", "idle")
WHOLE_STEPS = "a trace of whole steps, begun before the first of them, with CPU and CUDA activities"
UNEXPLAINED = 0.02  # of the path, from which it is said: what a rule takes for noise (`rule.Rule.worth`)


class StepGraph:
    """One step as a graph of what waited for what; made by `step_graph`."""

    def __init__(self, table: Table, launches: Ints, window: Window, repeats: bool) -> None:
        table = _without_negative_durations(table)
        full = full_queue(table, launches)
        self.main = main_thread(table, window)
        self.work = work_of(table, launches, window, full, repeats)
        host = host_of(table, launches, self.work, window, self.main, full)
        waits = waits_of(table, self.work, host, window)
        if not repeats and self.main is not None:
            window = window[0], worked_until(table, window, self.main)
        self.schedule = Schedule(self.work, host, waits, window, self.main, repeats)
        self._table, self._launches = table, launches

    @property
    def length_us(self) -> float:
        """Length of the critical path in microseconds."""
        return self.schedule.length_us()

    @cached_property
    def pieces(self) -> list[Piece]:
        """The critical path in order."""
        return self.schedule.path()

    @property
    def activities(self) -> Ints:
        """Rows of the table's activities that lie on the critical path, in order of time."""
        places = {piece.activity for piece in self.pieces if piece.activity >= 0}
        return np.array(sorted(self.work.row[place] for place in places), dtype=np.int64)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What to keep in mind with the path."""
        found = []
        missing, idle = int(np.isnan(self.work.launched).sum()), self.parts_us["idle"]
        if missing:
            why = f"{missing} of {len(self.work)} activities of the step have no launch in the trace"
            found.append(Gap(what="critical path", why=why, collect=WHOLE_STEPS, qualifies=True))
        if idle > UNEXPLAINED * self.length_us:
            why = (
                f"on {idle / self.length_us:.0%} of it the device waits for no recorded reason, which is taken to last"
            )
            found.append(Gap(what="critical path", why=why, collect=WHOLE_STEPS, qualifies=True))
        return tuple(found)

    @cached_property
    def parts_us(self) -> Mapping[str, float]:
        """The critical path by kind, see PARTS, in microseconds; the parts sum to its length."""
        parts = dict.fromkeys(PARTS, 0.0)
        rows, own = self._table.activities, self.work.row
        ran = np.where(
            communicates(self._table)[own], "communication", np.where(rows.kind[own] == KERNEL, "compute", "copy")
        )
        kinds = ran.tolist()
        for piece in self.pieces:
            if piece.kind != "host":
                parts[kinds[piece.activity] if piece.kind == "activity" else piece.kind] += piece.length
        for kind, part in self._host_parts([piece for piece in self.pieces if piece.kind == "host"]).items():
            parts[kind] += part
        return _without_skew(parts)

    def _host_parts(self, pieces: list[Piece]) -> dict[str, float]:
        """Split the work of threads: waiting for data, in synchronizing calls, in calls that launch, the rest."""
        found = dict.fromkeys(("data", "sync", "launch"), 0.0)
        whole = 0.0
        for thread in sorted({piece.thread for piece in pieces}):
            own = [piece for piece in pieces if piece.thread == thread]
            begin, end = np.array([piece.begin for piece in own]), np.array([piece.end for piece in own])
            part = np.array([piece.length for piece in own])
            share, reached, cover = part / (end - begin), 0.0, NO_INTERVALS
            for kind, layer in self._layers(thread).items():
                cover = merged(np.concatenate((cover, layer)))
                total = float((covered(cover, begin, end) * share).sum())
                found[kind] += total - reached
                reached = total
            whole += float(part.sum())
        return {**found, "host": whole - sum(found.values())}

    def _layers(self, thread: int) -> dict[str, Intervals]:
        """What a thread's time is taken for, what comes first counting first."""
        calls, ranges = self._table.calls, self._table.ranges
        data = data_ranges(self._table)
        data = data[ranges.thread[data] == thread]
        launching = np.zeros(len(calls), dtype=bool)
        launching[self._launches[self._launches >= 0]] = True
        synchronizing = matching(self._table, SYNCHRONISING, calls.name)
        layers = {"data": intervals(ranges.start[data], ranges.duration[data])}
        for kind, chosen in (("sync", synchronizing), ("launch", launching)):
            own = chosen & (calls.thread == thread)
            layers[kind] = intervals(calls.start[own], calls.duration[own])
        return layers


def step_graph(table: Table, launches: Ints, window: Window, repeats: bool = True) -> StepGraph | Gap:
    """Build the graph of one step, or say why there is none.

    `launches` has the row of the call that launched each activity (`joins.launching_calls`). `window` is the stretch of
    host time of the step, in microseconds on the clock of the table (`typical_step`); its activities are those that
    were launched in it, whenever they ran. A recording without steps is one window that does not repeat (`repeats`).

    An activity waits for the one before it on its stream, for its launch and for events of other streams
    (`devicewaits`); the host waits in calls that synchronize, in copies of pageable memory, in launches while the queue
    is full and, on the main thread, for backward passes (`hostwaits`). Each keeps the recorded distance to what
    released it, so that the recorded times come out; what did not decide keeps the usual distance of its kind.
    """
    rows = table.activities
    graph = StepGraph(table, launches, window, repeats) if len(rows) and window[1] > window[0] else None
    if graph is None or not len(graph.work):
        return Gap(what="critical path", why="the device did nothing for the step", collect=WHOLE_STEPS)
    if not graph.schedule.fits:
        why = f"{graph.schedule.nodes} waits between streams and threads, more than {LIMIT}, are one step"
        collect = "a trace with marked steps: torch.profiler.schedule, and step() of the profiler after each"
        return Gap(what="critical path", why=why, collect=collect)
    return graph


def critical_path(graph: StepGraph, savings: Mapping[str, Mapping[int, float]] | None = None) -> CriticalPath:
    """The work that sets the time of a step, by what it consists of, with what `savings` would change.

    Of a step that repeats it is the cycle that sets the pace (`schedule`): that of the host where the device waits for
    it, that of a stream where the host runs ahead. Its length is the time of a step at that pace. Of the parts `launch`
    is time in calls that launch and from a launch to the start of what it launched, `sync` time in calls that
    synchronize after the device was done, `host` all other time of the host, `idle` time between activities without a
    recorded reason.
    """
    found = what_if(graph, savings) if savings else ()
    return CriticalPath(length_us=graph.length_us, parts_us=graph.parts_us, what_if=found)


def what_if(graph: StepGraph, savings: Mapping[str, Mapping[int, float]]) -> tuple[WhatIf, ...]:
    """How long the step would take if the activities of one region after the other took less time.

    `savings` has for each region the microseconds that activities (by row of the table) would take; more than recorded
    counts as recorded. All else keeps its duration and its delays, the host its pace. The new length is the longest
    path through the same dependencies: never above the measured one, never below that of any other chain of work and
    never shorter than measured less what the region saves by itself. Host times are those under the profiler, which
    slows launches down: a step whose pace the host sets takes less without it.

    Raises ValueError for a negative or undefined time.
    """
    measured = graph.length_us
    return tuple(
        WhatIf(name=name, measured_us=measured, step_us=graph.schedule.length_us(_durations(graph, reduced)))
        for name, reduced in savings.items()
    )


def typical_step(steps: Steps) -> Window:
    """The host's window of the step of median length, until the next one begins, in microseconds.

    A step is as long as the host took for it or its window on the device, whichever is longer; of two in the middle the
    shorter one is taken. Raises ValueError where there are no steps.
    """
    if not len(steps):
        raise ValueError("no steps to choose from")
    ends = steps.host[:, 1].copy()
    follows = np.diff(steps.numbers) == 1
    ends[:-1][follows] = steps.host[1:, 0][follows]
    lengths = np.maximum(ends - steps.host[:, 0], steps.duration_us)
    place = int(np.argsort(lengths, kind="stable")[(len(steps) - 1) // 2])
    return float(steps.host[place, 0]), float(ends[place])


def _without_skew(parts: Mapping[str, float]) -> dict[str, float]:
    """Clocks that disagree add to launches what they take from returns, which can leave less than nothing for those."""
    found, owed = dict(parts), max(0.0, -parts["sync"])
    found["sync"] += owed
    for kind in ("launch", "idle", "host", *PARTS):
        taken = min(owed, found[kind])
        found[kind] -= taken
        owed -= taken
    return found


def _without_negative_durations(table: Table) -> Table:
    """Damaged recordings hold negative durations: they count as none."""
    found = {}
    for name in ("operators", "calls", "activities", "ranges"):
        rows = getattr(table, name)
        if (rows.duration < 0).any():
            found[name] = replace(rows, duration=np.maximum(0.0, rows.duration))
    return replace(table, **found) if found else table


def _durations(graph: StepGraph, reduced: Mapping[int, float]) -> Floats:
    """The durations of the step's activities with some of them reduced."""
    rows = np.fromiter(reduced.keys(), dtype=np.int64, count=len(reduced))
    times = np.fromiter(reduced.values(), dtype=np.float64, count=len(reduced))
    if not (times >= 0).all():
        raise ValueError("a reduced duration is negative or undefined: give microseconds of at least 0")
    work = graph.work
    order = np.argsort(work.row, kind="stable")
    place = np.minimum(np.searchsorted(work.row[order], rows), len(order) - 1)
    places, known = order[place], work.row[order[place]] == rows
    durations = work.duration.copy()
    durations[places[known]] = np.minimum(durations[places[known]], times[known])
    return durations
