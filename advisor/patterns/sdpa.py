"""Calls of scaled_dot_product_attention: their arguments by name, causal masks given as tensors, repeated heads.

Which kernel torch takes for a call is decided by its shapes, dtypes and options; `math_cause` gives the first condition
that excludes every fused kernel (PyTorch, aten/src/ATen/native/transformers: sdp_utils_cpp.cpp and cuda/sdp_utils.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from advisor.model import Graph, Node, Ref, Symbol
from advisor.patterns.masks import NotCausal, reads_batch, triangle_of
from advisor.patterns.regions import NearMiss, Region, calls
from advisor.semantics import operation

# operators under scaled_dot_product_attention: of the fused kernels, and of the path that writes the scores out
FUSED = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
MATH = "aten::_scaled_dot_product_attention_math"

POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # scale and enable_gqa are keyword-only
HALF = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True)
class Sdpa:
    """One call with its arguments by name; tensors are nodes. `dropout_p` is None where it is no number."""

    node: Node
    query: int
    key: int
    value: int
    mask: int | None
    dropout_p: float | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    given: Mapping[str, int | str]  # argument name -> position or keyword in the node


def sdpa_calls(graph: Graph) -> Iterator[Sdpa]:
    """Every call whose query, key and value are tensors of the graph."""
    for node in calls(graph, "scaled_dot_product_attention"):
        given: dict[str, int | str] = {name: place for place, name in enumerate(POSITIONAL[: len(node.args)])}
        given |= {name: name for name in node.kwargs}
        found = {n: node.args[at] if isinstance(at, int) else node.kwargs[at] for n, at in given.items()}
        tensors = [found.get(name) for name in POSITIONAL[:3]]
        if all(isinstance(arg, Ref) for arg in tensors):
            query, key, value = (arg.index for arg in tensors if isinstance(arg, Ref))
            mask = found.get("attn_mask")
            yield Sdpa(
                node=node,
                query=query,
                key=key,
                value=value,
                mask=mask.index if isinstance(mask, Ref) else None,
                dropout_p=_number(found.get("dropout_p", 0.0)),
                is_causal=found.get("is_causal") is True,
                scale=_number(found.get("scale")),
                enable_gqa=found.get("enable_gqa") is True,
                given=given,
            )


def call_of(graph: Graph, region: Region) -> Sdpa:
    """The call that a region ends in."""
    return next(call for call in sdpa_calls(graph) if call.node.index == region.root)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# --------------------------------------------------------------------------------------------------------- causal masks


def causal_mask_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """Calls whose mask is the lower triangle by value, made of state and shapes alone, as long as wide.

    `facts["diagonal"]` names a triu or tril whose diagonal must be a literal in the source.
    """
    for call in sdpa_calls(graph):
        if call.mask is None:
            continue
        reason = _not_causal(graph, call)
        diagonal = None
        if reason is None:
            try:
                diagonal = triangle_of(graph, call.mask)
            except NotCausal as error:
                reason = str(error)
        if reason is not None:
            yield NearMiss(graph=graph.index, node=call.node.index, reason=reason)
            continue
        yield Region(
            graph=graph.index,
            root=call.node.index,
            inputs={"query": call.query, "key": call.key, "value": call.value, "mask": call.mask},
            inner=frozenset({call.node.index}),
            facts={} if diagonal is None else {"diagonal": str(diagonal)},
        )


def _not_causal(graph: Graph, call: Sdpa) -> str | None:
    assert call.mask is not None
    mask, query, key = graph.nodes[call.mask], graph.nodes[call.query], graph.nodes[call.key]
    if query.shape is None or key.shape is None or mask.shape is None:
        return "the shapes of the mask and its operands were not seen"
    kept = mask.facts.get("keep")
    if kept != "causal":
        return "the mask is not the lower triangle" if kept else "the mask is not causal: its value was not seen as one"
    if query.shape[-2] != key.shape[-2]:
        return "there are more keys than queries or fewer: is_causal=True aligns the triangle at the top left"
    if mask.shape[-2:] != (query.shape[-2], key.shape[-2]):
        return "the mask is not as long as the queries"
    if reads_batch(graph, call.mask):
        return "the mask depends on the batch: that it was causal here does not prove it always is"
    return None


# ------------------------------------------------------------------------------------------------------- repeated heads


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Heads repeated for grouped attention: `source` has `heads` heads on `axis`, each of which follows `count` times.

    `first` and `last` are the first and last operation of the repeat; `after` are the swaps of two axes between it and
    the call, in order; `inner` holds every operation from `source` to the call.
    """

    source: int
    first: int
    last: int
    count: int
    after: tuple[tuple[int, int], ...]
    inner: frozenset[int]


