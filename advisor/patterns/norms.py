"""Normalisations over the last axis written out, told from their look-alikes by evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from advisor.model import Graph, Node, Ref
from advisor.patterns.regions import NearMiss, Region, calls, contained, forward_from, inner_nodes
from advisor.semantics import Array, NotModelled, evaluate, layer_norm, operation, same


def layer_norm_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """LayerNorm over the last axis written out, with or without weight and bias; look-alikes are near misses."""
    done: set[int] = set()
    for node in calls(graph, "mean", "var", "std"):
        source = node.args[0].index if node.args and isinstance(node.args[0], Ref) else None
        if source is None or source in done or node.index in done or not _over_last_axis(graph, node, source):
            continue
        found = _layer_norm_at(graph, node.index, source)
        if found is not None:
            done |= {source, *(found.inner if isinstance(found, Region) else ())}
            yield contained(graph, found) if isinstance(found, Region) else found


def _over_last_axis(graph: Graph, node: Node, source: int) -> bool:
    shape = graph.nodes[source].shape
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    return shape is not None and len(shape) >= 2 and dim in (-1, len(shape) - 1)


def _layer_norm_at(graph: Graph, anchor: int, source: int) -> Region | NearMiss | None:
    generator = np.random.default_rng(7)
    width = 7
    x = generator.standard_normal((4, width)) * np.array([[3.0], [1.0], [1e-2], [1e-3]]) + 0.5
    rank = len(graph.nodes[source].shape or ())
    x = x.reshape((1,) * (rank - 2) + x.shape)
    near: NearMiss | None = None
    for root in reversed(forward_from(graph, anchor)):
        vectors = _vectors(graph, root, source)
        if vectors is None or len(vectors) > 2:
            continue
        bound = {source: x} | {index: generator.standard_normal(width) + 1.5 for index in vectors}
        try:
            value = evaluate(graph, root, bound)
        except NotModelled:
            continue
        if value.shape != x.shape:
            continue
        found = _which_norm(graph, root, source, vectors, bound, value)
        if isinstance(found, Region):
            return found
        near = near or found
    return near


def _vectors(graph: Graph, root: int, source: int) -> tuple[int, ...] | None:
    """Leaves of the region that are vectors as long as the last axis; None when it has another leaf."""
    shape = graph.nodes[source].shape
    assert shape is not None
    leaves: list[int] = []
    seen: set[int] = set()
    pending = [root]
    while pending:
        index = pending.pop()
        if index == source or index in seen:
            continue
        seen.add(index)
        node = graph.nodes[index]
        if node.shape == shape[-1:]:
            leaves.append(index)
        elif not node.op.startswith("call_") or len(seen) > 40:
            return None
        else:
            pending.extend(node.inputs())
    return tuple(sorted(leaves))


def _which_norm(
    graph: Graph, root: int, source: int, vectors: tuple[int, ...], bound: Mapping[int, Array], value: Array
) -> Region | NearMiss | None:
    x = bound[source]
    inner = inner_nodes(graph, root, frozenset({source, *vectors}))
    for eps, node, position in _scalars(graph, inner):
        for weight, bias in _roles(vectors):
            arrays = (None if weight is None else bound[weight], None if bias is None else bound[bias])
            if same(value, layer_norm(x, *arrays, eps), 1e-9):
                inputs = {"x": source}
                inputs |= {name: i for name, i in (("weight", weight), ("bias", bias)) if i is not None}
                constants = {"eps": (eps, node, position)}
                return Region(graph=graph.index, root=root, inputs=inputs, inner=inner, constants=constants)
            reason = _look_alike(x, arrays, eps, value)
            if reason is not None:
                return NearMiss(graph=graph.index, node=root, reason=reason)
    return None


def _look_alike(x: Array, arrays: tuple[Array | None, Array | None], eps: float, value: Array) -> str | None:
    unbiased = same(value, layer_norm(x, *arrays, eps, ddof=1), 1e-9)
    outside = same(value, layer_norm(x, *arrays, eps, outside=True), 1e-9)
    both = same(value, layer_norm(x, *arrays, eps, ddof=1, outside=True), 1e-9)
    parts = []
    if unbiased or both:
        parts.append("divides the variance by N-1 where F.layer_norm divides by N")
    if outside or both:
        parts.append("adds eps to the standard deviation where F.layer_norm adds it to the variance")
    return "not the same function: " + " and ".join(parts) if parts else None


def _roles(vectors: tuple[int, ...]) -> list[tuple[int | None, int | None]]:
    if not vectors:
        return [(None, None)]
    if len(vectors) == 1:
        return [(vectors[0], None), (None, vectors[0])]
    return [(vectors[0], vectors[1]), (vectors[1], vectors[0])]


def _scalars(graph: Graph, inner: frozenset[int]) -> Iterator[tuple[float, int, int | str]]:
    """Small positive constants that are added inside the region: candidates for eps."""
    for index in sorted(inner):
        node = graph.nodes[index]
        if operation(node) != "add":
            continue
        for position, arg in enumerate(node.args):
            if isinstance(arg, (int, float)) and not isinstance(arg, bool) and 0 < arg < 0.1:
                yield float(arg), index, position
