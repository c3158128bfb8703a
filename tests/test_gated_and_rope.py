"""unfused-gated-mlp and unfused-rope on the ways people write them, and on look-alikes."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.patch import build
from advisor.rule import step

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)
        inverse = 1e4 ** -(torch.arange(0, 8, 2) / 8)
        angles = torch.outer(torch.arange(5.0), inverse)
        self.register_buffer("inverse", inverse)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())
        self.register_buffer("half_cos", angles.cos())
        self.register_buffer("half_sin", angles.sin())

    def forward(self, x):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 5, 8, requires_grad=True)]
"""


def results(
    rule: str, body: str, folder: Path, nodes: float = 0.5, missing: dict[str, str] | None = None
) -> tuple[list[Finding | Decline], str, str]:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    ctx, source = testing.context_of(RULES[rule], text, step(10_000, nodes=nodes), folder)
    ctx = replace(ctx, profile=replace(ctx.profile, missing=missing or {}))
    found = list(RULES[rule].match(ctx))
    after = text
    if len(found) == 1 and isinstance(found[0], Finding):
        rewrite = RULES[rule].rewrite(found[0], source)
        if isinstance(rewrite, Rewrite):
            after = build([rewrite], lambda _: source).sources["example.py"]
    return found, text, after


SILU = {
    "alone": "return x * torch.sigmoid(x)",
    "method": "h = self.w1(x)\nh = h.sigmoid() * h\nreturn self.w2(self.w3(x) * h)",
    "exponential": "return x / (1 + torch.exp(-x))",
    "functional": "g, u = x.chunk(2, dim=-1)\ng = g * F.sigmoid(g)\nreturn g * u",
    "in another block": "g = self.w1(x)\nreturn self.w2(self.w3(x) * (torch.sigmoid(g) * g))",
}


