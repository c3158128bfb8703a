"""gqa-repeat where another call of the same code, another device or another choice of kernels needs the repeat."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Graph, Hardware, Rewrite
from advisor.patch import build
from advisor.rule import Context, step
from advisor.source import Source

pytest.importorskip("torch")
RULE = registry.load()[0]["gqa-repeat"].rule

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

LOG = []
{before}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tile, self.axis, self.shift = False, 1, nn.Parameter(torch.ones(16))
        self.attend = F.scaled_dot_product_attention

    def forward(self, q, k, v):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, *sizes, 16, requires_grad=True) for sizes in {sizes}]
"""
HEADS, ROWS = "((4, 8), (2, 8), (2, 8))", "((8, 4), (8, 2), (8, 2))"
PLAIN = "k = k.repeat_interleave(2, 1)\nv = v.repeat_interleave(2, 1)\nreturn F.scaled_dot_product_attention(q, k, v)"
HELPED = "k = again(k, self.tile)\nv = again(v, self.tile)\nreturn F.scaled_dot_product_attention(q, k, v)"


def context(body: str, folder: Path, before: str = "", sizes: str = HEADS) -> tuple[Context, Source]:
    text = HEAD.replace("{before}", before and f"\n\n{before}\n").replace("{sizes}", sizes)
    text = text.replace("{body}", textwrap.indent(body, " " * 8))
    return testing.context_of(RULE, text, step(10_000, nodes=0.5), folder)


def declined(ctx: Context) -> str:
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline), found
    return found.reason


HELPERS = {
    "tiles in another call": (
        "def again(x, tile):\n    if tile:\n        return x.repeat(1, 2, 1, 1)\n    return x.repeat_interleave(2, 1)"
    ),
    "chooses": "def again(x, tile):\n    return x.repeat(1, 2, 1, 1) if tile else x.repeat_interleave(2, 1)",
    "keeps a record": "def again(x, tile):\n    LOG.append(tile)\n    return x.repeat_interleave(2, 1)",
    "writes": "def again(x, tile):\n    x.data[0] = 0\n    return x.repeat_interleave(2, 1)",
    "along an axis it is given": "def again(x, tile):\n    return x.repeat_interleave(2, 1 + tile)",
}


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_that_does_more_than_repeat_is_still_called(name: str, tmp_path: Path) -> None:
    assert "may do something else than repeat" in declined(context(HELPED, tmp_path, HELPERS[name])[0])


BODIES = {
    "a computed axis": (PLAIN.replace("2, 1)", "2, self.axis)"), "the axis of the repeat is computed"),
    "read by locals": (PLAIN.replace("return", "seen = locals()\nreturn"), "may be read by locals"),
    "another function": (
        PLAIN.replace("F.scaled_dot_product_attention", "self.scaled_dot_product_attention"),
        "not found",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_another_call_may_need_repeated_stays(name: str, tmp_path: Path) -> None:
    body, reason = BODIES[name]
    if name == "another function":
        body = "self.scaled_dot_product_attention = F.scaled_dot_product_attention\n" + body
    assert reason in declined(context(body, tmp_path)[0])


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ("torch.backends.cuda.enable_flash_sdp(False)", False),
        ("torch.backends.cuda.enable_flash_sdp(True)", True),
        ("KERNELS = lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.EFFICIENT_ATTENTION)", False),
        ("KERNELS = lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION)", True),
    ],
)
def test_a_choice_of_kernels_without_flash_keeps_the_repeat(choice: str, allowed: bool, tmp_path: Path) -> None:
    import torch

    before = torch.backends.cuda.flash_sdp_enabled()
    try:
        ctx, _ = context(PLAIN, tmp_path, choice)
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding if allowed else Decline), found


def on_cuda(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(replace(n, device="cuda", dtype="bfloat16") for n in graph.nodes))


@pytest.mark.parametrize(("arch", "allowed"), [("sm_75", False), ("sm_80", True), ("sm_90", True), (None, True)])
def test_devices_without_the_flash_kernel_keep_the_repeat(arch: str | None, allowed: bool, tmp_path: Path) -> None:
    ctx, _ = context(PLAIN, tmp_path)
    graphs = tuple(on_cuda(graph) for graph in ctx.profile.graphs)
    device = Hardware(name="d", kind="cuda", arch=arch)
    (found,) = RULE.match(replace(ctx, profile=replace(ctx.profile, graphs=graphs, hardware=device)))
    assert isinstance(found, Finding if allowed else Decline), found


def test_a_repeated_sum_keeps_its_parentheses(tmp_path: Path) -> None:
    body = (
        "k = (k + self.shift).repeat_interleave(2, 2).transpose(1, 2)\nv = v.repeat_interleave(2, 2).transpose(1, 2)\n"
        "return F.scaled_dot_product_attention(q.transpose(1, 2), k, v)"
    )
    ctx, source = context(body, tmp_path, sizes=ROWS)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding), found
    rewrite = RULE.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    after = build([rewrite], lambda _: source).sources["example.py"]
    assert "k = (k + self.shift).transpose(1, 2)" in after
    testing.check_same_function(source.text, after, RULE.tolerance, "a sum")
