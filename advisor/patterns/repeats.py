"""Follow a key or value of an attention call through the user's source to the expression that repeats its heads."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from advisor.model import Graph, Node, Span
from advisor.patterns.callsites import Function, enclosing, keyword, names, scope_of, spreads
from advisor.patterns.sdpa import Repeat
from advisor.source import Source

COMPILING = frozenset({"torch.jit.script", "torch.jit.script_if_tracing"})
REPEATING = frozenset(  # what a helper may call
    "repeat_interleave expand reshape view flatten unsqueeze contiguous clone size dim len int isinstance".split()
)
PASSED = frozenset({"transpose", "contiguous"})  # may stand between the repeat and the call


class Unread(Exception):
    """Why the source of a repeat was not found."""


@dataclass(frozen=True)
class Operand:
    """`repeated` is the expression that repeats, `plain` what it repeats; `idle` is its statement if that would become
    `k = k`."""

    repeated: ast.expr
    plain: ast.expr
    idle: ast.stmt | None


def operand_of(
    read: Callable[[str], Source],
    source: Source,
    graph: Graph,
    repeat: Repeat,
    expression: ast.expr,
    statement: ast.stmt,
) -> Operand:
    """Follow an argument, given in `statement`, to the expression that repeats its heads; raises `Unread`."""
    for _ in range(8):
        method = expression.func if isinstance(expression, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in PASSED:
            expression = method.value
            continue
        if isinstance(expression, ast.Name):
            before = _assigned(source, expression, statement)
            expression, statement = before.value, before
            continue
        if not _made(source, graph.nodes[repeat.last], expression):
            break
        plain = _plain(read, source, graph, repeat, expression)
        alone = isinstance(statement, ast.Assign) and statement.value is expression
        target = statement.targets[0] if alone and isinstance(statement, ast.Assign) else None
        same = isinstance(target, ast.Name) and isinstance(plain, ast.Name) and target.id == plain.id
        return Operand(expression, plain, statement if same else None)
    raise Unread("the repeat is not an operand that can be followed")


def _assigned(source: Source, name: ast.Name, before: ast.stmt) -> ast.Assign:
    """The assignment that gave a name its value in straight-line code, read by nothing but `before`."""
    block = source.block_of(before)
    if isinstance(scope_of(source, name), ast.Lambda):
        raise Unread(f"`{name.id}` stands inside a lambda")
    for statement in reversed(block[: block.index(before)]):
        bound = list(names(statement, name.id, ast.Store))
        reads = list(names(statement, name.id, ast.Load))
        if bound and isinstance(statement, ast.Assign) and statement.targets == bound:
            _check_read_once(source, statement, name)
            return statement
        if bound or reads:
            raise Unread(f"`{name.id}` is read or changed in line {statement.lineno}")
    raise Unread(f"`{name.id}` is not computed in this block")


def _check_read_once(source: Source, statement: ast.Assign, name: ast.Name) -> None:
    """Nothing but `name` itself may read the value, however it is read: its shape would be another one."""
    scope = scope_of(source, statement)
    if any(names(scope, "locals", ast.Load)) or any(names(scope, "eval", ast.Load)):
        raise Unread(f"`{name.id}` may be read by locals()")
    loop = enclosing(source, statement, (ast.For, ast.AsyncFor, ast.While))
    inside = set(ast.walk(statement))
    if loop is not None and any(r is not name and r not in inside for r in names(loop, name.id, ast.Load)):
        raise Unread(f"`{name.id}` may be read in the next turn of a loop")
    rebound = [n.lineno for n in names(scope, name.id, ast.Store) if n.lineno >= name.lineno]
    last = min(rebound, default=None)
    for read in names(scope, name.id, ast.Load):
        if read is not name and read.lineno > statement.lineno and (last is None or read.lineno <= last):
            raise Unread(f"`{name.id}` is read again in line {read.lineno}")


def _made(source: Source, node: Node, expression: ast.expr) -> bool:
    """Whether an operation was called at this expression, directly or in a function that it calls."""
    column = source.character(expression.lineno, expression.col_offset)
    return any(
        frame.path == source.path
        and frame.line == expression.lineno
        and (frame.end_column is None or frame.column == column)
        for frame in node.frames
    )


def _plain(
    read: Callable[[str], Source], source: Source, graph: Graph, repeat: Repeat, expression: ast.expr
) -> ast.expr:
    """The expression whose heads are repeated."""
    first = graph.nodes[repeat.first]
    if not isinstance(expression, ast.Call):
        raise Unread("the repeat is not a call")
    if first.span is not None and _here(source, first.span, expression):
        return _base(source, expression)
    if spreads(expression) or first.span is None:
        raise Unread("the helper's arguments cannot be read off")
    other = read(first.span.path)
    helper = other.function_at(first.span.line)
    if helper is None or not isinstance(expression.func, (ast.Name, ast.Attribute)):
        raise Unread("the helper that repeats was not found")
    if ast.unparse(expression.func).rsplit(".", 1)[-1] != helper.name:
        raise Unread(f"the repeat is made in `{helper.name}`, which this line does not call itself")
    parameters = [a.arg for a in helper.args.args]
    if parameters[:1] == ["self"]:
        parameters = parameters[1:]
    starts = [
        n
        for n in other.expressions_at(first.span.line, first.span.column if first.span.end_column is not None else None)
        if isinstance(n, ast.Name) and n.id in parameters
    ]
    if len({n.id for n in starts}) != 1 or any(names(helper, starts[0].id, ast.Store)):
        raise Unread(f"which argument `{helper.name}` repeats is not known")
    given = dict(zip(parameters, expression.args, strict=False)) | {k.arg: k.value for k in expression.keywords}
    if starts[0].id not in given:
        raise Unread(f"which argument `{helper.name}` repeats is not known")
    work = _other_work(other, helper, starts[0].id)
    if work is not None:
        raise Unread(f"`{helper.name}` may do something else than repeat in another call (line {work.lineno})")
    return given[starts[0].id]


def _other_work(source: Source, helper: Function, parameter: str) -> ast.stmt | ast.expr | None:
    """What a helper does besides repeating the heads of a parameter, or giving it back as it is; None for nothing."""
    decorator = next((d for d in helper.decorator_list if source.qualified(d) not in COMPILING), None)
    return decorator or _other_in(helper.body, parameter)


def _other_in(block: list[ast.stmt], parameter: str) -> ast.stmt | ast.expr | None:
    for statement in block:
        if isinstance(statement, ast.If):
            gives_back = len(statement.body) == 1 and _gives(statement.body[0], parameter)
            found = (None if gives_back else statement) or _other_in(statement.orelse, parameter)
            found = found or _foreign(statement.test)
        elif isinstance(statement, (ast.Assign, ast.Return, ast.Assert)):
            stored = [n for n in ast.walk(statement) if isinstance(n, (ast.Attribute, ast.Subscript)) and _writes(n)]
            found = next(iter(stored), None) or _foreign(statement)
        else:
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            found = None if text or isinstance(statement, ast.Pass) else statement
        if found is not None:
            return found
    return None


def _gives(statement: ast.stmt, parameter: str) -> bool:
    value = statement.value if isinstance(statement, ast.Return) else None
    return isinstance(value, ast.Name) and value.id == parameter


def _foreign(node: ast.AST) -> ast.expr | None:
    """An expression that chooses between values, or a call of anything but what repeats and looks at shapes."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.NamedExpr)) and isinstance(node, ast.stmt):
            return inner
        if isinstance(inner, ast.Call) and (_called(inner) not in REPEATING or not _along_a_literal(inner)):
            return inner
    return None


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rsplit(".", 1)[-1]


