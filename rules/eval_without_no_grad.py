"""An evaluation records the graph that only a backward pass would need.

## What it does
Puts the loop between `model.eval()` and `model.train()` under `with torch.no_grad():`.

## Why it costs
With gradients on, every operation of the forward pass keeps its inputs until the result is dropped and writes down how
to differentiate itself. Memory that the allocator could hand out again right away is held, and the host does more work
per operation.

## When not to
`eval()` alone says nothing about gradients: adversarial examples, forces from energies and frozen BatchNorm all
differentiate in evaluation mode. The rule declines where a file asks for gradients inside, where the run differentiated
there, where a library is handed the model, where a value that may carry a gradient is kept, returned or read later, and
in generators. Inside autocast, which keeps casts of weights, a cast made
without gradients would be used by the training step. Multi-head attention of torch.nn takes another path without
gradients and a compiled model is compiled once more: both are told, never edited.

## Fix safety
EXACT: the same operations on the same values; bit-identical losses are demanded.

## References
- torch.no_grad, PyTorch documentation: "reduces memory consumption for computations"
- pytorch/pytorch#2104: out of memory in the first evaluation
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor import blocks, codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.callees import called_names, callees, named
from advisor.usercode.gradfree import Block
from advisor.usercode.places import is_own

SHARE = 0.7  # of an evaluation: the most that leaving the graph out was measured to save
GUARDS = frozenset("no_grad inference_mode set_grad_enabled set_grad".split())
DIFFERENTIATES = frozenset(
    "backward grad requires_grad requires_grad_ enable_grad is_grad_enabled retain_grad register_hook "
    "vjp jvp jacrev jacfwd hessian grad_and_value dual_level grad_fn saved_tensors_hooks make_dot".split()
)
OTHER_PATHS = frozenset("MultiheadAttention TransformerEncoderLayer TransformerEncoder Transformer".split())
ATTENTION = "multi_head_attention_forward"
ASKED = "gradients were asked for between eval() and train() in this run"
AUTOCAST = "autocast set_autocast_enabled set_autocast_cache_enabled".split()
NOT_RUN = "cannot tell: this evaluation did not run in the timed steps"
BEFORE = """\
import torch


def evaluate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        logits = model(x)
        total += loss_of(logits, y).item()
        count += (logits.argmax(-1) == y).sum()
    model.train()
    return total, count


for step, (x, y) in enumerate(train):
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        evaluate(model, test)
"""
AFTER = """\
import torch


def evaluate(model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x)
            total += loss_of(logits, y).item()
            count += (logits.argmax(-1) == y).sum()
    model.train()
    return total, count


