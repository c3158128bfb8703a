"""The pattern language: captures, optional inputs, constraints, look-alikes, containment, and its cost."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from costs import processor_s, repeated, slowness

from advisor import patterns, testing
from advisor.model import Graph
from advisor.patterns import Alternative, Constant, Input, LookAlike, NearMiss, Pattern, Region, find

pytest.importorskip("torch")

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x, y):
{body}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(4, 6, 16, requires_grad=True) for _ in range(2)]
"""


def graph_of(body: str, folder: Path) -> Graph:
    (folder / "example.py").write_text(HEAD.replace("{body}", textwrap.indent(body, " " * 8)), encoding="utf-8")
    (graph,) = testing.capture(folder)
    return graph


def _damped(x: Any, other: Any = None, factor: float = 1.0) -> Any:
    """factor x exp(-|x|), times another tensor where there is one."""
    return factor * x * np.exp(-np.abs(x)) * (1.0 if other is None else other)


def _small(graph: Graph, region: Region) -> str | None:
    value = region.constants["factor"][0]
    return f"the factor {value} is not below 4" if value >= 4 else None


DAMPED = Pattern(
    name="a damped line",
    anchors=("exp",),
    inputs=(Input(name="x"), Input(name="other", kind="like", optional=True)),
    constants=(Constant(name="factor", role="mul", low=1.5, high=100.0, must=(_small,)),),
    alternatives=(Alternative(name="damped", function=_damped),),
    look_alikes=(
        LookAlike(
            reason="it grows",
            function=lambda x, factor, other=None: factor * x * np.exp(np.abs(x)),
        ),
    ),
    reach=6,
)


def found(body: str, folder: Path) -> list[Region | NearMiss]:
    return list(find(graph_of(body, folder), DAMPED))


