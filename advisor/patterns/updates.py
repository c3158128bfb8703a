"""Find what a training loop does to parameters and gradients tensor by tensor: averages of them, norms of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.model import Graph, Node, Ref
from advisor.patterns.loops import Spot, spot_of
from advisor.semantics import NotModelled, evaluate, in_place, operation, same

# ----------------------------------------------------------------------------------------------------------- averaging


@dataclass(frozen=True, kw_only=True)
class Average:
    """One update average = decay * average + (1 - decay) * parameter; `inner` are its nodes, `root` its last."""

    graph: int
    root: int
    average: int
    parameter: int
    decay: float
    inner: frozenset[int]


SAMPLES = (np.array([1.0, -3.0, 0.25]), np.array([2.0, 5.0, -0.5]))


def averages(graph: Graph) -> Iterator[Average]:
    """Exponential moving averages of parameters, recognised by evaluating the operations on samples."""
    for node in graph.nodes:
        if not node.op.startswith("call_") or operation(node) not in ("add", "sub", "lerp", "lerp_"):
            continue
        if node.requires_grad and not in_place(node) and node.facts.get("grad_mode") != "off":
            continue  # a mixture of weights that is trained
        found = _average(graph, node)
        if found is not None:
            yield found


def _average(graph: Graph, node: Node) -> Average | None:
    inner, leaves = _cone(graph, node.index)
    if len(leaves) != 2:
        return None
    first, second = leaves
    for average, parameter in ((first, second), (second, first)):
        if (
            not _is_parameter(graph.nodes[_source(graph, parameter)])
            or graph.nodes[average].shape != graph.nodes[parameter].shape
        ):
            continue
        decay = _decay(graph, node, average, parameter)
        if decay is not None:
            return Average(
                graph=graph.index, root=node.index, average=average, parameter=parameter, decay=decay, inner=inner
            )
    return None


def _cone(graph: Graph, root: int, limit: int = 6) -> tuple[frozenset[int], list[int]]:
    """The elementwise operations that end in `root`, and what they start from."""
    inner: set[int] = set()
    leaves: list[int] = []
    pending = [root]
    while pending:
        node = graph.nodes[pending.pop()]
        if node.index in inner or node.index in leaves:
            continue
        if operation(node) in ("add", "sub", "mul", "lerp", "lerp_") and len(inner) < limit:
            inner.add(node.index)
            pending.extend(node.inputs())
        else:
            leaves.append(node.index)
    return frozenset(inner), sorted(leaves)


def _is_parameter(node: Node) -> bool:
    if node.op not in ("placeholder", "get_attr"):
        return False
    kind = node.facts.get("kind")
    return kind == "parameter" or (kind is None and node.facts.get("origin") == "state")


def _decay(graph: Graph, node: Node, average: int, parameter: int) -> float | None:
    """The decay of an update that is one, None for any other function of the two tensors."""
    old, new = SAMPLES
    weight = node.args[2] if len(node.args) > 2 else node.kwargs.get("weight")
    if operation(node) in ("lerp", "lerp_"):
        if node.args[:2] != (Ref(average), Ref(parameter)) or not isinstance(weight, float):
            return None
        return 1.0 - weight if 0.0 < weight < 0.5 else None
    try:
        decay = float(evaluate(graph, node.index, {average: np.array([1.0]), parameter: np.array([0.0])})[0])
        value = evaluate(graph, node.index, {average: old, parameter: new})
    except (NotModelled, IndexError):
        return None
    return decay if 0.5 < decay < 1.0 and same(value, decay * old + (1.0 - decay) * new, 1e-6) else None


def _source(graph: Graph, index: int) -> int:
    """What a chain of detached or converted views starts from."""
    while operation(graph.nodes[index]) in ("detach", "to", "_get_data_attr") and graph.nodes[index].inputs():
        index = graph.nodes[index].inputs()[0]
    return index


# ------------------------------------------------------------------------------------------------------------ clipping


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Norms of gradients taken one tensor after the other at one place.

    `gradients` are the gradients of `norms`, in that order; `scales` the nodes that scale these.
    """

    graph: int
    spot: Spot
    norms: tuple[int, ...]
    gradients: tuple[int | None, ...]
    scales: tuple[int, ...]
    reads: tuple[int, ...]  # calls with which the host reads what was made of the norms


SAME_MEMORY = frozenset({"detach", "to", "_get_data_attr", "flatten", "view", "getattr"})
NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "pow", "square"})


def gradient_norms(graph: Graph, least: int) -> Iterator[GradientNorms]:
    """Places that take the norm of at least `least` gradients one by one, in the order of their first node."""
    places: dict[tuple[str, int, int], list[Node]] = {}
    for node in graph.nodes:
        if node.op.startswith("call_") and operation(node) in NORMS and _of_gradient(graph, node):
            places.setdefault(spot_of(graph, node).key(), []).append(node)
    for nodes in places.values():
        gradients = {_behind(graph, node) for node in nodes}
        if len(gradients) >= least:
            scales = tuple(
                n.index for n in graph.nodes if operation(n) in ("mul", "div") and _behind(graph, n) in gradients
            )
            yield GradientNorms(
                graph=graph.index,
                spot=spot_of(graph, nodes[0]),
                norms=tuple(node.index for node in nodes),
                gradients=tuple(_behind(graph, node) for node in nodes),
                scales=tuple(index for index in scales if index not in {n.index for n in nodes}),
                reads=tuple(_host_reads(graph, nodes)),
            )


def _behind(graph: Graph, node: Node) -> int | None:
    """The placeholder whose memory a node's first argument is, under whatever view, type or change in place."""
    arg = node.args[0] if node.args else None
    for _ in range(16):
        if not isinstance(arg, Ref):
            return None
        node = graph.nodes[arg.index]
        if node.op in ("placeholder", "get_attr"):
            return node.index
        arg = node.args[0] if node.args else None
        if operation(node) == "getitem" and isinstance(arg, Ref) and in_place(graph.nodes[arg.index]):
            changed, item = graph.nodes[arg.index].args[0], node.args[1]
            arg = changed[item] if isinstance(changed, tuple) and isinstance(item, int) else None
        elif operation(node) not in SAME_MEMORY and not in_place(node):
            return None
    return None


def _of_gradient(graph: Graph, node: Node) -> bool:
    behind = _behind(graph, node)
    if behind is None:
        return False
    source = graph.nodes[behind]
    return source.facts.get("kind") == "gradient" or source.name.endswith("_grad")  # as Dynamo names it


def _host_reads(graph: Graph, nodes: Sequence[Node]) -> Iterator[int]:
    seen: set[int] = set()
    pending = [node.index for node in nodes]
    while pending:
        index = pending.pop()
        for user in graph.nodes[index].users:
            if user in seen:
                continue
            seen.add(user)
            if operation(graph.nodes[user]) in ("item", "__float__", "__bool__", "tolist", "cpu"):
                yield user
            elif operation(graph.nodes[user]) in ("pow", "square", "add", "sum", "sqrt", "stack", "norm", "div"):
                pending.append(user)
