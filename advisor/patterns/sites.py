"""Where the user's source constructs a module that a graph node ran in: `self.conv = nn.Conv2d(...)`.

A node knows the path of its module ("layer1.0.conv") and the module's class, not the line that made it. The attribute
in the path is looked up among the assignments of the class that owns it; what several places could have made is None.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.model import Graph, Node
from advisor.patterns.callsites import Function, scope_of
from advisor.source import Source

CONTAINERS = ("torch.nn.Sequential", "torch.nn.ModuleList")


@dataclass(frozen=True)
class Construction:
    """A call that makes a module. `owner` is the class whose attribute it becomes, None for a plain variable.

    `attribute` is the attribute or variable, `place` the positions inside the containers it is listed in; None stands
    for every position of a comprehension.
    """

    call: ast.Call
    qualified: str
    owner: str | None
    attribute: str
    place: tuple[int | None, ...] = ()


def constructions(source: Source, prefixes: Sequence[str]) -> Iterator[Construction]:
    """Calls of names that begin with one of `prefixes` ("torch.nn.Conv"), assigned to an attribute or variable.

    Also as elements of nn.Sequential and nn.ModuleList, directly or one in another. In the order of the source.
    """
    for statement in ast.walk(source.tree):
        if not isinstance(statement, ast.Assign):
            continue
        for target, value in _assigned(statement):
            name = _attribute(source, target)
            if name is None:
                continue
            owner = _owner(source, statement) if isinstance(target, ast.Attribute) else None
            for call, place in _made(source, value):
                qualified = source.qualified(call.func)
                if qualified is not None and qualified.startswith(tuple(prefixes)):
                    yield Construction(call, qualified, owner, name, place)


def construction_of(source: Source, graph: Graph, node: Node) -> Construction | None:
    """The call that made the module a node ran in, None where the file does not show exactly one."""
    if not node.module or not node.module_class:
        return None
    kind = node.module_class.rpartition(".")[2]
    parts = node.module.split(".")
    cut = max((i for i, part in enumerate(parts) if not part.isdigit()), default=-1)
    attribute = parts[cut] if cut >= 0 else None
    place = tuple(int(part) for part in parts[cut + 1 :])
    fitting = [
        c
        for c in constructions(source, ("torch.nn.",))
        if c.qualified.rpartition(".")[2] == kind
        and _fits(c.place, place)
        and (c.attribute == attribute if attribute is not None else c.owner is None)
    ]
    owner = _class_at(graph, ".".join(parts[: max(cut, 0)])) or _caller(source, node, attribute)
    kin = _family(source, owner) if owner is not None else None
    owned = [c for c in fitting if kin is None or c.owner in kin]
    exact = [c for c in owned if c.owner == owner]
    found = exact or owned
    return found[0] if len(found) == 1 else None


def _caller(source: Source, node: Node, attribute: str | None) -> str | None:
    """The class whose method calls the attribute of its own instance at a node's line."""
    if node.span is None or node.span.path != source.path or attribute is None:
        return None
    for expression in source.expressions_at(node.span.line):
        if isinstance(expression, ast.Attribute) and expression.attr == attribute:
            name = _attribute(source, expression)
            return _owner(source, source.statement_of(expression)) if name is not None else None
    return None


def _family(source: Source, name: str) -> set[str | None]:
    """A class, its bases and the classes made from it, by name, as far as the file holds them."""
    bases = {c.name: {ast.unparse(base).rsplit(".", 1)[-1] for base in c.bases} for c in source.classes}
    found: set[str | None] = {name}
    while more := {n for n, b in bases.items() if n not in found and b & found} | {
        b for n in found if n in bases for b in bases[n] if b in bases and b not in found
    }:
        found |= more
    return found


def other_choice(source: Source, graph: Graph, node: Node, kinds: Sequence[str]) -> ast.expr | None:
    """What the class that holds a module may put in its place that is no class of torch.nn whose name begins with one
    of `kinds`; None where the file shows nothing of the kind."""
    parts = (node.module or "").split(".")
    attribute = parts[-1]
    owner = _class_at(graph, ".".join(parts[:-1])) or _caller(source, node, attribute)
    kin = _family(source, owner) if owner is not None else None
    for statement in (n for n in ast.walk(source.tree) if isinstance(n, ast.Assign)):
        for target, value in _assigned(statement):
            if not isinstance(target, ast.Attribute) or _attribute(source, target) != attribute:
                continue
            if kin is not None and _owner(source, statement) not in kin:
                continue
            made = next((call for call, place in _made(source, value) if not place), None)
            name = source.qualified(made.func) if made is not None else None
            if name is None or not name.startswith("torch.nn.") or not name.rsplit(".", 1)[-1].startswith(tuple(kinds)):
                return value
    return None


def module_value(source: Source, name: str) -> ast.Assign | None:
    """The only assignment to a name in the module, None where there are several or where it is a local name."""
    found = [
        s
        for s in ast.walk(source.tree)
        if isinstance(s, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr))
        and any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(s))
    ]
    top = [s for s in found if s in source.tree.body and isinstance(s, ast.Assign)]
    return top[0] if len(found) == 1 and len(top) == 1 else None


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """An argument of a call by position or name; None where * or ** hide it."""
    if any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
        return None
    if position < len(call.args):
        return call.args[position]
    return next((k.value for k in call.keywords if k.arg == keyword), None)


