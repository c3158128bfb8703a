"""misaligned-dims, channels-last and conv-bias-before-bn on captured models, and where modules are constructed."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Graph, Hardware, Kernels, Node, Rewrite, Span
from advisor.patch import build
from advisor.patterns.products import product_of
from advisor.patterns.sites import construction_of, constructions
from advisor.rule import Context, step
from advisor.source import Source

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 251


"""
TAIL = """

def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [{inputs}]
"""
FLOATS = "torch.randn(4, 6, 16, requires_grad=True)"
IMAGES = "torch.randn(2, 3, 8, 8, requires_grad=True)"


def model(init: str, forward: str, inputs: str, before: str = "") -> str:
    body = "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    body += textwrap.indent(init, " " * 8)
    call = f"\n\n    def forward(self, x):\n{textwrap.indent(forward, ' ' * 8)}\n"
    return HEAD + before + body + call + TAIL.replace("{inputs}", inputs)


def context(rule: str, text: str, folder: Path, device: str = "cuda", share: float = 0.5) -> tuple[Context, Source]:
    return testing.context_of(RULES[rule], text, step(10_000, nodes=share, device=device), folder)


def matched(rule: str, text: str, folder: Path, device: str = "cuda") -> list[Finding | Decline]:
    return list(RULES[rule].match(context(rule, text, folder, device)[0]))


def rewritten(rule: str, text: str, folder: Path) -> str:
    ctx, source = context(rule, text, folder)
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Finding), found
    rewrite = RULES[rule].rewrite(found, source)
    assert isinstance(rewrite, Rewrite), rewrite
    testing.check_regions(rewrite, ctx.graphs, rule)
    return build([rewrite], lambda _: source).sources["example.py"]


# ----------------------------------------------------------------------------------------------------- misaligned-dims

AUTOCAST = 'with torch.autocast("cpu", torch.bfloat16):\n'
SIZED = "{layer}.weight.shape[{axis}]"


@pytest.mark.parametrize(
    ("layer", "call", "parts"),
    [
        ("self.head = nn.Linear(16, 27, bias=False)", "self.head(x)",
         ["F.pad(self.head.weight, (0, 0, 0, -self.head.weight.shape[0] % 64))", "[..., : self.head.weight.shape[0]]"]),
        ("self.head = nn.Linear(16, 27)", "self.head(x)",
         ["F.pad(self.head.bias, (0, -self.head.weight.shape[0] % 64))", "[..., : self.head.weight.shape[0]]"]),
        ("self.first = nn.Linear(16, 27)\nself.head = nn.Linear(27, 32)", "self.head(x.repeat(1, 1, 2)[..., :27])",
         ["F.pad(x.repeat(1, 1, 2)[..., :27], (0, -self.head.weight.shape[1] % 64))", "self.head.bias"]),
        ("self.first = nn.Linear(16, 27)\nself.head = nn.Linear(27, 29)", "self.head(x.repeat(1, 1, 2)[..., :27])",
         ["(0, -self.head.weight.shape[1] % 64, 0, -self.head.weight.shape[0] % 64)"]),
        ("self.table = nn.Parameter(torch.randn(27, 16))", "F.linear(x, self.table)",
         ["F.pad(self.table, (0, 0, 0, -self.table.shape[0] % 64))", "[..., : self.table.shape[0]]"]),
    ],
    ids=["columns", "columns and bias", "inner", "both", "a function"],
)  # fmt: skip
def test_an_odd_layer_is_padded_in_the_forward_pass(layer: str, call: str, parts: list[str], tmp_path: Path) -> None:
    text = model(layer, f"{AUTOCAST}    return {call}", FLOATS)
    after = rewritten("misaligned-dims", text, tmp_path)
    flat = "".join(after.split())
    assert all("".join(part.split()) in flat for part in parts), after
    assert after.split("def forward")[0] == text.split("def forward")[0]  # parameters are as they were
    testing.check_same_function(text, after, RULES["misaligned-dims"].tolerance, call)
    assert matched("misaligned-dims", after, tmp_path) == []


@pytest.mark.parametrize("sides", [(201, 201), (97, 97)])
def test_odd_products_of_tensors_are_told_and_even_ones_are_not(sides: tuple[int, int], tmp_path: Path) -> None:
    """The cases of torch's own profiler patterns: (201, 201) and (3, 97, 97) in half precision, 200 in neither."""
    body = f"{AUTOCAST}    return x @ x.transpose(-2, -1)"
    (found,) = matched("misaligned-dims", model("pass", body, f"torch.randn(3, {sides[0]}, {sides[1]})"), tmp_path)
    assert isinstance(found, Finding)
    assert isinstance(RULES["misaligned-dims"].rewrite(found, None), Decline)  # type: ignore[arg-type]
    assert matched("misaligned-dims", model("pass", body, "torch.randn(3, 200, 200)"), tmp_path) == []


