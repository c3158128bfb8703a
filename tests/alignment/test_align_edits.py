"""Edits of aligned regions: guards, shared code, other files, buffers left behind, and random nestings."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import pytest
from aligning import MASKED, captured, shown, text_of, texts, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor import codemod, guarded, testing
from advisor.alignment.align import Alignment, Miss, align, align_all
from advisor.model import Graph
from advisor.patterns import Region, attention_regions
from advisor.source import Source
from advisor.usercode.buffers import dead_buffers

torch = pytest.importorskip("torch")
QKV = {"q", "k", "v"}

# ------------------------------------------------------------------------------------------------------ guarded edits

PLAIN = "F.scaled_dot_product_attention({q}, {k}, {v}, scale=0.5)"
WITH_MASK = "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask=~{mask}, scale=0.5)"
BOOL = "torch.ones(8, 8, dtype=torch.bool).triu(1)"
GUARDED = {  # body, mask of the recorded run, template, what stands there afterwards
    "a return keeps every line": (
        "s = q @ k.mT * 0.5\n\n# seldom\nif mask is not None:  # padding\n    s = s.masked_fill(mask, -1e9)\n"
        "return s.softmax(-1) @ v  # end",
        "",
        PLAIN,
        "if mask is None:\n    return F.scaled_dot_product_attention(q, k, v, scale=0.5)\n"
        "s = q @ k.mT * 0.5\n\n# seldom\nif mask is not None:  # padding\n    s = s.masked_fill(mask, -1e9)\n"
        "return s.softmax(-1) @ v  # end\n",
    ),
    "an assignment moves to the right": (
        "n = 2\ns = q @ k.mT * 0.5\n\n# seldom\nif mask is not None:  # padding\n    s = s.masked_fill(\n"
        "        mask, -1e9\n    )\ny = (s.softmax(-1) @ v) * n  # end\nreturn y",
        "",
        PLAIN,
        "n = 2\nif mask is None:\n    y = F.scaled_dot_product_attention(q, k, v, scale=0.5) * n\nelse:\n"
        "    s = q @ k.mT * 0.5\n\n    # seldom\n    if mask is not None:  # padding\n        s = s.masked_fill(\n"
        "            mask, -1e9\n        )\n    y = (s.softmax(-1) @ v) * n  # end\nreturn y\n",
    ),
    "the side that ran": (
        "s = q @ k.mT * 0.5\nif mask is None:\n    s = s * 2\nelse:\n    s = s.masked_fill(mask, -1e9)\n"
        "p = s.softmax(-1)\nif self.off and v.dim() == 4:\n    p = p * 2\nreturn p @ v",
        BOOL,
        WITH_MASK,
        "if mask is not None and not (self.off and v.dim() == 4):\n"
        "    return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask, scale=0.5)\n"
        "s = q @ k.mT * 0.5\nif mask is None:\n    s = s * 2\nelse:\n    s = s.masked_fill(mask, -1e9)\n"
        "p = s.softmax(-1)\nif self.off and v.dim() == 4:\n    p = p * 2\nreturn p @ v\n",
    ),
}


def attention_of(folder: Path, text: str) -> tuple[Source, Alignment, dict[str, str]]:
    """The region from the tensors to the product with the values, and how each tensor is spelled."""
    source, graph = captured(folder, text)
    root = max(n.index for n in graph.nodes if n.target.endswith("matmul"))
    boundary = frozenset(n.index for n in graph.nodes if n.op == "placeholder")
    found = align(source, graph, root, boundary, branches=True)
    return source, found, {source.segment(b.expression): source.segment(b.expression) for b in found.values.values()}


def outputs(text: str, folder: Path, mask: bool | None) -> object:
    path = folder / "run.py"
    path.write_text(text, encoding="utf-8")
    module = testing.load_module(path)
    q, k, v = module.get_inputs()[:3]
    torch.manual_seed(0)
    if mask is None:
        return module.Model()(q, k, v)
    return module.Model()(q, k, v, torch.ones(8, 8, dtype=torch.bool).triu(1) if mask else None)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_edit_keeps_what_did_not_run(name: str, ending: str, tmp_path: Path) -> None:
    body, mask, template, after = GUARDED[name]
    text = text_of(body, "mask=None", mask)
    source, found, spelled = attention_of(tmp_path, text)
    source = Source(source.path, text.replace("\n", ending))
    guard = found.guarded()
    spans = source.span(found.root.expression), source.span(guard.first)
    edits = guarded.guarded_instead(source, spans[0], template, spelled, spans[1], guard.text)
    result = codemod.apply(source, edits)
    assert result.replace(ending, "\n") == text.replace(
        text_of(body).split("k, v):\n")[1].split("\n\n\ndef")[0] + "\n", textwrap.indent(after, " " * 8)
    )
    assert ("\r\n" in result) == (ending == "\r\n") and result.count("\n") == result.count(ending)
    for masked in (True, False):
        expected, now = (outputs(t.replace("\r\n", "\n"), tmp_path, masked) for t in (text, result))
        torch.testing.assert_close(now, expected)


def test_a_text_of_several_lines_is_not_indented() -> None:
    text = 'def f(x, m):\n    y = x * 2\n    if m:\n        y = y + len("""a\n  b""")\n    z = y + 1\n    return z\n'
    source = Source("m.py", text)
    first, _, root, _ = source.tree.body[0].body  # type: ignore[attr-defined]
    edits = guarded.guarded_instead(source, source.span(root.value), "g({x})", {"x": "x"}, source.span(first), "not m")
    assert codemod.apply(source, edits) == (
        "def f(x, m):\n    if not m:\n        z = g(x)\n    else:\n        y = x * 2\n        if m:\n"
        '            y = y + len("""a\n  b""")\n        z = y + 1\n    return z\n'
    )


NO_GUARD = {
    "something else in between": (
        "s = q @ k.mT\nif mask is not None:\n    s = s + mask\nn = q.size(0)\nreturn s @ v * n",
        "something else is computed between",
    ),
    "a test made in between": (
        "s = q @ k.mT\nbig = q.size(-1) > 99\nif big:\n    s = s * 2\nreturn s @ v",
        "something else is computed between",
    ),
    "a test changed in between": (
        "m = None\ns = q @ k.mT\nif m is None:\n    m = 1\n    s = s * 2\nelse:\n    s = s * 3\nreturn s @ v",
        "something else is computed between",
    ),
    "something else in the branch": (
        "s = q @ k.mT\nif self.flag:\n    s = s * 2\n    n = 2\nelse:\n    n = 1\n    s = s * 3\nreturn s @ v * n",
        "something else is computed between",
    ),
}


@pytest.mark.parametrize("name", NO_GUARD)
def test_where_no_guard_can_stand(name: str, tmp_path: Path) -> None:
    body, reason = NO_GUARD[name]
    _, found, _ = attention_of(tmp_path, text_of(body, "mask=None"))
    with pytest.raises(Miss) as caught:
        found.guarded()
    assert re.search(reason, caught.value.reason), caught.value.reason


def test_a_test_that_acts_is_a_miss(tmp_path: Path) -> None:
    body = "s = q @ k.mT\nif self.extra_repr() == '':\n    s = s * 2\nreturn s @ v"
    with pytest.raises(Miss, match="found out by a call"):
        attention_of(tmp_path, text_of(body))


def test_without_a_guard_the_statements_of_a_branch_go_with_it(tmp_path: Path) -> None:
    body = f"s = q @ k.mT * 0.5\n{MASKED}# to the values\nreturn s.softmax(-1) @ v"
    source, found, spelled = attention_of(tmp_path, text_of(body, "mask=None", BOOL))
    template = "F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask}, scale=0.5)"
    spelled["mask"] = "~mask if mask is not None else None"
    consumed = [source.span(s) for s in found.consumed]
    edits = codemod.expression_instead(source, source.span(found.root.expression), template, spelled, consumed)
    result = codemod.apply(source, edits)
    assert "masked_fill" not in result and "# to the values\n" in result
    for masked in (True, False):
        torch.testing.assert_close(*(outputs(t, tmp_path, masked) for t in (result, source.text)))


# ------------------------------------------------------------------------------------- several regions, several files


def attentions(graph: Graph) -> list[Region]:
    return [found for found in attention_regions(graph) if isinstance(found, Region)]


SHARED = """\
def attend(q, k, v, mask=None):
    s = q @ k.mT
    if mask is not None:
        s = s.masked_fill(mask, -1e9)
    return s.softmax(-1) @ v


