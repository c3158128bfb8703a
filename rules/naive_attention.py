"""Softmax attention is written out, so the score matrix goes through memory several times.

## What it does
Replaces softmax(q k^T * scale + masks) v by one call of `torch.nn.functional.scaled_dot_product_attention`, whichever
way it is spelled: products by `@`, bmm, einsum or baddbmm, softmax by call, module or by hand, the scale on scores,
queries or keys, any order of axes. A mask stays a mask (`attn_mask`), unless it is one lower triangle at every length
and for every caller: then it becomes `is_causal=True`, and a buffer that nothing reads any more goes. Conditions of the
source (`if mask is not None`) are said in the call, or what is there now stays under an `else`. A mask that is added
and comes from a caller gets the dtype of the queries, because a mask of bool would mean something else to the fused
operation. What was read off is checked on sample values. Where flash-attn is installed, `flash_attn_func` is tried as
well on attention without a mask or with the causal one, and kept if it is faster.

## Why it costs
The T x T scores and probabilities of every head are written and read by each of the scale, mask, softmax, dropout and
cast kernels, forward and backward, and kept for the backward pass. The fused kernels compute the same sum block by
block and keep only one number per row (Dao et al. 2022). In `samples/nano_gpt` on an H200 the written-out attention
takes 192 of 533 ms, and its floor is 6 ms.

## When not to
When the probabilities are used for anything else (returned, logged, regularised); when the scale is a tensor, in any
instance or call that the files show; when a mask that is added is a number by its default or in an instance; when
anything else stands between the products (a soft cap, mixing of heads, top-k); when softmax does not run over the
keys; when removed scores get a finite value and a query may keep no key, which then attends to all keys equally; when
an operand draws random numbers before something else does; when a caller's mask would have its axes exchanged and may
have fewer of them. Each is declined with its reason. A query whose keys are all filled with `-inf` is NaN in the
written-out form and zero in the fused one: leave the form as it is where something relies on the NaN.

## Fix safety
NUMERICS: the same sum in another order. With dropout the draws come from another place of the random stream: the
proof compares with dropout off; checks that as many elements are dropped with the same probability in training, and
none in evaluation; and with dropout on compares mean and spread of the outputs over sixteen draws. Not the same: a
query without any key under a fill of `-inf` (NaN before, zero after), and scores below a finite fill such as -1e4,
which that fill does not remove (the proof refuses it where its large values reach so far). The fused operation raises
where a caller passes a mask that is a number, has fewer than two or more than four axes, or widens the batch of the
scores, and where the scale is a tensor (learned, one per head, or computed from one) in a way that is not followed: set
from outside the user's files, passed to a `forward`, or to a function around the one that attends. The form that calls
flash-attn takes it for half precision on a GPU at equal shapes of queries, keys and values, and the fused operation
otherwise; the file then imports `flash_attn`, so it needs that package wherever it runs. It is not tried where
attention drops elements, or where the files ask for deterministic algorithms or for gradients of gradients.

## References
- Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, 2022
- torch.nn.functional.scaled_dot_product_attention, PyTorch documentation
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.attending import always_causal, attention_floor_us, may_be_another, sdpa_call, shown_causal
from advisor.glance import Glance, glances
from advisor.graphrule import GraphRule, Site
from advisor.kernels import flash_attention
from advisor.model import Decline, Evidence, Finding, Form, Graph, Replacement, Safety
from advisor.patterns import Attention, NearMiss, Region, attention_regions, may_be_empty
from advisor.patterns.callsites import package_file
from advisor.patterns.masks import reads_batch
from advisor.patterns.reading import Mask
from advisor.patterns.sdpa import FUSED, MATH
from advisor.rule import Context, Example, floor_evidence, step
from advisor.source import Source

BUFFER = """\
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)
"""
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
            ).replace(BUFFER, ""),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("return torch.softmax(torch.matmul(q, k.mT) / 3.0, -1).matmul(v)"),
            after=_model("return F.scaled_dot_product_attention(q, k, v, scale=1.0 / 3.0)"),
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

    def kernels(self, ctx: Context, graph: Graph, site: Site, plain: Replacement) -> Iterator[Form]:
        """The function of flash-attn."""
        region = site.regions[0]
        return flash_attention(ctx, graph, site, region, plain) if isinstance(region, Attention) else iter(())

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        calls = [(region, g) for region, g in site.pairs(ctx) if isinstance(region, Attention)]
        if len({_form(region) for region, _ in calls}) != 1:
            return self.decline(site.span, "calls of the same code differ in mask, scale or layout")
        if ctx.needs_unfused_attention is not None:
            return self.decline(site.span, ctx.needs_unfused_attention)
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
                *floor_evidence("physical floor of the same attention", floor),
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
INSTEAD = 'fill with float("-inf") where that cannot happen, and run again'
LOST = -1e8  # one step of float32 there is more than the logarithm of any number of keys
BLURRED = (
    "a query all of whose keys are masked gets other gradients from the fused operation, which keeps one number a row "
    "and loses the sum of the row beside a mask of {fill:g}"
)


def _empty_rows(ctx: Context, calls: list[tuple[Attention, Graph]], site: Site) -> tuple[bool, str] | None:
    """(seen, reason) where a finite fill or bias meets a mask under which some query may keep no key."""
    for region, graph in calls:
        alone = sum(mask.fill is not None for mask in region.masks) == 1
        for mask in region.masks:
            if mask.fill is None:
                found = _low_bias(graph, mask)
            elif mask.fill == float("-inf"):
                found = None
            else:
                found = _finite_fill(ctx, site, graph, mask, alone, region is site.regions[0])
            if found is not None:
                return found
    return None


def _finite_fill(
    ctx: Context, site: Site, graph: Graph, mask: Mask, alone: bool, aligned: bool
) -> tuple[bool, str] | None:
    """The source tells of the first of a site's calls, which is `aligned`, what holds for all of them."""
    if aligned:
        shown, given = shown_causal(ctx, graph, site, mask), may_be_another(ctx, site, mask)
    else:
        shown, given = always_causal(ctx, graph, mask), False
    if shown and alone:
        return None
    if f"{mask.kind}_empty" in graph.nodes[mask.node].facts:
        return True, EMPTY
    if given or not alone or may_be_empty(graph, mask.node, mask.kind):
        return False, f"{EMPTY}: {INSTEAD}"
    return None


def _low_bias(graph: Graph, mask: Mask) -> tuple[bool, str] | None:
    """A mask from the batch that is added, and so low that the sum of a row without a key is lost."""
    facts = graph.nodes[mask.node].facts
    fill = float(facts.get("fill", "-inf"))
    if not float("-inf") < fill <= LOST or not reads_batch(graph, mask.node):
        return None
    return "keep_empty" in facts, f"{BLURRED.format(fill=fill)}: {INSTEAD}"
