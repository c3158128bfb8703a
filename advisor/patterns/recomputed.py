"""What the backward pass computed a second time, as the trace shows it: its time, and what it would be to keep it."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.model import Operators, Profile
from advisor.operators.arithmetic import RECOMPUTED, passes
from advisor.operators.families import VIEWS, plain_name
from advisor.roofline import BYTES


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Of one step: the time of what is computed again, a bound on the bytes that are kept without that, and the names
    of the operators."""

    time_us: float
    kept_bytes: int
    operators: frozenset[str]


def recomputation(profile: Profile) -> Recomputation | None:
    """What the profiled steps computed again in their backward passes; None where they did not.

    The time is that of the kernels; without kernels that of the outermost operators, on the scale of the un-profiled
    steps. Kept are at most the inputs of the operators that autograd recorded, each of them taken for a tensor of its
    own, weights included: the true figure is lower.
    """
    operators, kernels = profile.operators, profile.kernels
    state = passes(operators)
    rows = [row for row in range(len(operators)) if state[row] == RECOMPUTED and operators.step[row] >= 0]
    if not rows:
        return None
    steps = len({step for step in operators.step if step >= 0})
    if len(kernels):
        pairs = zip(kernels.operator, kernels.duration_us, strict=True)
        spent = sum(duration for row, duration in pairs if row >= 0 and state[row] == RECOMPUTED)
    else:
        outermost = [row for row in rows if state[operators.parent[row]] != RECOMPUTED]
        spent = sum(operators.duration_us[row] for row in outermost) * profile.pace()
    kept = sum(_read_bytes(operators, row) for row in _saving(operators, rows))
    return Recomputation(spent / steps, kept // steps, frozenset(operators.name[row] for row in rows))


def _saving(operators: Operators, rows: list[int]) -> list[int]:
    """The rows that save tensors for the backward pass: the innermost that autograd recorded, views aside."""
    recorded = [r for r in rows if operators.sequence[r] >= 0 and plain_name(operators.name[r]) not in VIEWS]
    outer = {operators.parent[row] for row in recorded}
    return [row for row in recorded if row not in outer]


def _read_bytes(operators: Operators, row: int) -> int:
    total = 0
    for shape, dtype in zip(operators.shapes[row], operators.dtypes[row], strict=False):
        if dtype not in BYTES or not all(isinstance(size, int) for size in shape):
            continue
        count = 1
        for size in shape:
            count *= size
        total += count * BYTES[dtype]
    return total
