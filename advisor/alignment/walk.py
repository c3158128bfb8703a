"""Walk an expression and a captured graph together, binding what the region reads to expressions of the source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from advisor.alignment.aligned import Bound, Miss
from advisor.model import Arg, Graph, Node, Ref, Symbol
from advisor.semantics import REARRANGES, TRANSPARENT, canonical, operation
from advisor.source import Source
from advisor.usercode.helpers import called_helper
from advisor.usercode.places import (
    Place,
    Scope,
    check_scope,
    computed_at,
    could_hold,
    is_own,
    outermost,
    root_of,
    short,
    spelled,
    starts_here,
)
from advisor.usercode.reaching import Decision, Definition, reaching

Read = Callable[[str], Source]

BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
}
COMPARE: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
COMMUTATIVE = frozenset({"add", "mul"})
FIELDS: Mapping[str, int] = {"values": 0, "indices": 1}  # of what max, min, sort and topk over an axis return
# operations whose arguments other than tensors choose elements or a shape, so that no rewrite needs their text
MOVES = REARRANGES | {"cat", "stack"}


@dataclass
class State:
    """What a walk has found so far."""

    values: dict[int, Bound] = field(default_factory=dict)
    constants: dict[tuple[int, int | str], Bound] = field(default_factory=dict)
    calls: dict[int, ast.expr] = field(default_factory=dict)
    visited: dict[int, Bound] = field(default_factory=dict)  # node -> where the root's function computes it
    consumed: list[ast.stmt] = field(default_factory=list)
    inside: list[ast.stmt] = field(default_factory=list)  # statements of helpers
    pieces: set[tuple[ast.stmt, ast.expr]] = field(default_factory=set)  # followed values
    decisions: dict[ast.If | ast.IfExp, Decision] = field(default_factory=dict)

    def copy(self) -> State:
        """An independent copy."""
        return State(
            dict(self.values), dict(self.constants), dict(self.calls), dict(self.visited), list(self.consumed),
            list(self.inside), set(self.pieces), dict(self.decisions),
        )  # fmt: skip


class Walk:
    """One attempt to align a region with the expression that ends it; `state` is what it found."""

    def __init__(self, graph: Graph, boundary: frozenset[int], read: Read | None) -> None:
        self.graph = graph
        self.boundary = boundary
        self.read = read
        self.state = State()

    def visit(self, at: Place, index: int) -> None:
        """The expression must compute node `index`; raises `Miss`."""
        if index in self.boundary:
            self._bind(at, index)
            return
        node = self.graph.nodes[index]
        expression = at.expression
        if isinstance(expression, ast.Name):
            self._name(at, expression, index)
        elif isinstance(expression, ast.IfExp):
            self._choice(at, expression, index)
        elif isinstance(expression, ast.NamedExpr):
            raise Miss("an assignment inside the expression is not handled", expression.lineno)
        elif self._item(at, node):
            return
        elif not computed_at(node, at):
            self._elsewhere(at, node)
        else:
            self.state.visited[index] = Bound(*outermost(at))
            self._operation(at, node)

    # ---------------------------------------------------------------------------------------------------- expressions

    def _operation(self, at: Place, node: Node) -> None:
        """An expression that stands where the node was computed."""
        expression = at.expression
        if isinstance(expression, ast.Call):
            self._call(at, expression, node)
            return
        operands: tuple[ast.expr, ...]
        if isinstance(expression, ast.BinOp):
            name, operands = BINARY.get(type(expression.op)), (expression.left, expression.right)
        elif isinstance(expression, ast.UnaryOp):
            name = {ast.USub: "neg", ast.Invert: "logical_not"}.get(type(expression.op))
            operands = (expression.operand,)
        elif isinstance(expression, ast.Compare) and len(expression.ops) == 1:
            name, operands = COMPARE.get(type(expression.ops[0])), (expression.left, expression.comparators[0])
        elif isinstance(expression, ast.Subscript):
            name, operands = "getitem", (expression.value, expression.slice)
        elif isinstance(expression, ast.Attribute) and len(node.args) == 2 and node.args[1] == expression.attr:
            name, operands = "getattr", (expression.value,)
        else:
            raise Miss(f"`{short(at)}` does not show how the value is computed", expression.lineno)
        if operation(node) != name or len(node.args) < len(operands):
            raise Miss(f"`{short(at)}` is not the captured {operation(node)}", expression.lineno)
        self._operands(at, operands, node)

    def _operands(self, at: Place, operands: tuple[ast.expr, ...], node: Node) -> None:
        """Operands in the order of the source; the eager recorder has `1 + x` as x + 1.

        Where both orders suit, which operand is the number cannot be told, so that neither is taken.
        """

        def take(order: tuple[ast.expr, ...]) -> None:
            for position, operand in enumerate(order):
                self._operand(at.of(operand), node, position)

        number = len(node.args) == 2 and isinstance(node.args[0], Ref) and isinstance(node.args[1], (int, float))
        if self.graph.kind != "eager" or len(operands) != 2 or operation(node) not in COMMUTATIVE or not number:
            take(operands)
            return
        several = Miss(f"which operand of `{short(at)}` is the number cannot be told", at.expression.lineno)
        self._only_one([lambda: take(operands), lambda: take(operands[::-1])], several)

    def _item(self, at: Place, node: Node) -> bool:
        """Whether it selects a result of an operation with several, recorded where that operation is called."""
        expression = at.expression
        if operation(node) != "getitem" or not isinstance(node.args[0], Ref) or not isinstance(node.args[1], int):
            return False
        if self.graph.nodes[node.args[0].index].shape is not None:  # an element of one tensor is an operation
            return False
        if isinstance(expression, ast.Attribute):
            item = FIELDS.get(expression.attr)
        elif isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            item = expression.slice.value if isinstance(expression.slice.value, int) else None
        else:
            return False
        if item != node.args[1]:
            raise Miss(f"`{short(at)}` is not the captured result number {node.args[1]}", expression.lineno)
        assert isinstance(expression, (ast.Attribute, ast.Subscript))
        self.state.visited[node.index] = Bound(*outermost(at))
        self.visit(at.of(expression.value), node.args[0].index)
        return True

    def _elsewhere(self, at: Place, node: Node) -> None:
        """An expression that did not compute the node itself: a call into a helper, or a cast that changed nothing."""
        expression = at.expression
        if isinstance(expression, ast.Call):
            if self._called_from(node, at):
                self._helper(at, expression, node)
                return
            func = expression.func
            if isinstance(func, ast.Attribute) and canonical(f"method.{func.attr}") in TRANSPARENT:
                self.visit(at.of(func.value), node.index)
                return
        what = f"`{short(at)}` is not where the captured {operation(node)} was computed"
        raise Miss(what, expression.lineno)

    def _operand(self, at: Place, node: Node, position: int | str) -> None:
        arg: Arg = node.args[position] if isinstance(position, int) else node.kwargs[position]
        if operation(node) == "to" and position != 0:  # `x.type_as(y)` reads no value of y
            return
        if isinstance(arg, Ref):
            self.visit(at, arg.index)
            return
        expression = at.expression
        if isinstance(arg, tuple) and _holds_tensor(arg):
            if not isinstance(expression, (ast.Tuple, ast.List)) or len(expression.elts) != len(arg):
                raise Miss(f"`{short(at)}` does not show the tensors one by one", expression.lineno)
            for element, part in zip(expression.elts, arg, strict=True):
                if isinstance(part, Ref):
                    self.visit(at.of(element), part.index)
            return
        if _holds_tensor(arg):
            raise Miss(f"`{short(at)}` holds a tensor in a way that is not followed", expression.lineno)
        if _literal_differs(expression, arg):
            raise Miss(f"the constant {ast.unparse(expression)} is not the captured {arg!r}", expression.lineno)
        self._constant(at, node, position)

    def _constant(self, at: Place, node: Node, position: int | str) -> None:
        try:
            self.state.constants[(node.index, position)] = spelled(at)
        except Miss:
            if operation(node) not in MOVES:
                raise

    # ---------------------------------------------------------------------------------------------------------- calls

    def _call(self, at: Place, expression: ast.Call, node: Node) -> None:
        if at.scope.helper is None or at.scope.source is root_of(at.scope).source:
            self.state.calls[node.index] = expression.func
        elif operation(node) == "dropout":
            raise Miss("the helper that drops elements is in another file", expression.lineno)
        if node.op == "call_method":
            if not isinstance(expression.func, ast.Attribute) or canonical(f"method.{expression.func.attr}") != (
                operation(node)
            ):
                raise self._not_shown(at)
            self._arguments(at, [expression.func.value, *expression.args], expression.keywords, node)
        elif is_module_call(at, expression, node):
            self._module_call(at, expression, node)
        elif node.module is None or not (node.module_class or "").startswith("torch.nn.modules."):
            func = expression.func
            name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else None
            qualified = at.scope.source.qualified(func)
            if qualified is not None:
                name = qualified.rsplit(".", 1)[-1]
            own = qualified is None and isinstance(func, ast.Attribute)
            known = canonical(f"method.{name}") == operation(node)
            if name is None or own or not known:
                raise self._not_shown(at)  # `own` is what an object holds: a module, or a function given to it
            self._arguments(at, list(expression.args), expression.keywords, node)
        else:
            raise self._not_shown(at)

    def _not_shown(self, at: Place) -> Miss:
        return Miss(f"`{short(at)}` is a call whose body is elsewhere", at.expression.lineno)

    def _module_call(self, at: Place, expression: ast.Call, node: Node) -> None:
        """A module of torch that computes one operation of its only argument."""
        others = [a for a in (*node.args[1:], *node.kwargs.values()) if _holds_tensor(a)]
        if others or not node.args or not isinstance(node.args[0], Ref):
            raise Miss(f"`{short(at)}` computes with parameters of its own", expression.lineno)
        self._operand(at.of(expression.args[0]), node, 0)

    def _arguments(self, at: Place, given: list[ast.expr], keywords: list[ast.keyword], node: Node) -> None:
        rest: tuple[Arg, ...] = node.args
        for position, argument in enumerate(given):
            if isinstance(argument, ast.Starred):
                if any(_holds_tensor(a) for a in rest):
                    raise Miss("arguments passed with * or ** cannot be read off", argument.lineno)
                break
            if position < len(node.args):
                self._operand(at.of(argument), node, position)
            elif any(_holds_tensor(a) for a in node.kwargs.values()):
                raise Miss(f"`{short(at)}` passes more than was captured", argument.lineno)
            else:  # the eager recorder has what a function of torch.nn.functional is given by its name
                self._constant(at.of(argument), node, position)
            rest = node.args[position + 1 :]
        for keyword in keywords:
            if keyword.arg is None:
                raise Miss("arguments passed with * or ** cannot be read off", keyword.value.lineno)
            if keyword.arg in node.kwargs:
                self._operand(at.of(keyword.value), node, keyword.arg)
            else:
                self._constant(at.of(keyword.value), node, keyword.arg)
        named = {keyword.arg for keyword in keywords}
        hidden = [*rest, *(arg for name, arg in node.kwargs.items() if name not in named)]
        if any(_holds_tensor(arg) for arg in hidden):
            raise Miss(f"`{short(at)}` shows only some of its tensors", at.expression.lineno)

    # -------------------------------------------------------------------------------------------------------- helpers

    def _called_from(self, node: Node, at: Place) -> bool:
        depth = len(at.scope.frames)
        same = node.frames[:depth] == at.scope.frames
        return same and len(node.frames) > depth + 1 and starts_here(node.frames[depth], at)

    def _helper(self, at: Place, expression: ast.Call, node: Node) -> None:
        """Follow a call of a function of the user's own whose body only computes."""
        depth = len(at.scope.frames)
        frame = node.frames[depth + 1]
        if not is_own(frame):
            raise Miss(f"`{short(at)}` is a call whose body is in a library", expression.lineno)
        if frame.path == at.scope.source.path:
            source = at.scope.source
        elif self.read is not None:
            source = self.read(frame.path)
        else:
            raise self._not_shown(at)
        helper = called_helper(source, frame.line, expression)
        if helper is None:
            raise self._not_shown(at)
        scope = Scope(source, node.frames[: depth + 1], helper, at)
        self.visit(Place(helper.value, helper.result, scope), node.index)
        for statement in helper.body:
            if statement not in self.state.inside:
                raise Miss(f"`{short(at)}` computes more than is replaced", statement.lineno)

    # ---------------------------------------------------------------------------------------------------------- names

    def _name(self, at: Place, name: ast.Name, index: int) -> None:
        check_scope(at.scope.source, name)
        candidates = reaching(at.scope.source, name.id, at.statement)
        self._only_one(
            [(lambda d=d: self._definition(at, name, d, index)) for d in candidates],  # type: ignore[misc]
            Miss(f"which branch gave `{name.id}` its value cannot be told", name.lineno),
        )

    def _choice(self, at: Place, expression: ast.IfExp, index: int) -> None:
        def take(value: ast.expr, taken: bool) -> None:
            self._decide(at, Decision(expression, at.statement, taken))
            self.visit(at.of(value), index)

        self._only_one(
            [lambda: take(expression.body, True), lambda: take(expression.orelse, False)],
            Miss(f"which side of `{short(at)}` ran cannot be told", expression.lineno),
        )

    def _only_one(self, attempts: list[Callable[[], None]], several: Miss) -> None:
        """Take the only attempt that succeeds; raises the reason of the one that came furthest, or `several`."""
        start = self.state
        found: list[State] = []
        misses: list[tuple[int, Miss]] = []
        for attempt in attempts:
            self.state = start.copy()
            try:
                attempt()
                found.append(self.state)
            except Miss as miss:
                misses.append((len(self.state.visited), miss))
        if len(found) > 1:
            raise several
        if not misses and not found:
            raise several
        if not found:
            raise max(misses, key=lambda item: item[0])[1]
        self.state = found[0]

    def _decide(self, at: Place, decision: Decision) -> None:
        if at.scope.helper is not None:
            raise Miss("a helper that branches is not followed", decision.statement.lineno)
        known = self.state.decisions.setdefault(decision.at, decision)
        if known.taken != decision.taken:
            raise Miss("one condition would have to hold and not to hold", decision.statement.lineno)

    def _definition(self, at: Place, name: ast.Name, found: Definition, index: int) -> None:
        if found.parameter and at.scope.helper is not None and at.scope.caller is not None:
            argument = at.scope.helper.arguments.get(name.id)
            if argument is None:
                raise Miss(f"`{name.id}` is not passed to the helper", name.lineno)
            self.visit(at.scope.caller.of(argument), index)
            return
        if found.statement is None or found.value is None:
            reason = found.reason or f"`{name.id}` is not computed in this function but passed to it"
            raise Miss(reason, found.statement.lineno if found.statement is not None else name.lineno)
        for decision in found.decisions:
            self._decide(at, decision)
        consumed = self.state.consumed if at.scope.helper is None else self.state.inside
        if found.statement not in consumed:
            consumed.append(found.statement)
        self.state.pieces.add((found.statement, found.value))
        place = Place(found.value, found.statement, at.scope)
        if found.item is None:
            self.visit(place, index)
            return
        node = self.graph.nodes[index]
        if operation(node) != "getitem" or node.args[1] != found.item or not isinstance(node.args[0], Ref):
            raise Miss(f"`{name.id}` is unpacked from something else", found.statement.lineno)
        self.state.visited[index] = Bound(*outermost(place))
        self.visit(place, node.args[0].index)

    def _bind(self, at: Place, index: int) -> None:
        node = self.graph.nodes[index]
        if node.shape is not None and isinstance(at.expression, ast.Constant):
            raise Miss(f"the number {short(at)} is not the captured tensor", at.expression.lineno)
        if not could_hold(node, at, self.graph):
            raise Miss(f"`{short(at)}` is not where the captured {operation(node)} was computed", at.expression.lineno)
        bound = spelled(at)
        known = self.state.values.get(index)
        if known is not None and _another_name(known.expression, bound.expression):
            raise Miss(f"`{short(at)}` and another name hold one value in this run", at.expression.lineno)
        if known is None or (not isinstance(known.expression, ast.Name) and isinstance(bound.expression, ast.Name)):
            self.state.values[index] = bound


