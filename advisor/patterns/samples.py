"""Check what was read off an attention by evaluating the region on small arrays, axis by axis."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from advisor.model import Graph
from advisor.patterns.reading import Attention, Mask
from advisor.semantics import Array, NotModelled, attention, evaluate, operation, same

LENGTHS = (2, 3)  # of the batch axes
QUERIES, KEYS, WIDTH, VALUE_WIDTH = 5, 6, 4, 7
LITERAL = frozenset({"view", "reshape", "expand", "unflatten", "flatten", "repeat", "full", "new_full", "tensor"})


def agrees(graph: Graph, region: Attention) -> bool | None:
    """Whether the region computes what was read off; None where it cannot be told from small arrays.

    A view with literal sizes fits the recorded shapes only: then the region proof tells.
    """
    twice = len(set(region.inputs.values())) < len(region.inputs)  # one tensor in two roles has one sample
    if twice or region.scalars or region.split or any(operation(graph.nodes[i]) in LITERAL for i in region.inner):
        return None
    generator = np.random.default_rng(11)
    lengths, key = _lengths(region)
    arrays = {
        name: generator.standard_normal(tuple(lengths[axis[0]] for axis in axes))
        for name, axes in region.input_axes.items()
    }
    masks = [_mask(mask, key, lengths, generator) for mask in region.masks]
    bound = {region.inputs[name]: array for name, array in arrays.items()}
    bound |= {mask.node: array for mask, array in zip(region.masks, masks, strict=True)}
    try:
        value = evaluate(graph, region.root, bound, through=frozenset(region.dropout))
    except NotModelled:
        return None
    return same(value, _expected(region, arrays, masks), 1e-9)


def _lengths(region: Attention) -> tuple[dict[str, int], str]:
    """A length for every axis, all different where the region allows it, and the name of the axis of keys."""
    query, keys, value = ({n for axis in region.input_axes[name] for n in axis} for name in ("query", "key", "value"))
    batch = [n for axis in region.input_axes["query"] for n in axis if n in keys & value]
    lengths = {name: LENGTHS[place] for place, name in enumerate(batch)}
    (key,), (row,), (summed,) = keys & value - query, query - keys, (query & keys) - value
    square = any(mask.causal for mask in region.masks)
    lengths |= {"width": VALUE_WIDTH, key: QUERIES if square else KEYS, row: QUERIES, summed: WIDTH}
    return lengths, key


def _mask(mask: Mask, key: str, lengths: Mapping[str, int], generator: np.random.Generator) -> Array:
    shape = tuple(lengths[axis[0]] if axis else 1 for axis in mask.axes)
    if mask.kind == "bias":
        return generator.standard_normal(shape)
    kept = generator.random(shape) < 0.6
    for place, axis in enumerate(mask.axes):
        if axis == (key,):
            kept[(slice(None),) * place + (0,)] = True  # no query is left without a key
    return np.asarray(~kept if mask.kind == "drop" else kept if mask.kind == "keep" else kept.astype(np.float64))


def _expected(region: Attention, arrays: Mapping[str, Array], masks: list[Array]) -> Array:
    q, k, v = (_ordered(arrays[name], region.orders[name]) for name in ("query", "key", "value"))
    bias: Array = np.zeros((1,) * q.ndim)
    for mask, array in zip(region.masks, masks, strict=True):
        moved = _ordered(array, mask.order)
        if mask.kind == "bias":
            later = [f for f in region.factors if f.node in mask.scaled_by]
            bias = bias + mask.sign * moved * math.prod(1 / f.value if f.divides else f.value for f in later)
        else:
            kept = ~moved if mask.kind == "drop" else moved != 0
            bias = np.where(kept, bias, -math.inf)
    return _ordered(attention(q, k, v, region.scale, bias=bias), region.orders["output"])


def _ordered(array: Array, order: tuple[int, ...] | None) -> Array:
    return array if order is None else np.transpose(array, order)
