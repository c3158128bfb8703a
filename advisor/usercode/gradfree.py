"""Whether what some statements leave behind can carry a gradient: names read later, results, what they store."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from advisor.source import Source
from advisor.usercode.callees import Function, callees

# methods whose result holds no gradient, whatever they are called on
METHODS = frozenset(
    "item tolist detach numpy argmax argmin argsort size dim numel ndimension long int bool eq ne lt gt le ge isnan "
    "isinf isfinite nonzero bincount keys count format".split()
)
FUNCTIONS = frozenset("float int bool str len range repr print isinstance hasattr time".split())
ATTRIBUTES = frozenset("shape data dtype device indices ndim".split())
PASSED_ON = frozenset("sum max min abs round list tuple sorted zip enumerate reversed dict set".split())
STORING = frozenset("append extend insert add appendleft put setdefault".split())
SECOND_IS_INDEX = frozenset("max min topk sort median mode kthvalue".split())
NUMBERS = ("numpy.", "math.", "time.", "random.")
LIBRARY = ("torch.", "numpy.", "math.", "time.")
MODULES = ("torch.nn.", "torch.hub.", "torch.jit.", "torch.load", "torch.compile")  # give what holds parameters
PARAMETERS = frozenset("parameters named_parameters modules named_modules children weight bias".split())
DECLARED = (ast.Global, ast.Nonlocal)
DEPTH = 60  # expressions followed one into the other


@dataclass(frozen=True)
class Block:
    """Neighbouring statements of one block, the user's files whose functions they may call, and how they name the
    module they run."""

    source: Source
    statements: tuple[ast.stmt, ...]
    sources: tuple[Source, ...]
    module: str = ""
    _busy: set[int] = field(default_factory=set, repr=False, compare=False)

    @cached_property
    def functions(self) -> list[tuple[Source, Function]]:
        """The user's functions that the statements may call, `forward` methods apart."""
        return callees(self.sources, self.statements)

    def leaking(self) -> ast.AST | None:
        """The first thing that outlives the statements and may carry a gradient; None where there is none."""
        return next(self._leaks(), None)

    def _leaks(self) -> Iterator[ast.AST]:
        inside = [node for statement in self.statements for node in ast.walk(statement)]
        last = self.statements[-1]
        for node in inside:
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
            if name is not None and not self._stored_free(self.source, node) and live_after(self.source, last, name):
                yield node
            if isinstance(node, ast.Return) and node.value is not None and not self.free(self.source, node.value):
                yield node
        holders: list[tuple[Source, ast.AST]] = [(self.source, statement) for statement in self.statements]
        for source, holder in (*holders, *self.functions):
            yield from self._kept(source, holder)

    def _kept(self, source: Source, holder: ast.AST) -> Iterator[ast.AST]:
        """What is put into containers and attributes."""
        for node in ast.walk(holder):
            if isinstance(node, ast.Call) and _stores_arguments(node):
                if not all(self.free(source, argument) for argument in node.args):
                    yield node
            elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                kept = any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in targets)
                if kept and not self.free(source, node.value):
                    yield node
            elif isinstance(node, DECLARED):
                yield node

    # ----------------------------------------------------------------------------------------------------- expressions

    def free(self, source: Source, node: ast.AST) -> bool:
        """Whether an expression's value holds no gradient."""
        if id(node) in self._busy:
            return True  # of a name that depends on itself, the other parts decide
        if len(self._busy) > DEPTH:
            return False
        self._busy.add(id(node))
        try:
            return self._free(source, node)
        finally:
            self._busy.discard(id(node))

    def _free(self, source: Source, node: ast.AST) -> bool:
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.Compare, ast.operator, ast.unaryop, ast.boolop)):
            return True
        if isinstance(node, ast.Name):
            return self._name_free(source, node)
        if isinstance(node, ast.Attribute):
            return node.attr in ATTRIBUTES or self.free(source, node.value)
        if isinstance(node, ast.Subscript):
            return self._item_free(source, node.value, node.slice)
        if isinstance(node, ast.Call):
            return self._call_free(source, node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self.free(source, node.elt)
        if isinstance(node, ast.Lambda):
            return False
        kept = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred)
        if not isinstance(node, kept):
            return False
        parts = [c for c in ast.iter_child_nodes(node) if not isinstance(c, (ast.expr_context, ast.keyword))]
        return all(self.free(source, part) for part in parts)

    def _item_free(self, source: Source, value: ast.expr, item: ast.expr) -> bool:
        index = item.value if isinstance(item, ast.Constant) else None
        return self.free(source, value) or (index == 1 and _second_is_index(value))

    def _call_free(self, source: Source, call: ast.Call) -> bool:
        arguments = [*call.args, *(k.value for k in call.keywords)]
        qualified = source.qualified(call.func) or ""
        if isinstance(call.func, ast.Attribute) and not qualified:
            if call.func.attr in METHODS:
                return True
            own = [f for f in self.functions if f[1].name == call.func.attr]
            if not own:
                return self.free(source, call.func.value) and all(self.free(source, a) for a in arguments)
            return all(self._returns_free(*each) for each in own)
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in FUNCTIONS or qualified.startswith(NUMBERS) or qualified.rpartition(".")[2] in METHODS:
            return True
        if name in PASSED_ON or (qualified.startswith(LIBRARY) and not _gives_parameters(call, qualified)):
            return all(self.free(source, argument) for argument in arguments)
        own = [f for f in self.functions if f[1].name == name]
        return bool(own) and all(self._returns_free(*each) for each in own)

    def _returns_free(self, source: Source, function: Function) -> bool:
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        yields = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(function))
        return not yields and all(self.free(source, r.value) for r in returns if r.value is not None)

    # ----------------------------------------------------------------------------------------------------------- names

    def _name_free(self, source: Source, name: ast.Name) -> bool:
        function = source.function_at(name.lineno)
        scope: ast.AST = function or source.tree
        if any(_asks_for_gradients(node, name.id) for node in ast.walk(source.tree)):
            return False
        inside = [s for s in self.statements if source is self.source]
        stores = [n for s in inside for n in ast.walk(s) if _stores(n, name.id)]
        if not any(not isinstance(source.parents.get(n), ast.AugAssign) for n in stores):
            stores = [n for n in ast.walk(scope) if _stores(n, name.id)]
            if function is not None and any(
                a.arg == name.id for a in ast.walk(function.args) if isinstance(a, ast.arg)
            ):
                return self._argument_free(function, name.id)
        return bool(stores) and all(self._stored_free(source, store) for store in stores)

    def _stored_free(self, source: Source, store: ast.AST) -> bool:
        """Whether what a name is given here holds no gradient; batches that a loop hands out hold none."""
        target: ast.AST = store
        parent = source.parents.get(target)
        while isinstance(parent, (ast.Tuple, ast.List, ast.Starred)):
            target, parent = parent, source.parents.get(parent)
        if isinstance(parent, (ast.For, ast.comprehension)):
            return self._handed_out_free(source, parent.iter)
        if isinstance(parent, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            return parent.value is None or self.free(source, parent.value)
        if not isinstance(parent, ast.Assign):
            return isinstance(parent, ast.withitem)
        value = parent.value
        if isinstance(target, ast.Tuple) and store in target.elts:
            place = target.elts.index(store)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                return self.free(source, value.elts[place])
            if place == 1 and _second_is_index(value):
                return True
        return self.free(source, value)

    def _handed_out_free(self, source: Source, iterated: ast.expr) -> bool:
        """Whether what a loop hands out holds no gradient: batches hold none, results of the statements may."""
        if id(iterated) in self._busy:
            return True
        self._busy.add(id(iterated))
        try:
            return not any(self._may_carry(source, node) for node in ast.walk(iterated))
        finally:
            self._busy.discard(id(iterated))

    def _may_carry(self, source: Source, node: ast.AST) -> bool:
        """Whether a part of what is iterated over runs the module, or was made by the statements of what it gave."""
        if isinstance(node, ast.Attribute) and node.attr in PARAMETERS:
            return True
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == self.module:
            return True
        if isinstance(node, ast.Call):
            last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            own = [(where, function) for where, function in self.functions if function.name == last]
            return not all(self._handed_out_free(where, value) for where, f in own for value in _given_back(f))
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            return False
        around = source.function_at(node.lineno)
        called = next((f for _, f in self.functions if f is around), None)
        stores = [n for s in ([called] if called else self.statements) for n in ast.walk(s) if _stores(n, node.id)]
        if not stores and called is not None and any(a.arg == node.id for a in called.args.args):
            given = self._given(called, node.id)
            return given is None or not all(self._handed_out_free(*each) for each in given)
        values = [_value_of(source, store) for store in stores]
        return not all(value is not None and self._handed_out_free(source, value) for value in values)

    def _argument_free(self, function: Function, name: str) -> bool:
        """Whether every call of a function hands it something without a gradient."""
        given = self._given(function, name)
        return given is not None and all(self.free(*each) for each in given)

    def _given(self, function: Function, name: str) -> list[tuple[Source, ast.expr]] | None:
        """What the calls of a function hand it for an argument; None where that cannot be told."""
        arguments = [a.arg for a in function.args.args]
        holders: list[tuple[Source, ast.AST]] = [(self.source, statement) for statement in self.statements]
        calls = [(s, n) for s, h in (*holders, *self.functions) for n in ast.walk(h) if _calls(n, function.name)]
        if name not in arguments or not calls:
            return None
        found: list[tuple[Source, ast.expr]] = []
        for source, call in calls:
            assert isinstance(call, ast.Call)
            place = arguments.index(name) - (1 if arguments[0] == "self" else 0)
            if place < 0 or any(isinstance(a, ast.Starred) for a in call.args):
                return None
            found += [(source, k.value) for k in call.keywords if k.arg == name]
            found += [(source, call.args[place])] if place < len(call.args) else []
        return found


def _gives_parameters(call: ast.Call, qualified: str) -> bool:
    """Whether a call of torch's gives a module, or a tensor that a gradient is asked for."""
    module = qualified.startswith(MODULES) and not qualified.startswith(("torch.nn.functional.", "torch.nn.utils."))
    return module or any(k.arg == "requires_grad" for k in call.keywords)


def _asks_for_gradients(node: ast.AST, name: str) -> bool:
    asked = isinstance(node, ast.Attribute) and node.attr in ("requires_grad_", "requires_grad", "retain_grad")
    return asked and _reads(node.value, name)  # type: ignore[attr-defined]


def _given_back(function: Function) -> list[ast.expr]:
    """What a function returns or yields."""
    kinds = (ast.Return, ast.Yield, ast.YieldFrom)
    return [n.value for n in ast.walk(function) if isinstance(n, kinds) and n.value is not None]


def _value_of(source: Source, store: ast.AST) -> ast.expr | None:
    """What a name is given here, or given elements of."""
    node: ast.AST | None = source.parents.get(store)
    while isinstance(node, (ast.Tuple, ast.List, ast.Starred)):
        node = source.parents.get(node)
    if isinstance(node, (ast.For, ast.comprehension)):
        return node.iter
    return node.value if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) else None


