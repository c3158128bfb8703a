"""A step makes a tensor on the host and then moves it to the GPU.

## What it does
Gives the factory the device, `torch.zeros(n).to(device)` becomes `torch.zeros(n, device=device)`, and drops the move; a
dtype that the move asked for is asked for behind it. What a few views, `tril`, comparisons and arithmetic with numbers
make of the tensor before the move is computed on the device too. A name that holds the tensor until it is moved is
followed where nothing else on the host uses it. `torch.tensor(0.5)` becomes `torch.full((), 0.5, device=device)`. What
`expand` repeats is made `.contiguous()`, as the move did.

## Why it costs
The host fills the tensor, the driver copies pageable memory in the host's time, and the host goes on only when the
device has come as far as the copy: it cannot launch ahead. A fill on the device is one small kernel.

## When not to
`torch.tensor` of other values of Python is copied either way: build it once, outside of the step. A tensor that the
host uses too, a generator of the host, and a device that is not known yet where the factory is called are left alone.
What is the same in every step costs least where it is made once before the loop or in `__init__`; that is told only.

## Fix safety
EXACT for constants. NUMERICS for `linspace`, for `arange` of floating point and for what is computed by `exp` or a
division, which the device may round another way in the last bit. SEMANTICS for random numbers: the device has a
generator of its own, and both streams change.

## References
- PyTorch performance tuning guide, "Create tensors directly on the target device"
- TorchTidy: the anti-pattern "tensor creation on the CPU and copy"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, Rewrite, Safety
from advisor.patterns.hostmade import Moved, Unfit, moved, remade
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source

MASK = """\
import torch


def forward(x, n):
    mask = {mask}
    return x + mask
"""
ONES = "torch.ones(n, n).tril().to(x.device)"
NOISE = "torch.randn(n).to(x.device)"
LIST = "torch.tensor([1.0, 2.0]).to(x.device)"
SCALAR = "torch.tensor(0.5).cuda(non_blocking=True)"


def _mask(text: str) -> str:
    return MASK.replace("{mask}", text)


class CpuCreateThenCopy(Rule):
    """torch.zeros(n).to(device) -> torch.zeros(n, device=device)."""

    id = "cpu-create-then-copy"
    safety = Safety.EXACT
    needs = ("steps", "graph")
    worth = 0.005
    order = 15
    examples = (
        Example(
            before=_mask(ONES),
            after=_mask("torch.ones(n, n, device=x.device).tril()"),
            profile=step(10_000, moves={ONES: (400.0, 300.0)}, busy=0.9),
            saves=(0, 300),
        ),
        Example(
            before=_mask(SCALAR),
            after=_mask('torch.full((), 0.5, device="cuda")'),
            profile=step(10_000, moves={SCALAR: (100.0, 80.0)}, busy=0.9),
            saves=(0, 80),
        ),
        Example(
            before=_mask(NOISE),
            after=_mask("torch.randn(n, device=x.device)"),
            profile=step(10_000, moves={NOISE: (400.0, 300.0)}, busy=0.9),
            saves=(0, 300),
        ),
        Example(
            before=_mask(LIST),
            after=None,
            profile=step(10_000, moves={LIST: (400.0, 300.0)}, busy=0.9),
            because="its values come from Python: `torch.tensor` copies them to the device either way",
        ),
        Example(
            before=_mask(ONES),
            after=None,
            profile=step(100_000, moves={ONES: (400.0, 300.0)}, busy=0.9),
            because="making it on the host and moving it takes 0.3% of the step",
        ),
        Example(
            before=_mask(ONES),
            after=None,
            profile=step(10_000, moves={ONES: (0, 0)}, device="cpu"),
            because=ON_A_GPU,
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        gpu = ctx.profile.hardware.kind == "cuda"
        for item in moved(ctx.graphs, ctx.loops, ctx.read, gpu):
            if not gpu:
                yield self.decline(item.span, ON_A_GPU, needs=("gpu",))
                continue
            yield self._judge(ctx, item)

    def _judge(self, ctx: Context, item: Moved) -> Finding | Decline:
        measured = ctx.profile.facts.get("moves_us", {})
        held, felt, copied = (sum(measured[key][part] for key in item.keys if key in measured) for part in range(3))
        felt = felt if ctx.idle_us is None else min(felt, ctx.idle_us)
        if copied + held <= 0.0:
            return self.decline(item.span, "the time of the copy could not be linked to it", needs=("links",))
        share = (copied + felt) / ctx.step_us
        if share < ctx.gate(self) or share <= 0.0:
            return self.decline(item.span, f"making it on the host and moving it takes {share:.1%} of the step")
        try:
            made = remade(item)
        except (Unfit, codemod.CannotEdit) as error:
            return self.decline(item.span, str(error))
        return self.finding(
            item.span,
            "a tensor is made on the host and moved to the device in every step",
            cited_us=copied + max(held, felt),
            high_us=copied + felt,
            evidence=(
                Evidence(what="the copy to the device per step", value=round(copied, 1), unit="us"),
                Evidence(what="the host's time in it per step", value=round(held, 1), unit="us"),
                Evidence(what="of that, the device has nothing to do", value=round(felt, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
            ),
            values={str(n): text for n, (_, text) in enumerate(made.edits)}
            | {"safety": made.safety.value, "fixed": "yes" if made.fixed else ""},
            bindings={str(n): span for n, (span, _) in enumerate(made.edits)},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        edits = [(span, finding.values[name]) for name, span in finding.bindings.items()]
        once = "; it is the same in every step, so making it once would cost nothing" if finding.values["fixed"] else ""
        made = self.edit(finding, f"make it on the device{once}", edits)
        return replace(made, safety=Safety(finding.values["safety"]))
