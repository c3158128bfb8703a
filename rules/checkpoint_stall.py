"""Training waits while a checkpoint is written.

## What it does
Tells where `torch.save` is called in the training loop, and what it costs per step. Nothing is edited: how often to
save and where to is for whoever has to restart the run.

## Why it costs
`torch.save` copies every tensor to the host and writes the file before it returns. On a GPU, nothing new is launched
meanwhile.

## When not to
A checkpoint that is written so rarely that it takes less than a hundredth of the time. The first save of every few is
often all that is needed: save less often, or with `torch.distributed.checkpoint.async_save`, which copies the state to
the host and writes it from a thread while training goes on; that takes host memory for one more copy, and the next
save has to wait for the last. On a GPU `torch.save` first waits for all work that was launched; this wait is not lost
and one step of it is not counted.

## Fix safety
SUGGEST: never applied; what is on disk after a crash changes.

## References
- torch.distributed.checkpoint.async_save, PyTorch documentation
- PyTorch blog, "Reducing Model Checkpointing Times by Over 10x with PyTorch Distributed Asynchronous Checkpointing"
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.model import Decline, Evidence, Finding, LoopCall, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.trainingloop import loop_of

SAVE = "torch.save"
ADVICE = "save less often, or write while training goes on: torch.distributed.checkpoint.async_save"
LOOP = """\
import torch


def save(step):
    torch.save({"model": model.state_dict(), "step": step}, f"checkpoint-{step}.pt")


for step in range(100):
    loss = model(batch()).mean()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        save(step)
"""


class CheckpointStall(Rule):
    """torch.save in the loop: told."""

    id = "checkpoint-stall"
    safety = Safety.SUGGEST
    needs = ("steps", "calls")
    worth = 0.01
    order = 13
    examples = (
        Example(
            before=LOOP, after=LOOP, profile=step(10_000, calls={SAVE: (0.2, 4_000)}, device="cpu"), saves=(0, 4_000)
        ),
        Example(before=LOOP, after=LOOP, profile=step(10_000, calls={SAVE: (0.2, 4_000)}), saves=(0, 2_000)),
        Example(
            before=LOOP,
            after=None,
            profile=step(10_000, calls={SAVE: (0.2, 2_010)}),
            because="saving takes 0.1% of the step, waiting for the device apart",
        ),
        Example(
            before=LOOP,
            after=None,
            profile=step(10_000, calls={SAVE: (0.0, 0.0)}),
            because="cannot tell: nothing was saved in the timed steps",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for call in ctx.calls(SAVE):
            outer = loop_of(call, ctx.read, ctx.sources)  # that of the epochs, where it is saved after each
            steps = [] if outer is None else [s for s in ctx.calls("optimizer.step") if outer.place(s) is not None]
            loops = (*ctx.loops, outer) if outer is not None and steps else ctx.loops
            place = next((p for loop in loops if (p := loop.place(call)) is not None), None)
            if place is not None:
                yield self._judge(ctx, call, place)

    def _judge(self, ctx: Context, call: LoopCall, place: Span) -> Finding | Decline:
        if call.host_us == 0.0:
            return self.decline(place, "cannot tell: nothing was saved in the timed steps", needs=("steps",))
        on_gpu = ctx.profile.hardware.kind == "cuda"
        lost_us = max(0.0, call.host_us - call.per_step * ctx.step_us) if on_gpu else call.host_us
        share = lost_us / ctx.step_us
        if share < ctx.gate(self) or lost_us == 0.0:
            apart = ", waiting for the device apart" if on_gpu else ""
            return self.decline(place, f"saving takes {share:.1%} of the step{apart}")
        cited_us = min(call.host_us, ctx.step_us)
        return self.finding(
            place,
            f"training waits for a checkpoint: {ADVICE}",
            cited_us=cited_us,
            high_us=min(lost_us, cited_us),
            basis="measured",
            evidence=(
                Evidence(what="saves per step", value=round(call.per_step, 4), unit="calls"),
                Evidence(what="the host's time in them per step", value=round(call.host_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
            ),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        return self.decline(finding.span, f"told, not edited: {ADVICE}")
