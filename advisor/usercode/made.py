"""What the user's files put where a call finds its module: every construction of an attribute, wherever it is given."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.alignment.aligned import Miss
from advisor.patterns.callsites import Function, scope_of
from advisor.source import Source

# names under which programs keep settings: what is assigned there is no module
SETTINGS = frozenset("config cfg conf args opt opts options hparams params settings defaults".split())
IN_PLACE = frozenset("to cuda cpu float double half bfloat16 requires_grad_ train eval".split())  # return their module
CONTAINERS = frozenset({"torch.nn.ModuleList", "torch.nn.Sequential", "torch.nn.ModuleDict"})
NO_MODULE = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr)
DEPTH = 6  # names and attributes that are followed one after another


@dataclass(frozen=True)
class Made:
    """A call that makes a module; `kind` is its class in torch.nn, None where it is no class of torch.nn."""

    source: Source
    call: ast.Call
    kind: str | None

    @property
    def arguments(self) -> str:
        """The arguments of the call as text, the same for two calls that say the same."""
        return ", ".join(ast.unparse(part) for part in (*self.call.args, *self.call.keywords))

    @property
    def literal(self) -> bool:
        """Whether every argument is written as a literal."""
        given = [*self.call.args, *(k.value if k.arg is not None else ast.Name("_") for k in self.call.keywords)]
        return all(_is_literal(value) for value in given)


@dataclass(frozen=True)
class Given:
    """One value that the files give an attribute, None where it cannot be read off.

    `owner` is the class that gives it to its own instances; `receiver` the object where it is another.
    """

    source: Source
    at: ast.stmt | ast.expr
    value: ast.expr | None
    owner: ast.ClassDef | None = None
    receiver: ast.expr | None = None


def made(sources: Sequence[Source], source: Source, callee: ast.expr) -> tuple[Made, ...]:
    """Every construction that the expression called in `source` may stand for; raises `Miss` where there may be
    others."""
    reader = _Reader(sources, source.segment(callee))
    reader.read(source, callee, (), DEPTH)
    if not reader.found:
        raise reader.unknown()
    return tuple(reader.found)


def given_to(sources: Sequence[Source], source: Source, owner: ast.ClassDef, name: str) -> Iterator[Given]:
    """Every value that the files give an attribute of the instances of a class, buffers and parameters too."""
    kin = _family(sources, source, owner)
    registered = (g for file in sources for g in _registered(file, name))
    for given in (*_given(sources, name), *registered):
        if given.owner is None or _key(given.source, given.owner) in kin:
            yield given


def relatives(sources: Sequence[Source], source: Source, owner: ast.ClassDef) -> list[tuple[Source, ast.ClassDef]]:
    """A class, the classes made from it, and their bases, each with its file."""
    kin = _family(sources, source, owner)
    return [(s, c) for s in sources for c in s.classes if _key(s, c) in kin]


def torch_class(source: Source, function: ast.expr) -> str | None:
    """The name in torch.nn of the class an expression names: "Dropout" for `nn.Dropout`."""
    name = source.qualified(function) or ""
    if isinstance(function, ast.Name) and any(c.name == function.id for c in source.classes):
        return None
    return name.rsplit(".", 1)[-1] if name.startswith("torch.nn.") else None


def own_class(source: Source, expression: ast.expr) -> ast.ClassDef | None:
    """The class of which a name is the instance, as the first parameter of one of its methods."""
    if not isinstance(expression, ast.Name):
        return None
    function: ast.AST | None = scope_of(source, expression)
    while isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = function.args
        first = next(iter((*arguments.posonlyargs, *arguments.args)), None)
        parent = source.parents.get(function)
        if isinstance(parent, ast.ClassDef) and isinstance(function, Function):
            kinds = {ast.unparse(d) for d in function.decorator_list}
            own = first is not None and first.arg == expression.id and not kinds & {"staticmethod", "classmethod"}
            return parent if own else None
        if any(a.arg == expression.id for a in ast.walk(arguments) if isinstance(a, ast.arg)):
            return None
        while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            parent = source.parents.get(parent)
        function = parent
    return None


# ------------------------------------------------------------------------------------------------------------- reading


class _Reader:
    """Collects the constructions behind one callee; `path` are the places in containers still to be taken."""

    def __init__(self, sources: Sequence[Source], text: str) -> None:
        self.sources, self.text = sources, " ".join(text.split())
        self.found: list[Made] = []

    def unknown(self, source: Source | None = None, at: ast.stmt | ast.expr | None = None) -> Miss:
        reason = f"`{self.text}` may be another module in another instance"
        if source is None or at is None:
            return Miss(f"{reason}: no line that makes it was found")
        text = " ".join(source.segment(at).split())
        return Miss(f"{reason}: `{text if len(text) <= 60 else text[:57] + '...'}` ({source.path}:{at.lineno})")

    def read(self, source: Source, expression: ast.expr, path: tuple[int | None, ...], depth: int) -> None:
        """What an expression that names a module, or a value that is one, may stand for."""
        if depth == 0:
            raise self.unknown(source, expression)
        if isinstance(expression, ast.Constant) and expression.value is None:
            return
        if isinstance(expression, ast.IfExp):
            self.read(source, expression.body, path, depth)
            self.read(source, expression.orelse, path, depth)
        elif isinstance(expression, ast.Subscript):
            self.read(source, expression.value, (_place(expression.slice), *path), depth)
        elif isinstance(expression, ast.Attribute):
            self._attribute(source, expression, path, depth)
        elif isinstance(expression, ast.Name):
            self._name(source, expression, path, depth)
        elif path:
            for element in self._elements(source, expression, path[0]):
                self.read(source, element, path[1:], depth)
        elif isinstance(expression, ast.Call):
            self._call(source, expression, depth)
        else:
            raise self.unknown(source, expression)

    def _call(self, source: Source, call: ast.Call, depth: int) -> None:
        if isinstance(call.func, ast.Attribute) and call.func.attr in IN_PLACE and source.qualified(call.func) is None:
            self.read(source, call.func.value, (), depth)
        else:
            self.found.append(Made(source, call, torch_class(source, call.func)))

    def _attribute(self, source: Source, expression: ast.Attribute, path: tuple[int | None, ...], depth: int) -> None:
        owner = own_class(source, expression.value)
        kin = None if owner is None else _family(self.sources, source, owner)
        for given in _given(self.sources, expression.attr):
            if given.owner is not None and kin is not None and _key(given.source, given.owner) not in kin:
                continue
            if _no_module(given):
                continue
            if given.value is None:
                raise self.unknown(given.source, given.at)
            self.read(given.source, given.value, path, depth - 1)
        for other in self.sources if path else ():
            self._appended(other, other.tree, expression.attr, path, depth)

    def _name(self, source: Source, name: ast.Name, path: tuple[int | None, ...], depth: int) -> None:
        scope = scope_of(source, name)
        stored = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name.id and _stores(n)]
        if is_parameter(scope, name.id) or (not stored and isinstance(scope, ast.Module)):
            raise self.unknown(source, name)
        if not stored:
            scope = source.tree
            stored = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name.id and _stores(n)]
        if not stored:
            raise self.unknown(source, name)
        for target in stored:
            value, more = self._bound(source, target)
            self.read(source, value, (*more, *path), depth - 1)
        if path:
            self._appended(source, scope, name.id, path, depth)

    def _bound(self, source: Source, target: ast.Name) -> tuple[ast.expr, tuple[int | None, ...]]:
        """The value a name is bound to, and the places in it that are taken."""
        parent, child = source.parents[target], target
        more: tuple[int, ...] = ()
        if isinstance(parent, (ast.Tuple, ast.List)):
            more = (parent.elts.index(child),)
            parent, child = source.parents[parent], parent  # type: ignore[assignment]
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and parent.value is not None:
            return parent.value, more
        if isinstance(parent, (ast.For, ast.comprehension)) and parent.target is child:
            walked, word = parent.iter, _named(parent.iter.func) if isinstance(parent.iter, ast.Call) else None
            if isinstance(walked, ast.Call) and word == "enumerate" and more == (1,):
                return walked.args[0], (None,)
            if isinstance(walked, ast.Call) and word == "zip" and len(more) == 1 and more[0] < len(walked.args):
                return walked.args[more[0]], (None,)
            return walked, (None, *more)
        raise self.unknown(source, source.statement_of(target))

    def _appended(self, source: Source, scope: ast.AST, name: str, path: tuple[int | None, ...], depth: int) -> None:
        """What is put into the container of a name after it was made."""
        for node in ast.walk(scope) if name in source.text else ():
            if isinstance(node, ast.Subscript) and _stores(node) and _named(node.value) == name:
                raise self.unknown(source, source.statement_of(node))
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if _named(node.func.value) != name or node.func.attr not in ("append", "insert", "extend", "update"):
                continue
            if node.func.attr != "append" or len(node.args) != 1:
                raise self.unknown(source, node)
            self.read(source, node.args[0], path[1:], depth - 1)

    def _elements(self, source: Source, value: ast.expr, place: int | None) -> list[ast.expr]:
        if isinstance(value, ast.Call):
            name = source.qualified(value.func) or ""
            if name not in CONTAINERS or value.keywords:
                raise self.unknown(source, value)
            if name.endswith("Sequential"):
                return self._picked(source, value.args, place)
            return self._elements(source, value.args[0], place) if value.args else []
        if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
            return [value.elt]
        if isinstance(value, ast.Dict):
            return list(value.values)
        if isinstance(value, (ast.List, ast.Tuple)):
            return self._picked(source, value.elts, place)
        raise self.unknown(source, value)

    def _picked(self, source: Source, elements: list[ast.expr], place: int | None) -> list[ast.expr]:
        starred = next((e for e in elements if isinstance(e, ast.Starred)), None)
        if starred is not None:
            raise self.unknown(source, starred)
        inside = place is not None and -len(elements) <= place < len(elements)
        return [elements[place]] if inside and place is not None else elements


def _place(index: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(index)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _stores(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _named(expression: ast.expr) -> str | None:
    """The last name of an expression that names something: `drop` of `self.drop` and of `drop`."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


