"""unfused-layernorm, unfused-rmsnorm and unfused-gelu on the ways people write them, and on look-alikes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.patch import build
from advisor.rule import step

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


def helper(x, eps):
    m = x.mean(-1, keepdim=True)
    return (x - m) / torch.sqrt(((x - m) ** 2).mean(-1, keepdim=True) + eps)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.rand(1))
        self.g = nn.Parameter(torch.rand(16))
        self.b = nn.Parameter(torch.rand(16))
        self.eps = 1e-5
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(4, 6, 16, requires_grad=True)]
"""

NORMS = {
    "rsqrt and var": "u = x.mean(-1, keepdim=True)\ns = (x - u).pow(2).mean(-1, keepdim=True)\n"
    "x = (x - u) * torch.rsqrt(s + self.eps)\nreturn self.g * x + self.b",
    "population var": "v = x.var(-1, keepdim=True, unbiased=False)\n"
    "return (x - x.mean(-1, keepdim=True)) / (v + 1e-6).sqrt() * self.g + self.b",
    "torch functions": "m = torch.mean(x, dim=-1, keepdim=True)\n"
    "v = torch.mean(torch.square(x - m), dim=-1, keepdim=True)\nreturn torch.div(x - m, torch.sqrt(v + 1e-5))",
    "centred once": "d = x - x.mean(-1, keepdim=True)\n"
    "d = d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5)\nreturn d * self.g",
    "power one half": "B, T, C = x.shape\nm = x.mean(2, True)\n"
    "return (x - m) / (((x - m) ** 2).mean(2, True) + 1e-5) ** 0.5 * self.g + self.b",
    "a weight that is an expression": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return (x - m) / torch.sqrt(v + 1e-5) * (1 + self.g) + self.b",
    "dropout after it": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return self.drop((x - m) / torch.sqrt(v + 1e-5) * self.g + self.b)",
    "a clamp after it": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return ((x - m) / torch.sqrt(v + 1e-5)).clamp(-1, 1) * self.g",
    "a cast after it": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return ((x - m) / torch.sqrt(v + 1e-5)).to(torch.float64).float()",
    "correction": "m = x.mean(-1, keepdim=True)\n"
    "v = torch.var(x, dim=-1, correction=0, keepdim=True)\nreturn (x - m) * (v + 1e-5).rsqrt()",
}
NORMS |= {
    "mean of squares": "m = x.mean(-1, keepdim=True)\nv = (x * x).mean(-1, keepdim=True) - m * m\n"
    "return (x - m) / torch.sqrt(v + self.eps) * self.g + self.b",
    "var_mean": "v, m = torch.var_mean(x, dim=-1, keepdim=True, correction=0)\nreturn (x - m) * torch.rsqrt(v + 1e-5)",
    "two axes": "m = x.mean((-2, -1), keepdim=True)\nv = x.var((-2, -1), keepdim=True, unbiased=False)\n"
    "return (x - m) / torch.sqrt(v + 1e-5)",
    "positive axes": "x = x.view(4, 6, 16)\nm = x.mean(2, keepdim=True)\nv = x.var(2, keepdim=True, unbiased=False)\n"
    "return self.b + self.g * ((x - m) / torch.sqrt(v + 1e-12))",
    "a bias of one element": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return ((x - m) / torch.sqrt(v + 1e-5)) + self.one",
}
SUMS = "m = x.sum(-1, keepdim=True) / {n}\nv = ((x - m) ** 2).sum(-1, keepdim=True) / {n}\n"
NORMS |= {
    "sums over a size": "n = x.shape[-1]\n" + SUMS.replace("{n}", "n") + "return (x - m) / torch.sqrt(v + 1e-5)",
    "sums over an unpacked size": "*_, n = x.size()\n"
    + SUMS.replace("{n}", "n")
    + "return (x - m) / torch.sqrt(v + 1e-5)",
    "sums over the size of the weight": SUMS.replace("{n}", "16") + "return (x - m) / torch.sqrt(v + 1e-5) * self.g",
    "sample variance made that of the population": "n = x.size(-1)\nm = x.mean(-1, keepdim=True)\n"
    "v = x.var(-1, keepdim=True) * (n - 1) / n\nreturn (x - m) / torch.sqrt(v + 1e-5) * self.g",
    "an axis put back": "m = x.mean(-1)[..., None]\nv = x.var(-1, unbiased=False).unsqueeze(-1)\n"
    "return (x - m) / torch.sqrt(v + 1e-5)",
}
RMS = {
    "length and size": "n = x.size(-1)\nreturn x * torch.rsqrt((x.norm(2, -1, keepdim=True) * n**-0.5) ** 2 + 1e-6)",
    "size of a cast": "h = x.float()\n"
    "return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / h.shape[-1] + 1e-6)).type_as(x)",
    "rsqrt": "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g",
    "root and quotient": "return self.g * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6))",
    "square": "return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()",
    "torch functions": "return torch.mul(x, torch.rsqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + 1e-6))",
    "length": "return x / torch.sqrt(x.norm(2, dim=-1, keepdim=True) ** 2 / 16 + 1e-6) * self.g",
    "linalg": "n = torch.linalg.vector_norm(x, dim=-1, keepdim=True)\n"
    "return x * torch.rsqrt(n * n / 16 + 1e-6) * self.g",
    "sum": "return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** 0.5 * self.g",
    "llama": "h = x.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n"
    "return self.g * h.to(x.dtype)",
    "gemma": "h = x.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n"
    "h = h * (1.0 + self.g.float())\nreturn h.type_as(x)",
    "two statements": "r = x.pow(2).mean(dim=-1, keepdim=True)\nx = x * torch.rsqrt(r + 1e-6)\n"
    "return x * self.g + self.b",
    "a weight that is an expression": "return (1 + self.g) * (x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6))",
    "three dimensions of two": "assert x.dim() == 3\n"
    "return x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6)",
}
NOT_RMS = {
    "eps outside": ("return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * self.g", "adds eps to the root mean"),
    "length and eps": (
        "return x / (x.norm(2, -1, keepdim=True) * 16**-0.5 + 1e-6) * self.g",
        "adds eps to the root mean",
    ),
    "normalize": ("return F.normalize(x, dim=-1) * 4.0 * self.g", "bounds the length from below"),
    "clamped": ("return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-8) * 4.0 * self.g", "bounds the length"),
    "no eps": ("return x / x.norm(dim=-1, keepdim=True) * 4.0 * self.g", "it has no eps"),
    "another axis": (
        "return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)",
        "it normalises dim 1 of 3, not the last axis",
    ),
    "root read again": (
        "r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\nreturn x * r * self.g + r",
        "the intermediate `r.*` is used elsewhere",
    ),
    "writes into its input": (
        "h = x * 1\ny = h.float()\ny *= torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)\nreturn y + h",
        "in place",
    ),
    "half precision on the way": (
        "h = x.bfloat16().float()\nreturn h * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "rounds to bfloat16",
    ),
}
OF_THIS_RUN = "which may be the size of the last axis in this run only"
UNSHOWN = "axis 2 is the last axis only for tensors of rank 3, and the source does not show the rank"
NOT_RMS |= {
    "a literal size": ("return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 16 + 1e-6)", f"`16`, {OF_THIS_RUN}"),
    "a length and a literal size": (
        "return x * torch.rsqrt((x.norm(2, -1, keepdim=True) * 16**-0.5) ** 2 + 1e-6)",
        OF_THIS_RUN,
    ),
    "the size of another axis": (
        "x = x[:, :4, :4]\ny = x.contiguous()\n"
        "return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) / y.shape[-2] + 1e-6)",
        OF_THIS_RUN,
    ),
    "an axis from the front": ("return x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6)", UNSHOWN),
}
QUIET_RMS = {
    "layer norm": NORMS["population var"],
    "centred": NORMS["centred once"],
    "unit length": "return F.normalize(x, dim=-1)",
    "mean only": "return x - x.mean(-1, keepdim=True)",
    "sum for mean": "return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)",
    "cube": "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) ** 3 + 1e-6)",
    "softmax": "return x.exp() / x.exp().sum(-1, keepdim=True)",
    "squared loss": "return x * (x**2).mean(-1, keepdim=True)",
}
NOT_NORMS = {
    "unbiased": (
        "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True)\nreturn (x - m) / torch.sqrt(v + 1e-5) * self.g",
        "divides the variance by N-1",
    ),
    "eps outside": (
        "m = x.mean(-1, keepdim=True)\ns = x.std(-1, keepdim=True, unbiased=False)\nreturn (x - m) / (s + 1e-5)",
        "adds eps to the standard deviation",
    ),
    "input changed in place": (
        "y = x * 1\nz = y * 2\ny -= y.mean(-1, keepdim=True)\n"
        "return y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) + z",
        "in place",
    ),
    "mean reused": (
        "m = x.mean(-1, keepdim=True)\nv = ((x - m) ** 2).mean(-1, keepdim=True)\n"
        "return (x - m) / torch.sqrt(v + 1e-5) + m",
        "used elsewhere",
    ),
    "another axis": (
        "m = x.mean(1, keepdim=True)\nreturn (x - m) / torch.sqrt(((x - m) ** 2).mean(1, keepdim=True) + 1e-5)",
        "it normalises dim 1 of 3, not the last axis",
    ),
    "every operation in double": (
        "m = x.double().mean(-1, keepdim=True)\nv = x.double().var(-1, keepdim=True, unbiased=False)\n"
        "return (x - m) / torch.sqrt(v + 1e-5)",
        "dtypes differ",
    ),
    "in a helper": ("return helper(x, 1e-5) * 2 + helper(x * 2, 1e-3)", "differ in eps"),
}
AXIS = "m = x.mean(2, keepdim=True)\nv = x.var(dim=2, keepdim=True, unbiased=False)\n"
NOT_NORMS |= {
    "a literal size": (SUMS.replace("{n}", "16") + "return (x - m) / torch.sqrt(v + 1e-5)", f"`16`, {OF_THIS_RUN}"),
    "literal sizes of the sample variance": (
        "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True) * 15 / 16\nreturn (x - m) / torch.sqrt(v + 1e-5)",
        OF_THIS_RUN,
    ),
    "a size read before the tensor changed": (
        "n = x.shape[-1]\nx = torch.tensordot(x, self.g.diag(), 1)\n"
        + SUMS.replace("{n}", "n")
        + "return (x - m) / torch.sqrt(v + 1e-5)",
        OF_THIS_RUN,
    ),
    "an axis from the front": (AXIS + "return (x - m) / torch.sqrt(v + 1e-5) * self.g", UNSHOWN),
    "a rank that another value had": (
        "B, T, C = x.shape\nx = torch.tensordot(x, self.g.diag(), 1)\n"
        + AXIS
        + "return (x - m) / torch.sqrt(v + 1e-5)",
        UNSHOWN,
    ),
    "a rank that some runs show": (
        "if self.training:\n    B, T, C = x.shape\n" + AXIS + "return (x - m) / torch.sqrt(v + 1e-5)",
        UNSHOWN,
    ),
    "an axis put back from the front": (
        "m = x.mean(-1).unsqueeze(2)\nv = x.var(-1, unbiased=False)[:, :, None]\nreturn (x - m) / torch.sqrt(v + 1e-5)",
        UNSHOWN,
    ),
}
QUIET = {
    "rms norm": "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.g",
    "dropout inside": "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
    "return self.drop(x - m) / torch.sqrt(v + 1e-5)",
    "mean only": "return x - x.mean(-1, keepdim=True)",
}
GELUS = {
    "power operator": "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))",
    "products": "return x * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))",
    "statements": "c = x * x * x\ni = x + 0.044715 * c\nt = torch.tanh(i * 0.7978845608028654)\n"
    "return x * (0.5 * (1 + t))",
    "erf": "return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
    "erf, half last": "return x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865475))",
    "bert": "cdf = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))\nreturn x * cdf",
    "erfc": "return 0.5 * x * torch.erfc(-x / math.sqrt(2.0))",
    "constant built in every call": "c = torch.sqrt(torch.tensor(2.0 / torch.pi))\n"
    "return 0.5 * x * (1 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3))))",
    "halves": "return x / 2 * (torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))) + 1)",
}
NOT_GELUS = {
    "tanh alone": "return torch.tanh(x)",
    "coarse constant": "return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))",
    "other cubic": "return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.05 * x**3)))",
    "dropout in the gate": "t = torch.tanh(0.7978845608 * (x + 0.044715 * x**3))\nreturn 0.5 * x * self.drop(1 + t)",
    "clamped": "return (0.5 * x).clamp(-5, 5) * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))",
    "five digits": "return 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))",
    "quick gelu with another factor": "return x * torch.sigmoid(1.7 * x)",
    "swish": "return x * torch.sigmoid(x)",
    "coarse erf": "return 0.5 * x * (1 + torch.erf(x / 1.41))",
    "lstm gate": "return torch.sigmoid(x) * torch.tanh(x)",
}