def _stores_arguments(call: ast.Call) -> bool:
    """Whether a call keeps what it is given: `losses.append(x)`, `buffer.copy_(x)`."""
    attr = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return attr in STORING or (attr.endswith("_") and not attr.endswith("__"))


def _stores(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _calls(node: ast.AST, name: str) -> bool:
    func = node.func if isinstance(node, ast.Call) else None
    return getattr(func, "id", None) == name or getattr(func, "attr", None) == name


def _second_is_index(value: ast.expr) -> bool:
    func = value.func if isinstance(value, ast.Call) else None
    return getattr(func, "attr", None) in SECOND_IS_INDEX


# ------------------------------------------------------------------------------------------------------------- liveness


def live_after(source: Source, statement: ast.stmt, name: str) -> bool:
    """Whether a name may be read after a statement before it gets another value."""
    while True:
        block = source.block_of(statement)
        first = reads_first(block[block.index(statement) + 1 :], name)
        if first is not None:
            return first
        parent = source.parents.get(statement)
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            declared = any(isinstance(n, DECLARED) and name in n.names for n in ast.walk(parent))
            return declared or _read_by_functions(parent, name)
        if not isinstance(parent, ast.stmt):
            return _read_by_functions(source.tree, name)
        if isinstance(parent, (ast.For, ast.AsyncFor, ast.While)) and statement in parent.body:
            around = None if _bound_by(parent, name) else reads_first(parent.body, name)
            if around:
                return True
        if isinstance(parent, ast.Try) and any(_reads(n, name) for n in ast.walk(parent)):
            return True
        statement = parent


def _bound_by(loop: ast.stmt, name: str) -> bool:
    return isinstance(loop, ast.For) and any(_stores(n, name) for n in ast.walk(loop.target))


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _read_by_functions(scope: ast.AST, name: str) -> bool:
    """Whether a function inside `scope` reads a name of that."""
    functions = [n for n in ast.walk(scope) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    for function in (one for one in functions if one is not scope):
        local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        local |= {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
        if name not in local and any(_reads(n, name) for n in ast.walk(function)):
            return True
    return False


def reads_first(statements: Sequence[ast.stmt], name: str) -> bool | None:
    """Whether statements read a name (True) or give it another value (False) first; None where neither is certain."""
    for statement in statements:
        first = _first(statement, name)
        if first is not None:
            return first
    return None


def _first(statement: ast.stmt, name: str) -> bool | None:
    if isinstance(statement, (ast.If, ast.While)):
        if any(_reads(n, name) for n in ast.walk(statement.test)):
            return True
        return _of_branches(reads_first(statement.body, name), reads_first(statement.orelse, name))
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        if any(_reads(n, name) for n in ast.walk(statement.iter)):
            return True
        body = None if _bound_by(statement, name) else reads_first(statement.body, name)
        return True if body or reads_first(statement.orelse, name) else None
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        if any(_reads(n, name) for item in statement.items for n in ast.walk(item)):
            return True
        return reads_first(statement.body, name)
    if any(_reads(n, name) for n in ast.walk(statement)):
        return True
    if isinstance(statement, ast.AugAssign) and _stores(statement.target, name):
        return True
    simple = isinstance(statement, (ast.Assign, ast.AnnAssign))
    return False if simple and any(_stores(n, name) for n in ast.walk(statement)) else None


def _of_branches(one: bool | None, other: bool | None) -> bool | None:
    if one or other:
        return True
    return False if one is False and other is False else None
