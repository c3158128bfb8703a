"""Every right value of real published traces: what each file says, computed without any profiler tool.

The files under `data/corpus` are always read. Where the whole corpus lies beside this checkout it is read as well.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from advisor import survey as surveys
from advisor.columns.intervals import intervals, length, merged
from advisor.columns.joins import launching_calls
from advisor.columns.schema import ANNOTATION, KERNEL, MEMCPY, MEMSET
from advisor.columns.table import Table
from advisor.ingest.reader import read_table
from advisor.ingest.recorded import devices, place
from advisor.ingest.store import Store
from advisor.measured import FileProfile
from advisor.metrics.totals import communicates
from advisor.survey import Options, survey

COPIES = Path(__file__).parent / "data" / "corpus"
SHARED = Path(__file__).parents[2] / "shared"
WHOLE = SHARED / "corpus"
H200 = SHARED / "h200"


@dataclass(frozen=True, eq=False)
class Item:
    """A trace, what is right of it, and what other tools said."""

    name: str
    path: Path
    right: Mapping[str, Any]
    extra: Mapping[str, Any]
    tb: Mapping[str, Any]
    hta: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name


def _items() -> dict[str, Item]:
    found: dict[str, Item] = {}
    for folder in (COPIES, WHOLE):
        truth = folder / "truth.json"
        for key, value in json.loads(truth.read_text(encoding="utf-8")).items() if truth.exists() else ():
            name = key.removeprefix("traces/")
            if key.startswith("traces/") and name not in found:
                peers = (value["peer_tb_0.4.3"], value["peer_hta_0.5.0"])
                found[name] = Item(name, folder / key, value["right"], value["right_extra"], *peers)
    return found


ITEMS = _items()
FOREIGN = ("xprof-tf-chrome-trace-foreign.json", "tracelens-rocprofv3-not-kineto.json.gz")
CUT = ("derived-kineto-resnet50-nw4-cut-json.json.gz", "derived-tracelens-bert-cut-gzip.json.gz")
READ = [item for name, item in ITEMS.items() if name not in (*FOREIGN, *CUT)]
COPIED = [item for item in READ if item.path.is_relative_to(COPIES)]
every_trace = pytest.mark.parametrize("item", READ, ids=str)


@cache
def table_of(item: Item) -> Table:
    return read_table(item.path, 1)


@cache
def profile_of(item: Item) -> FileProfile:
    return survey([item.path], Options(workers=1)).files[0]


def text_of(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@lru_cache(maxsize=4)
def events_of(path: Path) -> list[dict[str, Any]]:
    document = json.loads(text_of(path))
    return document if isinstance(document, list) else document["traceEvents"]


# -- sums. The right values have three decimals, and their unions were taken between absolute times of about 1e12
# microseconds in double precision, whose spacing is 1.2e-4 to 9.8e-4: over thousands of intervals that is up to 0.06
# us (`test_unions_are_closer_than_the_right_values` shows it with exact decimals).


def near(value: float) -> Any:
    return pytest.approx(value, abs=2e-3, rel=2e-5)


@every_trace
def test_sums(item: Item) -> None:
    profile, right = profile_of(item), item.right
    assert (profile.status, profile.reason) == ("ok", None)
    assert profile.events == right["n_events"]
    counted = (profile.kernels, profile.memcpys, profile.memsets, profile.nccl_kernels)
    assert counted == (right["kernels"], right["memcpy"], right["memset"], right["nccl_kernels"])
    assert profile.nccl_us == near(right["nccl_us"])
    if "gpu_busy_us" in right:
        assert profile.kernel_us == near(right["kernel_us"])
        assert profile.busy_us == near(right["gpu_busy_us"])
        assert profile.kernels_busy_us == near(right["kernel_union_us"])
        assert profile.span_us == near(right["gpu_span_us"])
        assert profile.busy_us and profile.span_us
        share, loss = 100 * profile.busy_us / profile.span_us, 100 * 2e-3 / profile.span_us
        assert share == pytest.approx(right["gpu_busy_pct_of_gpu_span"], abs=3e-3 + loss)
        assert profile.exposed_comm_us == near(item.extra.get("exposed_comm_us", 0.0))
        rows, chosen = table_of(item).activities, communicates(table_of(item))
        united = length(merged(intervals(rows.start[chosen], rows.duration[chosen])))
        assert united == near(item.extra.get("comm_union_us", 0.0))
    else:  # nothing ran on a device: nothing is said of it, not 0 us and not 0 %
        said = (profile.kernel_us, profile.busy_us, profile.kernels_busy_us, profile.span_us, profile.exposed_comm_us)
        assert said == (None,) * 5


@every_trace
def test_steps(item: Item) -> None:
    profile, right = profile_of(item), item.right
    assert profile.steps == right.get("steps", 0)
    if "steps" not in right:
        assert profile.step_mean_us is None
        return
    assert profile.step_mean_us == near(right["step_mean_us"])
    listed = right["step_names"]
    names = sorted(set(range_names(table_of(item), r"ProfilerStep#\d+$")), key=lambda name: int(name.split("#")[1]))
    assert [*names[:3], "..", names[-1]] == listed
    if right["kernels"]:
        assert profile.busy_in_steps is not None and profile.kernels_busy_in_steps is not None
        assert 100 * profile.busy_in_steps == pytest.approx(right["gpu_busy_pct_of_steps_window"], abs=6e-4)
        assert 100 * profile.kernels_busy_in_steps == pytest.approx(right["kernel_busy_pct_of_steps_window"], abs=6e-4)
    else:  # the right values have 0.0 here, and beside them the demand to refuse device figures instead
        assert (profile.busy_in_steps, profile.kernels_busy_in_steps) == (None, None)


def range_names(table: Table, pattern: str) -> list[str]:
    rows = table.ranges
    return [name for name in table.named(rows.name[rows.kind == ANNOTATION]) if re.match(pattern, name)]


# -- what ran on the device

NAMED = {  # kernels by name; what a name tells is a floor
    "softmax_us": "softmax",
    "flash_us": "flash|fmha|attn_fwd",
    "fp32_gemm_us": "sgemm|f32f32_f32f32|ffma",
    "align1_us": r"align1(?!\d)",
    "gemm_us": "gemm|cijk|cutlass|cublas|matmul_ogs",
    "elementwise_us": "elementwise",
}


@every_trace
def test_activities(item: Item) -> None:
    rows, right, extra = table_of(item).activities, item.right, item.extra
    kernel = rows.kind == KERNEL
    names, durations = table_of(item).named(rows.name[kernel]), rows.duration[kernel]
    assert len(set(names)) == right["uniq_kernels"]
    assert int((durations == 0).sum()) == right["zero_dur_kernels"]
    assert int((durations < 10).sum()) == extra["short_lt10us"]
    assert len(rows) == extra["gpu_ops"]
    # In the right values each duration is the difference of two rounded absolute times.
    assert rows.duration[rows.kind == MEMCPY].sum() == pytest.approx(right["memcpy_us"], abs=2e-3, rel=5e-5)
    assert rows.duration[rows.kind == MEMSET].sum() == pytest.approx(right["memset_us"], abs=2e-3, rel=5e-5)
    assert Counter(str(number) for number in rows.device[kernel].tolist()) == right["kernel_devices"]
    for field, pattern in NAMED.items():
        chosen = [re.search(pattern, name, re.IGNORECASE) is not None for name in names]
        assert durations[np.array(chosen, dtype=bool)].sum() == pytest.approx(extra[field], abs=0.06), field
    assert sum("softmax" in name.lower() for name in names) == extra["softmax_n"]


@every_trace
def test_copies_from_pageable_memory(item: Item) -> None:
    rows = table_of(item).activities
    copies = np.flatnonzero(rows.kind == MEMCPY)
    names = table_of(item).named(rows.name[copies])
    chosen = [row for row, name in zip(copies.tolist(), names, strict=True) if "HtoD" in name and "Pageable" in name]
    count, time = item.extra["pageable_h2d"]
    assert (len(chosen), rows.duration[chosen].sum()) == (count, near(time))


@every_trace
def test_what_the_profiler_estimated(item: Item) -> None:
    """Duration-weighted means over the kernels that carry the profiler's estimate; none is none (AMD)."""
    rows = table_of(item).activities
    kernel = rows.kind == KERNEL
    for field, values in (
        ("est_occ_time_weighted_pct", rows.occupancy),
        ("est_sm_eff_time_weighted_pct_of_kernel_time", 100 * np.minimum(rows.blocks_per_sm, 1.0)),
    ):
        known = kernel & ~np.isnan(values)
        assert known.any() == (field in item.right)
        if known.any():
            time = rows.duration[known]
            assert (values[known] * time).sum() / time.sum() == pytest.approx(item.right[field], abs=6e-4)
    if "est_occ_time_weighted_pct" not in item.right:
        assert profile_of(item).occupancy.recorded_percent is None


