"""What the source shows of a tensor that may come from a caller: where it comes from, its dtype, how many axes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor.patterns.extents import Extents
from advisor.source import Source
from advisor.usercode.made import given_to, own_class
from advisor.usercode.reaching import Function, bound_names, changed_by, reaching
from advisor.usercode.triangles import written_again

DEPTH = 8  # names and attributes that are followed one into the other
# methods whose result has the dtype of their tensor
SAME_DTYPE = frozenset(
    "view reshape expand expand_as unsqueeze squeeze transpose permute contiguous clone detach masked_fill tril triu "
    "repeat flatten unflatten repeat_interleave narrow neg".split()
)
# functions of torch that make a tensor of the default dtype unless they are told another
DEFAULT_DTYPE = frozenset("zeros ones empty rand randn full".split())
# what is computed with the operands of the attention, or with parameters
PRODUCTS = frozenset("Parameter matmul bmm baddbmm einsum linear embedding".split())
# methods whose result has the axes of their tensor
SAME_AXES = frozenset(
    "to float double half bfloat16 bool type type_as logical_not contiguous clone detach masked_fill eq ne gt lt ge le "
    "transpose permute tril triu".split()
)


def from_caller(source: Source, expression: ast.expr, statement: ast.stmt, depth: int = DEPTH) -> bool:
    """Whether a value comes from a parameter of a function around it, or from an attribute that is given one.

    A parameter that is read for its shape, dtype or device alone gives no value.
    """
    if depth == 0:
        return True
    for node in ast.walk(expression):
        value_read = isinstance(node, ast.Name) and not source.reads_only_shape(node)
        if isinstance(node, ast.Name) and value_read and _name_from_caller(source, node.id, statement, depth):
            return True
        given = _attribute(source, node) if isinstance(node, ast.Attribute) else []
        if any(_is_handed(source, value, DEPTH) for value in given):
            return True
    return False


def _name_from_caller(source: Source, name: str, statement: ast.stmt, depth: int) -> bool:
    function = source.function_at(statement.lineno)
    if function is None or name == _itself(source, function):
        return False
    local = {*bound_names(function), *(a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg))}
    for found in reaching(source, name, statement):
        if found.parameter or (found.value is None and name in local):  # a loop, say: not followed
            return True
        if found.statement is None and _of_outer_function(source, name, function):
            return True
    given = [(d.value, d.statement) for d in reaching(source, name, statement)]
    given += _given_otherwise(source, function, name)
    others = [(value, other) for value, other in given if value is not None and other not in (None, statement)]
    return any(from_caller(source, value, other, depth - 1) for value, other in others if other is not None)


def _itself(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """What a method calls its object."""
    first = function.args.args[0].arg if function.args.args else None
    return first if isinstance(source.parents.get(function), ast.ClassDef) else None


def _of_outer_function(source: Source, name: str, function: ast.AST | None) -> bool:
    """Whether a name is a parameter of a function that holds the function."""
    outer = source.parents.get(function) if function is not None else None
    while outer is not None:
        if isinstance(outer, Function) and name in {a.arg for a in ast.walk(outer.args) if isinstance(a, ast.arg)}:
            return name != _itself(source, outer)
        outer = source.parents.get(outer)
    return False


def _given_otherwise(source: Source, function: ast.AST | None, name: str) -> Iterator[tuple[ast.expr, ast.stmt]]:
    """What a name is given by anything but a plain assignment, with the statement that does it."""
    for node in ast.walk(function) if function is not None else ():
        value: ast.expr | None = None
        if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and ast.unparse(node.target) == name:
            value = node.value
        elif isinstance(node, (ast.For, ast.AsyncFor)) and _binds(node.target, name):
            value = node.iter
        elif isinstance(node, ast.Assign) and any(_writes_into(t, name) for t in node.targets):
            value = node.value
        if value is not None:
            yield value, source.statement_of(value)


def _binds(target: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(target))


def _writes_into(target: ast.expr, name: str) -> bool:
    return isinstance(target, (ast.Subscript, ast.Attribute)) and base_name(target) == name


def base_name(node: ast.expr) -> str | None:
    """The name an expression starts from: "x" for `x[0].mT.view(2)`."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _attribute(source: Source, attribute: ast.Attribute) -> list[ast.expr]:
    """The expressions that give an attribute of `self` its value in its class."""
    owner: ast.AST | None = attribute if isinstance(attribute.value, ast.Name) else None
    while owner is not None and not isinstance(owner, ast.ClassDef):
        owner = source.parents.get(owner)
    found: list[ast.expr] = []
    for node in ast.walk(owner) if owner is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
            first, registers = node.args[0], node.func.attr in ("register_buffer", "register_parameter")
            if registers and isinstance(first, ast.Constant) and first.value == attribute.attr:
                found.append(node.args[1])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Attribute) and t.attr == attribute.attr for t in targets):
                found.append(node.value)
    return found