@pytest.mark.parametrize("name", SILU)
def test_silu_written_out_is_rewritten(name: str, tmp_path: Path) -> None:
    found, before, after = results("unfused-gated-mlp", SILU[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found
    forward = after.split("def forward")[1]
    assert "F.silu(" in forward and "sigmoid" not in forward and "exp(" not in forward
    testing.check_same_function(before, after, RULES["unfused-gated-mlp"].tolerance, name)


GATES = {
    "SwiGLU": "return self.w2(F.silu(self.w1(x)) * self.w3(x))",
    "SwiGLU, up first": "return self.w2(self.w3(x) * F.silu(self.w1(x)))",
    "GeGLU": "g, u = x.chunk(2, dim=-1)\nreturn u * F.gelu(g)",
    "GeGLU (tanh)": 'g, u = x[..., :4], x[..., 4:]\nreturn F.gelu(g, approximate="tanh") * u',
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_with_a_ready_activation_is_pointed_at(name: str, tmp_path: Path) -> None:
    found, before, after = results("unfused-gated-mlp", GATES[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert isinstance(found[0], Finding)
    assert name.split(",")[0] in found[0].message
    assert found[0].replacement is None
    assert before == after


def test_a_gate_that_is_cheap_is_declined_with_what_it_could_save(tmp_path: Path) -> None:
    (found,) = results("unfused-gated-mlp", GATES["SwiGLU"], tmp_path, nodes=0.2)[0]
    assert isinstance(found, Decline)
    assert found.reason.startswith("SwiGLU is two kernels; one could save at most")


NOT_GATES = {
    "activation alone": "return F.silu(x)",
    "sigmoid gate": "return torch.sigmoid(self.w1(x)) * self.w3(x)",
    "lstm": "return torch.sigmoid(x) * torch.tanh(x)",
    "quick gelu": "return x * torch.sigmoid(1.702 * x)",
    "scaled by a number": "return F.silu(x) * 0.5",
    "another sign": "return x * torch.sigmoid(-x)",
    "squeeze and excite": "return F.silu(x) * x.mean(-1, keepdim=True)",
}


@pytest.mark.parametrize("name", NOT_GATES)
def test_something_else_is_no_gate(name: str, tmp_path: Path) -> None:
    assert results("unfused-gated-mlp", NOT_GATES[name], tmp_path)[0] == []


ROPES = {
    "half-split": "return x * self.cos + rotate_half(x) * self.sin",
    "half-split, unsqueezed": "c, s = self.cos[None, None], self.sin[None, None]\n"
    "return (rotate_half(x) * s) + (c * x)",
    "half-split, half tables": "a, b = x.chunk(2, dim=-1)\nc, s = self.half_cos, self.half_sin\n"
    "return torch.cat((a * c - b * s, b * c + a * s), dim=-1)",
    "half-split, a part of the width": "r, p = x[..., :4], x[..., 4:]\nc, s = self.cos[:, :4], self.sin[:, :4]\n"
    "return torch.cat((r * c + rotate_half(r) * s, p), dim=-1)",
    "interleaved": "c = self.half_cos.repeat_interleave(2, -1)\ns = self.half_sin.repeat_interleave(2, -1)\n"
    "return x * c + rotate_every_two(x) * s",
    "interleaved, unbound": "y = x.transpose(1, 2)\nr, i = y.float().reshape(y.shape[:-1] + (-1, 2)).unbind(-1)\n"
    "c, s = self.half_cos.view(1, 5, 1, 4), self.half_sin.view(1, 5, 1, 4)\n"
    "return torch.stack([r * c - i * s, r * s + i * c], dim=-1).flatten(3).type_as(x)",
    "interleaved, complex": "y = x.transpose(1, 2)\n"
    "z = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2))\n"
    "t = torch.view_as_complex(torch.stack((self.half_cos, self.half_sin), -1)).view(1, 5, 1, 4)\n"
    "return torch.view_as_real(z * t).flatten(3).type_as(x)",
}


NOT_FUSED = ("interleaved", "interleaved, complex")  # what a compiler fuses is not known of all they do


@pytest.mark.parametrize("name", ROPES)
def test_rotary_embedding_is_pointed_at_with_its_layout(name: str, tmp_path: Path) -> None:
    found, before, after = results("unfused-rope", ROPES[name], tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert isinstance(found[0], Finding)
    assert f"({name.split(',')[0]} pairs)" in found[0].message
    if name in NOT_FUSED:
        assert before == after
    else:
        assert after == before.replace("    def forward", "    @torch.compile\n    def forward")


def test_tables_made_in_the_step_are_counted(tmp_path: Path) -> None:
    body = (
        "for w in range(3):\n    a = torch.outer(torch.arange(5.0), self.inverse)\n    a = torch.cat((a, a), -1)\n"
        "    x = x * a.cos() + rotate_half(x) * a.sin()\nreturn x"
    )
    (found,) = results("unfused-rope", body, tmp_path)[0]
    assert isinstance(found, Finding)
    assert "its cosines and sines are computed 3 times a step" in found.message
    assert next(e.value for e in found.evidence if e.what.startswith("calls")) == 3


LEARNED = {
    "half-split": "a, b = x.chunk(2, -1)\nreturn torch.cat((a * self.re - b * self.im, a * self.im + b * self.re), -1)",
    "complex": "z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.view_as_complex(self.pairs)\n"
    "return torch.view_as_real(z).flatten(-2)",
    "angles": "a, b = x.chunk(2, -1)\nc, s = self.re.cos(), self.re.sin()\n"
    "return torch.cat((a * c - b * s, a * s + b * c), -1)",
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_factor_is_no_rotation_and_learned_angles_are(name: str, tmp_path: Path) -> None:
    text = HEAD.replace("{body}", textwrap.indent(LEARNED[name], " " * 8))
    learned = "self.re, self.im = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))\n        "
    learned += "self.pairs = nn.Parameter(torch.randn(4, 2))\n        inverse ="
    ctx, _ = testing.context_of(
        RULES["unfused-rope"], text.replace("inverse =", learned, 1), step(10_000, nodes=0.5), tmp_path
    )
    found = list(RULES["unfused-rope"].match(ctx))
    assert [type(f) for f in found if isinstance(f, Finding)] == ([Finding] if name == "angles" else [])
    assert all("its table is learned" in f.reason for f in found if isinstance(f, Decline))


NOT_ROPES = {
    "the other direction": "return x * self.cos - rotate_half(x) * self.sin",
    "one product": "return x * self.cos + rotate_half(x)",
    "a concatenation": "a, b = x.chunk(2, dim=-1)\nreturn torch.cat((-b, a), dim=-1)",
    "pairs of one layout, angles of the other": "return x * self.cos + rotate_every_two(x) * self.sin * x.mean()",
    "pixel shuffle": "a, b = x[..., ::2], x[..., 1::2]\nreturn torch.stack((a, b), -1).flatten(-2) * self.cos",
}


@pytest.mark.parametrize("name", NOT_ROPES)
def test_something_else_is_no_rotary_embedding(name: str, tmp_path: Path) -> None:
    assert results("unfused-rope", NOT_ROPES[name], tmp_path)[0] == []


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("unfused-gated-mlp", SILU["alone"]),
        ("unfused-gated-mlp", GATES["SwiGLU"]),
        ("unfused-rope", ROPES["half-split"]),
        ("unfused-rmsnorm", "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"),
        ("unfused-gelu", "return 0.5 * x * (1 + torch.erf(x * 0.7071067811865475))"),
    ],
)
def test_a_compiled_module_is_left_alone(rule: str, body: str, tmp_path: Path) -> None:
    (found,) = results(rule, body, tmp_path, missing={"compiled": "the script compiles this module"})[0]
    assert isinstance(found, Decline)
    assert found.reason.startswith("inside a compiled region")


def test_the_share_decides(tmp_path: Path) -> None:
    (found,) = results("unfused-rope", ROPES["half-split"], tmp_path, nodes=0.01)[0]
    assert isinstance(found, Decline)
    assert found.reason == "it takes 1.0% of the step"


# ----------------------------------------------------------------------------------------------------- other callers


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x[:, :, : self.n] * torch.sigmoid(x[:, :, : self.n])", None),
        ("return x * torch.sigmoid(x[:, :, : self.n])", None),
        ("return self.skip(x) * torch.sigmoid(x)", "hold one value in this run"),
        ("return self.times(x, torch.sigmoid(x))", "a call whose body is elsewhere"),
        ("return x * torch.sigmoid(x.float()).to(self.half_cos.dtype)", "it casts to a dtype of its own"),
    ],
)
def test_silu_of_this_run_alone_is_not_rewritten(body: str, reason: str | None, tmp_path: Path) -> None:
    """A slice that takes everything here, a module that passes its input on here, a function that is given, a cast."""
    settings = "self.n, self.skip, self.times = 5, nn.Identity(), torch.mul\ninverse ="
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    text = text.replace("inverse =", settings.replace("\n", "\n        "), 1)
    ctx, _ = testing.context_of(RULES["unfused-gated-mlp"], text, step(10_000, nodes=0.5), tmp_path)
    found = list(RULES["unfused-gated-mlp"].match(ctx))
    assert not [f for f in found if isinstance(f, Finding)]
    assert (not found) if reason is None else reason in " ".join(f.reason for f in found if isinstance(f, Decline))


CASTS = {
    "none back": ("y = x.float()\nreturn y * torch.sigmoid(y)", "y = x.float()\nreturn F.silu(y)"),
    "back": ("y = x.float()\nreturn (y * torch.sigmoid(y)).to(x.dtype)", "return F.silu(x)"),
    "back by another": ("y = x.float()\nreturn (y * torch.sigmoid(y)).type_as(x)", "return F.silu(x)"),
    "at the end": ("return (x * torch.sigmoid(x)).float()", "return (F.silu(x)).float()"),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_that_nothing_takes_back_stays(name: str, tmp_path: Path) -> None:
    """The run is in float32, where every cast gives its input; an input in half precision would be widened."""
    body, wanted = CASTS[name]
    found, before, after = results("unfused-gated-mlp", body, tmp_path)
    assert [type(f) for f in found] == [Finding], found
    assert after == before.replace(textwrap.indent(body, " " * 8), textwrap.indent(wanted, " " * 8))


def test_tables_of_other_frequencies_are_no_repetition(tmp_path: Path) -> None:
    body = (
        "for inverse in (self.inverse, self.other):\n    a = torch.outer(torch.arange(5.0), inverse)\n"
        "    a = torch.cat((a, a), -1)\n    x = x * a.cos() + rotate_half(x) * a.sin()\nreturn x"
    )
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    text = text.replace(
        '("inverse", inverse)', '("inverse", inverse)\n        self.register_buffer("other", inverse / 9)'
    )
    ctx, _ = testing.context_of(RULES["unfused-rope"], text, step(10_000, nodes=0.5), tmp_path)
    (found,) = RULES["unfused-rope"].match(ctx)
    assert isinstance(found, Finding)
    assert "times a step" not in found.message
