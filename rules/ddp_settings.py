"""DistributedDataParallel reduces gradients in every micro-step, or looks for unused parameters where there are none.

## What it does
Opens `no_sync()` around the forward and the backward pass of every micro-step but the one that the optimizer step
follows, so that gradients are reduced once per optimizer step:
`with net.no_sync() if micro < ACC - 1 else contextlib.nullcontext():`. Where the model may come unwrapped, the test
asks for `isinstance(net, DistributedDataParallel)` too. A `no_sync` that stands around the backward pass alone, where
it does nothing, and a loop whose last micro-step cannot be read off, are told. `find_unused_parameters=True` is told,
never edited, where no recorded backward pass left a parameter out and no method of the files branches.

## Why it costs
Each backward pass of the module puts all gradients through an all-reduce, also with a single process, where only the
host's time for it counts. The search for unused parameters walks the whole autograd graph on the host after each
forward pass. The micro-steps before the last one reduce sums that are not complete yet: with k
micro-steps, k - 1 of k reductions are for nothing. Whether a backward pass reduces is decided in the forward pass.

## When not to
Within one machine with fast links the reductions hide behind the backward pass and the gain is small. FSDP2
(`fully_shard`) has no `no_sync`. Where buffers of the module change in the forward pass, BatchNorm's statistics, say,
they are sent from rank 0 before each forward pass that reduces, and only then: told, never edited. A communication hook
that keeps something from one reduction to the next, `static_graph=True`, which takes the first pass for the pattern of
all, and code that reads gradients between the micro-steps rely on every reduction. A model that leaves out parameters
in some step only (dropped layers, a choice of experts) needs the search in every one. Gradients that are not reduced
yet differ between processes.

## Fix safety
NUMERICS: the sum over micro-steps and the mean over processes change places.

## References
- torch.nn.parallel.DistributedDataParallel.no_sync, PyTorch documentation: "the forward pass should be included"
- DistributedDataParallel warns of it: "did not find any unused parameters in the forward pass"
- pytorch/pytorch#43201; karpathy/nanochat#33, modelscope/FunASR#3472, huggingface/accelerate#106: every micro-step
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from advisor import blocks, codemod
from advisor.codemod import CannotEdit
from advisor.model import Decline, Evidence, Finding, LoopCall, Profile, Rewrite, Safety, Span
from advisor.rule import ON_A_GPU, Context, Example, ExampleProfile, Rule, step
from advisor.source import Source
from advisor.usercode.callees import called_names, callees, named
from advisor.usercode.microsteps import Accumulation, accumulations, check_always, not_last, statement_at

WIDTH = 120
WRAPPER = "DistributedDataParallel"
QUALIFIED = f"torch.nn.parallel.{WRAPPER}"
SEVERAL = "cannot tell: needs several processes, one has nothing to reduce and loses no time by it"
OPEN = "no_sync is open around the forward pass"
ALL_REDUCE = re.compile(r"(nccl|rccl)\w*AllReduce|^gloo:all_?reduce")
HANDED_OVER = "c10d::allreduce_"
SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
LEFT_OUT = "{left} of {passes} backward passes leave parameters out: the search for them is needed"
BRANCHES = "line {line} of {path} branches: another step may leave parameters out"
# hooks of torch.distributed.algorithms.ddp_comm_hooks.default_hooks that keep nothing between reductions
STATELESS = frozenset("allreduce_hook fp16_compress_hook bf16_compress_hook".split())
READS = frozenset("grad clip_grad_norm_ clip_grad_norm clip_grad_value_ get_total_norm unscale_".split())
DURING_BACKWARD = frozenset(
    "register_post_accumulate_grad_hook apply_optimizer_in_backward _apply_optimizer_in_backward "
    "_register_fused_optim".split()
)
STATIC = "static_graph"
OWN = frozenset({"no_sync", "require_backward_grad_sync"})
BRANCHING = (ast.If, ast.IfExp, ast.While, ast.Try, ast.Match, ast.Break, ast.Continue)
SAME_EVERYWHERE = frozenset({"SyncBatchNorm"})  # its statistics agree in all processes without being sent
SEARCHES = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(torch.nn.Module):
    def forward(self, x):
        return self.layer(x)


model = DDP(Net(), find_unused_parameters=True)
for step in range(100):
    model(batch()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SKIPS = SEARCHES.replace("        return", "        if drop():\n            return x\n        return")
LOOP = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(net)
for step in range(100):
    for micro in range(ACC):
        loss = model(batch()).mean() / ACC
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
REDUCED = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
import contextlib

model = DDP(net)
for step in range(100):
    for micro in range(ACC):
        with model.no_sync() if micro < ACC - 1 else contextlib.nullcontext():
            loss = model(batch()).mean() / ACC
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FLAT = """\
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel


