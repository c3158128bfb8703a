"""The experts of a mixture run one after the other, each on its own few tokens.

## What it does
Points at a loop over four or more experts that picks the tokens of each (by a mask, by `torch.where` or `nonzero`),
multiplies them with that expert's weights and adds the result back. The source is left alone. What to write instead is
one grouped product: tokens sorted by expert and `torch._grouped_mm` with the experts' weights stacked, or one batched
product where every expert has the same number of tokens, as in the examples. For the Transformers library it is the
option `experts_implementation="grouped_mm"`.

## Why it costs
Every expert takes a dozen launches for a product too small to fill the device, and finding its tokens makes the host
wait for the device. A grouped product launches once for all experts and needs no sizes on the host.

## When not to
Few experts with many tokens each: their products fill the device already. Experts of different shapes or with
different activations.

## Fix safety
SUGGEST: weights have to be stacked, which changes the parameters and the checkpoint; `torch._grouped_mm` is not a
stable interface.

## References
- pytorch/torchtitan, torchtitan/models/moe: grouped experts by `torch._grouped_mm`
- Hugging Face Transformers, documentation of `experts_implementation`
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import codemod
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import read_elsewhere
from advisor.patterns.loops import ExpertLoop, expert_loops
from advisor.rule import Context, Example, step
from advisor.source import Source

LEAST = 4  # experts
UNLIKE = "its experts differ in the shapes of their weights or in what they compute: one product cannot run them all"
ADVICE = "sort the tokens by expert and use torch._grouped_mm with the experts' weights stacked"
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.rand({experts}, 8, 8) / 8)

    def forward(self, x):
        gate = x[:, :{experts}].softmax(0)
        out = torch.zeros_like(x)
{body}
        return out


def get_init_inputs():
    return []


def get_inputs():
    return [torch.rand(12, 8, requires_grad=True)]
"""


def _model(*lines: str, experts: int = 4) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return MODEL.replace("{body}", body).replace("{experts}", str(experts))


