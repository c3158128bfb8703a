"""mha-need-weights, materialised-causal-mask, gqa-repeat and sdpa-math-fallback on the ways people call attention."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Graph, Node, Operators, Rewrite
from advisor.patch import build
from advisor.patterns.sdpa import math_cause, sdpa_calls
from advisor.rule import Context, step
from advisor.source import Source
from advisor.usercode.triangles import made_as_triangle

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


def repeat_kv(x, n_rep: int):
    bs, n_kv, slen, dim = x.shape
    if n_rep == 1:
        return x
    x_ = x[:, :, None, :, :].expand(bs, n_kv, n_rep, slen, dim)
    return x_.reshape(bs, n_kv * n_rep, slen, dim)


def repeat_rows(n_rep: int, x):
    bs, slen, n_kv, dim = x.shape
    return (
        x[:, :, :, None, :]
        .expand(bs, slen, n_kv, n_rep, dim)
        .reshape(bs, slen, n_kv * n_rep, dim)
    )


class Loud(nn.MultiheadAttention):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.other = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True)
        self.loud = Loud(16, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
        self.p = 0.0
        self.register_buffer("tri", torch.ones(8, 8, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("wide", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("add", torch.full((8, 8), float("-inf")).triu(1), persistent=False)
        self.register_buffer("band", torch.ones(16, 16).tril().triu(-7) > 0, persistent=False)
        self.bias = nn.Parameter(torch.zeros(8, 8))

    def forward(self, {arguments}):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [{inputs}]
"""
ROWS = ("x", "torch.randn(2, 8, 16, requires_grad=True)")
HEADS = ("q, k, v", "torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)")
GROUPS = ("q, k, v", "torch.randn(2, n, 8, 16, requires_grad=True) for n in (4, 2, 2)")
ROWS_OF_HEADS = ("q, k, v", "torch.randn(2, 8, n, 16, requires_grad=True) for n in (4, 2, 2)")
FLAT = ("q, k, v", "torch.randn(6, 8, 16, requires_grad=True) for _ in range(3)")

MHA = {
    "pair": "a, _ = self.attn(x, x, x)\nreturn x + a",
    "first element": "return self.attn(x, x, x)[0]",
    "named and never read": "a, weights = self.attn(x, x, x)\nreturn a",
    "bound again": "a, w = self.attn(x, x, x)\na, w = self.attn(a, x, x, need_weights=False)\n"
    "return a if w is None else w",
    "kept under a name": "out = self.attn(x, x, x)\nreturn out[0] * 2",
    "with a mask": "a, _ = self.attn(x, x, x, attn_mask=~self.tri)\nreturn a",
    "with padding": "pad = torch.arange(8).expand(2, 8) > 5\nreturn self.attn(x, x, x, key_padding_mask=pad)[0]",
    "with a causal hint": "a, _ = self.attn(x, x, x, attn_mask=self.add, is_causal=True)\nreturn a",
    "asked for": "a, _ = self.attn(x, x, x, need_weights=True)\nreturn a",
    "not averaged": "a, _ = self.attn(x, x, x, average_attn_weights=False)\nreturn a",
    "bias key": "return self.other(x, x, x)[0]",
    "in a loop": "for layer in self.layers:\n    x = x + layer(x, x, x)[0]\nreturn x",
    "by keyword": "return self.attn(query=x, key=x, value=x)[0]",
}
NOT_MHA = {
    "returned": ("a, w = self.attn(x, x, x)\nreturn a + w.mean()", "used after this call"),
    "passed on": ("return sum(t.sum() for t in self.attn(x, x, x)) * torch.ones(1)", "used after this call|passed on"),
    "stored": ("a, self.last = self.attn(x, x, x)\nreturn a", "used after this call|stored"),
    "second element": ("return self.attn(x, x, x)[1]", "used after this call"),
    "shape read": ("a, w = self.attn(x, x, x)\nreturn a * w.shape[-1]", "may be read in line"),
    "read in a branch": (
        "a, w = self.attn(x, x, x)\nif not self.training:\n    a = a + w.sum()\nreturn a",
        "may be read",
    ),
    "a wrong hint": (
        "a, _ = self.attn(x, x, x, attn_mask=~self.band[:8, :8].T, is_causal=True)\nreturn a",
        "drop the mask",
    ),
    "a bias key and a hint": (
        "a, _ = self.other(x, x, x, attn_mask=self.add, is_causal=True)\nreturn a",
        "bias key",
    ),
    "a subclass": ("return self.loud(x, x, x)[0]", "not called through nn.MultiheadAttention itself"),
    "the function itself": (
        "m, r = self.attn, x.transpose(0, 1)\n"
        "return F.multi_head_attention_forward(r, r, r, 16, 2, m.in_proj_weight, m.in_proj_bias, None, None, False, "
        "0.0, m.out_proj.weight, m.out_proj.bias)[0]",
        "not called through nn.MultiheadAttention itself",
    ),
    "by position": ("return self.attn(x, x, x, None, True)[0]", "given by position"),
    "computed": ("want = x.ndim == 3\nreturn self.attn(x, x, x, need_weights=want)[0]", "is computed"),
    "a hook": (
        "if x.ndim == 9:\n    self.attn.register_forward_hook(print)\nreturn self.attn(x, x, x)[0]",
        "forward hook registered in example.py:\\d+ may read the weights",
    ),
}