@every_trace
def test_launches(item: Item) -> None:
    table = table_of(item)
    calls = launching_calls(table)
    names = table.named(table.calls.name)
    assert sum("Launch" in name for name in names) == item.extra["launches"]
    if item.extra["no_launch"] is None:  # no activity has a correlation id: nothing can be linked
        assert (table.activities.correlation < 0).all() and (calls < 0).all()
    else:
        assert int((calls < 0).sum()) == item.extra["no_launch"]
    linked = np.flatnonzero(calls >= 0)
    assert (table.calls.correlation[calls[linked]] == table.activities.correlation[linked]).all()


# -- what ran on the host

# The right values count an optimizer range once more where Kineto copied it to the lane of the device. The steps are
# told apart from such copies, and so are these: what is here is the number on the host.
COPIED_RANGES = {
    "hta-a100-ddp-nccl-meta-rank0.json.gz": {"Optimizer.step#SGD.step": 3},
    "hta-mi250-toy-train.json.gz": {"Optimizer.step#SGD.step": 1},
    "hta-gp100-sgd-10steps.json.gz": {"Optimizer.zero_grad#SGD.zero_grad": 5, "Optimizer.step#SGD.step": 5},
    "tracelens-mi300-resnet-ddp8-actckpt-rank0.json.gz": {"Optimizer.step#SGD.step": 3},
}


