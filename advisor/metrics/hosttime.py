"""What the threads of the host were doing: waiting for data, for peers, for the device, or issuing work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.columns.intervals import Intervals, intervals, merged
from advisor.columns.schema import ANNOTATION, MEMCPY
from advisor.columns.table import CallRows, Ints, OperatorRows, RangeRows, Table

DATA, COMMUNICATION, SYNC, LAUNCH = "data", "communication", "sync", "launch"

LOADER = re.compile(r"^enumerate\(DataLoader\)#|^advisor::data|^\[pl\]\[profile\].*dataloader_next$")
"""Waiting for the data loader: PyTorch's own range, the probe's, Lightning's PyTorchProfiler's."""

SYNCHRONISING = re.compile(r"^(cuda|hip)(Device|Stream|Event)Synchronize|^cu(Ctx|Stream|Event)Synchronize")
BLOCKING_COPY = re.compile(r"^(cuda|hip|cu)Memcpy(?!.*Async)")
PAGEABLE = re.compile(r"Pageable")
"""Copies of pageable memory hold the host while the memory is staged, and to pageable memory until they are done,
whatever the call is named (CUDA Runtime API, "API synchronization behavior")."""

HOST_COLLECTIVE = re.compile(r"^(gloo|mpi|ucc):")
"""Ranges of collectives that run on the host; those of nccl only tell when one was put on its stream."""
WAITING_OPERATOR = re.compile(r"^c10d::(monitored_)?barrier_?$|wait_tensor$")

Flags = npt.NDArray[np.bool_]


def matching(table: Table, pattern: re.Pattern[str], numbers: Ints) -> Flags:
    """For name numbers whether the pattern is found in the text."""
    hits = np.array([pattern.search(name) is not None for name in table.names], dtype=bool)
    return hits[numbers] if len(numbers) else np.zeros(0, dtype=bool)


def data_ranges(table: Table) -> Ints:
    """Rows of `ranges` in which a thread waits for the data loader."""
    rows = table.ranges
    return np.flatnonzero((rows.kind == ANNOTATION) & matching(table, LOADER, rows.name))


def blocking_calls(table: Table, calls: Ints) -> Ints:
    """Rows of `calls` that return only when the device has done something; `calls` comes from `launching_calls`."""
    rows = table.calls
    blocking = matching(table, SYNCHRONISING, rows.name) | matching(table, BLOCKING_COPY, rows.name)
    copies = (table.activities.kind == MEMCPY) & (calls >= 0)
    blocking[calls[copies & matching(table, PAGEABLE, table.activities.name)]] = True
    return np.flatnonzero(blocking)


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Stretches of one kind, with the number of the thread of each."""

    name: str
    thread: Ints
    spans: Intervals


@dataclass(frozen=True, slots=True, eq=False)
class HostTime:
    """Stretches of the threads by kind, the kind that counts first in front; kinds may overlap."""

    kinds: tuple[_Kind, ...]
    launching: Ints  # threads
    host_collectives: Intervals  # of any thread: they run on threads of their own

    def of(self, threads: Ints) -> Iterator[tuple[str, Intervals]]:
        """What some threads do, as disjoint intervals by kind."""
        for kind in self.kinds:
            yield kind.name, merged(kind.spans[np.isin(kind.thread, threads)])

    def of_launching(self) -> Iterator[tuple[str, Intervals]]:
        """What the threads do that launch device activities, with the collectives that run beside them."""
        for name, found in self.of(self.launching):
            yield name, merged(np.concatenate((found, self.host_collectives))) if name == COMMUNICATION else found


def host_time(table: Table, calls: Ints) -> HostTime:
    """Sort the host's time by kind: data, communication, sync, launch. `calls` comes from `launching_calls`."""
    ranges, operators = table.ranges, table.operators
    collectives = np.flatnonzero((ranges.kind == ANNOTATION) & matching(table, HOST_COLLECTIVE, ranges.name))
    waits = np.flatnonzero(matching(table, WAITING_OPERATOR, operators.name))
    kinds = (
        _kind(DATA, (ranges, data_ranges(table))),
        _kind(COMMUNICATION, (operators, waits), (ranges, collectives)),
        _kind(SYNC, (table.calls, blocking_calls(table, calls))),
        _kind(LAUNCH, (operators, np.arange(len(operators))), (table.calls, np.arange(len(table.calls)))),
    )
    return HostTime(
        kinds=kinds,
        launching=np.unique(table.calls.thread[calls[calls >= 0]]),
        host_collectives=intervals(ranges.start[collectives], ranges.duration[collectives]),
    )


def _kind(name: str, *sources: tuple[CallRows | OperatorRows | RangeRows, Ints]) -> _Kind:
    return _Kind(
        name,
        np.concatenate([rows.thread[chosen] for rows, chosen in sources]),
        np.concatenate(
            [intervals(rows.start[chosen], np.maximum(0.0, rows.duration[chosen])) for rows, chosen in sources]
        ),
    )
