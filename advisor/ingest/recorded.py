"""What a trace says about its machine and its job: devices, rank, size of the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDevice:
    """One entry of `deviceProperties`; what is not there is None."""

    name: str
    sm_count: int | None = None
    compute: tuple[int, int] | None = None  # major, minor
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of a job recorded the trace; None where it does not say."""

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None


def devices(head: Mapping[str, Any]) -> tuple[TraceDevice, ...]:
    """The devices a trace lists, by their index (old traces call the list `computeProperties`)."""
    listed = head.get("deviceProperties") or head.get("computeProperties")
    if not isinstance(listed, list):
        return ()
    return tuple(_device(item) for item in listed if isinstance(item, dict))


def _device(item: Mapping[str, Any]) -> TraceDevice:
    major, minor = _whole(item.get("computeMajor")), _whole(item.get("computeMinor"))
    name = item.get("name")
    return TraceDevice(
        name=name if isinstance(name, str) else "",
        sm_count=_whole(item.get("numSms")),
        compute=(major, minor or 0) if major is not None else None,
        memory_bytes=_whole(item.get("totalGlobalMem")),
    )


def place(head: Mapping[str, Any]) -> Place:
    """Rank, world size and backend of the process."""
    info = head.get("distributedInfo")
    if not isinstance(info, dict):
        return Place()
    backend = info.get("backend")
    return Place(
        rank=_whole(info.get("rank")),
        world_size=_whole(info.get("world_size")),
        backend=backend if isinstance(backend, str) else None,
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
