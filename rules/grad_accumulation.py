"""Gradients are clipped in every micro-step of an accumulation.

## What it does
Tells where a loop over micro-steps clips gradients before all of them are summed. Nothing is edited.

## Why it costs
Clipping reads every gradient twice and writes it once, and launches kernels for it. Before the optimizer step one time
is enough.

## When not to
Where a condition decides whether gradients are clipped, unless it is an option of clipping. Clipping the sum is another
computation than clipping what has been summed so far: the limit then holds for the gradient that the optimizer sees,
which is usually what was meant. Other mistakes of accumulation have no time to cite and are not reported here: a loss
that is not divided by the number of micro-steps scales the gradient, as a larger learning rate would, and means of
unequal micro-batches weigh their tokens unequally (headroom-batch says so where it proposes larger ones). Gradients
that several processes reduce in every micro-step are for ddp-settings.

## Fix safety
SUGGEST: never applied; the gradients change.

## References
- "Gradient accumulation", Automatic Mixed Precision examples, PyTorch documentation: unscale and clip once, where the
  optimizer steps
- huggingface/transformers#34191: means of means under accumulation
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.model import Decline, Evidence, Finding, Rewrite, Safety
from advisor.patterns.checkpoints import asked
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.microsteps import Accumulation, accumulations
from advisor.usercode.trainingloop import Reached, TrainingLoop

CLIPS = ("clip_grad_norm_", "clip_grad_value_")
ADVICE = "clip once, in front of the optimizer step; that clips the sum, which gives other gradients"
LOOP = """\
import torch
for step, batch in enumerate(loader):
    loss = model(batch) / 4
    loss.backward()
{clip}    if (step + 1) % 4 == 0:
{inside}        optimizer.step()
        optimizer.zero_grad()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
EVERY = LOOP.replace("{clip}", f"    {CLIP}\n").replace("{inside}", "")
ONCE = LOOP.replace("{clip}", "").replace("{inside}", f"        {CLIP}\n")
CALLS = {"backward": (4.0, 0.0)}


class GradAccumulation(Rule):
    """clip_grad_norm_ in every micro-step: told."""

    id = "grad-accumulation"
    safety = Safety.SUGGEST
    needs = ("steps", "calls", "links")
    worth = 0.01
    order = 60
    examples = (
        Example(
            before=EVERY,
            after=EVERY,
            profile=step(10_000, calls=CALLS, values={CLIP: "float32"}, nodes=0.08),
            saves=(0, 600),
        ),
        Example(
            before=EVERY,
            after=None,
            profile=step(10_000, calls=CALLS, values={CLIP: "float32"}, nodes=0.004),
            because="clipping takes 0.4% of the step",
        ),
        Example(
            before=ONCE,
            after=None,
            profile=step(10_000, calls=CALLS, values={CLIP: "float32"}, nodes=0.08),
            because="the condition at line 5 decides whether gradients are clipped",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for found in accumulations(ctx):
            for reached in found.loop.reached():
                if _clips(reached):
                    yield self._judge(ctx, found, reached)

    def _judge(self, ctx: Context, found: Accumulation, reached: Reached) -> Finding | Decline:
        span = reached.source.span(reached.call)
        line = asked(reached.source, reached.call) if reached.call is not reached.at else None
        line = line or _decides(found.loop, reached.at)
        if line is not None:
            return self.decline(span, f"the condition at line {line} decides whether gradients are clipped")
        lines = range(span.line, (span.end_line or span.line) + 1)
        costs = [
            ctx.costs[(graph.index, node.index)].total_us
            for graph in ctx.graphs
            for node in graph.nodes
            if (graph.index, node.index) in ctx.costs
            and any(f.path == span.path and f.line in lines for f in (*node.frames, node.span) if f is not None)
        ]
        if not costs:
            return self.decline(span, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost = min(sum(costs), ctx.step_us)
        share = cost / ctx.step_us
        if share < ctx.gate(self) or not cost:
            return self.decline(span, f"clipping takes {share:.1%} of the step")
        return self.finding(
            span,
            f"gradients are clipped in every one of {found.per_step:.0f} micro-steps: {ADVICE}",
            cited_us=cost,
            high_us=cost * (1.0 - 1.0 / found.per_step),
            evidence=(
                Evidence(what="time of clipping per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="micro-steps per optimizer step", value=round(found.per_step, 2), unit="micro-steps"),
            ),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        return self.decline(finding.span, f"told, not edited: {ADVICE}")


def _decides(loop: TrainingLoop, call: ast.Call) -> int | None:
    """The line of a condition around a call that may differ from one micro-step to the next; an option does not."""
    bound = {n.id for n in ast.walk(loop.node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for choice in loop.conditions(call):
        inner = list(ast.walk(choice.test))
        names = {n.id for n in inner if isinstance(n, ast.Name)}
        attributes = [n.attr for n in inner if isinstance(n, ast.Attribute)]
        kept = all("clip" in name or "norm" in name for name in attributes)  # others may hold where a run stands
        if names & bound or not names or not kept or any(isinstance(n, ast.Call) for n in inner):
            return choice.lineno
    return None


def _clips(reached: Reached) -> bool:
    name = getattr(reached.call.func, "attr", getattr(reached.call.func, "id", ""))
    return name in CLIPS