class ExpertLoopRule(GraphRule):
    """for e in range(n): out.index_add_(0, rows, x[rows] @ w[e]) -> one grouped product, pointed at only."""

    id = "expert-loop"
    safety = Safety.SUGGEST
    worth = 0.05
    order = 30
    in_library = 'ask for the grouped form, in Transformers experts_implementation="grouped_mm"'
    examples = (
        Example(
            before=_model(
                "for e in range(4):",
                "    rows = gate[:, e].topk(3).indices",
                "    out = out.index_add(0, rows, x[rows] @ self.up[e])",
            ),
            after=_model(
                "rows = torch.stack([gate[:, e].topk(3).indices for e in range(4)])",
                "out = out.index_add(0, rows.flatten(), (x[rows] @ self.up[:4]).flatten(0, 1))",
            ),
            profile=step(10_000, nodes=0.5),
            saves=(0, 5_000),
        ),
        Example(
            before=_model(
                "for e in range(3):",
                "    rows = gate[:, e].topk(3).indices",
                "    out = out.index_add(0, rows, x[rows] @ self.up[e])",
                experts=3,
            ),
            after=None,
            profile=step(10_000, nodes=0.5),
            because="it loops over only 3 experts",
        ),
        Example(
            before=_model(
                "for e in range(4):",
                "    rows = gate[:, e].topk(3).indices",
                "    out = out.index_add(0, rows, x[rows] @ self.up[e])",
            ),
            after=None,
            profile=step(10_000, nodes=0.02),
            because="its experts take 1.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        for loop in expert_loops(graph, 2):
            if loop.experts < LEAST:
                reason = f"it loops over only {loop.experts} experts"
                yield NearMiss(graph=graph.index, node=loop.products[0], reason=reason)
            elif not loop.alike:
                yield NearMiss(graph=graph.index, node=loop.products[0], reason=UNLIKE)
            else:
                yield Region(graph=graph.index, root=loop.products[-1], inputs={}, inner=loop.inner)

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One finding for each place in the source, or in a package at the user's call of it."""
        places: dict[tuple[str, int, int], list[tuple[Graph, ExpertLoop]]] = {}
        for graph in ctx.graphs:
            for loop in expert_loops(graph, 2):
                places.setdefault(loop.spot.key(), []).append((graph, loop))
        for _, loops in sorted(places.items()):
            yield self._judge(ctx, loops)

    def _judge(self, ctx: Context, loops: list[tuple[Graph, ExpertLoop]]) -> Finding | Decline:
        spot = loops[0][1].spot
        experts = max(loop.experts for _, loop in loops)
        if experts < LEAST:
            return self.decline(spot.span, f"it loops over only {experts} experts")
        if not all(loop.alike for _, loop in loops):
            return self.decline(spot.span, UNLIKE)
        known = [cost for g, loop in loops if (cost := ctx.cost_us(g.index, loop.inner)) is not None]
        if not known:
            return self.decline(spot.span, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost, share = sum(known), sum(known) / ctx.step_us
        if spot.span is None or share < ctx.gate(self):
            return self.decline(spot.span, f"its experts take {share:.1%} of the step")
        costs = [ctx.costs.get((g.index, node)) for g, loop in loops for node in loop.inner]
        launches = sum(item.launches for item in costs if item is not None)
        flops = sum(item.flops or 0.0 for item in costs if item is not None)
        floor = ctx.floor_us(flops, 0.0, None)
        return self.finding(
            spot.span,
            f"{experts} experts run one after the other: {ADVICE}",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="time of the experts per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="launches per step", value=round(launches, 1), unit="launches"),
                Evidence(what="experts", value=experts, unit="experts"),
                Evidence(what="layers with this code", value=len(loops), unit="layers"),
            ),
            library=spot.library,
            values={} if all(loop.stacked for _, loop in loops) else {"not applied": ADVICE},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        around = [node for node in ast.walk(source.tree) if _holds(node, finding.span)]
        loop = max(around, key=lambda node: getattr(node, "lineno", 0), default=None)
        text = _batched(source, loop) if isinstance(loop, ast.For) else None
        if text is None or not isinstance(loop, ast.For):
            return self.decline(finding.span, ADVICE)
        name, edits = codemod.module_name(source, loop.lineno, "torch")
        return self.edit(
            finding, "one batched product for all experts", [*edits, (source.span(loop), text.replace("{torch}", name))]
        )


def _holds(node: ast.AST, span: Span) -> bool:
    return isinstance(node, ast.For) and node.lineno <= span.line <= (node.end_lineno or node.lineno)


def _batched(source: Source, loop: ast.For) -> str | None:
    """The loop `for e in range(n): rows = R(e); out = out.index_add(0, rows, x[rows] @ w[e])` as two statements.

    Experts must have equally many rows, else `torch.stack` says so.
    """
    call = loop.iter
    ranged = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"
    if not isinstance(call, ast.Call) or not ranged or len(call.args) != 1 or len(loop.body) != 2 or loop.orelse:
        return None
    first, second = loop.body
    if not isinstance(loop.target, ast.Name) or not isinstance(first, ast.Assign) or not isinstance(second, ast.Assign):
        return None
    rows, out, add = first.targets[0], second.targets[0], second.value
    if (
        len(first.targets) + len(second.targets) != 2
        or not isinstance(rows, ast.Name)
        or not isinstance(out, ast.Name)
        or not isinstance(add, ast.Call)
    ):
        return None
    on_out = isinstance(add.func, ast.Attribute) and add.func.attr == "index_add" and _named(add.func.value, out.id)
    if not on_out or len(add.args) != 3 or not _named(add.args[1], rows.id) or add.keywords:
        return None
    product = add.args[2]
    zero = isinstance(add.args[0], ast.Constant) and add.args[0].value == 0
    if not zero or not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.MatMult):
        return None
    tokens, weight = product.left, product.right
    if not (isinstance(tokens, ast.Subscript) and _named(tokens.slice, rows.id)):
        return None
    if not (isinstance(weight, ast.Subscript) and _named(weight.slice, loop.target.id)):
        return None
    made = (rows.id, out.id)  # in a turn: what is taken for all turns at once must not need it
    needed = any(_reads(part, name) for part in (first.value, tokens.value, weight.value, call) for name in made)
    by_turn = any(_reads(part, loop.target.id) for part in (tokens.value, weight.value))
    if needed or by_turn or any(read_elsewhere(source, [loop], name) for name in (rows.id, loop.target.id)):
        return None
    count, indent = source.segment(call.args[0]), " " * source.character(loop.lineno, loop.col_offset)
    index = f"[{source.segment(first.value)} for {loop.target.id} in range({count})]"
    joined = f"({source.segment(tokens)} @ {source.segment(weight.value)}[:{count}]).flatten(0, 1)"
    return (
        f"{rows.id} = {{torch}}.stack({index})\n{indent}{out.id} = {out.id}.index_add(0, {rows.id}.flatten(), {joined})"
    )


def _named(expression: ast.expr, name: str) -> bool:
    return isinstance(expression, ast.Name) and expression.id == name


def _reads(expression: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(expression))
