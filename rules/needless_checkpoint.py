"""Activations are computed again in the backward pass while the memory to keep them is free.

## What it does
Turns `checkpoint(block, x, use_reentrant=False)` into `block(x)`, and removes the line that asks a library for
checkpointing (`model.gradient_checkpointing_enable()`, `set_grad_checkpointing()`, `gradient_checkpointing=True`).
Where an option asks for it, that is told.

## Why it costs
A checkpointed forward pass runs twice, once more in the backward pass: up to a quarter of a step. Its time is that of
the forward operators that autograd records while a backward pass runs them.

## When not to
When memory is needed: less than 40 % of the device's is free, or the activations do not fit. How much they take is
bounded by the inputs of the operators that are computed again, each counted as a tensor of its own, weights included;
they are to fit into 90 % of a GPU's memory beside the peak, and into half of a CPU's, which others use as well. Longer
inputs than the recorded ones need more. Less than 8 % of the step is not worth it. A reentrant checkpoint of which no
input needs a gradient trains nothing inside, and would begin to; BatchNorm and what else a forward pass keeps are
changed twice by a checkpoint, and random numbers of Python, of NumPy or of a generator of the script's own are drawn
twice; without `preserve_rng_state` other random numbers are drawn in the second pass. A function that chooses what is
kept (`context_fn`) is left alone, and so is what a compiler computes again.

## Fix safety
EXACT: the same operations, once in place of twice. Random numbers are those of the first pass, as before.

## References
- torch.utils.checkpoint, PyTorch documentation: "trades compute for memory"
- pytorch/torchtitan#97: 4.91 to 4.55 s a step, memory from 28 % to 62 %
- pytorch/torchtune#785: 9 to 10 % faster
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Rewrite, Safety, Span
from advisor.patterns import checkpoints
from advisor.patterns.recomputed import Recomputation, recomputation
from advisor.rule import Context, Example, ExampleProfile, Rule, step
from advisor.source import Source

OWN, LIBRARY = checkpoints.CHECKPOINT, "library.checkpoint"
MOST = 0.6  # of the memory in use, from which on it is needed
FITS = {"cuda": 0.9, "cpu": 0.5}  # of the memory, what is to hold the peak and what is kept
CUT_OFF = "it passes gradients of tensors only, so that what is inside, or a part of it, is not trained"
GIB = 2**30
MODEL = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def forward(self, x):
        for block in self.blocks:
            {line}
        return x


model = Net()
{enable}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
AGAIN = (("aten::addmm", 1_000.0), ("aten::gelu", 500.0))
FACTS = {"reentrant": False, "selective": False, "draws_anew": False, "cut_off": False}
MEMORY = (20 << 30, 80 << 30)


def _model(line: str, enable: str = "") -> str:
    return MODEL.replace("{line}", line).replace("{enable}", enable)


def _step(name: str = OWN, device: str = "cuda", **parts: object) -> ExampleProfile:
    given = {"calls": {name: (4.0, 0.0)}, "called": {name: FACTS}, "recomputed": AGAIN, "memory": MEMORY, **parts}
    return step(10_000, device=device, **given)


PLAIN = _model("x = checkpoint(block, x, use_reentrant=False)")
ENABLED = _model("x = block(x)", "model.gradient_checkpointing_enable()\n")
OPTION = _model("x = checkpoint(block, x, use_reentrant=False) if self.saving else block(x)")


class NeedlessCheckpoint(Rule):
    """checkpoint(block, x, use_reentrant=False) -> block(x)."""

    id = "needless-checkpoint"
    safety = Safety.EXACT
    needs = ("steps", "kineto", "calls")
    worth = 0.08
    order = 50
    examples = (
        Example(before=PLAIN, after=_model("x = block(x)"), profile=_step(), saves=(0, 1_500)),
        Example(
            before=PLAIN,
            after=_model("x = block(x)"),
            profile=_step(device="cpu"),
            saves=(0, 1_500),
        ),
        Example(before=ENABLED, after=_model("x = block(x)"), profile=_step(LIBRARY), saves=(0, 1_500)),
        Example(before=OPTION, after=OPTION, profile=_step(), saves=(0, 1_500)),  # told: the option
        Example(
            before=PLAIN,
            after=None,
            profile=_step(memory=(60 << 30, 80 << 30)),
            because="75% of the memory is in use",
        ),
        Example(
            before=PLAIN,
            after=None,
            profile=_step(recomputed=(("aten::addmm", 100.0),)),
            because="what is computed again takes 1.0% of the step",
        ),
        Example(
            before=PLAIN,
            after=None,
            profile=_step(recomputed=(*AGAIN, ("aten::native_batch_norm", 10.0))),
            because="BatchNorm is computed again, which changes its running statistics twice a step",
        ),
        Example(
            before=PLAIN,
            after=None,
            profile=_step(called={OWN: {**FACTS, "reentrant": True, "cut_off": True}}),
            because=CUT_OFF,
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        calls = ctx.calls(OWN, LIBRARY)
        if not calls:
            return
        found = recomputation(ctx.profile)
        total = sum(call.per_step for call in calls)
        for span, mine in _places(ctx, calls):
            if any(call.facts.get("cut_off") for call in mine):
                yield self.decline(span, CUT_OFF)
                continue
            if found is None or not total:
                yield self.decline(span, "nothing was computed again in the profiled steps")
                continue
            share = sum(call.per_step for call in mine) / total
            yield self._judge(ctx, span, mine, found, found.time_us * share)

    def _judge(
        self, ctx: Context, span: Span | None, calls: list[LoopCall], found: Recomputation, time_us: float
    ) -> Finding | Decline:
        time_us = min(time_us, ctx.step_us)
        share = time_us / ctx.step_us
        if share < ctx.gate(self) or not time_us:
            return self.decline(span, f"what is computed again takes {share:.1%} of the step")
        reason = _unlike(ctx, calls, found) or _memory(ctx, found)
        if reason is not None or span is None:
            return self.decline(span, reason or "cannot tell which line of the user's files asks for it")
        told = _told(ctx, span, calls)
        every = "" if time_us >= min(found.time_us, ctx.step_us) else ", by its share of the checkpoints"
        peak = (ctx.profile.peak_bytes or 0) / GIB
        return self.finding(
            span,
            "activations are computed again in the backward pass while memory is free",
            cited_us=time_us,
            high_us=time_us,
            evidence=(
                Evidence(what=f"time computing again per step{every}", value=round(time_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="checkpoints per step", value=sum(round(c.per_step, 2) for c in calls), unit="calls"),
                Evidence(what="memory in use at most", value=round(peak, 2), unit="GiB"),
                Evidence(what="kept without it, at most", value=round(found.kept_bytes / GIB, 3), unit="GiB"),
                Evidence(what="memory", value=round((_memory_bytes(ctx) or 0) / GIB, 2), unit="GiB"),
            ),
            values={} if told is None else {"told": told},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        call = checkpoints.call_at(source, finding.span)
        assert call is not None
        try:
            if source.qualified(call.func) == OWN:
                edits = [checkpoints.plain_call(source, call)]
            else:
                edits = checkpoints.not_enabled(source, call)
        except codemod.CannotEdit as error:
            return self.decline(finding.span, str(error))
        return self.edit(finding, "keep the activations", edits)


def _places(ctx: Context, calls: tuple[LoopCall, ...]) -> list[tuple[Span | None, list[LoopCall]]]:
    """The lines that ask for checkpoints, each with its calls; those of a library together."""
    places: dict[Span | None, list[LoopCall]] = {}
    asking = checkpoints.enabling(ctx.sources)
    enabled = asking[0][0].span(asking[0][1]) if len(asking) == 1 else None
    for call in calls:
        places.setdefault(call.span if call.name == OWN else enabled, []).append(call)
    return sorted(places.items(), key=lambda item: (item[0] is None, str(item[0])))


def _unlike(ctx: Context, calls: list[LoopCall], found: Recomputation) -> str | None:
    """Why the step would be another one without the checkpoints."""
    if any(call.facts.get("selective") for call in calls):
        return "the script chooses what is kept and what is computed again"
    if any(call.facts.get("draws_anew") for call in calls):
        return "without preserve_rng_state other random numbers are drawn in what is computed again"
    if any("batch_norm" in name for name in found.operators):
        return "BatchNorm is computed again, which changes its running statistics twice a step"
    return checkpoints.repeats(ctx.sources, [frame for call in calls for frame in call.frames])


def _memory_bytes(ctx: Context) -> int | None:
    on_gpu = ctx.profile.hardware.kind == "cuda"
    return ctx.profile.hardware.hbm_bytes if on_gpu else ctx.profile.facts.get("host_memory_bytes")


def _memory(ctx: Context, found: Recomputation) -> str | None:
    """Why the activations could not be kept."""
    peak, memory = ctx.profile.peak_bytes, _memory_bytes(ctx)
    if not peak or not memory:
        return "cannot tell: the memory in use, or that of the device, is not known"
    if peak / memory >= MOST:
        return f"{peak / memory:.0%} of the memory is in use"
    if peak + found.kept_bytes > FITS["cuda" if ctx.profile.hardware.kind == "cuda" else "cpu"] * memory:
        return f"up to {found.kept_bytes / GIB:.1f} GiB would be kept beside {peak / GIB:.1f} of {memory / GIB:.1f} GiB"
    return None


def _told(ctx: Context, span: Span, calls: list[LoopCall]) -> str | None:
    """Why the call is left for the author to change; None where it is edited."""
    source = ctx.read(span.path)
    call = checkpoints.call_at(source, span)
    if call is None:
        return "no call stands at the recorded place"
    if calls[0].name == LIBRARY:
        return None
    if source.qualified(call.func) != OWN:
        return "it is called under another name or for a sequence: call the layers themselves"
    line = checkpoints.asked(source, call)
    inner = {frame for one in calls for frame in _inside(ctx, one)}
    for frame in sorted(inner, key=str):
        other = ctx.read(frame.path)
        around = checkpoints.call_at(other, frame)
        line = line or (checkpoints.asked(other, around) if around is not None else None)
    return None if line is None else f"the condition at line {line} asks for it: leave that off"


def _inside(ctx: Context, call: LoopCall) -> tuple[Span, ...]:
    """The positions behind the one in the training loop through which a call was made."""
    outer = [place for loop in ctx.loops if (place := loop.place(call)) is not None]
    return call.frames[call.frames.index(outer[0]) + 1 : -1] if outer else ()
