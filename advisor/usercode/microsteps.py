"""Loops of micro-steps whose gradients one optimizer step adds up, and which of them that step follows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.codemod import CannotEdit
from advisor.model import Span
from advisor.rule import Context
from advisor.source import Source
from advisor.usercode.callees import called_names, callees
from advisor.usercode.trainingloop import TrainingLoop, loop_of

SEVERAL = 1.5  # backward passes per optimizer step from which on one place accumulates
SEQUENCES = frozenset("split chunk tensor_split".split())  # of tensors: they return tuples
CONSTRUCTORS = frozenset("list tuple sorted".split())
SIMPLE = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.expr_context)
BRANCHES = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.For, ast.AsyncFor, ast.While)
PURE = (*SIMPLE, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop)


@dataclass(frozen=True)
class Accumulation:
    """The innermost loop around a backward pass that runs several times per optimizer step.

    `backwards` and `steps` are the positions in its body through which it makes backward passes and optimizer steps; a
    loop inside which no optimizer steps accumulates over all of its iterations. `per_step` counts its backward passes.
    """

    loop: TrainingLoop
    backwards: tuple[Span, ...]
    steps: tuple[Span, ...]
    per_step: float

    @property
    def source(self) -> Source:
        """The file of the loop."""
        return self.loop.source


def accumulations(ctx: Context) -> tuple[Accumulation, ...]:
    """The loops of a run that accumulate gradients, each once; a loop that steps in every iteration does not."""
    found: dict[tuple[str, int], Accumulation] = {}
    for call in ctx.calls("backward"):
        loop = loop_of(call, ctx.read, ctx.sources) if call.per_step > SEVERAL else None
        place = loop.place(call) if loop is not None else None
        if loop is None or place is None:
            continue
        key = (loop.source.path, loop.node.lineno)
        steps = [at for step in ctx.calls("optimizer.step") if (at := loop.place(step)) is not None]
        if any(not loop.conditions(node) for at in steps for node in _calls_at(loop.source, at)[:1]):
            continue
        before = found.get(key)
        found[key] = Accumulation(
            loop=loop,
            backwards=(*(before.backwards if before else ()), place),
            steps=tuple(steps),
            per_step=call.per_step + (before.per_step if before else 0.0),
        )
    return tuple(found[key] for key in sorted(found))


def _calls_at(source: Source, span: Span) -> list[ast.expr]:
    return [node for node in source.expressions_at(span.line, span.column) if isinstance(node, ast.Call)]


def statement_at(loop: TrainingLoop, span: Span) -> ast.stmt:
    """The statement of the loop's own body that holds a position, which every iteration evaluates.

    Raises `CannotEdit` where a condition, a loop or a `try` stands between.
    """
    held = next(s for s in loop.body if s.lineno <= span.line <= (s.end_lineno or s.lineno))
    inner: ast.stmt = held
    while isinstance(inner, (ast.With, ast.AsyncWith)) and span.line >= inner.body[0].lineno:
        inner = next(s for s in inner.body if s.lineno <= span.line <= (s.end_lineno or s.lineno))
    if not isinstance(inner, (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)):
        raise CannotEdit(f"line {span.line} does not run in every micro-step")
    return held


def check_always(ctx: Context, accumulation: Accumulation) -> None:
    """Raises `CannotEdit` where a function that the loop calls may leave out its backward pass."""
    for call in ctx.calls("backward"):
        place = accumulation.loop.place(call)
        if place not in accumulation.backwards:
            continue
        for frame in call.frames[call.frames.index(place) + 1 :]:
            source = ctx.read(frame.path)
            function = source.function_at(frame.line)
            if function is None or _may_skip(source, function, frame):
                raise CannotEdit(f"the backward pass of {frame} may be left out in a micro-step")


def _may_skip(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, frame: Span) -> bool:
    node: ast.AST = next(iter(_calls_at(source, frame)), function)
    while node is not function:
        node = source.parents[node]
        if isinstance(node, BRANCHES):
            return True
    leaves = (n for n in ast.walk(function) if isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom)))
    return any(n.lineno < frame.line and source.function_at(n.lineno) is function for n in leaves)


def _is_caught(loop: TrainingLoop) -> bool:
    """Whether an exception may end the loop early and not what is around it."""
    node: ast.AST | None = loop.source.parents.get(loop.node)
    caught = False
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        caught |= isinstance(node, ast.Try)
        if caught and isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return True
        node = loop.source.parents.get(node)
    return False


def not_last(accumulation: Accumulation, first: ast.stmt) -> str:
    """A test that holds in every micro-step but the one that the optimizer step follows, to be evaluated before
    `first`.

    Raises `CannotEdit` where the loop does not show one.
    """
    loop = accumulation.loop
    if accumulation.steps:
        return _not_stepping(accumulation, first)
    if not isinstance(loop.node, ast.For):
        raise CannotEdit("the loop does not show which micro-step is the last")
    if _is_caught(loop):
        raise CannotEdit("an exception that is caught may end the loop before its last micro-step")
    leaving = next(_leaving(loop.body), None)
    if leaving is not None:
        raise CannotEdit(f"line {leaving.lineno} may leave a micro-step or the loop early")
    iterated = loop.node.iter
    name = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else None
    if name == "range":
        return _within_range(loop.source, loop.node)
    if name == "enumerate":
        return _within_enumerate(loop.source, loop.node)
    raise CannotEdit("the loop does not count its micro-steps")


# ------------------------------------------------------------------------------------------------- loops of their own


def _within_range(source: Source, node: ast.For) -> str:
    call = node.iter
    assert isinstance(call, ast.Call)
    from_zero = len(call.args) == 1 or (len(call.args) == 2 and _is_zero(call.args[0]))
    if call.keywords or not from_zero or not isinstance(node.target, ast.Name):
        raise CannotEdit("the loop does not count its micro-steps from 0")
    count = call.args[-1]
    if not all(isinstance(inner, SIMPLE) for inner in ast.walk(count)):
        raise CannotEdit("the number of micro-steps is not a plain value")
    _check_kept(node.body, [node.target, count])
    if isinstance(count, ast.Constant) and isinstance(count.value, int):
        return f"{node.target.id} < {count.value - 1}"
    text = source.segment(count)
    tight = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
    if isinstance(count, ast.BinOp) and not isinstance(count.op, tight):
        text = f"({text})"
    return f"{node.target.id} < {text} - 1"


def _within_enumerate(source: Source, node: ast.For) -> str:
    call, target = node.iter, node.target
    assert isinstance(call, ast.Call)
    counter = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
    if len(call.args) != 1 or call.keywords or not isinstance(counter, ast.Name):
        raise CannotEdit("the loop does not count its micro-steps from 0")
    over = call.args[0]
    if not isinstance(over, ast.Name) or not _is_sequence(source, node, over.id):
        raise CannotEdit("the number of micro-steps is not known: give the loop a list")
    _check_kept(node.body, [counter, over])
    return f"{counter.id} < len({over.id}) - 1"


def _is_sequence(source: Source, node: ast.For, name: str) -> bool:
    """Whether a name stands for a list or tuple wherever it is given a value around the loop."""
    scope: ast.AST = source.function_at(node.lineno) or source.tree
    stored = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
    values = [parent.value for n in stored if isinstance(parent := source.parents[n], ast.Assign)]
    return bool(values) and len(values) == len(stored) and all(_makes_sequence(value) for value in values)


def _makes_sequence(value: ast.expr) -> bool:
    if isinstance(value, (ast.List, ast.ListComp, ast.Tuple)):
        return True
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        return value.func.id in CONSTRUCTORS
    return isinstance(value.func, ast.Attribute) and value.func.attr in SEQUENCES


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _leaving(body: Sequence[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """What ends an iteration of the loop with this body, or the loop, before its last statement."""
    pending: list[tuple[ast.AST, bool]] = [(statement, False) for statement in body]
    while pending:
        node, nested = pending.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            yield node
        if isinstance(node, (ast.Break, ast.Continue)) and not nested:
            yield node
        loops = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        pending += [(child, nested or loops) for child in ast.iter_child_nodes(node)]


def _check_kept(body: Sequence[ast.stmt], read: Sequence[ast.expr]) -> None:
    """Raises `CannotEdit` where statements give one of the names that expressions read another value."""
    names = {n.id for expr in read for n in ast.walk(expr) if isinstance(n, ast.Name)}
    attributes = {n.attr for expr in read for n in ast.walk(expr) if isinstance(n, ast.Attribute)}
    for node in (n for statement in body for n in ast.walk(statement)):
        stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if stored and ((isinstance(node, ast.Name) and node.id in names) or getattr(node, "attr", None) in attributes):
            raise CannotEdit(f"`{ast.unparse(node)}` gets another value in the loop")


# ----------------------------------------------------------------------------------------- loops that step now and then


def _not_stepping(accumulation: Accumulation, first: ast.stmt) -> str:
    loop, source = accumulation.loop, accumulation.source
    held = {id(s): s for at in accumulation.steps for s in loop.body if _any_inside([at], [s])}
    stepping = next(iter(held.values()), None)
    if len(held) != 1 or not isinstance(stepping, ast.If) or _any_inside(accumulation.steps, stepping.orelse):
        raise CannotEdit("the optimizer does not step under one condition of the loop")
    test = stepping.test
    calls = [n for n in ast.walk(test) if isinstance(n, ast.Call)]
    plain = all(isinstance(c.func, ast.Name) and c.func.id == "len" and isinstance(c.args[0], ast.Name) for c in calls)
    if not plain or not all(isinstance(n, (*PURE, ast.Call)) for n in ast.walk(test)):
        raise CannotEdit("the condition of the optimizer step does more than compare plain values")
    begin, end = loop.body.index(first), loop.body.index(stepping)
    if begin >= end or not all(_any_inside([at], loop.body[begin:end]) for at in accumulation.backwards):
        raise CannotEdit("the optimizer step does not follow the backward pass")
    _check_kept(loop.body[begin:end], [test])
    sources = tuple({one.path: one for one in (source, *loop.others)}.values())
    for one in sources:
        _check_attributes(one, test)
    changing = {n.id for n in ast.walk(loop.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if not changing & {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}:
        raise CannotEdit("the loop does not count what the condition of the optimizer step asks for")
    _check_only(sources, stepping)
    return _negated(source, test)


def _any_inside(spans: Sequence[Span], statements: Sequence[ast.stmt]) -> bool:
    return any(s.lineno <= span.line <= (s.end_lineno or s.lineno) for s in statements for span in spans)


def _check_attributes(source: Source, test: ast.expr) -> None:
    """An attribute or a name that a function changes could be another one when the condition is evaluated."""
    names = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    plain = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and plain & set(node.names):
            raise CannotEdit(f"line {node.lineno} of {source.path} may change what the condition asks for")
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Store):
            function = source.function_at(node.lineno)
            if function is None or function.name != "__init__":
                raise CannotEdit(f"`{ast.unparse(node)}` changes")


def _check_only(sources: Sequence[Source], stepping: ast.If) -> None:
    """An optimizer step after the loop, say, would take gradients that were never reduced."""
    inside = _step_calls(stepping.body)
    names = {name for call in inside for name in _step_names(call)}
    through = [function for _, function in callees(sources, stepping.body)]
    for source in sources:
        for call in _step_calls([source.tree]):
            if any(call is other for other in inside) or not (names & _step_names(call) or _is_optimizer(call)):
                continue
            function = source.function_at(call.lineno)
            if function not in through or _is_called_beside(sources, function, [*stepping.body, *through]):
                where = "" if source is sources[0] else f" of {source.path}"
                raise CannotEdit(f"line {call.lineno}{where} may step without the condition")


def _is_called_beside(sources: Sequence[Source], function: ast.AST | None, inside: Sequence[ast.AST]) -> bool:
    """Whether a function of this name is called elsewhere than in some statements."""
    name = getattr(function, "name", "")
    counts = [list(called_names(nodes)).count(name) for nodes in ([s.tree for s in sources], inside)]
    return counts[0] != counts[1]


def _is_optimizer(call: ast.Call) -> bool:
    return any(part in name.lower() for name in _step_names(call) for part in ("opt", "scaler"))


def _step_calls(nodes: Sequence[ast.AST]) -> list[ast.Call]:
    calls = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "step"]


def _step_names(call: ast.Call) -> set[str]:
    """Of `scaler.step(optimizer)`: scaler and optimizer."""
    assert isinstance(call.func, ast.Attribute)
    return {ast.unparse(node) for node in (call.func.value, *call.args) if not isinstance(node, ast.Constant)}


def _negated(source: Source, test: ast.expr) -> str:
    text = source.segment(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = (test.left, test.comparators[0])
        if all(isinstance(inner, SIMPLE) for side in sides for inner in ast.walk(side)):
            return f"{source.segment(sides[0])} != {source.segment(sides[1])}"
    return f"not ({text})"
