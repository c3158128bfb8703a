"""A Python loop takes or writes the elements of a tensor one by one.

## What it does
Points at an expression that indexes one tensor with ten or more different integers in a step, and says what the loop
does: it writes rows, joins them (a sum or a product, and which), or treats each alone. The source is left alone; the
examples show the one operation for a sum and for a product.

## Why it costs
Every turn launches its own small kernels and runs Python between them. In the backward pass the gradient of `x[i]` is a
tensor of the size of all of `x`, zero but for one row: n turns write n times the whole of `x`.

## When not to
A recurrence, where a turn needs what the turn before computed, cannot run all turns at once; it is declined. So are
rows of stacked weights, each for its own layer, and rows each for its own head.

## Fix safety
SUGGEST: what replaces a loop depends on all of its body. Sums are taken in another order.

## References
- PyTorch profiler, experimental pattern matcher, ForLoopIndexingPattern (torch.profiler._pattern_matcher)
- torch.sum, torch.prod, torch.stack, PyTorch documentation
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import read_elsewhere
from advisor.patterns.loops import IndexLoop, index_loops
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source

LEAST = 10  # turns; the PyTorch profiler's own pattern asks for as many
WIDENS = "the elements are integers or bools, whose sum torch takes in int64 where the loop keeps their type"
FRESH = frozenset("zeros ones full tensor zeros_like ones_like full_like new_zeros new_ones new_full".split())
JOINS = {ast.Add: "sum", ast.Mult: "prod"}
WHAT = {
    "store": "writes the elements of a tensor one by one: write them in one operation",
    "map": "treats the elements of a tensor one by one: treat the whole tensor at once",
}
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.rand(12, 8, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class PythonLoopIndex(GraphRule):
    """for i in range(n): y += x[i] -> y += x[:n].sum(0), pointed at only."""

    id = "python-loop-index"
    safety = Safety.SUGGEST
    worth = 0.02
    order = 30
    in_library = "ask the library for a form without the loop"
    examples = (
        Example(
            before=_model("y = 0.0", "for i in range(12):", "    y = y + x[i]", "return y"),
            after=_model("y = 0.0", "y = y + x[:12].sum(0)", "return y"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("y = torch.ones(8)", "for i in range(x.shape[0]): y *= x[i]", "return y"),
            after=_model("y = torch.ones(8)", "y *= x[:x.shape[0]].prod(0)", "return y"),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("h = x[0]", "for i in range(1, 12):", "    h = torch.tanh(h + x[i])", "return h"),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="every turn needs what the turn before computed: it cannot run all turns at once",
        ),
        Example(
            before=_model("y = 0.0", "for i in range(12):", "    y = y + x[i]", "return y"),
            after=None,
            profile=step(10_000, nodes=0.01),
            because="it takes 1.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        for loop in index_loops(graph, LEAST):
            reason = _unsuitable(graph, loop)
            if reason is not None:
                yield NearMiss(graph=graph.index, node=loop.nodes[0], reason=reason)
            else:
                yield Region(graph=graph.index, root=loop.nodes[-1], inputs={}, inner=loop.inner)

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One finding for each place; what several graphs make of it counts together."""
        places: dict[tuple[str, int, int], list[tuple[Graph, IndexLoop]]] = {}
        for graph in ctx.graphs:
            for loop in index_loops(graph, LEAST):
                places.setdefault(loop.spot.key(), []).append((graph, loop))
        for _, loops in sorted(places.items()):
            yield self._judge(ctx, loops)

    def _judge(self, ctx: Context, loops: list[tuple[Graph, IndexLoop]]) -> Finding | Decline:
        first = loops[0][1]
        reason = next((r for g, loop in loops if (r := _unsuitable(g, loop)) is not None), None)
        if reason is not None:
            return self.decline(first.spot.span, reason)
        known = [cost for g, loop in loops if (cost := ctx.cost_us(g.index, loop.inner)) is not None]
        if not known:
            return self.decline(
                first.spot.span, "cannot tell: no measured time could be linked to it", needs=("links",)
            )
        cost, share = sum(known), sum(known) / ctx.step_us
        span = first.spot.span
        if span is None or share < ctx.gate(self):
            return self.decline(span, f"it takes {share:.1%} of the step")
        turns = sum(loop.turns for _, loop in loops)
        moved = sum(2 * tensor_bytes(g.nodes[index]) for g, loop in loops for index in loop.nodes)
        floor = ctx.floor_us(0.0, moved, None)
        return self.finding(
            span,
            f"a Python loop {_what(first)}",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="time of the loop's operations per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="elements taken or written one by one per step", value=turns, unit="elements"),
                Evidence(what="operations the loop makes per step", value=_operations(loops), unit="calls"),
                *floor_evidence("floor: the elements read and written once", floor),
            ),
            library=first.spot.library,
            values={} if all(_is_floating(g, loop) for g, loop in loops) else {"not applied": WIDENS},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        loop = _loop_around(source, finding.span)
        text = _joined(source, loop) if loop is not None else None
        if loop is None or text is None:
            return self.decline(finding.span, "the loop is more than a sum or a product of rows: write it by hand")
        assert isinstance(loop.target, ast.Name)
        if read_elsewhere(source, [loop], loop.target.id):
            return self.decline(finding.span, "the loop's variable is read after the loop")
        return self.edit(finding, "one operation over all rows", [(source.span(loop), text)])


