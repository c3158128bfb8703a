"""Statements that end a compiled graph because the host reads a tensor, and how to write them without the read."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor import codemod
from advisor.model import Span
from advisor.source import Source

CLAMPS = frozenset({"clamp", "clip", "clamp_min", "clamp_max"})
# methods that give a tensor and read nothing on the host
METHODS = frozenset(
    "abs mean sum std var norm max min amax amin median square pow sqrt exp log float double half bfloat16 detach"
    " flatten view reshape squeeze unsqueeze transpose t contiguous neg mul add sub div".split()
)
HALF_MAX = 65504  # what float16 can hold: a clamp to a larger number raises there, whatever the values are
ELSEWHERE = ("DataParallel", "checkpoint", "checkpoint_sequential")  # run a forward in copies of a module, or twice


@dataclass(frozen=True)
class Statistic:
    """A number of a tensor that a forward keeps in an attribute: `owner.attribute.append(value)`, or assigned.

    `value` is the text of the tensor, `tensor` the name of a tensor on the same device.
    """

    owner: str
    attribute: str
    value: str
    tensor: str
    appended: bool


# --------------------------------------------------------------------------------------------------------------- clamps


def unconditional(source: Source, statement: ast.stmt) -> list[codemod.Edit]:
    """`if h.abs().max() > limit: h = h.clamp(-limit, limit)` without the condition.

    Where the condition is false the clamp gives the values and gradients it is given. Raises `codemod.CannotEdit` where
    that is not so, or cannot be told.
    """
    if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
        raise codemod.CannotEdit("a branch depends on the value of a tensor: write it with torch.where")
    inner = statement.body[0]
    if not isinstance(inner, ast.Assign) or len(inner.targets) != 1 or not isinstance(inner.targets[0], ast.Name):
        raise codemod.CannotEdit("a branch depends on the value of a tensor: write it with torch.where")
    name = inner.targets[0].id
    bounds = _bounds(source, inner.value, name)
    guard = _guard(source, statement.test, name)
    if bounds is None or guard is None:
        raise codemod.CannotEdit("a branch depends on the value of a tensor: write it with torch.where")
    if not _implied(guard, bounds):
        raise codemod.CannotEdit("the clamp changes values where the condition is false")
    if any(_is_large(bound) for bound in bounds):
        raise codemod.CannotEdit("float16 cannot hold the limit: there the clamp itself would fail")
    written = _written_into(source, statement, name)
    if written is not None:
        raise codemod.CannotEdit(f"line {written.lineno} writes into `{name}`, which the clamp would have copied")
    at = source.span(statement)
    if not source.at(at).startswith("if"):
        raise codemod.CannotEdit("the condition is an elif")
    first = source.span(inner)
    between = source.text[source.offset(at.line, at.column) : source.offset(first.line, first.column)]
    indent = source.lines[at.line - 1][: at.column]
    said = [line[line.index("#") :].rstrip() for line in between.splitlines() if "#" in line]
    text = "".join(f"{comment}{codemod.line_ending(source)}{indent}" for comment in said)
    gone = codemod.insert(source.path, at.line, at.column, "")[0]
    return [(_until(gone, first.line, first.column), text)]


def _is_large(bound: ast.expr | None) -> bool:
    value = bound.operand if isinstance(bound, ast.UnaryOp) else bound
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and abs(value.value) > HALF_MAX


def _written_into(source: Source, statement: ast.stmt, name: str) -> ast.expr | ast.stmt | None:
    """What writes into a name's tensor in place behind a statement, where another name may hold the same tensor."""
    function = source.function_at(statement.lineno)
    for node in ast.walk(function if function is not None else source.tree):
        if getattr(node, "lineno", 0) <= (statement.end_lineno or 0):
            continue
        if isinstance(node, ast.AugAssign) and _owner(node.target) == name:
            return node
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _owner(node) == name:
            return node
        if isinstance(node, ast.keyword) and node.arg in ("out", "inplace"):
            return node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            owners = {_owner(node.func.value), *map(_owner, node.args[:1])}
            if method.endswith("_") and not method.startswith("_") and name in owners:
                return node
    return None


