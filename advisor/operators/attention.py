"""Attention operators: which query-key pairs a recorded call works on, and the arithmetic and data that takes.

`causal` here and in `Work` follows one convention: the causal mask of as many queries as keys leaves half of the pairs
(the exact count, (T + 1) / 2 per query, differs by 1 / T). Every other mask that the arguments describe (a window,
fewer queries than keys) is counted pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from advisor.operators.calls import Call, NotRecorded


class Layout(NamedTuple):
    """How an attention operator is called.

    `token_major` is [batch, tokens, heads, width] instead of [batch, heads, tokens, width]; `bottom_right` tells to
    which corner of the scores a causal mask is aligned where queries and keys differ in number: torch's own
    `is_causal` is the top left, flash-attn's (2.1 and later) the bottom right.
    """

    token_major: bool = False
    bottom_right: bool = False
    backward: bool = False
    windowed: bool = False  # takes a window of keys, so a call says nothing of its pairs without its constants


_SDPA = "aten::_scaled_dot_product_"
ATTENTIONS: Mapping[str, Layout] = {
    "aten::scaled_dot_product_attention": Layout(),
    f"{_SDPA}flash_attention": Layout(),
    f"{_SDPA}flash_attention_for_cpu": Layout(),
    f"{_SDPA}efficient_attention": Layout(),
    f"{_SDPA}cudnn_attention": Layout(),
    f"{_SDPA}fused_attention_overrideable": Layout(),
    f"{_SDPA}flash_attention_backward": Layout(backward=True),
    f"{_SDPA}flash_attention_for_cpu_backward": Layout(backward=True),
    f"{_SDPA}efficient_attention_backward": Layout(backward=True),
    f"{_SDPA}cudnn_attention_backward": Layout(backward=True),
    f"{_SDPA}fused_attention_overrideable_backward": Layout(backward=True),
    "aten::_cudnn_attention_forward": Layout(),
    "aten::_cudnn_attention_backward": Layout(backward=True),
    "aten::_flash_attention_forward": Layout(True, True),
    "aten::_flash_attention_backward": Layout(True, True, backward=True),
    "aten::_efficient_attention_forward": Layout(True),
    "aten::_efficient_attention_backward": Layout(True, backward=True),
    "flash_attn::_flash_attn_forward": Layout(True, True, windowed=True),
    "flash_attn::_flash_attn_varlen_forward": Layout(True, True, windowed=True),
    "flash_attn::_flash_attn_backward": Layout(True, True, backward=True, windowed=True),
    "flash_attn::_flash_attn_varlen_backward": Layout(True, True, backward=True, windowed=True),
    "aiter::_flash_attn_forward": Layout(True, True, windowed=True),
    "aiter::_flash_attn_backward": Layout(True, True, backward=True, windowed=True),
}
MASKS = ("attn_mask", "attn_bias", "bias")
CACHES = ("block_table", "seqused_k", "leftpad_k", "seqlen_k")


class Sizes(NamedTuple):
    """Sequences, query heads, queries and keys of each sequence, and the widths of a query and of a value."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int


class Pairs(NamedTuple):
    """Query-key pairs of one head of one sequence: all that the window allows, and those a causal mask leaves.

    `masked` is None where the call does not say: a mask that is a tensor may hide any of them.
    """

    dense: float
    masked: float | None


class Counted(NamedTuple):
    """Operations of an attention call as `advisor.operators.arithmetic.Work` names them."""

    model: float
    executed: float
    causal: float | None


def count(call: Call) -> Counted:
    """Scores and weighted values: 2 * pairs * (width of a query + width of a value) per query head, forward.

    Query heads decide where several share one head of keys. Backward is twice that (four products of the same sizes);
    the kernels recompute the scores, 2.5 times in all (FlashAttention-2, Dao 2023, section 4.1). Raises NotRecorded
    where the sizes do not follow from the arguments, as they do not for packed sequences of unequal lengths.
    """
    layout = ATTENTIONS[call.name]
    sizes = _sizes(call, layout)
    pairs = _pairs(call, layout, sizes)
    each = 2.0 * sizes.batch * sizes.heads * (sizes.width + sizes.value_width) * (2 if layout.backward else 1)
    model = each * pairs.dense
    return Counted(
        model,
        model * 1.25 if layout.backward else model,
        None if pairs.masked is None else each * pairs.masked,
    )


def least_traffic(call: Call) -> int:
    """Bytes: queries, the keys and values that any query sees, and a mask read once, the result written once.

    Backward also reads the output and its gradient and writes the gradients of queries, keys and values. Keys and
    values that lie in pages of a cache count nothing: which pages are read is data.
    """
    layout = ATTENTIONS[call.name]
    query, key, value = _operands(call)
    total = call.traffic(query)
    total += sum(call.traffic(mask) for mask in MASKS)
    total += int(_seen(call, layout) * (call.traffic(key) + call.traffic(value)))
    if layout.backward:
        read = sum(call.traffic(name) for name in ("grad_out", "grad_out_", "dout", "out"))
        return total + read + sum(call.written(name) for name in (query, key, value))
    result = (*call.shape(query)[:-1], call.shape(value)[-1])
    return total + math.prod(result) * call.width(query)


