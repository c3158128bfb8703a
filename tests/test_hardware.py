"""Peaks are dense, belong to the device that was asked for, agree with its clock, and unknown stays unknown."""

from __future__ import annotations

import pytest

from advisor.hardware import Device, devices, lookup, reference_peak
from advisor.model import Hardware

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
        ("NVIDIA B300 SXM6 AC", None, 2250, 8000),
        ("NVIDIA A100-SXM4-40GB", 108, 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 108, 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 108, 312, 1555),
        ("NVIDIA A100 80GB PCIe", 108, 312, 1935),
        ("NVIDIA A100-PG509-200", 108, 312, 1555),
        ("NVIDIA A10", 72, 125, 600),
        ("NVIDIA A10G", 80, 70, 600),
        ("NVIDIA A30", 56, 165, 933),
        ("NVIDIA A40", 84, 149.7, 696),
        ("NVIDIA RTX A6000", 84, 154.8, 768),
        ("NVIDIA RTX 6000 Ada Generation", 142, 364.2, 960),
        ("NVIDIA GeForce RTX 3090", 82, 71, 936),
        ("NVIDIA GeForce RTX 4090", 128, 165.2, 1008),
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
    assert lookup(name) == hardware


@pytest.mark.parametrize(
    ("name", "sm_count", "tera"),
    [
        ("Tesla V100-SXM2-16GB", 80, 125),
        ("Tesla V100-SXM2-32GB", 80, 125),
        ("Tesla V100-DGXS-32GB", 80, 125),
        ("Tesla V100-PCIE-16GB", 80, 112),
        ("Tesla V100S-PCIE-32GB", 80, 130),
        ("Tesla T4", 40, 65),
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
        ("NVIDIA GeForce RTX 2080 Ti", 68),
        ("Quadro GP100", 56),
        ("ARTEMIS", None),
        ("", None),
        ("NVIDIA Graphics Device", 132),
        ("Quadro RTX 6000", 72),
        ("NVIDIA GeForce RTX 4090 D", 114),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 3090 Ti", 84),
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
    assert known("NVIDIA GB200").peak_flops["bfloat16"] != known("NVIDIA B200").peak_flops["bfloat16"]
    assert known("AMD Instinct MI250X").peak_flops["bfloat16"] == 191.5e12  # torch sees one of the two dies


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.hardware.name)
def test_every_entry_is_complete_and_sourced(device: Device) -> None:
    hardware = device.hardware
    assert hardware.kind == "cuda"
    assert hardware.arch
    assert hardware.peak_flops.keys() <= DTYPES
    assert {"float32", "float16"} <= hardware.peak_flops.keys()
    for figure in ("sm_count", "hbm_bandwidth"):
        assert (getattr(hardware, figure) is None) == (figure not in hardware.sources)
    assert all(len(text) > 5 for text in hardware.sources.values())
    assert "peak_flops" in hardware.sources
    peaks = hardware.peak_flops
    half = peaks.get("bfloat16", peaks["float16"])
    assert half == peaks["float16"]
    assert peaks["float32"] <= half
    if "tfloat32" in peaks:
        assert peaks["tfloat32"] == pytest.approx(half / 2, rel=0.02)
    if "float8" in peaks:
        assert peaks["float8"] == pytest.approx(half * 2, rel=0.02)


# No clock is published for the matrix peaks of the NVL parts, no SM count for B300.
WITHOUT_CLOCK = {"NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA B300"}


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.hardware.name)
def test_peaks_follow_from_units_and_clock(device: Device) -> None:
    """A figure with sparsity, or of another board, is off by far more than 8 %."""
    hardware = device.hardware
    if hardware.name in WITHOUT_CLOCK:
        assert device.boost_mhz is None
        return
    assert device.boost_mhz is not None
    assert device.per_sm_clock is not None
    assert hardware.sm_count is not None
    computed = hardware.sm_count * device.per_sm_clock * device.boost_mhz * 1e6
    peak = hardware.peak_flops.get("bfloat16", hardware.peak_flops["float16"])
    assert peak == pytest.approx(computed, rel=0.08)


@pytest.mark.parametrize(
    ("name", "sm_count", "measured_tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 271.2),
        ("NVIDIA A100-PCIE-40GB", 108, 252.9),
        ("NVIDIA H100 80GB HBM3", 132, 794.5),
        ("NVIDIA GH200 144G HBM3e", 132, 828.6),
        ("NVIDIA H200", 132, 789.0),
        ("AMD Instinct MI250X", 110, 147.0),
        ("AMD Instinct MI300X", 304, 668.4),
        ("AMD Instinct MI325X", 304, 784.9),
    ],
)
def test_peaks_lie_between_the_best_measured_matmul_and_twice_it(
    name: str, sm_count: int, measured_tera: float
) -> None:
    """Measured: maximum achievable matmul FLOPS of the ml-engineering handbook, bf16; H200 by an 8192^3 matmul."""
    peak = known(name, sm_count).peak_flops["bfloat16"]
    assert measured_tera * 1e12 <= peak <= 2 * measured_tera * 1e12


def test_the_reference_peak_names_its_source() -> None:
    peak = reference_peak(known("NVIDIA H200", 132))
    assert peak is not None
    assert peak[0] == 989.4e12
    assert peak[1].startswith("dense bfloat16 peak of NVIDIA H200 SXM: NVIDIA H200 Tensor Core GPU datasheet")
    assert reference_peak(Hardware(name="CPU", kind="cpu", measured_flops={"float32": 1e12})) is None
