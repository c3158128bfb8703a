"""The annotated step: values that cannot be looked into, and graphs whose checkpoints write to buffers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import scripts
from recorded_loops import briefly

torch = pytest.importorskip("torch")

from advisor.capture.annotate import describe_value  # noqa: E402


def unlike() -> list[object]:
    rows = [torch.ones(9, dtype=torch.long), torch.ones(12, dtype=torch.long)]
    return [
        torch.eye(10).to_sparse(),
        torch.eye(10, dtype=torch.long).to_sparse(),
        torch.eye(10).to_sparse_csr(),
        torch.nested.nested_tensor(rows, layout=torch.strided),
        torch.nested.nested_tensor(rows, layout=torch.jagged),
        torch.ones(4, 9, dtype=torch.int32, device="meta"),
    ]


def test_values_that_are_no_plain_tensors_are_described_without_their_elements() -> None:
    for value in unlike():
        described = describe_value(value)
        assert described["facts"] == {}
        assert json.loads(json.dumps(described)) == described


def test_values_of_a_transform_are_described_without_their_elements() -> None:
    described = []

    def one(row: torch.Tensor) -> torch.Tensor:
        described.append(describe_value(row[:, None] > row))
        return row.sum()

    torch.vmap(one)(torch.ones(3, 9))
    assert [item["facts"] for item in described] == [{}]


def test_a_checkpoint_that_counts_batches_is_annotated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.CHECKPOINTED_BATCH_NORM, encoding="utf-8")
    out = briefly(tmp_path)
    assert "graph" not in json.loads((out / "probe.json").read_text(encoding="utf-8"))["missing"]
    (graph, *_) = json.loads((out / "graph.json").read_text(encoding="utf-8"))["graphs"]
    assert sum("tag_activation_checkpoint" in node["target"] for node in graph["nodes"]) == 2


STEPS_INSIDE = """
import torch
from torch import nn
class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)
    def forward(self, x):
        self.optimizer.zero_grad()
        loss = self.inner(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
trainer = Trainer()
for step in range(40):
    trainer(torch.ones(8, 16))
"""


def test_a_module_whose_forward_takes_the_step_is_timed(tmp_path: Path) -> None:
    """Dynamo traces through the optimizer's step for our annotation: the script itself compiles nothing."""
    (tmp_path / "train.py").write_text(STEPS_INSIDE, encoding="utf-8")
    check = [sys.executable, "-m", "advisor", "check", "train.py", "--json"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "optimizer-not-fused" in done.stdout and "torch.compile region" in done.stdout, done.stderr
