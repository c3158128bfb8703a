"""manual-cross-entropy and logits-memory on the ways people write a loss, and on what only looks like one."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.patch import build
from advisor.patterns.losses import cross_entropy
from advisor.rule import step

torch = pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("labels", torch.arange(12).reshape{shape} % 7, persistent=False)
        self.register_buffer("soft", torch.rand(12, 7), persistent=False)
        self.register_buffer("advantage", torch.rand(12), persistent=False)
        self.eps = 0.1
        self.classes = 7
        self.log_softmax = nn.LogSoftmax(dim=-1)

    def forward(self, x):
        t = self.labels
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(*{scores}, requires_grad=True)]
"""
FLAT = ("(12)", "(12, 7)")
BATCH = ("(2, 6)", "(2, 6, 7)")
SECOND = ("(2, 6)", "(2, 7, 6)")  # the class axis comes second

PICK = "lp = F.log_softmax(x, -1)\nnll = -lp.gather(-1, t.unsqueeze(-1)).squeeze(-1)\n"
ANY = "x.flatten(0, -2), t.flatten()"  # where the source counts axes from the last alone, for any number of axes
WIDE = "x.to(torch.promote_types(x.dtype, torch.float32))"  # float32 at least, and float64 stays what it is
SOFT = "self.soft.to(torch.promote_types(self.soft.dtype, x.dtype)).expand_as(x)"
HOT = "x.flatten(0, -2), t.expand(x.shape[:-1]).flatten()"  # a one-hot table is broadcast, its classes are not
WRITTEN = {
    "gather, mean": (FLAT, PICK + "return nll.mean()", f"F.cross_entropy({ANY})"),
    "gather, sum": (FLAT, PICK + "return nll.sum()", f'F.cross_entropy({ANY}, reduction="sum")'),
    "gather, a loss for each row": (
        FLAT,
        PICK + "return nll",
        f'F.cross_entropy({ANY}, reduction="none").view_as(t)',
    ),
    "gather, a column": (
        FLAT,
        "y = -F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1))\nreturn y",
        f'F.cross_entropy({ANY}, reduction="none").view_as(t).unsqueeze(-1)',
    ),
    "gather, mean, the rank shown": (FLAT, "N, C = x.shape\n" + PICK + "return nll.mean()", "F.cross_entropy(x, t)"),
    "gather, mean, the rank shown by a view": (
        FLAT,
        "x = x.view(-1, 7)\n" + PICK + "return nll.sum() / len(t)",
        "F.cross_entropy(x, t)",
    ),
    "divided by a size that was unpacked": (
        FLAT,
        "N, C = x.shape\n" + PICK + "return nll.sum() / N",
        "F.cross_entropy(x, t)",
    ),
    "gather, column": (
        FLAT,
        "return -torch.log_softmax(x, 1).gather(1, t.view(-1, 1)).mean()",
        "F.cross_entropy(x, t.flatten())",
    ),
    "indexed by the rows": (
        FLAT,
        "t = t.clamp(min=0)\nlp = x.log_softmax(dim=-1)\nreturn -lp[torch.arange(t.size(0)), t].mean()",
        "F.cross_entropy(x, t)",
    ),
    "indexed by a range": (
        FLAT,
        "t = t % 7\nreturn -F.log_softmax(x, 1)[range(len(t)), t].mean()",
        "F.cross_entropy(x, t)",
    ),
    "one-hot": (
        FLAT,
        "hot = F.one_hot(t, 7).float()\nreturn -(hot * F.log_softmax(x, dim=1)).sum(dim=1).mean()",
        f"F.cross_entropy({WIDE}, t)",
    ),
    "one-hot over the number of rows": (
        FLAT,
        "hot = F.one_hot(t, num_classes=7)\nreturn -torch.sum(hot * F.log_softmax(x, dim=1)) / t.size(0)",
        "F.cross_entropy(x, t)",
    ),
    "scattered one-hot": (
        FLAT,
        "hot = torch.zeros_like(x).scatter(1, t.unsqueeze(1), 1.0)\nreturn -(hot * F.log_softmax(x, 1)).sum(-1).mean()",
        "F.cross_entropy(x, t)",
    ),
    "logarithm of softmax": (
        FLAT,
        "p = torch.softmax(x, dim=1)\nreturn F.nll_loss(torch.log(p), t)",
        "F.cross_entropy(x, t)",
    ),
    "logsumexp minus the score": (
        FLAT,
        "return (torch.logsumexp(x, dim=1) - x.gather(1, t[:, None]).squeeze(1)).mean()",
        "F.cross_entropy(x, t)",
    ),
    "log_softmax before F.cross_entropy": (
        FLAT,
        "return F.cross_entropy(F.log_softmax(x, 1), t)",
        "F.cross_entropy(x, t)",
    ),
    "masked mean": (
        FLAT,
        PICK + "keep = t != PAD\nreturn (nll * keep).sum() / keep.sum()",
        f"F.cross_entropy({ANY}, ignore_index=PAD)",
    ),
    "masked mean, default index": (
        FLAT,
        "keep = t.ne(-100)\nlp = F.log_softmax(x, -1)\n"
        "nll = -lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)\nreturn (nll * keep).sum() / keep.sum()",
        f"F.cross_entropy({ANY})",
    ),
    "masked sum by fill": (
        FLAT,
        PICK + "return nll.masked_fill(t == 3, 0.0).sum()",
        f'F.cross_entropy({ANY}, ignore_index=3, reduction="sum")',
    ),
    "smoothing": (
        FLAT,
        PICK + "return ((1 - self.eps) * nll + self.eps * -lp.mean(-1)).mean()",
        f"F.cross_entropy({ANY}, label_smoothing=self.eps)",
    ),
    "smoothing, classes as a column": (
        FLAT,
        "lp = F.log_softmax(x, -1)\nnll = -lp.gather(-1, t[:, None]).squeeze(1)\n"
        "return ((1.0 - self.eps) * nll + self.eps * -lp.mean(-1)).mean()",
        "F.cross_entropy(x, t, label_smoothing=self.eps)",
    ),
    "smoothed one-hot": (
        FLAT,
        "hot = F.one_hot(t, 7) * 0.9 + 0.1 / 7\nreturn -(hot * F.log_softmax(x, 1)).sum(1).mean()",
        f"F.cross_entropy({WIDE}, t, label_smoothing=0.1)",
    ),
    "smoothing over the size of the scores": (
        FLAT,
        PICK + "return ((1 - self.eps) * nll - self.eps / x.size(-1) * lp.sum(-1)).mean()",
        f"F.cross_entropy({ANY}, label_smoothing=self.eps)",
    ),
    "a sum over a batch of one stays": (
        ("(1, 12)", "(1, 12, 7)"),
        "B, T, C = x.shape\n" + PICK + "return nll.sum(0).mean()",
        f'F.cross_entropy({ANY}, reduction="none").view_as(t)',
    ),
    "one-hot over an attribute": (
        FLAT,
        "return -(F.one_hot(t, self.classes) * F.log_softmax(x, -1)).sum(-1).mean()",
        f"F.cross_entropy({HOT})",
    ),
    "soft targets": (
        FLAT,
        "return -(self.soft * F.log_softmax(x, dim=-1)).sum(dim=-1).mean()",
        f"F.cross_entropy(x.flatten(0, -2), {SOFT}.flatten(0, -2))",
    ),
    "soft targets, classes second": (
        FLAT,
        "y = self.soft\nreturn torch.sum(-y * F.log_softmax(x, dim=1), dim=1).mean()",
        f"F.cross_entropy(x, {SOFT.replace('self.soft', 'y')})",
    ),
    "soft targets that are floating-point": (
        FLAT,
        "y = self.soft.sigmoid()\nreturn -(y * F.log_softmax(x, dim=1)).sum(dim=1).mean()",
        "F.cross_entropy(x, y.expand_as(x))",
    ),
    "batch and time, mean": (
        BATCH,
        PICK + "return nll.mean()",
        "F.cross_entropy(x.flatten(0, -2), t.flatten())",
    ),
    "batch and time, for each token": (
        BATCH,
        PICK + "return nll",
        'F.cross_entropy(x.flatten(0, -2), t.flatten(), reduction="none").view_as(t)',
    ),
    "batch and time, flattened before": (
        BATCH,
        "lp = F.log_softmax(x.view(-1, 7), dim=-1)\nreturn -lp.gather(1, t.view(-1, 1)).squeeze(1).mean()",
        "F.cross_entropy(x.view(-1, 7), t.flatten())",
    ),
    "batch and time, mask": (
        BATCH,
        PICK + "keep = (t != PAD).float()\nreturn (nll * keep).sum() / keep.sum()",
        f"F.cross_entropy({WIDE}.flatten(0, -2), t.flatten(), ignore_index=PAD)",
    ),
    "classes second": (
        SECOND,
        "lp = F.log_softmax(x, dim=1)\nreturn -lp.gather(1, t.unsqueeze(1)).squeeze(1).mean()",
        "F.cross_entropy(x, t)",
    ),
    "in float32": (
        FLAT,
        "lp = F.log_softmax(x.float(), -1)\nreturn -(F.one_hot(t, 7).float() * lp).sum(-1).mean()",
        "F.cross_entropy(x.float().flatten(0, -2), t.expand(x.shape[:-1]).flatten())",
    ),
    "a factor behind it": (FLAT, PICK + "return nll.mean() * 0.5", f"F.cross_entropy({ANY}) * 0.5"),
    "a temperature before it": (
        FLAT,
        "lp = F.log_softmax(x / 2.0, 1)\nreturn -lp.gather(1, t.unsqueeze(1)).mean()",
        "F.cross_entropy(x / 2.0, t)",
    ),
}
UNSHOWN = "those of a loss only for scores of rank 3, and the source does not show the rank"
TRAPS = {
    "an axis from the front that is the last here": (
        BATCH,
        "lp = F.log_softmax(x, 2)\nreturn -lp.gather(2, t.unsqueeze(2)).mean()",
        UNSHOWN,
    ),
    "an axis from the last that is the second here": (
        SECOND,
        "lp = F.log_softmax(x, -2)\nreturn -lp.gather(-2, t.unsqueeze(-2)).mean()",
        UNSHOWN,
    ),
    "an index that may be negative": (
        FLAT,
        "lp = F.log_softmax(x, -1)\nreturn -lp[torch.arange(len(t)), t].mean()",
        "an index takes class -1 for the last one, F.cross_entropy refuses it, and `t` may hold it",
    ),
    "an index that is clamped in some runs": (
        FLAT,
        "if self.training:\n    t = t.clamp(min=0)\n"
        "lp = F.log_softmax(x, -1)\nreturn -lp[torch.arange(len(t)), t].mean()",
        "`t` may hold it",
    ),
    "a first size that is the number of rows here": (
        FLAT,
        "lp = F.log_softmax(x, 1)\nreturn -lp.gather(1, t.unsqueeze(1)).sum() / t.size(0)",
        "divides by `t.size\\(0\\)`, which may equal the number of rows in this run only",
    ),
    "the size of another tensor": (
        FLAT,
        "N, C = x.shape\n" + PICK + "return nll.sum() / len(self.advantage)",
        "divides by `len\\(self.advantage\\)`",
    ),
    "scores without a name that are widened": (
        FLAT,
        "return -(F.one_hot(t, 7).float() * F.log_softmax(x * 2, dim=1)).sum(dim=1).mean()",
        "the scores have no name that their dtype could be read from",
    ),
    "probabilities for scores without a name": (
        FLAT,
        "return -(self.soft * F.log_softmax(x * 2, dim=1)).sum(dim=1).mean()",
        "takes integers for classes, and `self.soft` may hold integers",
    ),
    "probabilities that may be broadcast to scores without a name": (
        FLAT,
        "return -(self.soft.float() * F.log_softmax(x * 2, dim=-1)).sum(dim=-1).mean()",
        "no name that their shape could be read from",
    ),
    "a numbered name of the capture": (
        FLAT,
        "lp = x.tanh()\nlp = F.log_softmax(lp, -1)\nnll = -lp.gather(-1, t.unsqueeze(-1)).squeeze(-1)\n"
        "return nll.mean() + 0.1 * (lp.exp() * lp).sum(-1).mean()",
        "the log-probabilities are used elsewhere",
    ),
    "smoothing over a literal number of classes": (
        FLAT,
        PICK + "return ((1 - self.eps) * nll - self.eps / 7 * lp.sum(-1)).mean()",
        "not known to be the number of classes",
    ),
    "smoothing over a number that is the classes here": (
        FLAT,
        "k = self.soft.shape[1]\nhot = F.one_hot(t, 7) * 0.9 + 0.1 / k\n"
        "return -(hot * F.log_softmax(x, 1)).sum(1).mean()",
        "not known to be the number of classes",
    ),
    "entropy of the same probabilities": (
        FLAT,
        PICK + "return nll.mean() + 0.1 * (lp.exp() * lp).sum(-1).mean()",
        "log-probabilities `lp` are used elsewhere",
    ),
    "accuracy of the same probabilities": (
        FLAT,
        PICK + "return nll.mean() + 0 * (lp.argmax(-1) == t).float().mean()",
        "log-probabilities `lp` are used elsewhere",
    ),
    "policy gradient": (
        FLAT,
        "lp = F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1)).squeeze(-1)\nreturn -(lp * self.advantage).mean()",
        "weighted by `.*advantage.*`: a policy gradient",
    ),
    "policy gradient, negated first": (FLAT, PICK + "return (nll * self.advantage).mean()", "policy gradient"),
    "softmax twice": (FLAT, "return F.cross_entropy(torch.softmax(x, 1), t)", "softmax is applied twice"),
    "softmax twice, by hand": (
        FLAT,
        "lp = F.log_softmax(F.softmax(x, 1), 1)\nreturn -lp.gather(1, t.unsqueeze(1)).mean()",
        "softmax is applied twice",
    ),
    "probabilities for log-probabilities": (FLAT, "return F.nll_loss(F.softmax(x, 1), t)", "given probabilities"),
    "a constant in the logarithm": (
        FLAT,
        "return F.nll_loss(torch.log(F.softmax(x, 1) + 1e-8), t)",
        "a constant inside the logarithm",
    ),
    "mean over the classes too": (
        FLAT,
        "return -(F.one_hot(t, 7) * F.log_softmax(x, 1)).mean()",
        "divides by the number of classes as well",
    ),
    "a literal batch size": (
        FLAT,
        "return -(F.one_hot(t, 7) * F.log_softmax(x, 1)).sum() / 12",
        "divides by `12`, which may equal the number of rows in this run only",
    ),
    "smoothing spread over the other classes": (
        FLAT,
        "hot = torch.full_like(x, 0.1 / 6).scatter(1, t.unsqueeze(1), 0.9)\n"
        "return -(hot * F.log_softmax(x, 1)).sum(1).mean()",
        "divided by a number that is not known to be the number of classes",
    ),
    "smoothing whose rest is another number": (
        FLAT,
        PICK + "return (0.9 * nll + self.eps * -lp.mean(-1)).mean()",
        "`0.9` is not shown to follow the label smoothing",
    ),
    "the same two operations": (FLAT, "return F.nll_loss(self.log_softmax(x), t)", "nothing to gain"),
    "sum over each sequence": (
        BATCH,
        "lp = F.log_softmax(x, -1)\nreturn -lp.gather(-1, t.unsqueeze(-1)).sum(1).mean()",
        "no loss that F.cross_entropy computes",
    ),
    "another dtype": (
        FLAT,
        "lp = F.log_softmax(x, -1).double()\nreturn -lp.gather(-1, t.unsqueeze(-1)).mean()",
        "its dtypes differ",
    ),
}
QUIET = {
    "F.cross_entropy": (FLAT, "return F.cross_entropy(x, t)"),
    "attention": (BATCH, "return torch.softmax(x, -1) @ x.transpose(-2, -1)"),
    "log-probabilities returned": (FLAT, "return F.log_softmax(x, -1)"),
    "divergence": (FLAT, "return (self.soft * (self.soft.log() - F.log_softmax(x, 1))).sum(1).mean()"),
}


