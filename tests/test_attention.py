"""naive-attention on the ways people write attention: what is rewritten is right, what is left alone says why."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

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
    "shape read later": (
        "w = (q @ k.mT).softmax(-1)\ny = w @ v\nreturn y * w.shape[-1]",
        "read again for its shape or dtype",
    ),
    "keys cut in two": (
        "s = (q @ k.mT).view(2, 3, 8, 2, 4) + self.add[:2, :4]\nreturn s.view(2, 3, 8, 8).softmax(-1) @ v",
        "cut or joined after the product",
    ),
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


# ------------------------------------------------------------------------------------------------------- other callers

FLAT = "q, k, v = (t.flatten(0, 1) for t in (q, k, v))\n"
FLOAT = "torch.randn(2, 1, 8, 8)"
TRIANGLE = "torch.ones(8, 8).tril()"
BOOL, INT = f"{TRIANGLE} == 1", f"({TRIANGLE} * 3).long()"
HANDED = {  # body, mask of the recorded run, masks of other callers, what the new call holds
    "added": (
        "return (q @ k.mT + m).softmax(-1) @ v",
        FLOAT,
        [BOOL, INT, "torch.randn(3, 8, 8).half()"],
        "m.to(q.dtype)",
    ),
    "subtracted": ("return (q @ k.mT - m.mT).softmax(-1) @ v", FLOAT, [INT, "torch.randn(8, 8)"], "-m.mT.to(q.dtype)"),
    "added and scaled": ("return ((q @ k.mT + m) / 3).softmax(-1) @ v", FLOAT, [BOOL, INT], "m.to(q.dtype) / 3"),
    "added before a mask": (
        "return (q @ k.mT + m).masked_fill(~self.tri, -math.inf).softmax(-1) @ v",
        FLOAT,
        [BOOL, INT],
        "m.to(q.dtype).masked_fill(",
    ),
    "added where it is given": (
        "s = q @ k.mT\nif m is not None:\n    s = s + m[:, :, :, : k.size(-2)]\nreturn s.softmax(-1) @ v",
        "torch.randn(2, 1, 8, 9)",
        ["None", "torch.randn(1, 1, 8, 9) > 0"],
        "m[:, :, :, : k.size(-2)].to(q.dtype) if m is not None else None",
    ),
    "inverted here": ("n = (1.0 - m) * -1e4\nreturn (q @ k.mT + n).softmax(-1) @ v", TRIANGLE, [INT], "n.to(q.dtype)"),
    "kept in an attribute": (
        "self.keep(m)\nreturn (q @ k.mT + self.kept).softmax(-1) @ v",
        FLOAT,
        [BOOL],
        "self.kept.to(q.dtype)",
    ),
    "read by an inner function": (
        "def inner(a, b, c):\n    return (a @ b.mT + m).softmax(-1) @ c\nreturn inner(q, k, v)",
        FLOAT,
        [BOOL],
        "m.to(a.dtype)",
    ),
    "of a query without a name": (
        "return (self.drop(q) @ k.mT + m).softmax(-1) @ v",
        FLOAT,
        [BOOL],
        "self.drop(q), k, v, attn_mask=m.to(k.dtype)",
    ),
    "two axes on three": (
        f"{FLAT}return torch.bmm((torch.bmm(q, k.mT) + m).softmax(-1), v)",
        "torch.randn(8, 8)",
        [BOOL, "torch.randn(6, 8, 8)", "torch.randn(1, 1, 8)"],
        "m.unsqueeze(-3).to(q.dtype)",
    ),
    "three axes of bool": (
        f"{FLAT}return torch.bmm(torch.bmm(q, k.mT).masked_fill(m == 0, -math.inf).softmax(-1), v)",
        "torch.ones(6, 8, 8).tril()",
        [TRIANGLE, INT, BOOL],
        "attn_mask=(m != 0).unsqueeze(-3)",
    ),
    "one axis": (
        "return (q @ k.mT + m).softmax(-1) @ v",
        "torch.randn(8)",
        [FLOAT, BOOL, "torch.tensor(1.5)"],
        "torch.atleast_2d(m).to(q.dtype)",
    ),
    "heads of another number": (
        f"B, H = q.shape[:2]\n{FLAT}s = torch.bmm(q, k.mT).view(-1, self.heads, 8, 8) + m\n"
        "return torch.bmm(s.view(-1, 8, 8).softmax(-1), v)",
        FLOAT,
        [BOOL],
        "q.unflatten(0, (-1, self.heads))",
    ),
    "a dtype that is shown": (
        "n = m.to(q.dtype)\nreturn (q @ k.mT + n).softmax(-1) @ v",
        FLOAT,
        [BOOL],
        "attn_mask=n,",
    ),
    "a prefix that is empty here": (
        "t = torch.ones(T, T, dtype=torch.bool).tril()\nt[:, : m.size(0)] = True\n"
        "return (q @ k.mT).masked_fill(~t, -math.inf).softmax(-1) @ v",
        "torch.zeros(0)",
        ["torch.zeros(3)"],
        "attn_mask=t,",
    ),
    "a triangle that a flag changes": (
        "t = torch.ones(T, T, dtype=torch.bool).tril()\nif m is not None:\n    t |= m\n"
        "return (q @ k.mT).masked_fill(~t, -math.inf).softmax(-1) @ v",
        "None",
        [BOOL, "torch.ones(8, 8) == 1"],
        "attn_mask=t,",
    ),
    "kept where it is given": (
        "s = q @ k.mT\nif m is not None:\n    s = s.masked_fill(~m, -math.inf)\nreturn s.softmax(-1) @ v",
        BOOL,
        ["None"],
        "attn_mask=m,",
    ),
    "changed and kept where it is given": (
        "s = q @ k.mT\nif m is not None:\n    m = m[None]\n    s = s.masked_fill(m == 0, -math.inf)\n"
        "return s.softmax(-1) @ v",
        BOOL,
        ["None", INT],
        "attn_mask=m != 0 if m is not None else None",
    ),
}
NOT_FOR_EVERY_CALLER = {
    "axes exchanged": (
        "q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))\n"
        "s = torch.einsum('ibhd,jbhd->ijbh', q, k).masked_fill(m == 0, -math.inf)\n"
        "return torch.einsum('ijbh,jbhd->ibhd', s.softmax(1), v)",
        "torch.ones(8, 8, 1, 1).tril()",
        "axes of a mask that a caller gives",
    ),
    "heads in one axis with the batch": (
        f"B, H = q.shape[:2]\n{FLAT}s = (torch.bmm(q, k.mT) + m).view(B, H, 8, 8)\n"
        "return torch.bmm(s.view(B * H, 8, 8).softmax(-1), v)",
        "torch.randn(8, 8)",
        "tell apart heads",
    ),
    "a condition that changes": (
        "use = m is not None\ns = q @ k.mT\nif use:\n    s = s + m\nuse = False\nreturn s.softmax(-1) @ v",
        FLOAT,
        "`use` changes after",
    ),
    "a finite fill": ("return (q @ k.mT).masked_fill(m == 0, -1e4).softmax(-1) @ v", TRIANGLE, "keeps no key"),
    "a finite fill of a mask that is written again": (
        "self.tri[0, 0] = self.heads > 1\nreturn (q @ k.mT).masked_fill(~self.tri, -1e9).softmax(-1) @ v",
        FLOAT,
        "keeps no key|in place",
    ),
    "a bias as low as float32 goes": (
        "return (q @ k.mT + m).softmax(-1) @ v",
        f"({TRIANGLE} - 1) * torch.finfo(torch.float32).max",
        "other gradients",
    ),
    "dropout before another": (
        "s = self.drop(q) @ k.mT\nv = self.other(v)\nreturn s.softmax(-1) @ v",
        FLOAT,
        r"`self.drop\(q\)` draws random numbers",
    ),
    "noise before another": (
        "s = (q + torch.rand_like(q)) @ k.mT\nv = v * torch.rand_like(v)\nreturn s.softmax(-1) @ v",
        FLOAT,
        "draws random numbers",
    ),
    "dropout before a module with one": (
        "s = self.drop(q) @ k.mT\nv = self.block(v)\nreturn s.softmax(-1) @ v",
        FLOAT,
        "draws random numbers",
    ),
    "two inputs dropped": (
        "return (self.drop(k) @ self.other(q).mT).softmax(-2).transpose(-2, -1) @ v",
        FLOAT,
        "draw random numbers, in an order",
    ),
}
SIMPLE = {  # what needs no conversion at all
    "transposed keys": ("return (q @ k.mT).softmax(-1) @ v", "F.scaled_dot_product_attention(q, k, v, scale=1.0)"),
    "permuted keys": ("return (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v", "(q, k, v, scale=1.0)"),
    "keys permuted twice": (
        "kt = k.transpose(1, 2).permute(0, 2, 3, 1)\nreturn (q @ kt).softmax(-1) @ v",
        "(q, k, v, scale=1.0)",
    ),
    "not in training": ("return F.dropout((q @ k.mT).softmax(-1), 0.5, training=False) @ v", "(q, k, v, scale=1.0)"),
    "always": (
        "s = q @ k.mT\nif True:\n    s = s.masked_fill(~self.tri, -math.inf)\nreturn s.softmax(-1) @ v",
        "(q, k, v, is_causal=True, scale=1.0)",
    ),
    "three axes of another number": (
        f"{FLAT}return (q @ k.mT).softmax(-1) @ v",
        "(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), scale=1.0).squeeze(-3)",
    ),
    "queries scaled in place": (
        "q = q * 1\nq *= q.size(-1) ** -0.5\nreturn (q @ k.transpose(-1, -2)).softmax(-1) @ v",
        "F.scaled_dot_product_attention(q, k, v, scale=1.0)",
    ),
    "keys that are square": (
        "kt = k[:, :, :4].mT + 0\nv = v[:, :, :4]\nreturn (q @ kt / math.sqrt(kt.size(-1))).softmax(-1) @ v",
        "scale=1.0 / math.sqrt(kt.size(-1))",
    ),
}


ELSEWHERE = {  # body, a line of the constructor, code after the class, the reason
    "a temperature that is learned in another instance": (
        "return (q @ k.mT / self.tau).softmax(-1) @ v",
        "self.tau = nn.Parameter(torch.tensor(5.0)) if m else 5.0",
        "",
        "`self.tau` may be a tensor",
    ),
    "a scale per head in another instance": (
        "return (q @ k.mT * self.logit).softmax(-1) @ v",
        "self.logit = torch.ones(3, 1, 1) if m else 0.3",
        "",
        "`self.logit` may be a tensor",
    ),
    "a scale that another call learns": (
        "return attend(q, k, v, 0.3)",
        "",
        "def attend(q, k, v, scale):\n    return (q @ k.mT * scale).softmax(-1) @ v\n\n\n"
        "def other(x):\n    tau = nn.Parameter(torch.ones(()))\n    return attend(x, x, x, scale=2 * tau)\n",
        "`scale` may be a tensor",
    ),
    "a bias that is a number by its default": (
        "return attend(q, k, v, self.bias)",
        "",
        "def attend(q, k, v, bias=0.0):\n    s = q @ k.mT\n    s = s + bias\n    return s.softmax(-1) @ v\n",
        "`bias` may be a number",
    ),
    "a bias that is a number in another instance": (
        "return (q @ k.mT + self.shift).softmax(-1) @ v",
        "self.shift = 0.0 if m else torch.zeros(8, 8)",
        "",
        "`self.shift` may be a number",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_not_right_for_every_instance(name: str, tmp_path: Path) -> None:
    """What is a number in the recorded run may be a tensor elsewhere, and the other way round."""
    body, line, after, reason = ELSEWHERE[name]
    head = HEAD.replace("def __init__(self):", "def __init__(self, m=False):").replace(
        "        self.p = 0.0\n", f"        self.p = 0.0\n        {line}\n"
    )
    text = head.replace("{body}", textwrap.indent(body, " " * 8)) + f"\n\n{after}"
    ctx, _ = testing.context_of(RULE, text, step(10_000, nodes=0.5), tmp_path)
    found = list(RULE.match(ctx))
    assert [type(f) for f in found] == [Decline], found
    assert isinstance(found[0], Decline) and re.search(reason, found[0].reason), found[0].reason


@pytest.mark.parametrize(
    "body",
    [
        "x = v\nfor i in range(2):\n    w = (q @ k.mT * (0.2 + i * 0.1)).softmax(-1)\n    x = w @ x\nreturn x",
        "x = attend(q, k, v, 0.5)\nreturn attend(q, k, x, 4**-0.5 / 3)\n",
    ],
    ids=["a loop", "two calls"],
)
def test_every_place_is_compared_at_its_own_scale(body: str, tmp_path: Path) -> None:
    attend = "\n\ndef attend(q, k, v, scale):\n    return (q @ k.mT * scale).softmax(-1) @ v\n"
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8)) + attend
    ctx, source = testing.context_of(RULE, text, step(10_000, nodes=0.5), tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding) and found.replacement is not None, found
    assert len(found.replacement.places) == 2
    rewrite = RULE.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    testing.check_regions(rewrite, ctx.graphs, body)
    after = build([rewrite], lambda _: source).sources["example.py"]
    testing.check_same_function(text, after, RULE.tolerance, body)


def handed(body: str, mask: str, folder: Path) -> tuple[list[Finding | Decline], str, str]:
    """What is found in a method that is given a mask, the file and the file rewritten."""
    head = HEAD.replace("def forward(self, q, k, v):", "def forward(self, q, k, v, m=None):")
    head = head.replace(
        "        self.p = 0.0\n",
        "        self.p = 0.0\n        self.heads = 3\n        self.other = nn.Dropout(0.0)\n"
        "        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))\n",
    )
    head = head.replace("    def forward", "    def keep(self, mask):\n        self.kept = mask\n\n    def forward")
    text = head.replace("{body}", textwrap.indent(body, " " * 8)).replace(
        "in range(3)]\n", f"in range(3)] + [{mask}]\n"
    )
    ctx, source = testing.context_of(RULE, text, step(10_000, nodes=0.5), folder)
    found = list(RULE.match(ctx))
    if len(found) != 1 or not isinstance(found[0], Finding):
        return found, text, text
    rewrite = RULE.rewrite(found[0], source)
    if isinstance(rewrite, Decline):
        return [rewrite], text, text
    return found, text, build([rewrite], lambda _: source).sources["example.py"]


def computed(text: str, mask: str, folder: Path) -> Any:
    import torch

    (folder / "run.py").write_text(text, encoding="utf-8")
    module = testing.load_module(folder / "run.py")
    given = eval(mask, {"torch": torch})
    torch.manual_seed(0)
    return module.Model()(*module.get_inputs()[:3], given)


@pytest.mark.parametrize("name", HANDED)
def test_right_for_every_caller(name: str, tmp_path: Path) -> None:
    """The mask of the recorded run and those that another caller may give."""
    import torch

    body, recorded, others, holds = HANDED[name]
    found, text, after = handed(body, recorded, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert holds in re.sub(r"\s+", " ", after).replace("( ", "("), after
    for mask in (recorded, *others):
        old, new = computed(text, mask, tmp_path), computed(after, mask, tmp_path)
        torch.testing.assert_close(new, old, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NOT_FOR_EVERY_CALLER)
def test_not_right_for_every_caller(name: str, tmp_path: Path) -> None:
    body, recorded, reason = NOT_FOR_EVERY_CALLER[name]
    found, _, _ = handed(body, recorded, tmp_path)
    assert [type(f) for f in found] == [Decline], found
    assert isinstance(found[0], Decline) and re.search(reason, found[0].reason), found[0].reason


@pytest.mark.parametrize("name", SIMPLE)
def test_nothing_is_said_that_changes_nothing(name: str, tmp_path: Path) -> None:
    body, holds = SIMPLE[name]
    found, _, after = handed(body, "None", tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert holds in re.sub(r"\s+", " ", after).replace("( ", "(").replace(" )", ")"), after


def test_a_finite_fill_of_a_buffer_that_is_written_by_another_name_stays(tmp_path: Path) -> None:
    body = "return (q @ k.mT).masked_fill(~self.tri, -1e9).softmax(-1) @ v\n\n"
    body += "def pad(net, n):\n    mask = net.tri\n    mask[:n] = False"
    found, _, _ = handed(body, FLOAT, tmp_path)
    assert [type(f) for f in found] == [Decline], found
    assert isinstance(found[0], Decline) and "keeps no key" in found[0].reason, found[0].reason
