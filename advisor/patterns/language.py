"""A small declarative language for regions of a graph: a pattern says what is computed, of what, and what it is not.

A pattern names operations that every spelling contains (anchors), the tensors and scalars of the function, reference
functions in float64, look-alikes, and constraints beside the value they constrain. `find` walks from each anchor to
every possible result and every possible main tensor, evaluates what lies between on sample values, and compares. How
the operations are ordered, named, nested or repeated does not matter, only what they compute; so commuted operands,
optional casts and other spellings need no alternatives of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from advisor.model import Arg, Graph, Node, Ref, Symbol
from advisor.patterns.regions import NearMiss, Region, calls, contained
from advisor.patterns.sweeps import Leaf, Sweep, View, reduced_axes, sample_shape
from advisor.semantics import REARRANGES, Array, NotModelled, operation, same

Constraint: TypeAlias = Callable[[Graph, Region], "str | None"]  # why the region is not one after all
Reference: TypeAlias = Callable[..., Array]  # keyword arguments: the inputs, the constants, and `axes`


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor the function reads. The first input of a pattern is the main one, of which the others take their shape.

    `kind` is "main"; "vector": along the normalised axes; "table": broadcasts against the main tensor, its last axis
    whole or half as long; "like": of the main tensor's shape.
    """

    name: str
    kind: str = "main"
    optional: bool = False
    must: tuple[Constraint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A scalar the function reads: `role` is the operation ("add", "mul") one of whose operands it is."""

    name: str
    role: str
    low: float
    high: float
    must: tuple[Constraint, ...] = ()

    def candidates(self, graph: Graph, inner: frozenset[int]) -> Iterator[tuple[float, int, int | str]]:
        """Scalars of a region that could be it: value, node, argument position."""
        for index in sorted(inner):
            node = graph.nodes[index]
            if operation(node) != self.role:
                continue
            places: list[tuple[int | str, Arg]] = [*enumerate(node.args), *node.kwargs.items()]
            for position, arg in places:
                number = isinstance(arg, (int, float)) and not isinstance(arg, bool)
                if number and self.low < arg < self.high:
                    yield float(arg), index, position


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One function the pattern accepts; a region that computes it carries the `name` as its fact "alternative"."""

    name: str
    function: Reference
    must: tuple[Constraint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LookAlike:
    """A function that is easily taken for the pattern, and why it is another."""

    reason: str
    function: Reference


def _normal(generator: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    return generator.standard_normal(shape)


def _agrees(value: Array, expected: Array, x: Array) -> bool:
    """As `same`; most pairs differ in their first element already."""
    if value.size and not abs(value.item(0) - expected.item(0)) <= 1e-5 * max(1.0, abs(expected.item(0))):
        return False
    return same(value, expected)


def _same_shape(anchor: Node, source: Node) -> bool:
    return source.shape == anchor.shape


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What is searched for.

    `anchors` are canonical operations of which every spelling contains one; a reducing anchor (`reduces`) gives the
    normalised axes. `suits` tells from the shapes which nodes before an anchor may be the main tensor, `unless` which
    of them belong to another pattern (such a region is passed over in silence). `sample` makes the values of the main
    tensor: they must tell the alternatives from every look-alike. `reach` bounds the operations between an anchor and
    both ends of its region, which keeps a search linear in the number of nodes. A region that is only `pointed_at`, not
    replaced, need not stand alone.
    """

    name: str
    anchors: tuple[str, ...]
    inputs: tuple[Input, ...]
    alternatives: tuple[Alternative, ...]
    constants: tuple[Constant, ...] = ()
    look_alikes: tuple[LookAlike, ...] = ()
    reduces: bool = False
    suits: Callable[[Node, Node], bool] = _same_shape
    unless: Callable[[Graph, int], bool] | None = None
    sample: Callable[[np.random.Generator, tuple[int, ...], tuple[int, ...]], Array] = _normal
    agrees: Callable[[Array, Array, Array], bool] = _agrees
    begins: Callable[[Graph, Node], bool] = lambda graph, anchor: True  # whether an anchor can be one at all
    reach: int = 12
    pointed_at: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of inputs besides the main one."""
        return frozenset(item.kind for item in self.inputs[1:])


def find(graph: Graph, *patterns: Pattern) -> Iterator[Region | NearMiss]:
    """Every region of a graph that computes a pattern, and look-alikes and regions that do not stand alone.

    One pattern after the other, each in graph order; what one has found, the next does not look at. A region ends as
    late as possible; but one whose operations stand in several functions is given only where no smaller one stands in a
    single function, because only that can be rewritten.
    """
    view, done, sweeps = View(graph), set[int](), dict[Hashable, Sweep | None]()
    for pattern in patterns:
        search = _Search(graph, pattern, view, done, sweeps)
        for anchor in calls(graph, *pattern.anchors):
            if anchor.index not in done and pattern.begins(graph, anchor):
                with np.errstate(all="ignore"):
                    found = search.at(anchor)
                if found is not None:
                    yield found


@dataclass
class _Search:
    """One search; `done` holds the nodes of what was found, `sweeps` what patterns with the same samples evaluated,
    `expected` the references' values, `named` what values agreed with."""

    graph: Graph
    pattern: Pattern
    view: View
    done: set[int]
    sweeps: dict[Hashable, Sweep | None]
    samples: dict[tuple[tuple[int, ...], tuple[int, ...]], Array] = field(default_factory=dict)
    expected: dict[Hashable, Array | None] = field(default_factory=dict)
    named: dict[Hashable, Alternative | LookAlike | None] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)  # what is known by identity stays alive

    @property
    def others(self) -> tuple[Input, ...]:
        """The inputs besides the main tensor."""
        return self.pattern.inputs[1:]

    def at(self, anchor: Node) -> Region | NearMiss | None:
        """What lies around one anchor; None where it is nothing of the kind."""
        chosen: Region | None = None
        near: tuple[NearMiss, Region] | None = None
        for _, group in itertools.groupby(self._candidates(anchor), key=lambda c: c[0].root):
            whole: list[Region] = []
            missed: tuple[NearMiss, Region] | None = None
            for region, reason in group:
                verdict = self._judged(region, reason)
                if isinstance(verdict, NearMiss):
                    missed = (verdict, region)
                else:
                    whole.append(verdict)
            near = near or missed
            if whole and (chosen is None or _in_one_function(self.graph, whole[-1])):
                chosen = _preferred(self.graph, whole)
                if _in_one_function(self.graph, chosen):
                    break
        self.done |= chosen.inner if chosen is not None else near[1].inner if near is not None else frozenset()
        return chosen or (near[0] if near is not None else None)

    def _judged(self, region: Region, reason: str | None) -> Region | NearMiss:
        if reason is None:
            constraints = itertools.chain(
                *(item.must for item in self.pattern.inputs if item.name in region.inputs),
                *(item.must for item in self.pattern.constants),
                *(item.must for item in self.pattern.alternatives if item.name == region.facts["alternative"]),
            )
            reason = next((why for c in constraints if (why := c(self.graph, region)) is not None), None)
        if reason is not None:
            return NearMiss(graph=self.graph.index, node=region.root, reason=reason)
        return region if self.pattern.pointed_at else contained(self.graph, region)

    def _candidates(self, anchor: Node) -> Iterator[tuple[Region, str | None]]:
        """Regions around an anchor that compute the pattern or, with the reason, a look-alike; largest first."""
        sweeps = [sweep for main in self._mains(anchor) if (sweep := self._sweep(anchor, main)) is not None]
        if not sweeps:
            return
        for root in self._roots(anchor):
            for sweep in sweeps:
                if root.shape != self.graph.nodes[sweep.main].shape:
                    continue
                try:
                    value = sweep.value(root.index)
                except NotModelled:
                    continue
                matched = self._matched(root.index, sweep, value)
                if matched is not None:
                    yield matched

    def _sweep(self, anchor: Node, main: int) -> Sweep | None:
        """The evaluation from one main tensor; None unless the anchor itself depends on nothing else."""
        pattern, shape = self.pattern, self.graph.nodes[main].shape
        assert shape is not None
        axes = reduced_axes(self.graph, anchor) if pattern.reduces else ()
        if axes is None:
            return None
        known = (anchor.index, main, pattern.sample, pattern.kinds)
        if known not in self.sweeps:
            key = (sample_shape(shape, axes), axes)
            if key not in self.samples:
                self.samples[key] = pattern.sample(np.random.default_rng(7), *key)
            sweep = Sweep(self.view, main, self.samples[key], axes, pattern.kinds)
            try:
                sweep.value(anchor.index)
                self.sweeps[known] = sweep
            except NotModelled:
                self.sweeps[known] = None
        return self.sweeps[known]

    def _mains(self, anchor: Node) -> list[int]:
        """Nodes before an anchor through which all of it is computed, and which may be the main tensor; farthest first.

        Nodes are taken back in descending order; where a single one is left to take back, all that is known comes from
        it. Parameters and small tensors that nothing modelled computes are left out: they may be leaves.
        """
        measure = self._before(anchor) if self.pattern.reduces else anchor
        if measure is None or measure.shape is None:
            return []
        found: list[int] = []
        frontier = {i for i in self.view.reads(anchor.index) if not self._aside(i, measure)}
        for _ in range(LARGEST):
            if not frontier:
                break
            index = max(frontier)
            node = self.graph.nodes[index]
            alone = len(frontier) == 1
            elsewhere = self.pattern.unless is not None and self.pattern.unless(self.graph, index)
            if alone and self.pattern.suits(measure, node) and not elsewhere:
                found.append(index)
            if not self.view.modelled(index) or len(found) > MAINS:
                break
            frontier.remove(index)
            frontier |= {i for i in self.view.reads(index) if not self._aside(i, measure)}
        return found[::-1]

    def _aside(self, index: int, measure: Node) -> bool:
        """Whether a node may be left out on the way back: a constant, a parameter or buffer, a small tensor."""
        if self.view.modelled(index):
            return not self.view.reads(index)
        node = self.graph.nodes[index]
        if node.facts.get("origin") == "state" or node.op == "get_attr":
            return True
        small = math.prod(node.shape) < math.prod(measure.shape or ()) if node.shape is not None else False
        return small and not self.pattern.suits(measure, node)

    def _before(self, anchor: Node) -> Node | None:
        inputs = self.view.reads(anchor.index)
        return self.graph.nodes[inputs[0]] if inputs else None

    def _roots(self, anchor: Node) -> list[Node]:
        """Nodes after an anchor that may be its region's result, farthest first.

        None that only selects or arranges: a slice that takes everything here may take less in another call.
        """
        seen, edge, order = {anchor.index}, [anchor.index], [anchor.index]
        for _ in range(self.pattern.reach):
            edge = [
                user
                for index in edge
                for user in self.graph.nodes[index].users
                if user not in seen and self.view.modelled(user) and not seen.add(user)  # type: ignore[func-returns-value]
            ]
            order += edge
            if len(seen) > LARGEST:
                break
        nodes = [self.graph.nodes[index] for index in reversed(order) if index not in self.done]
        return [node for node in nodes if operation(node) not in REARRANGES]

    def _matched(self, root: int, sweep: Sweep, value: Array) -> tuple[Region, str | None] | None:
        """The region between a main tensor and a root, with the reason where it is a look-alike; None where neither."""
        inner, leaves = sweep.region_of(root)
        if not self.pattern.pointed_at and any(_selects(self.graph, index) for index in inner):
            return None  # a slice that takes everything here may take less in another call
        choices = [list(item.candidates(self.graph, inner)) for item in self.pattern.constants]
        roles = list(_roles(self.others, leaves))
        main = self.pattern.inputs[0].name
        for constants in itertools.product(*choices):
            scalars = {item.name: c[0] for item, c in zip(self.pattern.constants, constants, strict=True)}
            for assigned in roles:
                found = self._named(sweep, assigned, scalars, value)
                if found is None:
                    continue
                axes = {"axes": ",".join(map(str, sweep.axes))} if sweep.axes else {}
                region = Region(
                    graph=self.graph.index,
                    root=root,
                    inputs={main: sweep.main, **assigned},
                    inner=inner,
                    constants={i.name: c for i, c in zip(self.pattern.constants, constants, strict=True)},
                    facts=axes if isinstance(found, LookAlike) else {**axes, "alternative": found.name},
                )
                return region, found.reason if isinstance(found, LookAlike) else None
        return None

    def _named(
        self, sweep: Sweep, assigned: Mapping[str, int], scalars: Mapping[str, float], value: Array
    ) -> Alternative | LookAlike | None:
        """The first alternative, else the first look-alike, that gives this value."""
        given: dict[str, object] = {item.name: sweep.known.get(assigned.get(item.name, -1)) for item in self.others}
        key = (id(value), sweep.x.shape, sweep.axes, tuple(map(id, given.values())), tuple(scalars.values()))
        if key not in self.named:
            given |= {self.pattern.inputs[0].name: sweep.x, **scalars}
            if self.pattern.reduces:
                given["axes"] = sweep.axes
            functions: list[Alternative | LookAlike] = [*self.pattern.alternatives, *self.pattern.look_alikes]
            fits = (item for n, item in enumerate(functions) if self._gives(n, item, key[1:], given, sweep.x, value))
            self.named[key] = next(fits, None)
            self.kept += [given, value]
        return self.named[key]

    def _gives(
        self,
        number: int,
        item: Alternative | LookAlike,
        key: tuple[Hashable, ...],
        given: Mapping[str, object],
        x: Array,
        value: Array,
    ) -> bool:
        """Whether a function of the pattern, the `number`-th, gives this value of what `key` tells apart."""
        if (number, *key) not in self.expected:
            try:
                self.expected[(number, *key)] = item.function(**given)
            except (TypeError, ValueError, IndexError):  # an optional input it needs, a table of another width
                self.expected[(number, *key)] = None
        expected = self.expected[(number, *key)]
        return expected is not None and value.shape == expected.shape and self.pattern.agrees(value, expected, x)


LARGEST = 48  # nodes looked at on each side of an anchor
MAINS = 6  # main tensors tried for one anchor


def _roles(inputs: Sequence[Input], leaves: Sequence[Leaf]) -> Iterator[dict[str, int]]:
    """Every way to name the leaves of a region: kinds agree and no required input is left out."""
    for chosen in itertools.permutations(inputs, len(leaves)):
        absent = [item for item in inputs if item not in chosen and not item.optional]
        if not absent and all(i.kind == leaf.kind for i, leaf in zip(chosen, leaves, strict=True)):
            yield {item.name: leaf.node for item, leaf in zip(chosen, leaves, strict=True)}


def _selects(graph: Graph, index: int) -> bool:
    """Whether a node takes elements of a tensor; one of several results of an operation is no such element."""
    node = graph.nodes[index]
    source = node.args[0] if node.args else None
    if operation(node) != "getitem" or not isinstance(source, Ref) or graph.nodes[source.index].shape is None:
        return False
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return not all(part is None or _is_whole(part) for part in parts)


def _is_whole(part: Arg) -> bool:
    """Whether a part of an index takes all there is, be it written `:` or `...`."""
    whole = isinstance(part, Symbol) and part.kind == "slice" and set(part.parts) <= {None}
    return whole or (isinstance(part, Symbol) and part.kind == "ellipsis")


def _preferred(graph: Graph, regions: list[Region]) -> Region:
    """The largest region within one function, else the largest; the others are its alternatives."""
    first = next((region for region in regions if _in_one_function(graph, region)), regions[0])
    return replace(first, alternatives=tuple(region for region in regions if region is not first))


def _in_one_function(graph: Graph, region: Region) -> bool:
    spans = [graph.nodes[i].span for i in region.inner]
    return len({(span.path, span.function) for span in spans if span is not None}) <= 1