def weigh(p, v):
    return p @ v


"""


def test_calls_that_take_different_branches_are_told_apart(tmp_path: Path) -> None:
    body = "return attend(q, k, v) + attend(k, q, v, torch.ones(8, 8, dtype=torch.bool).triu(1))"
    source, graph = captured(tmp_path, text_of(body).replace("class AlwaysDropout", SHARED + "class AlwaysDropout"))
    regions = [(graph, r.root, r.inputs) for r in attentions(graph)]
    assert len(regions) == 2
    with pytest.raises(Miss, match="calls of the same code take different branches"):
        align_all(source, regions, branches=True)
    with pytest.raises(Miss, match=r"which did not happen|computed only when"):
        align_all(source, regions)


def test_calls_that_take_the_same_branches_are_one_alignment(tmp_path: Path) -> None:
    body = "return attend(q, k, v) + attend(k, q, v)"
    source, graph = captured(tmp_path, text_of(body).replace("class AlwaysDropout", SHARED + "class AlwaysDropout"))
    found = align_all(source, [(graph, r.root, r.inputs) for r in attentions(graph)], branches=True)
    assert shown(found) == [("mask is not None", False, True)]


def test_the_call_of_a_helper_that_ends_the_region_is_what_is_replaced(tmp_path: Path) -> None:
    body = "p = (q @ k.mT).softmax(-1)\nreturn weigh(p, v)"
    source, graph = captured(tmp_path, text_of(body).replace("class AlwaysDropout", SHARED + "class AlwaysDropout"))
    found = align(source, graph, *whole(graph))
    assert source.segment(found.root.expression) == "weigh(p, v)"
    assert texts(found) == QKV
    assert [source.segment(s) for s in found.consumed] == ["p = (q @ k.mT).softmax(-1)"]


def test_calls_of_a_helper_from_two_places_are_two_places(tmp_path: Path) -> None:
    body = "a = (q @ k.mT).softmax(-1)\na = weigh(a, v)\nb = (k @ q.mT).softmax(-1)\nreturn weigh(b, v) + a"
    source, graph = captured(tmp_path, text_of(body).replace("class AlwaysDropout", SHARED + "class AlwaysDropout"))
    with pytest.raises(Miss, match="calls of the same code differ in their place"):
        align_all(source, [(graph, r.root, r.inputs) for r in attentions(graph)])


OTHER = """\
import torch
from torch import nn


