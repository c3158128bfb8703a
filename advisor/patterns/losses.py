"""Losses on rows of scores: what picks the class of a target, cross entropy by its definition, and every operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from advisor.model import Arg, Ref, Symbol
from advisor.patterns.rows import (
    Call,
    Value,
    clamped,
    elementwise,
    filled,
    is_rows,
    is_table,
    log_softmax,
    logsumexp,
    normalised,
    over_classes,
    permuted,
    reduction,
    row_index,
    viewed,
    without_class,
)
from advisor.semantics import Array

# --------------------------------------------------------------------------------------------------------------- picks


def _getitem(call: Call) -> Value:
    x = call.tensor(0)
    item = call.node.args[1]
    parts = item if isinstance(item, tuple) else (item,)
    if is_table(x) and len(x.shape) == 2 and x.axis == 1 and len(parts) == 2:
        return _picked_by_index(call, x, parts)
    whole = (None, None, None)
    kept = all(
        p is None or (isinstance(p, Symbol) and (p.kind == "ellipsis" or (p.kind == "slice" and p.parts == whole)))
        for p in parts
    )
    if not kept:
        raise ValueError("a part of the rows is taken")
    return viewed(call)


def _picked_by_index(call: Call, x: Value, parts: tuple[Arg, ...]) -> Value:
    """`scores[index of the rows, classes]`."""
    first, second = (call.known.get(p.index) if isinstance(p, Ref) else p for p in parts)
    counted = (isinstance(first, Value) and first.index) or (
        isinstance(first, Symbol) and first.text == "builtins.range" and call.rows.count > 1
    )
    if not counted or not isinstance(second, Value) or not is_rows(second) or second.shape != x.shape[:1]:
        raise ValueError("it does not take one class of every row")
    return call.made(_take(x, second))


def _take(x: Value, index: Value) -> Array:
    classes = index.data.astype(np.int64)
    if (classes < 0).any() or (classes >= x.data.shape[1]).any():
        raise ValueError("a class is out of range")
    return np.asarray(np.take_along_axis(x.data, classes[:, None], axis=1)[:, 0])


def _gather(call: Call) -> Value:
    x = over_classes(call)
    index = call.tensor(2, "index")
    if not is_rows(index) or index.shape != without_class(x):
        raise ValueError("it does not take one class of every row")
    return call.made(_take(x, index))


def _one_hot(call: Call) -> Value:
    target = call.tensor(0, "input", "self")
    width = call.shape[-1]
    classes = target.data.astype(np.int64)
    if not is_rows(target) or (classes < 0).any() or (classes >= width).any():
        raise ValueError("a class is out of range")
    return call.made(classes[:, None] == np.arange(width), len(call.shape) - 1)


def _scatter(call: Call) -> Value:
    call.only("dim", "index", "src", "value")
    x = over_classes(call)
    index, value = call.tensor(2, "index"), call.get(3, "src", "value")
    if not is_rows(index) or index.shape != without_class(x) or not isinstance(value, (int, float)):
        raise ValueError("it does not set one class of every row")
    data = x.data.copy()
    _take(x, index)  # refuses classes out of range
    np.put_along_axis(data, index.data.astype(np.int64)[:, None], float(value), axis=1)
    return call.made(data, x.axis)


# --------------------------------------------------------------------------------------------------------------- losses


def cross_entropy(
    scores: Array,
    target: Array,
    reduction: str,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Array:
    """torch.nn.functional.cross_entropy of (rows, classes) by its documentation; a 2-D target gives probabilities.

    With `smoothing` e the target is (1 - e) of the class and e / classes of every class; ignored rows count neither in
    the sum nor in the mean; the mean over probabilities divides by the rows.

    Raises ValueError for a class out of range that is not ignored.
    """
    with np.errstate(all="ignore"):
        return _nll(log_softmax(scores), target, reduction, ignore_index, smoothing)


def _nll(
    log_probs: Array,
    target: Array,
    reduction: str,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Array:
    width = log_probs.shape[1]
    if target.ndim == 2:
        mixed = (1 - smoothing) * target + smoothing / width
        losses, counts = -(mixed * log_probs).sum(axis=1), np.ones(len(target))
    else:
        kept = target != ignore_index
        classes = np.where(kept, target, 0).astype(np.int64)
        if (classes < 0).any() or (classes >= width).any():
            raise ValueError("a class is out of range")
        chosen = -log_probs[np.arange(len(classes)), classes]
        spread = -log_probs.sum(axis=1) / width
        losses = np.where(kept, (1 - smoothing) * chosen + smoothing * spread, 0.0)
        counts = np.where(kept, 1.0, 0.0)
    if reduction == "none":
        return np.asarray(losses)
    total = losses.sum()
    return np.asarray(total if reduction == "sum" else np.divide(total, counts.sum()))


def _loss(logits: bool) -> Callable[[Call], Value]:
    def step(call: Call) -> Value:
        call.only("input", "target", "weight", "ignore_index", "reduction", "label_smoothing", "size_average", "reduce")
        scores, target = call.tensor(0, "input"), call.tensor(1, "target")
        given = [call.get(2, "weight"), call.get(3, "size_average"), call.get(5, "reduce")]
        if any(item is not None for item in given):
            raise ValueError("weights and the deprecated averaging flags are not followed")
        if scores.axis != 1 or not is_rows(target) or target.shape != (*scores.shape[:1], *scores.shape[2:]):
            raise ValueError("the classes are not the second axis")
        data = log_softmax(scores.data) if logits else scores.data
        ignored, reduction = call.get(4, "ignore_index", default=-100), call.get(6, "reduction", default="mean")
        return call.made(_nll(data, target.data, reduction, ignored, call.get(7, "label_smoothing", default=0.0)))

    return step


STEPS: Mapping[str, Callable[[Call], Value]] = {
    **{
        name: elementwise(name)
        for name in ("add", "sub", "rsub", "mul", "div", "neg", "exp", "log", "eq", "ne", "logical_not")
    },
    **{name: elementwise(name) for name in ("to", "contiguous", "where", "masked_fill")},
    **dict.fromkeys(("long", "int", "clone"), elementwise("to")),
    **dict.fromkeys(("clamp", "clamp_min", "clip"), clamped),
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), viewed),
    **dict.fromkeys(("transpose", "permute"), permuted),
    **dict.fromkeys(("scatter", "scatter_"), _scatter),
    **dict.fromkeys(("zeros_like", "zeros", "new_zeros"), filled(0.0)),
    "full_like": filled(None),
    "softmax": normalised(logarithm=False),
    "log_softmax": normalised(logarithm=True),
    "logsumexp": logsumexp,
    "mean": reduction(np.mean),
    "sum": reduction(np.sum),
    "arange": row_index,
    "getitem": _getitem,
    "gather": _gather,
    "one_hot": _one_hot,
    "nll_loss": _loss(logits=False),
    "cross_entropy": _loss(logits=True),
}
