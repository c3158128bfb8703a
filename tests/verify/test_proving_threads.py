"""How many threads a process takes that proves regions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from advisor.verify import proving  # noqa: E402


def job(*shapes: list[int] | None) -> dict[str, Any]:
    first, *others = shapes
    return {"inputs": {"x": {"shape": first}}, "nodes": [{"shape": shape} for shape in others]}


def test_small_tensors_are_proved_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(proving, "prove", lambda job: {"ok": True})
    jobs = [job([8, 16], [8, 8], []), job([8, 16], [2048, 2048]), job([4], None)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    proving.main(tmp_path / "jobs.json", tmp_path / "results.json")
    assert taken == [1, threads, 1]
