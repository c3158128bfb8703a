"""One recorded operator call: its arguments by the names the operator's schema gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from advisor.operators.signatures import argument_names

Shape = tuple[int, ...]
Entry = Shape | tuple[Shape, ...]  # one input: a tensor's shape, or one shape per tensor of a list
Entries = Sequence[Entry]
Texts = Sequence[str]

BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two numbers to a byte, which torch shows as one element
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
# Bytes of an element by the number that stands for a dtype argument in "Concrete Inputs" (c10/core/ScalarType.h).
CODE_BYTES = {
    0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 8: 4, 9: 8, 10: 16, 11: 1, 15: 2,
    23: 1, 24: 1, 25: 1, 26: 1, 27: 2, 28: 4, 29: 8, 44: 1, 45: 1,
}  # fmt: skip


class NotRecorded(LookupError):
    """The trace does not hold an argument that a formula needs."""


# What a formula raises on a call whose inputs were not recorded, or are not those of its operator (a damaged record).
UNREADABLE = (LookupError, ValueError, ArithmeticError)


def is_list(entry: Entry) -> bool:
    """Whether an input is a list of tensors whose shapes were recorded."""
    return bool(entry) and not isinstance(entry[0], int)


def numbers(text: str) -> tuple[int, ...]:
    """The integers of a constant argument such as "[2, 2]" or "-1"; NotRecorded where it holds anything else."""
    try:
        return tuple(int(part) for part in text.strip("[]").split(",")) if text.strip("[] ") else ()
    except ValueError:
        raise NotRecorded(text) from None


def distinct(shape: Shape, strides: Shape | None = None) -> int:
    """Elements that a tensor keeps apart in memory.

    A dimension of stride 0 repeats what is there, and windows that overlap share elements: the tensor cannot touch more
    than the stretch from its first to its last element. Without strides every element counts.
    """
    count = math.prod(shape)
    if strides is None or len(strides) != len(shape) or not count:
        return count
    apart = math.prod(size for size, stride in zip(shape, strides, strict=True) if stride)
    return min(apart, 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True)))


_OF_LISTS = re.compile(r"^aten::(_foreach_|_fused_ada|_fused_sgd|_amp_foreach_|_?cat$|stack$)")


class Call:
    """A call's inputs by argument name. What an operator's schema does not name is not there."""

    def __init__(
        self, name: str, shapes: Entries, dtypes: Texts, concrete: Texts = (), strides: Entries | None = None
    ) -> None:
        self.name = name
        self._shapes, self._dtypes, self._concrete, self._strides = shapes, dtypes, concrete, strides
        self._of_lists = _OF_LISTS.search(name) is not None
        self._place = {argument: place for place, argument in enumerate(argument_names(name, len(shapes)))}

    def __contains__(self, argument: str) -> bool:
        """Whether the operator has such an argument."""
        return argument in self._place

    def _entry(self, argument: str) -> Entry:
        place = self._place.get(argument, len(self._shapes))
        return self._shapes[place] if place < len(self._shapes) else ()

    def shape(self, argument: str) -> Shape:
        """The shape of a tensor argument of one or more dimensions; NotRecorded where there is none."""
        entry = self._entry(argument)
        if not entry or is_list(entry):
            raise NotRecorded(argument)
        return tuple(size for size in entry if isinstance(size, int))

    def dimensions(self, argument: str) -> Shape:
        """The shape of an argument, () for a tensor without dimensions, a number, or what was not passed."""
        entry = self._entry(argument)
        return () if is_list(entry) else tuple(size for size in entry if isinstance(size, int))

    def shapes(self, argument: str) -> tuple[Shape, ...]:
        """The shapes of a list of tensors; NotRecorded where they are not there (Kineto keeps lists of up to 30)."""
        entry = self._entry(argument)
        if not is_list(entry):
            raise NotRecorded(argument)
        return tuple(shape for shape in entry if isinstance(shape, tuple))

    def given(self, argument: str) -> bool:
        """Whether a tensor was passed for an optional argument."""
        return bool(self._entry(argument)) or (bool(self.dtype(argument)) and not self._of_lists)

    def dtype(self, argument: str) -> str:
        """The dtype of a tensor argument, "" where none was recorded."""
        place = self._place.get(argument, len(self._dtypes))
        return self._dtypes[place] if place < len(self._dtypes) else ""

    def width(self, argument: str) -> int:
        """Bytes of one element; NotRecorded where the dtype is unknown."""
        try:
            return BYTES[self.dtype(argument)]
        except KeyError:
            raise NotRecorded(argument) from None

    def _strides_of(self, argument: str) -> Entry:
        place = self._place.get(argument, -1)
        return self._strides[place] if self._strides is not None and 0 <= place < len(self._strides) else ()

    def elements(self, argument: str) -> int:
        """Distinct elements of a tensor or of all tensors of a list; 0 for an argument that was not passed."""
        entry, strides = self._entry(argument), self._strides_of(argument)
        if is_list(entry):
            apart = strides if len(strides) == len(entry) else (None,) * len(entry)
            return sum(
                distinct(shape, stride if isinstance(stride, tuple) else None)
                for shape, stride in zip(self.shapes(argument), apart, strict=True)
            )
        if not self.given(argument):
            return 0
        known = tuple(step for step in strides if isinstance(step, int))
        return distinct(self.shape(argument), known if strides else None) if entry else 1

    def traffic(self, argument: str) -> int:
        """Bytes to read or write an argument once; 0 for an argument that was not passed."""
        count = self.elements(argument)
        return count * self.width(argument) if count else 0

    def written(self, argument: str) -> int:
        """Bytes of a result with an argument's shape and dtype; 0 for an argument that was not passed.

        Unlike the argument itself, a result repeats nothing in memory.
        """
        if not self.given(argument):
            return 0
        shapes = self.shapes(argument) if is_list(self._entry(argument)) else (self.dimensions(argument),)
        return sum(math.prod(shape) for shape in shapes) * self.width(argument)

    def text(self, argument: str) -> str:
        """A constant argument as text; NotRecorded where it is not there, "" for None."""
        place = self._place.get(argument, len(self._concrete))
        if place >= len(self._concrete):
            raise NotRecorded(argument)
        return self._concrete[place]

    def flag(self, argument: str) -> bool:
        """A boolean constant."""
        known = {"True": True, "False": False}.get(self.text(argument))
        if known is None:
            raise NotRecorded(argument)
        return known

    def flags(self, argument: str) -> tuple[bool, ...]:
        """A list of boolean constants; NotRecorded where it holds anything else."""
        parts = [part.strip() for part in self.text(argument).strip("[]").split(",")]
        if not set(parts) <= {"True", "False"}:
            raise NotRecorded(argument)
        return tuple(part == "True" for part in parts)

    def integer(self, argument: str) -> int:
        """An integer constant."""
        found = numbers(self.text(argument))
        if len(found) != 1:
            raise NotRecorded(argument)
        return found[0]

    def integers(self, argument: str, count: int) -> tuple[int, ...]:
        """One integer constant per dimension; a single one stands for all."""
        found = numbers(self.text(argument))
        if len(found) not in (1, count):
            raise NotRecorded(argument)
        return found * count if len(found) == 1 else found
