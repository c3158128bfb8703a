"""How many axes the source shows a tensor to have, and what attention does with axes counted from the front."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding
from advisor.patterns.extents import Extents
from advisor.rule import step
from advisor.source import Source

HEAD = """\
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


def heads(t):
    return t.view(t.shape[0], -1, 3, 8).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.other = Other()

    def forward(self, x, y):
{body}
"""
SHOWN = {
    "B, T, C = x.shape\nx": 3,
    "B, T, C = x.size()\nx.float() * 2": 3,
    "b, n, _, h = *x.shape, 4\nx": 3,
    "assert x.dim() == 2\nx": 2,
    "if x.ndim != 4:\n    raise ValueError\nx": 4,
    "B, T, C = x.shape\nself.linear(x)": 3,
    "B, T, C = x.shape\nx = x + self.linear(x)\nx": 3,
    "x.view(-1, 8)": 2,
    "x.reshape((2, 3, 4))": 3,
    "x.flatten(0, -2)": 2,
    "x.flatten(1)": 2,
    "x.permute(0, 2, 1, 3).contiguous()": 4,
    "torch.einsum('bhid,bhjd->bhij', x, y)": 4,
    "torch.einsum('b h i d, b h j d -> b h i j', x, y)": 4,
    "rearrange(x, 'b n (h d) -> b h n d', h=4)": 4,
    "rearrange(x, 'b h n d -> (b h) n d')": 3,
    "q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> b h n d', h=4), (x, x, x))\nk": 4,
    "q, k = (t.view(2, 3, 4) for t in (x, y))\nk": 3,
    "qkv = x.reshape(2, 3, 3, 4, 8).permute(2, 0, 3, 1, 4)\nq, k, v = qkv\nq": 4,
    "qkv = x.reshape(2, 3, 3, 4, 8)\nq, k, v = qkv.unbind(2)\nq": 4,
    "qkv = x.view(2, 3, 24).chunk(3, dim=-1)\nq, k, v = qkv\nq": 3,
    "qkv = x.view(3, 2, 4)\nqkv[0]": 2,
    "heads(x)": 4,
    "torch.bmm(x, y)": 3,
    "x.view(2, 3)[:, None]": 3,
    "x.view(2, 3).unsqueeze(0)": 3,
    "x.view(2, 3, 4).mean(-1, keepdim=True)": 3,
    "x.view(2, 3, 4).mean(-1)": 2,
    "x.view(2, 3, 4) if self.training else x.view(3, 2, 4)": 3,
}
UNSHOWN = [
    "x",
    "B, *_ = x.shape\nx",
    "x.view(*y.shape)",
    "x.view(y.shape)",
    "x.squeeze(1)",
    "B, T, C = x.shape\nx = self.other(x)\nx",
    "B, T, C = x.shape\nx + y",
    "B, T, C = y.shape\nx",
    "if self.training:\n    B, T, C = x.shape\nx",
    "if self.training:\n    x = x.view(2, 3)\nx",
    "x.view(2, 3, 4) if self.training else x.view(6, 4)",
    "torch.einsum('...id,...jd->...ij', x, y)",
    "rearrange(x, '... (h d) -> ... h d', h=4)",
    "[x.dim() for x in (x, y)]",
    "for _ in range(2):\n    x = x[None]\nx",
]


def rank(body: str) -> int | None:
    source = Source("example.py", HEAD.replace("{body}", textwrap.indent(body, " " * 8)))
    last = max((n for n in ast.walk(source.tree) if isinstance(n, ast.Expr)), key=lambda n: n.lineno)
    return Extents(source).rank(last.value, last)


@pytest.mark.parametrize("body", SHOWN)
def test_the_rank_is_shown(body: str) -> None:
    assert rank(body) == SHOWN[body]


@pytest.mark.parametrize("body", UNSHOWN)
def test_the_rank_is_not_shown(body: str) -> None:
    assert rank(body) is None


ATTENTION = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, q, k, v):
{body}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn({shape}, requires_grad=True) for _ in range(3)]
"""
WIDE = "B, T, C = q.shape\nq, k, v = (t.view(B, T, 2, 4).transpose(1, 2) for t in (q, k, v))\n"
FOUND = {
    "a view": WIDE + "return F.softmax(q @ k.transpose(-2, -1) / 2.0, dim=3) @ v",
    "bmm": "return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=2), v)",
    "a transpose in the product": "return F.softmax(q @ k.transpose(1, 2), dim=2) @ v",
    "einsum": "return torch.softmax(torch.einsum('bid,bjd->bij', q, k), 2) @ v",
}


def matched(body: str, folder: Path) -> list[Finding | Decline]:
    pytest.importorskip("torch")
    rule = registry.load()[0]["naive-attention"].rule
    text = ATTENTION.replace("{body}", textwrap.indent(body, " " * 8)).replace("{shape}", "2, 6, 8")
    ctx, _ = testing.context_of(rule, text, step(10_000, nodes=0.5), folder)
    return list(rule.match(ctx))


@pytest.mark.parametrize("name", FOUND)
def test_attention_over_an_axis_from_the_front_is_found_where_the_rank_is_shown(name: str, tmp_path: Path) -> None:
    found = matched(FOUND[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found


def test_attention_over_an_axis_from_the_front_is_declined(tmp_path: Path) -> None:
    (found,) = matched("return F.softmax(q @ k.transpose(-2, -1), dim=2) @ v", tmp_path)
    assert isinstance(found, Decline)
    assert "axis 2 is the last axis only for tensors of rank 3, and the source does not show the rank" in found.reason
