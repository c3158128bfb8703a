"""The operations that a function's source shows, as a graph: names are followed to the expressions that gave them.

Nothing is run. What the syntax does not tell (other calls, loops, stores into objects) becomes a node of its own that
uses whatever it could see, so that a value with no further users really has none in this function.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from advisor.model import Arg, Graph, Node, Ref, Span, Symbol
from advisor.source import Source
from advisor.usercode.scalars import FLOATS, Scalars, constant_call

ELSEWHERE = "source.elsewhere"  # a use that is not followed: returned, stored, passed on
EITHER = "source.either"  # the value of one of several branches
UNKNOWN = "source.unknown"  # a call or expression without a meaning here
SHAPE_ONLY = frozenset("shape size dim ndim ndimension dtype device numel stride layout is_cuda requires_grad".split())
BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
}
COMPARED: Mapping[type[ast.cmpop], str] = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.Gt: "gt"}
MODULES: Mapping[str, str] = {  # calls of a module held by the object, as the function they compute
    "torch.nn.Softmax": "torch.nn.functional.softmax",
    "torch.nn.Dropout": "torch.nn.functional.dropout",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_graphs(source: Source) -> Iterator[Graph]:
    """The graph of every function of a file, in the order of the file."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, Function)]
    for index, function in enumerate(sorted(functions, key=lambda f: (f.lineno, f.col_offset))):
        yield _Body(source, function, index).graph()


def is_scalar(node: Node) -> bool:
    """Whether a node stands for a number that the source does not tell."""
    return node.facts.get("scalar") == "yes"


@dataclass
class _Draft:
    name: str
    op: str
    target: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    span: Span | None
    scalar: bool = False
    users: list[int] = field(default_factory=list)


