"""Large products are computed in float32 where the device has tensor cores for bfloat16.

## What it does
Puts `with torch.autocast(device_type="cuda", dtype=torch.bfloat16):` around the statements of the training loop from
the call of the model to the loss that is differentiated, and nothing else: the backward pass runs in the dtypes of the
forward pass by itself, and the optimizer keeps float32 weights. bfloat16 needs no GradScaler.

## Why it costs
An H100 multiplies 989e12 numbers per second in bfloat16, half of that in TF32 and a fifteenth in float32, and the
activations take half the memory. The estimate is the time of the large float32 products of a step against what the
device's bfloat16 peak would take for them.

## When not to
Products of a few microseconds: each cast takes as long. A step in which the device waits for the host most of the time.
A device older than compute capability 8.0: float16 with a GradScaler, which is told and not written. Losses written by
hand whose last sum is not one that autocast computes in float32, values of the forward pass that are used on in a way
bfloat16 breaks (`.numpy()`), recurrent layers (autocast makes them float16), `binary_cross_entropy` (autocast refuses
it), gradients of gradients, DataParallel, and a loop that a library holds: the reason is given at the line. Where the
files name autocast, a GradScaler or a half type, what to compute in it has been decided already.

## Fix safety
PRECISION: products in bfloat16 have 8 bits of mantissa. Applied only with `--allow precision`; the loss is compared
over the steps of the proof.

## References
- torch.amp, PyTorch documentation: autocast "should wrap only the forward pass(es) of your network, including the loss
  computation(s). Backward passes under autocast are not recommended."
- huggingface/transformers#16588, microsoft/retrochimera#36, mittagessen/kraken#505: 2.2 times faster from TF32, 10 to
  15 % more from bfloat16; 2.7 times from both; no difference
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor import blocks, codemod
from advisor.model import Decline, Evidence, Finding, Graph, LoopCall, Rewrite, Safety, Span
from advisor.patterns.forwardpass import ForwardPass, branches, forward_pass, inside, losses, parting, used_on
from advisor.patterns.lowered import UPPER, hazards, is_product
from advisor.patterns.precision import Arithmetic, arithmetic, capability
from advisor.patterns.settled import holds_the_loop, settled
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source

LEAST = (8, 0)  # compute capability with bfloat16 tensor cores
HALF = (7, 0)  # with float16 ones
AMD = ("gfx908", "gfx90a", "gfx94", "gfx95")
IDLE = 0.5  # share of the step above which the device waits for the host, not the host for the device
OLD = "autocast in float16 with a GradScaler, from before backward to the optimizer's step: the device has no bfloat16"
LOOP = """\
import torch
import torch.nn.functional as F

for x, y in loader:
    optimizer.zero_grad()
{forward}    loss.backward()
    optimizer.step()