def score(q, k, scale):
    return q @ k.transpose(-2, -1) * scale


def shrink(x):
    return x * 0.25


class Base(nn.Module):
    def combine(self, q, k, v):
        s = q @ k.transpose(-2, -1) * 0.5
        return s.softmax(-1) @ v
"""


def test_helpers_in_another_file_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "align_other.py").write_text(OTHER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    text = text_of("return score(q, k, self.scale).softmax(-1) @ v").replace(
        "import math\n", "import math\nfrom align_other import Base, score, shrink\n"
    )
    source, graph = captured(tmp_path, text)
    found = align(source, graph, *whole(graph), read=lambda path: Source.read(tmp_path, path))
    assert texts(found) == QKV
    assert "self.scale" in {source.segment(b.expression) for b in found.constants.values()}
    with pytest.raises(Miss, match="body is elsewhere"):
        align(source, graph, *whole(graph))
    # a number written in another file cannot be spelled here
    source, graph = captured(tmp_path, text.replace("score(q, k, self.scale)", "shrink(q @ k.mT)"))
    with pytest.raises(Miss, match="written in another file"):
        align(source, graph, *whole(graph), read=lambda path: Source.read(tmp_path, path))
    # a method of a base class: the region lies in its file
    changed = text.replace("score(q, k, self.scale).softmax(-1) @ v", "self.combine(q, k, v)")
    source, graph = captured(tmp_path, changed.replace("class Model(nn.Module)", "class Model(Base)"))
    assert graph.nodes[whole(graph)[0]].span.path == "align_other.py"  # type: ignore[union-attr]
    found = align(Source.read(tmp_path, "align_other.py"), graph, *whole(graph))
    assert texts(found) == QKV
    monkeypatch.delitem(sys.modules, "align_other")


# ------------------------------------------------------------------------------------------------- buffers left behind

BUFFERS = {  # registration, another line of the class, whether the buffer is dead afterwards
    "read by the region alone": ("self.register_buffer('m', torch.ones(8, 8).tril() == 0, persistent=False)", "", True),
    "in the state dict": ("self.register_buffer('m', torch.ones(8, 8).tril() == 0)", "", False),
    "in the state dict by name": ("self.register_buffer('m', torch.ones(8, 8).bool(), persistent=True)", "", False),
    "read by another method": (
        "self.register_buffer('m', torch.ones(8, 8).bool(), persistent=False)",
        "def other(self): return self.m",
        False,
    ),
    "read by name": (
        "self.register_buffer('m', torch.ones(8, 8).bool(), persistent=False)",
        "def other(self): return getattr(self, 'm')",
        False,
    ),
    "read by any name": (
        "self.register_buffer('m', torch.ones(8, 8).bool(), persistent=False)",
        "def other(self, name): return getattr(self, name)",
        False,
    ),
    "swept": (
        "self.register_buffer('m', torch.ones(8, 8).bool(), persistent=False)",
        "def other(self): return list(self.buffers())",
        False,
    ),
    "drawn": ("self.register_buffer('m', torch.rand(8, 8) > 2, persistent=False)", "", False),
    "made of a local name": ("n = 8\nself.register_buffer('m', torch.ones(n, n).bool(), persistent=False)", "", False),
    "registered under a condition": (
        "if self.flag:\n    self.register_buffer('m', torch.ones(8, 8).bool(), persistent=False)",
        "",
        False,
    ),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_that_only_the_region_reads(name: str, tmp_path: Path) -> None:
    made, more, dead = BUFFERS[name]
    text = text_of("s = (q @ k.mT).masked_fill(self.m, -1e9)\nreturn s.softmax(-1) @ v")
    text = text.replace("        self.scale = 0.5\n", f"        self.scale = 0.5\n{textwrap.indent(made, ' ' * 8)}\n")
    text = text.replace("    def scores(", f"    {more}\n\n    def scores(")
    source, graph = captured(tmp_path, text)
    found = align(source, graph, *whole(graph))
    buffers = dead_buffers(source, found)
    assert [b.name for b in buffers] == (["m"] if dead else [])
    if dead:
        assert source.at(buffers[0].span) == made
        index = next(i for i, b in found.values.items() if source.segment(b.expression) == "self.m")
        assert dead_buffers(source, found, kept=[index]) == ()
        assert dead_buffers(source, found, others=[Source("eval.py", "show(model.block.m)\n")]) == ()


# ------------------------------------------------------------------------------------------------------ random nesting

STEPS = {  # one step of the scores, and what it does to them: factor, mask
    "s = s * 0.5": (0.5, False),
    "s *= 2": (2.0, False),
    "s = torch.div(\n    s,\n    2.0,  # half\n)": (0.5, False),
    "if self.flag:\n    s = s * 0.5": (0.5, False),
    "if self.off:\n    s = s * 3": (1.0, False),
    "if self.none is None:\n    if self.flag:\n        s = s / 2\n    else:\n        s = s / 3": (0.5, False),
    "if self.off:\n    # never\n    s = s + 1\nelif self.flag:\n    s = s.mul(2)\nelse:\n    s = -s": (2.0, False),
    "s = s * self.scale if self.flag else s": (0.5, False),
    "s = scaled(s)": (2.0, False),
    "s = scaled(scaled(s, 0.5), factor=2.0)": (1.0, False),
    "s = s.float(); s = s.to(q.dtype)": (1.0, False),
    "s = s.masked_fill(self.tri == 0, -1e9)": (1.0, True),
    "s.masked_fill_(~self.tri, -1e9)": (1.0, True),
    "if self.tri is not None:\n    s = torch.where(self.tri, s, -1e9)  # causal": (1.0, True),
}
STARTS = ["s = q @ k.mT", "s = torch.matmul(q, k.transpose(-2, -1))", 's = einsum("bhqd,bhkd->bhqk", q, k)']
PROBABILITIES = ["s = s.softmax(-1)", "s = soft(s, dim=-1)", "s = self.softmax(s)"]
ENDS = ["return s @ v", "y = (s @ v)  # out\nreturn y", 'y = 1 * torch.einsum("bhqk,bhkd->bhqd", s, v)\nreturn y']
DROPS = ["", "if self.dropout is not None:\n    s = self.dropout(s)", "if self.none is not None:\n    s = self.none(s)"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from(STARTS),
    st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    st.sampled_from(PROBABILITIES),
    st.sampled_from(DROPS),
    st.sampled_from(ENDS),
)
def test_any_nesting_is_rewritten_right_and_only_there(
    tmp_path_factory: pytest.TempPathFactory, start: str, steps: list[str], probabilities: str, drop: str, end: str
) -> None:
    folder = tmp_path_factory.mktemp("nesting")
    body = "\n".join(part for part in ("n = 1  # kept", start, *steps, probabilities, drop, end) if part)
    text = text_of(body)
    source, graph = captured(folder, text)
    products = [n for n in graph.nodes if n.target.endswith(("matmul", "einsum"))]
    boundary = frozenset(n.index for n in graph.nodes if n.op == "placeholder")
    found = align(source, graph, products[-1].index, boundary, branches=True)
    assert QKV <= texts(found) <= QKV | {"self.tri"}
    factor, masked = 1.0, False
    for step in steps:
        factor, masked = factor * STEPS[step][0], masked or STEPS[step][1]
    template = f"F.scaled_dot_product_attention({{q}}, {{k}}, {{v}}, is_causal={masked}, scale={factor})"
    names = {name: name for name in QKV}
    at, root = source.span(found.root.expression), found.root.statement
    if found.branches:
        guard = found.guarded()
        edits = guarded.guarded_instead(source, at, template, names, source.span(guard.first), guard.text)
        first = guard.first
    else:
        edits = codemod.expression_instead(source, at, template, names, [source.span(s) for s in found.consumed])
        first = min((*found.consumed, root), key=lambda s: s.lineno)
    result = codemod.apply(source, edits)
    ast.parse(result)
    before, after = source.lines, Source("m.py", result).lines
    assert root.end_lineno is not None
    tail = len(before) - root.end_lineno
    assert after[: first.lineno - 1] == before[: first.lineno - 1]
    assert after[len(after) - tail :] == before[root.end_lineno :]
    if found.branches:  # the code as it was, apart from its indentation
        old = [line.strip() for line in before[first.lineno - 1 : root.end_lineno]]
        assert [line.strip() for line in after][len(after) - tail - len(old) : len(after) - tail] == old
    torch.testing.assert_close(outputs(result, folder, None), outputs(text, folder, None), rtol=1e-4, atol=1e-5)
