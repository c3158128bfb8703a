"""Searches in the graph that a source shows: attention, norms and elementwise functions, where nothing is left open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from advisor.model import Arg, Graph, Node, Ref
from advisor.semantics import TRANSPARENT, Array, NotModelled, evaluate, operation, same
from advisor.usercode.sourcegraph import EITHER, ELSEWHERE, is_scalar

LIMIT = 12  # operations from an anchor to the beginning or the end of its pattern
EPS = 1e-3  # that stands for a number the source does not tell
TURNED = frozenset({"transpose", "permute", "mT", "T", "t", "mH"})  # how a key is turned for the product


def _argument(node: Node, place: int, *names: str) -> Arg:
    """An argument of a call by its place or its names, None where it is not given."""
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    return node.args[place] if len(node.args) > place else None


def _calls(graph: Graph, *names: str) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function" and operation(node) in names)


def _kept_inside(graph: Graph, inner: frozenset[int], root: int) -> bool:
    """Whether no value but the root's is used outside the pattern."""
    return all(user in inner for index in inner - {root} for user in graph.nodes[index].users)


# ------------------------------------------------------------------------------------------------------------ attention


def attentions(graph: Graph) -> Iterator[int]:
    """The last product of every softmax(q k^T scale + mask) v whose every step is visible and used nowhere else.

    Between the first product and softmax stand scales that are numbers, additive masks, fills with minus infinity and
    casts; between softmax over the last axis and the second product stand dropout and casts.
    """
    for node in _calls(graph, "softmax"):
        before: dict[int, int | None] = {}
        start = _argument(node, 0, "input")
        product = _scores(graph, start, before) if _argument(node, 1, "dim") == -1 else None
        after = None if product is None else _weighted(graph, node.index)
        if product is None or after is None:
            continue
        root, behind = after
        inner = frozenset({*before, *behind, node.index, product, root})
        if _kept_inside(graph, inner, root) and _are_activations(graph, product, root):
            yield root


def _scores(graph: Graph, arg: Arg, path: dict[int, int | None]) -> int | None:
    """The product that scores come from; the nodes on the way go into `path`, each with its product."""
    if not isinstance(arg, Ref):
        return None
    if arg.index in path:
        return path[arg.index]
    node = graph.nodes[arg.index]
    name = operation(node)
    if name in ("matmul", "einsum"):
        return arg.index if _is_scores(graph, node) else None
    following = _before(graph, node, name)
    if not following:
        return None
    products = {_scores(graph, each, path) for each in following}
    path[arg.index] = products.pop() if len(products) == 1 else None
    return path[arg.index]


def _before(graph: Graph, node: Node, name: str) -> tuple[Arg, ...]:
    """What the scores were before this step; empty where the step is none that attention has."""
    if node.target == EITHER:
        return node.args
    if name in TRANSPARENT:
        return node.args[:1]
    if name in ("mul", "div", "add") and len(node.args) == 2:
        left, right = node.args
        if _is_number(graph, right):
            return (left,)
        if _is_number(graph, left) and name == "mul":
            return (right,)
        if name == "add":
            both = [each for each in (left, right) if _leads_to_product(graph, each)]
            return tuple(both) if len(both) == 1 else ()
    if name == "masked_fill" and _argument(node, 2, "value") == -math.inf:
        return node.args[:1]
    if name == "where" and len(node.args) == 3 and -math.inf in node.args[1:]:
        return tuple(arg for arg in node.args[1:] if arg != -math.inf)
    return ()


def _is_number(graph: Graph, arg: Arg) -> bool:
    if isinstance(arg, Ref):
        return is_scalar(graph.nodes[arg.index])
    return isinstance(arg, int | float) and not isinstance(arg, bool)


def _leads_to_product(graph: Graph, arg: Arg) -> bool:
    return _scores(graph, arg, {}) is not None


def _is_scores(graph: Graph, node: Node) -> bool:
    """A product with a key that was turned, or an einsum over the last axis of both."""
    if operation(node) == "einsum":
        letters = _einsum(node)
        return letters is not None and letters[0][-1] == letters[1][-1] and letters[0][-1] not in letters[2]
    key = _argument(node, 1, "other", "mat2")
    while isinstance(key, Ref) and operation(graph.nodes[key.index]) in TRANSPARENT:
        key = graph.nodes[key.index].args[0]
    return isinstance(key, Ref) and operation(graph.nodes[key.index]) in TURNED


def _einsum(node: Node) -> tuple[str, str, str] | None:
    """The subscripts of an einsum of two tensors: left, right, result."""
    equation = node.args[0] if node.args else None
    if not isinstance(equation, str) or len(node.args) != 3 or equation.count(",") != 1 or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    left, right = given.split(",")
    return (left, right, result) if left and right and result else None


def _weighted(graph: Graph, softmax: int) -> tuple[int, set[int]] | None:
    """The product that the probabilities go into, and the nodes on the way; None where they go anywhere else."""
    path = {softmax}
    products: set[int] = set()
    pending = [softmax]
    while pending:
        index = pending.pop()
        for user in graph.nodes[index].users:
            node = graph.nodes[user]
            if operation(node) in ("matmul", "einsum"):
                if not _is_weighting(node, path):
                    return None
                products.add(user)
            elif node.target == EITHER or operation(node) in TRANSPARENT | {"dropout"}:
                if user not in path:
                    path.add(user)
                    pending.append(user)
            else:
                return None
    merged = [graph.nodes[index] for index in path if graph.nodes[index].target == EITHER]
    if len(products) != 1 or any(not isinstance(a, Ref) or a.index not in path for m in merged for a in m.args):
        return None
    return products.pop(), path


