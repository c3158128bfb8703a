"""unfused-layernorm and unfused-gelu on the ways people write them, and on look-alikes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.patch import build
from advisor.rule import step

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


def helper(x, eps):
    m = x.mean(-1, keepdim=True)
    return (x - m) / torch.sqrt(((x - m) ** 2).mean(-1, keepdim=True) + eps)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(16))
        self.b = nn.Parameter(torch.rand(16))
        self.eps = 1e-5
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""

NORMS = {
    "rsqrt and var": "u = x.mean(-1, keepdim=True)\ns = (x - u).pow(2).mean(-1, keepdim=True)\n"
    "x = (x - u) * torch.rsqrt(s + self.eps)\nreturn self.g * x + self.b",
    "population var": "v = x.var(-1, keepdim=True, unbiased=False)\n"
    "return (x - x.mean(-1, keepdim=True)) / (v + 1e-6).sqrt() * self.g + self.b",
    "torch functions": "m = torch.mean(x, dim=-1, keepdim=True)\n"
    "v = torch.mean(torch.square(x - m), dim=-1, keepdim=True)\nreturn torch.div(x - m, torch.sqrt(v + 1e-5))",
    "centred once": "d = x - x.mean(-1, keepdim=True)\n"
    "d = d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5)\nreturn d * self.g",
    "power one half": "m = x.mean(2, True)\n"
    "return (x - m) / (((x - m) ** 2).mean(2, True) + 1e-5) ** 0.5 * self.g + self.b",
    "a weight that is an expression": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return (x - m) / torch.sqrt(v + 1e-5) * (1 + self.g) + self.b",
    "dropout after it": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return self.drop((x - m) / torch.sqrt(v + 1e-5) * self.g + self.b)",
    "a clamp after it": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return ((x - m) / torch.sqrt(v + 1e-5)).clamp(-1, 1) * self.g",
    "correction": "m = x.mean(-1, keepdim=True)\n"
    "v = torch.var(x, dim=-1, correction=0, keepdim=True)\nreturn (x - m) * (v + 1e-5).rsqrt()",
}
NOT_NORMS = {
    "unbiased": (
        "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True)\nreturn (x - m) / torch.sqrt(v + 1e-5) * self.g",
        "divides the variance by N-1",
    ),
    "eps outside": (
        "m = x.mean(-1, keepdim=True)\ns = x.std(-1, keepdim=True, unbiased=False)\nreturn (x - m) / (s + 1e-5)",
        "adds eps to the standard deviation",
    ),
    "input changed in place": (
        "y = x * 1\nz = y * 2\ny -= y.mean(-1, keepdim=True)\n"
        "return y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) + 0 * z",
        "in place",
    ),
    "mean reused": (
        "m = x.mean(-1, keepdim=True)\nv = ((x - m) ** 2).mean(-1, keepdim=True)\n"
        "return (x - m) / torch.sqrt(v + 1e-5) + m",
        "used elsewhere",
    ),
    "a cast at the end": (
        "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
        "return ((x - m) / torch.sqrt(v + 1e-5)).to(torch.float64)",
        "dtypes differ",
    ),
    "in a helper": ("return helper(x, 1e-5) * 2 + helper(x * 2, 1e-3)", "differ in eps"),
}
QUIET = {
    "rms norm": "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.g",
    "mean over another axis": "m = x.mean(1, keepdim=True)\n"
    "return (x - m) / torch.sqrt(((x - m) ** 2).mean(1, keepdim=True) + 1e-5)",
    "dropout inside": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return self.drop(x - m) / torch.sqrt(v + 1e-5)",
    "mean only": "return x - x.mean(-1, keepdim=True)",
}
GELUS = {
    "power operator": "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))",
    "products": "return x * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))",
    "statements": "c = x * x * x\ni = x + 0.044715 * c\nt = torch.tanh(i * 0.7978845608028654)\n"
    "return x * (0.5 * (1 + t))",
    "halves": "return x / 2 * (torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))) + 1)",
}
NOT_GELUS = {
    "tanh alone": "return torch.tanh(x)",
    "coarse constant": "return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))",
    "other cubic": "return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.05 * x**3)))",
    "dropout in the gate": "t = torch.tanh(0.7978845608 * (x + 0.044715 * x**3))\nreturn 0.5 * x * self.drop(1 + t)",
    "clamped": "return (0.5 * x).clamp(-5, 5) * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))",
    "five digits": "return 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))",
    "lstm gate": "return torch.sigmoid(x) * torch.tanh(x)",
}


def results(rule: str, body: str, folder: Path) -> tuple[list[Finding | Decline], str, str]:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    ctx, source = testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), folder)
    found = list(RULES[rule].match(ctx))
    after = text
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULES[rule].rewrite(found[0], source)
        assert isinstance(rewrite, Rewrite), rewrite
        after = build([rewrite], lambda _: source).sources["example.py"]
    return found, text, after


@pytest.mark.parametrize(
    ("rule", "name"),
    [("unfused-layernorm", n) for n in NORMS] + [("unfused-gelu", n) for n in GELUS],
)
def test_rewritten_and_the_same_function(rule: str, name: str, tmp_path: Path) -> None:
    body = (NORMS if rule == "unfused-layernorm" else GELUS)[name]
    found, before, after = results(rule, body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    forward = after.split("def forward")[1]
    assert ("layer_norm(" if rule == "unfused-layernorm" else "gelu(") in forward
    assert "mean" not in forward and "tanh(" not in forward
    assert ("self.drop(" in forward) == ("dropout" in name)
    testing.check_same_function(before, after, RULES[rule].tolerance, name)


@pytest.mark.parametrize("name", NOT_NORMS)
def test_look_alike_is_declined_with_the_difference(name: str, tmp_path: Path) -> None:
    body, reason = NOT_NORMS[name]
    found, _, _ = results("unfused-layernorm", body, tmp_path)
    assert found
    assert all(isinstance(f, Decline) for f in found)
    assert re.search(reason, " ".join(f.reason for f in found if isinstance(f, Decline))), found


@pytest.mark.parametrize(
    ("rule", "name"),
    [("unfused-layernorm", n) for n in QUIET] + [("unfused-gelu", n) for n in NOT_GELUS],
)
def test_something_else_is_no_finding(rule: str, name: str, tmp_path: Path) -> None:
    body = (QUIET if rule == "unfused-layernorm" else NOT_GELUS)[name]
    assert results(rule, body, tmp_path)[0] == []


@pytest.mark.parametrize(
    ("rule", "body"), [("unfused-layernorm", NORMS["torch functions"]), ("unfused-gelu", GELUS["halves"])]
)
def test_one_line_in_two_graphs_is_one_finding(rule: str, body: str, tmp_path: Path) -> None:
    """A graph break between two calls of one function puts its operations into two graphs."""
    text = HEAD.replace("{body}", textwrap.indent("y = self.part(x)\nprint(end='')\nreturn self.part(y)", " " * 8))
    part = "    def part(self, x):\n" + textwrap.indent(body, " " * 8) + "\n\n    def forward"
    text = text.replace("    def forward", part)
    ctx, _ = testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), tmp_path)
    assert len(ctx.graphs) == 2
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Finding)
    assert next(e.value for e in found.evidence if e.what.startswith("calls")) == 2
