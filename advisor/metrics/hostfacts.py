"""Facts of the host's side of a trace: waits for data and for the device, how far launches run ahead, short kernels."""

from __future__ import annotations

import re

import numpy as np

from advisor.columns.intervals import covered, intervals, merged
from advisor.columns.joins import innermost, step_of
from advisor.columns.schema import KERNEL, MEMCPY
from advisor.columns.table import Floats, Ints, Table
from advisor.measured import HostFacts, Wait
from advisor.metrics.hosttime import PAGEABLE, SYNCHRONISING, blocking_calls, data_ranges, matching
from advisor.metrics.steps import Steps, spill_over

SHORT_US = 10.0
TO_DEVICE = re.compile(r"HtoD|Host(ToDevice| -> Device)", re.IGNORECASE)


def host_facts(table: Table, calls: Ints, parent: Ints, steps: Steps) -> HostFacts:
    """Collect the facts; `calls` comes from `launching_calls`, `parent` from `parents` of the operators."""
    rows, ranges = table.activities, table.ranges
    kernel = rows.kind == KERNEL
    staged = (rows.kind == MEMCPY) & matching(table, PAGEABLE, rows.name) & matching(table, TO_DEVICE, rows.name)
    synchronising = np.flatnonzero(matching(table, SYNCHRONISING, table.calls.name))
    data = data_ranges(table)
    delay, starved = _queue(table, calls)
    return HostFacts(
        kernels=int(kernel.sum()),
        short_kernels=int((kernel & (rows.duration < SHORT_US)).sum()),
        without_launch=int((calls < 0).sum()),
        spill_over=int(spill_over(table, calls).sum()),
        sync_calls=_counted(table, synchronising),
        sync_us=float(table.calls.duration[synchronising].sum()),
        waits=_waits(table, calls, parent, steps),
        pageable_h2d=int(staged.sum()),
        pageable_h2d_us=float(rows.duration[staged].sum()),
        data_ranges=len(data),
        data_us=float(ranges.duration[data].sum()),
        data_share=_share(merged(intervals(ranges.start[data], ranges.duration[data])), steps),
        queue_delay_us=max(0.0, float(np.median(delay))) if len(delay) and np.median(delay) > -1.0 else None,
        starved=float(starved.mean()) if len(starved) else None,
    )


def _counted(table: Table, rows: Ints) -> dict[str, int]:
    names, counts = np.unique(table.calls.name[rows], return_counts=True)
    return {table.names[name]: int(count) for name, count in zip(names.tolist(), counts.tolist(), strict=True)}


def _share(disjoint: Floats, steps: Steps) -> float | None:
    whole = float((steps.host[:, 1] - steps.host[:, 0]).sum())
    return float(covered(disjoint, *steps.host.T).sum()) / whole if whole > 0 else None


def _queue(table: Table, calls: Ints) -> tuple[Floats, Floats]:
    """For each launch its delay until the device began with it, and 1.0 where the device had run dry before, else 0.0.

    A launch of a graph counts once, by what begins first.
    """
    rows = table.activities
    dry = np.zeros(len(rows), dtype=bool)
    launched = np.flatnonzero(calls >= 0)
    returned = np.append(table.calls.start + table.calls.duration, np.nan)[calls]
    for device in np.unique(rows.device).tolist():
        mine = np.flatnonzero(rows.device == device)
        reached = np.concatenate(([-np.inf], np.maximum.accumulate(rows.end[mine])[:-1]))
        dry[mine] = returned[mine] >= reached
    _, first = np.unique(calls[launched], return_index=True)
    chosen = launched[first]
    return rows.start[chosen] - returned[chosen], dry[chosen].astype(np.float64)


def _waits(table: Table, calls: Ints, parent: Ints, steps: Steps) -> tuple[Wait, ...]:
    """What holds the host, by call and by the operators around it; within the steps where there are any."""
    rows = table.calls
    blocking = blocking_calls(table, calls)
    if len(steps):
        blocking = blocking[step_of(steps.host, rows.start[blocking]) >= 0]
    if not len(blocking):
        return ()
    around = innermost(rows.thread[blocking], rows.start[blocking], table.operators, parent)
    chains = [rows.name[blocking]]
    while (around >= 0).any():
        chains.append(np.where(around >= 0, np.append(table.operators.name, -1)[around], -1))
        around = np.where(around >= 0, np.append(parent, -1)[around], -1)
    kinds, place = np.unique(np.column_stack(chains), axis=0, return_inverse=True)
    count = np.bincount(place.reshape(-1), minlength=len(kinds))
    time = np.bincount(place.reshape(-1), weights=rows.duration[blocking], minlength=len(kinds))
    found = [
        Wait(
            call=table.names[names[0]],
            operators=tuple(table.names[name] for name in reversed(names[1:]) if name >= 0),
            count=int(count[row]),
            time_us=float(time[row]),
        )
        for row, names in enumerate(kinds.tolist())
    ]
    return tuple(sorted(found, key=lambda wait: (-wait.time_us, wait.call, wait.operators)))
