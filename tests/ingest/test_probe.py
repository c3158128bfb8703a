"""What the hooks saw, typed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from advisor.errors import ArtifactError
from advisor.ingest.probe import count_tokens, read_probe

TINY = Path(__file__).parents[1] / "data" / "tiny_gpt"


def write(path: Path, **fields: Any) -> Path:
    document = {"step_us": [1.0], "device": {"kind": "cpu"}, **fields}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_real_probe() -> None:
    facts = read_probe(TINY / "probe.json", TINY)
    lines = (TINY / "train.py").read_text(encoding="utf-8").splitlines()
    (loader,) = facts.loaders
    assert loader.arguments["batch_size"] == 4 and loader.given == ("batch_size", "shuffle")
    assert loader.span is not None
    assert lines[loader.span.line - 1][loader.span.column : loader.span.end_column].startswith("DataLoader(")
    (optimizer,) = facts.optimizers
    assert optimizer.kind == "torch.optim.adamw.AdamW" and optimizer.elements == 29184
    assert optimizer.span is not None and optimizer.span.path == "train.py"
    assert optimizer.step_us is None
    assert facts.tokens_per_step == 4 * 16
    assert facts.tokens_source == "tokens: elements of the integer input, one call per step"
    assert len(facts.step_us) == 5 and all(math.isfinite(loss) for loss in facts.losses)
    assert facts.device.kind == "cpu" and facts.device.measured_flops["float32"] > 0


def test_a_diverged_loss_is_no_reason_to_fail(tmp_path: Path) -> None:
    facts = read_probe(write(tmp_path / "probe.json", losses=[math.nan, math.inf, 1.0]), tmp_path)
    assert math.isnan(facts.losses[0]) and facts.losses[1:] == (math.inf, 1.0)


def test_byte_columns_become_character_columns(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('größe = DataLoader("ä", x)\n', encoding="utf-8")
    place = {"path": "train.py", "line": 1, "function": "main", "columns": [1, 1, 10, 29]}
    loader = {
        "span": place,
        "given": [],
        "arguments": {},
        "wait_us_per_step": None,
        "fetch_us": None,
        "batches": 0,
        "dataset": "D",
        "iterable": False,
    }
    span = read_probe(write(tmp_path / "probe.json", loaders=[loader]), tmp_path).loaders[0].span
    assert span is not None
    assert (span.column, span.end_column) == (8, 26)
    loader["span"] = {"path": "train.py", "line": 1, "function": "main", "columns": None}
    span = read_probe(write(tmp_path / "probe.json", loaders=[loader]), tmp_path).loaders[0].span
    assert span is not None and (span.line, span.column, span.end_column) == (1, 0, None)


@pytest.mark.parametrize(
    ("calls", "count", "source"),
    [
        ([("m.GPT", [((8, 256), "int64"), ((8, 256), "int64")])], 2048, "tokens: elements of the integer input, one"),
        ([("m.GPT", [((2, 16), "int64")])] * 4, 128, "tokens: elements of the integer input, 4 calls"),
        ([("m.Net", [((64, 3, 8, 8), "float32")])], 64, "samples: first dimension of the first input, one call"),
        ([("m.Net", [((4, 3, 8, 8), "float32")]), ("m.Head", [((4, 9), "float32")])], 4, "samples"),
        (
            [
                ("m.Net", [((4, 3, 8, 8), "float32")]),
                ("torch.nn.modules.loss.CrossEntropyLoss", [((4, 9, 8, 8), "float32"), ((4, 8, 8), "int64")]),
            ],
            4,
            "samples",
        ),
        ([("m.Net", [((64,), "int64")])], 64, "samples"),
        ([("m.Net", [((), "float32")])], None, None),
        ([], None, None),
    ],
)
def test_tokens(calls: list[Any], count: int | None, source: str | None) -> None:
    found, said = count_tokens(calls)
    assert found == count
    assert said is None if source is None else said is not None and said.startswith(source)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"step_us": "fast"}', b'{"step_us": [1.0]'])
def test_broken_files_say_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"probe\.json .*record the run again"):
        read_probe(path, tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="missing: record the run again"):
        read_probe(tmp_path / "probe.json", tmp_path)
