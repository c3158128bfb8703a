"""naive-attention on the ways people write attention: what is rewritten is right, what is left alone says why."""

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
RULE = registry.load()[0]["naive-attention"].rule

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class AlwaysDropout(nn.Dropout):
    def forward(self, x):
        return F.dropout(x, self.p, True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = AlwaysDropout(0.0)
        wide = torch.ones(16, 16, dtype=torch.bool)
        self.register_buffer("window", wide.tril() & wide.triu(-7), persistent=False)
        self.register_buffer("wide", wide.tril(), persistent=False)
        self.drop = nn.Dropout(0.0)
        self.p = 0.0
        self.scale = 4 ** -0.5
        self.softmax = nn.Softmax(dim=-1)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("tri", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)
        self.register_buffer("prefix", torch.tril(torch.ones(8, 8), diagonal=2).bool(), persistent=False)
        self.register_buffer("add", torch.full((8, 8), float("-inf")).triu(1), persistent=False)
        self.bias = nn.Parameter(torch.randn(8, 8))

    def forward(self, q, k, v):
        T = q.size(-2)
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
"""

REWRITTEN = {
    "textbook division": "return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), dim=-1) @ v",
    "size of the keys": "return torch.softmax(q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1))), -1) @ v",
    "multiplied scale": "return ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1) @ v",
    "scale on the left": "return F.softmax(self.scale * (q @ k.transpose(-2, -1)), dim=-1) @ v",
    "no scale": "return F.softmax(torch.matmul(q, k.transpose(2, 3)), dim=3).matmul(v)",
    "query scaled before": "q = q / 2.0\nreturn F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v",
    "module softmax": "return self.softmax(q @ k.transpose(-2, -1) / 3.0) @ v",
    "fp32 softmax": "return F.softmax((q @ k.transpose(-2, -1)).float(), dim=-1).to(q.dtype) @ v",
    "dtype argument": "return F.softmax(q @ k.transpose(-2, -1), dim=-1, dtype=torch.float32).to(v.dtype) @ v",
    "mask by where": 'w = torch.where(self.tri[:T, :T], q @ k.transpose(-2, -1) / 2, float("-inf"))\n'
    "return w.softmax(-1) @ v",
    "finite fill": "w = (q @ k.transpose(-2, -1) / 2).masked_fill(~self.tri, -1e9)\nreturn w.softmax(-1) @ v",
    "additive causal": "w = q @ k.transpose(-2, -1) / 2 + self.add[:T, :T]\nreturn w.softmax(-1) @ v",
    "in-place addition": "w = q @ k.transpose(-2, -1)\nw /= 2\nw += self.add\nw = w.softmax(-1)\nreturn w @ v",
    "functional dropout": "w = F.dropout(torch.softmax(q @ k.mT, -1), p=self.p, training=self.training)\nreturn w @ v",
    "a longer buffer": 'return (q @ k.mT).masked_fill(~self.wide[:T, :T], float("-inf")).softmax(-1) @ v',
    "a fixed scale": "return (q @ k.mT / 2.0).softmax(-1) @ v",
    "operands that need parentheses": "kt = k.mT\nreturn (q @ (kt + 0 * kt)).softmax(-1) @ v",
    "a triangle made here": "m = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)\n"
    "return (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v",
    "a lower triangle made here": "m = torch.ones(T, T).tril() == 0\n"
    "return (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v",
    "torch.dropout": "w = torch.dropout((q @ k.mT).softmax(-1), p=self.p, train=self.training)\nreturn w @ v",
    "semicolons": "s = q @ k.mT; s = s / 2.0; w = s.softmax(-1); y = w @ v\nreturn y",
    "learned bias": "return (q @ k.mT + self.bias).softmax(-1) @ v",
    "prefix mask": 'return (q @ k.mT).masked_fill(~self.prefix, float("-inf")).softmax(-1) @ v',
    "mask from the batch": "m = torch.ones_like(q[0, 0, :, :1] @ k[0, 0, :, :1].mT).tril() > 0\n"
    'return (q @ k.mT).masked_fill(~m, float("-inf")).softmax(-1) @ v',
    "a mask cut at an offset": "S = k.size(-2)\n"
    'return (q @ k.mT).masked_fill(~self.tri[S - T : S, :S], float("-inf")).softmax(-1) @ v',
    "a window that is causal only here": "w = (q @ k.mT).masked_fill(~self.window[:T, :T], -math.inf)\n"
    "return w.softmax(-1) @ v",
    "a mask given by the caller": "def attend(q, k, v, mask):\n"
    '    return (q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ v\n'
    "return attend(q, k, v, self.tri)",
    "names reused": "x = q @ k.mT\nx = x * 0.5\nx = x.softmax(-1)\nx = x @ v\nx = x * 2\nreturn x",
}

# a mask that is not known to be causal for every caller and at every length stays a mask
MASKED = {"learned bias", "prefix mask", "mask from the batch", "a mask cut at an offset", "a mask given by the caller"}
MASKED |= {"a window that is causal only here"}

# written as the root of the head dimension, so that the default stays right at every size
DEFAULT_SCALE: set[str] = {"size of the keys"}

LEFT_ALONE = {
    "weights returned": ("w = (q @ k.mT).softmax(-1)\nreturn w @ v + 0 * w.sum()", "used elsewhere"),
    "weights kept": ("w = (q @ k.mT).softmax(-1)\nself.last = w.detach()\nreturn w @ v", "used elsewhere"),
    "scores kept": ("s = q @ k.mT\nself.last = s\nreturn s.softmax(-1) @ v", "used elsewhere|read again"),
    "learned temperature": ("return (q @ k.mT / self.temperature).softmax(-1) @ v", "scaled by a tensor"),
    "inverted mask": ("return (q @ k.mT).masked_fill(self.tri, -1e9).softmax(-1) @ v", "keeps no key"),
    "small fill": ("return (q @ k.mT).masked_fill(~self.tri, -1.0).softmax(-1) @ v", "does not remove"),
    "softmax over queries": ("return (q @ k.mT).softmax(-2) @ v", "over the keys"),
    "soft cap": ("return (torch.tanh(q @ k.mT / 5.0) * 5.0).softmax(-1) @ v", "stands between"),
    "mask after softmax": ("return ((q @ k.mT).softmax(-1) * self.tri) @ v", "stands between softmax"),
    "probabilities on the right": ("return v.mT @ (q @ k.mT).softmax(-1)", "sum over the keys"),
    "integer factor of the mask": ("return (q @ k.mT * self.tri).softmax(-1) @ v", "scaled by a tensor"),
    "a mask made of positions": (
        "i = torch.arange(T)\nreturn (q @ k.mT).masked_fill(i[None] > i[:, None], -1e9).softmax(-1) @ v",
        "keeps no key",
    ),
    "a computed diagonal": (
        "m = torch.ones(T, T, dtype=torch.bool).triu(k.size(-2) - T + 1)\n"
        "return (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v",
        "keeps no key",
    ),
    "a subclass of Dropout": ("w = self.always((q @ k.mT).softmax(-1))\nreturn w @ v", "body is elsewhere"),
    "an intermediate deleted": ("w = (q @ k.mT).softmax(-1)\ny = w @ v\ndel w\nreturn y", "read again"),
    "an assignment inside": ("return (q @ k.mT / (d := math.sqrt(4))).softmax(-1) @ v * d", "assigns"),
    "inside a lambda": ("s = q @ k.mT\nf = lambda s: s.softmax(-1) @ v\nreturn f(s)", "lambda"),
    "queries changed in between": (
        "q = q * 1\ns = q @ k.mT\nq.mul_(3)\nreturn s.softmax(-1) @ v + 0 * q",
        "in place",
    ),
    "gradients switched in between": (
        "torch.set_grad_enabled(False)\ns = q @ k.mT\ntorch.set_grad_enabled(True)\nreturn s.softmax(-1) @ v",
        "switched",
    ),
    "shape read later": ("w = (q @ k.mT).softmax(-1)\ny = w @ v\nreturn y * w.shape[-1]", "read again"),
}

SILENT = {
    "softmax alone": "return torch.softmax(q, -1) @ v.mT @ v",
    "log softmax": "return torch.log_softmax(q @ k.mT, -1) @ v",
    "router": "w = torch.softmax(q.mean(-2) * 2, -1)\nreturn q * w[..., None, :] + k * 0 + v * 0",
}


def results(body: str, folder: Path) -> tuple[list[Finding | Decline], str]:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    ctx, source = testing.context_of(RULE, text, step(10_000, nodes=0.5), folder)
    found = list(RULE.match(ctx))
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULE.rewrite(found[0], source)
        if isinstance(rewrite, Decline):  # shown, not applied
            return [rewrite], text
        assert isinstance(rewrite, Rewrite), rewrite
        return found, build([rewrite], lambda _: source).sources["example.py"]
    return found, text


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_and_the_same_function(name: str, tmp_path: Path) -> None:
    text = HEAD.replace("{body}", textwrap.indent(REWRITTEN[name], " " * 8))
    found, after = results(REWRITTEN[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert "scaled_dot_product_attention(" in after
    assert "softmax(" not in after.split("def forward")[1]
    assert ("self.training else 0.0" in after) == ("self.training" in REWRITTEN[name])
    assert ("scale=" in after) == (name not in DEFAULT_SCALE)
    assert ("attn_mask=" in after) == (name in MASKED)
    testing.check_same_function(text, after, RULE.tolerance, name)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_with_the_reason(name: str, tmp_path: Path) -> None:
    body, reason = LEFT_ALONE[name]
    found, _ = results(body, tmp_path)
    assert [type(f) for f in found] == [Decline], found
    assert isinstance(found[0], Decline)
    assert re.search(reason, found[0].reason), found[0].reason


@pytest.mark.parametrize("name", SILENT)
def test_no_attention_no_word(name: str, tmp_path: Path) -> None:
    assert results(SILENT[name], tmp_path)[0] == []