for step, (x, y) in enumerate(train):
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        evaluate(model, test)
"""
RUN = {"evaluation": (0.1, 5_000.0)}
GRAD = {"evaluation": {"grad": True}}
ATTACK = BEFORE.replace("logits = model(x)", "logits = model(attack(x))").replace(
    "\n\nfor step", "\n\ndef attack(x):\n    return x + torch.autograd.grad(model(x).sum(), x)[0].sign()\n\n\nfor step"
)


@dataclass(frozen=True)
class Evaluation:
    """Statements of one block between `eval()` and `train()` that call the module, and the `rest` up to there."""

    source: Source
    statements: tuple[ast.stmt, ...]
    rest: tuple[ast.stmt, ...]
    module: str

    @property
    def place(self) -> ast.stmt:
        """The loop among them, else the first one."""
        loops = (s for s in self.statements if isinstance(s, (ast.For, ast.While)))
        return next(loops, self.statements[0])


class EvalWithoutNoGrad(Rule):
    """model.eval(); for x in loader: model(x) -> the loop under torch.no_grad()."""

    id = "eval-without-no-grad"
    safety = Safety.EXACT
    needs = ("steps", "calls")
    worth = 0.02
    order = 35
    examples = (
        Example(before=BEFORE, after=AFTER, profile=step(20_000, calls=RUN, called=GRAD), saves=(0, 3_501)),
        Example(
            before=AFTER, after=None, profile=step(20_000, calls=RUN, called=GRAD), because="gradients are off here"
        ),
        Example(
            before=ATTACK,
            after=None,
            profile=step(20_000, calls=RUN, called=GRAD),
            because="line 16 asks for gradients: `torch.autograd.grad`",
        ),
        Example(
            before=BEFORE.replace("loss_of(logits, y).item()", "loss_of(logits, y)"),
            after=None,
            profile=step(20_000, calls=RUN, called=GRAD),
            because="`total` of line 9 may carry a gradient out of the evaluation",
        ),
        Example(
            before=BEFORE,
            after=None,
            profile=step(20_000, calls={"evaluation": (0.0, 0.0)}, called=GRAD),
            because=NOT_RUN,
        ),
        Example(
            before=BEFORE,
            after=None,
            profile=step(2_000_000, calls=RUN, called=GRAD),
            because="evaluation takes 0.2% of the time of the steps",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        times: dict[tuple[str, int], list[LoopCall]] = {}
        for call in ctx.calls("evaluation"):
            assert call.span is not None
            if is_own(call.span):
                times.setdefault((call.span.path, call.span.line), []).append(call)
        for _, calls in sorted(times.items()):
            if any(call.facts.get("grad") for call in calls):
                yield from self._measured(ctx, calls)
        for source in ctx.sources:
            for unseen in _eval_calls(source):
                if (source.path, unseen.lineno) not in times:
                    yield from self._unseen(ctx, source, unseen)

    def _measured(self, ctx: Context, calls: Sequence[LoopCall]) -> Iterator[Finding | Decline]:
        span = calls[0].span
        assert span is not None
        source = ctx.read(span.path)
        call = next((c for c in _eval_calls(source) if c.lineno == span.line), None)
        found = None if call is None else _evaluation(ctx, source, call)
        if found is None:
            return
        place = source.span(found.place)
        reason = _guarded(ctx, found) or _refused(ctx, found)
        if reason is None and any(c.facts.get("differentiated") for c in calls):
            reason = ASKED
        if reason is not None:
            yield self.decline(place, reason)
            return
        host_us = sum(call.host_us for call in calls)
        share = host_us / (ctx.step_us + host_us) if host_us > ctx.step_us else host_us / ctx.step_us
        if host_us == 0.0:
            yield self.decline(place, NOT_RUN, needs=("steps",))
        elif share < ctx.gate(self):
            yield self.decline(place, f"evaluation takes {share:.1%} of the time of the steps")
        else:
            yield self._finding(ctx, found, place, sum(c.per_step for c in calls), min(host_us, ctx.step_us))

    def _finding(self, ctx: Context, found: Evaluation, place: Span, per_step: float, cited_us: float) -> Finding:
        told = _told(ctx, found, [frame for call in ctx.calls("evaluation") for frame in call.frames])
        first, last = found.statements[0], found.statements[-1]
        return self.finding(
            place,
            "the evaluation records a graph that nothing differentiates",
            cited_us=cited_us,
            high_us=SHARE * cited_us,
            basis="model",
            evidence=(
                Evidence(what="evaluations per step", value=round(per_step, 4), unit="evaluations"),
                Evidence(what="time of evaluation per step", value=round(cited_us, 1), unit="us"),
            ),
            values={} if told is None else {"told": told},
            bindings={"first": found.source.span(first), "last": found.source.span(last)},
        )

    def _unseen(self, ctx: Context, source: Source, call: ast.Call) -> Iterator[Decline]:
        """An evaluation that did not run is worth a word only where its edit would be right."""
        found = _evaluation(ctx, source, call)
        if found is None or not isinstance(found.place, (ast.For, ast.While)):
            return
        if _guarded(ctx, found) is None and _refused(ctx, found) is None:
            yield self.decline(source.span(found.place), NOT_RUN, needs=("steps",))

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, f"told, not edited: {finding.values['told']}")
        first, last = (source.statements_at(finding.bindings[name].line)[0] for name in ("first", "last"))
        block = source.block_of(first)
        inside = block[block.index(first) : block.index(last) + 1]
        try:
            edits, header = codemod.named_modules(source, first.lineno, "with torch.no_grad():")
            edits = [*edits, *blocks.put_under(source, inside, header)]
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the evaluation cannot be put under no_grad: {error}")
        return self.edit(finding, "evaluate without gradients", blocks.joined(edits))


# ------------------------------------------------------------------------------------------------------- the evaluation


def _eval_calls(source: Source) -> list[ast.Call]:
    """Statements that are `x.eval()`."""
    calls = [s.value for s in ast.walk(source.tree) if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "eval" and not c.args]


def _evaluation(ctx: Context, source: Source, call: ast.Call) -> Evaluation | None:
    """The statements after an `x.eval()`, up to `x.train()`, from the first that calls x to the last."""
    assert isinstance(call.func, ast.Attribute)
    module = ast.unparse(call.func.value)
    statement = source.statement_of(call)
    block = source.block_of(statement)
    inside: list[ast.stmt] = []
    for following in block[block.index(statement) + 1 :]:
        if any(_is_train(node, module) for node in ast.walk(following)):
            break
        inside.append(following)
    calling = [s for s in inside if _runs(ctx, source, s, module)]
    if not calling:
        return None
    kept = inside[inside.index(calling[0]) : inside.index(calling[-1]) + 1]
    found = Evaluation(source, tuple(kept), tuple(inside[inside.index(calling[-1]) + 1 :]), module)
    if _refused(ctx, found) is None:
        return found
    whole = Evaluation(source, (*found.statements, *found.rest), (), module)
    return whole if _refused(ctx, whole) is None else found


def _is_train(node: ast.AST, module: str) -> bool:
    func = node.func if isinstance(node, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr == "train" and ast.unparse(func.value) == module


def _runs(ctx: Context, source: Source, statement: ast.stmt, module: str) -> bool:
    """Whether a statement calls the module, one of its methods, or a function of the user's that it hands it to."""
    for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
        if ast.unparse(call.func) == module:
            return True
        given = [*call.args, *(k.value for k in call.keywords)]
        if any(ast.unparse(argument) == module for argument in given) and callees(ctx.sources, [call]):
            return True
    return False


