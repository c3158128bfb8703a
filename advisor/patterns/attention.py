"""Softmax attention written out: walk from softmax to both matrix products, then check by evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from advisor.model import Graph, Node, Ref, Symbol
from advisor.patterns.regions import (
    FORWARD_LIMIT,
    NearMiss,
    Region,
    calls,
    changes_input,
    disturbed,
    escape,
    inner_nodes,
)
from advisor.semantics import Array, NotModelled, attention, evaluate, operation, same

MASKED = -1e4  # an additive or fill value at or below this removes a pair after softmax in fp16 and wider


@dataclass
class _Path:
    """What stands between two matrix products, read off from softmax outwards."""

    any_mask: bool = False  # the code is only pointed at, so whatever masks its scores will do
    scale: float = 1.0
    factors: list[tuple[int, int]] = field(default_factory=list)  # (node, argument position) of every scalar factor
    mask: int | None = None
    diagonal: int | None = None  # a triu or tril whose diagonal must be a literal in the source
    dropout: int | None = None
    scores: int | None = None
    output: int | None = None


def attention_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """softmax(q k^T scale + mask) v written out, on tensors of three or four dimensions."""
    for node in calls(graph, "softmax"):
        found = _attention_at(graph, node, _Path())
        if isinstance(found, NearMiss) and node.span is None:  # library code is never rewritten, it brings its own mask
            pointed = _attention_at(graph, node, _Path(any_mask=True))
            found = pointed if isinstance(pointed, Region) else found
        if found is not None:
            yield found


def _attention_at(graph: Graph, softmax: Node, path: _Path) -> Region | NearMiss | None:
    """The attention around one softmax; None for a softmax that follows no matrix product, which is none at all."""
    try:
        _to_scores(graph, softmax, path)
        _to_output(graph, softmax, path)
        return _attention_region(graph, softmax, path)
    except _Stop as stop:
        return NearMiss(graph=graph.index, node=stop.node, reason=str(stop)) if path.scores is not None else None


class _Stop(Exception):
    def __init__(self, node: int, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def _scalar(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _to_scores(graph: Graph, softmax: Node, path: _Path) -> None:
    """Walk back from softmax to the product of queries and keys."""
    current = softmax.args[0]
    while isinstance(current, Ref):
        node = graph.nodes[current.index]
        kind = operation(node)
        if kind == "matmul":
            path.scores = node.index
            return
        step = _BACK.get(kind)
        if step is None:
            raise _Stop(node.index, f"`{kind}` stands between the scores and softmax")
        path.scores = path.scores or _product_behind(graph, node.index)
        current = step(graph, node, path)
    raise _Stop(softmax.index, "softmax does not follow a matrix product")


def _product_behind(graph: Graph, index: int) -> int | None:
    """The matrix product a chain of elementwise operations starts from, so that a stop can be told from no
    attention."""
    for _ in range(FORWARD_LIMIT):
        node = graph.nodes[index]
        if operation(node) == "matmul":
            return index
        refs = [a.index for a in node.args if isinstance(a, Ref)]
        if not refs or not node.op.startswith("call_"):
            return None
        index = next((i for i in refs if graph.nodes[i].shape == node.shape), refs[0])
    return None


def _back_scale(graph: Graph, node: Node, path: _Path) -> Any:
    left, right = node.args[0], node.args[1]
    divide = operation(node) == "div"
    factor, position = (_scalar(right), 1) if isinstance(left, Ref) else (_scalar(left), 0)
    if factor is None or (divide and position == 0):
        raise _Stop(node.index, "the scores are scaled by a tensor: the scale is not known before the run")
    if factor == 0:
        raise _Stop(node.index, "the scores are scaled by zero")
    path.scale *= 1.0 / factor if divide else factor
    path.factors.append((node.index, position))
    return left if isinstance(left, Ref) else right


def _back_mask(graph: Graph, node: Node, path: _Path) -> Any:
    kind = operation(node)
    if kind == "masked_fill":
        current, mask, fill, side = node.args[0], node.args[1], node.args[2], "drop"
    else:
        mask, current, fill, side = node.args[0], node.args[1], node.args[2], "keep"
    value = _scalar(fill)
    if value is None or value > MASKED:
        raise _Stop(node.index, f"masked scores are filled with {fill!r}, which does not remove them")
    _require_causal(graph, node, mask, side, path)
    return current


def _back_add(graph: Graph, node: Node, path: _Path) -> Any:
    for current, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if not (isinstance(current, Ref) and isinstance(other, Ref)):
            continue
        facts = graph.nodes[other.index].facts
        if path.any_mask and _product_behind(graph, current.index) is not None:
            path.mask = other.index
            return current
        if ("keep" in facts and float(facts.get("fill", "0")) <= MASKED) or facts.get("keep") == "all":
            _require_causal(graph, node, other, "keep", path)
            return current
    raise _Stop(node.index, "a bias is added to the scores that is not a causal mask")


def _require_causal(graph: Graph, node: Node, mask: Any, side: str, path: _Path) -> None:
    if path.any_mask and isinstance(mask, Ref):
        path.mask = mask.index
        return
    if path.mask is not None:
        raise _Stop(node.index, "two masks are applied to the scores")
    kept = graph.nodes[mask.index].facts.get(side) if isinstance(mask, Ref) else None
    if kept != "causal":
        seen = "its value was not seen" if kept is None else "its value is not the lower triangle"
        raise _Stop(node.index, f"the mask is not recognised as causal: {seen}")
    if _reads_batch(graph, mask.index):
        raise _Stop(node.index, "the mask depends on the batch: that it was causal here does not prove it always is")
    path.mask = mask.index
    path.diagonal = _causal_at_every_size(graph, mask.index)


VIEWS = frozenset({"getitem", "view", "reshape", "unsqueeze", "expand", "expand_as", "squeeze", "to", "detach"})
TESTS = frozenset({"eq", "ne", "gt", "lt", "logical_not", "bool"})


def _causal_at_every_size(graph: Graph, index: int) -> int | None:
    """Follow a mask to where its triangle comes from; raises `_Stop` unless it is causal whatever the length.

    Either a buffer that is a lower triangle as a whole, cut from its corner, or a triangle made in the graph. Gives the
    node of a `triu` whose diagonal must be a literal in the source, None where nothing is left to check.
    """
    while True:
        node = graph.nodes[index]
        kind = operation(node)
        if node.op in ("placeholder", "get_attr"):
            if {node.facts.get(name) for name in ("keep", "drop", "nonzero", "zero")} & {"causal"}:
                return None
            raise _Stop(index, "the mask's buffer is not a triangle as a whole: at another length it is another mask")
        if kind in ("tril", "triu"):
            diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal")
            if (kind, diagonal) == ("tril", None):
                return None
            if (kind, diagonal) in (("triu", 1), ("tril", 0)):
                return index
            raise _Stop(index, "the diagonal of the mask is not that of a causal mask")
        if kind == "getitem" and not _from_the_corner(node.args[1]):
            raise _Stop(index, "the mask is cut from its buffer at an offset")
        if kind not in VIEWS | TESTS or not isinstance(node.args[0], Ref):
            raise _Stop(
                index, f"the mask is made by `{kind}`: that it is causal at this length does not prove it always is"
            )
        index = node.args[0].index


def _from_the_corner(item: Any) -> bool:
    """Whether an index leaves the last two axes as they are or cuts their beginning; a start that is 0 here may not
    be."""
    parts = item if isinstance(item, tuple) else (item,)
    for part in parts:
        whole = part is None or isinstance(part, int) or (isinstance(part, Symbol) and part.kind == "ellipsis")
        cut = isinstance(part, Symbol) and part.kind == "slice" and part.parts[0] is None and part.parts[2] is None
        if not (whole or cut):
            return False
    return not any(isinstance(part, int) for part in parts[-2:]) or len(parts) <= 2


def _reads_batch(graph: Graph, index: int) -> bool:
    """Whether a value is computed from what the module was called with, not only from its state and from shapes."""
    seen: set[int] = set()
    pending = [index]
    while pending:
        node = graph.nodes[pending.pop()]
        if node.index in seen:
            continue
        seen.add(node.index)
        if node.op == "placeholder" and node.facts.get("origin") != "state":
            return True
        pending.extend(node.inputs())
    return False


def _back_cast(graph: Graph, node: Node, path: _Path) -> Any:
    return node.args[0]


_BACK: Mapping[str, Callable[[Graph, Node, _Path], Any]] = {
    "mul": _back_scale,
    "div": _back_scale,
    "masked_fill": _back_mask,
    "where": _back_mask,
    "add": _back_add,
    "to": _back_cast,
}


def _to_output(graph: Graph, softmax: Node, path: _Path) -> None:
    """Walk forward from softmax to the product with the values."""
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    rank = len(softmax.shape or ())
    if dim not in (-1, rank - 1):
        raise _Stop(softmax.index, "softmax does not run over the keys (the last axis)")
    node = softmax
    while True:
        users = node.users
        if len(users) != 1:
            raise _Stop(node.index, "the attention probabilities are used elsewhere as well")
        node, before = graph.nodes[users[0]], node
        kind = operation(node)
        if kind == "matmul":
            if not (isinstance(node.args[0], Ref) and node.args[0].index == before.index):
                raise _Stop(node.index, "the probabilities are the right operand of the product")
            path.output = node.index
            return
        if kind == "dropout" and path.dropout is None:
            path.dropout = node.index
        elif kind != "to":
            raise _Stop(node.index, f"`{kind}` stands between softmax and the values")


def _attention_region(graph: Graph, softmax: Node, path: _Path) -> Region:
    assert path.scores is not None and path.output is not None
    scores, output = graph.nodes[path.scores], graph.nodes[path.output]
    query, keys, value = scores.args[0], scores.args[1], output.args[1]
    if not all(isinstance(arg, Ref) for arg in (query, keys, value)):
        raise _Stop(scores.index, "the operands of the products are not tensors of this graph")
    key, transposed = _untransposed(graph, keys.index)
    inputs = {"query": query.index, "key": key, "value": value.index}
    _check_shapes(graph, scores, inputs, keys.index, path)
    if path.mask is not None:
        inputs["mask"] = path.mask
    inner = inner_nodes(graph, output.index, frozenset(inputs.values()))
    writes = changes_input(graph, inner)
    if writes is not None:
        raise _Stop(writes, "it changes its input in place")
    leak = escape(graph, inner, output.index)
    if leak is not None:
        raise _Stop(leak, f"the intermediate `{graph.nodes[leak].name}` is used elsewhere")
    region = Region(
        graph=graph.index,
        root=output.index,
        inputs=inputs,
        inner=inner,
        constants={f"factor{i}": (_factor(graph, at), *at) for i, at in enumerate(path.factors)},
        facts={"scale": repr(path.scale), "causal": str(path.mask is not None), "transposed": str(transposed)}
        | ({} if path.dropout is None else {"dropout": str(path.dropout)})
        | ({} if path.diagonal is None else {"diagonal": str(path.diagonal)}),
    )
    disturbance = disturbed(graph, inner, output.index)
    if disturbance is not None:
        raise _Stop(*disturbance)
    if output.dtype != graph.nodes[inputs["query"]].dtype and any(operation(graph.nodes[i]) == "to" for i in inner):
        raise _Stop(output.index, "the result has another dtype than the queries")
    if not path.any_mask:
        _check_meaning(graph, region, path, keys.index)
    return region


def _factor(graph: Graph, at: tuple[int, int]) -> float:
    return float(graph.nodes[at[0]].args[at[1]])


def _untransposed(graph: Graph, index: int) -> tuple[int, bool]:
    """The keys before their last two axes were swapped, and whether they were swapped at this place."""
    node = graph.nodes[index]
    rank = len(node.shape or ())
    if operation(node) == "transpose" and {a % rank for a in node.args[1:3]} == {rank - 1, rank - 2}:
        return node.args[0].index, True
    return index, False


def _check_shapes(graph: Graph, scores: Node, inputs: Mapping[str, int], keys: int, path: _Path) -> None:
    query, value, swapped = graph.nodes[inputs["query"]], graph.nodes[inputs["value"]], graph.nodes[keys]
    if query.shape is None or value.shape is None or swapped.shape is None or len(query.shape) not in (3, 4):
        raise _Stop(scores.index, "the operands do not have three or four dimensions")
    if len({query.dtype, value.dtype, swapped.dtype}) != 1:
        raise _Stop(scores.index, "query, key and value do not have one dtype")
    if query.shape[:-2] != value.shape[:-2] or query.shape[:-2] != swapped.shape[:-2]:
        raise _Stop(scores.index, "query, key and value do not have the same leading dimensions")
    if path.mask is not None and not path.any_mask and query.shape[-2] != swapped.shape[-1]:
        raise _Stop(scores.index, "the causal mask is not square: its alignment would change")


def _check_meaning(graph: Graph, region: Region, path: _Path, keys: int) -> None:
    """The region must compute attention on sample values too, whatever it looks like."""
    generator = np.random.default_rng(11)
    q, k, v = (generator.standard_normal((2, 2, 5, 4)) for _ in range(3))
    lower = np.tril(np.ones((5, 5), dtype=bool))
    bound = {region.inputs["query"]: q, keys: np.swapaxes(k, -2, -1), region.inputs["value"]: v}
    if path.mask is not None:
        bound[path.mask] = _sample_mask(graph.nodes[path.mask], lower)
    try:
        through = frozenset() if path.dropout is None else frozenset({path.dropout})
        value = evaluate(graph, region.root, bound, through=through)
    except NotModelled as unknown:
        raise _Stop(unknown.node.index, f"the region cannot be evaluated: {unknown}") from unknown
    if not same(value, attention(q, k, v, path.scale, lower if path.mask is not None else None), 1e-9):
        raise _Stop(region.root, "the region does not compute softmax attention on sample values")


def _sample_mask(node: Node, lower: Array) -> Array:
    if node.dtype == "bool":
        return lower if node.facts.get("keep") == "causal" else ~lower
    return np.where(lower, 0.0, float(node.facts["fill"]))


def default_scale(region: Region, graph: Graph) -> bool:
    """Whether the region's scale is 1/sqrt(head dimension), the default of scaled_dot_product_attention."""
    shape = graph.nodes[region.inputs["query"]].shape
    assert shape is not None
    return math.isclose(float(region.facts["scale"]), 1.0 / math.sqrt(shape[-1]), rel_tol=1e-6)
