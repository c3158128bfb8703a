"""A causal mask is given to scaled_dot_product_attention as a tensor, so the kernel reads it and skips nothing.

## What it does
Replaces a mask that is the lower triangle by `is_causal=True` and drops the mask argument, and with it a buffer outside
of the state dict that nothing else reads. Where the function that attends is handed the mask, and the source shows that
what made it makes a triangle at every length, that is told, never edited.

## Why it costs
The mask is read for every head, and half of the blocks it hides are computed all the same; on CUDA the flash kernel
takes no mask at all (PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_for_attn_mask). keras#22910
reports 1.10 times the forward speed at 1024 tokens and 2.62 times at 4096 for `is_causal`.

## When not to
When the mask holds more than the triangle (padding, a window, a bias) or comes from the batch, or from a caller that
may pass another; when the source does not show that every instance makes the same triangle (an argument of the
constructor, a subclass, a method that writes into it); when there are more keys than queries: `is_causal=True` aligns
the triangle at the top left, where a decoder with a cache needs it at the bottom right.

## Fix safety
NUMERICS: the same sum by another kernel. With dropout the draws come from another place of the random stream.

## References
- torch.nn.functional.scaled_dot_product_attention, PyTorch documentation, `is_causal`
- keras-team/keras#22910
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.alignment.align import Bound
from advisor.attending import diagonal_is_literal, stays_triangle
from advisor.graphrule import GraphRule, Site
from advisor.model import Decline, Evidence, Finding, Graph, Node, Safety
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import COMPREHENSIONS, around, enclosing, names, scope_of
from advisor.patterns.sdpa import FUSED, MATH, call_of, causal_mask_regions
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source
from advisor.usercode.handed import from_caller, written_in_place
from advisor.usercode.triangles import made_by_helper, shows_triangle

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{buffer}
    def forward(self, q, k, v):
        T = q.size(2)
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3)]
"""

CONDITIONS = (ast.If, ast.Try, ast.Match)
MAKES = (ast.Call, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Compare)
HANDED = "the mask is an argument of the function: another caller may pass another"
INSTEAD = "where every caller passes the triangle, leave the mask out and say is_causal=True"


BUFFER = '        self.register_buffer("tri", torch.tril(torch.ones(16, 16, dtype=torch.bool)), persistent=False)\n'


def _model(*lines: str, buffer: str = BUFFER) -> str:
    return MODEL.replace("{buffer}", buffer).replace("{body}", "".join(f"        {line}\n" for line in lines))


