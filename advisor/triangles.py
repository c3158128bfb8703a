"""Whether the source shows that a mask is a causal triangle for every instance, and stays one."""

from __future__ import annotations

import ast

from advisor.source import Source

WRAPPERS = frozenset(
    {"view", "reshape", "unsqueeze", "bool", "to", "float", "byte", "type", "contiguous", "logical_not"}
)
MADE = frozenset({"ones", "full", "zeros", "ones_like", "full_like", "empty", "fill_"})


def made_as_triangle(source: Source, mask: ast.expr) -> bool:
    """Whether a mask expression reads one attribute that its class makes by tril or triu with a literal diagonal.

    False where the attribute comes from a parameter, is made elsewhere, or is written again outside of the constructor.
    An expression that reads no attribute is judged by the graph alone: True.
    """
    function = source.function_at(mask.lineno)
    itself = function.args.args[0].arg if function is not None and function.args.args else None
    read = {
        n.attr
        for n in ast.walk(mask)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == itself
    }
    if not read:
        return True
    owner: ast.AST | None = mask
    while owner is not None and not isinstance(owner, ast.ClassDef):
        owner = source.parents.get(owner)
    if len(read) != 1 or owner is None:
        return False
    (name,) = read
    given = _given(owner, name)
    return len(given) == 1 and _is_triangle(*given[0]) and not _written_again(source, name)


def _given(owner: ast.AST, name: str) -> list[tuple[ast.expr, ast.FunctionDef]]:
    """The expressions that give an attribute its value in a class: register_buffer and assignments."""
    found = []
    for function in (n for n in ast.walk(owner) if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
                first = node.args[0]
                if node.func.attr == "register_buffer" and isinstance(first, ast.Constant) and first.value == name:
                    found.append((node.args[1], function))
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Attribute) and t.attr == name for t in node.targets
            ):
                found.append((node.value, function))
    return found


def _is_triangle(value: ast.expr, function: ast.FunctionDef, depth: int = 4) -> bool:
    """tril or triu with a literal diagonal, of a tensor made there and then, within changes of shape and type."""
    if depth == 0:
        return False
    if isinstance(value, ast.Name):
        given = [
            n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == value.id for t in n.targets)
        ]
        stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == value.id and not _loads(n)]
        return len(given) == len(stored) == 1 and _is_triangle(given[0], function, depth - 1)
    if isinstance(value, ast.Subscript):
        return _is_triangle(value.value, function, depth)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Invert):
        return _is_triangle(value.operand, function, depth)
    if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.comparators[0], ast.Constant):
        return _is_triangle(value.left, function, depth)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr in ("tril", "triu"):
        return _literal_triangle(value, function)
    return value.func.attr in WRAPPERS and _is_triangle(value.func.value, function, depth)


def _loads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _literal_triangle(call: ast.Call, function: ast.FunctionDef) -> bool:
    whole = _whole(call)
    if isinstance(whole, ast.Name):
        given = [
            n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == whole.id for t in n.targets)
        ]
        whole = given[0] if len(given) == 1 else whole
    made = isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute) and whole.func.attr in MADE
    return made and has_literal_diagonal(call)


def _whole(call: ast.Call) -> ast.expr:
    """What a triangle is cut from: the argument of torch.tril(x), the object of x.tril()."""
    assert isinstance(call.func, ast.Attribute)
    return call.args[0] if _is_function(call) else call.func.value


def _is_function(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    return isinstance(call.func.value, ast.Name) and call.func.value.id in ("torch", "np", "numpy") and bool(call.args)


def has_literal_diagonal(call: ast.Call) -> bool:
    """Whether the diagonal of a call of tril or triu is written as a number, or left out."""
    given = [*call.args[1 if _is_function(call) else 0 :], *(k.value for k in call.keywords if k.arg == "diagonal")]
    return all(not any(isinstance(n, (ast.Name, ast.Call)) for n in ast.walk(d)) for d in given)


def _written_again(source: Source, name: str) -> bool:
    """Whether the file writes into an attribute of this name anywhere but in constructors."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or node.attr != name:
            continue
        parent = source.parents.get(node)
        stored = not isinstance(node.ctx, ast.Load)
        element: ast.AST = node
        while isinstance(parent, (ast.Subscript, ast.Attribute)) and parent.value is element:
            stored = stored or not isinstance(parent.ctx, ast.Load)
            changes = isinstance(parent, ast.Attribute) and parent.attr.endswith("_") and not parent.attr.endswith("__")
            stored = stored or changes
            element, parent = parent, source.parents.get(parent)
        function = source.function_at(node.lineno)
        if stored and (function is None or function.name not in ("__init__", "__post_init__")):
            return True
    return False
