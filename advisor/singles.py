"""Counters of single kernels and operators: which of a trace are worth asking for, and what was measured of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from advisor.capture.replaying import RecordedCall, replay
from advisor.columns.inputs import Inputs
from advisor.columns.schema import KERNEL
from advisor.columns.table import Floats, Table
from advisor.fileprofile import machine_of, profile_of
from advisor.ingest.ncu import read_ncu
from advisor.ingest.ncu_join import TraceKernels, join, metrics_by_row
from advisor.ingest.reader import read_table
from advisor.measured import Cost, FileProfile
from advisor.metrics import floors as least
from advisor.model import Metric, SingleCounters

KERNELS = 12  # whose counters are asked for
OPERATORS = 8


def look(path: Path) -> tuple[Table, FileProfile]:
    """A trace and what it says."""
    table = read_table(path)
    return table, profile_of(path, table, machine_of(table, None, None))


def top(profile: FileProfile, kind: str, count: int) -> tuple[Cost, ...]:
    """The costs of a kind with most recoverable time, then most time."""
    chosen = [cost for cost in profile.costs if cost.kind == kind]
    return tuple(sorted(chosen, key=lambda cost: (-(cost.recoverable_us or 0.0), -cost.time_us, cost.name))[:count])


def _call(name: str, inputs: Inputs) -> RecordedCall | None:
    """A kind of call as it can be made again; None where a list of tensors hides its sizes."""
    if any(isinstance(size, tuple) for entry in inputs.shapes for size in entry):
        return None
    return RecordedCall(
        name=name,
        shapes=_plain(inputs.shapes),
        dtypes=inputs.dtypes,
        strides=_plain(inputs.strides),
        concrete=inputs.concrete,
    )


def recorded_calls(table: Table, costs: Sequence[Cost]) -> list[RecordedCall | None]:
    """The call behind each operator's cost; of several kinds, which differ in a dtype or a constant, the longest."""
    links = least.link(table)
    kinds = least.kinds(table, links)
    time = _times(table, links, kinds)
    longest: dict[tuple[str, str | None], int] = {}
    for place, (name, inputs) in enumerate(zip(kinds.name, kinds.inputs, strict=True)):
        title = name, least.sizes(inputs) or None
        if title not in longest or time[place] > time[longest[title]]:
            longest[title] = place
    places = [longest.get((cost.name, cost.shapes)) for cost in costs]
    return [None if place is None else _call(kinds.name[place], kinds.inputs[place]) for place in places]


def _times(table: Table, links: least.Links, kinds: least.Kinds) -> Floats:
    """Kernel time in microseconds of each kind of call, at the operator whose arithmetic counts."""
    kernels = np.flatnonzero((links.operator >= 0) & (table.activities.kind == KERNEL))
    row = links.operator[kernels]
    counted = least.rows(table, links, kinds).counted[row]
    kind = kinds.of_row[np.where(counted >= 0, counted, row)]
    time = np.bincount(kind, weights=least.lengths(table)[kernels], minlength=len(kinds.name))
    return time.astype(np.float64)


def launching(table: Table, kernels: Sequence[str]) -> tuple[RecordedCall, ...]:
    """One call that launches each of some kernels, where an operator did."""
    links = least.link(table)
    kinds = least.kinds(table, links)
    found: dict[RecordedCall, None] = {}
    for name in kernels:
        rows = np.flatnonzero((table.activities.name == table.names.index(name)) & (links.operator >= 0))
        for operator in links.operator[rows[:1]].tolist():
            kind = int(kinds.of_row[operator])
            call = _call(kinds.name[kind], kinds.inputs[kind])
            if call is not None:
                found.setdefault(call)
    return tuple(found)


def _plain(entries: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    return tuple(entry if isinstance(entry, tuple) else () for entry in entries)


def replayed(table: Table, profile: FileProfile, interpreter: str = sys.executable) -> tuple[SingleCounters, ...]:
    """Replay the operators with most recoverable time alone, under the device's counters."""
    costs = top(profile, "operator", OPERATORS)
    calls = list(zip(costs, recorded_calls(table, costs), strict=True))
    answers = iter(replay([call for _, call in calls if call is not None], interpreter=interpreter))
    found = []
    for cost, call in calls:
        if call is None:
            reason = "its inputs are lists of tensors, which are not recorded one by one"
            found.append(SingleCounters(kind="operator", name=cost.title, time_us=cost.time_us, reason=reason))
        else:
            answer = next(answers)
            found.append(
                SingleCounters(
                    kind="operator",
                    name=cost.title,
                    time_us=cost.time_us,
                    counters=answer.counters,
                    reason=answer.reason,
                )
            )
    return tuple(found)


def counted(table: Table, profile: FileProfile, pages: Sequence[Path]) -> tuple[SingleCounters, ...]:
    """What Nsight Compute says of the kernels with most recoverable time."""
    seen = kernel_counters(table, pages).by_name
    return tuple(
        SingleCounters(
            kind="kernel",
            name=cost.name,
            time_us=cost.time_us,
            counters=seen.get(cost.name, ()),
            reason=None if cost.name in seen else "Nsight Compute saw no launch of it",
        )
        for cost in top(profile, "kernel", KERNELS)
    )


class Counted(NamedTuple):
    """Counters by the name of a trace's kernel, and how many of the launches that were seen are in the trace."""

    by_name: dict[str, tuple[Metric, ...]]
    matched: int
    launches: int


def kernel_counters(table: Table, pages: Sequence[Path]) -> Counted:
    """What Nsight Compute says of the kernels of a trace: means over the launches of a name that it saw."""
    names, trace = _launches(table)
    seen: dict[str, list[tuple[Metric, ...]]] = {}
    matched = launches = 0
    for page in pages:
        kernels = read_ncu(page)
        matches = join(kernels, trace)
        launches += len(matches)
        matched += sum(bool(match.rows) for match in matches)
        for place, metrics in metrics_by_row(kernels, matches).items():
            seen.setdefault(names[place], []).append(metrics)
    return Counted({name: _means(metrics) for name, metrics in seen.items()}, matched, launches)


def _launches(table: Table) -> tuple[list[str], TraceKernels]:
    """The kernels of a trace as Nsight Compute's are joined to them."""
    rows = table.activities
    chosen = np.flatnonzero(rows.kind == KERNEL)
    names = table.named(rows.name[chosen])
    sizes = [
        [
            (x, y, z) if x > 0 else None
            for x, y, z in zip(*(getattr(rows, f"{shape}_{axis}")[chosen].tolist() for axis in "xyz"), strict=True)
        ]
        for shape in ("grid", "block")
    ]
    return names, TraceKernels(name=names, grid=sizes[0], block=sizes[1])


SHOWN = (
    "sm_active",
    "achieved_occupancy",
    "theoretical_occupancy",
    "tensor_active",
    "dram_throughput",
    "sm_throughput",
)


def _means(found: Sequence[tuple[Metric, ...]]) -> tuple[Metric, ...]:
    values: dict[str, list[Metric]] = {}
    for metrics in found:
        for metric in metrics:
            values.setdefault(metric.name, []).append(metric)
    return tuple(
        Metric(
            name=name,
            value=sum(metric.value for metric in values[name]) / len(values[name]),
            unit=values[name][0].unit,
            source=values[name][0].source,
        )
        for name in SHOWN
        if name in values
    )
