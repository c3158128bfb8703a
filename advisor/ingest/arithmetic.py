"""Floating-point operations of recorded operator calls, from their names, input shapes and constant arguments.

A multiplication and an addition count as two operations. Each piece of arithmetic is counted once, at the innermost
operator that has a formula and no counted operator around it: `aten::addmm`, not the `aten::linear` that calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from advisor.model import Operators

Shapes = Sequence[tuple[int, ...]]
Texts = Sequence[str]


class Work(NamedTuple):
    """Arithmetic of one call, in floating-point operations.

    `model` is what the mathematics needs (attention backward = twice forward, a recomputed forward = 0), `executed`
    what this call runs (attention backward = 2.5 times forward, because the kernel recomputes the scores), `causal`
    equals `model` with attention recorded as causal counted half, None when the call does not say whether it is
    causal.
    """

    family: str  # matmul, attention or convolution
    model: float
    executed: float
    causal: float | None


def _mm(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """[.., m, k] x [.., k, n], leading dimensions of `left`: 2 * batch * m * k * n."""
    return 2.0 * math.prod(left) * right[-1]


def _matmul(first: int) -> Callable[[Shapes, Texts], float]:
    def count(shapes: Shapes, _concrete: Texts) -> float:
        return _mm(shapes[first], shapes[first + 1])

    return count


def _vector(first: int) -> Callable[[Shapes, Texts], float]:
    def count(shapes: Shapes, _concrete: Texts) -> float:
        return 2.0 * math.prod(shapes[first])

    return count


def _convolution(shapes: Shapes, concrete: Texts) -> float:
    """2 * batch * output positions * elements of the weight; transposed: input positions in their place."""
    source, weight = shapes[0], shapes[1]
    spatial = source[2:]
    stride, padding, dilation = (_integers(text, len(spatial)) for text in concrete[3:6])
    if concrete[6] != "True":
        spatial = tuple(
            (size + 2 * pad - step * (width - 1) - 1) // jump + 1
            for size, width, jump, pad, step in zip(spatial, weight[2:], stride, padding, dilation, strict=True)
        )
    return 2.0 * source[0] * math.prod(spatial) * math.prod(weight)


def _convolution_backward(shapes: Shapes, concrete: Texts) -> float:
    """The forward's arithmetic once for each of the gradients of input and weight that is asked for."""
    gradient, source, weight = shapes[0], shapes[1], shapes[2]
    spatial = source[2:] if concrete[7] == "True" else gradient[2:]
    wanted = concrete[10].strip("[]").split(",")[:2]
    return 2.0 * gradient[0] * math.prod(spatial) * math.prod(weight) * sum(flag.strip() == "True" for flag in wanted)


def _integers(text: str, count: int) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.strip("[]").split(","))
    return numbers * count if len(numbers) == 1 else numbers


MATMULS: Mapping[str, Callable[[Shapes, Texts], float]] = {
    "aten::mm": _matmul(0),
    "aten::bmm": _matmul(0),
    "aten::addmm": _matmul(1),
    "aten::_addmm_activation": _matmul(1),
    "aten::baddbmm": _matmul(1),
    "aten::addbmm": _matmul(1),
    "aten::_scaled_mm": _matmul(0),
    "aten::_grouped_mm": _matmul(0),
    "aten::mv": _vector(0),
    "aten::addmv": _vector(1),
    "aten::dot": _vector(0),
}
CONVOLUTIONS: Mapping[str, Callable[[Shapes, Texts], float]] = {
    "aten::convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
}


class Attention(NamedTuple):
    """Where an attention operator keeps its arguments: first of q, k, v; whether [B, T, H, D]; place of `is_causal`."""

    query: int
    token_major: bool
    causal: int
    backward: bool


_SDPA = "aten::_scaled_dot_product_"
ATTENTIONS: Mapping[str, Attention] = {
    f"{_SDPA}flash_attention": Attention(0, False, 4, False),
    f"{_SDPA}flash_attention_for_cpu": Attention(0, False, 4, False),
    f"{_SDPA}efficient_attention": Attention(0, False, 6, False),
    f"{_SDPA}cudnn_attention": Attention(0, False, 6, False),
    f"{_SDPA}fused_attention_overrideable": Attention(0, False, 5, False),
    f"{_SDPA}flash_attention_backward": Attention(1, False, 11, True),
    f"{_SDPA}flash_attention_for_cpu_backward": Attention(1, False, 7, True),
    f"{_SDPA}efficient_attention_backward": Attention(1, False, 11, True),
    f"{_SDPA}cudnn_attention_backward": Attention(1, False, 14, True),
    "aten::_flash_attention_forward": Attention(0, True, 8, False),
    "aten::_efficient_attention_forward": Attention(0, True, 99, False),
    "aten::_flash_attention_backward": Attention(1, True, 11, True),
    "aten::_efficient_attention_backward": Attention(1, True, 99, True),
}


def _attention(place: Attention, shapes: Shapes, concrete: Texts) -> Work:
    """Scores and weighted values: 2 * B * H * Tq * Tk * (D + Dv) forward.

    Backward is twice that (four products of the same sizes); the kernels recompute the scores, 2.5 times in all
    (FlashAttention, Dao 2023, section 4.1).
    """
    query, key, value = shapes[place.query : place.query + 3]
    if len(query) != 4:
        raise IndexError("packed sequences: the lengths are not in the shapes")
    batch, heads, length = (query[0], query[2], query[1]) if place.token_major else query[:3]
    keys = key[1] if place.token_major else key[2]
    forward = 2.0 * batch * heads * length * keys * (query[3] + value[3])
    model = 2 * forward if place.backward else forward
    executed = 2.5 * forward if place.backward else forward
    flag = concrete[place.causal] if place.causal < len(concrete) else ""
    causal = {"True": model / 2, "False": model}.get(flag)
    return Work("attention", model, executed, causal)


def _work(name: str, shapes: Shapes, concrete: Texts) -> Work | None:
    """The arithmetic of one call; None when it has none or does not say its sizes."""
    try:
        if name in ATTENTIONS:
            return _attention(ATTENTIONS[name], shapes, concrete)
        for family, table in (("matmul", MATMULS), ("convolution", CONVOLUTIONS)):
            if name in table:
                flops = table[name](shapes, concrete)
                return Work(family, flops, flops, flops)
    except (IndexError, ValueError):  # arguments not recorded
        return None
    return None


def count_work(operators: Operators, concrete: Mapping[int, Texts]) -> dict[int, Work]:
    """The arithmetic of every row that does any, none of it twice.

    A forward operator that records for autograd while a backward pass runs it is activation recomputation: its
    `executed` operations stay, its `model` operations are 0.
    """
    found: dict[int, Work] = {}
    inside = bytearray(len(operators))  # 1: at or below a counted row
    passes = bytearray(len(operators))  # 1: backward, 2: recomputation
    for row, name in enumerate(operators.name):
        parent = operators.parent[row]
        state = passes[parent] if parent >= 0 else 0
        if operators.forward_thread[row]:
            state = 1
        elif state == 1 and operators.sequence[row] >= 0:
            state = 2
        passes[row] = state
        if parent >= 0 and inside[parent]:
            inside[row] = 1
            continue
        work = _work(name, operators.shapes[row], concrete.get(row, ()))
        if work is not None:
            inside[row] = 1
            found[row] = work._replace(model=0.0, causal=0.0) if state == 2 else work
    return found
