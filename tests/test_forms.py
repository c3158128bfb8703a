"""Other forms of a finding: which are offered where, what they write, and what plan and report make of them."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from advisor import codemod, registry, testing
from advisor.forms import is_compiled
from advisor.model import (
    Environment,
    Finding,
    Form,
    Hardware,
    Numerics,
    Outcome,
    Patch,
    Profile,
    Rewrite,
    Safety,
    Step,
    Verdict,
)
from advisor.patch import build
from advisor.plan import Plan, plan
from advisor.rule import Context, Rule, step
from advisor.source import Source
from advisor.summary import Results, report_of

torch = pytest.importorskip("torch")

RULES: dict[str, Rule] = {name: item.rule for name, item in registry.load()[0].items()}
INSTALLED = {"liger_kernel": "0.8.5", "triton": "3.4.0", "flash_attn": "2.8.3"}
ALLOWED = frozenset({Safety.NUMERICS})

NORM = """\
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, 16))

    def forward(self, x):
{body}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return {block}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(4, 6, 16, requires_grad=True, dtype=torch.{dtype})]
"""
RMS = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight"
LAYER = "m = x.mean(-1, keepdim=True)\nv = x.var(-1, keepdim=True, unbiased=False)\n"
LAYER += "return (x - m) / torch.sqrt(v + 1e-5) * self.weight + self.bias"


def norm_text(body: str, block: str = "self.norm(x)", dtype: str = "float32") -> str:
    text = NORM.replace("{body}", textwrap.indent(body, " " * 8)).replace("{block}", block).replace("{dtype}", dtype)
    if dtype != "float32":
        text = text.replace("self.norm = Norm()", f"self.norm = Norm().to(torch.{dtype})")
    return text


def seen(
    folder: Path, name: str, text: str, device: str = "cuda", packages: Mapping[str, str] | None = None
) -> tuple[list[Finding], Context, Source]:
    """The findings of a rule on a captured example, as on a device with packages."""
    ctx, source = testing.context_of(RULES[name], text, step(10_000, nodes=0.4, device=device), folder)
    environment = replace(ctx.profile.environment, packages=packages or {})
    ctx = replace(ctx, profile=replace(ctx.profile, environment=environment))
    return [f for f in RULES[name].match(ctx) if isinstance(f, Finding)], ctx, source


def names(findings: list[Finding]) -> list[str]:
    (found,) = findings
    return [form.name for form in found.forms]


def written(name: str, finding: Finding, source: Source, form: str) -> str:
    rewrites = {r.form: r for r in RULES[name].forms(finding, source)}
    return str(build([rewrites[form]], lambda _: source).sources[testing.FILE])


# ------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize(
    ("block", "device", "offered"),
    [("self.norm(x)", "cuda", True), ("self.norm(x)", "cpu", False), ("self.up(self.norm(x))", "cuda", True)],
)
def test_a_function_that_only_normalises_can_be_compiled(
    tmp_path: Path, block: str, device: str, offered: bool
) -> None:
    findings, _, source = seen(tmp_path, "unfused-rmsnorm", norm_text(RMS, block), device)
    assert names(findings) == (["compiled"] if offered else [])
    if offered:
        text = written("unfused-rmsnorm", findings[0], source, "compiled")
        assert "    @torch.compile\n    def forward(self, x):\n        return x * torch.rsqrt(" in text
        assert text.count("@torch.compile") == 1 and findings[0].forms[0].title == "compile `forward`"


@pytest.mark.parametrize("after", ["self.up(h)", "self.drop(h)", "h @ h.mT"])
def test_a_function_that_does_more_is_left_to_the_first_form(tmp_path: Path, after: str) -> None:
    body = f"h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)\nreturn {after}"
    text = norm_text("return x", "x").replace("        return x\n\n\ndef", textwrap.indent(body, " " * 8) + "\n\n\ndef")
    findings, _, _ = seen(tmp_path, "unfused-rmsnorm", text)
    assert names(findings) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch needs a C++ compiler")
def test_the_decorated_source_is_the_same_function(tmp_path: Path) -> None:
    text = norm_text(RMS)
    findings, _, source = seen(tmp_path, "unfused-rmsnorm", text)
    after = written("unfused-rmsnorm", findings[0], source, "compiled")
    torch._dynamo.reset()
    testing.check_same_function(text, after, RULES["unfused-rmsnorm"].tolerance, "compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


CLASS = "import torch\n\n\nclass Norm:\n    def forward(self, x):\n        return x * 2\n"


def decorated(text: str, at: str = "x * 2") -> str:
    source = Source(path="a.py", text=text)
    line = text[: text.index(at)].count("\n") + 1
    return codemod.apply(source, codemod.decorated(source, line, "torch.compile"))


def test_a_decorator_stands_as_the_function_does() -> None:
    assert decorated(CLASS) == CLASS.replace("    def", "    @torch.compile\n    def")
    assert decorated(CLASS.replace("\n", "\r\n")) == CLASS.replace("    def", "    @torch.compile\n    def").replace(
        "\n", "\r\n"
    )
    tabs = CLASS.replace("    ", "\t")
    assert decorated(tabs) == tabs.replace("\tdef", "\t@torch.compile\n\tdef")
    plain = "import torch\ndef f(x):\n    return x * 2\n"
    assert decorated(plain) == plain.replace("def", "@torch.compile\ndef")


def test_a_decorator_is_spelled_as_the_file_spells_torch() -> None:
    other = CLASS.replace("import torch", "import torch as t")
    assert decorated(other) == other.replace("    def", "    @t.compile\n    def")
    without = "from torch import nn\n\n\ndef f(x):\n    return x * 2\n"
    assert decorated(without) == without.replace("nn\n", "nn\nimport torch\n").replace("def", "@torch.compile\ndef")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CLASS.replace("    def", "    @staticmethod\n    def"), "has a decorator already"),
        ("def g():\n    def f(x):\n        return x * 2\n    return f\n", "made inside another function"),
        ("if True:\n    def f(x):\n        return x * 2\n", "made inside another function"),
        ("async def f(x):\n    return x * 2\n", "no function holds the line"),
        ("y = x * 2\n", "no function holds the line"),
        ("z = 1; y = x * 2\n", "no function holds the line"),
    ],
)
def test_a_function_that_cannot_bear_a_decorator(text: str, reason: str) -> None:
    with pytest.raises(codemod.CannotEdit, match=reason):
        decorated(text)


@pytest.mark.parametrize(
    ("decorator", "compiled"),
    [
        ("torch.compile", True),
        ("torch.compile(dynamic=True)", True),
        ("compile", True),
        ("compile(fullgraph=True)", True),
        ("partial(torch.compile, dynamic=True)", True),
        ("torch.compiler.disable", False),
        ("torch.compiler.disable()", False),
        ("recompiles", False),
    ],
)
def test_only_torch_compile_compiles(decorator: str, compiled: bool) -> None:
    text = f"import torch\nfrom functools import partial\nfrom torch import compile\n\n\n@{decorator}\ndef f(x):\n"
    assert is_compiled(Source("a.py", f"{text}    return x * 2\n"), 8) == compiled


# --------------------------------------------------------------------------------------------------------- Liger-Kernel


def test_liger_norms_are_called_where_they_take_their_inputs(tmp_path: Path) -> None:
    findings, _, source = seen(tmp_path, "unfused-rmsnorm", norm_text(RMS), packages=INSTALLED)
    assert names(findings) == ["liger", "compiled"]
    text = written("unfused-rmsnorm", findings[0], source, "liger")
    assert "\nfrom liger_kernel.ops.rms_norm import LigerRMSNormFunction\n" in text
    assert (
        "        return (\n"
        '            LigerRMSNormFunction.apply(x, self.weight, 1e-5, 0.0, "gemma", False)\n'
        "            if x.is_cuda and x.dtype == self.weight.dtype == torch.float32 and x.shape[-1] <= 65536\n"
        "            else F.rms_norm(x, self.weight.shape, self.weight, 1e-5)\n"
        "        )\n"
    ) in text
    findings, _, source = seen(tmp_path, "unfused-layernorm", norm_text(LAYER, dtype="float16"), packages=INSTALLED)
    text = written("unfused-layernorm", findings[0], source, "liger")
    assert (
        "            LigerLayerNormFunction.apply(x, self.weight, self.bias, 1e-5)\n"
        "            if x.is_cuda\n"
        "            and x.dtype == self.weight.dtype == self.bias.dtype == torch.float16\n"
        "            and x.shape[-1] <= 65536\n"
        "            and not torch.is_autocast_enabled()\n"
        "            else F.layer_norm("
    ) in text


def test_a_file_of_another_ending_and_name_of_torch_gets_the_same_form(tmp_path: Path) -> None:
    text = norm_text(RMS).replace("import torch\n", "import torch\nimport torch as t\n", 1).replace("\n", "\r\n")
    (tmp_path / "crlf").mkdir()
    findings, _, source = seen(tmp_path / "crlf", "unfused-rmsnorm", text, packages=INSTALLED)
    source = Source(path=testing.FILE, text=text)
    after = written("unfused-rmsnorm", findings[0], source, "liger")
    assert after.count("\r\n") == after.count("\n")
    ast.parse(after)


WITHOUT = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)"
NOT_OFFERED = {
    "not installed": (RMS, {}, "cuda", "float32", ""),
    "no triton": (RMS, {"liger_kernel": "0.8.5"}, "cuda", "float32", ""),
    "before the signature": (RMS, {**INSTALLED, "liger_kernel": "0.5.10"}, "cuda", "float32", ""),
    "no device": (RMS, INSTALLED, "cpu", "float32", ""),
    "float64": (RMS, INSTALLED, "cuda", "float64", ""),
    "gradients of gradients": (RMS, INSTALLED, "cuda", "float32", "def g(y, x):\n    y.backward(create_graph=True)\n"),
    "transforms": (RMS, INSTALLED, "cuda", "float32", "from torch.func import jacrev as j\n"),
    "TorchScript": (RMS, INSTALLED, "cuda", "float32", "def g(m):\n    return torch.jit.script(m)\n"),
    "distributed tensors": (RMS, INSTALLED, "cuda", "float32", "def g(m, p):\n    parallelize_module(m, p)\n"),
    "its name is taken": (RMS, INSTALLED, "cuda", "float32", "LigerRMSNormFunction = None\n"),
}


@pytest.mark.parametrize("case", NOT_OFFERED)
def test_liger_norms_are_not_offered(tmp_path: Path, case: str) -> None:
    body, packages, device, dtype, more = NOT_OFFERED[case]
    findings, _, _ = seen(tmp_path, "unfused-rmsnorm", norm_text(body, dtype=dtype) + more, device, packages)
    assert "liger" not in names(findings)


def test_a_norm_without_weight(tmp_path: Path) -> None:
    findings, _, source = seen(tmp_path, "unfused-rmsnorm", norm_text(WITHOUT), packages=INSTALLED)
    text = written("unfused-rmsnorm", findings[0], source, "liger")
    assert 'LigerRMSNormFunction.apply(x, None, 1e-5, 0.0, "gemma", False)' in text
    bare = LAYER.replace(" * self.weight + self.bias", "")
    findings, _, _ = seen(tmp_path, "unfused-layernorm", norm_text(bare), packages=INSTALLED)
    assert "liger" not in names(findings)
    older = {**INSTALLED, "liger_kernel": "0.8.0"}  # rounds the statistics that it keeps to the dtype of the input
    findings, _, _ = seen(tmp_path, "unfused-layernorm", norm_text(LAYER), packages=older)
    assert "liger" not in names(findings)


def test_what_is_not_a_name_is_not_said_again(tmp_path: Path) -> None:
    text = norm_text(f"weights = [self.weight]\n{RMS.replace('self.weight', 'weights[0]')}")
    findings, _, source = seen(tmp_path, "unfused-rmsnorm", text, packages=INSTALLED)
    assert "LigerRMSNormFunction.apply(x, None, 1e-5" in written("unfused-rmsnorm", findings[0], source, "liger")


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None,
    reason="needs liger_kernel and triton",
)
def test_the_kernels_of_liger_are_the_same_function() -> None:
    """Its Triton kernels run on the CPU, interpreted: forward and backward against the plain form."""
    script = Path(__file__).parent / "liger_interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the same"


# ----------------------------------------------------------------------------------------------------------- flash-attn

ATTENTION = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout({p})
        self.register_buffer("tri", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)

    def forward(self, q, k, v):
        B, H, T, D = q.size()
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 8, 4, requires_grad=True, dtype=torch.{dtype}) for _ in range(3)]
"""
CAUSAL = """\
att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
att = att.masked_fill(self.tri[:T, :T] == 0, float("-inf"))
att = self.drop(F.softmax(att, dim=-1))
return att @ v
"""
FULL = "return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v"
BATCHED = """\
q, k, v = q.reshape(6, 8, 4), k.reshape(6, 8, 4), v.reshape(6, 8, 4)
return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
"""
TURNED = """\
q, k, v = q.reshape(2, 3, 8, 4), k.reshape(2, 3, 8, 4), v.reshape(2, 3, 8, 4)
q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
att = torch.einsum("bthd,bshd->bhts", q, k) / 2.0
return torch.einsum("bhts,bshd->bthd", att.softmax(-1), v)
"""
CALLED = """\
        return (
            flash_attn_func(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                causal=True,
                dropout_p=self.drop.p if self.drop.training else 0.0,
            ).transpose(1, 2)
            if q.is_cuda
            and q.dtype == k.dtype == v.dtype == torch.bfloat16
            and q.shape == k.shape == v.shape
            and q.shape[-1] <= 256
            else F.scaled_dot_product_attention(
"""


