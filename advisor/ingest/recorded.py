"""What a trace says about its machine and its job: devices, rank, size of the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDevice:
    """One entry of `deviceProperties`; what is not there is None."""

    name: str
    index: int | None = None  # by which activities name it
    sm_count: int | None = None
    compute: tuple[int, int] | None = None  # major, minor
    memory_bytes: int | None = None
    warp_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of a job recorded the trace; None where it does not say."""

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None


def devices(head: Mapping[str, Any]) -> tuple[TraceDevice, ...]:
    """The devices a trace lists (old traces call the list `computeProperties`)."""
    listed = head.get("deviceProperties") or head.get("computeProperties")
    if not isinstance(listed, list):
        return ()
    return tuple(_device(item) for item in listed if isinstance(item, dict))


def _device(item: Mapping[str, Any]) -> TraceDevice:
    major, minor = _whole(item.get("computeMajor")), _whole(item.get("computeMinor"))
    name = item.get("name")
    return TraceDevice(
        name=name if isinstance(name, str) else "",
        index=_whole(item.get("id")),
        sm_count=_whole(item.get("numSms")),
        compute=(major, minor or 0) if major is not None else None,
        memory_bytes=_whole(item.get("totalGlobalMem")),
        warp_size=_whole(item.get("warpSize")),
    )


def device_of(head: Mapping[str, Any], index: int | None) -> TraceDevice:
    """The device that activities call `index`; the only one where one is listed, else one without a name.

    A process that sees one of several devices lists that one under the number 0.
    """
    listed = devices(head)
    found = [device for device in listed if device.index == index]
    if len(found) == 1:
        return found[0]
    same = {replace(device, index=None) for device in listed}
    return same.pop() if len(same) == 1 else TraceDevice(name="")


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
