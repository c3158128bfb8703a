"""What one recording says, worked out by hand: model FLOPs over step time and peak, what is left above the floors."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import BF16, FLOAT, GEMM, H200, UNKNOWN, Event, Loop, loops, training

from advisor import calibration
from advisor.fileprofile import machine_of, profile_of
from advisor.ingest.reader import read_table
from advisor.measured import FileProfile

ROOT = Path(__file__).parents[1]
DATA, SAMPLE = ROOT / "tests" / "data", ROOT / "samples" / "nano_gpt" / "h200" / "trace.json.gz"
SHARED = ROOT.parent / "shared"
CORPUS = sorted((DATA / "corpus" / "traces").rglob("*.json*"))
LARGE = sorted((SHARED / "corpus" / "traces").glob("*.json*"))
RECORDED = sorted((SHARED / "h200").glob("*.json.gz"))
FOREIGN = ("xprof-tf-chrome-trace-foreign.json", "tracelens-rocprofv3-not-kineto.json.gz")
EVERY = [*CORPUS, SAMPLE, *sorted((DATA / "what_if").glob("*.gz")), *RECORDED]
EVERY += [path for path in LARGE if all(path.name != copied.name for copied in CORPUS)]
EVERY = [path for path in EVERY if path.name not in FOREIGN]
BF16_PEAK, TF32_PEAK, FP32_PEAK, BANDWIDTH = 989.4e12, 494.7e12, 66.9e12, 4.8e12  # H200 SXM datasheet, dense

Read = Callable[..., FileProfile]


def profiled(path: Path, peak: float | None = None, measured: Path | None = None) -> FileProfile:
    table = read_table(path, 1)
    return profile_of(path, table, machine_of(table, peak, measured))


@cache
def recorded(name: str) -> FileProfile:
    path = SHARED / "h200" / f"h200_{name}.json.gz"
    if not path.exists():
        pytest.skip("the recordings are not beside this checkout")
    return profiled(path)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """A function from a loop, and if need be the device, to its profile."""

    def go(loop: Loop, device: Event | None = H200, peak: float | None = None, **more: Any) -> FileProfile:
        return profiled(loop.save(tmp_path / "trace.json", device, **more), peak)

    return go


def gaps(profile: FileProfile) -> dict[str, str]:
    return {gap.what: gap.why for gap in profile.gaps}


# -------------------------------------------------------------------------------------------------- recorded on an H200


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The sizes of a recorded model; figures are per step, parameters those of matrix products with the head."""

    layers: int
    width: int
    context: int
    batch: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def linear(self) -> int:
        return 6 * (self.layers * 12 * self.width**2 + self.vocabulary * self.width) * self.tokens

    @property
    def attention(self) -> int:
        return 12 * self.layers * self.width * self.context * self.tokens


NAIVE = Gpt(2, 2048, 2048, 4, 50257)
PADDED = Gpt(2, 2048, 2048, 4, 50264)  # the compiler pads the vocabulary to a multiple of 8
TINY = Gpt(4, 256, 256, 8, 8192)
NANO = Gpt(12, 2048, 2048, 8, 50257)