def is_parameter(scope: ast.AST, name: str) -> bool:
    """Whether a scope is a function that takes a parameter of this name."""
    arguments = getattr(scope, "args", None)
    return arguments is not None and any(a.arg == name for a in ast.walk(arguments) if isinstance(a, ast.arg))


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


# -------------------------------------------------------------------------------------------------------------- giving


def _no_module(given: Given) -> bool:
    """Whether a value shows that no module is replaced: a number (torch refuses it), a setting."""
    value = given.value
    if isinstance(value, NO_MODULE) or (isinstance(value, ast.Constant) and value.value is not None):
        return True
    return given.receiver is not None and (_named(given.receiver) or "").lstrip("_") in SETTINGS


def _key(source: Source, owner: ast.ClassDef) -> tuple[str, int]:
    """What tells a class from others, however often its file is parsed."""
    return source.path, owner.lineno


def _family(sources: Sequence[Source], source: Source, owner: ast.ClassDef) -> set[tuple[str, int]]:
    """A class, the classes made from it, and the bases of all of these, as far as the files hold them."""

    def bases(at: Source, one: ast.ClassDef) -> Iterator[tuple[Source, ast.ClassDef]]:
        for base in one.bases:
            name = _named(base.value if isinstance(base, ast.Subscript) else base)
            here = [(at, c) for c in at.classes if c.name == name and c is not one]
            yield from here or [(s, c) for s in sources for c in s.classes if c.name == name]

    every = [(s, c) for s in sources for c in s.classes]
    above = {_key(s, c): {_key(*base) for base in bases(s, c)} for s, c in every}
    found = {_key(source, owner)}
    while more := {key for key, over in above.items() if key not in found and over & found}:
        found |= more
    while more := {over for key in found for over in above.get(key, ())} - found:
        found |= more
    return found