def _along_a_literal(call: ast.Call) -> bool:
    """Whether the axis that a call repeats or inserts is written down, so that it is the same in every call."""
    if _called(call) not in ("repeat_interleave", "unsqueeze"):
        return True
    given = [k.value for k in call.keywords if k.arg == "dim"] or call.args[-1:]
    return len(given) == 1 and all(isinstance(n, (ast.Constant, ast.UnaryOp, ast.USub)) for n in ast.walk(given[0]))


def _writes(node: ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _here(source: Source, span: Span, expression: ast.expr) -> bool:
    return span.path == source.path and expression.lineno <= span.line <= (expression.end_lineno or expression.lineno)


def _base(source: Source, expression: ast.expr) -> ast.expr:
    """What a chain of methods and subscripts repeats: `k` of `k[:, :, None].expand(...).reshape(...)`."""
    if isinstance(expression, ast.Call):
        if not _along_a_literal(expression):
            raise Unread("the axis of the repeat is computed: it may be another one in another call")
        if (source.qualified(expression.func) or "").startswith("torch."):
            found = expression.args[0] if expression.args else keyword(expression, "input")
            if found is not None and ast.unparse(expression.func).endswith("repeat_interleave"):
                return found
        elif isinstance(expression.func, ast.Attribute):
            if expression.func.attr in ("repeat_interleave", "unsqueeze"):
                return expression.func.value
            if expression.func.attr in ("reshape", "view", "flatten", "expand", "contiguous", "clone"):
                return _base(source, expression.func.value)
    elif isinstance(expression, ast.Subscript) and not any(
        isinstance(n, (ast.Name, ast.Attribute, ast.Call)) for n in ast.walk(expression.slice)
    ):
        return expression.value
    raise Unread("the repeat is written in a form that is not known")
