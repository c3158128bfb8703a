"""Phases, utilisation, floors and regions, on recordings and on numbers chosen by hand."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor.analyze import after, analyze, boundary_bytes, optimizer_bytes, roofline
from advisor.correlate import correlate
from advisor.hardware import lookup, reference_peak
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import Trace, read_trace
from advisor.ingest.probe import read_probe
from advisor.model import Environment, Graph, Hardware, Node, OptimizerUse, Profile, Ref, Utilisation

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny_gpt"
SHARED = Path(__file__).parents[2] / "shared" / "h200"
CPU = Hardware(name="CPU", kind="cpu", measured_flops={"float32": 1e11}, measured_bandwidth=2e10)
PEAK = (1e12, "a round number")


def blank(hardware: Hardware = CPU, **fields: Any) -> Profile:
    return Profile(environment=Environment(python="3.11", torch=None), hardware=hardware, steps=(), **fields)


def tiny_profile(trace: Trace, annotated: Trace, **changes: Any) -> Profile:
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


@pytest.fixture(scope="module")
def tiny() -> Profile:
    return tiny_profile(read_trace(TINY / "trace.json.gz"), read_trace(TINY / "annotated.json.gz"))


# ----------------------------------------------------------------------------------------------------------- invariants


def check_invariants(profile: Profile) -> None:
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
    assert tiny.facts["hfu"] == use.mfu  # nothing is recomputed
    assert tiny.facts["matmul_precision"] == "highest"
    assert [step.tokens for step in tiny.steps] == [64, 64]
    assert tiny.missing == {}


def test_costs_of_a_cpu_run(tiny: Profile) -> None:
    graph = tiny.graphs[0]
    products = [cost for cost in tiny.costs if graph.nodes[cost.node].target == "operator.matmul"]
    once = 2 * 4 * 2 * 16 * 16 * 16
    assert [cost.flops for cost in products] == [3 * once] * 4
    first = products[0]
    tensors = 4 * (2 * 4 * 2 * 16 * 16 + 4 * 2 * 16 * 16)
    assert first.least_bytes == 2 * tensors
    assert first.floor_us == pytest.approx(max(3 * once / 1e11, 2 * tensors / 2e10) * 1e6)
    views = [cost for cost in tiny.costs if graph.nodes[cost.node].target == "method.transpose"]
    assert views and all(cost.least_bytes == 0 and cost.floor_us == 0 for cost in views)


def test_regions_of_a_cpu_run(tiny: Profile) -> None:
    families = {region.name: region for region in tiny.regions if region.span is None}
    assert {"matmul", "softmax", "elementwise", "optimizer"} <= set(families)
    lines = [region for region in tiny.regions if region.span is not None]
    assert lines == sorted(lines, key=lambda region: -region.measured_us)
    source = (TINY / "train.py").read_text(encoding="utf-8").splitlines()
    softmax = next(r for r in lines if "softmax" in r.name and r.span and "softmax" in source[r.span.line - 1])
    assert softmax.name.endswith("in Block")
    assert sum(region.measured_us for region in families.values()) < 1.01 * (tiny.median_step_us() or 0)


def test_the_optimizer_gets_its_time(tiny: Profile) -> None:
    (optimizer,) = tiny.optimizers
    region = next(region for region in tiny.regions if region.name == "optimizer")
    assert optimizer.step_us == pytest.approx(region.measured_us)
    assert region.floor_us == pytest.approx(min(29184 * 4 * 7 / 2e10 * 1e6, region.measured_us))


def test_a_slowed_host_is_scaled_to_the_unprofiled_step(tiny: Profile) -> None:
    trace, annotated = read_trace(TINY / "trace.json.gz"), read_trace(TINY / "annotated.json.gz")
    mean = sum(step.duration_us for step in tiny.steps) / 2
    slow = tiny_profile(trace, annotated, step_us=(mean * 2,))
    fast = tiny_profile(trace, annotated, step_us=(mean / 2,))
    assert sum(c.total_us for c in fast.costs) == pytest.approx(0.5 * sum(c.total_us for c in slow.costs))
    assert any("scaled by 0.50" in note for note in fast.facts["notes"])
    assert not any("scaled" in note for note in slow.facts["notes"])
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


def h200(name: str) -> tuple[Trace, Profile]:
    path = SHARED / f"h200_{name}.json.gz"
    if not path.is_file():
        pytest.skip("the recorded H200 traces are not beside this checkout")
    trace = read_trace(path)
    hardware = lookup("NVIDIA H200", 132)
    assert hardware is not None
    steps = tuple(step.duration_us for step in trace.timeline.steps)
    return trace, analyze(blank(hardware, step_us=steps), trace, reference_peak=reference_peak(hardware))


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
    assert profile.facts["hfu"] > use.mfu  # the attention kernel recomputes its scores
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

Event = dict[str, Any]


def activity(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
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
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return read_trace(path)


GPU = Hardware(
    name="A", kind="cuda", peak_flops={"bfloat16": 1e14, "tfloat32": 5e13}, hbm_bandwidth=1e12, measured_flops={}
)


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
    assert (use.mfu, use.mfu_own_peak, use.of_measured, use.peak_flops) == (None, None, None, None)
    assert use.achieved_flops is not None
    assert "Strange One" in profile.missing["mfu"] and "--peak-flops" in profile.missing["mfu"]
    assert [region.floor_us for region in profile.regions] == [None]


def test_without_shapes_there_are_no_operations(tmp_path: Path) -> None:
    events = [{**event, "args": {k: v for k, v in event["args"].items() if "Input" not in k}} for event in gpu_step()]
    profile = analyze(blank(GPU, step_us=(1000.0,)), made(tmp_path, events), reference_peak=(1e14, "x"))
    assert profile.utilisation.mfu is None and "record_shapes" in profile.missing["flops"]


def test_without_timed_steps_there_is_no_mfu(tmp_path: Path) -> None:
    profile = analyze(blank(GPU), made(tmp_path, gpu_step()), reference_peak=(1e14, "x"))
    assert profile.utilisation.mfu is None and "--steps" in profile.missing["mfu"]


@pytest.mark.parametrize(("precision", "peak"), [("high", 5e13), ("highest", None)])
def test_float32_products_run_in_the_precision_that_is_set(tmp_path: Path, precision: str, peak: float | None) -> None:
    text = json.dumps(gpu_step()).replace("c10::BFloat16", "float")
    profile = blank(GPU, step_us=(1000.0,), facts={"matmul_precision": precision})
    use = analyze(profile, made(tmp_path, json.loads(text)), reference_peak=(1e14, "x")).utilisation
    flops = 20 * 2 * 512**3
    assert use.mfu == pytest.approx(flops / 1e-3 / 1e14)
    assert use.mfu_own_peak == (None if peak is None else pytest.approx(flops / 1e-3 / peak))


def test_a_floor_above_the_measured_time_is_cut_with_a_note(tmp_path: Path) -> None:
    slow = replace(GPU, peak_flops={"bfloat16": 1e12})
    profile = analyze(blank(slow, step_us=(1000.0,)), made(tmp_path, gpu_step()), reference_peak=None)
    (region,) = profile.regions
    assert region.floor_us == region.measured_us and region.recoverable_us == 0
    assert any(
        note.startswith("matmul: the floor of 5369 us exceeds the measured 800 us") for note in profile.facts["notes"]
    )


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
    before = Utilisation(busy=0.9, model_flops_per_step=1e12, achieved_flops=1e13, mfu=0.15, mfu_own_peak=0.3)
    scaled = after(before, 2.0)
    assert (scaled.mfu, scaled.mfu_own_peak, scaled.achieved_flops) == (0.3, 0.6, 2e13)
    assert (scaled.busy, scaled.mfu_causal) == (None, None)
    assert scaled.model_flops_per_step == before.model_flops_per_step


def test_roofline() -> None:
    assert roofline(3.0, 5.0) == (5.0, "memory")
    assert roofline(3.0, None) == (3.0, "compute")
    assert roofline(None, None) is None


def test_boundary_bytes_leave_inner_values_out() -> None:
    def node(index: int, *inputs: int, users: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Node:
        args = tuple(Ref(place) for place in inputs)
        return Node(
            index=index,
            name=f"n{index}",
            op="call_function",
            target="f",
            args=args,
            users=users,
            shape=(10, 4),
            stride=stride,
            dtype="float32",
        )

    nodes = (node(0, users=(1, 2)), node(1, 0, 0, users=(2,)), node(2, 1, 0, users=(3,)), node(3, 2, users=()))
    graph = Graph(index=0, nodes=nodes)
    assert boundary_bytes(graph, frozenset({1})) == 2 * 160
    assert boundary_bytes(graph, frozenset({1, 2})) == 2 * 160
    repeated = (replace(nodes[0], stride=(0, 1)), *nodes[1:])
    assert boundary_bytes(Graph(index=0, nodes=repeated), frozenset({1})) == 160 + 16


def use(kind: str, **arguments: Any) -> OptimizerUse:
    return OptimizerUse(
        span=None,
        kind=kind,
        arguments=arguments,
        given=(),
        parameters=1,
        elements=100,
        devices=("cuda",),
        dtypes=("float32",),
        sparse=False,
        overrides_step=False,
        groups=1,
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (use("torch.optim.adamw.AdamW"), 100 * 4 * 7),
        (use("torch.optim.adam.Adam", amsgrad=True), 100 * 4 * 9),
        (use("torch.optim.sgd.SGD", momentum=0.0), 100 * 4 * 3),
        (use("torch.optim.sgd.SGD", momentum=0.9), 100 * 4 * 5),
        (use("mine.Muon"), None),
    ],
)
def test_optimizer_bytes(optimizer: OptimizerUse, expected: float | None) -> None:
    assert optimizer_bytes((optimizer,)) == expected
    assert optimizer_bytes(()) is None


def test_no_figure_is_infinite(tiny: Profile) -> None:
    figures = [region.measured_us for region in tiny.regions] + [cost.least_bytes or 0.0 for cost in tiny.costs]
    assert all(math.isfinite(figure) for figure in figures)
