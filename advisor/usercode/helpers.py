"""Small functions of the user's own that an expression calls, with the arguments of the call."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from advisor.source import Source
from advisor.usercode.reaching import Function, binds


@dataclass(frozen=True)
class Called:
    """A helper that only computes: assignments, then one return. `defaults` are the arguments the call leaves out."""

    body: tuple[ast.stmt, ...]
    result: ast.Return
    arguments: Mapping[str, ast.expr]
    defaults: tuple[ast.expr, ...]

    @property
    def value(self) -> ast.expr:
        """The returned expression."""
        assert self.result.value is not None
        return self.result.value

    def assigns(self, name: str) -> bool:
        """Whether the helper gives a name a value itself."""
        return any(binds(statement, name) for statement in self.body)


def called_helper(source: Source, line: int, call: ast.Call) -> Called | None:
    """The function around `line` as `call` calls it; None where the call or the function is not simple enough.

    Modules are not followed: the `self` of their `forward` is not the caller's.
    """
    function = source.function_at(line)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if function is None or function.name != name or isinstance(function, ast.AsyncFunctionDef):
        return None
    kinds = [d.id if isinstance(d, ast.Name) else None for d in function.decorator_list]
    parent = source.parents.get(function)
    if kinds not in ([], ["staticmethod"]) or not isinstance(parent, (ast.Module, ast.ClassDef)):
        return None
    if isinstance(parent, ast.ClassDef) and not isinstance(call.func, ast.Attribute):
        return None
    if isinstance(parent, ast.ClassDef) and _overridden(source, parent, function.name):
        return None
    bound = isinstance(parent, ast.ClassDef) and not kinds
    passed = _passed(function, call, bound)
    parts = _parts(function)
    if passed is None or parts is None:
        return None
    return Called(*parts, *passed)


def _overridden(source: Source, owner: ast.ClassDef, name: str) -> bool:
    """Whether another class of the file has a method of this name: a subclass may compute something else."""
    others = (n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n is not owner)
    return any(isinstance(s, ast.FunctionDef) and s.name == name for other in others for s in other.body)


def _parts(function: ast.FunctionDef) -> tuple[tuple[ast.stmt, ...], ast.Return] | None:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
        return None
    for statement in body[:-1]:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        plain = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        if not plain or not all(isinstance(t, (ast.Name, ast.Tuple)) for t in targets):
            return None
    scoped = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, *Function)
    if any(isinstance(n, scoped) for s in body for n in ast.walk(s)):
        return None
    return tuple(body[:-1]), body[-1]


def _passed(
    function: ast.FunctionDef, call: ast.Call, bound: bool
) -> tuple[Mapping[str, ast.expr], tuple[ast.expr, ...]] | None:
    """Parameter -> argument expression, and which of those are defaults."""
    spec = function.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    given = list(call.args)
    if bound and isinstance(call.func, ast.Attribute):
        given.insert(0, call.func.value)
    starred = any(isinstance(a, ast.Starred) for a in given) or any(k.arg is None for k in call.keywords)
    if starred or len(given) > len(names) or spec.vararg is not None or spec.kwarg is not None:
        return None
    found = dict(zip(names, given, strict=False))
    found |= {k.arg: k.value for k in call.keywords if k.arg is not None}
    missing = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
    missing |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
    defaults = {name: value for name, value in missing.items() if name not in found}
    return {**defaults, **found}, tuple(defaults.values())