SPELLINGS = {
    "plain": "return 2.0 * x * torch.exp(-x.abs())",
    "commuted": "return torch.exp(-abs(x)) * (x * 2.0)",
    "divided": "return x * 2.0 / x.abs().exp()",
    "cast": "h = x.float()\nreturn (h * torch.exp(-h.abs()) * 2.0).to(x.dtype)",
    "statements": "a = x.abs()\nb = torch.exp(torch.neg(a))\nc = b * x\nreturn 2.0 * c",
    "in a helper": "def helper(t):\n    return t * torch.exp(-t.abs())\nreturn 2.0 * helper(x)",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_function_are_one_pattern(name: str, tmp_path: Path) -> None:
    (region,) = found(SPELLINGS[name], tmp_path)
    assert isinstance(region, Region)
    assert set(region.inputs) == {"x"}
    assert region.constants["factor"][0] == 2.0
    assert region.facts["alternative"] == "damped"


def test_an_optional_input_is_captured_where_it_is_there(tmp_path: Path) -> None:
    graph = graph_of("return y * (2.0 * x * torch.exp(-x.abs()))", tmp_path)
    (region,) = find(graph, DAMPED)
    assert isinstance(region, Region)
    assert {name: graph.nodes[i].op for name, i in region.inputs.items()} == {
        "x": "placeholder",
        "other": "placeholder",
    }
    assert region.inputs["x"] != region.inputs["other"]


def test_a_tensor_behind_an_unknown_operation_is_an_input(tmp_path: Path) -> None:
    graph = graph_of("h = self.linear(x)\nreturn 2.0 * h * torch.exp(-h.abs())", tmp_path)
    (region,) = find(graph, DAMPED)
    assert isinstance(region, Region)
    assert graph.nodes[region.inputs["x"]].target.endswith("linear")


MISSES = {
    "a look-alike": ("return 2.0 * x * torch.exp(x.abs())", "it grows"),
    "a constraint": ("return 5.0 * x * torch.exp(-x.abs())", "the factor 5.0 is not below 4"),
    "an intermediate read elsewhere": (
        "e = torch.exp(-x.abs())\nreturn 2.0 * x * e + self.linear(e)",
        "the intermediate `e` is used elsewhere",
    ),
    "an intermediate returned": (
        "e = torch.exp(-x.abs())\nreturn 2.0 * x * e, e",
        "the intermediate `e` is used elsewhere",
    ),
    "an intermediate saved": (
        "self.kept = torch.exp(-x.abs())\nreturn 2.0 * x * self.kept",
        "used elsewhere",
    ),
    "another dtype": ("return 2.0 * x.double() * torch.exp(-x.double().abs())", "its dtypes differ"),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_failure_has_its_reason(name: str, tmp_path: Path) -> None:
    body, reason = MISSES[name]
    results = found(body, tmp_path)
    assert [type(r) for r in results] == [NearMiss], results
    assert isinstance(results[0], NearMiss) and reason in results[0].reason


SOMETHING_ELSE = {
    "another function": "return 2.0 * x * torch.exp(-x * x)",
    "not closed": "return 2.0 * x * torch.exp(-self.linear(x).abs())",
    "random": "return 2.0 * x * torch.exp(-F.dropout(x, 0.5).abs())",
    "a cast that changes values": "return 2.0 * x * torch.exp(-x.abs().to(torch.int32))",
    "no factor": "return x * torch.exp(-x.abs())",
}


@pytest.mark.parametrize("name", SOMETHING_ELSE)
def test_something_else_is_passed_over(name: str, tmp_path: Path) -> None:
    assert found(SOMETHING_ELSE[name], tmp_path) == []


def test_two_runs_agree(tmp_path: Path) -> None:
    graph = graph_of("return 2.0 * x * torch.exp(-x.abs()) + 3.0 * y * torch.exp(-y.abs())", tmp_path)
    assert list(find(graph, DAMPED)) == list(find(graph, DAMPED))
    assert len(list(find(graph, DAMPED))) == 2


# ------------------------------------------------------------------------------------------------------------ the cost

TRANSFORMER = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * h.to(x.dtype)


class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = RMSNorm(), RMSNorm(), LayerNorm()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.wide, self.back = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, cos, sin):
        q, k, v = (t.view(2, 5, 2, 8).transpose(1, 2) for t in self.qkv(self.first(x)).split(16, dim=2))
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        p = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), -1)
        x = x + self.out((p @ v).transpose(1, 2).reshape(2, 5, 16))
        h = self.second(x)
        g = self.gate(h)
        x = x + self.down(g * torch.sigmoid(g) * self.up(h)) + self.down(F.silu(g) * self.up(h))
        h = self.wide(self.third(x))
        return x + self.back(0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        angles = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 5, 16, requires_grad=True)]
"""
PER_COPY = {
    patterns.layer_norm_regions: 3,
    patterns.rms_norm_regions: 6,
    patterns.gelu_regions: 3,
    patterns.silu_regions: 3,
    patterns.gate_regions: 3,
    patterns.rope_regions: 6,
}


def seconds(search: Callable[[Graph], Iterator[Region | NearMiss]], graph: Graph) -> float:
    """Processor time of a search."""
    return processor_s(lambda: list(search(graph)))


def test_ten_thousand_nodes_are_searched_in_half_a_second(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(TRANSFORMER, encoding="utf-8")
    (graph,) = testing.capture(tmp_path)
    large, copies = repeated(graph, 10_000)
    for search, count in PER_COPY.items():
        regions = list(search(large))
        assert [type(r) for r in regions] == [Region] * count * copies, search
    assert sum(seconds(search, large) for search in PER_COPY) < 0.5 * slowness()


def test_the_cost_grows_with_the_nodes_alone(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(TRANSFORMER, encoding="utf-8")
    (graph,) = testing.capture(tmp_path)
    times = [sum(seconds(search, repeated(graph, nodes)[0]) for search in PER_COPY) for nodes in (2_500, 10_000)]
    assert times[1] < 8 * times[0]