RIGHT = {
    "unfused-layernorm": (NORMS, "layer_norm"),
    "unfused-rmsnorm": (RMS, "rms_norm"),
    "unfused-gelu": (GELUS, "gelu"),
}


SILENT = {"unfused-layernorm": QUIET, "unfused-rmsnorm": QUIET_RMS, "unfused-gelu": NOT_GELUS}


def results(rule: str, body: str, folder: Path) -> tuple[list[Finding | Decline], str, str]:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    ctx, source = testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), folder)
    found = list(RULES[rule].match(ctx))
    after = text
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULES[rule].rewrite(found[0], source)
        assert isinstance(rewrite, Rewrite), rewrite
        after = build([rewrite], lambda _: source).sources["example.py"]
    return found, text, after


@pytest.mark.parametrize(
    ("rule", "name"),
    [(rule, name) for rule, (bodies, _) in RIGHT.items() for name in bodies],
)
def test_rewritten_and_the_same_function(rule: str, name: str, tmp_path: Path) -> None:
    body = RIGHT[rule][0][name]
    found, before, after = results(rule, body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    forward = after.split("def forward")[1]
    assert f"{RIGHT[rule][1]}(" in forward
    assert not re.search(r"mean|tanh\(|erfc?\(|rsqrt", forward)
    assert ("self.drop(" in forward) == ("dropout" in name)
    testing.check_same_function(before, after, RULES[rule].tolerance, name)


@pytest.mark.parametrize(
    ("rule", "name"),
    [("unfused-layernorm", n) for n in NOT_NORMS] + [("unfused-rmsnorm", n) for n in NOT_RMS],
)
def test_look_alike_is_declined_with_the_difference(rule: str, name: str, tmp_path: Path) -> None:
    body, reason = (NOT_NORMS if rule == "unfused-layernorm" else NOT_RMS)[name]
    found, _, _ = results(rule, body, tmp_path)
    assert found
    assert all(isinstance(f, Decline) for f in found)
    assert re.search(reason, " ".join(f.reason for f in found if isinstance(f, Decline))), found


@pytest.mark.parametrize(
    ("rule", "name"),
    [(rule, name) for rule, bodies in SILENT.items() for name in bodies],
)
def test_something_else_is_no_finding(rule: str, name: str, tmp_path: Path) -> None:
    assert results(rule, SILENT[rule][name], tmp_path)[0] == []


@pytest.mark.parametrize(
    ("rule", "body"), [("unfused-layernorm", NORMS["torch functions"]), ("unfused-gelu", GELUS["halves"])]
)
def test_one_line_in_two_graphs_is_one_finding(rule: str, body: str, tmp_path: Path) -> None:
    """A graph break between two calls of one function puts its operations into two graphs."""
    text = HEAD.replace("{body}", textwrap.indent("y = self.part(x)\nprint(end='')\nreturn self.part(y)", " " * 8))
    part = "    def part(self, x):\n" + textwrap.indent(body, " " * 8) + "\n\n    def forward"
    text = text.replace("    def forward", part)
    ctx, _ = testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), tmp_path)
    assert len(ctx.graphs) == 2
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Finding)
    assert next(e.value for e in found.evidence if e.what.startswith("calls")) == 2