# ---------------------------------------------------------------------------------------------------------- what speaks


def _guarded(ctx: Context, found: Evaluation) -> str | None:
    """Whether gradients are turned off around or inside, in the file."""
    off = "gradients are off here"
    node: ast.AST | None = found.statements[0]
    while node is not None:
        heads: list[ast.AST] = []
        if isinstance(node, (ast.With, ast.AsyncWith)):
            heads = list(node.items)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            heads = list(node.decorator_list)
        if named(heads, GUARDS) is not None:
            return off
        node = found.source.parents.get(node)
    holders = [*found.statements, *(function for _, function in callees(ctx.sources, found.statements))]
    before = found.source.block_of(found.statements[0])[: found.source.block_of(found.statements[0]).index(found.place)]
    return off if named([*holders, *before], GUARDS) is not None else None


def _refused(ctx: Context, found: Evaluation) -> str | None:
    """Why the statements may need gradients."""
    function = found.source.function_at(found.place.lineno)
    if isinstance(function, ast.AsyncFunctionDef) or (function is not None and _yields(function)):
        return "a generator would leave gradients off between its values"
    forwards = [(s, n) for s in ctx.sources for n in ast.walk(s.tree) if _is_forward(n)]
    holders: list[tuple[Source, ast.AST]] = [(found.source, s) for s in found.statements]
    inside = [*found.statements, *(n for _, n in forwards)]
    for source, holder in (*holders, *forwards, *callees(ctx.sources, inside)):
        asks = named([holder], DIFFERENTIATES)
        if asks is not None and isinstance(asks, (ast.expr, ast.keyword)):
            text = asks.arg if isinstance(asks, ast.keyword) else ast.unparse(asks)
            where = "" if source is found.source else f" of {source.path}"
            return f"line {asks.lineno}{where} asks for gradients: `{text}`"
    library = _handed_to_a_library(ctx, found)
    if library is not None:
        return f"`{library}` is a library's, has the model and may ask for gradients"
    leak = Block(found.source, found.statements, ctx.sources, found.module).leaking()
    if leak is not None:
        what = leak.id if isinstance(leak, ast.Name) else ast.unparse(leak)
        return f"`{what}` of line {leak.lineno} may carry a gradient out of the evaluation"  # type: ignore[attr-defined]
    return None


