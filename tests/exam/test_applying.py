"""Applying a rewrite: a right one trains with the same losses, a wrong one is told."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from applying import SAME, Original, apply, apply_all, original
from examiner import Answer, Entry

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
SCRIPT = """\
import math

import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = torch.softmax(q @ k.mT / math.sqrt(16), -1)
        y = self.drop(p) @ v
        return x + self.out(y)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 8, 16)).square().mean().backward()
    optimizer.step()
"""
LINE = "        y = self.drop(p) @ v\n"


def rewritten(new: str) -> Entry:
    after = SCRIPT.replace(LINE, f"        y = {new}\n")
    diff = "".join(difflib.unified_diff(SCRIPT.splitlines(True), after.splitlines(True), "a/train.py", "b/train.py"))
    return Entry(rule="naive-attention", path="train.py", line=16, end_line=16, found=True, text="", diff=diff)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Original:
    path = tmp_path_factory.mktemp("before") / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return original(path)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_a_right_rewrite_trains_with_the_same_losses(script: Path) -> None:
    right = rewritten("F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p)")
    assert [said for _, said in apply_all(script, Answer((right,)))] == [SAME]


@pytest.mark.parametrize(
    "new",
    [
        "F.scaled_dot_product_attention(q, k, v, scale=0.26)",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "F.scaled_dot_product_attention(k, q, v)",
        "F.scaled_dot_product_attention(q, k, v.detach())",
    ],
)
def test_a_wrong_rewrite_is_told(script: Path, before: Original, new: str) -> None:
    assert apply(script, rewritten(new), before).startswith("losses or gradients differ")


def test_what_breaks_is_told(script: Path, before: Original) -> None:
    assert apply(script, rewritten("nothing_of_this_name"), before).startswith("after the rewrite: ")
    elsewhere = rewritten("v")
    script.write_text(SCRIPT.replace("@", "#"), encoding="utf-8")
    assert apply(script, elsewhere, before).startswith("the diff does not apply")
