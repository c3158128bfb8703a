"""Regions that compute an elementwise function of one tensor, found by evaluating them on samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from advisor.model import Graph
from advisor.patterns.regions import FORWARD_LIMIT, NearMiss, Region, calls, contained, forward_from, inner_nodes
from advisor.semantics import Array, NotModelled, evaluate


def unary_regions(
    graph: Graph, anchor: str, reference: Callable[[Array], Array], relative: float = 1e-6
) -> Iterator[Region | NearMiss]:
    """Regions around operations named `anchor` that compute `reference` of a single tensor, elementwise."""
    samples = np.concatenate([np.linspace(-9.0, 9.0, 37), [-0.01, 0.0, 0.003, -1e6, -100.0, 100.0, 1e6]])
    expected = reference(samples)
    for node in calls(graph, anchor):
        found = _unary_at(graph, node.index, samples, expected, relative)
        if found is not None:
            yield contained(graph, found)


def _unary_at(graph: Graph, anchor: int, samples: Array, expected: Array, relative: float) -> Region | None:
    for root in forward_from(graph, anchor):
        for source in _cuts(graph, anchor):
            try:
                value = evaluate(graph, root, {source: samples})
            except NotModelled:
                continue
            if value.shape == expected.shape and bool(
                np.all(np.abs(value - expected) <= relative * np.maximum(np.abs(samples), 1e-3))
            ):
                inner = inner_nodes(graph, root, frozenset({source}))
                return Region(graph=graph.index, root=root, inputs={"x": source}, inner=inner)
    return None


def _cuts(graph: Graph, anchor: int) -> list[int]:
    """Nodes before the anchor that could be the only input of its region, nearest first."""
    order, seen, edge = [], {anchor}, [anchor]
    for _ in range(FORWARD_LIMIT):
        edge = [i for index in edge for i in graph.nodes[index].inputs() if i not in seen and not seen.add(i)]  # type: ignore[func-returns-value]
        order.extend(edge)
    return order[:32]
