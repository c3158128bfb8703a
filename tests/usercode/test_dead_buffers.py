"""A buffer that only the replaced code read goes with it: in no checkpoint, and nothing else can reach it."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Finding, Rewrite
from advisor.patch import build
from advisor.rule import step

pytest.importorskip("torch")
RULE = registry.load()[0]["naive-attention"].rule
REGISTERED = '        self.register_buffer("mask", torch.tril(torch.ones(n, n)){persistent})\n'
MODEL = """\
import math
import torch
from torch import nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
{registered}
    def forward(self, q, k, v):
        T = q.size(-2)
        w = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        w = w.masked_fill(self.mask[:T, :T] == 0, float("-inf")).softmax(-1)
        return w @ v
{more}

def get_init_inputs():
    return [8]


def get_inputs():
    return [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
"""


def rewritten(folder: Path, persistent: str, more: str = "") -> str:
    text = MODEL.replace("{registered}", REGISTERED.replace("{persistent}", persistent)).replace("{more}", more)
    ctx, source = testing.context_of(RULE, text, step(10_000, nodes=0.5), folder)
    (finding,) = (found for found in RULE.match(ctx) if isinstance(found, Finding))
    rewrite = RULE.rewrite(finding, source)
    assert isinstance(rewrite, Rewrite)
    return build([rewrite], lambda _: source).sources[testing.FILE]


def test_a_buffer_that_nothing_reads_any_more_goes(tmp_path: Path) -> None:
    result = rewritten(tmp_path, ", persistent=False")
    assert "is_causal=True" in result
    assert "mask" not in result


@pytest.mark.parametrize(
    ("persistent", "more"),
    [
        pytest.param("", "", id="in the state dict"),
        pytest.param(", persistent=False", "\n    def show(self):\n        return self.mask\n", id="read elsewhere"),
        pytest.param(", persistent=False", "\n    def all(self):\n        return list(self.buffers())\n", id="swept"),
    ],
)
def test_a_buffer_that_something_may_read_stays(tmp_path: Path, persistent: str, more: str) -> None:
    result = rewritten(tmp_path, persistent, more)
    assert "is_causal=True" in result
    assert "register_buffer" in result


BY_TEXT = {
    "attrgetter": "\nfrom operator import attrgetter\nKEPT = attrgetter('ma' + 'sk')\n",
    "reduce": "\nimport functools\ndef read(net, name):\n    return functools.reduce(getattr, name.split('.'), net)\n",
    "renamed": "\nfrom operator import attrgetter as read\n",
    "methodcaller": "\nimport operator\ndef read(net, name):\n    return operator.methodcaller('get', name)(net)\n",
    "own getattr": "\n    def read(self, name):\n        return super().__getattr__(name)\n",
}


@pytest.mark.parametrize("way", BY_TEXT)
def test_a_buffer_that_a_computed_name_may_reach_stays(way: str, tmp_path: Path) -> None:
    result = rewritten(tmp_path, ", persistent=False", BY_TEXT[way])
    assert "is_causal=True" in result
    assert "register_buffer" in result


def test_a_state_dict_and_a_literal_name_reach_nothing_else(tmp_path: Path) -> None:
    more = "\n    def kept(self):\n        return getattr(self, 'n', 0), self.state_dict()\n"
    assert "register_buffer" not in rewritten(tmp_path, ", persistent=False", more)
