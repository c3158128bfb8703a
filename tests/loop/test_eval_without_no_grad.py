"""Evaluation without `torch.no_grad()`: what is found, what is left alone because it differentiates, what it gains."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from verdicts import improved

from advisor import patch as patching
from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite

pytest.importorskip("torch")
RULE = registry.load()[0]["eval-without-no-grad"].rule
MEASURED = RULE.examples[0].profile
TRAIN = """
for step, (x, y) in enumerate(train):
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        EVALUATE
"""
FUNCTION = """\
import torch


def evaluate(model, loader):
    model.eval()
    LINES
    model.train()
    return total / count

""" + TRAIN.replace("EVALUATE", "evaluate(model, test)")


def function(*lines: str) -> str:
    return FUNCTION.replace("LINES", "\n    ".join(("total, count = 0, 1", *lines)))


def inline(*lines: str) -> str:
    return "import torch\n" + TRAIN.replace("EVALUATE", "\n        ".join(("model.eval()", *lines, "model.train()")))


def said(text: str, folder: Path) -> list[Finding | Decline]:
    ctx, _ = testing.context_of(RULE, text, MEASURED, folder)
    return list(RULE.match(ctx))


def edited(text: str, folder: Path) -> str:
    ctx, source = testing.context_of(RULE, text, MEASURED, folder)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding), found
    edit = RULE.rewrite(found, source)
    assert isinstance(edit, Rewrite), edit
    result = patching.build([edit], lambda _: source).sources[testing.FILE]
    compile(result, "result", "exec")
    return result


GAINS = [
    function("for x, y in loader:", "    total += criterion(model(x), y).item()"),
    function("for x, y in loader:", "    _, pred = torch.max(model(x), 1)", "    total += (pred == y).sum()"),
    function("for x, y in loader:", "    pred = model(x).argmax(-1)", "    preds.append(pred.cpu())"),
    function("for x, y in loader:", "    out = model(x)", "    meter.update(out, y)", "total = meter.compute()"),
    function("it = iter(loader)", "while count < 9:", "    total += float(model(next(it)).mean())", "    count += 1"),
    function("losses = torch.zeros(9)", "for k in range(9):", "    losses[k] = criterion(model(xs[k]), y).item()"),
    inline("for x, y in test:", "    logits = model(x)", "    loss = criterion(logits, y)", "    print(loss.item())"),
    inline("out = model(held_x)", "print(criterion(out, held_y).item())"),
]


@pytest.mark.parametrize("text", GAINS)
def test_evaluations_that_people_write(text: str, tmp_path: Path) -> None:
    result = edited(text, tmp_path)
    header = next(i for i, line in enumerate(result.splitlines()) if "no_grad" in line)
    assert any(word in result.splitlines()[header + 1] for word in ("for ", "while ", "model("))


def test_a_helper_of_the_users_that_runs_the_model(tmp_path: Path) -> None:
    helper = "\ndef score(net, x, y):\n    return criterion(net(x), y).item()\n"
    meter = "\nclass Meter:\n    def update(self, value, n):\n        self.sum += value * n\n"
    body = ("for x, y in loader:", "    loss = score(model, x, y)", "    meter.update(loss, x.size(0))")
    result = edited(function(*body) + helper + meter, tmp_path)
    assert "    with torch.no_grad():\n        for x, y in loader:\n" in result


SILENT = [
    function("with torch.no_grad():", "    for x, y in loader:", "        total += model(x).sum().item()"),
    function("for x, y in loader:", "    with torch.inference_mode():", "        total += model(x).sum().item()"),
    function("for x, y in loader:", "    total += model(x).sum().item()").replace("def ev", "@torch.no_grad()\ndef ev"),
    function("torch.set_grad_enabled(False)", "for x, y in loader:", "    total += model(x).sum().item()"),
    function("for x, y in loader:", "    loss = criterion(model(x), y)", "    loss.backward()"),
    function("for x, y in loader:", "    x.requires_grad_()", "    total += model(x).sum().item()"),
    function("for x, y in loader:", "    total += criterion(model(x), y)"),
    function("for x, y in loader:", "    feats.append(model(x))"),
    function("for x, y in loader:", "    self.last = model(x)"),
    function("for k, (x, y) in enumerate(loader):", "    cache[k] = model(x)"),
    function("for k, (x, y) in enumerate(loader):", "    cache[k].copy_(model(x))"),
    function("for x, y in loader:", "    yield model(x).argmax(-1)"),
    function("for x, y in loader:", "    return model(x)"),
    function("for x, y in loader:", "    out = model(x)", "total = out"),
    function("total, _ = model(first), 0"),
    inline("target = model(x)") + "    kl(model(x), target).backward()\n",
    inline("x = attack(model, x)") + "\ndef attack(model, x):\n    return x + torch.autograd.grad(model(x), x)[0]\n",
    "import torch\nmodel.eval()\n" + TRAIN.replace("EVALUATE", "print(loss.item())"),  # BatchNorm kept as it is
]


METHODS = """\
import torch


