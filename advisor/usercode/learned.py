"""Whether what was a number in the run may be a tensor, perhaps a learned one, in another instance or call."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from advisor.source import Source, last_name
from advisor.usercode.made import given_to, relatives

Function = ast.FunctionDef | ast.AsyncFunctionDef
READ = frozenset("item size dim numel tolist".split())  # methods of a tensor that give numbers
FACTS = frozenset("shape ndim dtype device".split())  # attributes of a tensor that are none
NO_TENSOR = frozenset({"torch.finfo", "torch.iinfo", "torch.Size"})
DEPTH = 5  # names and attributes that are followed one after another


@dataclass(frozen=True)
class _Scope:
    """Where an expression stands; `away` tells that another instance or call may give another value."""

    source: Source
    function: Function | None
    away: bool = False
    depth: int = DEPTH


def maybe_tensor(sources: Sequence[Source], source: Source, expression: ast.expr, line: int) -> str | None:
    """The call that makes a tensor of what `expression` reads in the function at `line`, with its place; None where
    the files hold none."""
    found = next(_tensors(sources, expression, _Scope(source, source.function_at(line))), None)
    if found is None:
        return None
    at, call = found
    text = " ".join(at.segment(call).split())
    return f"`{text if len(text) <= 60 else text[:57] + '...'}` ({at.path}:{call.lineno})"


def _tensors(sources: Sequence[Source], node: ast.expr, scope: _Scope) -> Iterator[tuple[Source, ast.expr]]:
    if scope.depth == 0:
        return
    if isinstance(node, ast.Call):
        yield from _of_call(sources, node, scope)
    elif isinstance(node, ast.Attribute):
        if node.attr not in FACTS and scope.source.qualified(node) is None:
            yield from _of_attribute(sources, node, scope)
    elif isinstance(node, ast.Name):
        yield from _of_name(sources, node.id, scope)
    elif not isinstance(node, (ast.Lambda, ast.Compare)):
        tests = [node.test] if isinstance(node, ast.IfExp) else []
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr) and part not in tests:
                yield from _tensors(sources, part, scope)


def _of_call(sources: Sequence[Source], call: ast.Call, scope: _Scope) -> Iterator[tuple[Source, ast.expr]]:
    name = scope.source.qualified(call.func) or ""
    if name.startswith("torch."):
        if scope.away and name not in NO_TENSOR:
            yield scope.source, call
    elif isinstance(call.func, ast.Attribute) and not name and call.func.attr not in READ:
        yield from _tensors(sources, call.func.value, scope)  # self.log_eps.exp()


def _of_attribute(sources: Sequence[Source], node: ast.Attribute, scope: _Scope) -> Iterator[tuple[Source, ast.expr]]:
    owner = scope.source.parents.get(scope.function) if scope.function is not None else None
    first = next(iter(positional(scope.function)), None) if scope.function is not None else None
    if not isinstance(owner, ast.ClassDef) or not isinstance(node.value, ast.Name) or node.value.id != first:
        return
    for given in given_to(sources, scope.source, owner, node.attr):
        function = given.at if isinstance(given.at, Function) else given.source.function_at(given.at.lineno)
        inside = _Scope(given.source, function, True, scope.depth - 1)
        if given.value is not None:
            yield from _tensors(sources, given.value, inside)
        elif isinstance(given.at, Function):  # a property
            for part in ast.walk(given.at):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield from _tensors(sources, part.value, inside)


def _of_name(sources: Sequence[Source], name: str, scope: _Scope) -> Iterator[tuple[Source, ast.expr]]:
    function, deeper = scope.function, replace(scope, depth=scope.depth - 1)
    for value in assigned(function or scope.source.tree, name):
        yield from _tensors(sources, value, deeper)
    if function is None:
        return
    if name in {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}:
        for source, value in passed(sources, scope.source, function, name):
            yield from _tensors(sources, value, _Scope(source, source.function_at(value.lineno), True, scope.depth - 1))
    else:
        for value in assigned(scope.source.tree, name, scope.source.tree.body):
            yield from _tensors(sources, value, replace(deeper, function=None))


def assigned(scope: ast.AST, name: str, among: Sequence[ast.stmt] | None = None) -> Iterator[ast.expr]:
    """What the assignments of a scope give a name."""
    for node in ast.walk(scope) if among is None else among:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            yield from (value for part, value in pairs if isinstance(part, ast.Name) and part.id == name)


def passed(
    sources: Sequence[Source], source: Source, function: Function, name: str
) -> Iterator[tuple[Source, ast.expr]]:
    """What the calls in the files pass a function, or the constructor of a class, for a parameter; its default too."""
    owner = source.parents.get(function)
    method = isinstance(owner, ast.ClassDef)
    kin = relatives(sources, source, owner) if isinstance(owner, ast.ClassDef) else []
    names = {c.name for _, c in kin} if function.name == "__init__" else {function.name}
    order = positional(function)
    default = _defaults(function).get(name)
    if default is not None:
        yield source, default
    for file in sources:
        inside = {id(n) for at, c in kin if at.path == file.path for n in ast.walk(c)} if len(kin) > 1 else set()
        for call in ast.walk(file.tree):
            if not isinstance(call, ast.Call):
                continue
            callee = last_name(call.func)
            if callee not in names and not (callee == "__init__" == function.name and id(call) in inside):
                continue
            yield from ((file, k.value) for k in call.keywords if k.arg == name)
            given = [*([call.func] if method else []), *call.args]
            plain = not any(isinstance(a, ast.Starred) for a in given)
            if plain and name in order and order.index(name) < len(given):
                yield file, given[order.index(name)]


def _defaults(function: Function) -> dict[str, ast.expr]:
    args = function.args
    order = positional(function)
    given = dict(zip(order[len(order) - len(args.defaults) :], args.defaults, strict=True))
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return {**given, **{a.arg: value for a, value in pairs if value is not None}}


def positional(function: Function) -> list[str]:
    """The names of the parameters that a call may give by their place."""
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
