"""Losses over rows of class scores, evaluated on a few sample rows whatever the batch: each row stands for many.

A value is a table of scores (one axis is the class), one number for every row, a single number, or the running index of
the rows. Views are followed by the captured shapes, so that the order of the rows is the same in every value; what
would reorder rows, broadcast rows against rows or mix them other than by a sum or mean over all is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from advisor.model import Graph, Node, Ref, Symbol
from advisor.semantics import MEANINGS, Array, NotModelled, operation

ROWS = 6  # sample rows


@dataclass(frozen=True)
class Value:
    """What a node computes: `data` is (ROWS, classes), (ROWS,) or (), `shape` the captured shape.

    `axis` is the class axis of a table. `index` marks 0, 1, 2, ... over the rows.
    """

    data: Array
    shape: tuple[int, ...]
    axis: int | None = None
    index: bool = False


@dataclass
class Rows:
    """One evaluation: `steps` gives the meaning of every operation, `bound` the values of the inputs.

    `count` is the number of rows in the captured run.
    `counted` collects the arguments that were taken for the number of rows: (node, argument position). A number that
    equals `count` by chance is told from the count by the source alone.
    """

    graph: Graph
    steps: Mapping[str, Callable[[Call], Value]]
    bound: Mapping[int, Value]
    count: int
    limit: int = 40
    counted: list[tuple[int, int]] = field(default_factory=list)

    def value(self, root: int) -> Value:
        """The value of a node; raises `NotModelled` where it depends on more than the bound nodes and constants."""
        known: dict[int, Value] = dict(self.bound)

        def visit(index: int) -> Value:
            if index in known:
                return known[index]
            node = self.graph.nodes[index]
            step = self.steps.get(operation(node))
            if step is None or node.shape is None:
                raise NotModelled(node, "it reads more than scores and targets")
            if len(known) > self.limit:
                raise NotModelled(node, "the region is too large")
            given = [visit(arg.index) if isinstance(arg, Ref) else arg for arg in node.args]
            named = {k: visit(arg.index) if isinstance(arg, Ref) else arg for k, arg in node.kwargs.items()}
            for item in (i for arg in node.args if isinstance(arg, tuple) for i in arg if isinstance(i, Ref)):
                visit(item.index)
            try:
                known[index] = step(Call(self, node, given, named, known))
            except (TypeError, ValueError, IndexError) as error:
                raise NotModelled(node, f"arguments are not understood: {error}") from error
            return known[index]

        with np.errstate(all="ignore"):
            return visit(root)


@dataclass(frozen=True)
class Call:
    """One node with its evaluated arguments."""

    rows: Rows
    node: Node
    args: list[Any]
    kwargs: dict[str, Any]
    known: Mapping[int, Value]

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.node.shape is not None
        return self.node.shape

    def get(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def tensor(self, position: int, *names: str) -> Value:
        """An argument that must be a tensor."""
        found = self.get(position, *names)
        if not isinstance(found, Value):
            raise ValueError("a tensor is expected")
        return found

    def only(self, *names: str) -> None:
        """Refuse keyword arguments beside these."""
        other = set(self.kwargs) - set(names)
        if other:
            raise ValueError(f"{', '.join(sorted(other))} is not followed")

    def made(self, data: Any, axis: int | None = None) -> Value:
        """The node's value with its captured shape."""
        return Value(np.asarray(data, dtype=np.float64), self.shape, axis)


def is_table(value: Value) -> bool:
    """Whether a value holds a score for every class."""
    return value.axis is not None


def is_rows(value: Value) -> bool:
    return value.axis is None and value.data.ndim == 1


def without_class(value: Value) -> tuple[int, ...]:
    """The shape of a table with its class axis kept as one element."""
    assert value.axis is not None
    return (*value.shape[: value.axis], 1, *value.shape[value.axis + 1 :])


# ---------------------------------------------------------------------------------------------------------- elementwise


def elementwise(name: str) -> Callable[[Call], Value]:
    meaning = MEANINGS[name]

    def step(call: Call) -> Value:
        call.only("alpha", "rounding_mode", "dtype", "device", "non_blocking", "memory_format", "value", "other")
        operands = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Value)]
        if any(o.index for o in operands):
            raise ValueError("the index of the rows is used as a number")
        _check_exact(call, name, operands)
        axis, aligned = _broadcast(call, operands)
        data = {id(old): new for old, new in zip(operands, aligned, strict=True)}
        args = [data[id(a)] if isinstance(a, Value) else a for a in call.args]
        if name in ("to", "contiguous"):
            return call.made(args[0], axis)
        kwargs = {k: data[id(a)] if isinstance(a, Value) else a for k, a in call.kwargs.items()}
        return call.made(meaning(*_counted(call, name, operands, args), **kwargs), axis)

    return step


def _check_exact(call: Call, name: str, operands: list[Value]) -> None:
    """A cast to integers may cut numbers, and the bits of an integer inverted are not its logical opposite."""
    integer = (call.node.dtype or "").startswith(("int", "uint", "bool"))
    if name == "to" and integer and any((o.data % 1 != 0).any() for o in operands):
        raise ValueError("a cast cuts the numbers")
    if name == "logical_not" and not call.node.target.endswith("logical_not") and call.node.dtype != "bool":
        raise ValueError("the bits of an integer are inverted")


