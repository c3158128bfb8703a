"""Gated activations: an activation of one half times the other half, as in SwiGLU and GeGLU."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.model import Graph
from advisor.patterns.language import Alternative, Input, Pattern, find
from advisor.patterns.regions import NearMiss, Region
from advisor.semantics import gelu_erf, gelu_tanh, silu

# Shazeer 2020, GLU Variants Improve Transformer: activation(x W) * (x V)
GATE = Pattern(
    name="a gated activation",
    anchors=("silu", "gelu"),
    inputs=(Input(name="gate"), Input(name="up", kind="like")),
    alternatives=(
        Alternative(name="SwiGLU", function=lambda gate, up: silu(gate) * up),
        Alternative(name="GeGLU", function=lambda gate, up: gelu_erf(gate) * up),
        Alternative(name="GeGLU (tanh)", function=lambda gate, up: gelu_tanh(gate) * up),
    ),
    reach=3,
    pointed_at=True,
)


def gate_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """activation(gate) * up where the activation is one operation already; the fact "alternative" names it."""
    return find(graph, GATE)
