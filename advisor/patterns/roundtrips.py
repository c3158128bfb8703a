"""Values that become float32 under autocast and are cast back to half precision, and what made them float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from advisor.model import Graph, Node
from advisor.semantics import REARRANGES, in_place, operation

HALF = frozenset({"bfloat16", "float16"})
SINGLE = "float32"
# what autocast runs in half precision
PRODUCTS = frozenset(
    "linear matmul addmm addbmm baddbmm bilinear einsum scaled_dot_product_attention conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
# what autocast runs in float32 on a GPU
POLICY = frozenset(
    "pow square rpow rtruediv acos asin cosh cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 "
    "group_norm kl_div l1_loss layer_norm log log10 log_softmax log1p log2 mse_loss nll_loss norm normalize prod "
    "reciprocal rsqrt sinh smooth_l1_loss softmax softmin softplus sum tan "
    "binary_cross_entropy_with_logits rms_norm".split()
)
VIEWS = REARRANGES | {"contiguous", "t", "clone"}
DEPTH = 12  # nodes between a cast and the one back: what is further away is no pair of casts

Casts = Mapping[tuple[int, int], Mapping[tuple[int, ...], float]]  # `Profile.facts["casts_us"]`


@dataclass(frozen=True)
class Origin:
    """The node that makes float32 of half precision: "explicit" casts, a "policy" of autocast, "promoted" by the
    float32 argument at `operand`."""

    kind: str
    node: int
    operand: int = -1


@dataclass(frozen=True)
class RoundTrip:
    """What one origin makes float32 and which nodes of its graph cast it back.

    `plain` tells that nothing but views lie between and that nothing else reads it, `cost_us` the time of the casts
    there and back per step, `there_us` the part of it that is the origin's own.
    """

    graph: Graph
    origin: Origin
    readers: tuple[int, ...]
    plain: bool
    cost_us: float
    there_us: float = 0.0

    @property
    def node(self) -> Node:
        """The node that makes it float32."""
        return self.graph.nodes[self.origin.node]


def round_trips(graph: Graph, casts: Casts) -> list[RoundTrip]:
    """The values of a graph that become float32 and are cast back, in the order of their origins.

    What has several origins belongs to none: it stays float32 where one of them is mended.
    """
    found: dict[Origin, dict[int, set[int]]] = {}
    for reader in graph.nodes:
        for value in _cast_back(graph, reader):
            origins = set(_origins(graph, value))
            if len(origins) == 1:
                found.setdefault(origins.pop(), {}).setdefault(reader.index, set()).add(value)
    return [_round_trip(graph, origin, found[origin], casts) for origin in sorted(found, key=lambda o: o.node)]


def _cast_back(graph: Graph, reader: Node) -> Iterator[int]:
    """The float32 activations that a node reads and autocast, or the node itself, casts to half precision."""
    if reader.dtype not in HALF or operation(reader) not in PRODUCTS | {"to"}:
        return
    for value in dict.fromkeys(reader.inputs()):
        node = graph.nodes[value]
        if node.dtype == SINGLE and node.op.startswith("call_"):
            yield value


def _round_trip(graph: Graph, origin: Origin, readers: Mapping[int, set[int]], casts: Casts) -> RoundTrip:
    there = sum(casts.get((graph.index, origin.node), {}).values()) if origin.kind != "promoted" else 0.0
    back = 0.0
    for reader, values in readers.items():
        times = casts.get((graph.index, reader), {})
        read = [graph.nodes[value].shape or () for value in _cast_back(graph, graph.nodes[reader])]
        back += sum(times.get(shape, 0.0) / read.count(shape) for shape in (graph.nodes[v].shape or () for v in values))
    plain = _only_views(graph, origin.node, frozenset(readers))
    return RoundTrip(graph, origin, tuple(sorted(readers)), plain, there + back, there)


def _only_views(graph: Graph, start: int, readers: frozenset[int]) -> bool:
    """Whether a value reaches nothing but some readers, through nothing but views."""
    pending = list(graph.nodes[start].users)
    while pending:
        user = pending.pop()
        if user in readers:
            continue
        node = graph.nodes[user]
        if operation(node) not in VIEWS or not node.users:
            return False
        pending += node.users
    return True


def _origins(graph: Graph, value: int, depth: int = DEPTH) -> Iterator[Origin]:
    """Where a float32 value comes from, each way back; an origin of the kind "unknown" is none that can be named."""
    node = graph.nodes[value]
    read = [graph.nodes[i] for i in dict.fromkeys(node.inputs()) if graph.nodes[i].dtype in HALF | {SINGLE}]
    halves = [n for n in read if n.dtype in HALF]
    singles = [n for n in read if n.dtype == SINGLE and n.shape != ()]
    name = operation(node)
    if not node.op.startswith("call_") or depth == 0 or not read:
        yield Origin("unknown", value)
    elif halves and name == "to":
        yield Origin("explicit", value)
    elif halves and name in POLICY:
        yield Origin("policy", value)
    elif halves and len(singles) == 1 and _is_state(graph, singles[0]):
        yield Origin("promoted", value, singles[0].index)
    elif halves and not singles:
        yield Origin("unknown", value)
    else:
        before = [n.index for n in singles if not _is_state(graph, n)]
        for index in before:
            for origin in _origins(graph, index, depth - 1):
                # autocast makes its result float32 whether its input is promoted or not
                yield Origin("policy", value) if name in POLICY and origin.kind == "promoted" else origin
        if not before:
            yield Origin("unknown", value)


def _is_state(graph: Graph, node: Node) -> bool:
    """Whether a value is a buffer, a parameter, what a factory made, or part of one."""
    while node.op.startswith("call_") and operation(node) in VIEWS and node.inputs():
        node = graph.nodes[node.inputs()[0]]
    return node.facts.get("origin") == "state" or (node.op == "call_function" and not node.inputs())


def is_written(graph: Graph, cast: Node) -> bool:
    """Whether what a cast reads, or a view of it, is written in place: the cast keeps the value from before."""
    family: set[int] = set()
    pending = list(cast.inputs())
    while pending:
        node = graph.nodes[pending.pop()]
        if node.index in family:
            continue
        family.add(node.index)
        pending += [user for user in node.users if operation(graph.nodes[user]) in VIEWS]
        pending += node.inputs() if node.op.startswith("call_") and operation(node) in VIEWS else ()
    users = [graph.nodes[user] for index in family for user in graph.nodes[index].users]
    return any(in_place(user) or operation(user) == "setitem" for user in users)


def is_square(node: Node) -> bool:
    """Whether a node squares its input: `x ** 2`, `torch.pow(x, 2)`, `x.square()`."""
    name = operation(node)
    return name == "square" or (name == "pow" and len(node.args) > 1 and node.args[1] in (2, 2.0))


def single_products(graph: Graph) -> list[Node]:
    """Products of float32 in a graph that has others in half precision."""
    products = [node for node in graph.nodes if node.op.startswith("call_") and operation(node) in PRODUCTS]
    if not any(node.dtype in HALF for node in products):
        return []
    return [node for node in products if node.dtype == SINGLE]
