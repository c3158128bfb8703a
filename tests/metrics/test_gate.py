"""Every defect of a trace is told with what it blocks and what to collect; a good trace passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recordings import (
    CORPUS,
    EMPTY,
    NOT_HERE,
    Event,
    call,
    corpus,
    event,
    h200,
    kernel,
    launch,
    op,
    readable,
    span,
    table_of,
)

from advisor.columns.joins import launching_calls
from advisor.columns.table import Table
from advisor.metrics.breakdown import phases
from advisor.metrics.gate import (
    CAUSES,
    CLAIMS,
    COUNTERS,
    DEVICE,
    FLOPS,
    IDLE,
    IN_TIME,
    ON_DEVICE,
    OPERATORS,
    PEAK,
    STEPS,
    Gate,
    check,
)
from advisor.metrics.steps import find_steps


def gate(table: Table, counters: tuple[float, float] | None = None) -> Gate:
    calls = launching_calls(table)
    steps = find_steps(table, calls)
    return check(table, calls, steps, phases(table, calls, steps.windows if steps.on_device else None), counters)


def recording(count: int = 40) -> list[Event]:
    """Two marked steps of a healthy loop."""
    events = [span("ProfilerStep#1", 0.0, 10.0 * count), span("ProfilerStep#2", 10.0 * count, 10.0 * count)]
    for number in range(2 * count):
        start = 10.0 * number
        events += [
            op("aten::mm", start, 6.0, **{"Input Dims": [[8, 8], [8, 8]]}),
            launch(number + 1, start + 1.0),
            kernel("gemm", start + 4.0, 5.0, number + 1),
        ]
    return events


def reasons(found: Gate) -> str:
    return "; ".join(gap.why for gap in found.gaps)


# --------------------------------------------------------------------------------------------------- recorded traces

JUDGED: dict[str, tuple[tuple[str, ...], str]] = {  # what each trace does not support, and a word of the reason
    "hta-128rank-sampled-rank0.json.gz": ((IDLE, CAUSES, PEAK), "activities are missing"),
    "hta-128rank-sampled-rank1.json.gz": ((IDLE, CAUSES, PEAK), "does not name the device"),
    "hta-a100-alexnet-bench.json.gz": ((STEPS, FLOPS), "not marked"),
    "hta-a100-cupti-range-counters.json.gz": ((STEPS, *ON_DEVICE, FLOPS), "not an idle GPU"),
    "hta-a100-ddp-nccl-meta-rank0.json.gz": ((FLOPS,), "shapes"),
    "hta-a100-event-sync.json.gz": ((FLOPS,), "shapes"),
    "hta-a100x16-torchrec-rank0.json.gz": ((IDLE, CAUSES), "replayed graphs"),
    "hta-cpu-only-gloo-rank34of300.pt.trace.json.gz": ((*ON_DEVICE, FLOPS), "times are those of the host"),
    "hta-gp100-sgd-10steps.json.gz": ((FLOPS,), "found by optimizer steps"),
    "hta-mtia-inference-rank0.json.gz": ((STEPS, *ON_DEVICE), "mtia_ccp_events"),
    "hta-no-gpu-events-rank-missing.json.gz": ((STEPS, *ON_DEVICE), "there was a GPU"),
    "hta-uint64-comms-id.json.gz": ((STEPS, CAUSES, OPERATORS, FLOPS, PEAK), "only 0 of 1"),
    "hta-v1-category-names-rank1.json.gz": ((STEPS, OPERATORS, FLOPS, PEAK), "no operator"),
    "hta-v100x2-ddp-rank1.json.gz": ((FLOPS,), "shapes"),
    "kineto-gpu-metrics-expected.json": ((FLOPS,), "shapes"),
    "kineto-gpu-metrics-input.json": ((FLOPS,), "shapes"),
    "kineto-h100-cuda-sync-after-fix.json": ((STEPS, FLOPS), "not marked"),
    "kineto-h100-cuda-sync-before-fix.json": ((STEPS, FLOPS), "not marked"),
    "param-2080ti-resnet-cifar-30steps.json.gz": ((FLOPS,), "found by optimizer steps"),
    "tracelens-mi210-gpu-only-train.json.gz": ((STEPS, OPERATORS, FLOPS), "no operator"),
    "tracelens-mi300-gemm-misaligned.json.gz": ((STEPS, CAUSES, OPERATORS, PEAK), "only 0 of 10"),
    "tracelens-mi300-graph-capture-no-kernels.json.gz": (IN_TIME, "captured into a graph"),
    "tracelens-mi300-norm-layers.json.gz": ((STEPS,), "not marked"),
    "tracelens-mi300-sdpa-short-seq.json.gz": ((STEPS,), "not marked"),
    # A batch that was launched before the recording, and is not in it, holds the first copy of this one for 493 ms.
    "tracelens-mi300-sglang-qwen3-prefill.json.gz": ((STEPS, IDLE, CAUSES), "for 493.2 ms of 987.3 ms"),
    "tracelens-mi300-torch-compile.json.gz": ((STEPS,), "not marked"),
    "tracelens-mi300-vllm-graph-exec.json.gz": ((STEPS, PEAK), "empty text"),
    "tracelens-synth-attn-unfused.json": ((STEPS, CAUSES), "by 197 us at most"),
    "derived-kineto-resnet50-nw4-cut-json.json.gz": (ON_DEVICE, "before any device activity"),
    "derived-tracelens-bert-cut-gzip.json.gz": (ON_DEVICE, "before any device activity"),
    "xprof-tf-chrome-trace-foreign.json": ((STEPS, *ON_DEVICE, OPERATORS, FLOPS), "no operator"),
}


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
@pytest.mark.parametrize("path", readable())
def test_every_trace_as_judged_by_hand(path: str) -> None:
    """A trace that is not listed supports everything: all of them are loops or models recorded with shapes."""
    blocks, reason = JUDGED.get(path.removeprefix("traces/"), ((), ""))
    found = gate(corpus(path))
    assert tuple(found.blocked) == tuple(claim for claim in CLAIMS if claim in blocks)
    assert reason in reasons(found) and bool(found.gaps) == bool(reason)
    assert all(gap.what and gap.why and gap.collect for gap in found.gaps)


@pytest.mark.parametrize(
    "name", ["gpt_naive_bf16", "gpt_launch_bound_fp32", "gpt_fused_compiled_bf16", "resnet50_dataloader_bound_fp32"]
)
def test_recorded_training_passes(name: str) -> None:
    assert gate(h200(name)) == Gate()


# -------------------------------------------------------------------------------------------------------- by defect


def test_a_healthy_recording_passes(tmp_path: Path) -> None:
    assert gate(table_of(tmp_path, recording())) == Gate()


def drop(events: list[Event], category: str, every: int, name: str = "") -> list[Event]:
    """Leave out one event of a category in so many."""
    kept, seen = [], 0
    for item in events:
        seen += item["cat"] == category and name in item["name"]
        if item["cat"] != category or seen % every:
            kept.append(item)
    return kept


@pytest.mark.parametrize(
    ("events", "blocks", "reason"),
    [
        (lambda: [item for item in recording() if "Step" not in item["name"]], (STEPS,), "not marked"),
        (lambda: drop(recording(), "cuda_runtime", 10), (STEPS, CAUSES, OPERATORS), "only 72 of 80"),
        (lambda: drop(recording(), "kernel", 10), IN_TIME, "8 of 80 kernel launches have no kernel"),
        (lambda: [item for item in recording() if item["cat"] != "kernel"], (STEPS, *ON_DEVICE), "80 kernel launches"),
        (lambda: [*recording(), op("aten::mm", 3.0, -4.0)], IN_TIME, "down to -4 us"),
        (lambda: [item for item in recording() if item["cat"] != "cpu_op"], (OPERATORS, FLOPS), "no operator"),
    ],
)
def test_a_defect_and_what_it_blocks(events: Any, blocks: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    found = gate(table_of(tmp_path, events()))
    assert set(found.blocked) == set(blocks)
    assert reason in reasons(found)


def test_what_was_launched_before_the_recording_has_no_launch(tmp_path: Path) -> None:
    unmarked = [item for item in recording() if "Step" not in item["name"]]
    spilled = [kernel("earlier", 0.04 * number, 0.03, 900 + number) for number in range(80)]
    assert set(gate(table_of(tmp_path, [*unmarked, *spilled])).blocked) == {STEPS}


@pytest.mark.parametrize(("every", "blocks"), [(1, (STEPS, CAUSES)), (200, ())])
def test_clocks_that_are_apart(every: int, blocks: tuple[str, ...], tmp_path: Path) -> None:
    events = recording(100)
    for item in [item for item in events if item["cat"] == "kernel"][::every]:
        item["ts"] -= 250.0
    found = gate(table_of(tmp_path, events))
    assert tuple(found.blocked) == blocks and "by 247 us at most" in reasons(found)
    assert found.gaps[0].what == (", ".join(blocks) or CAUSES)


@pytest.mark.parametrize(("count", "blocks"), [(1, ()), (20, (STEPS, DEVICE, IDLE, CAUSES))])
def test_activities_outside_the_window(count: int, blocks: tuple[str, ...], tmp_path: Path) -> None:
    stray = [item for number in range(count) for item in stray_kernel(number)]
    table = table_of(tmp_path, [*recording(100), *stray, event("Trace", "PyTorch Profiler (0)", 0.0, 2100.0)])
    found = gate(table)
    assert set(blocks) <= set(found.blocked)
    assert f"{count} of {200 + count} device activities lie outside" in reasons(found)


def stray_kernel(number: int) -> list[Event]:
    return [launch(1000 + number, 9000.0 + number), kernel("gemm", 9002.0 + number, 0.5, 1000 + number)]


def test_launches_inside_a_capture_are_no_loss(tmp_path: Path) -> None:
    capture = [
        call("cudaStreamBeginCapture_v10000", 801.0, 1.0),
        *(launch(500 + number, 803.0 + number, 0.5) for number in range(3)),
        call("cudaStreamEndCapture_v10000", 810.0, 1.0),
    ]
    assert gate(table_of(tmp_path, [*recording(), *capture])) == Gate()


def test_a_graph_of_which_nothing_is_recorded(tmp_path: Path) -> None:
    replays = [
        call("cudaGraphLaunch", 402.5, 1.0, 600),
        call("cudaGraphLaunch", 412.5, 1.0, 601),
        kernel("graphed", 413.0, 0.5, 601),
    ]
    found = gate(table_of(tmp_path, [*recording(), *replays]))
    assert "1 of 2 graph launches have no device activity" in reasons(found)
    assert set(found.blocked) == {DEVICE, IDLE, CAUSES, OPERATORS}


def test_a_queue_that_stands_still(tmp_path: Path) -> None:
    events = recording()
    for item in events:
        if item["cat"] == "kernel" and item["ts"] >= 400.0:
            item["ts"] += 500.0
    found = gate(table_of(tmp_path, events))
    assert set(found.blocked) == {IDLE, CAUSES}
    assert "for 0.5 ms of 1.3 ms" in reasons(found)


def test_counters_of_another_time(tmp_path: Path) -> None:
    table = table_of(tmp_path, recording())
    assert gate(table, counters=(-5.0, 1000.0)) == Gate()
    found = gate(table, counters=(400.0, 1000.0))
    assert set(found.blocked) == {COUNTERS} and "cover 50% of the steps" in reasons(found)


def test_several_devices_in_one_process(tmp_path: Path) -> None:
    beside = [
        item
        for number in range(3)
        for item in (launch(700 + number, 1.0, 0.1), kernel("gemm", 5.0 + number, 0.5, 700 + number, device=1))
    ]
    found = gate(table_of(tmp_path, [*recording(), *beside]))
    assert not found.blocked and "those of device 0" in reasons(found)


@pytest.mark.parametrize("listed", [[], [{"id": 0, "name": ""}], "nonsense"])
def test_a_device_without_a_name(listed: Any, tmp_path: Path) -> None:
    assert set(gate(table_of(tmp_path, recording(), deviceProperties=listed)).blocked) == {PEAK}


def test_nothing_recorded_supports_nothing() -> None:
    found = gate(EMPTY)
    assert set(found.blocked) == {STEPS, *ON_DEVICE, OPERATORS, FLOPS}
    assert [gap.what for gap in found.gaps] == [", ".join(ON_DEVICE), STEPS, f"{OPERATORS}, {FLOPS}"]
