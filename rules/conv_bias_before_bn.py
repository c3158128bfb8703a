"""A convolution adds a bias that the BatchNorm after it subtracts again with the mean.

## What it does
Tells of convolutions whose output goes into BatchNorm alone and that have a bias: construct them with `bias=False`.

## Why it costs
BatchNorm in training subtracts the mean over the batch of every channel, so a constant added to a channel has no effect
and its gradient is zero but for rounding. The bias is still added to the whole activation, and in the backward pass the
gradient of the activation is read once more to be summed over. BatchNorm has a bias of its own.

## When not to
In evaluation with stored statistics; when the convolution's output is used elsewhere as well; where another setting
leaves BatchNorm out, freezes it or puts another module there, or where the files read a bias without asking whether
there is one, both of which are told with the finding; before LayerNorm or GroupNorm over several channels, which do not
take a channel's constant out. A pretrained checkpoint holds the bias: without it, `load_state_dict` reports an
unexpected key, and the stored running mean has to be reduced by the bias.

## Fix safety
SUGGEST: the parameters, the checkpoint and the random stream of the initialisation change. Never applied.

## References
- Ioffe, Szegedy, Batch Normalization, 2015, section 3.2: the bias can be ignored
- PyTorch, performance tuning guide: disable bias for convolutions directly followed by a batch norm
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import codemod
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Node, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.biases import frozen, reads_bias
from advisor.patterns.callsites import around, call_at
from advisor.patterns.convolutions import bias_before_batch_norm, convolutions
from advisor.patterns.sites import construction_of, other_choice
from advisor.rule import Context, Example, step, tensor_bytes
from advisor.source import Source

MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1{bias})
        self.norm = nn.{norm}

    def forward(self, x):
        {forward}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 3, 8, 8, requires_grad=True)]
"""


def _model(bias: str = "", norm: str = "BatchNorm2d(8)", forward: str = "return self.norm(self.conv(x))") -> str:
    return MODEL.replace("{bias}", bias).replace("{norm}", norm).replace("{forward}", forward)


