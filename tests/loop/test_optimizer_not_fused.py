"""Several optimizers: each has its share of the time, and those that one line makes are one finding."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, OptimizerUse, Rewrite
from advisor.rule import step
from advisor.source import Source

RULE = registry.load()[0]["optimizer-not-fused"].rule
MADE = "import torch\nopts = [torch.optim.Adam([p], lr=1e-3) for p in params]\n"
TWO = """\
import torch
from torch import nn

G, D = (nn.Sequential(*[nn.Linear(48, 48) for _ in range(8)]) for _ in range(2))
of_g = torch.optim.Adam(G.parameters())
of_d = torch.optim.Adam(D.parameters(), lr=2e-4)
idle = torch.optim.Adam(nn.Linear(4, 4).parameters())
for step in range(30):
    fake = G(torch.randn(4, 48))
    for batch, opt in ((fake.detach(), of_d), (fake, of_g)):
        opt.zero_grad()
        D(batch).square().mean().backward()
        opt.step()
"""


def said(uses: Sequence[OptimizerUse], folder: Path) -> list[Finding | Decline]:
    ctx, _ = testing.context_of(RULE, MADE, step(10_000, optimizer=[90]), folder)
    return list(RULE.match(replace(ctx, profile=replace(ctx.profile, optimizers=tuple(uses)))))


def one(folder: Path) -> OptimizerUse:
    ctx, _ = testing.context_of(RULE, MADE, step(10_000, optimizer=[90]), folder)
    return ctx.profile.optimizers[0]


def test_optimizers_that_one_line_makes_are_one_finding(tmp_path: Path) -> None:
    use = replace(one(tmp_path), idle_us=10.0)
    (found,) = said([use] * 5, tmp_path)
    assert isinstance(found, Finding)
    assert "60,000 parameters" in found.message
    assert {item.what: item.value for item in found.evidence}["time of the optimizer per step"] == 5 * (90.0 + 10.0)
    (declined,) = said([use, replace(use, sparse=True)], tmp_path)
    assert isinstance(declined, Decline) and "sparse" in declined.reason


def test_one_that_makes_no_step_is_left_alone(tmp_path: Path) -> None:
    (declined,) = said([replace(one(tmp_path), stepped=False)], tmp_path)
    assert isinstance(declined, Decline) and declined.reason == "it makes no step in this run"


@pytest.mark.slow
def test_two_of_one_class_have_their_shares(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TWO, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "check", "train.py", "--json", "--worth", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    document = json.loads(ended.stdout)
    assert {f["line"] for f in document["findings"] if f["rule"] == RULE.id} == {5, 6}
    assert [(d["line"], d["reason"]) for d in document["declines"] if d["rule"] == RULE.id] == [
        (7, "it makes no step in this run")
    ]


def test_a_name_for_the_class_is_followed(tmp_path: Path) -> None:
    text = "import torch\ncls = torch.optim.AdamW\nopt = cls(params)\n"
    ctx, _ = testing.context_of(RULE, MADE.replace("Adam(", "AdamW("), step(10_000, optimizer=[900]), tmp_path)
    (use,) = ctx.profile.optimizers
    for more, rewritten in (("", True), ("cls = other\n", False)):
        source = Source(testing.FILE, text + more)
        call = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call))
        made = replace(use, span=source.span(call))
        (found,) = RULE.match(replace(ctx, profile=replace(ctx.profile, optimizers=(made,))))
        assert isinstance(found, Finding)
        assert isinstance(RULE.rewrite(found, source), Rewrite) is rewritten
