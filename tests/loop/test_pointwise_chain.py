"""Chains of memory-bound operations: what is compiled, what other rules leave of it, and the gain on a CPU."""

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

from advisor import codemod
from advisor.model import Decline, Finding, Rewrite
from advisor.source import Source

pytest.importorskip("torch")
RULE = "pointwise-chain"
SAMPLE = Path(__file__).parents[2] / "samples" / "nano_gpt"
SCRIPT = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        h = self.up(x)
        gate = torch.sigmoid(h * 1.702 + self.shift)
        wave = torch.sin(h * self.scale) * torch.exp(-0.5 * h * h)
        return x + 0.1 * (gate * wave + h / (1.0 + h * h)) * self.scale


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Net(64, 3).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(16, 4096, 64)
    for step in range(1_000_000):
        x = data[step % 16]
        loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
"""
MADE = '    model = Net(64, 3).to("cpu")\n'
ADDED = "    for block in model.blocks:\n        block.compile()\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(SCRIPT, tmp_path_factory.mktemp("chains"))


def answer(recorded: Recorded) -> Finding | Decline:
    (found,) = RULES[RULE].match(recorded.ctx)
    return found


def test_the_blocks_are_compiled_where_the_model_is_made(recorded: Recorded) -> None:
    assert recorded.patched(RULE) == SCRIPT.replace(MADE, MADE + ADDED)


def test_the_whole_model_is_another_form_of_the_same_group(recorded: Recorded) -> None:
    found = answer(recorded)
    assert isinstance(found, Finding)
    source = recorded.ctx.read("train.py")
    first = RULES[RULE].rewrite(found, source)
    (other,) = RULES[RULE].forms(found, source)
    assert isinstance(first, Rewrite) and first.group == other.group is not None
    assert codemod.apply(source, other.edits) == SCRIPT.replace(MADE, MADE + "    model.compile()\n")


def test_the_estimate_is_bounded_by_the_time_it_cites(recorded: Recorded) -> None:
    found = answer(recorded)
    assert isinstance(found, Finding)
    cited = float(found.evidence[0].value)
    assert 0 < found.estimate.high_us <= cited <= recorded.ctx.step_us


def test_the_other_rule_that_compiles_the_model_leaves_the_gate(recorded: Recorded) -> None:
    """Only one of the two is applied, so that a small chain is no more worth beside it."""
    long = tuple(100.0 * us for us in recorded.ctx.profile.step_us)  # the time of the chains is within it
    found = answer(Recorded(replace(recorded.ctx, profile=replace(recorded.ctx.profile, step_us=long), worth=0.0)))
    assert isinstance(found, Finding)
    steps = (float(found.evidence[0].value) / 0.03,)  # 3 % of the step
    for compiles, kind in ((True, Decline), (False, Finding)):
        profile = replace(recorded.ctx.profile, step_us=steps)
        ctx = replace(recorded.ctx, profile=profile, left=0.3, left_compiles=compiles)
        assert isinstance(answer(Recorded(ctx)), kind)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (MADE, MADE + "    model = torch.compile(model)\n", "the script has a call of the compiler of its own"),
        ("    for step in range(1_000_000):\n", "    for step in range(20):\n", "20 steps save at most"),
        (MADE, MADE + "    model = prepared(model)\n", "`prepared(model)` gives `model` what is not followed"),
        (MADE, MADE + "    model.blocks[0].register_forward_hook(print)\n", "a hook runs on a module"),
        ("optimizer.zero_grad()\n", "optimizer.zero_grad()\n        torch.save(model, 'm.pt')\n", "copied or saved"),
    ],
)
def test_what_stands_in_the_way(recorded: Recorded, old: str, new: str, reason: str) -> None:
    behind = SCRIPT.replace(old, new)
    if old == MADE:  # the recorded call of the model has moved down a line
        call = next(c for c in recorded.ctx.profile.calls if c.name == "module")
        moved = replace(call, frames=tuple(_down(f, behind) for f in call.frames))
        others = tuple(c for c in recorded.ctx.profile.calls if c.name != "module")
        graphs = tuple(
            g if g.span is None else replace(g, span=_down(g.span, behind)) for g in recorded.ctx.profile.graphs
        )
        ctx = replace(recorded.ctx, profile=replace(recorded.ctx.profile, calls=(moved, *others), graphs=graphs))
        assert reason in reading(Recorded(ctx), behind).reason(RULE)
        return
    assert reason in reading(recorded, behind).reason(RULE)


def _down(span: object, text: str) -> object:
    line, end = span.line + 1, span.end_line + 1 if span.end_line else None  # type: ignore[attr-defined]
    assert Source("train.py", text).tree
    return replace(span, line=line, end_line=end)  # type: ignore[type-var]


def test_the_blocks_of_the_sample(tmp_path: Path) -> None:
    """A list of blocks in a model made under a `with`; norms, activations and attention have rules of their own."""
    text = (SAMPLE / "train.py").read_text(encoding="utf-8").replace("default=400", "default=400_000")
    (tmp_path / "as_you_like_it.txt").write_bytes((SAMPLE / "as_you_like_it.txt").read_bytes())
    recorded = record(text, tmp_path)
    always = Recorded(replace(recorded.ctx, worth=0.0))
    made = "        model = GPT(args)\n"
    assert always.patched(RULE) == text.replace(made, made + "    for block in model.h:\n        block.compile()\n")
    found = answer(always)
    assert isinstance(found, Finding)
    left = next(float(e.value) for e in found.evidence if e.what == "of that, not replaced by other rules")
    assert found.estimate.high_us <= left < float(found.evidence[0].value) / 2


SMALL = ("torch.randn(16, 4096, 64)", "torch.randn(16, 64, 64)")


def test_small_tensors_are_not_bound_by_memory(tmp_path: Path) -> None:
    assert not record(SCRIPT.replace(*SMALL), tmp_path).ask(RULE)


def test_dropout_that_drops_is_named(tmp_path: Path) -> None:
    text = SCRIPT.replace("return x + 0.1 * (", "return F.dropout(x, 0.1) + 0.1 * (")
    recorded = record(text, tmp_path)
    found = answer(recorded)
    assert isinstance(found, Decline) and "draws random numbers" in found.reason
    assert found.span is not None and "F.dropout" in text.splitlines()[found.span.line - 1]


@pytest.mark.slow
def test_it_pays_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--time", "40", "--no-baselines"]
    done = subprocess.run(
        [*command, "--select", RULE, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    report = json.loads(done.stdout)
    (proved, *_) = [trial for trial in report["trials"] if trial["numerics"] is not None]
    assert proved["numerics"]["ok"], proved["numerics"]["reasons"]
    improved(report)
    (applied,) = [found for found in report["findings"] if found["status"] == "applied"]
    assert "block.compile()" in applied["diff"] or "model.compile()" in applied["diff"]
