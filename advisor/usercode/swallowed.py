"""What a captured run cannot show of a module whose call a rewrite drops: other instances, replacements, hooks.

The run saw one instance of the user's class. Another may hold another module under the same name, because it is given
from outside, chosen by a setting or put there afterwards; and a hook on a module runs only while the module is called.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from advisor.alignment.aligned import Alignment, Miss
from advisor.model import Graph
from advisor.patterns import Region
from advisor.patterns.callsites import around, scope_of
from advisor.source import Source
from advisor.usercode.made import IN_PLACE, is_parameter, made, own_class, torch_class

TORCH = "torch.nn.modules."
# Modules of which no argument of the constructor decides what a rewrite says: dropout is read off the module itself.
SAID_AGAIN = frozenset({"Dropout", "Identity", "MultiheadAttention"})
HOOKS = frozenset(
    f"register_{kind}"
    for kind in (
        *("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook"),
        *("module_forward_hook", "module_forward_pre_hook", "module_backward_hook"),
        *("module_full_backward_hook", "module_full_backward_pre_hook"),
    )
)


def check_swallowed(sources: Sequence[Source], alignment: Alignment, region: Region, graph: Graph) -> None:
    """Every module of torch whose call belongs to the region is the same in every instance, and nothing hooks into it.

    Raises `Miss` otherwise.
    """
    for index in sorted(region.inner):
        kind, callee = _kind(graph, index), alignment.calls.get(index)
        if isinstance(callee, ast.Call):  # nn.Softmax(dim=-1)(x)
            kind = kind or torch_class(alignment.source, callee.func)
        if kind is None:
            continue
        if callee is None:
            raise Miss(f"`{graph.nodes[index].module}` is called in another file, where it may be another module")
        reason = other_module(sources, alignment.source, callee, kind)
        if reason is None and (hook := hooked(sources, callee, kind)) is not None:
            reason = f"{hook} may be on `{_text(alignment.source, callee)}`, which would no longer be called"
        if reason is not None:
            raise Miss(reason)


def other_module(sources: Sequence[Source], source: Source, callee: ast.expr, kind: str) -> str | None:
    """Why a callee may be anything but the module of class `kind` of torch.nn that the run saw, None where it cannot.

    An identity may stand for a dropout.
    """
    try:
        found = made(sources, source, callee)
    except Miss as miss:
        return miss.reason
    for one in found:
        alike = one.kind == kind or (kind, one.kind) == ("Dropout", "Identity")
        fixed = one.kind in SAID_AGAIN or (one.literal and one.arguments == found[0].arguments)
        if not alike or not fixed:
            where = f"`{_text(one.source, one.call)}` ({one.source.path}:{one.call.lineno})"
            return f"`{_text(source, callee)}` may be another module in another instance: {where}"
    line = replaced(sources, callee, kind)
    return None if line is None else f"`{_text(source, callee)}` may be replaced by another module ({line})"


def _text(source: Source, expression: ast.expr) -> str:
    text = " ".join(source.segment(expression).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(graph: Graph, index: int) -> str | None:
    """The class of torch.nn that computed a node in its own code."""
    node = graph.nodes[index]
    name = node.module_class or ""
    return name.rsplit(".", 1)[-1] if node.op.startswith("call_") and name.startswith(TORCH) else None


def _names(callee: ast.expr) -> frozenset[str]:
    """The names under which the callee is an attribute: `drop` of `self.drop`, `layers` of `self.layers[0]`."""
    while isinstance(callee, (ast.Subscript, ast.Call)):
        callee = callee.value if isinstance(callee, ast.Subscript) else callee.func
    return frozenset({callee.attr} if isinstance(callee, ast.Attribute) else ())


# --------------------------------------------------------------------------------------------------------- replacement


def replaced(sources: Sequence[Source], callee: ast.expr, kind: str) -> str | None:
    """The line that may exchange modules of a class, or their `forward`, without writing down their name.

    A program that exchanges modules by computed names looks for their class in the same function.
    """
    names = _names(callee)
    for source in sources:
        if not any(word in source.text for word in ("setattr", "_modules", "forward")):
            continue
        for node in ast.walk(source.tree):
            if not isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
                continue
            if _puts_forward(node, names) or (
                _puts_by_computed_name(node) and kind in _mentioned(scope_of(source, node))
            ):
                return f"{source.path}:{node.lineno}"
    return None


def _puts_forward(node: ast.AST, names: Collection[str]) -> bool:
    """model.drop.forward = function."""
    stored = isinstance(node, ast.Attribute) and node.attr == "forward" and isinstance(node.ctx, ast.Store)
    return (
        stored
        and isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and (node.value.attr in names)
    )


def _puts_by_computed_name(node: ast.AST) -> bool:
    """setattr(parent, name, module), parent._modules[name] = module."""
    if isinstance(node, ast.Subscript):
        stored = isinstance(node.ctx, ast.Store) and not isinstance(node.slice, ast.Constant)
        return stored and isinstance(node.value, ast.Attribute) and node.value.attr == "_modules"
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
    return called and isinstance(node, ast.Call) and len(node.args) == 3 and not isinstance(node.args[1], ast.Constant)


def _mentioned(scope: ast.AST) -> set[str]:
    names = {n.attr for n in ast.walk(scope) if isinstance(n, ast.Attribute)}
    return names | {n.id for n in ast.walk(scope) if isinstance(n, ast.Name)}


# --------------------------------------------------------------------------------------------------------------- hooks


def hooked(sources: Sequence[Source], callee: ast.expr, kind: str, ending: str = "hook") -> str | None:
    """The hook, with its line, that the files may register on the module behind a callee; `ending` is that of the
    methods that count."""
    classes = {c.name for source in sources for c in source.classes}
    for source in sources:
        if "register_" not in source.text:
            continue
        for node, name in _registrations(source):
            if not name.endswith(ending):
                continue
            receiver = node.value if isinstance(node, ast.Attribute) else None
            every = name.startswith("register_module_") or receiver is None
            if every or receiver is None or _may_be(source, receiver, _names(callee), kind, classes):
                word = name.removeprefix("register_").replace("_", " ")
                return f"a {word} registered in {source.path}:{node.lineno}"
    return None


def _registrations(source: Source) -> Iterator[tuple[ast.expr, str]]:
    """The expressions that name a method which registers a hook: by attribute, imported, or as text for getattr."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in HOOKS:
            yield node, node.attr
        elif isinstance(node, ast.Name) and node.id in HOOKS:
            yield node, node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in HOOKS:
            yield node, node.value


