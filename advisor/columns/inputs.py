"""The inputs of operator calls out of the texts a trace records: shapes, dtypes, strides and constant arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from advisor.columns.schema import Signature

Sizes = tuple[int, ...]
Entry = Sizes | tuple[Sizes, ...]  # of one input: a tensor's sizes, or those of each tensor of a list

MAX_DIMENSIONS = 64  # reductions support no more (ATen/WrapDimUtilsMulti.h)
_MOST = 1 << 62

DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "unsigned long": "uint64",
    "long unsigned int": "uint64",
    "unsigned int": "uint32",
    "unsigned short": "uint16",
    "short unsigned int": "uint16",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::Float8_e8m0fnu": "float8_e8m0fnu",
    "c10::Float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "c10::complex<c10::Half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """One entry per input: `shapes` and `strides` have () for what is no tensor and one tuple per tensor for a list of
    tensors, `dtypes` has "" for what is no tensor. `concrete` holds the texts of constant arguments.
    """

    shapes: tuple[Entry, ...] = ()
    dtypes: tuple[str, ...] = ()
    strides: tuple[Entry, ...] = ()
    concrete: tuple[str, ...] = ()


def inputs_of(signature: Signature) -> Inputs:
    """Read what one kind of call recorded; what is not as Kineto writes it counts as not recorded."""
    return Inputs(
        shapes=tuple(_entry(item, _elements) for item in _items(signature.dims)),
        dtypes=tuple(DTYPES.get(str(item), "") for item in _items(signature.types)),
        strides=tuple(_entry(item, _largest) for item in _items(signature.strides)),
        concrete=tuple(str(item) for item in _items(signature.concrete)),
    )


def _entry(item: object, extent: Callable[[Sizes], int]) -> Entry:
    sizes = _sizes(item, extent)
    return sizes if sizes is not None else _list(item, extent)


def _elements(sizes: Sizes) -> int:
    return math.prod(sizes) if len(sizes) <= MAX_DIMENSIONS else _MOST


def _largest(strides: Sizes) -> int:
    return max(strides, default=0)


def _items(text: bytes) -> list[object]:
    if not text:
        return []
    try:
        return msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, RecursionError):
        return []


def _sizes(item: object, extent: Callable[[Sizes], int]) -> Sizes | None:
    """The numbers of one tensor, None where they are none or their extent is more than any memory holds."""
    if not isinstance(item, list):
        return None
    sizes = tuple(size for size in item if isinstance(size, int) and not isinstance(size, bool) and size >= 0)
    return sizes if len(sizes) == len(item) and extent(sizes) < _MOST else None


def _list(item: object, extent: Callable[[Sizes], int]) -> tuple[Sizes, ...]:
    if not isinstance(item, list):
        return ()
    found = [_sizes(part, extent) for part in item]
    return tuple(sizes for sizes in found if sizes is not None) if None not in found else ()
