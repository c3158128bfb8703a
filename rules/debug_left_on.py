"""A debugging aid runs in every training step.

## What it does
Removes anomaly detection of autograd, `torch.cuda.empty_cache()` and `torch.cuda.synchronize()` from the training loop,
the last two also where the loop calls a function of its own that does nothing else. What stands outside the loop, a
wait that makes a timing honest, say, stays.

## Why it costs
Anomaly mode records a Python stack for every operation of the forward pass and looks for NaN in every gradient.
`empty_cache` gives memory back that the next step asks for again, which makes the host wait for the device twice. After
`synchronize` the device has nothing queued until the host has launched the next operation.

## When not to
A wait that the device does not feel, because the host is far ahead again before the device runs dry, costs nothing, and
the rule is silent. A wait stays where the loop keeps times to take that of a step, or the script uses streams, events
or copies to the host that nothing else waits for. The time since the start, read behind a removed wait, no longer
includes the work of the device. What an option or a condition asks for is told only. Without anomaly mode a NaN no
longer raises; it does not repair one either.

## Fix safety
EXACT: nothing of what is computed changes; bit-identical losses are demanded.

## References
- torch.autograd.set_detect_anomaly, PyTorch documentation: "enable only for debugging"
- torch.cuda.empty_cache, PyTorch documentation: it "does not increase the amount of GPU memory available for PyTorch"
- yenchenlin/nerf-pytorch#42, Lightning-AI/pytorch-lightning#17359: anomaly mode left on, 1.5 to 3 times slower
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import blocks, codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Rewrite, Safety, Span
from advisor.patterns.hostreads import seldom_reached
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.trainingloop import TrainingLoop

FLUSH, WAIT = "torch.cuda.empty_cache", "torch.cuda.synchronize"
SAYS = {
    FLUSH: "the allocator's cache is emptied in every step",
    WAIT: "the host waits for the device in every step",
}
STREAMS = frozenset({"Stream", "stream", "ExternalStream", "CUDAGraph", "graph", "set_stream"})
CLOCKS = frozenset(
    {f"time.{name}" for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")}
    | {"timeit.default_timer", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.now"}
)
FOREIGN = frozenset({"cupy", "numba", "pycuda", "tensorrt", "cuda", "pynvml", "ctypes"})
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
ANOMALY_SHARE = 2 / 3  # of a step: three times slower is the most that was reported
LOOP = """\
import torch


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


for step in range(100):
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
{lines}wait()
"""
LOG = """\
import torch

