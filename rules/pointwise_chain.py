"""Chains of memory-bound operations in the blocks of a model run one kernel each.

## What it does
Looks in the repeated blocks of the model for four or more neighbouring elementwise operations, norms and reductions of
one size, a quarter of a megabyte or more, that move at least twice the bytes that their inputs and results have. Behind
the statement that makes the model ready, before it is wrapped for several processes, every block is compiled in place:
`for block in model.h: block.compile()`. Where the blocks are not alike the whole model is compiled. The other of the
two is measured as well, and the faster one is kept.

## Why it costs
Every operation reads its inputs from memory and writes its result there, in the forward and in the backward pass. The
compiler makes one kernel of a chain, which reads and writes once. Blocks that are alike are compiled once.

## When not to
Where the chains are norms, activations and attention that other rules replace by one operation each, and those leave
little: what they leave counts. Where the run is too short to make up for a compilation of up to a minute. Where sizes
vary from step to step, the script compiles already, dropout or another draw of random numbers runs inside the model
(compiled code draws others), gradients are differentiated again, a backward pass keeps its graph (`retain_graph`),
hooks run on modules, something traces the model, or the whole model is copied or saved. Where the statement that makes
the model cannot be told.

## Fix safety
NUMERICS: the same operations in kernels that round in another order and keep intermediate values in float32. Names of
parameters and keys of checkpoints stay as they are.

## References
- "Reducing torch.compile cold start compilation time with regional compilation", PyTorch tutorials
- stas00/ml-engineering, "training/performance": 3.1 to 3.9 times faster for 1 B, 0.93 to 0.95 for 8 B parameters
- pytorch/torchtitan#1365: activation checkpointing, then compile, then FSDP
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from advisor import codemod, regional
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Node, Rewrite, Safety, Span
from advisor.patterns import (
    Attention,
    NearMiss,
    Region,
    attention_regions,
    gelu_regions,
    layer_norm_regions,
    rms_norm_regions,
    silu_regions,
)
from advisor.patterns.callsites import package_file
from advisor.roofline import boundary_bytes
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.origin import Unclear
from advisor.usercode.runlength import planned_steps

LEAST = 4  # neighbouring operations of one size
REPEATED = 2.0  # bytes moved over the bytes of inputs and results
PASSES = 2.5  # traffic of forward and backward over that of the inputs and results of a forward pass
ALONE = 2.0  # time of one operation over its floor, forward and backward, where a norm is one kernel each way
SMALLEST = 1 << 18  # bytes of a result: what a smaller one costs is its launch, not its traffic
LEFT = 0.02  # of the step: what has to be left by the rules that replace a part of the chains by one operation
MOVING = frozenset(
    "add sub rsub mul div pow neg sqrt rsqrt reciprocal square abs exp log log1p tanh erf erfc sigmoid where"
    " masked_fill logical_not eq ne lt gt le ge silu gelu relu relu6 leaky_relu elu selu mish softplus hardswish clamp"
    " maximum minimum sin cos softmax log_softmax mean sum var std norm normalize layer_norm rms_norm group_norm"
    " batch_norm dropout to float contiguous addcmul addcdiv lerp".split()
)
VIEWS = frozenset("view reshape transpose permute unsqueeze squeeze getitem chunk split unbind flatten expand".split())
FUSED = (attention_regions, layer_norm_regions, rms_norm_regions, gelu_regions, silu_regions)
MODEL = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.a = nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = self.linear(x)
        return x + {chain}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(8192, 8, requires_grad=True)]


def main():
    model = Model().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in {batches}:
        model(batch).sum().backward()
        optimizer.step()
"""
CHAIN = "self.a * torch.sin(h * 2.0) + torch.exp(-h * h) * torch.sigmoid(h + 1.0)"


def _model(chain: str = CHAIN, batches: str = "loader") -> str:
    return MODEL.replace("{chain}", chain).replace("{batches}", batches)


def _compiled(text: str) -> str:
    made = '    model = Model().to("cuda")\n'
    return text.replace(made, f"{made}    for block in model.blocks:\n        block.compile()\n")


CALLED = {"module": (1.0, 0.0)}


@dataclass(frozen=True)
class _Chain:
    """Neighbouring operations of one block, and those of them that move data."""

    nodes: frozenset[int]
    moving: tuple[int, ...]


