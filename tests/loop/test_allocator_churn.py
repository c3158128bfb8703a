"""Memory taken from the driver in the steady state: counted, timed, told once and by one rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from advisor import clock
from advisor.errors import SourceError
from advisor.ingest.kineto import read_trace
from advisor.ingest.probe import read_probe
from advisor.match import match
from advisor.model import (
    Decline,
    Environment,
    Finding,
    Hardware,
    LoopCall,
    Operators,
    Profile,
    Span,
    Utilisation,
)
from advisor.registry import load
from advisor.rule import Context
from advisor.source import Source

RULE = load()[0]["allocator-churn"].rule
SCRIPT = """\
import os
import torch

for step in range(100):
    loss = model(batch()).sum()
    loss.backward()
    optimizer.step()
    torch.cuda.empty_cache()
"""
CHURN = {"cudaMalloc": (4.0, 600.0), "cudaFree": (2.0, 900.0)}
OPERATORS = Operators(
    name=("aten::mm",), start_us=(0.0,), duration_us=(1.0,), thread=(1,), sequence=(-1,), forward_thread=(0,),
    parent=(-1,), step=(0,), shapes=((),), dtypes=((),),
)  # fmt: skip


def answers(
    text: str = SCRIPT, kind: str = "cuda", flushes: float = 0.0, busy: float = 0.8, **facts: Any
) -> list[Finding | Decline]:
    call = LoopCall(
        name="torch.cuda.empty_cache",
        frames=(Span(path="train.py", line=8),),
        calls=4,
        per_step=flushes,
        host_us=900.0,
    )
    profile = Profile(
        environment=Environment(python="3", torch="2"),
        hardware=Hardware(name="a device", kind=kind),
        steps=(),
        step_us=(10_000.0,),
        operators=OPERATORS,
        calls=(call,),
        utilisation=Utilisation(busy=busy),
        facts=facts,
    )

    def read(path: str) -> Source:
        if path != "train.py":
            raise SourceError(f"no such file: {path}")
        return Source(path, text)

    result = match(Context(profile, read, script="train.py"), [RULE])
    assert not result.errors, result.errors[0].detail
    return [*result.findings, *result.declines]


def test_calls_of_the_driver_are_told_where_torch_is_imported() -> None:
    (finding,) = answers(memory_calls=CHURN, alloc_retries=3)
    assert isinstance(finding, Finding)
    assert finding.span.line == 2
    assert finding.estimate.high_us == pytest.approx(1_500.0)
    said = {item.what: item.value for item in finding.evidence}
    assert said["calls of cudaMalloc per step"] == 4.0
    assert said["times all cached memory was given back"] == 3
    told = RULE.rewrite(finding, Source("train.py", SCRIPT))
    assert isinstance(told, Decline)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in told.reason


def test_what_the_device_does_not_feel_is_no_finding() -> None:
    (answer,) = answers(memory_calls=CHURN, busy=0.995)
    assert isinstance(answer, Decline)
    assert answer.reason.endswith("take 15.0% of the step, and the device is idle for only 50 us")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"memory_calls": {}},
        {"memory_calls": CHURN, "kind": "cpu"},
        {"memory_calls": CHURN, "flushes": 1.0},  # debug-left-on's
        {"alloc_retries": 0},
    ],
)
def test_silent(given: dict[str, Any]) -> None:
    assert answers(**given) == []


@pytest.mark.parametrize(
    "text",
    [
        SCRIPT.replace("import os", "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'"),
        SCRIPT.replace("import os", "conf = 'backend:cudaMallocAsync'"),
    ],
)
def test_a_setting_in_the_source_is_seen(text: str) -> None:
    (answer,) = answers(text, memory_calls=CHURN)
    assert isinstance(answer, Decline)
    assert answer.reason.startswith("segments are told to grow already")


def test_retries_outside_of_the_profiled_steps_are_no_finding() -> None:
    (answer,) = answers(alloc_retries=2)
    assert isinstance(answer, Decline)
    assert answer.reason.endswith("what it costs is not known")


def test_a_trace_gives_the_calls_of_its_steps(tmp_path: Path) -> None:
    def event(name: str, cat: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}

    events = [
        event("ProfilerStep#3", "user_annotation", 100, 100),
        event("ProfilerStep#4", "user_annotation", 200, 100),
        event("aten::mm", "cpu_op", 110, 20),
        event("cudaMalloc", "cuda_runtime", 50, 30, correlation=1),  # before the steps
        event("cudaMalloc", "cuda_runtime", 112, 10, correlation=2),
        event("cudaFree", "cuda_runtime", 215, 40, correlation=3),
        event("cudaFreeHost", "cuda_runtime", 260, 20, correlation=4),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path).memory_calls == {"cudaFree": (0.5, 20.0), "cudaMalloc": (0.5, 5.0)}


def test_the_probe_hands_on_the_counts_of_the_timed_steps(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(
        json.dumps(
            {
                "step_us": [1.0],
                "device": {"kind": "cpu"},
                "allocator": {"alloc_retries": 2, "device_allocs": 7},
                "flags": {"allocator_settings": "expandable_segments:True"},
            }
        )
    )
    flags = read_probe(path, tmp_path).flags
    assert (flags["alloc_retries"], flags["device_allocs"]) == (2, 7)
    assert flags["allocator_settings"] == "expandable_segments:True"


def test_counts_of_the_allocator_need_a_device_and_no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.allocator() == {}
    monkeypatch.setattr(clock, "on_cuda", lambda: True)
    monkeypatch.setattr(clock.torch.cuda, "synchronize", lambda: pytest.fail("waits"))
    monkeypatch.setattr(clock.torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 2, "num_ooms": 0})
    assert clock.allocator() == {"alloc_retries": 2}
