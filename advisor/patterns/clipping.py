"""Read off the source whether statements clip gradients exactly as torch.nn.utils.clip_grad_norm_ does."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from advisor import codemod
from advisor.model import Span
from advisor.source import Source


@dataclass(frozen=True)
class Form:
    """Clipping written out, read off statement by statement; texts as the source has them."""

    statements: tuple[ast.stmt, ...]
    parameters: str
    limit: str
    total: str
    host: bool  # the total is a Python number


@dataclass(frozen=True)
class ClipPlace:
    """What stands at a place: a call of clip_grad_norm_ with foreach=False, or `form`, clipping written out.

    `inexact` says why it is not rewritten.
    """

    span: Span
    lines: range
    call: ast.Call | None = None
    form: Form | None = None
    inexact: str | None = None

    @staticmethod
    def read(source: Source, span: Span) -> ClipPlace | str:
        """What stands there, or why there is nothing to say about it."""
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and _is_clip(n)]
        call = next((n for n in calls if n.lineno <= span.line <= (n.end_lineno or n.lineno)), None)
        if call is not None:
            if not any(k.arg == "foreach" and _is_false(k.value) for k in call.keywords):
                return "torch clips tensor by tensor on this device or for these tensors"
            return ClipPlace(source.span(call), range(call.lineno, call.lineno + 1), call=call)
        line = range(span.line, span.line + 1)
        loop = _loop_at(source, span.line)
        if loop is None:
            return ClipPlace(span, line, inexact="the norms are not taken in a loop over statements")
        try:
            form = _read_form(source, loop)
        except _Other as other:
            return ClipPlace(span, line, inexact=str(other))
        first, last = source.span(form.statements[0]), source.span(form.statements[-1])
        whole = Span(
            path=span.path,
            line=first.line,
            column=first.column,
            end_line=last.end_line,
            end_column=last.end_column,
            function=first.function,
        )
        return ClipPlace(whole, range(first.line, (last.end_line or last.line) + 1), form=form)

    def edits(self, source: Source) -> list[codemod.Edit]:
        """The edits that put one call in place of what stands here."""
        if self.call is not None:
            return [_without_foreach(source, self.call)]
        assert self.form is not None
        form = self.form
        name, imports = codemod.module_name(source, self.span.line, "torch.nn.utils")
        text = f"{name}.clip_grad_norm_({form.parameters}, {form.limit})"
        if _reads_elsewhere(source, form.statements, form.total):
            text = f"{form.total} = {text}{'.item()' if form.host else ''}"
        indent = " " * self.span.column
        comments = [
            source.lines[line - 1].strip() for line in self.lines if source.lines[line - 1].strip().startswith("#")
        ]
        return [*imports, (self.span, f"\n{indent}".join([*comments, text]))]


class _Other(Exception):
    """The statements are not the clipping that torch's function computes."""


def _is_clip(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    return name == "clip_grad_norm_"


def _is_false(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is False


def _loop_at(source: Source, line: int) -> ast.For | None:
    """The innermost loop at a line, or the one whose sum starts there."""
    loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For)]
    for loop in loops:
        block = source.block_of(loop)
        place = block.index(loop)
        if place and _covers(block[place - 1], line) and _assigned(block[place - 1]) is not None:
            return loop
    return max((loop for loop in loops if _covers(loop, line)), key=lambda loop: loop.lineno, default=None)


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _without_foreach(source: Source, call: ast.Call) -> codemod.Edit:
    """The call's argument foreach=False cut out, with the comma before it."""
    keyword = next(k for k in call.keywords if k.arg == "foreach")
    parts = sorted((*call.args, *(k.value for k in call.keywords)), key=lambda n: (n.lineno, n.col_offset))
    value = source.span(keyword.value)
    before = source.span(parts[parts.index(keyword.value) - 1])
    assert before.end_line is not None and before.end_column is not None
    return (
        Span(
            path=source.path,
            line=before.end_line,
            column=before.end_column,
            end_line=value.end_line,
            end_column=value.end_column,
        ),
        "",
    )


