"""Modules whose calls a rewrite drops: what another instance, another file or a hook may make of them is declined."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.patch import build
from advisor.rule import Context, step
from advisor.source import Source, with_imported

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn

SETTING = False


class Named(nn.Dropout):
    pass


class SoftDropout(nn.Module):
    pass


class Model(nn.Module):
    def __init__(self{arguments}):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
{made}

    def forward(self, q, k, v):
        {result}
{more}

def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
"""
DROP = "self.drop = nn.Dropout(0.1)"
RESULT = "return self.drop(self.softmax(q @ k.mT)) @ v"
PLAIN = "self.drop.p if self.drop.training else 0.0"
OR_IDENTITY = 'getattr(self.drop, "p", 0.0) if self.drop.training else 0.0'


def text_of(made: str = DROP, more: str = "", arguments: str = "", result: str = RESULT) -> str:
    text = MODEL.replace("{made}", textwrap.indent(made, " " * 8)).replace("{result}", result)
    return text.replace("{arguments}", arguments).replace("{more}", f"\n{more}\n" if more else "")


def context_of(text: str, folder: Path, rule: str = "naive-attention") -> tuple[Context, Source]:
    return testing.context_of(RULES[rule], text, step(10_000, nodes=0.5), folder)


def rewritten(ctx: Context, source: Source, rule: str = "naive-attention") -> str:
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Finding), found
    rewrite = RULES[rule].rewrite(found, source)
    assert isinstance(rewrite, Rewrite), rewrite
    return build([rewrite], lambda _: source).sources["example.py"]


def declined(ctx: Context, rule: str = "naive-attention") -> str:
    (found,) = RULES[rule].match(ctx)
    assert isinstance(found, Decline), found
    return found.reason


def watched(*lines: str, given: str = "model") -> str:
    return f"\ndef watch({given}):\n" + textwrap.indent("\n".join(lines), " " * 4)


def for_each(kinds: str, line: str) -> str:
    """A function that does something with every module of some classes."""
    return watched("for name, m in model.named_modules():", f"    if isinstance(m, {kinds}):", f"        {line}")


# ----------------------------------------------------------------------------------------------------- one and the same