def device_steps(path: Path) -> list[float]:
    """Steps in microseconds out of the document: from the end of what was launched before to the end of its own."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    ends: list[float] = [marks[0][0]]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    reach = [event["ts"] + event["dur"] for event in device if event["args"]["correlation"] not in launches]
    ends[0] = max([ends[0], *reach])
    for begin, end in marks:
        own = [
            event["ts"] + event["dur"]
            for event in device
            if begin <= launches.get(event["args"]["correlation"], -math.inf) < end
        ]
        ends.append(max(own))
    return [later - earlier for earlier, later in pairwise(ends)]


@pytest.mark.parametrize("name", ["gpt_naive_bf16", "gpt_fused_compiled_bf16", "gpt_launch_bound_fp32", "sample"])
def test_the_step_is_that_of_the_device(name: str) -> None:
    profile = profiled(SAMPLE) if name == "sample" else recorded(name)
    path = SAMPLE if name == "sample" else SHARED / "h200" / f"h200_{name}.json.gz"
    assert profile.device_step_us == pytest.approx(statistics.median(device_steps(path)), abs=0.01)


def test_mfu_of_the_naive_gpt() -> None:
    """(6 N + 12 L d T) x tokens / (step x 989.4 TFLOP/s)."""
    found = recorded("gpt_naive_bf16")
    flops = NAIVE.linear + NAIVE.attention
    assert flops == 10_831_471_312_896
    assert found.utilisation.model_flops_per_step == flops
    assert found.device_step_us == pytest.approx(86_912.04, abs=0.01)
    assert found.mfu == pytest.approx(flops / (86_912.04e-6 * BF16_PEAK), rel=1e-6) == pytest.approx(0.12596, abs=1e-5)
    assert found.mfu_own_peak == pytest.approx(found.mfu)  # all products ran in bfloat16
    assert found.hfu == found.mfu  # nothing is computed twice
    assert found.mfu_causal is None  # two products and a mask do not say that half of them is hidden
    assert found.utilisation.achieved_flops == pytest.approx(flops / 86_912.04e-6, rel=1e-6)
    assert (found.utilisation.peak_flops, found.utilisation.of_measured) == (BF16_PEAK, None)
    assert found.utilisation.peak_source is not None and "datasheet" in found.utilisation.peak_source


def test_mfu_of_the_compiled_gpt() -> None:
    """Attention is one operator here: its causal half and what its backward kernel computes again are known."""
    found = recorded("gpt_fused_compiled_bf16")
    flops, step_s = PADDED.linear + PADDED.attention, (found.device_step_us or 0) / 1e6
    assert found.utilisation.model_flops_per_step == flops
    for share, count in (
        (found.mfu, flops),
        (found.mfu_causal, flops - PADDED.attention / 2),
        (found.hfu, flops + PADDED.attention / 3 / 2),  # half of the forward pass once more
        (found.mfu_own_peak, flops),
    ):
        assert share == pytest.approx(count / (step_s * BF16_PEAK), rel=1e-9)
    assert found.mfu_causal is not None and found.mfu is not None and found.hfu is not None
    assert found.mfu_causal < found.mfu < found.hfu < 1
    assert found.mfu == pytest.approx(0.5223, abs=1e-4)


def test_mfu_of_a_float32_gpt_that_is_bound_by_launches() -> None:
    """The headline divides by the dense bfloat16 peak whatever the script computes in; its own peak is 66.9 TFLOP/s."""
    found = recorded("gpt_launch_bound_fp32")
    flops, step_s = TINY.linear + TINY.attention, (found.device_step_us or 0) / 1e6
    assert found.utilisation.model_flops_per_step == flops
    assert found.mfu == pytest.approx(flops / (step_s * BF16_PEAK), rel=1e-9)
    assert found.mfu_own_peak == pytest.approx(flops / (step_s * FP32_PEAK), rel=1e-9)
    assert found.tensor_time["yes"] == 0
    assert found.breakdown is not None
    assert found.breakdown.idle_us / found.breakdown.length_us == pytest.approx(0.85, abs=0.01)
    assert max(found.breakdown.idle_by_cause_us, key=lambda cause: found.breakdown.idle_by_cause_us[cause]) == "launch"  # type: ignore[union-attr]  # fmt: skip


def test_mfu_of_resnet50_is_between_its_two_peaks() -> None:
    """Convolutions may round to TF32 by default, products may not: the own peak is a mean of 494.7 and 66.9."""
    found = recorded("resnet50_dataloader_bound_fp32")
    assert found.mfu is not None and found.mfu_own_peak is not None
    assert found.mfu * BF16_PEAK / TF32_PEAK < found.mfu_own_peak < 1.01 * found.mfu * BF16_PEAK / TF32_PEAK
    assert found.host is not None and found.host.data_share is not None and found.host.data_share > 0.5
    assert found.breakdown is not None
    causes = found.breakdown.idle_by_cause_us
    assert causes["data"] > 0.5 * found.breakdown.length_us


def test_the_sample_on_an_h200() -> None:
    """Twelve layers; recorded in this repository."""
    found = profiled(SAMPLE)
    flops = NANO.linear + NANO.attention
    assert (found.status, found.steps, found.steps_from, found.device) == ("ok", 2, "ProfilerStep", "NVIDIA H200")
    assert found.utilisation.model_flops_per_step == flops
    step_us = statistics.median(device_steps(SAMPLE))
    assert found.mfu == pytest.approx(flops / (step_us / 1e6 * BF16_PEAK), rel=1e-9) == pytest.approx(0.1486, abs=1e-4)
    families = {cost.name: cost for cost in found.costs if cost.kind == "family"}
    thin = 128 * (2 * 2048 * 128 + 2048 * 2048) * 2  # one product of attention, bound by memory
    floor = NANO.linear / BF16_PEAK * 1e6 + 6 * NANO.layers * thin / BANDWIDTH * 1e6
    assert families["matmul"].floor_us == pytest.approx(floor, rel=1e-6)
    assert found.recoverable_us == pytest.approx(sum(cost.recoverable_us or 0 for cost in families.values()))
    assert not found.gaps


# --------------------------------------------------------------------------------------------------------- made by hand


def test_figures_of_a_loop(read: Read) -> None:
    """Three products of 137.4, 34.4 and 34.4 GFLOP and a sum in 800 us, the first step after its launch."""
    found = read(training())
    flops = 2 * 4096 * (4096 * 4096 + 2 * 4096 * 1024)
    assert (found.steps, found.device_step_us, found.kernels, found.kernel_us) == (3, 800, 12, 2400)
    assert found.utilisation.model_flops_per_step == flops
    assert found.mfu == pytest.approx(flops / (800e-6 * BF16_PEAK))
    floors = flops / BF16_PEAK * 1e6 + 3 * (4 << 24) / BANDWIDTH * 1e6
    assert found.recoverable_us == pytest.approx(800 - floors)
    assert found.tensor_time == {"yes": 700 / 800, "no": 100 / 800, "unknown": 0}
    assert found.breakdown is not None
    assert found.breakdown.compute_us == 800
    # The first step begins on the host: an operator, a launch and its way to the device are 6 us before any kernel.
    assert found.breakdown.idle_us == pytest.approx(6 / 3)
    assert not found.gaps
    counts = {cost.title: (cost.count, cost.time_us) for cost in found.costs if cost.kind == "operator"}
    assert counts["aten::mm [4096, 4096] x [4096, 4096] bfloat16"] == (1, 250)


def test_the_own_peak_weighs_each_dtype(read: Read) -> None:
    loop = Loop()
    for _ in range(3):
        with loop.step():
            loop.mm(4096, 4096, 4096, 400.0)
            loop.mm(4096, 4096, 4096, 600.0, kernel="cutlass_80_simt_sgemm", dtype=FLOAT)
    found = read(loop)
    flops = 2 * 4096**3
    assert found.device_step_us == 1000
    assert found.mfu == pytest.approx(2 * flops / (1e-3 * BF16_PEAK))
    assert found.mfu_own_peak == pytest.approx((flops / BF16_PEAK + flops / FP32_PEAK) / 1e-3)


def test_a_given_peak_is_the_one_that_is_divided_by(read: Read) -> None:
    found, usual = read(training(), peak=1e15), read(training())
    assert found.mfu is not None and usual.mfu is not None
    assert found.mfu == pytest.approx(usual.mfu * BF16_PEAK / 1e15)
    assert (found.utilisation.peak_flops, found.utilisation.peak_source) == (1e15, "given with --peak")
    assert found.recoverable_us == usual.recoverable_us  # floors stay those of the datasheet


def test_an_unknown_device_has_no_mfu_and_says_why(read: Read) -> None:
    found = read(training(), UNKNOWN)
    assert (found.mfu, found.mfu_own_peak, found.mfu_causal, found.hfu) == (None,) * 4
    assert gaps(found) == {"MFU": "no datasheet on record for Experimental GPU"}
    assert "--calibrate" in found.gaps[0].collect and "--peak" in found.gaps[0].collect
    assert found.recoverable_us is None
    assert found.utilisation.model_flops_per_step is not None  # what was computed is known all the same
    assert found.occupancy.percent is None


def test_an_unknown_device_takes_a_peak(read: Read) -> None:
    found = read(training(), UNKNOWN, peak=1e15)
    assert found.mfu == pytest.approx(2 * 4096 * (4096 * 4096 + 2 * 4096 * 1024) / (800e-6 * 1e15))
    assert not found.gaps


@pytest.mark.parametrize("device", [None, {**H200, "name": ""}])
def test_a_device_without_a_name_takes_a_peak(read: Read, device: Event | None) -> None:
    """The gate asks for --peak: with it there is a figure and no question left."""
    without = read(training(), device)
    assert without.mfu is None and "share of the peak" in gaps(without)
    found = read(training(), device, peak=1e15)
    assert found.mfu is not None and not found.gaps


def test_a_slice_of_a_device_is_not_the_device(read: Read) -> None:
    found = read(training(), {**H200, "numSms": 60})
    assert found.mfu is None
    assert gaps(found)["MFU"] == "NVIDIA H200 reports 60 multiprocessors, its datasheet says 132"


def test_a_calibrated_device_has_a_share_of_what_it_reached(read: Read, tmp_path: Path) -> None:
    kept = tmp_path / "devices.json"
    figures = {"measured_flops": {"bfloat16": 5e14, "float32": 3e13}, "measured_bandwidth": 2e12, "date": "2026-11-30"}
    calibration.save(kept, "Experimental GPU", 100, figures)
    found = profiled(training().save(tmp_path / "trace.json", UNKNOWN), measured=kept)
    flops = 2 * 4096 * (4096 * 4096 + 2 * 4096 * 1024)
    assert found.mfu == pytest.approx(flops / (800e-6 * 5e14)) == found.utilisation.of_measured
    assert found.utilisation.peak_source is not None
    assert found.utilisation.peak_source.endswith("measured by advisor doctor --calibrate on 2026-11-30")
    assert found.mfu_own_peak is None  # what was reached is no peak
    assert found.recoverable_us is not None  # but the best rate there is for a floor, as in `advisor optimize`


def test_a_known_device_is_found_by_its_own_name(tmp_path: Path) -> None:
    """The datasheet calls it otherwise; the headline stays a share of the datasheet's peak."""
    kept = tmp_path / "devices.json"
    figures = {"measured_flops": {"bfloat16": 789e12}, "measured_bandwidth": 4.3e12, "date": "2026-11-29"}
    calibration.save(kept, "NVIDIA H200", 132, figures)
    path = training().save(tmp_path / "trace.json")
    found, plain = profiled(path, measured=kept), profiled(path)
    assert found.mfu == plain.mfu is not None
    assert found.utilisation.of_measured == pytest.approx(plain.mfu * BF16_PEAK / 789e12)
    assert plain.utilisation.of_measured is None