@every_trace
def test_host(item: Item) -> None:
    table, right = table_of(item), item.right
    calls = Counter(name for name in table.named(table.calls.name) if "Synchronize" in name)
    assert calls == right["sync_calls"]
    assert len(range_names(table, r"enumerate\(DataLoader\)")) == right["dataloader_ranges"]
    copies = COPIED_RANGES.get(item.name, {})
    assert Counter(range_names(table, r"Optimizer\.")) == {**right["optimizer"], **copies}
    rows = table.ranges
    loads = [re.match(r"enumerate\(DataLoader\)", name) is not None for name in table.named(rows.name)]
    time = rows.duration[np.array(loads, dtype=bool) & (rows.kind == ANNOTATION)].sum()
    assert (sum(loads), time) == (item.extra["dataloader"][0], near(item.extra["dataloader"][1]))


@pytest.mark.parametrize("name", COPIED_RANGES)
def test_copied_ranges(name: str) -> None:
    if name not in ITEMS:
        pytest.skip("the whole corpus is not beside this checkout")
    lanes: dict[str, Counter[str]] = {"user_annotation": Counter(), "gpu_user_annotation": Counter()}
    for event in events_of(ITEMS[name].path):
        if event.get("cat") in lanes and event["name"] in COPIED_RANGES[name]:
            lanes[event["cat"]][event["name"]] += 1
    assert lanes["user_annotation"] == COPIED_RANGES[name]
    right = {key: ITEMS[name].right["optimizer"][key] for key in COPIED_RANGES[name]}
    assert lanes["user_annotation"] + lanes["gpu_user_annotation"] == right


@every_trace
def test_categories(item: Item) -> None:
    counts = dict(table_of(item).counts)
    assert sum(counts.values()) == item.right["n_events"]
    assert counts.get("python_function", 0) == item.right["python_function"]
    without = sum(counts.pop(key) for key in list(counts) if key.startswith("phase "))
    assert {**counts, **({"null": without} if without else {})} == item.right["cats"]


INPUT_TYPES = ("float", "double", "c10::Half", "c10::BFloat16")