class _Body:
    """Walks one function, statement by statement, and collects its nodes."""

    def __init__(self, source: Source, function: Function, index: int) -> None:
        self.source = source
        self.function = function
        self.index = index
        self.scalars = Scalars(source, function)
        self.drafts: list[_Draft] = []
        self.names: dict[str, Arg] = {}
        self.known: dict[str, Ref] = {}  # placeholders by their text
        self.shared: set[str] = set()  # global and nonlocal names

    def graph(self) -> Graph:
        """The nodes of the function."""
        for argument in ast.walk(self.function.args):
            if isinstance(argument, ast.arg):
                scalar = self.scalars.is_number(ast.Name(argument.arg, ast.Load()))
                self.names[argument.arg] = self._placeholder(argument.arg, scalar)
        self._block(self.function.body)
        for index, draft in enumerate(self.drafts):
            for used in dict.fromkeys(_refs((*draft.args, *draft.kwargs.values()))):
                self.drafts[used].users.append(index)
        nodes = tuple(
            Node(
                index=index,
                name=draft.name,
                op=draft.op,
                target=draft.target,
                args=draft.args,
                kwargs=draft.kwargs,
                users=tuple(draft.users),
                span=draft.span,
                facts={"scalar": "yes"} if draft.scalar else {},
            )
            for index, draft in enumerate(self.drafts)
        )
        return Graph(index=self.index, nodes=nodes)

    # ---------------------------------------------------------------------------------------------------------- nodes

    def _add(self, draft: _Draft) -> Ref:
        self.drafts.append(draft)
        return Ref(len(self.drafts) - 1)

    def _placeholder(self, text: str, scalar: bool) -> Ref:
        found = self.known.get(text)
        if found is None:
            found = self.known[text] = self._add(_Draft(text, "placeholder", text, (), {}, None, scalar))
        return found

    def _call(self, target: str, args: Sequence[Arg], node: ast.expr, kwargs: Mapping[str, Arg] | None = None) -> Ref:
        name = target.rsplit(".", 1)[-1]
        return self._add(_Draft(name, "call_function", target, tuple(args), kwargs or {}, self.source.span(node)))

    def _escape(self, *values: Arg) -> None:
        if refs := [Ref(index) for index in _refs(values)]:
            self._add(_Draft("elsewhere", "output", ELSEWHERE, tuple(refs), {}, None))

    def _number(self, value: Arg) -> bool:
        if isinstance(value, Ref):
            return self.drafts[value.index].scalar
        return isinstance(value, int | float) and not isinstance(value, bool)

    # ----------------------------------------------------------------------------------------------------- statements

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self._value(node.value)
            for target in node.targets:
                self._bind(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._bind(node.target, self._value(node.value))
        elif isinstance(node, ast.AugAssign):
            self._augmented(node)
        elif isinstance(node, ast.Expr):
            self._value(node.value)
        elif isinstance(node, ast.Return):
            self._escape(*([] if node.value is None else [self._value(node.value)]))
        elif isinstance(node, ast.If):
            self._if(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._escape(self._value(item.context_expr))
            self._block(node.body)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            self.shared |= set(node.names)
        elif not isinstance(node, ast.Pass | ast.Import | ast.ImportFrom | ast.Break | ast.Continue):
            self._other(node)

    def _augmented(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and type(node.op) in BINARY:
            left, right = self._value(ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)), None
            right = self._value(node.value)
            target = f"operator.{BINARY[type(node.op)]}"
            self._bind(node.target, self._call(target, (left, right), node.target))
        else:
            self._escape(self._value(node.value), *self._reads(node.target))

    def _bind(self, target: ast.expr, value: Arg) -> None:
        if isinstance(target, ast.Name):
            if target.id in self.shared:
                self._escape(value)
            self.names[target.id] = value
            if isinstance(value, Ref) and self.drafts[value.index].op == "call_function":
                self.drafts[value.index].name = target.id
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(e, ast.Starred) for e in target.elts):
            parts = value if isinstance(value, tuple) and len(value) == len(target.elts) else None
            for place, element in enumerate(target.elts):
                self._bind(element, parts[place] if parts is not None else self._item(value, place, target))
        else:  # into an object or a container, or an unpacking that is not followed
            self._escape(value, *self._reads(target))
            for name in _stored([target]):
                self.names[name] = self._call(UNKNOWN, (), target)

    def _item(self, value: Arg, place: int, node: ast.expr) -> Ref:
        if self._number(value):  # a, b = x.shape
            assert isinstance(value, Ref)
            return self._placeholder(f"{self.drafts[value.index].target}[{place}]", True)
        return self._call("operator.getitem", (value, place), node)

    def _if(self, node: ast.If) -> None:
        self._escape(self._value(node.test))
        before = dict(self.names)
        self._block(node.body)
        yes, self.names = self.names, before
        before = dict(before)
        self._block(node.orelse)
        no = self.names
        if _leaves(node.body):
            self.names = no
        elif _leaves(node.orelse):
            self.names = yes
        else:
            names = dict.fromkeys([*yes, *no])
            self.names = {name: self._either(yes.get(name), no.get(name), node) for name in names}

    def _either(self, yes: Arg, no: Arg, node: ast.If) -> Arg:
        """The value of a name after a branch; None for a name that was not bound is a value like any other."""
        return yes if yes == no else self._call(EITHER, (yes, no), node.test)

    def _other(self, node: ast.stmt) -> None:
        """Loops, try, match, nested definitions: bodies of loops are walked, nothing is followed in or out of them."""
        stored = sorted(_stored([node]))
        self._escape(*(self.names[name] for name in stored if name in self.names), *self._reads(node))
        entries: dict[str, Arg] = {name: self._call(UNKNOWN, (), _expression(node)) for name in stored}
        self.names |= entries
        if isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Try):
            handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            self._block([*node.body, *node.orelse, *handlers, *getattr(node, "finalbody", [])])
        outside = {n.id for n in _loads(self.function, but=node)}
        carried = set(_refs([arg for draft in self.drafts for arg in (*draft.args, *draft.kwargs.values())]))
        for name, entry in entries.items():
            value = self.names.get(name)
            assert isinstance(entry, Ref)
            if name in outside | self.shared or entry.index in carried or not isinstance(node, ast.For | ast.While):
                self._escape(value)
            self.names[name] = self._call(UNKNOWN, (), _expression(node))

    # ---------------------------------------------------------------------------------------------------- expressions

    def _reads(self, node: ast.AST) -> list[Arg]:
        return [
            self.names[n.id]
            for n in ast.walk(node)
            if isinstance(n, ast.Name) and n.id in self.names and not self._shape_only(n)
        ]

    def _shape_only(self, name: ast.Name) -> bool:
        parent = self.source.parents.get(name)
        return isinstance(parent, ast.Attribute) and parent.attr in SHAPE_ONLY

    def _value(self, node: ast.expr) -> Arg:
        number = self.scalars.constant(node, {n: v for n, v in self.names.items() if _is_plain(v)})
        if number is not None:
            return number
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, bool | str | None) else Symbol("opaque", repr(node.value))
        if isinstance(node, ast.Name):
            return self.names[node.id] if node.id in self.names else self._free(node)
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._value(element) for element in node.elts)
        if isinstance(node, ast.BinOp):
            pair = (self._value(node.left), self._value(node.right))
            name = BINARY.get(type(node.op))
            return self._operation(UNKNOWN if name is None else f"operator.{name}", pair, node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
            name = "operator.neg" if isinstance(node.op, ast.USub) else "operator.invert"
            return self._operation(name, (self._value(node.operand),), node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
            pair = (self._value(node.left), self._value(node.comparators[0]))
            return self._call(f"operator.{COMPARED[type(node.ops[0])]}", pair, node)
        if isinstance(node, ast.IfExp):
            self._escape(self._value(node.test))
            return self._call(EITHER, (self._value(node.body), self._value(node.orelse)), node)
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value)
            self._bind(node.target, value)
            return value
        return self._reference(node)

    def _reference(self, node: ast.expr) -> Arg:
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            base = self._value(node.value)
            if self._number(base):
                return self._placeholder(ast.unparse(node), True)
            return self._call("operator.getitem", (base, *self._index(node.slice)), node)
        if isinstance(node, ast.Call):
            return self._called(node)
        return self._call(UNKNOWN, self._reads(node), node)

    def _operation(self, target: str, operands: tuple[Arg, ...], node: ast.expr) -> Ref:
        if all(self._number(operand) for operand in operands):
            return self._placeholder(ast.unparse(node), True)
        return self._call(target, operands, node)

    def _index(self, node: ast.expr) -> list[Arg]:
        return [Symbol("opaque", ast.unparse(node)), *self._reads(node)]

    def _free(self, node: ast.Name) -> Ref:
        """A name from outside the function."""
        return self._placeholder(node.id, self.scalars.is_number(node))

    def _attribute(self, node: ast.Attribute) -> Arg:
        qualified = self.source.qualified(node)
        if qualified is not None:
            return FLOATS.get(qualified, Symbol("opaque", qualified))
        if node.attr in SHAPE_ONLY:
            return self._placeholder(ast.unparse(node), True)
        if isinstance(node.value, ast.Name) and node.value.id == self.scalars.this:
            return self._placeholder(ast.unparse(node), self.scalars.is_number(node))
        return self._call(f"method.{node.attr}", (self._value(node.value),), node)

    # ---------------------------------------------------------------------------------------------------------- calls

    def _called(self, node: ast.Call) -> Arg:
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            return self._call(UNKNOWN, self._reads(node), node)
        callee = node.func
        if isinstance(callee, ast.Attribute) and callee.attr in SHAPE_ONLY and self.source.qualified(callee) is None:
            return self._placeholder(ast.unparse(node), True)
        if isinstance(callee, ast.Name) and callee.id in ("len", "int", "float") and callee.id not in self.names:
            return self._placeholder(ast.unparse(node), True)
        args = [self._value(argument) for argument in node.args]
        kwargs = {k.arg: self._value(k.value) for k in node.keywords if k.arg is not None}
        return self._applied(node, args, kwargs)

    def _applied(self, node: ast.Call, args: list[Arg], kwargs: dict[str, Arg]) -> Arg:
        callee = node.func
        qualified = self.source.qualified(callee)
        if qualified == "torch.tensor" and args and not isinstance(args[0], Ref | tuple):
            return args[0]
        if qualified is not None and constant_call(qualified) and all(self._number(a) for a in args):
            return self._placeholder(ast.unparse(node), True)
        if qualified is not None and qualified.startswith("torch."):
            return self._call(qualified, args, node, kwargs)
        held = self.scalars.held(callee)
        if held is not None:
            return self._module(held, node, args, kwargs)
        own = isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name)
        if not isinstance(callee, ast.Attribute) or (own and self._is_this(callee)) or qualified is not None:
            return self._call(UNKNOWN, (*args, *kwargs.values(), *self._reads(callee)), node)
        value = self._call(f"method.{callee.attr}", (self._value(callee.value), *args), node, kwargs)
        if callee.attr.endswith("_") and not callee.attr.endswith("__"):
            self._changed(callee.value, value)
        return value

    def _is_this(self, callee: ast.Attribute) -> bool:
        return isinstance(callee.value, ast.Name) and callee.value.id == self.scalars.this

    def _changed(self, target: ast.expr, value: Ref) -> None:
        """A method wrote its result into its object: every name of that object has the new value."""
        if not isinstance(target, ast.Name):
            self._escape(value)
            return
        old = self.names.get(target.id)
        for name in [n for n, v in self.names.items() if v == old]:
            self.names[name] = value

    def _module(self, held: ast.Call, node: ast.Call, args: list[Arg], kwargs: dict[str, Arg]) -> Arg:
        name = self.source.qualified(held.func) or ""
        if name == "torch.nn.Identity" and len(args) == 1:
            return args[0]
        if name not in MODULES or len(args) != 1 or kwargs:
            return self._call(UNKNOWN, (*args, *kwargs.values()), node)
        options: dict[str, Arg] = {}
        if name == "torch.nn.Softmax":
            given = [k.value for k in held.keywords if k.arg == "dim"] or held.args[:1]
            options = {"dim": self.scalars.constant(given[0], {}) if given else None}
        return self._call(MODULES[name], args, node, options)


def _refs(values: Sequence[Arg]) -> Iterator[int]:
    for value in values:
        if isinstance(value, Ref):
            yield value.index
        elif isinstance(value, tuple):
            yield from _refs(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _stored(nodes: Sequence[ast.AST]) -> set[str]:
    names = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store | ast.Del)}


def _loads(tree: ast.AST, *, but: ast.AST) -> Iterator[ast.Name]:
    """Names that are read in a tree, one part of it left out."""
    for child in ast.iter_child_nodes(tree):
        if child is not but:
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
                yield child
            yield from _loads(child, but=but)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _expression(node: ast.stmt) -> ast.expr:
    """Some expression of a statement, for its place."""
    found = next((n for n in ast.walk(node) if isinstance(n, ast.expr)), None)
    return found if found is not None else ast.copy_location(ast.Constant(None), node)
