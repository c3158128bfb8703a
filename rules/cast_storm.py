"""Values are cast to float32 and back between operations in half precision.

## What it does
Looks under autocast for activations that become float32 and are cast back by the next product. Removes an explicit
`.float()` behind which there are only views; writes the square of an activation, which autocast computes in float32 as
a power, as a product, `x * x`; casts a float32 buffer or parameter that promotes an activation at its use. Products
that run in float32 beside others in half precision are told with their line.

## Why it costs
A cast reads and writes the whole activation, forward and backward, and what lies between moves twice the bytes. The
estimate is the time of both, less what the operation needs in half precision.

## When not to
What autocast itself runs in float32, softmax, norms, losses and powers, is its policy: those casts go where the
operation is fused, and are left alone with what they take. So is a residual stream in float32, and an explicit cast
whose result is computed with before it is cast back.

## Fix safety
NUMERICS for a square: the product of two half precision values is exact in float32, so both ways round once. EXACT for
a cast that is taken back behind views, where one product reads it, NUMERICS where several do. PRECISION for these where
the files use half precision without autocast too, and for a buffer that is rounded to half precision.

## References
- torch.amp, PyTorch documentation: the operations that autocast casts to float16 and to float32
- PyTorch performance tuning guide, "Use mixed precision and AMP"
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, Graph, Node, Rewrite, Safety, Span
from advisor.patterns.callsites import around, call_at
from advisor.patterns.roundtrips import HALF, Casts, RoundTrip, is_square, is_written, round_trips, single_products
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.places import is_own

SINGLES = frozenset({"torch.float32", "torch.float"})
HALVES = frozenset({"torch.bfloat16", "torch.float16", "torch.half"})
SAYS = {
    "explicit": "an activation is cast to float32 and straight back",
    "square": "autocast squares an activation in float32, which the next product casts back",
    "promoted": "a float32 tensor promotes an activation, which the next product casts back",
}
TITLES = {
    "explicit": "leave it in half precision",
    "square": "write the square as a product",
    "promoted": "cast the small operand to the activation's dtype",
}
MLP = """\
import torch
import torch.nn.functional as F


def forward(self, x):
    x = {first}
    return F.linear(x, self.weight)
