"""A script that compiles by itself: when the call is taken out, when that is told, and when nothing is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verdicts import improved

from advisor import codemod, registry, testing
from advisor.model import Decline, Finding, Recompiled, Rewrite, Span
from advisor.patterns import uncompiled
from advisor.source import Source

RULE = registry.load()[0]["compile-not-paying"].rule
EXAMPLE, SHORT = RULE.examples[0], RULE.examples[3]


def without(text: str) -> str:
    source = Source("train.py", f"import torch\n{text}")
    line = next(n for n, one in enumerate(source.lines, start=1) if "compile" in one)
    return codemod.apply(source, uncompiled.without(source, Span(path="train.py", line=line), [source]))[13:]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model = Net()\nmodel = torch.compile(model)\n", "model = Net()\n"),
        ("model = torch.compile(Net(), mode='default')\n", "model = Net()\n"),
        ("fast = torch.compile(model)\n", "fast = model\n"),
        ("model = DDP(torch.compile(model))\n", "model = DDP(model)\n"),
        ("self.net = torch.compile(self.net)\nrun()\n", "run()\n"),
        ("model.compile(dynamic=True)\nrun()\n", "run()\n"),
        ("for b in model.blocks:\n    b.compile()\nrun()\n", "run()\n"),
        ("for b in model.blocks:\n    b.compile()\n    count += 1\n", "for b in model.blocks:\n    count += 1\n"),
        ("@torch.compile\ndef f(x):\n    return x\n", "def f(x):\n    return x\n"),
        ("@torch.compile(backend='eager')\n@other\ndef f(x):\n    return x\n", "@other\ndef f(x):\n    return x\n"),
        (
            "def f(x):\n    return x\nf = torch.compile(f)\nm.state_dict()\n",
            "def f(x):\n    return x\nm.state_dict()\n",
        ),
        ("if __name__ == '__main__':\n    m = torch.compile(m)\n", "if __name__ == '__main__':\n    pass\n"),
    ],
)
def test_the_call_taken_out(before: str, after: str) -> None:
    assert without(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "if args.compile:\n    model = torch.compile(model)\n",
        "model = torch.compile(model) if args.compile else model\n",
        "model = torch.compile(model)\ntorch.save(model, 'm.pt')\n",
        "model = torch.compile(model)\ntorch.save(model.state_dict(), 'm.pt')\n",
        "model = torch.compile(model)\nraw = model._orig_mod\n",
        "model = torch.compile(model)\ndecay = [p for n, p in model.named_parameters() if 'bias' not in n]\n",
        "model = torch.compile(model=net)\n",
        "done = model.compile() or True\n",
    ],
)
def test_calls_that_stay(text: str) -> None:
    with pytest.raises(codemod.CannotEdit):
        without(text)


def said(folder: Path, text: str = EXAMPLE.before, **parts: Any) -> Finding | Decline | Rewrite:
    ctx, source = testing.context_of(RULE, text, replace(EXAMPLE.profile, **parts), folder)
    (found,) = RULE.match(ctx)
    return RULE.rewrite(found, source) if isinstance(found, Finding) else found


def compiled(**parts: Any) -> Recompiled:
    place = Span(path="net.py", line=3, function="forward")
    given = {"place": place, "resumes": False, "limit": True, "count": 8, "reasons": ("step == 3",), "host_us": 0.0}
    return Recompiled(**{**given, **parts})


def test_a_function_at_its_limit_for_another_reason_than_sizes(tmp_path: Path) -> None:
    inductor = EXAMPLE.before.replace(', backend="eager"', "")
    assert isinstance(said(tmp_path, inductor, called={}, recompiled=(compiled(),)), Rewrite)
    sized = compiled(reasons=("tensor 'x' size mismatch at index 0. expected 4, actual 5",))
    for other in (sized, compiled(resumes=True), compiled(limit=False, host_us=90.0)):
        answer = said(tmp_path, inductor, called={}, recompiled=(other,))
        assert isinstance(answer, Decline) and answer.reason.endswith("see recompile")


def test_a_gpu_that_is_busy_does_not_feel_the_guards(tmp_path: Path) -> None:
    answer = said(tmp_path, device="cuda", busy=0.995)
    assert isinstance(answer, Decline) and "0.5% of the step" in answer.reason
    assert isinstance(said(tmp_path, device="cuda", busy=0.8), Rewrite)


def test_breaks_that_the_script_asks_for_are_nobody_elses(tmp_path: Path) -> None:
    asked = {"model(x)": "Skip calling `torch.compiler.disable()`d function"}
    assert isinstance(said(tmp_path, breaks=asked), Rewrite)


def test_two_calls_and_a_run_that_is_long_enough(tmp_path: Path) -> None:
    twice = EXAMPLE.before.replace("optimizer =", "other = torch.compile(other)\noptimizer =")
    ctx, _ = testing.context_of(RULE, twice, EXAMPLE.profile, tmp_path)
    assert {type(one) for one in RULE.match(ctx)} == {Decline}
    ctx, _ = testing.context_of(RULE, SHORT.before.replace("200", "20_000"), SHORT.profile, tmp_path)
    assert {type(one) for one in RULE.match(ctx)} == {Decline}


SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(40)])
model = torch.compile(model, backend="{backend}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    loss = model(torch.randn(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_compiler_is_taken_out_and_the_steps_are_faster(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("{backend}", "aot_eager"), encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--time", "60", "--no-baselines", "--json"]
    command += ["--ignore", "optimizer-not-fused"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    (found,) = [f for f in report["findings"] if f["rule"] == "compile-not-paying"]
    assert found["line"] == 6
    improved(report)
    assert found["status"] == "applied"
