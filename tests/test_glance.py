"""What the source alone shows: certain patterns are told, everything that leaves a doubt is not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from advisor.glance import KINDS, Glance, glances, look
from advisor.model import Decline, Finding, Safety
from advisor.rule import Context, Rule
from advisor.source import Source

HEAD = """\
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import einsum

WIDTH, HEADS = (64, 4) if torch.cuda.is_available() else (16, 2)


class Attention(nn.Module):
    def __init__(self, width, heads=8, eps=1e-6):
        super().__init__()
        self.scale = (width // heads) ** -0.5
        self.eps = eps
        self.attend, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.key, self.value = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.temperature = nn.Parameter(torch.ones(1))

"""


def source(body: str, name: str = "forward", arguments: str = "q, k, v, mask=None, bias=None") -> Source:
    method = f"    def {name}(self, {arguments}):\n" + textwrap.indent(textwrap.dedent(body), " " * 8)
    return Source("model.py", HEAD + method)


def lines(kind: str, text: Source) -> list[str]:
    """The source lines that are told, without indentation and comments."""
    return [text.lines[found.span.line - 1].split("#")[0].strip() for found in glances(text, kind)]


ATTENTION = [
    """
    y = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS), dim=-1) @ v  # here
    return y
    """,
    """
    att = torch.matmul(q, k.mT) * self.scale
    if mask is not None:
        att = att.masked_fill(mask == 0, float("-inf"))
    att = F.softmax(att, -1)
    if self.training:
        att = self.drop(att)
    return torch.matmul(att, v)  # here
    """,
    """
    sim = einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5 + bias
    att = sim.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return einsum("b h i j, b h j d -> b h i d", att, v)  # here
    """,
    """
    q, k, v = self.project(q).chunk(3, dim=-1)
    k = k.permute(0, 1, 3, 2).contiguous()
    dots = torch.where(mask, torch.bmm(q, k).float() / 8.0, -math.inf)
    weights = self.drop(self.attend(dots)).type_as(v)
    out = torch.bmm(weights, v)  # here
    return out
    """,
    """
    out = []
    for a, b, c in zip(q, k, v):
        weights = F.softmax(a @ b.transpose(-2, -1) * 0.125, dim=-1)
        out.append(weights @ c)  # here
    return torch.stack(out)
    """,
    """
    with torch.autocast("cuda"):
        scores = q @ k.transpose(-2, -1)
        scores *= self.scale
        return scores.softmax(-1) @ v  # here
    """,
]


@pytest.mark.parametrize("body", ATTENTION)
def test_attention_in_the_forms_people_write(body: str) -> None:
    text = source(body)
    (found,) = glances(text, "attention")
    assert text.lines[found.span.line - 1].rstrip().endswith("# here")
    assert found.span.function == "forward"


NO_ATTENTION = {
    "probabilities are returned": "p = (q @ k.mT).softmax(-1)\nreturn p @ v, p",
    "probabilities are kept": "p = (q @ k.mT).softmax(-1)\nself.last = p\nreturn p @ v",
    "probabilities feed a loss": "p = (q @ k.mT).softmax(-1)\nreturn p @ v - p.log().sum()",
    "scores are logged": "s = q @ k.mT\nlog(s)\nreturn s.softmax(-1) @ v",
    "scores are capped": "return torch.softmax(torch.tanh(q @ k.mT / 30) * 30, -1) @ v",
    "a finite fill": "return (q @ k.mT).masked_fill(mask, -1e9).softmax(-1) @ v",
    "a mask that multiplies": "return ((q @ k.mT) * mask).softmax(-1) @ v",
    "a scale that is a parameter": "return (q @ k.mT * self.temperature).softmax(-1) @ v",
    "softmax over another axis": "return (q @ k.mT).softmax(1) @ v",
    "softmax over an axis not told": "return F.softmax(q @ k.mT, dim=mask) @ v",
    "summed over the other axis": "return v @ (q @ k.mT).softmax(-1)",
    "a look-up in parameters": "return F.softmax(q @ self.key.t(), -1) @ self.value",
    "a product without a key": "return F.softmax(q @ k, -1) @ v",
    "the last probabilities leave a loop": "for a in q:\n    p = (a @ k.mT).softmax(-1)\n    y = p @ v\nreturn y, p",
    "probabilities are carried round a loop": (
        "p = 0\nfor a in q:\n    y = p @ v\n    p = (a @ k.mT).softmax(-1)\n    z = p @ v\nreturn y + z"
    ),
    "a branch changes them": "p = (q @ k.mT).softmax(-1)\nif mask:\n    p = p ** 2\nreturn p @ v",
    "a closure reads them": "p = (q @ k.mT).softmax(-1)\nself.probe = lambda: p\nreturn p @ v",
    "they are changed in place": "p = (q @ k.mT).softmax(-1)\np[mask] = 0\nreturn p @ v",
    "a fused form stands beside it": (
        "if self.flash:\n    return F.scaled_dot_product_attention(q, k, v)\nreturn (q @ k.mT).softmax(-1) @ v"
    ),
    "it is asked for": (
        "if hasattr(F, 'scaled_dot_product_attention'):\n    return fast(q, k, v)\nreturn (q @ k.mT).softmax(-1) @ v"
    ),
}


@pytest.mark.parametrize("body", NO_ATTENTION.values(), ids=NO_ATTENTION.keys())
def test_no_attention_where_anything_is_open(body: str) -> None:
    assert lines("attention", source(body)) == []


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("rmsnorm", "h = q.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\nreturn h", 1),
        ("rmsnorm", "return q / (q * q).mean(dim=-1, keepdim=True).add(1e-6).sqrt()", 0),
        ("rmsnorm", "return q / torch.sqrt(torch.mean(q * q, dim=-1, keepdim=True) + 1e-6) * self.weight", 0),
        ("layernorm", "u = q.mean(-1, True)\ns = (q - u).pow(2).mean(-1, True)\nreturn (q - u) / (s + 1e-5).sqrt()", 2),
        (
            "layernorm",
            "v, m = q.var(-1, keepdim=True, unbiased=False), q.mean(-1, keepdim=True)\n"
            "return (q - m) * torch.rsqrt(v + self.eps)",
            1,
        ),
        ("gelu", "return 0.5 * q * (1 + torch.tanh(math.sqrt(2 / math.pi) * (q + 0.044715 * q**3)))", 0),
        ("gelu", "return q * 0.5 * (1.0 + torch.erf(q / math.sqrt(2.0)))", 0),
    ],
)
def test_norms_and_gelu(kind: str, body: str, told: int) -> None:
    assert lines(kind, source(body)) == [body.splitlines()[told]]


@pytest.mark.parametrize(
    "body",
    [
        "return (q - q.mean(-1, keepdim=True)) / (q.std(-1, keepdim=True) + self.eps)",
        "return (q - q.mean(-1, keepdim=True)) / torch.sqrt(q.var(-1, keepdim=True) + self.eps)",
        "u = q.mean(1, keepdim=True)\ns = (q - u).pow(2).mean(1, keepdim=True)\nreturn (q - u) / torch.sqrt(s + 1e-5)",
        "s = q.pow(2).mean(-1, keepdim=True)\nreturn q * torch.rsqrt(s + self.eps), s",
        "return q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + self.eps)",
        "return q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True)) + self.eps",
        "t = torch.tanh(0.7978845608 * (q + 0.044715 * q**3))\nreturn 0.5 * q * (1 + t) + t",
        "return 0.5 * q * (1 + torch.tanh(0.8 * (q + 0.044715 * q**3)))",
        "return q * torch.sigmoid(1.702 * q)",
    ],
)
def test_look_alikes_are_not_told(body: str) -> None:
    text = source(body)
    assert [line for kind in KINDS for line in lines(kind, text)] == []


def test_a_class_that_nothing_uses_is_not_told() -> None:
    unused = source("return (q @ k.mT).softmax(-1) @ v").text
    assert lines("attention", Source("model.py", unused))  # a library
    script = f"{unused}\n\ndef main():\n    return 1\n\n\nmain()\n"
    assert lines("attention", Source("train.py", script)) == []
    assert lines("attention", Source("train.py", script.replace("return 1", "return Attention(8)")))


def test_every_kind_says_what_it_saw() -> None:
    for kind, entry in KINDS.items():
        assert entry.message, kind
        assert entry.fused, kind


class Sees(Rule):
    id = "sees"
    safety = Safety.NUMERICS

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        return iter(())

    def rewrite(self, finding: Finding, source: Source) -> Any:
        raise AssertionError

    def glance(self, source: Source) -> Iterator[Glance]:
        return glances(source, "attention")


class Raises(Sees):
    id = "raises"

    def glance(self, source: Source) -> Iterator[Glance]:
        raise RuntimeError("half written")


def test_rules_are_asked_by_id_and_one_that_raises_is_named() -> None:
    text = source(ATTENTION[0])
    found, errors = look({"sees": Sees(), "raises": Raises()}, text)
    assert [rule for rule, _ in found] == ["sees"]
    assert [str(error) for error in errors] == ["rule raises raised RuntimeError: half written"]
    moved = Source("model.py", "\n" + text.text)
    assert [f.fingerprint("sees") for f in glances(moved, "attention")] == [found[0][1].fingerprint("sees")]
