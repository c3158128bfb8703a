"""Which part of a training step an operator call or a device activity belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from advisor.model import Kernels, Operators

BACKWARD_RANGE = "advisor::backward"
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
    return None


class _Timeline:
    """Looks up the phase a range gives to a moment of a thread. Ranges of the four kinds do not nest in each other."""

    def __init__(self, ranges: Sequence[NamedRange]) -> None:
        self._known: dict[int, list[tuple[float, float, str]]] = {}
        for name, start, duration, thread in ranges:
            phase = range_phase(name)
            known = self._known.setdefault(thread, [])
            if phase is not None and not (known and start < known[-1][1]):  # the outer range decides
                known.append((start, start + duration, phase))
        self._starts = {thread: np.array([item[0] for item in items]) for thread, items in self._known.items()}

    def at(self, thread: int, time: float) -> str | None:
        items = self._known.get(thread)
        if not items:
            return None
        place = int(np.searchsorted(self._starts[thread], time, side="right")) - 1
        if place < 0 or time >= items[place][1]:
            return None
        return items[place][2]


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
    and `zero_grad` are "other". Everything else is forward.
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
