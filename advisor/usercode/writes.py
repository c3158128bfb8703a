"""Whether anything in the user's files writes into the tensor that an attribute of a class holds, by any name of it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

from advisor.source import Source

CONSTRUCTORS = ("__init__", "__post_init__")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# attributes and methods of a tensor that give no view of it
OTHER = frozenset(
    "shape size dim ndim device dtype item tolist numel clone repeat logical_not logical_and logical_or masked_fill eq "
    "ne lt le gt ge sum any all requires_grad requires_grad_".split()
)
# functions whose result holds their first argument, or views of it
HOLDS = frozenset(
    "zip enumerate list tuple iter reversed sorted next dict set chain as_tensor asarray Parameter Buffer diagonal "
    "squeeze unsqueeze transpose permute t narrow select movedim reshape flatten ravel view_as_real".split()
)
NUMPY = frozenset({"fill_diagonal", "copyto", "putmask", "place", "put"})  # functions of numpy that write in place
# what an average of all weights does to every buffer: the same for a triangle and its copy
AVERAGES = frozenset(
    {"copy_", "lerp_", "mul_", "add_", "div_", "sub_", "_foreach_mul_", "_foreach_add_", "_foreach_copy_"}
)
KEEPS = frozenset({"append", "appendleft", "add", "extend", "insert", "setdefault", "update"})  # methods of containers
BY_NAME = frozenset({"getattr", "get_buffer", "get_parameter"})
TABLES = frozenset({"_buffers", "__dict__", "vars", "named_buffers"})  # what holds attributes by their names
WALKS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.BoolOp, ast.Await, ast.comprehension)


def written_in_place(source: Source, owner: ast.ClassDef, name: str, others: Iterable[Source] = ()) -> bool:
    """Whether a file writes elements of an attribute that the objects of a class may hold, or gives it a new value.

    A plain assignment to the attribute of `self` in a constructor is not among them. Followed are local names,
    containers, loops, parameters and results of functions of the files, and attributes of other objects.
    """
    files = (source, *(other for other in others if other.path != source.path))
    family = _Family(owner, files)
    if _Writes(family, files).into_attribute(name, of_family=True):
        return True
    return _Writes(family, files, AVERAGES).into_every_buffer()


class _Family:
    """The classes that are derived from one or that it is derived from, by their names."""

    def __init__(self, owner: ast.ClassDef, files: tuple[Source, ...]) -> None:
        self.files = files
        self.classes = {c.name for source in files for c in source.classes}
        bases = bases_of(files)
        self.names = derived_from(owner.name, bases)
        pending = list(self.names)
        while pending:
            above = bases.get(pending.pop(), set()) - self.names
            self.names |= above
            pending += above
        self.known = self.names <= self.classes | {"Module", "ABC", "object"}
        self.modules = {part.removesuffix(".py") for source in files for part in source.path.split("/")}

    def excludes(self, source: Source, named: ast.expr) -> bool:
        """Whether no object of the family is an instance of the class that an expression names."""
        qualified = source.qualified(named) or ""
        name = last_name(named)
        name = qualified.rsplit(".", 1)[-1] or name
        if not name or name in self.names | {"Module", "object"}:
            return False
        if name in self.classes or qualified.startswith("torch.nn."):
            return True
        return self.known and bool(qualified) and qualified.split(".")[0] not in self.modules

    def has_not(self, source: Source, receiver: ast.expr) -> bool:
        """Whether an object whose attribute is written is seen to be of no class of the family."""
        function = source.function_at(receiver.lineno)
        owner = source.parents.get(function) if function is not None else None
        itself = own_name(source, function)
        if isinstance(receiver, ast.Name) and receiver.id == itself and isinstance(owner, ast.ClassDef):
            return owner.name not in self.names
        if isinstance(receiver, ast.Attribute) and isinstance(receiver.value, ast.Name) and receiver.value.id == itself:
            assigned = (n for n in ast.walk(owner or source.tree) if isinstance(n, ast.Assign))
            given = [n.value for n in assigned if _gives(n, receiver.attr)]
            if given and all(isinstance(v, ast.Call) and self.excludes(source, v.func) for v in given):
                return True
        return self._is_asked(source, receiver)

    def _is_asked(self, source: Source, receiver: ast.expr) -> bool:
        """Whether `isinstance` with another class holds where an expression stands."""
        text, node = ast.unparse(receiver), source.parents.get(receiver)
        below: ast.AST = receiver
        while node is not None and not isinstance(node, Function):
            if isinstance(node, ast.If) and below in node.body:
                tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
                either = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or)
                if not either and any(self._asks(source, test, text) for test in tests):
                    return True
            below, node = node, source.parents.get(node)
        return False

    def _asks(self, source: Source, test: ast.expr, text: str) -> bool:
        called = isinstance(test, ast.Call) and len(test.args) == 2 and last_name(test.func) == "isinstance"
        if not called or not isinstance(test, ast.Call) or ast.unparse(test.args[0]) != text:
            return False
        named = test.args[1]
        return all(self.excludes(source, c) for c in (named.elts if isinstance(named, ast.Tuple) else [named]))


class _Writes:
    """The search for a write, over every name that may stand for the tensor; each name is looked at once."""

    def __init__(self, family: _Family, files: tuple[Source, ...], allowed: frozenset[str] = frozenset()) -> None:
        self.family, self.files, self.allowed = family, files, allowed
        self.seen: set[tuple[str, int, str]] = set()

    def into_every_buffer(self) -> bool:
        """Whether a file goes through the buffers of a module and writes into them, but by what is allowed."""
        return any(self._is_written(source, call) for source in self.files for call in _sweeps(source))

    def into_attribute(self, name: str, of_family: bool = False) -> bool:
        """Whether a file writes into an attribute of this name of any object, or of one that may be of the family."""
        if self._again(("", int(of_family), name)):
            return False
        for source in self.files:
            for node, receiver in _references(source, name):
                if of_family and receiver is not None and self.family.has_not(source, receiver):
                    continue
                if self._is_written(source, node):
                    return True
        return False

    def _into_name(self, source: Source, scope: ast.AST, name: str) -> bool:
        if self._again((source.path, id(scope), name)):
            return False
        named = (n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name)
        return any(self._is_written(source, node) for node in named)

    def _in_place(self, name: str) -> bool:
        """Whether a name is that of a function that writes into its tensor: `fill_`."""
        return name.endswith("_") and not name.endswith("__") and name not in self.allowed

    def _again(self, key: tuple[str, int, str]) -> bool:
        known = key in self.seen
        self.seen.add(key)
        return known

    def _is_written(self, source: Source, first: ast.expr) -> bool:
        """Whether what an expression stands for, or a view of it, is written where the expression stands."""
        if _is_stored(first):
            return not _is_fresh(source, first) and not self.allowed
        at: ast.AST = first
        while True:
            parent = source.parents.get(at)
            if isinstance(parent, (ast.Subscript, ast.Attribute)) and parent.value is at:
                if isinstance(parent, ast.Attribute) and parent.attr in OTHER:
                    return False
                if _is_stored(parent) or (isinstance(parent, ast.Attribute) and self._in_place(parent.attr)):
                    return True
            elif isinstance(parent, ast.Call) and parent.func is at:
                pass
            elif isinstance(parent, (ast.Call, ast.keyword)):
                call = source.parents[parent] if isinstance(parent, ast.keyword) else parent
                if not isinstance(call, ast.Call):  # the keyword of a class
                    return True
                if self._is_written_by(source, call, at, parent.arg if isinstance(parent, ast.keyword) else None):
                    return True
                if last_name(call.func) not in HOLDS:
                    return False
                parent = call
            elif isinstance(parent, ast.IfExp) and parent.test is not at:
                pass
            elif not isinstance(parent, WALKS):
                return self._is_bound(source, parent, at)
            if isinstance(parent, ast.comprehension):
                return parent.iter is at and self._into_target(source, parent.target)
            assert parent is not None
            at = parent

    def _is_bound(self, source: Source, parent: ast.AST | None, at: ast.AST) -> bool:
        """Whether what a statement gives to a name is written by that name."""
        if isinstance(parent, ast.Assign):
            return any(self._into_target(source, t) for t in parent.targets)
        if isinstance(parent, ast.AnnAssign):
            return parent.value is at and self._into_target(source, parent.target)
        if isinstance(parent, ast.NamedExpr):
            return self._into_target(source, parent.target) or self._is_written(source, parent)
        if isinstance(parent, (ast.For, ast.AsyncFor)):
            return parent.iter is at and self._into_target(source, parent.target)
        if isinstance(parent, Comprehension):
            return self._is_written(source, parent)
        if isinstance(parent, ast.Lambda):
            return True
        if isinstance(parent, (ast.Return, ast.Yield, ast.YieldFrom)):
            function = source.function_at(parent.lineno)
            return function is not None and (
                self.into_attribute(function.name)
                or any(self._into_name(other, other.tree, function.name) for other in self.files)
            )
        return False

    def _into_target(self, source: Source, target: ast.expr) -> bool:
        if isinstance(target, (ast.Tuple, ast.List)):
            return any(self._into_target(source, element) for element in target.elts)
        if isinstance(target, ast.Starred):
            return self._into_target(source, target.value)
        if isinstance(target, ast.Name):
            return self._into_name(source, source.function_at(target.lineno) or source.tree, target.id)
        if isinstance(target, ast.Attribute):
            return self.into_attribute(target.attr)
        return True  # an element of a container

    def _is_written_by(self, source: Source, call: ast.Call, at: ast.AST, keyword: str | None) -> bool:
        """Whether a call writes into an argument, or gives it to what does."""
        name = last_name(call.func)
        function = isinstance(call.func, ast.Name) or source.qualified(call.func) is not None
        first = keyword in ("input", "tensor") or (bool(call.args) and call.args[0] is at)
        inside = self._in_place(name) or name in NUMPY or any(k.arg == "inplace" for k in call.keywords)
        if keyword == "out" or name in ("map", "partial") or (function and first and inside):
            return True
        if name in ("register_buffer", "setattr", "__setattr__"):
            given = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            return len(given) != 1 or self.into_attribute(given[0])
        if name in KEEPS and isinstance(call.func, ast.Attribute) and not function:
            return self._into_target(source, call.func.value)
        for other, called in self._called(call):
            for parameter in _parameters(other, called, call, at, keyword):
                if self._into_name(other, called, parameter):
                    return True
        return False

    def _called(self, call: ast.Call) -> Iterator[tuple[Source, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """The functions of the files that a call may mean: by its name, the constructor of a class, the forward of a
        module that `self` holds."""
        name = last_name(call.func)
        held = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        held = held and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
        known = any(name in _functions(source) for source in self.files)
        for source in self.files:
            found = _functions(source)
            for function in (*found.get(name, ()), *(found.get("forward", ()) if held and not known else ())):
                yield source, function
            for made in (f for c in CONSTRUCTORS for f in found.get(c, ())):
                owner = source.parents.get(made)
                if isinstance(owner, ast.ClassDef) and owner.name == name:
                    yield source, made


def bases_of(files: Iterable[Source]) -> dict[str, set[str]]:
    """The names of the bases of every class of some files; a name that an import changes is the one it had."""
    found: dict[str, set[str]] = {}
    for source in files:
        renamed = {
            a.asname: a.name.rsplit(".", 1)[-1]
            for n in ast.walk(source.tree)
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
            if a.asname
        }
        for one in source.classes:
            names = {last_name(base) for base in one.bases}
            found.setdefault(one.name, set()).update(renamed.get(name, name) for name in names)
    return found


def derived_from(name: str, bases: dict[str, set[str]]) -> set[str]:
    """A class and those derived from it."""
    derived = {name}
    while True:
        more = {one for one, above in bases.items() if above & derived} - derived
        if not more:
            return derived
        derived |= more


def last_name(node: ast.expr) -> str:
    """`ones_` of `nn.init.ones_`, `Block` of `Block[int]`; empty for what has no name."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def own_name(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> str | None:
    """What a method calls its object, None for any other function."""
    if function is None or not isinstance(source.parents.get(function), ast.ClassDef) or not function.args.args:
        return None
    free = any(last_name(d) in ("staticmethod", "classmethod") for d in function.decorator_list)
    return None if free else function.args.args[0].arg


