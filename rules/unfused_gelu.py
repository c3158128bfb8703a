"""GELU is written out, so five to eight operations pass over the widest activation of the model.

## What it does
Replaces any spelling of `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` by `F.gelu(x, approximate="tanh")` and of
`0.5 x (1 + erf(x / sqrt(2)))` by `F.gelu(x)`. The pattern is recognised by evaluating the captured operations on sample
values: constants folded or built in every call, a cube written as a power or as products, factors in any order.

## Why it costs
The feed-forward activation is four times as wide as the model. Each operation of the chain reads and writes it, forward
and backward, and keeps its input; the fused kernel reads it once and keeps nothing else.

## When not to
Inside a compiled region, where the compiler has fused the chain already, or when an intermediate is used elsewhere.
When it casts to a dtype that the input of another call may not have. `x * sigmoid(1.702 x)` (quick GELU) is another
function that no fused operation computes. `x * sigmoid(x)` is SiLU, of which unfused-gated-mlp takes care.

## Fix safety
NUMERICS: the same function. Constants rounded to fewer than six digits are another function and do not match.

## References
- Hendrycks, Gimpel, Gaussian Error Linear Units, 2016
- torch.nn.functional.gelu, PyTorch documentation
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.glance import Glance, glances
from advisor.graphrule import GraphRule, Site
from advisor.model import Decline, Finding, Graph, Safety
from advisor.patterns import NearMiss, Region, gelu_regions, same_code
from advisor.patterns.casts import another_dtype
from advisor.rule import Context, Example, step
from advisor.source import Source

MODEL = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, x):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class UnfusedGelu(GraphRule):
    """Hand-written GELU -> F.gelu."""

    id = "unfused-gelu"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = ("aten::gelu",)
    title = "use F.gelu"
    compiler_fuses = True
    examples = (
        Example(
            before=_model(
                "return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))"
            ),
            after=_model('return F.gelu(x, approximate="tanh")'),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model(
                "h = x * 2",
                "inner = 0.7978845608 * (h + 0.044715 * h * h * h)",
                "gate = (1 + inner.tanh())  # in (0, 2)",
                "y = gate * h * 0.5",
                "return y",
            ),
            after=_model("h = x * 2", 'y = F.gelu(h, approximate="tanh")', "return y"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))"),
            after=_model("return F.gelu(x)"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("return x * torch.sigmoid(1.702 * x)"),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="quick GELU: no fused operation computes x sigmoid(1.702 x), and F.gelu is another function",
        ),
        Example(
            before=_model("t = torch.tanh(0.7978845608 * (x + 0.044715 * x**3))", "return 0.5 * x * (1 + t) + t"),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="the intermediate `t` is used elsewhere",
        ),
    )

    def glance(self, source: Source) -> Iterator[Glance]:
        """What the source alone shows, told where the script cannot run."""
        return glances(source, "gelu")

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return gelu_regions(graph)

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        forms = {region.facts["alternative"] for region in site.regions}
        if len(forms) != 1 or not same_code(site.pairs(ctx)):
            return self.decline(site.span, "calls of the same code compute different functions")
        other = another_dtype(site.alignment, graph, site.regions[0])
        if other is not None:
            return self.decline(site.span, other)
        return self.memory_bound(
            ctx,
            site,
            f"GELU is written out: {len(site.regions[0].inner)} operations pass over the feed-forward activation",
            "time of the written-out GELU per step",
            replacement=site.replacement('F.gelu({x}, approximate="tanh")' if forms == {"tanh"} else "F.gelu({x})"),
        )