def _given(sources: Sequence[Source], name: str) -> Iterator[Given]:
    """Every place in the files that gives an attribute of this name a value."""
    for source in sources:
        if name not in source.text:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == name and _stores(node):
                yield _stored(source, node)
            elif isinstance(node, ast.Call):
                yield from _by_call(source, node, name)
            elif isinstance(node, ast.Subscript) and _stores(node) and _named(node.value) == "_modules":
                if isinstance(node.slice, ast.Constant) and node.slice.value == name:
                    yield _stored(source, node)
            elif isinstance(node, ast.ClassDef):
                yield from _in_class(source, node, name)


def _stored(source: Source, target: ast.Attribute | ast.Subscript) -> Given:
    statement = source.statement_of(target)
    receiver = (
        target.value.value
        if isinstance(target.value, ast.Attribute) and isinstance(target, ast.Subscript)
        else (target.value)
    )  # fmt: skip - `self` of self._modules["drop"]
    value: ast.expr | None = None
    parent = source.parents[target]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and parent is statement:
        value = statement.value
        if value is None:  # a declaration of a type
            value = ast.Constant(0)
    elif isinstance(parent, (ast.Tuple, ast.List)) and isinstance(statement, ast.Assign):
        given = statement.value
        if isinstance(given, (ast.Tuple, ast.List)) and len(given.elts) == len(parent.elts):
            value = given.elts[parent.elts.index(target)]
    return Given(source, statement, value, own_class(source, receiver), receiver)


