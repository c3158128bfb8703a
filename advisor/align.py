"""Align a region of a captured graph with the expressions of the user's source that computed it.

The walk goes down the syntax tree and up the graph together: an expression computes a node when its operation is the
node's operation and its operands compute the node's inputs; a local name is followed to the assignment that gave it its
value. What cannot be aligned exactly is a `Miss` with the reason, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.model import Arg, Graph, Node, Ref
from advisor.semantics import TRANSPARENT, canonical, operation
from advisor.source import Source

BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
}
COMMUTATIVE = frozenset({"add", "mul"})


@dataclass(frozen=True)
class Miss(Exception):
    """Why a region could not be aligned or rewritten."""

    reason: str
    line: int | None = None

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Bound:
    """A source expression and the statement it is evaluated in."""

    expression: ast.expr
    statement: ast.stmt


@dataclass
class Alignment:
    """The source of one region: `root` computes its result, `consumed` are assignments only the region needs.

    `values` binds boundary nodes, `constants` non-tensor arguments by (node, argument position or name), `calls` the
    callee expression of every call walked through.
    """

    source: Source
    root: Bound
    values: dict[int, Bound] = field(default_factory=dict)
    constants: dict[tuple[int, int | str], Bound] = field(default_factory=dict)
    calls: dict[int, ast.expr] = field(default_factory=dict)
    consumed: list[ast.stmt] = field(default_factory=list)


def align(source: Source, graph: Graph, root: int, boundary: frozenset[int]) -> Alignment:
    """Align the region that ends in node `root` and begins at `boundary`; raises `Miss`."""
    node = graph.nodes[root]
    if node.span is None:
        raise Miss("the operation has no position in the user's source")
    column = node.span.column if node.span.end_column is not None else None
    found: list[Alignment] = []
    misses: list[tuple[bool, Miss]] = []
    for expression in source.expressions_at(node.span.line, column):
        attempt = Alignment(source, Bound(expression, source.statement_of(expression)))
        aligned = False
        try:
            _Walk(attempt, graph, boundary).visit(attempt.root, root)
            aligned = True
            check_movable(attempt)
        except Miss as miss:
            misses.append((aligned, miss))
            continue
        found.append(attempt)
    if len(found) == 1:
        return found[0]
    if found:
        raise Miss("several expressions on this line could be the operation", node.span.line)
    # the most telling reason: of an expression that did align, else of the widest one
    raise next((miss for aligned, miss in misses if aligned), None) or (
        misses[0][1] if misses else Miss("no expression at this place matches the captured operations", node.span.line)
    )


class _Walk:
    """One attempt to align; fills the alignment it is given."""

    def __init__(self, alignment: Alignment, graph: Graph, boundary: frozenset[int]) -> None:
        self.out = alignment
        self.source = alignment.source
        self.graph = graph
        self.boundary = boundary

    def visit(self, bound: Bound, index: int) -> None:
        """`bound` must compute node `index`."""
        if index in self.boundary:
            self._bind(bound, index)
            return
        node = self.graph.nodes[index]
        expression = bound.expression
        if isinstance(expression, ast.Name):
            self._check_scope(expression)
            self.visit(self._definition(expression, bound.statement), index)
        elif isinstance(expression, ast.NamedExpr):
            raise Miss("an assignment inside the expression is not handled", expression.lineno)
        elif isinstance(expression, ast.BinOp):
            self._binary(expression, bound.statement, node)
        elif isinstance(expression, ast.UnaryOp) and isinstance(expression.op, (ast.USub, ast.Invert)):
            self._expect(node, "neg" if isinstance(expression.op, ast.USub) else "logical_not", expression)
            self._operand(expression.operand, bound.statement, node, 0)
        elif isinstance(expression, ast.Call):
            self._call(expression, bound.statement, node)
        else:
            raise Miss(f"`{self._short(expression)}` does not show how the value is computed", expression.lineno)

    def _check_scope(self, name: ast.Name) -> None:
        """A lambda or comprehension around a name may bind it to something else."""
        node: ast.AST | None = self.source.parents.get(name)
        while node is not None and not isinstance(node, ast.stmt):
            if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                raise Miss(f"`{name.id}` stands inside a lambda or comprehension", name.lineno)
            node = self.source.parents.get(node)

    def _bind(self, bound: Bound, index: int) -> None:
        known = self.out.values.get(index)
        if known is None or (not isinstance(known.expression, ast.Name) and isinstance(bound.expression, ast.Name)):
            self.out.values[index] = bound

    def _short(self, expression: ast.expr) -> str:
        text = " ".join(self.source.segment(expression).split())
        return text if len(text) <= 40 else text[:37] + "..."

    def _expect(self, node: Node, name: str, expression: ast.expr) -> None:
        if operation(node) != name:
            raise Miss(f"`{self._short(expression)}` is not the captured {operation(node)}", expression.lineno)

    def _binary(self, expression: ast.BinOp, statement: ast.stmt, node: Node) -> None:
        name = BINARY.get(type(expression.op))
        if name is None:
            raise Miss(f"`{self._short(expression)}` uses an operator without a tensor meaning here", expression.lineno)
        self._expect(node, name, expression)
        if len(node.args) != 2:
            raise Miss("the captured operation has unexpected arguments", expression.lineno)
        self._pair((expression.left, expression.right), statement, node)

    def _pair(self, operands: tuple[ast.expr, ast.expr], statement: ast.stmt, node: Node) -> None:
        """Both operands of a binary operation, in either order where it is commutative."""
        saved = (dict(self.out.values), dict(self.out.constants), dict(self.out.calls), list(self.out.consumed))
        try:
            self._operand(operands[0], statement, node, 0)
            self._operand(operands[1], statement, node, 1)
        except Miss:
            if operation(node) not in COMMUTATIVE:
                raise
            self.out.values, self.out.constants, self.out.calls, self.out.consumed = saved
            self._operand(operands[1], statement, node, 0)
            self._operand(operands[0], statement, node, 1)

    def _operand(self, expression: ast.expr, statement: ast.stmt, node: Node, position: int | str) -> None:
        arg: Arg = node.args[position] if isinstance(position, int) else node.kwargs[position]
        if isinstance(arg, Ref):
            self.visit(Bound(expression, statement), arg.index)
            return
        if isinstance(expression, ast.Constant) and expression.value != arg:
            raise Miss(f"the constant {expression.value!r} is not the captured {arg!r}", expression.lineno)
        self.out.constants[(node.index, position)] = Bound(expression, statement)

    def _call(self, expression: ast.Call, statement: ast.stmt, node: Node) -> None:
        name = expression.func.attr if isinstance(expression.func, ast.Attribute) else None
        qualified = self.source.qualified(expression.func)
        is_function = qualified is not None and qualified.startswith("torch.")
        if any(isinstance(a, ast.Starred) for a in expression.args) or any(k.arg is None for k in expression.keywords):
            raise Miss("arguments passed with * or ** cannot be read off", expression.lineno)
        arguments = list(expression.args)
        self.out.calls[node.index] = expression.func
        if self._is_module_call(expression, node):
            self._operand(arguments[0], statement, node, 0)
            return
        spelled = qualified.rsplit(".", 1)[-1] if is_function and qualified is not None else name
        if spelled is not None and canonical(f"method.{spelled}") == operation(node):
            if not is_function and isinstance(expression.func, ast.Attribute):
                arguments.insert(0, expression.func.value)
            self._arguments(expression, arguments, statement, node)
        elif spelled in TRANSPARENT and not is_function and isinstance(expression.func, ast.Attribute):
            self.visit(Bound(expression.func.value, statement), node.index)
        else:
            raise Miss(f"`{self._short(expression)}` is a call whose body is elsewhere", expression.lineno)

    def _arguments(self, expression: ast.Call, arguments: list[ast.expr], statement: ast.stmt, node: Node) -> None:
        for position, argument in enumerate(arguments):
            if position >= len(node.args):
                break
            self._operand(argument, statement, node, position)
        for keyword in expression.keywords:
            assert keyword.arg is not None
            if keyword.arg in node.kwargs:
                self._operand(keyword.value, statement, node, keyword.arg)
            else:
                self.out.constants[(node.index, keyword.arg)] = Bound(keyword.value, statement)

    def _is_module_call(self, expression: ast.Call, node: Node) -> bool:
        """`self.attn_dropout(x)` computed a node whose module path ends in attn_dropout."""
        if not isinstance(expression.func, ast.Attribute) or not node.module or len(expression.args) != 1:
            return False
        known = (node.module_class or "").startswith("torch.nn.modules.")  # a subclass may do anything
        return known and node.module.rsplit(".", 1)[-1] == expression.func.attr

    def _definition(self, name: ast.Name, before: ast.stmt) -> Bound:
        """The assignment that gave a local name its value before a statement, in straight-line code."""
        block = self.source.block_of(before)
        for statement in reversed(block[: block.index(before)]):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                if isinstance(target, ast.Name) and target.id == name.id:
                    self._consume(statement)
                    return Bound(statement.value, statement)
            if isinstance(statement, ast.AnnAssign) and statement.value is not None and _binds(statement, name.id):
                self._consume(statement)
                return Bound(statement.value, statement)
            if isinstance(statement, ast.AugAssign) and _binds(statement, name.id):
                self._consume(statement)
                left = ast.copy_location(ast.Name(id=name.id, ctx=ast.Load()), statement.target)
                value = ast.copy_location(ast.BinOp(left=left, op=statement.op, right=statement.value), statement)
                return Bound(value, statement)
            if _binds(statement, name.id):
                raise Miss(f"`{name.id}` gets its value in a way that is not followed", statement.lineno)
        raise Miss(f"`{name.id}` is not computed in this block", name.lineno)

    def _consume(self, statement: ast.stmt) -> None:
        if statement not in self.out.consumed:
            self.out.consumed.append(statement)


def _binds(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, (ast.Store, ast.Del))
        for n in ast.walk(statement)
    )


# --------------------------------------------------------------------------------------------------- may it be moved?


def check_movable(alignment: Alignment) -> None:
    """Raise `Miss` unless the bound expressions may be evaluated at the root and the consumed statements may go."""
    root = alignment.root.statement
    block = alignment.source.block_of(root)
    for bound in alignment.values.values():
        _check_bound(alignment, bound, root, block)
    for bound in alignment.constants.values():
        _check_bound(alignment, bound, root, block)
    for statement in (root, *alignment.consumed):
        for node in ast.walk(statement if statement is not root else alignment.root.expression):
            if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                raise Miss("the expression assigns or waits while it is evaluated", statement.lineno)
    _check_unread(alignment)


def _check_bound(alignment: Alignment, bound: Bound, root: ast.stmt, block: list[ast.stmt]) -> None:
    """Nothing the expression reads may change between its statement and the root, and it must be pure if it moves."""
    if bound.statement is root or bound.statement not in block:
        return
    names = {n.id for n in ast.walk(bound.expression) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(bound.expression) if isinstance(n, ast.Attribute)}
    for statement in block[block.index(bound.statement) : block.index(root)]:
        if statement in alignment.consumed:
            continue
        changed = next((name for name in sorted(names) if _binds(statement, name)), None)
        changed = changed or next((a for a in sorted(attributes) if _sets_attribute(statement, a)), None)
        if changed is not None:
            raise Miss(f"`{changed}` changes before the result is computed", statement.lineno)


def _sets_attribute(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == name and isinstance(n.ctx, (ast.Store, ast.Del))
        for n in ast.walk(statement)
    )


def _check_unread(alignment: Alignment) -> None:
    """No name of a consumed assignment may be read outside the region before it gets a new value."""
    source = alignment.source
    root = alignment.root
    function = source.function_at(root.statement.lineno)
    body: ast.AST = function if function is not None else source.tree
    targets = {name: s for s in alignment.consumed for name in _targets(s)}
    inside = {id(n) for s in alignment.consumed for n in ast.walk(s)} | {id(n) for n in ast.walk(root.expression)}
    repeated = _in_loop(source, root.statement)
    for node in ast.walk(body):
        reads = isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Load, ast.Del)) and node.id in targets
        if not reads or id(node) in inside:
            continue
        assert isinstance(node, ast.Name)
        first = min(s.lineno for s in alignment.consumed if node.id in _targets(s))
        later = repeated or node.lineno >= first or source.function_at(node.lineno) is not function
        if later and not _rebound_before(alignment, node):
            raise Miss(f"the intermediate `{node.id}` is read again", node.lineno)
    block = source.block_of(root.statement)
    if any(s not in block for s in alignment.consumed):
        raise Miss("the operations are spread over several blocks", root.statement.lineno)


def _in_loop(source: Source, statement: ast.stmt) -> bool:
    """Whether a statement is repeated inside its function, so that reads above it come after it too."""
    node: ast.AST | None = source.parents.get(statement)
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return True
        node = source.parents.get(node)
    return False


def _targets(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _rebound_before(alignment: Alignment, name: ast.Name) -> bool:
    """Whether straight-line code gives the name a new value after the region and before this read."""
    source = alignment.source
    block = source.block_of(alignment.root.statement)
    reader: ast.AST = name
    while reader not in block:
        parent = source.parents.get(reader)
        if parent is None:
            return False
        reader = parent
    assert isinstance(reader, ast.stmt)
    between = block[block.index(alignment.root.statement) : block.index(reader)]
    return any(isinstance(s, ast.Assign) and name.id in _targets(s) and s not in alignment.consumed for s in between)
