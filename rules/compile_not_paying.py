"""The script compiles by itself, and what was measured says that it does not pay.

## What it does
Takes `torch.compile` out where nothing is fused while the guards of the compiled code cost time in every step:
`model = torch.compile(model, backend="eager")`, `model.compile()`, `@torch.compile`. The result is measured against
the script as it is. Where a run is so short that no gain makes up for the seconds spent compiling, that is told.

## Why it costs
Before compiled code runs, its guards are checked on the host. A backend that hands the operations on as they are gives
nothing back for that, and neither does a function at its limit of compilations, for which every guard is checked in
vain, nor code of which no fused kernel runs on the GPU.

## When not to
A script that compiles is no finding. Closing what breaks the graph, or what makes it compile again, comes first:
graph-break speaks of every line of the user's files that breaks it, recompile of sizes that change and of what is
compiled again in the timed steps, and as long as one of them does, this rule is silent. Whether fused kernels pay is
for a measurement to say. Random numbers in compiled code are others than without the compiler, names of parameters
begin with `_orig_mod.` while a module is wrapped: where a file saves or names them, that is told. `disable=True` is no
way around that: it returns the model itself.

## Fix safety
NUMERICS: the same operations, but not fused, which round in another order.

## References
- stas00/ml-engineering, "training/performance": 5 to 7 % slower for 8 B parameters; it pays after about 600 steps
- pytorch/pytorch#98441, pytorch/pytorch#119611: 1.4 to 74 times slower, compiling included
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Rewrite, Safety, Span
from advisor.patterns import uncompiled
from advisor.regional import DROPOUT, RANDOM
from advisor.rule import Context, Example, Rule, step
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.runlength import planned_steps

UNFUSED = ("eager", "aot_eager")  # backends that run the operations as they are
MOST = 4.0  # times as fast: the most that compiling was reported to bring
ASKED = ("compiler.disable", "_dynamo.disable", "graph_break()")  # breaks that the script asks for
OFTEN = 3  # compilations of a function after its first of which recompile speaks
SIZES = ("size mismatch", "stride mismatch", ".size()", ".shape[", ".stride()")
SOURCE = """\
import torch

model = Net()
{made}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    model(x).sum().backward()
    optimizer.step()
