"""Casts to float32 and back: which are undone and how exactly, and which are autocast's own or wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from advisor import patch as patching
from advisor.casttimes import cast_times
from advisor.match import match
from advisor.model import (
    UNLINKED_READS,
    Decline,
    Environment,
    Finding,
    Graph,
    Hardware,
    Kernels,
    Node,
    NodeCost,
    Operators,
    Profile,
    Ref,
    Rewrite,
    Safety,
    Span,
    Symbol,
)
from advisor.registry import load
from advisor.rule import ON_A_GPU, Context
from advisor.source import Source

RULE = load()[0]["cast-storm"].rule
SHAPE = (64, 128)
LINEAR = "torch._C._nn.linear"
HEAD = """\
import torch
import torch.nn.functional as F


class Block(torch.nn.Module):
    def forward(self, x):
"""


class Recording:
    """A graph built call by call, each placed where the source has its text."""

    def __init__(self, body: str, head: str = HEAD) -> None:
        lines = "".join(f"        {line}\n" for line in body.split("\n"))
        self.source = Source("model.py", head + lines)
        self.nodes: list[Node] = []
        self.casts: dict[tuple[int, int], dict[tuple[int, ...], float]] = {}

    def given(self, dtype: str, shape: tuple[int, ...] = SHAPE, origin: str = "input") -> int:
        facts = {"origin": origin}
        return self._add(Node(index=len(self.nodes), name="p", op="placeholder", target="p", dtype=dtype, shape=shape,
                              facts=facts))  # fmt: skip

    def called(
        self, target: str, *args: Any, dtype: str, text: str | None = None, us: float = 0.0,
        shape: tuple[int, ...] = SHAPE,
    ) -> int:  # fmt: skip
        at = self.source.text.index(text) if text is not None else -1
        before = self.source.text[: max(at, 0)]
        line = before.count("\n") + 1
        span = Span(path="model.py", line=line, column=at - before.rfind("\n") - 1) if text is not None else None
        refs = tuple(Ref(a) if isinstance(a, int) and not isinstance(a, bool) else a for a in args)
        index = len(self.nodes)
        if us:
            self.casts[(0, index)] = {SHAPE: us}
        return self._add(
            Node(index=index, name=f"n{index}", op="call_function", target=target, args=refs, dtype=dtype, shape=shape,
                 frames=(span,) if span else (), span=span)
        )  # fmt: skip

    def _add(self, node: Node) -> int:
        for read in node.inputs():
            self.nodes[read] = replace(self.nodes[read], users=(*self.nodes[read].users, node.index))
        self.nodes.append(node)
        return node.index

    def context(self, kind: str = "cuda", costs: Mapping[tuple[int, int], NodeCost] | None = None) -> Context:
        profile = Profile(
            environment=Environment(python="3", torch="2"),
            hardware=Hardware(name="a device", kind=kind, peak_flops={"bfloat16": 1e15}),
            steps=(),
            step_us=(10_000.0,),
            graphs=(Graph(index=0, nodes=tuple(self.nodes)),),
            facts={"casts_us": self.casts},
        )
        return Context(profile, lambda path: self.source, costs=costs or {}, script="model.py")

    def answers(self, **given: Any) -> list[Finding | Decline]:
        result = match(self.context(**given), [RULE])
        assert not result.errors, result.errors[0].detail
        return [*result.findings, *result.declines]

    def rewritten(self) -> tuple[str, Rewrite]:
        (finding,) = self.answers()
        assert isinstance(finding, Finding), finding
        made = RULE.rewrite(finding, self.source)
        assert isinstance(made, Rewrite), made
        text = patching.build([made], lambda path: self.source).sources["model.py"]
        return text.split("forward(self, x):\n")[1], made

    def told(self) -> str:
        (finding,) = self.answers()
        assert isinstance(finding, Finding), finding
        answer = RULE.rewrite(finding, self.source)
        assert isinstance(answer, Decline), answer
        return answer.reason


def squared(body: str, text: str, target: str = "torch.pow", dtype: str = "bfloat16") -> Recording:
    """A recording in which autocast squares an activation and the next layer casts it back."""
    made = Recording(body)
    x = made.given(dtype)
    weight = made.given("float32", (8, 128), "state")
    square = made.called(target, x, *([2.0] if "pow" in target else []), dtype="float32", text=text, us=300.0)
    view = made.called("method.view", square, dtype="float32")
    made.called(LINEAR, view, weight, dtype=dtype, us=400.0)
    return made


def test_the_square_of_an_activation_is_the_same_product_to_the_bit() -> None:
    torch.manual_seed(0)
    given = torch.randn(1000, dtype=torch.bfloat16)
    gradient = torch.randn(1000, dtype=torch.bfloat16)
    results = []
    for square in (lambda x: (x.float() ** 2).to(x.dtype), lambda x: x * x):
        x = given.clone().requires_grad_()
        value = square(x)
        value.backward(gradient)
        assert x.grad is not None
        results.append((value.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


SQUARES = {
    "x = F.relu(self.fc(x)).square()": ("F.relu(self.fc(x)).square()", "x = F.relu(self.fc(x))\n        x = x * x"),
    "x = F.relu(x) ** 2": ("F.relu(x) ** 2", "x = F.relu(x)\n        x = x * x"),
    "x = (x +\n             x) ** 2": ("(x +", "x = (x +\n                     x)\n        x = x * x"),
    "return self.proj(x**2)": ("x**2", "return self.proj(x * x)"),
    "return self.proj(x.pow(2).view(-1))": ("x.pow(2)", "return self.proj((x * x).view(-1))"),
    "y = torch.square(x)": ("torch.square(x)", "y = x * x"),
}


@pytest.mark.parametrize("body", SQUARES)
def test_squares_become_products(body: str) -> None:
    text, wanted = SQUARES[body]
    result, made = squared(body, text).rewritten()
    assert result == f"        {wanted}\n"
    assert made.safety is Safety.NUMERICS
    assert made.finding.estimate.high_us == pytest.approx(700.0)


def test_a_square_without_a_name_is_told() -> None:
    made = squared("return self.proj(F.relu(x).square())", "F.relu(x).square()")
    assert made.told() == "give the activation a name and write the square as a product, `x * x`"


def test_a_cube_and_a_square_that_is_computed_with_are_policy() -> None:
    made = Recording("x = torch.pow(x, 3)\ny = x * 2")
    x, weight = made.given("bfloat16"), made.given("float32", (8, 128), "state")
    cube = made.called("torch.pow", x, 3.0, dtype="float32", text="torch.pow(x, 3)", us=300.0)
    made.called(LINEAR, cube, weight, dtype="bfloat16", us=400.0)
    (answer,) = made.answers()
    assert isinstance(answer, Decline)
    assert answer.reason.startswith(
        "autocast runs pow in float32 by its own policy: the casts there and back take 7.0%"
    )
    made = squared("x = torch.pow(x, 2)", "torch.pow(x, 2)")
    made.called("method.mean", 2, dtype="float32")  # the mean is taken of it too
    (answer,) = made.answers()
    assert isinstance(answer, Decline)


def upcast(body: str, text: str, readers: int = 1, head: str = HEAD) -> Recording:
    """A recording in which an activation is cast to float32 and products cast it back."""
    made = Recording(body, head)
    x, weight = made.given("bfloat16"), made.given("float32", (8, 128), "state")
    cast = made.called("method.float", x, dtype="float32", text=text, us=300.0)
    turned = made.called("method.transpose", cast, dtype="float32")
    for _ in range(readers):
        made.called(LINEAR, turned, weight, dtype="bfloat16", us=400.0)
    return made


def test_an_explicit_cast_is_left_out_where_products_cast_it_back() -> None:
    result, made = upcast("q = self.q(x).float().transpose(0, 1)", "self.q(x).float()").rewritten()
    assert result == "        q = self.q(x).transpose(0, 1)\n"
    assert made.safety is Safety.EXACT
    result, made = upcast("q = x.to(torch.float32)", "x.to(torch.float32)", readers=2).rewritten()
    assert result == "        q = x\n"
    assert made.safety is Safety.NUMERICS
    assert made.finding.estimate.high_us == pytest.approx(1_100.0)
    half = HEAD.replace("class", "model = build().bfloat16()\n\n\nclass")
    _, made = upcast("q = x.float()", "x.float()", head=half).rewritten()
    assert made.safety is Safety.PRECISION
    autocast = HEAD.replace("class", "context = torch.autocast('cuda', dtype=torch.bfloat16)\n\n\nclass")
    _, made = upcast("q = x.float()", "x.float()", head=autocast).rewritten()
    assert made.safety is Safety.EXACT


def test_a_cast_that_is_needed_stays() -> None:
    made = upcast("q = x.float()", "x.float()")
    made.called("torch.nn.functional.cross_entropy", 2, dtype="float32")
    (answer,) = made.answers()
    assert isinstance(answer, Decline)
    assert answer.reason.startswith("it is computed with in float32 before it is cast back: the casts there and back")
    made = upcast("q = x.float()", "x.float()")
    made.called("method.float", 0, dtype="float32", text="x.float()")  # another call, whose result is a loss
    made.called("method.sum", len(made.nodes) - 1, dtype="float32")
    assert made.told() == "other calls of this code need float32"
    made = upcast("q = x.float()", "x.float()")
    made.called("method.add_", 0, 1.0, dtype="bfloat16")
    assert made.told() == "what it casts is written in place: the cast keeps the value from before"
    made = upcast("q = x.type(torch.FloatTensor)", "x.type(torch.FloatTensor)")
    assert made.told() == "the cast is not written as `.float()`: leave it out"


def test_code_that_other_calls_need_in_float32_stays() -> None:
    made = squared("x = torch.pow(x, 2)", "torch.pow(x, 2)")  # a helper that a norm calls too
    other = made.called("torch.pow", 0, 2.0, dtype="float32", text="torch.pow(x, 2)")
    made.called("method.mean", other, dtype="float32")
    assert made.told() == "other calls of this code need float32"
    made = upcast("q = x.float()", "x.float()")  # images of bytes, in another call
    image = made.given("uint8")
    made.called("method.float", image, dtype="float32", text="x.float()")
    assert made.told() == "other calls of this code need float32"


def test_float32_that_is_asked_for_is_not_called_a_policy() -> None:
    made = Recording("p = F.softmax(x, dim=-1, dtype=torch.float32)")
    x, weight = made.given("bfloat16"), made.given("float32", (8, 128), "state")
    soft = made.called("torch.nn.functional.softmax", x, dtype="float32", text="F.softmax", us=300.0)
    made.nodes[soft] = replace(made.nodes[soft], kwargs={"dtype": Symbol("dtype", "float32")})
    made.called(LINEAR, soft, weight, dtype="bfloat16", us=400.0)
    (answer,) = made.answers()
    assert isinstance(answer, Decline)
    assert answer.reason.startswith("softmax is told float32: the casts")


def test_the_casts_of_one_reader_are_shared_among_what_it_casts() -> None:
    made = Recording("q = x.float()\nk = y.float()")
    x, y = made.given("bfloat16"), made.given("bfloat16")
    query = made.called("method.float", x, dtype="float32", text="x.float()", us=100.0)
    key = made.called("method.float", y, dtype="float32", text="y.float()", us=100.0)
    made.called("torch.matmul", query, key, dtype="bfloat16", us=400.0)
    estimates = [answer.estimate.high_us for answer in made.answers() if isinstance(answer, Finding)]
    assert estimates == pytest.approx([300.0, 300.0])


def promoted(body: str, text: str, shape: tuple[int, ...] = (128,), first: bool = False) -> Recording:
    made = Recording(body)
    x, weight = made.given("bfloat16"), made.given("float32", (8, 128), "state")
    buffer = made.given("float32", shape, "state")
    args = (buffer, x) if first else (x, buffer)
    added = made.called("operator.add", *args, dtype="float32", text=text)
    made.called(LINEAR, added, weight, dtype="bfloat16", us=400.0)
    return made


def test_a_buffer_that_promotes_is_cast_at_its_use() -> None:
    result, made = promoted("x = x + self.shift", "x + self.shift").rewritten()
    assert result == "        x = x + self.shift.to(x.dtype)\n"
    assert made.safety is Safety.PRECISION
    result, _ = promoted("x = self.shift[:4] + x", "self.shift[:4] + x", first=True).rewritten()
    assert result == "        x = self.shift[:4].to(x.dtype) + x\n"
    hint = "cast the float32 operand to the activation's dtype"
    assert promoted("x = x + self.shift", "x + self.shift", SHAPE).told() == hint  # as large as the activation
    assert promoted("x = self.fc(x) + self.shift", "self.fc(x) + self.shift").told() == hint
    assert promoted("x = torch.add(x, self.shift)", "torch.add(x, self.shift)").told() == hint


def test_what_promotes_in_front_of_an_operation_that_autocast_runs_in_float32() -> None:
    made = Recording("p = (x + self.bias).softmax(-1)")
    x, weight, bias = (
        made.given("bfloat16"),
        made.given("float32", (8, 128), "state"),
        made.given("float32", (128,), "state"),
    )
    added = made.called("operator.add", x, bias, dtype="float32", text="x + self.bias", us=300.0)
    soft = made.called("method.softmax", added, dtype="float32", text="(x + self.bias).softmax(-1)")
    made.called(LINEAR, soft, weight, dtype="bfloat16", us=400.0)
    (answer,) = made.answers()
    assert isinstance(answer, Decline)
    assert answer.reason.startswith(
        "autocast runs softmax in float32 by its own policy: the casts there and back take 4"
    )


def test_what_stays_float32_for_another_reason_is_silent() -> None:
    made = Recording("x = x + self.attn(x)")
    tokens, weight = made.given("int64"), made.given("float32", (8, 128), "state")
    stream = made.called("torch.nn.functional.embedding", tokens, weight, dtype="float32")
    branch = made.called(LINEAR, stream, weight, dtype="bfloat16", us=900.0)
    added = made.called("operator.add", stream, branch, dtype="float32", text="x + self.attn(x)", us=900.0)
    normed = made.called("torch.nn.functional.layer_norm", added, dtype="float32")
    made.called(LINEAR, normed, weight, dtype="bfloat16", us=900.0)
    assert made.answers() == []


def test_products_in_float32_are_told_unless_autocast_is_off_there() -> None:
    body = "y = self.head(x)\nwith torch.autocast('cuda', enabled=False):\n    z = self.gate(x)"
    made = Recording(body)
    x, weight = made.given("float32"), made.given("float32", (8, 128), "state")
    made.called(LINEAR, x, weight, dtype="bfloat16")
    head = made.called(LINEAR, x, weight, dtype="float32", text="self.head(x)")
    gate = made.called(LINEAR, x, weight, dtype="float32", text="self.gate(x)")
    costs = {
        (0, n): NodeCost(graph=0, node=n, forward_us=300.0, backward_us=600.0, launches=3, provenance="a test",
                         flops=1e11)
        for n in (head, gate)
    }  # fmt: skip
    finding, decline = made.answers(costs=costs)
    assert isinstance(finding, Finding)
    assert finding.span.line == 7
    assert finding.estimate.high_us == pytest.approx(800.0)
    assert isinstance(RULE.rewrite(finding, made.source), Decline)
    assert isinstance(decline, Decline)
    assert decline.reason == "autocast is turned off there: its products in float32 take 9.0% of the step"


def test_on_a_cpu_only_what_could_be_mended_is_spoken_of() -> None:
    (answer,) = upcast("q = x.float()", "x.float()").answers(kind="cpu")
    assert isinstance(answer, Decline)
    assert answer.reason == ON_A_GPU
    made = upcast("q = x.float()", "x.float()")
    made.called("method.mean", 2, dtype="float32")
    assert made.answers(kind="cpu") == []


def test_casts_are_timed_by_node_and_shape() -> None:
    names = ("aten::linear", "aten::to", "aten::_to_copy", "aten::copy_", "aten::addmm", "aten::_to_copy")
    operators = Operators(
        name=names,
        start_us=tuple(float(n) for n in range(6)),
        duration_us=(1.0,) * 6,
        thread=(1,) * 6,
        sequence=(-1,) * 6,
        forward_thread=(0,) * 6,
        parent=(-1, 0, 1, 2, 0, -1),
        step=(0,) * 6,
        shapes=((), (SHAPE,), (SHAPE,), (SHAPE,), (), ((4,),)),
        dtypes=((), ("float32",), ("float32",), ("float32",), (), ("int64",)),
    )
    kernels = Kernels(
        name=("cast", "gemm", "cast"),
        category=("kernel",) * 3,
        start_us=(0.0, 10.0, 20.0),
        duration_us=(8.0, 90.0, 3.0),
        stream=(7,) * 3,
        correlation=(0, 1, 2),
        operator=(3, 4, 5),
        step=(0, 0, 0),
    )
    cost = NodeCost(graph=0, node=5, forward_us=1.0, backward_us=0.0, launches=1, provenance="a test")
    assert cast_times(kernels, operators, [cost], [0] * 6, 2) == {(0, 5): {SHAPE: 4.0}}
    assert cast_times(kernels, operators, [], [-1] * 6, 2) == {UNLINKED_READS: {SHAPE: 4.0}}
