"""Gradients are accumulated over small micro-batches while much of the device's memory is free.

## What it does
Tells where the size of the micro-batches is set. Nothing is edited.

## Why it costs
A small micro-batch gives small products, which leave parts of the device idle, and as many launches as a large one.
With twice the size and half the number, an optimizer step sees the same samples.

## When not to
A mean over a merged micro-batch weighs every token or sample alike, a mean of means every micro-batch alike. Where
micro-batches hold unequal numbers, because padding is ignored, say, merging them changes the objective. The exact
way is to sum the losses of each and to divide all of them once by the number in the whole batch. BatchNorm normalises
over one micro-batch at a time, and dropout draws other numbers. A long sequence that is cut in parts is no batch: where
one part hands its state to the next, nothing is said. Where the device is near its floor already, or memory
is needed by longer sequences, nothing is gained.

## Fix safety
SUGGEST: never applied; the weights of samples may change.

## References
- huggingface/transformers#34191, unslothai/unsloth-zoo#6, axolotl-ai-cloud/axolotl#2262: means of means under
  accumulation
- karpathy/nanochat#59
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.model import Decline, Evidence, Finding, Rewrite, Safety, Span
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.gradfree import reads_first
from advisor.usercode.microsteps import Accumulation, accumulations

MOST = 0.6  # of the device's memory in use
FACTORIES = frozenset("torch.randn torch.rand torch.randint torch.zeros torch.ones torch.empty".split())
ADVICE = (
    "larger and fewer ones; one mean over them weighs unequal micro-batches in another way: sum the losses and divide "
    "once by the number in the whole batch"
)
LOOP = """\
ACC, MICRO = 8, 2
for step in range(100):
    tokens, labels = batch(ACC * MICRO)
    for x, y in zip(tokens.split(MICRO), labels.split(MICRO)):
        loss = loss_of(model(x), y) / ACC
        loss.backward()
    optimizer.step()
