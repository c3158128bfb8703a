"""LayerNorm and RMSNorm written out, told from their look-alikes by evaluation."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from advisor.model import Graph, Node, Ref
from advisor.patterns.language import Alternative, Constant, Input, LookAlike, Pattern, find
from advisor.patterns.regions import NearMiss, Region, contained, forward_from
from advisor.patterns.sweeps import Sweep, View, sample_shape
from advisor.semantics import REARRANGES, Array, NotModelled, layer_norm, operation, rms_norm, same

UNBIASED = "divides the variance by N-1 where F.layer_norm divides by N"
OUTSIDE = "adds eps to the standard deviation where F.layer_norm adds it to the variance"
REDUCTIONS = ("mean", "var", "std", "var_mean", "std_mean", "sum")


def _rows(
    generator: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...], scales: tuple[float, ...], at: float
) -> Array:
    """Rows of several scales, some as small as eps and below it, so that where eps stands makes a difference."""
    x = generator.standard_normal(shape)
    rows = next((axis for axis in range(-len(shape), 0) if axis not in axes and shape[axis] > 1), None)
    if rows is None:
        return x * scales[2] + at
    factors = np.resize(scales, shape[rows]).reshape((-1,) + (1,) * (-rows - 1))
    return np.asarray(x * factors + at)


def _trailing(graph: Graph, region: Region) -> str | None:
    """Only the last axes can be normalised by F.layer_norm and F.rms_norm."""
    axes = [int(a) for a in region.facts["axes"].split(",")]
    if axes == list(range(-len(axes), 0)):
        return None
    rank = len(graph.nodes[region.inputs["x"]].shape or ())
    dims = ", ".join(str(rank + a) for a in axes)
    return f"it normalises dim {dims} of {rank}, not the last axis: the fused operation would need the axes swapped"


def _layer_norm(x: Array, axes: Any, eps: float, weight: Any = None, bias: Any = None, **other: Any) -> Array:
    return layer_norm(x, weight, bias, eps, axes=axes, **other)


def _subtracted(graph: Graph, anchor: Node) -> bool:
    """Whether something is subtracted within a few operations of a mean or sum, as every LayerNorm does."""
    if operation(anchor) not in ("mean", "sum"):
        return True
    near = (graph.nodes[index] for index in forward_from(graph, anchor.index, 6))
    return any(operation(node) in ("sub", "rsub", "neg") for node in near)


LAYER_NORM = Pattern(
    name="LayerNorm",
    anchors=REDUCTIONS,
    begins=_subtracted,
    reduces=True,
    inputs=(
        Input(name="x", must=(_trailing,)),
        Input(name="weight", kind="vector", optional=True),
        Input(name="bias", kind="vector", optional=True),
    ),
    constants=(Constant(name="eps", role="add", low=0.0, high=0.1),),
    alternatives=(Alternative(name="layer_norm", function=_layer_norm),),
    look_alikes=(
        LookAlike(reason=f"not the same function: {UNBIASED}", function=partial(_layer_norm, ddof=1)),
        LookAlike(reason=f"not the same function: {OUTSIDE}", function=partial(_layer_norm, outside=True)),
        LookAlike(
            reason=f"not the same function: {UNBIASED} and {OUTSIDE}",
            function=partial(_layer_norm, ddof=1, outside=True),
        ),
    ),
    sample=partial(_rows, scales=(3.0, 1.0, 1e-2, 1e-3, 1e-5), at=0.5),
)


def _centred(graph: Graph, index: int) -> bool:
    """Whether a tensor is another one minus its mean: what RMSNorm of it computes is LayerNorm."""
    node = graph.nodes[index]
    if operation(node) in ("to", "contiguous") and node.args and isinstance(node.args[0], Ref):
        return _centred(graph, node.args[0].index)
    if operation(node) != "sub" or len(node.args) < 2 or not all(isinstance(a, Ref) for a in node.args[:2]):
        return False
    mean = graph.nodes[node.args[1].index]
    while operation(mean) in ("to", "getitem", "unsqueeze") and isinstance(mean.args[0], Ref):
        mean = graph.nodes[mean.args[0].index]
    return operation(mean) in ("mean", "var_mean", "std_mean")


def _of_squares(graph: Graph, anchor: Node) -> bool:
    """Whether a mean or sum is one of powers or products of what is not centred, as far as casts and views lead."""
    if operation(anchor) not in ("mean", "sum"):
        return True
    arg = anchor.args[0] if anchor.args else None
    while isinstance(arg, Ref) and operation(graph.nodes[arg.index]) in ("to", "contiguous", "view", "reshape"):
        arg = graph.nodes[arg.index].args[0] if graph.nodes[arg.index].args else None
    if not isinstance(arg, Ref):
        return True
    power = graph.nodes[arg.index]
    squares = operation(power) in ("pow", "square", "mul", "einsum")
    return squares and not any(_centred(graph, a.index) for a in power.args[:1] if isinstance(a, Ref))


def _rms_norm(x: Array, axes: Any, eps: float, weight: Any = None, **other: Any) -> Array:
    return rms_norm(x, weight, eps, axes=axes, **other)


def _clamped(x: Array, axes: Any, weight: Any = None, least: float = 1e-12) -> Array:
    """Length one times the root of the width, the length bounded from below (torch.nn.functional.normalize)."""
    length = np.sqrt(np.sum(x**2, axis=axes, keepdims=True))
    unit = x / np.maximum(length, least) * np.sqrt(np.prod([x.shape[a] for a in axes]))
    return np.asarray(unit if weight is None else unit * weight)


RMS_NORM = Pattern(
    name="RMSNorm",
    anchors=("mean", "sum", "norm"),
    reduces=True,
    inputs=(Input(name="x", must=(_trailing,)), Input(name="weight", kind="vector", optional=True)),
    constants=(Constant(name="eps", role="add", low=0.0, high=0.1),),
    alternatives=(Alternative(name="rms_norm", function=_rms_norm),),
    look_alikes=(
        LookAlike(
            reason="not the same function: adds eps to the root mean square where F.rms_norm adds it to the mean "
            "square",
            function=partial(_rms_norm, outside=True),
        ),
    ),
    unless=_centred,
    begins=_of_squares,
    sample=partial(_rows, scales=(3.0, 1.0, 1e-2, 1e-3, 1e-13), at=0.0),
)


def _no_eps(x: Array, axes: Any, weight: Any = None) -> Array:
    return _clamped(x, axes, weight, 0.0)


BOUNDED = "not the same function: bounds the length from below where F.rms_norm adds eps to the mean square"
UNIT_LENGTH = Pattern(
    name="a vector of the length of the root of its width",
    anchors=("normalize", "norm", "mean", "sum"),
    reduces=True,
    inputs=RMS_NORM.inputs,
    alternatives=(),
    look_alikes=(
        LookAlike(reason=BOUNDED, function=_clamped),
        LookAlike(reason="not the same function: it has no eps, F.rms_norm adds one", function=_no_eps),
    ),
    unless=_centred,
    begins=_of_squares,
    sample=RMS_NORM.sample,
)
CLAMPED = replace(
    UNIT_LENGTH,
    anchors=("norm", "sum"),
    constants=(Constant(name="least", role="clamp", low=0.0, high=0.1),),
    look_alikes=UNIT_LENGTH.look_alikes[:1],
)


def layer_norm_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """LayerNorm written out, with or without weight and bias; look-alikes and other axes are near misses.

    A region with weight or bias has the norm before them as its last alternative, for a source that applies them under
    a condition.
    """
    return _with_plain(graph, find(graph, LAYER_NORM), LAYER_NORM)


def rms_norm_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """RMSNorm written out, with or without weight; look-alikes, other axes and alternatives as in LayerNorm."""
    return _with_plain(graph, find(graph, RMS_NORM, UNIT_LENGTH, CLAMPED), RMS_NORM)


def _with_plain(graph: Graph, found: Iterator[Region | NearMiss], pattern: Pattern) -> Iterator[Region | NearMiss]:
    known: dict[Hashable, tuple[int, ...]] = {}  # by the code of a region: the places of the plain norm's nodes in it
    for region in found:
        if isinstance(region, NearMiss) or len(region.inputs) == 1:
            yield region
            continue
        order = sorted(region.inner)
        code = tuple((graph.nodes[i].target, graph.nodes[i].span) for i in order)
        if code not in known:
            known[code] = _plain(graph, region, pattern)
        inner = [order[place] for place in known[code]]
        if region.constants["eps"][1] not in inner:
            yield region
            continue
        plain = replace(
            region, root=inner[-1], inputs={"x": region.inputs["x"]}, inner=frozenset(inner), alternatives=()
        )
        whole = contained(graph, plain)
        yield replace(region, alternatives=(*region.alternatives, whole)) if isinstance(whole, Region) else region


def _plain(graph: Graph, region: Region, pattern: Pattern) -> tuple[int, ...]:
    """The places in a region of the nodes of its norm without weight and bias, the result last; () where none is."""
    main, shape = region.inputs["x"], graph.nodes[region.inputs["x"]].shape
    assert shape is not None
    axes = tuple(int(axis) for axis in region.facts["axes"].split(","))
    x = pattern.sample(np.random.default_rng(7), sample_shape(shape, axes), axes)
    wanted = pattern.alternatives[0].function(x=x, axes=axes, eps=region.constants["eps"][0])
    sweep, order = Sweep(View(graph), main, x, axes, frozenset()), sorted(region.inner)
    for root in reversed(order):
        if graph.nodes[root].shape != shape or operation(graph.nodes[root]) in REARRANGES:
            continue
        try:
            with np.errstate(all="ignore"):
                if same(sweep.value(root), wanted):
                    return tuple(order.index(node) for node in sorted(sweep.region_of(root)[0]))
        except NotModelled:
            continue
    return ()


def shape_text(x: str, vector: str | None, axes: int) -> str | None:
    """How a source spells the normalised shape: by the weight's name, else by the input's; None where neither has
    one."""
    if vector is not None and DOTTED.fullmatch(vector):
        return f"{vector}.shape"
    cast = CAST.fullmatch(x)
    name = cast[1] if cast else x
    return f"{name}.shape[-{axes}:]" if DOTTED.fullmatch(name) else None


DOTTED = re.compile(r"[A-Za-z_][\w.]*")
CAST = re.compile(r"([A-Za-z_][\w.]*)\.(?:float|double|half|bfloat16|to|type)\([^()]*\)")
