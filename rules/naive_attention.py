"""Softmax attention is written out, so the score matrix goes through memory several times.

## What it does
Replaces `softmax(q @ k.T * scale + causal mask) @ v` by `torch.nn.functional.scaled_dot_product_attention`. The
pattern is recognised by what the captured operations compute on sample values; the mask by its own value in the run.

## Why it costs
The T x T scores and probabilities of every head are written and read by each of the scale, mask, softmax, dropout and
cast kernels, forward and backward, and kept for the backward pass. The fused kernels compute the same sum block by
block and keep only one number per row (Dao et al. 2022). In `samples/nano_gpt` on an H200 the written-out attention
takes 192 of 533 ms, and its floor is 6 ms.

## When not to
When the probabilities are used for anything else (returned, logged, regularised); when the mask is not causal by
value, comes from the batch or from the caller, or is a triangle at this length only; when the scale is a tensor, or
when a soft cap or a bias changes the scores. Each of these is declined with its reason.

## Fix safety
NUMERICS: the same sum in another order. With dropout the draws come from another place of the random stream: the
proof compares with dropout off; checks that as many elements are dropped with the same probability in training, and
none in evaluation; and with dropout on compares mean and spread of the outputs over sixteen draws.

## References
- Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, 2022
- torch.nn.functional.scaled_dot_product_attention, PyTorch documentation
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, Graph, Node, Rewrite, Safety
from advisor.patterns import NearMiss, Region, attention_regions, default_scale
from advisor.rule import Context, Example, GraphRule, Site, step, tensor_bytes
from advisor.source import Source

MODEL = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)

    def forward(self, q, k, v):
        T = q.size(-2)
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class NaiveAttention(GraphRule):
    """softmax(q k^T) v -> scaled_dot_product_attention."""

    id = "naive-attention"
    safety = Safety.NUMERICS
    worth = 0.03
    runs = (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    )
    avoids = ("aten::_scaled_dot_product_attention_math",)
    in_library = 'ask for the fused form, such as attn_implementation="sdpa" in transformers'
    examples = (
        Example(
            before=_model(
                "att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))",
                'att = att.masked_fill(self.mask[:T, :T] == 0, float("-inf"))',
                "att = F.softmax(att, dim=-1)",
                "att = self.drop(att)",
                "y = att @ v  # weighted values",
                "return y",
            ),
            after=_model(
                "y = F.scaled_dot_product_attention(",
                "    q, k, v, is_causal=True, dropout_p=self.drop.p if self.drop.training else 0.0",
                ")  # weighted values",
                "return y",
            ),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("return torch.softmax(torch.matmul(q, k.mT) / 3.0, -1).matmul(v)"),
            after=_model("return F.scaled_dot_product_attention(q, k.mT.transpose(-2, -1), v, scale=1.0 / 3.0)"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("att = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1)", "return att @ v, att"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the attention probabilities are used elsewhere as well",
        ),
        Example(
            before=_model("return torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1) @ v"),
            after=None,
            profile=step(10_000, nodes=0.01),
            because="it takes 1.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return attention_regions(graph)

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        region = site.regions[0]
        facts = {(r.facts["causal"], r.facts["scale"], default_scale(r, g)) for r, g in site.pairs(ctx)}
        if len(facts) != 1:
            return self.decline(site.span, "calls of the same code differ in mask or scale")
        unsure = _mask_reason(ctx, graph, site, region)
        if unsure is not None:
            return self.decline(site.span, unsure)
        scale = _scale_text(site, region)
        if scale is not None and default_scale(region, graph) and _is_default(site, region):
            scale = ""
        if scale is None:
            return self.decline(site.span, "the scale is spread over several expressions")
        floor = sum(_floor_us(ctx, g, r) for r, g in site.pairs(ctx))
        query = graph.nodes[region.inputs["query"]]
        return self.finding(
            site.span,
            "softmax attention is written out: the score matrix is stored and re-read by every operation",
            cited_us=site.cost_us,
            high_us=site.cost_us - floor,
            evidence=(
                Evidence(what="time of the written-out attention per step", value=round(site.cost_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(site.cost_us / ctx.step_us, 4), unit="share"),
                Evidence(what="physical floor of the same attention", value=round(floor, 1), unit="us"),
                Evidence(what="query shape", value=str(query.shape), unit="elements", refs=(query.name,)),
                Evidence(what="calls of this code per step", value=len(site.regions), unit="calls"),
            ),
            bindings={name: site.span_of(region.inputs[name]) for name in ("query", "key", "value")},
            values={
                "causal": region.facts["causal"],
                "transposed": region.facts["transposed"],
                "scale": scale,
                "dropout": _dropout_text(site, region),
            },
            consumed=tuple(site.alignment.source.span(s) for s in site.alignment.consumed),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        query, key, value = (source.at(finding.bindings[name]) for name in ("query", "key", "value"))
        if finding.values["transposed"] == "False":
            key = f"{codemod.grouped(key)}.transpose(-2, -1)"
        arguments = [query, key, value]
        if finding.values["causal"] == "True":
            arguments.append("is_causal=True")
        if finding.values["scale"]:
            arguments.append(f"scale={finding.values['scale']}")
        if finding.values["dropout"]:
            arguments.append(f"dropout_p={finding.values['dropout']}")
        edits = codemod.call_instead(source, finding.span, "scaled_dot_product_attention", arguments, finding.consumed)
        return self.edit(finding, "use scaled_dot_product_attention", edits)


def _floor_us(ctx: Context, graph: Graph, region: Region) -> float:
    """Two products forward, four and one recomputed backward (Dao et al. 2022, 2.5 times the forward); causal needs
    half."""
    query, value = graph.nodes[region.inputs["query"]], graph.nodes[region.inputs["value"]]
    shape = query.shape or ()
    queries, width = shape[-2], shape[-1]
    keys = (value.shape or ())[-2]
    rows = 1
    for size in shape[:-2]:
        rows *= size
    forward = 2 * 2.0 * rows * queries * keys * width
    share = 0.5 if region.facts["causal"] == "True" else 1.0
    traffic = 3 * (2 * tensor_bytes(query) + 2 * tensor_bytes(value))
    return ctx.floor_us(3.5 * share * forward, traffic, query.dtype)


def _scale_text(site: Site, region: Region) -> str | None:
    """Source of the scale argument when it is not the default; "1.0" where nothing scales, None where it is spread
    out."""
    if not region.constants:
        return "1.0"
    if len(region.constants) > 1:
        return None
    (_, node, position) = region.constants["factor0"]
    bound = site.alignment.constants.get((node, position))
    if bound is None:
        return None
    text = site.alignment.source.segment(bound.expression)
    divided = isinstance(_operator_of(site, bound.expression), ast.Div)
    return f"1.0 / {codemod.grouped(text)}" if divided else text


def _is_default(site: Site, region: Region) -> bool:
    """Whether the scale is written as the root of the head dimension, so that it stays the default at every size."""
    if len(region.constants) != 1:
        return False
    (_, node, position) = region.constants["factor0"]
    expression = site.alignment.constants[(node, position)].expression
    text = "".join(site.alignment.source.segment(expression).split())
    names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
    operands = {site.text(region.inputs[name]) for name in ("query", "key")}
    return ("size(-1)" in text or "shape[-1]" in text) and names <= operands | {"math", "np", "numpy", "torch"}


def _mask_reason(ctx: Context, graph: Graph, site: Site, region: Region) -> str | None:
    """Why the mask of this code may be another one elsewhere, or None."""
    if "mask" not in region.inputs:
        return None
    source = site.alignment.source
    bound = site.alignment.values[region.inputs["mask"]]
    if source.reads_parameter(bound.expression, bound.statement):
        return "the mask is an argument of the function: another caller may pass another"
    if "diagonal" in region.facts and not _literal_diagonal(ctx, graph.nodes[int(region.facts["diagonal"])]):
        return "the diagonal of the mask is computed: that it is causal at this length does not prove it always is"
    return None


def _literal_diagonal(ctx: Context, node: Node) -> bool:
    if node.span is None or node.span.end_column is None:
        return False
    for expression in ctx.read(node.span.path).expressions_at(node.span.line, node.span.column):
        if isinstance(expression, ast.Call) and "tri" in ast.unparse(expression.func):
            given = [k.value for k in expression.keywords if k.arg == "diagonal"] or expression.args[-1:]
            return all(isinstance(value, ast.Constant) for value in given)
    return False


def _operator_of(site: Site, expression: ast.expr) -> ast.operator | None:
    parent = site.alignment.source.parents.get(expression)
    if isinstance(parent, (ast.BinOp, ast.AugAssign)):
        return parent.op
    called = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and "div" in parent.func.attr
    return ast.Div() if called else None


def _dropout_text(site: Site, region: Region) -> str:
    """The probability to drop, gated by training as the user's own call is; empty where there is no dropout."""
    if "dropout" not in region.facts:
        return ""
    node = int(region.facts["dropout"])
    source = site.alignment.source
    callee = site.alignment.calls[node]
    name = source.segment(callee)
    if (source.qualified(callee) or "").startswith("torch."):
        return _functional_dropout(site, node)
    return f"{name}.p if {name}.training else 0.0"


def _functional_dropout(site: Site, node: int) -> str:
    """F.dropout(x, p, training): its own expressions, with torch's defaults p=0.5 and training=True."""
    source = site.alignment.source

    def text(position: int, keyword: str) -> str | None:
        bound = site.alignment.constants.get((node, keyword)) or site.alignment.constants.get((node, position))
        return source.segment(bound.expression) if bound is not None else None

    probability = text(1, "p") or "0.5"
    training = text(2, "training") or text(2, "train")  # the second is torch.dropout's word
    if training in (None, "True"):
        return probability
    return f"{codemod.grouped(probability)} if {codemod.grouped(training)} else 0.0"