def _is_handed(source: Source, value: ast.expr, depth: int) -> bool:
    """Whether a value is a parameter itself, or a part or view of one; a tensor made with sizes of one is not."""
    if depth == 0:
        return True
    if isinstance(value, ast.IfExp):
        return _is_handed(source, value.body, depth - 1) or _is_handed(source, value.orelse, depth - 1)
    if isinstance(value, ast.BoolOp):
        return any(_is_handed(source, side, depth - 1) for side in value.values)
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and source.qualified(value.func) is None:
            return _is_handed(source, value.func.value, depth - 1)
        return False
    if isinstance(value, (ast.Subscript, ast.UnaryOp)):
        return _is_handed(source, value.value if isinstance(value, ast.Subscript) else value.operand, depth - 1)
    if not isinstance(value, ast.Name):
        return False
    function = source.function_at(value.lineno)
    found = reaching(source, value.id, source.statement_of(value))
    if any(d.parameter for d in found) and (function is None or value.id != _itself(source, function)):
        return True
    return any(_is_handed(source, d.value, depth - 1) for d in found if d.value is not None and d.item is None)


def may_change(source: Source, expression: ast.expr) -> bool:
    """Whether an expression reads an attribute that the file writes again after its object was made."""
    return any(isinstance(n, ast.Attribute) and written_again(source, n.attr) for n in ast.walk(expression))


def may_be_number(
    sources: Sequence[Source], source: Source, expression: ast.expr, statement: ast.stmt, depth: int = DEPTH
) -> bool:
    """Whether what was a tensor in the run is something else by a parameter's default, or a number in an instance."""
    if depth == 0 or isinstance(expression, ast.Constant):
        return depth > 0 and isinstance(getattr(expression, "value", None), (int, float))
    if isinstance(expression, (ast.UnaryOp, ast.BinOp)):
        sides = [n for n in ast.iter_child_nodes(expression) if isinstance(n, ast.expr)]
        return all(may_be_number(sources, source, side, statement, depth) for side in sides)
    if isinstance(expression, ast.IfExp):
        sides = [expression.body, expression.orelse]
        return any(may_be_number(sources, source, side, statement, depth) for side in sides)
    if isinstance(expression, ast.Attribute):
        owner = own_class(source, expression.value)
        given = given_to(sources, source, owner, expression.attr) if owner is not None else iter(())
        values = [(g.source, g.value) for g in given if g.owner is not None and g.value in g.source.parents]
        return any(may_be_number(sources, s, v, s.statement_of(v), depth - 1) for s, v in values if v is not None)
    if not isinstance(expression, ast.Name):
        return False
    found = reaching(source, expression.id, statement)
    if any(d.parameter for d in found) and _has_default(source.function_at(statement.lineno), expression.id):
        return True
    given_here = [(d.value, d.statement) for d in found if d.item is None]
    return any(may_be_number(sources, source, v, s, depth - 1) for v, s in given_here if v and s)


def _has_default(function: ast.FunctionDef | ast.AsyncFunctionDef | None, name: str) -> bool:
    """Whether a parameter has a default that is not None."""
    if function is None:
        return False
    arguments = function.args
    places = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(places), reversed(arguments.defaults), strict=False)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return any(a.arg == name and not (isinstance(d, ast.Constant) and d.value is None) for a, d in pairs)


# --------------------------------------------------------------------------------------------------------------- dtype