CAUSAL = {
    "buffer": "return F.scaled_dot_product_attention(q, k, v, self.tri)",
    "cut from the corner": "T = q.size(2)\nreturn F.scaled_dot_product_attention(q, k, v, attn_mask=self.wide[:T, :T])",
    "with leading axes": "T = q.size(2)\nreturn sdpa(q, k, v, attn_mask=self.wide[None, None, :T, :T])",
    "additive": "return sdpa(q, k, v, attn_mask=self.add)",
    "made here": "m = torch.triu(torch.full((8, 8), float('-inf')), diagonal=1)\nreturn sdpa(q, k, v, attn_mask=m)",
    "opposite": "m = torch.ones(8, 8).tril()\nm = m == 1\nreturn sdpa(q, k, v, attn_mask=m)",
    "with everything": "return sdpa(q, k, v, self.tri, self.p if self.training else 0.0, False, scale=0.3)",
}
NOT_CAUSAL = {
    "a band": ("return sdpa(q, k, v, attn_mask=self.band[:8, :8])", "not a triangle as a whole"),
    "prefix": ("return sdpa(q, k, v, attn_mask=self.tri | (torch.arange(8) < 2))", "not the lower triangle"),
    "padding": ("return sdpa(q, k, v, attn_mask=(q[:, :1, :1, :8] < 9).expand(2, 1, 8, 8))", "not the lower triangle"),
    "from the batch": ("return sdpa(q, k, v, attn_mask=self.tri & (k[0, 0, :, 0] < 99))", "depends on the batch"),
    "more keys": ("return sdpa(q[:, :, :4], k, v, attn_mask=self.tri[:4])", "more keys than queries"),
    "at an offset": ("S = q.size(2)\nreturn sdpa(q, k, v, attn_mask=self.wide[S - 8 : S, :8])", "at an offset"),
    "an argument": (
        "def attend(q, k, v, mask):\n    return sdpa(q, k, v, attn_mask=mask)\nreturn attend(q, k, v, self.tri)",
        "argument of the function",
    ),
    "chosen": ("return sdpa(q, k, v, attn_mask=self.tri if self.training else None)", "chosen by a condition"),
    "under a condition": (
        "m = None\nif self.training:\n    m = self.tri\nreturn sdpa(q, k, v, attn_mask=m)",
        "under a condition",
    ),
    "a computed diagonal": (
        "m = torch.ones(8, 8, dtype=torch.bool).tril(q.size(2) - 8)\nreturn sdpa(q, k, v, attn_mask=m)",
        "diagonal of the mask is computed",
    ),
}