"""
PLAIN = ("logits = model(x)", "# the usual", "loss = F.cross_entropy(logits, y)")
WITH = 'with torch.autocast(device_type="cuda", dtype=torch.bfloat16):'
MADE = {"module": (1.0, 0.0)}
LARGE = (("aten::mm", "float32", 300.0),) * 20
HERE = "the large float32 products of the loop take {share:.1%} of the step"


def _loop(*lines: str) -> str:
    return LOOP.replace("{forward}", "".join(f"    {line}\n" for line in lines))


class NoMixedPrecision(Rule):
    """logits = model(x); loss = ... -> with torch.autocast(device_type="cuda", dtype=torch.bfloat16): ..."""

    id = "no-mixed-precision"
    safety = Safety.PRECISION
    needs = ("steps", "calls")
    worth = 0.2
    order = 20
    examples = (
        Example(
            before=_loop(*PLAIN),
            after=_loop(WITH, *(f"    {line}" for line in PLAIN)),
            profile=step(10_000, products=LARGE, calls=MADE, arch="sm_90"),
            saves=(0, 6_000),
        ),
        Example(
            before=_loop("loss = F.cross_entropy(model(x), y)"),
            after=None,
            profile=step(10_000, products=LARGE, calls=MADE, device="cpu"),
            because=ON_A_GPU,
        ),
        Example(
            before=_loop("loss = F.cross_entropy(model(x), y)"),
            after=None,
            profile=step(10_000, products=(("aten::mm", "float32", 6.0),) * 900, calls=MADE, arch="sm_90"),
            because="its float32 products take at most 6 us each: the casts of autocast would take as long",
        ),
        Example(
            before=_loop("loss = F.cross_entropy(model(x), y)"),
            after=None,
            profile=step(10_000, products=LARGE[:2], calls=MADE, arch="sm_90"),
            because=HERE.format(share=0.06),
        ),
        Example(
            before=_loop("with torch.autocast('cuda', enabled=amp):", "    loss = F.cross_entropy(model(x), y)"),
            after=None,
            profile=step(10_000, products=LARGE, calls=MADE, arch="sm_90"),
            because="the files use autocast already (example.py:6)",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        differentiated = [c for c in ctx.calls("backward") if c.per_step > 0] or list(ctx.calls("backward"))
        called = [c for c in ctx.calls("module") if c.facts.get("training", True) and not _is_loss(c)]
        if not differentiated or not called:
            return
        place = _place(called, differentiated[0])
        reason = settled(ctx.sources, ctx.script) or holds_the_loop(ctx.read(place.path), differentiated[0])
        if reason is not None:
            yield self.decline(place, reason)
        elif ctx.profile.hardware.kind != "cuda":
            if any(node.dtype == "float32" and is_product(node) for g in ctx.graphs for node in g.nodes):
                yield self.decline(place, ON_A_GPU, needs=("gpu",))
        else:
            yield self._measured(ctx, place, called, differentiated)

    def _measured(
        self, ctx: Context, place: Span, called: list[LoopCall], differentiated: list[LoopCall]
    ) -> Finding | Decline:
        hardware, products = ctx.profile.hardware, arithmetic(ctx.profile)
        single, able = products.of("float32"), capability(hardware)
        if not single.calls:
            return self.decline(place, "no product in float32 was recorded")
        if products.of("float64").time_us:
            return self.decline(place, "some products are computed in float64: the precision is chosen on purpose")
        if able is None and not (hardware.arch or "").startswith(AMD):
            return self.decline(place, f"cannot tell: what {hardware.name} computes in is not known")
        if able is not None and able < HALF:
            return self.decline(place, f"{hardware.name} has no tensor cores")
        if not single.large_us:
            most = f"{single.longest_us:.0f} us"
            return self.decline(
                place, f"its float32 products take at most {most} each: the casts of autocast would take as long"
            )
        share, idle = single.large_us / ctx.step_us, (ctx.idle_us or 0.0) / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(place, HERE.format(share=share))
        if idle > IDLE:
            return self.decline(
                place, f"the device is idle in {idle:.0%} of the step: it does not wait for its products"
            )
        return self._found(ctx, place, products, _chosen(ctx, called, differentiated, able))

    def _found(self, ctx: Context, place: Span, products: Arithmetic, found: ForwardPass | str) -> Finding:
        single = products.of("float32")
        flops = dict(ctx.profile.facts.get("model_flops_by_dtype", {}))
        work = (flops.get("float32", 0.0) + flops.get("tfloat32", 0.0)) * single.large_us / single.time_us
        reason = found if isinstance(found, str) else None
        bindings = {}
        if isinstance(found, ForwardPass):
            bindings = {
                "first": found.source.span(found.statements[0]),
                "last": found.source.span(found.statements[-1]),
            }
        return self.finding(
            place,
            f"large products in float32 take {single.large_us / ctx.step_us:.0%} of the step, and bfloat16 is not used",
            cited_us=single.large_us,
            high_us=single.large_us - ctx.floor_us(work, 0.0, "bfloat16"),
            evidence=(
                Evidence(what="time of large float32 products per step", value=round(single.large_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(single.large_us / ctx.step_us, 4), unit="share"),
                Evidence(what="float32 products per step", value=round(single.calls, 1), unit="operators"),
                Evidence(what="the longest of them", value=round(single.longest_us, 1), unit="us"),
                Evidence(what="precision of float32 products", value=_setting(ctx), unit=""),
            ),
            bindings=bindings,
            values={} if reason is None else {"not applied": reason},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        first, last = finding.bindings["first"], finding.bindings["last"]
        block = next(source.block_of(node) for node in source.statements_at(first.line) if source.span(node) == first)
        chosen = [s for s in block if first.line <= s.lineno and (s.end_lineno or s.lineno) <= (last.end_line or 0)]
        edits, header = codemod.named_modules(source, first.line, WITH)
        try:
            edits = [*edits, *blocks.put_under(source, chosen, header)]
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the statements up to the loss cannot be put under autocast: {error}")
        return self.edit(finding, "bfloat16 autocast around model and loss", edits)


def _is_loss(call: LoopCall) -> bool:
    return str(call.facts.get("class", "")).endswith("Loss")


def _setting(ctx: Context) -> str:
    return str(ctx.profile.facts.get("matmul_precision", "not known"))


def _place(called: list[LoopCall], backward: LoopCall) -> Span:
    """The model's call as the function that differentiates the loss makes it, else the call itself."""
    for call in called:
        pair = parting(call, backward)
        if pair is not None:
            return pair[0]
    span = called[0].span
    assert span is not None, "calls with frames have a span"
    return span


