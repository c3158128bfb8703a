"""Gradients are filled with zeros in every step, and the backward pass adds to the zeros.

## What it does
Takes `set_to_none=False` out of `zero_grad()` in the training loop, and makes `p.grad = None` of a hand-written
`p.grad.zero_()`. Without a gradient to add to, the backward pass hands over the one it has computed.

## Why it costs
The zeros are written once, read once with the new gradient and written again as its sum: four passes over memory of the
size of the parameters, and two launches per parameter on a GPU, for what an assignment does.

## When not to
An optimizer with momentum or weight decay goes on moving a parameter whose gradient is zero and leaves alone one that
has none. So it is only done where every step gives a gradient to the same parameters: one backward pass before each
optimizer step, a forward pass without branches that may change, modules of torch and of the files alone. Plain SGD
does nothing for a zero either. Not where gradients are read without a test for None, read between zero_grad and the
backward pass, assigned, captured in CUDA graphs, or differentiated again.

## Fix safety
EXACT: zero plus a gradient is the gradient; bit-identical losses are demanded.

## References
- torch.optim.Optimizer.zero_grad, PyTorch documentation: what changes with set_to_none
- PyTorch performance tuning guide: "use parameter.grad = None instead of model.zero_grad()"
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.model import Decline, Evidence, Finding, LoopCall, OptimizerUse, Rewrite, Safety, Span
from advisor.patterns.callsites import differentiates_twice
from advisor.patterns.forwardpass import forward_pass, parting
from advisor.patterns.gradflow import choices, gradient_uses, guarded
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.trainingloop import TrainingLoop, enclosing_loop

ZEROS = ("method.zero_", "method.fill_")
ACCUMULATE = "torch::autograd::AccumulateGrad"
FILLS = frozenset({"aten::zero_", "aten::_foreach_zero_"})
KNOWN = ("torch/", "torchvision/")  # packages whose modules take the same way in every step
HOLDERS = (
    "torch.cuda.graph",
    "torch.cuda.CUDAGraph",
    "torch.cuda.make_graphed_callables",
    "deepspeed.initialize",
)
CHANGES = "an optimizer with momentum or decay treats no gradient and a gradient of zero differently"
LOOP = """\
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.{optimizer}
for x in loader:
    {zero}
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
ADAM = "AdamW(model.parameters())"
OFF = {"zero_grad": (1.0, 300.0), "module": (1.0, 0.0)}


def _loop(zero: str, optimizer: str = ADAM) -> str:
    return LOOP.replace("{zero}", zero).replace("{optimizer}", optimizer)