def test_float32_is_odd_in_tf32_only(tmp_path: Path) -> None:
    text = model("self.head = nn.Linear(16, 27)", "return self.head(x)", FLOATS)
    ctx, _ = context("misaligned-dims", text, tmp_path)
    (found,) = RULES["misaligned-dims"].match(ctx)
    assert isinstance(found, Decline)
    assert "no tensor cores" in found.reason
    tf32 = replace(ctx, profile=replace(ctx.profile, facts={"matmul_precision": "high"}))
    (found,) = RULES["misaligned-dims"].match(tf32)
    assert isinstance(found, Finding)
    even = model("self.head = nn.Linear(16, 28)", "return self.head(x)", FLOATS)  # 28 floats are 7 times 16 bytes
    assert matched("misaligned-dims", even, tmp_path) == []


def test_a_view_that_a_slice_does_not_allow_is_not_rewritten(tmp_path: Path) -> None:
    text = model("self.head = nn.Linear(16, 27)", f"{AUTOCAST}    return self.head(x).view(4, 162)", FLOATS)
    (found,) = matched("misaligned-dims", text, tmp_path)
    assert isinstance(found, Finding)
    assert "views the result" in found.values["not applied"]


def test_calls_of_one_line_with_other_sizes_are_not_rewritten(tmp_path: Path) -> None:
    before = textwrap.dedent(
        """\
        class Layer(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.proj = nn.Linear(16, width)

            def forward(self, x):
                return self.proj(x)


        """
    )
    body = f"{AUTOCAST}    return self.a(x).sum(-1) + self.b(x).sum(-1)"
    text = model("self.a, self.b = Layer(27), Layer(32)", body, FLOATS, before)
    (found,) = matched("misaligned-dims", text, tmp_path)
    assert isinstance(found, Finding)
    assert found.values["not applied"] == "the same code also computes something else"


