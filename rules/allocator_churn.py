"""The allocator takes memory from the driver, and gives it back, in the steady state.

## What it does
Tells to let segments grow, `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, in the environment of the run: the
allocator reads it before its first allocation on the device, so it stands in the command or before `import torch`.
Nothing is edited.

## Why it costs
Where no cached block fits, because sizes differ from step to step, the allocator asks the driver for another. Where the
driver has none, all cached blocks are given back first, and the device runs dry before that: the next steps ask for all
of them again. Segments that grow serve every size from one range of addresses.

## When not to
In the first steps of a run every allocation is new. `empty_cache` in the loop has the same effect and is
`debug-left-on`'s to report. Where memory is nearly full, segments that grow avoid retries, but a smaller batch, or
lengths that are padded to a few sizes, may be what is missing. They need a GPU of NVIDIA or AMD on Linux; memory that
is shared with another process as a tensor may not be supported by older versions.

## Fix safety
SUGGEST: never applied. Nothing that is computed changes, but the setting belongs to the process: a launcher, or another
file that imports torch first, would make a line in the script come too late.

## References
- PyTorch documentation, CUDA semantics, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF"
- cp2k#5672: 28 % less at the peak; torchrec#4375: throughput about the same
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from advisor.model import Decline, Evidence, Finding, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source

FLUSH = "torch.cuda.empty_cache"
SETTING = "expandable_segments:True"
SCRIPT = """\
import torch

for step in range(100):
    loss = model(batch()).sum()
    loss.backward()
    optimizer.step()
"""
CHURN: Mapping[str, tuple[float, float]] = {"cudaMalloc": (4.0, 600.0), "cudaFree": (2.0, 900.0)}


class AllocatorChurn(Rule):
    """cudaMalloc and cudaFree in the steps -> expandable segments, told."""

    id = "allocator-churn"
    safety = Safety.SUGGEST
    needs = ("steps", "kineto")
    worth = 0.01
    order = 48
    examples = (
        Example(
            before=SCRIPT,
            after=SCRIPT,
            profile=step(
                10_000, products=(("aten::mm", "float32", 9_000.0),), facts={"memory_calls": CHURN, "alloc_retries": 3}
            ),
            saves=(0, 1_500),
        ),
        Example(
            before=SCRIPT,
            after=None,
            profile=step(200_000, products=(("aten::mm", "float32", 9_000.0),), facts={"memory_calls": CHURN}),
            because="calls that take memory from the driver or give it back take 0.8% of the step",
        ),
        Example(
            before=SCRIPT,
            after=None,
            profile=step(10_000, products=(("aten::mm", "float32", 9_000.0),), facts={"alloc_retries": 2}),
            because="cached memory was given back in the timed steps, but not in those that were profiled: what it "
            "costs is not known",
        ),
        Example(
            before=SCRIPT,
            after=None,
            profile=step(
                10_000,
                products=(("aten::mm", "float32", 9_000.0),),
                facts={"memory_calls": CHURN, "allocator_settings": SETTING},
            ),
            because="segments are told to grow already: pad the lengths to a few sizes, or use less memory",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        facts = ctx.profile.facts
        if ctx.profile.hardware.kind != "cuda" or any(call.per_step > 0 for call in ctx.calls(FLUSH)):
            return
        taken: Mapping[str, tuple[float, float]] = facts.get("memory_calls", {})
        cost = sum(time for _, time in taken.values())
        span = _import_of_torch(ctx)
        if cost <= 0.0:
            if facts.get("alloc_retries", 0) > 0:
                why = "cached memory was given back in the timed steps, but not in those that were profiled: "
                yield self.decline(span, f"{why}what it costs is not known")
            return
        felt = cost if ctx.idle_us is None else min(cost, ctx.idle_us)
        if felt / ctx.step_us < ctx.gate(self):
            why = f"calls that take memory from the driver or give it back take {cost / ctx.step_us:.1%} of the step"
            busy = "" if felt == cost else f", and the device is idle for only {felt:.0f} us"
            yield self.decline(span, f"{why}{busy}")
        elif _grows(ctx):
            why = "segments are told to grow already: pad the lengths to a few sizes, or use less memory"
            yield self.decline(span, why)
        elif span is None:
            yield self.decline(None, f"set PYTORCH_CUDA_ALLOC_CONF={SETTING}: the script does not import torch itself")
        else:
            yield self._finding(ctx, span, cost, felt)

    def _finding(self, ctx: Context, span: Span, cost: float, felt: float) -> Finding:
        retries = int(ctx.profile.facts.get("alloc_retries", 0))
        taken: Mapping[str, tuple[float, float]] = ctx.profile.facts["memory_calls"]
        evidence = [
            Evidence(what=f"calls of {name} per step", value=round(count, 2), unit="calls")
            for name, (count, _) in sorted(taken.items())
        ]
        if retries:
            evidence.append(Evidence(what="times all cached memory was given back", value=retries, unit="times"))
        return self.finding(
            span,
            "the allocator takes memory from the driver in the steady state",
            cited_us=cost,
            high_us=felt,
            evidence=(
                Evidence(what="the host's time in these calls per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(felt / ctx.step_us, 4), unit="share"),
                *evidence,
            ),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        how = f"run it with PYTORCH_CUDA_ALLOC_CONF={SETTING}, or set it in os.environ before this import"
        return self.decline(finding.span, f"{how} (from torch 2.9 also PYTORCH_ALLOC_CONF)")


def _grows(ctx: Context) -> bool:
    """Whether the environment or the files tell the allocator to let segments grow, or to be another one."""
    told = str(ctx.profile.facts.get("allocator_settings", ""))
    texts = [told, *(source.text for source in ctx.sources)]
    return any("expandable_segments:True" in text or "cudaMallocAsync" in text for text in texts)


def _import_of_torch(ctx: Context) -> Span | None:
    """The first statement of the script that imports torch; of the first of the user's files that does, where the
    script is not known."""
    paths = [ctx.script] if ctx.script is not None else [source.path for source in ctx.sources]
    for path in paths:
        source = ctx.read(path)
        for statement in source.tree.body:
            if isinstance(statement, ast.Import) and any(a.name.split(".")[0] == "torch" for a in statement.names):
                return source.span(statement)
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "torch":
                return source.span(statement)
    return None
