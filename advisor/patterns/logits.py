"""Scores that an output layer makes for a loss: from the cross entropy back to the product, with every copy between."""

from __future__ import annotations

import math
from collections.abc import Iterator

from advisor.model import Graph, Node, Ref, Symbol
from advisor.patterns.regions import FORWARD_LIMIT, NearMiss, Region, calls
from advisor.semantics import operation

PASSED_ON = frozenset(
    {"to", "view", "reshape", "flatten", "transpose", "permute", "contiguous", "getitem", "log_softmax", "squeeze"}
)


def logits_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """Cross entropy of what a linear layer gives, through casts, views and slices alone.

    The root is the loss, inputs are the layer's "x" and "weight". Facts: "logits" the layer's node, "classes" the size
    of its result, "copies" the nodes between that hold the scores once more (another dtype, or made contiguous).
    Where the scores are used for anything else it is a near miss.
    """
    for loss in calls(graph, "cross_entropy", "nll_loss"):
        path = _to_layer(graph, loss)
        if path is None:
            continue
        layer = graph.nodes[path[-1]]
        inside = {loss.index, *path}
        leak = next((i for i in path if any(user not in inside for user in graph.nodes[i].users)), None)
        if leak is not None:
            user = next(u for u in graph.nodes[leak].users if u not in inside)
            what = "returned" if graph.nodes[user].op == "output" else f"used by `{graph.nodes[user].name}`"
            reason = f"the logits are {what} as well, so they have to be there as a whole"
            yield NearMiss(graph=graph.index, node=loss.index, reason=reason)
            continue
        x, weight = layer.args[0], layer.args[1]
        assert isinstance(x, Ref) and isinstance(weight, Ref)
        yield Region(
            graph=graph.index,
            root=loss.index,
            inputs={"x": x.index, "weight": weight.index},
            inner=frozenset(inside),
            facts={
                "logits": str(layer.index),
                "classes": str((layer.shape or (0,))[-1]),
                "copies": " ".join(str(i) for i in path[:-1] if _copies(graph, graph.nodes[i])),
            },
        )


def _to_layer(graph: Graph, loss: Node) -> list[int] | None:
    """The nodes from the loss's scores back to the linear layer, the layer last; None where it is none."""
    current = loss.args[0] if loss.args else loss.kwargs.get("input")
    path: list[int] = []
    for _ in range(FORWARD_LIMIT):
        if not isinstance(current, Ref):
            return None
        node = graph.nodes[current.index]
        path.append(node.index)
        kind = operation(node)
        if kind == "linear":
            both = len(node.args) > 1 and all(isinstance(a, Ref) for a in node.args[:2])
            return path if both and node.shape else None
        if kind not in PASSED_ON or not node.args or (kind == "getitem" and not _slices(node)):
            return None
        current = node.args[0]
    return None


def _slices(node: Node) -> bool:
    item = node.args[1]
    parts = item if isinstance(item, tuple) else (item,)
    return all(isinstance(part, Symbol) and part.kind in ("slice", "ellipsis") for part in parts)


def _copies(graph: Graph, node: Node) -> bool:
    """Whether a node holds the values of its input once more."""
    arg = node.args[0]
    before = graph.nodes[arg.index] if isinstance(arg, Ref) else None
    if before is None or before.shape is None or node.shape is None:
        return False
    if operation(node) == "log_softmax" or before.dtype != node.dtype:
        return True
    return operation(node) == "contiguous" and before.stride != node.stride


def elements(node: Node) -> int:
    """Number of elements of a node's value, 0 where it is not known."""
    return math.prod(node.shape) if node.shape is not None else 0