AFFINE = (
    "if self.affine:\n    x = self.g * x + self.b\nreturn x",
    "if self.g is not None:\n    x = x * self.g\nif self.b is not None:\n    x = x + self.b\nreturn x",
)


@pytest.mark.parametrize("affine", AFFINE)
def test_a_weight_under_a_condition_stays(affine: str, tmp_path: Path) -> None:
    """The norm before weight and bias is replaced, so that both outcomes of the condition keep their meaning."""
    body = NORMS["population var"].replace("return", "x =").replace(" * self.g + self.b", "") + "\n" + affine
    text = HEAD.replace("self.eps = 1e-5", "self.eps, self.affine = 1e-5, True")
    text = text.replace("{body}", textwrap.indent(body, " " * 8))
    rule = RULES["unfused-layernorm"]
    ctx, source = testing.context_of(rule, text, step(10_000, nodes=0.5), tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding), found
    rewrite = rule.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    after = build([rewrite], lambda _: source).sources["example.py"]
    assert "x = F.layer_norm(x, x.shape[-1:], None, None, 1e-6)\n" in after
    assert affine.splitlines()[1] in after
    for setting in ("self.affine = 1e-5, True", "self.affine = 1e-5, False"):
        pair = (code.replace("self.affine = 1e-5, True", setting) for code in (text, after))
        testing.check_same_function(*pair, rule.tolerance, setting)


