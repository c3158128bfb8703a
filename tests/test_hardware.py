"""Peaks are dense, belong to the device that was asked for, agree with its clock, and unknown stays unknown."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from advisor.hardware import (
    Device,
    SmLimits,
    arch_name,
    architectures,
    devices,
    identify,
    lookup,
    reference_peak,
    sm_limits,
    unidentified,
)
from advisor.model import Hardware

CORPUS = Path(__file__).parents[2] / "shared" / "corpus"
TRACES, TRUTH = CORPUS / "traces", CORPUS / "truth.json"

DTYPES = {"float32", "tfloat32", "bfloat16", "float16", "float8"}


def known(name: str, sm_count: int | None = None) -> Hardware:
    hardware = lookup(name, sm_count)
    assert hardware is not None, name
    return hardware


@pytest.mark.parametrize(
    ("name", "sm_count", "tera", "giga_bytes_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 989.4, 3350),
        ("NVIDIA H100 PCIe", 114, 756, 2000),
        ("NVIDIA H100 NVL", 132, 835.5, 3900),
        ("NVIDIA H200", 132, 989.4, 4800),
        ("NVIDIA H200 NVL", 132, 835.5, 4800),
        ("NVIDIA H20", 78, 148, 4000),
        ("NVIDIA GH200 480GB", 132, 989.4, 4000),
        ("NVIDIA GH200 144G HBM3e", 132, 989.4, 4900),
        ("NVIDIA B200", 148, 2250, 8000),
        ("NVIDIA GB200", 152, 2500, 8000),
        ("NVIDIA B300 SXM6 AC", 148, 2250, 8000),
        ("NVIDIA B300 SXM6 AC", 152, 2250, 8000),
        ("NVIDIA A100-SXM4-40GB", 108, 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 108, 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 108, 312, 1555),
        ("NVIDIA A100 80GB PCIe", 108, 312, 1935),
        ("NVIDIA A10", 72, 125, 600),
        ("NVIDIA A10G", 80, 70, 600),
        ("NVIDIA A30", 56, 165, 933),
        ("NVIDIA A40", 84, 149.7, 696),
        ("NVIDIA RTX A6000", 84, 154.8, 768),
        ("NVIDIA RTX 6000 Ada Generation", 142, 364.2, 960),
        ("NVIDIA GeForce RTX 3070", 46, 40.6, 448),
        ("NVIDIA GeForce RTX 3080", 68, 59.5, 760),
        ("NVIDIA GeForce RTX 3080 Ti", 80, 68.2, 912),
        ("NVIDIA GeForce RTX 3090", 82, 71, 936),
        ("NVIDIA GeForce RTX 3090 Ti", 84, 80, 1008),
        ("NVIDIA GeForce RTX 4080", 76, 97.5, 716.8),
        ("NVIDIA GeForce RTX 4080 SUPER", 80, 104.4, 736),
        ("NVIDIA GeForce RTX 4090", 128, 165.2, 1008),
        ("NVIDIA GeForce RTX 5070", 48, 61.7, 672),
        ("NVIDIA GeForce RTX 5070 Ti", 70, 87.9, 896),
        ("NVIDIA GeForce RTX 5080", 84, 112.6, 960),
        ("NVIDIA GeForce RTX 5090", 170, 209.5, 1792),
        ("NVIDIA L4", 58, 121, 300),
        ("NVIDIA L40", 142, 181.05, 864),
        ("NVIDIA L40S", 142, 362.05, 864),
        ("AMD Instinct MI210", 104, 181, 1638),
        ("AMD Instinct MI250X", 110, 191.5, 1638),
        ("AMD Instinct MI300X", 304, 1307.4, 5300),
        ("AMD Instinct MI300X VF", 304, 1307.4, 5300),
        ("AMD Instinct MI325X", 304, 1307.4, 6000),
        ("AMD Instinct MI350X", 256, 2306.9, 8000),
        ("AMD Instinct MI355X", 256, 2516.6, 8000),
    ],
)
def test_names_that_devices_report(name: str, sm_count: int | None, tera: float, giga_bytes_per_s: float) -> None:
    hardware = known(name, sm_count)
    assert lookup(name.upper(), sm_count) == hardware
    assert hardware.peak_flops["bfloat16"] == float(f"{tera}e12")
    assert hardware.hbm_bandwidth == float(f"{giga_bytes_per_s}e9")
    assert hardware.sm_count == sm_count
    named = known(name)
    assert named.peak_flops == hardware.peak_flops
    assert named.sm_count in (sm_count, None)


@pytest.mark.parametrize(
    ("name", "sm_count", "tera"),
    [
        ("Tesla V100-SXM2-16GB", 80, 125),
        ("Tesla V100-SXM2-32GB", 80, 125),
        ("Tesla V100-DGXS-32GB", 80, 125),
        ("Tesla V100-PCIE-16GB", 80, 112),
        ("Tesla V100S-PCIE-32GB", 80, 130),
        ("Tesla T4", 40, 65),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 56.9),
        ("NVIDIA GeForce RTX 2080 SUPER", 48, 44.6),
        ("NVIDIA GeForce RTX 2080", 46, 42.4),
        ("Tesla P100-SXM2-16GB", 56, 10.6),
        ("Tesla P100-PCIE-16GB", 56, 9.3),
        ("Quadro GP100", 56, 10.3),
    ],
)
def test_devices_without_bfloat16_fall_back_to_float16(name: str, sm_count: int, tera: float) -> None:
    hardware = known(name, sm_count)
    assert "bfloat16" not in hardware.peak_flops
    peak = reference_peak(hardware)
    assert peak is not None
    assert peak[0] == tera * 1e12
    assert "float16" in peak[1]


@pytest.mark.parametrize(
    ("name", "sm_count"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", 46),
        ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", 48),
        ("Quadro GP100", 60),
        ("Tesla P100-PCIE-12GB", 56),
        ("NVIDIA GeForce RTX 3080", 70),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 48),
        ("NVIDIA GeForce RTX 5090 D", 170),
        ("NVIDIA B300 SXM6 AC", 20),
        ("ARTEMIS", None),
        ("", None),
        ("NVIDIA Graphics Device", 132),
        ("Quadro RTX 6000", 72),
        ("NVIDIA GeForce RTX 4090 D", 114),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 3090 Ti", 82),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14),
        ("NVIDIA A100-SXM4-40GB", 42),
        ("NVIDIA H100 80GB HBM3", 114),
        ("NVIDIA A40-48Q", 84),
        ("GRID A100-40C", 108),
        ("NVIDIA H100", None),
        ("NVIDIA H100", 114),
        ("NVIDIA H800", 132),
        ("NVIDIA H20-3e", 78),
        ("NVIDIA GB300", 148),
        ("NVIDIA L400", None),
        ("AMD Instinct MI300X", 38),
        ("AMD Instinct MI300A", 228),
        ("AMD Radeon Graphics", None),
        ("AMD Radeon Graphics", 16),
        ("Intel(R) Data Center GPU Max 1550", None),
    ],
)
def test_unknown_and_partial_devices_have_no_peak(name: str, sm_count: int | None) -> None:
    assert lookup(name, sm_count) is None


def test_a_bare_name_is_settled_by_its_size() -> None:
    meta = known("NVIDIA H100", 132)
    assert meta.peak_flops["bfloat16"] == 989.4e12
    assert meta.hbm_bandwidth is None
    assert meta.hbm_bytes is None
    assert known("AMD Radeon Graphics", 104).peak_flops["bfloat16"] == 181e12
    assert known("AMD Radeon Graphics", 110).peak_flops["bfloat16"] == 191.5e12
    assert known("AMD Instinct MI250X / MI250", 104).peak_flops["bfloat16"] == 181e12
    assert lookup("AMD Instinct MI250X / MI250") is None


def test_a_part_without_a_datasheet_of_its_own_keeps_what_its_size_fixes() -> None:
    board = known("NVIDIA A100-PG509-200", 108)
    assert board.peak_flops["bfloat16"] == 312e12
    assert board.hbm_bandwidth is None  # nothing fixes its memory clock
    assert known("NVIDIA B300 SXM6 AC").sm_count is None  # sold with 148 and with 152


def test_the_memory_comes_from_the_name_where_one_entry_covers_several() -> None:
    assert known("Tesla V100-SXM2-16GB").hbm_bytes == 16 * 2**30
    assert known("Tesla V100-SXM2-32GB").hbm_bytes == 32 * 2**30
    assert known("NVIDIA H200").hbm_bytes == 141 * 2**30


def test_errors_of_other_tables_are_not_repeated() -> None:
    assert known("NVIDIA L4").hbm_bandwidth == 300e9  # 3350e9 elsewhere: copied from the next row
    assert known("NVIDIA L40S").name != known("NVIDIA A100-SXM4-80GB").name
    assert known("NVIDIA H100 80GB HBM3").peak_flops["bfloat16"] == 989.4e12  # not 1979e12, which is with sparsity
    assert known("NVIDIA A10G").peak_flops["bfloat16"] != known("NVIDIA A10").peak_flops["bfloat16"]
    assert known("NVIDIA RTX A6000").peak_flops["bfloat16"] == 154.8e12  # not 309.7e12
    assert known("NVIDIA GeForce RTX 5090").peak_flops["bfloat16"] == 209.5e12  # not 838e12
    assert known("NVIDIA GeForce RTX 3090").peak_flops["bfloat16"] == 71e12  # not 142e12: accumulated in float16
    assert known("NVIDIA H100 NVL").peak_flops["bfloat16"] == 835.5e12  # neither 756e12 (PCIe) nor 989e12 (SXM)
    assert known("NVIDIA H200").name != known("NVIDIA H20").name
    assert known("NVIDIA GB200").peak_flops["bfloat16"] != known("NVIDIA B200").peak_flops["bfloat16"]
    assert known("AMD Instinct MI250X").peak_flops["bfloat16"] == 191.5e12  # torch sees one of the two dies


# What a figure without a source of the vendor starts with.
UNOFFICIAL = "not from the vendor: "
UNOFFICIAL_DEVICES = {"NVIDIA H20"}
# The float32 rate of H20 that is passed around does not follow from its SM count.
WITHOUT_FLOAT32 = {"NVIDIA H20"}
BEFORE_AMPERE = {"sm_60", "sm_61", "sm_70", "sm_75"}
# No matrix units: torch accumulates a float16 matmul in float32, at the float32 rate.
WITHOUT_MATRIX_UNITS = {"sm_60"}


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.hardware.name)
def test_every_entry_is_complete_and_sourced(device: Device) -> None:
    hardware = device.hardware
    assert hardware.kind == "cuda"
    assert hardware.arch
    assert sm_limits(hardware.arch) is not None
    assert hardware.peak_flops.keys() <= DTYPES
    assert ({"float32", "float16"} <= hardware.peak_flops.keys()) == (hardware.name not in WITHOUT_FLOAT32)
    assert (hardware.hbm_bandwidth is None) == ("hbm_bandwidth" not in hardware.sources)
    assert (not device.sm_counts) == ("sm_count" not in hardware.sources)
    assert all(len(text) > 5 for text in hardware.sources.values())
    assert "peak_flops" in hardware.sources
    unofficial = any(text.startswith(UNOFFICIAL) for text in hardware.sources.values())
    assert unofficial == (hardware.name in UNOFFICIAL_DEVICES)


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.hardware.name)
def test_the_rates_of_the_dtypes_stand_to_each_other_as_the_matrix_units_do(device: Device) -> None:
    peaks, arch = device.hardware.peak_flops, device.hardware.arch
    assert arch is not None
    half = peaks.get("bfloat16", peaks["float16"])
    assert half == peaks["float16"]
    assert peaks.get("float32", 0) <= half
    assert ("bfloat16" in peaks) == (arch not in BEFORE_AMPERE)
    if arch in WITHOUT_MATRIX_UNITS:
        assert half == peaks["float32"]
    if "tfloat32" in peaks:
        assert peaks["tfloat32"] == pytest.approx(half / 2, rel=0.02)
    if "float8" in peaks:
        assert peaks["float8"] == pytest.approx(half * 2, rel=0.02)


# Dense matrix FLOPs of one multiprocessor per clock in half precision with float32 accumulation. NVIDIA: the
# whitepapers of V100, A100 (256 FMA in each of 4 tensor cores) and H100 (512), half of it on GeForce, twice it on
# Blackwell; AMD: "FLOPS/CLOCK/CU" of the MI250 and MI300 microarchitecture pages of the ROCm documentation, doubled by
# CDNA 4.
FULL_RATE = {
    "sm_70": 1024,
    "sm_75": 1024,
    "sm_80": 2048,
    "sm_86": 1024,
    "sm_89": 1024,
    "sm_90": 4096,
    "sm_100": 8192,
    "sm_103": 8192,
    "sm_120": 1024,
    "gfx90a": 1024,
    "gfx942": 2048,
    "gfx950": 4096,
}
# Data-centre boards with the matrix rate of the GeForce chips they are made from.
HALF_RATE_BOARDS = {"NVIDIA A10G", "NVIDIA L40"}


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.hardware.name)
def test_peaks_follow_from_units_and_clock(device: Device) -> None:
    """A figure with sparsity, or of another board, is off by a factor, not by these few percent."""
    hardware = device.hardware
    if hardware.name in UNOFFICIAL_DEVICES:
        assert device.boost_mhz is None and device.max_mhz is None and device.per_sm_clock is None
        return
    rate, arch = device.per_sm_clock, hardware.arch
    assert arch is not None
    if arch in WITHOUT_MATRIX_UNITS:
        assert rate == 128  # 64 float32 lanes, each a multiply-add per clock
    elif "GeForce" in hardware.name or hardware.name in HALF_RATE_BOARDS:
        assert rate == FULL_RATE[arch] // 2
    else:
        assert rate == FULL_RATE[arch]
    assert rate is not None
    peak = hardware.peak_flops.get("bfloat16", hardware.peak_flops["float16"])
    if device.boost_mhz is not None:
        assert device.max_mhz is None
        assert peak == pytest.approx(device.sm_counts[0] * rate * device.boost_mhz * 1e6, rel=0.03)
    elif device.max_mhz is not None:
        assert 0.85 <= peak / (device.sm_counts[0] * rate * device.max_mhz * 1e6) <= 1
    else:
        # B300: the clock that its peak asks for lies within the clocks of its sisters.
        clocks = [peak / (count * rate * 1e6) for count in device.sm_counts]
        assert all(1800 <= clock <= 2062 for clock in clocks)


@pytest.mark.parametrize(
    ("name", "sm_count", "measured_tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 271.2),
        ("NVIDIA A100-PCIE-40GB", 108, 252.9),
        ("NVIDIA H100 80GB HBM3", 132, 794.5),
        ("NVIDIA GH200 144G HBM3e", 132, 828.6),
        ("NVIDIA H200", 132, 789.0),
        ("NVIDIA B200", 148, 1745.0),
        ("NVIDIA B300 SXM6 AC", 148, 1769.0),
        ("NVIDIA GB200", 152, 1822.0),
        ("AMD Instinct MI250X", 110, 147.0),
        ("AMD Instinct MI300X", 304, 668.4),
        ("AMD Instinct MI325X", 304, 784.9),
        ("AMD Instinct MI355X", 256, 1565.0),
    ],
)
def test_peaks_lie_between_the_best_measured_matmul_and_twice_it(
    name: str, sm_count: int, measured_tera: float
) -> None:
    """Measured: maximum achievable matmul FLOPS of the ml-engineering handbook, bf16; H200 by an 8192^3 matmul."""
    peak = known(name, sm_count).peak_flops["bfloat16"]
    assert measured_tera * 1e12 <= peak <= 2 * measured_tera * 1e12


@pytest.mark.parametrize(
    ("name", "sm_count", "dtype", "measured_tera"),
    [
        ("Tesla V100-SXM2-16GB", 80, "float16", 94.8),
        ("Tesla V100S-PCIE-32GB", 80, "float16", 88.9),
        ("Tesla T4", 40, "float16", 42.7),
        ("Tesla P100-PCIE-16GB", 56, "float16", 8.4),  # not 18.7: torch accumulates in float32
        ("NVIDIA L4", 58, "bfloat16", 70.9),
        ("NVIDIA L40S", 142, "bfloat16", 269.2),
        ("NVIDIA RTX A6000", 84, "bfloat16", 123.3),
        ("NVIDIA H100 PCIe", 114, "bfloat16", 495.9),
        ("NVIDIA H20", 78, "bfloat16", 142.3),
        ("NVIDIA GeForce RTX 2080 Ti", 68, "float16", 58.6),
        ("NVIDIA GeForce RTX 2080", 46, "float16", 39.0),
        ("NVIDIA GeForce RTX 3070", 46, "float16", 43.0),
        ("NVIDIA GeForce RTX 3080", 68, "bfloat16", 64.7),
        ("NVIDIA GeForce RTX 3080 Ti", 80, "bfloat16", 78.3),
        ("NVIDIA GeForce RTX 3090", 82, "bfloat16", 76.7),
        ("NVIDIA GeForce RTX 4090", 128, "bfloat16", 173.3),
        ("NVIDIA GeForce RTX 5070", 48, "bfloat16", 67.2),
        ("NVIDIA GeForce RTX 5070 Ti", 70, "bfloat16", 99.1),
        ("NVIDIA GeForce RTX 5080", 84, "bfloat16", 102.9),
        ("NVIDIA GeForce RTX 5090", 170, "bfloat16", 242.2),
    ],
)
def test_peaks_of_smaller_devices_agree_with_matmuls_that_users_measured(
    name: str, sm_count: int, dtype: str, measured_tera: float
) -> None:
    """Measured: torch matmuls up to 10240^3 collected in zzc0721/torch-performance-test-data (January 2026).

    GeForce cards run above their rated boost clock, so a measured matmul may exceed the rated peak by a sixth.
    """
    peak = known(name, sm_count).peak_flops[dtype]
    headroom = 1.17 if "GeForce" in name else 1.0
    assert measured_tera * 1e12 / headroom <= peak <= 2 * measured_tera * 1e12


def test_the_reference_peak_names_its_source() -> None:
    peak = reference_peak(known("NVIDIA H200", 132))
    assert peak is not None
    assert peak[0] == 989.4e12
    assert peak[1].startswith("dense bfloat16 peak of NVIDIA H200 SXM: NVIDIA H200 Tensor Core GPU datasheet")
    assert reference_peak(Hardware(name="CPU", kind="cpu", measured_flops={"float32": 1e12})) is None


H200 = ("NVIDIA H200", 132, 9, 0, 150109880320)


def test_a_device_is_identified_by_what_a_trace_records() -> None:
    found = identify(*H200)
    assert found == lookup("NVIDIA H200", 132)
    assert unidentified(*H200) is None
    meta = identify("NVIDIA H100", 132, 9, 0, 102085492736)
    assert meta is not None
    assert meta.hbm_bytes == 102085492736
    assert meta.sources["hbm_bytes"] == "reported by the device"
    die = identify("AMD Radeon Graphics", 104, 9, 0, 68702699520)
    assert die is not None
    assert die.name == "AMD Instinct MI210 or one die of MI250"  # the same figures either way


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        (("", 304, 9, 4, 206141652992), "the trace does not name its device"),
        ((None, 304, 9, 4, 206141652992), "the trace does not name its device"),
        (("ARTEMIS", None, None, None, None), "no datasheet on record for ARTEMIS"),
        (("AMD Radeon Graphics", None, 9, 0, None), "shared by several parts"),
        (("AMD Radeon Graphics", 60, 9, 0, None), "reports 60 multiprocessors, its datasheet says 104 or 110"),
        (("NVIDIA H200", 132, 8, 0, None), "compute capability 8.0"),
        (("NVIDIA H200", 16, 9, 0, None), "reports 16 multiprocessors, its datasheet says 132"),
        (("NVIDIA H200", 132, 9, 0, 18 * 2**30), "reports 18.0 GiB of memory, NVIDIA H200 SXM has 141 GiB"),
        (("NVIDIA GeForce RTX 4090", 128, 8, 9, 48 * 2**30), "48.0 GiB"),
    ],
)
def test_properties_that_do_not_settle_the_device_are_refused_with_a_reason(
    properties: tuple[Any, ...], reason: str
) -> None:
    assert identify(*properties) is None
    text = unidentified(*properties)
    assert text is not None
    assert reason in text


@pytest.mark.parametrize(
    ("major", "minor", "warp_size", "arch"),
    [
        (7, 5, 32, "sm_75"),
        (9, 0, 32, "sm_90"),
        (10, 3, 32, "sm_103"),
        (12, 0, 32, "sm_120"),
        (9, 4, 64, "gfx942"),
        (9, 5, 64, "gfx950"),
        (9, 0, 64, None),  # gfx900, gfx906, gfx908 or gfx90a
        (9, 0, None, None),
        (None, None, 32, None),
    ],
)
def test_the_compute_capability_names_the_architecture(
    major: int | None, minor: int | None, warp_size: int | None, arch: str | None
) -> None:
    assert arch_name(major, minor, warp_size) == arch


def test_limits_of_a_multiprocessor() -> None:
    hopper = sm_limits("sm_90")
    assert hopper is not None
    assert (hopper.max_warps, hopper.max_blocks, hopper.registers) == (64, 32, 65536)
    assert (hopper.shared_bytes, hopper.block_shared_bytes) == (228 * 1024, 227 * 1024)
    assert sm_limits("sm_90a") == hopper
    assert sm_limits("sm_99") is None
    assert sm_limits(None) is None
    ampere, lovelace = sm_limits("sm_80"), sm_limits("sm_89")
    assert ampere is not None and lovelace is not None
    assert ampere.block_shared_bytes == 163 * 1024
    assert lovelace.block_shared_bytes == 99 * 1024
    assert (lovelace.max_warps, lovelace.max_blocks) == (48, 24)


@pytest.mark.parametrize("limits", architectures(), ids=lambda limits: limits.arch)
def test_limits_fit_together(limits: SmLimits) -> None:
    assert limits.source
    assert limits.registers == (65536 if limits.arch.startswith("sm_") else 131072)
    if limits.max_threads is not None:
        assert limits.max_warps == limits.max_threads // limits.warp_size
    if limits.arch.startswith("gfx"):
        assert limits.warp_size == 64
        assert limits.max_blocks is None  # no source, so no occupancy either
        return
    assert limits.warp_size == 32
    assert limits.shared_bytes is not None and limits.block_shared_bytes is not None
    modern = limits.arch not in BEFORE_AMPERE
    assert limits.reserved_shared_bytes == (1024 if modern else 0)
    assert limits.shared_unit_bytes == (128 if modern else 256)
    if modern:
        assert limits.block_shared_bytes == limits.shared_bytes - 1024


@pytest.mark.skipif(not TRUTH.exists(), reason="the shared corpus is not beside this checkout")
def test_every_device_of_the_recorded_traces_is_identified_or_refused_with_a_reason() -> None:
    recorded = {
        tuple(device)
        for entry in json.loads(TRUTH.read_text()).values()
        for device in entry.get("right", {}).get("devices", [])
    }
    names = {name: identify(name, sms, major, minor, memory) for name, sms, memory, major, minor in recorded}
    assert {name for name, found in names.items() if found is None} == {"", "ARTEMIS"}
    assert {name: found.name for name, found in names.items() if found is not None} == {
        "AMD Instinct MI210": "AMD Instinct MI210",
        "AMD Instinct MI300X": "AMD Instinct MI300X",
        "AMD Instinct MI300X VF": "AMD Instinct MI300X",
        "AMD Radeon Graphics": "AMD Instinct MI210 or one die of MI250",
        "NVIDIA A100-PG509-200": "NVIDIA A100 PG509-200 40GB",
        "NVIDIA A100-SXM4-80GB": "NVIDIA A100 SXM4 80GB",
        "NVIDIA GeForce RTX 2080 Ti": "NVIDIA GeForce RTX 2080 Ti",
        "NVIDIA H100": "NVIDIA H100, 132 SMs",
        "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM5 80GB",
        "Quadro GP100": "NVIDIA Quadro GP100",
        "Tesla V100-DGXS-32GB": "NVIDIA V100 SXM 32GB",
        "Tesla V100-SXM2-32GB": "NVIDIA V100 SXM 32GB",
    }
    assert all(
        unidentified(name, sms, major, minor, memory) is None
        for name, sms, memory, major, minor in recorded
        if names[name] is not None
    )


@pytest.mark.skipif(not TRACES.exists(), reason="the shared corpus is not beside this checkout")
def test_limits_are_those_that_the_devices_of_recorded_traces_report() -> None:
    checked = set()
    for path in sorted(TRACES.rglob("*.json.gz")):
        properties = recorded_devices(path)
        for device in properties:
            arch = arch_name(device.get("computeMajor"), device.get("computeMinor"), device.get("warpSize"))
            limits = sm_limits(arch)
            if limits is None or limits.warp_size != 32:
                continue
            assert limits.max_threads == device["maxThreadsPerMultiprocessor"]
            assert limits.max_block_threads == device["maxThreadsPerBlock"]
            assert limits.registers == device["regsPerMultiprocessor"]
            assert limits.block_registers == device["regsPerBlock"]
            assert limits.shared_bytes == device["sharedMemPerMultiprocessor"]
            assert limits.block_shared_bytes == device["sharedMemPerBlockOptin"]
            checked.add(arch)
    assert checked == {"sm_60", "sm_70", "sm_75", "sm_80", "sm_90"}


def recorded_devices(path: Path) -> list[dict[str, Any]]:
    """The device properties of a Kineto trace, where they stand in its first 2 MiB."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            head = file.read(1 << 21)
    except EOFError:
        return []
    start = head.find('"deviceProperties"')
    if start < 0:
        return []
    found, _ = json.JSONDecoder().raw_decode(head, head.index("[", start))
    return list(found)
