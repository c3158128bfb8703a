"""The loop of a training script as its source shows it, found by the calls that a run made from inside it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from advisor.model import LoopCall, Span
from advisor.source import Source
from advisor.usercode.places import is_own

Loop = ast.For | ast.AsyncFor | ast.While
COMMON = frozenset(
    "backward close cpu cuda detach eval forward item step to train update zero_grad".split()
)  # of torch
DEPTH = 3  # calls of the user's own functions that are followed one into the other


@dataclass(frozen=True)
class Reached:
    """A call that an iteration of a loop makes: `at` is the call in the loop's own body through which it is made, the
    call itself or one of a function of the user's; `source` is the file of `call`."""

    source: Source
    call: ast.Call
    at: ast.Call

    @property
    def name(self) -> str | None:
        """The dotted name of what is called, through the file's imports; None where it is no imported name."""
        return self.source.qualified(self.call.func)


@dataclass(frozen=True)
class TrainingLoop:
    """A loop of the user's, and the position in it through which the call was made that it was found by."""

    source: Source
    node: Loop
    inside: Span
    others: tuple[Source, ...] = ()

    @property
    def body(self) -> Sequence[ast.stmt]:
        """The statements of one iteration."""
        return self.node.body

    def holds(self, span: Span | None) -> bool:
        """Whether a position lies in the body of this loop."""
        if span is None or span.path != self.source.path:
            return False
        first, last = self.node.body[0].lineno, self.node.body[-1].end_lineno or self.node.body[-1].lineno
        return first <= span.line <= last

    def place(self, call: LoopCall) -> Span | None:
        """The position in this loop's body through which a call was made; None where it was made elsewhere."""
        return next((frame for frame in call.frames if self.holds(frame)), None)

    def reached(self) -> Iterator[Reached]:
        """Every call of an iteration, those in the user's own functions and methods that it calls included."""
        for call in _calls(self.node.body):
            yield Reached(self.source, call, call)
            yield from self._inside(self.source, call, call, ())

    def conditions(self, node: ast.AST) -> list[ast.If]:
        """The `if` statements of the loop's body that a node stands under, innermost first."""
        found: list[ast.If] = []
        while node is not self.node:
            parent = self.source.parents.get(node)
            if parent is None:
                break
            if isinstance(parent, ast.If) and node is not parent.test:
                found.append(parent)
            node = parent
        return found

    def _inside(
        self, source: Source, call: ast.Call, at: ast.Call, around: tuple[ast.FunctionDef, ...]
    ) -> Iterator[Reached]:
        found = self._function(source, call)
        if found is None or found[1] in around or len(around) == DEPTH:
            return
        where, function = found
        for inner in _calls(function.body):
            yield Reached(where, inner, at)
            yield from self._inside(where, inner, at, (*around, function))

    def _function(self, source: Source, call: ast.Call) -> tuple[Source, ast.FunctionDef] | None:
        """The one function of the user's that a call by a plain name calls, or the one method of its name in the file.

        A name that objects of torch have too, `step`, says too little.
        """
        if isinstance(call.func, ast.Attribute):
            called = call.func.attr
            methods = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == called]
            one = len(methods) == 1 and isinstance(source.parents[methods[0]], ast.ClassDef) and called not in COMMON
            return (source, methods[0]) if one and source.qualified(call.func) is None else None
        if not isinstance(call.func, ast.Name):
            return None
        name = call.func.id
        here = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == name]
        if here:
            return (source, here[0]) if len(here) == 1 else None
        module, _, imported = (source.imports.get(name) or "").rpartition(".")
        for other in self.others:
            if module and other.path.replace("\\", "/").removesuffix(".py").replace("/", ".").endswith(module):
                there = [n for n in other.tree.body if isinstance(n, ast.FunctionDef) and n.name == imported]
                return (other, there[0]) if len(there) == 1 else None
        return None


def loop_of(call: LoopCall, read: Callable[[str], Source], others: Sequence[Source] = ()) -> TrainingLoop | None:
    """The innermost loop of the user's that a call was made from, also through functions; None where there is none."""
    return next(loops_around(call, read, others), None)


def loops_around(
    call: LoopCall, read: Callable[[str], Source], others: Sequence[Source] = ()
) -> Iterator[TrainingLoop]:
    """The loops of the user's that a call was made from, also through functions, innermost first."""
    for frame in reversed(call.frames):
        if not is_own(frame):
            continue
        source = read(frame.path)
        loop = enclosing_loop(source, frame)
        while loop is not None:
            yield TrainingLoop(source, loop, frame, tuple(others))
            loop = _around(source, loop)


def enclosing_loop(source: Source, span: Span) -> Loop | None:
    """The innermost loop around a position, within its function; its iterable is not inside."""
    function = source.function_at(span.line)
    found: Loop | None = None
    for node in ast.walk(function if function is not None else source.tree):
        if not isinstance(node, (ast.For, ast.AsyncFor, ast.While)) or source.function_at(node.lineno) is not function:
            continue
        inside = node.body[0].lineno <= span.line <= (node.body[-1].end_lineno or node.body[-1].lineno)
        if inside and (found is None or node.lineno > found.lineno):
            found = node
    return found


def _around(source: Source, loop: Loop) -> Loop | None:
    """The next loop around a loop, within its function."""
    node = source.parents.get(loop)
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return node
        node = source.parents.get(node)
    return None


def _calls(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """The calls in some statements, not those in functions and classes that are only defined there."""
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            yield node
        pending.extend(reversed(list(ast.iter_child_nodes(node))))
