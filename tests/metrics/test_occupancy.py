"""Occupancy agrees with NVIDIA's calculator, Nsight Compute, Kineto and the TensorBoard plugin, where they know it."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.hardware import SmLimits, arch_name, sm_limits
from advisor.metrics.occupancy import (
    LIMITERS,
    Occupancy,
    block_limits,
    estimated_sm_efficiency,
    occupancy,
    recorded_occupancy,
    sliced_sm_efficiency,
)

SHARED = Path(__file__).parents[3] / "shared"
TRACES = SHARED / "corpus" / "traces"
H200 = SHARED / "h200"
NCU = H200 / "ncu_attention_raw.csv"


def limits_of(arch: str) -> SmLimits:
    limits = sm_limits(arch)
    assert limits is not None
    return limits


def one(arch: str, threads: int, registers: int, shared: int, blocks: float = 1e6, sm_count: int = 100) -> Occupancy:
    return occupancy(
        blocks=[blocks],
        threads=[threads],
        registers=[registers],
        shared_bytes=[shared],
        limits=limits_of(arch),
        sm_count=sm_count,
    )


# Each line is derived by hand from the limits of hardware.toml. Registers: a warp takes 32 * registers, rounded up to
# 256, from one of the 4 register files of 16384 (2 of 32768 on sm_60). Shared memory: the block plus what the driver
# adds, rounded up, into that of the multiprocessor.
@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "fit", "theoretical", "limiter"),
    [
        # 12 warps; 32 * 168 = 5376, 16384 // 5376 = 3 warps per file, 12 in all: 1 block.
        # 188636 + 1024 -> 189696, 233472 // 189696 = 1. 1 * 12 / 64. The recorder says 0.
        ("sm_90", 384, 168, 188_636, 1, 12 / 64, "registers and shared memory"),
        # The same launch on 128 registers: 4 warps per file, 16 in all, still 1 block; shared memory as before.
        ("sm_90", 384, 128, 188_636, 1, 12 / 64, "registers and shared memory"),
        # 64 registers: 8 warps per file, 32 in all, 2 blocks; only shared memory holds it at 1.
        ("sm_90", 384, 64, 188_636, 1, 12 / 64, "shared memory"),
        # 8 warps: 64 // 8 = 8; 2048 registers per warp, 8 per file, 32 in all, 4 blocks; 48 KiB + 1 KiB: 3 blocks.
        ("sm_80", 256, 64, 49_152, 3, 24 / 64, "shared memory"),
        # Without shared memory the registers hold it at 4.
        ("sm_80", 256, 64, 0, 4, 32 / 64, "registers"),
        # 4 warps of 48: 12; 1280 registers per warp, 12 per file, 48 in all: 12. Both, and full.
        ("sm_86", 128, 40, 0, 12, 1.0, "warps and registers"),
        # One warp a block: 32 warps would fit, 16 blocks may be resident.
        ("sm_75", 32, 32, 0, 16, 16 / 32, "blocks"),
        # 32 blocks of one warp on Volta, of 64 warps.
        ("sm_70", 32, 32, 0, 32, 32 / 64, "blocks"),
        # 32 warps; 1024 registers per warp, 16 per file, 64 in all: 2 blocks; 96 KiB of 96 KiB: 1 block.
        ("sm_70", 1024, 32, 98_304, 1, 32 / 64, "shared memory"),
        # 32 * 255 = 8160 -> 8192: 2 warps per file, 8 in all, one block of 8 warps, of 48.
        ("sm_89", 256, 255, 0, 1, 8 / 48, "registers"),
        # 32 * 104 = 3328: 9 per file of 32768, 18 in all, 4 blocks of 4 warps. With four files it would be 16 // 4 = 4.
        ("sm_60", 128, 104, 0, 4, 16 / 64, "registers"),
        # 32 * 88 = 2816: 11 per file of 32768, 22 in all, 5 blocks of 4 warps.
        ("sm_60", 128, 88, 0, 5, 20 / 64, "registers"),
        # 24 blocks of one warp on Blackwell's consumer chips, of 48 warps.
        ("sm_120", 32, 16, 0, 24, 24 / 48, "blocks"),
        # A block of 33 threads takes 2 warps: 32 blocks by warps and by slots.
        ("sm_100", 33, 16, 0, 32, 1.0, "warps and blocks"),
    ],
)
def test_hand_derived_occupancy(
    arch: str, threads: int, registers: int, shared: int, fit: int, theoretical: float, limiter: str
) -> None:
    found = one(arch, threads, registers, shared)
    assert found.blocks_fit[0] == fit
    assert found.theoretical[0] == pytest.approx(theoretical)
    assert found.achieved[0] == found.theoretical[0]  # the grid is large
    assert found.limiter_name(0) == limiter
    assert found.reason_text(0) is None


# Threads per block, registers per thread, shared bytes per block: active blocks per multiprocessor that
# cudaOccMaxActiveBlocksPerMultiprocessor of CUDA 13's cuda_occupancy.h gives with the opt-in to large shared memory.
CALCULATED = [
    ("sm_60", 96, 29, 14011, 4),
    ("sm_60", 32, 135, 6460, 9),
    ("sm_60", 256, 211, 0, 1),
    ("sm_60", 128, 253, 8901, 2),
    ("sm_60", 384, 138, 39699, 1),
    ("sm_60", 448, 97, 0, 1),
    ("sm_61", 96, 221, 0, 2),
    ("sm_61", 32, 49, 10297, 9),
    ("sm_61", 256, 107, 0, 2),
    ("sm_61", 96, 248, 0, 2),
    ("sm_61", 160, 133, 30354, 2),
    ("sm_61", 96, 144, 47427, 2),
    ("sm_70", 256, 241, 16943, 1),
    ("sm_70", 256, 163, 17426, 1),
    ("sm_70", 384, 41, 1185, 3),
    ("sm_70", 160, 70, 37511, 2),
    ("sm_70", 160, 154, 19574, 2),
    ("sm_70", 384, 122, 53787, 1),
    ("sm_75", 64, 150, 0, 6),
    ("sm_75", 192, 214, 26615, 1),
    ("sm_75", 96, 17, 0, 10),
    ("sm_75", 1024, 38, 0, 1),
    ("sm_75", 384, 83, 0, 1),
    ("sm_75", 160, 251, 0, 1),
    ("sm_80", 32, 248, 17524, 8),
    ("sm_80", 384, 130, 74566, 1),
    ("sm_80", 32, 188, 0, 8),
    ("sm_80", 64, 115, 19342, 8),
    ("sm_80", 192, 34, 72331, 2),
    ("sm_80", 160, 29, 46668, 3),
    ("sm_86", 160, 232, 53814, 1),
    ("sm_86", 32, 154, 75334, 1),
    ("sm_86", 64, 219, 85907, 1),
    ("sm_86", 32, 223, 49202, 2),
    ("sm_86", 256, 36, 0, 6),
    ("sm_86", 96, 234, 0, 2),
    ("sm_89", 160, 90, 18962, 4),
    ("sm_89", 160, 49, 9053, 7),
    ("sm_89", 192, 64, 19607, 4),
    ("sm_89", 256, 231, 77852, 1),
    ("sm_89", 192, 187, 0, 1),
    ("sm_89", 192, 55, 54875, 1),
    ("sm_90", 128, 204, 158026, 1),
    ("sm_90", 512, 48, 214103, 1),
    ("sm_90", 160, 164, 0, 2),
    ("sm_90", 32, 128, 69628, 3),
    ("sm_90", 256, 57, 11893, 4),
    ("sm_90", 128, 46, 19227, 10),
    ("sm_100", 448, 114, 0, 1),
    ("sm_100", 32, 178, 746, 8),
    ("sm_100", 256, 211, 0, 1),
    ("sm_100", 32, 120, 0, 16),
    ("sm_100", 128, 243, 3750, 2),
    ("sm_100", 32, 89, 0, 20),
    ("sm_120", 448, 37, 0, 3),
    ("sm_120", 448, 67, 0, 2),
    ("sm_120", 384, 106, 24015, 1),
    ("sm_120", 160, 218, 0, 1),
    ("sm_120", 448, 46, 0, 2),
    ("sm_120", 384, 108, 12774, 1),
]


@pytest.mark.parametrize(("arch", "threads", "registers", "shared", "active"), CALCULATED)
def test_the_occupancy_calculator_of_the_toolkit(
    arch: str, threads: int, registers: int, shared: int, active: int
) -> None:
    assert one(arch, threads, registers, shared).blocks_fit[0] == active


# Launches under Nsight Compute on one H200 (shared/h200/ncu_attention_raw.csv): grid, block, registers, shared bytes;
# launch__occupancy_limit_ warps, registers, shared_mem, blocks; waves; sm__warps_active in percent.
PROFILED = [
    ("normal_", 1056, 256, 44, 0, (8, 5, 32, 32), 1.60, 50.61),
    ("fill_", 4096, 128, 16, 0, (16, 32, 32, 32), 1.94, 66.0),
    ("tril", 16384, 128, 30, 0, (16, 16, 32, 32), 7.76, 83.7),
    ("nvjet TNT", 132, 384, 168, 213_188, (5, 1, 1, 32), 1.0, 14.84),
    ("eq", 4096, 128, 32, 0, (16, 16, 32, 32), 1.94, 73.88),
    ("masked_fill", 1_048_576, 128, 18, 0, (16, 21, 32, 32), 496.48, 92.96),
    ("copy to float32", 1_048_576, 128, 32, 0, (16, 16, 32, 32), 496.48, 93.95),
    ("softmax", 65536, 128, 80, 0, (16, 6, 32, 32), 82.75, 32.13),
    ("copy to bfloat16", 524_288, 128, 32, 0, (16, 16, 32, 32), 248.24, 83.35),
    ("nvjet NNN", 132, 384, 168, 213_188, (5, 1, 1, 32), 1.0, 14.68),
    ("flash attention", 132, 384, 168, 232_448, (5, 1, 1, 32), 1.0, 14.1),
]


def agrees_with_nsight_compute(launch: tuple[Any, ...]) -> None:
    _, grid, block, registers, shared, counted, waves, active_percent = launch
    limits = limits_of("sm_90")
    found = block_limits([block], [registers], [shared], limits)
    assert found is not None
    # Without shared memory the profiler caps this limit at the blocks that can be resident.
    mine = (found.warps[0], found.registers[0], min(found.shared[0], 32), found.blocks[0])
    assert mine == counted
    whole = one("sm_90", block, registers, shared, blocks=grid, sm_count=132)
    assert whole.theoretical[0] == min(counted) * -(-block // 32) / 64
    assert whole.waves[0] == pytest.approx(waves, abs=0.005)
    # The estimate is what could be resident; blocks that start and end at different times keep it from being reached.
    assert active_percent <= 100 * whole.achieved[0] + 0.5


@pytest.mark.parametrize("launch", PROFILED, ids=lambda launch: launch[0])
def test_nsight_compute_counts_the_same_limits(launch: tuple[Any, ...]) -> None:
    agrees_with_nsight_compute(launch)


@pytest.mark.skipif(not NCU.exists(), reason="the shared recordings are not beside this checkout")
def test_nsight_compute_counts_the_same_limits_for_every_recorded_kernel() -> None:
    lines = [line for line in NCU.read_text(encoding="utf-8").splitlines() if not line.startswith("==")]
    rows = list(csv.DictReader(lines))[1:]  # the first row holds units

    def number(row: dict[str, str], column: str) -> float:
        return float(row[column].replace(",", ""))

    resources = ("warps", "registers", "shared_mem", "blocks")
    for row in rows:
        launch = (
            row["Kernel Name"],
            number(row, "launch__grid_size"),
            int(number(row, "launch__block_size")),
            int(number(row, "launch__registers_per_thread")),
            int(
                number(row, "launch__shared_mem_per_block_static") + number(row, "launch__shared_mem_per_block_dynamic")
            ),
            tuple(number(row, f"launch__occupancy_limit_{resource}") for resource in resources),
            number(row, "launch__waves_per_multiprocessor"),
            number(row, "sm__warps_active.avg.pct_of_peak_sustained_active"),
        )
        agrees_with_nsight_compute(launch)
    assert len(rows) == 20


def kernels_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Complete kernel events of a trace and its device properties."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document = json.load(file)
    events = document["traceEvents"]
    found = [event for event in events if event.get("ph") == "X" and str(event.get("cat", "")).lower() == "kernel"]
    return found, document.get("deviceProperties", [])


def column(kernels: list[dict[str, Any]], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([float(kernel["args"].get(name, np.nan)) for kernel in kernels])


def volume(kernels: list[dict[str, Any]], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([float(np.prod(kernel["args"][name])) if name in kernel["args"] else np.nan for kernel in kernels])


RECORDED = [
    (TRACES / "hta-gp100-sgd-10steps.json.gz", "sm_60", 130, 0),
    (TRACES / "param-dlrm8" / "rank4.pt.trace.json.gz", "sm_70", 251, 0),
    (TRACES / "param-2080ti-resnet-cifar-30steps.json.gz", "sm_75", 9628, 0),
    (TRACES / "hta-a100-ddp-nccl-meta-rank0.json.gz", "sm_80", 2286, 414),
    (TRACES / "tracelens-h100-bert-small.json.gz", "sm_90", 51, 9),
    (TRACES / "tracelens-h100-qwen15-05b.json.gz", "sm_90", 1224, 241),
    (H200 / "h200_gpt_naive_bf16.json.gz", "sm_90", 1628, 96),
    (H200 / "h200_gpt_fused_compiled_bf16.json.gz", "sm_90", 300, 93),
    (H200 / "h200_gpt_launch_bound_fp32.json.gz", "sm_90", 2232, 0),
    (H200 / "h200_resnet50_dataloader_bound_fp32.json.gz", "sm_90", 1074, 400),
]


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not beside this checkout")
@pytest.mark.parametrize(("path", "arch", "small", "large"), RECORDED, ids=lambda value: getattr(value, "name", None))
def test_kineto_recorded_the_same_occupancy_wherever_it_could(path: Path, arch: str, small: int, large: int) -> None:
    """Up to 48 KB of shared memory every kernel agrees to the rounding of the recorder; above it says 0, we do not."""
    kernels, devices = kernels_of(path)
    device = devices[0]
    assert arch_name(device["computeMajor"], device["computeMinor"], device["warpSize"]) == arch
    shared = column(kernels, "shared memory")
    found = occupancy(
        blocks=volume(kernels, "grid"),
        threads=volume(kernels, "block"),
        registers=column(kernels, "registers per thread"),
        shared_bytes=shared,
        limits=limits_of(arch),
        sm_count=device["numSms"],
    )
    percent = column(kernels, "est. achieved occupancy %")
    recorded = recorded_occupancy(percent, shared)
    assert np.all(found.reason < 0)
    assert np.array_equal(np.isnan(recorded), shared > 48 * 1024)
    assert (np.sum(shared <= 48 * 1024), np.sum(shared > 48 * 1024)) == (small, large)
    known = ~np.isnan(recorded)
    assert np.all(np.abs(found.achieved[known] - recorded[known]) <= 0.005 + 1e-9)
    assert np.all(percent[~known] == 0)
    assert np.all(found.achieved[~known] > 0)
    assert np.allclose(found.blocks_per_sm, column(kernels, "blocks per SM"), rtol=1e-4)


@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not beside this checkout")
@pytest.mark.parametrize("rank", range(8))
def test_the_plugin_computes_the_same_sm_efficiency(rank: int) -> None:
    """torch-tb-profiler 0.4.3 on traces with several streams; its window is one step, as long as it prints."""
    name = f"param-dlrm8/rank{rank}.pt.trace.json.gz"
    truth = json.loads((SHARED / "corpus" / "truth.json").read_text(encoding="utf-8"))[f"traces/{name}"]
    peer = truth["peer_tb_0.4.3"]
    path = TRACES / name
    kernels, _ = kernels_of(path)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    begin = min(event["ts"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#"))
    start = np.array([kernel["ts"] for kernel in kernels])
    duration = np.array([kernel["dur"] for kernel in kernels])
    per_sm = volume(kernels, "grid") / 80
    mine = sliced_sm_efficiency(
        start, duration, per_sm, begin_us=begin, end_us=begin + peer["perf"]["Average Step Time"]
    )
    assert mine is not None
    assert round(100 * mine, 2) == float(dict(peer["gpu"])["Est. SM Efficiency"].removesuffix(" %"))
    own = estimated_sm_efficiency(volume(kernels, "grid"), 80)
    weighted = 100 * np.sum(own * duration) / np.sum(duration)
    assert weighted == pytest.approx(truth["right"]["est_sm_eff_time_weighted_pct_of_kernel_time"], abs=0.01)


def test_waves_and_their_efficiency() -> None:
    # nvjet: one block fits, 132 multiprocessors. 132 blocks are one full wave, 133 need a second for one block.
    full = one("sm_90", 384, 168, 188_636, blocks=132, sm_count=132)
    assert (full.waves[0], full.wave_efficiency[0]) == (1.0, 1.0)
    assert full.limiter_name(0) == "registers and shared memory"
    tail = one("sm_90", 384, 168, 188_636, blocks=133, sm_count=132)
    assert tail.waves[0] == pytest.approx(133 / 132)
    assert tail.wave_efficiency[0] == pytest.approx(133 / 264)
    assert tail.achieved[0] == full.achieved[0]
    half = one("sm_90", 384, 168, 188_636, blocks=66, sm_count=132)
    assert half.achieved[0] == pytest.approx(0.5 * 12 / 64)
    assert half.wave_efficiency[0] == 0.5
    assert half.limiter_name(0) == "grid"


def test_one_thread_on_a_large_device() -> None:
    """The recorder counts threads (0.0004 % here), a multiprocessor holds warps: the block takes a whole one."""
    lone = one("sm_90", 1, 16, 0, blocks=1, sm_count=132)
    assert lone.achieved[0] == pytest.approx(1 / 132 / 64)
    assert lone.limiter_name(0) == "grid"
    assert estimated_sm_efficiency([1], 132)[0] == pytest.approx(1 / 132)


NAN = float("nan")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"limits": None}, "architecture are not on record"),
        ({"limits": sm_limits("gfx942")}, "architecture are not on record"),
        ({"sm_count": None}, "number of multiprocessors is unknown"),
        ({"sm_count": 0}, "number of multiprocessors is unknown"),
        ({"blocks": [NAN]}, "does not record grid and block"),
        ({"threads": [0]}, "does not record grid and block"),
        ({"registers": [0]}, "does not record the registers"),
        ({"registers": [NAN]}, "does not record the registers"),
        ({"shared_bytes": [NAN]}, "does not record the shared memory"),
        ({"shared_bytes": [228 * 1024]}, "exceeds the limits"),
        ({"threads": [1025]}, "exceeds the limits"),
        ({"registers": [256]}, "exceeds the limits"),
    ],
)
def test_what_is_unknown_is_never_zero(changed: dict[str, Any], reason: str) -> None:
    known: dict[str, Any] = {
        "blocks": [132],
        "threads": [384],
        "registers": [168],
        "shared_bytes": [188_636],
        "limits": sm_limits("sm_90"),
        "sm_count": 132,
    }
    found = occupancy(**{**known, **changed})
    for values in (found.blocks_fit, found.theoretical, found.achieved, found.waves, found.wave_efficiency):
        assert np.isnan(values).all()
    assert found.limiter_name(0) is None
    text = found.reason_text(0)
    assert text is not None
    assert reason in text


def test_what_the_grid_alone_says_stays_known() -> None:
    """AMD traces record grid and block, neither registers nor shared memory."""
    found = occupancy(
        blocks=[608], threads=[256], registers=[NAN], shared_bytes=[NAN], limits=sm_limits("gfx942"), sm_count=304
    )
    assert found.blocks_per_sm[0] == 2
    assert np.isnan(found.achieved[0])
    assert estimated_sm_efficiency([608, 152, NAN], 304).tolist()[:2] == [1.0, 0.5]
    assert np.isnan(estimated_sm_efficiency([608], None)).all()


def test_every_share_is_a_share_whatever_the_launch() -> None:
    random = np.random.default_rng(0)
    count = 20_000
    for arch in ("sm_60", "sm_75", "sm_80", "sm_86", "sm_90", "sm_120"):
        found = occupancy(
            blocks=random.integers(1, 100_000, count),
            threads=random.integers(1, 1025, count),
            registers=random.integers(1, 256, count),
            shared_bytes=random.integers(0, 250_000, count),
            limits=limits_of(arch),
            sm_count=int(random.integers(1, 200)),
        )
        known = found.reason < 0
        assert known.any() and not known.all()
        assert np.all(found.blocks_fit[known] >= 1)
        assert np.all((found.theoretical[known] > 0) & (found.theoretical[known] <= 1))
        assert np.all((found.achieved[known] > 0) & (found.achieved[known] <= found.theoretical[known]))
        assert np.all((found.wave_efficiency[known] > 0) & (found.wave_efficiency[known] <= 1))
        assert np.all((found.limiter > 0) == known)
        assert np.all(found.limiter < 1 << len(LIMITERS))
        assert np.isnan(found.achieved[~known]).all()


def test_slices_add_up_to_one_at_most() -> None:
    # 0-10: 0.5; 10-20: 0.5 + 0.75 -> 1; 20-30: 0.75; 30-40: idle; in all 22.5 of 40.
    start, duration, per_sm = [0.0, 10.0], [20.0, 20.0], [0.5, 0.75]
    assert sliced_sm_efficiency(start, duration, per_sm, begin_us=0, end_us=40) == pytest.approx(22.5 / 40)
    # The order of the kernels does not matter, nor do kernels outside the window.
    turned = sliced_sm_efficiency([100.0, 10.0, 0.0], [5.0, 20.0, 20.0], [9.0, 0.75, 0.5], begin_us=0, end_us=40)
    assert turned == pytest.approx(22.5 / 40)
    # A window cuts kernels at its edges.
    assert sliced_sm_efficiency(start, duration, per_sm, begin_us=15, end_us=25) == pytest.approx(8.75 / 10)
    assert sliced_sm_efficiency([], [], [], begin_us=0, end_us=10) == 0.0
    assert sliced_sm_efficiency(start, duration, per_sm, begin_us=5, end_us=5) is None
    assert sliced_sm_efficiency(start, duration, [0.5, NAN], begin_us=0, end_us=40) is None
    assert sliced_sm_efficiency(start, duration, [0.5, NAN], begin_us=0, end_us=10) == pytest.approx(0.5)


def test_no_time_is_counted_twice_however_kernels_overlap() -> None:
    random = np.random.default_rng(1)
    start = random.random(500) * 1000
    duration = random.random(500) * 20
    dense = sliced_sm_efficiency(start, duration, np.full(500, 5.0), begin_us=0, end_us=1020)
    assert dense is not None
    edges = np.sort(np.concatenate((start, start + duration)))
    middle = (edges[:-1] + edges[1:]) / 2
    running = ((start[None, :] < middle[:, None]) & (middle[:, None] < (start + duration)[None, :])).any(axis=1)
    assert dense == pytest.approx(np.sum(np.diff(edges)[running]) / 1020)


def test_a_recorded_zero_above_48_kb_is_missing() -> None:
    share = recorded_occupancy([0, 0, 19, NAN, 100], [188_636, 1024, 188_636, 0, 0])
    assert np.isnan(share[[0, 3]]).all()
    assert share[[1, 2, 4]].tolist() == [0.0, 0.19, 1.0]
    assert recorded_occupancy([0], [48 * 1024])[0] == 0.0
