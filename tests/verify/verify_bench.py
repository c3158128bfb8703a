"""A small real training script, and a bench that proves edits of it in child processes."""

from __future__ import annotations

from pathlib import Path

from advisor.capture.launch import Child
from advisor.model import Estimate, Finding, Numerics, Patch, Rewrite, Safety, Span
from advisor.session import Spec
from advisor.verify.lab import ProcessLab, Settings

SCRIPT = """\
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(3)


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(args.dropout)
        keep = torch.ones(length, length, dtype=torch.bool).tril()
        self.register_buffer("keep", keep, persistent=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~self.keep[:t, :t], float("-inf"))
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Model(nn.Module):
    def __init__(self, vocab=64, width=32, length=16):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 4, length)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, x):
        h = self.tokens(x) + self.places
        h = h + self.attention(self.norm(h))
        h = h + self.mlp(h)
        return self.head(self.batch_norm(h.transpose(1, 2)).transpose(1, 2))


data = torch.randint(0, 48, (512, 17))
loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=16, shuffle=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
step = 0
while step < args.steps:
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == args.steps:
            break
print("done")
"""

SCORES = """\
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~self.keep[:t, :t], float("-inf"))
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
"""
FUSED = """\
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
"""
NAME = "train.py"


def rewrite(rule: str, *, safety: Safety = Safety.NUMERICS, **more: object) -> Rewrite:
    """A rewrite that names a rule and edits nothing: the tests bring their own patched text."""
    span = Span(path=NAME, line=1)
    estimate = Estimate(low_us=0.0, high_us=1.0, basis="bound")
    finding = Finding(rule=rule, span=span, message="", evidence=(), estimate=estimate, fingerprint=rule)
    return Rewrite(finding=finding, title=rule, safety=safety, edits=(), **more)  # type: ignore[arg-type]


def edited(*replacements: tuple[str, str], text: str = SCRIPT) -> str:
    """The script with texts replaced; each must occur."""
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


def patch_of(text: str, *, safety: Safety = Safety.NUMERICS) -> Patch:
    """A patch of the whole script."""
    return Patch(base={}, rewrites=(rewrite("edit", safety=safety),), diff="", sources={NAME: text})


NOTHING = Patch(base={}, rewrites=(), diff="", sources={})


class Bench:
    """Proves edits of one script; the recordings of the original are made once."""

    def __init__(self, folder: Path, text: str, *argv: str, settings: Settings, step_timeout: float = 60.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.script = folder / NAME
        self.script.write_text(text, encoding="utf-8")
        self.spec = Spec(script=str(self.script), argv=argv, root=str(folder), out=str(folder), plan="")
        self.lab = ProcessLab(lambda spec: Child(spec, step_timeout=step_timeout), self.spec, folder / "work", settings)

    def prove(self, *replacements: tuple[str, str], safety: Safety = Safety.NUMERICS) -> Numerics:
        """Prove the script with texts replaced."""
        return self.lab.prove(patch_of(edited(*replacements, text=self.script.read_text()), safety=safety))


QUICK = Settings(trajectory_steps=6, step_timeout_s=60.0, min_quads=3, max_quads=4, block_s=0.1, seconds=300.0)
