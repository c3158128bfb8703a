"""Registered buffers that nothing reads any more once a region has been replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from advisor.alignment.aligned import Alignment
from advisor.model import Span
from advisor.source import Source
from advisor.usercode.reaching import stored_names

# functions and methods that make a mask or table without drawing random numbers and without another effect
MAKERS = frozenset(
    "tril triu ones zeros full arange eye linspace tensor outer view reshape bool to float int unsqueeze squeeze "
    "logical_not masked_fill expand size".split()
)
# ways to reach every buffer of a module without its name
SWEEPS = frozenset({"buffers", "named_buffers", "_buffers", "get_buffer", "__dict__", "_non_persistent_buffers_set"})
# ways to reach an attribute by a text, each with the place of that text; a state dict holds no buffer of ours and has
# none, `vars` gives every attribute
BY_NAME = {
    "getattr": 1,
    "hasattr": 1,
    "delattr": 1,
    "__getattr__": 0,
    "__getattribute__": 0,
    "attrgetter": 0,
    "methodcaller": 0,
    "state_dict": None,
    "vars": 1,
}
EVALUATES = frozenset({"eval", "exec"})


@dataclass(frozen=True)
class DeadBuffer:
    """A buffer and the statement that registers it."""

    name: str
    statement: ast.Expr
    span: Span


def dead_buffers(
    source: Source, alignment: Alignment, kept: Iterable[int] = (), others: Iterable[Source] = ()
) -> tuple[DeadBuffer, ...]:
    """Buffers that only the replaced code reads, with the statements that register them and may go with it.

    `kept` are the boundary nodes whose expressions the replacement still spells, `others` the other files of the
    project. Buffers in the state dict, and any that something may reach by another way, are not among them.
    """
    gone: list[ast.AST] = [alignment.root.expression, *alignment.consumed]
    if alignment.source is not source or alignment.unran:  # a guarded rewrite keeps the old code
        return ()
    spelled = [alignment.values[index].expression for index in kept]
    still = {n.attr for e in spelled for n in ast.walk(e) if isinstance(n, ast.Attribute)}
    inside = {id(n) for statement in gone for n in ast.walk(statement)}
    read = {
        n.attr
        for statement in gone
        for n in ast.walk(statement)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }
    found = []
    for name in sorted(read - still):
        statement = _registration(source, alignment, name)
        if statement is None or _reached(source, name, inside | {id(n) for n in ast.walk(statement)}):
            continue
        if not any(_reached(other, name, set()) for other in others if other.path != source.path):
            found.append(DeadBuffer(name, statement, source.span(statement)))
    return tuple(found)


def _registration(source: Source, alignment: Alignment, name: str) -> ast.Expr | None:
    """The one statement of the region's class that registers the buffer, None where it may not be removed."""
    owner: ast.AST | None = alignment.root.statement
    while owner is not None and not isinstance(owner, ast.ClassDef):
        owner = source.parents.get(owner)
    calls = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "register_buffer"
        and _argument(node, 0, "name") == name
    ]
    if owner is None or len(calls) != 1 or calls[0] not in set(ast.walk(owner)):
        return None
    statement = source.parents[calls[0]]
    function = source.parents.get(statement)
    simple = isinstance(statement, ast.Expr) and isinstance(function, ast.FunctionDef) and len(function.body) > 1
    if not simple or _argument(calls[0], 2, "persistent") is not False or not _only_makes(source, calls[0]):
        return None
    assert isinstance(statement, ast.Expr)
    return statement


def _argument(call: ast.Call, position: int, keyword: str) -> object:
    """The literal an argument is, None where it is absent or no literal."""
    given = next((k.value for k in call.keywords if k.arg == keyword), None)
    if given is None and len(call.args) > position:
        given = call.args[position]
    return given.value if isinstance(given, ast.Constant) else None


def _only_makes(source: Source, call: ast.Call) -> bool:
    """Whether the buffer's value is made from literals and attributes alone, without an effect on anything else."""
    value = next((k.value for k in call.keywords if k.arg == "tensor"), call.args[1] if len(call.args) > 1 else None)
    if value is None or any(isinstance(a, ast.Starred) for a in call.args):
        return False
    function = source.function_at(call.lineno)
    local = stored_names(function or source.tree)
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            func = node.func
            made = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else None
            if made not in MAKERS:
                return False
        elif isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
            return False
        elif isinstance(node, ast.Name) and node.id in local:
            return False  # it would be left unused itself
    return True


def _reached(source: Source, name: str, without: set[int]) -> bool:
    """Whether a file may reach an attribute: by its name, as text, or by going through all buffers."""
    for node in ast.walk(source.tree):
        if id(node) in without:
            continue
        if isinstance(node, ast.Attribute) and (node.attr == name or node.attr in SWEEPS):
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name in node.value.split("."):
            return True
        if isinstance(node, ast.alias) and node.asname and node.name.rsplit(".", 1)[-1] in BY_NAME:
            return True
        named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Name) and named in EVALUATES:
            return True
        if isinstance(node, ast.expr) and named in BY_NAME and not _is_literal(source, node, BY_NAME[named]):
            return True
    return False


def _is_literal(source: Source, function: ast.expr, place: int | None) -> bool:
    """Whether a function that reads an attribute by its name is called there and then, with a name that is written
    out; `place` is that of the name, None where there is none to give."""
    call = source.parents.get(function)
    if not isinstance(call, ast.Call) or call.func is not function:
        return False
    if place is None:
        return not call.args
    names = call.args[place : place + 1] if place else call.args
    return bool(names) and all(isinstance(a, ast.Constant) for a in names)
