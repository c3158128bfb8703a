"""Least traffic of reductions: the input once and, where the reduced dimensions are recorded, the result once."""

from __future__ import annotations

import math

from advisor.operators.calls import BYTES, CODE_BYTES, Entries, NotRecorded, Shape, Texts, distinct, numbers

# Place of the reduced dimensions and of the result's dtype among the arguments, and how wide a result is beside its
# input: places of 64 bits, truth values of one byte, two results.
_DIMS = {"norm": 2, "linalg_vector_norm": 2}
_DTYPE = {"sum": 3, "mean": 3, "nansum": 3, "prod": 3, "linalg_vector_norm": 4}
NAMES = frozenset(
    """
    all amax amin any argmax argmin count_nonzero linalg_vector_norm max mean min nansum norm prod std std_mean sum var
    var_mean
    """.split()
)
_PLACES = frozenset({"argmax", "argmin", "count_nonzero"})
_PAIRS = frozenset({"std_mean", "var_mean"})


def traffic(plain: str, shapes: Entries, dtypes: Texts, concrete: Texts, strides: Entries | None) -> int:
    """Bytes of a reduction by its name without "aten::"; raises NotRecorded where the input is not known.

    A list of tensors (`_foreach_norm`) is read once.
    """
    if not dtypes or dtypes[0] not in BYTES:
        raise NotRecorded("the input of a reduction")
    entry, width = shapes[0], BYTES[dtypes[0]]
    if any(isinstance(size, tuple) for size in entry):
        return sum(math.prod(shape) for shape in entry if isinstance(shape, tuple)) * width
    shape = tuple(size for size in entry if isinstance(size, int))
    step = strides[0] if strides is not None and strides else None
    known = None if step is None else tuple(size for size in step if isinstance(size, int))
    return distinct(shape, known) * width + _left(plain, shape, concrete) * _width(plain, width, concrete)


def _left(plain: str, shape: Shape, concrete: Texts) -> int:
    """Elements of the result; 0 where the dimensions are not recorded, or all are reduced."""
    place = _DIMS.get(plain, 1)
    try:
        dims = numbers(concrete[place]) if place < len(concrete) else ()
    except NotRecorded:  # `std(x, unbiased)` reduces everything
        return 0
    if not dims or not shape or not all(-len(shape) <= dim < len(shape) for dim in dims):
        return 0
    gone = {dim % len(shape) for dim in dims}
    return math.prod(size for dim, size in enumerate(shape) if dim not in gone)


def _width(plain: str, width: int, concrete: Texts) -> int:
    if plain in ("all", "any"):
        return 1
    if plain in _PLACES:
        return 8
    if plain in ("max", "min"):  # along a dimension: values and their places
        return width + 8
    place = _DTYPE.get(plain, len(concrete))
    if place < len(concrete) and concrete[place].isdigit():
        return CODE_BYTES.get(int(concrete[place]), 1)
    return width * (2 if plain in _PAIRS else 1)
