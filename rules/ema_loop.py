"""An average of the parameters is updated one tensor after the other.

## What it does
Points at lines that update an exponential moving average of parameters with more than a hundred operations a step. The
source is left alone; the examples show the form of `torch.optim.swa_utils` that updates all tensors at once:
`get_ema_multi_avg_fn(decay)(averages, parameters, 0)`, which is what `AveragedModel(model,
multi_avg_fn=get_ema_multi_avg_fn(decay))` calls.

## Why it costs
Every tensor takes its own kernels, most of them too small to fill a device: the step pays for launching them. Written
as a product and a sum, every element is also read and written twice; `lerp` passes over it once.

## When not to
Few tensors. Averages of floating-point parameters only: buffers that count steps are copied, not averaged. Averages
kept in another dtype than the parameters: the update of all at once takes one dtype. Under sharding (FSDP) the average
has to be sharded alike.

## Fix safety
SUGGEST: the same average rounded in another way, and where it is kept is a decision about the whole script.

## References
- torch.optim.swa_utils, PyTorch documentation: AveragedModel, get_ema_multi_avg_fn
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import codemod
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import read_elsewhere
from advisor.patterns.loops import Spot, spot_of
from advisor.patterns.updates import Average, averages
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source

LEAST = 100  # operations of one place in a step; fewer are not worth a change
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(4) for _ in range({count}))
        self.averages = nn.ParameterList(torch.zeros(4) for _ in range({count}))
        self.decay = 0.75

    @torch.no_grad()
    def update(self):
{body}
    def forward(self, x):
        self.update()
        return x * self.averages[0].detach() * self.averages[1].detach() + self.weights[0]


def get_init_inputs():
    return []


def get_inputs():
    return [torch.rand(3, 4, requires_grad=True)]
"""


def _model(*lines: str, count: int = 60) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines) + "\n").replace("{count}", str(count))


class EmaLoop(GraphRule):
    """average.mul_(decay).add_(parameter, alpha=1 - decay) in a loop -> one update of all, pointed at only."""

    id = "ema-loop"
    safety = Safety.SUGGEST
    worth = 0.01
    order = 60
    in_library = "ask the library for an update of all tensors at once"
    examples = (
        Example(
            before=_model(
                "for a, p in zip(self.averages, self.weights):",
                "    a.mul_(self.decay).add_(p, alpha=1 - self.decay)",
            ),
            after=_model(
                "torch.optim.swa_utils.get_ema_multi_avg_fn(self.decay)(list(self.averages), list(self.weights), 0)"
            ),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("for a, p in zip(self.averages, self.weights):", "    a.lerp_(p.detach(), 0.25)", count=120),
            after=_model(
                "torch.optim.swa_utils.get_ema_multi_avg_fn(1 - 0.25)(list(self.averages), list(self.weights), 0)",
                count=120,
            ),
            profile=step(10_000, nodes=0.2),
            saves=(0, 2_000),
        ),
        Example(
            before=_model("for a, p in zip(self.averages, self.weights):", "    a.lerp_(p, 0.25)", count=20),
            after=None,
            profile=step(10_000, nodes=0.2),
            because="the average takes only 20 operations per step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        for found in averages(graph):
            inputs = {"average": found.average, "parameter": found.parameter}
            yield Region(graph=graph.index, root=found.root, inputs=inputs, inner=found.inner)

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One finding for each line that updates averages."""
        places: dict[tuple[str, int, int], list[tuple[Graph, Average]]] = {}
        spots: dict[tuple[str, int, int], Spot] = {}
        for graph in ctx.graphs:
            for found in averages(graph):
                spot = spot_of(graph, graph.nodes[found.root])
                places.setdefault(spot.key(), []).append((graph, found))
                spots[spot.key()] = spot
        for key, updates in sorted(places.items()):
            yield self._judge(ctx, spots[key], updates)

    def _judge(self, ctx: Context, spot: Spot, updates: list[tuple[Graph, Average]]) -> Finding | Decline:
        operations = sum(len(average.inner) for _, average in updates)
        if operations <= LEAST:
            return self.decline(spot.span, f"the average takes only {operations} operations per step")
        known = [cost for g, found in updates if (cost := ctx.cost_us(g.index, found.inner)) is not None]
        if not known:
            return self.decline(spot.span, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost, share = sum(known), sum(known) / ctx.step_us
        if spot.span is None or share < ctx.gate(self):
            return self.decline(spot.span, f"it takes {share:.1%} of the step")
        costs = [ctx.costs.get((g.index, node)) for g, found in updates for node in found.inner]
        launches = sum(item.launches for item in costs if item is not None)
        moved = sum(3 * tensor_bytes(g.nodes[found.average]) for g, found in updates)
        floor = ctx.floor_us(0.0, moved, None)
        return self.finding(
            spot.span,
            f"an average of {len(updates)} tensors is updated one tensor after the other",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="time of the updates per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="launches per step", value=round(launches, 1), unit="launches"),
                *floor_evidence("floor: both read, the average written once", floor),
                Evidence(what="decay", value=round(updates[0][1].decay, 12), unit=""),
            ),
            library=spot.library,
            values={} if (reason := _uneven(updates)) is None else {"not applied": reason},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        loop = _loop_of(source, finding.span)
        read = _update(source, loop) if loop is not None else None
        if loop is None or read is None:
            return self.decline(
                finding.span,
                "the loop is not one update of pairs of tensors: use torch.optim.swa_utils.AveragedModel with "
                "multi_avg_fn=get_ema_multi_avg_fn(decay)",
            )
        name, edits = codemod.module_name(source, loop.lineno, "torch.optim.swa_utils")
        averages_text, parameters_text, decay = read
        text = f"{name}.get_ema_multi_avg_fn({decay})(list({averages_text}), list({parameters_text}), 0)"
        return self.edit(finding, "update all averages at once", [*edits, (source.span(loop), text)])


def _uneven(updates: list[tuple[Graph, Average]]) -> str | None:
    """Why the tensors cannot be averaged by one operation, by what was recorded; None where they can."""
    if len({average.decay for _, average in updates}) > 1:
        return "the decay differs from tensor to tensor"
    if any(g.nodes[found.average].dtype != g.nodes[found.parameter].dtype for g, found in updates):
        return "the averages have another dtype than the parameters, and the update of all at once takes one"
    return None


def _loop_of(source: Source, span: Span) -> ast.For | None:
    """The `for` statement whose only statement is at a place."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.For) and len(node.body) == 1 and not node.orelse:
            body = node.body[0]
            if body.lineno <= span.line <= (body.end_lineno or body.lineno):
                return node
    return None


def _update(source: Source, loop: ast.For) -> tuple[str, str, str] | None:
    """Averages, parameters and decay of `for a, p in zip(A, P): <one update>`, as text; None for another loop."""
    call, target = loop.iter, loop.target
    zipped = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "zip"
    if not isinstance(call, ast.Call) or not zipped or len(call.args) != 2 or not isinstance(target, ast.Tuple):
        return None
    statement = loop.body[0]
    names = [item.id for item in target.elts if isinstance(item, ast.Name)]
    if len(names) != 2 or not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    if any(read_elsewhere(source, [loop], name) for name in names) or any(_is_argument(source, a) for a in call.args):
        return None
    for average, parameter in ((0, 1), (1, 0)):
        decay = _decay(statement.value, names[average], names[parameter])
        if decay is not None and not any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(decay[1])):
            text = codemod.grouped(source.segment(decay[1])) if decay[0] else source.segment(decay[1])
            return source.segment(call.args[average]), source.segment(call.args[parameter]), decay[0] + text
    return None


def _is_argument(source: Source, expression: ast.expr) -> bool:
    """Whether an expression is a parameter of its function: another caller may pass no tensors at all."""
    function = source.function_at(expression.lineno)
    given = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)} if function is not None else set()
    return isinstance(expression, ast.Name) and expression.id in given


