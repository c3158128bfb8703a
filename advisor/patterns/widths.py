"""Whether a norm that is written with the size of its axes computes the same function for tensors of another size."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from advisor.alignment.aligned import Alignment, Bound
from advisor.model import Arg, Graph, Node
from advisor.patterns.extents import Extents
from advisor.patterns.language import Pattern
from advisor.patterns.regions import Region
from advisor.patterns.shown_axes import axes_given
from advisor.patterns.sweeps import Sweep, View, sample_shape
from advisor.semantics import NotModelled, operation, same
from advisor.usercode.reaching import reaching
from advisor.usercode.scalars import Scalars

Key: TypeAlias = "tuple[int, int | str]"  # node and argument
WIDER = 3  # elements more along every normalised axis
CASTS = frozenset("float double half bfloat16 to type type_as contiguous".split())
MAKING = frozenset("ones zeros empty rand randn full".split())


@dataclass(frozen=True)
class Widths:
    """`followed` are the numbers of a region that the source takes from the tensors' sizes; `reason` tells why the
    source does not compute the function for other sizes, where it does not."""

    followed: frozenset[Key] = frozenset()
    reason: str | None = None


def widths(alignment: Alignment, graph: Graph, region: Region, pattern: Pattern) -> Widths:
    """Evaluate a norm on wider rows, with the numbers that the source takes from the sizes changed accordingly."""
    return _Wider(alignment, graph, region, pattern).judged()


class _Wider:
    def __init__(self, alignment: Alignment, graph: Graph, region: Region, pattern: Pattern) -> None:
        self.alignment, self.graph, self.region, self.pattern = alignment, graph, region, pattern
        self.axes = tuple(int(axis) for axis in region.facts["axes"].split(","))
        vectors = [alignment.values[index].expression for name, index in region.inputs.items() if name != "x"]
        self.vectors = {ast.unparse(vector): len(self.axes) for vector in vectors}
        self.extents = Extents(alignment.source, self.vectors)
        shape = graph.nodes[region.inputs["x"]].shape
        assert shape is not None
        self.sizes = {axis: shape[axis] for axis in self.axes}
        small = list(sample_shape(shape, self.axes))
        for axis in self.axes:
            small[axis] += WIDER
        self.wide = {axis: small[axis] for axis in self.axes}
        self.x = pattern.sample(np.random.default_rng(7), tuple(small), self.axes)

    def judged(self) -> Widths:
        """What holds for wider rows."""
        if self._agrees({}) in (True, None):
            return Widths()
        changed: dict[Key, float] = {}
        for key, bound in self._numbers.items():
            wider = self._value(bound, self.wide)
            here = self._value(bound, self.sizes)
            if wider is not None and here is not None and math.isclose(here, self._given(key), rel_tol=1e-6):
                changed[key] = wider
        if self._agrees(changed):
            return Widths(frozenset(changed))
        return Widths(reason=self._reason({key for key, value in changed.items() if value != self._given(key)}))

    def _reason(self, sized: Set[Key]) -> str:
        """Why the norm is none for other sizes; numbers that are not `sized` come first."""
        factors = [key for key in self._numbers if operation(self.graph.nodes[key[0]]) != "pow"]
        first = next(iter(sorted(factors, key=lambda key: key in sized)), None)
        if first is None:
            return "it computes with a number that may be the size of the last axis in this run only"
        text = " ".join(self.alignment.source.segment(self._numbers[first].expression).split())
        return f"it computes with `{text}`, which may be the size of the last axis in this run only"

    @cached_property
    def _numbers(self) -> Mapping[Key, Bound]:
        """The numbers that the region computes with, without axes and the constants that the replacement repeats."""
        named = {(node, place) for _, node, place in self.region.constants.values()}
        return {
            key: bound
            for key, bound in {**self.alignment.left_out, **self.alignment.constants}.items()
            if key[0] in self.region.inner
            and key not in named
            and not axes_given(self.graph.nodes[key[0]])
            and isinstance(self._arg(key), (int, float))
            and not isinstance(self._arg(key), bool)
        }

    def _arg(self, key: Key) -> Arg:
        node, place = self.graph.nodes[key[0]], key[1]
        if isinstance(place, str):
            return node.kwargs.get(place)
        return node.args[place] if place < len(node.args) else None

    def _given(self, key: Key) -> float:
        value = self._arg(key)
        assert isinstance(value, (int, float))
        return float(value)

    def _agrees(self, changed: Mapping[Key, float]) -> bool | None:
        """Whether the region gives the pattern's value on wider rows; None where it cannot be evaluated."""
        nodes = list(self.graph.nodes)
        for key, value in changed.items():
            nodes[key[0]] = _with_argument(nodes[key[0]], key[1], value)
        view = View(replace(self.graph, nodes=tuple(nodes)))
        sweep = Sweep(view, self.region.inputs["x"], self.x, self.axes, self.pattern.kinds)
        function = next(a.function for a in self.pattern.alternatives if a.name == self.region.facts["alternative"])
        try:
            with np.errstate(all="ignore"):
                value = sweep.value(self.region.root)
                vectors = {name: sweep.known[i] for name, i in self.region.inputs.items() if i in sweep.leaves}
                scalars = {name: constant[0] for name, constant in self.region.constants.items()}
                return same(value, function(x=self.x, axes=self.axes, **vectors, **scalars))
        except NotModelled:
            return None

    # -------------------------------------------------------------------------------------------------------- numbers

    def _value(self, bound: Bound, sizes: Mapping[int, int]) -> float | None:
        """A number of the source where the normalised axes have these sizes."""
        function = self.alignment.source.function_at(bound.statement.lineno)
        if function is None:
            return None
        spelled = self._spelled(bound.expression, bound.statement, sizes)
        return Scalars(self.alignment.source, function).constant(spelled, {})

    def _spelled(self, node: ast.expr, at: ast.stmt, sizes: Mapping[int, int], depth: int = 6) -> ast.expr:
        """An expression with literals in place of the sizes it reads."""
        axis = self._axis(node, at)
        if axis is not None:
            return ast.Constant(sizes[axis])
        if isinstance(node, ast.BinOp):
            left, right = (self._spelled(side, at, sizes, depth) for side in (node.left, node.right))
            return ast.BinOp(left=left, op=node.op, right=right)
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(op=node.op, operand=self._spelled(node.operand, at, sizes, depth))
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            inner = self._spelled(node.args[0], at, sizes, depth)
            plain = isinstance(node.func, ast.Name) and node.func.id in ("float", "int")
            return inner if plain else ast.Call(func=node.func, args=[inner], keywords=[])
        if isinstance(node, ast.Name) and depth:
            found = reaching(self.alignment.source, node.id, at)
            value, statement = (found[0].value, found[0].statement) if len(found) == 1 else (None, None)
            if value is not None and statement is not None and found[0].item is None:
                return self._spelled(value, statement, sizes, depth - 1)
        return node

    def _axis(self, node: ast.expr, at: ast.stmt) -> int | None:
        """The normalised axis that an expression is the size of."""
        size = self.extents.size(node, at)
        if size is not None:
            known = ast.unparse(size.tensor) in self.vectors or self._is_input(size.tensor, size.statement)
            return size.axis if known and size.axis in self.axes else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numel":
            known = len(self.axes) == 1 and ast.unparse(node.func.value) in self.vectors
            return self.axes[0] if known else None
        if not isinstance(node, (ast.Constant, ast.Attribute)):
            return None
        origin = _origin(self.alignment.source.parents, node)
        return next((axis for axis, text in self._parameter.items() if text == origin), None)

    def _is_input(self, tensor: ast.expr, at: ast.stmt) -> bool:
        """Whether an expression is the normalised tensor, casts aside."""
        mine = self.alignment.values[self.region.inputs["x"]]
        (first, there), (second, here) = self._uncast(tensor, at), self._uncast(mine.expression, mine.statement)
        if ast.unparse(first) != ast.unparse(second):
            return False
        return not isinstance(first, ast.Name) or self.extents.same(first.id, there, here)

    def _uncast(self, node: ast.expr, at: ast.stmt) -> tuple[ast.expr, ast.stmt]:
        while True:
            if isinstance(node, ast.Name):
                found = reaching(self.alignment.source, node.id, at)
                value, statement = (found[0].value, found[0].statement) if len(found) == 1 else (None, None)
                if value is None or statement is None or found[0].item is not None or not _is_cast(value):
                    return node, at
                node, at = value, statement
            if not _is_cast(node):
                return node, at
            assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            node = node.func.value

    @cached_property
    def _parameter(self) -> Mapping[int, str]:
        """What gives the weight or the bias its sizes, by axis: `nn.Parameter(torch.ones(dim))`."""
        parents = self.alignment.source.parents
        for name, index in self.region.inputs.items():
            vector = self.alignment.values[index].expression
            made = _assigned(parents, vector) if name != "x" and isinstance(vector, ast.Attribute) else None
            call = made.args[0] if isinstance(made, ast.Call) and made.args else None
            sizes = list(call.args) if isinstance(call, ast.Call) and _named(call.func) in MAKING else []
            if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
                sizes = sizes[0].elts
            if len(sizes) == len(self.axes):
                return {axis: _origin(parents, size) for axis, size in zip(self.axes, sizes, strict=True)}
        return {}


def _with_argument(node: Node, place: int | str, value: float) -> Node:
    if isinstance(place, str):
        return replace(node, kwargs={**node.kwargs, place: value})
    return replace(node, args=(*node.args[:place], value, *node.args[place + 1 :]))


def _named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_cast(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS


def _assigned(parents: Mapping[ast.AST, ast.AST], attribute: ast.Attribute) -> ast.expr | None:
    """The only value that the methods of a class give to an attribute of the object."""
    owner: ast.AST | None = attribute
    while owner is not None and not isinstance(owner, ast.ClassDef):
        owner = parents.get(owner)
    text = ast.unparse(attribute)
    given = [
        s.value
        for s in (ast.walk(owner) if owner is not None else ())
        if isinstance(s, ast.Assign) and any(ast.unparse(t) == text for t in s.targets)
    ]
    return given[0] if len(given) == 1 else None


def _origin(parents: Mapping[ast.AST, ast.AST], node: ast.expr, depth: int = 4) -> str:
    """What a size is written as where it comes from: the literal, or the argument of the constructor."""
    value = _assigned(parents, node) if isinstance(node, ast.Attribute) and depth else None
    return ast.unparse(node) if value is None else _origin(parents, value, depth - 1)
