"""Gradients are clipped tensor by tensor where torch clips them all at once.

## What it does
Replaces clipping by norm that is written out (a loop that adds the squared norms of the gradients, a root, a factor
`max_norm / (norm + 1e-6)` of at most 1, a loop that scales the gradients) by `torch.nn.utils.clip_grad_norm_`, and
takes `foreach=False` out of calls of that function. Only the 2-norm with torch's own 1e-6 is rewritten; everything else
is shown.

## Why it costs
Every gradient takes a kernel for its norm and one for its scaling, and `.item()` on each norm makes the host wait for
the device once per tensor. `clip_grad_norm_` takes the norms and scales the gradients of one device and dtype with a
few launches, and waits for nothing.

## When not to
`foreach=False` on a CPU, where there are no launches to save. Gradients in half precision: their norm would be rounded.
`.item()` or `float()` on the norm that is returned waits for the device once per step: worth it only where the number
is needed. Clipping stays where it is, behind `GradScaler.unscale_`. Where a gradient is NaN, torch makes all of them
NaN; a loop under `if factor < 1:`, or by `min(1, factor)` of Python, leaves the others unscaled. The finding says so
where the source has one of these.

## Fix safety
NUMERICS: the same norm in another order of summation.

## References
- torch.nn.utils.clip_grad_norm_, PyTorch documentation: norm_type, error_if_nonfinite, foreach
- torch/nn/utils/clip_grad.py, PyTorch: max_norm / (total_norm + 1e-6), clamped to 1
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety
from advisor.patterns import NearMiss, Region
from advisor.patterns.clipping import ClipPlace
from advisor.patterns.updates import GradientNorms, gradient_norms
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source

LEAST = 2  # gradients
EXACT_DTYPES = frozenset({"float32", "float64"})
NAN = ", which makes every gradient NaN where one is; here the others stay as they are"
OWN = "torch/nn/utils/clip_grad.py"
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for number, p in enumerate(self.net.parameters()):
            p.grad = torch.full_like(p, 1.0 + number)

    @torch.no_grad()
    def clip(self):
{body}
    def forward(self, x):
        self.clip()
        return self.net(x)


def get_init_inputs():
    return []


def get_inputs():
    return [torch.rand(4, 8, requires_grad=True)]
"""
WRITTEN_OUT = (
    "total = 0.0",
    "for p in self.net.parameters():",
    "    if p.grad is not None:",
    "        total += p.grad.data.norm(2) ** 2",
    "total = total ** 0.5",
    "# the usual factor",
    "coef = 0.5 / (total + 1e-6)",
    "coef = torch.clamp(coef, max=1.0)",
    "for p in self.net.parameters():",
    "    if p.grad is not None:",
    "        p.grad.data.mul_(coef)",
)


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines) + "\n")