def is_module_call(at: Place, expression: ast.Call, node: Node) -> bool:
    """`self.attn_dropout(x)`, `self.layers[0](x)` or `nn.Softmax(-1)(x)` computed a node of a module of torch."""
    func = expression.func
    if len(expression.args) != 1 or expression.keywords or isinstance(expression.args[0], ast.Starred):
        return False
    if isinstance(func, ast.Call):
        name = at.scope.source.qualified(func.func) or ""
        return node.module is None and name.startswith("torch.nn.") and _names(name.rsplit(".", 1)[-1], node)
    path = (node.module or "").split(".")
    if not node.module or not (node.module_class or "").startswith("torch.nn.modules."):  # a subclass may do anything
        return False
    if isinstance(func, ast.Attribute):
        return path[-1] == func.attr
    if not isinstance(func, ast.Subscript) or not isinstance(func.value, ast.Attribute) or len(path) < 2:
        return False
    known = not isinstance(func.slice, ast.Constant) or str(func.slice.value) == path[-1]
    return known and path[-2] == func.value.attr


def _another_name(first: ast.expr, second: ast.expr) -> bool:
    """Whether two expressions are read, which another call may give different values: `x` and `self.skip(x)`."""
    return ast.unparse(first) != ast.unparse(second)


def _names(module: str, node: Node) -> bool:
    """Whether a class of torch.nn is named after the operation: LogSoftmax computes log_softmax."""
    return module.lower() == operation(node).replace("_", "")


def _holds_tensor(arg: Arg) -> bool:
    if isinstance(arg, tuple):
        return any(_holds_tensor(part) for part in arg)
    if isinstance(arg, Symbol):
        return any(_holds_tensor(part) for part in arg.parts)
    return isinstance(arg, Ref)


def _literal_differs(expression: ast.expr, arg: Arg) -> bool:
    try:
        value = ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError):
        return False
    return not isinstance(value, (list, tuple, dict, set)) and bool(value != arg)
