"""The columns of one recorded window, as the later stages read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from advisor.ingest.phases import kernel_phases, operator_phases
from advisor.ingest.steps import Rows, Timeline, measure
from advisor.ingest.units import Unit, counted_rows, cut, working_rows
from advisor.model import Kernels, Operators
from advisor.operators.arithmetic import Work, count_work
from advisor.operators.traffic import families, traffic


class Range(NamedTuple):
    """A named host range (`record_function`): microseconds from the start of the trace."""

    name: str
    start_us: float
    duration_us: float
    thread: int


class Launch(NamedTuple):
    """The host call that put a device activity on its stream."""

    start_us: float
    thread: int


class StepRange(NamedTuple):
    """The host range of one profiled step; on a GPU this is launch time, not the step's duration."""

    number: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded window, rows in time order; times are microseconds from the window's first event.

    `operator_phase` and `kernel_phase` say per row which part of a step it belongs to (data, forward, backward,
    optimizer, copy, comm, other); `outermost` is the row of the enclosing operator that has no parent; `work` holds the
    arithmetic of the rows that do any, `family` and `least_bytes` describe every row, `working` lists the rows that do
    something themselves, `units` cuts the steps' time into calls. `timeline` has the steps as measured, `steps` their
    host ranges; `recorded` is the window the profiler itself claims, where it says so. `memory_calls` gives calls per
    step and the host's time in them by the name of those that take memory from the driver or give it back. `defects`
    counts what makes a trace untrustworthy (negative durations, activities outside the window or before their launch).
    """

    operators: Operators
    kernels: Kernels
    ranges: tuple[Range, ...] = ()
    launches: Mapping[int, Launch] = field(default_factory=dict)
    steps: tuple[StepRange, ...] = ()
    operator_phase: tuple[str, ...] = ()
    kernel_phase: tuple[str, ...] = ()
    outermost: tuple[int, ...] = ()
    work: Mapping[int, Work] = field(default_factory=dict)
    family: tuple[str, ...] = ()
    least_bytes: tuple[float | None, ...] = ()
    working: tuple[int, ...] = ()
    units: tuple[Unit, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)
    recorded: tuple[float, float] | None = None
    device_names: tuple[str, ...] = ()
    memory_calls: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    defects: Mapping[str, int] = field(default_factory=dict)


def assemble(
    *,
    operators: Operators,
    concrete: Mapping[int, tuple[str, ...]],
    kernels: Kernels,
    ranges: tuple[Range, ...],
    launches: Mapping[int, Launch],
    steps: tuple[StepRange, ...],
    recorded: tuple[float, float] | None = None,
    device_names: tuple[str, ...] = (),
    memory_calls: Mapping[str, tuple[float, float]] | None = None,
    defects: Mapping[str, int] | None = None,
) -> Trace:
    """Derive what the columns imply. `concrete` holds constant arguments of operator rows, as text."""
    phases = operator_phases(operators, ranges, steps)
    of_kernels = kernel_phases(kernels, launches, operators, phases, ranges, steps)
    kinds = families(operators)
    work = count_work(operators, concrete)
    counted = counted_rows(operators, work)
    return Trace(
        operators=operators,
        kernels=kernels,
        ranges=ranges,
        launches=launches,
        steps=steps,
        operator_phase=phases,
        kernel_phase=of_kernels,
        outermost=_outermost(operators),
        work=work,
        family=kinds,
        least_bytes=traffic(operators, kinds, concrete),
        working=working_rows(operators, kernels, kinds, work),
        units=cut(operators, kernels, phases, of_kernels, kinds, counted),
        timeline=measure(Rows(operators, kernels, ranges, launches, steps, phases, of_kernels)),
        recorded=recorded,
        device_names=device_names,
        memory_calls=memory_calls or {},
        defects=defects or {},
    )


def _outermost(operators: Operators) -> tuple[int, ...]:
    found: list[int] = []
    for row, parent in enumerate(operators.parent):
        found.append(row if parent < 0 else found[parent])
    return tuple(found)