def _read_form(source: Source, loop: ast.For) -> Form:
    """The clipping whose first loop is `loop`; raises `_Other` with what differs."""
    block = source.block_of(loop)
    place = block.index(loop)
    if place == 0 or not isinstance(loop.target, ast.Name):
        raise _Other("the loop over the parameters is not the usual one")
    start = block[place - 1]
    total = _assigned(start)
    if total is None or not isinstance(start, ast.Assign) or not _is_number(start.value, 0):
        raise _Other("the sum of squares does not start from 0 right before its loop")
    host = _accumulates(loop, total)
    rest = list(block[place + 1 :])
    used: list[ast.stmt] = [start, loop, _root(_next(rest), total)]
    factor, limit, clamped = _factor(source, used, rest, total)
    used.append(_next(rest))
    _check_scaling(used[-1], loop, factor, clamped)
    stored = {n.id for s in used for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for name in sorted(stored - {total}):
        if _reads_elsewhere(source, used, name):
            raise _Other(f"`{name}` is read elsewhere")
    for expression in (loop.iter, limit):
        if any(isinstance(n, ast.Name) and n.id in stored for n in ast.walk(expression)):
            raise _Other("the parameters or the largest norm are computed from the norm")
    return Form(tuple(used), source.segment(loop.iter), source.segment(limit), total, host)


def _root(statement: ast.stmt, total: str) -> ast.stmt:
    """The statement that takes the square root of the sum of squares."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Pow) and _named(statement.target, total):
        if _is_number(statement.value, 0.5):
            return statement
    elif _assigned(statement) == total and isinstance(statement, ast.Assign) and _is_root(statement.value, total):
        return statement
    raise _Other("the norm is not the square root of the sum of squares")


def _factor(source: Source, used: list[ast.stmt], rest: list[ast.stmt], total: str) -> tuple[str, ast.expr, bool]:
    """Name of the factor, the largest norm, whether the factor is bounded by 1; takes its statements."""
    statement = _next(rest)
    factor = _assigned(statement)
    if factor is None or not isinstance(statement, ast.Assign):
        raise _Other("the factor is not computed right after the norm")
    used.append(statement)
    value, clamped = _clamped(statement.value)
    limit = _limit(value, total)
    if rest and _assigned(rest[0]) == factor and isinstance(rest[0], ast.Assign):
        value, again = _clamped(rest[0].value)
        if not again or not _named(value, factor):
            raise _Other("the factor is changed before it is applied")
        clamped = True
        used.append(_next(rest))
    return factor, limit, clamped


def _next(rest: list[ast.stmt]) -> ast.stmt:
    if not rest:
        raise _Other("the gradients are scaled somewhere else")
    return rest.pop(0)


def _assigned(statement: ast.stmt) -> str | None:
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) else None


def _named(expression: ast.expr, name: str) -> bool:
    return isinstance(expression, ast.Name) and expression.id == name


def _is_number(expression: ast.expr, *values: float) -> bool:
    """Whether an expression is one of these numbers, 1/2 included."""
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return _is_number(expression.left, 1) and _is_number(expression.right, 2) and 0.5 in values
    if not isinstance(expression, ast.Constant) or isinstance(expression.value, bool):
        return False
    return isinstance(expression.value, (int, float)) and expression.value in values


def _body(loop: ast.For, name: str) -> list[ast.stmt]:
    """The statements for one parameter, behind a test that it has a gradient."""
    body = loop.body
    if loop.orelse:
        raise _Other("a loop over the parameters has an else")
    if len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse:
        if ast.unparse(body[0].test) != f"{name}.grad is not None":
            raise _Other(f"only some gradients are clipped: `{ast.unparse(body[0].test)}`")
        return body[0].body
    if isinstance(body[0], ast.If) and ast.unparse(body[0]).split() == f"if {name}.grad is None: continue".split():
        return body[1:]
    return body


def _accumulates(loop: ast.For, total: str) -> bool:
    """Check that a loop adds the squared 2-norm of every gradient to `total`; whether each is read by the host."""
    assert isinstance(loop.target, ast.Name)
    body = _body(loop, loop.target.id)
    local: dict[str, ast.expr] = {}
    for statement in body[:-1]:
        name = _assigned(statement)
        if name is None or not isinstance(statement, ast.Assign):
            raise _Other("the loop over the norms does more than add them up")
        local[name] = statement.value
    last = body[-1]
    if isinstance(last, ast.AugAssign) and isinstance(last.op, ast.Add) and _named(last.target, total):
        added = last.value
    elif _assigned(last) == total and isinstance(last, ast.Assign) and isinstance(last.value, ast.BinOp):
        if not isinstance(last.value.op, ast.Add) or not _named(last.value.left, total):
            raise _Other("the loop over the norms does more than add them up")
        added = last.value.right
    else:
        raise _Other("the loop over the norms does more than add them up")
    text = ast.unparse(_filled(added, local))
    gradient = _GRADIENT.replace("{p}", re.escape(loop.target.id))
    if not any(re.fullmatch(form.replace("{g}", gradient), text) for form in _SQUARES):
        raise _Other(f"`{text}` is not the square of a gradient's 2-norm")
    return ".item()" in text or text.startswith("float(")


def _filled(expression: ast.expr, local: dict[str, ast.expr]) -> ast.expr:
    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return local.get(node.id, node)

    filled: ast.expr = expression
    for _ in local:
        filled = Fill().visit(ast.parse(ast.unparse(filled), mode="eval").body)
    return filled


def _is_root(expression: ast.expr, total: str) -> bool:
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Pow):
        return _named(expression.left, total) and _is_number(expression.right, 0.5)
    return ast.unparse(expression) in (
        f"math.sqrt({total})",
        f"torch.sqrt({total})",
        f"{total}.sqrt()",
        f"sqrt({total})",
    )


def _clamped(expression: ast.expr) -> tuple[ast.expr, bool]:
    """What is bounded by 1 from above, and whether anything is."""
    if not isinstance(expression, ast.Call):
        return expression, False
    name = expression.func.attr if isinstance(expression.func, ast.Attribute) else getattr(expression.func, "id", "")
    arguments = list(expression.args)
    if name == "min" and len(arguments) == 2 and not expression.keywords and isinstance(expression.func, ast.Name):
        value, bound = arguments if not isinstance(arguments[0], ast.Constant) else arguments[::-1]
        return (value, True) if _is_number(bound, 1) else (expression, False)
    bounded = [k.arg for k in expression.keywords] == ["max"] and _is_number(expression.keywords[0].value, 1)
    if name in ("clamp", "clamp_", "clip") and bounded and isinstance(expression.func, ast.Attribute):
        if _named(expression.func.value, "torch"):
            return (arguments[0], True) if len(arguments) == 1 else (expression, False)
        return (expression.func.value, True) if not arguments else (expression, False)
    return expression, False


def _limit(expression: ast.expr, total: str) -> ast.expr:
    """The largest norm in `limit / (total + 1e-6)`."""
    quotient = isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div)
    if not isinstance(expression, ast.BinOp) or not quotient:
        raise _Other("the factor is not the largest norm over the norm")
    below = expression.right
    if not isinstance(below, ast.BinOp) or not isinstance(below.op, ast.Add) or not _named(below.left, total):
        raise _Other("the factor is not max_norm / (norm + 1e-6), which is what torch divides by")
    if not _is_number(below.right, 1e-6):
        raise _Other(f"the factor adds {ast.unparse(below.right)} to the norm where torch adds 1e-6")
    return expression.left


def _check_scaling(statement: ast.stmt, first: ast.For, factor: str, clamped: bool) -> None:
    """Raise `_Other` unless a statement scales the same gradients by the factor where that is below 1."""
    if isinstance(statement, ast.If) and not statement.orelse and len(statement.body) == 1:
        if ast.unparse(statement.test) not in (f"{factor} < 1", f"{factor} < 1.0"):
            raise _Other(f"the gradients are scaled if `{ast.unparse(statement.test)}`")
        clamped, statement = True, statement.body[0]
    if not isinstance(statement, ast.For) or not isinstance(statement.target, ast.Name):
        raise _Other("the gradients are scaled somewhere else")
    if ast.dump(statement.iter) != ast.dump(first.iter):
        raise _Other("the two loops do not run over the same parameters")
    body = _body(statement, statement.target.id)
    gradient = _GRADIENT.replace("{p}", re.escape(statement.target.id))
    factors = rf"(?:{factor}|min\({factor}, 1(?:\.0)?\))"
    forms = (rf"{gradient}\.mul_\(({factors})\)", rf"{gradient} \*= ({factors})")
    text = ast.unparse(body[0]) if len(body) == 1 else ""
    found = next((m for form in forms if (m := re.fullmatch(form, text))), None)
    if found is None:
        raise _Other("the second loop does something else than scale the gradients by the factor")
    if not clamped and found[1] == factor:
        raise _Other("small gradients are scaled up: the factor is not bounded by 1")


def _reads_elsewhere(source: Source, statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether a name is read outside the statements other than under a loop or comprehension that sets it."""
    function = source.function_at(statements[0].lineno)
    body: ast.AST = function if function is not None else source.tree
    if any(isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names for node in ast.walk(body)):
        return True
    inside = {id(node) for statement in statements for node in ast.walk(statement)}
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and id(node) not in inside
        and not _set_around(source, node)
        for node in ast.walk(body)
    )