def results(rule: str, layout: tuple[str, str], body: str, folder: Path) -> tuple[list[Finding | Decline], str, str]:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    text = text.replace("{shape}", layout[0]).replace("{scores}", layout[1])
    ctx, source = testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), folder)
    found = list(RULES[rule].match(ctx))
    after = text
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULES[rule].rewrite(found[0], source)
        assert isinstance(rewrite, Rewrite), rewrite
        if "range(" not in body:  # capture does not record what a range holds, so the proof declines
            testing.check_regions(rewrite, ctx.graphs, rule)
        after = build([rewrite], lambda _: source).sources["example.py"]
    return found, text, after


@pytest.mark.parametrize("name", WRITTEN)
def test_rewritten_and_the_same_function(name: str, tmp_path: Path) -> None:
    layout, body, wanted = WRITTEN[name]
    found, before, after = results("manual-cross-entropy", layout, body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    forward = after.split("def forward")[1].split("def get_init")[0]
    assert f" {wanted}\n" in one_line(forward)
    assert "softmax" not in forward
    testing.check_same_function(before, after, RULES["manual-cross-entropy"].tolerance, name)
    assert not [r for r in results_of(after, tmp_path) if isinstance(r, Finding)]


def one_line(text: str) -> str:
    """Calls that the layout broke into lines, joined again."""
    return re.sub(r"\(\n +", "(", re.sub(r",\n +", ", ", re.sub(r",?\n +\)", ")", text)))


def results_of(text: str, folder: Path) -> list[Finding | Decline]:
    ctx, _ = testing.context_of(RULES["manual-cross-entropy"], text, step(10_000, nodes=0.5), folder)
    return list(RULES["manual-cross-entropy"].match(ctx))


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_declined_with_its_reason(name: str, tmp_path: Path) -> None:
    layout, body, reason = TRAPS[name]
    found, _, _ = results("manual-cross-entropy", layout, body, tmp_path)
    assert found
    assert all(isinstance(f, Decline) for f in found), found
    assert re.search(reason, " ".join(f.reason for f in found if isinstance(f, Decline))), found


@pytest.mark.parametrize("name", QUIET)
def test_something_else_is_no_finding(name: str, tmp_path: Path) -> None:
    layout, body = QUIET[name]
    assert results("manual-cross-entropy", layout, body, tmp_path)[0] == []


def test_a_mean_that_is_zero_without_targets_keeps_its_mean(tmp_path: Path) -> None:
    """F.cross_entropy gives no number where all targets are ignored: only the loss of each row is replaced."""
    body = PICK + "keep = t != PAD\nreturn (nll * keep).sum() / keep.sum().clamp(min=1)"
    found, before, after = results("manual-cross-entropy", FLAT, body, tmp_path)
    assert isinstance(found[0], Finding)
    assert f'nll = F.cross_entropy({ANY}, reduction="none").view_as(t)' in after
    assert ".clamp(min=1)" in after
    testing.check_same_function(before, after, RULES["manual-cross-entropy"].tolerance, "clamped mean")


ANY_RANK = [
    "gather, mean",
    "gather, a loss for each row",
    "gather, a column",
    "masked mean",
    "smoothing",
    "soft targets",
]


@pytest.mark.parametrize("name", ANY_RANK)
def test_scores_with_more_axes_give_the_same_loss(name: str, tmp_path: Path) -> None:
    """Code that counts axes from the last alone may be called with scores of any number of axes."""
    layout, body, _ = WRITTEN[name]
    _, before, after = results("manual-cross-entropy", layout, body, tmp_path)
    found = []
    for number, text in enumerate((before, after)):
        (tmp_path / f"module{number}.py").write_text(text, encoding="utf-8")
        model = testing.load_module(tmp_path / f"module{number}.py").Model()
        torch.manual_seed(2)
        model.labels = torch.randint(0, 7, (3, 2, 4))
        model.soft = torch.rand(3, 2, 4, 7)
        found.append(model(torch.randn(3, 2, 4, 7)))
    torch.testing.assert_close(*found)


def test_scores_in_double_stay_double(tmp_path: Path) -> None:
    """A float32 target widens half precision; it does not narrow float64."""
    layout, body, _ = WRITTEN["one-hot"]
    _, before, after = results("manual-cross-entropy", layout, body, tmp_path)
    found = []
    for number, text in enumerate((before, after)):
        (tmp_path / f"module{number}.py").write_text(text, encoding="utf-8")
        torch.manual_seed(2)
        module = testing.load_module(tmp_path / f"module{number}.py")
        found.append(module.Model()(torch.randn(12, 7, dtype=torch.float64)))
    assert [value.dtype for value in found] == [torch.float64] * 2
    torch.testing.assert_close(*found, rtol=1e-12, atol=0.0)


def both(name: str, folder: Path) -> list[torch.nn.Module]:
    """The model of a way to write a loss, before and after the rewrite."""
    layout, body, _ = WRITTEN[name]
    _, *texts = results("manual-cross-entropy", layout, body, folder)
    models = []
    for number, text in enumerate(texts):
        (folder / f"module{number}.py").write_text(text, encoding="utf-8")
        models.append(testing.load_module(folder / f"module{number}.py").Model())
    return models


@pytest.mark.parametrize("name", ["soft targets", "soft targets, classes second"])
def test_probabilities_of_any_shape_and_dtype_give_the_same_loss(name: str, tmp_path: Path) -> None:
    """A prior for all rows, a one-hot table of integers, integers that F.cross_entropy would take for classes."""
    models = both(name, tmp_path)
    torch.manual_seed(2)
    x, hot = torch.randn(7, 7), torch.nn.functional.one_hot(torch.arange(7), 7)
    tables = [hot[3] * 1.0, hot[:1] * 0.5, hot, hot.double(), hot.bfloat16(), torch.arange(7)]
    tables += [hot.bool()] if name == "soft targets" else []  # torch negates no booleans
    for scores in (x, x.double(), x.bfloat16()):
        for table in tables:
            found = []
            for model in models:
                model.soft = table
                found.append(model(scores))
            torch.testing.assert_close(*found)


def test_classes_of_another_shape_are_flattened_as_before(tmp_path: Path) -> None:
    found = []
    for model in both("gather, column", tmp_path):
        torch.manual_seed(2)
        model.labels = torch.randint(0, 7, (3, 4))
        found.append(model(torch.randn(12, 7)))
    torch.testing.assert_close(*found)


def test_a_one_hot_table_that_is_broadcast_is_no_other_number(tmp_path: Path) -> None:
    """A column of classes makes a table of rows by rows: the rewrite refuses it, it does not pick one class a row."""
    before, after = both("one-hot over an attribute", tmp_path)
    for model in (before, after):
        model.labels = torch.arange(5)[:, None]
    assert before(torch.randn(5, 7)).shape == ()
    with pytest.raises(RuntimeError):
        after(torch.randn(5, 7))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_the_reference_is_torchs_cross_entropy(reduction: str, smoothing: float, ignored: int) -> None:
    """What regions are compared with is torch's own function, ignored rows and a batch of nothing else included."""
    generator = np.random.default_rng(3)
    scores = generator.standard_normal((9, 7)) * 4
    for target in (generator.integers(0, 7, 9), np.array([3, 3, 1, 2, 3, 0, 6, 5, 4]), np.full(9, ignored)):
        ours = cross_entropy(scores, target.astype(np.float64), reduction, ignored, smoothing)
        theirs = torch.nn.functional.cross_entropy(
            torch.tensor(scores),
            torch.tensor(target),
            reduction=reduction,
            ignore_index=ignored,
            label_smoothing=smoothing,
        )
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12)
    soft = generator.random((9, 7))
    theirs = torch.nn.functional.cross_entropy(
        torch.tensor(scores), torch.tensor(soft), reduction=reduction, label_smoothing=smoothing
    )
    np.testing.assert_allclose(cross_entropy(scores, soft, reduction, -100, smoothing), theirs.numpy(), rtol=1e-12)


