"""Fused attention has no second derivative: a script that differentiates gradients again keeps its own attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline
from advisor.rule import step

pytest.importorskip("torch")
RULES = {name: loaded.rule for name, loaded in registry.load()[0].items()}
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        y = torch.softmax(x @ x.transpose(-2, -1), dim=-1) @ x
        return self.mha(y, y, y)[0]


def penalty(model, x):
    (gradient,) = torch.autograd.grad(model(x).sum(), x, {again})
    return (gradient.norm() - 1) ** 2


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 5, 8, requires_grad=True)]
"""


@pytest.mark.parametrize("rule", ["naive-attention", "mha-need-weights"])
@pytest.mark.parametrize(("again", "told"), [("create_graph=True", True), ("create_graph=False", False)])
def test_a_gradient_penalty_declines_fused_attention(rule: str, again: str, told: bool, tmp_path: Path) -> None:
    text = MODEL.replace("{again}", again)
    ctx, _ = testing.context_of(RULES[rule], text, step(10_000, nodes=0.9), tmp_path)
    (found,) = RULES[rule].match(ctx)
    declined = isinstance(found, Decline) and "differentiates gradients again" in found.reason
    assert declined is told
