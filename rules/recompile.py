"""A compiled function is compiled again and again.

## What it does
Shows where `torch.compile` is called for a function that Dynamo compiled three times more or until its limit, with what
had changed. Where all that changes are sizes of tensors and the call says nothing about them, `dynamic=True` is added,
which compiles once for all sizes. Otherwise it is told: fix or bucket the sizes, mark them with
`torch._dynamo.mark_dynamic`, hand over a tensor in place of a number, keep no growing list in the module.

## Why it costs
Every compilation takes seconds in which nothing is trained. After eight (`recompile_limit`) the function runs without
the compiler for the rest of the run, and only a warning says so.

## When not to
Sizes that are few are best compiled one by one: compilations that all fall into the warm-up are left alone. Kernels for
all sizes can be slower than those for one. What follows a graph break in its function is compiled again because of the
break: see graph-break.

## Fix safety
NUMERICS: the same operations, in kernels that the compiler makes for any size, which may round in another order.

## References
- "Recompilation", "Dynamic shapes", PyTorch documentation, torch.compiler
- stas00/ml-engineering, "training/performance": after the limit everything is eager
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Recompiled, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.places import is_own

BACKENDS = ("inductor", "eager", "aot_eager")
OFTEN = 3  # compilations of a frame after its first
GAIN = 1 / 2  # of the time behind the limit: the most that running compiled was reported to bring
SIZES = re.compile(r"(size|stride) mismatch at index|\.size\(\)|\.shape\[|\.stride\(\)")
SAYS = (
    (SIZES, "sizes of tensors change"),
    (re.compile(r"\blen\(|^not \S+$"), "a list or dictionary that it reads changes its length"),
    (re.compile(r"grad_mode|requires_grad|\.training\b"), "gradients or training mode are switched"),
    (re.compile(r"___check_obj_id|___check_type_id.*module", re.IGNORECASE), "it is given another object"),
    (re.compile(r"== -?[\d.]+|___check_type_id"), "a number that it is given changes"),
    (re.compile(r"dtype mismatch|device mismatch|dispatch key"), "dtypes or devices change"),
)
SOURCE = """\
import torch

model = torch.compile(Net(){given})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in batches:
    model(batch).sum().backward()
    optimizer.step()