@every_trace
def test_input_types(item: Item) -> None:
    """The recorded types of all operator inputs; ranges that old traces list among the operators are none."""
    if item.path.stat().st_size > 1 << 20:
        pytest.skip("json takes seconds for it")
    table = table_of(item)
    marks = re.compile(r"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)|DistributedDataParallel\.|## ")
    expected: Counter[str] = Counter()
    for event in events_of(item.path):
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "Operator") and not marks.match(event["name"]):
            arguments = event.get("args", {})
            expected.update(arguments.get("Input type", arguments.get("Input Type", ())))
    found: Counter[str] = Counter()
    calls = np.bincount(table.operators.signature, minlength=len(table.signatures))
    for signature, count in zip(table.signatures, calls.tolist(), strict=True):
        for kind in msgspec.json.decode(signature.types) if signature.types else ():
            found[kind] += count
    assert {kind: found[kind] for kind in INPUT_TYPES} == {kind: expected[kind] for kind in INPUT_TYPES}


# -- what the document says


@every_trace
def test_machine_and_job(item: Item) -> None:
    head, right = table_of(item).head, item.right
    listed = [
        [device.name, device.sm_count, device.memory_bytes, *(device.compute or (None, None))]
        for device in devices(head)
    ]
    if "computeProperties" in head:  # so the list was called once; the right values do not read it
        assert [device[0] for device in listed] == ["Tesla V100-DGXS-32GB"] * 4 and "devices" not in right
    else:
        assert listed == right.get("devices", [])
    where, profile = place(head), profile_of(item)
    job = right.get("distributedInfo", {})
    if isinstance(job, str):  # the right values hold the beginning of a long text
        assert json.dumps(head["distributedInfo"]).startswith(job)
        job = json.loads(job.split(', "pg_count"')[0] + "}")
    else:
        assert head.get("distributedInfo", {}) == job
    assert (where.rank, where.world_size, where.backend) == (job.get("rank"), job.get("world_size"), job.get("backend"))
    assert (profile.rank, profile.world_size) == (where.rank, where.world_size)
    for key in ("schemaVersion", "record_shapes", "with_stack"):
        assert head.get(key) == right.get(key), key
    for key in ("cuda_runtime_version", "cuda_driver_version", "hip_runtime_version", "hip_driver_version"):
        assert head.get(key) == right.get(key), key
    assert profile.device == ((listed[0][0] or None) if listed else None)


# -- exact arithmetic


def covered(intervals: Iterable[tuple[Any, Any]]) -> Any:
    """Length of a union, by sweeping."""
    total, reach = Decimal(0), None
    for start, end in sorted(intervals):
        if reach is None or start > reach:
            total += end - start
            reach = end
        elif end > reach:
            total += end - reach
            reach = end
    return total


ON_DEVICE = ("kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset")


@pytest.mark.parametrize("item", COPIED, ids=str)
def test_unions_are_closer_than_the_right_values(item: Item) -> None:
    """All times are taken from the first event on, so that a union loses less than a nanosecond per microsecond."""
    events = json.loads(text_of(item.path), parse_float=Decimal, parse_int=Decimal)["traceEvents"]
    spans: dict[str, list[tuple[Decimal, Decimal]]] = {"all": [], "kernel": []}
    for event in events:
        category = str(event.get("cat")).lower()
        if event.get("ph") == "X" and category in ON_DEVICE:
            span = (Decimal(event["ts"]), Decimal(event["ts"]) + Decimal(event["dur"]))
            spans["all"].append(span)
            if category == "kernel":
                spans["kernel"].append(span)
    profile = profile_of(item)
    if not spans["all"]:
        assert profile.busy_us is None
        return
    whole = float(max(end for _, end in spans["all"]) - min(start for start, _ in spans["all"]))
    for ours, exact, right in (
        (profile.busy_us, float(covered(spans["all"])), item.right["gpu_busy_us"]),
        (profile.kernels_busy_us, float(covered(spans["kernel"])), item.right["kernel_union_us"]),
        (profile.span_us, whole, item.right["gpu_span_us"]),
    ):
        assert ours == pytest.approx(exact, abs=1e-3)
        assert right == pytest.approx(exact, abs=0.06)


# -- other tools: where they differ from the right value, ours is the right value, and this is why they differ

