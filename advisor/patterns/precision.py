"""Time of matrix products, convolutions and attention per step, by the dtype of what they multiply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.model import Hardware, Kernels, Operators, Profile
from advisor.operators.families import ARITHMETIC, family

FLOATS = ("float", "bfloat")
LARGE_US = 20.0  # the least device time of a product that is worth casting its operands: a cast takes some 5 us


@dataclass(frozen=True)
class Products:
    """Products of one dtype and family: their number and device time per step, and the time of the large ones."""

    calls: float = 0.0
    time_us: float = 0.0
    large_us: float = 0.0
    longest_us: float = 0.0


@dataclass(frozen=True)
class Arithmetic:
    """All products of the profiled steps by family ("matmul", "convolution", "attention", "recurrent") and dtype."""

    products: Mapping[tuple[str, str], Products] = field(default_factory=dict)

    def of(self, dtype: str, *families: str) -> Products:
        """Products of a dtype, those of some families only where any are named."""
        wanted = [p for (kind, d), p in self.products.items() if d == dtype and (not families or kind in families)]
        return Products(
            calls=sum(p.calls for p in wanted),
            time_us=sum(p.time_us for p in wanted),
            large_us=sum(p.large_us for p in wanted),
            longest_us=max((p.longest_us for p in wanted), default=0.0),
        )


def arithmetic(profile: Profile) -> Arithmetic:
    """The products whose kernels ran in the profiled steps of a run on a GPU."""
    operators = profile.operators
    steps = len({step for step in profile.kernels.step if step >= 0})
    found: dict[tuple[str, str], Products] = {}
    for row, us in sorted(product_times(profile).items()):
        dtype = next((d for d in operators.dtypes[row] if d.startswith(FLOATS)), None)
        if dtype is None:
            continue
        key = (family(operators.name[row]), dtype)
        known = found.get(key, Products())
        found[key] = Products(
            calls=known.calls + 1 / steps,
            time_us=known.time_us + us / steps,
            large_us=known.large_us + (us / steps if us >= LARGE_US else 0.0),
            longest_us=max(known.longest_us, us),
        )
    return Arithmetic(found)


def product_times(profile: Profile) -> dict[int, float]:
    """The device time of every product of the profiled steps by its operator's row."""
    times: dict[int, float] = {}
    for row, us in _owners(profile.kernels, profile.operators):
        times[row] = times.get(row, 0.0) + us
    return times


def products_of(profile: Profile, kind: str, dtype: str) -> dict[int, float]:
    """The device time of the products of one family whose operands have a dtype, by their operators' rows."""
    operators = profile.operators
    return {
        row: us
        for row, us in product_times(profile).items()
        if family(operators.name[row]) == kind and dtype in operators.dtypes[row]
    }


def _owners(kernels: Kernels, operators: Operators) -> list[tuple[int, float]]:
    """The product each kernel belongs to, the innermost operator around its launch that is one, and its time."""
    found = []
    for row, (step, operator) in enumerate(zip(kernels.step, kernels.operator, strict=True)):
        if step < 0 or kernels.category[row] != "kernel":
            continue
        while operator >= 0 and family(operators.name[operator]) not in ARITHMETIC:
            operator = operators.parent[operator]
        if operator >= 0:
            found.append((operator, kernels.duration_us[row]))
    return found


def capability(hardware: Hardware) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA device; None for other devices and for those that are not known."""
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", hardware.arch or "")
    return (int(found[1]), int(found[2])) if found is not None else None
