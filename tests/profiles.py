"""Profiles to analyze: the recorded CPU run, and steps on a made-up GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor.analyze import analyze
from advisor.correlate import correlate
from advisor.hardware import lookup, reference_peak
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import Trace, read_trace
from advisor.ingest.probe import read_probe
from advisor.model import Environment, Hardware, Profile

TINY = Path(__file__).parent / "data" / "tiny_gpt"
SHARED = Path(__file__).parents[2] / "shared" / "h200"
CPU = Hardware(name="CPU", kind="cpu", measured_flops={"float32": 1e11}, measured_bandwidth=2e10)
GPU = Hardware(
    name="A", kind="cuda", peak_flops={"bfloat16": 1e14, "tfloat32": 5e13}, hbm_bandwidth=1e12, measured_flops={}
)
PEAK = (1e12, "a round number")
Event = dict[str, Any]


def blank(hardware: Hardware = CPU, **fields: Any) -> Profile:
    """A profile that holds what a run recorded and nothing that follows from it."""
    return Profile(environment=Environment(python="3.11", torch=None), hardware=hardware, steps=(), **fields)


def tiny_profile(trace: Trace, annotated: Trace, **changes: Any) -> Profile:
    """The recorded CPU run, analyzed; `changes` replace what it recorded."""
    graphs, _ = read_graphs(TINY / "graph.json", TINY)
    facts = read_probe(TINY / "probe.json", TINY)
    links = correlate(trace, annotated, graphs)
    profile = blank(
        graphs=graphs,
        costs=links.costs,
        optimizers=facts.optimizers,
        step_us=facts.step_us,
        tokens_per_step=facts.tokens_per_step,
        facts=dict(facts.flags),
        linked_share=links.linked_share,
    )
    return analyze(
        replace(profile, **changes),
        trace,
        reference_peak=PEAK,
        operator_cost=links.operator_cost,
        executions=links.executions,
    )


def h200(name: str) -> tuple[Trace, Profile]:
    """A recorded H200 trace, its steps taken for the un-profiled ones."""
    path = SHARED / f"h200_{name}.json.gz"
    if not path.is_file():
        pytest.skip("the recorded H200 traces are not beside this checkout")
    trace = read_trace(path)
    hardware = lookup("NVIDIA H200", 132)
    assert hardware is not None
    steps = tuple(step.duration_us for step in trace.timeline.steps)
    return trace, analyze(blank(hardware, step_us=steps), trace, reference_peak=reference_peak(hardware))


def activity(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    """A complete event of a trace."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def gpu_step(products: int = 20) -> list[Event]:
    """One step that launches some products of 512 x 512 matrices in bfloat16."""
    dims = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["c10::BFloat16"] * 2}
    events = [activity("user_annotation", "ProfilerStep#1", 0, 1000)]
    for number in range(products):
        begin = 10.0 + number * 20
        events += [
            activity("cpu_op", "aten::mm", begin, 10, **dims),
            activity("cuda_runtime", "cudaLaunchKernel", begin + 1, 2, correlation=number),
            activity("kernel", "gemm", 100 + number * 50, 40, 7, correlation=number, stream=7),
        ]
    return events


def made(tmp_path: Path, events: list[Event]) -> Trace:
    """Write and read a trace of these events."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return read_trace(path)


def check_invariants(profile: Profile) -> None:
    """What holds for every analyzed profile."""
    for step in profile.steps:
        assert sum(step.phases_us.values()) == pytest.approx(step.duration_us, rel=1e-6)
        assert all(time >= 0 for time in step.phases_us.values())
    assert profile.utilisation.busy is None or 0 <= profile.utilisation.busy <= 1
    for region in profile.regions:
        assert region.floor_us is None or 0 <= region.floor_us <= region.measured_us
        assert region.recoverable_us is None or 0 <= region.recoverable_us <= region.measured_us
        assert (region.floor_us is None) == (region.bound is None)
    for cost in profile.costs:
        assert cost.floor_us is None or 0 <= cost.floor_us <= cost.total_us
