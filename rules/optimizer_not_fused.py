"""The optimizer updates its parameters without the fused kernel.

## What it does
Adds `fused=True` where the optimizer is constructed, for the torch optimizers that have a fused kernel (Adam, AdamW,
SGD, Adagrad), and takes out a `foreach=` that would contradict it. Optimizers that one line makes in a loop are one
finding; of several of one class, each has the share of their time that it has of the elements they update.

## Why it costs
The update of one element reads parameter, gradient and two moments and writes three of them back: 28 bytes in
float32. The per-tensor and foreach forms pass over the same memory once per arithmetic operation, and launch a kernel
each time; the fused kernel passes once. On a GPU that waits for its host, what counts is the time that the host takes
for all these launches, in which the device has nothing to do.

## When not to
Sparse gradients, a subclass that overrides `step` (it accepts the flag and ignores it), parameters on a device
without a fused kernel, `differentiable=True`. On small models the optimizer's share of a step decides; below the gate
it is noise.

## Fix safety
NUMERICS: the same update in another rounding order.

## References
- torch.optim.AdamW, PyTorch documentation, `fused`
- pytorch/torchtitan#355: 1.5 to 2 points of MFU from the fused optimizer
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, OptimizerUse, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, floor_evidence, step
from advisor.source import Source

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
DEVICES = frozenset({"cuda", "cpu"})
DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
SGD = """\
from torch.optim import SGD
opt = SGD(
    params,
    lr=0.1,  # warm-up later
    {option},
)
"""


class OptimizerNotFused(Rule):
    """AdamW(params) -> AdamW(params, fused=True)."""

    id = "optimizer-not-fused"
    safety = Safety.NUMERICS
    needs = ("steps", "optimizers")
    worth = 0.02
    runs = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_")
    order = 60
    examples = (
        Example(
            before="import torch\nopt = torch.optim.AdamW(params, lr=3e-4)\n",
            after="import torch\nopt = torch.optim.AdamW(params, lr=3e-4, fused=True)\n",
            profile=step(10_000, optimizer=[150] * 12),
            saves=(0, 1_800),
        ),
        Example(
            before=SGD.replace("{option}", "foreach=True"),
            after=SGD.replace("{option}", "fused=True"),
            profile=step(10_000, optimizer=[900]),
            saves=(0, 900),
        ),
        Example(  # a device that waits for the host
            before="import torch\nopt = torch.optim.AdamW(params)\n",
            after="import torch\nopt = torch.optim.AdamW(params, fused=True)\n",
            profile=step(10_000, optimizer=[20], optimizer_idle_us=3_000),
            saves=(0, 3_020),
        ),
        Example(
            before="import torch\nopt = torch.optim.AdamW(params)\n",
            after=None,
            profile=step(10_000, optimizer=[20]),
            because="the optimizer takes 0.2% of the step",
        ),
        Example(
            before="import torch\nopt = torch.optim.Adam(params)\n",
            after=None,
            profile=step(10_000, optimizer=[900], sparse=True),
            because="its gradients are sparse: the fused kernel does not take them",
        ),
        Example(
            before="import torch\nopt = torch.optim.Adam(params, fused=True)\n",
            after=None,
            profile=step(10_000, optimizer=[900]),
            because="it is fused already",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for use in _by_place(ctx.profile.optimizers):
            yield self._judge(ctx, use)

    def _judge(self, ctx: Context, use: OptimizerUse) -> Finding | Decline:
        reason = _unsuitable(use)
        if reason is not None:
            return self.decline(use.span, reason)
        if use.step_us is None:
            return self.decline(use.span, "cannot tell: its time was not measured", needs=("kineto",))
        taken_us = use.step_us + use.idle_us
        share = taken_us / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(use.span, f"the optimizer takes {share:.1%} of the step")
        name = use.kind.rsplit(".", 1)[-1]
        if use.span is None:
            return self.decline(
                None, f"{name} takes {share:.1%} of the step and is constructed inside a library: ask it for fused=True"
            )
        floor = ctx.optimizer_floor_us(use)
        return self.finding(
            use.span,
            f"{name} updates {use.elements:,} parameters without the fused kernel",
            cited_us=taken_us,
            high_us=taken_us - floor,
            evidence=(
                Evidence(what="time of the optimizer per step", value=round(taken_us, 1), unit="us"),
                *_waiting(use),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                *floor_evidence("floor: state read and written once", floor),
                Evidence(what="parameter tensors", value=use.parameters, unit="tensors"),
            ),
            values={"name": name},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        name = finding.values["name"]
        try:
            span, text = codemod.set_keywords(source, finding.span, {"fused": "True"}, drop=("foreach",))
        except codemod.CannotEdit as error:
            return self.decline(
                finding.span, f"{name} is not constructed at this line ({error}): pass fused=True where it is"
            )
        if name not in text.split("(", 1)[0] and not _is_alias(source, finding.span, name):
            return self.decline(
                finding.span, f"this call does not name {name}: pass fused=True where it is constructed"
            )
        return self.edit(finding, f"fused {name}", [(span, text)])


def _is_alias(source: Source, span: Span, name: str) -> bool:
    """Whether the call at a position is of a name that its file binds once, to the class: `cls = torch.optim.Adam`."""
    here = (n for n in source.expressions_at(span.line, span.column) if isinstance(n, ast.Call))
    called = next((n.func.id for n in here if isinstance(n.func, ast.Name)), None)
    bound = [source.parents[n] for n in ast.walk(source.tree) if _binds(n, called)]
    value = bound[0].value if len(bound) == 1 and isinstance(bound[0], ast.Assign) else None
    return (
        value is not None
        and (source.qualified(value) or "").startswith("torch.optim.")
        and ((source.qualified(value) or "").rpartition(".")[2] == name)
    )


def _binds(node: ast.AST, name: str | None) -> bool:
    if isinstance(node, ast.arg):
        return node.arg == name
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)


def _by_place(uses: Sequence[OptimizerUse]) -> list[OptimizerUse]:
    """The optimizers of a run, those of one class that one line makes in a loop as one."""
    places: dict[tuple[object, ...], list[OptimizerUse]] = {}
    for number, use in enumerate(uses):
        alone = number if use.span is None or not use.stepped else None
        places.setdefault((use.span, use.kind, use.overrides_step, alone), []).append(use)
    return [_together(found) if len(found) > 1 else found[0] for found in places.values()]


def _together(uses: Sequence[OptimizerUse]) -> OptimizerUse:
    """Several optimizers as if they were one."""
    times = [use.step_us for use in uses if use.step_us is not None]
    return replace(
        uses[0],
        arguments={name: any(use.arguments.get(name) for use in uses) for name in ("fused", "differentiable")},
        parameters=sum(use.parameters for use in uses),
        elements=sum(use.elements for use in uses),
        devices=tuple(sorted({name for use in uses for name in use.devices})),
        dtypes=tuple(sorted({name for use in uses for name in use.dtypes})),
        sparse=any(use.sparse for use in uses),
        step_us=sum(times) if len(times) == len(uses) else None,
        idle_us=sum(use.idle_us for use in uses),
    )


def _waiting(use: OptimizerUse) -> tuple[Evidence, ...]:
    """How much of its time the device waits for the host, where it does."""
    if use.idle_us <= 0.0:
        return ()
    return (Evidence(what="of that, the device waits for the host", value=round(use.idle_us, 1), unit="us"),)


def _unsuitable(use: OptimizerUse) -> str | None:
    """Why the fused kernel cannot serve this optimizer, or None."""
    module, _, name = use.kind.rpartition(".")
    if not module.startswith("torch.optim") or name not in FUSED:
        return (
            f"{name} has no fused kernel in torch"
            if not use.overrides_step
            else f"{name} overrides step(): the flag would have no effect"
        )
    if not use.stepped:
        return "it makes no step in this run"
    if use.arguments.get("fused"):
        return "it is fused already"
    if use.sparse:
        return "its gradients are sparse: the fused kernel does not take them"
    if use.arguments.get("differentiable"):
        return "it is differentiable: the fused kernel is not"
    if not set(use.devices) <= DEVICES or len(use.devices) != 1:
        return f"its parameters are on {', '.join(use.devices) or 'no device'}"
    if not set(use.dtypes) <= DTYPES:
        return f"its parameters are {', '.join(use.dtypes)}: the fused kernel takes floating point only"
    return None