HALF = {
    "llama": "h = x.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n"
    "return self.g * h.to(x.dtype)",
    "gemma": "h = x.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n"
    "return (h * (1.0 + self.g.float())).type_as(x)",
}


def in_half_precision(text: str, weights: bool) -> str:
    """The module on bfloat16 inputs, its parameters in bfloat16 too or left in float32."""
    text = text.replace("torch.randn(4, 6, 16, req", "torch.randn(4, 6, 16, dtype=torch.bfloat16, req")
    return text.replace("torch.rand(16)", "torch.rand(16, dtype=torch.bfloat16)") if weights else text


@pytest.mark.parametrize("weights", [True, False], ids=["weights in bfloat16", "weights in float32"])
@pytest.mark.parametrize("name", HALF)
def test_in_half_precision_the_result_keeps_its_dtype(name: str, weights: bool, tmp_path: Path) -> None:
    import torch

    text = in_half_precision(HEAD.replace("{body}", textwrap.indent(HALF[name], " " * 8)), weights)
    ctx, source = testing.context_of(RULES["unfused-rmsnorm"], text, step(10_000, nodes=0.5), tmp_path)
    (found,) = RULES["unfused-rmsnorm"].match(ctx)
    assert isinstance(found, Finding), found
    rewrite = RULES["unfused-rmsnorm"].rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    after = build([rewrite], lambda _: source).sources["example.py"]
    assert "rsqrt" not in after.split("def forward")[1]
    results = []
    for number, code in enumerate((text, after)):
        (tmp_path / f"module{number}.py").write_text(code, encoding="utf-8")
        module = testing.load_module(tmp_path / f"module{number}.py")
        torch.manual_seed(0)
        results.append(module.Model()(*module.get_inputs()))
    assert results[0].dtype == results[1].dtype
    assert results[0].dtype is (torch.float32 if name == "llama" and not weights else torch.bfloat16)
    torch.testing.assert_close(results[0], results[1])


