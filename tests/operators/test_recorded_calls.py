"""Arithmetic and traffic of recorded calls against torch's counter and against what the device can do at most."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from recorded_calls import Recorded, Recording, read

from advisor.model import Hardware
from advisor.operators.calls import BYTES

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared"
MARGIN = 1.05  # bandwidth: the memory clock of a board and the datasheet's differ by a few percent


@pytest.fixture(scope="module")
def h200() -> Recording:
    return read(DATA / "h200_calls" / "trace.json.gz")


@pytest.fixture(scope="module")
def counted() -> dict[str, float]:
    found: dict[str, float] = json.loads((DATA / "h200_calls" / "counted.json").read_text())
    return found


SEQUENCE, BATCH, WIDTH, HIDDEN = 64, 32, 128, 256
TOKENS = SEQUENCE * BATCH
# What torch 2.11's counter leaves at 0 or gets wrong, by hand.
BY_HAND = {
    "addmm_": 2 * 2048 * 1024 * 4096,
    "addbmm": 2 * 16 * 512 * 256 * 512,
    "mv": 2 * 2048 * 1024,
    "dot": 2 * (1 << 20),
    "int_mm": 2 * 1024**3,
    # each of the 2048 rows, columns or terms belongs to one group
    "grouped 2d 3d": 2 * 2048 * 512 * 1024,
    "grouped 3d 2d": 2 * 1024 * 512 * 2048,
    "grouped 2d 2d": 2 * 1024 * 2048 * 512,
    "grouped 3d 3d": 2 * 4 * 1024 * 512 * 1024,
    # its count of the weight's gradient ignores groups; three times forward
    "conv2d groups": 3 * 2 * 16 * 54 * 54 * 64 * (64 // 4) * 3 * 3,
    "depthwise": 3 * 2 * 16 * 56 * 56 * 64 * 7 * 7,
    "packed equal": 3.5 * 2 * 4 * 16 * 512 * 512 * (64 + 64),
    "packed unequal": 0,  # the lengths are data
    "flash grouped queries": 3.5 * 2 * 4 * 16 * 1024 * 1024 * (64 + 64),  # queries' heads; torch's counter refuses
    # two layers of two directions: gates x hidden x (input + state), forward and twice that backward
    "lstm": 3 * 2 * TOKENS * 2 * 4 * HIDDEN * ((WIDTH + HIDDEN) + (2 * HIDDEN + HIDDEN)),
    # batch first: the 64 are the batch; a projection of 256 to 64
    "lstm projected": 3 * 2 * TOKENS * (4 * HIDDEN * (WIDTH + 64) + HIDDEN * 64),
    "gru": 3 * 2 * TOKENS * 3 * HIDDEN * (WIDTH + HIDDEN),
    "rnn": 3 * 2 * TOKENS * HIDDEN * ((WIDTH + HIDDEN) + 2 * (HIDDEN + HIDDEN)),
}


def test_operations_are_those_torch_counts(h200: Recording, counted: dict[str, float]) -> None:
    names = {label.removeprefix("call ") for _, _, label in h200.labels}
    assert set(counted) | {"flash grouped queries"} == names
    expected = {name: BY_HAND.get(name, counted.get(name, 0)) for name in names}
    found = {
        name: sum(call.work.executed for call in h200.of_label(f"call {name}") if call.work and call.counts is call)
        for name in names
    }
    assert found == expected


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("flash", 1.0),
        ("flash causal", 0.5),
        ("efficient causal", 0.5),
        ("cudnn causal", 0.5),
        ("cudnn cross", 1.0),
        # 1024 queries of 2048 keys, aligned at the top left: query i sees i + 1 keys
        ("efficient causal cross", 1024 * 1025 / 2 / (1024 * 2048)),
        ("efficient mask", None),  # which pairs a tensor hides is data
    ],
)
def test_causal_share_of_recorded_attention(h200: Recording, name: str, share: float | None) -> None:
    works = [call.work for call in h200.of_label(f"call {name}") if call.work and call.counts is call]
    assert len(works) == 2  # forward and backward
    for work in works:
        assert work.causal == (None if share is None else work.model * share)


def fits(call: Recorded, hardware: Hardware) -> bool:
    """Whether a call's data may have stayed in the last cache (MB: datasheets and `cudaDeviceProp.l2CacheSize`)."""
    sizes = {"V100": 6, "A100": 40, "H100": 50, "H200": 60, "MI300X": 256}
    cache = next(size for name, size in sizes.items() if name in hardware.name) * 2**20
    inputs = sum(
        math.prod(shape) * BYTES.get(dtype, 0) for shape, dtype in zip(call.shapes, call.dtypes, strict=False) if dtype
    )
    footprint = inputs if call.name.endswith("_") else call.least_bytes or 0.0
    return footprint <= cache