def _chosen(
    ctx: Context, called: list[LoopCall], differentiated: list[LoopCall], able: tuple[int, int] | None
) -> ForwardPass | str:
    """The statements to compute in bfloat16, or why none can be chosen."""
    if able is not None and able < LEAST:
        return OLD
    if len({str(call.span) for call in differentiated}) > 1:
        lines = ", ".join(str(call.span) for call in differentiated)
        return f"the step differentiates at several places ({lines}): put autocast around each forward pass by hand"
    found: ForwardPass | str = "the model is not called in the function that differentiates the loss"
    for call in called:
        pair = parting(call, differentiated[0])
        one = forward_pass(ctx.read(pair[0].path), call, differentiated[0]) if pair is not None else found
        if isinstance(one, str):
            found = one if isinstance(found, str) else found
        elif isinstance(found, str) or one.lines.start < found.lines.start:
            found = one
    return found if isinstance(found, str) else _unsafe(ctx, found) or found


def _unsafe(ctx: Context, found: ForwardPass) -> str | None:
    """Why the forward pass may not compute what it should under autocast; None where nothing speaks against it."""
    for call in ctx.calls("backward", "optimizer.step"):
        if any(found.holds(frame) for frame in call.frames):
            return f"the statements up to the loss hold the {call.name.replace('optimizer.step', 'optimizer')} as well"
    used = used_on(found)
    if used is not None:
        return f"`{used.name}` is used in line {used.line}, where it would be bfloat16: `.float()` there first"
    through = {_line(c.span) for c in ctx.calls("module") if any(found.holds(frame) for frame in c.frames)}
    graphs = [g for g in ctx.profile.graphs if g.kind == "eager" or g.span is None or _line(g.span) in through]
    if any(not g.training for g in graphs) or _without_gradients(found):
        return "part of the forward pass runs without gradients, and autocast would keep its copies of the weights"
    if not any(is_product(node) for g in graphs for node in g.nodes):
        return "the operations of the model were not recorded: what autocast would make of them is not known"
    other = _not_recorded(ctx, found, graphs)
    if other is not None:
        return f"line {other.lineno} did not run: what its loss would be rounded to is not known"
    for graph in graphs:
        for hazard in hazards(graph):
            if graph.kind != "eager" or any(found.holds(frame) for frame in hazard.node.frames):
                return f"{hazard.why}: `{hazard.node.target}` ({hazard.node.span or hazard.node.module or 'model'})"
    return None


def _line(span: Span | None) -> tuple[str, int] | None:
    return None if span is None else (span.path, span.line)


def _without_gradients(found: ForwardPass) -> bool:
    switches = ("torch.no_grad", "torch.inference_mode")
    parts = (node for node in inside(found.statements) if isinstance(node, (ast.Name, ast.Attribute)))
    return any(found.source.qualified(node) in switches for node in parts)


def _not_recorded(ctx: Context, found: ForwardPass, graphs: Sequence[Graph]) -> ast.expr | None:
    """A loss in a branch that did not run which autocast may not compute in float32."""
    nodes = (frame for graph in graphs for node in graph.nodes for frame in node.frames)
    calls = (frame for call in ctx.calls("module") for frame in call.frames)
    ran = {frame.line for frame in (*nodes, *calls) if found.holds(frame)}
    spans = [c.span for c in ctx.calls("module") if _is_loss(c) and c.span is not None and found.holds(c.span)]
    text = {found.source.at(span).partition("(")[0] for span in spans if span.end_line is not None}
    for branch in branches(found):
        if not ran & set(range(branch[0].lineno, (branch[-1].end_lineno or 0) + 1)):
            doubtful = (value for value in losses(found, branch) if not _is_float32(found.source, value, text))
            other = next(doubtful, None)
            if other is not None:
                return other
    return None


def _is_float32(source: Source, value: ast.expr, criteria: set[str]) -> bool:
    """Whether autocast computes an expression in float32: losses of torch, and sums and multiples of them."""
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        known = [
            _is_float32(source, side, criteria) for side in sides if not isinstance(side, (ast.Constant, ast.Name))
        ]
        return bool(known) and all(known)
    if not isinstance(value, ast.Call):
        return False
    space, _, name = (source.qualified(value.func) or "").rpartition(".")
    return (space == "torch.nn.functional" and name in UPPER) or ast.unparse(value.func) in criteria
