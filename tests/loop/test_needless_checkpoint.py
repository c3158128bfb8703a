"""Activation checkpointing with memory to spare: what is edited, what is told, and what stays because it is not the
same without."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_loops import record
from verdicts import improved

from advisor import codemod, registry, testing
from advisor.model import Decline, Finding, Operators, Rewrite
from advisor.patterns import checkpoints
from advisor.patterns.recomputed import recomputation
from advisor.source import Source

RULE = registry.load()[0]["needless-checkpoint"].rule
EXAMPLE = RULE.examples[0]
HEAD = "from torch.utils.checkpoint import checkpoint\n"


def plain(call: str) -> str:
    source = Source("net.py", f"{HEAD}y = {call}\n")
    found = source.tree.body[1].value  # type: ignore[attr-defined]
    return codemod.apply(source, [checkpoints.plain_call(source, found)]).removeprefix(f"{HEAD}y = ").rstrip()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("checkpoint(block, x, use_reentrant=False)", "block(x)"),
        ("checkpoint(self.blocks[i], x, mask, use_reentrant=flag)", "self.blocks[i](x, mask)"),
        ("checkpoint(block, x, mask=m, use_reentrant=False, preserve_rng_state=True)", "block(x, mask=m)"),
        ("checkpoint(lambda a: block(a, m), x, use_reentrant=False)", "(lambda a: block(a, m))(x)"),
        ("checkpoint(make(i), *inputs, use_reentrant=False)", "make(i)(*inputs)"),
        ("checkpoint(\n    block,\n    x,\n    use_reentrant=False,\n)", "block(x)"),
    ],
)
def test_the_plain_call(call: str, text: str) -> None:
    assert plain(call) == text


@pytest.mark.parametrize(
    "call",
    [
        "checkpoint(block, x, use_reentrant=False, context_fn=policy)",
        "checkpoint(block, x, use_reentrant=False, determinism_check='none')",
        "checkpoint(block, x, use_reentrant=False, early_stop=False)",
        "checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)",
        "checkpoint(block, x, **options)",
        "checkpoint(*everything)",
        "checkpoint(function=block, use_reentrant=False)",
        "checkpoint(block,  # the large one\n    x, use_reentrant=False)",
    ],
)
def test_calls_that_stay(call: str) -> None:
    with pytest.raises(codemod.CannotEdit):
        plain(call)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if self.save and self.training:\n    return checkpoint(f, x)", 3),
        ("if not self.save:\n    return f(x)\nreturn checkpoint(f, x)", 3),
        ("return checkpoint(f, x) if self.save else f(x)", 3),
        ("if save and self.training:\n    return checkpoint(f, x)", 3),
        ("if i % 2 == 0:\n    return checkpoint(f, x)", 3),
        ("return self.save and checkpoint(f, x)", 3),
        ("if self.training:\n    return checkpoint(f, x)", None),
        ("if self.training and torch.is_grad_enabled():\n    return checkpoint(f, x)", None),
        ("return checkpoint(f, x)", None),
    ],
)
def test_the_option(body: str, line: int | None) -> None:
    lines = "".join(f"    {one}\n" for one in body.splitlines())
    source = Source("net.py", f"{HEAD}def forward(self, x, save, i):\n{lines}")
    call = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "checkpoint")
    assert checkpoints.asked(source, call) == line


@pytest.mark.parametrize(
    "line",
    [
        "self.calls += 1",
        "self.seen.append(x)",
        "self.mean.mul_(0.9).add_(x.mean())",
        "self.cache[0] = x",
        "self.count.add_(1)",
        "self.helper(x)",
    ],
)
def test_what_a_second_forward_pass_changes_again(line: str) -> None:
    text = f"class Block(Module):\n    def forward(self, x):\n        {line}\n        return x\n"
    text += "    def helper(self, x):\n        self.last = x\n"
    assert checkpoints.repeats([Source("net.py", text)], []) is not None
    text = text.replace(line, "x = self.act(x)").replace("self.last", "last")
    assert checkpoints.repeats([Source("net.py", text)], []) is None


BLOCK = """\
class Block(Module):
    def forward(self, x, cache):
        {line}
        return self.layer(x)
"""
PASSED = """\
class Model(Module):
    def body(self, x):
        self.calls += 1
        return self.block(x)

    def forward(self, x):
        self.seen += 1
        def run(x):
            self.calls += 1
            return self.block(x)
        return checkpoint({function}, x, use_reentrant=False)