@dataclass(frozen=True)
class _Found:
    """What the chains of a graph cost per step, and what of that the rules that fuse a part of them leave."""

    spent_us: float
    left_us: float
    floor_us: float
    operations: int
    ratio: float


class PointwiseChain(GraphRule):
    """for block in model.h: block.compile()."""

    id = "pointwise-chain"
    safety = Safety.NUMERICS
    needs = ("steps", "graph", "links", "calls")
    worth = 0.05
    order = 40
    compiles = True
    title = "compile the blocks of the model"
    examples = (
        Example(
            before=_model(),
            after=_compiled(_model()),
            profile=step(10_000, nodes=0.6, calls=CALLED),
            saves=(0, 6_000),
        ),
        Example(
            before=_model(batches="range(1000)"),
            after=None,
            profile=step(10_000, nodes=0.6, calls=CALLED),
            because="1000 steps save at most 6 s, and compiling takes about 11 s",
        ),
        Example(
            before=_model(f"F.dropout({CHAIN}, 0.1)"),
            after=None,
            profile=step(10_000, nodes=0.6, calls=CALLED),
            because="it draws random numbers: compiled code draws others",
        ),
        Example(
            before=_compiled(_model()),
            after=None,
            profile=step(10_000, nodes=0.6, calls=CALLED),
            because="the script has a call of the compiler of its own",
        ),
        Example(
            before=_model(),
            after=None,
            profile=step(10_000, nodes=0.04, calls=CALLED),
            because="its chains of memory-bound operations take 3.7% of the step",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for graph in regional.models(ctx):
            yield from self._judge(ctx, graph)

    def _judge(self, ctx: Context, graph: Graph) -> Iterator[Finding | Decline]:
        chains = _chains(graph, regional.repeated(graph))
        if not chains:
            return
        spent = ctx.cost_us(graph.index, frozenset().union(*(chain.nodes for chain in chains)))
        if spent is None:
            yield self.decline(graph.span, "cannot tell: no measured time could be linked to it", needs=("links",))
            return
        if spent / ctx.step_us < regional.gate(ctx, self) or not spent:
            share = f"{spent / ctx.step_us:.1%}"
            yield self.decline(graph.span, f"its chains of memory-bound operations take {share} of the step")
            return
        way = regional.obstacle(ctx, graph)
        if way is not None:
            yield self.decline(way[0] or graph.span, way[1])
            return
        try:
            plan = regional.compilation(ctx, graph)
        except Unclear as error:
            yield self.decline(error.span or graph.span, error.reason)
            return
        yield self._found(ctx, plan, _measured(ctx, graph, chains, min(spent, ctx.step_us)))

    def _found(self, ctx: Context, plan: regional.Compilation, found: _Found) -> Finding | Decline:
        saved = found.left_us - found.floor_us
        left = f"{found.left_us / ctx.step_us:.1%} of the step"
        if found.left_us / ctx.step_us < min(LEFT * regional.left(ctx), regional.gate(ctx, self)):
            return self.decline(plan.span, f"other rules replace most of its chains, and leave {left}")
        if saved <= 0.0:
            return self.decline(plan.span, f"its chains, {left}, take no longer than their inputs and results need")
        short = regional.too_short(planned_steps(ctx), saved, plan.compile_us())
        if short is not None:
            return self.decline(plan.span, short)
        what = f"the blocks of `{plan.origin.text}`" if plan.repeated is not None else f"`{plan.origin.text}`"
        try:
            values, bindings = regional.noted(plan, ("", ""))
        except codemod.CannotEdit as error:
            return self.decline(plan.span, str(error))
        cited = math.floor(10 * found.spent_us) / 10  # down: it may be all of the step
        return self.finding(
            plan.span,
            f"chains of memory-bound operations run one kernel each in {what}",
            cited_us=cited,
            high_us=min(round(saved, 1), cited),
            evidence=(
                Evidence(what="time of the chains per step", value=cited, unit="us"),
                Evidence(what="share of the step", value=round(found.spent_us / ctx.step_us, 4), unit="share"),
                Evidence(what="of that, not replaced by other rules", value=round(found.left_us, 1), unit="us"),
                *floor_evidence("floor: inputs and results once", found.floor_us),
                Evidence(what="operations in chains per step", value=found.operations, unit="operations"),
                Evidence(what="bytes moved over the least", value=round(found.ratio, 1), unit="times"),
                *((Evidence(what="not block by block", value=plan.reason, unit=""),) if plan.reason else ()),
            ),
            values=values,
            bindings=bindings,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        regions = finding.values["first"] == "blocks"
        title = self.title if regions else "compile the model"
        return self.edit(finding, title, [(finding.bindings["place"], finding.values["text"])])

    def edit(self, finding: Finding, title: str, edits: Iterable[tuple[Span, str]]) -> Rewrite:
        """A rewrite; of those of both rules that compile a model at most one is kept for each model."""
        return replace(
            super().edit(finding, title, edits), group=f"compile {finding.values['model']} at {finding.span}"
        )

    def forms(self, finding: Finding, source: Source) -> Iterator[Rewrite]:
        if finding.values["whole"] != finding.values["text"]:
            edits = [(finding.bindings["place"], finding.values["whole"])]
            yield replace(self.edit(finding, "compile the model", edits), form="whole")


# --------------------------------------------------------------------------------------------------------------- chains


def _chains(graph: Graph, blocks: regional.Repeated | None) -> list[_Chain]:
    """The chains of a graph: inside its repeated blocks, or anywhere where it has none."""
    linked = [n for n in graph.nodes if n.op.startswith("call_") and operation(n) in MOVING | VIEWS]
    inside = {n.index: _member(blocks, n) for n in linked if blocks is None or blocks.holds(n.module)}
    parent = {index: index for index in inside}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index in inside:
        for read in graph.nodes[index].inputs():
            if read in inside and inside[read] == inside[index]:
                parent[root(index)] = root(read)
    groups: dict[int, list[int]] = {}
    for index in inside:
        groups.setdefault(root(index), []).append(index)
    found = [chain for members in groups.values() if (chain := _chain(graph, members)) is not None]
    return sorted(found, key=lambda chain: min(chain.nodes))


def _member(blocks: regional.Repeated | None, node: Node) -> str | None:
    if blocks is None:
        return None
    return next((m for m in blocks.members if node.module == m or (node.module or "").startswith(f"{m}.")), None)


def _chain(graph: Graph, members: Sequence[int]) -> _Chain | None:
    """Some connected operations, where enough of them have one size and move more than they need to."""
    moving = [index for index in members if operation(graph.nodes[index]) in MOVING]
    sizes = [tensor_bytes(graph.nodes[index]) for index in moving]
    counts = [_elements(graph.nodes[index]) for index in moving]
    if not sizes or max(sizes) < SMALLEST or counts.count(max(counts)) < LEAST:
        return None
    chain = _Chain(frozenset(members), tuple(moving))
    return chain if _ratio(graph, [chain]) >= REPEATED else None


def _ratio(graph: Graph, chains: Sequence[_Chain]) -> float:
    moved = sum(boundary_bytes(graph, frozenset({index})) for chain in chains for index in chain.moving)
    least = sum(boundary_bytes(graph, chain.nodes) for chain in chains)
    return moved / least if least else 0.0


def _elements(node: Node) -> int:
    count = 1
    for size in node.shape or ():
        count *= size
    return count


def _measured(ctx: Context, graph: Graph, chains: Sequence[_Chain], spent: float) -> _Found:
    """What the chains cost, and what is left of that where other rules put one operation in place of their regions."""
    nodes = frozenset().union(*(chain.nodes for chain in chains))
    taken: set[int] = set()
    gone: set[int] = set()
    fused = 0.0
    for region in _taken(graph):
        mine = (region.inner & nodes) - taken
        if not mine:
            continue
        taken |= mine
        if isinstance(region, Attention):  # whose operations lie between its products, and move nothing any more
            gone |= mine
            continue
        least = ALONE * ctx.floor_us(0.0, PASSES * boundary_bytes(graph, region.inner), None)
        fused += min(least, ctx.cost_us(graph.index, mine) or 0.0)
    left = (ctx.cost_us(graph.index, nodes - taken) or 0.0) + fused
    floor = ctx.floor_us(0.0, PASSES * sum(boundary_bytes(graph, chain.nodes - gone) for chain in chains), None)
    count = sum(len(chain.moving) for chain in chains)
    return _Found(spent, min(left, spent), min(floor, spent), count, _ratio(graph, chains))


def _taken(graph: Graph) -> Iterator[Region]:
    """The regions in the user's own code that other rules put one operation in the place of."""
    for found in itertools.chain.from_iterable(search(graph) for search in FUSED):
        if not isinstance(found, NearMiss) and package_file(graph.nodes[found.root]) is None:
            yield found
