"""Which assignments may have given a local name its value at a statement, and which branches lead there."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.source import Source

Loop = (ast.For, ast.AsyncFor, ast.While)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Decision:
    """One outcome of an `if` statement or conditional expression."""

    at: ast.If | ast.IfExp
    statement: ast.stmt
    taken: bool


@dataclass(frozen=True)
class Definition:
    """A candidate for a name's value: the assigned expression, or why it is not followed.

    `item` selects an element of the value where a tuple is unpacked; `parameter` says that the name is an argument.
    """

    statement: ast.stmt | None
    value: ast.expr | None
    decisions: tuple[Decision, ...] = ()
    item: int | None = None
    parameter: bool = False
    reason: str | None = None


def reaching(source: Source, name: str, before: ast.stmt) -> list[Definition]:
    """Every definition of `name` that can reach `before`, in the order in which a run would meet them last first.

    Loops are not unrolled: a name that a loop around the statement assigns later, or before which the loop stands, is
    given back with the reason that it is not followed.
    """
    found: list[Definition] = []
    open_paths: list[tuple[Decision, ...]] = [()]
    statement: ast.stmt = before
    while True:
        block = source.block_of(statement)
        done, open_paths = _search(block[: block.index(statement)], name, open_paths)
        found += done
        if not open_paths:
            return found
        parent = source.parents.get(statement)
        if isinstance(parent, (ast.If, ast.With, ast.AsyncWith)) or (
            isinstance(parent, ast.Try) and block is parent.body
        ):
            statement = parent
        elif isinstance(parent, Function):
            arguments = {a.arg for a in ast.walk(parent.args) if isinstance(a, ast.arg)}
            if name in arguments:
                return [*found, *(Definition(None, None, path, parameter=True) for path in open_paths)]
            return [*found, Definition(None, None, reason=f"`{name}` is not computed in this function")]
        elif isinstance(parent, Loop):
            return [*found, Definition(None, None, reason=f"`{name}` is not computed inside the loop around it")]
        else:
            return [*found, Definition(None, None, reason=f"`{name}` is not computed in this block")]


Paths = list[tuple[Decision, ...]]


def _search(block: Sequence[ast.stmt], name: str, paths: Paths) -> tuple[list[Definition], Paths]:
    """Definitions in a block, last first, each with the decisions that lead to it, and the paths that meet none."""
    found: list[Definition] = []
    for statement in reversed(block):
        if not paths:
            break
        if not binds(statement, name) and not changes(statement, name):
            continue
        if isinstance(statement, ast.If):
            left: Paths = []
            for branch, taken in ((statement.body, True), (statement.orelse, False)):
                if leaves(branch):
                    continue
                # a branch whose sibling never comes back is no choice: every run that gets here went through it
                sibling = statement.orelse if taken else statement.body
                decided = () if leaves(sibling) else (Decision(statement, statement, taken),)
                done, rest = _search(branch, name, [(*path, *decided) for path in paths])
                found += done
                left += rest
            paths = left
        elif isinstance(statement, (ast.With, ast.AsyncWith)) and not _in_header(statement, name):
            done, paths = _search(statement.body, name, paths)
            found += done
        else:
            found += [_simple(statement, name, path) for path in paths]
            paths = []
    return found, paths


def _in_header(statement: ast.With | ast.AsyncWith, name: str) -> bool:
    return any(binds(item, name) for item in statement.items)


def _simple(statement: ast.stmt, name: str, path: tuple[Decision, ...]) -> Definition:
    """The definition one statement makes."""
    unknown = Definition(statement, None, path, reason=f"`{name}` gets its value in a way that is not followed")
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr) and changed_by(statement.value) == name:
        return Definition(statement, statement.value, path)
    if value is not None and binds(value, name):
        return unknown
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return Definition(statement, statement.value, path)
    if isinstance(statement, ast.AugAssign):
        left = ast.copy_location(ast.Name(id=name, ctx=ast.Load()), statement.target)
        sum_of = ast.BinOp(left=left, op=statement.op, right=statement.value)
        return Definition(statement, ast.copy_location(sum_of, statement), path)
    if not isinstance(statement, ast.Assign):
        return unknown
    targets = [t for t in statement.targets if binds(t, name)]
    if len(targets) != 1:
        return unknown
    target = targets[0]
    if isinstance(target, ast.Name):
        return Definition(statement, statement.value, path)
    if not isinstance(target, (ast.Tuple, ast.List)) or any(isinstance(e, ast.Starred) for e in target.elts):
        return unknown
    places = [i for i, e in enumerate(target.elts) if isinstance(e, ast.Name) and e.id == name]
    if len(places) != 1:
        return unknown
    if isinstance(statement.value, (ast.Tuple, ast.List)) and len(statement.value.elts) == len(target.elts):
        return Definition(statement, statement.value.elts[places[0]], path)
    return Definition(statement, statement.value, path, item=places[0])


def leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether a block never runs on to the statement after it."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
        return True
    return isinstance(last, ast.If) and leaves(last.body) and leaves(last.orelse)


def binds(node: ast.AST, name: str) -> bool:
    """Whether a statement, or anything inside it, gives `name` a value or deletes it."""
    return name in bound_names(node)


def changed_by(node: ast.AST) -> str | None:
    """The name whose tensor a call changes in place: "x" for `x.add_(1)`."""
    func = node.func if isinstance(node, ast.Call) else None
    if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Name):
        return None
    return func.value.id if func.attr.endswith("_") and not func.attr.endswith("__") else None


def changes(statement: ast.stmt, name: str) -> bool:
    """Whether a statement, or anything inside it, changes the tensor of a name in place and drops the result."""
    return name in changed_names(statement)


@functools.lru_cache(maxsize=4096)
def changed_names(node: ast.AST) -> frozenset[str]:
    """The names whose tensors a statement, or anything inside it, changes in place and drops the result."""
    changed = {changed_by(n.value) for n in ast.walk(node) if isinstance(n, ast.Expr)}
    return frozenset(name for name in changed if name is not None)


@functools.lru_cache(maxsize=4096)
def bound_names(node: ast.AST) -> frozenset[str]:
    """Every name that a statement or anything inside it binds or deletes, definitions and imports included."""
    return frozenset(_bound(node))


def _bound(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            yield inner.id
        elif isinstance(inner, (*Function, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield (inner.asname or inner.name).split(".")[0]
        elif isinstance(inner, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and inner.name:
            yield inner.name
        elif isinstance(inner, ast.MatchMapping) and inner.rest:
            yield inner.rest


def stored_names(node: ast.AST) -> set[str]:
    """Names a statement assigns, or whose tensors it changes in place."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | changed_names(node)


def stored_attributes(node: ast.AST) -> set[str]:
    """Attributes a statement or anything inside it assigns."""
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