class ZeroGradFill(Rule):
    """optimizer.zero_grad(set_to_none=False) -> optimizer.zero_grad()."""

    id = "zero-grad-fill"
    safety = Safety.EXACT
    needs = ("steps", "calls", "optimizers")
    worth = 0.005
    order = 60
    examples = (
        Example(
            before=_loop("optimizer.zero_grad(set_to_none=False)  # as ever"),
            after=_loop("optimizer.zero_grad()  # as ever"),
            profile=step(10_000, calls=OFF, device="cpu"),
            saves=(0, 300),
        ),
        Example(
            before=_loop("model.zero_grad(False)"),
            after=_loop("model.zero_grad()"),
            profile=step(10_000, calls=OFF, device="cpu"),
            saves=(0, 300),
        ),
        Example(
            before=_loop("optimizer.zero_grad()"),
            after=None,
            profile=step(10_000, calls=OFF, device="cpu"),
            because="gradients are set to None already",
        ),
        Example(
            before=_loop("optimizer.zero_grad(set_to_none=False)"),
            after=None,
            profile=step(100_000, calls=OFF, device="cpu"),
            because="filling gradients with zeros takes 0.3% of the step",
        ),
        Example(
            before=_loop("optimizer.zero_grad(set_to_none=False); print(model.weight.grad.norm())"),
            after=None,
            profile=step(10_000, calls=OFF, device="cpu"),
            because="a gradient is used without a test for None (example.py:6)",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for call in ctx.calls("zero_grad"):
            loop = next((loop for loop in ctx.loops if loop.place(call) is not None), None)
            if loop is not None and call.span is not None:
                yield self._judge(ctx, loop, call, call.span)
        yield from self._by_hand(ctx)

    def _judge(self, ctx: Context, loop: TrainingLoop, call: LoopCall, place: Span) -> Finding | Decline:
        if call.facts.get("set_to_none", True):
            return self.decline(place, "gradients are set to None already")
        cost = _device_us(ctx) + min(call.host_us, ctx.idle_us or 0.0)
        if ctx.profile.hardware.kind != "cuda":
            cost = call.host_us + _accumulated_us(ctx)
        return self._found(ctx, loop, place, cost, frozenset())

    def _by_hand(self, ctx: Context) -> Iterator[Finding | Decline]:
        """`p.grad.zero_()` in the loop, once for each place."""
        costs: dict[Span, float] = {}
        for graph in ctx.graphs:
            for node in graph.nodes:
                made = [graph.nodes[i] for i in node.inputs()[:1]]
                if node.target in ZEROS and made and made[0].facts.get("kind") == "gradient" and node.span is not None:
                    costs[node.span] = costs.get(node.span, 0.0) + (ctx.cost_us(graph.index, [node.index]) or 0.0)
        for span, cost in sorted(costs.items(), key=lambda item: str(item[0])):
            source = ctx.read(span.path)
            loop = next(
                (loop for loop in ctx.loops if any(span in frames for frames in _frames(ctx, span, loop))), None
            )
            target = _filled(source, span)
            if loop is None or target is None or cost == 0.0:
                continue
            extra = _accumulated_us(ctx) if ctx.profile.hardware.kind != "cuda" else 0.0
            yield self._found(ctx, loop, span, cost + extra, frozenset({id(target)}))

    def _found(
        self, ctx: Context, loop: TrainingLoop, place: Span, cost: float, besides: frozenset[int]
    ) -> Finding | Decline:
        share = cost / ctx.step_us
        if share < ctx.gate(self) or cost == 0.0:
            return self.decline(place, f"filling gradients with zeros takes {share:.1%} of the step")
        reason = _not_exact(ctx, loop, place, besides)
        if reason is not None:
            return self.decline(place, reason)
        return self.finding(
            place,
            "gradients are filled with zeros in every step",
            cited_us=cost,
            high_us=cost,
            evidence=(
                Evidence(what="time to fill gradients and to add to them per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="parameters", value=sum(u.parameters for u in ctx.profile.optimizers), unit="tensors"),
            ),
            values={"by hand": "yes"} if besides else {},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if finding.values:
            target = _filled(source, finding.span)
            statement = None if target is None else source.statement_of(target)
            if target is None or not isinstance(statement, ast.Expr):
                return self.decline(finding.span, "its line does more than fill the gradient with zeros")
            return self.edit(
                finding, "no gradient instead of zeros", [(source.span(statement), f"{source.segment(target)} = None")]
            )
        call = _call(source, finding.span)
        if call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "zero_grad":
            return self.decline(finding.span, "zero_grad is not called by this line itself")
        given = [*call.args, *(k.value for k in call.keywords)]
        if len(given) != 1 or not isinstance(given[0], ast.Constant) or given[0].value is not False:
            return self.decline(finding.span, "set_to_none is not written as False here")
        text = source.segment(call)
        if "#" in text[len(source.segment(call.func)) :]:
            return self.decline(finding.span, "a comment stands among its arguments")
        return self.edit(
            finding, "no gradient instead of zeros", [(source.span(call), f"{source.segment(call.func)}()")]
        )


def _call(source: Source, span: Span) -> ast.Call | None:
    here = source.expressions_at(span.line, span.column if span.end_line is not None else None)
    return next((node for node in here if isinstance(node, ast.Call)), None)


def _filled(source: Source, span: Span) -> ast.Attribute | None:
    """The gradient that a statement like `p.grad.zero_()` or `p.grad.data.fill_(0)` fills with zeros."""
    call = _call(source, span)
    if call is None or not isinstance(call.func, ast.Attribute) or call.func.attr not in ("zero_", "fill_"):
        return None
    value = call.func.value
    if isinstance(value, ast.Attribute) and value.attr == "data":
        value = value.value
    zero = call.func.attr == "zero_" or (len(call.args) == 1 and ast.unparse(call.args[0]) in ("0", "0.0"))
    return value if zero and isinstance(value, ast.Attribute) and value.attr == "grad" else None


def _frames(ctx: Context, span: Span, loop: TrainingLoop) -> list[tuple[Span, ...]]:
    """The ways from a loop to what was recorded at a position."""
    nodes = (node for graph in ctx.graphs for node in graph.nodes if node.span == span)
    return [node.frames for node in nodes if any(loop.holds(frame) for frame in node.frames)]


def _accumulated_us(ctx: Context) -> float:
    """Time per step in which a CPU adds gradients to zeros, scaled from the profiled to the un-profiled step."""
    operators, steps = ctx.profile.operators, ctx.profile.steps
    rows = [i for i, name in enumerate(operators.name) if name == ACCUMULATE and operators.step[i] >= 0]
    profiled = sum(one.duration_us for one in steps) / len(steps) if steps else 0.0
    if not profiled:
        return 0.0
    pace = min(1.0, ctx.step_us / profiled)
    return sum(operators.duration_us[i] for i in rows) / len(steps) * pace


def _device_us(ctx: Context) -> float:
    """Time per step of the device in filling gradients with zeros and in adding to them."""
    kernels, operators = ctx.profile.kernels, ctx.profile.operators
    steps = len({one for one in kernels.step if one >= 0})
    total = 0.0
    for row, at in enumerate(kernels.operator):
        if kernels.step[row] < 0 or at < 0:
            continue
        names = [operators.name[at]]
        while operators.parent[at] >= 0:
            at = operators.parent[at]
            names.append(operators.name[at])
        if ACCUMULATE in names or names[-1] in FILLS:
            total += kernels.duration_us[row]
    return total / steps if steps else 0.0


# ------------------------------------------------------------------------------------------------------------ exactness


def _not_exact(ctx: Context, loop: TrainingLoop, place: Span, besides: frozenset[int]) -> str | None:
    """Why training could differ; None where it cannot."""
    for source in ctx.sources:
        twice = differentiates_twice(source)
        if twice is not None:
            return f"gradients are differentiated again (`{twice}`)"
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and source.qualified(node) in HOLDERS:
                return f"`{ast.unparse(node)}` holds on to the gradients ({source.path}:{node.lineno})"
    for use in ctx.profile.optimizers:
        if not use.kind.startswith("torch.optim.") or use.overrides_step or use.sparse or use.kind.endswith("LBFGS"):
            return f"what {use.kind.rpartition('.')[2]} does without a gradient is not known"
    return _looked_at(ctx, loop, place, besides) or _uneven(ctx, loop, place)


def _looked_at(ctx: Context, loop: TrainingLoop, place: Span, besides: frozenset[int]) -> str | None:
    """Who would see that there is no gradient."""
    for source, node in gradient_uses(ctx.sources, besides):
        line = getattr(node, "lineno", 0)
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            return f"a gradient is assigned ({source.path}:{line})"
        if not guarded(source, node):
            return f"a gradient is used without a test for None ({source.path}:{line})"
        if not _between(ctx, loop, place, source, line):
            return f"a gradient may be looked at before the backward pass ({source.path}:{line})"
    return None


def _between(ctx: Context, loop: TrainingLoop, place: Span, source: Source, line: int) -> bool:
    """Whether a look at a gradient stands between the backward pass and zero_grad in the loop."""
    zero = next((f.line for f in _ways(ctx, loop, place)), None)
    backward = next((at.line for call in ctx.calls("backward") if (at := loop.place(call)) is not None), None)
    if zero is None or backward is None or zero == backward:
        return False
    lines = [line] if source.path == loop.source.path else []
    function = source.function_at(line)
    if function is not None and function is not loop.source.function_at(loop.node.lineno):
        uses = [n for s in ctx.sources for n in ast.walk(s.tree) if _names(n, function.name)]
        here = [n for n in ast.walk(loop.source.tree) if _names(n, function.name)]
        if len(uses) != len(here):
            return False
        lines = [n.lineno for n in here if isinstance(n, ast.expr)]
    last = loop.node.body[-1].end_lineno or loop.node.body[-1].lineno
    if not all(loop.node.body[0].lineno <= at <= last for at in lines):
        return False
    return all((at <= zero or at > backward) if zero < backward else backward < at <= zero for at in lines)


def _names(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _ways(ctx: Context, loop: TrainingLoop, place: Span) -> Iterator[Span]:
    """The positions in the loop's body from which a position is reached."""
    for call in ctx.calls("zero_grad"):
        if call.span == place and (at := loop.place(call)) is not None:
            yield at
    for frames in _frames(ctx, place, loop):
        yield from (frame for frame in frames[::-1] if loop.holds(frame))


def _uneven(ctx: Context, loop: TrainingLoop, place: Span) -> str | None:
    """Why a step might give a gradient to other parameters than the step before."""
    if not _clips(ctx) and all(_is_plain(use) for use in ctx.profile.optimizers):
        return None  # plain SGD adds nothing to a parameter for a gradient of zero
    backwards, steps = ctx.calls("backward"), ctx.calls("optimizer.step")
    modules = [c for c in ctx.calls("module") if c.facts.get("training", True) and loop.place(c) is not None]
    if len({str(c.span) for c in backwards}) != 1 or len({str(c.span) for c in steps}) != 1 or not modules:
        return f"{CHANGES}, and the loop has several backward passes or steps"
    if not _one_after_another(ctx, loop, place, backwards[0], steps[0]):
        return f"{CHANGES}, and not every step is seen to follow a backward pass"
    package = _package(ctx)
    if package is not None:
        return f"{CHANGES}, and whether every step uses the same parameters is not known: {package}"
    pair = parting(modules[0], backwards[0])
    found = forward_pass(ctx.read(pair[0].path), modules[0], backwards[0]) if pair is not None else None
    if found is None or isinstance(found, str):
        return f"{CHANGES}, and the way from the model to its loss is not seen"
    for source, node in choices(ctx.sources, found.source, found.statements):
        return f"{CHANGES}, and line {getattr(node, 'lineno', 0)} of {source.path} may choose other parameters"
    return _thawed(ctx)


def _is_plain(use: OptimizerUse) -> bool:
    settings = ("momentum", "weight_decay", "nesterov")
    return use.kind.endswith(".SGD") and use.groups == 1 and not any(use.arguments.get(name) for name in settings)


def _clips(ctx: Context) -> bool:
    """Whether norms of gradients are taken: zeros among them may round their sum differently."""
    return any("clip_grad" in source.text or "get_total_norm" in source.text for source in ctx.sources)


def _one_after_another(ctx: Context, loop: TrainingLoop, place: Span, backward: LoopCall, taken: LoopCall) -> bool:
    """Whether each optimizer step comes after a backward pass since gradients were dropped, in the order of lines."""
    pair = parting(backward, taken)
    if pair is None or pair[0].line >= pair[1].line:
        return False
    source = ctx.read(pair[0].path)
    conditions = [_conditions(source, span) for span in pair]
    if not set(map(id, conditions[0])) <= set(map(id, conditions[1])):
        return False
    zeros = [f.line for f in _ways(ctx, loop, place)] + [place.line]
    outer = enclosing_loop(source, pair[1])
    inner = enclosing_loop(source, pair[0])
    nested = inner is not None and outer is not None and inner is not outer
    first = inner.lineno if nested and inner is not None else pair[0].line
    return not any(first <= line < pair[1].line for line in zeros if place.path == source.path)


def _conditions(source: Source, span: Span) -> list[ast.AST]:
    """What may keep a position from being reached: branches and handlers around it, and loops that may be empty."""
    call = _call(source, span)
    node: ast.AST | None = call
    found: list[ast.AST] = []
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        parent = source.parents.get(node)
        if isinstance(parent, (ast.If, ast.IfExp, ast.Try, ast.Match, ast.BoolOp)):
            found.append(parent)
        node = parent
    return found


def _package(ctx: Context) -> str | None:
    """An installed package whose modules the model uses and whose branches are not known."""
    for graph in ctx.graphs:
        for node in graph.nodes:
            for frame in node.frames:
                path = frame.path.replace("\\", "/")
                inside = path.rpartition("-packages/")[2] if "-packages/" in path else None
                if inside is not None and not inside.startswith(KNOWN):
                    return f"parts of the model are in {inside.split('/')[0]}"
    return None


def _thawed(ctx: Context) -> str | None:
    """Where a loop decides which parameters are trained: freezing layers by epoch."""
    for source in ctx.sources:
        for node in ast.walk(source.tree):
            switched = isinstance(node, ast.Attribute) and node.attr == "requires_grad_"
            stored = (
                isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store)
            )
            if (switched or stored) and not _before_training(ctx, source, node):
                return f"{CHANGES}, and parameters are frozen or thawed ({source.path}:{getattr(node, 'lineno', 0)})"
    return None


def _before_training(ctx: Context, source: Source, node: ast.AST) -> bool:
    """Whether a statement stands at the top level of its file, under no loop but one over parameters or modules."""
    while node in source.parents:
        node = source.parents[node]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name not in ("__init__", "main"):
            return False
        over = ast.unparse(node.iter) if isinstance(node, ast.For) else ""
        if isinstance(node, ast.While) or (over and not over.endswith(("parameters()", "modules()", "children()"))):
            return False
    return True
