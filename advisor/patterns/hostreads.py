"""Where the host reads the device in every step of the user's loop, and what the value that it reads is for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.model import Graph, Node, Ref, Span
from advisor.source import Source
from advisor.usercode.places import is_own
from advisor.usercode.trainingloop import Loop, TrainingLoop, enclosing_loop

ITEM = frozenset({"method.item", "method.__float__", "method.__int__"})  # one number for Python
READS = ITEM | {
    "method.tolist", "method.numpy", "method.cpu", "method.__bool__", "method.__index__", "method.__format__",
    "method.__repr__", "method.equal", "method.allclose", "torch.equal", "torch.allclose",
}  # fmt: skip
# the host has to know how much came out
SIZES = frozenset({"method.nonzero", "torch.nonzero", "torch.masked_select", "method.masked_select", "torch.argwhere"})
# what shows a number, and can do so less often
LOGS = frozenset(
    "print set_postfix set_postfix_str set_description log log_dict log_metric log_metrics add_scalar add_scalars info "
    "debug warning write".split()
)
LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)


@dataclass(frozen=True)
class Read:
    """A statement in which the host reads the device in every step.

    `at` is the statement in the loop's own body through which it is reached, the same unless it stands in a function.
    `dtypes` are those of the tensors, by the expression that reads one where that can be told; `nodes` are (graph,
    node); `forward` says that a module's forward reads; `other` that the statement computes more tensors; `shaped` that
    a tensor of one number has dimensions.
    """

    source: Source
    statement: ast.stmt
    at: ast.stmt
    loop: TrainingLoop | None
    nodes: tuple[tuple[int, int], ...]
    dtypes: Mapping[ast.expr, str]
    forward: bool = False
    other: bool = False
    shaped: bool = False

    @property
    def span(self) -> Span:
        """The part of the source that reads: the statement, or the first line of one that holds others."""
        span = self.source.span(self.statement)
        if hasattr(self.statement, "body"):
            return Span(path=span.path, line=span.line, column=span.column, function=span.function)
        return span


def reads(
    graphs: Sequence[Graph], loops: Sequence[TrainingLoop], read: Callable[[str], Source], gpu: bool
) -> list[Read]:
    """The statements of the user's that read the device in every training step, in the order of their places."""
    found: dict[tuple[str, int, int, int], tuple[Source, ast.stmt, list[tuple[Graph, Node]]]] = {}
    known: dict[Span, ast.stmt | None] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.span is None or not node.frames or not is_own(node.frames[-1]) or not _reads(graph, node, gpu):
                continue
            source = read(node.span.path)
            if node.span not in known:
                known[node.span] = _statement(source, node.span)
            statement = known[node.span]
            if statement is not None:
                key = (source.path, statement.lineno, statement.col_offset, graph.index)
                found.setdefault(key, (source, statement, []))[2].append((graph, node))
    results = {key[:3]: _read(loops, *found[key]) for key in sorted(found, reverse=True)}
    return [item for _, item in sorted(results.items(), key=lambda pair: pair[0]) if item is not None]


def _reads(graph: Graph, node: Node, gpu: bool) -> bool:
    """Whether a call makes the host wait for a tensor that lives on the device."""
    inputs = node.inputs()
    if not inputs or not node.op.startswith("call_"):
        return False
    device = graph.nodes[inputs[0]].device or ""
    if not device.startswith("cuda" if gpu else "cpu"):
        return False
    if node.target in READS or node.target in SIZES:
        return True
    if node.target == "method.to":
        return gpu and node.device == "cpu"
    return node.target == "operator.getitem" and _masks(graph, node)


def _masks(graph: Graph, node: Node) -> bool:
    """Whether a subscript selects by a boolean tensor."""
    index = node.args[1] if len(node.args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Ref) and graph.nodes[part.index].dtype == "bool" for part in parts)


