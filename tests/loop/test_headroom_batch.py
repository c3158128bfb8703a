"""Small micro-batches with memory to spare: where their size is set, and when nothing is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding
from advisor.rule import ON_A_GPU

RULE = registry.load()[0]["headroom-batch"].rule
MEASURED = RULE.examples[0].profile
LOOP = """\
import torch
ACC, MICRO = 8, 2
for step in range(100):
    HEAD
        loss = loss_of(model(x)) / ACC
        loss.backward()
    optimizer.step()
"""


def said(text: str, folder: Path) -> list[Finding | Decline]:
    ctx, _ = testing.context_of(RULE, text, MEASURED, folder)
    return list(RULE.match(ctx))


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("for x in batch().split(MICRO):", 2),
        ("for x in torch.split(batch(), MICRO):", 2),
        ("for i in range(0, len(data), MICRO):\n        x = data[i : i + MICRO]", 2),
        ("for micro in range(ACC):\n        x = torch.randn(MICRO, 64)", 2),
        ("for micro in range(ACC):\n        x = torch.randint(0, 9, (MICRO, 64))", 2),
        ("for micro in range(ACC):\n        x = get_batch('train')", 4),
        ("for x in batch().split(2):", 4),
        ("for x in batch().chunk(ACC):", 4),
    ],
)
def test_where_the_size_is_set(head: str, line: int, tmp_path: Path) -> None:
    (found,) = said(LOOP.replace("HEAD", head), tmp_path)
    assert isinstance(found, Finding)
    assert found.span.line == line
    assert "weighs unequal micro-batches" in found.message


def test_a_size_that_is_set_twice_is_told_at_the_loop(tmp_path: Path) -> None:
    text = LOOP.replace("HEAD", "for x in batch().split(MICRO):") + "MICRO = 4\n"
    (found,) = said(text, tmp_path)
    assert isinstance(found, Finding)
    assert found.span.line == 4


def test_the_batch_size_of_the_loader(tmp_path: Path) -> None:
    text = """\
from torch.utils.data import DataLoader
size = 4
loader = DataLoader(data, batch_size=size)
for i, x in enumerate(loader):
    model(x).mean().backward()
    if (i + 1) % 8 == 0:
        optimizer.step()
"""
    (found,) = said(text, tmp_path)
    assert isinstance(found, Finding)
    assert found.span.line == 2


@pytest.mark.parametrize("state", ["_, h = model(x, h)", "h = h.detach()\n        y, h = model(x, hidden=h)"])
def test_parts_of_one_sequence(state: str, tmp_path: Path) -> None:
    text = LOOP.replace("HEAD", f"for x in sequence.split(MICRO):\n        {state}").replace("model(x)) /", "h) /")
    ctx, _ = testing.context_of(RULE, text, replace(MEASURED, calls={**MEASURED.calls, "module": (8, 0.0)}), tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline) and "`h` goes from each micro-step" in found.reason


def test_without_accumulation_and_for_a_critic_nothing_is_said(tmp_path: Path) -> None:
    text = LOOP.replace("HEAD", "for x in batch().split(MICRO):").replace("    optimizer", "        optimizer")
    assert not said(text, tmp_path)
    once = replace(MEASURED, calls={"backward": (1.0, 0.0)})
    ctx, _ = testing.context_of(RULE, LOOP.replace("HEAD", "for x in batches:"), once, tmp_path)
    assert not list(RULE.match(ctx))


def test_on_a_cpu_the_place_is_told_and_no_more(tmp_path: Path) -> None:
    measured = replace(MEASURED, device="cpu")
    ctx, _ = testing.context_of(RULE, LOOP.replace("HEAD", "for x in batch().split(MICRO):"), measured, tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline)
    assert (found.span and found.span.line, found.reason, found.needs) == (2, ON_A_GPU, ("gpu",))
