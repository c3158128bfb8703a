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
when a constant stands inside the logarithm; when the mean counts rows otherwise than torch does; when the classes are
an axis counted from the front, or the divisor is the number of rows, only for as many axes as the scores had in this
run. Each is declined with its reason.

Targets that are no class: `log_probs[rows, target]` takes -1 for the last class, where `F.cross_entropy` raises, so
that indexing is declined unless the source shows that no target is negative (`target.clamp(min=0)`, `% n`, `argmax`).
`gather`, `scatter` and `F.one_hot` raise for every negative target; `F.cross_entropy` raises as well, but for -100, its
`ignore_index`: a target of -100 that stopped the program before is left out of the loss after.

Targets of another shape: `gather` and `scatter` take fewer targets than there are rows of scores and leave the other
rows out; `F.cross_entropy` raises. A one-hot table that is broadcast to the scores, and scores that are broadcast to a
table of probabilities, may raise as well, and so do scores without any axis of rows, `(classes,)`, where they are
flattened. Scores without a name are declined where their shape or dtype must be said again for the targets.

`F.nll_loss(F.log_softmax(x, 1), target)` is left alone: `F.cross_entropy` runs the same two operations.

## Fix safety
NUMERICS: the same loss in another rounding order; the logarithm of a softmax that underflows becomes finite. Where the
code computes in float32 even for scores of half precision (`F.one_hot(...).float()`), the scores are cast before the
loss, to the wider of their dtype and float32 unless the source casts them to float32 itself. Where all axes are counted
from the last, the loss may be called with any number of them, two at least: scores and targets are flattened.
Probabilities are expanded to the shape of the scores and, where the source does not show that they are floating-point
numbers, cast to the dtype that their product with the scores has: a table of zeros and ones may hold integers, which
`F.cross_entropy` takes for classes.

## References
- torch.nn.functional.cross_entropy, PyTorch documentation
- Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2016, section 7: label smoothing
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.graphrule import GraphRule, Site, is_fixed
from advisor.model import Decline, Evidence, Finding, Graph, Safety
from advisor.patterns import NearMiss, Region
from advisor.patterns.cross_entropy import bare_loss, cross_entropy_regions
from advisor.patterns.written_losses import WrittenLoss
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source

# what a cast of the scores must be: to the wider of their dtype and float32, or to float32 as the source says itself
WIDER = {"": "", "float": ".float()", "promoted": ".to(torch.promote_types({x}.dtype, torch.float32))"}
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
        written = WrittenLoss(site.alignment, graph, site.regions[0])
        another = written.another_loss()
        if another is not None:
            return self.decline(site.span, another)
        templates = {_template(g, r, written) for r, g in pairs}
        constants = {tuple((name, value[0]) for name, value in sorted(r.constants.items())) for r in site.regions}
        if len(templates) != 1 or len(constants) != 1:
            return self.decline(site.span, "calls of the same code differ in reduction, layout or ignored class")
        template = templates.pop()
        if template is None:
            return self.decline(site.span, "its result has a shape that F.cross_entropy does not give")
        given = _options(site, written)
        if isinstance(given, str):
            return self.decline(site.span, given)
        options = "".join(f", {name}={{{name}}}" for name in given)
        return self._found(ctx, site, template.replace("<options>", options), given, written)

    def _found(
        self, ctx: Context, site: Site, template: str, given: dict[str, tuple[str, float]], written: WrittenLoss
    ) -> Finding:
        pairs = site.pairs(ctx)
        followed = written.followed | set(written.fractions() if "label_smoothing" in given else ())
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
                *floor_evidence("floor of the rest: one table of gradients written", floor),
                Evidence(what="calls of this code per step", value=len(site.regions), unit="calls"),
            ),
            consumed=site.consumed,
            replacement=site.replacement(template, given, followed=followed, axes_followed=True),
        )