"""
CALLED = {"torch.compile": (0.0, 0.0)}
EAGER = {"torch.compile": {"backend": "eager"}}


def _source(made: str = "", steps: str = "STEPS") -> str:
    return SOURCE.replace("{made}", made).replace("{steps}", steps)


MODEL = _source('model = torch.compile(model, backend="eager")\n')
BLOCKS = _source("for block in model.blocks:\n    block.compile(backend='eager')\n")
SHORT = _source("model = torch.compile(model)\n", "200")
INDUCTOR = _source("model = torch.compile(model)\n")


class CompileNotPaying(Rule):
    """model = torch.compile(model, backend="eager") -> the model as it is."""

    id = "compile-not-paying"
    safety = Safety.NUMERICS
    needs = ("steps", "calls", "kineto")
    worth = 0.01
    order = 40
    group = "compile"
    examples = (
        Example(
            before=MODEL,
            after=_source(),
            profile=step(2_000, calls=CALLED, called=EAGER, facts={"guards_us": 200.0}, device="cpu"),
            saves=(0, 200),
        ),
        Example(
            before=BLOCKS,
            after=_source(),
            profile=step(2_000, calls=CALLED, called=EAGER, facts={"guards_us": 200.0}, busy=0.7),
            saves=(0, 200),
        ),
        Example(
            before=INDUCTOR,
            after=_source(),
            profile=step(2_000, calls=CALLED, facts={"guards_us": 300.0}, busy=0.5, kernels=[("cutlass_gemm", 900.0)]),
            saves=(0, 300),
        ),
        Example(  # told: 200 steps of 2 ms
            before=SHORT,
            after=SHORT,
            profile=step(2_000, calls=CALLED, facts={"guards_us": 20.0, "compile_s": 30.0}, device="cpu"),
        ),
        Example(
            before=INDUCTOR,
            after=None,
            profile=step(
                2_000, calls=CALLED, facts={"guards_us": 300.0}, busy=0.5, kernels=[("triton_poi_fused_0", 900.0)]
            ),
            because="fused kernels run: whether they pay is for a measurement to say",
        ),
        Example(
            before=MODEL,
            after=None,
            profile=step(20_000, calls=CALLED, called=EAGER, facts={"guards_us": 20.0}, device="cpu"),
            because="checking guards takes 0.1% of the step",
        ),
        Example(
            before=MODEL,
            after=None,
            profile=step(2_000, calls=CALLED, called=EAGER, facts={"guards_us": 200.0}, breaks={"model(x)": "item()"}),
            because="the compiled graph breaks: close that first, see graph-break",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        places: dict[Span, list[LoopCall]] = {}
        for call in ctx.calls("torch.compile"):
            assert call.span is not None
            places.setdefault(call.span, []).append(call)
        for span, calls in places.items():
            if len(places) > 1:
                yield self.decline(span, "cannot tell which of the calls that compile costs the time")
            else:
                yield self._judge(ctx, span, calls)

    def _judge(self, ctx: Context, span: Span, calls: list[LoopCall]) -> Finding | Decline:
        others = _others(ctx)
        if others is not None:
            return self.decline(span, others)
        found = self._unpaid(ctx, span, calls)
        return found if isinstance(found, Finding) else self._short(ctx, span) or found

    def _unpaid(self, ctx: Context, span: Span, calls: list[LoopCall]) -> Finding | Decline:
        """Guards are checked for code in which nothing is fused."""
        guards = float(ctx.profile.facts.get("guards_us", 0.0))
        on_gpu = ctx.profile.hardware.kind == "cuda"
        if on_gpu and ctx.idle_us is None:
            return self.decline(span, "cannot tell: the device's idle time is not known", needs=("kineto",))
        felt = min(guards, ctx.step_us, ctx.idle_us or 0.0) if on_gpu else min(guards, ctx.step_us)
        if felt / ctx.step_us < ctx.gate(self) or not felt:
            return self.decline(span, f"checking guards takes {felt / ctx.step_us:.1%} of the step")
        why = _unfused(ctx, calls)
        if why is None:
            return self.decline(span, "fused kernels run: whether they pay is for a measurement to say")
        if not _only(calls, UNFUSED) and _draws(ctx):
            return self.decline(span, "random numbers are drawn: without the compiler they are others")
        return self.finding(
            span,
            f"compiled code costs more than it brings: {why}",
            cited_us=felt,
            high_us=felt,
            evidence=(
                Evidence(what="checking guards per step", value=round(guards, 1), unit="us"),
                Evidence(what="share of the step", value=round(felt / ctx.step_us, 4), unit="share"),
                *_compiling(ctx),
            ),
            values=_kept(ctx, span),
        )

    def _short(self, ctx: Context, span: Span) -> Finding | None:
        """Told where the whole run, however much slower, ends before compiling does."""
        planned, seconds = planned_steps(ctx), float(ctx.profile.facts.get("compile_s", 0.0))
        if not planned or seconds <= (MOST - 1.0) * planned * ctx.step_us / 1e6:
            return None
        most = min(seconds * 1e6 / planned, ctx.step_us)
        return self.finding(
            span,
            f"compiling takes {seconds:.1f} s, all {planned} steps {planned * ctx.step_us / 1e6:.1f} s",
            cited_us=most,
            high_us=most,
            evidence=(*_compiling(ctx), Evidence(what="steps of the run", value=planned, unit="steps")),
            values={"told": "a run of this length ends sooner without the compiler; a longer one may not"},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        try:
            edits = uncompiled.without(source, finding.span, [source])
        except codemod.CannotEdit as error:
            return self.decline(finding.span, str(error))
        return self.edit(finding, "do not compile", edits)


def _kept(ctx: Context, span: Span) -> dict[str, str]:
    """Why the call stays where any of the user's files would see the difference."""
    try:
        uncompiled.without(ctx.read(span.path), span, ctx.sources)
    except codemod.CannotEdit as error:
        return {"told": str(error)}
    return {}


def _others(ctx: Context) -> str | None:
    """What other rules say of the script's compilation, which comes first."""
    if "breaks" in ctx.profile.missing:
        return f"cannot tell: {ctx.profile.missing['breaks']}"
    if any(one.span is not None and not any(word in one.reason for word in ASKED) for one in ctx.profile.breaks):
        return "the compiled graph breaks: close that first, see graph-break"
    for found in ctx.profile.recompiled:
        sized = any(word in reason for reason in found.reasons for word in SIZES)
        if (found.count >= OFTEN and found.host_us and not found.limit) or (found.limit and sized) or found.resumes:
            return f"`{found.place.function}` is compiled again and again: see recompile"
    return None


def _unfused(ctx: Context, calls: list[LoopCall]) -> str | None:
    """Why nothing is fused in what is compiled; None where something is, or may be."""
    if _only(calls, UNFUSED):
        return f"backend={calls[0].facts['backend']} runs the operations as they are"
    limits = [found for found in ctx.profile.recompiled if found.limit]
    if limits:
        return f"`{limits[0].place.function}` is at the limit of compilations and runs without the compiler"
    kernels = ctx.profile.kernels.name
    if kernels and not any(name.startswith("triton_") for name in kernels):
        return "none of its kernels is a fused one"
    return None


def _only(calls: list[LoopCall], backends: tuple[str, ...]) -> bool:
    return all(call.facts.get("backend", "inductor") in backends for call in calls)


def _draws(ctx: Context) -> bool:
    named = {operation(node) for graph in ctx.graphs for node in graph.nodes if node.op.startswith("call_")}
    attention = "scaled_dot_product_attention" in named  # which may drop
    return attention or bool(named & (RANDOM | DROPOUT))


def _compiling(ctx: Context) -> tuple[Evidence, ...]:
    seconds = ctx.profile.facts.get("compile_s")
    return () if seconds is None else (Evidence(what="spent compiling", value=round(float(seconds), 1), unit="s"),)