GELU_CASTS = {
    "none back": "y = x.float()\nreturn 0.5 * y * (1.0 + torch.erf(y / math.sqrt(2.0)))",
    "to a setting": "y = x.to(self.g.dtype)\nreturn 0.5 * y * (1.0 + torch.erf(y / math.sqrt(2.0)))",
    "back": "y = x.float()\ny = 0.5 * y * (1.0 + torch.erf(y / math.sqrt(2.0)))\nreturn y.to(x.dtype)",
    "back by a name": "kind = x.dtype\ny = x.float()\nreturn (0.5 * y * (1.0 + torch.erf(y / 2**0.5))).to(kind)",
}


@pytest.mark.parametrize("name", GELU_CASTS)
def test_gelu_in_float32_keeps_the_dtype_of_other_inputs(name: str, tmp_path: Path) -> None:
    """Every cast gives its input in the recorded run; an input in half precision shows which of them count."""
    import torch

    found, before, after = results("unfused-gelu", GELU_CASTS[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found
    kinds = []
    for number, code in enumerate((before, after)):
        (tmp_path / f"module{number}.py").write_text(code, encoding="utf-8")
        module = testing.load_module(tmp_path / f"module{number}.py")
        kinds.append([module.Model()(torch.ones(2, 16, dtype=kind)).dtype for kind in (torch.bfloat16, torch.float64)])
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "body",
    [
        "return 0.5 * x * (1 + self.call(x / math.sqrt(2.0)))",
        "return self.mul(0.5 * x, 1 + torch.erf(x / math.sqrt(2.0)))",
    ],
)
def test_gelu_of_a_function_that_is_given_stays(body: str, tmp_path: Path) -> None:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    text = text.replace("self.eps = 1e-5", "self.eps, self.call, self.mul = 1e-5, torch.erf, torch.mul")
    ctx, _ = testing.context_of(RULES["unfused-gelu"], text, step(10_000, nodes=0.5), tmp_path)
    (found,) = RULES["unfused-gelu"].match(ctx)
    assert isinstance(found, Decline), found
    assert "a call whose body is elsewhere" in found.reason


RMS = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g"
PLAIN = "return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.g\n"
WHOLE = "return F.rms_norm(x, self.g.shape, self.g, self.eps)\n"
FROM_X = "return F.rms_norm(x, x.shape[-1:], self.g, self.eps)\n"


@pytest.mark.parametrize(
    ("made", "more", "wanted"),
    [
        ("nn.Parameter(torch.rand(size))", "", WHOLE),
        ("nn.Parameter(torch.rand((size,)))", "", WHOLE),
        ("nn.Parameter(torch.empty(size).fill_(0.5)) if size else None", "", WHOLE),
        ("nn.Parameter(torch.rand(size))", "WIDE = Model((4, 16))", PLAIN),
        ("nn.Parameter(torch.rand(size))", "def wide(*sizes):\n    return Model(size=sizes[1:])", PLAIN),
        ("nn.Parameter(torch.rand(size))", "NORMS = {'rms': Model}", FROM_X),
        ("nn.Parameter(torch.rand(size))", "def other(*given):\n    return Model(*given)", FROM_X),
        ("nn.Parameter(torch.rand(size if size else 1))", "", PLAIN),
        ("nn.Parameter(torch.rand(1, size))[0]", "", PLAIN),
        ("nn.Parameter(torch.rand(16)) if gain is None else gain", "", PLAIN),
        ("nn.Parameter(torch.rand(size))", "def late(model):\n    model.g = nn.Parameter(torch.rand(4, 16))", FROM_X),
    ],
)
def test_a_weight_that_may_have_another_shape_stays_outside(made: str, more: str, wanted: str, tmp_path: Path) -> None:
    text = HEAD.replace("{body}", textwrap.indent(RMS, " " * 8)).replace("nn.Parameter(torch.rand(16))", made, 1)
    text = text.replace("def __init__(self)", "def __init__(self, size=16, gain=None)")
    rule = RULES["unfused-rmsnorm"]
    ctx, source = testing.context_of(rule, f"{text}\n\n{more}\n", step(10_000, nodes=0.5), tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding), found
    rewrite = rule.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    after = build([rewrite], lambda _: source).sources["example.py"]
    assert wanted in after
    testing.check_same_function(source.text, after, rule.tolerance, made)


def test_weights_that_are_arguments_stay_outside(tmp_path: Path) -> None:
    body = "return norm(x, self.g, self.b)"
    function = "def norm(x, g, b):\n    m = x.mean(-1, keepdim=True)\n    v = x.var(-1, keepdim=True, correction=0)\n"
    function += "    return (x - m) * torch.rsqrt(v + 1e-5) * g + b\n\n\nclass Model"
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8)).replace("class Model", function)
    rule = RULES["unfused-layernorm"]
    ctx, source = testing.context_of(rule, text, step(10_000, nodes=0.5), tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding), found
    rewrite = rule.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    after = build([rewrite], lambda _: source).sources["example.py"]
    assert "return F.layer_norm(x, x.shape[-1:], None, None, 1e-5) * g + b\n" in after


