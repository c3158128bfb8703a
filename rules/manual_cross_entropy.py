"""Cross entropy is written out on log-probabilities, so the scores of all classes pass through more operations.

## What it does
Replaces log-softmax with gather, indexing, a one-hot product or `nll_loss` of `log(softmax)`, and logsumexp minus the
score of the target, by `torch.nn.functional.cross_entropy`. The pattern is recognised by evaluating the captured
operations on sample rows, so that the reduction, the ignored class and label smoothing are read off what is computed.

## Why it costs
The table of scores has one number for every class and row; in a language model it is the largest tensor of the step. A
one-hot target has the same size, its product with the log-probabilities is stored and read again, and so is the
logarithm of a softmax, forward and backward. `F.cross_entropy` runs log-softmax and picks the class of each row.

## When not to
When the log-probabilities are used for anything else (entropy, a divergence, accuracy); when they are weighted by
another tensor, as a policy gradient does; when softmax is applied twice, which is a mistake that a rewrite would hide;
when a constant stands inside the logarithm; when the mean counts rows otherwise than torch does. Each is declined with
its reason. `F.nll_loss(F.log_softmax(x, 1), target)` is left alone: `F.cross_entropy` runs the same two operations.

## Fix safety
NUMERICS: the same loss in another rounding order; the logarithm of a softmax that underflows becomes finite. Where the
code computes in float32 whatever the scores are (`F.one_hot(...).float()`), the scores are cast before the loss.

## References
- torch.nn.functional.cross_entropy, PyTorch documentation
- Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2016, section 7: label smoothing
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.model import Decline, Evidence, Finding, Graph, Safety
from advisor.patterns import NearMiss, Region
from advisor.patterns.cross_entropy import bare_loss, cross_entropy_regions
from advisor.rule import Context, Example, GraphRule, Site, step, tensor_bytes

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("target", torch.arange(12) % 7, persistent=False)
        self.smoothing = 0.1

    def forward(self, x):
        target = self.target
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(12, 7, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class ManualCrossEntropy(GraphRule):
    """log-softmax and the score of the target -> F.cross_entropy."""

    id = "manual-cross-entropy"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = ("aten::cross_entropy_loss", "aten::nll_loss_forward", "aten::nll_loss2d_forward")
    title = "use F.cross_entropy"
    examples = (
        Example(
            before=_model(
                "log_probs = F.log_softmax(x, dim=-1)",
                "nll = -log_probs.gather(1, target.unsqueeze(1)).squeeze(1)",
                "return nll.mean()  # over the batch",
            ),
            after=_model("return F.cross_entropy(x, target)  # over the batch"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model(
                "lp = torch.log_softmax(x, 1)",
                "nll = -lp.gather(1, target.unsqueeze(1)).squeeze(1)",
                "loss = (1.0 - self.smoothing) * nll + self.smoothing * (-lp.mean(dim=1))",
                "return loss.sum()",
            ),
            after=_model('return F.cross_entropy(x, target, label_smoothing=self.smoothing, reduction="sum")'),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model(
                "lp = F.log_softmax(x, 1)",
                "entropy = -(lp.exp() * lp).sum(1).mean()",
                "return -lp.gather(1, target.unsqueeze(1)).mean() - 0.01 * entropy",
            ),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the log-probabilities `lp` are used elsewhere",
        ),
        Example(
            before=_model("return F.cross_entropy(F.softmax(x, 1), target)"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="softmax is applied twice, here and inside the loss: a mistake that a rewrite would hide",
        ),
        Example(
            before=_model("return F.nll_loss(F.log_softmax(x, dim=1), target)"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="F.cross_entropy runs the same operations, log_softmax and nll_loss: there is nothing to gain",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return cross_entropy_regions(graph)

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        pairs = site.pairs(ctx)
        if all(bare_loss(g, r) for r, g in pairs):
            return self.decline(
                site.span,
                "F.cross_entropy runs the same operations, log_softmax and nll_loss: there is nothing to gain",
            )
        templates = {_template(g, r) for r, g in pairs}
        constants = {tuple((name, value[0]) for name, value in sorted(r.constants.items())) for r in site.regions}
        if len(templates) != 1 or len(constants) != 1:
            return self.decline(site.span, "calls of the same code differ in reduction, layout or ignored class")
        template = templates.pop()
        if template is None:
            return self.decline(site.span, "its result has a shape that F.cross_entropy does not give")
        given = _options(site, site.regions[0])
        if isinstance(given, str):
            return self.decline(site.span, given)
        options = "".join(f", {name}={{{name}}}" for name in given)
        return self._found(ctx, site, template.replace("<options>", options), given)

    def _found(self, ctx: Context, site: Site, template: str, given: dict[str, tuple[str, float]]) -> Finding:
        pairs = site.pairs(ctx)
        kept = sum(ctx.cost_us(r.graph, [int(r.facts["anchor"])]) or 0.0 for r, _ in pairs)
        traffic = sum(tensor_bytes(g.nodes[r.inputs["x"]]) for r, g in pairs)
        floor = ctx.floor_us(0.0, traffic, None)
        return self.finding(
            site.span,
            "cross entropy is written out: the scores of all classes are stored and read by every operation",
            cited_us=site.cost_us,
            high_us=site.cost_us - kept - floor,
            evidence=(
                Evidence(what="time of the written-out loss per step", value=round(site.cost_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(site.cost_us / ctx.step_us, 4), unit="share"),
                Evidence(what="of it the softmax, which stays", value=round(kept, 1), unit="us"),
                Evidence(what="floor of the rest: one table of gradients written", value=round(floor, 1), unit="us"),
                Evidence(what="calls of this code per step", value=len(site.regions), unit="calls"),
            ),
            consumed=site.consumed,
            replacement=site.replacement(template, given),
        )


def _template(graph: Graph, region: Region) -> str | None:
    """The call with <options> where its own options go; None where the result would have another shape."""
    x, target = (graph.nodes[region.inputs[name]].shape or () for name in ("x", "target"))
    axis, soft, reduction = int(region.facts["axis"]), region.facts["soft"] == "True", region.facts["reduction"]
    natural = (*x[:axis], *x[axis + 1 :])
    wide = ".float()" if region.facts["widened"] == "True" else ""
    scores, classes, result = f"{{x}}{wide}", "{target}", natural
    if axis != 1:  # (..., classes): one row for everything before
        scores, result = f"{{x}}{wide}.flatten(0, -2)", (_size(natural),)
        classes = "{target}.flatten(0, -2)" if soft else "{target}" if len(target) == 1 else "{target}.flatten()"
    elif not soft and target != natural:
        if len(x) != 2:
            return None
        classes = "{target}.flatten()"
    option = "" if reduction == "mean" else f', reduction="{reduction}"'
    call = f"F.cross_entropy({scores}, {classes}<options>{option})"
    wanted = graph.nodes[region.root].shape
    if reduction != "none" or wanted == result:
        return call
    if wanted == target and not soft:
        return f"{call}.view_as({{target}})"
    return f"{call}.unsqueeze(1)" if wanted == (*result[:1], 1, *result[1:]) else None


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _options(site: Site, region: Region) -> dict[str, tuple[str, float]] | str:
    """Text and value of ignore_index and label_smoothing, or why the source does not show them."""
    unsure = _count_reason(site, region)
    if unsure is not None:
        return unsure
    found: dict[str, tuple[str, float]] = {}
    if "ignore_index" in region.constants:
        value, node, place = region.constants["ignore_index"]
        bound = site.alignment.constants.get((node, place))
        text = site.alignment.source.segment(bound.expression) if bound is not None else repr(int(value))
        found["ignore_index"] = (text, int(value))
    if "label_smoothing" in region.constants:
        smoothing = _smoothing(site, region)
        if isinstance(smoothing, str):
            return smoothing
        found["label_smoothing"] = smoothing
    return found


def _smoothing(site: Site, region: Region) -> tuple[str, float] | str:
    """The smoothing as the source writes it; every other fraction of the region must be made of the same text."""
    source, constants = site.alignment.source, site.alignment.constants
    classes, smoothing = int(region.facts["classes"]), float(region.facts["smoothing"])
    value, node, place = region.constants["label_smoothing"]
    bound = constants.get((node, place))
    if bound is None:
        return "the source does not show the label smoothing"
    expression: ast.expr = bound.expression
    if value != smoothing:  # spread over the classes: smoothing / classes
        if not isinstance(expression, ast.BinOp) or not isinstance(expression.op, ast.Div):
            return "the label smoothing is computed in a way that is not followed"
        counts = isinstance(expression.right, ast.Constant) and expression.right.value == classes
        literal = isinstance(expression.left, ast.Constant) and expression.left.value == smoothing
        if not counts and not literal:
            return "the smoothing is divided by a number that is not known to be the number of classes"
        expression = expression.left
    text = source.segment(expression)
    for (index, _), other in constants.items():
        if index not in region.inner or not _is_fraction(other.expression):
            continue
        literals = isinstance(other.expression, ast.Constant) and isinstance(expression, ast.Constant)
        if not literals and text not in source.segment(other.expression):
            return f"`{source.segment(other.expression)}` is not shown to follow the label smoothing"
    return text, smoothing


def _is_fraction(expression: ast.expr) -> bool:
    """Whether an expression may be a share: a floating-point literal, or anything that is not a literal."""
    if isinstance(expression, ast.UnaryOp):
        return _is_fraction(expression.operand)
    return not isinstance(expression, ast.Constant) or isinstance(expression.value, float)


def _count_reason(site: Site, region: Region) -> str | None:
    """Why a divisor that equals the number of rows may be another number elsewhere, or None."""
    for item in filter(None, region.facts["counted"].split(";")):
        node, place = (int(part) for part in item.split())
        bound = site.alignment.constants.get((node, place))
        text = "" if bound is None else "".join(site.alignment.source.segment(bound.expression).split())
        rows = text.startswith("len(") or text.endswith((".size(0)", ".shape[0]"))
        if not text.endswith(".numel()") and not (rows and region.facts["flat"] == "True"):
            return f"it divides by `{text or 'a number'}`, which may equal the number of rows in this run only"
    return None