"""
SQUARE = "F.relu(x).square()"


class _Told(Exception):
    """Why the source is not edited; the message is the reason."""


def _mlp(text: str) -> str:
    return MLP.replace("{first}", text)


class CastStorm(Rule):
    """x = F.relu(x).square() -> x = F.relu(x); x = x * x."""

    id = "cast-storm"
    safety = Safety.NUMERICS
    needs = ("steps", "graph")
    worth = 0.03
    order = 22
    examples = (
        Example(
            before=_mlp(SQUARE),
            after=_mlp("F.relu(x)\n    x = x * x"),
            profile=step(10_000, trips={SQUARE: ("method.square", 700.0)}),
            saves=(0, 700),
        ),
        Example(
            before=_mlp("torch.pow(x, 2)"),
            after=_mlp("x * x"),
            profile=step(10_000, trips={"torch.pow(x, 2)": ("method.square", 700.0)}),
            saves=(0, 700),
        ),
        Example(
            before=_mlp("x.float()"),
            after=_mlp("x"),
            profile=step(10_000, trips={"x.float()": ("method.float", 700.0)}),
            saves=(0, 700),
        ),
        Example(
            before=_mlp("x + self.shift"),
            after=_mlp("x + self.shift.to(x.dtype)"),
            profile=step(10_000, trips={"x + self.shift": ("operator.add", 700.0)}),
            saves=(0, 700),
        ),
        Example(
            before=_mlp("F.softmax(x, dim=-1)"),
            after=None,
            profile=step(10_000, trips={"F.softmax(x, dim=-1)": ("torch.nn.functional.softmax", 700.0)}),
            because="autocast runs softmax in float32 by its own policy: the casts there and back take 7.0% of the "
            "step",
        ),
        Example(
            before=_mlp(SQUARE),
            after=None,
            profile=step(100_000, trips={SQUARE: ("method.square", 700.0)}),
            because="the casts there and back take 0.7% of the step",
        ),
        Example(
            before=_mlp(SQUARE),
            after=None,
            profile=step(10_000, trips={SQUARE: ("method.square", 700.0)}, device="cpu"),
            because=ON_A_GPU,
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        casts: Casts = ctx.profile.facts.get("casts_us", {})
        found: dict[tuple[str, int, int, str], list[RoundTrip]] = {}
        for graph in ctx.graphs:
            for trip in round_trips(graph, casts):
                span = trip.node.span
                if _is_users(trip.node) and span is not None and trip.origin.kind != "unknown":
                    found.setdefault((span.path, span.line, span.column, trip.origin.kind), []).append(trip)
        gpu = ctx.profile.hardware.kind == "cuda"
        for key in sorted(found):
            trips = found[key]
            span = trips[0].node.span
            assert span is not None
            if gpu:
                yield from self._judge(ctx, trips, span)
            elif _kind(trips) in SAYS and (_kind(trips) == "promoted" or all(trip.plain for trip in trips)):
                yield self.decline(span, ON_A_GPU, needs=("gpu",))
        if gpu:
            yield from self._products(ctx)

    def _judge(self, ctx: Context, trips: Sequence[RoundTrip], span: Span) -> Iterator[Finding | Decline]:
        cost = sum(trip.cost_us for trip in trips)
        share, kind = cost / ctx.step_us, _kind(trips)
        if kind not in SAYS or (kind != "promoted" and not all(trip.plain for trip in trips)):
            if kind in SAYS:
                why = "it is computed with in float32 before it is cast back"
            else:
                name = operation(trips[0].node)
                asked = any("dtype" in trip.node.kwargs for trip in trips)
                why = f"{name} is told float32" if asked else f"autocast runs {name} in float32 by its own policy"
            if share >= self.worth:
                yield self.decline(span, f"{why}: the casts there and back take {share:.1%} of the step")
            return
        if share < ctx.gate(self) or cost <= 0.0:
            yield self.decline(span, f"the casts there and back take {share:.1%} of the step")
            return
        values, bindings, place = _edits(ctx, trips, kind, span)
        region, floor = _region_us(ctx, trips)
        yield self.finding(
            place,
            SAYS[kind],
            cited_us=region,
            high_us=region - floor,
            evidence=(
                Evidence(what="casts to float32 and back per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="with the operation between them", value=round(region, 1), unit="us"),
                Evidence(what="places in the graphs", value=len(trips), unit="nodes"),
            ),
            values={**values, "kind": kind},
            bindings=bindings,
        )

    def _products(self, ctx: Context) -> Iterator[Finding | Decline]:
        """Products of float32 beside others in half precision, by their line."""
        found: dict[tuple[str, int], list[tuple[Graph, Node]]] = {}
        for graph in ctx.graphs:
            for node in single_products(graph):
                if node.span is not None and _is_users(node):
                    found.setdefault((node.span.path, node.span.line), []).append((graph, node))
        for _, nodes in sorted(found.items()):
            cost = sum(ctx.cost_us(graph.index, [node.index]) or 0.0 for graph, node in nodes)
            span = nodes[0][1].span
            if span is None or cost / ctx.step_us < max(ctx.gate(self), self.worth):
                continue
            if any(_is_turned_off(ctx, node) for _, node in nodes):
                share = f"its products in float32 take {cost / ctx.step_us:.1%} of the step"
                yield self.decline(span, f"autocast is turned off there: {share}")
                continue
            yield self._product(ctx, nodes, span, cost)

    def _product(self, ctx: Context, nodes: Sequence[tuple[Graph, Node]], span: Span, cost: float) -> Finding:
        known = [(graph.index, node.index) for graph, node in nodes]
        costs = [ctx.costs[key] for key in known if key in ctx.costs]
        floor = sum(ctx.floor_us(c.flops or 0.0, (c.least_bytes or 0.0) / 2, "bfloat16") for c in costs)
        return self.finding(
            span,
            "a product runs in float32 beside others in half precision",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="products in float32 per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
            ),
            values={"why": "it stands outside of autocast: move it inside where its precision is not needed"},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "why" in finding.values:
            return self.decline(finding.span, finding.values["why"])
        edits = [(span, finding.values[name]) for name, span in finding.bindings.items()]
        made = self.edit(finding, TITLES[finding.values["kind"]], edits)
        return replace(made, safety=Safety(finding.values["safety"]))


def _kind(trips: Sequence[RoundTrip]) -> str:
    """What the places have in common: "square" of the policies is one that can be written otherwise."""
    kinds = {"square" if t.origin.kind == "policy" and is_square(t.node) else t.origin.kind for t in trips}
    return kinds.pop() if len(kinds) == 1 else "policy"


def _region_us(ctx: Context, trips: Sequence[RoundTrip]) -> tuple[float, float]:
    """Time per step of the casts and of the operation that they surround, forward and backward, and its floor where
    the operation, if one is left, moves half as many bytes."""
    region = floor = 0.0
    for trip in trips:
        cost = ctx.costs.get((trip.graph.index, trip.node.index))
        own = max(cost.total_us, trip.there_us) if cost is not None else trip.there_us
        region += trip.cost_us - trip.there_us + own
        if cost is not None and trip.origin.kind != "explicit":
            floor += (cost.floor_us or 0.0) / 2
    return region, min(floor, region)


def _is_users(node: Node) -> bool:
    return bool(node.frames) and is_own(node.frames[-1])


def _is_turned_off(ctx: Context, node: Node) -> bool:
    """Whether a product stands under `autocast(enabled=False)`, or in a function that is decorated so."""
    for frame in node.frames:
        if not is_own(frame):
            continue
        source = ctx.read(frame.path)
        statements = source.statements_at(frame.line)
        for outer in around(source, statements[-1]) if statements else []:
            given: list[ast.expr] = []
            if isinstance(outer, (ast.With, ast.AsyncWith)):
                given = [item.context_expr for item in outer.items]
            elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = outer.decorator_list
            texts = [ast.unparse(value) for value in given]
            single = any("autocast" in text and ("False" in text or "float32" in text) for text in texts)
            if single or any("custom_fwd" in text for text in texts):
                return True
    return False


# ----------------------------------------------------------------------------------------------------------- the edits


def _edits(
    ctx: Context, trips: Sequence[RoundTrip], kind: str, span: Span
) -> tuple[dict[str, str], dict[str, Span], Span]:
    """The edits as values and bindings of a finding, and its place; or, as a value, why there are none."""
    source, node = ctx.read(span.path), trips[0].node
    try:
        if not _is_all(ctx.graphs, trips):
            raise _Told("other calls of this code need float32")
        if kind == "explicit" and any(is_written(trip.graph, trip.node) for trip in trips):
            raise _Told("what it casts is written in place: the cast keeps the value from before")
        if kind == "explicit":
            place, edits = _uncast(source, node)
        elif kind == "square":
            place, edits = _product_instead(source, node)
        else:
            place, edits = _cast_operand(source, trips)
    except (_Told, codemod.CannotEdit) as error:
        return {"why": str(error)}, {}, span
    values = {str(number): text for number, (_, text) in enumerate(edits)}
    values["safety"] = _safety(ctx, trips, kind).value
    return values, {str(number): at for number, (at, _) in enumerate(edits)}, place


def _is_all(graphs: Sequence[Graph], trips: Sequence[RoundTrip]) -> bool:
    """Whether every node that this code makes float32 of half precision is cast back."""
    known = {(trip.graph.index, trip.origin.node) for trip in trips}
    first = trips[0].node
    return all(
        (graph.index, node.index) in known
        for graph in graphs
        for node in graph.nodes
        if node.span == first.span and node.target == first.target and _rises(graph, node)
    )


def _rises(graph: Graph, node: Node) -> bool:
    """Whether float32 is made of something else: of half precision, or, by a cast, of whole numbers or float64."""
    others = {graph.nodes[i].dtype for i in node.inputs()} - {"float32", None}
    return node.dtype == "float32" and bool(others & HALF or (others and operation(node) == "to"))


def _safety(ctx: Context, trips: Sequence[RoundTrip], kind: str) -> Safety:
    if kind == "promoted" or (kind == "explicit" and _half_elsewhere(ctx.sources)):
        return Safety.PRECISION
    return Safety.EXACT if kind == "explicit" and all(len(t.readers) == 1 for t in trips) else Safety.NUMERICS


def _half_elsewhere(sources: Sequence[Source]) -> bool:
    """Whether the files name half precision anywhere but in a call of autocast."""
    for source in sources:
        for node in ast.walk(source.tree):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("half", "bfloat16"):
                return True
            if isinstance(node, (ast.Name, ast.Attribute)) and source.qualified(node) in HALVES:
                calls = [n for n in around(source, node) if isinstance(n, ast.Call)]
                if not any("autocast" in ast.unparse(call.func) for call in calls):
                    return True
    return False


def _uncast(source: Source, node: Node) -> tuple[Span, list[codemod.Edit]]:
    """`x.float()` and `x.to(torch.float32)` without the cast."""
    call = call_at(source, node, lambda call: _to_single(source, call))
    if call is None or not isinstance(call.func, ast.Attribute):
        raise _Told("the cast is not written as `.float()`: leave it out")
    return source.span(call), [(source.span(call), codemod.grouped(source.segment(call.func.value)))]


def _to_single(source: Source, call: ast.Call) -> bool:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    given = [*call.args, *(k.value for k in call.keywords)]
    if method == "float":
        return not given
    named = all(k.arg == "dtype" for k in call.keywords)
    return method in ("to", "type") and len(given) == 1 and named and source.qualified(given[0]) in SINGLES


def _product_instead(source: Source, node: Node) -> tuple[Span, list[codemod.Edit]]:
    """`x * x` in place of `x ** 2`, of `torch.pow(x, 2)` and of `x.square()`."""
    assert node.span is not None
    column = node.span.column if node.span.end_column is not None else None
    squares = [(e, base) for e in source.expressions_at(node.span.line, column) if (base := _base(source, e))]
    if len(squares) != 1:
        raise _Told("write the square as a product of the activation with itself")
    square, base = squares[0]
    span = source.span(square)
    if isinstance(base, ast.Name):
        return span, [_as_product(source, square, base.id)]
    statement = source.statement_of(square)
    targets = statement.targets if isinstance(statement, ast.Assign) and statement.value is square else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name) or len(codemod.sharing_lines(source, statement)) > 1:
        raise _Told("give the activation a name and write the square as a product, `x * x`")
    name, line = targets[0].id, source.lines[statement.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    if source.span(statement).column != len(indent):
        raise _Told("give the activation a name and write the square as a product, `x * x`")
    then = f"{codemod.line_ending(source)}{indent}{name} = {name} * {name}"
    text = source.segment(base)
    first = codemod.grouped(text) if "\n" in text else text
    return span, [(source.span(statement), f"{name} = {first}{then}")]


def _as_product(source: Source, square: ast.expr, name: str) -> codemod.Edit:
    parent = source.parents.get(square)
    alone = isinstance(parent, (ast.Assign, ast.Return, ast.keyword)) or (
        isinstance(parent, ast.Call) and square in parent.args
    )
    text = f"{name} * {name}"
    return source.span(square), text if alone else f"({text})"


def _base(source: Source, node: ast.expr) -> ast.expr | None:
    """What an expression squares; None for any other expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left if _is_two(node.right) else None
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    name = source.qualified(node.func)
    if name in ("torch.pow", "torch.square"):
        return node.args[0] if len(node.args) == 1 + (name == "torch.pow") and _squares(node.args[1:]) else None
    method = node.func if isinstance(node.func, ast.Attribute) else None
    if method is None or method.attr not in ("pow", "square") or len(node.args) != (method.attr == "pow"):
        return None
    return method.value if _squares(node.args) else None