def test_of_two_devices_mfu_is_the_mean(read: Read) -> None:
    """One process that drives two devices does twice the work of one and is not twice as good."""
    one, two = Loop(), Loop()
    for loop in (one, two):
        for _ in range(3):
            with loop.step():
                loop.mm(4096, 4096, 4096, 400.0)
                if loop is two:
                    loop.mm(4096, 4096, 4096, 400.0, device=1)
    devices = [H200, {**H200, "id": 1}]
    found = read(two, deviceProperties=devices)
    assert found.mfu == pytest.approx(read(one).mfu)
    assert found.utilisation.mfu == found.mfu and found.mfu is not None and found.mfu < 1
    assert any("2 devices" in gap.why and gap.qualifies for gap in found.gaps)


def test_streams_beside_each_other_give_back_no_more_than_they_took(read: Read) -> None:
    """Two streams of sums that take 400 us together in 400 us: 390 us each above their floors is not 780."""
    loop = Loop()
    for _ in range(3):
        with loop.step():
            loop.add(1 << 16, 400.0, stream=7)
            loop.add(1 << 16, 400.0, stream=8)
    found = read(loop)
    assert found.kernel_us == 2400
    assert found.breakdown is not None and found.recoverable_us is not None
    assert found.recoverable_us == found.breakdown.compute_us < 410