def _counted(call: Call, name: str, operands: list[Value], args: list[Any]) -> list[Any]:
    """A sum over the rows divided by a number equal to their count: the sample has another count."""
    divisor = call.args[1] if name == "div" and len(call.args) == 2 else None
    plain = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
    if plain and divisor == call.rows.count and operands and operands[0].data.ndim == 0:
        call.rows.counted.append((call.node.index, 1))
        return [args[0], ROWS]
    return args


def _broadcast(call: Call, operands: list[Value]) -> tuple[int | None, list[Array]]:
    """The class axis of the result and every operand's data, aligned to it."""
    tables = [o for o in operands if is_table(o)]
    if not tables:
        shapes = {o.shape for o in operands if o.data.ndim == 1}
        if len(shapes) > 1:
            raise ValueError("rows of different shapes are broadcast")
        return None, [o.data for o in operands]
    first = tables[0]
    if any((t.shape, t.axis) != (first.shape, first.axis) for t in tables) or call.shape != first.shape:
        raise ValueError("tables of different layouts are combined")
    if any(is_rows(o) and o.shape != without_class(first) for o in operands):
        raise ValueError("rows are broadcast against another axis than the classes")
    return first.axis, [o.data[:, None] if is_rows(o) else o.data for o in operands]


def clamped(call: Call) -> Value:
    call.only("min", "max")
    x = call.tensor(0)
    least, most = call.get(1, "min"), call.get(2, "max")
    if isinstance(least, Value) or isinstance(most, Value):
        raise ValueError("the limits are tensors")
    return call.made(np.clip(x.data, least, most), x.axis)


def filled(fill: float | None) -> Callable[[Call], Value]:
    def step(call: Call) -> Value:
        value = call.get(1, "fill_value") if fill is None else fill
        tables = [v for v in call.rows.bound.values() if v.shape == call.shape and is_table(v)]
        if not tables or isinstance(value, Value):
            raise ValueError("it does not have the shape of the scores")
        return call.made(np.full(tables[0].data.shape, float(value)), tables[0].axis)

    return step


# ------------------------------------------------------------------------------------------------------------ reduction


def axis_of(dim: Any, rank: int) -> int:
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError("it does not run over one axis")
    return int(dim) % rank


def over_classes(call: Call, position: int = 1) -> Value:
    x = call.tensor(0, "input", "self")
    if not is_table(x) or axis_of(call.get(position, "dim", "axis"), len(x.shape)) != x.axis:
        raise ValueError("it does not run over the classes")
    return x


def log_softmax(data: Array) -> Array:
    top = data.max(axis=1, keepdims=True)
    return np.asarray(data - top - np.log(np.exp(data - top).sum(axis=1, keepdims=True)))


def normalised(logarithm: bool) -> Callable[[Call], Value]:
    def step(call: Call) -> Value:
        call.only("dim", "_stacklevel", "dtype")
        x = over_classes(call)
        value = log_softmax(x.data)
        return call.made(value if logarithm else np.exp(value), x.axis)

    return step


def logsumexp(call: Call) -> Value:
    call.only("dim", "keepdim")
    x = over_classes(call)
    return call.made((x.data - log_softmax(x.data))[:, 0])


def reduction(function: Callable[..., Any]) -> Callable[[Call], Value]:
    def step(call: Call) -> Value:
        call.only("dim", "axis", "keepdim", "dtype")
        x = call.tensor(0, "input", "self")
        given = call.get(1, "dim", "axis")
        if given is None or not x.shape:
            return call.made(function(x.data, axis=None))
        dim = axis_of(given, len(x.shape))
        if is_table(x) and dim == x.axis:
            return call.made(function(x.data, axis=1))
        tables = [v for v in call.rows.bound.values() if is_table(v)]
        if is_rows(x) and any(v.axis == dim and without_class(v) == x.shape for v in tables):
            return call.made(x.data)  # the class axis that a pick has left
        raise ValueError("it sums over some of the rows")

    return step


# ---------------------------------------------------------------------------------------------------------------- views


def viewed(call: Call) -> Value:
    x = call.tensor(0, "input", "self")
    if math.prod(call.shape) != math.prod(x.shape):
        raise ValueError("the number of elements changes")
    if not is_table(x):
        return Value(x.data, call.shape, index=x.index)
    last = len(x.shape) - 1
    if x.axis != last or call.shape[-1:] != x.shape[-1:]:
        raise ValueError("a view mixes rows and classes")
    return call.made(x.data, len(call.shape) - 1)


def permuted(call: Call) -> Value:
    x = call.tensor(0, "input", "self")
    rank = len(x.shape)
    order = list(range(rank))
    if operation(call.node) == "transpose":
        first, second = (axis_of(call.get(i, name), rank) for i, name in ((1, "dim0"), (2, "dim1")))
        order[first], order[second] = order[second], order[first]
    else:
        given = call.args[1] if len(call.args) == 2 else tuple(call.args[1:])
        order = [axis_of(d, rank) for d in (given if isinstance(given, tuple) else call.kwargs["dims"])]
    rows = [d for d in order if d != x.axis and x.shape[d] != 1]
    if rows != sorted(rows):
        raise ValueError("the rows are reordered")
    return Value(x.data, call.shape, None if x.axis is None else order.index(x.axis), x.index)


def row_index(call: Call) -> Value:
    numbers = [a for a in call.args if not isinstance(a, Symbol)]
    begins = numbers == [call.rows.count] or numbers == [0, call.rows.count]
    if not begins or call.rows.count < 2 or not set(call.kwargs) <= {"device", "dtype"}:
        raise ValueError("it is not the index of the rows")
    return Value(np.arange(ROWS, dtype=np.float64), call.shape, index=True)