TIED = model(
    "self.emb, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)\n"
    "self.head.weight = self.emb.weight\n"
    'self.register_buffer("tokens", torch.arange(12).reshape(2, 6), persistent=False)',
    "return self.head(self.emb(self.tokens) + x)",
    "torch.randn(2, 6, 16, requires_grad=True)",
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_odd_vocabulary_is_told_where_it_is_set(device: str, tmp_path: Path) -> None:
    """On a CPU the sizes are facts all the same: the constant is suggested, the product declined."""
    ctx, source = context("misaligned-dims", TIED, tmp_path, device)
    ctx = replace(ctx, profile=replace(ctx.profile, facts={"matmul_precision": "high"}))
    found = list(RULES["misaligned-dims"].match(ctx))
    (told,) = [f for f in found if isinstance(f, Finding) and f.span.line == 5]
    assert source.at(told.span) == "VOCAB = 251"
    assert "256" in told.message
    assert isinstance(RULES["misaligned-dims"].rewrite(told, source), Decline)
    others = [f for f in found if f is not told]
    assert [type(f) for f in others] == [Decline if device == "cpu" else Finding]
    assert told.estimate.high_us <= sum(c.total_us for c in ctx.profile.costs)


def test_a_small_share_is_no_finding(tmp_path: Path) -> None:
    ctx, _ = context("misaligned-dims", TIED, tmp_path, "cpu", share=0.01)
    assert not [f for f in RULES["misaligned-dims"].match(ctx) if isinstance(f, Finding)]
    free = replace(ctx, worth=0.0)
    assert [f for f in RULES["misaligned-dims"].match(free) if isinstance(f, Finding)]


def test_the_floor_of_a_product_bounds_the_estimate(tmp_path: Path) -> None:
    """Three products forward and backward of 2 x 24 x 16 x 27 operations each; the tensors are small beside them."""
    text = model("self.head = nn.Linear(16, 27)", f"{AUTOCAST}    return self.head(x)", FLOATS)
    ctx, _ = context("misaligned-dims", text, tmp_path)
    device = Hardware(name="d", kind="cuda", peak_flops={"bfloat16": 1e8}, hbm_bandwidth=1e12)
    (found,) = RULES["misaligned-dims"].match(replace(ctx, profile=replace(ctx.profile, hardware=device)))
    assert isinstance(found, Finding)
    floor = 3 * 2 * 24 * 16 * 27 / 1e8 * 1e6
    cited = next(e.value for e in found.evidence if e.what.startswith("time"))
    assert isinstance(cited, float)
    assert found.estimate.high_us == pytest.approx(cited - floor, rel=1e-3)


def test_sizes_are_those_of_the_product(tmp_path: Path) -> None:
    body = (
        "a = F.linear(x, self.w)\nb = torch.addmm(self.b, x[0], self.w.t())\nc = x @ x.transpose(1, 2)\n"
        "d = F.conv1d(x, self.w[..., None].expand(27, 6, 1)[:, :6])\nreturn a.sum() + b.sum() + c.sum() + d.sum()"
    )
    init = "self.w = nn.Parameter(torch.randn(27, 16))\nself.b = nn.Parameter(torch.randn(27))"
    init += "\nself.v = nn.Parameter(torch.randn(27, 6, 1))"
    text = model(init, body.replace("self.w[..., None].expand(27, 6, 1)[:, :6]", "self.v"), FLOATS)
    ctx, _ = context("misaligned-dims", text, tmp_path)
    (graph,) = ctx.graphs
    found = [p for n in graph.nodes if n.op.startswith("call_") and (p := product_of(graph, n)) is not None]
    assert [(p.batch, p.rows, p.inner, p.columns) for p in found] == [
        (1, 24, 16, 27),
        (1, 6, 16, 27),
        (4, 6, 16, 6),
        (1, 64, 6, 27),
    ]


# ------------------------------------------------------------------------------------------------------- channels-last

SCRIPT = model(
    "self.c, self.n = nn.Conv2d(3, 8, 3{groups}), nn.BatchNorm2d(8)",
    'with torch.autocast("cpu", torch.bfloat16):\n    y = self.n(self.c(x)){then}\nreturn y',
    IMAGES,
)
TRAIN = """

def train(device, batches):
    model = Model().to(device)
    for images in batches:
        loss = model(images.to(device)).mean()
        loss.backward()
"""


def with_kernels(ctx: Context, text: str, name: str = "void cudnn::ops::nchwToNhwcKernel<float>") -> Context:
    """The context of a run that converted layouts for 400 of 10000 us in each of two steps, at `loss = model(...)`."""
    kernels = Kernels(
        name=(name, "gemm", name, "gemm"),
        category=("kernel",) * 4,
        start_us=(0.0, 400.0, 10_000.0, 10_400.0),
        duration_us=(400.0, 100.0, 400.0, 100.0),
        stream=(7,) * 4,
        correlation=(1, 2, 3, 4),
        operator=(-1,) * 4,
        step=(0, 0, 1, 1),
    )
    number = next((i for i, line in enumerate(text.splitlines(), 1) if "loss = model(" in line), None)
    span = Span(path="example.py", line=number) if number is not None else None
    graphs = tuple(replace(graph, span=span) for graph in ctx.profile.graphs)
    return replace(ctx, profile=replace(ctx.profile, kernels=kernels, graphs=graphs))


def layout(text: str, folder: Path, **changes: object) -> tuple[Finding | Decline, Source]:
    ctx, source = context("channels-last", text, folder)
    ctx = with_kernels(ctx, text)
    (found,) = RULES["channels-last"].match(replace(ctx, profile=replace(ctx.profile, **changes)))  # type: ignore[arg-type]
    return found, source


def plain(groups: str = "", then: str = "") -> str:
    return SCRIPT.replace("{groups}", groups).replace("{then}", then)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Model().to(device)", "Model().to(device, memory_format=torch.channels_last)"),
        ("Model().cuda()", "Model().cuda().to(memory_format=torch.channels_last)"),
        ("Model()", "Model().to(memory_format=torch.channels_last)"),
    ],
)
def test_model_and_input_are_converted_together(before: str, after: str, tmp_path: Path) -> None:
    text = plain() + TRAIN.replace("Model().to(device)", before)
    found, source = layout(text, tmp_path)
    assert isinstance(found, Finding), found
    assert found.estimate.high_us == 1000.0  # the convolutions, conversions included
    rewrite = RULES["channels-last"].rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    result = build([rewrite], lambda _: source).sources["example.py"]
    expected = text.replace(f"model = {before}\n", f"model = {after}\n")
    expected = expected.replace(
        "model(images.to(device))", "model(images.to(device).to(memory_format=torch.channels_last))"
    )
    assert result == expected