def test_much_uncounted_work_makes_mfu_unknown_and_a_little_a_lower_bound(read: Read) -> None:
    def loop(us: float) -> Loop:
        made = Loop()
        for _ in range(3):
            with made.step():
                made.mm(4096, 4096, 4096, 400.0)
                made.call("vendor::fused_linear", [[64, 64]], [BF16], GEMM, us)
        return made

    much, little, hardly = read(loop(200.0)), read(loop(20.0)), read(loop(2.0))
    assert much.mfu is None
    assert gaps(much)["MFU"] == "the arithmetic of vendor::fused_linear (33% of the kernel time) is not counted"
    assert little.mfu is not None and little.gaps[0].qualifies and "lower bound" in little.gaps[0].why
    assert hardly.mfu is not None and not hardly.gaps


def test_a_recording_without_shapes_or_steps_says_so(read: Read) -> None:
    loop, unmarked = Loop(), Loop()
    for _ in range(3):
        with loop.step():
            loop.kernel(GEMM, 100.0)
            with loop.operator("aten::mm"):
                loop.kernel(GEMM, 100.0)
    unmarked.mm(4096, 4096, 4096, 400.0)
    unmarked.add(1024, 10.0)
    shapeless, stepless = read(loop), read(unmarked)
    assert shapeless.mfu is None and "recorded shapes" in gaps(shapeless)["MFU"]
    assert stepless.mfu is None and stepless.device_step_us is None
    assert gaps(stepless) == {"step times": "the steps are not marked", "MFU": "the steps are not marked"}
    assert stepless.recoverable_us is not None  # over the recording
    assert stepless.steps_from is None


