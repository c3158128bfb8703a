"""The values of a region's nodes on samples, evaluated once from a main tensor forwards and kept for every result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from advisor.model import Graph, Node, Ref, Symbol
from advisor.patterns.regions import reads
from advisor.semantics import MEANINGS, Array, NotModelled, operation

VIEWS = frozenset({"view", "reshape"})  # their sizes are literals of the run, so samples need sizes of their own
MODELLED = (frozenset(MEANINGS) | VIEWS) - {"matmul", "softmax"}  # a search walks through these and no others
LARGEST = 64  # nodes of one region
BEHIND = 32  # nodes behind a leaf that are looked at to see that it does not depend on the main tensor
LARGEST_AXES = 16384  # elements along the normalised axes up to which samples keep their true sizes
ROWS = 5  # samples of a row


@dataclass(frozen=True)
class Leaf:
    """A tensor that a region reads besides its main one."""

    node: int
    kind: str


def reduced_axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The axes a reduction runs over, counted from the last; None where it reduces all or they are not known."""
    source = graph.nodes[node.args[0].index] if node.args and isinstance(node.args[0], Ref) else None
    if source is None or source.shape is None or len(source.shape) < 2:
        return None
    place = 2 if operation(node) in ("norm", "normalize") else 1
    default = 1 if operation(node) == "normalize" else None
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    dims = dim if isinstance(dim, tuple) else (dim,)
    if not dims or any(isinstance(d, bool) or not isinstance(d, int) for d in dims):
        return None
    rank = len(source.shape)
    return tuple(sorted(d if d < 0 else d - rank for d in dims))


def sample_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """A small shape to evaluate in place of `shape`: `axes` (else the last one) keep their sizes, one axis has ROWS
    rows."""
    kept = axes or (-1,)
    count = math.prod(shape[a] for a in kept if -a <= len(shape))
    sizes, rows = list(shape), False
    for axis in range(-len(shape), 0):
        if axis in kept:
            sizes[axis] = shape[axis] if count <= LARGEST_AXES else min(shape[axis], 13)
        else:
            sizes[axis] = 1 if rows or shape[axis] == 1 else ROWS
            rows = rows or shape[axis] > 1
    return tuple(sizes)


@functools.lru_cache(maxsize=256)
def leaf_sample(shape: tuple[int, ...], kind: str, number: int, is_complex: bool) -> Array:
    """The value given to the `number`-th leaf of a region; the same for all regions, and not to be written to."""
    generator = np.random.default_rng(number)
    value: Array = generator.standard_normal(shape) + (1.5 if kind == "vector" else 0.0)
    value = value + 1j * generator.standard_normal(shape) if is_complex else value
    value.flags.writeable = False
    return value