def repeated_heads(graph: Graph, index: int) -> Repeat | str | None:
    """How a key or value of an attention call was repeated from fewer heads; a reason where it nearly was."""
    swaps: list[tuple[int, int]] = []
    path: list[int] = []
    axis = -3
    while True:
        node = graph.nodes[index]
        rank = len(node.shape or ())
        kind = operation(node)
        if rank != 4 or not node.op.startswith("call_"):
            return None
        if kind == "transpose":
            pair = (int(node.args[1]) % rank, int(node.args[2]) % rank)
            axis = {pair[0]: pair[1], pair[1]: pair[0]}.get(axis % rank, axis % rank)
            swaps.insert(0, pair)
        elif kind != "contiguous":
            break
        path.append(index)
        index = node.args[0].index
    found = _repeat_at(graph, index, axis % 4)
    if not isinstance(found, tuple):
        return found
    source, first, count, inner = found
    return Repeat(
        source=source, first=first, last=index, count=count, after=tuple(swaps), inner=frozenset(path) | inner
    )


def _repeat_at(graph: Graph, index: int, axis: int) -> tuple[int, int, int, frozenset[int]] | str | None:
    node = graph.nodes[index]
    kind = operation(node)
    if kind == "repeat_interleave" and isinstance(node.args[0], Ref):
        count = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if isinstance(count, int) and isinstance(dim, int) and dim % 4 == axis:
            return node.args[0].index, index, count, frozenset({index})
        return None
    if kind in ("repeat", "tile") and isinstance(node.args[0], Ref):
        return _tiled(graph, node, axis)
    return _expanded(graph, node, axis) if kind in ("reshape", "flatten", "view") else None


def _tiled(graph: Graph, node: Node, axis: int) -> str | None:
    before, after = graph.nodes[node.args[0].index].shape, node.shape
    if before is None or after is None or len(before) != 4 or before[axis] == 1:
        return None
    others = all(a == b for place, (a, b) in enumerate(zip(before, after, strict=True)) if place != axis)
    if not others or after[axis] == before[axis]:
        return None
    return "the heads are tiled (0 1 0 1), where enable_gqa repeats each in turn (0 0 1 1): another function"


def _expanded(graph: Graph, node: Node, axis: int) -> tuple[int, int, int, frozenset[int]] | None:
    """x[:, :, None].expand(B, H, n, T, D).reshape(B, H n, T, D), where `axis` is that of H."""
    inner = [node.index]
    wide = graph.nodes[node.args[0].index] if isinstance(node.args[0], Ref) else None
    if wide is not None and operation(wide) in ("contiguous", "clone") and isinstance(wide.args[0], Ref):
        inner.append(wide.index)
        wide = graph.nodes[wide.args[0].index]
    if wide is None or operation(wide) != "expand" or not isinstance(wide.args[0], Ref):
        return None
    thin = graph.nodes[wide.args[0].index]
    if operation(thin) not in ("getitem", "unsqueeze") or not isinstance(thin.args[0], Ref):
        return None
    source = graph.nodes[thin.args[0].index]
    shapes = [n.shape for n in (source, thin, wide, node)]
    if any(shape is None for shape in shapes):
        return None
    before, narrow, broad, after = (tuple(shape or ()) for shape in shapes)
    count = broad[axis + 1] if len(broad) == 5 else 0
    one = (*before[: axis + 1], 1, *before[axis + 1 :])
    many = (*before[: axis + 1], count, *before[axis + 1 :])
    merged = (*before[:axis], before[axis] * count, *before[axis + 1 :]) if len(before) == 4 else ()
    if (narrow, broad, after) != (one, many, merged) or not _inserts(thin, axis + 1):
        return None
    return source.index, thin.index, count, frozenset({*inner, wide.index, thin.index})


