"""Fused attention has no second derivative: a script that differentiates gradients again keeps its own attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline
from advisor.patterns.callsites import differentiates_twice
from advisor.rule import step
from advisor.source import Source

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
    {again}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 5, 8, requires_grad=True)]
"""


GRAD = "return torch.autograd.grad(model(x).sum(), x, "
FORWARD = "import torch.autograd.forward_ad as fw\n    with fw.dual_level():\n        "
TWICE = (
    GRAD + "create_graph=True)",
    GRAD + "None, None, True)",
    GRAD + "*model.options)",
    GRAD + "**{'create_graph': True})",
    "torch.autograd.backward([model(x)], None, None, True)",
    "model(x).sum().backward(None, None, True)",
    "return torch.autograd.functional.jacobian(model, x, True)",
    "return torch.autograd.functional.jvp(model, x, x)",
    "return torch.autograd.functional.vjp(model, x, x, create_graph=True)",
    "return torch.func.jvp(model, (x,), (x,))",
    "from torch.func import jacfwd\n    return jacfwd(model)(x)",
    "return map(torch.func.linearize, [model], [x])",
    "return torch.func.grad(torch.func.grad(model))(x)",
    "rows = torch.func.jacrev(model)\n    return torch.func.jacrev(rows)(x)",
    "torch.func.grad(model)(x).norm().backward()",
    FORWARD + "return fw.unpack_dual(model(fw.make_dual(x, x))).tangent",
)
ONCE = (
    GRAD + "create_graph=False)",
    GRAD + "None, None, False)",
    GRAD + "None, True)",
    "model(x).sum().backward(retain_graph=True)",
    "return torch.autograd.functional.jacobian(model, x)",
    "return torch.func.grad(model)(x)",
)


def told(rule: str, again: str, folder: Path) -> bool:
    ctx, _ = testing.context_of(RULES[rule], MODEL.replace("{again}", again), step(10_000, nodes=0.9), folder)
    (found,) = RULES[rule].match(ctx)
    return isinstance(found, Decline) and "differentiates gradients again" in found.reason


@pytest.mark.parametrize("rule", ["naive-attention", "mha-need-weights"])
@pytest.mark.parametrize("again", [TWICE[0], ONCE[0]])
def test_a_gradient_penalty_declines_fused_attention(rule: str, again: str, tmp_path: Path) -> None:
    assert told(rule, again, tmp_path) is (again in TWICE)


@pytest.mark.parametrize("again", [*TWICE, *ONCE])
def test_every_way_to_differentiate_twice_or_forward_is_known(again: str) -> None:
    source = Source("example.py", MODEL.replace("{again}", again))
    assert (differentiates_twice(source) is not None) is (again in TWICE)
