"""LayerNorm is written out operation by operation, so every operation reads and writes the whole activation.

## What it does
Replaces a hand-written LayerNorm over the last axis or axes by `torch.nn.functional.layer_norm`. The pattern is
recognised by evaluating the captured operations on sample values, including rows whose variance is as small as eps, so
that a look-alike (variance over N-1, eps outside the root) is told from the real one. Where Liger-Kernel is installed,
its LayerNorm is tried as well on a norm with weight and bias, and kept if it is faster.

## Why it costs
Mean, difference, square, mean, root, quotient, product and sum are one kernel each, and each keeps its input for the
backward pass. The fused kernel reads the activation once and keeps one mean and one scale per row (Ba et al. 2016 for
the definition). The operations are memory-bound: the time is the traffic.

## When not to
When it is not the same function: an unbiased variance or eps added to the standard deviation is declined, and so is a
norm over channels that are not the last axis, for which there is no fused operation in that layout. When it is the same
function in this run only: an axis counted from the front (`x.mean(2)`) where the source does not show how many axes the
tensor has, a number that stands for the size of the last axis (`x.sum(-1) / 8`) and is neither read from a shape nor
what gives the weight its size; an eps that another instance may learn. A weight or bias that comes from outside, or
that the files may make of another shape, stays outside of the fused operation; so do both where the files name autocast
on the CPU. Inside a compiled region the compiler has fused it already.

## Fix safety
NUMERICS: the same statistics in another rounding order. A variance written as E[x^2] - E[x]^2 loses digits where the
mean is large against the spread; the fused operation does not. The dtypes are those of the recorded run: where another
run, outside of CUDA's autocast, meets an input in half precision with a weight in float32, or computes in float32
without a cast back, the written-out norm gives float32 and the fused one the input's dtype, if it takes the two at all.
The form that calls Liger-Kernel takes its kernel on a GPU in the dtype that was recorded, and F.layer_norm otherwise;
the file then imports `liger_kernel`, so it needs that package wherever it runs. It is not tried where the files ask for
gradients of gradients.

## References
- Ba, Kiros, Hinton, Layer Normalization, 2016
- torch.nn.functional.layer_norm, PyTorch documentation
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.alignment.align import Alignment
from advisor.glance import Glance, glances
from advisor.graphrule import GraphRule, Site
from advisor.kernels import liger_layer_norm
from advisor.model import Decline, Finding, Form, Graph, Replacement, Safety
from advisor.patterns import NearMiss, Region, layer_norm_regions, same_code, shape_text
from advisor.patterns.norms import LAYER_NORM
from advisor.patterns.vectors import axes_shown, check_one_dtype
from advisor.patterns.widths import widths
from advisor.rule import Context, Example, step
from advisor.source import Source

MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))
        self.bias = nn.Parameter(torch.rand(16))
        self.eps = 1e-5

    def forward(self, x):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class UnfusedLayerNorm(GraphRule):
    """Hand-written LayerNorm -> F.layer_norm."""

    id = "unfused-layernorm"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = ("aten::native_layer_norm",)
    title = "use F.layer_norm"
    compiler_fuses = True
    examples = (
        Example(
            before=_model(
                "mean = x.mean(-1, keepdim=True)",
                "var = ((x - mean) ** 2).mean(-1, keepdim=True)",
                "x = (x - mean) / torch.sqrt(var + self.eps)",
                "return self.weight * x + self.bias",
            ),
            after=_model("return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model(
                "m = x.mean(dim=-1, keepdim=True); v = x.var(dim=-1, keepdim=True, unbiased=False)",
                "return (x - m) * torch.rsqrt(v + 1e-6)",
            ),
            after=_model("return nn.functional.layer_norm(x, x.shape[-1:], None, None, 1e-6)"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model(
                "mean = x.mean(-1, keepdim=True)",
                "std = x.std(-1, keepdim=True)",
                "return self.weight * (x - mean) / (std + self.eps) + self.bias",
            ),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="not the same function: divides the variance by N-1 where F.layer_norm divides by N and "
            "adds eps to the standard deviation where F.layer_norm adds it to the variance",
        ),
    )

    def glance(self, source: Source) -> Iterator[Glance]:
        """What the source alone shows, told where the script cannot run."""
        return glances(source, "layernorm")

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return layer_norm_regions(graph)

    def kernels(self, ctx: Context, graph: Graph, site: Site, plain: Replacement) -> Iterator[Form]:
        """Liger-Kernel's LayerNorm."""
        return liger_layer_norm(ctx, graph, site, plain)

    def check_form(self, ctx: Context, aligned: Alignment, region: Region) -> None:
        """A weight or bias that may have another shape than the normalised one, or another dtype, stays outside."""
        axes_shown(ctx.sources, aligned, region)
        check_one_dtype(ctx.sources, region)

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        region = site.regions[0]
        eps, node, position = region.constants["eps"]
        mine = (sorted(region.inputs), eps, region.facts["axes"])
        if any((sorted(r.inputs), r.constants["eps"][0], r.facts["axes"]) != mine for r in site.regions):
            return self.decline(site.span, "calls of the same code differ in eps, weight or bias")
        if not same_code(site.pairs(ctx)):
            return self.decline(site.span, "calls of the same code compute different functions")
        bound = site.alignment.constants.get((node, position))
        eps_text = site.alignment.source.segment(bound.expression) if bound is not None else repr(eps)
        axes = region.facts["axes"].count(",") + 1
        vector = next((site.text(region.inputs[name]) for name in ("weight", "bias") if name in region.inputs), None)
        shown = axes_shown(ctx.sources, site.alignment, region)
        shape = shape_text(site.text(region.inputs["x"]), vector if shown else None, axes)
        if shape is None:
            return self.decline(site.span, "what is normalised has no name that its shape could be read from")
        sizes = (graph.nodes[region.inputs["x"]].shape or ())[-axes:]
        width = widths(site.alignment, graph, region, LAYER_NORM)
        if width.reason is not None:
            return self.decline(site.span, width.reason)
        weight, bias = (f"{{{name}}}" if name in region.inputs else "None" for name in ("weight", "bias"))
        return self.memory_bound(
            ctx,
            site,
            "LayerNorm is written out: every operation reads and writes the whole activation",
            "time of the written-out norm per step",
            replacement=site.replacement(
                f"F.layer_norm({{x}}, {{shape}}, {weight}, {bias}, {{eps}})",
                {"eps": (eps_text, eps), "shape": (shape, sizes)},
                followed=width.followed,
            ),
        )
