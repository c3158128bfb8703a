"""The gated activation of a feed-forward block passes over its widest tensors more often than it has to.

## What it does
Replaces SiLU written out, `x * sigmoid(x)` in any spelling, by `F.silu(x)`. Where the activation is one operation
already, `F.silu(gate) * up` and its kin are pointed at as two kernels that could be one, if fusing them can save
enough; the source is left as it is. GELU written out inside a gate is replaced by unfused-gelu.

## Why it costs
Gate and up are the widest activations of the model. SiLU written out reads and writes one of them twice over and keeps
both its input and the sigmoid; activation and product as two kernels move 13 tensors forward and backward where one
fused kernel moves 8 (counted below).

## When not to
Inside a compiled region: the compiler has fused it. A product of a ready activation alone is cheap; below 2.5 times the
rule's share it is declined. When SiLU written out casts to a dtype that the input of another call may not have. Which
fused form pays is a matter of measurement: a hand-written SwiGLU kernel was 3.15 times slower than the compiled block
on one device (linkedin/Liger-Kernel#1330).

## Fix safety
NUMERICS: the same function. The pointed-at form is never applied: the gate of Liger-Kernel writes its gradients over
gate and up, which other operations and a second backward pass may still read.

## References
- Elfwing, Uchibe, Doya, Sigmoid-Weighted Linear Units, 2018
- Shazeer, GLU Variants Improve Transformer, 2020
- torch.nn.functional.silu, PyTorch documentation
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from advisor.graphrule import GraphRule, Site
from advisor.model import Decline, Evidence, Finding, Graph, Safety
from advisor.patterns import NearMiss, Region, gate_regions, same_code, silu_regions
from advisor.patterns.casts import another_dtype
from advisor.rule import Context, Example, step

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 24)

    def forward(self, x):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


# Tensors read and written by two kernels. Forward: the activation 1 and 1, the product 2 and 1. Backward: the product
# 3 and 2, the activation 2 and 1. By one kernel that computes the activation anew: 2 and 1, then 3 and 2.
PASSES, FUSED_PASSES = 13, 8
SUGGESTED = 2.5  # times the rule's share that fusing must be able to save before it is suggested


class UnfusedGatedMlp(GraphRule):
    """x * sigmoid(x) -> F.silu(x); activation(gate) * up is pointed at."""

    id = "unfused-gated-mlp"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = ("aten::silu", "aten::silu_")
    title = "use F.silu"
    compiler_fuses = True
    in_library = "compile the layers that hold it, or ask the library for its fused gate"
    examples = (
        Example(
            before=_model("gate = self.w1(x)", "return self.w2(self.w3(x) * (gate * torch.sigmoid(gate)))"),
            after=_model("gate = self.w1(x)", "return self.w2(self.w3(x) * F.silu(gate))"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("return self.w2(F.silu(self.w1(x)) * self.w3(x))"),
            after=None,
            profile=step(10_000, nodes=0.25),
            because="SwiGLU is two kernels; one could save at most 3.8% of the step",
        ),
        Example(
            before=_model("g = self.w1(x)", "s = torch.sigmoid(g)", "return self.w2(g * s * self.w3(x)) + s.mean()"),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="the intermediate `s` is used elsewhere",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return chain(silu_regions(graph), gate_regions(graph))

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        kinds = {region.facts["alternative"] for region in site.regions}
        if len(kinds) != 1 or not same_code(site.pairs(ctx)):
            return self.decline(site.span, "calls of the same code compute different functions")
        (kind,) = kinds
        if kind != "silu":
            return self._two_kernels(ctx, site, kind)
        other = another_dtype(site.alignment, graph, site.regions[0])
        if other is not None:
            return self.decline(site.span, other)
        return self.memory_bound(
            ctx,
            site,
            "SiLU is written out: the sigmoid of the widest activation is stored and read again",
            "time of the written-out SiLU per step",
            replacement=site.replacement("F.silu({x})"),
        )

    def _two_kernels(self, ctx: Context, site: Site, kind: str) -> Finding | Decline:
        saved = site.cost_us * (1 - FUSED_PASSES / PASSES)
        share = saved / ctx.step_us
        if share < SUGGESTED * ctx.gate(self):
            return self.decline(site.span, f"{kind} is two kernels; one could save at most {share:.1%} of the step")
        return self.finding(
            site.span,
            f"{kind} is two kernels: the activation is stored and read again by its product with the other half",
            cited_us=site.cost_us,
            high_us=saved,
            basis="model",
            evidence=(
                Evidence(what="time of activation and product per step", value=round(site.cost_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(site.cost_us / ctx.step_us, 4), unit="share"),
                Evidence(what="tensors moved, by two kernels", value=PASSES, unit="tensors"),
                Evidence(what="tensors moved, by one", value=FUSED_PASSES, unit="tensors"),
                Evidence(what="calls of this code per step", value=len(site.regions), unit="calls"),
            ),
            values={"not applied": "compile this block; a fused gate kernel is worth a measurement, not a promise"},
        )
