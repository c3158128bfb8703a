"""Exam 1: the attention forms that PyTorch's own fusion tests cover, those of well-known models, the traps beside them.

The numbered forms follow the order of `torch/_inductor/fx_passes/fuse_attention.py`; each is written anew as a module.
"""

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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.scale = 8 ** -0.5
        self.softmax = nn.Softmax(dim=-1)
        self.heads = 3
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.bias = nn.Parameter(torch.randn(3, 6, 6))
        self.mix = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("tri", torch.tril(torch.ones(6, 6, dtype=torch.bool)), persistent=False)

    def forward(self, q, k, v, real, position):
        B, H, T, D = q.shape
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    tensors = [torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3)]
    return [*tensors, torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]), torch.randn(1, 3, 6, 6)]
"""

PERM = "q, k, v = (t.transpose(1, 2).contiguous().permute(0, 2, 1, 3) for t in (q, k, v))\n"
FLAT = "qf, kf, vf = q.reshape(B * H, T, D), k.reshape(B * H, T, D), v.reshape(B * H, T, D)\n"
LONG = "real = real[:, None, None, :]\n"

# name -> (body, text the rewritten forward must hold)
REWRITTEN = {
    "1 divided": ("return torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(8)).softmax(dim=-1).matmul(v)", ""),
    "2 multiplied": (
        "return (torch.matmul(q, k.transpose(-2, -1)) * self.scale).softmax(-1).matmul(v)",
        "scale=self.scale",
    ),
    "3 divided, dropout": (
        "return F.dropout(torch.matmul(q, k.transpose(-2, -1)).div(3.0).softmax(-1), p=0.0).matmul(v)",
        "dropout_p=0.0",
    ),
    "4 multiplied, dropout": ("return self.drop((q @ k.mT * 0.4).softmax(-1)) @ v", "dropout_p=self.drop.p"),
    "5 additive": (
        "return torch.softmax((q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))) + position, dim=-1) @ v",
        "attn_mask=position",
    ),
    "5 bool made float": (
        "mask = torch.zeros(T, T).masked_fill(self.tri.logical_not(), -float('inf'))\n"
        "return torch.softmax((q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))) + mask, dim=-1) @ v",
        "attn_mask=mask",
    ),
    "6 additive, dropout": (
        "w = torch.softmax((q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))) + position, dim=-1)\n"
        "w = torch.dropout(w, 0.0, True)\nreturn w @ v",
        "attn_mask=position",
    ),
    "7 cast, dropout": (
        PERM + "div = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))\ndiv = div.to(torch.float32)\n"
        "w = torch.softmax(div, dim=-1)\nw = torch.dropout(w, 1e-11, True)\nw = w.to(q.dtype)\nreturn w @ v",
        "dropout_p=1e-11",
    ),
    "9 queries divided before": (
        PERM + "q = q / math.sqrt(q.size(-1))\nw = (q @ k.transpose(-2, -1)).to(torch.float32).softmax(-1)\n"
        "return w.to(q.dtype) @ v",
        "F.scaled_dot_product_attention(",
    ),
    "11 BERT layout": (
        "q = q.permute(0, 2, 1, 3)\nk = k.permute(0, 2, 1, 3)\nv = v.permute(0, 2, 1, 3)\n"
        "q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)\n"
        "return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)).div(4.0), -1), v)",
        "scale=1.0 / 4.0",
    ),
    "13 three dimensions": (
        FLAT + "w = torch.bmm(qf, kf.transpose(1, 2)).softmax(dim=-1)\nw = F.dropout(w, p=0.0)\n"
        "return torch.bmm(w, vf).view(B, H, T, D)",
        "qf.unsqueeze(1)",
    ),
    "15 padding mask viewed and expanded": (
        "scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8)\n"
        "mask = (real == 0).view(B, 1, 1, T).expand_as(scores)\n"
        "scores = scores.masked_fill(mask, -float('inf'))\nreturn torch.softmax(scores, dim=-1) @ v",
        "attn_mask=~(real == 0).view(B, 1, 1, T)",
    ),
    "18 where and a full() divisor, lowest float": (
        "w = torch.matmul(q, k.permute(0, 1, 3, 2))\n"
        "w = w / torch.full([], v.size(-1) ** 0.5, dtype=w.dtype, device=w.device)\n"
        "w = torch.where(self.tri[:T, :T], w, torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype))\n"
        "return self.drop(w.softmax(dim=-1)).matmul(v)",
        "is_causal=True",
    ),
    "19 where and additive": (
        "w = q @ k.mT / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype)\n"
        "w = torch.where(self.tri[:T, :T], w, torch.finfo(w.dtype).min) + position\n"
        "w = F.softmax(w, dim=-1, dtype=torch.float32).type(v.dtype)\nreturn w @ v",
        "masked_fill(",
    ),
    "20 DistilBERT 4.44": (
        "q = q / math.sqrt(8)\nscores = torch.matmul(q, k.transpose(2, 3))\n"
        "mask = (real == 0).view(B, 1, 1, T).expand_as(scores)\nscores = scores.masked_fill(mask, float('-inf'))\n"
        "weights = F.softmax(scores, dim=-1)\nweights = self.drop(weights)\nreturn torch.matmul(weights, v)",
        "attn_mask=~(real == 0).view(B, 1, 1, T)",
    ),
    "21 T5": (
        "scores = torch.matmul(q, k.transpose(3, 2))\nscores += position\n"
        "attn_weights = F.softmax(scores.float(), dim=-1).type_as(scores)\n"
        "attn_weights = F.dropout(attn_weights, p=0.0, training=self.training)\n"
        "return torch.matmul(attn_weights, v)",
        "scale=1.0",
    ),
    "24 MBart": (
        FLAT + "mask = position\nattn_weights = torch.bmm(qf, kf.transpose(1, 2))\n"
        "attn_weights = attn_weights.view(B, self.heads, T, T) + mask\n"
        "attn_weights = attn_weights.view(B * self.heads, T, T)\n"
        "attn_weights = F.softmax(attn_weights, dim=-1)\n"
        "attn_probs = F.dropout(attn_weights, p=0.0, training=self.training)\n"
        "out = torch.bmm(attn_probs, vf)\nreturn out.view(B, H, T, D)",
        "attn_mask=mask",
    ),
    "28 Visformer": (
        "qkv = torch.stack([q, k, v])\nq, k, v = qkv[0], qkv[1], qkv[2]\n"
        "attn = (q @ k.transpose(-2, -1)) * self.scale\nattn = attn.softmax(dim=-1)\nattn = self.drop(attn)\n"
        "return attn @ v",
        "scale=self.scale",
    ),
    "29 both sides": (
        "a = math.sqrt(0.3)\nw = (q * a) @ (k * a).transpose(-2, -1) + position\nreturn w.softmax(-1) @ v",
        "scale=a * a",
    ),
    "llama2.c slow path": (
        "mask = torch.full((1, 1, T, T), float('-inf')).triu(1)\n"
        "scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(8)\nscores = scores + mask[:, :, :T, :T]\n"
        "scores = F.softmax(scores.float(), dim=-1).type_as(q)\nscores = self.drop(scores)\n"
        "return torch.matmul(scores, v)",
        "F.scaled_dot_product_attention(",
    ),
    "whisper: both scaled, fp32 softmax": (
        "scale = 8 ** -0.25\nqk = (q * scale) @ (k * scale).transpose(-1, -2)\nqk = qk.float()\n"
        "w = F.softmax(qk, dim=-1).to(q.dtype)\nreturn w @ v",
        "scale=scale * scale",
    ),
    "einsum with spaces": (
        "dots = torch.einsum('b h i d, b h j d -> b h i j', q, k) * self.scale\nattn = dots.softmax(dim=-1)\n"
        "return torch.einsum('b h i j, b h j d -> b h i d', attn, v)",
        "scale=self.scale",
    ),
    "einsum over bthd": (
        "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)\n"
        "w = torch.einsum('bthd,bshd->bhts', q, k) / math.sqrt(8)\nw = w.softmax(-1)\n"
        "return torch.einsum('bhts,bshd->bthd', w, v)",
        ".transpose(1, 2)",
    ),
    "guided diffusion": (
        FLAT + "qf, kf, vf = qf.mT, kf.mT, vf.mT\nscale = 1 / math.sqrt(math.sqrt(D))\n"
        "weight = torch.einsum('bct,bcs->bts', qf * scale, kf * scale)\n"
        "weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)\n"
        "a = torch.einsum('bts,bcs->bct', weight, vf)\nreturn a",
        "scale=scale * scale",
    ),
    "labml layout, softmax over the second axis": (
        "q, k, v = q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)\n"
        "mask = self.tri[:, :, None, None]\nscores = torch.einsum('ibhd,jbhd->ijbh', q, k)\nscores *= self.scale\n"
        "scores = scores.masked_fill(mask == 0, float('-inf'))\nattn = scores.softmax(dim=1)\n"
        "return torch.einsum('ijbh,jbhd->ibhd', attn, v)",
        "permute(",
    ),
    "LDM spatial: transposed product": (
        FLAT + "qs, ks, vs = qf.mT, kf.mT, vf.mT\n"
        "w_ = torch.bmm(qs.permute(0, 2, 1), ks)\nw_ = w_ * (int(D) ** (-0.5))\nw_ = F.softmax(w_, dim=2)\n"
        "w_ = w_.permute(0, 2, 1)\nh_ = torch.bmm(vs, w_)\nreturn h_",
        "unsqueeze(1)",
    ),
    "mask before scale": (
        "scores = q @ k.transpose(2, 3)\nscores.masked_fill_(~self.tri[:T, :T], -torch.inf)\n"
        "w = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)\nreturn self.drop(w) @ v",
        "is_causal=True",
    ),
    "minGPT": (
        "att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))\n"
        "att = att.masked_fill(self.tri[:T, :T] == 0, float('-inf'))\natt = F.softmax(att, dim=-1)\n"
        "att = self.drop(att)\nreturn att @ v",
        "is_causal=True",
    ),
    "softmax by hand": (
        "s = q @ k.mT / 3.0\ne = torch.exp(s - s.max(dim=-1, keepdim=True)[0])\n"
        "p = e / e.sum(dim=-1, keepdim=True)\nreturn p @ v",
        "scale=1.0 / 3.0",
    ),
    "softmax by hand without the maximum": ("e = (q @ k.mT / 3.0).exp()\nreturn (e / e.sum(-1, keepdim=True)) @ v", ""),
    "exponential of log_softmax": ("return F.log_softmax(q @ k.mT / 3.0, dim=-1).exp() @ v", ""),
    "baddbmm": (
        FLAT + "s = torch.baddbmm(qf.new_empty(B * H, T, T), qf, kf.transpose(-1, -2), beta=0, alpha=self.scale)\n"
        "return torch.bmm(s.softmax(dim=-1), vf)",
        "scale=self.scale",
    ),
    "multiplied mask": (
        "b = self.tri[:T, :T].float()\nw = q @ k.mT\nw = w * b + -1e9 * (1 - b)\nreturn w.softmax(-1) @ v",
        "F.scaled_dot_product_attention(",
    ),
    "padding and causal": (
        LONG + "s = q @ k.mT / 3.0\ns = s.masked_fill(~self.tri[:T, :T], float('-inf'))\n"
        "s = s.masked_fill(real == 0, float('-inf'))\nreturn s.softmax(-1) @ v",
        " & ",
    ),
    "a mask that may be None, given": (
        "mask = real[:, None, None, :]\nscores = q @ k.transpose(-2, -1) / math.sqrt(8)\nif mask is not None:\n"
        "    scores = scores.masked_fill(mask == 0, float('-inf'))\nw = scores.softmax(-1)\n"
        "if self.drop is not None:\n    w = self.drop(w)\nreturn w @ v",
        "attn_mask=mask != 0 if mask is not None else None",
    ),
    "causal under a flag": (
        "causal = self.heads == 3\nscores = q @ k.transpose(-2, -1) / math.sqrt(8)\nif causal:\n"
        "    scores = scores.masked_fill(~self.tri[:T, :T], float('-inf'))\nw = scores.softmax(-1)\nreturn w @ v",
        "is_causal=bool(causal)",
    ),
    "a conditional expression": (
        "bias = position\ns = q @ k.mT\ns = s + bias if bias is not None else s\nreturn s.softmax(-1) @ v",
        "attn_mask=bias.to(q.dtype) if bias is not None else None",
    ),
    "learned bias": ("return (q @ k.mT + self.bias).softmax(-1) @ v", "attn_mask=self.bias"),
    "ALiBi and causal": (
        "s = q @ k.transpose(-2, -1) * 8 ** -0.5\ns = s + position\n"
        "p = s.masked_fill(~self.tri[:T, :T], float('-inf')).softmax(-1)\nreturn p @ v",
        'position.to(q.dtype).masked_fill(~self.tri[:T, :T], float("-inf"))',
    ),
    "subtracted penalty": (
        LONG + "s = q @ k.mT / 3.0 - (1.0 - real.float()) * 1e4\nreturn s.softmax(-1) @ v",
        "attn_mask=-",
    ),
    "a bias before the scale": (
        "return ((q @ k.mT + position) * self.scale).softmax(-1) @ v",
        "attn_mask=position.to(q.dtype) * self.scale",
    ),
    "a bias and a mask before the scale": (
        "s = (q @ k.mT + position).masked_fill(~self.tri[:T, :T], -math.inf) / 3.0\nreturn s.softmax(-1) @ v",
        '(position.to(q.dtype) / 3.0).masked_fill(~self.tri[:T, :T], float("-inf"))',
    ),
    "relative positions: a product added to the product": (
        "BD = torch.einsum('bhid,hjd->bhij', q, self.bias[:, :, :1] + k[0] * 0)\n"
        "AC = torch.einsum('bhid,bhjd->bhij', q, k)\n"
        "s = AC + BD\ns.mul_(self.scale)\nreturn torch.einsum('bhij,bhjd->bhid', s.softmax(dim=3), v)",
        "attn_mask=BD * self.scale",
    ),
    "cross attention": ("k, v = k[:, :, :4], v[:, :, :4]\nreturn (q @ k.mT / 3.0).softmax(-1) @ v", ""),
    "values of another width": ("v = v[..., :5]\nreturn (q @ k.mT / 3.0).softmax(-1) @ v", ""),
    "multi-query": (
        "k, v = k[:, :1].expand(B, H, T, D), v[:, :1].expand(B, H, T, D)\nreturn (q @ k.mT).softmax(-1) @ v",
        "",
    ),
}

GUARDED = {
    "a mask that may be given, None": (
        "mask = None\nscores = q @ k.transpose(-2, -1) / math.sqrt(8)\nif mask is not None:\n"
        "    scores = scores.masked_fill(mask == 0, float('-inf'))\nw = scores.softmax(-1)\nreturn w @ v",
        "if mask is None:",
    ),
}

# name -> (body, what the reason must say)
DECLINED = {
    "weights returned besides": ("w = (q @ k.mT).softmax(-1)\nreturn w @ v + w.sum() * 0", "used elsewhere"),
    "weights stored": ("w = (q @ k.mT).softmax(-1)\nself.attn = w\nreturn w @ v", "used elsewhere"),
    "scale a tensor, multiplied": ("return (q @ k.mT * self.temperature).softmax(-1) @ v", "scaled by a tensor"),
    "scale a tensor, divided": ("return (q @ k.mT / self.temperature).softmax(-1) @ v", "scaled by a tensor"),
    "integer mask added": (LONG + "return (q @ k.mT + real).softmax(-1) @ v", "int64 is added"),
    "a number added": ("return (q @ k.mT + 2.0).softmax(-1) @ v", "number is added"),
    "softmax over the queries": ("return (q @ k.mT).softmax(-2) @ v", "over the keys"),
    "softmax over the heads": ("return (q @ k.mT).softmax(1) @ v", "over the keys"),
    "cloned probabilities": ("return (q @ k.mT).softmax(-1).clone() @ v", "`clone` stands between"),
    "talking heads before": (
        "s = torch.einsum('bhij,hg->bgij', q @ k.mT, self.mix)\nreturn s.softmax(-1) @ v",
        "same batch axes",
    ),
    "talking heads after": (
        "s = (q @ k.mT).softmax(-1)\ns = torch.einsum('bhij,hg->bgij', s, self.mix)\nreturn s @ v",
        "sum over the keys|stands between",
    ),
    "soft cap": ("s = q @ k.mT / 8.0\nreturn (50.0 * torch.tanh(s / 50.0)).softmax(-1) @ v", "`tanh` stands between"),
    "finite fill and an empty row": (
        "ok = self.tri & (real[:, None, None, :].flip(-1) == 1)\n"
        "return (q @ k.mT).masked_fill(~ok, -1e9).softmax(-1) @ v",
        "keeps no key",
    ),
    "top-k attention": (
        "s = q @ k.mT\nkept = s.topk(3, dim=-1).values[..., -1:]\n"
        "return s.masked_fill(s < kept, float('-inf')).softmax(-1) @ v",
        "used elsewhere",
    ),
    "mask after softmax": ("return ((q @ k.mT).softmax(-1) * self.tri) @ v", "`mul` stands between softmax"),
    "renormalised": (
        "p = (q @ k.mT).softmax(-1)\np = p / (1e-9 + p.sum(dim=1, keepdim=True))\nreturn p @ v",
        "used elsewhere",
    ),
    "five dimensions": (
        "q, k, v = (t.reshape(2, 3, 2, 3, 8) for t in (q, k, v))\nreturn (q @ k.mT).softmax(-1) @ v",
        "three batch axes",
    ),
}

SILENT = {
    "linear attention": "k = k.softmax(dim=-1)\ncontext = torch.einsum('bhnd,bhne->bhde', k, v)\n"
    "return torch.einsum('bhde,bhnd->bhne', context, q)",
    "a router": "p = torch.softmax(q.mean(-2) * 2, -1)\nreturn q * p[..., None, :] + k * 0 + v * 0",
}


def outcome(body: str, folder: Path) -> tuple[list[Finding | Decline], str, str]:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    ctx, source = testing.context_of(RULE, text, step(10_000, nodes=0.5), folder)
    found = list(RULE.match(ctx))
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULE.rewrite(found[0], source)
        if isinstance(rewrite, Decline):
            return [rewrite], text, text
        assert isinstance(rewrite, Rewrite)
        return found, text, build([rewrite], lambda _: source).sources["example.py"]
    return found, text, text


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str, tmp_path: Path) -> None:
    body, holds = REWRITTEN[name]
    found, text, after = outcome(body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    forward = after.split("def forward")[1]
    assert "scaled_dot_product_attention(" in forward and "softmax(" not in forward, forward
    assert holds in forward, forward
    testing.check_same_function(text, after, RULE.tolerance, name)


OTHER_INSTANCES = {  # the mask is causal in this run, and need not be in another
    "a mask the constructor is given": ('"tri", torch.tril', '"tri", given if given is not None else torch.tril'),
    "a mask that another method changes": (
        "    def forward",
        "    def prefix(self, n):\n        self.tri[:, :n] = True\n\n    def forward",
    ),
    "a diagonal the constructor is given": ("dtype=torch.bool))", "dtype=torch.bool), diagonal=shift)"),
}
SETTINGS = {  # what the replacement does not say again must not be a setting
    "softmax over an axis given": "dim = -self.heads + 2\nreturn (q @ k.mT).softmax(dim) @ v",
    "a function kept as an attribute": "self.act = F.softmax\nreturn self.act(q @ k.mT, -1) @ v",
    "a fill kept as an attribute": "fill = -1e9 * self.heads\n"
    "return (q @ k.mT).masked_fill(~self.tri, fill).softmax(-1) @ v",
}
DEFAULTS = {  # as large as the default scale here, and not at another size
    "another axis": "return (q @ k.mT / math.sqrt(q.size(-1) - 6 + q.size(-2))).softmax(-1) @ v",
    "a product": "return (q @ k.mT * (math.sqrt(8) / q.size(-1))).softmax(-1) @ v",
    "a constant": "return (q @ k.mT / math.sqrt(8)).softmax(-1) @ v",
}


@pytest.mark.parametrize("name", OTHER_INSTANCES)
def test_a_mask_that_may_be_another_stays_a_mask(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = OTHER_INSTANCES[name]
    head = HEAD.replace("def __init__(self):", "def __init__(self, given=None, shift=0):").replace(old, new)
    monkeypatch.setattr(f"{__name__}.HEAD", head)
    body = "return (q @ k.mT).masked_fill(~self.tri[:T, :T], float('-inf')).softmax(-1) @ v"
    found, _, after = outcome(body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert "attn_mask=self.tri[:T, :T]" in after and "is_causal" not in after


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_would_be_lost_are_declined(name: str, tmp_path: Path) -> None:
    found, _, _ = outcome(SETTINGS[name], tmp_path)
    assert [type(f) for f in found] == [Decline], found


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_scale_that_is_the_default_here_only_is_written(name: str, tmp_path: Path) -> None:
    found, _, after = outcome(DEFAULTS[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert "scale=" in after.split("def forward")[1]


@pytest.mark.parametrize("name", GUARDED)
def test_rewritten_under_a_guard(name: str, tmp_path: Path) -> None:
    """What did not run in this run stays as it is."""
    body, holds = GUARDED[name]
    found, text, after = outcome(body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert holds in after and "scaled_dot_product_attention(" in after
    for line in body.splitlines()[1:]:
        assert line in after
    testing.check_same_function(text, after, RULE.tolerance, name)


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_the_reason(name: str, tmp_path: Path) -> None:
    body, reason = DECLINED[name]
    found, _, _ = outcome(body, tmp_path)
    assert [type(f) for f in found] == [Decline], found
    assert isinstance(found[0], Decline)
    assert re.search(reason, found[0].reason), found[0].reason


@pytest.mark.parametrize("name", SILENT)
def test_no_word(name: str, tmp_path: Path) -> None:
    assert outcome(SILENT[name], tmp_path)[0] == []
