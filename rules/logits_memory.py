"""The scores of the whole vocabulary are held for every token at once, several times over.

## What it does
Tells how many bytes the logits of the output layer take between the layer and the loss, copies in another dtype counted
as the graph makes them, and what share of the peak memory that is.

## Why it costs
A table of tokens by vocabulary is the largest tensor of a language model: 8 x 2048 tokens and 50257 classes are 1.6 GB
in bf16 and 3.3 GB in float32, and the loss keeps its log-softmax for the backward pass, which makes a gradient of the
same size. The loss is a sum over tokens: computed in chunks of rows, only one chunk of the table has to exist.

## When not to
When the logits are used for anything else (returned, accuracy), and when memory does not limit the batch: a chunked or
fused loss computes the same products again in the backward pass and can take twice as long as an operation. It pays
through the larger batch or the longer sequence that then fits. A fused linear cross entropy takes the place of the
output layer and of the loss: it cannot be combined with another rewrite of the same loss.

## Fix safety
SUGGEST: never applied. The chunked sum is the same loss in another rounding order.

## References
- pytorch/torchtitan#996: 7 GiB less at the same tokens per second
- linkedin/Liger-Kernel, LigerFusedLinearCrossEntropyLoss
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.logits import elements, logits_regions
from advisor.rule import Context, Example, step, tensor_bytes
from advisor.source import Source

LARGE = 16_384  # classes
SHARE = 0.15  # of the peak memory
ADVICE = (
    "sum the loss over chunks of rows, each with its own output layer under checkpointing, or use Liger's fused linear "
    "cross entropy where it can be imported, in place of layer and loss; as an operation it can be slower, it pays "
    "through the batch that then fits: measure both together"
)
MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, {classes}, bias=False)
        self.register_buffer("target", torch.arange(6), persistent=False)

    def forward(self, x):
        logits = self.head(x)
        {loss}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(6, 4, requires_grad=True)]
"""


def _model(loss: str, classes: int = LARGE) -> str:
    return MODEL.replace("{loss}", loss).replace("{classes}", str(classes))


class LogitsMemory(GraphRule):
    """Output layer and cross entropy over a large vocabulary: what a chunked loss would save in memory."""

    id = "logits-memory"
    safety = Safety.SUGGEST
    worth = 0.02
    examples = (
        Example(
            before=_model("return F.cross_entropy(logits.float(), self.target)"),
            after=_model("return F.cross_entropy(logits.float(), self.target)"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("return F.cross_entropy(logits, self.target) + logits.mean()"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the logits are used by `mean` as well, so they have to be there as a whole",
        ),
        Example(
            before=_model("return F.cross_entropy(logits, self.target)", classes=10),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="10 classes are few, and the peak memory was not measured",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return logits_regions(graph)

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One answer for each place of a loss; a loss inside a library is shown where the library is called."""
        places: dict[Span, list[tuple[Graph, Region]]] = {}
        missed: dict[tuple[str, int, str], NearMiss] = {}
        graphs = {graph.index: graph for graph in ctx.graphs}
        for graph in ctx.graphs:
            for found in self.search(graph):
                node = graph.nodes[found.root if isinstance(found, Region) else found.node]
                span = node.span or graph.span
                if isinstance(found, NearMiss):
                    missed.setdefault((span.path if span else "", span.line if span else 0, found.reason), found)
                elif span is not None:
                    places.setdefault(span, []).append((graph, found))
        for span, pairs in sorted(places.items(), key=lambda item: (item[0].path, item[0].line, item[0].column)):
            yield self._judge(ctx, span, pairs)
        for (_, _, reason), near in sorted(missed.items(), key=lambda item: item[0]):
            yield self.decline(graphs[near.graph].nodes[near.node].span, reason)

    def _judge(self, ctx: Context, span: Span, pairs: list[tuple[Graph, Region]]) -> Finding | Decline:
        graph, region = max(pairs, key=lambda pair: _held(*pair)[0])
        logits, copies, kept = _held(graph, region)
        classes, peak = int(region.facts["classes"]), ctx.profile.peak_bytes
        share = (logits + copies + kept) / peak if peak else None
        if classes < LARGE and (share is None or share < SHARE):
            memory = "the peak memory was not measured" if share is None else f"their logits take {share:.1%} of it"
            return self.decline(span, f"{classes:,} classes are few, and {memory}")
        known = [cost for g, r in pairs if (cost := ctx.cost_us(g.index, r.inner)) is not None]
        if not known:
            return self.decline(span, "cannot tell: no measured time could be linked to it", needs=("links",))
        cost = sum(known)
        if cost / ctx.step_us < ctx.gate(self):
            return self.decline(span, f"it takes {cost / ctx.step_us:.1%} of the step")
        layer = sum(ctx.cost_us(g.index, [int(r.facts["logits"])]) or 0.0 for g, r in pairs)
        evidence = [
            Evidence(what="logits of the output layer", value=logits, unit="bytes"),
            Evidence(what="copies of them before the loss", value=copies, unit="bytes"),
            Evidence(what="log-softmax kept for the backward pass", value=kept, unit="bytes"),
            Evidence(what="time of output layer and loss per step", value=round(cost, 1), unit="us"),
            Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
        ]
        if share is not None:
            evidence.insert(3, Evidence(what="share of the peak memory", value=round(share, 4), unit="share"))
        inside = graph.nodes[region.root]
        return self.finding(
            span,
            f"the scores of {classes:,} classes are held for every token at once: {ADVICE}",
            cited_us=cost,
            high_us=cost - layer,
            evidence=tuple(evidence),
            values={"not applied": ADVICE},
            library=_library(inside.frames) if inside.span is None else None,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        return self.decline(finding.span, finding.values["not applied"])


def _held(graph: Graph, region: Region) -> tuple[int, int, int]:
    """Bytes of the logits, of their copies, and of the log-softmax that F.cross_entropy keeps in the loss's dtype."""
    logits = graph.nodes[int(region.facts["logits"])]
    copies = [graph.nodes[int(index)] for index in region.facts["copies"].split()]
    loss = graph.nodes[region.root]
    given = loss.args[0] if loss.args else loss.kwargs["input"]
    size = 2 if loss.dtype in ("float16", "bfloat16") else 8 if loss.dtype == "float64" else 4
    kept = 0 if loss.target.endswith("nll_loss") else elements(graph.nodes[given.index]) * size
    return tensor_bytes(logits), sum(tensor_bytes(node) for node in copies), kept


def _library(frames: tuple[Span, ...]) -> str:
    if not frames:
        return "code without a recorded position"
    path = frames[-1].path.replace("\\", "/")
    return f"{path.rsplit('-packages/', 1)[-1]}:{frames[-1].line}"