def _set_around(source: Source, name: ast.Name) -> bool:
    node: ast.AST | None = source.parents.get(name)
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        targets = [node.target] if isinstance(node, ast.For) else []
        targets += [g.target for g in getattr(node, "generators", [])]
        if any(isinstance(t, ast.Name) and t.id == name.id for target in targets for t in ast.walk(target)):
            return True
        node = source.parents.get(node)
    return False


_GRADIENT = r"{p}\.grad(?:\.data|\.detach\(\))?"
_NORM = (
    r"(?:{g}\.norm\((?:2|2\.0|p=2|p=2\.0)?\)|torch\.norm\({g}(?:, (?:p=)?2(?:\.0)?)?\)"
    r"|torch\.linalg\.(?:vector_)?norm\({g}(?:, (?:ord=)?2(?:\.0)?)?\))"
)
_SQUARES = (
    rf"{_NORM}(?:\.item\(\))? \*\* 2(?:\.0)?",
    rf"float\({_NORM}\) \*\* 2(?:\.0)?",
    rf"{_NORM}\.(?:pow\(2\)|square\(\))(?:\.item\(\))?",
    r"{g}\.(?:pow\(2\)|square\(\))\.sum\(\)(?:\.item\(\))?",
    r"torch\.sum\({g} \*\* 2\)(?:\.item\(\))?",
    r"\({g} \*\* 2\)\.sum\(\)(?:\.item\(\))?",
)