def _owner(node: ast.AST) -> str | None:
    """The name that an element, an attribute or a chain of methods begins with."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _until(span: Span, line: int, column: int) -> Span:
    return Span(path=span.path, line=span.line, column=span.column, end_line=line, end_column=column)


def _bounds(source: Source, value: ast.expr, name: str) -> tuple[ast.expr | None, ast.expr | None] | None:
    """Lower and upper bound of a clamp of a name; None where a value is no such clamp."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    method, given = value.func.attr, list(value.args)
    if (source.qualified(value.func) or "") == f"torch.{method}":
        of, given = (given[0], given[1:]) if given else (None, [])
    else:
        of = value.func.value
    keywords = {k.arg: k.value for k in value.keywords}
    if not _is_name(of, name) or method not in CLAMPS or not keywords.keys() <= {"min", "max"}:
        return None
    order = {"clamp_min": ["min"], "clamp_max": ["max"]}.get(method, ["min", "max"])
    found: dict[str | None, ast.expr] = {**dict(zip(order, given, strict=False)), **keywords}
    if len(given) > len(order) or len(found) != len(given) + len(keywords):
        return None
    low, high = (None if _is_none(found.get(end)) else found[end] for end in ("min", "max"))
    return low, high


def _guard(source: Source, test: ast.expr, name: str) -> tuple[str, ast.expr] | None:
    """What a condition compares: ("abs", "max" or "min", the limit) of a name's elements."""
    test = _read(test)
    inner = _called(source, test, {"any"})  # any element beyond the limit
    compare = test if inner is None else inner
    if not isinstance(compare, ast.Compare) or len(compare.ops) != 1:
        return None
    left, right, op = compare.left, compare.comparators[0], compare.ops[0]
    more = isinstance(op, (ast.Gt, ast.GtE))
    if not more and not isinstance(op, (ast.Lt, ast.LtE)):
        return None
    for value, limit, above in ((left, right, more), (right, left, not more)):
        if _is_plain(limit) and not _mentions(limit, name):
            kind = _kind(source, _read(value), name, inner is not None)
            if (kind in ("abs", "max") and above) or (kind == "min" and not above):
                return kind, limit
            if kind == "elements":
                return ("max" if above else "min"), limit
    return None


def _kind(source: Source, value: ast.expr, name: str, elementwise: bool) -> str | None:
    """What of a name's elements a value is: the largest magnitude, the largest, the least, or all of them."""
    if elementwise:
        magnitude = _called(source, value, {"abs"})
        return "abs" if _is_tensor(magnitude, name) else "elements" if _is_tensor(value, name) else None
    for method, kind in (("max", "max"), ("amax", "max"), ("min", "min"), ("amin", "min")):
        of = _called(source, value, {method})
        magnitude = None if of is None else _called(source, of, {"abs"})
        if kind == "max" and _is_tensor(magnitude, name):
            return "abs"
        if _is_tensor(of, name):
            return kind
    return None


def _implied(guard: tuple[str, ast.expr], bounds: tuple[ast.expr | None, ast.expr | None]) -> bool:
    """Whether the bounds are the limit of the condition: a clamp to them changes nothing where it is false."""
    (kind, limit), (low, high) = guard, bounds
    if kind == "abs":
        return _same(high, limit) and low is not None and _same(_negated(low), limit)
    return (_same(high, limit) and low is None) if kind == "max" else (_same(low, limit) and high is None)


def _negated(value: ast.expr) -> ast.expr | None:
    return value.operand if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) else None


def _same(one: ast.expr | None, other: ast.expr) -> bool:
    if isinstance(one, ast.Constant) and isinstance(other, ast.Constant):
        return bool(one.value == other.value)
    return one is not None and ast.dump(one) == ast.dump(other)


def _called(source: Source, value: ast.expr, names: set[str]) -> ast.expr | None:
    """What a method without arguments, or a function of torch of one argument, is called of."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.keywords:
        return None
    if value.func.attr not in names:
        return None
    if source.qualified(value.func) == f"torch.{value.func.attr}":
        return value.args[0] if len(value.args) == 1 else None
    return value.func.value if not value.args else None


def _is_tensor(value: ast.expr | None, name: str) -> bool:
    """Whether a value is a name, or that without its gradient."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "detach":
        value = value.func.value
    return _is_name(value, name)


