"""A size of a matrix product is no multiple of 16 bytes, so tensor cores read its rows slowly.

## What it does
Pads the weight of a linear layer inside the forward pass and slices the result back:
`F.linear(x, F.pad(w, (0, 0, 0, -w.shape[0] % 64)))[..., : w.shape[0]]`. Parameters and checkpoints stay as they are.
Where the odd size is a vocabulary, it also tells where it is set: padding it there costs nothing per step.

## Why it costs
Tensor cores run best on operands whose rows begin at multiples of 16 bytes: 8 elements in half precision, 4 in TF32.
With other sizes the library falls back to kernels that load less at a time. The output layer of `samples/nano_gpt` on
an H200 takes 34.5 ms with 50257 columns and 4.3 ms with 50304.

## When not to
In float32 without TF32, which uses no tensor cores, unless a finding of no-mixed-precision or tf32-off takes most of
the step: then its time is scaled by what that leaves; on a CPU, where the size decides nothing; where padding copies
more than the product gains. Told and not applied where the layer may have hooks, which `F.linear` does not run, may be
another module or have no bias in another instance, or computes its weight when it is called; where the files name
quantization or LoRA or give an object another class; where the weight is a parameter or variable of the function, which
another call may give a vector; and where the result is viewed in a way that a slice does not allow, also in code that
did not run. Code of other files may still view it so, which then raises. Padding the vocabulary itself changes the
parameters and the random stream of the initialisation, and padded logits must not enter the loss.

## Fix safety
NUMERICS for the form inside the forward pass: zeros are added to sums, and sliced away. The sizes of parameters are
only ever suggested.

## References
- NVIDIA, Matrix Multiplication Background User's Guide, section on tensor core requirements
- karpathy/nanoGPT: vocabulary padded from 50257 to 50304
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Place, Replacement, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.padding import exchanged, unfit_layer, unfit_operands, unseen_view
from advisor.patterns.products import ELEMENTS, embedding_with, is_vocabulary, odd_products, viewed_elsewhere
from advisor.patterns.sites import argument, construction_of, module_value
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source

LOWERING = ("no-mixed-precision", "tf32-off")  # rules whose rewrite puts float32 products on tensor cores
MULTIPLE = 64  # elements: 128 bytes in half precision, what the kernels for aligned operands like best
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
LINEAR = "torch.nn.functional.linear"
MOST_PADDING = 1.25  # of a vocabulary: what is padded is computed
VOCABULARY = (
    "padding the vocabulary changes parameters, checkpoints and the random stream of the initialisation: slice the "
    "logits back to the true size before the loss, keep a tied weight one tensor, and load old checkpoints by rows"
)
MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 27, bias=False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16{enabled}):
            {call}
        return y


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""


def _model(call: str, enabled: str = "") -> str:
    return MODEL.replace("{enabled}", enabled).replace("{call}", call)


class MisalignedDims(GraphRule):
    """self.head(x) with odd sizes -> F.linear with a padded weight, sliced back."""

    id = "misaligned-dims"
    safety = Safety.NUMERICS
    worth = 0.05
    title = "pad the weight inside the forward pass"
    tolerance = 64.0
    examples = (
        Example(
            before=_model("y = self.head(x)  # logits"),
            after=_model(
                "y = F.linear(\n"
                "                x, F.pad(self.head.weight, (0, 0, 0, -self.head.weight.shape[0] % 64))\n"
                "            )[..., : self.head.weight.shape[0]]  # logits"
            ),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("y = self.head(x)", enabled=", enabled=False"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="float32 without TF32 runs on no tensor cores: the size does not matter",
        ),
        Example(
            before=_model("y = self.head(x)"),
            after=None,
            profile=step(10_000, nodes=0.4, device="cpu"),
            because="cannot tell: the sizes matter on tensor cores only, and this profile is of a CPU",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return odd_products(graph)

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """The products by the place that computes them, then where an odd vocabulary is set."""
        places: dict[Span, list[tuple[Graph, Region]]] = {}
        for graph in ctx.graphs:
            for found in self.search(graph):
                span = graph.nodes[found.root].span if isinstance(found, Region) else None
                if span is not None and isinstance(found, Region):
                    places.setdefault(span, []).append((graph, found))
        for span, pairs in sorted(places.items(), key=lambda item: (item[0].path, item[0].line, item[0].column)):
            yield self._judge(ctx, span, pairs)
        yield from self._vocabulary(ctx)

    # ---------------------------------------------------------------------------------------------------- the rewrite

    def _judge(self, ctx: Context, span: Span, pairs: list[tuple[Graph, Region]]) -> Finding | Decline:
        region = pairs[0][1]
        if ctx.profile.hardware.kind != "cuda":
            reason = "cannot tell: the sizes matter on tensor cores only, and this profile is of a CPU"
            return self.decline(span, reason, needs=("kineto",))
        if _on_no_tensor_cores(ctx, region):
            return self.decline(span, "float32 without TF32 runs on no tensor cores: the size does not matter")
        known = [cost for graph, r in pairs if (cost := ctx.cost_us(graph.index, r.inner)) is not None]
        if not known:
            return self.decline(span, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost = sum(known) * _lowered(ctx, region)
        if cost / ctx.step_us < ctx.gate(self):
            return self.decline(span, f"it takes {cost / ctx.step_us:.1%} of the step")
        floor = sum(_floor_us(ctx, graph, r) for graph, r in pairs)
        call = _call(ctx, span, pairs)
        unfit = _unfit(ctx, call, span, pairs)
        if unfit is None:
            floor += sum(_copied_us(ctx, graph, r) for graph, r in pairs)
            if floor >= cost:
                return self.decline(span, "padding the weight in every pass takes as long as aligned rows save")
        return self.finding(
            span if call is None else ctx.read(span.path).span(call),
            f"a matrix product has {_sizes(region)}: no multiple of {ELEMENTS[region.facts['dtype']]}",
            cited_us=cost,
            high_us=cost - floor,
            evidence=_evidence(ctx, cost, region, len(pairs), floor),
            values={} if unfit is None else {"not applied": unfit},
            replacement=_replacement(ctx.read(span.path), call, pairs) if unfit is None and call is not None else None,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if finding.replacement is None:
            return self.decline(finding.span, finding.values["not applied"])
        return super().rewrite(finding, source)

    # ------------------------------------------------------------------------------------------------- the vocabulary

    def _vocabulary(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One suggestion for every place that sets an odd vocabulary."""
        places: dict[Span, list[tuple[Graph, Region]]] = {}
        for graph in ctx.graphs:
            for found in self.search(graph):
                if isinstance(found, Region) and _is_head(ctx, found):
                    span = _where_set(ctx, graph, found)
                    if span is not None:
                        places.setdefault(span, []).append((graph, found))
        for span, found_there in sorted(places.items(), key=lambda item: (item[0].path, item[0].line)):
            region = found_there[0][1]
            cost = sum(ctx.cost_us(r.graph, r.inner) or 0.0 for _, r in found_there) * _lowered(ctx, region)
            on_gpu = ctx.profile.hardware.kind == "cuda"
            if cost <= 0 or cost / ctx.step_us < ctx.gate(self) or (on_gpu and _on_no_tensor_cores(ctx, region)):
                continue
            floor = sum(_floor_us(ctx, graph, r) for graph, r in found_there)
            size = int(region.facts["columns"])
            padded = -(-size // MULTIPLE) * MULTIPLE
            if padded > MOST_PADDING * size:
                yield self.decline(span, f"padding {size} classes to {padded} adds more work than aligned rows save")
                continue
            on_cpu = "" if on_gpu else "; what it buys has to be measured on a GPU"
            yield self.finding(
                span,
                f"the vocabulary of {size} is no multiple of 8: {padded} gives the output layer aligned rows{on_cpu}",
                cited_us=cost,
                high_us=cost - floor,
                evidence=_evidence(ctx, cost, region, len(found_there), floor),
                values={"not applied": VOCABULARY},
            )


def _on_no_tensor_cores(ctx: Context, region: Region) -> bool:
    """Whether a product is computed in float32 without TF32, and stays so."""
    single = str(ctx.profile.facts.get("matmul_precision", "highest")) == "highest"
    return region.facts["dtype"] == "float32" and single and ctx.largest not in LOWERING


def _lowered(ctx: Context, region: Region) -> float:
    """The factor from the time of a product as found to that on tensor cores, where another finding puts it there."""
    return ctx.left if region.facts["dtype"] == "float32" and ctx.largest in LOWERING else 1.0


def _sizes(region: Region) -> str:
    names = {"columns": "columns", "inner": "inner elements"}
    return " and ".join(f"{int(region.facts[name]):,} {names[name]}" for name in region.facts["odd"].split())


def _floor_us(ctx: Context, graph: Graph, region: Region) -> float:
    """Three products of the forward's size (forward, gradient of input and of weight); each tensor moved in each."""
    node = graph.nodes[region.root]
    tensors = [node, *(graph.nodes[index] for index in region.inputs.values())]
    dtype = "bfloat16" if _lowered(ctx, region) < 1.0 else node.dtype
    return ctx.floor_us(3 * float(region.facts["flops"]), 3 * sum(tensor_bytes(t) for t in tensors), dtype)


def _copied_us(ctx: Context, graph: Graph, region: Region) -> float:
    """What padding inside the forward pass moves: each operand read and written, and its gradient again."""
    odd = region.facts["odd"].split()
    names = ["weight", "x"] if "inner" in odd else ["weight"]
    return ctx.floor_us(0.0, 4 * sum(tensor_bytes(graph.nodes[region.inputs[name]]) for name in names), None)


def _evidence(ctx: Context, cost_us: float, region: Region, count: int, floor_us: float) -> tuple[Evidence, ...]:
    row = int(region.facts["columns"]) * BYTES[region.facts["dtype"]]
    return (
        Evidence(what="time of this product per step", value=round(cost_us, 1), unit="us"),
        Evidence(what="share of the step", value=round(cost_us / ctx.step_us, 4), unit="share"),
        *floor_evidence("floor of the same product", floor_us),
        Evidence(what="a row of the result ends past a multiple of 128 bytes by", value=row % 128, unit="bytes"),
        Evidence(what="calls of this code per step", value=count, unit="calls"),
    )


def _call(ctx: Context, span: Span, pairs: list[tuple[Graph, Region]]) -> ast.Call | None:
    """The call of the layer that starts where a product was computed; None where the source does not show one."""
    if pairs[0][1].facts["kind"] != "linear" or "weight" not in pairs[0][1].inputs:
        return None
    source = ctx.read(span.path)
    column = span.column if span.end_column is not None else None
    calls = [e for e in source.expressions_at(span.line, column) if isinstance(e, ast.Call)]
    found = [call for call in calls if _operands(source, call, pairs) is not None]
    return found[0] if len(found) == 1 else None


def _unfit(ctx: Context, call: ast.Call | None, span: Span, pairs: list[tuple[Graph, Region]]) -> str | None:
    """Why a product is only told of, or None."""
    region = pairs[0][1]
    if region.facts["kind"] != "linear" or "weight" not in region.inputs:
        return f"its operands are no layer's weight: choose sizes that are multiples of {MULTIPLE} where they are set"
    if len({(r.facts["odd"], r.facts["dtype"], tuple(sorted(r.inputs))) for _, r in pairs}) != 1:
        return "calls of the same code differ in their odd sizes or dtype"
    mine = {(graph.index, r.root) for graph, r in pairs}
    target, here = pairs[0][0].nodes[region.root].target, (span.path, span.line, span.column)
    for graph in ctx.graphs:
        for node in graph.nodes:
            at = node.span
            same = at is not None and node.target == target and (at.path, at.line, at.column) == here
            if same and (graph.index, node.index) not in mine:
                return "the same code also computes something else"
    viewed = None
    if "columns" in region.facts["odd"].split():
        seen = (
            r.facts["viewed"] or viewed_elsewhere(ctx.graphs, g.nodes[r.root], int(r.facts["columns"]))
            for g, r in pairs
        )
        viewed = next((name for name in seen if name), None)
    if viewed is not None:
        return f"`{viewed}` views the result in a way that a slice of a padded one does not allow"
    if call is None:
        return "the source does not show the layer and its input"
    return _unfit_elsewhere(ctx, ctx.read(span.path), call, pairs)


def _unfit_elsewhere(ctx: Context, source: Source, call: ast.Call, pairs: list[tuple[Graph, Region]]) -> str | None:
    """Why the padded product may be another one than the call in another instance or call, or None."""
    graph, region = pairs[0]
    columns, bias = "columns" in region.facts["odd"].split(), "bias" in region.inputs
    if columns:
        place = unseen_view(ctx.sources, source, call, ctx.profile.graphs)
        if place is not None:
            return f"{place} views a tensor and did not run: of a slice of a padded result it may fail"
    other = exchanged(ctx.sources)
    if other is not None:
        return other
    if source.qualified(call.func) == LINEAR:
        weight = graph.nodes[region.inputs["weight"]]
        return unfit_operands(ctx.sources, source, call, weight, bias, columns)
    return unfit_layer(ctx.sources, source, call, bias)


def _operands(source: Source, call: ast.Call, pairs: list[tuple[Graph, Region]]) -> dict[str, str] | None:
    """How the source spells input, weight and bias of `self.head(x)` or `F.linear(x, weight, bias)`."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return None
    names = sorted(pairs[0][1].inputs)
    if source.qualified(call.func) == LINEAR:
        given = {
            name: argument(call, place, word)
            for place, (name, word) in enumerate((("x", "input"), ("weight", "weight"), ("bias", "bias")))
        }
        texts = {name: source.segment(value) for name, value in given.items() if value is not None}
        return {name: texts[name] for name in names} if set(names) <= set(texts) else None
    nodes = [graph.nodes[region.root] for graph, region in pairs]
    attribute = call.func.attr if isinstance(call.func, ast.Attribute) else None
    layers = all(
        n.module_class == "torch.nn.modules.linear.Linear" and (n.module or "").rpartition(".")[2] == attribute
        for n in nodes
    )
    if not layers or len(call.args) != 1 or call.keywords:
        return None
    layer = source.segment(call.func)
    return {name: source.segment(call.args[0]) if name == "x" else f"{layer}.{name}" for name in names}


def _replacement(source: Source, call: ast.Call, pairs: list[tuple[Graph, Region]]) -> Replacement | None:
    """The padded product; a size is padded by an expression, so that the same code serves every size."""
    texts = _operands(source, call, pairs)
    if texts is None:
        return None
    region = pairs[0][1]
    odd = region.facts["odd"].split()
    inner = f"-{{weight}}.shape[1] % {MULTIPLE}" if "inner" in odd else "0"
    outer = f", 0, -{{weight}}.shape[0] % {MULTIPLE}" if "columns" in odd else ""
    x = f"F.pad({{x}}, (0, {inner}))" if "inner" in odd else "{x}"
    bias = "" if "bias" not in region.inputs else ", {bias}"
    if bias and "columns" in odd:
        bias = f", F.pad({{bias}}, (0, -{{weight}}.shape[0] % {MULTIPLE}))"
    cut = "[..., : {weight}.shape[0]]" if "columns" in odd else ""
    return Replacement(
        template=f"F.linear({x}, F.pad({{weight}}, (0, {inner}{outer})){bias}){cut}",
        texts=texts,
        places=tuple(Place(graph=r.graph, root=r.root, inputs=dict(r.inputs)) for _, r in pairs),
    )


def _is_head(ctx: Context, region: Region) -> bool:
    return "columns" in region.facts["odd"].split() and is_vocabulary(ctx.graphs, int(region.facts["columns"]))


def _where_set(ctx: Context, graph: Graph, region: Region) -> Span | None:
    """The constant that sets the vocabulary, else the construction of the layer or of its embedding."""
    head, size = graph.nodes[region.root], int(region.facts["columns"])
    embedding = embedding_with(graph, size)
    for node, position, keyword in ((head, 1, "out_features"), (embedding, 0, "num_embeddings")):
        if node is None or node.span is None:
            continue
        source = ctx.read(node.span.path)
        made = construction_of(source, graph, node)
        if made is None:
            continue
        given = argument(made.call, position, keyword)
        constant = module_value(source, given.id) if isinstance(given, ast.Name) else None
        return source.span(constant if constant is not None else made.call)
    return None