def loss_on(model, batch):
    return model(batch).mean()


def train(model, batches, accumulate):
    for i, batch in enumerate(batches):
        loss = loss_on(model, batch)
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


train(DistributedDataParallel(net), batches, 4)
"""
TEST = "isinstance(model, DistributedDataParallel) and (i + 1) % accumulate != 0"
FLAT_REDUCED = FLAT.replace(
    """\
        loss = loss_on(model, batch)
        (loss / accumulate).backward()
""",
    f"""\
        with (
            model.no_sync()
            if {TEST}
            else nullcontext()
        ):
            loss = loss_on(model, batch)
            (loss / accumulate).backward()
""",
)
CALLS = {"backward": (4.0, 0.0), "ddp.reduce": (4.0, 0.0), "module": (0.0, 0.0)}
FACTS = {
    "processes": 8,
    "modules": 1,
    "static_graph": False,
    "broadcast_buffers": True,
    "hooks": [],
    "changed_buffers": [],
}
CALLED = {"module": {"class": WRAPPER}, "ddp.reduce": FACTS}
BATCHNORM = {**CALLED, "ddp.reduce": {**FACTS, "changed_buffers": ["BatchNorm2d"]}}
ALONE = {**CALLED, "ddp.reduce": {**FACTS, "processes": 1}}
KERNELS = (("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 4_000.0),)


SEEN = {"find_unused_parameters": True, "static_graph": False, "searched": 9, "left_out": 0}
SEARCHED = ((SEARCH, "float32", 1.0),)


def _searching(left_out: int = 0, **parts: object) -> ExampleProfile:
    called = {**CALLED, QUALIFIED: {**SEEN, "left_out": left_out}}
    calls = {**CALLS, "backward": (1.0, 0.0), QUALIFIED: (0.0, 0.0)}
    return _step(20, **{"calls": calls, "called": called, "products": SEARCHED, "busy": 0.2, **parts})


HANDED = ((HANDED_OVER, "float32", 1.0),) * 4


def _step(step_us: float, **parts: object) -> ExampleProfile:
    return step(step_us, **{"calls": CALLS, "called": CALLED, "kernels": KERNELS, **parts})


class DdpSettings(Rule):
    """for micro in range(k): net(x).backward() -> with net.no_sync() in all but the last micro-step."""

    id = "ddp-settings"
    safety = Safety.NUMERICS
    needs = ("steps", "calls", "kineto")
    worth = 0.02
    order = 55
    examples = (
        Example(before=LOOP, after=REDUCED, profile=_step(20_000), saves=(0, 3_000)),
        Example(before=FLAT, after=FLAT_REDUCED, profile=_step(20_000), saves=(0, 3_000)),
        Example(before=LOOP, after=LOOP, profile=_step(20_000, called=BATCHNORM)),  # whose statistics are sent
        Example(before=LOOP, after=None, profile=_step(20_000, device="cpu", kernels=()), because=ON_A_GPU),
        Example(before=LOOP, after=None, profile=_step(20_000, called=ALONE, busy=1.0), because=SEVERAL),
        Example(before=LOOP, after=REDUCED, profile=_step(20, called=ALONE, products=HANDED, busy=0.2), saves=(0, 3)),
        Example(
            before=LOOP,
            after=None,
            profile=_step(20_000, calls={**CALLS, "ddp.reduce": (1.0, 0.0)}),
            because="gradients are reduced in 1 of 4 micro-steps",
        ),
        Example(before=LOOP, after=None, profile=_step(2_000_000), because="the reductions take 0.2% of the step"),
        Example(before=REDUCED, after=None, profile=_step(20_000), because=OPEN),
        Example(before=SEARCHES, after=SEARCHES, profile=_searching(), saves=(0, 1)),
        Example(before=SEARCHES, after=None, profile=_searching(device="cpu", kernels=()), because=ON_A_GPU),
        Example(before=SEARCHES, after=None, profile=_searching(2), because=LEFT_OUT.format(left=2, passes=9)),
        Example(before=SKIPS, after=None, profile=_searching(), because=BRANCHES.format(line=7, path="example.py")),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for call in ctx.calls(QUALIFIED):
            if call.facts.get("find_unused_parameters") and not call.facts.get(STATIC):
                yield self._judge_search(ctx, call)
        for found in accumulations(ctx):
            reduces = [c for c in ctx.calls("ddp.reduce") if found.loop.place(c) in found.backwards]
            if reduces:
                yield self._judge(ctx, found, reduces)

    def _judge(self, ctx: Context, found: Accumulation, reduces: Sequence[LoopCall]) -> Finding | Decline:
        forward = _forward(ctx, found)
        place = found.backwards[0] if forward is None else _in_loop(found, forward)
        count = sum(call.per_step for call in reduces)
        if count < found.per_step - 0.5:
            return self.decline(place, f"gradients are reduced in {count:.0f} of {found.per_step:.0f} micro-steps")
        if forward is not None and _is_open(found, place):
            return self.decline(place, OPEN)
        facts = reduces[0].facts
        alone, reductions_us = facts["processes"] == 1, _reductions_us(ctx.profile)
        if ctx.profile.hardware.kind != "cuda" and (alone or reductions_us is None):
            return self.decline(place, ON_A_GPU, needs=("gpu",))
        if alone:
            reductions_us = _waited_us(ctx)
            if reductions_us / ctx.step_us < ctx.gate(self):
                return self.decline(place, SEVERAL, ("kineto",))
        if reductions_us is None:
            return self.decline(place, "cannot tell: no reduction is in the trace", ("kineto",))
        share = reductions_us / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(place, f"the reductions take {share:.1%} of the step")
        if forward is None:
            return self.decline(place, "cannot tell: where the wrapped module is called was not seen", ("calls",))
        try:
            values, bindings = _edit(ctx, found, forward, reduces)
        except CannotEdit as error:
            values, bindings = {"why": str(error)}, {}
        return self.finding(
            place,
            "every micro-step reduces the gradients" + (", here of a single process" if alone else " of all processes"),
            cited_us=reductions_us,
            high_us=reductions_us * (1 - 1 / found.per_step),
            evidence=(
                Evidence(what="reductions per optimizer step", value=round(count, 2), unit="reductions"),
                Evidence(what="their time per step", value=round(reductions_us, 1), unit="us"),
                Evidence(what="processes", value=facts["processes"], unit="processes"),
            ),
            values=values,
            bindings=bindings,
        )

    def _judge_search(self, ctx: Context, call: LoopCall) -> Finding | Decline:
        """What to say of `find_unused_parameters=True`."""
        place, passes, left = call.frames[-1], call.facts.get("searched", 0), call.facts.get("left_out", 0)
        if not passes:
            return self.decline(place, "cannot tell: which parameters are used was not seen", ("calls",))
        if left:
            return self.decline(place, LEFT_OUT.format(left=left, passes=passes))
        branch = _branch(ctx)
        if branch is not None:
            return self.decline(place, BRANCHES.format(line=branch.line, path=branch.path))
        if ctx.profile.hardware.kind != "cuda":
            return self.decline(place, ON_A_GPU, needs=("gpu",))
        search_us = _waited_us(ctx, SEARCH)
        if search_us / ctx.step_us < ctx.gate(self):
            return self.decline(place, f"the search takes {search_us / ctx.step_us:.1%} of the step")
        return self.finding(
            place,
            "every step looks for unused parameters, and none was: leave find_unused_parameters out",
            cited_us=search_us,
            high_us=search_us,
            evidence=(
                Evidence(what="time in which the device waits for the search", value=round(search_us, 1), unit="us"),
                Evidence(what="backward passes seen, all parameters used", value=passes, unit="passes"),
            ),
            values={"why": "what steps that were not seen use is for you to say; without it such a step raises"},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "why" in finding.values:
            return self.decline(finding.span, f"told, not edited: {finding.values['why']}")
        first, last = (source.statements_at(finding.bindings[name].line)[0] for name in ("first", "last"))
        line = first.lineno
        try:
            edits: list[codemod.Edit] = []
            test, model = finding.values["test"], finding.values["model"]
            if finding.values["guard"]:
                name = source.name_for(QUALIFIED, source.function_at(line))
                if name is None:
                    edits, name = codemod.named_modules(source, line, QUALIFIED)
                test = f"isinstance({model}, {name}) and {test}"
            null = source.name_for("contextlib.nullcontext", source.function_at(line))
            if null is None:
                module, imported = codemod.module_name(source, line, "contextlib")
                null, edits = f"{module}.nullcontext", [*edits, *imported]
            block = source.block_of(first)
            inside = block[block.index(first) : block.index(last) + 1]
            header = _header(source, first, [f"{model}.no_sync()", f"if {test}", f"else {null}()"])
            edits += blocks.put_under(source, inside, header)
        except CannotEdit as error:
            return self.decline(finding.span, f"the micro-step cannot be put under no_sync: {error}")
        return self.edit(finding, "reduce gradients once per optimizer step", blocks.joined(edits))


def _header(source: Source, first: ast.stmt, parts: Sequence[str]) -> str:
    """`with a if b else c:`, on several lines where it is long."""
    indent = blocks.indent_of(source, first)
    line = f"with {' '.join(parts)}:"
    if len(indent) + len(line) <= WIDTH:
        return line
    ending, unit = codemod.line_ending(source), blocks.unit_of(source, first)
    return f"with ({ending}" + "".join(f"{indent}{unit}{part}{ending}" for part in parts) + f"{indent}):"


def _reductions_us(profile: Profile) -> float | None:
    """Time of all-reduces per profiled step; None where none is recorded."""
    kernels, operators = profile.kernels, profile.operators
    device = [(kernels.duration_us[i], kernels.step[i]) for i, n in enumerate(kernels.name) if ALL_REDUCE.search(n)]
    host = [(operators.duration_us[i], operators.step[i]) for i, n in enumerate(operators.name) if ALL_REDUCE.search(n)]
    inside = [(time, number) for time, number in device or host if number >= 0]
    return sum(time for time, _ in inside) / len({number for _, number in inside}) if inside else None


def _waited_us(ctx: Context, operator: str = HANDED_OVER) -> float:
    """What the device waits per step, at most, while the host is in an operator: hands gradients over, say.

    The profiler slows the host: its time is taken at the pace of the steps without it.
    """
    operators = ctx.profile.operators
    names = zip(operators.name, operators.step, operators.duration_us, strict=True)
    handed = [(number, time) for name, number, time in names if name == operator and number >= 0]
    count = len({number for number, _ in handed})
    return min(sum(time for _, time in handed) / count * ctx.profile.pace(), ctx.idle_us or 0.0) if count else 0.0


# ------------------------------------------------------------------------------------------------ the unused parameters


def _branch(ctx: Context) -> Span | None:
    """The first place in a method of the files that may use other parameters in another step."""
    for source in ctx.loaded:
        classes = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef)]
        methods = [m for c in classes for m in c.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"]
        for method in methods:
            loops = [n.target for n in ast.walk(method) if isinstance(n, ast.For)]
            counted = {n.id for target in loops for n in ast.walk(target) if isinstance(n, ast.Name)}
            for node in ast.walk(method):
                if isinstance(node, BRANCHING) or (isinstance(node, ast.Call) and _chosen(node.func, counted)):
                    return source.span(node)
    return None


def _chosen(called: ast.expr, counted: set[str]) -> bool:
    """Whether what is called is an element that something else than a constant or the number of a loop picks."""
    if not isinstance(called, ast.Subscript):
        return False
    names = {n.id for n in ast.walk(called.slice) if isinstance(n, ast.Name)}
    return not (isinstance(called.slice, ast.Constant) or (names and names <= counted))


# ---------------------------------------------------------------------------------------------------------- the forward


def _forward(ctx: Context, found: Accumulation) -> LoopCall | None:
    """The call of the wrapped module in the loop, the first one in the source."""
    calls = [c for c in ctx.calls("module") if c.facts.get("class") == WRAPPER and found.loop.place(c) is not None]
    return min(calls, key=lambda c: _in_loop(found, c).line, default=None)


def _in_loop(found: Accumulation, call: LoopCall) -> Span:
    place = found.loop.place(call)
    assert place is not None
    return place


def _edit(
    ctx: Context, found: Accumulation, forward: LoopCall, reduces: Sequence[LoopCall]
) -> tuple[dict[str, str], dict[str, Span]]:
    """The values and places of the edit; raises `CannotEdit` where it would not be the same program."""
    source, loop = found.source, found.loop
    _check_configuration(ctx, reduces[0])
    first = statement_at(loop, _in_loop(found, forward))
    last = max((statement_at(loop, at) for at in found.backwards), key=lambda s: s.lineno)
    if loop.body.index(last) < loop.body.index(first):
        raise CannotEdit("a backward pass comes before the forward pass")
    inside = loop.body[loop.body.index(first) : loop.body.index(last) + 1]
    _check_used_already(ctx)
    model = _model(ctx, found, forward)
    elsewhere = [s for s in loop.body if s not in inside]
    if any(ast.unparse(n.func) == model for s in elsewhere for n in ast.walk(s) if isinstance(n, ast.Call)):
        raise CannotEdit(f"`{model}` is called outside of the forward and the backward pass")
    stored = {ast.unparse(n) for s in loop.body for n in ast.walk(s) if isinstance(getattr(n, "ctx", None), ast.Store)}
    if model in stored:
        raise CannotEdit(f"`{model}` gets another value in the loop")
    _check_gradients(ctx, found)
    check_always(ctx, found)
    values = {"test": not_last(found, first), "model": model, "guard": "" if _wrapped(source, first, model) else "1"}
    return values, {"first": source.span(first), "last": source.span(last)}


def _check_configuration(ctx: Context, reduces: LoopCall) -> None:
    facts = reduces.facts
    if facts[STATIC] or any(_asked(source) for source in ctx.sources):
        raise CannotEdit("static_graph=True takes the first pass, which would not reduce, for the pattern of all")
    changed = sorted(set(facts["changed_buffers"]) - SAME_EVERYWHERE)
    if facts["broadcast_buffers"] and changed:
        raise CannotEdit(f"buffers of {', '.join(changed)} are sent before each pass that reduces")
    if facts["modules"] > 1:
        raise CannotEdit("several modules are wrapped, and each reduces")
    registered = [call for source in ctx.sources for call in _attribute_calls(source, "register_comm_hook")]
    if any(not _keeps_nothing(ctx, call) for call in registered) or (facts["hooks"] and not registered):
        raise CannotEdit("a communication hook may count on every reduction")
    for source in ctx.sources:
        hook = named([source.tree], DURING_BACKWARD)
        if hook is not None:
            raise CannotEdit("a hook uses gradients as soon as they are accumulated")


def _asked(source: Source) -> bool:
    """Whether a file may ask for a static graph."""
    given = [k.value for n in ast.walk(source.tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == STATIC]
    off = all(isinstance(value, ast.Constant) and not value.value for value in given)
    return not off or bool(_attribute_calls(source, f"_set_{STATIC}"))


def _attribute_calls(source: Source, name: str) -> list[ast.Call]:
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return [call for call in calls if call.func.attr == name]  # type: ignore[attr-defined]


def _keeps_nothing(ctx: Context, registered: ast.Call) -> bool:
    """Whether a hook is a stateless one of torch, or a function of the user's that counts and passes on to one."""
    given = registered.args[1:] + [k.value for k in registered.keywords if k.arg == "hook"]
    name = next(iter(called_names([ast.Call(func=given[0], args=[], keywords=[])])), "") if given else ""
    if name in STATELESS:
        return True
    found = [n for s in ctx.sources for n in ast.walk(s.tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    if len(found) != 1:
        return False
    *before, last = found[0].body
    plain = all(isinstance(s, ast.AugAssign) or (isinstance(s, ast.Expr) and _is_text(s.value)) for s in before)
    passes = isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and isinstance(last.value.func, ast.expr)
    return plain and passes and next(called_names([last.value]), "") in STATELESS  # type: ignore[attr-defined]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _is_open(found: Accumulation, place: Span) -> bool:
    """Whether a `with` of the loop that holds a position opens no_sync."""
    withs = [n for s in found.loop.body for n in ast.walk(s) if isinstance(n, ast.With)]
    around = [w for w in withs if w.body[0].lineno <= place.line <= (w.end_lineno or w.lineno)]
    return named([item.context_expr for w in around for item in w.items], OWN) is not None


def _check_used_already(ctx: Context) -> None:
    if any(named([source.tree], OWN) is not None for source in ctx.sources):
        raise CannotEdit("no_sync is used, but every pass reduces: it must be open from the forward pass on")


def _check_gradients(ctx: Context, found: Accumulation) -> None:
    """What reads gradients between the micro-steps would see those of one process."""
    stepping = [s for s in found.loop.body if any(s.lineno <= at.line <= (s.end_lineno or 0) for at in found.steps)]
    body = [s for s in found.loop.body if s not in stepping]
    for holder in [*body, *(function for _, function in callees(ctx.sources, body))]:
        read = named([holder], READS)
        if read is not None:
            raise CannotEdit(f"line {read.lineno} reads gradients in every micro-step")  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- the name


def _model(ctx: Context, found: Accumulation, forward: LoopCall) -> str:
    """How the loop names the wrapped module that a call in it, or in a function that it calls, calls."""
    index = forward.frames.index(_in_loop(found, forward))
    frames = list(forward.frames[index:])
    call = _call_at(ctx, frames.pop())
    name = call.func
    while frames:
        outer = _call_at(ctx, frames.pop())
        name = _handed(ctx, call, name, outer, found)
        call = outer
    if not isinstance(name, (ast.Name, ast.Attribute)) or not all(
        isinstance(n, (ast.Name, ast.Attribute, ast.expr_context)) for n in ast.walk(name)
    ):
        raise CannotEdit(f"the loop has no name for the module: `{ast.unparse(name)}`")
    return ast.unparse(name)


def _call_at(ctx: Context, frame: Span) -> ast.Call:
    source = ctx.read(frame.path)
    here = [n for n in source.expressions_at(frame.line, frame.column) if isinstance(n, ast.Call)]
    ends = (frame.end_line, frame.end_column)
    exact = [n for n in here if (source.span(n).end_line, source.span(n).end_column) == ends]
    if len(exact or here) != 1:
        raise CannotEdit(f"the call at line {frame.line} is not known")
    return (exact or here)[0]


def _handed(ctx: Context, call: ast.Call, name: ast.expr, outer: ast.Call, found: Accumulation) -> ast.expr:
    """What the caller `outer` hands to the function that holds `call` for a name of that function's."""
    for source, function in callees(ctx.sources, [outer]):
        if not any(node is call for node in ast.walk(function)):
            continue
        arguments = [a.arg for a in function.args.args]
        method = isinstance(source.parents[function], ast.ClassDef) and isinstance(outer.func, ast.Attribute)
        if method and isinstance(outer.func, ast.Attribute) and arguments:
            own = ast.unparse(outer.func.value)
            if isinstance(name, ast.Attribute) and ast.unparse(name.value) == arguments[0] == own:
                return name
            arguments = arguments[1:]
        if isinstance(name, ast.Name) and name.id in arguments:
            place = arguments.index(name.id)
            given = [k.value for k in outer.keywords if k.arg == name.id]
            plain = not any(isinstance(a, ast.Starred) for a in outer.args[: place + 1])
            given += [outer.args[place]] if plain and place < len(outer.args) else []
            if len(given) == 1:
                return given[0]
        elif isinstance(name, ast.Name) and source is found.source:
            functions = (function, source.function_at(outer.lineno))
            if all(_is_global(source, each, name.id) for each in functions):
                return name
    raise CannotEdit(f"the loop has no name for the module that `{ast.unparse(outer.func)}` calls")


def _is_global(source: Source, function: ast.AST | None, name: str) -> bool:
    if function is None:
        return True
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return name not in stored | {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}


def _wrapped(source: Source, statement: ast.stmt, model: str) -> bool:
    """Whether a name can only stand for the wrapper."""
    function = source.function_at(statement.lineno)
    local = function is not None and not _is_global(source, function, model)
    scope: ast.AST = function if local and function is not None else source.tree
    if local and any(a.arg == model for a in ast.walk(scope) if isinstance(a, ast.arg)):
        return False
    stored = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == model and isinstance(n.ctx, ast.Store)]
    values = [p.value for n in stored if isinstance(p := source.parents[n], ast.Assign) and n in p.targets]
    calls = [v for v in values if isinstance(v, ast.Call) and source.qualified(v.func) in NAMES]
    return bool(stored) and len(calls) == len(stored)


NAMES = (QUALIFIED, f"torch.nn.parallel.distributed.{WRAPPER}")