"""


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("seen.append(x)", "keeps a value"),
        ("stats['calls'] += 1", "keeps a value"),
        ("cache.append(x)", "keeps a value"),
        ("cache.last = x", "keeps a value"),
        ("mean = self.mean; mean.mul_(0.9)", "keeps a value"),
        ("x = x if random.random() < 0.1 else -x", "draws random numbers"),
        ("x = x + np.random.rand()", "draws random numbers"),
        ("x = x + torch.rand(3, generator=self.noise)", "draws random numbers"),
        ("self.layer = spectral_norm(self.inner)(x)", "keeps a value"),
        ("x = spectral_norm(x)", "spectral_norm"),
    ],
)
def test_what_outlives_a_forward_pass(line: str, why: str) -> None:
    imports = "import random\nimport numpy as np\nimport torch\nfrom torch.nn.utils import spectral_norm\n"
    said = checkpoints.repeats([Source("net.py", imports + BLOCK.replace("{line}", line))], [])
    assert said is not None and why in said


@pytest.mark.parametrize(
    "line", ["outs = []; outs.append(x)", "made = {}; made['x'] = x", "x[0] = 1", "x = F.relu_(x)"]
)
def test_what_ends_with_a_forward_pass(line: str) -> None:
    text = "import torch.nn.functional as F\n" + BLOCK.replace("{line}", line)
    assert checkpoints.repeats([Source("net.py", text)], []) is None


@pytest.mark.parametrize("function", ["run", "self.body", "lambda x: self.calls.append(x)", "self.block"])
def test_what_the_function_changes_that_is_passed(function: str) -> None:
    source = Source("net.py", HEAD + PASSED.replace("{function}", function))
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "checkpoint"]
    said = checkpoints.repeats([source], [source.span(calls[0])])
    assert (said is None) == (function == "self.block")


def answer(text: str, folder: Path, **parts: object) -> Finding | Decline | Rewrite:
    ctx, source = testing.context_of(RULE, text, replace(EXAMPLE.profile, **parts), folder)
    (found,) = RULE.match(ctx)
    return RULE.rewrite(found, source) if isinstance(found, Finding) else found


def test_activations_that_do_not_fit(tmp_path: Path) -> None:
    said = answer(EXAMPLE.before, tmp_path, memory=(50 << 20, 60 << 21))
    assert isinstance(said, Rewrite)
    said = answer(EXAMPLE.before, tmp_path, memory=(2 << 20, 10 << 20))
    assert isinstance(said, Decline) and "0.0 GiB would be kept" in said.reason
    said = answer(EXAMPLE.before, tmp_path, memory=None)
    assert isinstance(said, Decline) and "not known" in said.reason


@pytest.mark.parametrize("fact", ["selective", "draws_anew"])
def test_what_the_run_has_shown_of_the_calls(fact: str, tmp_path: Path) -> None:
    called = {name: {**facts, fact: True} for name, facts in EXAMPLE.profile.called.items()}
    assert isinstance(answer(EXAMPLE.before, tmp_path, called=called), Decline)


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("model.set_grad_checkpointing()", ""),
        ("model.set_grad_checkpointing(enable=True)", ""),
        ("model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})", ""),
        (
            "args = TrainingArguments(gradient_checkpointing=True)",
            "args = TrainingArguments(gradient_checkpointing=False)",
        ),
        ("args = TrainingArguments(gradient_checkpointing=options.save)", None),
        ("if options.save:\n    model.gradient_checkpointing_enable()", None),
        ("model.set_grad_checkpointing(options.save)", None),
        ("model.set_grad_checkpointing(False)", None),
    ],
)
def test_a_library_that_is_asked(line: str, after: str | None, tmp_path: Path) -> None:
    example = RULE.examples[2]
    said_before = "model.gradient_checkpointing_enable()\n"
    text = example.before.replace(said_before, f"{line}\n")
    ctx, source = testing.context_of(RULE, text, example.profile, tmp_path)
    (found,) = RULE.match(ctx)
    said = RULE.rewrite(found, source) if isinstance(found, Finding) else found
    if after is None:
        assert isinstance(said, Decline)
        return
    assert isinstance(said, Rewrite)
    assert codemod.apply(source, said.edits) == example.before.replace(said_before, after and f"{after}\n")


def test_the_time_and_the_bytes_of_what_is_computed_again(tmp_path: Path) -> None:
    ctx, _ = testing.context_of(RULE, EXAMPLE.before, EXAMPLE.profile, tmp_path)
    found = recomputation(ctx.profile)
    assert found is not None
    assert (found.time_us, found.kept_bytes) == (1_500.0, 2 * 4 << 20)
    twice = replace(ctx.profile, operators=replace(ctx.profile.operators, step=(0, 0, 1)))
    found = recomputation(twice)
    assert found is not None and found.time_us == 750.0
    assert recomputation(replace(ctx.profile, operators=Operators())) is None


SCRIPT = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self, width=128, depth=6):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    loss = model(torch.randn(128, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("use_reentrant=False", {"reentrant": False, "cut_off": False}),
        ("use_reentrant=True", {"reentrant": True, "cut_off": False}),
        ("use_reentrant=True, preserve_rng_state=False", {"reentrant": True, "draws_anew": True}),
    ],
)
def test_what_a_run_notes_of_checkpoints(kind: str, facts: dict[str, bool], tmp_path: Path) -> None:
    ctx = record(SCRIPT.replace("use_reentrant=False", kind), tmp_path).ctx
    (call,) = ctx.calls("torch.utils.checkpoint.checkpoint")
    assert call.per_step == 6.0 and [frame.line for frame in call.frames] == [33, 26]
    assert not call.facts["selective"] and facts.items() <= call.facts.items()


@pytest.mark.slow
def test_inputs_without_gradients_in_a_reentrant_checkpoint(tmp_path: Path) -> None:
    text = SCRIPT.replace("use_reentrant=False", "use_reentrant=True").replace(
        "x = self.embed(x)", "x = x.repeat(1, 16)"
    )
    ctx = record(text.replace("return x\n\n\nmodel", "return self.embed(x[:, :8])\n\n\nmodel"), tmp_path).ctx
    (call,) = ctx.calls("torch.utils.checkpoint.checkpoint")
    assert call.facts["cut_off"]


@pytest.mark.slow
def test_the_activations_are_kept_and_the_steps_are_faster(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--time", "60", "--no-baselines", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    improved(report)
    (found,) = [f for f in report["findings"] if f["rule"] == "needless-checkpoint"]
    assert (found["line"], found["status"]) == (26, "applied")
    assert report["speedup"] > 1.1