def _handed_to_a_library(ctx: Context, found: Evaluation) -> str | None:
    """What the statements call that a library gives and that is handed the module, or was when it was constructed."""
    names = _names_of_the_module(found)
    made = [
        f"{ast.unparse(target)}."
        for source in ctx.sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if _is_handed(ctx, source, node.value, names) and ast.unparse(target) not in names
    ]
    for call in (n for statement in found.statements for n in ast.walk(statement) if isinstance(n, ast.Call)):
        text = ast.unparse(call.func)
        own = f"{text}.".startswith(f"{found.module}.")
        if not own and (_is_handed(ctx, found.source, call, names) or f"{text}.".startswith(tuple(made))):
            return text
    return None


def _names_of_the_module(found: Evaluation) -> set[str]:
    """How the evaluation names the module, and how its callers in the file do."""
    names, function = {found.module}, found.source.function_at(found.place.lineno)
    arguments = [] if function is None else [a.arg for a in function.args.args]
    if function is None or found.module not in arguments:
        return names
    for call in (n for n in ast.walk(found.source.tree) if isinstance(n, ast.Call)):
        if next(called_names([call]), None) == function.name:
            names |= {ast.unparse(a) for a in call.args[arguments.index(found.module) :][:1]}
            names |= {ast.unparse(k.value) for k in call.keywords if k.arg == found.module}
    return names


def _is_handed(ctx: Context, source: Source, call: ast.Call, names: set[str]) -> bool:
    """Whether a call of something imported, from neither torch nor the user's files, is given the module."""
    qualified = source.qualified(call.func)
    given = [*call.args, *(k.value for k in call.keywords)]
    if qualified is None or qualified.startswith(("torch.", "copy.")):
        return False
    if not any(ast.unparse(argument) in names for argument in given):
        return False
    kinds, last = (ast.FunctionDef, ast.ClassDef), qualified.rpartition(".")[2]
    return not any(isinstance(n, kinds) and n.name == last for s in ctx.sources for n in ast.walk(s.tree))


def _yields(function: ast.AST) -> bool:
    return any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(function))


def _is_forward(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in ("forward", "__call__")


def _told(ctx: Context, found: Evaluation, frames: Sequence[Span]) -> str | None:
    """Why the same evaluation without gradients may not be the same to the last bit."""
    takes = any(ATTENTION in n.target for g in ctx.profile.graphs for n in g.nodes)
    if takes or any(named([source.tree], OTHER_PATHS) is not None for source in ctx.sources):
        return "multi-head attention takes another path without gradients"
    for source in ctx.sources:
        if named([source.tree], ("compile",)) is not None:
            return "a compiled model is compiled once more without gradients"
    if any(call.facts.get("autocast") for call in ctx.calls("evaluation")) or _under_autocast(ctx, found, frames):
        return "autocast, or a cache, would keep weights made without gradients for the training step"
    return None


def _under_autocast(ctx: Context, found: Evaluation, frames: Sequence[Span]) -> bool:
    """Whether autocast may be on around an evaluation: asked for there, or anywhere while something unknown is open."""
    places = [(found.source, found.place.lineno), *((ctx.read(f.path), f.line) for f in frames if is_own(f))]
    heads: list[ast.expr] = []
    for source, line in places:
        for node in ast.walk(source.tree):
            if line not in range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", None) or 0) + 1):
                continue
            if isinstance(node, (ast.With, ast.AsyncWith)):
                heads += [item.context_expr for item in node.items]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                heads += node.decorator_list
    if named(heads, (*AUTOCAST, "cached")) is not None:
        return True
    entered = any(named([source.tree], ("__enter__", "enter_context", AUTOCAST[1])) for source in ctx.sources)
    return (bool(heads) or entered) and any(named([source.tree], AUTOCAST) is not None for source in ctx.sources)
