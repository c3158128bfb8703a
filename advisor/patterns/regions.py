"""Regions of a captured graph: what they are made of, how they are walked, whether they stand alone.

A search returns a region or a `NearMiss` that says how far it got and why it stopped, so that a rule can decline with a
reason instead of staying silent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from advisor.model import Graph, Node, Ref
from advisor.semantics import canonical, in_place, operation

FORWARD_LIMIT = 12  # operations between an anchor and the end of its region


@dataclass(frozen=True, kw_only=True)
class Region:
    """A closed part of a graph: `root` is its result, `inputs` its named tensors, `inner` every node it computes.

    `constants` names scalars the region uses as (value, node, argument position or name); `dropout` are the nodes that
    drop elements at random in training. `scalars` are nodes that give a number, not a tensor: the source's expression
    for them is bound as a whole. `alternatives` are the same region with other inputs, for a source whose form does not
    suit these.
    """

    graph: int
    root: int
    inputs: Mapping[str, int]
    inner: frozenset[int]
    constants: Mapping[str, tuple[float, int, int | str]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    dropout: tuple[int, ...] = ()
    scalars: Mapping[str, int] = field(default_factory=dict)
    alternatives: tuple[Region, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NearMiss:
    """Something that looks like the pattern and is not it; `node` is where it differs."""

    graph: int
    node: int
    reason: str


def calls(graph: Graph, *names: str) -> Iterator[Node]:
    """Nodes whose canonical operation is one of `names`, in graph order."""
    found = [nodes for target, nodes in graph.by_target.items() if canonical(target) in names]
    yield from sorted(itertools.chain.from_iterable(found), key=lambda node: node.index)


def forward_from(graph: Graph, start: int, limit: int = FORWARD_LIMIT) -> list[int]:
    """Nodes that depend on `start` within `limit` operations, nearest first."""
    seen, order, edge = {start}, [start], [start]
    for _ in range(limit):
        edge = [u for index in edge for u in graph.nodes[index].users if u not in seen and not seen.add(u)]  # type: ignore[func-returns-value]
        order.extend(edge)
    return order


def reads(node: Node) -> tuple[int, ...]:
    """Indices of the nodes whose values a node reads; `x.type_as(y)` reads no value of y."""
    if operation(node) == "to" and node.args and isinstance(node.args[0], Ref):
        return (node.args[0].index,)
    return node.inputs()


def inner_nodes(graph: Graph, root: int, inputs: frozenset[int]) -> frozenset[int]:
    """Every node on a path from the inputs to `root`, `root` included and the inputs not."""
    found: set[int] = set()
    pending = [root]
    while pending:
        index = pending.pop()
        if index in inputs or index in found:
            continue
        found.add(index)
        pending.extend(reads(graph.nodes[index]))
    return frozenset(found)


def escape(graph: Graph, inner: frozenset[int], root: int) -> int | None:
    """An inner node whose value is also used outside the region, or None."""
    for index in sorted(inner - {root}):
        if graph.nodes[index].op.startswith("call_") and any(user not in inner for user in graph.nodes[index].users):
            return index
    return None


ALIASES = frozenset(
    {
        "to",
        "contiguous",
        "detach",
        "getitem",
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "chunk",
        "split",
        "unbind",
        "expand",
        "view_as",
        "narrow",
        "select",
        "mT",
        "T",
    }
)  # fmt: skip - may give another view of the same storage


def changes_in_place(node: Node) -> bool:
    """Whether a call writes into its first argument."""
    return in_place(node) or node.target.endswith("setitem") or node.kwargs.get("out") is not None


def _storage(graph: Graph, index: int) -> int:
    """The node whose storage a value may share."""
    node = graph.nodes[index]
    while node.op.startswith("call_") and operation(node) in ALIASES and node.args and isinstance(node.args[0], Ref):
        node = graph.nodes[node.args[0].index]
    return node.index


def changes_input(graph: Graph, inner: frozenset[int]) -> int | None:
    """An operation of the region that writes into a tensor from outside it, or into one read afterwards by its old
    name; or None."""
    for index in sorted(inner):
        node = graph.nodes[index]
        target = node.args[0] if node.args else None
        if not node.op.startswith("call_") or not changes_in_place(node) or not isinstance(target, Ref):
            continue
        read_later = any(user > index for user in graph.nodes[target.index].users)
        if target.index not in inner or _storage(graph, target.index) not in inner or read_later:
            return index
    return None


MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode"})


def disturbed(graph: Graph, inner: frozenset[int], root: int) -> tuple[int, str] | None:
    """An operation between the region's own that changes a value in place or switches gradients or autocast."""
    for index in range(min(inner), root):
        node = graph.nodes[index]
        if index in inner or not node.op.startswith("call_"):
            continue
        name = node.target.rsplit(".", 1)[-1]
        if name in MODES:
            return index, "gradients or autocast are switched while it is computed"
        if changes_in_place(node):
            return index, "a tensor is changed in place while it is computed"
    return None