@dataclass
class View:
    """A graph as one search looks at it, what it asks often kept: what nodes read, which are constants."""

    graph: Graph
    _reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _constants: dict[int, Array | None] = field(default_factory=dict)
    _modelled: dict[int, bool] = field(default_factory=dict)
    _results: dict[Hashable, tuple[Any, object]] = field(default_factory=dict)

    def once(self, meaning: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The result of an operation, worked out once for the same arrays: a model repeats its blocks."""
        given = (arguments, keywords)
        key = (meaning, *map(_token, arguments), *keywords, *map(_token, keywords.values()))
        try:
            known = self._results.get(key)
        except TypeError:  # a slice
            return meaning(*arguments, **keywords)
        if known is None:  # what a key knows by identity stays alive with the result
            known = self._results[key] = (meaning(*arguments, **keywords), given)
        return known[0]

    def reads(self, index: int) -> tuple[int, ...]:
        """Indices of the nodes whose values a node reads, each once."""
        if index not in self._reads:
            self._reads[index] = tuple(dict.fromkeys(reads(self.graph.nodes[index])))
        return self._reads[index]

    def modelled(self, index: int) -> bool:
        """Whether a search walks through a node."""
        if index not in self._modelled:
            self._modelled[index] = operation(self.graph.nodes[index]) in MODELLED
        return self._modelled[index]

    def constant(self, index: int) -> Array | None:
        """The value of a closed expression of literals with one element; None where it is none."""
        if index not in self._constants:
            self._constants[index] = None
            node = self.graph.nodes[index]
            if self.modelled(index) and len(node.shape or ()) <= 1:
                try:
                    value = np.asarray(computed(node, self._literal, self.once))
                    self._constants[index] = value if value.size == 1 else None
                except NotModelled:
                    pass
        return self._constants[index]

    def _literal(self, index: int) -> Array:
        value = self.constant(index)
        if value is None:
            raise NotModelled(self.graph.nodes[index], "not a constant")
        return value


@dataclass
class Sweep:
    """Values of nodes when `main` has the value `x` and every leaf a random one.

    A node that does not depend on `main` is a constant where it can be evaluated, else a leaf of one of `kinds`.
    """

    view: View
    main: int
    x: Array
    axes: tuple[int, ...]
    kinds: frozenset[str]
    known: dict[int, Any] = field(default_factory=dict)
    leaves: dict[int, str] = field(default_factory=dict)
    _dependent: dict[int, bool] = field(default_factory=dict)
    _budget: int = 0

    def __post_init__(self) -> None:
        self.known[self.main] = self.x

    @property
    def graph(self) -> Graph:
        """The graph it runs on."""
        return self.view.graph

    def value(self, index: int) -> Any:
        """Value of a node; raises `NotModelled` where the region that ends there is not closed."""
        if index not in self.known:
            node = self.graph.nodes[index]
            if len(self.known) > LARGEST:
                raise NotModelled(node, "the region is too large")
            try:
                self.known[index] = self._found(node)
            except NotModelled as error:
                self.known[index] = error.with_traceback(None)  # the frames would live as long as the graph
        found = self.known[index]
        if isinstance(found, NotModelled):
            raise found
        return found

    def region_of(self, root: int) -> tuple[frozenset[int], list[Leaf]]:
        """The nodes computed between the main tensor and a root, and the leaves they read, in graph order."""
        leaves: set[int] = set()
        inner: set[int] = set()
        pending = [root]
        while pending:
            index = pending.pop()
            if index in self.leaves:
                leaves.add(index)
            elif index != self.main and index not in inner:
                inner.add(index)
                pending.extend(self.view.reads(index))
        return frozenset(inner), [Leaf(index, self.leaves[index]) for index in sorted(leaves)]

    def _depends_on_main(self, index: int) -> bool:
        """Whether a node is computed from the main tensor, or from so much that it is taken to be."""
        self._budget = BEHIND
        return self._depends(index)

    def _depends(self, index: int) -> bool:
        if index <= self.main:  # a graph is in order: what stands before the main tensor is not computed from it
            return index == self.main
        known = self._dependent.get(index)
        if known is None:
            self._budget -= 1
            known = self._budget < 0
            for read in () if known else self.view.reads(index):
                if self._depends(read):
                    known = True
                    break
            self._dependent[index] = known
        return known

    def _found(self, node: Node) -> Any:
        modelled = self.view.modelled(node.index)
        if not modelled and self._kind(node) is None:
            raise NotModelled(node, "not part of a closed region")
        if not self._depends_on_main(node.index):
            return self._leaf(node)
        viewed = self._viewed if operation(node) in VIEWS else None
        return computed(node, self.value, self.view.once, viewed)

    def _leaf(self, node: Node) -> Array:
        constant = self.view.constant(node.index)
        if constant is not None:
            return constant
        kind = self._kind(node)
        if kind is None:
            raise NotModelled(node, "reads a tensor that is no part of the pattern")
        self.leaves[node.index] = kind
        return leaf_sample(self._shape(node), kind, len(self.leaves), (node.dtype or "").startswith("complex"))

    def _kind(self, node: Node) -> str | None:
        main, shape = self.graph.nodes[self.main].shape, node.shape
        if main is None or shape is None or not _floating(node):
            return None
        trailing = self.axes == tuple(range(-len(self.axes), 0))
        if "vector" in self.kinds and self.axes:
            spread = tuple(
                size if axis in self.axes else 1 for axis, size in zip(range(-len(main), 0), main, strict=True)
            )
            exact = shape == main[len(main) - len(self.axes) :] if trailing else _stripped(shape) == _stripped(spread)
            if exact:
                return "vector"
        if "like" in self.kinds and shape == main:
            return "like"
        if "table" in self.kinds and shape and len(shape) <= len(main):
            whole = shape[-1] in (main[-1], main[-1] // 2) and shape[-1] > 1
            if whole and all(size in (1, other) for size, other in zip(shape[-2::-1], main[-2::-1], strict=False)):
                return "table"
        return None

    def _shape(self, node: Node) -> tuple[int, ...]:
        """The sample's shape of a leaf: axes of size one stay, the last may be half the main tensor's."""
        assert node.shape is not None
        full = self.graph.nodes[self.main].shape
        assert full is not None
        sizes = []
        for axis in range(-len(node.shape), 0):
            size = node.shape[axis]
            sizes.append(size if size == 1 or size != full[axis] else self.x.shape[axis])
        return tuple(sizes)

    def _viewed(self, node: Node, x: Array, *sizes: Any, **named: Any) -> Array:
        """A view by literal sizes: the leading ones are the run's and become the sample's, the rest keep theirs."""
        if len(sizes) == 1 and isinstance(sizes[0], tuple):
            sizes = sizes[0]
        source = node.args[0]
        real = self.graph.nodes[source.index].shape if isinstance(source, Ref) else None
        if named or real is None or not sizes or not all(isinstance(size, int) for size in sizes):
            raise NotModelled(node, "a view by sizes that are not literals")
        wanted = list(sizes)
        for axis, size in enumerate(real[: len(wanted)]):
            if wanted[axis] != size:
                break
            wanted[axis] = x.shape[axis]
        try:
            return x.reshape(wanted)
        except ValueError as error:
            raise NotModelled(node, "a view that mixes rows") from error


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[next((i for i, size in enumerate(shape) if size != 1), len(shape)) :]


def _floating(node: Node) -> bool:
    return (node.dtype or "").startswith(("float", "bfloat", "complex"))


def _token(argument: Any) -> Hashable:
    """What tells an argument from others: the identity of an array, the type and value of anything else."""
    if isinstance(argument, tuple):
        return tuple(map(_token, argument))
    return (np.ndarray, id(argument)) if isinstance(argument, np.ndarray) else (type(argument), argument)


def computed(node: Node, value: Any, once: Any, viewed: Any = None) -> Any:
    """Value of a node from those of its arguments (`value` by index), by `View.once`; raises `NotModelled` where it has
    no meaning."""
    kind = operation(node)
    meaning = MEANINGS.get(kind)
    if not node.op.startswith("call_") or (meaning is None and viewed is None):
        raise NotModelled(node, "not part of a closed region")
    if kind == "to":  # what else a cast is given tells a dtype
        if not _floating(node) or not node.args or not isinstance(node.args[0], Ref):
            raise NotModelled(node, "a cast that changes values")
        return value(node.args[0].index)

    def resolved(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return value(arg.index)
        if isinstance(arg, tuple):
            return tuple(resolved(item) for item in arg)
        if isinstance(arg, Symbol) and arg.kind == "slice":
            return slice(*(resolved(part) for part in arg.parts))
        return ... if isinstance(arg, Symbol) and arg.kind == "ellipsis" else arg

    arguments = [value(arg.index) if isinstance(arg, Ref) else resolved(arg) for arg in node.args]
    keywords: Mapping[str, Any] = {name: resolved(arg) for name, arg in node.kwargs.items()}
    try:
        if viewed is not None:
            return viewed(node, *arguments, **keywords)
        assert meaning is not None
        return once(meaning, arguments, keywords)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise NotModelled(node, f"arguments are not understood: {error}") from error