def attention_text(body: str, dtype: str = "bfloat16", p: float = 0.0) -> str:
    text = ATTENTION.replace("{body}", textwrap.indent(body, " " * 8))
    return text.replace("{dtype}", dtype).replace("{p}", str(p))


def documented(  # type: ignore[no-untyped-def]
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """What flash_attn_interface.py documents of flash_attn_func, in torch: the package needs a GPU."""
    assert q.dim() == 4 and k.shape == v.shape and q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[2] % k.shape[2] == 0 and q.shape[-1] == k.shape[-1] <= 256 and dropout_p == 0.0
    documented.calls += 1  # type: ignore[attr-defined]
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:  # aligned at the bottom right
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~keep, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).to(torch.bfloat16)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in place of flash_attn that computes the documented function with torch on any device."""
    documented.calls = 0  # type: ignore[attr-defined]
    module = ModuleType("flash_attn")
    module.flash_attn_func = documented  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def on_cpu(rewrite: Rewrite) -> Rewrite:
    """A form whose kernel is taken on the CPU."""
    found = rewrite.finding.replacement
    assert found is not None and "{query}.is_cuda" in found.template
    template = found.template.replace(".is_cuda", ".is_cpu")
    return replace(rewrite, finding=replace(rewrite.finding, replacement=replace(found, template=template)))


def test_flash_attention_is_spelled_as_it_wants_its_axes(tmp_path: Path) -> None:
    findings, _, source = seen(tmp_path, "naive-attention", attention_text(CAUSAL), packages=INSTALLED)
    assert names(findings) == ["flash"]
    text = written("naive-attention", findings[0], source, "flash")
    assert CALLED in text and "\nfrom flash_attn import flash_attn_func\n" in text


@pytest.mark.parametrize("body", [CAUSAL, FULL, BATCHED, TURNED])
@pytest.mark.usefixtures("stand_in")
def test_flash_attention_is_the_same_function(tmp_path: Path, body: str) -> None:
    findings, ctx, source = seen(tmp_path, "naive-attention", attention_text(body), packages=INSTALLED)
    (form,) = RULES["naive-attention"].forms(findings[0], source)
    testing.check_regions(on_cpu(form), ctx.graphs, "flash")
    assert documented.calls > 10  # type: ignore[attr-defined]
    count = documented.calls  # type: ignore[attr-defined]
    testing.check_regions(form, ctx.graphs, "flash, plain on the CPU")
    assert documented.calls == count  # type: ignore[attr-defined]


@pytest.mark.usefixtures("stand_in")
def test_the_file_runs_with_either_branch(tmp_path: Path) -> None:
    findings, _, source = seen(tmp_path, "naive-attention", attention_text(CAUSAL), packages=INSTALLED)
    text = written("naive-attention", findings[0], source, "flash")
    results = []
    for number, shown in enumerate((attention_text(CAUSAL), text, text.replace(".is_cuda", ".is_cpu"))):
        (tmp_path / f"module{number}.py").write_text(shown, encoding="utf-8")
        module = testing.load_module(tmp_path / f"module{number}.py")
        inputs = module.get_inputs()
        output = module.Model()(*inputs)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), inputs)))
    for old, plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(plain, old, atol=0.05, rtol=0.05)
        torch.testing.assert_close(kernel, old, atol=0.05, rtol=0.05)
    assert documented.calls == 1  # type: ignore[attr-defined]


NO_FLASH = {
    "not installed": (attention_text(CAUSAL), {}, "cuda"),
    "no device": (attention_text(CAUSAL), INSTALLED, "cpu"),
    "float32": (attention_text(CAUSAL, "float32"), INSTALLED, "cuda"),
    "another generation": (attention_text(CAUSAL), {"flash_attn": "1.0.9"}, "cuda"),
    "a later generation": (attention_text(CAUSAL), {"flash_attn": "3.0.0"}, "cuda"),
    "a bias": (attention_text("return (q @ k.mT + self.tri.to(q.dtype)).softmax(-1) @ v"), INSTALLED, "cuda"),
    "operands without a name": (attention_text(FULL.replace("(q @", "(q.relu() @")), INSTALLED, "cuda"),
    "dropout": (attention_text(CAUSAL, p=0.1), INSTALLED, "cuda"),
    "fewer keys": (attention_text("k, v = k[:, :, :4], v[:, :, :4]\n" + FULL), INSTALLED, "cuda"),
    "deterministic": (attention_text(CAUSAL) + "torch.use_deterministic_algorithms\n", INSTALLED, "cuda"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_FLASH)
def test_flash_attention_is_not_offered(tmp_path: Path, case: str) -> None:
    text, packages, device = NO_FLASH[case]
    findings, _, _ = seen(tmp_path, "naive-attention", text, device, packages)
    assert findings[0].replacement is not None and names(findings) == []


# ------------------------------------------------------------------------------------------------------ plan and report


def planned(folder: Path) -> tuple[Plan, Finding]:
    findings, _, source = seen(folder, "unfused-rmsnorm", norm_text(RMS), packages=INSTALLED)
    return plan(findings, RULES, lambda _: source, ALLOWED), findings[0]


def test_the_forms_of_a_finding_are_one_group(tmp_path: Path) -> None:
    found, finding = planned(tmp_path)
    assert [r.form for r in found.rewrites] == [None, "liger", "compiled"]
    assert len({r.group for r in found.rewrites}) == 1 and found.rewrites[0].group is not None
    assert len({r.id for r in found.rewrites}) == 3
    first, kernel, compiled = found.rewrites
    assert first.runs and not kernel.runs and not compiled.runs
    assert first.finding is finding and compiled.finding.replacement is None
    kernel_replacement = kernel.finding.replacement
    assert kernel_replacement is not None and kernel_replacement.imports
    alone = replace(finding, forms=())
    (only,) = plan([alone], RULES, lambda _: Source(testing.FILE, norm_text(RMS)), ALLOWED).rewrites
    assert only.group is None


def test_a_form_that_cannot_be_written_leaves_the_others(tmp_path: Path) -> None:
    head = "    def forward(self, x):\n        return x *"
    text = norm_text(RMS).replace(head, f"    @torch.no_grad()\n{head}")
    _, finding = planned(tmp_path)
    moved = replace(finding, forms=(Form(name="compiled", title="compile `forward`"),))
    source = Source(testing.FILE, text)
    line = text[: text.index("return x *")].count("\n") + 1
    span = source.span(next(source.expressions_at(line)))
    found = plan([replace(moved, span=span)], RULES, lambda _: source, ALLOWED)
    assert [r.form for r in found.rewrites] == [None]


def report(found: Plan, verdict: Verdict) -> list[tuple[str, str, dict[str, object]]]:
    profile = Profile(
        environment=Environment(python="3", torch="2"),
        hardware=Hardware(name="example device", kind="cuda"),
        steps=(Step(index=0, duration_us=10_000.0),),
        step_us=(10_000.0,),
    )
    results = Results(
        run="run",
        script="train.py",
        profile=profile,
        declines=(),
        plan=found,
        patch=Patch(base={}, rewrites=(), diff="", sources={}),
        diffs={},
        verdict=verdict,
        safety={},
        seconds={},
    )
    shown = report_of(results).findings
    return [(f.status, f.title.rsplit(": ", 1)[-1], {e.what: e.value for e in f.evidence}) for f in shown]


def test_the_report_shows_the_form_that_is_kept(tmp_path: Path) -> None:
    found, _ = planned(tmp_path)
    first, kernel, compiled = found.rewrites
    numerics = Numerics(ok=True, reference="float64", compared=1)
    verdict = Verdict(
        outcome=Outcome.IMPROVED,
        reasons=(),
        kept=(kernel.id,),
        rejected={first.id: f"{kernel.id} is faster in its place, 1.100x", compiled.id: "slower"},
        saved_us={kernel.id: 300.0},
        numerics=numerics,
    )
    ((status, title, evidence),) = report(found, verdict)
    assert (status, title) == ("applied", "call Liger-Kernel's RMSNorm")
    assert evidence["instead: use F.rms_norm"] == f"{kernel.id} is faster in its place, 1.100x"
    assert evidence["instead: compile `forward`"] == "slower"


def test_the_report_shows_the_first_form_where_none_is_kept(tmp_path: Path) -> None:
    found, _ = planned(tmp_path)
    first, kernel, compiled = found.rewrites
    rejected = {first.id: "slower", compiled.id: "as fast"}
    wrong = replace(found, rewrites=(first, compiled), rejected=((kernel, "another function"),))
    verdict = Verdict(outcome=Outcome.NEUTRAL, reasons=("nothing is faster",), rejected=rejected)
    ((status, title, evidence),) = report(wrong, verdict)
    assert (status, title) == ("rejected", "use F.rms_norm")
    assert evidence["instead: compile `forward`"] == "as fast"
    assert evidence["instead: call Liger-Kernel's RMSNorm"] == "another function"