def test_a_model_of_unknown_construction_is_only_told(tmp_path: Path) -> None:
    text = plain() + TRAIN.replace("    for images", "    model = torch.compile(model)\n    for images")
    found, source = layout(text, tmp_path)
    assert isinstance(found, Finding)
    assert isinstance(RULES["channels-last"].rewrite(found, source), Decline)


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (plain().replace("(3, 8, 3)", "(3, 9, 3, groups=3)").replace("BatchNorm2d(8)", "BatchNorm2d(9)"),
         {}, "grouped convolutions"),
        (plain(), {"hardware": Hardware(name="d", kind="cpu")}, "needs a profile on a GPU"),
        (plain().replace("torch.bfloat16", "torch.bfloat16, enabled=False"), {"facts": {"cudnn_tf32": False}},
         "float32 without TF32"),
        (plain(then=".view(2, -1)"), {}, "in the order of its memory"),
        (plain(), {"kernels": Kernels()}, "take 0.0% of the step"),
    ],
    ids=["grouped", "cpu", "float32", "view", "no such kernels"],
)  # fmt: skip
def test_the_layout_is_left_alone(text: str, changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    found, _ = layout(text + TRAIN, tmp_path, **changes)
    assert isinstance(found, Decline), found
    assert reason in found.reason


# ------------------------------------------------------------------------------------------------- conv-bias-before-bn


@pytest.mark.parametrize(
    ("init", "forward", "findings"),
    [
        ("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", "return self.n(self.c(x))", 1),
        ("self.c, self.n = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)", "return self.n(self.c(x))", 0),
        ("self.c = nn.Conv2d(3, 8, 3)", "return self.c(x)", 0),
        ("self.c, self.n = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)", "return self.n(self.c(x))", 0),
        ("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", "return self.n(self.c(x).relu())", 0),
        ("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval()", "return self.n(self.c(x))", 0),
        ("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", "y = self.c(x)\nreturn self.n(y) + y", 0),
        ("self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())", "return self.body(x)", 1),
    ],
    ids=["bias", "no bias", "alone", "group norm", "relu between", "evaluation", "used elsewhere", "sequential"],
)  # fmt: skip
def test_a_bias_before_batch_norm(init: str, forward: str, findings: int, tmp_path: Path) -> None:
    text = model(init, forward, IMAGES)
    ctx, source = context("conv-bias-before-bn", text, tmp_path)
    found = [f for f in RULES["conv-bias-before-bn"].match(ctx) if isinstance(f, Finding)]
    assert len(found) == findings
    for finding in found:
        assert source.at(finding.span) == "nn.Conv2d(3, 8, 3)"
        rewrite = RULES["conv-bias-before-bn"].rewrite(finding, source)
        assert isinstance(rewrite, Rewrite)
        result = build([rewrite], lambda _: source).sources["example.py"]
        assert result == text.replace("nn.Conv2d(3, 8, 3)", "nn.Conv2d(3, 8, 3, bias=False)")


BLOCK = """\
class Block(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3) if normed else nn.Identity()

    def forward(self, x):
        return self.norm(self.conv(x))


"""


def test_one_construction_of_many_convolutions_is_one_finding(tmp_path: Path) -> None:
    text = model(
        "self.blocks = nn.Sequential(*[Block(True) for _ in range(3)])", "return self.blocks(x)", IMAGES, BLOCK
    )
    (found,) = matched("conv-bias-before-bn", text, tmp_path)
    assert isinstance(found, Finding)
    assert next(e.value for e in found.evidence if e.what.startswith("calls")) == 3


def test_a_construction_that_also_makes_convolutions_without_norm_is_left_alone(tmp_path: Path) -> None:
    text = model("self.a, self.b = Block(True), Block(False)", "return self.b(self.a(x))", IMAGES, BLOCK)
    (found,) = matched("conv-bias-before-bn", text, tmp_path)
    assert isinstance(found, Decline)
    assert found.reason == "this line also makes convolutions that need their bias"


# ------------------------------------------------------------------------------------------------------- constructions


def sources(body: str) -> Source:
    source = Source("a.py", "import torch.nn as nn\nfrom torch.nn import Linear\n" + textwrap.dedent(body))
    assert isinstance(source.tree, ast.Module)
    return source


def node_in(module: str, kind: str) -> tuple[Graph, Node]:
    node = Node(
        index=0, name="n", op="call_function", target="f", module=module, module_class=f"torch.nn.modules.x.{kind}"
    )
    return Graph(index=0, nodes=(node,)), node


def test_constructions_in_every_place_a_module_is_put() -> None:
    source = sources(
        """
        class A(nn.Module):
            def __init__(s, w):
                s.a, s.b = nn.Linear(1, w), Linear(2, w)
                s.c = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(3, w)))
                s.d = nn.ModuleList([nn.Linear(4, w) for _ in range(3)])
                s.e = nn.Sequential(*layers(), nn.Linear(5, w))
                other.f = nn.Linear(6, w)
                s.g = nn.Linear(7, w).cuda()
        top = nn.Linear(8, 1)
        """
    )
    found = [
        (c.owner, c.attribute, c.place, ast.unparse(c.call.args[0])) for c in constructions(source, ("torch.nn.L",))
    ]
    assert sorted(found, key=lambda item: item[3]) == [
        ("A", "a", (), "1"),
        ("A", "b", (), "2"),
        ("A", "c", (1, 0), "3"),
        ("A", "d", (None,), "4"),
        ("A", "g", (), "7"),
        (None, "top", (), "8"),
    ]
    for path, first in (("x.a", "1"), ("c.1.0", "3"), ("blocks.0.d.2", "4"), ("c.0.0", None), ("h", None)):
        graph, node = node_in(path, "Linear")
        one = construction_of(source, graph, node)
        assert (None if one is None else ast.unparse(one.call.args[0])) == first


def test_two_classes_with_one_attribute_are_ambiguous_without_their_owner() -> None:
    source = sources(
        """
        class A(nn.Module):
            def __init__(self):
                self.fc = nn.Linear(1, 1)
        class B(nn.Module):
            def __init__(self):
                self.fc = nn.Linear(2, 2)
        """
    )
    graph, node = node_in("part.fc", "Linear")
    assert construction_of(source, graph, node) is None
    owner = replace(node, index=1, module="part", module_class="a.B")
    made = construction_of(source, replace(graph, nodes=(node, owner)), node)
    assert made is not None
    assert made.owner == "B"


# ----------------------------------------------------------------------------------------------- another instance, call


def not_applied(rule: str, text: str, folder: Path) -> str:
    """Why the only finding of a text is told and not applied."""
    ctx, source = context(rule, text, folder)
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Finding), found
    declined = RULES[rule].rewrite(found, source)
    assert isinstance(declined, Decline), declined
    return declined.reason