class Trainer:
    def part(self, x, y):
        return criterion(self.model(x), y)

    def evaluate(self):
        self.model.eval()
        total = 0
        for x, y in loader:
            total = total + self.part(x, self.model(y).argmax())
        self.model.train()
        return total
"""
LEAKS = [  # what looks like a batch, a number or data, and carries a gradient to what is differentiated later
    inline("outs = model(held)", "penalty = 0", "for o in outs:", "    penalty = penalty + o.sum()")
    + "    use(penalty)\n",
    inline("penalty = 0", "for o in model(held):", "    penalty = penalty + o.sum()") + "    use(penalty)\n",
    inline("out = model(held)", "penalty = head.weight.norm()", "print(model(held).argmax())")
    + "    use(penalty)\n\nhead = torch.nn.Linear(3, 3)\n",
    inline("out = model(held)", "penalty = (w**2).sum()", "print(model(held).argmax())")
    + "    use(penalty)\n\nw = torch.randn(3, requires_grad=True)\n",
    function("for x, y in loader:", "    total = model(x)").replace(
        "    model.eval()", "    global total\n    model.eval()"
    ),
    function("for x, y in loader:", "    out = model(x)")
    .replace("    model.eval()", "    def later():\n        return out.sum()\n\n    model.eval()")
    .replace("return total / count", "return later()"),
    function("for x, y in loader:", "    assert model(x).grad_fn is not None"),
    METHODS,
]


@pytest.mark.parametrize("text", LEAKS)
def test_what_carries_a_gradient_out(text: str, tmp_path: Path) -> None:
    assert not [found for found in said(text, tmp_path) if isinstance(found, Finding)]


@pytest.mark.parametrize(
    "text",
    [
        "import torchattacks\n"
        + function(
            "for x, y in loader:", "    adv = atk(x, y)", "    count += (model(adv).argmax(1) == y).sum().item()"
        )
        + "\natk = torchattacks.PGD(model)\n",
        "from foolbox import pgd\n"
        + function("for x, y in loader:", "    total += model(pgd(model, x, y)).sum().item()"),
    ],
)
def test_attacks_of_a_library(text: str, tmp_path: Path) -> None:
    (found,) = said(text, tmp_path)
    assert isinstance(found, Decline)
    assert "is a library's" in found.reason


def test_a_run_that_differentiated_in_its_evaluation(tmp_path: Path) -> None:
    called = {"evaluation": {"grad": True, "differentiated": True}}
    ctx, _ = testing.context_of(RULE, GAINS[0], replace(MEASURED, called=called), tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline)
    assert "in this run" in found.reason


@pytest.mark.parametrize("text", SILENT)
def test_what_differentiates_or_keeps_is_left_alone(text: str, tmp_path: Path) -> None:
    assert not [found for found in said(text, tmp_path) if isinstance(found, Finding)]


def test_forces_in_the_forward_of_a_model(tmp_path: Path) -> None:
    model = (
        "\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return torch.autograd.grad(energy(x), x)\n"
    )
    (found,) = said(GAINS[0] + model, tmp_path)
    assert isinstance(found, Decline)
    assert "asks for gradients" in found.reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model = torch.compile(model)\n", "a compiled model"),
        ("layer = torch.nn.TransformerEncoderLayer(8, 2)\n", "multi-head attention"),
    ],
)
def test_told_where_other_kernels_may_run(text: str, why: str, tmp_path: Path) -> None:
    ctx, source = testing.context_of(RULE, GAINS[0] + text, MEASURED, tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    edit = RULE.rewrite(found, source)
    assert isinstance(edit, Decline)
    assert why in edit.reason


def test_told_inside_autocast(tmp_path: Path) -> None:
    text = inline("for x, y in test:", "    print(model(x).sum().item())")
    lines = [f"    {line}" if line else line for line in text.splitlines()[1:]]
    text = "\n".join(["import torch", "with torch.autocast('cuda'):", *lines]) + "\n"
    ctx, source = testing.context_of(RULE, text, MEASURED, tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    edit = RULE.rewrite(found, source)
    assert isinstance(edit, Decline)
    assert "autocast" in edit.reason


@pytest.mark.parametrize(
    "head",
    [
        "cast = torch.autocast('cuda')\nwith cast:",
        "@torch.autocast('cuda')\ndef main():",
        "torch.set_autocast_enabled(True)\nif True:",
    ],
)
def test_told_where_autocast_is_opened_otherwise(head: str, tmp_path: Path) -> None:
    text = inline("for x, y in test:", "    print(model(x).sum().item())")
    lines = [f"    {line}" if line else line for line in text.splitlines()[1:]]
    ctx, source = testing.context_of(RULE, "\n".join(["import torch", head, *lines]) + "\n", MEASURED, tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    edit = RULE.rewrite(found, source)
    assert isinstance(edit, Decline) and "autocast" in edit.reason


def test_an_evaluation_that_never_ran(tmp_path: Path) -> None:
    ctx, _ = testing.context_of(RULE, GAINS[0], replace(MEASURED, calls={}), tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline)
    assert (found.span and found.span.line, found.needs) == (7, ("steps",))


def test_the_proof_compares_the_inputs_of_training() -> None:
    import torch

    from advisor.verify.arm import NumericsPlan

    model, frozen, loss = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5).eval(), torch.nn.MSELoss()
    copied = copy.deepcopy(model).eval()
    held_out, batch = torch.ones(2, 4), torch.zeros(2, 4)

    def noted(*calls: tuple[torch.nn.Module, torch.Tensor]) -> list[str]:
        plan = NumericsPlan.__new__(NumericsPlan)
        plan.inputs, plan.noted = [], None
        for module, given in calls:
            plan._note_call(module, (given,), {})
        return plan.inputs

    assert noted((copied, held_out), (loss, held_out), (model, batch), (loss, batch)) == noted((model, batch))
    assert noted((frozen, batch), (model, held_out)) == noted((frozen, batch))  # features, which an edit may round


SCRIPT = """\
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, width=128, depth=24):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(depth))

    def forward(self, x):
        for scale in self.scales:
            x = (x * scale + 0.1).clamp(-3, 3)
        return x


def evaluate(model, batches):
    model.eval()
    total = 0.0
    for x, y in batches:
        total += F.mse_loss(model(x), y).item()
    model.train()
    return total / len(batches)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
held_out = [(torch.randn(512, 128), torch.randn(512, 128)) for _ in range(2)]
for step in range(100000):
    x, y = torch.randn(4, 128), torch.randn(4, 128)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    score = evaluate(model, held_out)
"""


@pytest.mark.slow
def test_it_pays_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--select", RULE.id]
    command += ["--time", "60", "--no-baselines", "--json", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    improved(report)
    (found,) = report["findings"]
    assert found["line"] == SCRIPT.splitlines().index("    for x, y in batches:") + 1
    assert "+    with torch.no_grad():" in found["diff"]