COPIES_AS_STEPS = "counts the copies of ProfilerStep on the lane of the device as steps"
LONGER_STEPS = "a step ends with the last device work that it launched"
ONE_STEP = "takes the whole recording as one step where there is no ProfilerStep"
NO_OPERATORS = "has no window without operators on the host"
RAISES = "raises"
TB = {
    "hta-mi250-toy-train.json.gz": COPIES_AS_STEPS,
    "tracelens-h100-timesformer.json.gz": COPIES_AS_STEPS,
    "tracelens-h100-vit-nsfw.json.gz": COPIES_AS_STEPS,
    "tracelens-mi300-vit-nsfw.json.gz": COPIES_AS_STEPS,
    "tracelens-h100-bert-small.json.gz": COPIES_AS_STEPS,
    "tracelens-h100-qwen15-05b.json.gz": COPIES_AS_STEPS,
    "tracelens-mi300-qwen15-05b.json.gz": COPIES_AS_STEPS,
    "tracelens-mi300-owlv2.json.gz": COPIES_AS_STEPS,
    "tracelens-mi300-resnet-ddp8-actckpt-rank0.json.gz": COPIES_AS_STEPS,
    "kineto-resnet50-nw0-steps5-10.pt.trace.json.gz": LONGER_STEPS,
    "kineto-resnet50-nw4-steps5-10.pt.trace.json.gz": LONGER_STEPS,
    "kineto-resnet50-nw4-steps16-21.pt.trace.json.gz": LONGER_STEPS,
    "hta-a100-alexnet-bench.json.gz": ONE_STEP,
    "hta-a100-cupti-range-counters.json.gz": ONE_STEP,
    "hta-mtia-inference-rank0.json.gz": ONE_STEP,
    "hta-uint64-comms-id.json.gz": ONE_STEP,
    "hta-gp100-sgd-10steps.json.gz": ONE_STEP,
    "tracelens-mi300-norm-layers.json.gz": ONE_STEP,
    "tracelens-mi300-torch-compile.json.gz": ONE_STEP,
    "tracelens-mi300-sglang-qwen3-prefill.json.gz": ONE_STEP,
    "tracelens-mi300-vllm-graph-exec.json.gz": ONE_STEP,
    "tracelens-mi300-gemm-misaligned.json.gz": ONE_STEP,
    "tracelens-mi300-sdpa-short-seq.json.gz": ONE_STEP,
    "param-2080ti-resnet-cifar-30steps.json.gz": ONE_STEP,
    "hta-v1-category-names-rank1.json.gz": NO_OPERATORS,
    "tracelens-mi210-gpu-only-train.json.gz": NO_OPERATORS,
    "kineto-h100-cuda-sync-before-fix.json": RAISES,
    "kineto-h100-cuda-sync-after-fix.json": RAISES,
}


@every_trace
def test_torch_tb_profiler(item: Item) -> None:
    profile, peer, why = profile_of(item), item.tb, TB.get(item.name)
    if why == RAISES:
        assert peer["err"] is not None and profile.status == "ok"
        return
    step = peer["perf"]["Average Step Time"]
    use = dict(peer["gpu"] or ()).get("GPU Utilization")
    if why is None:
        assert peer["steps"] == profile.steps
        assert step == pytest.approx(profile.step_mean_us, abs=1)
        if profile.kernels_busy_in_steps is not None:
            assert use is not None
            assert float(use.split()[0]) == pytest.approx(100 * profile.kernels_busy_in_steps, abs=0.006)
    elif why == COPIES_AS_STEPS:
        lanes = Counter(
            event["cat"] for event in events_of(item.path) if str(event.get("name")).startswith("ProfilerStep#")
        )
        assert peer["steps"] == lanes["user_annotation"] + lanes["gpu_user_annotation"]
        assert profile.steps == lanes["user_annotation"] < peer["steps"]
        assert step < profile.step_mean_us  # a mean over short copies
    elif why == LONGER_STEPS:
        assert peer["steps"] == profile.steps and step > profile.step_mean_us + 1
    elif why == ONE_STEP:
        assert (peer["steps"], profile.steps, profile.step_mean_us) == (1, 0, None)
    else:
        assert step < 0 and (profile.steps, profile.step_mean_us) == (0, None)


