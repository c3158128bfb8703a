"""Keeps what `advisor doctor --calibrate` measured of devices that the table does not know, per user."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from advisor.errors import OutputError
from advisor.model import Hardware

FIGURES = ("measured_flops", "measured_bandwidth", "date")


def default_path() -> Path:
    """The file of measured devices: in the user's configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "advisor" / "devices.json"


def save(path: Path, name: str, sm_count: int | None, figures: Mapping[str, Any]) -> None:
    """Keep the figures of a device, in place of older ones; raises OutputError."""
    known = _read(path)
    known[_key(name, sm_count)] = {figure: figures[figure] for figure in FIGURES}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write {path.name}: {error.strerror}: set XDG_CONFIG_HOME to another folder"
        ) from error


def measured(path: Path, hardware: Hardware, name: str | None = None, sm_count: int | None = None) -> Hardware:
    """The hardware with what was measured of a device of this name and size, as it was where nothing is kept.

    `name` and `sm_count` are what the device says of itself; without them they are taken from `hardware`, whose name is
    that of the datasheet where it is known.
    """
    key = _key(name, sm_count) if name else _key(hardware.name, hardware.sm_count)
    found = _read(path).get(key)
    if not isinstance(found, dict):
        return hardware
    flops, bandwidth = found.get("measured_flops"), found.get("measured_bandwidth")
    if not isinstance(flops, dict) or not all(map(_is_rate, flops.values())) or not _is_rate(bandwidth):
        return hardware
    source = f"measured by advisor doctor --calibrate on {found.get('date')}"
    return replace(
        hardware,
        measured_flops={str(dtype): float(rate) for dtype, rate in flops.items()},
        measured_bandwidth=float(bandwidth),
        sources={**hardware.sources, "measured_flops": source, "measured_bandwidth": source},
    )


def reference(hardware: Hardware) -> tuple[float, str] | None:
    """What stands in for the dense peak of a device without a datasheet: the calibrated rate, said to be one."""
    source = hardware.sources.get("measured_flops")
    for dtype in ("bfloat16", "float16"):
        if source is not None and dtype in hardware.measured_flops:
            return hardware.measured_flops[dtype], f"{dtype} matmul rate of {hardware.name}, {source}"
    return None


def _is_rate(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _key(name: str, sm_count: int | None) -> str:
    return f"{name} / {sm_count}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
