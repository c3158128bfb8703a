"""Reads graph.json, the FX graphs the annotated step captured, into the model's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from advisor.errors import ArtifactError
from advisor.ingest.documents import read_document
from advisor.ingest.frames import Frames
from advisor.ingest.inplace import reread
from advisor.model import Arg, Break, Graph, Node, Ref, Span, Symbol


class _Frame(msgspec.Struct):
    path: str
    line: int
    function: str | None = None
    text: str | None = None
    column: int | None = None
    end_column: int | None = None


class _Node(msgspec.Struct):
    name: str
    op: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    module: str | None = None
    module_class: str | None = None
    frames: list[_Frame] = []
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    stride: tuple[int, ...] | None = None
    device: str | None = None
    requires_grad: bool = False
    facts: dict[str, str] = {}


class _Graph(msgspec.Struct):
    index: int
    nodes: list[_Node] = []
    training: bool = True
    span: _Frame | None = None
    kind: str = "dynamo"


class _Break(msgspec.Struct):
    reason: str
    count: int = 1


class _Document(msgspec.Struct):
    graphs: list[_Graph]
    breaks: list[_Break] = []
    missing: dict[str, str] = {}


def read_graphs(path: Path, root: Path) -> tuple[tuple[Graph, ...], dict[str, str]]:
    """The captured graphs and what could not be captured (collector -> reason).

    Frames in files below `root` that are neither installed packages nor the standard library get paths relative to it,
    and a node's `span` is the innermost of those. Capture does not place graph breaks in a graph: they stand on the
    first. Raises ArtifactError for a file that cannot be read.
    """
    document = read_document(path, _Document)
    frames = Frames(root)
    breaks = tuple(
        Break(reason=item.reason if item.count == 1 else f"{item.reason} ({item.count} times)")
        for item in document.breaks
    )
    missing = dict(document.missing)
    if breaks and not document.graphs:
        missing.setdefault("graph", "no graph was captured: " + "; ".join(item.reason for item in breaks))
    graphs = []
    for position, recorded in enumerate(sorted(document.graphs, key=lambda graph: graph.index)):
        if not recorded.nodes:
            missing[f"graph {recorded.index}"] = "captured but not executed in the annotated steps"
        graphs.append(_graph(recorded, breaks if position == 0 else (), frames))
    return tuple(graphs), missing


def _graph(recorded: _Graph, breaks: tuple[Break, ...], frames: Frames) -> Graph:
    arguments = [
        (tuple(_argument(arg) for arg in node.args), {key: _argument(arg) for key, arg in node.kwargs.items()})
        for node in recorded.nodes
    ]
    plain = [
        _node(index, node, args, kwargs, frames)
        for index, (node, (args, kwargs)) in enumerate(zip(recorded.nodes, arguments, strict=True))
    ]
    plain = reread(plain)
    users: list[list[int]] = [[] for _ in plain]
    for node in plain:
        for read in dict.fromkeys(node.inputs()):
            if not 0 <= read < len(plain):
                raise ArtifactError(
                    f"graph.json: node {node.name} reads node {read}, which is not there: record the run again"
                )
            users[read].append(node.index)
    return Graph(
        index=recorded.index,
        nodes=tuple(replace(node, users=tuple(users[node.index])) for node in plain),
        breaks=breaks,
        training=recorded.training,
        span=_call_site(recorded.span, frames),
        kind=recorded.kind,
    )


def _call_site(place: _Frame | None, frames: Frames) -> Span | None:
    """Where the user's own code called the graph, None where no frame of it was on the stack."""
    if place is None or frames.relative(place.path) is None:
        return None
    return frames.span(place.path, place.line, place.function)


def _node(index: int, node: _Node, args: tuple[Arg, ...], kwargs: dict[str, Arg], frames: Frames) -> Node:
    spans = [
        (frames.span(f.path, f.line, f.function, f.text, f.column, f.end_column), frames.relative(f.path) is not None)
        for f in node.frames
    ]
    return Node(
        index=index,
        name=node.name,
        op=node.op,
        target=node.target,
        args=args,
        kwargs=kwargs,
        shape=node.shape,
        dtype=node.dtype,
        stride=node.stride,
        device=node.device,
        requires_grad=node.requires_grad,
        module=node.module,
        module_class=node.module_class,
        frames=tuple(span for span, _ in spans),
        span=_innermost(spans),
        facts=node.facts,
    )


def _innermost(spans: Sequence[tuple[Span, bool]]) -> Span | None:
    return next((span for span, own in reversed(spans) if own), None)


def _argument(value: Any) -> Arg:
    """One argument as capture describes it: a constant, or an object with a single key that names its kind."""
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ArtifactError("graph.json: an argument is not of a known form: record the run again")
    kind, content = next(iter(value.items()))
    if kind == "ref":
        return Ref(int(content))
    if kind == "tuple":
        return tuple(_argument(item) for item in content)
    if kind == "slice":
        return Symbol("slice", parts=tuple(_argument(item) for item in content))
    if kind == "float":
        return float(content)
    if kind in ("dtype", "device", "layout", "ellipsis", "opaque"):
        return Symbol(kind, str(content))
    raise ArtifactError(f"graph.json: an argument of unknown kind {kind!r}: record the run again with this version")