def test_a_replayed_graph_is_not_idle() -> None:
    """Its kernels lie outside of the window of torch-tb-profiler, which prints 0.0 % for a device that is busy."""
    item = ITEMS["tracelens-mi300-vllm-graph-exec.json.gz"]
    assert dict(item.tb["gpu"])["GPU Utilization"] == "0.0 %"
    profile = profile_of(item)
    assert profile.busy_us and profile.span_us and profile.busy_us / profile.span_us == pytest.approx(0.99763, abs=6e-6)


def said_by_hta(item: Item) -> tuple[float, float] | None:
    """Busy time and span, where it did not raise."""
    found = item.hta["temporal"]
    return found and (found["compute_time(us)"] + found["non_compute_time(us)"], found["kernel_time(us)"])


WITHOUT_LAST_STEP = "leaves out the last ProfilerStep"
WAITING = "counts what has a stream as device work: waiting for events, operators that name a stream"
WHOLE_MICROSECONDS = "moves starts up and ends down to whole microseconds"
HTA_DIFFERS = {
    "hta-a100-alexnet-bench.json.gz": WAITING,
    "hta-a100-event-sync.json.gz": WAITING,
    "tracelens-mi300-torch-compile.json.gz": WAITING,
    **dict.fromkeys(
        (
            "hta-mi250-toy-train.json.gz",
            "tracelens-h100-vit-nsfw.json.gz",
            "tracelens-mi300-vit-nsfw.json.gz",
            "tracelens-h100-bert-small.json.gz",
            "tracelens-mi300-qwen15-05b.json.gz",
            "tracelens-mi300-owlv2.json.gz",
            "tracelens-mi210-gpu-only-train.json.gz",
            "tracelens-mi300-norm-layers.json.gz",
            "tracelens-mi300-sglang-qwen3-prefill.json.gz",
            "tracelens-mi300-vllm-graph-exec.json.gz",
            "tracelens-mi300-graph-capture-no-kernels.json.gz",
            "tracelens-mi300-sdpa-short-seq.json.gz",
        ),
        WHOLE_MICROSECONDS,
    ),
    **dict.fromkeys(
        (
            "kineto-resnet50-nw0-steps5-10.pt.trace.json.gz",
            "kineto-resnet50-nw4-steps5-10.pt.trace.json.gz",
            "kineto-resnet50-nw4-steps16-21.pt.trace.json.gz",
            "hta-v100x2-ddp-rank1.json.gz",
            "hta-a100-ddp-nccl-meta-rank0.json.gz",
            "hta-a100x16-torchrec-rank0.json.gz",
            "hta-a100x8-control-rank3.json.gz",
            "hta-128rank-sampled-rank0.json.gz",
            "hta-128rank-sampled-rank1.json.gz",
            "tracelens-mi300-resnet-ddp8-actckpt-rank0.json.gz",
        ),
        WITHOUT_LAST_STEP,
    ),
}


@every_trace
def test_holistic_trace_analysis(item: Item) -> None:
    profile, peer, why = profile_of(item), said_by_hta(item), HTA_DIFFERS.get(item.name)
    if peer is None:
        assert item.hta["temporal_err"] is not None and profile.status == "ok"
        return
    if item.name == "hta-mtia-inference-rank0.json.gz":  # an accelerator, whose events are no kernels
        assert peer[0] / peer[1] > 0.94 and profile.busy_us is None
        return
    if item.name == "tracelens-h100-timesformer.json.gz":  # 12 us less than rounding explains, of 157893
        assert peer[0] == pytest.approx(rounded(item), abs=12) and peer[0] < profile.busy_us
        return
    if why is None:
        assert peer == (profile.busy_us, profile.span_us)
        return
    assert peer[0] != pytest.approx(profile.busy_us, abs=1)
    if why == WITHOUT_LAST_STEP:
        assert profile.span_us is not None and profile.step_mean_us is not None and profile.steps >= 2
        assert peer[1] < profile.span_us - 0.5 * profile.step_mean_us
    else:
        assert peer[0] == rounded(item)
        assert (peer[0] > profile.busy_us) == (why == WAITING)