def too_fast(recording: Recording) -> list[tuple[str, float]]:
    """Calls whose figures ask more of the device than it has: operations per second, or bytes per second."""
    hardware = recording.hardware
    assert hardware is not None and hardware.hbm_bandwidth is not None
    found = []
    for call in recording.calls:
        if call.work is not None and call.counts is call:
            dtype = next((name for name in call.dtypes if name.startswith(("float", "bfloat"))), "")
            if dtype == "float32" and "tfloat32" in hardware.peak_flops:
                dtype = "tfloat32"
            rate = call.work.least / (call.time_us * 1e-6) / hardware.peak_flops.get(dtype, math.inf)
            if rate > 1:
                found.append((call.name, rate))
        if call.least_bytes and not fits(call, hardware):
            rate = call.least_bytes / (call.time_us * 1e-6) / hardware.hbm_bandwidth
            if rate > MARGIN:
                found.append((call.name, rate))
    return found


def test_nothing_recorded_on_its_own_beats_the_device(h200: Recording) -> None:
    """Each call began with a cache full of other data. x * x reads one tensor where its record shows two."""
    assert [name for name, _ in too_fast(h200)] == ["aten::mul"]
    assert too_fast(h200)[0][1] == pytest.approx(1.21, abs=0.01)  # 3 / 2 of what the memory gave


def test_most_of_the_recorded_time_has_a_floor(h200: Recording) -> None:
    known = sum(call.time_us for call in h200.calls if call.least_bytes is not None)
    assert known > 0.97 * sum(call.time_us for call in h200.calls)


NO_RECORD = "the shared recordings are not beside this checkout"
TRACES = {
    "h200/h200_gpt_naive_bf16.json.gz": set(),
    "h200/h200_gpt_fused_compiled_bf16.json.gz": set(),
    "h200/h200_gpt_launch_bound_fp32.json.gz": set(),
    "h200/h200_resnet50_dataloader_bound_fp32.json.gz": set(),
    "corpus/traces/tracelens-h100-bert-small.json.gz": set(),
    "corpus/traces/tracelens-h100-qwen15-05b.json.gz": set(),
    "corpus/traces/tracelens-h100-vit-nsfw.json.gz": set(),
    "corpus/traces/tracelens-mi300-qwen15-05b.json.gz": set(),
    "corpus/traces/tracelens-mi300-norm-layers.json.gz": set(),
    "corpus/traces/tracelens-mi300-torch-compile.json.gz": set(),
    "corpus/traces/tracelens-mi300-sdpa-short-seq.json.gz": set(),
    # 2021, times in whole microseconds. cuDNN's Winograd kernels multiply less than the definition (Lavin and Gray
    # 2016: 2.25 times for 3x3 and tiles of 2x2, 4 times for 4x4). Without strides the expanded gradient of a mean
    # counts in full (div). The optimizer's tensors of 8 MB lie mostly in the cache of 6 (add_), as do activations of
    # 3.2 MB that a convolution has just written (clamp_min).
    "corpus/traces/kineto-resnet50-nw0-steps5-10.pt.trace.json.gz": {
        "aten::cudnn_convolution_backward_input",
        "aten::div",
        "aten::add_",
        "aten::clamp_min",
    },
}


@pytest.mark.parametrize("path", TRACES)
def test_no_recorded_call_beats_the_device(path: str) -> None:
    """Floors are floors: what a call must compute and move takes no longer than it took."""
    if not (SHARED / path).exists():
        pytest.skip(NO_RECORD)
    assert {name for name, _ in too_fast(read(SHARED / path))} <= TRACES[path]
