"""Elementwise functions of one tensor written out: GELU in both forms, SiLU, and what is taken for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from advisor.model import Graph
from advisor.patterns.casts import ends_in_a_cast
from advisor.patterns.language import Alternative, Input, LookAlike, Pattern, find
from advisor.patterns.regions import NearMiss, Region
from advisor.semantics import Array, gelu_erf, gelu_tanh, quick_gelu, silu

RELATIVE = 1e-6  # of the input: what constants rounded to six digits change

POINTS = np.concatenate([np.linspace(-9.0, 9.0, 37), [-0.01, 0.0, 0.003, -1e6, -100.0, 100.0, 1e6]])


def _points(generator: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    return POINTS.reshape((1,) * (len(shape) - 1) + (-1,))


def _close(value: Array, expected: Array, x: Array) -> bool:
    return bool(np.all(np.abs(value - expected) <= RELATIVE * np.maximum(np.abs(x), 1e-3)))


def _elementwise(name: str, anchors: tuple[str, ...], *alternatives: Alternative, **other: Any) -> Pattern:
    return Pattern(
        name=name,
        anchors=anchors,
        inputs=(Input(name="x", must=(ends_in_a_cast,)),),
        alternatives=alternatives,
        sample=_points,
        agrees=_close,
        **other,
    )


GELU = _elementwise(
    "GELU",
    ("tanh", "erf", "erfc"),
    Alternative(name="tanh", function=gelu_tanh),
    Alternative(name="none", function=gelu_erf),
)
QUICK_GELU = _elementwise(
    "quick GELU",
    ("sigmoid",),
    look_alikes=(
        LookAlike(
            reason="quick GELU: no fused operation computes x sigmoid(1.702 x), and F.gelu is another function",
            function=quick_gelu,
        ),
    ),
)
SILU = _elementwise("SiLU", ("sigmoid", "exp"), Alternative(name="silu", function=silu))


def gelu_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """GELU written out, the fact "alternative" being F.gelu's `approximate`; quick GELU is a near miss."""
    return find(graph, GELU, QUICK_GELU)


def silu_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """x sigmoid(x) written out."""
    return find(graph, SILU)
