"""scaled_dot_product_attention takes its math path, so the scores go through memory although the call looks fused.

## What it does
Names the condition that excludes the fused kernels, read off the shapes, dtypes and options of the call. Inputs with
three dimensions get the fourth that the kernels ask for (`unsqueeze(0)`, and `squeeze(0)` behind the call); every other
cause is shown and left to the author.

## Why it costs
The math path computes scores, softmax and product as separate kernels and stores the scores for the backward pass, as
attention written out by hand does (PyTorch, aten/src/ATen/native/transformers/attention.cpp).

## When not to
When the trace shows another kernel under the call, or the script chooses the kernels itself (`sdpa_kernel`). Where
gradients are differentiated again: the fused kernels have no second derivative. A cause in dtype or head dimension
changes precision or checkpoints, and a mask that learns needs its gradient: none of these is edited.

## Fix safety
NUMERICS: the same sum by another kernel. With dropout the draws come from another place of the random stream.

## References
- torch.nn.functional.scaled_dot_product_attention, PyTorch documentation
- PyTorch, aten/src/ATen/native/transformers/sdp_utils_cpp.cpp and cuda/sdp_utils.cpp
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from advisor.alignment.align import Miss
from advisor.graphrule import UNLINKED, GraphRule, Site
from advisor.model import Decline, Evidence, Finding, Graph, Node, Operators, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import is_tensor, package_file
from advisor.patterns.sdpa import FUSED, MATH, Sdpa, call_of, math_cause, sdpa_calls
from advisor.rule import Context, Example, step

CALL = "aten::scaled_dot_product_attention"
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
ADVICE: Mapping[str, str] = {
    "dtype": "give it one dtype, float16 or bfloat16 on a GPU",
    "mask-gradient": "a learned bias costs the fused kernel on a CPU",
    "mask-shape": "give the mask two or four dimensions",
    "head-dim": "choose head dimensions that the kernels take",
    "stride": "make the last dimension contiguous before the call",
    "heads": "expand keys and values to the batch and heads of the queries, or use enable_gqa=True",
    "unknown": "call torch.nn.attention.sdpa_kernel around it to read torch's own reason",
}
MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8, 8))

    def forward(self, q, k, v):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(6, 8, 16, requires_grad=True) for _ in range(3)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class SdpaMathFallback(GraphRule):
    """scaled_dot_product_attention on 3-D inputs -> on 4-D inputs; other causes are shown."""

    id = "sdpa-math-fallback"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = FUSED
    title = "four dimensions for scaled_dot_product_attention"
    examples = (
        Example(
            before=_model("return F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
            after=_model(
                "return F.scaled_dot_product_attention(",
                "    q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal=True",
                ").squeeze(0)",
            ),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("q, k, v = q[None], k[None], v[None]", "return F.scaled_dot_product_attention(q, k, v)"),
            after=None,
            profile=step(10_000, nodes=0.001),
            because="no call of it takes the math path",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """Every call of the user's own code."""
        for call in sdpa_calls(graph):
            if package_file(call.node) is None:
                yield Region(
                    graph=graph.index,
                    root=call.node.index,
                    inputs={"query": call.query, "key": call.key, "value": call.value}
                    | ({} if call.mask is None else {"mask": call.mask}),
                    inner=frozenset({call.node.index}),
                )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """The calls under which the trace shows the math path; without a trace, those for which torch must take it."""
        ran = _kernels(ctx.profile.operators)
        graphs = {g.index: g for g in ctx.graphs}
        places: dict[tuple[str, int, int], list[Region]] = {}
        seen = False
        wanted = _math_is_wanted(ctx)
        for graph in ctx.graphs:
            for region in self.search(graph):
                node = graph.nodes[region.root] if isinstance(region, Region) else None
                if node is None or node.span is None or not isinstance(region, Region):
                    continue
                seen = True
                if _takes_math(ctx, ran, graph, call_of(graph, region)):
                    places.setdefault((node.span.path, node.span.line, node.span.column), []).append(region)
        for (path, line, column), regions in sorted(places.items()):
            if wanted is not None:
                yield self.decline(Span(path=path, line=line, column=column), wanted)
            else:
                yield self._judged(ctx, graphs, regions)
        if seen and not places:
            yield self.decline(None, "no call of it takes the math path")

    def _judged(self, ctx: Context, graphs: Mapping[int, Graph], regions: list[Region]) -> Finding | Decline:
        graph = graphs[regions[0].graph]
        node = graph.nodes[regions[0].root]
        span = node.span
        assert span is not None
        causes = {_cause(graphs[r.graph], r) for r in regions}
        name, sentence = min(causes)
        if causes == {(name, sentence)} and name == "rank" and _widened_cause(graph, regions[0]) is None:
            return self._place(ctx, graphs, regions)
        if causes == {(name, sentence)} and name == "dropout":
            return self.decline(span, f"{sentence}: that is so on a CPU only, a GPU has kernels with dropout")
        costs = [c for r in regions if (c := ctx.cost_us(r.graph, r.inner)) is not None]
        if not costs:
            return self.decline(span, UNLINKED, needs=("links",))
        share = sum(costs) / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(span, f"it takes {share:.1%} of the step")
        return self._finding(ctx, node, sentence, sum(costs), len(regions), {"not applied": _advice(name, sentence)})

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        """Inputs with three dimensions: the same call with a leading axis of one."""
        region = site.regions[0]
        call = call_of(graph, region)
        rank = len(graph.nodes[call.query].shape or ())
        if rank != 3:
            return self.decline(site.span, f"its inputs have {rank} dimensions, which one more does not make four")
        parts = [f"{{{name}}}.unsqueeze(0)" for name in ("query", "key", "value")]
        if call.mask is not None:
            parts.append(f"attn_mask={_widened_mask(graph, site, call.mask)}")
        constants = {}
        for name in ("dropout_p", "is_causal", "scale", "enable_gqa"):
            bound = site.alignment.constants.get((region.root, call.given[name])) if name in call.given else None
            if bound is not None:
                parts.append(f"{name}={{{name}}}")
                constants[name] = (site.alignment.source.segment(bound.expression), getattr(call, name))
        template = f"F.scaled_dot_product_attention({', '.join(parts)}).squeeze(0)"
        found = self._finding(
            ctx, graph.nodes[region.root], _cause(graph, region)[1], site.cost_us, len(site.regions), {}
        )
        return replace(found, span=site.span, consumed=site.consumed, replacement=site.replacement(template, constants))

    def _finding(
        self, ctx: Context, node: Node, sentence: str, cost: float, calls: int, values: Mapping[str, str]
    ) -> Finding:
        assert node.span is not None
        return self.finding(
            node.span,
            f"scaled_dot_product_attention takes its math path: {sentence}",
            cited_us=cost,
            high_us=cost,
            evidence=(
                Evidence(what="time of the attention per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
                Evidence(what="calls of this code per step", value=calls, unit="calls"),
            ),
            values=values,
        )


def _widened_mask(graph: Graph, site: Site, mask: int) -> str:
    """The mask for inputs of four dimensions; raises `Miss` where it may be None and has no name to ask it by."""
    if len(graph.nodes[mask].shape or ()) != 3:
        return "{mask}"
    bound, source = site.alignment.values[mask], site.alignment.source
    if is_tensor(source, bound.expression):
        return "{mask}.unsqueeze(0)"
    if isinstance(bound.expression, (ast.Name, ast.Attribute)):
        return "None if {mask} is None else {mask}.unsqueeze(0)"
    raise Miss("the mask may be None in another call", bound.expression.lineno)


SWITCHES = frozenset({"enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"})


def _math_is_wanted(ctx: Context) -> str | None:
    """Why the script needs the math path or asked for it; None where nothing of its files says so."""
    if ctx.needs_unfused_attention is not None:
        return ctx.needs_unfused_attention
    for source in ctx.sources:
        for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func).rsplit(".", 1)[-1]
            given = ast.unparse(call)
            forced = name in ("sdpa_kernel", "sdp_kernel") and not any(
                word in given
                for word in ("FLASH", "EFFICIENT", "CUDNN", "enable_flash=True", "enable_mem_efficient=True")
            )
            off = name in SWITCHES and not given.endswith("(True)")
            if forced or off:
                return f"the script chooses the kernels of attention itself: `{given}`"
    return None