"""
SIZED = tuple(f"tensor 'x' size mismatch at index {i}. expected 4, actual {4 + i}" for i in (0, 1, 2))
FRAME = Span(path="site-packages/net.py", line=9, function="forward")


def _again(*reasons: str, **parts: object) -> Recompiled:
    given = {"place": FRAME, "resumes": False, "limit": False, "count": len(reasons), "host_us": 4_000.0, **parts}
    return Recompiled(reasons=reasons, **given)  # type: ignore[arg-type]


def _source(given: str = "") -> str:
    return SOURCE.replace("{given}", given)


class Recompile(Rule):
    """torch.compile(model) -> torch.compile(model, dynamic=True) where only sizes change."""

    id = "recompile"
    safety = Safety.NUMERICS
    needs = ("steps", "calls")
    worth = 0.03
    order = 39
    examples = (
        Example(
            before=_source(),
            after=_source(", dynamic=True"),
            profile=step(10_000, calls={"torch.compile": (0, 0)}, recompiled=(_again(*SIZED),)),
            saves=(0, 4_000),
        ),
        Example(  # told: sizes were asked to be fixed
            before=_source(", dynamic=False"),
            after=_source(", dynamic=False"),
            profile=step(
                10_000,
                calls={"torch.compile": (0, 0)},
                called={"torch.compile": {"dynamic": False}},
                recompiled=(_again(*SIZED, limit=True),),
            ),
            saves=(0, 5_000),
        ),
        Example(  # told: a number that changes
            before=_source(),
            after=_source(),
            profile=step(
                10_000, calls={"torch.compile": (0, 0)}, recompiled=(_again("step == 1", "step == 2", "step == 3"),)
            ),
        ),
        Example(
            before=_source(),
            after=None,
            profile=step(10_000, calls={"torch.compile": (0, 0)}, recompiled=(_again(*SIZED, host_us=0.0),)),
            because="compiled 3 times more, all of them before the timed steps",
        ),
        Example(
            before=_source(),
            after=None,
            profile=step(10_000, calls={"torch.compile": (0, 0)}, recompiled=(_again(*SIZED, resumes=True),)),
            because="what is compiled again follows a graph break in its function: close that first",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        calls = ctx.calls("torch.compile")
        if "breaks" in ctx.profile.missing and ctx.calls("torch.compile"):
            yield self.decline(None, f"cannot tell: {ctx.profile.missing['breaks']}")
        told: set[Span] = set()
        for found in ctx.profile.recompiled:
            if found.count < OFTEN and not found.limit:
                continue
            call = _call_of(calls, found)
            span = call.span if call is not None else found.place if is_own(found.place) else None
            if span is None or span in told:
                continue
            told.add(span)
            yield self._judge(ctx, span, found, call)

    def _judge(self, ctx: Context, span: Span, found: Recompiled, call: LoopCall | None) -> Finding | Decline:
        if found.resumes:
            reason = "what is compiled again follows a graph break in its function: close that first"
            return self.decline(span, reason)
        if _asked(ctx, span):
            return self.decline(
                span, "dynamic=True is given already: what depends on a size all the same is compiled again"
            )
        if not found.limit and not found.host_us:
            return self.decline(span, f"compiled {found.count} times more, all of them before the timed steps")
        spent = sum(use.step_us or 0.0 for use in ctx.profile.optimizers)
        most = max(ctx.step_us - spent, 0.0) if found.limit else min(found.host_us, ctx.step_us)
        if most / ctx.step_us < ctx.gate(self) or not most:
            return self.decline(span, f"compiling takes {most / ctx.step_us:.1%} of the timed steps")
        why = ", ".join(dict.fromkeys(_plain(reason) for reason in found.reasons)) or "Dynamo gives no reason"
        often = f"{found.count} times more" + (", to the limit: it runs without the compiler" if found.limit else "")
        told = _told(found, call)
        return self.finding(
            span,
            f"`{found.place.function}` is compiled {often}: {why}",
            cited_us=most,
            high_us=GAIN * most if found.limit else most,
            basis="model" if found.limit else "measured",
            evidence=(
                Evidence(what="compiled again", value=found.count, unit="times"),
                Evidence(what="compiling per timed step", value=round(found.host_us, 1), unit="us"),
                Evidence(what="guards that failed", value="; ".join(dict.fromkeys(found.reasons[:3])), unit=""),
            ),
            values={} if told is None else {"told": told},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        try:
            edit = codemod.set_keywords(source, finding.span, {"dynamic": "True"})
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"give it dynamic=True: {error}")
        return self.edit(finding, "compile once for all sizes", [edit])


def _asked(ctx: Context, span: Span) -> bool:
    """Whether the call at a place asks for kernels of any size."""
    here = ctx.read(span.path).expressions_at(span.line, span.column)
    keywords = [k for node in here if isinstance(node, ast.Call) for k in node.keywords if k.arg == "dynamic"]
    return any(isinstance(k.value, ast.Constant) and k.value.value is True for k in keywords)


def _call_of(calls: tuple[LoopCall, ...], found: Recompiled) -> LoopCall | None:
    """The call that compiled a frame: the one that named its code, else the only one there is."""
    place = {"path": found.place.path, "line": found.place.line}
    named = [call for call in calls if call.facts.get("code") == place]
    if named:
        return named[0] if len({call.span for call in named}) == 1 else None
    return calls[0] if len({call.span for call in calls}) == 1 else None


def _told(found: Recompiled, call: LoopCall | None) -> str | None:
    """Why the call of the compiler is left as it is; None where `dynamic=True` is added."""
    if call is None:
        return "cannot tell which call compiles it"
    if not all(SIZES.search(reason) for reason in found.reasons) or not found.reasons:
        return "what changes is no size: hand it over as a tensor, or keep it out of what is compiled"
    if "dynamic" in call.facts:
        return f"the call asks for dynamic={call.facts['dynamic']}: bucket the sizes, or leave them to dynamic=True"
    if call.facts.get("backend", "inductor") not in BACKENDS:
        return f"whether `backend={call.facts['backend']}` compiles for all sizes is not known"
    if "options" in call.facts or str(call.facts.get("mode", "default")) not in (
        "default",
        "max-autotune-no-cudagraphs",
    ):
        return "CUDA graphs may be asked for, which are recorded for every size: bucket or pad the sizes"
    return None


def _plain(reason: str) -> str:
    return next((said for pattern, said in SAYS if pattern.search(reason)), reason)