def _read(
    loops: Sequence[TrainingLoop], source: Source, statement: ast.stmt, nodes: Sequence[tuple[Graph, Node]]
) -> Read | None:
    """The read of one statement, None where it is not one of every training step."""
    graph, first = nodes[0]
    numbers = tuple((graph.index, node.index) for graph, node in nodes)
    if graph.kind == "dynamo" or first.module is not None:
        if seldom_reached(source, statement, None, None):
            return None
        return Read(source, statement, statement, None, numbers, {}, forward=True)
    for loop in loops:
        place = next((frame for frame in first.frames if loop.holds(frame)), None)
        at = None if place is None else _statement(loop.source, place)
        if place is None or at is None:
            continue
        if _evaluates(first, loop, place) or seldom_reached(loop.source, at, loop.node, loop.inside.line):
            return None
        if statement is not at and seldom_reached(source, statement, None, None):
            return None
        dtypes = _dtypes(statement, nodes)
        more = _computes_more(graph, source, statement, nodes)
        shaped = any(_has_dimensions(g, n) for g, n in nodes)
        return Read(source, statement, at, loop, numbers, dtypes, other=more, shaped=shaped)
    return None


def _statement(source: Source, span: Span) -> ast.stmt | None:
    """The innermost statement whose own text, not that of a block in it, holds a position."""
    best: ast.stmt | None = None
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= span.line <= (node.end_lineno or node.lineno):
            continue
        begins = node.lineno < span.line or source.character(node.lineno, node.col_offset) <= span.column
        if (begins or span.end_column is None) and (best is None or node.lineno >= best.lineno):
            best = node
    return best


def _evaluates(node: Node, loop: TrainingLoop, place: Span) -> bool:
    """Whether a read belongs to a loop inside the training loop that runs without gradients."""
    inner = enclosing_loop(loop.source, place)
    return inner is not None and inner is not loop.node and node.facts.get("grad_mode") == "off"


def _dtypes(statement: ast.stmt, nodes: Sequence[tuple[Graph, Node]]) -> dict[ast.expr, str]:
    """The dtypes read by the expressions of a statement; empty where they cannot be told apart."""
    numbers = [(graph, node) for graph, node in nodes if node.target in ITEM]
    found = [e for e in own_expressions(statement) if read_operand(e) is not None]
    found.sort(key=lambda e: (e.end_lineno or e.lineno, e.end_col_offset or 0))
    dtypes = [graph.nodes[node.inputs()[0]].dtype or "" for graph, node in numbers]
    if len(found) == len(dtypes) == len(nodes):
        return dict(zip(found, dtypes, strict=True))
    if len(set(dtypes)) == 1 and len(numbers) == len(nodes) and len(nodes) % max(len(found), 1) == 0:
        return dict.fromkeys(found, dtypes[0])
    return {}


def _has_dimensions(graph: Graph, node: Node) -> bool:
    """Whether one number is read from a tensor that is no scalar, which adds up and is formatted another way."""
    return node.target in ITEM and graph.nodes[node.inputs()[0]].shape not in (None, ())


def _computes_more(graph: Graph, source: Source, statement: ast.stmt, nodes: Sequence[tuple[Graph, Node]]) -> bool:
    """Whether the lines of a statement compute a tensor that none of its reads needs."""
    needed: set[int] = set()
    pending = [node.index for _, node in nodes]
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            pending += graph.nodes[index].inputs()
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    others = [n for n in graph.nodes if n.index not in needed and n.op.startswith("call_") and n.span is not None]
    here = [n.span for n in others if n.span is not None and n.span.path == source.path and n.span.line in lines]
    return any(_statement(source, span) is statement for span in here)


# ---------------------------------------------------------------------------------------------------------- the source


