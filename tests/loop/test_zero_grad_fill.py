"""Gradients that are filled with zeros: the edit, the steps it saves, and training that would not stay the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_loops import RULES, Recorded, reading, record
from verdicts import improved

from advisor.model import Finding

pytest.importorskip("torch")
RULE = "zero-grad-fill"
SCRIPT = """\
import random
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, residual=True):
        super().__init__()
        self.residual = residual
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x, mask=None):
        x = self.embedding(x).mean(1)
        for block in self.blocks:
            y = torch.relu(block(x))
            x = x + y if self.residual else y
        if mask is not None:
            x = x * mask
        return self.head(x)


model, other = Net(), Net()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    x, y = torch.randint(0, 64, (4, 5)), torch.randint(0, 4, (4,))
    optimizer.zero_grad(set_to_none=False)  # zero
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
HAND = """\
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
"""
MOVES = "an optimizer with momentum or decay treats no gradient and a gradient of zero differently, and "


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return always(record(SCRIPT, tmp_path_factory.mktemp("zeros")))


def always(recorded: Recorded) -> Recorded:
    """The same recording, with every share of the step worth a finding."""
    return Recorded(replace(recorded.ctx, worth=0.0))


def test_the_argument_is_dropped(recorded: Recorded) -> None:
    dropped = SCRIPT.replace("zero_grad(set_to_none=False)  # zero", "zero_grad()  # zero")
    assert recorded.patched(RULE) == dropped


def test_a_share_too_small(recorded: Recorded) -> None:
    reason = Recorded(replace(recorded.ctx, worth=0.9)).reason(RULE)
    assert reason.startswith("filling gradients with zeros takes ")


def test_by_hand(tmp_path: Path) -> None:
    text = SCRIPT.replace("    optimizer.zero_grad(set_to_none=False)  # zero\n", HAND)
    patched = always(record(text, tmp_path)).patched(RULE)
    assert patched == text.replace("p.grad.zero_()", "p.grad = None")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("y = torch.relu(block(x))", "y = block(x) if random.random() < 0.5 else x", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "y = torch.relu(block(x)) if x.sum() > 0 else x", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "y = self.blocks[int(x.sum()) % 3](x)", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "b = self.blocks[int(x.sum()) % 3]; y = b(x)", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "b = dict(enumerate(self.blocks))[len(x) % 3]; y = b(x)", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "y = x @ self.blocks[len(x) % 3].weight", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "y = self.get_submodule(f'blocks.{len(x) % 3}')(x)", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "hs = [b(x) for b in self.blocks]; y = hs[len(x) % 3]", MOVES + "line 17"),
        ("y = torch.relu(block(x))", "y = self.blocks[0](x)[: len(x)]", ""),
        ("block in self.blocks:", "block, _ in zip(self.blocks, range(len(x) % 3)):", MOVES + "line 16"),
        ("model(x), y)", "model(x), [y, y][step % 2])", MOVES + "line 29"),
        ("in self.blocks:", "in self.blocks[: int(x.sum()) % 3]:", MOVES + "line 16"),
        ("if mask is not None:", "if self.count > 3:", MOVES + "line 19"),
        ("if mask is not None:", "if self.training and self.residual:", ""),
        (
            "cross_entropy(model(x), y)",
            "cross_entropy(model(x), y) + (other(x).sum() if step % 2 else 0)",
            MOVES + "line",
        ),
        ("loss.backward()", "loss.backward() if step else None", MOVES + "not every step"),
        ("loss.backward()", "[loss.backward(), print(model.head.weight.grad)]", "used without a test for None"),
        ("loss.backward()", "loss.backward(create_graph=True)", "differentiated again"),
    ],
)
def test_what_could_change_training(recorded: Recorded, old: str, new: str, words: str) -> None:
    there = reading(recorded, SCRIPT.replace(old, new, 1))
    if words:
        assert words in there.reason(RULE)
    else:
        there.patched(RULE)


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ("    if step == 9:\n        model.head.requires_grad_(False)\n", MOVES + "parameters are frozen"),
        ("model.head.weight.grad = torch.zeros(4, 16)\n", "a gradient is assigned (train.py:33)"),
        ("print(getattr(model.head.weight, 'grad'))\n", "used without a test for None (train.py:33)"),
        ("print([p.grad for p in model.parameters() if p.grad is not None])\n", "looked at before the backward pass"),
        ("graph = torch.cuda.CUDAGraph\n", "holds on to the gradients"),
    ],
)
def test_what_stands_behind(recorded: Recorded, behind: str, words: str) -> None:
    there = reading(recorded, SCRIPT + behind)
    assert words in there.reason(RULE)


def test_gradients_that_are_looked_at_where_they_are(recorded: Recorded) -> None:
    look = "    print([p.grad.norm() for p in model.parameters() if p.grad is not None])\n"
    there = reading(recorded, SCRIPT + look)
    assert there.patched(RULE).endswith(look)
    early = SCRIPT.replace("  # zero\n", "  # zero\n" + look)
    assert "looked at before the backward pass" in reading(recorded, early).reason(RULE)


def test_plain_sgd_does_nothing_for_a_zero(recorded: Recorded) -> None:
    (use,) = recorded.ctx.profile.optimizers
    sgd = replace(use, kind="torch.optim.sgd.SGD", arguments={"momentum": 0, "weight_decay": 0})
    drawn = SCRIPT.replace("y = torch.relu(block(x))", "y = block(x) if random.random() < 0.5 else x")
    there = Recorded(replace(recorded.ctx, profile=replace(recorded.ctx.profile, optimizers=(sgd,))))
    assert "line 17" in reading(there, drawn).reason(RULE), "norms are taken"
    free = drawn.replace("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "    print(step)\n")
    assert "zero_grad()" in reading(there, free).patched(RULE)


def test_optimizers_that_are_not_known(recorded: Recorded) -> None:
    (use,) = recorded.ctx.profile.optimizers
    for other in (replace(use, kind="lion.Lion"), replace(use, overrides_step=True), replace(use, sparse=True)):
        there = Recorded(replace(recorded.ctx, profile=replace(recorded.ctx.profile, optimizers=(other,))))
        assert "without a gradient is not known" in there.reason(RULE)


def test_on_a_gpu_the_kernels_count(recorded: Recorded) -> None:
    """The recorded step on an H200 fills 52 gradients with zeros and adds to them."""
    from profiles import h200

    _, profile = h200("gpt_launch_bound_fp32")
    ctx = recorded.ctx
    mixed = replace(profile, calls=ctx.profile.calls, graphs=ctx.profile.graphs, optimizers=ctx.profile.optimizers)
    (found,) = RULES[RULE].match(replace(ctx, profile=mixed))
    assert isinstance(found, Finding)
    assert 100 < found.estimate.high_us < 1_000


FAST = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30_000, 128), nn.Flatten(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for step in range(100_000):
    optimizer.zero_grad(set_to_none=False)
    loss = model(torch.randint(0, 30_000, (16, 2))).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_steps_are_faster(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAST, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--time", "60", "--no-baselines", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    improved(report)
    (found,) = [f for f in report["findings"] if f["rule"] == RULE]
    assert (found["line"], found["status"]) == (8, "applied")
    assert report["speedup"] > 1.1
