"""Alignment of captured graphs with the source: every spelling binds the right expressions, or a miss says why."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from aligning import MASK, MASKED, called, captured, shown, text_of, texts, under, whole, whole_of

from advisor.alignment.align import Miss, align
from advisor.model import Graph, Span

pytest.importorskip("torch")

# ---------------------------------------------------------------------------------------------------------- spellings

QKV = {"q", "k", "v"}
SPELLINGS = {
    "methods": "return q.matmul(k.transpose(-2, -1)).div(2.0).softmax(-1).matmul(v)",
    "functions": "s = torch.div(torch.bmm(q[0], k[0].mT), 2.0)\nreturn torch.bmm(nnf.softmax(s, dim=-1), v[0])",
    "an imported function": "return soft(q @ k.mT, dim=-1) @ v",
    "a dotted function": "return torch.nn.functional.softmax(q @ k.mT, -1) @ v",
    "an import inside": "import torch.nn.functional as fun\nreturn fun.softmax(q @ k.mT, -1) @ v",
    "einsum": 's = einsum("bhqd,bhkd->bhqk", q, k)\nreturn torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v)',
    "baddbmm": "return torch.baddbmm(q[0], k[0] @ k[0].mT, v[0], beta=1, alpha=0.5)",
    "keywords": "return torch.matmul(input=torch.matmul(q, other=k.mT).softmax(dim=-1), other=v)",
    "where": "return torch.where((q > k) , v, torch.zeros_like(v))",
    "shapes": "x = q.view(2, 3, 32).reshape(2, 3, 8, 4).permute(0, 2, 1, 3).contiguous().unsqueeze(0).squeeze(0)\n"
    "return x.transpose(1, 2) * k.expand(2, 3, 8, 4) + v.type_as(q).to(torch.float32).float()",
    "starred shape": "return q.view(*q.shape[:2], -1) + k.reshape(2, 3, 32) * v.flatten(2)",
    "subscripts": "return q[..., None][..., 0] * k[:, :, :8] + v",
    "maximum by number": "s = q @ k.mT\ns = (s - s.max(-1, keepdim=True)[0]).exp()\n"
    "return s / s.sum(-1, keepdim=True) @ v",
    "maximum by name": "s = q @ k.mT\ns = torch.exp(s - s.max(dim=-1, keepdim=True).values)\nreturn s @ v",
    "maximum unpacked": "s = q @ k.mT\nm, _ = s.max(-1, keepdim=True)\nreturn (s - m).exp() @ v",
    "amax": "s = q @ k.mT\nreturn (s - s.amax(dim=-1, keepdim=True)).exp() @ v",
    "in place": "s = q @ k.mT\ns += 1\ns *= 0.5\ns.masked_fill_(s > 3, 0.0)\ns = s.add_(2)\nreturn s @ v",
    "a multi-line chain": "return (\n    (q @ k.mT)\n    .mul(0.5)\n    .softmax(dim=-1)\n    .matmul(v)\n)",
    "multi-line operands": "s = torch.matmul(\n    q,\n    k.mT,\n)\nreturn (\n    s *\n    2\n) @ v",
    "two at once": "a, b = q * 2, k * 3\nreturn a @ b.mT @ v",
    "chained": "a = b = q * 2\nreturn a @ b.mT @ k @ v.mT",
    "annotated": "a: torch.Tensor = q * 2\nreturn a @ k.mT @ v",
    "unary": "return -q * (1 - k) + 2 ** v",
    "softmax module": "return self.softmax(q @ k.mT) @ v",
    "softmax module made here": "return nn.Softmax(dim=-1)(q @ k.mT) @ v",
    "dropout module": "p = self.dropout(q @ k.mT)\nreturn p @ v",
    "modules in a list": "return self.layers[1](self.layers[0](q @ k.mT)) @ v",
    "a number on the left": "return (1 + q) * (2 * k) + 3 * v",
    "gelu module": "return self.act(q) * k + v",
    "a helper": "return scaled(q @ k.mT) @ v",
    "nested helpers": "return scaled(scaled(q, 3.0) @ k.mT, factor=0.5) @ v",
    "a method": "return self.scores(q, k).softmax(-1) @ v",
    "a helper of two statements": "return rotate_half(q) * k + v",
    "a list of tensors": "return torch.stack([q, k]).sum(0) + torch.cat((v[..., :2], v[..., 2:]), -1)",
    "inside a with block": "s = q @ k.mT\nwith torch.profiler.record_function('x'):\n    y = s @ v\nreturn y",
    "inside an if": "s = q @ k.mT\nif self.flag:\n    y = s.softmax(-1) @ v\n    return y\nreturn None",
    "the other branch leaves": "if self.off:\n    return q\nelse:\n    n = 2\n    s = q @ k.mT\nreturn s @ v * n",
    "unpacked from a call": "a, b = (q @ k.mT).chunk(2, -1)\nreturn a @ v[..., :4, :] + b.sum()",
    "the end of a with block": "with torch.autocast('cpu'):\n    n = 2\n    s = q @ k.mT\nreturn s.float() @ v * n",
    "characters of several bytes": "ä = q @ k.mT; ß = ä.softmax(-1)\nreturn ß @ v",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_followed(name: str, tmp_path: Path) -> None:
    found = whole_of(tmp_path, SPELLINGS[name])
    assert texts(found) == QKV
    assert not found.branches


MISSES = {
    "a condition on an intermediate": (
        "s = q @ k.mT\nif s.dim() == 4:\n    s = s * 2\nreturn s @ v",
        "depends on the intermediate `s`",
    ),
    "a probability of an intermediate": (
        "s = q @ k.mT\nreturn F.dropout(s, 0.0 * s.size(-1)) @ v",
        "how much is dropped depends on the intermediate `s`",
    ),
    "a subclass with another forward": ("return self.always(q) + k + v", "body is elsewhere"),
    "a subclass of a module": ("return self.quiet(q) + k + v", "body is elsewhere"),
    "several modules in one": ("return self.stack(q) + k + v", "body is elsewhere"),
    "a helper with another statement": ("return checked(q) + k + v", "body is elsewhere"),
    "an assignment inside": ("return (s := q @ k.mT) @ v", "assignment inside"),
    "a loop": ("x = q\nfor _ in range(2):\n    x = x @ k.mT @ v\nreturn x", "."),
    "before the loop": ("s = q @ k.mT\nfor _ in range(1):\n    y = s @ v\nreturn y", "loop"),
    "inside a comprehension": ("s = q @ k.mT\nreturn [s @ x for x in [v]][0]", "comprehension"),
    "a lambda": ("s = q @ k.mT\nf = lambda x: s @ x\nreturn f(v)", "lambda|no expression"),
    "read again": ("s = q @ k.mT\ny = s @ v\nif self.off:\n    print(s)\nreturn y", "`s` is read again"),
    "a value beside it": ("a, b = q @ k.mT, len(q)\nreturn a @ v", "another value"),
    "changed in between": ("a = q * self.scale\nself.scale = 2\nreturn a + k + v", "`scale` changes"),
    "in place at the end": ("s = q @ k.mT @ v\ns += v\nreturn s", "assignment in place"),
    "a try": ("try:\n    s = q @ k.mT\nexcept ValueError:\n    s = q\nreturn s @ v", "not followed"),
    "an emptied with": ("with torch.autocast('cpu', enabled=False):\n    s = q @ k.mT\nreturn s @ v", "left empty"),
    "an emptied branch": ("if self.off:\n    return q\nelse:\n    s = q @ k.mT\nreturn s @ v", "left empty"),
    "an unknown with": (
        "with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):\n    n = 2\n    s = q @ k.mT\nreturn s @ v * n",
        "spread over the block of `with sdpa_kernel`",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_cannot_be_followed_is_a_miss(name: str, tmp_path: Path) -> None:
    body, reason = MISSES[name]
    with pytest.raises(Miss) as caught:
        whole_of(tmp_path, body, branches=True)
    assert re.search(reason, caught.value.reason), caught.value.reason


# ----------------------------------------------------------------------------------------------------------- branches

BRANCHES = {  # body, more parameters, branches (test, outcome, loses), values under a condition, guard
    "a mask that was given": (
        f"s = q @ k.mT\n{MASKED}return s.softmax(-1) @ v",
        *MASK,
        [("mask is not None", True, False)],
        {"mask": ["mask is not None"]},
        "mask is not None",
    ),
    "a mask that was not given": (
        f"s = q @ k.mT\n{MASKED}return s.softmax(-1) @ v",
        "mask=None",
        "",
        [("mask is not None", False, True)],
        {},
        "mask is None",
    ),
    "both sides compute": (
        "s = q @ k.mT\nif mask is None:\n    s = s * 2\nelse:\n    s = s.masked_fill(mask, -1e9)\nreturn s @ v",
        *MASK,
        [("mask is None", False, True)],
        {"mask": ["mask is None"]},
        "mask is not None",
    ),
    "a module that may be absent": (
        "p = q @ k.mT\nif self.dropout is not None:\n    p = self.dropout(p)\nreturn p @ v",
        "",
        "",
        [("self.dropout is not None", True, False)],
        {},
        "self.dropout is not None",
    ),
    "two conditions": (
        f"s = q @ k.mT\n{MASKED}p = s.softmax(-1)\nif self.none is not None:\n    p = self.none(p)\nreturn p @ v",
        *MASK,
        [("mask is not None", True, False), ("self.none is not None", False, True)],
        {"mask": ["mask is not None"]},
        "mask is not None and self.none is None",
    ),
    "nested": (
        "s = q @ k.mT\nif mask is not None:\n    if self.flag:\n        s = s.masked_fill(mask, -1e9)\nreturn s @ v",
        *MASK,
        [("mask is not None", True, False), ("self.flag", True, False)],
        {"mask": ["mask is not None", "self.flag"]},
        "mask is not None and self.flag",
    ),
    "a chain": (
        "s = q @ k.mT\nif self.off:\n    s = s * 2\nelif self.flag or self.off:\n    s = s.masked_fill(mask, -1e9)\n"
        "else:\n    s = s * 3\nreturn s @ v",
        *MASK,
        [("self.off", False, True), ("self.flag or self.off", True, True)],
        {"mask": ["self.off", "self.flag or self.off"]},
        "not self.off and (self.flag or self.off)",
    ),
    "an expression that ran": (
        "s = q @ k.mT\ns = s + bias if bias is not None else s\nreturn s @ v",
        "bias=None",
        "torch.randn(8, 8)",
        [("bias is not None", True, False)],
        {"bias": ["bias is not None"]},
        "bias is not None",
    ),
    "an expression that did not run": (
        "s = q @ k.mT\ns = s + bias if bias is not None else s\nreturn s @ v",
        "bias=None",
        "",
        [("bias is not None", False, True)],
        {},
        "bias is None",
    ),
    "a scale": (
        "s = q @ k.mT\nif self.scale != 1:\n    s = s * self.scale\nreturn s @ v",
        "",
        "",
        [("self.scale != 1", True, False)],
        {},
        "self.scale != 1",
    ),
    "one condition for two names": (
        "w = v\ns = q @ k.mT\nif self.flag:\n    s = s * 2\n    w = v + 1\nreturn s @ w",
        "",
        "",
        [("self.flag", True, True)],
        {"v": ["self.flag"]},
        "self.flag",
    ),
    "a branch in place": (
        "s = q @ k.mT\nif mask is not None:\n    s.masked_fill_(mask, -1e9)\nreturn s @ v",
        *MASK,
        [("mask is not None", True, False)],
        {"mask": ["mask is not None"]},
        "mask is not None",
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_the_branch_that_ran_is_aligned(name: str, tmp_path: Path) -> None:
    body, more, given, branches, conditions, guard = BRANCHES[name]
    found = whole_of(tmp_path, body, more, given, branches=True)
    assert shown(found) == branches
    assert under(found) == conditions
    assert found.guarded().text == guard
    assert bool(found.unran) == any(lost for _, _, lost in branches)
    with pytest.raises(Miss) as caught:
        whole_of(tmp_path, body, more, given)
    assert re.search("computed only when|which did not happen in this run", caught.value.reason)


# ----------------------------------------------------------------------------------------------------- without columns


def without_columns(graph: Graph) -> Graph:
    """The graph as Python 3.10 gives it: frames tell the line alone."""

    def bare(span: Span) -> Span:
        return Span(path=span.path, line=span.line, function=span.function)

    nodes = [
        replace(n, frames=tuple(map(bare, n.frames)), span=None if n.span is None else bare(n.span))
        for n in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


LINES = ["methods", "in place", "maximum by name", "a helper", "two at once", "softmax module", "a multi-line chain"]


@pytest.mark.parametrize("name", LINES)
def test_lines_alone_are_enough(name: str, tmp_path: Path) -> None:
    source, graph = captured(tmp_path, text_of(SPELLINGS[name]))
    assert texts(align(source, without_columns(graph), *whole(graph))) == QKV


def test_lines_alone_tell_branches_apart(tmp_path: Path) -> None:
    body = f"s = q @ k.mT\n{MASKED}return s.softmax(-1) @ v"
    source, graph = captured(tmp_path, text_of(body, *MASK))
    found = align(source, without_columns(graph), *whole(graph), branches=True)
    assert shown(found) == [("mask is not None", True, False)]


def test_what_lines_cannot_tell_is_a_miss(tmp_path: Path) -> None:
    source, graph = captured(tmp_path, text_of("a = q * 2; b = q * 2\nreturn (q + k) + (q + k) + v"))
    root, boundary = whole(graph)
    inner = graph.nodes[root].args[0].index
    twin = graph.nodes[inner].args[0].index
    with pytest.raises(Miss, match="several expressions"):
        align(source, without_columns(graph), twin, boundary - {2})


def test_a_constant_of_an_intermediate_is_not_spelled(tmp_path: Path) -> None:
    body = "s = q @ k.mT / math.sqrt(k.size(-1))\ns = s.masked_fill(self.tri, torch.finfo(s.dtype).min)\nreturn s @ v"
    found = whole_of(tmp_path, body)
    assert texts(found) == {"q", "k", "v", "self.tri"}
    spelled = {found.source.segment(bound.expression) for bound in found.constants.values()}
    assert "math.sqrt(k.size(-1))" in spelled and not any("finfo" in text for text in spelled)


def test_an_input_that_reads_an_intermediate_is_a_miss(tmp_path: Path) -> None:
    source, graph = captured(
        tmp_path, text_of("m, i = (q @ k.mT).max(-1, keepdim=True)\nreturn m * i @ v.mT[..., :1, :]")
    )
    root, boundary = whole(graph)
    index = next(n.index for n in graph.nodes if n.target == "operator.getitem" and n.args[1] == 1)
    with pytest.raises(Miss, match="an input of the region reads the intermediate `i`"):
        align(source, graph, root, boundary | {index})


# ------------------------------------------------------------------------------------------------------ eager recorder

EAGER = {  # body, line of the root's operation, what the region reads
    "numbers on either side": "s = 1 + q @ k.mT\ns = 2 * s * 0.5\nreturn s.softmax(-1) @ v",
    "a function with its axis": "s = self.scale * (q @ k.mT)\nreturn F.softmax(s, -1) @ v",
    "modules": "s = self.dropout(self.softmax(q @ k.mT))\nreturn s @ v",
    "a branch": "s = q @ k.mT\nif self.flag:\n    s = F.dropout(s, 0.0, self.training)\nreturn s @ v",
    "a helper": "return scaled(q @ k.mT, 0.5) @ v",
}


@pytest.mark.parametrize("name", EAGER)
def test_calls_recorded_one_by_one(name: str, tmp_path: Path) -> None:
    source, graph = called(tmp_path, text_of(EAGER[name]))
    products = [n for n in graph.nodes if n.target.endswith("matmul")]
    boundary = frozenset(n.index for n in graph.nodes if n.op == "placeholder")
    found = align(source, graph, products[-1].index, boundary, branches=True)
    assert texts(found) == QKV


def test_a_number_and_a_tensor_that_look_alike_are_not_guessed(tmp_path: Path) -> None:
    text = text_of("return F.silu(self.halved(q, 0.5)) + k + v").replace(
        "    def scores(", "    def halved(self, x, y):\n        return x * y\n\n    def scores("
    )
    source, graph = called(tmp_path, text)
    product = next(n for n in graph.nodes if n.target.endswith("mul"))
    with pytest.raises(Miss, match="which operand of `x \\* y` is the number"):
        align(source, graph, product.index, frozenset(product.inputs()))
