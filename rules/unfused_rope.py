"""Rotary position embedding is written out, so half a dozen kernels pass over every query and key.

## What it does
Points at rotary embeddings of queries and keys, once per place in the source, and names their layout: half-split, where
element i is paired with element i + D/2 (GPT-NeoX, Llama in transformers), or interleaved, where neighbours are paired
(RoFormer, GPT-J, Llama as published). Says when the cosines and sines are computed anew for several of them in one
step. Where the function that computes it computes nothing that a compiler would not fuse, it is put under
`torch.compile`; in any other place the finding is a suggestion.

## Why it costs
Slices, negation, concatenation, two products and a sum are one kernel each, forward and backward, where one pass would
do. They are memory-bound: the time is the traffic.

## When not to
Inside a compiled region: the compiler has fused it. Where every call has other sizes: the compiler starts again for
them, and gives up after a few. Where the tables are trained parameters, which is a product with a learned complex
number and no rotation; angles may be learned. The two layouts are not exchangeable: a kernel for the other one gives
other numbers with the same checkpoint.

## Fix safety
NUMERICS: the compiler keeps intermediates in registers, in float32. PyTorch has no fused rotary operation; compiling
the block that holds it or a kernel of another package is for the user to choose.

## References
- Su, Lu, Pan, Murtadha, Wen, Liu, RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021
- torch.compile, PyTorch documentation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from advisor import codemod
from advisor.forms import compiled_form, is_compiled
from advisor.graphrule import COMPILED, GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety
from advisor.patterns import NearMiss, Region, rope_regions, table_source
from advisor.patterns.rope import table_key
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source

MODEL = """\
import torch
from torch import nn


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, q):
        {body}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 3, 5, 8, requires_grad=True)]
"""
ADVICE = "compile the block that holds it, or use a rotary kernel of the same layout"


class UnfusedRope(GraphRule):
    """q * cos + rotate_half(q) * sin in a function of its own -> the function under torch.compile."""

    id = "unfused-rope"
    safety = Safety.NUMERICS
    worth = 0.02
    title = ADVICE
    in_library = "compile the layers that hold it, or ask the library for its fused rotary kernel"
    examples = (
        Example(
            before=MODEL.replace("{body}", "return q * self.cos + rotate_half(q) * self.sin"),
            after=MODEL.replace("{body}", "return q * self.cos + rotate_half(q) * self.sin").replace(
                "    def forward", "    @torch.compile\n    def forward"
            ),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=MODEL.replace("{body}", "return self.out(q * self.cos + rotate_half(q) * self.sin)").replace(
                "        angles", "        self.out = nn.Linear(8, 8)\n        angles"
            ),
            after=MODEL.replace("{body}", "return self.out(q * self.cos + rotate_half(q) * self.sin)").replace(
                "        angles", "        self.out = nn.Linear(8, 8)\n        angles"
            ),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=MODEL.replace("{body}", "return q * self.cos + rotate_half(q) * self.sin"),
            after=None,
            profile=step(10_000, nodes=0.01),
            because="it takes 1.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return rope_regions(graph)

    def _place(self, ctx: Context, graphs: Mapping[int, Graph], regions: list[Region]) -> Finding | Decline:
        first = regions[0]
        span = graphs[first.graph].nodes[first.root].span
        assert span is not None
        source = ctx.read(span.path)
        if "compiled" in ctx.profile.missing or is_compiled(source, span.line):
            return self.decline(span, COMPILED)
        known = [cost for r in regions if (cost := ctx.cost_us(r.graph, r.inner)) is not None]
        if not known:
            return self.decline(span, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost = sum(known)
        if cost / ctx.step_us < ctx.gate(self):
            return self.decline(span, f"it takes {cost / ctx.step_us:.1%} of the step")
        moved = sum(4 * tensor_bytes(graphs[r.graph].nodes[r.inputs["x"]]) for r in regions)
        floor = ctx.floor_us(0.0, moved, None)
        layout = " and ".join(sorted({r.facts["alternative"] for r in regions}))
        made = {(r.graph, at) for r in regions if (at := table_source(graphs[r.graph], r)) is not None}
        tables = {table_key(graphs[graph], at) for graph, at in made}
        again = len(made) > len(tables)
        repeated = f"; its cosines and sines are computed {len(made)} times a step" if again else ""
        repeated += f", for {len(tables)} different tables" if again and len(tables) > 1 else ""
        form = compiled_form(ctx.sources, source, span.line, ctx.graphs)
        advice = {} if form is not None else {"not applied": f"compute each table once; {ADVICE}" if again else ADVICE}
        return self.finding(
            span,
            f"rotary position embedding ({layout} pairs) is written out, one kernel for every operation{repeated}",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="time of the written-out rotation per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
                *floor_evidence("floor: two passes forward, two backward", floor),
                Evidence(what="layout of the pairs", value=layout, unit="layout"),
                Evidence(what="calls of this code per step", value=len(regions), unit="calls"),
                Evidence(what="computations of its tables per step", value=len(made), unit="calls"),
            ),
            values=advice,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        edits = codemod.decorated(source, finding.span.line, "torch.compile")
        return self.edit(finding, "compile the function that computes it", edits)