{mode}for step in range(100):
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
"""


def _loop(*lines: str) -> str:
    return LOOP.replace("{lines}", "".join(f"    {line}\n" for line in lines))


class DebugLeftOn(Rule):
    """set_detect_anomaly(True), and empty_cache() and synchronize() in the loop -> removed."""

    id = "debug-left-on"
    safety = Safety.EXACT
    needs = ("steps", "calls")
    worth = 0.01
    order = 12
    examples = (
        Example(
            before=LOG.replace("{mode}", "torch.autograd.set_detect_anomaly(True)\n"),
            after=LOG.replace("{mode}", ""),
            profile=step(9_000, calls={"detect_anomaly": (0, 0)}, facts={"anomaly": True}, device="cpu"),
            saves=(0, 6_000),
        ),
        Example(
            before=_loop("torch.cuda.empty_cache()  # be nice to others", "done(step)"),
            after=_loop("done(step)"),
            profile=step(10_000, calls={FLUSH: (1, 800)}),
            saves=(0, 800),
        ),
        Example(
            before=_loop("wait()  # exact bar", "done(step)"),
            after=_loop("done(step)"),
            profile=step(10_000, calls={WAIT: (1, 4_000)}, busy=0.7),
            saves=(0, 3_001),
        ),
        Example(
            before=_loop("torch.cuda.empty_cache()"),
            after=None,
            profile=step(10_000, calls={FLUSH: (0, 0)}, device="cpu"),
            because=ON_A_GPU,
        ),
        Example(
            before=_loop("torch.cuda.empty_cache()"),
            after=None,
            profile=step(100_000, calls={FLUSH: (0.01, 8)}),
            because="the host spends 0.0% of the step in it",
        ),
        Example(
            before=LOG.replace("{mode}", "torch.autograd.set_detect_anomaly(False)\n"),
            after=None,
            profile=step(9_000, calls={"detect_anomaly": (0, 0)}),
            because="anomaly mode is off in the timed steps",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for call in ctx.calls("detect_anomaly"):
            yield self._anomaly(ctx, call)
        for loop in ctx.loops:
            if ctx.profile.hardware.kind != "cuda":
                yield from self._unmeasured(loop)
                continue
            for call in ctx.calls(FLUSH, WAIT):
                place = loop.place(call)
                if place is not None:
                    yield self._in_loop(ctx, loop, call, place)

    def _anomaly(self, ctx: Context, call: LoopCall) -> Finding | Decline:
        assert call.span is not None
        if not call.facts.get("mode") or not ctx.profile.facts.get("anomaly"):
            return self.decline(call.span, "anomaly mode is off in the timed steps")
        return self.finding(
            call.span,
            "autograd looks for anomalies in every step",
            cited_us=ctx.step_us,
            high_us=ANOMALY_SHARE * ctx.step_us,
            basis="model",
            evidence=(Evidence(what="anomaly mode in the timed steps", value="on", unit=""),),
        )

    def _unmeasured(self, loop: TrainingLoop) -> Iterator[Decline]:
        """On a machine without a GPU: where the loop holds one of these in every step."""
        for found in loop.reached():
            if found.name in (FLUSH, WAIT) and _every_step(loop, found.at):
                yield self.decline(loop.source.span(found.at), ON_A_GPU, needs=("gpu",))

    def _in_loop(self, ctx: Context, loop: TrainingLoop, call: LoopCall, place: Span) -> Finding | Decline:
        share = call.host_us / ctx.step_us
        if share < ctx.gate(self) or call.host_us == 0.0:
            return self.decline(place, f"the host spends {share:.1%} of the step in it")
        felt = call.host_us
        needed = _needed(loop) if call.name == WAIT else None
        if needed is not None:
            return self.decline(place, needed)
        if call.name == WAIT:  # only what the device waits for in turn can be saved
            idle = ctx.idle_us
            if idle is None:
                return self.decline(place, "cannot tell: the device's idle time is not known", needs=("kineto",))
            felt = min(felt, idle)
            if felt / ctx.step_us < ctx.gate(self):
                return self.decline(place, f"the host waits in it, but the device is idle in only {felt:.0f} us a step")
        return self.finding(
            place,
            SAYS[call.name],
            cited_us=call.host_us,
            high_us=felt,
            evidence=(
                Evidence(what="calls per step", value=round(call.per_step, 2), unit="calls"),
                Evidence(what="the host's time in it per step", value=round(call.host_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
            ),
            values={"name": call.name},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        name = finding.values.get("name")
        here = source.expressions_at(finding.span.line, finding.span.column)
        call = next((node for node in here if isinstance(node, ast.Call)), None)
        statement = None if call is None else source.statement_of(call)
        if call is None or not isinstance(statement, ast.Expr) or statement.value is not call:
            what = "take it out of the `with`" if name is None else "its line does more than this"
            return self.decline(finding.span, f"it is no statement of its own: {what}")
        if name is None and not all(_is_true(value) for value in [*call.args, *(k.value for k in call.keywords)]):
            return self.decline(finding.span, "an option turns it on: leave that off")
        asked = _asked(source, statement)
        if asked is not None:
            return self.decline(finding.span, f"the condition at line {asked.lineno} asks for it: leave that off")
        if name is not None and source.qualified(call.func) != name and not _only_calls(source, call, name):
            return self.decline(finding.span, f"the function called here does more than {name}")
        try:
            edits = blocks.removed(source, statement)
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the line cannot be taken out: {error}")
        return self.edit(finding, f"remove {name or 'anomaly detection'}", edits)


def _every_step(loop: TrainingLoop, node: ast.AST) -> bool:
    """Whether every step on a GPU reaches a place: under no condition but one on the device or that of the optimizer's
    step, of accumulated gradients, say."""
    for condition in loop.conditions(node):
        first, last = condition.lineno, condition.end_lineno or condition.lineno
        if not first <= loop.inside.line <= last and "cuda" not in ast.unparse(condition.test):
            return False
    return not seldom_reached(loop.source, node, loop.node, loop.inside.line)


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


def _asked(source: Source, node: ast.AST) -> ast.If | None:
    """The `if` around a statement by which somebody asks for it, one on the device or on every so many steps aside."""
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, SCOPES):
        if isinstance(parent, ast.If) and not _is_usual(parent):
            return parent
        parent = source.parents.get(parent)
    return None


def _is_usual(condition: ast.If) -> bool:
    text = ast.unparse(condition.test)
    counts = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in ast.walk(condition.test))
    return counts or any(word in text for word in ("cuda", "__name__", "rank"))


def _needed(loop: TrainingLoop) -> str | None:
    """What in the loop, or its file, is right only behind a wait for the device, or None."""
    own = [n for n in ast.walk(loop.source.tree) if isinstance(n, ast.Call)]
    reached = [(found.source, found.call) for found in loop.reached()]
    for source, call in [*reached, *((loop.source, call) for call in own)]:
        name, last = source.qualified(call.func) or "", getattr(call.func, "attr", getattr(call.func, "id", ""))
        if (name.startswith("torch.cuda.") and last in STREAMS) or last == "elapsed_time":
            return f"line {call.lineno} has work of other streams or events to wait for"
        if _copies_to_host(call):
            return f"line {call.lineno} copies to the host and goes on: what reads that needs the wait"
    for source, call in reached:
        kept = isinstance(source.parents[call], (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Tuple))
        if kept and (source.qualified(call.func) or "") in CLOCKS:
            return f"line {call.lineno} takes the time of a step: without the wait that would be another"
    foreign = next((n for n in loop.source.imports.values() if n.partition(".")[0] in FOREIGN), None)
    return None if foreign is None else f"{foreign} may have work of its own on the device"


def _copies_to_host(call: ast.Call) -> bool:
    """Whether a call may copy to the host without a wait: `x.to("cpu", non_blocking=True)`, `host.copy_(x, True)`."""
    told = any(k.arg == "non_blocking" and not _is_false(k.value) for k in call.keywords)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "copy_":
        return told or len(call.args) > 1
    given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device")]
    return told and method == "to" and any("cpu" in ast.unparse(value).lower() for value in given)


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _only_calls(source: Source, call: ast.Call, name: str) -> bool:
    """Whether a function of the file that is called by its name does nothing but call `name`, under conditions."""
    named = call.func.id if isinstance(call.func, ast.Name) else None
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == named]
    if len(found) != 1 or call.args or call.keywords:
        return False
    pending = list(found[0].body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.If):
            if not _is_usual(statement):
                return False
            pending += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if source.qualified(statement.value.func) != name:
                return False
        elif not isinstance(statement, ast.Pass) and not _is_text(statement):
            return False
    return True


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
