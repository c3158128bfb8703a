"""Convolutions of a captured graph: their layout, groups and bias, and the normalisation that follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from advisor.model import Graph, Node, NodeCost, Ref
from advisor.patterns.regions import NearMiss, Region, calls
from advisor.semantics import operation

NAMES = ("conv1d", "conv2d", "conv3d")
VIEWS = frozenset({"view", "view_as", "as_strided"})  # fail or read other elements where the layout is another
MODULES = ("Conv1d", "Conv2d", "Conv3d")


@dataclass(frozen=True)
class Convolution:
    """One call: `bias` is the node of its bias, `groups` how many groups its channels form."""

    node: Node
    weight: Node | None
    bias: int | None
    groups: int

    @property
    def dimensions(self) -> int:
        """Spatial dimensions, 1 to 3."""
        return int(operation(self.node)[4])


def convolutions(graph: Graph) -> Iterator[Convolution]:
    """Every convolution of a graph; transposed ones are left out."""
    for node in calls(graph, *NAMES):
        weight, bias, groups = _given(node, 1, "weight"), _given(node, 2, "bias"), _given(node, 6, "groups")
        yield Convolution(
            node=node,
            weight=graph.nodes[weight.index] if isinstance(weight, Ref) else None,
            bias=bias.index if isinstance(bias, Ref) else None,
            groups=groups if isinstance(groups, int) else 1,
        )


def times(found: Iterable[tuple[Graph, Convolution]], costs: Mapping[tuple[int, int], NodeCost]) -> tuple[float, float]:
    """Measured time of some convolutions and the sum of their known floors, both in microseconds per step."""
    places = [(graph.index, convolution.node.index) for graph, convolution in found]
    known = [costs[place] for place in places if place in costs]
    return sum(cost.total_us for cost in known), sum(cost.floor_us or 0.0 for cost in known)


def _given(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def bias_before_batch_norm(graph: Graph) -> Iterator[Region | NearMiss]:
    """Convolutions whose bias the mean of a following BatchNorm in training takes out again.

    The region is the convolution alone, its inputs "x" and "bias".
    """
    for found in convolutions(graph):
        node = found.node
        norms = [u for u in node.users if operation(graph.nodes[u]) == "batch_norm"]
        if found.bias is None or not norms or not isinstance(node.args[0], Ref):
            continue
        reason = _needs_bias(graph, found, norms)
        if reason is not None:
            yield NearMiss(graph=graph.index, node=node.index, reason=reason)
            continue
        yield Region(
            graph=graph.index,
            root=node.index,
            inputs={"x": node.args[0].index, "bias": found.bias},
            inner=frozenset({node.index}),
        )


def _needs_bias(graph: Graph, found: Convolution, norms: list[int]) -> str | None:
    """Why the bias is not superfluous, or None."""
    assert found.bias is not None
    if len(norms) != len(found.node.users):
        return "what the convolution gives is used elsewhere than in BatchNorm"
    if any(_given(graph.nodes[n], 5, "training") is not True for n in norms):
        return "BatchNorm runs with its stored statistics, which do not hold the bias of this batch"
    if len(graph.nodes[found.bias].users) != 1:
        return "the bias is used elsewhere"
    if (found.node.module_class or "").rpartition(".")[2] not in MODULES:
        return "the bias is no parameter of an nn.Conv module"
    if not graph.nodes[found.bias].requires_grad:
        return "the bias is not trained"
    return None


def is_channels_last(graph: Graph, found: Convolution) -> bool:
    """Whether the input of a convolution lies in memory with its channels next to each other."""
    arg = found.node.args[0] if found.node.args else None
    shape = graph.nodes[arg.index].shape if isinstance(arg, Ref) else None
    stride = graph.nodes[arg.index].stride if isinstance(arg, Ref) else None
    return shape is not None and stride is not None and len(shape) == 4 and shape[1] > 1 and stride[1] == 1


def flattened_activation(graph: Graph) -> Node | None:
    """A view of a tensor of four dimensions that joins or splits its spatial ones, or None.

    Of a parameter only what cannot copy counts: it is read once, and a convolution's weight changes its layout too.
    """
    for node in calls(graph, *VIEWS, "reshape", "flatten", "unflatten"):
        before = graph.nodes[node.args[0].index] if node.args and isinstance(node.args[0], Ref) else None
        shape = before.shape if before is not None else None
        parameter = before is not None and before.facts.get("origin") == "state" and operation(node) not in VIEWS
        if shape is not None and len(shape) == 4 and shape[2] * shape[3] > 1 and not parameter:
            return node
    return None