def _squares(exponents: Sequence[ast.expr]) -> bool:
    return all(_is_two(exponent) for exponent in exponents)


def _is_two(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (2, 2.0) and not isinstance(node.value, bool)


def _cast_operand(source: Source, trips: Sequence[RoundTrip]) -> tuple[Span, list[codemod.Edit]]:
    """`x + self.shift.to(x.dtype)`, where the operand is the smaller one and the sum is only cast back."""
    node = trips[0].node
    hint = "cast the float32 operand to the activation's dtype"
    assert node.span is not None
    column = node.span.column if node.span.end_column is not None else None
    found = [
        e
        for e in source.expressions_at(node.span.line, column)
        if isinstance(e, ast.BinOp) and isinstance(e.op, (ast.Add, ast.Sub, ast.Mult, ast.Div))
    ]
    if len(found) != 1 or len(node.args) != 2 or not all(trip.plain for trip in trips):
        raise _Told(hint)
    places = {[getattr(arg, "index", -1) for arg in t.node.args].index(t.origin.operand) for t in trips}
    smaller = all(2 * _elements(t.graph.nodes[t.origin.operand]) <= _elements(t.node) for t in trips)
    if len(places) != 1 or not smaller:
        raise _Told(hint)
    sides = [found[0].left, found[0].right]
    operand = sides.pop(places.pop())
    inner = sides[0]
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise _Told(hint)
    text = f"{codemod.grouped(source.segment(operand))}.to({source.segment(sides[0])}.dtype)"
    return source.span(found[0]), [(source.span(operand), text)]


def _elements(node: Node) -> int:
    count = 1
    for size in node.shape or ():
        count *= size
    return count