def shows_dtype(source: Source, expression: ast.expr, statement: ast.stmt, depth: int = DEPTH) -> bool:
    """Whether the source shows that a tensor is float32, or of the dtype of a parameter or another tensor."""
    if depth == 0:
        return False
    if isinstance(expression, ast.Name):
        found = reaching(source, expression.id, statement)
        return bool(found) and all(
            d.value is not None
            and d.statement is not None
            and d.item is None
            and shows_dtype(source, d.value, d.statement, depth - 1)
            for d in found
        )
    if isinstance(expression, ast.Attribute):
        if expression.attr in ("mT", "T"):
            return shows_dtype(source, expression.value, statement, depth)
        given = _attribute(source, expression)
        return bool(given) and all(shows_dtype(source, v, source.statement_of(v), depth - 1) for v in given)
    if isinstance(expression, ast.BinOp):
        if isinstance(expression.op, ast.MatMult):
            return True
        sides = [s for s in (expression.left, expression.right) if not _is_scalar(source, s)]
        return bool(sides) and all(shows_dtype(source, side, statement, depth) for side in sides)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return shows_dtype(source, expression.operand, statement, depth)
    if isinstance(expression, ast.Subscript):
        return shows_dtype(source, expression.value, statement, depth)
    return isinstance(expression, ast.Call) and _call_shows_dtype(source, expression, statement, depth)


def _call_shows_dtype(source: Source, call: ast.Call, statement: ast.stmt, depth: int) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    told = [k.value for k in call.keywords if k.arg == "dtype"]
    if (source.qualified(call.func) or "").startswith("torch."):
        if name in PRODUCTS:
            return True
        if name == "full" and not told:
            return len(call.args) > 1 and _is_float(source, call.args[1])
        if name in DEFAULT_DTYPE:
            return not told or _is_dtype(told[0])
        return name in SAME_DTYPE and bool(call.args) and shows_dtype(source, call.args[0], statement, depth)
    if not isinstance(call.func, ast.Attribute):
        return False
    if name in ("to", "type", "type_as"):
        return name == "type_as" or any(_is_dtype(a) for a in (*call.args, *told))
    same = name.rstrip("_") in SAME_DTYPE
    return name in ("float", "matmul", "bmm") or (same and shows_dtype(source, call.func.value, statement, depth))


def _is_dtype(node: ast.expr) -> bool:
    """`torch.float32`, `torch.float` or the dtype of something."""
    return isinstance(node, ast.Attribute) and node.attr in ("dtype", "float", "float32")


def _is_float(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_float(source, node.operand)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "float"
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("math.inf", "torch.inf", "np.inf") or node.attr == "min"
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def _is_scalar(source: Source, node: ast.expr) -> bool:
    return _is_float(source, node) or (isinstance(node, ast.Constant) and isinstance(node.value, int))


# ---------------------------------------------------------------------------------------------------------------- axes


def least_axes(source: Source, expression: ast.expr, statement: ast.stmt, depth: int = DEPTH) -> int:
    """The number of axes that a tensor has at least in every call, as far as the source shows it."""
    known = Extents(source).rank(expression, statement)
    if known is not None or depth == 0:
        return known or 0
    if isinstance(expression, ast.Name):
        found = reaching(source, expression.id, statement)
        values = [(d.value, d.statement) for d in found if d.item is None]
        return min((least_axes(source, v, s, depth - 1) if v and s else 0 for v, s in values), default=0)
    if isinstance(expression, ast.Subscript):
        parts = expression.slice.elts if isinstance(expression.slice, ast.Tuple) else [expression.slice]
        return sum(isinstance(p, ast.Slice) or (isinstance(p, ast.Constant) and p.value is None) for p in parts)
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        return least_axes(source, expression.left, statement, depth)
    if isinstance(expression, ast.UnaryOp):
        return least_axes(source, expression.operand, statement, depth)
    if isinstance(expression, ast.BinOp):
        return max(least_axes(source, side, statement, depth) for side in (expression.left, expression.right))
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        inner = least_axes(source, expression.func.value, statement, depth)
        name = expression.func.attr.rstrip("_")
        return inner + 1 if name == "unsqueeze" else inner if name in SAME_AXES else 0
    return 0


def written_in_place(function: ast.AST, name: str) -> bool:
    """Whether a function changes elements of the tensor of a local name: `x[0] = 1`, `x |= y`, `x[:2].fill_(1)`."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            if base_name(node) == name:
                return True
        elif isinstance(node, ast.AugAssign) and base_name(node.target) == name:
            return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inside = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
            if changed_by(node) == name or (inside and base_name(node.func.value) == name):
                return True
        elif isinstance(node, ast.Call) and any(k.arg == "out" and base_name(k.value) == name for k in node.keywords):
            return True
    return False