def _decay(call: ast.Call, average: str, parameter: str) -> tuple[str, ast.expr] | None:
    """The decay as text and an expression: of `a.mul_(d).add_(p, alpha=1 - d)`, or "1 - " and the weight of
    `a.lerp_(p, w)`.

    Two literals are known from the graph to be those of an average; other factors must be written as `d` and `1 - d`.
    """
    if not isinstance(call.func, ast.Attribute) or not call.args or not _is(call.args[0], parameter):
        return None
    inner = call.func.value
    if call.func.attr == "lerp_" and _is(inner, average) and len(call.args) == 2:
        return "1 - ", call.args[1]
    product = inner if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else None
    if call.func.attr != "add_" or product is None or len(product.args) != 1 or len(call.args) != 1:
        return None
    assert isinstance(product.func, ast.Attribute)
    exact = product.func.attr == "mul_" and _is(product.func.value, average)
    if not exact or [keyword.arg for keyword in call.keywords] != ["alpha"]:
        return None
    decay, alpha = product.args[0], call.keywords[0].value
    literal = isinstance(decay, ast.Constant) and isinstance(alpha, ast.Constant)
    return ("", decay) if literal or _rest_of(alpha, decay) or _rest_of(decay, alpha) else None


def _rest_of(expression: ast.expr, other: ast.expr) -> bool:
    """Whether an expression is `1 - other`."""
    return (
        isinstance(expression, ast.BinOp)
        and isinstance(expression.op, ast.Sub)
        and isinstance(expression.left, ast.Constant)
        and expression.left.value == 1
        and ast.dump(expression.right) == ast.dump(other)
    )


def _is(expression: ast.expr, name: str) -> bool:
    """`name`, `name.data` or `name.detach()`."""
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) and not expression.args:
        expression = expression.func if expression.func.attr == "detach" else expression
    if isinstance(expression, ast.Attribute) and expression.attr in ("data", "detach"):
        expression = expression.value
    return isinstance(expression, ast.Name) and expression.id == name
