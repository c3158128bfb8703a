"""The device waits for the host, which launches one short operation after the other.

## What it does
Where the device has nothing to do for a tenth of the step or more, neither for want of data, nor because the host reads
a value or updates parameters, and the median kernel takes less than 10 us, the model is compiled in place behind the
statement that makes it ready: `model.compile(mode="reduce-overhead")`, which records the launches of a step once and
plays them again as a CUDA graph. Without CUDA graphs, and block by block where the model is large and has blocks that
are alike, it is measured as well, and the fastest is kept.

## Why it costs
The host needs some microseconds for each operation of PyTorch, more than the device for a small one. The device then
works at the pace of Python.

## When not to
Where memory that a CUDA graph writes in every step is read in a later one, or moves: outputs of the model that are
kept, gradients that are accumulated or kept, inputs in the host's memory or changed by the model, several calls in a
step. The model is then compiled without CUDA graphs. Where sizes vary from step to step or the run is too short to make
up for the compilation, it is only told: larger batches or several models at once would fill the device. Where random
numbers are drawn, the script compiles already, a backward pass keeps its graph (`retain_graph`), something traces the
model, or the statement that makes the model cannot be told, it is left alone.

## Fix safety
NUMERICS: the same operations in kernels that round in another order. CUDA graphs hold on to memory of their own.

## References
- "torch.compile", mode="reduce-overhead", PyTorch documentation
- fangwei123456/spikingjelly#740: 5.08 times faster at batch 8, 1.01 at batch 96
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from advisor import codemod, regional
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, LoopCall, Rewrite, Safety, Span
from advisor.patterns import graphhazards
from advisor.rule import ON_A_GPU, Context, Example, step, tensor_bytes
from advisor.source import Source
from advisor.usercode.origin import Unclear, call_at
from advisor.usercode.runlength import planned_steps

SHORT_US = 10.0  # of a kernel; its launch takes about as long
SMALL_BYTES = 1 << 23  # of a result, which a GPU writes in less time than that
REPLAYED = 'mode="reduce-overhead"'
LARGE = 500  # nodes of a graph from which on its blocks are tried one by one as well
FILL = "larger batches or several models at once would fill the device"
MODEL = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        return self.layers(x)


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 8, requires_grad=True)]


def main():
    model = Model().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for batch in {batches}:
        out = model(batch)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad({zero}){keep}
"""


def _model(batches: str = "loader", zero: str = "", keep: str = "") -> str:
    return MODEL.replace("{batches}", batches).replace("{zero}", zero).replace("{keep}", keep)


def _compiled(text: str, arguments: str = REPLAYED) -> str:
    made = '    model = Model().to("cuda")\n'
    return text.replace(made, f"{made}    model.compile({arguments})\n")


CALLED = {"module": (1.0, 0.0), "zero_grad": (1.0, 0.0)}
KERNELS = (("vectorized_elementwise_kernel", 4.0),) * 8


@dataclass(frozen=True)
class _Waits:
    """Per step: the device idle for want of launches, and the kernels that ran, with their median time."""

    idle_us: float
    kernels: int
    median_us: float