def test_steps_that_are_not_trusted_are_not_divided_by(read: Read) -> None:
    """Half of the launches are lost: there is no step time, no MFU, and every figure is over the recording."""
    loop = training(4)
    kept = [event for number, event in enumerate(loop.events) if event["cat"] != "cuda_runtime" or number % 2]
    assert len(kept) < len(loop.events)
    loop.events = kept
    found = read(loop)
    assert "step times" in " ".join(gaps(found))
    assert (found.device_step_us, found.steps_from, found.mfu, found.hfu) == (None,) * 4
    assert found.steps == 4 and found.step_mean_us is not None  # as recorded on the host
    assert found.breakdown is not None and found.breakdown.compute_us == found.kernel_us == 3200
    kernels = [cost for cost in found.costs if cost.kind == "kernel"]
    assert {cost.kind for cost in found.costs} == {"kernel"}
    assert sum(cost.time_us for cost in kernels) == 3200
    assert all(cost.floor_us is None and cost.flops is None and cost.bound is None for cost in kernels)
    assert found.recoverable_us is None


def test_limiters_are_those_of_the_longest_launch(read: Read) -> None:
    loop = Loop()
    launch = {"grid": [1320, 1, 1], "block": [1024, 1, 1], "registers_per_thread": 32, "shared_memory": 0}
    for us, more in ((50.0, launch), (10.0, {**launch, "shared_memory": 200_000})):
        loop.add(1024, us, **more)
    costs = {cost.kind: cost for cost in read(loop).costs}
    assert costs["kernel"].limiter == "warps and registers"
    assert costs["operator"].limiter is None
    assert costs["kernel"].occupancy_percent == pytest.approx((50 * 100 + 10 * 50) / 60)


def test_a_host_without_a_device(read: Read) -> None:
    loop = Loop()
    for _ in range(3):
        with loop.step(), loop.operator("aten::mm", [[64, 64], [64, 64]], [FLOAT] * 2):
            loop.moment += 100
    found = read(loop, None)
    assert (found.kernels, found.kernel_us, found.mfu, found.breakdown, found.recoverable_us) == (
        0,
        None,
        None,
        None,
        None,
    )
    assert found.steps == 3 and found.device_step_us is None and found.host_step_us is not None
    assert found.tensor_time == {} and found.costs == ()
    assert any("nothing of a device is recorded" in gap.why for gap in found.gaps)


# ----------------------------------------------------------------------------------------------------------- invariants