# ------------------------------------------------------------------------------------------------------- logits-memory

LAYER = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, {classes}, bias=False)
        self.register_buffer("labels", torch.arange(12).reshape(2, 6) % 7, persistent=False)

    def forward(self, x):
        t = self.labels
        logits = self.head(x)
{body}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 6, 8, requires_grad=True)]
"""


def memory(body: str, classes: int, peak_bytes: int | None, folder: Path) -> list[Finding | Decline]:
    text = LAYER.replace("{classes}", str(classes)).replace("{body}", textwrap.indent(body, " " * 8))
    rule = RULES["logits-memory"]
    ctx, _ = testing.context_of(rule, text, step(10_000, nodes=0.5), folder)
    return list(rule.match(replace(ctx, profile=replace(ctx.profile, peak_bytes=peak_bytes))))


def facts(finding: Finding) -> dict[str, float | str]:
    return {evidence.what: evidence.value for evidence in finding.evidence}


def test_logits_and_their_copies_are_counted(tmp_path: Path) -> None:
    """The shifted loss of a language model: a float32 table, a contiguous copy of its slice, the log-softmax."""
    body = (
        "shifted = logits.float()[:, :-1].contiguous()\n"
        "return F.cross_entropy(shifted.view(-1, shifted.size(-1)), t[:, 1:].reshape(-1))"
    )
    (found,) = memory(body, 20_000, 10_000_000, tmp_path)
    assert isinstance(found, Finding)
    table, shifted = 12 * 20_000 * 4, 10 * 20_000 * 4
    told = facts(found)
    assert told["logits of the output layer"] == table
    assert told["copies of them before the loss"] == shifted  # .float() of float32 copies nothing
    assert told["log-softmax kept for the backward pass"] == shifted
    assert told["share of the peak memory"] == pytest.approx((table + 2 * shifted) / 10_000_000, abs=1e-4)
    assert found.span.line == 16
    assert isinstance(RULES["logits-memory"].rewrite(found, None), Decline)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "classes", "peak_bytes", "reason"),
    [
        ("return F.cross_entropy(logits.flatten(0, 1), t.flatten()), logits", 20_000, None, "are returned as well"),
        ("loss = F.cross_entropy(logits.flatten(0, 1), t.flatten())\nreturn loss + 0 * logits.argmax(-1).sum()",
         20_000, None, "are used by `argmax` as well"),
        ("return F.cross_entropy(logits.flatten(0, 1), t.flatten())", 100, 10_000_000, "100 classes are few"),
    ],
)  # fmt: skip
def test_logits_that_stay_or_are_small_are_declined(
    body: str, classes: int, peak_bytes: int | None, reason: str, tmp_path: Path
) -> None:
    (found,) = memory(body, classes, peak_bytes, tmp_path)
    assert isinstance(found, Decline)
    assert reason in found.reason


def test_a_small_vocabulary_that_fills_the_memory_is_told(tmp_path: Path) -> None:
    (found,) = memory("return F.cross_entropy(logits.flatten(0, 1), t.flatten())", 1_000, 200_000, tmp_path)
    assert isinstance(found, Finding)


def test_a_loss_on_something_else_than_a_layer_is_no_finding(tmp_path: Path) -> None:
    assert memory("return F.cross_entropy(logits.flatten(0, 1).tanh(), t.flatten())", 20_000, None, tmp_path) == []
