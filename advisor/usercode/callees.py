"""The user's functions that some statements may call, found by name alone: rather too many than too few."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from advisor.source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef


def callees(sources: Sequence[Source], nodes: Iterable[ast.AST]) -> list[tuple[Source, Function]]:
    """Every function of the files that has a name which the nodes call, and those that these call in turn."""
    by_name: dict[str, list[tuple[Source, Function]]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                by_name.setdefault(node.name, []).append((source, node))
    found: dict[int, tuple[Source, Function]] = {}
    pending = list(nodes)
    while pending:
        for name in called_names([pending.pop()]):
            for source, function in by_name.get(name, ()):
                if id(function) not in found:
                    found[id(function)] = (source, function)
                    pending.append(function)
    return list(found.values())


def called_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The last name of everything that is called: `step` of `trainer.step(x)`."""
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                if isinstance(inner.func, ast.Name):
                    yield inner.func.id
                elif isinstance(inner.func, ast.Attribute):
                    yield inner.func.attr


def named(nodes: Iterable[ast.AST], names: Iterable[str]) -> ast.AST | None:
    """The first name, attribute, keyword or import among the nodes that is one of some names."""
    wanted = frozenset(names)
    for node in nodes:
        for inner in ast.walk(node):
            name = getattr(inner, "attr", None) or getattr(inner, "id", None) or getattr(inner, "arg", None)
            if name in wanted:
                return inner
    return None
