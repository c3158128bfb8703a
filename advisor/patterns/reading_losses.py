"""Read off which cross entropy the nodes after a softmax compute: target, reduction, ignored class, label smoothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from advisor.model import Arg, Graph, Node, Ref
from advisor.patterns.losses import STEPS, cross_entropy
from advisor.patterns.regions import reads
from advisor.patterns.rows import ROWS, Rows, Value
from advisor.semantics import Array, NotModelled, operation

REACH = 96  # nodes around a loss that are looked at
DEFAULT_IGNORED = -100  # torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Target:
    node: int
    value: Value
    soft: bool


@dataclass(frozen=True)
class Meaning:
    """What a node computes: the arguments that F.cross_entropy needs beside scores and target."""

    reduction: str
    ignored: int | None
    smoothing: float
    counted: tuple[tuple[int, int], ...]


class Reading:
    """What the nodes after one softmax, the anchor, compute of its input, the scores."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        self.graph = graph
        self.anchor = anchor
        scores = anchor.args[0]
        assert isinstance(scores, Ref)
        self.scores = graph.nodes[scores.index]
        self.shape = self.scores.shape or ()
        self.axis = self._class_axis()
        generator = np.random.default_rng(11)
        self.classes = self.shape[self.axis] if self.axis is not None else 0
        self.rows = math.prod(self.shape) // max(self.classes, 1)
        self.x = Value(generator.standard_normal((ROWS, self.classes)) * 3.0, self.shape, self.axis)
        self.soft = generator.random((ROWS, self.classes)) + 0.05
        self.hard = generator.integers(0, max(self.classes, 1), ROWS).astype(np.float64)

    def _class_axis(self) -> int | None:
        """The axis the softmax runs over, where it is the last or the second."""
        dim = self.anchor.args[1] if len(self.anchor.args) > 1 else self.anchor.kwargs.get("dim")
        if isinstance(dim, tuple) and len(dim) == 1:
            dim = dim[0]
        rank = len(self.shape)
        if not isinstance(dim, int) or rank < 2:
            return None
        dim %= rank
        return dim if dim in (1, rank - 1) else None

    # ------------------------------------------------------------------------------------------------------- targets

    def targets(self, root: int) -> list[Target]:
        """Tensors the root reads that may be the target: one class for every row, or probabilities of all classes.

        The nearest with the shape that F.cross_entropy takes comes first, then what is farthest from an index.
        """
        found: list[tuple[bool, int, Target]] = []
        for index in self.around(root):
            node = self.graph.nodes[index]
            if node.shape is None or node.requires_grad or index == root or index == self.anchor.index:
                continue
            if node.dtype == "int64" and math.prod(node.shape) == self.rows and node.shape:
                natural = len(node.shape) == 1 or node.shape == self._row_shape()
                found.append(
                    (not natural, -index if natural else index, Target(index, Value(self.hard, node.shape), False))
                )
            elif node.shape == self.shape and node.dtype == self.scores.dtype:
                found.append((True, -index, Target(index, Value(self.soft, node.shape, self.axis), True)))
        return [target for *_, target in sorted(found, key=lambda item: item[:2])]

    def around(self, root: int) -> list[int]:
        """The nodes the root reads, nearest first, as far as a loss can reach: its scores' own history is left out."""
        seen, order = {root}, [root]
        for index in order:
            if len(order) >= REACH:
                break
            for read in reads(self.graph.nodes[index]):
                if read not in seen and read != self.scores.index:
                    seen.add(read)
                    order.append(read)
        return order

    def _row_shape(self) -> tuple[int, ...]:
        assert self.axis is not None
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :])

    # ------------------------------------------------------------------------------------------------------- meaning

    def value(self, root: int, target: Target, data: Array) -> tuple[Array, tuple[tuple[int, int], ...]] | None:
        given = Value(data, target.value.shape, target.value.axis)
        rows = Rows(self.graph, STEPS, {self.scores.index: self.x, target.node: given}, self.rows)
        try:
            return rows.value(root).data, tuple(rows.counted)
        except NotModelled:
            return None

    def meaning(self, root: int, target: Target) -> Meaning | None:
        """The loss a node computes, None where it is none."""
        plain = target.value.data
        ignored = [] if target.soft else self.ignored(root)
        base = np.where(np.isin(plain, ignored), self._class_beside(ignored), plain) if ignored else plain
        computed = self.value(root, target, base)
        if computed is None:
            return None
        value, counted = computed
        reduction, smoothing = self.plain_loss(root, value, base)
        if reduction is None:
            return None
        for index in (*ignored, None):
            # with no class left out, every number that targets are compared with must count as a class
            if all(self._treats(root, target, base, reduction, smoothing, index, other) for other in ignored):
                return Meaning(reduction, index, smoothing, counted)
        return None

    def _class_beside(self, ignored: list[int]) -> int:
        return next(c for c in range(self.classes) if c not in ignored)

    def plain_loss(self, root: int, value: Array, target: Array) -> tuple[str | None, float]:
        """Reduction and smoothing under which F.cross_entropy gives the value."""
        kinds = ("none",) if value.ndim else ("mean", "sum")
        for smoothing in (0.0, *self.fractions(root)):
            for kind in kinds:
                if agree(value, cross_entropy(self.x.data, target, kind, smoothing=smoothing)):
                    return kind, smoothing
        return None, 0.0

    def _treats(
        self,
        root: int,
        target: Target,
        base: Array,
        reduction: str,
        smoothing: float,
        ignored: int | None,
        index: int,
    ) -> bool:
        """Whether targets equal to `index`, be it some or all, give what F.cross_entropy gives that leaves out
        `ignored`."""
        for share in (slice(0, 2), slice(None)):
            data = base.copy()
            data[share] = index
            computed = self.value(root, target, data)
            try:
                left_out = DEFAULT_IGNORED if ignored is None else ignored
                wanted = cross_entropy(self.x.data, data, reduction, left_out, smoothing)
            except ValueError:  # out of range
                return False
            if computed is None or not agree(computed[0], wanted):
                return False
        return True

    def ignored(self, root: int) -> list[int]:
        """Integers that targets are compared with in the region: candidates for the class that is left out."""
        found: list[int] = []
        for index in sorted(self.around(root)):
            node = self.graph.nodes[index]
            if operation(node) in ("eq", "ne"):
                found += [a for a in node.args if isinstance(a, int) and not isinstance(a, bool)]
            elif operation(node) in ("nll_loss", "cross_entropy"):
                given = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", DEFAULT_IGNORED)
                found += [given] if isinstance(given, int) else []
        return list(dict.fromkeys(found))

    def fractions(self, root: int) -> list[float]:
        """Constants of the region that may be a label smoothing, alone or spread over the classes."""
        found: list[float] = []
        for value, *_ in self.floats(root):
            found += [v for v in (value, value * self.classes) if 0.0 < v < 1.0]
        return list(dict.fromkeys(found))

    def floats(self, root: int) -> Iterator[tuple[float, int, int | str]]:
        for index in sorted(self.around(root)):
            node = self.graph.nodes[index]
            for place, arg in arguments(node):
                if isinstance(arg, float) and arg > 0.0:
                    yield arg, index, place


def arguments(node: Node) -> Iterator[tuple[int | str, Arg]]:
    yield from enumerate(node.args)
    yield from node.kwargs.items()


def agree(left: Array, right: Array) -> bool:
    """Equal to nine digits; no number agrees with no number alone: a mean over no row is none in both."""
    if left.shape != right.shape:
        return False
    scale = float(np.nanmax(np.abs(right), initial=1e-300)) if np.isfinite(right).any() else 1.0
    return bool(np.allclose(left, right, rtol=0.0, atol=1e-9 * scale, equal_nan=True))
