"""Steps by their optimizers, for traces that no schedule marked: a step ends where its last optimizer ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.columns.intervals import NO_INTERVALS, Intervals
from advisor.columns.joins import step_of
from advisor.columns.schema import ANNOTATION
from advisor.columns.table import Floats, Ints, Table

PREFIX = "Optimizer.step#"
BACKWARD = re.compile(r"^autograd::engine::|Backward")


class _Group(NamedTuple):
    """Optimizers that run after the same backward pass: microseconds, names."""

    start: float
    end: float
    names: frozenset[str]


def optimizer_steps(table: Table, calls: Ints) -> tuple[tuple[int, ...], Intervals]:
    """Numbers (from 0) and host ranges of the steps that `Optimizer.step#` ranges end; nothing below two of them.

    Optimizers without a backward pass between them end one step together. Where backward passes alternate between
    optimizers (a generator and a discriminator), the step ends with the one that runs as often as any, and of several
    with the one that the longest time without an optimizer follows. What runs in front of the first optimizer counts as
    a step only when it launched as much as the least of the others: a trace may begin in the middle of a step. One
    class of optimizers that steps twice, with a backward pass between, counts as two steps: names cannot tell.
    """
    groups = _ending(_grouped(table))
    if len(groups) < 2:
        return (), NO_INTERVALS
    begin, finish = _host_span(table)
    ends = [group.end for group in groups]
    if groups[-1].end <= groups[-1].start:  # a range that the profiler cut off has no duration
        ends[-1] = finish
    host = np.column_stack(([begin, *ends[:-1]], ends))
    work = np.bincount(step_of(host, _launches(table, calls)) + 1, minlength=len(host) + 1)[1:]
    if work[0] < work[1:].min():
        host = host[1:]
    return tuple(range(len(host))), host


def _launches(table: Table, calls: Ints) -> Floats:
    """When the host launched device activities, or called operators where no launch is recorded."""
    known = calls[calls >= 0]
    return table.calls.start[known] if len(known) else table.operators.start


def _host_span(table: Table) -> tuple[float, float]:
    """First start and last end of what the host recorded of operators, calls and annotations."""
    marked = table.ranges.kind == ANNOTATION
    starts = (table.operators.start, table.calls.start, table.ranges.start[marked])
    lengths = (table.operators.duration, table.calls.duration, table.ranges.duration[marked])
    ends = [float((start + length).max()) for start, length in zip(starts, lengths, strict=True) if len(start)]
    return min(float(start.min()) for start in starts if len(start)), max(ends)


def _grouped(table: Table) -> list[_Group]:
    """Optimizer ranges that lie in no other, in order; those that no backward pass separates are one group."""
    rows = table.ranges
    chosen = [place for place, name in enumerate(table.names) if name.startswith(PREFIX)]
    backward = _backward(table)
    groups: list[_Group] = []
    for row in np.flatnonzero((rows.kind == ANNOTATION) & np.isin(rows.name, chosen)).tolist():
        start = float(rows.start[row])
        item = _Group(start, start + float(rows.duration[row]), frozenset([table.names[rows.name[row]]]))
        last = groups[-1] if groups else None
        if last is not None and start < last.end:
            continue
        if last is not None and len(backward) and not _any_between(backward, last.end, start):
            groups[-1] = _Group(last.start, item.end, last.names | item.names)
        else:
            groups.append(item)
    return groups


def _backward(table: Table) -> Floats:
    """Starts of the operators that autograd runs, in order."""
    rows = table.operators
    named = np.array([BACKWARD.search(name) is not None for name in table.names], dtype=bool)
    return rows.start[(rows.forward_thread > 0) | named[rows.name]] if len(rows) else rows.start


def _any_between(moments: Floats, begin: float, end: float) -> bool:
    return bool(np.searchsorted(moments, begin) < np.searchsorted(moments, end))


def _ending(groups: Sequence[_Group]) -> list[_Group]:
    """The groups that end a step."""
    counts: dict[str, int] = {}
    behind: dict[str, float] = {}
    for place, group in enumerate(groups):
        pause = groups[place + 1].start - group.end if place + 1 < len(groups) else 0.0
        for name in group.names:
            counts[name] = counts.get(name, 0) + 1
            behind[name] = behind.get(name, 0.0) + pause
    if not counts:
        return []
    chosen = max(sorted(counts), key=lambda name: (counts[name], behind[name]))
    return [group for group in groups if chosen in group.names]
