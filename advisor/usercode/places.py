"""Where an expression is evaluated, which recorded positions are its own, and how another function can write it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from advisor.alignment.aligned import Bound, Miss
from advisor.model import Graph, Node, Span
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.helpers import Called
from advisor.usercode.reaching import reaching, stored_attributes


@dataclass(frozen=True)
class Scope:
    """One call of one function: its file, the recorded positions of its callers, its arguments where it is followed."""

    source: Source
    frames: tuple[Span, ...]
    helper: Called | None = None
    caller: Place | None = None


@dataclass(frozen=True)
class Place:
    """An expression, the statement it is evaluated in and the call that evaluates it."""

    expression: ast.expr
    statement: ast.stmt
    scope: Scope

    def of(self, expression: ast.expr) -> Place:
        """Another expression of the same statement."""
        return Place(expression, self.statement, self.scope)


# ------------------------------------------------------------------------------------------------------------ positions

# how recorded paths of files that are not the user's own begin
ELSEWHERE = ("site-packages/", "dist-packages/", "lib/python3", "outside/", "<", "/")


def is_own(frame: Span) -> bool:
    """Whether a recorded position lies in a file of the user's own."""
    return not frame.path.replace("\\", "/").startswith(ELSEWHERE) and ":" not in frame.path[:2]


def starts_here(frame: Span, at: Place) -> bool:
    """Whether a recorded position is the start of an expression; only the line counts where no column is recorded."""
    if frame.path != at.scope.source.path:
        return False
    starts = at.scope.source.starts(at.expression)
    if frame.end_column is None:
        return any(line == frame.line for line, _ in starts)
    return (frame.line, frame.column) in starts


def computed_at(node: Node, at: Place) -> bool:
    """Whether a node was computed by this expression itself, in this call of its function."""
    depth = len(at.scope.frames)
    if len(node.frames) <= depth or node.frames[:depth] != at.scope.frames:
        return False
    if any("/torch/nn/" not in frame.path for frame in node.frames[depth + 1 :]):
        return False
    return node.op.startswith("call_") and starts_here(node.frames[depth], at)


def could_hold(node: Node, at: Place, graph: Graph) -> bool:
    """Whether the recorded position of a boundary node allows that the expression gave its value."""
    depth = len(at.scope.frames)
    frames = node.frames
    if not node.op.startswith("call_") or len(frames) <= depth or frames[:depth] != at.scope.frames:
        return True
    frame = frames[depth]
    if frame.path != at.scope.source.path or operation(node) == "getitem":
        return True
    if at.scope.source.function_at(frame.line) is not at.scope.source.function_at(at.statement.lineno):
        return True  # by another module that the same library code calls, a container's child before this one
    if isinstance(at.expression, (ast.Name, ast.Attribute)) and operation(node) != "getattr":
        return (not _within(frame, at) and _may_keep(frames, at)) or _repeated(at)
    if isinstance(at.expression, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        return starts_here(frame, at)
    return True


def _may_keep(frames: tuple[Span, ...], at: Place) -> bool:
    """Whether a name or attribute can have the value of a node that this call of the function computed."""
    source, expression = at.scope.source, at.expression
    here = len(frames) == len(at.scope.frames) + 1
    if isinstance(expression, ast.Attribute):
        function = source.function_at(at.statement.lineno)
        return not here or function is None or expression.attr in stored_attributes(function)
    assert isinstance(expression, ast.Name)
    found = reaching(source, expression.id, at.statement)
    computed = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant)
    if len(found) != 1 or found[0].statement is None or not isinstance(found[0].value, computed):
        return not here or not all(d.parameter for d in found)
    place = Place(found[0].value, found[0].statement, at.scope)
    return starts_here(frames[len(at.scope.frames)], place)


def _within(frame: Span, at: Place) -> bool:
    """Whether a position lies in the statement of an expression, so that no name can hold its value there yet."""
    statement = at.statement
    last = statement.end_lineno or statement.lineno
    if frame.end_column is None or not statement.lineno <= frame.line <= last:
        return False
    begin = at.scope.source.character(statement.lineno, statement.col_offset)
    assert statement.end_col_offset is not None
    end = at.scope.source.character(last, statement.end_col_offset)
    return (statement.lineno, begin) <= (frame.line, frame.column) < (last, end)


def _repeated(at: Place) -> bool:
    node: ast.AST | None = at.expression
    parents = at.scope.source.parents
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.comprehension, ast.ListComp, ast.GeneratorExp)):
            return True
        node = parents.get(node)
    return False


# ------------------------------------------------------------------------------------------------------------- spelling


def root_of(scope: Scope) -> Scope:
    """The call of the function that holds the result."""
    while scope.caller is not None:
        scope = scope.caller.scope
    return scope


def outermost(at: Place) -> tuple[ast.expr, ast.stmt]:
    """The expression of the root's function that led to a place in a helper."""
    while at.scope.caller is not None:
        at = at.scope.caller
    return at.expression, at.statement


def spelled(at: Place) -> Bound:
    """The expression as the root's function can write it; raises `Miss` for one that reads a helper's own names."""
    expression, scope = at.expression, at.scope
    if scope.caller is None or scope.helper is None:
        return Bound(expression, at.statement)
    text = short(at)
    if isinstance(expression, ast.Name) and not scope.helper.assigns(expression.id):
        argument = scope.helper.arguments.get(expression.id)
        if argument is not None and argument not in scope.helper.defaults:
            return spelled(scope.caller.of(argument))
        expression = argument or expression
    if scope.source is not scope.caller.scope.source:
        raise Miss(f"`{text}` is written in another file", expression.lineno)
    for name in (n for n in ast.walk(expression) if isinstance(n, ast.Name)):
        argument = scope.helper.arguments.get(name.id)
        same = isinstance(argument, ast.Name) and argument.id == name.id
        known = same if argument is not None else name.id in (*scope.source.imports, "float", "int", "slice")
        if scope.helper.assigns(name.id) or not known:
            raise Miss(f"`{text}` reads `{name.id}` of the helper it stands in", expression.lineno)
    return spelled(Place(expression, scope.caller.statement, scope.caller.scope))


def short(at: Place) -> str:
    """The source of a place on one line, cut to 40 characters."""
    text = " ".join(at.scope.source.segment(at.expression).split())
    return text if len(text) <= 40 else text[:37] + "..."


def check_scope(source: Source, name: ast.Name) -> None:
    """A lambda or comprehension around a name may bind it to something else."""
    node: ast.AST | None = source.parents.get(name)
    while node is not None and not isinstance(node, ast.stmt):
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            raise Miss(f"`{name.id}` stands inside a lambda or comprehension", name.lineno)
        node = source.parents.get(node)
