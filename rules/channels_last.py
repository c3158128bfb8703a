"""Convolutions run on tensors whose channels are far apart, so kernels convert the layout before and after them.

## What it does
Puts the model and its input into the channels-last memory format: `model.to(memory_format=torch.channels_last)` where
the model is constructed and the same for the images where it is called. Shapes and values stay as they are.

## Why it costs
The tensor-core kernels of cuDNN read the channels of a pixel next to each other. For a tensor in the default layout
cuDNN converts input and output by kernels of their own (`nchwToNhwc`, `nhwcToNchw`), which only move memory, or takes
slower kernels. The estimate is the time of the convolutions with these conversions, less the convolutions' floor.

## When not to
On a CPU, and in float32 without TF32, where no tensor core waits for the layout; with grouped or depthwise
convolutions, some of which run on slow paths in this layout; with convolutions over one or three spatial dimensions;
where the model takes something else than one batch of images; where activations, weights or gradients are viewed in the
order of their memory, also in code that did not run; where random numbers are drawn for an activation, because they are
drawn in the order of memory. Each is declined with its reason. Told and not applied where the file does not show the
one place that constructs the model and the one that calls it; where weights are initialised, or numbers drawn for a
tensor, after that or in code that did not run, dropout too; where the files name layers over three dimensions; and
where callers of a function choose what the model is called with, which may be one image without a batch.

## Fix safety
NUMERICS: the same products in another order.

## References
- PyTorch tutorial, Channels Last Memory Format in PyTorch
- pytorch/pytorch#34977, #50036: grouped convolutions that became slower
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import codemod
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.convolutions import Convolution, convolutions, is_channels_last, times
from advisor.patterns.layouts import (
    Called,
    called_model,
    depends_on_layout,
    returns_image,
    unfit_elsewhere,
    unfit_model,
    viewed_result,
)
from advisor.rule import Context, Example, step
from advisor.source import Source

ADVICE = "convert the model where it is constructed and its input where it is called"
LAYOUT = ("nchwtonhwc", "nhwctonchw")  # cuDNN's kernels that convert the layout, in small letters
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups={groups})

    def forward(self, x):
        return self.conv(x)


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 4, 8, 8, requires_grad=True)]
"""


