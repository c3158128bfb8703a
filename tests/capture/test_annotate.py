"""The annotated step: values that cannot be looked into, and graphs whose checkpoints write to buffers."""

from __future__ import annotations

import json
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
