"""Steps by repetition, for traces that nothing marked: the kernels of a training loop come in the same order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.columns.intervals import NO_INTERVALS, Intervals
from advisor.columns.table import Ints, Table
from advisor.metrics.optimizers import BACKWARD

REPETITIONS = 3
BACKWARD_KERNEL = re.compile(r"backward|bwd|dgrad|wgrad", re.IGNORECASE)


def periods(table: Table, calls: Ints) -> tuple[tuple[int, ...], Intervals]:
    """Numbers (from 0) and times of the repetitions that a trace consists of; nothing unless that is certain.

    What the busiest stream ran must repeat exactly, by name, at least three times and make up the whole trace but for
    less than one repetition at its start; and the trace must hold a backward pass, because the layers of a model that
    only runs forward repeat just as well. A repetition begins behind the longest pauses of the device, wherever in the
    loop they are. Times are those of the launches, and those of the device where no launch is recorded.
    """
    rows = table.activities
    queue = _busiest(table, calls)
    found = _period(rows.name[queue].tolist()) if _trains(table) else None
    if found is None:
        return (), NO_INTERVALS
    first = found.first + _phase(table, queue[found.first :], found.length)
    moments = table.calls.start[calls[queue]] if (calls >= 0).any() else rows.start[queue]
    edges = np.append(moments, np.nextafter(moments[-1], np.inf))[first :: found.length]
    return tuple(range(len(edges) - 1)), np.column_stack((edges[:-1], edges[1:]))


class _Run(NamedTuple):
    """A run that repeats until the end of a sequence: where it begins, the length of one repetition."""

    first: int
    length: int


def _busiest(table: Table, calls: Ints) -> Ints:
    """Rows of the stream that ran most activities, in order; only launched ones where any launch is recorded."""
    rows = table.activities
    chosen = np.flatnonzero(calls >= 0) if (calls >= 0).any() else np.arange(len(rows))
    if not len(chosen):
        return chosen
    streams = np.column_stack((rows.device[chosen], rows.stream[chosen]))
    _, stream, counts = np.unique(streams, axis=0, return_inverse=True, return_counts=True)
    return np.asarray(chosen[stream.reshape(-1) == int(np.argmax(counts))])


def _trains(table: Table) -> bool:
    """Whether the trace holds a backward pass, by its operators or by the names of its kernels."""
    if len(table.operators):
        named = [place for place, name in enumerate(table.names) if BACKWARD.search(name)]
        return bool((table.operators.forward_thread > 0).any() or np.isin(table.operators.name, named).any())
    return any(BACKWARD_KERNEL.search(table.names[name]) for name in np.unique(table.activities.name).tolist())


def _period(names: Sequence[int]) -> _Run | None:
    """The run of at least three repetitions that leaves less than one of them in front; the shortest repetition.

    For every suffix the failure function of Knuth, Morris and Pratt, run from the end, gives its shortest period.
    """
    turned = names[::-1]
    failure = [0] * len(turned)
    matched = 0
    for place in range(1, len(turned)):
        while matched and turned[place] != turned[matched]:
            matched = failure[matched - 1]
        matched += turned[place] == turned[matched]
        failure[place] = matched
    for size in range(len(turned), 0, -1):
        length = size - failure[size - 1]
        if size >= REPETITIONS * length and len(turned) - size < length:
            return _Run(len(turned) - size, length)
    return None


def _phase(table: Table, kernels: Ints, length: int) -> int:
    """The place in a repetition with the longest pauses of the device in front of it, summed over all repetitions."""
    rows = table.activities
    reached = np.maximum.accumulate(rows.end[kernels])
    pause = np.maximum(0.0, rows.start[kernels][1:] - reached[:-1])
    totals = np.zeros(length)
    np.add.at(totals, np.arange(1, len(kernels)) % length, pause)
    return int(np.argmax(totals))