def _by_call(source: Source, call: ast.Call, name: str) -> Iterator[Given]:
    """setattr(module, "name", value), module.add_module("name", value) and their kin."""
    function = _named(call.func)
    if function not in ("setattr", "__setattr__", "add_module", "register_module"):
        return
    plain = isinstance(call.func, ast.Attribute) and len(call.args) == 2
    arguments = [call.func.value, *call.args] if plain and isinstance(call.func, ast.Attribute) else list(call.args)
    if len(arguments) == 3 and isinstance(arguments[1], ast.Constant) and arguments[1].value == name:
        yield Given(source, call, arguments[2], own_class(source, arguments[0]), arguments[0])


def _registered(source: Source, name: str) -> Iterator[Given]:
    """module.register_buffer("name", value) and module.register_parameter("name", value)."""
    for call in ast.walk(source.tree) if name in source.text else ():
        function = call.func if isinstance(call, ast.Call) else None
        if not isinstance(function, ast.Attribute) or function.attr not in ("register_buffer", "register_parameter"):
            continue
        assert isinstance(call, ast.Call)
        said = {k.arg: k.value for k in call.keywords}
        given = [*call.args, *(said[key] for key in ("name", "tensor", "param") if key in said)]
        if len(given) > 1 and isinstance(given[0], ast.Constant) and given[0].value == name:
            yield Given(source, call, given[1], own_class(source, function.value), function.value)


def _in_class(source: Source, owner: ast.ClassDef, name: str) -> Iterator[Given]:
    """An attribute of the class itself: a value, a field that its constructor takes, a method or property."""
    for statement in owner.body:
        if isinstance(statement, ast.Assign) and any(_named(t) == name for t in statement.targets):
            yield Given(source, statement, statement.value, owner)
        elif isinstance(statement, ast.AnnAssign) and _named(statement.target) == name:
            if statement.value is not None or owner.decorator_list:
                yield Given(source, statement, statement.value, owner)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
            yield Given(source, statement, None, owner)