def rounded(item: Item) -> float:
    """The busy time of HTA: whole microseconds, and all events of a stream."""
    spans = []
    for event in events_of(item.path):
        stream = (event.get("args") or {}).get("stream", -1)
        if event.get("ph") == "X" and isinstance(stream, int) and stream >= 0:
            start = math.ceil(event["ts"])
            spans.append((start, max(start, math.floor(event["ts"] + event["dur"]))))
    return float(covered(spans))


@every_trace
def test_overlap(item: Item) -> None:
    """The share of communication that other kernels hide: equal to HTA's where that takes all steps."""
    peer = (item.hta["overlap"] or [{}])[0].get("comp_comm_overlap_pctg")
    if peer is None or math.isnan(peer):
        assert not profile_of(item).nccl_kernels or item.hta["temporal_err"]
        return
    union = item.extra["comm_union_us"]
    share = 100 * (1 - profile_of(item).exposed_comm_us / union)
    assert 0 <= share <= 100
    if HTA_DIFFERS.get(item.name) != WITHOUT_LAST_STEP:
        assert share == pytest.approx(peer, abs=0.006)


def test_ranks_in_their_order() -> None:
    """Eight ranks of one job, whatever the order of the paths: the communication times of the README."""
    paths = [item.path for item in READ if item.name.startswith("param-dlrm8/")]
    assert len(paths) == 8
    found = survey([paths[place] for place in (3, 0, 7, 1, 6, 2, 5, 4)], Options(workers=1))
    assert [file.rank for file in found.files] == list(range(8))
    assert [file.nccl_us for file in found.files] == [5798, 11336, 3492, 9774, 6587, 6251, 3558, 1746]
    assert found.files == survey(paths, Options(workers=2)).files
    assert found.ranks == survey(paths, Options(workers=1)).ranks


def test_files_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "BESIDE_FROM_BYTES", 0)
    paths = [item.path for item in READ if item.name.startswith(("param-dlrm8/", "hta-uint64"))]
    paths.append(COPIES / "traces" / FOREIGN[0])
    assert survey(paths, Options(workers=2)) == survey(paths, Options(workers=1))


def test_a_folder() -> None:
    """Each file for itself: one that is cut or foreign takes no other with it."""
    found = survey([COPIES / "traces"], Options(workers=1))
    assert len(found.files) == len(list((COPIES / "traces").rglob("*.json*")))
    odd = {Path(file.path).name: file.status for file in found.files if file.status != "ok"}
    assert odd == {FOREIGN[0]: "refused", CUT[1]: "partial"}


# -- files that are not whole, and files of other tools


def whole_events(text: bytes) -> int:
    """How many whole events a cut text begins with, one by one with json."""
    rest = text.decode("utf-8", "replace")
    place, count = re.search(r'"traceEvents"\s*:\s*\[', rest).end(), 0  # type: ignore[union-attr]
    while True:
        place = re.compile(r"[\s,]*").match(rest, place).end()  # type: ignore[union-attr]
        try:
            _, place = json.JSONDecoder().raw_decode(rest, place)
        except json.JSONDecodeError:
            return count
        count += 1


