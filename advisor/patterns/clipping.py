"""Read off the source whether statements clip gradients exactly as torch.nn.utils.clip_grad_norm_ does."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from advisor import codemod
from advisor.model import Span
from advisor.patterns.callsites import read_elsewhere
from advisor.source import Source


@dataclass(frozen=True)
class Form:
    """Clipping written out, read off statement by statement; texts as the source has them."""

    statements: tuple[ast.stmt, ...]
    parameters: str
    limit: str
    total: str
    host: bool  # the total is a Python number

    @property
    def leaves_nan(self) -> bool:
        """Whether a norm that is NaN leaves the gradients unscaled: no comparison with NaN holds."""
        first = (c.args[0] for s in self.statements for c in ast.walk(s) if isinstance(c, ast.Call) and _is_min(c))
        return isinstance(self.statements[-1], ast.If) or any(isinstance(a, ast.Constant) for a in first)


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
        if read_elsewhere(source, form.statements, form.total):
            text = f"{form.total} = {text}{'.item()' if form.host else ''}"
        indent = source.lines[self.span.line - 1][: self.span.column]
        comments = [
            source.lines[line - 1].strip() for line in self.lines if source.lines[line - 1].strip().startswith("#")
        ]
        return [*imports, (self.span, f"\n{indent}".join([*comments, text]))]


class _Other(Exception):
    """The statements are not the clipping that torch's function computes."""


def _is_clip(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    return name == "clip_grad_norm_"


def _is_min(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "min" and bool(call.args)


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
    """The call's argument foreach=False cut out: its own line, or from the comma before it, or to the next argument."""
    keyword = next(k for k in call.keywords if k.arg == "foreach")
    end = source.span(keyword.value)
    assert end.end_line is not None and end.end_column is not None
    begin = (keyword.lineno, source.character(keyword.lineno, keyword.col_offset))
    stop = (end.end_line, end.end_column)
    before, after = _around(source, begin, stop)
    if source.lines[begin[0] - 1].strip() == "foreach=False,":
        begin, stop = (begin[0], 0), (begin[0] + 1, 0)
    elif before.string == ",":
        begin = before.start
    elif after is not None:
        stop = after.start
    return (
        Span(path=source.path, line=begin[0], column=begin[1], end_line=stop[0], end_column=stop[1]),
        "",
    )


SKIPPED = frozenset({tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})


def _around(
    source: Source, begin: tuple[int, int], stop: tuple[int, int]
) -> tuple[tokenize.TokenInfo, tokenize.TokenInfo | None]:
    """The token before an argument, and the first of the argument behind it where there is one."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source.text).readline) if t.type not in SKIPPED]
    place = next(i for i, t in enumerate(tokens) if t.start == begin)
    behind = [t for t in tokens[place:] if t.start >= stop]
    following = behind[0].string == "," and behind[1].string != ")"
    return tokens[place - 1], behind[1] if following else None


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
    if source.lines[start.lineno - 1][: source.span(start).column].strip():
        raise _Other("the sum of squares shares its line with another statement")
    if _runs_out(source, loop):
        raise _Other(f"`{ast.unparse(loop.iter)}` can be run over only once: the second loop scales nothing")
    host = _accumulates(loop, total)
    rest = list(block[place + 1 :])
    root = _next(rest)
    host = _root(source, root, total) or host
    used: list[ast.stmt] = [start, loop, root]
    factor, limit, clamped = _factor(source, used, rest, total)
    used.append(_next(rest))
    _check_scaling(used[-1], loop, factor, clamped)
    stored = {n.id for s in used for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for name in sorted(stored - {total}):
        if read_elsewhere(source, used, name):
            raise _Other(f"`{name}` is read elsewhere")
    for expression in (loop.iter, limit):
        if any(isinstance(n, ast.Name) and n.id in stored for n in ast.walk(expression)):
            raise _Other("the parameters or the largest norm are computed from the norm")
    parameters = source.segment(loop.iter)
    bare = isinstance(loop.iter, ast.Tuple) and not parameters.startswith("(")
    return Form(tuple(used), f"({parameters})" if bare else parameters, source.segment(limit), total, host)


ONCE = frozenset({"parameters", "buffers", "filter", "map", "iter", "zip", "chain", "reversed", "from_iterable"})


def _runs_out(source: Source, loop: ast.For) -> bool:
    """Whether a loop runs over a name that stands for an iterator, which a second loop finds empty."""
    if not isinstance(loop.iter, ast.Name):
        return False
    name, function = loop.iter.id, source.function_at(loop.lineno)
    given = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and _assigned(n) == name] if function else []
    before = [n for n in given if n.lineno < loop.lineno]
    if before:
        return _is_iterator(max(before, key=lambda n: n.lineno).value)
    if function is not None and name in {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}:
        return any(map(_is_iterator, _passed(source, function, name)))
    return any(isinstance(s, ast.Assign) and _assigned(s) == name and _is_iterator(s.value) for s in source.tree.body)


def _is_iterator(expression: ast.expr) -> bool:
    if isinstance(expression, ast.GeneratorExp):
        return True
    function = expression.func if isinstance(expression, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in ONCE


def _passed(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[ast.expr]:
    """What the file's own calls of a function give to one of its parameters."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if called != function.name:
            continue
        yield from (k.value for k in call.keywords if k.arg == name)
        place = names.index(name) if name in names else len(call.args)
        place -= bool(names[:1] == ["self"] and isinstance(call.func, ast.Attribute))
        yield from call.args[place : place + 1]


def _root(source: Source, statement: ast.stmt, total: str) -> bool:
    """Check that a statement takes the square root of the sum of squares; whether that makes a Python number of it."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Pow) and _named(statement.target, total):
        if _is_number(statement.value, 0.5):
            return False
    elif _assigned(statement) == total and isinstance(statement, ast.Assign) and _is_root(statement.value, total):
        function = statement.value.func if isinstance(statement.value, ast.Call) else None
        return function is not None and source.qualified(function) in ("math.sqrt", None) and _plain_root(function)
    raise _Other("the norm is not the square root of the sum of squares")


def _plain_root(function: ast.expr) -> bool:
    """Whether it is `math.sqrt` or a bare `sqrt`, not a method of a tensor."""
    return ast.unparse(function) in ("math.sqrt", "sqrt")


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
    filled = _filled(added, local)
    used = {n.id for value in (added, *local.values()) for n in ast.walk(value) if isinstance(n, ast.Name)}
    if set(local) - used:
        raise _Other("the loop over the norms does more than add them up")
    text = ast.unparse(filled)
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


_GRADIENT = r"{p}\.grad(?:\.data|\.detach\(\))?"
_NORM = (
    r"(?:{g}\.norm\((?:2|2\.0|p=2|p=2\.0)?\)|torch\.norm\({g}(?:, (?:p=)?2(?:\.0)?)?\)"
    r"|torch\.linalg\.norm\({g}\)"  # with an order it is the norm of a matrix
    r"|torch\.linalg\.vector_norm\({g}(?:, (?:ord=)?2(?:\.0)?)?\))"
)
_SQUARES = (
    rf"{_NORM}(?:\.item\(\))? \*\* 2(?:\.0)?",
    rf"float\({_NORM}\) \*\* 2(?:\.0)?",
    rf"{_NORM}\.(?:pow\(2\)|square\(\))(?:\.item\(\))?",
    r"{g}\.(?:pow\(2\)|square\(\))\.sum\(\)(?:\.item\(\))?",
    r"torch\.sum\({g} \*\* 2\)(?:\.item\(\))?",
    r"\({g} \*\* 2\)\.sum\(\)(?:\.item\(\))?",
)
