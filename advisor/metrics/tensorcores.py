"""Whether a kernel multiplies on matrix units, by what its name states and by its operator, data type and device."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Families whose operators are matrix products, and those of torch's own that never hold one. In the families between
# (recurrent, normalization, custom, ...) an operator may launch both kinds of kernel.
MATRIX_FAMILIES = frozenset({"matmul", "convolution", "attention"})
OTHER_FAMILIES = frozenset(
    "softmax reduction sorting fill random optimizer pooling resampling dropout view communication".split()
)

_HALF = frozenset({"bfloat16", "float16"})
_FLOAT8 = frozenset({"float8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
# Matrix instructions came with Volta, CDNA 1 (gfx908) and RDNA 3 (gfx11).
_AMD_WITH_MATRIX_UNITS = re.compile(r"gfx(?:908|90a|94\d|95\d|11\d\d|12\d\d)")
# What a longer name says about its instructions stands in its first characters.
_LONGEST_NAME = 4096


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Whether a kernel uses matrix units, `None` where that is not known, and why."""

    used: bool | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Entry:
    pattern: re.Pattern[str]
    uses: bool
    why: str
    arch: str


@dataclass(frozen=True, slots=True)
class _Type:
    pattern: re.Pattern[str]
    dtype: str | None


def tensor_use(
    kernel_name: str, op_family: str | None = None, dtype: str | None = None, arch: str | None = None
) -> bool | None:
    """Whether this kernel uses matrix units; `None` where that is not known. `explain` gives the reason with it."""
    return explain(kernel_name, op_family, dtype, arch).used


def explain(
    kernel_name: str, op_family: str | None = None, dtype: str | None = None, arch: str | None = None
) -> TensorUse:
    """Whether this kernel uses matrix units, with the reason.

    `op_family` is the family of the operator that launched it ("matmul", "convolution", "attention", ...), `dtype` the
    data type of that operator's inputs ("bfloat16", ...), `arch` the architecture of the device ("sm_90", "gfx942").
    A device without matrix units never uses them. Then a name that states the instruction decides, since operators
    also launch transposes and sums of partial results, and a float32 product may run in TF32 or not; then operator and
    data type. What neither says is unknown, never "no".

    NVIDIA's GTX 16 series reports sm_75 and has no tensor cores; its float16 products are misjudged.
    """
    if _without_matrix_units(arch):
        return TensorUse(False, f"{arch} has no matrix units")
    entry = _stated(kernel_name, arch or "")
    if entry is not None:
        return TensorUse(entry.uses, f"the name says {entry.why}")
    if op_family in OTHER_FAMILIES:
        return TensorUse(False, f"a {op_family} operator holds no matrix product")
    if op_family not in MATRIX_FAMILIES:
        return TensorUse(None, "neither the name nor an operator says whether it is a matrix product")
    return _by_type(dtype or dtype_of_name(kernel_name), op_family, arch)


@lru_cache(maxsize=8192)
def dtype_of_name(kernel_name: str) -> str | None:
    """The data type that a matrix kernel multiplies, as far as its name states it; `None` otherwise.

    "tfloat32" where float32 operands are rounded. "s1688" alone is no type: CUTLASS uses it for TF32, bfloat16 and
    float16, and `f16` in cuDNN's generated attention stands for both 16-bit types.
    """
    for entry in _types():
        found = entry.pattern.search(kernel_name[:_LONGEST_NAME])
        if found is None:
            continue
        group = next((text for text in found.groups() if text is not None), None)
        return entry.dtype if group is None else _table()["types"][group]
    return None


def _by_type(dtype: str | None, family: str, arch: str | None) -> TensorUse:
    """A matrix operator whose kernel's name states nothing."""
    if dtype is None:
        return TensorUse(None, f"the data type of the {family} is not recorded")
    if arch is None:
        return TensorUse(None, "the architecture of the device is unknown")
    known = _nvidia(dtype, int(arch[3:]), family) if re.fullmatch(r"sm_\d+", arch) else None
    if known is None and arch.startswith("gfx") and dtype in _HALF | _FLOAT8:
        known = TensorUse(True, f"a {dtype} {family} on {arch}")
    return known or TensorUse(None, f"a {dtype} {family} on {arch} may run on either kind of unit")


def _nvidia(dtype: str, capability: int, family: str) -> TensorUse | None:
    """Types of mma instructions by compute capability (PTX ISA, "Matrix multiply-accumulate operation")."""
    least = {"float16": 70, "bfloat16": 80, "tfloat32": 80, "int8": 75}
    least |= dict.fromkeys(_FLOAT8, 89)
    if dtype in least:
        if capability >= least[dtype]:
            return TensorUse(True, f"a {dtype} {family} on sm_{capability}")
        return TensorUse(False, f"sm_{capability} has no {dtype} matrix instruction")
    if dtype in ("float32", "float64") and capability < 80:
        return TensorUse(False, f"sm_{capability} has no {dtype} matrix instruction")
    return None


def _without_matrix_units(arch: str | None) -> bool:
    if arch is None:
        return False
    if arch.startswith("gfx"):
        return _AMD_WITH_MATRIX_UNITS.fullmatch(arch) is None
    found = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return found is not None and int(found[1]) < 70


@lru_cache(maxsize=8192)
def _stated(kernel_name: str, arch: str) -> _Entry | None:
    name = kernel_name[:_LONGEST_NAME]
    return next((entry for entry in _entries() if arch.startswith(entry.arch) and entry.pattern.search(name)), None)


@lru_cache(maxsize=1)
def _entries() -> tuple[_Entry, ...]:
    return tuple(
        _Entry(re.compile(row["pattern"].strip()), row["uses"], row["why"], row.get("arch", ""))
        for row in _table()["kernel"]
    )


@lru_cache(maxsize=1)
def _types() -> tuple[_Type, ...]:
    return tuple(_Type(re.compile(row["pattern"]), row.get("dtype")) for row in _table()["dtype"])


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    path = resources.files("advisor.metrics").joinpath("tensorcores.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
