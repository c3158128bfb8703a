"""Much of what attention and matrix products compute is padding.

## What it does
Tells what share of the tokens of a recorded batch is padding, and where sequences are padded. Nothing is edited.

## Why it costs
Products and attention treat padding as they treat tokens. Batches of sequences of like lengths, or sequences packed one
behind the other with attention that keeps them apart (FlexAttention, varlen kernels), leave it out.

## When not to
Less than 20 % padding. The share is that of one recorded batch: of a mask of real tokens where the model is given one,
else of labels that end in a value that is ignored, else of token ids that end in one repeated id. Sequences of fixed
size by design, of images, say, and models whose attention skips padding have nothing to gain. Bucketing changes which
samples meet in a batch, packing the positions and the masks, and a mean over a batch weighs other tokens together.

## Fix safety
SUGGEST: never applied; the batches change.

## References
- Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021: up to half of the tokens of BERT's
  pretraining are padding, twice as fast without
- torch.nn.attention.flex_attention, PyTorch documentation: document masks
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from advisor.model import Decline, Evidence, Finding, Graph, Node, Rewrite, Safety, Span
from advisor.patterns.lowered import is_product
from advisor.rule import Context, Example, Rule, step
from advisor.semantics import operation
from advisor.source import Source

LEAST = 0.2  # of the tokens
MASK, IGNORED, REPEATED = "a mask of real tokens", "labels that are ignored", "a repeated last token"
CHANCE = 0.05  # below which rows may end in one token by chance
FLOATING = ("float", "bfloat")
ADVICE = "put sequences of like lengths into a batch, or pack them one behind the other"
LOOP = """\
import torch
for tokens, mask, labels in loader:
    loss = model(tokens, attention_mask=mask, labels=labels)
    loss.backward()
    optimizer.step()
"""
COLLATE = """\
from torch.nn.utils.rnn import pad_sequence


def collate(samples):
    return pad_sequence(samples, batch_first=True)


"""
CALLED = {"module": (1.0, 0.0)}


@dataclass(frozen=True)
class _Padded:
    """What shows the padding of a batch: what it is, its share of the tokens, and the batch's sizes."""

    shown_by: str
    share: float
    shapes: frozenset[tuple[int, ...]]