def test_autocast_on_the_cpu_keeps_the_weight_outside(tmp_path: Path) -> None:
    """The product with a weight in float32 widens the result, which the fused norm does not."""
    import torch

    text = HEAD.replace("{body}", textwrap.indent(RMS, " " * 8))
    text += '\n\ndef mixed(model, x):\n    with torch.autocast("cpu", torch.bfloat16):\n        return model(x)\n'
    rule = RULES["unfused-rmsnorm"]
    ctx, source = testing.context_of(rule, text, step(10_000, nodes=0.5), tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding), found
    rewrite = rule.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    after = build([rewrite], lambda _: source).sources["example.py"]
    assert PLAIN in after
    kinds = []
    for number, code in enumerate((text, after)):
        (tmp_path / f"module{number}.py").write_text(code, encoding="utf-8")
        module = testing.load_module(tmp_path / f"module{number}.py")
        kinds.append(module.mixed(module.Model(), torch.ones(2, 16, dtype=torch.bfloat16)).dtype)
    assert kinds == [torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("made", "more"),
    [
        ("nn.Parameter(torch.tensor(1e-5)) if learn else 1e-5", ""),
        ("eps", "def learned():\n    return Model(eps=nn.Parameter(torch.tensor(1e-5)))"),
        (
            "eps",
            "class Learned(Model):\n    def __init__(self):\n        super().__init__()\n"
            "        self.register_buffer('eps', torch.tensor(1e-5))",
        ),
    ],
)
@pytest.mark.parametrize("rule", ["unfused-layernorm", "unfused-rmsnorm"])
def test_an_eps_that_may_be_learned_stays(rule: str, made: str, more: str, tmp_path: Path) -> None:
    body = RMS if rule == "unfused-rmsnorm" else NORMS["rsqrt and var"]
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8)).replace("self.eps = 1e-5", f"self.eps = {made}")
    text = text.replace("def __init__(self)", "def __init__(self, learn=False, eps=1e-5)")
    ctx, _ = testing.context_of(RULES[rule], f"{text}\n\n{more}\n", step(10_000, nodes=0.5), tmp_path)
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Decline), found
    assert "`self.eps` may be a tensor in another call" in found.reason


def test_an_eps_of_a_dtype_is_a_number(tmp_path: Path) -> None:
    text = HEAD.replace("{body}", textwrap.indent(RMS, " " * 8))
    text = text.replace("self.eps = 1e-5", "self.eps = torch.finfo(torch.float32).eps")
    ctx, _ = testing.context_of(RULES["unfused-rmsnorm"], text, step(10_000, nodes=0.5), tmp_path)
    assert [type(found) for found in RULES["unfused-rmsnorm"].match(ctx)] == [Finding]


def test_a_norm_behind_a_block_in_a_container(tmp_path: Path) -> None:
    """Both are called by the container: what the block computed is no value of the norm's own function."""
    text = """\
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-5

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = Norm(), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.out(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), Block(), Block(), Norm()).bfloat16()

    def forward(self, x):
        return self.layers(x)


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(4, 6, 16).bfloat16().requires_grad_(True)]
"""
    rule = RULES["unfused-rmsnorm"]
    ctx, source = testing.context_of(rule, text, step(10_000, nodes=0.5), tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding), found
    assert isinstance(rule.rewrite(found, source), Rewrite)