def _unsuitable(graph: Graph, loop: IndexLoop) -> str | None:
    if loop.form == "recurrence":
        return "every turn needs what the turn before computed: it cannot run all turns at once"
    if loop.form == "weighted":
        return "every turn has weights of its own"
    bases = {graph.nodes[node].inputs()[0] for node in loop.nodes}
    modules = {graph.nodes[node].module for node in loop.nodes}
    if len(modules) > 1:
        return "it indexes once in each of several modules, not in a loop"
    if loop.form != "store" and all(graph.nodes[base].facts.get("origin") == "state" for base in bases):
        return "it takes the weights of one layer or expert after the other"
    return None


def _is_floating(graph: Graph, loop: IndexLoop) -> bool:
    """Whether the rows a loop joins are no integers or bools; other loops are not rewritten."""
    dtypes = [graph.nodes[node].dtype or "" for node in loop.nodes]
    return loop.form != "reduction" or all(d.startswith(("float", "bfloat", "complex")) for d in dtypes)


def _what(loop: IndexLoop) -> str:
    if loop.form == "reduction":
        return f"joins the elements of a tensor one by one: `{loop.reduction}` does it in one operation"
    return WHAT[loop.form]


def _operations(loops: list[tuple[Graph, IndexLoop]]) -> int:
    return sum(len(loop.inner) for _, loop in loops)


def _loop_around(source: Source, span: Span) -> ast.For | None:
    """The innermost `for` statement around a place."""
    around = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.For) and node.lineno <= span.line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _joined(source: Source, loop: ast.For) -> str | None:
    """`y = y + x[:n].sum(0)` for a loop whose body only joins the rows of x to y; None for any other loop."""
    stops = loop.iter.args if isinstance(loop.iter, ast.Call) and not loop.iter.keywords else []
    ranged = isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range"
    if not ranged or len(stops) != 1 or len(loop.body) != 1 or loop.orelse or not isinstance(loop.target, ast.Name):
        return None
    if not _is_count(stops[0]):
        return None
    statement = loop.body[0]
    target: ast.expr
    if isinstance(statement, ast.AugAssign):
        if not _is_fresh(source, loop, statement.target):
            return None
        target, row, operator = statement.target, statement.value, statement.op
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.BinOp):
        target, row, operator = statement.targets[0], statement.value.right, statement.value.op
        if ast.dump(statement.value.left) != ast.dump(target).replace("ctx=Store()", "ctx=Load()"):
            return None
    else:
        return None
    name = JOINS.get(type(operator))
    if name is None or not isinstance(row, ast.Subscript) or not isinstance(target, ast.Name):
        return None
    plain = isinstance(row.slice, ast.Name) and row.slice.id == loop.target.id
    names = {node.id for node in ast.walk(row.value) if isinstance(node, ast.Name)}
    if not plain or not isinstance(row.value, (ast.Name, ast.Attribute)) or names & {loop.target.id, target.id}:
        return None
    joined = f"{source.segment(row.value)}[:{source.segment(stops[0])}].{name}(0)"
    whole, part = source.span(statement), source.span(row)
    begin = source.offset(whole.line, whole.column)
    return source.text[begin : source.offset(part.line, part.column)] + joined


def _is_count(expression: ast.expr) -> bool:
    """Whether an expression is a number of turns: not a difference, which as the end of a slice may count from the
    back."""
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Add, ast.Mult, ast.FloorDiv)):
        return _is_count(expression.left) and _is_count(expression.right)
    if isinstance(expression, ast.Constant):
        return isinstance(expression.value, int) and expression.value >= 0
    return isinstance(expression, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))


def _is_fresh(source: Source, loop: ast.For, target: ast.expr) -> bool:
    """Whether what a loop changes in place is a number or a tensor made for it, which shares no memory with the rows.

    Rows that were added to a view of them would be read changed.
    """
    if not isinstance(target, ast.Name):
        return False
    scope = source.function_at(loop.lineno) or source.tree
    given = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == target.id for t in node.targets)
    ]
    last = max((n for n in given if n.lineno < loop.lineno), key=lambda n: n.lineno, default=None)
    value = last.value if last is not None else None
    made = value.func if isinstance(value, ast.Call) else None
    return isinstance(value, ast.Constant) or (isinstance(made, ast.Attribute) and made.attr in FRESH)
