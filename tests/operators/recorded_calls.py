"""Operator calls of a trace with the kernels they launched, read with nothing but json."""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.columns.inputs import DTYPES
from advisor.hardware import lookup
from advisor.model import Hardware
from advisor.operators.arithmetic import COMPOSITES, Work, work_of
from advisor.operators.families import family
from advisor.operators.lists import with_list_dtype
from advisor.operators.traffic import least_bytes

LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime")
ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")


@dataclass(eq=False)
class Recorded:
    """One call; `kernels` and `time_us` are what it launched itself, or all inside it where its arithmetic counts."""

    name: str
    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]
    concrete: tuple[str, ...]
    strides: tuple[Any, ...] | None
    start: float
    end: float
    parent: Recorded | None = None
    counts: Recorded | None = None  # the call around this one whose arithmetic counts
    holds: bool = False
    work: Work | None = None
    time_us: float = 0.0
    kernels: list[str] = field(default_factory=list)

    @property
    def least_bytes(self) -> float | None:
        dtypes = with_list_dtype(self.shapes, self.dtypes, self.kernels[0] if self.kernels else "")
        return least_bytes(self.name, family(self.name), self.shapes, dtypes, self.concrete, self.strides)


@dataclass
class Recording:
    """The device, the labelled stretches of host time, and the calls that launched anything."""

    hardware: Hardware | None
    labels: list[tuple[float, float, str]]
    calls: list[Recorded]

    def of_label(self, label: str) -> list[Recorded]:
        """The calls made while a `record_function` range of that name was open."""
        spans = [(start, end) for start, end, name in self.labels if name == label]
        return [call for call in self.calls if any(start <= call.start < end for start, end in spans)]


def read(path: Path) -> Recording:
    """All of a trace, old or new."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(re.sub(rb":\s*-?(?:inf|nan|Infinity|NaN)\b", b": null", data))
    threads: dict[Any, list[Recorded]] = {}
    launches: dict[int, tuple[Any, float]] = {}
    activities, labels = [], []
    for event in document["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, arguments = str(event.get("cat")).lower(), event.get("args") or {}
        where = (event.get("pid"), event.get("tid"))
        if category in ("cpu_op", "operator"):
            threads.setdefault(where, []).append(_call(event, arguments))
        elif category in LAUNCHES and "correlation" in arguments:
            launches[arguments["correlation"]] = (where, float(event["ts"]))
        elif category in ACTIVITIES:
            activities.append((arguments.get("correlation"), float(event.get("dur") or 0), event["name"]))
        elif category == "user_annotation":
            labels.append((float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"]))
    for calls in threads.values():
        _nest(calls)
    for composite in (False, True):
        for calls in threads.values():
            _count(calls, composite)
    found = list(_charge(threads, launches, activities))
    devices = document.get("deviceProperties") or []
    known = [lookup(device.get("name", ""), device.get("numSms")) for device in devices]
    return Recording(next((item for item in known if item), None), sorted(labels), found)


def _call(event: dict[str, Any], arguments: dict[str, Any]) -> Recorded:
    def entries(key: str) -> tuple[Any, ...]:
        recorded = arguments.get(key) or arguments.get(key.replace("Dims", "dims")) or []
        return tuple(tuple(tuple(inner) if isinstance(inner, list) else inner for inner in item) for item in recorded)

    strides = entries("Input Strides")
    return Recorded(
        name=event["name"],
        shapes=entries("Input Dims"),
        dtypes=tuple(DTYPES.get(str(item), "") for item in arguments.get("Input type") or []),
        concrete=tuple(str(item) for item in arguments.get("Concrete Inputs") or []),
        strides=strides or None,
        start=float(event["ts"]),
        end=float(event["ts"]) + float(event.get("dur") or 0),
    )


def _nest(calls: list[Recorded]) -> None:
    calls.sort(key=lambda call: (call.start, -call.end))
    stack: list[Recorded] = []
    for call in calls:
        while stack and stack[-1].end <= call.start:
            stack.pop()
        call.parent = stack[-1] if stack else None
        stack.append(call)
        call.work = work_of(call.name, call.shapes, call.dtypes, call.concrete)


def _count(calls: list[Recorded], composite: bool) -> None:
    for call in calls:
        if call.parent is not None and call.parent.counts is not None:
            call.counts = call.parent.counts
        elif call.work is not None and (call.name in COMPOSITES) == composite and not call.holds and not call.counts:
            call.counts = call
            outer = call.parent
            while outer is not None:
                outer.holds, outer = True, outer.parent


def _charge(
    threads: dict[Any, list[Recorded]], launches: dict[int, tuple[Any, float]], activities: list[Any]
) -> Iterator[Recorded]:
    starts = {where: [call.start for call in calls] for where, calls in threads.items()}
    for correlation, duration, name in activities:
        where, time = launches.get(correlation, (None, 0.0))
        place = bisect.bisect_right(starts.get(where, []), time) - 1
        call = threads[where][place] if place >= 0 else None
        while call is not None and call.end <= time:
            call = call.parent
        if call is None:
            continue
        unit = call.counts or call
        if not unit.kernels:
            yield unit
        unit.kernels.append(name)
        unit.time_us += duration
