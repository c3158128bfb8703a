"""What the source shows of the weight and the bias of a norm: how many axes they have, which dtypes may meet."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.alignment.aligned import Alignment, Miss
from advisor.patterns.callsites import spreads
from advisor.patterns.regions import Region
from advisor.source import Source, last_name
from advisor.usercode.learned import Function, assigned, passed, positional
from advisor.usercode.made import given_to, relatives

MAKING = frozenset("ones zeros empty rand randn full Tensor FloatTensor".split())
SAME_SHAPE = frozenset(
    "float double half bfloat16 to type type_as cuda cpu contiguous clone detach requires_grad_ "
    "mul_ add_ fill_ zero_ copy_ normal_ uniform_".split()
)
SEVERAL = frozenset("tuple list Tuple List Sequence Size Iterable".split())  # in an annotation, or called
OPEN = None  # of counts: the files do not show it
DEPTH = 6  # names and attributes that are followed one after another


@dataclass(frozen=True)
class _Scope:
    source: Source
    function: Function | None
    depth: int = DEPTH


Count = tuple[int | None, Source, ast.expr]  # the number of axes, and what shows it


def axes_shown(sources: Sequence[Source], alignment: Alignment, region: Region) -> bool:
    """Whether the files show that weight and bias reach along the normalised axes alone; False where they leave it
    open. Raises `Miss` where one is given from outside or may have another shape."""
    axes, shown = region.facts["axes"].count(",") + 1, True
    for name, index in region.inputs.items():
        if name == "x":
            continue
        bound = alignment.values[index]
        scope = _Scope(alignment.source, alignment.source.function_at(bound.statement.lineno))
        text = " ".join(alignment.source.segment(bound.expression).split())
        counts = list(_vector(sources, bound.expression, scope))
        for count, source, at in counts:
            if count is not OPEN and count != axes:
                raise Miss(f"`{text}` may have another shape in another instance ({source.path}:{at.lineno})")
        if not counts:
            raise Miss(f"the shape of `{text}` is not shown where it is made", bound.expression.lineno)
        shown = shown and all(count is not OPEN for count, _, _ in counts)
    return shown


def _vector(sources: Sequence[Source], node: ast.expr, scope: _Scope) -> Iterator[Count]:
    """The numbers of axes of a tensor, for every value that it may have; 0 for what no construction shows."""
    source = scope.source
    if scope.depth == 0:
        yield 0, source, node
    elif isinstance(node, ast.IfExp):
        yield from _vector(sources, node.body, scope)
        yield from _vector(sources, node.orelse, scope)
    elif isinstance(node, ast.BinOp):
        sides = [side for side in (node.left, node.right) if not isinstance(side, ast.Constant)]
        for side in sides:
            yield from _vector(sources, side, scope)
    elif isinstance(node, ast.Call):
        yield from _made(sources, node, scope)
    elif isinstance(node, ast.Name) and scope.function is not None and not _is_parameter(scope.function, node.id):
        values = list(assigned(scope.function, node.id))
        for value in values:
            yield from _vector(sources, value, _Scope(source, scope.function, scope.depth - 1))
        if not values:
            yield 0, source, node
    elif isinstance(node, ast.Attribute) and _owner(node, scope) is not None:
        yield from _attribute(sources, node, scope)
    elif not (isinstance(node, ast.Constant) and node.value is None):
        yield 0, source, node


def _attribute(sources: Sequence[Source], node: ast.Attribute, scope: _Scope) -> Iterator[Count]:
    owner = _owner(node, scope)
    assert owner is not None
    for given in given_to(sources, scope.source, owner, node.attr):
        function = given.source.function_at(given.at.lineno)
        if given.value is None:
            yield 0, given.source, node
            continue
        for count, source, at in _vector(sources, given.value, _Scope(given.source, function, scope.depth - 1)):
            mine = given.owner is not None
            if mine or count:  # lm_head.weight = wte.weight: another object's attribute of that name
                yield count if mine else OPEN, source, at


def _made(sources: Sequence[Source], call: ast.Call, scope: _Scope) -> Iterator[Count]:
    name = scope.source.qualified(call.func) or ""
    word = name.rsplit(".", 1)[-1]
    inner = next((a for a in (*call.args, *(k.value for k in call.keywords if k.arg in ("data", "input")))), None)
    method = isinstance(call.func, ast.Attribute) and not name and call.func.attr in SAME_SHAPE
    if method and isinstance(call.func, ast.Attribute):
        yield from _vector(sources, call.func.value, scope)
    elif name.startswith("torch.") and inner is not None and _keeps_shape(name):
        yield from _vector(sources, inner, scope)
    elif name in ("torch.linspace", "torch.logspace", "torch.arange"):
        yield 1, scope.source, call
    elif name.startswith("torch.") and word in MAKING:
        sizes = call.args[:1] if word == "full" else call.args
        said = [k.value for k in call.keywords if k.arg == "size"]
        if len(sizes) > 1 and not any(isinstance(s, ast.Starred) for s in sizes):
            yield len(sizes), scope.source, call
        elif len([*sizes, *said]) == 1:
            yield from _sizes(sources, [*sizes, *said][0], scope)
        else:
            yield 0, scope.source, call
    else:
        yield 0, scope.source, call


def _keeps_shape(name: str) -> bool:
    """Whether a function of torch gives a tensor of the shape of its first argument."""
    return name.startswith("torch.nn.init.") or name.endswith(("_like", ".Parameter"))


# -------------------------------------------------------------------------------------------------------------- dtypes


def check_one_dtype(sources: Sequence[Source], region: Region) -> None:
    """Raise `Miss` where the files name autocast on the CPU: `weight * x` widens a bfloat16 x to the weight's dtype
    there, the fused norm does not."""
    if len(region.inputs) == 1:
        return
    for source in sources:
        for call in ast.walk(source.tree) if "autocast" in source.text else ():
            if isinstance(call, ast.Call) and last_name(call.func) == "autocast" and _on_cpu(source, call):
                text = " ".join(source.segment(call.func).split())
                raise Miss(f"`{text}` on the CPU ({source.path}:{call.lineno}) would give it the dtype of its input")


def _on_cpu(source: Source, call: ast.Call) -> bool:
    said = {k.arg: k.value for k in call.keywords}
    enabled, kind = said.get("enabled"), said.get("device_type", next(iter(call.args), None))
    if isinstance(enabled, ast.Constant) and not enabled.value:
        return False
    named = kind is not None and any(isinstance(n, ast.Constant) and n.value == "cpu" for n in ast.walk(kind))
    return named or ".cpu.amp." in f"{source.qualified(call.func) or ''}."


# --------------------------------------------------------------------------------------------------------------- sizes


def _sizes(sources: Sequence[Source], node: ast.expr, scope: _Scope) -> Iterator[Count]:
    """How many sizes an expression is: one for a number, and for what nothing shows to be several; 0 for an unknown
    number."""
    source = scope.source
    if isinstance(node, (ast.Tuple, ast.List)):
        yield 0 if any(isinstance(e, ast.Starred) for e in node.elts) else len(node.elts), source, node
    elif isinstance(node, ast.IfExp):
        for side in (node.body, node.orelse):
            broadcast = isinstance(side, ast.Constant) and side.value == 1
            yield from [(0, source, side)] if broadcast else _sizes(sources, side, scope)
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            yield from _sizes(sources, side, scope)
    elif isinstance(node, ast.Subscript):
        yield 0 if isinstance(node.slice, ast.Slice) else 1, source, node
    elif _gives_several(node):
        yield 0, source, node
    elif scope.depth and isinstance(node, ast.Name):
        yield from _of_name(sources, node, scope)
    elif scope.depth and isinstance(node, ast.Attribute) and _owner(node, scope) is not None:
        owner = _owner(node, scope)
        assert owner is not None
        for given in given_to(sources, source, owner, node.attr):
            if given.value is not None and given.owner is not None:
                function = given.source.function_at(given.at.lineno)
                yield from _sizes(sources, given.value, _Scope(given.source, function, scope.depth - 1))
    else:
        yield 1, source, node


def _of_name(sources: Sequence[Source], node: ast.Name, scope: _Scope) -> Iterator[Count]:
    source, function = scope.source, scope.function
    yield 1, source, node
    for value in assigned(function or source.tree, node.id):
        yield from _sizes(sources, value, _Scope(source, function, scope.depth - 1))
    if function is None or not _is_parameter(function, node.id):
        return
    annotation = next(a.annotation for a in ast.walk(function.args) if isinstance(a, ast.arg) and a.arg == node.id)
    if annotation is not None and SEVERAL & {last_name(n) for n in ast.walk(annotation) if isinstance(n, ast.expr)}:
        yield 0, source, annotation
    for at, value in passed(sources, source, function, node.id):
        yield from _sizes(sources, value, _Scope(at, at.function_at(value.lineno), scope.depth - 1))
    owner = source.parents.get(function)
    if isinstance(owner, ast.ClassDef) and _handed_on(sources, {c.name for _, c in relatives(sources, source, owner)}):
        yield OPEN, source, node


def _handed_on(sources: Sequence[Source], names: set[str]) -> bool:
    """Whether one of the classes is a value somewhere, which may then be called under another name, or is called with
    arguments that are unpacked."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in names:
                parent = source.parents.get(node)
                called = isinstance(parent, ast.Call) and parent.func is node and not spreads(parent)
                super_of = isinstance(parent, ast.Call) and last_name(parent.func) in ("super", "isinstance")
                if not (called or super_of or isinstance(parent, (ast.ClassDef, ast.Attribute))):
                    return True
    return False


def _gives_several(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        word = last_name(node.func)
        return word in SEVERAL or (word == "size" and not node.args)
    return isinstance(node, (ast.ListComp, ast.Starred)) or (isinstance(node, ast.Attribute) and node.attr == "shape")


def _is_parameter(function: Function, name: str) -> bool:
    return any(a.arg == name for a in ast.walk(function.args) if isinstance(a, ast.arg))


def _owner(node: ast.Attribute, scope: _Scope) -> ast.ClassDef | None:
    """The class whose instance the attribute is read of, as the first parameter of its method."""
    owner = scope.source.parents.get(scope.function) if scope.function is not None else None
    first = next(iter(positional(scope.function)), None) if scope.function is not None else None
    mine = isinstance(node.value, ast.Name) and node.value.id == first
    return owner if mine and isinstance(owner, ast.ClassDef) else None
