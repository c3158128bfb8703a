"""Softmax attention is written out, so the score matrix goes through memory several times.

## What it does
Replaces softmax(q k^T * scale + masks) v by one call of `torch.nn.functional.scaled_dot_product_attention`, whichever
way it is spelled: products by `@`, bmm, einsum or baddbmm, softmax by call, module or by hand, the scale on scores,
queries or keys, any order of axes. A mask stays a mask (`attn_mask`), unless it is one lower triangle at every length
and for every caller: then it becomes `is_causal=True`. Conditions of the source (`if mask is not None`) are said in the
call, or what is there now stays under an `else`. What was read off is checked on sample values.

## Why it costs
The T x T scores and probabilities of every head are written and read by each of the scale, mask, softmax, dropout and
cast kernels, forward and backward, and kept for the backward pass. The fused kernels compute the same sum block by
block and keep only one number per row (Dao et al. 2022). In `samples/nano_gpt` on an H200 the written-out attention
takes 192 of 533 ms, and its floor is 6 ms.

## When not to
When the probabilities are used for anything else (returned, logged, regularised); when the scale is a tensor; when
anything else stands between the products (a soft cap, mixing of heads, top-k); when softmax does not run over the
keys; when removed scores get a finite value and a query may keep no key, which then attends to all keys equally. Each
is declined with its reason.

## Fix safety
NUMERICS: the same sum in another order. With dropout the draws come from another place of the random stream: the
proof compares with dropout off; checks that as many elements are dropped with the same probability in training, and
none in evaluation; and with dropout on compares mean and spread of the outputs over sixteen draws.

## References
- Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, 2022
- torch.nn.functional.scaled_dot_product_attention, PyTorch documentation
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.attending import always_causal, attention_floor_us, sdpa_call
from advisor.glance import Glance, glances
from advisor.model import Decline, Evidence, Finding, Graph, Safety
from advisor.patterns import Attention, NearMiss, Region, attention_regions, may_be_empty
from advisor.patterns.callsites import package_file
from advisor.patterns.sdpa import FUSED, MATH
from advisor.rule import Context, Example, GraphRule, Site, step
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
    title = "use scaled_dot_product_attention"
    safety = Safety.NUMERICS
    worth = 0.03
    runs = FUSED
    avoids = (MATH,)
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

    def glance(self, source: Source) -> Iterator[Glance]:
        """What the source alone shows, told where the script cannot run."""
        return glances(source, "attention")

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """Attention in the user's own code; library-attention looks after the packages'."""
        for found in attention_regions(graph):
            node = graph.nodes[found.root if isinstance(found, Region) else found.node]
            if package_file(node) is None:
                yield found

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        calls = [(region, g) for region, g in site.pairs(ctx) if isinstance(region, Attention)]
        if len({_form(region) for region, _ in calls}) != 1:
            return self.decline(site.span, "calls of the same code differ in mask, scale or layout")
        empty = _empty_rows(ctx, calls, site)
        if empty is not None and empty[0]:
            return self.decline(site.span, empty[1])
        floor = sum(attention_floor_us(ctx, g, region) for region, g in calls)
        region, query = calls[0][0], graph.nodes[calls[0][0].inputs["query"]]
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
            values={} if empty is None else {"not applied": empty[1]},
            consumed=site.consumed,
            replacement=sdpa_call(ctx, graph, site, region) if empty is None else None,
        )


def _form(region: Attention) -> tuple[object, ...]:
    """What one call must have in common with another for the same source to be right for both."""
    masks = tuple((m.kind, m.sign, m.fill, m.order, m.rank, m.cast) for m in region.masks)
    factors = tuple((f.divides, f.position) for f in region.factors)
    orders = tuple(sorted(region.orders.items())), tuple(sorted(region.cut.items()))
    return masks, factors, orders, region.batch, region.causal, bool(region.split), bool(region.dropout)


EMPTY = (
    "a query that keeps no key attends to all keys equally here, because the fill is finite; the fused operation would "
    "give zero or NaN"
)


def _empty_rows(ctx: Context, calls: list[tuple[Attention, Graph]], site: Site) -> tuple[bool, str] | None:
    """(seen, reason) where a finite fill meets a mask under which some query may keep no key."""
    for region, graph in calls:
        removing = [mask for mask in region.masks if mask.fill is not None]
        for k, mask in enumerate(region.masks):
            if (
                mask.fill is None
                or mask.fill == float("-inf")
                or (always_causal(ctx, graph, mask) and len(removing) == 1)
            ):
                continue
            if f"{mask.kind}_empty" in graph.nodes[mask.node].facts:
                return True, EMPTY
            bound = site.alignment.values[region.inputs[f"mask{k}"]] if region is site.regions[0] else None
            given = bound is not None and site.alignment.source.reads_parameter(bound.expression, bound.statement)
            if given or len(removing) > 1 or may_be_empty(graph, mask.node, mask.kind):
                return False, f'{EMPTY}: fill with float("-inf") where that cannot happen, and run again'
    return None
