"""Joins the columns of a table: which call launched an activity, which operator encloses a moment of a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.columns.table import CallRows, Floats, Ints, OperatorRows, Table


def launching_calls(table: Table) -> Ints:
    """The row in `calls` that launched each activity, -1 where the trace has none.

    Correlation ids repeat where the traces of several cycles were merged: the last launch before the activity counts,
    the first one for an activity that begins before all of them.
    """
    calls, activities = table.calls, table.activities
    found = np.full(len(activities), -1, dtype=np.int64)
    rows = np.flatnonzero(activities.correlation >= 0)
    wanted = activities.correlation[rows]
    order = np.lexsort((calls.start, calls.correlation))
    keys = calls.correlation[order]
    first, behind = np.searchsorted(keys, wanted, side="left"), np.searchsorted(keys, wanted, side="right")
    place = first
    if (behind - first > 1).any():
        place = np.clip(_until(calls, wanted, activities.start[rows]) - 1, first, np.maximum(first, behind - 1))
    launched = behind > first
    found[rows[launched]] = order[place[launched]]
    return found


def _until(calls: CallRows, correlation: Ints, start: Floats) -> Ints:
    """For pairs of a correlation id and a time: how many calls stand up to them in the order of both."""
    ids, times = np.concatenate((calls.correlation, correlation)), np.concatenate((calls.start, start))
    asks = np.arange(len(ids)) >= len(calls)
    order = np.lexsort((asks, times, ids))
    counts = np.empty(len(ids), dtype=np.int64)
    counts[order] = np.cumsum(~asks[order])
    return counts[len(calls) :]


def parents(rows: OperatorRows) -> Ints:
    """The row of the innermost enclosing call on the same thread, -1 for none; rows are in time order, outer first."""
    return nested(rows.thread, rows.start, rows.start + rows.duration)


def nested(thread: Ints, start: Floats, end: Floats) -> Ints:
    """The row of the innermost interval on the same thread that was open when each began, -1 for none."""
    found = np.full(len(start), -1, dtype=np.int64)
    for rows in by_thread(thread).values():
        inner = _well_nested(start[rows], end[rows])
        if inner is not None:
            found[rows] = np.where(inner >= 0, rows[np.maximum(inner, 0)], -1)
            continue
        opened: list[int] = []
        ends: list[float] = []
        result = []
        for row, begins, until in zip(rows.tolist(), start[rows].tolist(), end[rows].tolist(), strict=True):
            while ends and ends[-1] <= begins:
                ends.pop()
                opened.pop()
            result.append(opened[-1] if opened else -1)
            opened.append(row)
            ends.append(until)
        found[rows] = result
    return found


def _well_nested(start: Floats, end: Floats) -> Ints | None:
    """As `nested` for one thread, None unless every interval lies wholly inside or outside every other.

    What encloses an interval is then the last one before it that stands one level higher, and its level is the number
    of those before it that have not ended.
    """
    count = len(start)
    rows = np.arange(count)
    empty = end <= start
    ended = np.searchsorted(np.sort(end), start, side="right")
    # An interval without length has ended where it begins, also for those that stand before it.
    through = np.searchsorted(start[empty], start, side="right")
    ended -= through - np.cumsum(empty) + empty
    level = rows - ended
    if (level < 0).any():
        return None
    parent = np.full(count, -1, dtype=np.int64)
    order = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[order], np.arange(int(level.max(initial=0)) + 2))
    for depth in range(1, len(bounds) - 1):
        above, own = order[bounds[depth - 1] : bounds[depth]], order[bounds[depth] : bounds[depth + 1]]
        place = np.searchsorted(above, own) - 1
        if (place < 0).any():
            return None
        parent[own] = above[place]
    inside = parent >= 0
    outer = parent[inside]
    if (end[inside] > end[outer]).any() or (end[outer] <= start[inside]).any():
        return None
    return parent


def by_thread(thread: Ints) -> dict[int, Ints]:
    """Rows of each thread, in their order."""
    if not len(thread):
        return {}
    order = np.argsort(thread, kind="stable")
    values, begins = np.unique(thread[order], return_index=True)
    return {int(value): rows for value, rows in zip(values, np.split(order, begins[1:]), strict=True)}


def innermost(thread: Ints, time: Floats, rows: Any, parent: Ints) -> Ints:
    """For moments of threads the innermost row that encloses each, -1 where there is none.

    `rows` are ranges or operators in time order, outer first, and `parent` is what encloses each of them.
    """
    found = np.full(len(time), -1, dtype=np.int64)
    of_thread = by_thread(rows.thread)
    ends = rows.start + rows.duration
    for number, moments in by_thread(thread).items():
        candidates = of_thread.get(number)
        if candidates is None:
            continue
        place = np.searchsorted(rows.start[candidates], time[moments], side="right") - 1
        row = np.where(place >= 0, candidates[np.maximum(place, 0)], -1)
        while True:  # one turn per level of nesting that ended before the moment
            outside = (row >= 0) & (ends[np.maximum(row, 0)] <= time[moments])
            if not outside.any():
                break
            row = np.where(outside, parent[np.maximum(row, 0)], row)
        found[moments] = row
    return found


def launching_operators(table: Table, calls: Ints, parent: Ints) -> Ints:
    """The row of the innermost operator around the launch of each activity, -1 where there is none.

    `calls` comes from `launching_calls`, `parent` from `parents`.
    """
    launched = np.flatnonzero(calls >= 0)
    found = np.full(len(calls), -1, dtype=np.int64)
    rows = calls[launched]
    found[launched] = innermost(table.calls.thread[rows], table.calls.start[rows], table.operators, parent)
    return found


def step_of(windows: npt.NDArray[np.float64], time: Floats) -> Ints:
    """The place of the window [n, 2] (start, end; in order) that holds each time, -1 outside. NaN is outside."""
    if not len(windows):
        return np.full(len(time), -1, dtype=np.int64)
    place = np.searchsorted(windows[:, 0], time, side="right") - 1
    inside = (place >= 0) & (time < windows[np.maximum(place, 0), 1])
    return np.where(inside, place, -1)