def _inserts(node: Node, axis: int) -> bool:
    """Whether a node inserts one axis at `axis` and takes everything else as it is."""
    if operation(node) == "unsqueeze":
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return isinstance(dim, int) and dim % len(node.shape or (0,)) == axis
    item = node.args[1]
    parts = item if isinstance(item, tuple) else (item,)
    whole = [isinstance(p, Symbol) and p.kind == "slice" and p.parts == (None, None, None) for p in parts]
    return len(parts) > axis and parts[axis] is None and sum(whole) == len(parts) - 1


# -------------------------------------------------------------------------------------------------------- math fallback


def math_cause(graph: Graph, call: Sdpa) -> tuple[str, str] | None:
    """The first condition that excludes every fused kernel, as (short name, sentence); None where none is known.

    Short names: rank, dtype, dropout, mask-gradient, mask-shape, head-dim, stride, heads.
    """
    nodes = [graph.nodes[i] for i in (call.query, call.key, call.value)]
    shapes = [n.shape for n in nodes]
    if any(shape is None for shape in shapes):
        return None
    query, key, value = (tuple(shape or ()) for shape in shapes)
    if len(query) != 4:
        return "rank", f"its inputs have {len(query)} dimensions, and the fused kernels take four"
    dtypes = {n.dtype for n in nodes}
    if len(dtypes) != 1:
        return "dtype", f"its inputs differ in dtype ({', '.join(sorted(str(d) for d in dtypes))})"
    if any(n.stride is not None and n.stride[-1] != 1 and (n.shape or (0,))[-1] > 1 for n in nodes):
        return "stride", "the last dimension of an input is not contiguous"
    heads = call.enable_gqa and query[1] % max(key[1], 1) == 0 and key[1] == value[1]
    if query[0] != key[0] or key[0] != value[0] or (not heads and len({query[1], key[1], value[1]}) != 1):
        return "heads", "batch or heads are broadcast, which the fused kernels do not do"
    if nodes[0].device == "cpu":
        return _cpu_cause(graph, call, query, key, value)
    return _cuda_cause(call, nodes[0].dtype or "", query, value) if nodes[0].device == "cuda" else None


def _cpu_cause(
    graph: Graph, call: Sdpa, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> tuple[str, str] | None:
    """sdp_utils_cpp.cpp, use_flash_attention_cpp: the only fused kernel on a CPU."""
    if call.dropout_p:
        return "dropout", "the kernel for CPUs has no dropout"
    if not query[-1] == key[-1] == value[-1]:
        return "head-dim", "the values have another head dimension than the queries"
    mask = graph.nodes[call.mask] if call.mask is not None else None
    if mask is not None and mask.requires_grad:
        return "mask-gradient", "the mask needs a gradient"
    if mask is not None and len(mask.shape or ()) not in (2, 4):
        return "mask-shape", f"the mask has {len(mask.shape or ())} dimensions, and the kernel takes two or four"
    return None


def _cuda_cause(call: Sdpa, dtype: str, query: tuple[int, ...], value: tuple[int, ...]) -> tuple[str, str] | None:
    """cuda/sdp_utils.cpp: flash takes half precision without a mask up to head dimension 256; memory-efficient takes
    float32 too, with head dimensions that are multiples of 16 bytes (can_use_mem_efficient_attention, sm80 and newer).
    """
    if dtype not in HALF | {"float32"}:
        return "dtype", f"no fused kernel computes in {dtype}"
    if dtype in HALF and call.mask is None and query[-1] == value[-1] <= 256:
        return None
    step = 8 if dtype in HALF else 4
    if query[-1] % step or value[-1] % step:
        rest = "with a mask" if call.mask is not None else "here"
        return "head-dim", f"the head dimension {query[-1]} is not a multiple of {step}, which {dtype} needs {rest}"
    return None
