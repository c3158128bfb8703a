"""Datasheet figures of training devices, found by the name and size a device reports; an unknown device is `None`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One row of the table: a device-name pattern and the hardware it stands for.

    `boost_mhz` is the clock behind the matrix peak and `per_sm_clock` the FLOPs of one multiprocessor per clock in
    bfloat16 (float16 where there is no bfloat16); both only serve to check the peak and are `None` where unpublished.
    """

    match: re.Pattern[str]
    needs_sm_count: bool
    boost_mhz: float | None
    per_sm_clock: int | None
    hardware: Hardware


@lru_cache(maxsize=1)
def devices() -> tuple[Device, ...]:
    """Every device of `hardware.toml`, in the order of the file."""
    text = resources.files("advisor").joinpath("hardware.toml").read_text(encoding="utf-8")
    return tuple(_device(row) for row in tomllib.loads(text)["device"])


def lookup(name: str, sm_count: int | None = None) -> Hardware | None:
    """The datasheet figures of the device that calls itself `name`, or `None` where they are not known for certain.

    `sm_count` is the number of multiprocessors (compute units on AMD) the device reports. It settles names that several
    parts share, and a count that differs from the datasheet (a MIG slice, a partition, a cut-down part) gives `None`
    rather than the peak of the whole device.
    """
    wanted = _VENDOR_WORDS.sub("", name.strip(), count=1)
    for device in devices():
        found = device.match.fullmatch(wanted)
        known = device.hardware.sm_count
        if found is None or (device.needs_sm_count and sm_count is None):
            continue
        if sm_count is not None and known is not None and sm_count != known:
            continue
        return _sized(device.hardware, found.groupdict().get("gib"))
    return None


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


def _device(row: dict[str, Any]) -> Device:
    hardware = Hardware(
        name=row["name"],
        kind="cuda",
        arch=row["arch"],
        sm_count=row.get("sm_count"),
        peak_flops={dtype: _scaled(tera, 12) for dtype, tera in row["peak"].items()},
        hbm_bytes=row["memory_gib"] * 2**30 if "memory_gib" in row else None,
        hbm_bandwidth=_scaled(row["bandwidth"], 9) if "bandwidth" in row else None,
        sources=_sources(row),
    )
    return Device(
        match=re.compile(row["match"], re.IGNORECASE),
        needs_sm_count=row.get("needs_sm_count", False),
        boost_mhz=row.get("boost_mhz"),
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
