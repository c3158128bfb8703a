"""Which axis of a product is which: matmul, bmm, baddbmm and einsum read as products over named axes, views followed.

An axis is a tuple of names of the elementary axes it is made of, slowest first: () has size one, ("b", "h") is batch
and heads in one axis.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from advisor.model import Arg, Graph, Node, Ref, Symbol
from advisor.semantics import operation

Axis: TypeAlias = tuple[str, ...]
Axes: TypeAlias = tuple[Axis, ...]

PRODUCTS = frozenset({"matmul", "einsum", "baddbmm"})
LAYOUTS = frozenset(
    {"transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "to"}
)


class Unclear(Exception):
    """The axes cannot be followed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`left` times `right` summed over one axis; `scale` multiplies it, `added` (node, factor) is added to it."""

    node: int
    left: int
    right: int
    left_axes: Axes
    right_axes: Axes
    out: Axes
    summed: str
    sizes: Mapping[str, int]
    scale: float = 1.0
    scale_at: str | None = None  # keyword that gives the scale
    added: tuple[int, float] | None = None


def product(graph: Graph, node: Node, prefix: str = "") -> Product | None:
    """The product a node computes; None where it is none of two tensors with one summed axis."""
    kind = operation(node)
    if kind == "einsum":
        return _einsum(graph, node, prefix)
    if kind == "matmul":
        return _matmul(graph, node, node.args[:2], prefix)
    if kind == "baddbmm" and len(node.args) >= 3 and isinstance(node.args[0], Ref):
        found = _matmul(graph, node, node.args[1:3], prefix)
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if found is None or not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            return None
        added = (node.args[0].index, float(beta)) if beta else None
        return replace(found, scale=float(alpha), scale_at="alpha" if "alpha" in node.kwargs else None, added=added)
    return None


def _shapes(graph: Graph, args: Sequence[Arg]) -> list[tuple[int, tuple[int, ...]]] | None:
    found: list[tuple[int, tuple[int, ...]]] = []
    for arg in args:
        shape = graph.nodes[arg.index].shape if isinstance(arg, Ref) else None
        if shape is None:
            return None
        assert isinstance(arg, Ref)
        found.append((arg.index, shape))
    return found


def _matmul(graph: Graph, node: Node, args: Sequence[Arg], prefix: str) -> Product | None:
    known = _shapes(graph, args)
    if known is None or len(known) != 2:
        return None
    (left, left_shape), (right, right_shape) = known
    rank = len(left_shape)
    if rank < 2 or len(right_shape) != rank or left_shape[:-2] != right_shape[:-2]:
        return None
    batch = tuple((f"{prefix}b{k}",) for k in range(rank - 2))
    row, summed, column = (f"{prefix}row",), (f"{prefix}summed",), (f"{prefix}column",)
    sizes = {name: size for (name,), size in zip(batch, left_shape[:-2], strict=True)}
    sizes |= {row[0]: left_shape[-2], summed[0]: left_shape[-1], column[0]: right_shape[-1]}
    return Product(
        node=node.index,
        left=left,
        right=right,
        left_axes=(*batch, row, summed),
        right_axes=(*batch, summed, column),
        out=(*batch, row, column),
        summed=summed[0],
        sizes=sizes,
    )


EQUATION = re.compile(r"^([A-Za-z.]+),([A-Za-z.]+)->([A-Za-z.]*)$")


def _einsum(graph: Graph, node: Node, prefix: str) -> Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple):
        operands = list(operands[0])
    known = _shapes(graph, operands)
    found = EQUATION.match(equation.replace(" ", "")) if isinstance(equation, str) else None
    if found is None or known is None or len(known) != 2:
        return None
    terms = [found[1], found[2], found[3]]
    if any("." in term for term in terms):
        extra = len(known[0][1]) - len(terms[0].replace("...", ""))
        free = [c for c in string.ascii_letters if c not in "".join(terms)][: max(extra, 0)]
        terms = [term.replace("...", "".join(free)) for term in terms]
    left, right, out = terms
    fits = len(left) == len(known[0][1]) and len(right) == len(known[1][1])
    distinct = all(len(set(term)) == len(term) for term in terms)
    summed = (set(left) & set(right)) - set(out)
    if not fits or not distinct or len(summed) != 1 or (set(left) | set(right)) - set(out) != summed:
        return None
    sizes: dict[str, int] = {}
    for term, (_, shape) in zip((left, right), known, strict=True):
        for name, size in zip(term, shape, strict=True):
            if sizes.setdefault(prefix + name, size) != size:
                return None  # broadcast
    axes = [tuple((prefix + name,) for name in term) for term in terms]
    return Product(
        node=node.index,
        left=known[0][0],
        right=known[1][0],
        left_axes=axes[0],
        right_axes=axes[1],
        out=axes[2],
        summed=prefix + summed.pop(),
        sizes=sizes,
    )


@dataclass
class Follow:
    """Axes of a value on its way through views; a view that cuts an elementary axis in two is kept in `splits`."""

    axes: Axes
    sizes: dict[str, int]
    splits: dict[str, tuple[int, Axis]] = field(default_factory=dict)  # name -> (the view's node, its parts)

    def through(self, node: Node) -> None:
        """Follow one operation of LAYOUTS; raises `Unclear`."""
        kind = operation(node)
        rank = len(self.axes)
        if kind == "transpose":
            first, second = (_dim(a, rank) for a in node.args[1:3])
            axes = list(self.axes)
            axes[first], axes[second] = axes[second], axes[first]
            self.axes = tuple(axes)
        elif kind == "permute":
            dims = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple) else node.args[1:]
            self.axes = tuple(self.axes[_dim(d, rank)] for d in dims)
        elif kind in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"):
            self._reshape(node)

    def _reshape(self, node: Node) -> None:
        if node.shape is None:
            raise Unclear(f"the shape of `{node.name}` is not known")
        flat = [name for axis in self.axes for name in axis]
        result: list[Axis] = []
        for size in node.shape:
            axis: list[str] = []
            left = size
            while left > 1:
                if not flat:
                    raise Unclear(f"`{node.name}` cannot be followed")
                name = flat.pop(0)
                if left % self.sizes[name] == 0:
                    left //= self.sizes[name]
                elif self.sizes[name] % left == 0:
                    name, rest = self._split(node, name, left)
                    flat.insert(0, rest)
                    left = 1
                else:
                    raise Unclear(f"`{node.name}` mixes axes")
                axis.append(name)
            result.append(tuple(axis))
        if any(self.sizes[name] > 1 for name in flat):
            raise Unclear(f"`{node.name}` cannot be followed")
        self.axes = tuple(result)

    def _split(self, node: Node, name: str, outer: int) -> tuple[str, str]:
        parts = (f"{name}.0", f"{name}.1")
        if name in self.splits:
            raise Unclear(f"`{node.name}` cuts an axis again")
        self.splits[name] = (node.index, parts)
        self.sizes |= {parts[0]: outer, parts[1]: self.sizes[name] // outer}
        return parts


def _dim(arg: Arg, rank: int) -> int:
    if not isinstance(arg, int):
        raise Unclear("an axis is not a number")
    return arg % rank


def split_axes(axes: Axes, splits: Mapping[str, tuple[int, Axis]]) -> Axes:
    """Axes with every elementary axis that was cut replaced by its parts."""
    return tuple(
        tuple(part for name in axis for part in (splits[name][1] if name in splits else (name,))) for axis in axes
    )


NUMPY: Mapping[str, Callable[[float], float]] = {"wrapped_sqrt": math.sqrt}  # numpy functions as Dynamo records them


def number(graph: Graph, arg: Arg) -> float | None:
    """The number an argument is, written as such or as a constant of no dimensions; None for anything else."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return float(arg)
    if not isinstance(arg, Ref):
        return None
    node = graph.nodes[arg.index]
    if operation(node) in NUMPY and len(node.args) == 1:
        value = number(graph, node.args[0])
        return NUMPY[operation(node)](value) if value is not None and value >= 0 else None
    place = _constant_argument(node)
    return number(graph, node.args[place]) if place is not None else None


def constant_place(graph: Graph, node: int, position: int | str) -> tuple[int, int | str | None]:
    """Where the source spells a number: (node, position), or (node, None) where a whole call gives it."""
    found = graph.nodes[node]
    arg = found.args[position] if isinstance(position, int) else found.kwargs[position]
    if not isinstance(arg, Ref):
        return node, position
    constant = graph.nodes[arg.index]
    place = _constant_argument(constant)
    return constant_place(graph, arg.index, place) if place is not None else (arg.index, None)


def _constant_argument(node: Node) -> int | None:
    """Position of the number in a call that makes a constant scalar tensor: torch.full((), x), torch.tensor(x)."""
    kind = operation(node)
    if node.shape != () or any(isinstance(a, Symbol) for a in node.args):
        return None
    position = {"tensor": 0, "scalar_tensor": 0, "full": 1, "new_full": 2}.get(kind)
    return position if position is not None and len(node.args) > position else None
