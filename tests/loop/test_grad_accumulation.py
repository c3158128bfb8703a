"""Gradients that are clipped in every micro-step: told with the time that takes, and silent elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_loops import record

from advisor import registry, testing
from advisor.model import Decline, Finding

RULE = registry.load()[0]["grad-accumulation"].rule
EXAMPLE = RULE.examples[0]
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def said(text: str, folder: Path, per_step: float = 4.0) -> list[Finding | Decline]:
    measured = replace(EXAMPLE.profile, calls={"backward": (per_step, 0.0)})
    ctx, _ = testing.context_of(RULE, f"import torch\n{text}", measured, folder)
    return list(RULE.match(ctx))


@pytest.mark.parametrize(
    "text",
    [
        "for step in range(99):\n    for x in batches:\n"
        f"        loss(x).backward()\n        {CLIP}\n    optimizer.step()\n",
        f"def micro(x):\n    loss(x).backward()\n    {CLIP}\nfor step in range(99):\n    for x in batches:\n"
        "        micro(x)\n    optimizer.step()\n",
        "for i, x in enumerate(batches):\n    loss(x).backward()\n    if args.grad_clip > 0.0:\n"
        f"        {CLIP}\n    if (i + 1) % 4 == 0:\n        optimizer.step()\n",
    ],
)
def test_clipped_in_every_micro_step(text: str, tmp_path: Path) -> None:
    (found,) = said(text, tmp_path)
    assert isinstance(found, Finding) and "4 micro-steps" in found.message
    assert found.estimate.high_us == pytest.approx(600.0)


@pytest.mark.parametrize(
    "text",
    [
        "for step in range(99):\n    for x in batches:\n"
        f"        loss(x).backward()\n    {CLIP}\n    optimizer.step()\n",
        "for i, x in enumerate(batches):\n    loss(x).backward()\n    if (i + 1) % 4 == 0:\n"
        f"        {CLIP}\n        optimizer.step()\n",
        f"def micro(x, last):\n    loss(x).backward()\n    if last:\n        {CLIP}\nfor step in range(99):\n"
        "    for x in batches:\n        micro(x, False)\n    optimizer.step()\n",
        "for i, x in enumerate(batches):\n    loss(x).backward()\n    if accelerator.sync_gradients:\n"
        f"        {CLIP}\n    if (i + 1) % 4 == 0:\n        optimizer.step()\n",
    ],
)
def test_clipped_where_the_optimizer_steps(text: str, tmp_path: Path) -> None:
    assert not [one for one in said(text, tmp_path) if isinstance(one, Finding)]


def test_a_loop_that_steps_every_time(tmp_path: Path) -> None:
    text = f"for x in batches:\n    loss(x).backward()\n    {CLIP}\n    optimizer.step()\n"
    assert said(text, tmp_path, 1.0) == []


SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(200):
    loss = model(torch.randn(4, 64)).square().mean() / 4
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_time_of_a_recorded_script(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recorded = record(SCRIPT, tmp_path)
    (found,) = RULE.match(replace(recorded.ctx, worth=0.0))
    assert isinstance(found, Finding)
    assert found.span.line == 10
    assert 0.0 < found.estimate.high_us < recorded.ctx.step_us
