"""Where in the user's source a captured operation was called, and what becomes of that call's value there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from advisor.model import Node
from advisor.source import Source

INSTALLED = ("site-packages/", "dist-packages/")
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def package_file(node: Node) -> str | None:
    """The file of an installed package that holds the operation: "transformers/models/t5/modeling_t5.py".

    None where the innermost recorded frame is not inside an installed package.
    """
    if not node.frames:
        return None
    path = node.frames[-1].path.replace("\\", "/")
    return next((path.rsplit(mark, 1)[1] for mark in INSTALLED if mark in path), None)


def differentiates_twice(source: Source) -> str | None:
    """What a file asks for that differentiates gradients again or forward, as text: create_graph=True,
    torch.func.hessian, a gradient of a gradient, forward-mode derivatives."""
    nested: list[ast.expr] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and _keeps_graph(source, node):
            return ast.unparse(node)
        if isinstance(node, ast.Dict) and any(_is_create_graph(k) and _asked(v) for k, v in _items(node)):
            return "create_graph"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_create_graph(node.slice):
            return "create_graph"
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        name = source.qualified(node) or ""
        package, _, function = name.rpartition(".")
        if name.startswith(FORWARD_MODE) or (package in TRANSFORMS and function in SECOND):
            return ast.unparse(_call_of(source, node))
        if package in FUNCTION_TRANSFORMS and function in FIRST:
            nested.append(node)
    again = nested[1:] or [node for node in nested if _differentiated(source, node)]
    return ast.unparse(_call_of(source, again[0])) if again else None


FORWARD_MODE = "torch.autograd.forward_ad."
FUNCTION_TRANSFORMS = ("torch.func", "functorch")
TRANSFORMS = (*FUNCTION_TRANSFORMS, "torch.autograd.functional", "torch.autograd.gradcheck", "torch.autograd")
SECOND = frozenset("hessian hvp vhp jvp jacfwd linearize gradgradcheck".split())
FIRST = frozenset("grad grad_and_value vjp jacrev".split())  # of second order where one is taken of another
# where create_graph stands among the arguments
CREATE_GRAPH = {
    "torch.autograd.grad": 4,
    "torch.autograd.backward": 3,
    "torch.autograd.functional.vjp": 3,
    "torch.autograd.functional.jacobian": 2,
}
CREATE_GRAPH_OF_METHOD = 2  # tensor.backward(gradient, retain_graph, create_graph)


def _keeps_graph(source: Source, call: ast.Call) -> bool:
    """Whether a call may ask for gradients that can be differentiated."""
    again = keyword(call, "create_graph")
    if again is not None:
        return _asked(again)
    position = CREATE_GRAPH.get(source.qualified(call.func) or "")
    if position is None and isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
        position = CREATE_GRAPH_OF_METHOD
    if position is None:
        return False
    before = call.args[: position + 1]
    if any(isinstance(argument, ast.Starred) for argument in before):
        return True
    return len(before) > position and _asked(before[position])


def _asked(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and not value.value)


def _is_create_graph(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "create_graph"


def _items(node: ast.Dict) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    yield from zip(node.keys, node.values, strict=True)


def _call_of(source: Source, node: ast.expr) -> ast.expr:
    """The call of a function, the function where it is only named."""
    parent = source.parents.get(node)
    return parent if isinstance(parent, ast.Call) and parent.func is node else node


def _differentiated(source: Source, node: ast.expr) -> bool:
    """Whether the function that takes a gradient with torch.func asks autograd for another."""
    scope = source.function_at(node.lineno)
    calls = [n for n in ast.walk(scope if scope is not None else source.tree) if isinstance(n, ast.Call)]
    named = {source.qualified(c.func) for c in calls} & {"torch.autograd.grad", "torch.autograd.backward"}
    return bool(named) or any(isinstance(c.func, ast.Attribute) and c.func.attr == "backward" for c in calls)


def is_tensor(source: Source, expression: ast.expr, depth: int = 6) -> bool:
    """Whether an expression is a tensor in every call, not perhaps None: arithmetic, a function of torch, a method of a
    tensor, or a name or attribute of `self` that is given nothing else."""
    if isinstance(expression, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        return True
    if isinstance(expression, ast.Call):
        known = (source.qualified(expression.func) or "").startswith("torch.")
        method = isinstance(expression.func, ast.Attribute) and expression.func.attr in TENSOR_METHODS
        return known or method
    function = source.function_at(expression.lineno)
    if depth == 0 or function is None:
        return False
    if isinstance(expression, ast.Name):
        stores = [source.parents.get(n) for n in names(function, expression.id, ast.Store)]
        given = [s.value for s in stores if isinstance(s, ast.Assign)]
        argument = any(a.arg == expression.id for a in ast.walk(function.args) if isinstance(a, ast.arg))
        return not argument and 0 < len(given) == len(stores) and all(is_tensor(source, v, depth - 1) for v in given)
    owner = source.parents.get(function)
    if not isinstance(expression, ast.Attribute) or not isinstance(owner, ast.ClassDef):
        return False
    values = _given_to(owner, expression.attr)
    return bool(values) and all(is_tensor(source, value, depth - 1) for value in values)


TENSOR_METHODS = frozenset(
    "to float bool half double type unsqueeze squeeze view reshape expand repeat repeat_interleave masked_fill tril "
    "triu contiguous transpose permute flatten unflatten logical_not clone detach".split()
)


def _given_to(owner: ast.ClassDef, name: str) -> list[ast.expr]:
    """What a class gives an attribute of its instances: assignments, buffers, parameters."""
    found = []
    for node in ast.walk(owner):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("register_buffer", "register_parameter")):
            if len(node.args) > 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == name:
                found.append(node.args[1])
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Attribute) and t.attr == name for t in node.targets
        ):
            found.append(node.value)
    return found


def call_at(source: Source, node: Node, wanted: Callable[[ast.Call], bool] = lambda _: True) -> ast.Call | None:
    """The only call, of those that satisfy `wanted`, that starts where the user's own code made the operation.

    Without a recorded column every call that starts on the line counts.
    """
    if node.span is None:
        return None
    column = node.span.column if node.span.end_column is not None else None
    found = [
        expression
        for expression in source.expressions_at(node.span.line, column)
        if isinstance(expression, ast.Call) and wanted(expression)
    ]
    return found[0] if len(found) == 1 else None


def enclosing(source: Source, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
    """The innermost node of one of `kinds` around a node, inside its function; None where there is none."""
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, (*kinds, ast.FunctionDef, ast.AsyncFunctionDef)):
        parent = source.parents.get(parent)
    return parent if isinstance(parent, kinds) else None


def around(source: Source, node: ast.AST) -> list[ast.AST]:
    """Every node around a node, innermost first."""
    found: list[ast.AST] = []
    while (parent := source.parents.get(node)) is not None:
        found.append(parent)
        node = parent
    return found


def scope_of(source: Source, node: ast.stmt | ast.expr) -> ast.AST:
    """The function a node is evaluated in, the module where it stands outside of functions."""
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        parent = source.parents.get(parent)
    return parent if parent is not None else source.tree


def names(scope: ast.AST, name: str, context: type[ast.expr_context]) -> Iterator[ast.Name]:
    """Every place in a scope that reads (ast.Load) or binds (ast.Store) a name, in order of lines."""
    found = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, context)]
    yield from sorted(found, key=lambda n: (n.lineno, n.col_offset))


def shared(scope: ast.AST, name: str) -> bool:
    """Whether a scope declares a name global or nonlocal, so that code elsewhere may read it."""
    return any(isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names for n in ast.walk(scope))


def read_after(source: Source, statement: ast.stmt, name: str) -> int | None:
    """The line that may read the value a statement gives to a local name, None where nothing does.

    Straight-line code that binds the name again before any read ends the search; reads anywhere else in the function
    count, before the statement too, because it may stand in a loop.
    """
    scope = scope_of(source, statement)
    if shared(scope, name) or isinstance(scope, ast.Module):
        return statement.lineno
    reads = list(names(scope, name, ast.Load))
    if not reads:
        return None
    block = source.block_of(statement)
    for following in block[block.index(statement) + 1 :]:
        inside = [n for n in ast.walk(following) if isinstance(n, ast.Name) and n.id == name]
        if any(isinstance(n.ctx, (ast.Load, ast.Del)) for n in inside):
            return next(n.lineno for n in inside)
        if inside and isinstance(following, ast.Assign):
            closures = [r for r in reads if enclosing(source, r, COMPREHENSIONS) or scope_of(source, r) is not scope]
            return closures[0].lineno if closures else None
    return reads[0].lineno


def read_elsewhere(source: Source, statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether a name that statements bind is read, changed or deleted outside of them, other than under a loop or
    comprehension that sets it."""
    function = source.function_at(statements[0].lineno)
    body: ast.AST = function if function is not None else source.tree
    if shared(body, name):
        return True
    inside = {id(node) for statement in statements for node in ast.walk(statement)}
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and (not isinstance(node.ctx, ast.Store) or isinstance(source.parents.get(node), ast.AugAssign))
        and id(node) not in inside
        and not _set_around(source, node)
        for node in ast.walk(body)
    )


def _set_around(source: Source, name: ast.Name) -> bool:
    """Whether a loop or comprehension around a name gives it its value."""
    node: ast.AST | None = source.parents.get(name)
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        targets = [node.target] if isinstance(node, ast.For) else []
        targets += [g.target for g in getattr(node, "generators", [])]
        if any(isinstance(t, ast.Name) and t.id == name.id for target in targets for t in ast.walk(target)):
            return True
        node = source.parents.get(node)
    return False


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value a call gives to a keyword argument, None where it names no such argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def spreads(call: ast.Call) -> bool:
    """Whether a call passes arguments with * or **, which may hold any of them."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