def _template(graph: Graph, region: Region, written: WrittenLoss) -> str | None:
    """The call with <options> where its own options go; None where the result would have another shape."""
    x, target = (graph.nodes[region.inputs[name]].shape or () for name in ("x", "target"))
    axis, soft, reduction = int(region.facts["axis"]), region.facts["soft"] == "True", region.facts["reduction"]
    natural = (*x[:axis], *x[axis + 1 :])
    wide, front, fitted = WIDER[region.facts["widened"]], written.from_front, written.fitted_target
    scores, classes, result = f"{{x}}{wide}", fitted, natural
    if not front:  # (..., classes): one row for everything before
        scores, result = f"{{x}}{wide}.flatten(0, -2)", (_size(natural),)
        classes = f"{fitted}.flatten(0, -2)" if soft else f"{fitted}.flatten()"
    elif not soft and (target != natural or region.facts["reshaped"] == "True"):
        if len(x) != 2:
            return None
        classes = "{target}.flatten()"
    option = "" if reduction == "mean" else f', reduction="{reduction}"'
    call = f"F.cross_entropy({scores}, {classes}<options>{option})"
    wanted = graph.nodes[region.root].shape
    if reduction != "none" or (front and wanted == result):
        return call
    if front or soft or target != natural:
        return f"{call}.unsqueeze(1)" if front and wanted == (*result[:1], 1, *result[1:]) else None
    shaped = f"{call}.view_as({{target}})"
    return shaped if wanted == natural else f"{shaped}.unsqueeze(-1)" if wanted == (*natural, 1) else None


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _options(site: Site, written: WrittenLoss) -> dict[str, tuple[str, float]] | str:
    """Text and value of ignore_index and label_smoothing, or why the source does not show them."""
    region = site.regions[0]
    unsure = _count_reason(site, written)
    if unsure is not None:
        return unsure
    found: dict[str, tuple[str, float]] = {}
    if "ignore_index" in region.constants:
        value, node, place = region.constants["ignore_index"]
        bound = site.alignment.constants.get((node, place))
        text = site.alignment.source.segment(bound.expression) if bound is not None else repr(int(value))
        found["ignore_index"] = (text, int(value))
    if "label_smoothing" in region.constants:
        smoothing = _smoothing(site, written)
        if isinstance(smoothing, str):
            return smoothing
        found["label_smoothing"] = smoothing
    return found


def _smoothing(site: Site, written: WrittenLoss) -> tuple[str, float] | str:
    """The smoothing as the source writes it; every other fraction of the region must be made of the same text."""
    region, source, constants = site.regions[0], site.alignment.source, site.alignment.constants
    smoothing = float(region.facts["smoothing"])
    value, node, place = region.constants["label_smoothing"]
    bound = constants.get((node, place))
    if bound is None:
        return "the source does not show the label smoothing"
    expression: ast.expr = bound.expression
    if value != smoothing:  # spread over the classes: smoothing / classes
        if not isinstance(expression, ast.BinOp) or not isinstance(expression.op, ast.Div):
            return "the label smoothing is computed in a way that is not followed"
        if not written.counts_classes(expression.right, bound.statement):
            return "the smoothing is divided by a number that is not known to be the number of classes"
        expression = expression.left
    text = source.segment(expression)
    for other in written.fractions().values():
        if not _follows(source, other.expression, expression):
            return f"`{source.segment(other.expression)}` is not shown to follow the label smoothing"
    return text, smoothing


def _follows(source: Source, fraction: ast.expr, smoothing: ast.expr) -> bool:
    """Whether a fraction of the region changes with the label smoothing and with nothing else that the source varies:
    both are fixed, or the one is computed from the other."""
    if isinstance(smoothing, ast.Constant):
        return is_fixed(source, fraction)
    text = ast.unparse(smoothing)
    read = any(ast.unparse(node) == text for node in ast.walk(fraction) if isinstance(node, ast.expr))
    return read and is_fixed(source, fraction, frozenset({text}))


def _count_reason(site: Site, written: WrittenLoss) -> str | None:
    """Why a divisor that equals the number of rows may be another number elsewhere, or None."""
    for key in written.counted:
        bound = site.alignment.constants.get(key)
        if bound is None or not written.counts_rows(bound.expression, bound.statement):
            text = "a number" if bound is None else f"`{site.alignment.source.segment(bound.expression)}`"
            return f"it divides by {text}, which may equal the number of rows in this run only"
    return None