GQA = {
    "interleaved": (
        "k = k.repeat_interleave(2, dim=1)\nv = v.repeat_interleave(2, dim=1)\nreturn sdpa(q, k, v)",
        "return sdpa(q, k, v, enable_gqa=True)",
    ),
    "other names": (
        "kk = torch.repeat_interleave(k, 2, dim=1)\nvv = torch.repeat_interleave(v, repeats=2, dim=-3)\n"
        "return sdpa(q, kk, vv, is_causal=True)",
        "kk = k\nvv = v\nreturn sdpa(q, kk, vv, is_causal=True, enable_gqa=True)",
    ),
    "inside the call": (
        "return sdpa(\n    q,\n    k.repeat_interleave(2, 1),\n    v.repeat_interleave(2, 1),  # shared\n)",
        "return sdpa(\n    q,\n    k,\n    v,  # shared\n    enable_gqa=True,\n)",
    ),
    "expanded": (
        "k = k[:, :, None].expand(2, 2, 2, 8, 16).reshape(2, 4, 8, 16)\n"
        "v = v.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)\nreturn sdpa(q, k, (v))",
        "return sdpa(q, k, (v), enable_gqa=True)",
    ),
    "a helper": (
        "k = repeat_kv(k, 2)\nv = repeat_kv(v, n_rep=2)\nreturn sdpa(q, k, v, is_causal=True)",
        "return sdpa(q, k, v, is_causal=True, enable_gqa=True)",
    ),
    "a mask": (
        "return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=self.add)",
        "return sdpa(q, k, v, attn_mask=self.add, enable_gqa=True)",
    ),
}
ROWS_FIRST = (  # the layout of llama2.c: repeat on (batch, position, head, width), then swap
    "k = repeat_rows(2, k)\nv = repeat_rows(2, v)\nq = q.transpose(1, 2)\nk = k.transpose(1, 2)\n"
    "v = v.transpose(1, 2)\nreturn sdpa(q, k, v, is_causal=True)",
    "q = q.transpose(1, 2)\nk = k.transpose(1, 2)\nv = v.transpose(1, 2)\n"
    "return sdpa(q, k, v, is_causal=True, enable_gqa=True)",
)
NOT_GQA = {
    "tiled": ("return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))", "tiled"),
    "used elsewhere": ("k = repeat_kv(k, 2)\nv = repeat_kv(v, 2)\nreturn sdpa(q, k, v) + k", "used elsewhere"),
    "shape read": (
        "k = repeat_kv(k, 2)\nv = repeat_kv(v, 2)\nn = k.shape[1]\nreturn sdpa(q, k, v) * n",
        "read again|read or",
    ),
    "keys alone": ("return sdpa(q, repeat_kv(k, 2), q)", "not repeated alike"),
    "dropout on a CPU": ("return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), dropout_p=0.5)", "math path already"),
    "assigned together": (
        "k, v = repeat_kv(k, 2), repeat_kv(v, 2)\nreturn sdpa(q, k, v)",
        "cannot be rewritten safely",
    ),
}


def text_of(body: str, kind: tuple[str, str]) -> str:
    text = HEAD.replace("{arguments}", kind[0]).replace("{inputs}", kind[1])
    return text.replace("{body}", textwrap.indent(body, " " * 8))


def results(rule: str, text: str, folder: Path) -> tuple[list[Finding | Decline], str, Context]:
    ctx, source = testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), folder)
    found = list(RULES[rule].match(ctx))
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULES[rule].rewrite(found[0], source)
        assert isinstance(rewrite, Rewrite), rewrite
        return found, build([rewrite], lambda _: source).sources["example.py"], ctx
    return found, text, ctx


def check_declined(found: list[Finding | Decline], reason: str) -> None:
    assert found
    assert all(isinstance(f, Decline) for f in found), found
    assert re.search(reason, " ".join(f.reason for f in found if isinstance(f, Decline))), found