def one_dtype(graph: Graph, region: Region) -> NearMiss | None:
    """A near miss unless result and inputs have one dtype.

    Where autocast alone widened the result, it may differ from the input as long as only matrix products read it: they
    round it to the input's dtype again.
    """
    root = graph.nodes[region.root]
    kinds = {graph.nodes[index].dtype for index in region.inputs.values()}
    if len(kinds) == 1 and root.dtype in kinds:
        return None
    explicit = any(operation(graph.nodes[index]) == "to" for index in region.inner)
    products = {"linear", "matmul", "addmm", "conv1d", "conv2d", "conv3d"}
    rounded = bool(root.users) and all(operation(graph.nodes[user]) in products for user in root.users)
    if len(kinds) == 1 and not explicit and rounded and kinds <= {"bfloat16", "float16"} and root.dtype == "float32":
        return None
    names = ", ".join(sorted(str(kind) for kind in kinds))
    reason = f"its dtypes differ: {names} in, {root.dtype} out; the fused operation would return another"
    return NearMiss(graph=graph.index, node=region.root, reason=reason)


BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of one element


def rounds(graph: Graph, region: Region) -> int | None:
    """An operation of the region in a narrower dtype than its tensors and its result, None where there is none."""
    ends = [graph.nodes[i].dtype for i in (region.root, *region.inputs.values())]
    least = min((BYTES.get(kind or "", 4) for kind in ends), default=4)
    return next((i for i in sorted(region.inner) if BYTES.get(graph.nodes[i].dtype or "", 8) < least), None)


def contained(graph: Graph, region: Region) -> Region | NearMiss:
    """The region, or why it cannot be replaced by one operation: dtypes, changes in place, intermediates read
    elsewhere."""
    other = one_dtype(graph, region)
    if other is not None:
        return other
    narrow = rounds(graph, region)
    if narrow is not None:
        reason = f"it rounds to {graph.nodes[narrow].dtype} on the way: the fused operation would not"
        return NearMiss(graph=graph.index, node=narrow, reason=reason)
    disturbance = disturbed(graph, region.inner, region.root)
    if disturbance is not None:
        return NearMiss(graph=graph.index, node=disturbance[0], reason=disturbance[1])
    writes = changes_input(graph, region.inner)
    if writes is not None:
        return NearMiss(graph=graph.index, node=writes, reason="it changes its input in place")
    leak = escape(graph, region.inner, region.root)
    if leak is None:
        return region
    return NearMiss(
        graph=graph.index, node=leak, reason=f"the intermediate `{graph.nodes[leak].name}` is used elsewhere"
    )


def same_code(regions: Iterable[tuple[Region, Graph]]) -> bool:
    """Whether regions of one source place are made of the same operations at the same positions, so that what is said
    of one is true of all."""
    found = {
        tuple(sorted((n.target, str(n.span)) for n in (graph.nodes[i] for i in region.inner) if n.op != "placeholder"))
        for region, graph in regions
    }
    return len(found) <= 1