def origins(sources: Sequence[Source], source: Source, expression: ast.expr) -> Iterator[tuple[Source, ast.expr]]:
    """Every expression that the value of an expression may come from, first itself.

    Names are followed to all that their function or module gives them, parameters to the arguments of every call of
    their function by its name, a result to what the functions of that name in the files return.
    """
    pending, seen = [(source, expression)], {id(expression)}
    while pending:
        at, one = pending.pop()
        yield at, one
        for inner in ast.walk(one):
            further: list[tuple[Source, ast.expr]] = []
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                further = [(at, value) for value in _bound(at, inner)] or list(_passed(sources, at, inner))
            elif isinstance(inner, ast.Call):
                further = list(_returned(sources, inner))
            for pair in further:
                if id(pair[1]) not in seen:
                    seen.add(id(pair[1]))
                    pending.append(pair)


def called_name(call: ast.Call) -> str | None:
    """The last name of what is called: `view` of `x.view(-1)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def _bound(source: Source, name: ast.Name) -> Iterator[ast.expr]:
    """What the function around a name, or the module, binds it to: assignments, loops, `with`."""
    scope = scope_of(source, name)
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Store):
            parent = source.parents.get(node)
            while isinstance(parent, (ast.Tuple, ast.List, ast.Starred)):
                parent = source.parents.get(parent)
            for field in ("value", "iter", "context_expr"):
                value = getattr(parent, field, None)
                if isinstance(value, ast.expr):
                    yield value


def _passed(sources: Sequence[Source], source: Source, name: ast.Name) -> Iterator[tuple[Source, ast.expr]]:
    """What the files pass as a parameter to the function around a name."""
    function = scope_of(source, name)
    if not isinstance(function, Function):
        return
    arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if name.id not in [*arguments, *(a.arg for a in function.args.kwonlyargs)]:
        return
    position = arguments.index(name.id) if name.id in arguments else len(arguments)
    for other in sources:
        for call in ast.walk(other.tree) if f"{function.name}(" in other.text else ():
            if isinstance(call, ast.Call) and called_name(call) == function.name:
                bound = arguments[:1] == ["self"] and isinstance(call.func, ast.Attribute)
                given = argument(call, position - bound, name.id) if position >= bound else None
                if given is not None:
                    yield other, given


def _returned(sources: Sequence[Source], call: ast.Call) -> Iterator[tuple[Source, ast.expr]]:
    """What functions of the called name give back, those of the files."""
    name = called_name(call)
    for source in sources:
        for function in ast.walk(source.tree) if f"def {name}" in source.text else ():
            if isinstance(function, Function) and function.name == name:
                for node in ast.walk(function):
                    if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                        yield source, node.value


def _assigned(statement: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in statement.targets:
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            if len(target.elts) == len(statement.value.elts):
                yield from zip(target.elts, statement.value.elts, strict=True)
        else:
            yield target, statement.value


def _attribute(source: Source, target: ast.expr) -> str | None:
    """The attribute of the first parameter that is assigned to, or the variable."""
    if isinstance(target, ast.Name):
        return target.id
    if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
        return None
    function = source.function_at(target.lineno)
    first = function.args.args[0].arg if function is not None and function.args.args else None
    return target.attr if target.value.id == first else None


def _owner(source: Source, statement: ast.stmt) -> str | None:
    node: ast.AST | None = source.parents.get(statement)
    while node is not None and not isinstance(node, ast.ClassDef):
        node = source.parents.get(node)
    return node.name if isinstance(node, ast.ClassDef) else None


def _made(
    source: Source, value: ast.expr, place: tuple[int | None, ...] = ()
) -> Iterator[tuple[ast.Call, tuple[int | None, ...]]]:
    """Calls that make the value or, inside containers, its elements; a chain such as `nn.Linear(...).to(d)` is its
    first call."""
    while (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
    ):
        value = value.func.value
    if not isinstance(value, ast.Call):
        return
    if source.qualified(value.func) not in CONTAINERS:
        yield value, place
        return
    elements: Sequence[ast.expr] = value.args
    if len(elements) == 1 and isinstance(elements[0], ast.Starred):
        elements = [elements[0].value]
    if len(elements) == 1 and isinstance(elements[0], (ast.ListComp, ast.GeneratorExp)):
        yield from _made(source, elements[0].elt, (*place, None))
        return
    if len(elements) == 1 and isinstance(elements[0], (ast.List, ast.Tuple)):
        elements = elements[0].elts
    for position, element in enumerate(elements):
        if isinstance(element, ast.Starred):  # what follows has no known position
            return
        yield from _made(source, element, (*place, position))


def _fits(listed: tuple[int | None, ...], place: tuple[int, ...]) -> bool:
    return len(listed) == len(place) and all(a is None or a == b for a, b in zip(listed, place, strict=True))


def _class_at(graph: Graph, path: str) -> str | None:
    """The class of the module at a path, by a node that ran in it itself."""
    found = {n.module_class for n in graph.nodes if n.module == path and n.module_class}
    return found.pop().rpartition(".")[2] if len(found) == 1 else None
