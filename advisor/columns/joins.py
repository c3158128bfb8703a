"""Joins the columns of a table: which call launched an activity, which operator encloses a moment of a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.columns.table import Floats, Ints, OperatorRows, Table


def launching_calls(table: Table) -> Ints:
    """The row in `calls` that launched each activity, -1 where the trace has none.

    Correlation ids repeat where the traces of several cycles were merged: the last launch before the activity counts.
    """
    calls, activities = table.calls, table.activities
    order = np.lexsort((calls.start, calls.correlation))
    keys = calls.correlation[order]
    first = np.searchsorted(keys, activities.correlation, side="left")
    last = np.searchsorted(keys, activities.correlation, side="right") - 1
    found = (
        np.where((last >= first) & (activities.correlation >= 0), order[np.minimum(first, len(order) - 1)], -1)
        if (len(order))
        else np.full(len(activities), -1, dtype=np.int64)
    )
    for row in np.flatnonzero((last > first) & (activities.correlation >= 0)).tolist():
        starts = calls.start[order[first[row] : last[row] + 1]]
        place = int(np.searchsorted(starts, activities.start[row], side="right")) - 1
        found[row] = order[first[row] + max(0, place)]
    return found.astype(np.int64)


def parents(rows: OperatorRows) -> Ints:
    """The row of the innermost enclosing call on the same thread, -1 for none; rows are in time order, outer first."""
    return nested(rows.thread, rows.start, rows.start + rows.duration)


def nested(thread: Ints, start: Floats, end: Floats) -> Ints:
    """The row of the innermost interval on the same thread that was open when each began, -1 for none."""
    found = np.full(len(start), -1, dtype=np.int64)
    for rows in by_thread(thread).values():
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
