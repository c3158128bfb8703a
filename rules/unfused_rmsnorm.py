"""RMSNorm is written out operation by operation, so every operation reads and writes the whole activation.

## What it does
Replaces a hand-written RMSNorm over the last axis or axes, `x * rsqrt(mean(x^2) + eps) * weight` in any spelling, by
`torch.nn.functional.rms_norm`. The pattern is recognised by evaluating the captured operations on sample values,
including rows far smaller than eps, so that a look-alike is told from the real one. Where Liger-Kernel is installed,
its RMSNorm is tried as well, and kept if it is faster.

## Why it costs
Square, mean, sum, root, product and the casts around them are one kernel each, and each keeps its input for the
backward pass. The fused kernel reads the activation once and keeps one number per row. The operations are
memory-bound: the time is the traffic. The fused kernel was measured at about nine times the speed of the written-out
operations (pytorch/pytorch#153666).

## When not to
When it is not the same function: eps added to the root instead of the mean square, a length bounded from below as by
F.normalize, no eps at all. When it is the same function in this run only: an axis counted from the front where the
source does not show how many axes the tensor has, a number for the size of the last axis (`x.norm(2, -1) * 16**-0.5`)
that is neither read from a shape nor what gives the weight its size; an eps that another instance may learn. When the
dtypes of input, weight and result differ in the recorded run, only the part in one dtype is replaced. A weight that
comes from outside, or that the files may make of another shape, stays outside of the fused operation; so does any
weight where the files name autocast on the CPU. Inside a compiled region the compiler has fused it already. F.rms_norm
needs torch 2.4; older than 2.8 it is not fused.

## Fix safety
NUMERICS: the same statistics in another rounding order. In half precision the fused operation computes in float32 and
rounds once, whereas `weight * (x * r).to(x.dtype)` rounds before the weight as well: the last bit may differ, towards
the exact value. The dtypes are those of the recorded run: where another run, outside of CUDA's autocast, meets an
input in half precision with a weight in float32, or computes in float32 without a cast back, the written-out norm gives
float32 and the fused one the input's dtype. The form that calls Liger-Kernel takes its kernel on a GPU in the dtype
that was recorded, and F.rms_norm otherwise; the file then imports `liger_kernel`, so it needs that package wherever it
runs. It is not tried where the files ask for gradients of gradients.

## References
- Zhang, Sennrich, Root Mean Square Layer Normalization, 2019
- torch.nn.functional.rms_norm, PyTorch documentation
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from advisor.alignment.align import Alignment
from advisor.glance import Glance, glances
from advisor.graphrule import GraphRule, Site
from advisor.kernels import liger_rms_norm
from advisor.model import Decline, Finding, Form, Graph, Replacement, Safety
from advisor.patterns import NearMiss, Region, rms_norm_regions, same_code, shape_text
from advisor.patterns.norms import RMS_NORM
from advisor.patterns.vectors import axes_shown, check_one_dtype
from advisor.patterns.widths import widths
from advisor.rule import Context, Example, step
from advisor.source import Source

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))
        self.eps = 1e-5

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class UnfusedRmsNorm(GraphRule):
    """Hand-written RMSNorm -> F.rms_norm."""

    id = "unfused-rmsnorm"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = ("aten::_fused_rms_norm",)
    title = "use F.rms_norm"
    compiler_fuses = True
    in_library = "compile the layers that hold it, or ask the library for its fused norm"
    examples = (
        Example(
            before=_model(
                "h = x.float()",
                "h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)",
                "return self.weight * h.to(x.dtype)",
            ),
            after=_model("return F.rms_norm(x, self.weight.shape, self.weight, self.eps)"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("return self._norm(x.float()).type_as(x) * (1.0 + self.weight)"),
            after=_model("return self._norm(x.float()).type_as(x) * (1.0 + self.weight)").replace(
                "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
                "F.rms_norm(x, x.shape[-1:], None, self.eps)",
            ),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("return x / (x.norm(2, dim=-1, keepdim=True) * 16**-0.5 + 1e-8) * self.weight"),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="not the same function: adds eps to the root mean square where F.rms_norm adds it to the mean "
            "square",
        ),
    )

    def glance(self, source: Source) -> Iterator[Glance]:
        """What the source alone shows, told where the script cannot run."""
        return glances(source, "rmsnorm")

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return rms_norm_regions(graph)

    def kernels(self, ctx: Context, graph: Graph, site: Site, plain: Replacement) -> Iterator[Form]:
        """Liger-Kernel's RMSNorm."""
        return liger_rms_norm(ctx, graph, site, plain)

    def check_form(self, ctx: Context, aligned: Alignment, region: Region) -> None:
        """A weight or bias that may have another shape than the normalised one, or another dtype, stays outside."""
        axes_shown(ctx.sources, aligned, region)
        check_one_dtype(ctx.sources, region)

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        region = site.regions[0]
        if _before_2_4(ctx.profile.environment.torch):
            return self.decline(site.span, "F.rms_norm needs torch 2.4")
        eps, node, position = region.constants["eps"]
        mine = (sorted(region.inputs), eps, region.facts["axes"])
        if any((sorted(r.inputs), r.constants["eps"][0], r.facts["axes"]) != mine for r in site.regions):
            return self.decline(site.span, "calls of the same code differ in eps or weight")
        if not same_code(site.pairs(ctx)):
            return self.decline(site.span, "calls of the same code compute different functions")
        bound = site.alignment.constants.get((node, position))
        eps_text = site.alignment.source.segment(bound.expression) if bound is not None else repr(eps)
        axes = region.facts["axes"].count(",") + 1
        vector = site.text(region.inputs["weight"]) if "weight" in region.inputs else None
        shown = axes_shown(ctx.sources, site.alignment, region)
        shape = shape_text(site.text(region.inputs["x"]), vector if shown else None, axes)
        if shape is None:
            return self.decline(site.span, "what is normalised has no name that its shape could be read from")
        sizes = (graph.nodes[region.inputs["x"]].shape or ())[-axes:]
        width = widths(site.alignment, graph, region, RMS_NORM)
        if width.reason is not None:
            return self.decline(site.span, width.reason)
        weight = "{weight}" if vector is not None else "None"
        return self.memory_bound(
            ctx,
            site,
            "RMSNorm is written out: every operation reads and writes the whole activation",
            "time of the written-out norm per step",
            replacement=site.replacement(
                f"F.rms_norm({{x}}, {{shape}}, {weight}, {{eps}})",
                {"eps": (eps_text, eps), "shape": (shape, sizes)},
                followed=width.followed,
            ),
        )


def _before_2_4(version: str | None) -> bool:
    """Whether torch is known to be older than the release that brought F.rms_norm."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) < (2, 4)
