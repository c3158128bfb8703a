"""Softmax in all its spellings: the operation, exp over its own sum, the exponential of log_softmax or logsumexp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from advisor.model import Arg, Graph, Node, Ref
from advisor.patterns.regions import calls
from advisor.semantics import operation


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """`node` holds the probabilities, `source` what goes in, `dim` the axis from the front."""

    node: int
    source: int
    dim: int


def softmaxes(graph: Graph) -> Iterator[Softmax]:
    """Every softmax of a graph, in order of its first operation."""
    for node in calls(graph, "softmax", "exp"):
        found = _operation(node) if operation(node) == "softmax" else _by_hand(graph, node)
        if found is not None:
            yield found


def _operation(node: Node) -> Softmax | None:
    rank = len(node.shape or ())
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not node.args or not isinstance(node.args[0], Ref) or not isinstance(dim, int) or not rank:
        return None
    return Softmax(node=node.index, source=node.args[0].index, dim=dim % rank)


def _by_hand(graph: Graph, exp: Node) -> Softmax | None:
    """exp(x) / sum(exp(x)), with or without the maximum taken off; exp(log_softmax(x)); exp(x - logsumexp(x))."""
    rank = len(exp.shape or ())
    inside = _node(graph, exp.args[0]) if exp.args else None
    if inside is None or not rank:
        return None
    if operation(inside) == "log_softmax":
        found = _operation(inside)
        return None if found is None else Softmax(node=exp.index, source=found.source, dim=found.dim)
    shifted = _shift(graph, inside, "logsumexp", rank)
    if shifted is not None:
        return Softmax(node=exp.index, source=shifted[0], dim=shifted[1])
    for user in exp.users:
        quotient = graph.nodes[user]
        total = _node(graph, quotient.args[1]) if operation(quotient) == "div" and len(quotient.args) == 2 else None
        if total is None or quotient.args[0] != Ref(exp.index) or operation(total) != "sum":
            continue
        dim = _reduced(total, rank)
        if total.args[0] != Ref(exp.index) or dim is None:
            continue
        taken = _shift(graph, inside, "max", rank) or _shift(graph, inside, "amax", rank)
        source = taken[0] if taken is not None and taken[1] == dim else inside.index
        return Softmax(node=quotient.index, source=source, dim=dim)
    return None


def _node(graph: Graph, arg: Arg) -> Node | None:
    return graph.nodes[arg.index] if isinstance(arg, Ref) else None


def _shift(graph: Graph, node: Node, name: str, rank: int) -> tuple[int, int] | None:
    """(x, axis) where a node is x - name(x, axis, keepdim=True)."""
    if operation(node) != "sub" or len(node.args) != 2 or not isinstance(node.args[0], Ref):
        return None
    taken = _node(graph, node.args[1])
    while taken is not None and operation(taken) in ("getitem", "detach", "getattr"):
        taken = _node(graph, taken.args[0])
    if taken is None or operation(taken) != name or taken.args[0] != node.args[0]:
        return None
    dim = _reduced(taken, rank)
    return (node.args[0].index, dim) if dim is not None else None


def _reduced(node: Node, rank: int) -> int | None:
    """The one axis a reduction keeps with size one, None where it is another reduction."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    return dim % rank if isinstance(dim, int) and not isinstance(dim, bool) and keeps is True else None