def floats(value: Any) -> Iterator[float]:
    """Every figure in a profile, however deep."""
    if isinstance(value, float):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from floats(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floats(item)


def shares(profile: FileProfile) -> Iterator[float | None]:
    full, use = profile.occupancy, profile.utilisation
    yield from (use.busy, profile.busy_in_steps, profile.kernels_busy_in_steps, full.known, full.sm_efficiency)
    yield from (full.wave_efficiency, *full.limiters.values(), *profile.tensor_time.values())
    yield from (None if percent is None else percent / 100 for percent in (full.percent, full.recorded_percent))
    yield from (None if cost.occupancy_percent is None else cost.occupancy_percent / 100 for cost in profile.costs)


def hold(profile: FileProfile, physical: bool = True) -> None:
    """What is true of every recording; a made-up one may be faster than any device (`physical` is False)."""
    assert all(math.isfinite(figure) for figure in floats(profile))
    for share in shares(profile):
        assert share is None or 0 <= share <= 1 + 1e-12
    for share in (profile.mfu, profile.mfu_causal, profile.mfu_own_peak, profile.hfu):
        assert share is None or 0 <= share <= (1 if physical else math.inf)
    if profile.tensor_time:
        assert sum(profile.tensor_time.values()) == pytest.approx(1)
    if profile.busy_us is not None:
        assert profile.busy_us <= (profile.span_us or 0) + 1e-6
        assert (profile.kernels_busy_us or 0) <= min(profile.busy_us, profile.kernel_us or 0) + 1e-6
        assert 0 <= (profile.exposed_comm_us or 0) <= (profile.nccl_us or 0) + 1e-6
    parts = profile.breakdown
    if parts is not None:
        split = (parts.compute_us, parts.exposed_comm_us, parts.exposed_copy_us, parts.idle_us)
        assert min(split) >= -1e-6
        assert sum(split) == pytest.approx(parts.length_us, rel=1e-6, abs=1e-6)
        if parts.idle_by_cause_us:
            assert sum(parts.idle_by_cause_us.values()) == pytest.approx(parts.idle_us, rel=1e-6, abs=1e-6)
        if profile.recoverable_us is not None:
            assert 0 <= profile.recoverable_us <= parts.compute_us + 1e-6 <= parts.length_us + 2e-6
    for cost in profile.costs:
        assert cost.time_us >= 0 and cost.count > 0
        assert cost.floor_us is None or 0 <= cost.floor_us <= cost.time_us * (1 + 1e-9) + 1e-9
        assert (cost.floor_us is None) == (cost.bound is None) == (cost.recoverable_us is None)
    if profile.mfu is not None:
        assert profile.device_step_us and profile.utilisation.peak_flops
        assert profile.hfu is not None and profile.hfu >= profile.mfu * (1 - 1e-12)
        assert profile.mfu_causal is None or profile.mfu_causal <= profile.mfu * (1 + 1e-12)
        assert profile.utilisation.mfu == profile.mfu
    else:
        assert (profile.mfu_causal, profile.mfu_own_peak, profile.hfu) == (None,) * 3
        assert profile.gaps  # and is told why


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.name)
def test_every_recording_holds(path: Path) -> None:
    hold(profiled(path))


@settings(max_examples=1200, deadline=None)
@given(loop=loops())
def test_every_made_up_loop_holds(tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> None:
    hold(profiled(loop.save(tmp_path_factory.getbasetemp() / "made.json")), physical=False)


@settings(max_examples=1200, deadline=None)
@given(loop=loops(), seed=st.randoms(use_true_random=False))
def test_no_event_matters_by_its_place(
    tmp_path_factory: pytest.TempPathFactory, loop: Loop, seed: random.Random
) -> None:
    path = tmp_path_factory.getbasetemp() / "made.json"
    before = profiled(loop.save(path))
    seed.shuffle(loop.events)
    assert profiled(loop.save(path)) == before


@settings(max_examples=1200, deadline=None)
@given(loop=loops())
def test_damaged_durations_hold(tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> None:
    """A clock that was set back in the middle: sums stay sums, nothing else is claimed."""
    for number, event in enumerate(loop.events):
        if number % 3 == 1:
            event["dur"] = -event["dur"] - 1.0
    found = profiled(loop.save(tmp_path_factory.getbasetemp() / "made.json"))
    hold(found, physical=False)
    if any(event["dur"] < 0 for event in loop.events):
        assert found.device_step_us is None and found.mfu is None and found.breakdown is None


def test_a_recording_twice_as_fast_has_twice_the_mfu(read: Read) -> None:
    fast, slow = read(training()), read(training(factor=2.0))
    assert fast.mfu is not None and slow.mfu is not None
    assert (fast.device_step_us, slow.device_step_us) == (800, 1600)
    assert fast.mfu == pytest.approx(2 * slow.mfu)
    assert fast.recoverable_us is not None and slow.recoverable_us is not None
    assert slow.recoverable_us - fast.recoverable_us == pytest.approx(800)