class ChannelsLast(GraphRule):
    """model.to(device), model(x) -> both in torch.channels_last."""

    id = "channels-last"
    safety = Safety.NUMERICS
    needs = ("steps", "graph", "kineto")
    worth = 0.03
    title = "channels-last memory format for the model and its input"
    examples = (
        Example(  # called from outside this file: told, not edited
            before=MODEL.replace("{groups}", "1"),
            after=MODEL.replace("{groups}", "1"),
            profile=step(10_000, kernels=(("cudnn::ops::nchwToNhwcKernel<float>", 800.0),)),
            saves=(0, 800),
        ),
        Example(
            before=MODEL.replace("{groups}", "1"),
            after=None,
            profile=step(10_000, nodes=0.4, device="cpu"),
            because="cannot tell: what the layout costs needs a profile on a GPU",
        ),
        Example(
            before=MODEL.replace("{groups}", "4"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="grouped convolutions run on slow paths in this layout on some versions: measure it by hand",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """The convolutions over two dimensions, each a region of its own."""
        for found in convolutions(graph):
            if found.dimensions == 2:
                root = found.node.index
                yield Region(graph=graph.index, root=root, inputs={}, inner=frozenset({root}))

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One answer for all graphs: kernels are counted together, and one model has one layout."""
        found = [(graph, c) for graph in ctx.graphs for c in convolutions(graph)]
        if any(c.dimensions == 2 for _, c in found):
            yield self._judge(ctx, found)

    def _judge(self, ctx: Context, found: list[tuple[Graph, Convolution]]) -> Finding | Decline:
        spans = {graph.span for graph, _ in found}
        called = _made(ctx, *found[0]) if len(spans) == 1 else None
        place = next((c.node.span for _, c in found if c.node.span), None)
        if called is not None and found[0][0].span is not None:
            source = ctx.read(found[0][0].span.path)
            place = source.span(called.statement)
        reason = _unsuitable(ctx, found)
        if reason is not None:
            return self.decline(place, reason, needs=("kineto",) if reason.startswith("cannot tell") else ())
        cost, names = _layout_us(ctx)
        share = cost / ctx.step_us
        if share < ctx.gate(self) or cost == 0:
            return self.decline(place, f"kernels that convert the layout take {share:.1%} of the step")
        if place is None:
            return self.decline(None, "the model is constructed and called in a library: ask it for channels_last")
        unfit = unfit_model(_first(ctx, found))
        if unfit is None and called is None:
            unfit = "the place is not shown by this file"
        if unfit is None and called is not None:
            unfit = unfit_elsewhere(ctx.graphs, ctx.sources, ctx.read(place.path), called)
        measured, floor = times(found, ctx.costs)
        spent = max(cost, measured)
        return self.finding(
            place,
            "kernels convert the layout of activations before and after convolutions: channels-last needs none",
            cited_us=spent,
            high_us=max(cost, spent - floor),
            evidence=(
                Evidence(what="time of kernels that convert the layout per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share", refs=names),
                Evidence(what="convolutions", value=len(found), unit="calls"),
                Evidence(what="their time per step, conversions included", value=round(spent, 1), unit="us"),
            ),
            bindings={}
            if called is None
            else {"model": source.span(called.made), "input": source.span(called.argument)},
            values={} if unfit is None else {"not applied": f"{unfit}: {ADVICE}"},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        name, imported = codemod.module_name(source, finding.span.line, "torch")
        given = f"memory_format={name}.channels_last"
        model, images = finding.bindings["model"], finding.bindings["input"]
        edits = [*imported, _converted(source, model, given)]
        edits.append((images, f"{codemod.grouped(source.at(images))}.to({given})"))
        return self.edit(finding, self.title, edits)


def _unsuitable(ctx: Context, found: list[tuple[Graph, Convolution]]) -> str | None:
    """Why the layout is not to be changed, or None."""
    if any(c.groups > 1 for _, c in found):
        return "grouped convolutions run on slow paths in this layout on some versions: measure it by hand"
    if ctx.profile.hardware.kind != "cuda":
        return "cannot tell: what the layout costs needs a profile on a GPU"
    half = all(c.node.dtype in ("float16", "bfloat16") for _, c in found)
    if not half and not ctx.profile.facts.get("cudnn_tf32", True):
        return "float32 without TF32 runs on no tensor cores: mixed precision first"
    if any(c.dimensions != 2 for _, c in found):
        return "the model has convolutions over one or three dimensions as well"
    if all(is_channels_last(graph, c) for graph, c in found):
        return "the model runs in channels-last already"
    return depends_on_layout(ctx.graphs, ctx.sources)


def _first(ctx: Context, found: list[tuple[Graph, Convolution]]) -> Graph:
    """The graph that begins the call in which the convolutions run."""
    one = min((graph for graph, _ in found), key=lambda graph: graph.index)
    return min((g for g in ctx.graphs if (g.span, g.kind) == (one.span, one.kind)), key=lambda g: g.index, default=one)


def _layout_us(ctx: Context) -> tuple[float, tuple[str, ...]]:
    """Time per step of the kernels that convert between layouts, and their names."""
    kernels = ctx.profile.kernels
    rows = [i for i, name in enumerate(kernels.name) if any(word in name.lower() for word in LAYOUT)]
    rows = [i for i in rows if kernels.step[i] >= 0]
    steps = len({step for step in kernels.step if step >= 0})
    total = sum(kernels.duration_us[i] for i in rows)
    return (total / steps if steps else 0.0), tuple(sorted({kernels.name[i] for i in rows}))


def _made(ctx: Context, graph: Graph, found: Convolution) -> Called | None:
    """Where the file makes and calls the model; None where it does not show exactly one place of each."""
    if graph.span is None:
        return None
    source = ctx.read(graph.span.path)
    called = called_model(ctx.sources, source, graph.span, found)
    if called is not None and any(returns_image(g) for g in ctx.graphs) and viewed_result(source, called):
        return None
    return called


def _converted(source: Source, model: Span, given: str) -> codemod.Edit:
    """`Net().to(device)` with the memory format added, any other call with `.to` behind it."""
    text = source.at(model)
    body = ast.parse(text.strip(), mode="eval").body
    if isinstance(body, ast.Call) and isinstance(body.func, ast.Attribute) and body.func.attr == "to":
        name, value = given.split("=")
        return codemod.set_keywords(source, model, {name: value})
    return codemod.replace(model, f"{text}.to({given})")