def _is_name(value: ast.expr | None, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_plain(value: ast.expr) -> bool:
    """A number or a name, whose evaluation does nothing and gives the same twice."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        value = value.operand
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) or (isinstance(value, ast.Constant) and isinstance(value.value, (int, float)))


def _mentions(value: ast.expr, name: str) -> bool:
    return any(_is_name(node, name) for node in ast.walk(value) if isinstance(node, ast.expr))


def _read(value: ast.expr) -> ast.expr:
    """The tensor that the host reads a number of: without `.item()`, `float()` and `bool()`."""
    while isinstance(value, ast.Call) and not value.keywords:
        if isinstance(value.func, ast.Attribute) and value.func.attr == "item" and not value.args:
            value = value.func.value
        elif isinstance(value.func, ast.Name) and value.func.id in ("float", "bool") and len(value.args) == 1:
            value = value.args[0]
        else:
            break
    return value


# ----------------------------------------------------------------------------------------------------------- statistics


def statistic(source: Source, statement: ast.stmt) -> Statistic | None:
    """The statistic that a statement keeps on the host; None where it does not have that form."""
    kept, value, appended = _kept(statement)
    if kept is None or value is None or not isinstance(kept.value, ast.Name):
        return None
    tensor = _read(value)
    if tensor is value:
        return None
    while isinstance(tensor, ast.Call) and isinstance(tensor.func, ast.Attribute) and not tensor.args:
        if tensor.func.attr not in ("detach", "cpu"):
            break
        tensor = tensor.func.value
    base = _base(source, tensor)
    if base is None:
        return None
    return Statistic(kept.value.id, kept.attr, source.segment(tensor), base, appended)


def on_the_device(source: Source, statement: ast.stmt) -> list[codemod.Edit]:
    """Keep a statistic as a tensor that grows, or as the tensor itself, in the file of the statement.

    Raises `codemod.CannotEdit` where the statement or what else the file does with the attribute has no known form.
    """
    found = statistic(source, statement)
    if found is None:
        raise codemod.CannotEdit("it is no statistic that an attribute keeps")
    imports, torch = codemod.named_modules(source, statement.lineno, "torch.")
    double = f"dtype={torch}float64"  # of which a number of Python's is
    kept, value = f"{found.owner}.{found.attribute}", codemod.grouped(found.value)
    if not found.appended:
        return [(source.span(statement), f"{kept} = {value}.detach().double()")]
    text = f"{kept} = {torch}cat(({kept}.to({found.tensor}.device), {value}.detach().reshape(1)))"
    edits = [*imports, (source.span(statement), text)]
    for node in _attributes(source, found.attribute):
        empty, cleared = _emptied(source, node), _cleared(source, node)
        if empty is not None:
            edits.append((source.span(empty), f"{torch}zeros(0, {double})"))
        elif cleared is not None:
            owner = source.segment(node)
            edits.append((source.span(cleared), f"{owner} = {owner}[:0]"))
    return edits


def read_alike(sources: Sequence[Source], source: Source, statement: ast.stmt) -> str | None:
    """Why the rest of the program would tell a statistic on the device from numbers; None where it would not."""
    found = statistic(source, statement)
    assert found is not None
    for other in sources:
        for node in ast.walk(other.tree):
            if isinstance(node, ast.Constant) and node.value == "mps":
                return f"a device without float64 may be used, {other.path}:{node.lineno}"
            if isinstance(node, ast.Constant) and node.value == found.attribute and not _is_key(sources, other, node):
                return f"`{found.attribute}` may be read by its name, {other.path}:{node.lineno}"
            if isinstance(node, (ast.Name, ast.Attribute)) and _last(node) in ELSEWHERE:
                return f"`{_last(node)}` is used, {other.path}:{node.lineno}"
        for attribute in _attributes(other, found.attribute):
            if other is source and source.statement_of(attribute) is statement:
                continue
            if not _fits(other, attribute, found, other is source):
                where = f"{other.path}:{attribute.lineno}"
                return f"`{found.attribute}` is used in a way for which it must hold numbers, {where}"
    begun = [node for node in _attributes(source, found.attribute) if _emptied(source, node) is not None]
    return None if begun or not found.appended else f"no statement of the file makes `{found.attribute}` an empty list"


def _is_key(sources: Sequence[Source], source: Source, node: ast.Constant) -> bool:
    """Whether a text is a key of a dictionary that is no object's own, and nothing is read by a name made up."""
    parent = source.parents[node]
    if isinstance(parent, ast.Subscript):
        owner = parent.value.func if isinstance(parent.value, ast.Call) else parent.value
        key = not (isinstance(owner, (ast.Name, ast.Attribute)) and _last(owner) in ("vars", "__dict__"))
    else:
        key = isinstance(parent, ast.Dict) and node in parent.keys
    return key and not any(_is_made_up(call) for one in sources for call in ast.walk(one.tree))


def _is_made_up(node: ast.AST) -> bool:
    by_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr")
    return by_name and not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant))  # type: ignore[attr-defined]