"""
CALLS = {"backward": (8.0, 0.0)}
MEMORY = (20 << 30, 80 << 30)


class HeadroomBatch(Rule):
    """Accumulation over small micro-batches with memory to spare: told."""

    id = "headroom-batch"
    safety = Safety.SUGGEST
    needs = ("steps", "calls")
    worth = 0.05
    order = 50
    examples = (
        Example(before=LOOP, after=LOOP, profile=step(20_000, calls=CALLS, busy=0.6, memory=MEMORY), saves=(0, 8_001)),
        Example(before=LOOP, after=None, profile=step(20_000, calls=CALLS, device="cpu"), because=ON_A_GPU),
        Example(
            before=LOOP,
            after=None,
            profile=step(20_000, calls=CALLS, busy=0.6, memory=(60 << 30, 80 << 30)),
            because="75% of the device's memory is in use",
        ),
        Example(
            before=LOOP,
            after=None,
            profile=step(20_000, calls=CALLS, busy=0.99, memory=MEMORY),
            because="the device is idle or above its floor for 1.0% of the step",
        ),
        Example(
            before=LOOP,
            after=None,
            profile=step(20_000, calls=CALLS, memory=MEMORY),
            because="cannot tell: the device's idle time is not known",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for found in accumulations(ctx):
            carried = _carried(ctx, found)
            if carried is None:
                yield self._judge(ctx, found, _place(ctx, found))
            else:
                yield self.decline(_place(ctx, found), f"`{carried}` goes from each micro-step to the next")

    def _judge(self, ctx: Context, found: Accumulation, place: Span) -> Finding | Decline:
        if ctx.profile.hardware.kind != "cuda":
            return self.decline(place, ON_A_GPU, needs=("gpu",))
        peak, memory = ctx.profile.peak_bytes, ctx.profile.hardware.hbm_bytes
        if not peak or not memory:
            return self.decline(place, "cannot tell: the memory in use is not known", needs=("gpu",))
        if peak / memory >= MOST:
            return self.decline(place, f"{peak / memory:.0%} of the device's memory is in use")
        if ctx.idle_us is None:
            return self.decline(place, "cannot tell: the device's idle time is not known", needs=("kineto",))
        above = sum(r.recoverable_us or 0.0 for r in ctx.profile.regions if r.span is None)
        lost_us = min(ctx.idle_us + above, ctx.step_us)
        share = lost_us / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(place, f"the device is idle or above its floor for {share:.1%} of the step")
        return self.finding(
            place,
            f"small micro-batches leave memory free: {ADVICE}",
            cited_us=ctx.step_us,
            high_us=lost_us,
            basis="bound",
            evidence=(
                Evidence(what="micro-batches per optimizer step", value=round(found.per_step, 2), unit="micro-batches"),
                Evidence(what="memory in use at most", value=round(peak / 2**30, 2), unit="GiB"),
                Evidence(what="memory of the device", value=round(memory / 2**30, 2), unit="GiB"),
                Evidence(what="time per step idle or above the floor", value=round(lost_us, 1), unit="us"),
            ),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        return self.decline(finding.span, f"told, not edited: {ADVICE}")


# ------------------------------------------------------------------------------------------------------ what is carried


def _carried(ctx: Context, found: Accumulation) -> str | None:
    """What one micro-step computes and the next one hands to a module: the state of a sequence that is cut in parts."""
    source, loop = found.source, found.loop
    places = [at for call in ctx.calls("module") if (at := loop.place(call)) is not None]
    stored = {n.id for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(loop.node, (ast.For, ast.AsyncFor)):
        stored -= {n.id for n in ast.walk(loop.node.target) if isinstance(n, ast.Name)}
    for call in (n for at in places for n in source.expressions_at(at.line, at.column) if isinstance(n, ast.Call)):
        given = [n.id for part in (*call.args, *call.keywords) for n in ast.walk(part) if isinstance(n, ast.Name)]
        for name in given:
            if name in stored and reads_first(loop.body, name):
                return name
    return None


# ------------------------------------------------------------------------------------------------------------ the place


def _place(ctx: Context, found: Accumulation) -> Span:
    """Where the size of a micro-batch is set, where that is one place, else the head of the loop over them."""
    source, node = found.source, found.loop.node
    for size in _sizes(ctx, found):
        set_at = _set_at(source, size)
        if set_at is not None:
            return set_at
    return source.span(node.test if isinstance(node, ast.While) else node.iter)


def _sizes(ctx: Context, found: Accumulation) -> Iterator[ast.expr]:
    """Expressions that say how much a micro-batch takes, the surest first."""
    source, node = found.source, found.loop.node
    inside = [n for part in ([] if isinstance(node, ast.While) else [node.iter]) for n in ast.walk(part)]
    inside += [n for statement in node.body for n in ast.walk(statement)]
    for call in (n for n in inside if isinstance(n, ast.Call)):
        last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if last == "split" and call.args:
            yield call.args[-1 if source.qualified(call.func) == "torch.split" else 0]
        if isinstance(call.func, ast.Name) and call.func.id == "range" and len(call.args) == 3:
            yield call.args[2]
    for loader in ctx.profile.loaders if len(ctx.profile.loaders) == 1 else ():
        at = loader.span
        here = source.expressions_at(at.line, at.column) if at is not None and at.path == source.path else ()
        for call in (n for n in here if isinstance(n, ast.Call)):
            yield from (k.value for k in call.keywords if k.arg == "batch_size")
    for call in (n for n in inside if isinstance(n, ast.Call) and source.qualified(n.func) in FACTORIES):
        sizes = [a for a in call.args if isinstance(a, (ast.Name, ast.Tuple))]
        if sizes:
            yield sizes[0].elts[0] if isinstance(sizes[0], ast.Tuple) and sizes[0].elts else sizes[0]


def _set_at(source: Source, size: ast.expr) -> Span | None:
    """The one assignment of a name."""
    if not isinstance(size, ast.Name):
        return None
    bound = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == size.id]
    stored = [n for n in bound if isinstance(n.ctx, ast.Store)]
    given = any(a.arg == size.id for a in ast.walk(source.tree) if isinstance(a, ast.arg))
    if len(stored) != 1 or given:
        return None
    statement = source.statement_of(stored[0])
    return source.span(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