LAYERS = {
    "no bias in another": ("self.head = nn.Linear(16, 27, bias=VOCAB > 9)", "has a bias is decided elsewhere"),
    "a bias in another": ("self.head = nn.Linear(16, 27, bias=VOCAB < 9)", "has a bias is decided elsewhere"),
    "bias taken away": ("self.head = nn.Linear(16, 27)\nif VOCAB < 9:\n    self.head.bias = None", "bias is decided"),
    "identity": ("self.head = nn.Linear(16, 27) if VOCAB > 9 else nn.Identity()", "may be another module"),
    "injected": ("kind = getattr(nn, 'Linear')\nself.head = kind(16, 27)", "may be another module"),
    "replaced": ("self.head = nn.Linear(16, 27)\ndef swap(other):\n    other.head = nn.Sequential()", "another module"),
    "a hook": (
        "self.head = nn.Linear(16, 27)\ndef spy():\n    self.head.register_forward_hook(print)",
        "would no longer be called",
    ),
    "weight norm": ("self.head = torch.nn.utils.weight_norm(nn.Linear(16, 27))", "may be another module"),
    "weight norm later": (
        "self.head = nn.Linear(16, 27)\nif VOCAB < 9:\n    torch.nn.utils.weight_norm(self.head)",
        "may compute the weight",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_may_be_another_is_told_and_not_padded(name: str, tmp_path: Path) -> None:
    init, reason = LAYERS[name]
    assert reason in not_applied("misaligned-dims", model(init, f"{AUTOCAST}    return self.head(x)", FLOATS), tmp_path)


TABLE = "self.table = nn.Parameter(torch.randn(27, 16))\n"
OPERANDS = {
    "dropped weight": (TABLE, "F.linear(x, F.dropout(self.table, 0.5))", "would be computed several times"),
    "a property": (TABLE, "F.linear(x, self.drawn)", "would be computed several times"),
    "a bias elsewhere": (
        TABLE + "self.bias = nn.Parameter(torch.randn(27)) if VOCAB < 9 else None",
        "F.linear(x, self.table, self.bias)",
        "another call may pass a bias",
    ),
    "no bias elsewhere": (
        TABLE + "self.bias = nn.Parameter(torch.randn(27)) if VOCAB > 9 else None",
        "F.linear(x, self.table, self.bias)",
        "may be None in another call",
    ),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_may_be_others_are_not_padded(name: str, tmp_path: Path) -> None:
    init, call, reason = OPERANDS[name]
    text = model(init, f"{AUTOCAST}    return {call}", FLOATS)
    drawn = "\n    @property\n    def drawn(self):\n        return self.table * torch.rand(1)\n\n    def forward"
    text = text.replace("\n    def forward", drawn) if name == "a property" else text
    assert reason in not_applied("misaligned-dims", text, tmp_path)


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("return self.head(x)[0].view(-1)", "views the result"),
        ("y = self.head(x).unsqueeze(0)\nreturn y.squeeze(0).view(4, -1)", "views the result"),
        ("y = self.head(x)\nif not self.training:\n    return y.view(-1)\nreturn y", "did not run"),
    ],
)
def test_a_later_view_of_the_result_keeps_it_as_it_is(then: str, reason: str, tmp_path: Path) -> None:
    text = model("self.head = nn.Linear(16, 27)", AUTOCAST + textwrap.indent(then, "    "), FLOATS)
    assert reason in not_applied("misaligned-dims", text, tmp_path)


def test_a_view_that_splits_the_columns_is_no_obstacle(tmp_path: Path) -> None:
    body = f"{AUTOCAST}    return self.head(x).view(4, 6, 3, 12).sum(2)"
    text = model("self.head = nn.Linear(16, 36)", body, FLOATS)
    testing.check_same_function(text, rewritten("misaligned-dims", text, tmp_path), 64.0, "split")


def test_padding_that_copies_more_than_it_saves_is_declined(tmp_path: Path) -> None:
    """The weight is copied forward and its gradient backward: with few rows that is as much as the product moves."""
    text = model("self.head = nn.Linear(16, 27)", f"{AUTOCAST}    return self.head(x)", FLOATS)
    ctx, _ = context("misaligned-dims", text, tmp_path)
    device = Hardware(name="d", kind="cuda", peak_flops={"bfloat16": 1e15}, hbm_bandwidth=3e6)
    (found,) = RULES["misaligned-dims"].match(replace(ctx, profile=replace(ctx.profile, hardware=device)))
    assert isinstance(found, Decline)
    assert found.reason == "padding the weight in every pass takes as long as aligned rows save"


LOOP = TRAIN + "\n\ndef log(model):\n    {line}\n"
LAYOUTS = {
    "strided": ("y = y.as_strided((2, 8, 3, 3), (288, 36, 6, 1))\nreturn y", "", "in the order of its memory"),
    "dropped": ("return F.dropout(y, 0.5)", "", "draws in the order of memory"),
    "noise": ("return y + torch.randn_like(y)", "", "draws in the order of memory"),
    "strides read": ("return y * y.stride(1)", "", "reads the order in memory"),
    "viewed in evaluation": ("if not self.training:\n    y = y.view(2, -1)\nreturn y", "", "did not run"),
    "a weight viewed": ("return y + self.c.weight.view(8, -1).mean()", "", "in the order of its memory"),
    "parameters flattened": ("return y", "nn.utils.parameters_to_vector(model.parameters())", "order in memory"),
    "parameters viewed": ("return y", "return [p.view(-1) for p in model.parameters()]", "did not run"),
    "gradients viewed": ("return y", "return model.c.weight.grad.view(-1)", "did not run"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_reads_the_order_in_memory_keeps_the_layout(name: str, tmp_path: Path) -> None:
    forward, line, reason = LAYOUTS[name]
    text = model("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", f"y = self.n(self.c(x))\n{forward}", IMAGES)
    found, _ = layout(text + LOOP.replace("{line}", line or "pass"), tmp_path)
    assert isinstance(found, Decline), found
    assert reason in found.reason


ARGUMENTS = {
    "a dictionary": ("x['image']", "{'image': torch.randn(2, 3, 8, 8)}"),
    "a tuple": ("x[0]", "(torch.randn(2, 3, 8, 8), 1)"),
    "three dimensions": ("x[:, None].expand(-1, 3, -1, -1)", "torch.randn(2, 8, 8)"),
    "video": ("x.mean(1)", "torch.randn(2, 4, 3, 8, 8)"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_only_a_batch_of_images_is_converted(name: str, tmp_path: Path) -> None:
    given, inputs = ARGUMENTS[name]
    text = model("self.c = nn.Conv2d(3, 8, 3)", f"return self.c({given})", inputs) + TRAIN
    found, source = layout(text, tmp_path)
    assert isinstance(found, Finding), found
    assert found.values["not applied"].startswith("the model takes something else than one batch of images")
    assert isinstance(RULES["channels-last"].rewrite(found, source), Decline)


def test_a_parameter_of_five_dimensions_is_not_converted(tmp_path: Path) -> None:
    init = "self.c, self.p = nn.Conv2d(3, 8, 3), nn.Parameter(torch.zeros(1, 1, 8, 6, 6))"
    found, _ = layout(model(init, "return self.c(x) + self.p[0]", IMAGES) + TRAIN, tmp_path)
    assert isinstance(found, Finding), found
    assert "has five dimensions" in found.values["not applied"]


def test_the_loss_around_the_call_is_not_taken_for_the_model(tmp_path: Path) -> None:
    train = TRAIN.replace("    model =", "    soft = nn.Softmax(dim=1)\n    model =")
    train = train.replace("loss = model(images.to(device)).mean()", "loss = soft(model(images.to(device))).mean()")
    text = plain() + train
    ctx, source = context("channels-last", text, tmp_path)
    (found,) = RULES["channels-last"].match(with_kernels(ctx, text.replace("loss = soft(model(", "loss = model((")))
    assert isinstance(found, Finding)
    assert source.at(found.bindings["model"]) == "Model().to(device)"
    assert source.at(found.bindings["input"]) == "images.to(device)"


@pytest.mark.parametrize("made", ["make(Model())", "functools.partial(Model())"])
def test_what_is_no_module_is_not_converted(made: str, tmp_path: Path) -> None:
    text = "import functools\n" + plain() + TRAIN.replace("Model().to(device)", made)
    found, _ = layout(text, tmp_path)
    assert isinstance(found, Finding)
    assert found.values["not applied"].startswith("the place is not shown by this file")


@pytest.mark.parametrize(
    ("norm", "forward", "reason"),
    [
        ("nn.BatchNorm2d(8) if VOCAB > 9 else nn.Identity()", "return self.n(self.c(x))", "may have no BatchNorm"),
        ("make(8)", "return self.n(self.c(x))", "may have no BatchNorm"),
        ("nn.BatchNorm2d(8)", "x = self.c(x)\nif VOCAB > 9:\n    x = self.n(x)\nreturn x", "runs only where"),
    ],
)
def test_a_bias_that_another_setting_needs_is_told_and_not_edited(
    norm: str, forward: str, reason: str, tmp_path: Path
) -> None:
    before = "def make(width):\n    return nn.BatchNorm2d(width)\n\n\n"
    text = model(f"self.c = nn.Conv2d(3, 8, 3)\nself.n = {norm}", forward, IMAGES, before)
    assert reason in not_applied("conv-bias-before-bn", text, tmp_path)


def test_a_bias_that_is_a_setting_is_not_edited(tmp_path: Path) -> None:
    init = "self.c, self.n = nn.Conv2d(3, 8, 3, bias=VOCAB > 9), nn.BatchNorm2d(8)"
    reason = not_applied("conv-bias-before-bn", model(init, "return self.n(self.c(x))", IMAGES), tmp_path)
    assert reason.startswith("whether it has a bias is a setting")


def test_a_module_of_another_class_is_not_where_a_module_was_made() -> None:
    source = sources(
        """
        class A(nn.Module):
            def __init__(self):
                self.conv = nn.Conv2d(1, 1, 1)
        class B(nn.Module):
            def __init__(self):
                self.add_module("conv", nn.Conv2d(2, 2, 1))
            def forward(self, x):
                return self.conv(x)
        class C(A):
            def forward(self, x):
                return self.conv(x)
        """
    )
    graph, node = node_in("part.conv", "Conv2d")
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Return)]
    of_b, of_c = (replace(node, span=source.span(call)) for call in calls)
    assert construction_of(source, graph, of_b) is None
    made = construction_of(source, graph, of_c)
    assert made is not None
    assert made.owner == "A"


# ----------------------------------------------------------------------------------------- other code of the same files

ELSEWHERE = {
    "a view in a function": (
        "",
        "def score(model, x):\n    y = model(x)\n    return y.view(len(y), -1)",
        "did not run",
    ),
    "a view of a helper": (
        "",
        "def flat(y):\n    return y.view(len(y), -1)\n\n\ndef score(model, x):\n    return flat(model(x))",
        "did not run",
    ),
    "quantized": ("", "def export(model):\n    return torch.ao.quantization.quantize_dynamic(model)", "another layer"),
    "prepared": ("", "def qat(model):\n    torch.ao.quantization.prepare_qat(model)", "another layer"),
    "adapted": (
        "",
        "def tune(model):\n    from peft import get_peft_model\n    return get_peft_model(model)",
        "another layer",
    ),
    "another class": ("", "def swap(model, kind):\n    model.head.__class__ = kind", "another class"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_code_of_the_files_keeps_a_layer_from_being_padded(name: str, tmp_path: Path) -> None:
    before, after, reason = ELSEWHERE[name]
    text = model("self.head = nn.Linear(16, 27)", f"{AUTOCAST}    return self.head(x)", FLOATS, before)
    assert reason in not_applied("misaligned-dims", f"{text}\n\n{after}\n", tmp_path)


def test_views_that_keep_the_last_axis_or_are_of_no_module_allow_padding(tmp_path: Path) -> None:
    text = model("self.head = nn.Linear(16, 27)", f"{AUTOCAST}    return self.head(x)", FLOATS)
    text += (
        "\n\ndef evaluate(model, batch, correct):\n    x, y = batch\n    logits = model(x)\n    y.view(-1)\n"
        "    return logits.view(-1, logits.size(-1)), correct[:1].float().view(-1)\n"
    )
    assert "F.pad(self.head.weight" in rewritten("misaligned-dims", text, tmp_path)


@pytest.mark.parametrize(
    ("init", "forward"),
    [
        (TABLE, "return project(x, self.table)"),
        (TABLE, "weight = self.table if x.dim() == 3 else self.table[0]\nreturn F.linear(x, weight)"),
        (TABLE + "if VOCAB < 9:\n    self.table = nn.Parameter(torch.randn(16))", "return F.linear(x, self.table)"),
    ],
    ids=["a parameter", "a variable", "two values"],
)
def test_a_weight_that_may_be_a_vector_is_not_padded(init: str, forward: str, tmp_path: Path) -> None:
    before = "def project(x, weight):\n    return F.linear(x, weight)\n\n\n"
    text = model(init, AUTOCAST + textwrap.indent(forward, "    "), FLOATS, before)
    assert "one of one dimension too" in not_applied("misaligned-dims", text, tmp_path)


INIT = "def init(m):\n    if isinstance(m, nn.Conv2d):\n        nn.init.kaiming_normal_(m.weight)\n\n\n"
NOISE = "        for p in model.parameters():\n            p.grad.add_(torch.randn_like(p))\n"
OTHERS = {
    "initialised after": (
        INIT,
        "",
        TRAIN.replace("    for images", "    model.apply(init)\n    for images"),
        "may draw",
    ),
    "noise on gradients": ("", "", TRAIN + NOISE, "`torch.randn_like`"),
    "video": ("", "self.v = nn.Conv3d(3, 8, 3) if VOCAB < 9 else None", TRAIN, "`Conv3d`"),
    "dropout": ("", "self.d = nn.Dropout(0.1) if VOCAB < 9 else nn.Identity()", TRAIN, "`nn.Dropout`"),
    "one image": (
        "",
        "",
        "\n\nmodel = Model()\n\n\ndef score(image):\n    loss = model(image)\n    return loss\n",
        "passed by callers",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_setting_or_caller_keeps_the_layout(name: str, tmp_path: Path) -> None:
    before, init, after, reason = OTHERS[name]
    layers = f"self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)\n{init}"
    text = model(layers, "return self.n(self.c(x)).mean((2, 3))", IMAGES, before) + after
    found, source = layout(text, tmp_path)
    assert isinstance(found, Finding), found
    assert reason in found.values["not applied"]
    assert isinstance(RULES["channels-last"].rewrite(found, source), Decline)


MUON = """

class Muon(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                g = g.view(len(g), -1)
"""


@pytest.mark.parametrize(
    "after",
    [
        MUON,
        "\n\ndef flat(g):\n    return g.view(-1)\n\n\ndef norm(net):\n    return [flat(p) for p in net.parameters()]\n",
    ],
    ids=["optimizer", "helper"],
)
def test_views_of_what_parameters_give_keep_the_layout(after: str, tmp_path: Path) -> None:
    found, _ = layout(plain(then=".mean((2, 3))") + TRAIN + after, tmp_path)
    assert isinstance(found, Decline), found
    assert "did not run" in found.reason


def test_initialising_in_the_constructor_and_known_dropout_allow_the_layout(tmp_path: Path) -> None:
    """The weights are drawn before the layout changes; the run shows that dropout gets no image; accuracy is viewed."""
    init = (
        "self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)\n"
        "self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))\nself.apply(init)"
    )
    text = model(init, "return self.head(self.n(self.c(x)).mean((2, 3)))", IMAGES, INIT)
    text += TRAIN + "\n\ndef accuracy(output, target):\n    return output.argmax(1).eq(target.view(1, -1)).sum()\n"
    found, source = layout(text, tmp_path)
    assert isinstance(found, Finding), found
    assert "not applied" not in found.values
    assert isinstance(RULES["channels-last"].rewrite(found, source), Rewrite)


BIASES = {
    "frozen in a loop": (
        "for m in model.modules():\n        if isinstance(m, nn.BatchNorm2d):\n            m.eval()",
        "freeze",
    ),
    "a part in evaluation": ("model.body.eval()", "freeze"),
    "named so": ("freeze_bn(model)", "freeze"),
    "initialised": (
        "for m in model.modules():\n        if isinstance(m, nn.Conv2d):\n            nn.init.zeros_(m.bias)",
        "None",
    ),
    "read": ("return model.body[0].bias.square().sum()", "None"),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_that_other_code_needs_is_told_with_the_finding(name: str, tmp_path: Path) -> None:
    line, reason = BIASES[name]
    text = model("self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))", "return self.body(x)", IMAGES)
    text += f"\n\ndef other(model):\n    {line}\n"
    assert reason in not_applied("conv-bias-before-bn", text, tmp_path)


def test_an_override_of_train_that_freezes_is_told_with_the_finding(tmp_path: Path) -> None:
    text = model("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", "return self.n(self.c(x))", IMAGES)
    override = "\n\n    def train(self, mode=True):\n        super().train(mode)\n        self.n.train(False)\n"
    text = text.replace("\n\n\ndef get_init", f"{override}\n\ndef get_init", 1)
    assert "freeze" in not_applied("conv-bias-before-bn", text, tmp_path)


def test_evaluation_of_the_whole_model_and_biases_of_others_are_no_obstacle(tmp_path: Path) -> None:
    text = model("self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", "return self.n(self.c(x))", IMAGES)
    text += (
        "\n\ndef prepare(model):\n    model.eval()\n    for m in model.modules():\n"
        "        if isinstance(m, nn.Conv2d) and m.bias is not None:\n            nn.init.zeros_(m.bias)\n"
        "        elif isinstance(m, nn.BatchNorm2d):\n            nn.init.zeros_(m.bias)\n"
    )
    ctx, source = context("conv-bias-before-bn", text, tmp_path)
    (found,) = RULES["conv-bias-before-bn"].match(ctx)
    assert isinstance(found, Finding)
    assert isinstance(RULES["conv-bias-before-bn"].rewrite(found, source), Rewrite)