def own_expressions(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement, those of a block inside it left out."""
    found: list[ast.expr] = []
    pending: list[ast.AST] = [c for c in ast.iter_child_nodes(statement) if not isinstance(c, ast.stmt)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.expr):
            found.append(node)
        pending += [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt)]
    return found


def read_operand(node: ast.AST) -> ast.expr | None:
    """The tensor of `x.item()`, `float(x)` and `int(x)`; None for any other expression."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        return node.func.value
    if isinstance(node.func, ast.Name) and node.func.id in ("float", "int") and len(node.args) == 1:
        given = node.args[0]
        return None if isinstance(given, (ast.Starred, ast.Constant)) or read_operand(given) is not None else given
    return None


def seldom_reached(source: Source, node: ast.AST, until: Loop | None, step: int | None) -> bool:
    """Whether a place in a loop, or in a function where `until` is None, is reached every so many steps only.

    Conditions under which the optimizer's step at line `step` stands too say nothing.
    """
    child = node
    while child is not until:
        parent = source.parents.get(child)
        if parent is None or isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return False
        if isinstance(parent, ast.If) and child is not parent.test:
            branch = parent.body if child in parent.body else parent.orelse
            if not _holds(branch, step) and seldom(source, parent.test, child in parent.body, until):
                return True
        if isinstance(child, ast.stmt) and any(
            _turns_away(source, other, until, step) for other in _before(source, child)
        ):
            return True
        child = parent
    return False


def _before(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    block = source.block_of(statement)
    return block[: block.index(statement)]


def _turns_away(source: Source, other: ast.stmt, until: Loop | None, step: int | None) -> bool:
    """Whether a statement leaves the iteration in most steps: `if step % 10: continue`."""
    if not isinstance(other, ast.If) or other.orelse or not isinstance(other.body[-1], LEAVES):
        return False
    return (step is None or step <= (other.end_lineno or other.lineno)) and seldom(source, other.test, False, until)


def _holds(block: Sequence[ast.stmt], line: int | None) -> bool:
    return line is not None and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno)


def seldom(source: Source, test: ast.expr, outcome: bool, loop: Loop | None, depth: int = 3) -> bool:
    """Whether a condition has an outcome once in several steps: `step % 10 == 0`, `step == last`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return seldom(source, test.operand, not outcome, loop, depth)
    if isinstance(test, ast.BoolOp):
        each = [seldom(source, value, outcome, loop, depth) for value in test.values]
        return any(each) if isinstance(test.op, ast.And) == outcome else all(each)
    if isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod):
        return not outcome
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _seldom_equal(test, outcome, loop)
    if isinstance(test, ast.Name) and depth:
        values = [n.value for n in ast.walk(source.tree) if isinstance(n, ast.Assign) and _binds(n, test.id)]
        return bool(values) and all(seldom(source, value, outcome, loop, depth - 1) for value in values)
    return False


def _seldom_equal(test: ast.Compare, outcome: bool, loop: Loop | None) -> bool:
    sides = (test.left, test.comparators[0])
    counted = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for side in sides for n in ast.walk(side))
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        targets = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        counted = counted or any(isinstance(side, ast.Name) and side.id in targets for side in sides)
    if isinstance(test.ops[0], (ast.Eq, ast.Is, ast.In)):
        return counted and outcome
    return isinstance(test.ops[0], (ast.NotEq, ast.IsNot, ast.NotIn)) and counted and not outcome


def _binds(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


# ------------------------------------------------------------------------------------------------- what a value is for


def decides(source: Source, node: ast.AST) -> bool:
    """Whether an expression stands in a test: of an `if`, a `while`, an assertion or a conditional expression."""
    while isinstance(node, ast.expr):
        parent = source.parents[node]
        if isinstance(parent, (ast.If, ast.While, ast.Assert, ast.IfExp)) and node is parent.test:
            return True
        node = parent
    return False


def purpose(source: Source, node: ast.expr) -> str:
    """What becomes of a value at a place that has to know it, as a reason to leave it there."""
    line = node.lineno
    if decides(source, node):
        return f"line {line} decides by its value what is done next: the host has to wait for it"
    call = next((c for c in _calls_around(source, node)), None)
    if call is not None:
        name = ast.unparse(call.func)
        if name.rpartition(".")[2] not in LOGS:
            return f"line {line} hands it to `{name}`, which may need a number"
        what = "prints it" if name == "print" else f"hands it to `{name}`"
        return f"line {line} {what} in every step: do that every so many steps only, under `if step % N == 0`"
    statement = source.statement_of(node)
    if isinstance(statement, ast.Return):
        function = source.function_at(line)
        return f"`{function.name if function is not None else 'the function'}` returns it, and its callers may need it"
    return f"line {line} needs its value in every step"


def _calls_around(source: Source, node: ast.AST) -> Iterator[ast.Call]:
    """The calls that an expression is an argument of, within its statement, outermost first."""
    found: list[ast.Call] = []
    while not isinstance(node, ast.stmt):
        parent = source.parents[node]
        if isinstance(parent, ast.Call) and node is not parent.func and read_operand(parent) is None:
            found.append(parent)
        node = parent
    return reversed(found)