class LaunchBound(GraphRule):
    """model.compile(mode="reduce-overhead")."""

    id = "launch-bound"
    safety = Safety.NUMERICS
    needs = ("steps", "graph", "calls")
    worth = 0.1
    order = 41
    compiles = True
    title = "play the launches of the model again as a CUDA graph"
    examples = (
        Example(
            before=_model(),
            after=_compiled(_model()),
            profile=step(1_000, busy=0.3, kernels=KERNELS, calls=CALLED),
            saves=(0, 700),
        ),
        Example(  # gradients stay: without CUDA graphs
            before=_model(zero="set_to_none=False"),
            after=_compiled(_model(zero="set_to_none=False"), ""),
            profile=step(1_000, busy=0.3, kernels=KERNELS, calls=CALLED),
            saves=(0, 700),
        ),
        Example(  # outputs are kept: without CUDA graphs
            before=_model(keep="\n        outputs.append(out.detach())"),
            after=_compiled(_model(keep="\n        outputs.append(out.detach())"), ""),
            profile=step(1_000, busy=0.3, kernels=KERNELS, calls=CALLED),
        ),
        Example(  # told: too short
            before=_model(batches="range(1000)"),
            after=_model(batches="range(1000)"),
            profile=step(1_000, busy=0.3, kernels=KERNELS, calls=CALLED),
        ),
        Example(
            before=_model(),
            after=None,
            profile=step(1_000, busy=0.3, kernels=KERNELS, calls=CALLED, device_idle_us=650.0),
            because="the device waits 5.0% of the step for launches",
        ),
        Example(
            before=_model(),
            after=None,
            profile=step(1_000, busy=0.3, kernels=(("gemm", 40.0),) * 7, calls=CALLED),
            because="the median kernel takes 40 us: launches are not what is short of",
        ),
        Example(before=_model(), after=None, profile=step(1_000, device="cpu", calls=CALLED), because=ON_A_GPU),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for graph in regional.models(ctx):
            yield from self._judge(ctx, graph)

    def _judge(self, ctx: Context, graph: Graph) -> Iterator[Finding | Decline]:
        waits = _waits(ctx)
        on_gpu = ctx.profile.hardware.kind == "cuda"
        if on_gpu and waits is None:
            yield self.decline(graph.span, "cannot tell: the time in which the device is idle was not measured")
            return
        if waits is not None and waits.idle_us / ctx.step_us < regional.gate(ctx, self):
            share = f"{waits.idle_us / ctx.step_us:.1%}"
            yield self.decline(graph.span, f"the device waits {share} of the step for launches")
            return
        if waits is not None and waits.median_us >= SHORT_US:
            why = f"the median kernel takes {waits.median_us:.0f} us: launches are not what is short of"
            yield self.decline(graph.span, why)
            return
        way = regional.obstacle(ctx, graph)
        try:
            plan = regional.compilation(ctx, graph)
        except Unclear as error:
            if waits is not None:
                yield self.decline(error.span or graph.span, error.reason)
            return
        if waits is None:
            if way is None and _is_small(graph):
                yield self.decline(plan.span, ON_A_GPU, needs=("gpu",))
            return
        if way is not None and way[1] != regional.VARY:
            yield self.decline(way[0] or plan.span, way[1])
            return
        yield self._found(ctx, plan, waits, None if way is None else way[1])

    def _found(self, ctx: Context, plan: regional.Compilation, waits: _Waits, varies: str | None) -> Finding | Decline:
        cited = waits.idle_us * _share(ctx, plan.graph)
        if cited / ctx.step_us < regional.gate(ctx, self):
            return self.decline(plan.span, f"the device waits {cited / ctx.step_us:.1%} of the step for the model")
        told = varies or regional.too_short(planned_steps(ctx), cited, plan.compile_us())
        hazard = _hazard(ctx, plan)
        arguments = REPLAYED if hazard is None else ""
        try:
            values, bindings = regional.noted(plan, (arguments, arguments))
        except codemod.CannotEdit as error:
            return self.decline(plan.span, str(error))
        if told is not None:
            values = {**values, "told": f"overhead-bound, but {told}: {FILL}"}
        if plan.repeated is not None and len(plan.graph.nodes) > LARGE:
            values = {**values, "large": "yes"}
        plain = {"plain": values["whole"].replace(REPLAYED, "")} if hazard is None else {}
        return self.finding(
            plan.span,
            f"the device waits while the host launches the operations of `{plan.origin.text}` one by one",
            cited_us=round(cited, 1),
            high_us=round(cited, 1),
            evidence=(
                Evidence(what="the device waits for launches of the model, per step", value=round(cited, 1), unit="us"),
                Evidence(what="share of the step", value=round(cited / ctx.step_us, 4), unit="share"),
                Evidence(what="kernels per step", value=waits.kernels, unit="kernels"),
                Evidence(what="median kernel", value=round(waits.median_us, 1), unit="us"),
                *((Evidence(what="without CUDA graphs", value=_said(hazard), unit=""),) if hazard else ()),
            ),
            values={**values, **plain},
            bindings=bindings,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        title = self.title if "plain" in finding.values else "compile the model"
        return self.edit(finding, title, [(finding.bindings["place"], finding.values["whole"])])

    def edit(self, finding: Finding, title: str, edits: Iterable[tuple[Span, str]]) -> Rewrite:
        """A rewrite; of those of both rules that compile a model at most one is kept for each model."""
        return replace(
            super().edit(finding, title, edits), group=f"compile {finding.values['model']} at {finding.span}"
        )

    def forms(self, finding: Finding, source: Source) -> Iterator[Rewrite]:
        if "told" in finding.values:
            return
        others = []
        if "large" in finding.values:
            others.append(("blocks", "compile the blocks of the model", finding.values["text"]))
        if "plain" in finding.values:
            others.append(("plain", "compile the model without CUDA graphs", finding.values["plain"]))
        for form, title, text in others:
            yield replace(self.edit(finding, title, [(finding.bindings["place"], text)]), form=form)


def _waits(ctx: Context) -> _Waits | None:
    """What the device waits for the host's launches: not for data, not behind its reads, not in the optimizer."""
    idle, table = ctx.idle_us, ctx.profile.kernels
    rows = [row for row, kind in enumerate(table.category) if kind == "kernel" and table.step[row] >= 0]
    if idle is None or not rows or ctx.profile.hardware.kind != "cuda":
        return None
    reads = sum(felt for _, felt in (ctx.profile.facts.get("reads_us") or {}).values())
    optimizing = sum(use.idle_us for use in ctx.profile.optimizers)
    late = idle - float(ctx.profile.facts.get("data_idle_us") or 0.0) - reads - optimizing
    steps = len({table.step[row] for row in rows})
    return _Waits(max(0.0, late), len(rows) // steps, statistics.median(table.duration_us[row] for row in rows))


def _share(ctx: Context, graph: Graph) -> float:
    """The model's part of the launches outside of the optimizer; all where that is not known."""
    launches: dict[int, float] = {}
    for cost in ctx.profile.costs:
        launches[cost.graph] = launches.get(cost.graph, 0.0) + cost.launches
    total = sum(launches.values())
    return launches.get(graph.index, 0.0) / total if total else 1.0


def _is_small(graph: Graph) -> bool:
    """Whether most results of a graph are of a size that a GPU writes faster than it is launched."""
    sizes = [tensor_bytes(node) for node in graph.nodes if node.op.startswith("call_") and node.shape is not None]
    return bool(sizes) and statistics.median(sizes) < SMALL_BYTES


def _hazard(ctx: Context, plan: regional.Compilation) -> tuple[Span | None, str] | None:
    """What forbids CUDA graphs, with its place."""
    if plan.origin.wrapped:
        return plan.span, "gradients are reduced over processes while the backward pass runs"
    names = graphhazards.known_as(ctx.sources, {_last(plan.origin.text), _last(_called(ctx, plan.call))} - {""})
    return (
        graphhazards.in_the_graph(plan.graph)
        or graphhazards.in_the_loop(_calls(ctx, names), plan.graph.span)
        or graphhazards.in_the_files(ctx.sources, names)
    )


def _calls(ctx: Context, names: Collection[str]) -> list[LoopCall]:
    """The calls of the loop, of modules only those of the model."""
    return [call for call in ctx.profile.calls if call.name != "module" or _last(_called(ctx, call)) in names]


def _called(ctx: Context, call: LoopCall) -> str | None:
    """How the source spells what is called."""
    found = call_at(ctx.read(call.span.path), call.span) if call.span is not None and call.frames else None
    return None if found is None else ast.unparse(found.func)


def _last(text: str | None) -> str:
    return (text or "").rpartition(".")[2]


def _said(hazard: tuple[Span | None, str]) -> str:
    span, reason = hazard
    return reason if span is None else f"{reason} ({span})"