class ClipGradSlow(GraphRule):
    """for p in params: total += p.grad.norm() ** 2 ... -> torch.nn.utils.clip_grad_norm_(params, max_norm)."""

    id = "clip-grad-slow"
    safety = Safety.NUMERICS
    worth = 0.01
    order = 60
    examples = (
        Example(
            before=_model(*WRITTEN_OUT),
            after=_model("# the usual factor", "nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("return nn.utils.clip_grad_norm_(self.net.parameters(), 0.5, foreach=False)"),
            after=_model("return nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("nn.utils.clip_grad_norm_(self.net.parameters(), 0.5, foreach=False)"),
            after=None,
            profile=step(10_000, nodes=0.2, device="cpu"),
            because="on a CPU there are no launches that foreach could save",
        ),
        Example(
            before=_model("nn.utils.clip_grad_norm_(self.net.parameters(), 0.5, foreach=False)"),
            after=None,
            profile=step(10_000, nodes=0.001),
            because="clipping takes 0.1% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        for found in gradient_norms(graph, LEAST):
            yield Region(graph=graph.index, root=found.norms[-1], inputs={}, inner=_inner(found))

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One finding for each place that takes norms of gradients one by one."""
        places: dict[tuple[str, int, int], tuple[Graph, GradientNorms]] = {}
        for graph in ctx.graphs:
            for found in gradient_norms(graph, LEAST):
                places.setdefault(found.spot.key(), (graph, found))
        for _, (graph, found) in sorted(places.items(), key=lambda item: item[0]):
            yield self._judge(ctx, graph, found)

    def _judge(self, ctx: Context, graph: Graph, found: GradientNorms) -> Finding | Decline:
        span = found.spot.span
        if span is None or (found.spot.library is not None and OWN not in found.spot.library):
            return self.decline(span, f"{found.spot.library or 'library code'} clips tensor by tensor")
        read = ClipPlace.read(ctx.read(span.path), span)
        if isinstance(read, str):
            return self.decline(span, read)
        if read.call is not None and ctx.profile.hardware.kind != "cuda":
            return self.decline(span, "on a CPU there are no launches that foreach could save")
        inner = _inner(found) | _of_lines(graph, read.lines, span.path)
        cost = ctx.cost_us(graph.index, inner)
        if cost is None:
            return self.decline(span, "cannot tell: no measured time could be linked to it", needs=("links",))
        if cost / ctx.step_us < ctx.gate(self):
            return self.decline(span, f"clipping takes {cost / ctx.step_us:.1%} of the step")
        return self._found(ctx, graph, found, read, cost, inner)

    def _found(
        self, ctx: Context, graph: Graph, found: GradientNorms, read: ClipPlace, cost: float, inner: frozenset[int]
    ) -> Finding:
        gradients = sorted({i for norm in found.norms for i in graph.nodes[norm].inputs()[:1]})
        floor = ctx.floor_us(0.0, sum(3 * tensor_bytes(graph.nodes[i]) for i in gradients), None)
        launches = sum(item.launches for node in inner if (item := ctx.costs.get((graph.index, node))) is not None)
        waits = Evidence(what="waits of the host for a norm per step", value=len(found.reads), unit="reads")
        name, nan = "torch.nn.utils.clip_grad_norm_", NAN if read.form is not None and read.form.leaves_nan else ""
        reason = read.inexact or _unsafe(graph, found, gradients, read)
        return self.finding(
            read.span,
            f"{len(gradients)} gradients are clipped one tensor after the other: use {name}{nan}",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="time of clipping per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
                Evidence(what="launches per step", value=round(launches, 1), unit="launches"),
                *((waits,) if found.reads else ()),
                *floor_evidence("floor: gradients read twice, written once", floor),
            ),
            values={} if reason is None else {"not applied": reason},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        read = ClipPlace.read(source, finding.span)
        assert isinstance(read, ClipPlace), "what was found is still there"
        return self.edit(finding, "clip all gradients at once", read.edits(source))


def _inner(found: GradientNorms) -> frozenset[int]:
    return frozenset((*found.norms, *found.scales, *found.reads))


def _of_lines(graph: Graph, lines: range, path: str) -> frozenset[int]:
    """Calls that the user's statements on these lines made."""
    return frozenset(
        node.index
        for node in graph.nodes
        if node.op.startswith("call_") and node.span is not None and node.span.path == path and node.span.line in lines
    )


def _unsafe(graph: Graph, found: GradientNorms, gradients: list[int], read: ClipPlace) -> str | None:
    """Why clip_grad_norm_ might compute something else, by what was recorded; None where it cannot."""
    dtypes = sorted({graph.nodes[i].dtype or "unknown" for i in gradients})
    if read.form is not None and (len(dtypes) > 1 or not set(dtypes) <= EXACT_DTYPES):
        return f"the gradients are {', '.join(dtypes)}: the norm would be rounded to that"
    if any(graph.nodes[i].stride is None for i in gradients):
        return "a gradient is sparse"
    if any(graph.nodes[i].requires_grad for i in gradients):
        return "the gradients are differentiated again, and the norm of clip_grad_norm_ is not"
    if read.form is not None and len(found.gradients) != len(set(found.gradients)):
        return "a gradient is clipped more than once"
    if read.form is not None and not read.form.parameters.endswith(".parameters()"):
        last = read.form.statements[-1]
        lines = range(last.lineno, (last.end_lineno or last.lineno) + 1)
        if not any((span := graph.nodes[i].span) is not None and span.line in lines for i in found.scales):
            return "no gradient was scaled in the recorded step: whether the loop can run twice is not known"
    return None