def _is_weighting(node: Node, path: set[int]) -> bool:
    """Whether a product sums over the last axis of the probabilities, which stand on its left."""
    first = 1 if operation(node) == "einsum" else 0
    left = node.args[first] if len(node.args) > first else None
    if not isinstance(left, Ref) or left.index not in path:
        return False
    if operation(node) == "matmul":
        return True
    letters = _einsum(node)
    return letters is not None and letters[0][-1] in letters[1] and letters[0][-1] not in letters[2]


def _are_activations(graph: Graph, scores: int, root: int) -> bool:
    """Whether key and value are computed: products with stored tensors are look-ups, which may be something else."""
    for node, place in ((graph.nodes[scores], -1), (graph.nodes[root], -1)):
        arg = node.args[place] if node.args else None
        while isinstance(arg, Ref) and operation(graph.nodes[arg.index]) in TRANSPARENT | TURNED:
            arg = graph.nodes[arg.index].args[0]
        if not isinstance(arg, Ref):
            return False
        source = graph.nodes[arg.index]
        if source.op == "placeholder" and "." in source.target:
            return False
    return True


# ------------------------------------------------------------------------------------------------- norms and functions


def norms(graph: Graph, reference: Callable[[Array, float], Array]) -> Iterator[int]:
    """Nodes that compute a norm of one tensor over its last axis, found by evaluating them on samples.

    Numbers that the source does not tell (`self.eps`) take part as one and the same small number.
    """
    samples = np.random.default_rng(0).normal(0.3, 1.7, (2, 2, 2, 2, 8))  # so many axes that only -1 means the last
    roots = [node.index for node in _calls(graph, "sqrt", "rsqrt", "pow", "std")]
    yield from _computing(graph, roots, samples, lambda eps: reference(samples, eps))


def elementwise(graph: Graph, references: Mapping[str, Callable[[Array], Array]]) -> Iterator[int]:
    """Nodes that compute a function of one tensor; `references` maps the operation it is recognised by to it."""
    samples = np.concatenate([np.linspace(-6.0, 6.0, 25), [-0.01, 0.0, 0.003]])
    for name, reference in references.items():
        expected = reference(samples)
        anchors = [node.index for node in _calls(graph, name)]
        yield from _computing(graph, anchors, samples, lambda _, expected=expected: expected)  # type: ignore[misc]


def _computing(graph: Graph, anchors: list[int], samples: Array, expected: Callable[[float], Array]) -> Iterator[int]:
    done: set[int] = set()
    for anchor in anchors:
        found = next(
            (
                (root, inner)
                for root in _forward(graph, anchor)
                for start in _backward(graph, anchor)
                if (inner := _computes(graph, root, start, samples, expected)) is not None
            ),
            None,
        )
        if found is not None and found[0] not in done and _kept_inside(graph, found[1], found[0]):
            done.add(found[0])
            yield found[0]


def _computes(
    graph: Graph, root: int, start: int, samples: Array, expected: Callable[[float], Array]
) -> frozenset[int] | None:
    """The nodes between `start` and `root` when they compute what is expected of the samples."""
    numbers = {node.index: np.asarray(EPS) for node in graph.nodes if is_scalar(node)}
    if start in numbers:
        return None
    try:
        value = evaluate(graph, root, {**numbers, start: samples})
    except NotModelled:
        return None
    inner = _between(graph, root, frozenset({start, *numbers}))
    used = {EPS} if any(i in numbers for n in inner for i in graph.nodes[n].inputs()) else set()
    constants = {float(a) for n in inner for a in graph.nodes[n].args if isinstance(a, float) and 0 < a < 0.1}
    return inner if any(same(value, expected(eps), 1e-5) for eps in sorted(used | constants | {EPS})) else None


def _between(graph: Graph, root: int, inputs: frozenset[int]) -> frozenset[int]:
    found: set[int] = set()
    pending = [root]
    while pending:
        index = pending.pop()
        if index not in inputs and index not in found:
            found.add(index)
            pending.extend(graph.nodes[index].inputs())
    return frozenset(found)


def _forward(graph: Graph, start: int) -> list[int]:
    """A node and what is computed from it, nearest first."""
    return _spread(start, lambda index: [u for u in graph.nodes[index].users if graph.nodes[u].target != ELSEWHERE])


def _backward(graph: Graph, start: int) -> list[int]:
    """What a node is computed from, nearest first."""
    return _spread(start, lambda index: list(graph.nodes[index].inputs()))[1:]


def _spread(start: int, step: Callable[[int], list[int]]) -> list[int]:
    order, seen, edge = [start], {start}, [start]
    for _ in range(LIMIT):
        following = [index for each in edge for index in step(each)]
        edge = [index for index in dict.fromkeys(following) if index not in seen]
        seen.update(edge)
        order += edge
    return order[: 4 * LIMIT]