def _fits(source: Source, node: ast.Attribute, found: Statistic, here: bool) -> bool:
    """Whether a use of the attribute is right for a tensor as for numbers, or is rewritten with it."""
    if isinstance(node.ctx, ast.Store):
        if found.appended:
            return here and _emptied(source, node) is not None
        return _is_number(_assigned(source, node))
    if not isinstance(node.ctx, ast.Load):
        return False
    if not found.appended:
        return _is_number_use(source, node)
    return (here and _cleared(source, node) is not None) or _is_sequence_use(source, node)


def _is_sequence_use(source: Source, node: ast.expr) -> bool:
    parent = source.parents[node]
    if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Load):
        if isinstance(parent.slice, ast.Slice):
            return parent.slice.step is None and _is_sequence_use(source, parent)
        return _is_number_use(source, parent)
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.args == [node]:
        return parent.func.id == "len" or (parent.func.id in ("sum", "max", "min") and _is_number_use(source, parent))
    if isinstance(parent, ast.comprehension) and parent.iter is node:
        return _all_numbers(source, source.parents[parent], parent.target)
    return isinstance(parent, ast.For) and parent.iter is node and _all_numbers(source, parent, parent.target)


def _all_numbers(source: Source, scope: ast.AST, target: ast.expr) -> bool:
    """Whether every read of a loop's variable turns it into a number; a loop's variable is not read behind it."""
    if not isinstance(target, ast.Name):
        return False
    around = scope if not isinstance(scope, ast.For) else source.function_at(scope.lineno) or source.tree
    names = [n for n in ast.walk(around) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    return all(isinstance(n.ctx, ast.Load) and _is_number_use(source, n) for n in names)


def _is_number_use(source: Source, node: ast.expr) -> bool:
    """Whether a value is only made a number of, or formatted as one."""
    parent = source.parents[node]
    if isinstance(parent, ast.FormattedValue):
        return parent.conversion == -1
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name):
        return parent.func.id == "float" and parent.args == [node]
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Div, ast.Mult, ast.Add, ast.Sub)):
        other = parent.right if parent.left is node else parent.left
        counted = isinstance(other, ast.Call) and isinstance(other.func, ast.Name) and other.func.id == "len"
        return (counted or _is_number(other)) and _is_number_use(source, parent)
    return False


def _kept(statement: ast.stmt) -> tuple[ast.Attribute | None, ast.expr | None, bool]:
    """The attribute that a statement keeps a value in, the value, and whether it is appended."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return (target if isinstance(target, ast.Attribute) else None), statement.value, False
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None, None, True
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
        return None, None, True
    return (call.func.value if isinstance(call.func.value, ast.Attribute) else None), call.args[0], True


def _base(source: Source, value: ast.expr) -> str | None:
    """The name of the tensor that a chain of methods, or a function of torch, begins with."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        function, qualified = value.func, source.qualified(value.func) or ""
        if function.attr not in METHODS:
            return None
        if qualified.startswith("torch."):
            if qualified != f"torch.{function.attr}" or not value.args:
                return None
            value = value.args[0]
        else:
            value = function.value
    named = isinstance(value, ast.Name) and value.id not in source.imports
    return value.id if isinstance(value, ast.Name) and named else None


def _attributes(source: Source, name: str) -> Iterator[ast.Attribute]:
    return (n for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and n.attr == name)


def _assigned(source: Source, node: ast.Attribute) -> ast.expr | None:
    """The value that an attribute gets, also as one of several; None where that cannot be told."""
    statement = source.statement_of(node)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if target is node:
        return value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
        return None if starred or node not in target.elts else value.elts[target.elts.index(node)]
    return None


def _emptied(source: Source, node: ast.Attribute) -> ast.expr | None:
    """The empty list that an attribute is assigned."""
    value = _assigned(source, node) if isinstance(node.ctx, ast.Store) else None
    listed = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "list"
    if isinstance(value, ast.List) and not value.elts:
        return value
    return value if isinstance(value, ast.Call) and listed and not value.args and not value.keywords else None


def _cleared(source: Source, node: ast.Attribute) -> ast.Expr | None:
    """The statement `....clear()` of an attribute."""
    method = source.parents[node]
    call = source.parents[method] if isinstance(method, ast.Attribute) and method.attr == "clear" else None
    statement = source.parents[call] if isinstance(call, ast.Call) and not call.args else None
    named = isinstance(node.value, (ast.Name, ast.Attribute))
    return statement if isinstance(statement, ast.Expr) and named else None


def _is_number(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and value.value is not True


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr
