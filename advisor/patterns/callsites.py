"""Where in the user's source a captured operation was called, and what becomes of that call's value there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

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


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value a call gives to a keyword argument, None where it names no such argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def spreads(call: ast.Call) -> bool:
    """Whether a call passes arguments with * or **, which may hold any of them."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