def _gives(node: ast.Assign, name: str) -> bool:
    return any(isinstance(t, ast.Attribute) and t.attr == name for t in node.targets)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)


def _is_fresh(source: Source, node: ast.expr) -> bool:
    """Whether a name gets another tensor, which writes nothing, or an attribute of `self` its own in a constructor."""
    parent = source.parents.get(node)
    if isinstance(node, ast.Name):
        return not isinstance(parent, ast.AugAssign)
    if isinstance(parent, ast.AnnAssign) and parent.value is None:
        return True
    function = source.function_at(node.lineno)
    plain = isinstance(parent, ast.Assign) and node in parent.targets and isinstance(node, ast.Attribute)
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    own = own and isinstance(node, ast.Attribute) and ast.unparse(node.value) == own_name(source, function)
    return plain and own and function is not None and function.name in CONSTRUCTORS


def _references(source: Source, name: str) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Expressions that mean an attribute of a name, with the object where it is written out."""
    attributes, called = _index(source)
    yield from ((node, node.value) for node in attributes.get(name, ()))
    yield from ((node, receiver) for node, receiver, text in called if _may_name(text, name))


@functools.lru_cache(maxsize=512)
def _index(
    source: Source,
) -> tuple[dict[str, list[ast.Attribute]], list[tuple[ast.expr, ast.expr | None, ast.expr | None]]]:
    """Every attribute by its name, and every expression that reads one by text, with its object and that text."""
    attributes: dict[str, list[ast.Attribute]] = {}
    called: list[tuple[ast.expr, ast.expr | None, ast.expr | None]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            attributes.setdefault(node.attr, []).append(node)
        elif isinstance(node, ast.Subscript):
            table = node.value.func if isinstance(node.value, ast.Call) else node.value
            if any(isinstance(n, (ast.Name, ast.Attribute)) and last_name(n) in TABLES for n in ast.walk(table)):
                called.append((node, None, node.slice))
        elif isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in BY_NAME and isinstance(node.func, ast.Name) and len(node.args) > 1:
                called.append((node, node.args[0], node.args[1]))
            elif name in BY_NAME and isinstance(node.func, ast.Attribute) and node.args:
                called.append((node, None, node.args[-1]))
            elif name == "reduce" and node.args and last_name(node.args[0]) == "getattr":
                called.append((node, None, None))
            elif isinstance(node.func, ast.Call) and last_name(node.func.func) == "attrgetter" and node.func.args:
                called.append((node, None, node.func.args[0] if len(node.func.args) == 1 else None))
    return attributes, called


def _sweeps(source: Source) -> Iterator[ast.Call]:
    """The calls that give every buffer of a module."""
    for name in ("buffers", "named_buffers"):
        parents = (source.parents.get(node) for node in _index(source)[0].get(name, ()))
        yield from (call for call in parents if isinstance(call, ast.Call))


def _may_name(text: ast.expr | None, name: str) -> bool:
    """Whether a text, written out or made on the way, may name an attribute."""
    if isinstance(text, ast.Constant):
        return isinstance(text.value, str) and text.value.rsplit(".", 1)[-1] == name
    if isinstance(text, ast.JoinedStr) and text.values:
        first, last = text.values[0], text.values[-1]
        ends = not isinstance(last, ast.Constant) or name.endswith(str(last.value).rsplit(".", 1)[-1])
        dotted = any("." in str(v.value) for v in text.values if isinstance(v, ast.Constant))
        return ends and (dotted or not isinstance(first, ast.Constant) or name.startswith(str(first.value)))
    return True


@functools.lru_cache(maxsize=512)
def _functions(source: Source) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
    found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            found.setdefault(node.name, []).append(node)
    return found


def _parameters(
    source: Source,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    call: ast.Call,
    at: ast.AST,
    keyword: str | None,
) -> list[str]:
    """The parameters of a function that an argument of a call may become."""
    placed = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    named = [*placed, *(a.arg for a in function.args.kwonlyargs)]
    rest = [a.arg for a in (function.args.vararg, function.args.kwarg) if a is not None]
    if keyword is not None:
        return [keyword] if keyword in named else rest
    before = call.args[: call.args.index(at)] if isinstance(at, ast.expr) and at in call.args else None
    if before is None or isinstance(at, ast.Starred) or any(isinstance(a, ast.Starred) for a in before):
        return [*named, *rest]
    place = len(before) + (own_name(source, function) is not None)
    return [placed[place]] if place < len(placed) else rest
