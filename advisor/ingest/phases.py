"""Which part of a training step an operator call or a device activity belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from advisor.model import Kernels, Operators

BACKWARD_RANGE = "advisor::backward"
CLOSURE_RANGE = "advisor::closure"  # what an optimizer was given to compute the loss inside its step
DATA_RANGES = ("advisor::data", "enumerate(DataLoader)#")
OPTIMIZER_RANGE = "Optimizer.step#"
ZERO_GRAD_RANGE = "Optimizer.zero_grad#"

ENGINE = "autograd::engine::"  # gradient accumulators run under this name without a sequence number

NamedRange = tuple[str, float, float, int]  # name, start, duration (microseconds), thread
StepTimes = tuple[int, float, float]  # index, start, end (microseconds)


def range_phase(name: str) -> str | None:
    """The phase a host range stands for, None for a range that says nothing about it."""
    if name.startswith(DATA_RANGES):
        return "data"
    if name.startswith(OPTIMIZER_RANGE):
        return "optimizer"
    if name.startswith(ZERO_GRAD_RANGE):
        return "other"
    if name == BACKWARD_RANGE:
        return "backward"
    if name == CLOSURE_RANGE:
        return "forward"
    return None


class Stretch(NamedTuple):
    """A stretch of one thread's time, in microseconds, and the range that stands for its phase."""

    start_us: float
    end_us: float
    phase: str
    name: str


def stretches(ranges: Sequence[NamedRange]) -> dict[int, list[Stretch]]:
    """By thread the disjoint stretches, in order, in which one range that stands for a phase is the innermost.

    An optimizer given a closure runs forward and backward inside its step: what it does itself lies around them.
    `ranges` come in order of start, an outer range before one that starts with it.
    """
    whole: dict[int, list[Stretch]] = {}
    for name, start, duration, thread in ranges:
        phase = range_phase(name)
        if phase is not None:
            whole.setdefault(thread, []).append(Stretch(start, start + duration, phase, name))
    return {thread: list(_innermost(items)) for thread, items in whole.items()}


def _innermost(whole: Sequence[Stretch]) -> Iterator[Stretch]:
    """Cut what nests in each other where an inner one begins or ends."""
    opened: list[Stretch] = []
    reached = -math.inf
    for item in (*whole, Stretch(math.inf, math.inf, "", "")):
        while opened and opened[-1].end_us <= item.start_us:
            inner = opened.pop()
            if inner.end_us > reached:
                yield inner._replace(start_us=reached)
                reached = inner.end_us
        if opened and item.start_us > reached:
            yield opened[-1]._replace(start_us=reached, end_us=item.start_us)
        opened.append(item)
        reached = item.start_us


class _Timeline:
    """Looks up the phase that the innermost range gives to a moment of a thread."""

    def __init__(self, ranges: Sequence[NamedRange]) -> None:
        self._known = stretches(ranges)
        self._starts = {thread: np.array([item.start_us for item in items]) for thread, items in self._known.items()}

    def at(self, thread: int, time: float) -> str | None:
        items = self._known.get(thread)
        if not items:
            return None
        place = int(np.searchsorted(self._starts[thread], time, side="right")) - 1
        if place < 0 or time >= items[place].end_us:
            return None
        return items[place].phase


def _backward_threads(operators: Operators) -> frozenset[int]:
    """Threads of autograd's own: they run gradient functions and no outermost call that records for autograd."""
    running: set[int] = set()
    recording: set[int] = set()
    for thread, forward, sequence, parent in zip(
        operators.thread, operators.forward_thread, operators.sequence, operators.parent, strict=True
    ):
        if forward:
            running.add(thread)
        elif sequence >= 0 and parent < 0:
            recording.add(thread)
    return frozenset(running - recording)


def operator_phases(operators: Operators, ranges: Sequence[NamedRange], steps: Sequence[StepTimes]) -> tuple[str, ...]:
    """One phase per operator row: data, forward, backward, optimizer or other.

    A call belongs to the backward pass when autograd runs it (`forward_thread`), inside `advisor::backward`, or on a
    thread of autograd's own. What follows the last backward pass of a step outside the optimizer (clipping, logging)
    and `zero_grad` are "other". Everything else is forward, also in a closure that the optimizer calls.
    """
    timeline = _Timeline(ranges)
    own_threads = _backward_threads(operators)
    phases: list[str] = []
    for row in range(len(operators)):
        parent, thread = operators.parent[row], operators.thread[row]
        engine = operators.name[row].startswith(ENGINE)
        if engine or operators.forward_thread[row] or thread in own_threads:
            phases.append("backward")
        elif parent >= 0:
            phases.append(phases[parent])
        else:
            phases.append(timeline.at(thread, operators.start_us[row]) or "forward")
    last = _last_backward(operators, phases, steps)
    return tuple(
        "other" if phase == "forward" and start >= last.get(step, float("inf")) else phase
        for phase, start, step in zip(phases, operators.start_us, operators.step, strict=True)
    )


def _last_backward(operators: Operators, phases: Sequence[str], steps: Sequence[StepTimes]) -> dict[int, float]:
    """End of the last backward operator of every step, in microseconds."""
    last: dict[int, float] = {}
    for phase, start, duration, step in zip(
        phases, operators.start_us, operators.duration_us, operators.step, strict=True
    ):
        if phase == "backward" and (step >= 0 or not steps):
            last[step] = max(last.get(step, 0.0), start + duration)
    return last


def kernel_phases(
    kernels: Kernels,
    launches: Mapping[int, tuple[float, int]],
    operators: Operators,
    phases: Sequence[str],
    ranges: Sequence[NamedRange],
    steps: Sequence[StepTimes],
) -> tuple[str, ...]:
    """One phase per device activity: that of its operator, but comm for collectives and copy for host transfers."""
    timeline = _Timeline(ranges)
    own_threads = _backward_threads(operators)
    last = _last_backward(operators, phases, steps)
    found = []
    for row, name in enumerate(kernels.name):
        launch = launches.get(kernels.correlation[row])
        if name.startswith("nccl"):
            found.append("comm")
        elif kernels.category[row] == "memcpy" and ("HtoD" in name or "DtoH" in name):
            found.append("copy")
        elif kernels.operator[row] >= 0:
            found.append(phases[kernels.operator[row]])
        elif launch is None:
            found.append("other")
        elif launch[1] in own_threads:
            found.append("backward")
        else:
            late = launch[0] >= last.get(kernels.step[row], float("inf"))
            found.append(timeline.at(launch[1], launch[0]) or ("other" if late else "forward"))
    return tuple(found)