SAME = {
    "a dropout": (DROP, "", "", PLAIN),
    "a setting of its own": ("self.drop = nn.Dropout(p)", "", ", p=0.1", PLAIN),
    "or an identity": ("self.drop = nn.Dropout(p) if p else nn.Identity()", "", ", p=0.1", OR_IDENTITY),
    "an identity in the other branch": (
        "if p:\n    self.drop = nn.Dropout(p)\nelse:\n    self.drop = nn.Identity()",
        "",
        ", p=0.1",
        OR_IDENTITY,
    ),
    "or nothing": ("self.drop = nn.Dropout(p) if p else None", "", ", p=0.1", PLAIN),
    "by a local name": ("drop = nn.Dropout(0.1)\nself.drop = drop", "", "", PLAIN),
    "added by name": ('self.add_module("drop", nn.Dropout(0.1))', "", "", PLAIN),
    "declared and made": ("self.drop: nn.Module = nn.Dropout(0.1)", "", "", PLAIN),
    "a number of another class": (
        DROP,
        "\nclass Other:\n    def __init__(self, drop):\n        self.drop = drop",
        "",
        PLAIN,
    ),
    "a setting": (DROP, watched("config.drop = rate", given="config, rate"), "", PLAIN),
    "replaced by its like": (DROP, watched("model.attn.drop = nn.Dropout(0.2)"), "", PLAIN),
    "another class is exchanged": (
        DROP,
        for_each("nn.Linear", "setattr(model, name, m)"),
        "",
        PLAIN,
    ),
    "a hook on another module": (DROP, watched("model.head.register_forward_hook(print)"), "", PLAIN),
    "a hook on the model": (
        DROP,
        watched("model = Model()", "model = model.to(0)", "model.register_full_backward_hook(print)", given=""),
        "",
        PLAIN,
    ),
    "hooks on another class": (
        DROP,
        for_each("(nn.Linear, nn.Conv2d)", "m.register_forward_hook(print)"),
        "",
        PLAIN,
    ),
    "a hook on itself": (f"{DROP}\nself.register_forward_pre_hook(lambda m, i: None)", "", "", PLAIN),
    "a hook on a tensor": (DROP, watched("model.head.weight.register_hook(print)"), "", PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_module_that_is_the_same_everywhere_goes(name: str, tmp_path: Path) -> None:
    made, more, arguments, dropout = SAME[name]
    after = rewritten(*context_of(text_of(made, more, arguments), tmp_path))
    assert f"dropout_p={dropout}" in after


# ------------------------------------------------------------------------------------------------------- another module

OTHER = {
    "injected": ("self.drop = drop", "", ", drop=nn.Dropout(0.1)", r"`drop` \(example.py:20\)"),
    "injected or made": ("self.drop = drop or nn.Dropout(0.1)", "", ", drop=None", "drop or nn.Dropout"),
    "made by a class that is given": ("self.drop = kind(0.1)", "", ", kind=nn.Dropout", r"kind\(0.1\)"),
    "another dropout of torch": ("self.drop = nn.AlphaDropout(0.1) if SETTING else nn.Dropout(0.1)", "", "", "Alpha"),
    "a class named like one": ("self.drop = SoftDropout() if SETTING else nn.Dropout(0.1)", "", "", "SoftDropout"),
    "a subclass": ("self.drop = Named(0.1) if SETTING else nn.Dropout(0.1)", "", "", "Named"),
    "in a subclass of the user's": (
        DROP,
        "\nclass Loud(Model):\n    def __init__(self, drop):\n        super().__init__()\n        self.drop = drop",
        "",
        r"`drop` \(example.py:",
    ),
    "replaced afterwards": (DROP, watched("model.attn.drop = nn.AlphaDropout(0.2)"), "", "AlphaDropout"),
    "replaced by what is given": (DROP, watched("model.drop = other", given="model, other"), "", "`other`"),
    "set by name": (DROP, watched('setattr(model, "drop", SoftDropout())'), "", "SoftDropout"),
    "exchanged by class": (
        DROP,
        for_each("nn.Dropout", "setattr(model, name, SoftDropout())"),
        "",
        r"replaced by another module \(example.py:",
    ),
    "another forward": (DROP, watched("model.drop.forward = print"), "", "replaced by another module"),
    "a softmax along another axis": (
        f"{DROP}\nself.softmax = nn.Softmax(dim=dim)",
        "",
        ", dim=-1",
        r"`self.softmax` may be another .*`nn.Softmax\(dim=dim\)`",
    ),
    "a softmax of two kinds": (
        f"{DROP}\nif SETTING:\n    self.softmax = nn.Softmax(dim=1)",
        "",
        "",
        r"`self.softmax` may be another .*Softmax\(dim=1\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_a_module_that_may_be_another_stays(name: str, tmp_path: Path) -> None:
    made, more, arguments, reason = OTHER[name]
    ctx, _ = context_of(text_of(made, more, arguments), tmp_path)
    assert re.search(reason, declined(ctx)), declined(ctx)


def test_a_module_of_the_function_that_drops_is_not_named_elsewhere(tmp_path: Path) -> None:
    more = "\ndef probabilities(net, s):\n    return net.drop(net.softmax(s))"
    ctx, _ = context_of(text_of(more=more, result="return probabilities(self, q @ k.mT) @ v"), tmp_path)
    assert "`net.drop` is a name of the function that drops" in declined(ctx)


def test_a_method_that_drops_reads_the_same_module(tmp_path: Path) -> None:
    more = "    def probabilities(self, s):\n        return self.drop(self.softmax(s))"
    text = text_of(more=more, result="return self.probabilities(q @ k.mT) @ v")
    assert f"dropout_p={PLAIN}" in rewritten(*context_of(text, tmp_path))


def test_a_module_made_in_the_expression_is_the_same_with_literal_arguments(tmp_path: Path) -> None:
    text = text_of(result="return nn.Softmax(dim=-1)(q @ k.mT) @ v")
    assert "scaled_dot_product_attention(" in rewritten(*context_of(text, tmp_path))
    chosen = "d = 1 if SETTING else -1\n        return nn.Softmax(dim=d)(q @ k.mT) @ v"
    ctx, _ = context_of(text_of(result=chosen), tmp_path)
    assert "may be another module" in declined(ctx)


# ---------------------------------------------------------------------------------------------------------------- hooks

HOOKED = {
    "every module": watched("for m in model.modules():", "    m.register_forward_hook(print)"),
    "by its name": watched("model.attn.drop.register_forward_pre_hook(print)"),
    "by its path": watched('model.get_submodule("attn.softmax").register_full_backward_hook(print)'),
    "by its class": for_each("nn.Softmax", "m.register_full_backward_pre_hook(print)"),
    "a module that is given": watched("model.register_forward_hook(print)"),
    "modules of every kind": watched("torch.nn.modules.module.register_module_forward_hook(print)", given=""),
    "by text": watched('getattr(model, "register_forward_hook")(print)'),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_on_a_module_that_would_no_longer_be_called(name: str, tmp_path: Path) -> None:
    text = text_of(more=HOOKED[name])
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "register_" in code)
    ctx, _ = context_of(text, tmp_path)
    assert re.search(rf"hook registered in example.py:{line} may be on `self.(softmax|drop)`", declined(ctx))


GATE = (
    "self.sigmoid = nn.Sigmoid()",
    "h = q @ self.w\n        h = h * self.sigmoid(h)\n        return h * k + v",
)


@pytest.mark.parametrize("hook", [False, True])
def test_the_activation_of_a_gate_is_a_module_too(hook: bool, tmp_path: Path) -> None:
    made = f"self.w = nn.Parameter(torch.eye(4))\n{GATE[0]}"
    text = text_of(made, HOOKED["every module"] if hook else "", result=GATE[1])
    ctx, source = context_of(text, tmp_path, "unfused-gated-mlp")
    if hook:
        assert "may be on `self.sigmoid`" in declined(ctx, "unfused-gated-mlp")
    else:
        assert "F.silu(h)" in rewritten(ctx, source, "unfused-gated-mlp")


# ---------------------------------------------------------------------------------------------------------- other files

SCRIPTS = {
    "a hook": ("for m in Model().modules():\n    m.register_forward_hook(print)\n", "hook registered in train.py:5"),
    "a replacement": ("model = Model()\nmodel.drop = torch.nn.AlphaDropout()\n", r"AlphaDropout\(\)` \(train.py:5\)"),
    "a file that it imports": ("import tools.watch\n", "hook registered in tools/watch.py:2"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_and_what_it_imports_count(name: str, tmp_path: Path) -> None:
    lines, reason = SCRIPTS[name]
    ctx, _ = context_of(text_of(), tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "watch.py").write_text(
        "def watch(m):\n    m.register_forward_hook(print)\n", encoding="utf-8"
    )
    (tmp_path / "train.py").write_text(f"import torch\nfrom example import Model\n\n{lines}", encoding="utf-8")
    ctx = replace(ctx, read=lambda path: Source.read(tmp_path, path), script="train.py")
    assert re.search(reason, declined(ctx)), declined(ctx)


RECORDER = "{imported}\n\ndef record(module):\n    module.drop.register_forward_hook(print)\n"


@pytest.mark.parametrize(("imported", "counts"), [("from example import Model", True), ("import torch", False)])
def test_a_file_beside_the_module_counts_where_it_imports_it(imported: str, counts: bool, tmp_path: Path) -> None:
    ctx, source = context_of(text_of(), tmp_path)
    (tmp_path / "recorder.py").write_text(RECORDER.replace("{imported}", imported), encoding="utf-8")
    (tmp_path / "train.py").write_text("from example import Model\n", encoding="utf-8")
    ctx = replace(
        ctx,
        read=lambda path: Source.read(tmp_path, path),
        script="train.py",
        files_in=lambda folder: tuple(sorted(path.name for path in (tmp_path / folder).glob("*.py"))),
    )
    if counts:
        assert "hook registered in recorder.py:4" in declined(ctx)
    else:
        assert "scaled_dot_product_attention" in rewritten(ctx, source)


def test_every_imported_file_of_the_project_is_read_once(tmp_path: Path) -> None:
    files = {
        "run/train.py": "import torch, os.path\nfrom model.layers import Block\nimport helper\n",
        "run/helper.py": "import train\nfrom data.rows import Rows\n",
        "run/data": "a file, not a folder",
        "model/__init__.py": "",
        "model/layers/__init__.py": "from .attention import Attention\nfrom . import norm\n",
        "model/layers/attention.py": "from ..shared import x\n",
        "model/layers/norm.py": "",
        "model/shared.py": "",
        "model/unused.py": "",
        "model/broken.py": "def (\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    found = with_imported(lambda path: Source.read(tmp_path, path), ["run/train.py"])
    assert [source.path for source in found] == sorted(set(files) - {"run/data", "model/unused.py", "model/broken.py"})


# ------------------------------------------------------------------------------------------------ nn.MultiheadAttention

MHA = """\
import torch
from torch import nn


class Mine(nn.Module):
    pass


class Model(nn.Module):
    def __init__(self, mine=False, d=1, fill=float("-inf"), causal=True, attn=None):
        super().__init__()
        self.attn = {made}
        self.layers = nn.ModuleList([])
        for _ in range(2):
            self.layers.append(nn.ModuleList([nn.MultiheadAttention(16, 2), nn.Linear(16, 16)]))
        self.d, self.fill, self.causal = d, fill, causal
        self.register_buffer("mask", torch.triu(torch.ones(16, 16, dtype=torch.bool), diagonal=1))
        self.register_buffer("made", nn.Transformer.generate_square_subsequent_mask(16))

    def forward(self, x):
        T = x.size(0)
        {body}


def watch(model):
    for m in model.modules():
        {hook}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [torch.randn(6, 2, 16, requires_grad=True)]
"""
MADE = "nn.MultiheadAttention(16, 2)"


def mha(folder: Path, body: str, made: str = MADE, hook: str = "pass") -> tuple[Context, Source]:
    text = MHA.replace("{body}", body).replace("{made}", made).replace("{hook}", hook)
    return context_of(text, folder, "mha-need-weights")


HINTED = "return self.attn(x, x, x, attn_mask={mask}, is_causal={hint})[0]"
TRIANGLES = (
    "torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)",
    "torch.full((T, T), float('-inf')).triu(1)",
    "self.mask[:T, :T]",
    "self.made[:T, :T]",
    "~torch.ones(T, T, dtype=torch.bool).tril()",
    "nn.Transformer.generate_square_subsequent_mask(T)",
)
NO_TRIANGLES = (
    "torch.triu(torch.ones(T, T, dtype=torch.bool), self.d)",
    "torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=self.d)",
    "torch.full((T, T), self.fill).triu(1)",
    "self.mask[T - 6 : T, :T]",
    "(self.mask if self.causal else ~self.mask)[:T, :T]",
)


@pytest.mark.parametrize("mask", TRIANGLES)
def test_a_causal_hint_with_a_mask_that_is_always_causal(mask: str, tmp_path: Path) -> None:
    ctx, source = mha(tmp_path, HINTED.format(mask=mask, hint=True))
    assert "need_weights=False" in rewritten(ctx, source, "mha-need-weights")


@pytest.mark.parametrize("mask", NO_TRIANGLES)
def test_a_causal_hint_with_a_mask_that_is_causal_in_this_run(mask: str, tmp_path: Path) -> None:
    ctx, _ = mha(tmp_path, HINTED.format(mask=mask, hint=True))
    assert "does not show one causal mask" in declined(ctx, "mha-need-weights")


@pytest.mark.parametrize(
    ("body", "made", "reason"),
    [
        (HINTED.format(mask="~self.mask[:T, :T].T", hint="self.causal and T == 9"), MADE, "is_causal is computed"),
        (
            HINTED.format(mask="self.mask[:T, :T]", hint=True),
            "nn.MultiheadAttention(16, 2, add_bias_kv=mine)",
            "another instance may have a bias key",
        ),
        ("return self.attn(x, x, x)[0]", f"Mine() if mine else {MADE}", r"`self.attn` may be another.*`Mine\(\)`"),
        ("return self.attn(x, x, x)[0]", f"attn or {MADE}", "may be another module in another instance"),
    ],
)
def test_a_call_that_may_mean_something_else_elsewhere(body: str, made: str, reason: str, tmp_path: Path) -> None:
    ctx, _ = mha(tmp_path, body, made)
    assert re.search(reason, declined(ctx, "mha-need-weights")), declined(ctx, "mha-need-weights")


def test_attention_modules_in_lists_of_lists_are_seen(tmp_path: Path) -> None:
    body = "for attn, feed in self.layers:\n            x = feed(x + attn(x, x, x)[0])\n        return x"
    ctx, source = mha(tmp_path, body)
    assert "need_weights=False" in rewritten(ctx, source, "mha-need-weights")


def test_a_hook_that_reads_no_results_does_not_keep_the_weights(tmp_path: Path) -> None:
    body = "return self.attn(x, x, x)[0]"
    ctx, source = mha(tmp_path, body, hook="m.register_forward_pre_hook(print)")
    assert "need_weights=False" in rewritten(ctx, source, "mha-need-weights")
    ctx, _ = mha(tmp_path, body, hook="m.register_forward_hook(print)")
    assert "may read the weights" in declined(ctx, "mha-need-weights")