class MaterialisedCausalMask(GraphRule):
    """scaled_dot_product_attention(q, k, v, triangle) -> scaled_dot_product_attention(q, k, v, is_causal=True)."""

    id = "materialised-causal-mask"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = FUSED
    avoids = (MATH,)
    title = "is_causal=True instead of the mask"
    examples = (
        Example(
            before=_model("return F.scaled_dot_product_attention(q, k, v, attn_mask=self.tri[:T, :T])"),
            after=_model("return F.scaled_dot_product_attention(q, k, v, is_causal=True)", buffer=""),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model(
                "mask = torch.ones(T, T, dtype=torch.bool).tril()",
                "return F.scaled_dot_product_attention(q * 2, k, v, mask, 0.0, scale=0.5)",
            ),
            after=_model(
                "mask = torch.ones(T, T, dtype=torch.bool).tril()",
                "return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, dropout_p=0.0, scale=0.5)",
            ),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("return F.scaled_dot_product_attention(q[:, :, :4], k, v, attn_mask=self.tri[:4, :T])"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="there are more keys than queries or fewer: is_causal=True aligns the triangle at the top left",
        ),
        Example(
            before=_model("return F.scaled_dot_product_attention(q, k, v, self.tri[:T, :T] & (k[0, 0, :, 0] < 9))"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the mask depends on the batch: that it was causal here does not prove it always is",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return causal_mask_regions(graph)

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        region = site.regions[0]
        unsure = _unsure(ctx, graph, site)
        handed = unsure == HANDED and _hands_triangle(ctx, site)
        if unsure is not None and not handed:
            return self.decline(site.span, unsure)
        call = call_of(graph, region)
        constants = {}
        for name in ("dropout_p", "scale", "enable_gqa"):
            bound = site.alignment.constants.get((region.root, call.given[name])) if name in call.given else None
            if bound is not None:
                constants[name] = (site.alignment.source.segment(bound.expression), getattr(call, name))
        given = "".join(f", {name}={{{name}}}" for name in constants)
        floor = sum(_floor_us(ctx, g, r) for r, g in site.pairs(ctx))
        return self.finding(
            site.span,
            "a causal mask is given as a tensor: the kernel reads it and computes the half it hides",
            cited_us=site.cost_us,
            high_us=site.cost_us - floor,
            evidence=(
                Evidence(what="time of the attention per step", value=round(site.cost_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(site.cost_us / ctx.step_us, 4), unit="share"),
                *floor_evidence("physical floor of causal attention", floor),
                Evidence(what="calls of this code per step", value=len(site.regions), unit="calls"),
            ),
            values={"not applied": f"{HANDED}: {INSTEAD}"} if handed else {},
            consumed=site.consumed,
            replacement=None
            if handed
            else site.replacement(
                f"F.scaled_dot_product_attention({{query}}, {{key}}, {{value}}, is_causal=True{given})", constants
            ),
        )


def _floor_us(ctx: Context, graph: Graph, region: Region) -> float:
    """Half of two products forward, and 2.5 times that backward (Dao et al. 2022); q, k, v, out and gradients once."""
    query, value = graph.nodes[region.inputs["query"]], graph.nodes[region.inputs["value"]]
    shape = query.shape or ()
    rows = 1
    for size in shape[:-1]:
        rows *= size
    keys, width = (value.shape or ())[-2:]
    forward = 0.5 * 2.0 * rows * keys * (shape[-1] + width)
    traffic = 3 * (2 * tensor_bytes(query) + 2 * tensor_bytes(value))
    return ctx.floor_us(3.5 * forward, traffic, query.dtype)


def _unsure(ctx: Context, graph: Graph, site: Site) -> str | None:
    """Why the mask of this code may be another one in another run, or None."""
    region = site.regions[0]
    source = site.alignment.source
    bound = site.alignment.values[region.inputs["mask"]]
    helped = _from_helper(source, bound)
    if not helped and from_caller(source, bound.expression, bound.statement):
        return HANDED
    scope = scope_of(source, bound.expression)
    values: list[ast.expr] = [bound.expression]
    if isinstance(bound.expression, ast.Name):
        stores = [source.parents.get(n) for n in names(scope, bound.expression.id, ast.Store)]
        made = [s for s in stores if isinstance(s, ast.Assign)]
        outer = around(source, bound.statement)
        if not made or len(made) != len(stores):
            return f"how `{bound.expression.id}` gets its value is not followed"
        if any(enclosing(source, s, CONDITIONS) not in (None, *outer) for s in made):
            return f"`{bound.expression.id}` is made under a condition"
        values += [s.value for s in made]
    if any(isinstance(n, (ast.IfExp, ast.BoolOp, *COMPREHENSIONS)) for value in values for n in ast.walk(value)):
        return "the mask is chosen by a condition"
    if not helped and not stays_triangle(source, bound, ctx.sources):
        return "the source does not show that the mask is this triangle in every instance and every call"
    if "diagonal" in region.facts and not diagonal_is_literal(ctx, graph.nodes[int(region.facts["diagonal"])]):
        return "the diagonal of the mask is computed: that it is causal at this length does not prove it always is"
    return None


def _hands_triangle(ctx: Context, site: Site) -> bool:
    """Whether the mask is a parameter as it was passed, and the caller's source makes nothing but the triangle."""
    source, bound = site.alignment.source, site.alignment.values[site.regions[0].inputs["mask"]]
    function = source.function_at(bound.statement.lineno)
    if not isinstance(bound.expression, ast.Name) or function is None:
        return False
    name = bound.expression.id
    if name not in {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}:
        return False
    if any(names(function, name, ast.Store)) or written_in_place(function, name):
        return False
    return all(_made_as_triangle(ctx, g.nodes[r.inputs["mask"]]) for r, g in site.pairs(ctx))


def _made_as_triangle(ctx: Context, mask: Node) -> bool:
    """Whether the source shows that the expression of a recorded mask is a triangle at every length."""
    if mask.span is None:
        return False
    source = ctx.read(mask.span.path)
    here = [e for e in source.expressions_at(mask.span.line, mask.span.column) if isinstance(e, MAKES)]
    # torch records where an expression begins, and the end of its line: the longest one has to be the triangle
    return bool(here) and shows_triangle(source, max(here, key=lambda e: len(source.segment(e))))


def _from_helper(source: Source, bound: Bound) -> bool:
    """Whether a mask is what a function of the file makes of sizes alone."""
    expression = bound.expression
    if isinstance(expression, ast.Name):
        stored = list(names(scope_of(source, expression), expression.id, ast.Store))
        given = source.parents.get(stored[0]) if len(stored) == 1 else None
        changed = written_in_place(scope_of(source, expression), expression.id)
        expression = given.value if isinstance(given, ast.Assign) and not changed else expression
    return made_by_helper(source, expression)