def _seen(call: Call, layout: Layout) -> float:
    """The share of the keys that some query may see."""
    if any(call.given(name) for name in CACHES):
        return 0.0
    band = _band(call, layout)
    if band is not None and band.left is None and band.right is None:
        return 1.0
    try:
        sizes = _sizes(call, layout)
    except NotRecorded:
        return 0.0
    if band is None:
        return min(1.0, sizes.queries / sizes.keys)
    shift = sizes.keys - sizes.queries if band.bottom_right else 0
    first = 0 if band.left is None else max(0, shift - band.left)
    last = sizes.keys if band.right is None else min(sizes.keys, sizes.queries + shift + band.right)
    return max(0, last - first) / sizes.keys


def _operands(call: Call) -> tuple[str, str, str]:
    return ("q", "k", "v") if "q" in call else ("query", "key", "value")


def _sizes(call: Call, layout: Layout) -> Sizes:
    query, key, value = (call.shape(name) for name in _operands(call))
    if any(call.given(name) for name in CACHES):
        raise NotRecorded("how many keys of a cache are in use")
    if len(query) == 3 and call.given("cum_seq_q"):
        return _packed(call, "cum_seq_q", ("max_q", "max_k"))
    if call.given("cu_seqlens_q"):
        return _packed(call, "cu_seqlens_q", ("max_seqlen_q", "max_seqlen_k"))
    if not len(query) == len(key) == len(value) == 4:
        raise NotRecorded("the lengths of packed sequences")
    tokens, heads = (1, 2) if layout.token_major else (2, 1)
    return Sizes(query[0], query[heads], query[tokens], key[tokens], query[3], value[3])


def _packed(call: Call, starts: str, longest: tuple[str, str]) -> Sizes:
    """Sequences laid end to end: [tokens of all, heads, width].

    No sequence is longer than the longest, so as many tokens as that times their number means that all are equal.
    """
    query, key, value = (call.shape(name) for name in _operands(call))
    queries, keys = (call.integer(name) for name in longest)
    batch = call.shape(starts)[0] - 1
    if batch < 1 or query[-3] != batch * queries or key[-3] != batch * keys:
        raise NotRecorded("the lengths of packed sequences")
    return Sizes(batch, query[-2], queries, keys, query[-1], value[-1])


class Band(NamedTuple):
    """The keys a query sees: so many to the left and right of its own place (None: all), from which corner."""

    left: int | None
    right: int | None
    bottom_right: bool


def _pairs(call: Call, layout: Layout, sizes: Sizes) -> Pairs:
    queries, keys = sizes.queries, sizes.keys
    band = _band(call, layout)
    if band is None:
        return Pairs(float(queries * keys), None)
    left, right, bottom_right = band
    reach = keys if left is None or right is None else min(keys, left + right + 1)
    dense = float(queries * reach)
    if any(call.given(mask) for mask in MASKS):
        return Pairs(dense, None)
    if left is None and right is None:
        return Pairs(dense, dense)
    if left is None and right == 0 and queries == keys:
        return Pairs(dense, dense / 2)
    shift = keys - queries if bottom_right else 0
    upto = queries * keys if right is None else _keys_before(shift + right + 1, queries, keys)
    return Pairs(dense, float(upto - (0 if left is None else _keys_before(shift - left, queries, keys))))


def _band(call: Call, layout: Layout) -> Band | None:
    """None where the call does not say whether it is causal."""
    try:
        causal = _causal(call)
    except NotRecorded:
        if layout.windowed:
            raise
        return None
    if (_window(call, "window_size") or 0) > 0:
        raise NotRecorded("which keys the window of memory-efficient attention covers")
    left, right = (_window(call, side) for side in ("window_size_left", "window_size_right"))
    return Band(left, 0 if causal else right, layout.bottom_right or causal == 2)


def _causal(call: Call) -> int:
    """0: not causal, 1: causal, 2: causal from the bottom right corner."""
    for flag in ("is_causal", "causal"):
        if flag in call:
            return int(call.flag(flag))
    kind = call.integer("custom_mask_type")
    if kind not in (0, 1, 2):
        raise NotRecorded("custom_mask_type")
    return kind


def _window(call: Call, side: str) -> int | None:
    """The window to one side; None for no limit, which is written as nothing or as a negative number.

    An operator that has grown a window keeps its older records, which are shorter, and had none then.
    """
    try:
        text = call.text(side)
    except NotRecorded:
        return None
    size = call.integer(side) if text else -1
    return size if size >= 0 else None


def _keys_before(shift: int, queries: int, keys: int) -> int:
    """The keys j < i + shift of 0 <= j < keys, summed over the queries 0 <= i < queries."""
    first = min(queries, max(0, 1 - shift))  # queries that see any
    full = min(queries, max(first, keys - shift))  # queries from here on see all
    rising = full - first
    return rising * (first + shift) + rising * (rising - 1) // 2 + (queries - full) * keys
