"""The recorded time cut into units: one per operator call whose arithmetic or traffic is counted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from advisor.model import Kernels, Operators

BY_PHASE = {"comm": "communication", "copy": "host copies", "optimizer": "optimizer"}


class Unit(NamedTuple):
    """Time of one call in the profiled steps, in microseconds; `row` is its operator, -1 where no operator launched it.

    `family` is the operator's, but communication, host copies and the optimizer go by what they are for.
    """

    family: str
    row: int
    time_us: float


def counted_rows(operators: Operators, work: Collection[int]) -> tuple[int, ...]:
    """For each operator row the enclosing row whose arithmetic is counted, or itself."""
    found: list[int] = []
    for row, parent in enumerate(operators.parent):
        outer = found[parent] if parent >= 0 else row
        found.append(outer if outer in work and row not in work else row)
    return tuple(found)


def working_rows(
    operators: Operators, kernels: Kernels, families: Sequence[str], work: Collection[int]
) -> tuple[int, ...]:
    """Rows that do something themselves: that launched kernels, on a CPU those that leave it to no other operator."""
    if len(kernels):
        return tuple(sorted({row for row in kernels.operator if row >= 0}))
    idle = ("view", "autograd", "fill")
    callers = {parent for row, parent in enumerate(operators.parent) if families[row] not in idle}
    return tuple(
        row
        for row in range(len(operators))
        if families[row] not in ("view", "autograd") and (row in work or row not in callers)
    )


def cut(
    operators: Operators,
    kernels: Kernels,
    operator_phase: Sequence[str],
    kernel_phase: Sequence[str],
    families: Sequence[str],
    counted: Sequence[int],
) -> tuple[Unit, ...]:
    """Kernel durations, or without kernels the time operators spend outside the operators they call, by unit."""
    times: dict[tuple[str, int], float] = {}
    if len(kernels):
        for row, operator in enumerate(kernels.operator):
            if kernels.step[row] >= 0:
                unit = counted[operator] if operator >= 0 else -1
                family = BY_PHASE.get(kernel_phase[row]) or (families[unit] if unit >= 0 else "other")
                times[family, unit] = times.get((family, unit), 0.0) + kernels.duration_us[row]
    else:
        inner = [0.0] * len(operators)
        for row, parent in enumerate(operators.parent):
            if parent >= 0:
                inner[parent] += operators.duration_us[row]
        for row, unit in enumerate(counted):
            if operators.step[row] >= 0 and operator_phase[row] != "data":
                family = BY_PHASE.get(operator_phase[row]) or families[unit]
                own = max(0.0, operators.duration_us[row] - inner[row])
                times[family, unit] = times.get((family, unit), 0.0) + own
    return tuple(Unit(family, row, time) for (family, row), time in sorted(times.items()))