def _may_be(
    source: Source, receiver: ast.expr, names: Collection[str], kind: str, classes: Collection[str], depth: int = 4
) -> bool:
    """Whether a hook's module may be the one of these names and this class of torch.nn."""
    if depth == 0:
        return True
    receiver = _bare(receiver)
    while isinstance(receiver, ast.Subscript):
        receiver = receiver.value
    if isinstance(receiver, ast.Attribute):
        return receiver.attr in names
    if isinstance(receiver, ast.Call):
        called = receiver.func
        if isinstance(called, ast.Attribute) and called.attr == "get_submodule" and receiver.args:
            path = receiver.args[0]
            known = isinstance(path, ast.Constant) and isinstance(path.value, str)
            return not known or not isinstance(path, ast.Constant) or str(path.value).rsplit(".", 1)[-1] in names
        if isinstance(called, ast.Name) and called.id in classes:
            return False
        name = source.qualified(called) or ""
        return torch_class(source, called) == kind or not name.startswith("torch.")
    if not isinstance(receiver, ast.Name):
        return True
    if own_class(source, receiver) is not None or _is_another_class(source, receiver, kind, classes):
        return False
    values = _values(source, receiver)
    return not values or any(_may_be(source, v, names, kind, classes, depth - 1) for v in values)


def _values(source: Source, name: ast.Name) -> list[ast.expr]:
    """What a name is assigned besides itself, empty where it is bound in another way as well."""
    for scope in (scope_of(source, name), source.tree):
        stored = [
            n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name.id and isinstance(n.ctx, ast.Store)
        ]
        given = [_bare(p.value) for n in stored if isinstance(p := source.parents[n], ast.Assign)]
        if is_parameter(scope, name.id) or len(given) != len(stored):
            return []
        if given:
            return [value for value in given if not isinstance(value, ast.Name) or value.id != name.id]
    return []


def _bare(value: ast.expr) -> ast.expr:
    """A module without the calls that return it: `model` of `model.to(device)`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in IN_PLACE:
        value = value.func.value
    return value


def _is_another_class(source: Source, name: ast.Name, kind: str, classes: Collection[str]) -> bool:
    """Whether `if isinstance(name, ...)` around the registration lets only other classes through."""
    child: ast.AST = name
    for parent in around(source, name):
        if isinstance(parent, ast.If) and child in parent.body:
            test = parent.test
            asked = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"
            if asked and isinstance(test, ast.Call) and len(test.args) == 2 and ast.unparse(test.args[0]) == name.id:
                wanted = test.args[1]
                kinds = wanted.elts if isinstance(wanted, (ast.Tuple, ast.List)) else [wanted]
                return all(_is_other(source, one, kind, classes) for one in kinds)
        child = parent
    return False


def _is_other(source: Source, one: ast.expr, kind: str, classes: Collection[str]) -> bool:
    if isinstance(one, ast.Name) and one.id in classes:
        return True
    found = torch_class(source, one)
    return found is not None and found not in (kind, "Module") and not found.startswith("_")