class ConvBiasBeforeBn(GraphRule):
    """nn.Conv2d(...) before BatchNorm -> nn.Conv2d(..., bias=False), as a suggestion."""

    id = "conv-bias-before-bn"
    safety = Safety.SUGGEST
    worth = 0.005
    title = "construct the convolution without a bias"
    examples = (
        Example(
            before=_model(),
            after=_model(", bias=False"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model(forward="y = self.conv(x); return self.norm(y) + y"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="what the convolution gives is used elsewhere than in BatchNorm",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return bias_before_batch_norm(graph)

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One finding for each place that constructs such convolutions; where it is not known, for their call."""
        places: dict[Span, list[tuple[Node, float | None]]] = {}
        needed: set[Span | None] = set()  # constructions that also make convolutions which need their bias
        elsewhere: dict[Span, str] = {}  # constructions of which another instance may need the bias, and why
        missed: dict[tuple[str, int, str], Node] = {}
        for graph in ctx.graphs:
            superfluous = list(self.search(graph))
            roots = {found.root for found in superfluous if isinstance(found, Region)}
            for other in convolutions(graph):
                if other.node.span is not None and other.node.index not in roots:
                    needed.add(_constructed(ctx, graph, other.node))
            for found in superfluous:
                node = graph.nodes[found.root if isinstance(found, Region) else found.node]
                if isinstance(found, NearMiss):
                    missed.setdefault((*_where(node), found.reason), node)
                elif node.span is not None:
                    place = _constructed(ctx, graph, node) or node.span
                    choice = _other_norm(ctx, graph, node)
                    if choice is not None:
                        elsewhere.setdefault(place, choice)
                    places.setdefault(place, []).append((node, ctx.cost_us(graph.index, found.inner)))
        general = _elsewhere(ctx) if places else None
        for place, nodes in sorted(places.items(), key=lambda item: (item[0].path, item[0].line, item[0].column)):
            if place in needed:
                yield self.decline(place, "this line also makes convolutions that need their bias")
            else:
                yield self._judge(ctx, place, nodes, elsewhere.get(place, general))
        for (_, _, reason), node in sorted(missed.items(), key=lambda item: item[0]):
            yield self.decline(node.span, reason)

    def _judge(
        self, ctx: Context, place: Span, nodes: list[tuple[Node, float | None]], elsewhere: str | None
    ) -> Finding | Decline:
        known = [cost for _, cost in nodes if cost is not None]
        if not known:
            return self.decline(place, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost = sum(known)
        if cost / ctx.step_us < ctx.gate(self):
            return self.decline(place, f"its convolutions take {cost / ctx.step_us:.1%} of the step")
        moved = sum(3 * tensor_bytes(node) for node, _ in nodes)
        bound = ctx.floor_us(0.0, moved, None)
        return self.finding(
            place,
            "the bias of a convolution is taken out again by the BatchNorm after it"
            + (": construct it with bias=False" if elsewhere is None else " in this run"),
            cited_us=cost,
            high_us=bound or cost,
            evidence=(
                Evidence(what="time of these convolutions per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
                Evidence(what="activation the bias is added to and summed over", value=moved // 3, unit="bytes"),
                Evidence(what="calls of this code per step", value=len(nodes), unit="calls"),
            ),
            values={} if elsewhere is None else {"not applied": elsewhere},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        try:
            span, text = codemod.set_keywords(source, finding.span, {"bias": "False"})
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the convolution is not constructed at this line ({error})")
        call = ast.parse(text, mode="eval").body
        if "bias" in _settings(source, finding.span):
            return self.decline(finding.span, "whether it has a bias is a setting: let that be false before BatchNorm")
        if isinstance(call, ast.Call) and len(call.args) > 7:
            return self.decline(finding.span, "the bias is given by position: pass False there")
        if ".Conv" not in f".{text.split('(', 1)[0]}":
            return self.decline(finding.span, "this call makes no convolution: pass bias=False where it is constructed")
        return self.edit(finding, self.title, [(span, text)])


def _settings(source: Source, place: Span) -> set[str | None]:
    """The arguments of a call that are no literals."""
    calls = (e for e in source.expressions_at(place.line, place.column) if isinstance(e, ast.Call))
    call = next((c for c in calls if source.span(c) == place), None)
    return {k.arg for k in call.keywords if not isinstance(k.value, ast.Constant)} if call is not None else set()


def _elsewhere(ctx: Context) -> str | None:
    """Why the bias may be needed by other code or another setting of the files, or None."""
    place = frozen(ctx.sources)
    if place is not None:
        return f"{place} may freeze BatchNorm, which then does not take the bias out"
    place = reads_bias(ctx.sources)
    return None if place is None else f"{place} reads a bias, which would be None"


def _other_norm(ctx: Context, graph: Graph, node: Node) -> str | None:
    """Why another instance may have something else than BatchNorm behind a convolution, or None."""
    for norm in (graph.nodes[user] for user in node.users):
        if norm.span is None or not norm.module or norm.module.rsplit(".", 1)[-1].isdigit():
            continue
        source = ctx.read(norm.span.path)
        other = other_choice(source, graph, norm, ("BatchNorm", "SyncBatchNorm", "LazyBatchNorm"))
        if other is not None:
            text = " ".join(source.segment(other).split())
            where = f"`{text}` (line {other.lineno})"
            return f"another instance may have no BatchNorm after it: {where}: let the bias follow that"
        under = _condition(source, norm, node)
        if under is not None:
            return f"BatchNorm runs only where `{under}` holds: let the bias follow that"
    return None


def _condition(source: Source, norm: Node, node: Node) -> str | None:
    """The condition that the call of the norm is under and that of the convolution is not, or None."""
    found = []
    for one in (norm, node):
        call = call_at(source, one) if one.span is not None and one.span.path == source.path else None
        if call is None:
            return None
        found.append([n for n in around(source, call) if isinstance(n, (ast.If, ast.IfExp))])
    return next((" ".join(source.segment(n.test).split()) for n in found[0] if n not in found[1]), None)


def _where(node: Node) -> tuple[str, int]:
    return (node.span.path, node.span.line) if node.span is not None else ("", 0)


def _constructed(ctx: Context, graph: Graph, node: Node) -> Span | None:
    assert node.span is not None
    source = ctx.read(node.span.path)
    found = construction_of(source, graph, node)
    return source.span(found.call) if found is not None else None
