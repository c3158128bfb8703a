"""Least traffic of element by element arithmetic: torch's own operators and the kernels that a compiler fused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from advisor.operators.calls import BYTES, Entries, Entry, NotRecorded, Shape, Texts, distinct, is_list
from advisor.operators.families import POINTWISE, Arity, plain_name

_PREDICATES = frozenset(
    """
    eq ge greater greater_equal gt isclose isfinite isinf isnan isneginf isposinf le less less_equal logical_and
    logical_not logical_or logical_xor lt ne not_equal signbit
    """.split()
)
_FROM_COMPLEX = frozenset({"abs", "absolute", "angle"})  # half as wide
_KINDS = (("complex", 3), ("float", 2), ("bfloat", 2), ("int", 1), ("uint", 1))


class Tensor(NamedTuple):
    """One tensor among a call's inputs: its shape, the elements it keeps apart in memory, and its dtype."""

    shape: Shape
    apart: int
    dtype: str

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return BYTES[self.dtype]

    @property
    def traffic(self) -> int:
        """Bytes to read it once."""
        return self.apart * self.width


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The common shape of tensors that are combined element by element."""
    count = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (count - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def traffic(name: str, shapes: Entries, dtypes: Texts, strides: Entries | None) -> int:
    """Inputs once and a result of the broadcast shape once; in place, the result is the first input.

    A tensor beyond the operator's own arguments is one to write to (`out=`). A tensor without dimensions beside others
    is an argument of the kernel, not traffic.
    """
    plain = plain_name(name)
    arity = POINTWISE.get(plain, Arity(2, 2))
    if "_foreach_" in name:
        return _list_traffic(plain, shapes, dtypes)
    tensors = _tensors(shapes[: arity.arguments], dtypes, strides)[: arity.tensors]
    if not tensors:
        raise NotRecorded(name)
    large = [tensor for tensor in tensors if tensor.shape] or tensors
    read = sum(tensor.traffic for tensor in large)
    if _may_be_one(plain, large):
        read -= large[-1].traffic
    if name.endswith("_"):
        return read + math.prod(tensors[0].shape) * tensors[0].width
    return read + math.prod(broadcast([tensor.shape for tensor in large])) * _result_width(plain, large)


def _may_be_one(plain: str, operands: Sequence[Tensor] | Sequence[tuple[Shape, ...]]) -> bool:
    """Whether the last two operands are the factors of an `addcmul` that look alike.

    The record does not tell tensors apart, and Adam's second moment is `addcmul_(grad, grad)`.
    """
    return plain == "addcmul" and len(operands) > 2 and operands[-1] == operands[-2]


def _tensors(shapes: Entries, dtypes: Texts, strides: Entries | None) -> list[Tensor]:
    found = []
    for place, (entry, dtype) in enumerate(zip(shapes, dtypes, strict=False)):
        if dtype in BYTES:
            step = strides[place] if strides is not None and place < len(strides) else None
            found.append(Tensor(_shape(entry), distinct(_shape(entry), None if step is None else _shape(step)), dtype))
        elif entry:
            raise NotRecorded("the dtype of a tensor")
    return found


def _shape(entry: Entry) -> Shape:
    return tuple(size for size in entry if isinstance(size, int))


def _result_width(plain: str, tensors: Sequence[Tensor]) -> int:
    """Bytes of an element of the result: that of the widest input of the highest kind (torch's type promotion).

    Arithmetic on whole numbers may give floating-point numbers of the default dtype, of which none has under two bytes.
    """
    if plain in _PREDICATES:
        return 1
    kind = max(_kind(tensor.dtype) for tensor in tensors)
    width = max(tensor.width for tensor in tensors if _kind(tensor.dtype) == kind)
    if kind == 3 and plain in _FROM_COMPLEX:
        return width // 2
    return min(width, 2) if kind < 2 else width


def _kind(dtype: str) -> int:
    return next((kind for start, kind in _KINDS if dtype.startswith(start)), 0)


def _list_traffic(plain: str, shapes: Entries, dtypes: Texts) -> int:
    """Every list read once, and a result like the first written once, in place or not; all lists need a dtype."""
    lists, sizes = [], []
    for place, entry in enumerate(shapes):
        if is_list(entry):
            if place >= len(dtypes) or dtypes[place] not in BYTES:
                raise NotRecorded("the dtype of a list")
            lists.append(tuple(shape for shape in entry if isinstance(shape, tuple)))
            sizes.append(sum(math.prod(shape) for shape in lists[-1]) * BYTES[dtypes[place]])
    if not sizes:
        raise NotRecorded("the tensors of a list")
    return sum(sizes) + sizes[0] - (sizes[-1] if _may_be_one(plain, lists) else 0)


# ------------------------------------------------------------------------------------------------------------ compiled

_SPARSE = re.compile("embedding|index|gather|scatter|nll_loss|select|slice|split|chunk|unbind|narrow|unfold|pool")
_LOOPS = {"poi": 1, "per": 2, "red": 2}  # lengths behind the tensors: of the elements; of the rows and what they reduce


def compiled_traffic(name: str, shapes: Entries, dtypes: Texts, concrete: Texts, strides: Entries | None) -> int:
    """A kernel that Inductor wrote for Triton: each tensor that it can reach in full, once.

    A tensor of more elements than the kernel's loops run through is a table, or a buffer of which the kernel sees a
    part, and counts nothing; in a kernel named after a look-up or a slice, so does a smaller one that is not as large
    as the loops or the outer loop. Tensors read and written in place count once. Raises NotRecorded where the lengths
    of the loops are not there.
    """
    tensors = [tensor for tensor in _tensors(shapes, dtypes, strides) if tensor.shape]
    reach, outer = _loops(name, concrete, dtypes, {tensor.apart for tensor in tensors})
    if _SPARSE.search(name):
        return sum(tensor.traffic for tensor in tensors if tensor.apart in (reach, outer))
    return sum(tensor.traffic for tensor in tensors if tensor.apart <= reach)


def _loops(name: str, concrete: Texts, dtypes: Texts, sizes: set[int]) -> tuple[int, int]:
    """Elements that all loops of a kernel run through, and the length of the outer one.

    More numbers than a kernel of its kind has loops are a second dimension or the sizes of dynamic shapes; then the
    loops are those whose product is the size of a tensor.
    """
    lengths = [int(text) for text, dtype in zip(concrete, dtypes, strict=False) if not dtype and text.isdigit()]
    kind = name.split("_")[1] if "_" in name else ""
    if kind in _LOOPS and len(lengths) == _LOOPS[kind]:
        return math.prod(lengths), lengths[0]
    for start in range(len(lengths)):
        if math.prod(lengths[start:]) in sizes:
            return math.prod(lengths[start:]), lengths[start]
    raise NotRecorded("the lengths of the kernel's loops")