def _cause(graph: Graph, region: Region) -> tuple[str, str]:
    known = math_cause(graph, call_of(graph, region))
    return known or ("unknown", "no condition on shapes and dtypes explains it; a backend may be switched off")


def _advice(name: str, sentence: str) -> str:
    return f"{sentence}: {ADVICE[name]}" if name in ADVICE else sentence


def _widened_cause(graph: Graph, region: Region) -> tuple[str, str] | None:
    """What would still exclude the fused kernels once the inputs have four dimensions."""
    call = call_of(graph, region)
    wide = {index for index in (call.query, call.key, call.value, call.mask) if index is not None}
    nodes = tuple(
        replace(n, shape=(1, *n.shape), stride=None if n.stride is None else (1, *n.stride))
        if n.index in wide and n.shape is not None and len(n.shape) == 3
        else n
        for n in graph.nodes
    )
    return math_cause(replace(graph, nodes=nodes), call)


def _kernels(operators: Operators) -> dict[Shapes, set[bool]]:
    """Shapes of query, key and value -> whether the calls with them took the math path."""
    math = {operators.parent[row] for row, name in enumerate(operators.name) if name == MATH}
    found: dict[Shapes, set[bool]] = {}
    for row, name in enumerate(operators.name):
        if name == CALL and len(operators.shapes[row]) >= 3:
            found.setdefault(tuple(operators.shapes[row][:3]), set()).add(row in math)
    return found


def _takes_math(ctx: Context, ran: Mapping[Shapes, set[bool]], graph: Graph, call: Sdpa) -> bool:
    if not len(ctx.profile.operators):
        return math_cause(graph, call) is not None
    shapes = tuple(graph.nodes[index].shape or () for index in (call.query, call.key, call.value))
    return ran.get(shapes) == {True}  # two calls with the same shapes and different kernels tell nothing
