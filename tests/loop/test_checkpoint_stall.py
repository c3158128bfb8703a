"""Saving in the training loop: where it is told, and when it is worth nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding

RULE = registry.load()[0]["checkpoint-stall"].rule
MEASURED = RULE.examples[0].profile
EPOCHS = """\
import torch

for epoch in range(9):
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "last.pt")
"""


def said(text: str, folder: Path, device: str = "cpu", **calls: tuple[float, float]) -> list[Finding | Decline]:
    measured = replace(MEASURED, device=device, calls={"torch.save": calls.get("save", (0.2, 4_000.0))})
    ctx, _ = testing.context_of(RULE, text, measured, folder)
    return list(RULE.match(ctx))


def test_after_each_epoch(tmp_path: Path) -> None:
    (found,) = said(EPOCHS, tmp_path)
    assert isinstance(found, Finding)
    assert found.span.line == 7


def test_before_and_behind_the_loop_is_no_stall(tmp_path: Path) -> None:
    behind = EPOCHS.replace(
        '    torch.save(model.state_dict(), "last.pt")', 'torch.save(model.state_dict(), "last.pt")'
    )
    assert not said(behind, tmp_path)
    assert not said(EPOCHS.replace("for epoch", "for _ in range(2):\n    torch.save(x, 'x.pt')\nfor epoch", 1)
                    .replace("    torch.save(model", "    print(model"), tmp_path)  # fmt: skip


@pytest.mark.parametrize(("device", "found"), [("cpu", True), ("cuda", False)])
def test_the_wait_for_the_device_is_not_lost(device: str, found: bool, tmp_path: Path) -> None:
    """On a GPU a small file that is written in every step shows the time of the step before it."""
    (answer,) = said(EPOCHS, tmp_path, device, save=(1.0, 10_000.0))
    assert isinstance(answer, Finding) == found


SCRIPT = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def checkpoint(step):
    torch.save({"model": model.state_dict(), "step": step}, "last.pt")


for step in range(30):
    x = torch.randn(4, 512)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint(step)
"""


def test_a_script_that_saves_in_every_step(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "check", "train.py", "--select", RULE.id, "--json", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (found,) = json.loads(done.stdout)["findings"]
    assert (found["line"], found["status"], found["diff"]) == (17, "suggested", "")