@pytest.mark.parametrize("name", MHA)
def test_need_weights_is_switched_off_where_they_are_dropped(name: str, tmp_path: Path) -> None:
    text = text_of(MHA[name], ROWS)
    found, after, _ = results("mha-need-weights", text, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert after.count("need_weights=False") == text.count("need_weights=False") + 1
    assert after.replace(", need_weights=False", "") == text.replace(", need_weights=False", "").replace(
        ", need_weights=True", ""
    )
    testing.check_same_function(text, after, 64.0, name)


@pytest.mark.parametrize("name", NOT_MHA)
def test_weights_that_may_be_read_stay(name: str, tmp_path: Path) -> None:
    body, reason = NOT_MHA[name]
    found, _, _ = results("mha-need-weights", text_of(body, ROWS), tmp_path)
    check_declined(found, reason)


def test_each_call_of_attention_is_judged_on_its_own(tmp_path: Path) -> None:
    body = "a, _ = self.attn(x, x, x)\nc, w = self.other(a, x, x)\nreturn c + w.sum()"
    found, _, _ = results("mha-need-weights", text_of(body, ROWS), tmp_path)
    lines = {type(f): f.span.line for f in found if f.span is not None}
    first = text_of(body, ROWS).splitlines().index("        a, _ = self.attn(x, x, x)") + 1
    assert lines == {Finding: first, Decline: first + 1}


def test_a_call_whose_weights_one_of_two_turns_needs_stays(tmp_path: Path) -> None:
    """Weights that are read after a loop are those of its last turn; the call is the same in every turn."""
    body = "for layer in self.layers:\n    x, w = layer(x, x, x)\nreturn x + w.sum()"
    found, _, _ = results("mha-need-weights", text_of(body, ROWS), tmp_path)
    check_declined(found, "may be read in line")


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_a_flag(name: str, tmp_path: Path) -> None:
    text = text_of(CAUSAL[name], HEADS)
    found, after, ctx = results("materialised-causal-mask", text, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    forward = after.split("def forward")[1]
    assert "is_causal=True" in forward
    assert "attn_mask" not in forward
    assert ("scale=0.3" in forward) == (name == "with everything")
    testing.check_same_function(text, after, 64.0, name)
    assert isinstance(found[0], Finding)
    rewrite = RULES["materialised-causal-mask"].rewrite(found[0], ctx.read("example.py"))
    assert isinstance(rewrite, Rewrite)
    testing.check_regions(rewrite, ctx.graphs, name)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_another_mask_stays(name: str, tmp_path: Path) -> None:
    body, reason = NOT_CAUSAL[name]
    found, _, _ = results("materialised-causal-mask", text_of(body, HEADS), tmp_path)
    check_declined(found, reason)


@pytest.mark.parametrize("name", [*GQA, "rows first"])
def test_heads_are_shared_instead_of_repeated(name: str, tmp_path: Path) -> None:
    before, wanted = GQA.get(name, ROWS_FIRST)
    kind = ROWS_OF_HEADS if name == "rows first" else GROUPS
    text = text_of(before, kind)
    found, after, ctx = results("gqa-repeat", text, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert after == text_of(wanted, kind)
    testing.check_same_function(text, after, 64.0, name)
    assert isinstance(found[0], Finding)
    rewrite = RULES["gqa-repeat"].rewrite(found[0], ctx.read("example.py"))
    assert isinstance(rewrite, Rewrite)
    testing.check_regions(rewrite, ctx.graphs, name)


@pytest.mark.parametrize("name", NOT_GQA)
def test_repeats_that_are_something_else_stay(name: str, tmp_path: Path) -> None:
    body, reason = NOT_GQA[name]
    found, _, _ = results("gqa-repeat", text_of(body, GROUPS), tmp_path)
    check_declined(found, reason)


# -------------------------------------------------------------------------------------------------------- math fallback

MATH = {
    "three dimensions": ("return sdpa(q, k, v)", FLAT, "three|3 dimensions"),
    "dropout": ("return sdpa(q, k, v, dropout_p=0.25)", HEADS, "no dropout"),
    "learned bias": ("return sdpa(q, k, v, attn_mask=self.bias)", HEADS, "needs a gradient"),
    "mask with three dimensions": ("return sdpa(q, k, v, attn_mask=self.add[None])", HEADS, "three|3 dimensions"),
    "transposed width": ("return sdpa(q, k, v.mT.contiguous().mT)", HEADS, "not contiguous"),
    "narrow values": ("return sdpa(q, k, v[..., :8])", HEADS, "another head dimension"),
    "broadcast batch": ("return sdpa(q, k[:1], v[:1])", HEADS, "broadcast"),
}
FUSED = {
    "plain": ("return sdpa(q, k, v)", HEADS),
    "mask": ("return sdpa(q, k, v, attn_mask=self.add)", HEADS),
    "grouped": ("return sdpa(q, k, v, enable_gqa=True)", GROUPS),
    "odd width": ("return sdpa(q[..., :7], k[..., :7], v[..., :7])", HEADS),
}


def recorded(text: str, folder: Path) -> Operators:
    """The operators of one forward pass, as the profiler records them."""
    import torch

    (folder / "recorded.py").write_text(text, encoding="utf-8")
    module = testing.load_module(folder / "recorded.py")
    model, inputs = module.Model(), module.get_inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(*inputs)
    events = list(profiler.events())
    rows = {id(event): row for row, event in enumerate(events)}
    return Operators(
        name=tuple(event.name for event in events),
        parent=tuple(rows.get(id(event.cpu_parent), -1) for event in events),
        shapes=tuple(tuple(tuple(shape) for shape in event.input_shapes) for event in events),
    )


def with_operators(ctx: Context, operators: Operators) -> Context:
    return replace(ctx, profile=replace(ctx.profile, operators=operators))


@pytest.mark.parametrize("name", MATH)
def test_the_cause_of_the_math_path_is_named_and_torch_takes_it(name: str, tmp_path: Path) -> None:
    body, kind, cause = MATH[name]
    text = text_of(body, kind)
    ctx, source = testing.context_of(RULES["sdpa-math-fallback"], text, step(10_000, nodes=0.5), tmp_path)
    operators = recorded(text, tmp_path)
    assert "aten::_scaled_dot_product_attention_math" in operators.name
    (found,) = RULES["sdpa-math-fallback"].match(with_operators(ctx, operators))
    if name == "dropout":  # GPUs have kernels for it: nothing to change
        assert isinstance(found, Decline) and re.search(cause, found.reason)
        return
    assert isinstance(found, Finding)
    assert re.search(cause, found.message)
    rewrite = RULES["sdpa-math-fallback"].rewrite(found, source)
    assert isinstance(rewrite, Rewrite) == (name == "three dimensions")
    if isinstance(rewrite, Rewrite):
        after = build([rewrite], lambda _: source).sources["example.py"]
        assert "aten::_scaled_dot_product_attention_math" not in recorded(after, tmp_path).name
        testing.check_same_function(text, after, 64.0, name)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_call_is_no_finding(name: str, tmp_path: Path) -> None:
    body, kind = FUSED[name]
    text = text_of(body, kind)
    ctx, _ = testing.context_of(RULES["sdpa-math-fallback"], text, step(10_000, nodes=0.5), tmp_path)
    operators = recorded(text, tmp_path)
    assert "aten::_scaled_dot_product_attention_math" not in operators.name
    assert all(math_cause(g, call) is None for g in ctx.graphs for call in sdpa_calls(g))
    assert all(isinstance(f, Decline) for f in RULES["sdpa-math-fallback"].match(with_operators(ctx, operators)))


def test_the_trace_decides_against_the_conditions(tmp_path: Path) -> None:
    """Shapes that should fall back, under which the trace shows a fused kernel, are no finding."""
    text = text_of("return sdpa(q, k, v)", FLAT)
    ctx, _ = testing.context_of(RULES["sdpa-math-fallback"], text, step(10_000, nodes=0.5), tmp_path)
    operators = recorded(text, tmp_path)
    fused = replace(operators, name=tuple(n.replace("attention_math", "flash_attention") for n in operators.name))
    assert all(isinstance(f, Decline) for f in RULES["sdpa-math-fallback"].match(with_operators(ctx, fused)))


def on_cuda(graph: Graph, dtype: str) -> Graph:
    def moved(node: Node) -> Node:
        return replace(node, device="cuda", dtype=dtype if node.dtype == "float32" else node.dtype)

    return replace(graph, nodes=tuple(moved(n) for n in graph.nodes))


@pytest.mark.parametrize(
    ("body", "dtype", "cause"),
    [
        ("return sdpa(q, k, v)", "bfloat16", None),
        ("return sdpa(q, k, v)", "float32", None),
        ("return sdpa(q, k, v)", "float64", "dtype"),
        ("return sdpa(q, k, v, dropout_p=0.25)", "bfloat16", None),
        ("return sdpa(q[..., :12], k[..., :12], v[..., :12])", "bfloat16", None),
        ("return sdpa(q[..., :12], k[..., :12], v[..., :12], attn_mask=self.tri)", "bfloat16", "head-dim"),
        ("return sdpa(q[..., :12], k[..., :12], v[..., :12])", "float32", None),
        ("return sdpa(q[..., :10], k[..., :10], v[..., :10])", "float32", "head-dim"),
    ],
)
def test_conditions_of_cuda(body: str, dtype: str, cause: str | None, tmp_path: Path) -> None:
    ctx, _ = testing.context_of(RULES["gqa-repeat"], text_of(body, HEADS), step(10_000), tmp_path)
    graph = on_cuda(ctx.graphs[0], dtype)
    (call,) = sdpa_calls(graph)
    found = math_cause(graph, call)
    assert (found[0] if found else None) == cause


@pytest.mark.parametrize(
    ("body", "dtype", "reason"),
    [
        ("return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True)", "bfloat16", None),
        ("return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2))", "float32", "half precision"),
        ("return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=self.tri)", "bfloat16", "takes no mask"),
    ],
)
def test_grouped_heads_on_cuda(body: str, dtype: str, reason: str | None, tmp_path: Path) -> None:
    ctx, _ = testing.context_of(RULES["gqa-repeat"], text_of(body, GROUPS), step(10_000, nodes=0.5), tmp_path)
    graphs = tuple(on_cuda(g, dtype) for g in ctx.graphs)
    (found,) = RULES["gqa-repeat"].match(replace(ctx, profile=replace(ctx.profile, graphs=graphs)))
    assert isinstance(found, Finding) == (reason is None)
    assert reason is None or (isinstance(found, Decline) and reason in found.reason)


# --------------------------------------------------------------------------------------------- masks of other instances

OTHER = """\
import torch
import torch.nn.functional as F
from torch import nn


def banded(T, window=None):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    if window is not None:
        mask = mask.triu(-window)
    return mask


def plain(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


class Model(nn.Module):
    def __init__(self, {argument}):
        super().__init__()
{made}

    def forward(self, q, k, v):
        T = q.size(2)
{body}


{more}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
"""
TRIANGLE = "torch.ones(8, 8, dtype=torch.bool).tril()"
BUFFER = f"self.register_buffer('mask', {TRIANGLE}, persistent=False)"
CALL = "return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:T, :T])"
LOCAL = "return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"
OTHER_INSTANCES = {
    "given to the constructor": (f"self.mask = {TRIANGLE} if mask is None else mask", CALL, "mask=None", ""),
    "made under a condition": (f"m = {TRIANGLE}\nif wide:\n    m = m.triu(-2)\nself.mask = m", CALL, "wide=0", ""),
    "a diagonal of the constructor": ("self.mask = torch.ones(8, 8).tril(past) > 0", CALL, "past=0", ""),
    "written in the constructor": (f"m = {TRIANGLE}\nif sink:\n    m[:, 0] = False\nself.mask = m", CALL, "sink=0", ""),
    "a subclass": (
        BUFFER,
        CALL,
        "_=0",
        "class Wide(Model):\n    def __init__(self):\n        super().__init__()\n        self.mask = self.mask.triu()",
    ),
    "registered again": (BUFFER, CALL, "_=0", "def widen(m):\n    m.register_buffer('mask', m.mask.triu(-2))"),
    "set by its name": (BUFFER, CALL, "_=0", "def widen(m, mask):\n    setattr(m, 'mask', mask)"),
    "pruned later": (BUFFER, CALL, "_=0", "def prune(model):\n    model.mask[:, 3] = False"),
    "a prefix of the constructor": (f"{BUFFER}\nif prefix:\n    self.mask[:, :prefix] = True", CALL, "prefix=0", ""),
    "filled by a subclass": (
        BUFFER,
        CALL,
        "_=0",
        "class Wide(Model):\n    def __init__(self):\n        super().__init__()\n        self.mask.fill_(True)",
    ),
    "written by another name": (BUFFER, CALL, "_=0", "def widen(m, n):\n    mask = m.mask\n    mask[:, :n] = True"),
    "a parameter": (
        "self.mask = nn.Parameter(torch.full((8, 8), float('-inf')).triu(1), requires_grad=False)",
        CALL,
        "_=0",
        "",
    ),
    "a helper that chooses": ("self.window = window", f"mask = banded(T, self.window)\n{LOCAL}", "window=None", ""),
    "a helper of the same name": (
        "self.plain = make",
        f"mask = self.plain(T)\n{LOCAL}",
        f"make=lambda T: {TRIANGLE}",
        "",
    ),
    "written where not trained": (
        "self.x = 1",
        f"mask = {TRIANGLE}\nif not self.training:\n    mask[:, 0] = False\n{LOCAL}",
        "_=0",
        "",
    ),
    "another fill": ("self.fill = fill", f"mask = torch.full((T, T), self.fill).triu(1)\n{LOCAL}", "fill=-1e9", ""),
}
EVERY_INSTANCE = {
    "a helper": ("self.x = 1", f"mask = plain(T)\n{LOCAL}"),
    "of numpy": (
        "import numpy as np\n"
        "self.register_buffer('mask', torch.from_numpy(np.tril(np.ones((8, 8)))) > 0, persistent=False)",
        CALL,
    ),
    "of torch": (
        "self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(8), persistent=False)",
        CALL,
    ),
    "cut at a size": (f"self.n = 8\n{BUFFER}", CALL.replace(":T, :T", ": self.n, : self.n")),
    "the least number": ("self.x = 1", f"mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)\n{LOCAL}"),
}


def other_text(made: str, body: str, argument: str = "_=0", more: str = "") -> str:
    text = OTHER.replace("{argument}", argument).replace("{more}", more)
    text = text.replace("{made}", textwrap.indent(made, " " * 8))
    return text.replace("{body}", textwrap.indent(body, " " * 8))


@pytest.mark.parametrize("name", OTHER_INSTANCES)
def test_a_mask_that_may_be_another_in_another_instance_stays(name: str, tmp_path: Path) -> None:
    found, _, _ = results("materialised-causal-mask", other_text(*OTHER_INSTANCES[name]), tmp_path)
    check_declined(found, "does not show that the mask is this triangle|another caller|depends on the batch")


@pytest.mark.parametrize("name", EVERY_INSTANCE)
def test_a_mask_that_every_instance_makes_alike_becomes_a_flag(name: str, tmp_path: Path) -> None:
    text = other_text(*EVERY_INSTANCE[name])
    found, after, _ = results("materialised-causal-mask", text, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert "k, v, is_causal=True)" in after
    testing.check_same_function(text, after, 64.0, name)


# ------------------------------------------------------------------------------------------ other callers of three axes

ATTEND = """\
def attend(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Model(nn.Module):"""


def three_axes(body: str, folder: Path, head: str = "") -> tuple[Finding | Decline, Rewrite | Decline | None, str]:
    text = text_of(body, FLAT).replace("class Model(nn.Module):", f"{head}class Model(nn.Module):" if head else ATTEND)
    ctx, source = testing.context_of(RULES["sdpa-math-fallback"], text, step(10_000, nodes=0.5, device="cpu"), folder)
    (found,) = RULES["sdpa-math-fallback"].match(ctx)
    if isinstance(found, Decline):
        return found, None, text
    rewrite = RULES["sdpa-math-fallback"].rewrite(found, source)
    after = build([rewrite], lambda _: source).sources["example.py"] if isinstance(rewrite, Rewrite) else text
    testing.check_same_function(text, after, 64.0, "three axes")
    return found, rewrite, after


def test_a_mask_that_another_caller_leaves_out_is_asked_for(tmp_path: Path) -> None:
    body = "return attend(q, k, v, self.add.expand(6, 8, 8))"
    _, rewrite, after = three_axes(body, tmp_path)
    assert isinstance(rewrite, Rewrite)
    assert "attn_mask=None if mask is None else mask.unsqueeze(0)" in after
    without = after.replace(body, "return attend(q, k, v)")
    testing.check_same_function(text_of("return sdpa(q, k, v)", FLAT), without, 64.0, "no mask")


def test_grouped_heads_stay_grouped(tmp_path: Path) -> None:
    _, rewrite, after = three_axes("return sdpa(q, k[:2], v[:2], enable_gqa=True)", tmp_path)
    assert isinstance(rewrite, Rewrite)
    assert "enable_gqa=True" in after.split("def forward")[1]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "return sdpa(q, k, v, attn_mask=self.add.expand(6, 8, 8) if self.p == 0.0 else None)",
            "may be None in another",
        ),
        ("with sdpa_kernel(SDPBackend.MATH):\n    return sdpa(q, k, v)", "chooses the kernels of attention itself"),
        ("torch.backends.cuda.enable_flash_sdp(True)\nreturn sdpa(q, k, v)", ""),
        (
            "o = sdpa(q, k, v)\n(g,) = torch.autograd.grad(o.sum(), q, create_graph=True)\nreturn o + g",
            "differentiates gradients again",
        ),
    ],
)
def test_the_math_path_stays_where_it_is_wanted(body: str, reason: str, tmp_path: Path) -> None:
    head = "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n\n"
    found, rewrite, _ = three_axes(body, tmp_path, head)
    assert isinstance(rewrite, Rewrite) == (not reason)
    assert not reason or (isinstance(found, Decline) and reason in found.reason), found


# ------------------------------------------------------------------------------------- writes into the buffer of a mask

MASKED = """\
from torch import nn
class Attention(nn.Module):
    def __init__(self, n, prefix=0):
        super().__init__()
        self.proj = nn.Linear(n, n)
        self.register_buffer("bias", torch.tril(torch.ones(n, n)))
{own}
    def forward(self, x):
        return x.masked_fill(self.bias[: x.size(1), : x.size(1)] == 0, float("-inf"))
{more}
"""
WRITES = [
    "self.bias |= True",
    "def f(net):\n    nn.init.ones_(net.bias)",
    "def f(net):\n    for b in (net.bias,):\n        b[:, :3] = 1",
    "def f(net):\n    [b.fill_(1) for b in (net.bias,)]",
    "def f(net):\n    m = net.bias.data.view(-1)\n    m[:3].fill_(1)",
    "def w(m):\n    m[:, 0] = 1\ndef f(net):\n    w(net.bias)",
    "def f(net):\n    getattr(net, 'bias')[:, 0] = 1",
    "import functools\ndef f(net, name):\n    functools.reduce(getattr, name.split('.'), net)[:, :3] = 1",
    "def f(net):\n    for n, b in net.named_buffers():\n        b[:, 0] = 1",
    "class Kept:\n    def __init__(self, m):\n        self.m = m\n    def w(self):\n        self.m[0] = 1\n"
    "def f(net):\n    Kept(net.bias).w()",
    "class Wide(Attention):\n    def mask(self):\n        return self.bias\ndef f(net):\n    net.mask()[:, 0] = 1",
    "def f(m):\n    if isinstance(m, nn.Module):\n        m.bias.data.zero_()",
]
NO_WRITES = [
    "nn.init.zeros_(self.proj.bias)",
    "class Norm(nn.Module):\n    def __init__(self, n):\n        super().__init__()\n"
    "        self.bias = nn.Parameter(torch.zeros(n))\n    def reset(self):\n        nn.init.zeros_(self.bias)\n"
    "def init(m):\n    if isinstance(m, nn.Linear) and m.bias is not None:\n        nn.init.zeros_(m.bias)\n"
    "    elif isinstance(m, (nn.LayerNorm, Norm)):\n        m.bias.data.zero_()",
    "class Other(Attention):\n    def forward(self, att):\n        return att.masked_fill_(self.bias == 0, -1)",
    "def average(ema, net):\n    for a, b in zip(ema.buffers(), net.buffers()):\n        a.copy_(b)",
]


def compared(source: Source) -> ast.expr:
    """The mask that the first attention of a file compares with 0."""
    found = (n.left for n in ast.walk(source.tree) if isinstance(n, ast.Compare))
    return next(left for left in found if ast.unparse(left).startswith("self.bias["))


@pytest.mark.parametrize(("text", "writes"), [*((t, True) for t in WRITES), *((t, False) for t in NO_WRITES)])
def test_a_mask_is_a_triangle_while_nothing_writes_into_it(text: str, writes: bool) -> None:
    own, more = ("", text) if text.startswith(("def", "class", "import")) else (" " * 8 + text, "")
    source = Source("example.py", MASKED.replace("{own}", own).replace("{more}", more))
    assert made_as_triangle(source, compared(source)) is not writes
    if more:  # in another file
        alone = Source("example.py", MASKED.replace("{own}", "").replace("{more}", ""))
        other = Source("other.py", f"from torch import nn\nfrom example import Attention\n{more}\n")
        assert made_as_triangle(alone, compared(alone), (other,)) is not writes


HANDED = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x, k, v, mask):
        q = self.query(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Model(nn.Module):
    def __init__(self, past=0):
        super().__init__()
        self.past, self.blocks = past, nn.ModuleList([Block(), Block()])
        self.register_buffer("tri", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)

    def forward(self, q, k, v):
        T = q.size(2)
        mask = MADE
        for block in self.blocks:
            q = block(q, k, v, mask)
        return q


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
"""


@pytest.mark.parametrize("made", ["torch.full((T, T), float('-inf')).triu(diagonal=1)", "self.tri[:T, :T]"])
@pytest.mark.parametrize("inline", [False, True])
def test_a_triangle_that_is_handed_to_the_function_is_told(made: str, inline: bool, tmp_path: Path) -> None:
    rule = RULES["materialised-causal-mask"]
    text = HANDED.replace("block(q, k, v, mask)", f"block(q, k, v, {made})") if inline else HANDED
    ctx, source = testing.context_of(rule, text.replace("MADE", made), step(10_000, nodes=0.5), tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding), found
    refused = rule.rewrite(found, source)
    assert isinstance(refused, Decline)
    assert "another caller may pass another" in refused.reason


@pytest.mark.parametrize("made", ["torch.ones(T, T).tril(self.past) > 0", "self.tri[:T, :T].tril(self.past)"])
def test_a_mask_that_is_handed_over_and_may_be_no_triangle_stays(made: str, tmp_path: Path) -> None:
    found, _, _ = results("materialised-causal-mask", HANDED.replace("MADE", made), tmp_path)
    check_declined(found, "another caller may pass another")
