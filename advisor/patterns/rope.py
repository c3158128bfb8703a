"""Rotary position embedding written out, by half-split or interleaved pairs, with real or complex tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from advisor.model import Graph, Node, Ref, Symbol
from advisor.patterns.language import Alternative, Constraint, Input, Pattern, find
from advisor.patterns.regions import NearMiss, Region, reads
from advisor.semantics import Array, operation, rotated

HALVES = "half-split"  # GPT-NeoX, Llama as transformers holds it: pairs (i, i + D/2)
NEIGHBOURS = "interleaved"  # RoFormer, GPT-J, Llama as published: pairs (2i, 2i + 1)


def _halves(x: Array, cos: Any, sin: Any) -> Array:
    return rotated(x, cos, sin, interleaved=False)


def _neighbours(x: Array, cos: Any, sin: Any) -> Array:
    return rotated(x, cos, sin, interleaved=True)


def _complex(x: Array, table: Any) -> Array:
    if not np.iscomplexobj(table):
        raise TypeError("a real table")
    return rotated(x, table.real, table.imag, interleaved=True)


def _complex_halves(x: Array, table: Any) -> Array:
    if not np.iscomplexobj(table):
        raise TypeError("a real table")
    return rotated(x, table.real, table.imag, interleaved=False)


def _as_many(anchor: Node, source: Node) -> bool:
    """As many numbers as the anchor, a complex one counted as two, in a real tensor of at least three dimensions."""
    if anchor.shape is None or source.shape is None or len(source.shape) < 3:
        return False
    twice = 2 if (anchor.dtype or "").startswith("complex") else 1
    real = (source.dtype or "").startswith(("float", "bfloat"))
    return real and source.shape[-1] % 2 == 0 and math.prod(source.shape) == twice * math.prod(anchor.shape)


TRIGONOMETRY = frozenset({"cos", "sin", "polar"})
ANGULAR = TRIGONOMETRY | {"exp"}  # of an imaginary angle
TABLE_REACH = 40  # nodes looked at behind a table


def _is_angle(name: str) -> Constraint:
    """Whether an input is no parameter that training moves: what it learns freely is no rotation."""

    def reason(graph: Graph, region: Region) -> str | None:
        learned = _learned(graph, region.inputs[name])
        return None if learned is None else f"its table is learned (`{learned}`): that is a product, no rotation"

    return reason


def _learned(graph: Graph, table: int) -> str | None:
    """The trained parameter from which a table is made other than as an angle; None without one."""
    pending, seen = [table], set[int]()
    while pending and len(seen) < TABLE_REACH:
        index = pending.pop(0)
        node = graph.nodes[index]
        if index in seen or operation(node) in ANGULAR:
            continue
        seen.add(index)
        state = node.facts.get("origin") == "state" or node.op == "get_attr"
        if state and node.requires_grad:
            return node.name
        pending.extend(reads(node))
    return None


COS, SIN = (Input(name=name, kind="table", must=(_is_angle(name),)) for name in ("cos", "sin"))
ROPE = Pattern(
    name="rotary position embedding",
    anchors=("cat", "stack", "view_as_complex"),
    inputs=(Input(name="x"), COS, SIN),
    alternatives=(
        Alternative(name=HALVES, function=_halves),
        Alternative(name=NEIGHBOURS, function=_neighbours),
    ),
    suits=_as_many,
    reach=10,
    pointed_at=True,
)
COMPLEX_ROPE = Pattern(
    name="rotary position embedding by complex numbers",
    anchors=("view_as_complex", "complex"),
    inputs=(Input(name="x"), Input(name="table", kind="table", must=(_is_angle("table"),))),
    alternatives=(
        Alternative(name=NEIGHBOURS, function=_complex),
        Alternative(name=HALVES, function=_complex_halves),
    ),
    suits=_as_many,
    reach=8,
    pointed_at=True,
)


def rope_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """Rotary embeddings of a tensor; the fact "alternative" names the layout."""
    return find(graph, ROPE, COMPLEX_ROPE)


def table_source(graph: Graph, region: Region) -> int | None:
    """The operation of this graph that computes a region's angles, None where the table comes from outside it."""
    pending = [index for name, index in region.inputs.items() if name != "x"]
    seen: set[int] = set()
    while pending and len(seen) < TABLE_REACH:
        index = pending.pop(0)
        node = graph.nodes[index]
        if index in seen:
            continue
        seen.add(index)
        if operation(node) in TRIGONOMETRY:
            return index
        pending.extend(reads(node))
    return None


def table_key(graph: Graph, index: int) -> tuple[object, ...]:
    """What a table is computed from: equal for two operations that compute the same.

    Modules of a list count as alike, because layers that compute a table of their own hold equal frequencies.
    """
    left = [TABLE_REACH]

    def key(at: int) -> tuple[object, ...]:
        node = graph.nodes[at]
        left[0] -= 1
        if not node.op.startswith("call_"):
            state = node.facts.get("origin") == "state" or node.op == "get_attr"
            return (
                (re.sub(r"(?<=modules_)\d+(?=_)", "", node.name), node.shape, node.dtype)
                if state
                else (graph.index, at)
            )
        if left[0] < 0:
            return (graph.index, at)
        return (operation(node), *map(said, (*node.args, *sorted(node.kwargs.items()))))

    def said(arg: Any) -> object:
        if isinstance(arg, Ref):
            return key(arg.index)
        if isinstance(arg, tuple):
            return tuple(map(said, arg))
        return (arg.kind, arg.text, *map(said, arg.parts)) if isinstance(arg, Symbol) else repr(arg)

    return key(index)
