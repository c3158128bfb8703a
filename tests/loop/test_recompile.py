"""Frames that a script's own compilation compiles again: told with the reason, rewritten where only sizes change."""

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

from advisor import registry, testing
from advisor.model import Decline, Finding

pytest.importorskip("torch")
SCRIPT = """\
import torch
from torch import nn

torch._dynamo.config.automatic_dynamic_shapes = False


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, factor=1.0):
        return self.linear(x).relu() * factor


model = {made}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    model({given}).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def answers(path: Path, made: str, given: str) -> list[dict[str, Any]]:
    (path / "train.py").write_text(SCRIPT.replace("{made}", made).replace("{given}", given), encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "check", "train.py", "--worth", "0", "--json", "-q"]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    return [one for one in (*said["findings"], *said["declines"]) if one["rule"] in ("recompile", "graph-break")]


def test_a_backend_of_which_nothing_is_known_is_told(tmp_path: Path) -> None:
    rule = registry.load()[0]["recompile"].rule
    example = rule.examples[0]
    measured = replace(example.profile, called={"torch.compile": {"backend": "cudagraphs"}})
    ctx, source = testing.context_of(rule, example.before, measured, tmp_path)
    (found,) = rule.match(ctx)
    assert isinstance(found, Finding)
    edit = rule.rewrite(found, source)
    assert isinstance(edit, Decline) and "cudagraphs" in edit.reason


@pytest.mark.slow
def test_sizes_that_change(tmp_path: Path) -> None:
    (one,) = answers(tmp_path, 'torch.compile(Net(), backend="eager")', "torch.randn(4 + step, 8)")
    assert one["rule"] == "recompile" and one["status"] == "found" and one["line"] == 16
    assert '+model = torch.compile(Net(), backend="eager", dynamic=True)' in one["diff"]
    assert "sizes of tensors change" in one["title"]


@pytest.mark.slow
def test_a_number_that_changes_is_told(tmp_path: Path) -> None:
    given = "torch.randn(4, 8), str(step) * 0 or step"
    (one,) = answers(tmp_path, 'torch.compile(Net(), backend="eager", dynamic=False)', given)
    assert one["rule"] == "recompile" and one["status"] == "suggested"
    assert "a number that it is given changes" in one["title"] and "no size" in one["reason"]


@pytest.mark.slow
def test_nothing_is_said_where_nothing_is_compiled(tmp_path: Path) -> None:
    assert not answers(tmp_path, "Net()", "torch.randn(4 + step, 8)")


SIZES = """\
import torch
from torch import nn

torch._dynamo.config.automatic_dynamic_shapes = False
torch._dynamo.config.recompile_limit = 4096
torch._dynamo.config.accumulated_recompile_limit = 4096
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(1500, 256), nn.Linear(256, 1500)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens).relu())


model = torch.compile(Net(), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    tokens = torch.randint(0, 1500, (16, 64 + step // 2 % 1000))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_compiled_once_for_all_sizes_the_script_is_faster(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIZES, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--select", "recompile", "--no-baselines"]
    done = subprocess.run(
        [*command, "--time", "120", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    improved(report)
    (found,) = report["findings"]
    assert (found["rule"], found["line"], found["status"]) == ("recompile", 19, "applied")
    assert report["speedup"] > 1.1
    assert '+model = torch.compile(Net(), backend="eager", dynamic=True)' in found["diff"]