class PaddingWaste(Rule):
    """Padded tokens in attention and matrix products: told."""

    id = "padding-waste"
    safety = Safety.SUGGEST
    needs = ("steps", "graph", "links")
    worth = 0.05
    order = 15
    examples = (
        Example(before=LOOP, after=LOOP, profile=step(10_000, calls=CALLED, padded=0.4, nodes=0.8), saves=(0, 3_201)),
        Example(
            before=COLLATE + LOOP,
            after=COLLATE + LOOP,
            profile=step(10_000, calls=CALLED, padded=0.4, nodes=0.8, device="cpu"),
            saves=(0, 3_201),
        ),
        Example(
            before=LOOP,
            after=None,
            profile=step(10_000, calls=CALLED, padded=0.1, nodes=0.8),
            because="10% of the tokens of a batch are padding",
        ),
        Example(
            before=LOOP,
            after=None,
            profile=step(10_000, calls=CALLED, padded=0.4, nodes=0.1),
            because="padding takes 4.0% of the step",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        padded = _padded(ctx)
        if padded is None:
            return
        place = _place(ctx)
        if padded.share < LEAST:
            yield self.decline(place, f"{padded.share:.0%} of the tokens of a batch are padding")
            return
        spent = _spent(ctx, padded)
        if spent is None or place is None:
            yield self.decline(place, "cannot tell: no measured time could be linked to its tokens", needs=("links",))
            return
        lost = min(spent, ctx.step_us) * padded.share
        if lost / ctx.step_us < ctx.gate(self) or not lost:
            yield self.decline(place, f"padding takes {lost / ctx.step_us:.1%} of the step")
            return
        yield self.finding(
            place,
            f"{padded.share:.0%} of the tokens of a batch are padding: {ADVICE}",
            cited_us=lost,
            high_us=lost,
            basis="model",
            evidence=(
                Evidence(
                    what=f"padding among the tokens, by {padded.shown_by}", value=round(padded.share, 3), unit="share"
                ),
                Evidence(what="products and attention on these tokens per step", value=round(spent, 1), unit="us"),
            ),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        return self.decline(finding.span, f"told, not edited: {ADVICE}")


def _padded(ctx: Context) -> _Padded | None:
    """The padding that the recorded values show, by the surest of them."""
    found: dict[str, list[tuple[Node, float]]] = {}
    for graph in ctx.graphs:
        if any("varlen" in node.target or "flex_attention" in node.target for node in graph.nodes):
            return None
        for node in graph.nodes:
            kind, share = _shown(node)
            chance = kind == REPEATED and (share < CHANCE or _is_counted_with(graph, node))
            if kind is not None and node.shape is not None and not chance:
                found.setdefault(kind, []).append((node, share))
    for kind in (MASK, IGNORED, REPEATED):
        nodes = found.get(kind, [])
        sizes = [(node.shape[0] * node.shape[1], share) for node, share in nodes if node.shape is not None]
        total = sum(size for size, _ in sizes)
        if total:
            share = sum(size * share for size, share in sizes) / total
            return _Padded(kind, share, frozenset(node.shape for node, _ in nodes if node.shape is not None))
    return None


def _shown(node: Node) -> tuple[str | None, float]:
    facts, name = node.facts, f"{node.name} {node.target}".lower()
    if "zeros" in facts:
        zeros, padding = float(facts["zeros"]), "padding_mask" in name or "pad_mask" in name
        if "causal" in facts.values() or not (padding or "attention_mask" in name or "attn_mask" in name):
            return None, 0.0
        real = facts.get("real", "0" if padding else "1")
        return MASK, zeros if real == "1" else 1.0 - zeros
    if "padded" in facts:
        return IGNORED if int(facts["padding"]) < 0 else REPEATED, float(facts["padded"])
    return None, 0.0


def _is_counted_with(graph: Graph, node: Node) -> bool:
    """Whether numbers are computed of a value: it holds features, no ids of tokens."""
    users = [graph.nodes[user] for user in node.users]
    return any((user.dtype or "").startswith(FLOATING) and operation(user) != "embedding" for user in users)


def _spent(ctx: Context, padded: _Padded) -> float | None:
    """Time per step of the products and attention on the tokens of such batches."""
    nodes = [(g, n) for g in ctx.graphs for n in g.nodes if is_product(n) and _on_tokens(n, padded)]
    costs = [cost.total_us for g, n in nodes if (cost := ctx.costs.get((g.index, n.index))) is not None]
    return sum(costs) if costs else None


def _on_tokens(node: Node, padded: _Padded) -> bool:
    shape = node.shape or ()
    for batch, tokens in padded.shapes:
        if shape[:2] == (batch, tokens) or shape[:1] == (batch * tokens,):
            return True
        if len(shape) > 2 and shape[0] in (batch, tokens) and tokens in shape[1:]:
            return True
    return False


def _place(ctx: Context) -> Span | None:
    """Where the user's files pad sequences, else where the model is called."""
    for source in ctx.sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _pads(source, node):
                return source.span(node)
    called = ctx.calls("module")
    graphs: list[Graph] = [graph for graph in ctx.graphs if graph.span is not None]
    return called[0].frames[0] if called else (graphs[0].span if graphs else None)


def _pads(source: Source, call: ast.Call) -> bool:
    last = (source.qualified(call.func) or ast.unparse(call.func)).rpartition(".")[2]
    asked = any(k.arg == "padding" and isinstance(k.value, ast.Constant) and k.value.value for k in call.keywords)
    tokenises = "token" in ast.unparse(call.func).lower()
    return last in ("pad_sequence", "DataCollatorWithPadding") or (asked and tokenises)
