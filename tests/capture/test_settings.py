"""What scripts do that a capture must survive: settings made in any way, memory of graphs, nested tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_loops import briefly, record

from advisor import clock
from advisor.ingest.probe import read_probe

torch = pytest.importorskip("torch")
SCRIPT = """
import torch

SETTINGS
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("settings", "precision", "convolutions"),
    [
        ('torch.set_float32_matmul_precision("high")', "high", True),
        ('torch.backends.cuda.matmul.fp32_precision = "tf32"', "high", True),
        ('torch.backends.cuda.matmul.fp32_precision = "ieee"', "highest", True),
        (
            'torch.backends.cudnn.conv.fp32_precision = "ieee"; torch.backends.cudnn.rnn.fp32_precision = "tf32"',
            "highest",
            False,
        ),
    ],
)
def test_precision_of_products(tmp_path: Path, settings: str, precision: str, convolutions: bool) -> None:
    if "fp32_precision" in settings and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this version of torch has no such setting")
    facts = record(SCRIPT.replace("SETTINGS", settings), tmp_path).ctx.profile.facts
    assert (facts["matmul_precision"], facts["cudnn_tf32"]) == (precision, convolutions)


def test_memory_of_cuda_graphs_is_in_use() -> None:
    """Segments as `torch.cuda.memory_snapshot` gives them; nothing here has a GPU."""
    segments = [
        {"total_size": 2048, "allocated_size": 512, "segment_pool_id": (0, 0)},
        {"total_size": 4096, "allocated_size": 1024, "segment_pool_id": (0, 3)},
        {"total_size": 1024, "allocated_size": 0},
    ]
    assert clock.graph_bytes(segments) == 3072


def test_a_batch_of_nested_tensors_counts_its_samples(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(100, 8), nn.Linear(8, 4)

    def forward(self, ids):
        return self.out(self.table(ids)).values()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    ids = torch.nested.nested_tensor([torch.randint(0, 100, (k,)) for k in (12, 30, 9)], layout=torch.jagged)
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    assert read_probe(briefly(tmp_path) / "probe.json", tmp_path).tokens_per_step == 3