def inflated(stored: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(stored)


@pytest.mark.parametrize("name", CUT)
def test_cut(name: str) -> None:
    if name not in ITEMS:
        pytest.skip("the whole corpus is not beside this checkout")
    path = ITEMS[name].path
    profile = survey([path], Options()).files[0]
    assert profile.status == "partial"
    assert profile.events == whole_events(inflated(path.read_bytes())) > 1000
    assert profile.reason is not None and "truncated: the text ends inside the list of events" in profile.reason
    assert ("the gzip stream ends early" in profile.reason) == ("gzip" in name)


@pytest.mark.parametrize("share", [0.2, 0.37, 0.6, 0.99])
@pytest.mark.parametrize(
    "name", ["kineto-gpu-metrics-input.json", "tracelens-h100-bert-small.json.gz", "hta-128rank-sampled-rank0.json.gz"]
)
def test_cut_anywhere(tmp_path: Path, name: str, share: float) -> None:
    stored, packed = ITEMS[name].path.read_bytes(), name.endswith(".gz")
    path = tmp_path / name
    path.write_bytes(stored[: int(share * len(stored))])
    table = read_table(path, 1)
    text = inflated(path.read_bytes()) if packed else path.read_bytes()
    assert table.events == whole_events(text) > 0
    ends = "truncated: the text ends inside the list of events"
    assert table.lost == (("truncated: the gzip stream ends early", ends) if packed else (ends,))


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign(name: str) -> None:
    if name not in ITEMS:
        pytest.skip("the whole corpus is not beside this checkout")
    profile = survey([ITEMS[name].path], Options()).files[0]
    assert (profile.status, profile.kernels, profile.busy_us) == ("refused", None, None)
    assert profile.reason is not None
    if "rocprof" in name:
        assert profile.reason.startswith(f"{name} is an export of rocprofv3, not of torch.profiler: record with")
    else:
        assert profile.events == 37
        assert profile.reason.startswith("none of its events is an operator, a launch or a kernel: give a trace")


# -- secrets

WITH_ENVIRONMENT = [item for item in READ if "tracelens-h100" in item.name or "tracelens-mi300-vit" in item.name]


@pytest.mark.parametrize("item", WITH_ENVIRONMENT, ids=str)
def test_no_environment_is_kept(tmp_path: Path, item: Item) -> None:
    """Ten published traces carry the environment of the process, with a token (here: a placeholder) in it."""
    if b"HF_TOKEN" not in text_of(item.path):
        pytest.skip("it carries none")
    table = table_of(item)
    assert "HF_TOKEN" not in repr(table) and "HF_TOKEN" not in repr(profile_of(item))
    Store(tmp_path).put(item.path, table)
    kept = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(kept) == 6
    for content in kept:
        assert b"HF_TOKEN" not in content and b"hf_" not in content and b"HOSTNAME" not in content
    for rows in (table.names, table.threads, table.signatures, table.collectives, table.head):
        assert "hf_xxx" not in repr(rows)


# -- recordings of one H200


@pytest.mark.skipif(not H200.exists(), reason="the recordings are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "kernels", "kernel_ms", "steps_ms"),
    [
        ("h200_gpt_naive_bf16", 1724, 224.045, (58.8, 86.7)),
        ("h200_gpt_fused_compiled_bf16", 393, 61.733, None),
        ("h200_resnet50_dataloader_bound_fp32", 1474, 62.684, (154.6, 153.4)),
        ("h200_gpt_launch_bound_fp32", 2232, 9.186, (31.4, 30.6)),
    ],
)
def test_h200(name: str, kernels: int, kernel_ms: float, steps_ms: tuple[float, float] | None) -> None:
    path = H200 / f"{name}.json.gz"
    profile, table = survey([path], Options(workers=1)).files[0], read_table(path, 1)
    assert (profile.status, profile.kernels, profile.steps) == ("ok", kernels, 2)
    assert profile.kernel_us == pytest.approx(1000 * kernel_ms, abs=0.5)
    rows = table.ranges
    marked = [name.startswith("ProfilerStep#") for name in table.named(rows.name)]
    durations = rows.duration[np.array(marked)]
    assert len(durations) == 2  # the range on the lane of the device, which lasts 0.8 us once, is no step
    if steps_ms is not None:
        assert durations.tolist() == pytest.approx([1000 * step for step in steps_ms], abs=50)


def test_h200_annotated() -> None:
    profile = survey([COPIES.parent / "h200_gpt_naive_bf16_annotated.json.gz"], Options(workers=1)).files[0]
    assert (profile.kernels or 0) + (profile.memcpys or 0) + (profile.memsets or 0) == 548
    assert profile.busy_us == pytest.approx(86270, abs=5)


@pytest.mark.skipif(not H200.exists(), reason="the recordings are not beside this checkout")
def test_the_recorder_says_0_for_clusters() -> None:
    """A known wrong value: it is kept as recorded here; what is made of it must not take it for a real 0."""
    table = read_table(H200 / "h200_gpt_naive_bf16.json.gz", 1)
    rows = table.activities
    nvjet = np.array(["nvjet" in name for name in table.named(rows.name)])
    assert nvjet.any() and (rows.occupancy[nvjet] == 0).all() and (rows.shared[nvjet] > 48 << 10).all()
