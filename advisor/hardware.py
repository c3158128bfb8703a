"""Datasheet figures of training devices and the limits of their multiprocessors; an unknown device is `None`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from advisor.model import Hardware

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VENDOR_WORDS = re.compile(r"(?:(?:NVIDIA|AMD|Tesla|Quadro|GeForce|Instinct|Corporation)\s+)*", re.IGNORECASE)

# What a device reports is a little less than what is sold: firmware and error correction take up to a tenth.
_LEAST_REPORTED_MEMORY = 0.88
_MOST_REPORTED_MEMORY = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One row of the table: a device-name pattern and the hardware it stands for.

    `sm_counts` are the multiprocessor counts sold under the name, empty where unknown. `boost_mhz` is the published
    clock behind the matrix peak, `max_mhz` the highest clock the device reports where none is published, and
    `per_sm_clock` the FLOPs of one multiprocessor per clock in bfloat16 (float16 where there is no bfloat16); the three
    only serve to check the peak and are `None` where unpublished.
    """

    match: re.Pattern[str]
    needs_sm_count: bool
    sm_counts: tuple[int, ...]
    boost_mhz: float | None
    max_mhz: float | None
    per_sm_clock: int | None
    hardware: Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class SmLimits:
    """What one streaming multiprocessor (AMD: compute unit) of an architecture holds; `None` where no source says so.

    Registers are 32 bits wide. `thread_registers` is the most one thread may use, `warp_registers_unit` the unit in
    which registers are allocated to a warp, `partitions` the number of register files that the warps of a block are
    spread over. `shared_bytes` is shared by all resident blocks, `block_shared_bytes` the most one block may have after
    opting in; the driver adds `reserved_shared_bytes` to each block and rounds the sum up to `shared_unit_bytes`.
    """

    arch: str
    source: str
    warp_size: int
    max_threads: int | None = None
    max_warps: int | None = None
    max_blocks: int | None = None
    max_block_threads: int | None = None
    registers: int | None = None
    block_registers: int | None = None
    thread_registers: int | None = None
    warp_registers_unit: int | None = None
    partitions: int | None = None
    shared_bytes: int | None = None
    block_shared_bytes: int | None = None
    reserved_shared_bytes: int | None = None
    shared_unit_bytes: int | None = None


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("advisor").joinpath("hardware.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def devices() -> tuple[Device, ...]:
    """Every device of `hardware.toml`, in the order of the file."""
    return tuple(_device(row) for row in _table()["device"])


@lru_cache(maxsize=1)
def architectures() -> tuple[SmLimits, ...]:
    """The limits of every architecture of `hardware.toml`, in the order of the file."""
    return tuple(SmLimits(arch=arch, **row) for arch, row in _table()["sm"].items())


def sm_limits(arch: str | None) -> SmLimits | None:
    """The limits of a multiprocessor of `arch` ("sm_90", "gfx942"), or `None` for an architecture without a source.

    The suffix of an architecture-specific target ("sm_90a") is ignored.
    """
    if arch is None:
        return None
    wanted = re.sub(r"^(sm_\d+)[af]$", r"\1", arch)
    return next((limits for limits in architectures() if limits.arch == wanted), None)


def arch_name(compute_major: int | None, compute_minor: int | None, warp_size: int | None) -> str | None:
    """The architecture behind the compute capability in a trace's device properties, `None` where it is not certain.

    `warp_size` tells the vendors apart: 32 is NVIDIA, 64 is AMD, where HIP reports the first two digits of the gfx
    number. 9.4 and 9.5 are gfx942 and gfx950; 9.0 is shared by gfx900, gfx906, gfx908 and gfx90a and stays unknown.
    """
    if compute_major is None or compute_minor is None:
        return None
    if warp_size == 32:
        return f"sm_{compute_major}{compute_minor}"
    if warp_size == 64:
        return {(9, 4): "gfx942", (9, 5): "gfx950"}.get((compute_major, compute_minor))
    return None


def lookup(name: str, sm_count: int | None = None) -> Hardware | None:
    """The datasheet figures of the device that calls itself `name`, or `None` where they are not known for certain.

    `sm_count` is the number of multiprocessors (compute units on AMD) the device reports. It settles names that several
    parts share, and a count that differs from the datasheet (a MIG slice, a partition, a cut-down part) gives `None`
    rather than the peak of the whole device.
    """
    wanted = _VENDOR_WORDS.sub("", name.strip(), count=1)
    for device in devices():
        found = device.match.fullmatch(wanted)
        if found is None or (device.needs_sm_count and sm_count is None):
            continue
        if sm_count is not None and device.sm_counts and sm_count not in device.sm_counts:
            continue
        known = device.hardware
        if known.sm_count is None and sm_count is not None and device.sm_counts:
            known = replace(known, sm_count=sm_count)
        return _sized(known, found.groupdict().get("gib"))
    return None


def identify(
    name: str | None,
    sm_count: int | None = None,
    compute_major: int | None = None,
    compute_minor: int | None = None,
    memory_bytes: int | None = None,
) -> Hardware | None:
    """The device behind the properties that a trace records, or `None` where they do not settle it.

    As `lookup`, and the compute capability and the size of memory, where given, have to be those of the datasheet. A
    device whose datasheet memory is unknown takes the size it reports. `unidentified` says why the answer is `None`.
    """
    return _identified(name, sm_count, compute_major, compute_minor, memory_bytes)[0]


def unidentified(
    name: str | None,
    sm_count: int | None = None,
    compute_major: int | None = None,
    compute_minor: int | None = None,
    memory_bytes: int | None = None,
) -> str | None:
    """Why `identify` does not know the device with these properties; `None` where it does."""
    return _identified(name, sm_count, compute_major, compute_minor, memory_bytes)[1]


def reference_peak(hardware: Hardware) -> tuple[float, str] | None:
    """The one peak that headline MFU divides by, in FLOP/s, with its source; `None` where the datasheet is unknown.

    It is the dense bfloat16 peak, or the float16 peak of a device without bfloat16, whatever the script computes in, so
    that figures of one device stay comparable.
    """
    for dtype in ("bfloat16", "float16"):
        peak = hardware.peak_flops.get(dtype)
        if peak is not None:
            source = hardware.sources.get("peak_flops", "source not recorded")
            return peak, f"dense {dtype} peak of {hardware.name}: {source}"
    return None


def _identified(
    name: str | None, sm_count: int | None, major: int | None, minor: int | None, memory_bytes: int | None
) -> tuple[Hardware | None, str | None]:
    if not name or not name.strip():
        return None, "the trace does not name its device"
    found = lookup(name, sm_count)
    if found is None:
        return None, _not_found(name, sm_count)
    if major is not None and minor is not None and (major, minor) != _capability(found.arch):
        return None, f"{name} reports compute capability {major}.{minor}, which is not that of {found.name}"
    if memory_bytes is None or memory_bytes <= 0:
        return found, None
    if found.hbm_bytes is None:
        sources = {**found.sources, "hbm_bytes": "reported by the device"}
        return replace(found, hbm_bytes=memory_bytes, sources=sources), None
    share = memory_bytes / found.hbm_bytes
    if not _LEAST_REPORTED_MEMORY <= share <= _MOST_REPORTED_MEMORY:
        gib = memory_bytes / 2**30
        return None, f"{name} reports {gib:.1f} GiB of memory, {found.name} has {found.hbm_bytes / 2**30:.0f} GiB"
    return found, None


def _not_found(name: str, sm_count: int | None) -> str:
    wanted = _VENDOR_WORDS.sub("", name.strip(), count=1)
    same_name = [device for device in devices() if device.match.fullmatch(wanted)]
    if not same_name:
        return f"no datasheet on record for {name}"
    if sm_count is None:
        return f"the name {name} is shared by several parts and the number of multiprocessors is unknown"
    counts = sorted({count for device in same_name for count in device.sm_counts})
    return f"{name} reports {sm_count} multiprocessors, its datasheet says {' or '.join(map(str, counts))}"


def _capability(arch: str | None) -> tuple[int, int] | None:
    """Compute capability that a device of `arch` reports; on AMD the first two digits of the gfx number."""
    if arch is None:
        return None
    digits = arch.removeprefix("sm_")
    if digits != arch:
        return int(digits[:-1]), int(digits[-1])
    return int(arch[3]), int(arch[4])


def _device(row: dict[str, Any]) -> Device:
    counts = row.get("sm_count", [])
    sm_counts = (counts,) if isinstance(counts, int) else tuple(counts)
    hardware = Hardware(
        name=row["name"],
        kind="cuda",
        arch=row["arch"],
        sm_count=sm_counts[0] if len(sm_counts) == 1 else None,
        peak_flops={dtype: _scaled(tera, 12) for dtype, tera in row["peak"].items()},
        hbm_bytes=row["memory_gib"] * 2**30 if "memory_gib" in row else None,
        hbm_bandwidth=_scaled(row["bandwidth"], 9) if "bandwidth" in row else None,
        sources=_sources(row),
    )
    return Device(
        match=re.compile(row["match"], re.IGNORECASE),
        needs_sm_count=row.get("needs_sm_count", False),
        sm_counts=sm_counts,
        boost_mhz=row.get("boost_mhz"),
        max_mhz=row.get("max_mhz"),
        per_sm_clock=row.get("per_sm_clock"),
        hardware=hardware,
    )


def _sources(row: dict[str, Any]) -> dict[str, str]:
    figures = {"peak_flops": "peak", "hbm_bandwidth": "bandwidth", "hbm_bytes": "memory_gib", "sm_count": "sm_count"}
    sizes_in_name = "(?P<gib>" in row["match"]
    return {
        figure: row.get("sources", {}).get(figure, row["source"])
        for figure, key in figures.items()
        if key in row or (figure == "hbm_bytes" and sizes_in_name)
    }


def _scaled(value: float, exponent: int) -> float:
    # Through the decimal text: 989.4 * 1e12 is not the float 989.4e12.
    return float(f"{value}e{exponent}")


def _sized(hardware: Hardware, gib: str | None) -> Hardware:
    if gib is None:
        return hardware
    return replace(hardware, name=f"{hardware.name} {gib}GB", hbm_bytes=int(gib) * 2**30)
