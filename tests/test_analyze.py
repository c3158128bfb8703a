"""Phases, utilisation, the gate and what is said, on recordings and on steps of a made-up GPU."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from profiles import GPU, TINY, Event, activity, blank, check_invariants, gpu_step, h200, made, tiny_profile

from advisor.analyze import after, analyze
from advisor.ingest.kineto import read_trace
from advisor.model import Hardware, Profile, Utilisation


@pytest.fixture(scope="module")
def tiny() -> Profile:
    return tiny_profile(read_trace(TINY / "trace.json.gz"), read_trace(TINY / "annotated.json.gz"))


# ----------------------------------------------------------------------------------------------------------- invariants


def test_a_cpu_run(tiny: Profile) -> None:
    check_invariants(tiny)
    use = tiny.utilisation
    median = tiny.median_step_us()
    assert median is not None
    flops = 64 * (6 * (2 * 12 * 32**2 + 61 * 32) + 12 * 2 * 32 * 16)  # tokens x (6N + 12 L d T)
    assert use.model_flops_per_step == pytest.approx(flops, rel=1e-9)
    assert use.achieved_flops == pytest.approx(flops / (median / 1e6))
    assert use.mfu == pytest.approx(flops / (median / 1e6) / 1e12)
    assert use.of_measured == pytest.approx(flops / (median / 1e6) / 1e11)
    assert use.mfu_own_peak is None and use.mfu_causal is None and use.busy is None
    assert "a round number" in use.definition and "twice" in use.definition
    assert use.hfu == use.mfu  # nothing is recomputed
    assert tiny.facts["matmul_precision"] == "highest"
    assert [step.tokens for step in tiny.steps] == [64, 64]
    assert tiny.missing == {}


def test_a_slowed_host_is_scaled_to_the_unprofiled_step(tiny: Profile) -> None:
    trace, annotated = read_trace(TINY / "trace.json.gz"), read_trace(TINY / "annotated.json.gz")
    mean = sum(step.duration_us for step in tiny.steps) / 2
    slow = tiny_profile(trace, annotated, step_us=(mean * 2,))
    fast = tiny_profile(trace, annotated, step_us=(mean / 2,))
    assert sum(c.total_us for c in fast.costs) == pytest.approx(0.5 * sum(c.total_us for c in slow.costs))
    assert any("scaled by 0.50, because" in note for note in fast.notes)
    assert not any("scaled" in note for note in slow.notes)
    assert fast.steps == slow.steps
    check_invariants(fast)


def test_order_of_events_does_not_matter(tmp_path: Path, tiny: Profile) -> None:
    mixed = []
    for name in ("trace", "annotated"):
        document = json.loads(gzip.decompress((TINY / f"{name}.json.gz").read_bytes()))
        random.Random(7).shuffle(document["traceEvents"])
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
        mixed.append(read_trace(tmp_path / f"{name}.json"))
    assert tiny_profile(*mixed) == tiny


# ------------------------------------------------------------------------------------------ GPU traces


def test_naive_gpt_is_timed_by_the_device_not_by_its_launches() -> None:
    trace, profile = h200("gpt_naive_bf16")
    check_invariants(profile)
    host = [(end - begin) / 1e3 for _, begin, end in trace.steps]
    assert host == [pytest.approx(58.8, abs=0.05), pytest.approx(86.7, abs=0.05)]
    assert [step.duration_us / 1e3 for step in profile.steps] == [pytest.approx(86.9, abs=0.1)] * 2
    assert profile.utilisation.busy == pytest.approx(0.989, abs=0.002)
    flops = 8192 * (6 * (2 * 12 * 2048**2 + 50257 * 2048) + 12 * 2 * 2048 * 2048)
    assert profile.utilisation.model_flops_per_step == pytest.approx(flops, rel=1e-9)
    assert profile.utilisation.mfu == pytest.approx(flops / 86.9e-3 / 989.4e12, rel=2e-3)
    assert profile.utilisation.mfu_own_peak == pytest.approx(profile.utilisation.mfu)
    assert {**profile.missing} == {}


def test_compiled_gpt_has_flash_attention_and_mfu_causal() -> None:
    _, profile = h200("gpt_fused_compiled_bf16")
    check_invariants(profile)
    use = profile.utilisation
    assert use.mfu == pytest.approx(0.522, abs=0.003)
    assert use.mfu is not None and use.mfu_causal is not None
    attention = 12 * 2 * 2048 * 2048 * 8192
    assert use.mfu - use.mfu_causal == pytest.approx(use.mfu * attention / 2 / (use.model_flops_per_step or 0))
    assert use.hfu is not None and use.hfu > use.mfu  # the attention kernel recomputes its scores
    assert "flops" not in profile.missing


def test_a_launch_bound_run_is_idle() -> None:
    _, profile = h200("gpt_launch_bound_fp32")
    check_invariants(profile)
    assert profile.utilisation.busy == pytest.approx(0.151, abs=0.005)
    assert all(step.phases_us["idle"] / step.duration_us > 0.8 for step in profile.steps)
    assert [step.duration_us / 1e3 for step in profile.steps] == [pytest.approx(31, abs=0.5)] * 2
    use = profile.utilisation
    assert use.mfu_own_peak is not None and use.mfu is not None and use.mfu_own_peak > 10 * use.mfu


def test_an_input_bound_run_waits_for_data() -> None:
    _, profile = h200("resnet50_dataloader_bound_fp32")
    check_invariants(profile)
    assert [step.duration_us / 1e3 for step in profile.steps] == [
        pytest.approx(154.6, abs=0.5),
        pytest.approx(153.4, abs=0.5),
    ]
    assert all(step.phases_us["data"] / step.duration_us > 0.6 for step in profile.steps)
    assert all(step.phases_us["copy"] > 5000 for step in profile.steps)
    convolution = next(region for region in profile.regions if region.name == "convolution")
    assert convolution.floor_us is not None and convolution.floor_us < convolution.measured_us  # cuDNN used TF32


# ------------------------------------------------------------------------------------------ the gate and what is said


def test_a_sound_gpu_trace(tmp_path: Path) -> None:
    profile = analyze(blank(GPU, step_us=(1000.0,)), made(tmp_path, gpu_step()), reference_peak=(1e14, "x"))
    check_invariants(profile)
    flops = 20 * 2 * 512**3
    assert profile.utilisation.mfu == pytest.approx(flops / 1e-3 / 1e14)
    (region,) = profile.regions
    assert (region.name, region.bound, region.measured_us) == ("matmul", "compute", 800.0)
    assert region.floor_us == pytest.approx(flops / 1e14 * 1e6)


def without(events: list[Event], cat: str, keep: int = 0) -> list[Event]:
    chosen = [event for event in events if event["cat"] == cat][keep:]
    return [event for event in events if event not in chosen]


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda events: without(events, "user_annotation"), "steps are not marked"),
        (lambda events: without(events, "cuda_runtime", keep=15), "only 15 of 20 device activities have their launch"),
        (lambda events: without(events, "kernel"), "no device activity"),
        (lambda events: [*events, activity("cpu_op", "aten::mm", 700, -5)], "negative duration"),
        (
            lambda events: [
                {**event, "ts": event["ts"] - 5000} if event["cat"] == "kernel" else event for event in events
            ],
            "before their launch",
        ),
        (
            lambda events: [
                *events,
                {"ph": "X", "cat": "Trace", "name": "P", "pid": "Spans", "tid": "P", "ts": -9000, "dur": 5000},
            ],
            "outside the recorded window",
        ),
    ],
)
def test_an_insufficient_trace_says_what_to_collect(tmp_path: Path, spoil: Any, part: str) -> None:
    trace = made(tmp_path, spoil(gpu_step()))
    profile = analyze(blank(GPU, step_us=(1000.0,), linked_share=0.5), trace, reference_peak=(1e14, "x"))
    assert profile.missing["trace"].startswith("insufficient trace, collect this: ")
    assert part in profile.missing["trace"]
    assert (profile.steps, profile.costs, profile.regions, profile.linked_share) == ((), (), (), None)
    assert profile.utilisation == Utilisation()


def test_a_few_lost_launches_are_tolerated(tmp_path: Path) -> None:
    profile = analyze(
        blank(GPU, step_us=(1000.0,)), made(tmp_path, without(gpu_step(), "cuda_runtime", keep=19)), reference_peak=None
    )
    assert "trace" not in profile.missing


def test_an_unknown_device_has_no_mfu_and_says_what_to_do(tmp_path: Path) -> None:
    unknown = Hardware(name="Strange One", kind="cuda")
    profile = analyze(blank(unknown, step_us=(1000.0,)), made(tmp_path, gpu_step()), reference_peak=None)
    use = profile.utilisation
    assert (use.mfu, use.mfu_own_peak, use.hfu, use.of_measured, use.peak_flops) == (None,) * 5
    assert use.achieved_flops is not None
    assert "Strange One" in profile.missing["mfu"] and "--peak" in profile.missing["mfu"]
    assert [region.floor_us for region in profile.regions] == [None]


def test_without_shapes_there_are_no_operations(tmp_path: Path) -> None:
    events = [{**event, "args": {k: v for k, v in event["args"].items() if "Input" not in k}} for event in gpu_step()]
    profile = analyze(blank(GPU, step_us=(1000.0,)), made(tmp_path, events), reference_peak=(1e14, "x"))
    assert profile.utilisation.mfu is None and "record_shapes" in profile.missing["flops"]


def test_without_timed_steps_there_is_no_mfu(tmp_path: Path) -> None:
    profile = analyze(blank(GPU), made(tmp_path, gpu_step()), reference_peak=(1e14, "x"))
    assert profile.utilisation.mfu is None and "--steps" in profile.missing["mfu"]


def test_arithmetic_that_is_not_counted_is_named(tmp_path: Path) -> None:
    events = [
        *gpu_step(),
        activity("cpu_op", "flash_attn::_flash_attn_forward", 600, 10),
        activity("cuda_runtime", "cudaLaunchKernel", 601, 2, correlation=900),
        activity("kernel", "flash_fwd", 1200, 200, 7, correlation=900, stream=7),
    ]
    profile = analyze(blank(GPU, step_us=(1000.0,)), made(tmp_path, events), reference_peak=(1e14, "x"))
    assert "flash_attn::_flash_attn_forward (20% of the operator time)" in profile.missing["flops"]
    assert profile.utilisation.mfu is not None


# ------------------------------------------------------------------------------------------ pieces


def test_after_scales_what_speed_scales() -> None:
    before = Utilisation(busy=0.9, model_flops_per_step=1e12, achieved_flops=1e13, mfu=0.15, mfu_own_peak=0.3, hfu=0.2)
    scaled = after(before, 2.0)
    assert (scaled.mfu, scaled.mfu_own_peak, scaled.hfu, scaled.achieved_flops) == (0.3, 0.6, 0.4, 2e13)
    assert (scaled.busy, scaled.mfu_causal) == (None, None)
    assert scaled.model_flops_per_step == before.model_flops_per_step
