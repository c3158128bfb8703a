"""The counters of GPUs as a monitoring tool reported them, and the rules by which a sample counts.

Names and units are those of `capture.counters`, so that what was recorded elsewhere stands beside what a run recorded
itself. A ratio outside 0..1 is a fault of the counter and is left out with its reason, never clamped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from advisor.model import Metric

BLANK = 2.0**47  # DCGM_FP64_BLANK of dcgm_structs.h: from here on a number says why there is none; INT64's is higher


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounters:
    """The counters of one GPU or MIG instance.

    `entity` is its name in the file ("GPU 0", "GPU 0 instance 1", "GPU-I 3") and `gpu` its index there, None where the
    file names instances only. `metrics` are means over the samples that count, `samples` their greatest number over
    the metrics, and `series` the number of distinct series the file has of this GPU, ours or not. `missing` says what
    was left out, in whole or in part, and why (metric -> reason).
    """

    entity: str
    gpu: int | None
    uuid: str | None = None
    model: str | None = None
    metrics: tuple[Metric, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    series: int = 0


class Counter(NamedTuple):
    """One of our counters, read from a number times `factor`; `top` is the largest number that can be right."""

    name: str
    unit: str
    factor: float = 1.0
    top: float | None = None


def ratio(name: str) -> Counter:
    """A counter that is printed as 0..1 and kept in percent."""
    return Counter(name, "%", 100.0, 1.0)


def percent(name: str) -> Counter:
    """A counter that is printed in percent."""
    return Counter(name, "%", 1.0, 100.0)


POWER = Counter("power", "W")
MEMORY_MIB = Counter("memory_used", "byte", 2.0**20)
MEMORY_BYTES = Counter("memory_used", "byte")
UTILISATION = percent("gpu_utilisation")
MEMORY_UTILISATION = percent("memory_utilisation")


def convert(counter: Counter, text: str) -> float:
    """The number of one sample in the counter's unit. Raises ValueError with the reason where it cannot be right."""
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    try:
        value = float(text.replace("_", "?"))  # float() alone takes "1_0"
    except ValueError:
        raise ValueError(f"{shown!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{shown} is no measurement")
    if value >= BLANK and counter.unit != "byte":
        raise ValueError(f"{shown} is DCGM's mark for a value it does not have")
    if value < 0 or (counter.top is not None and value > counter.top):
        bounds = f"0..{counter.top:g}" if counter.top is not None else "0 and above"
        raise ValueError(f"{shown} is outside {bounds}")
    return float(f"{value * counter.factor:.15g}")  # 0.005822 is 0.5822 %, not 0.5821999999999999


class Tally:
    """The samples of one GPU while a file is read."""

    def __init__(self, entity: str, gpu: int | None, uuid: str | None = None, model: str | None = None) -> None:
        self.entity = entity
        self.gpu = gpu
        self.uuid = uuid
        self.model = model
        self._source: dict[str, tuple[str, str]] = {}  # counter -> unit, source; in the order of the file
        self._sums: dict[str, tuple[float, int]] = {}
        self._reasons: dict[str, tuple[str, int]] = {}

    def add(self, counter: Counter, text: str, source: str) -> None:
        """Count a sample, or keep the reason why it does not count."""
        self._source.setdefault(counter.name, (counter.unit, source))
        try:
            value = convert(counter, text)
        except ValueError as error:
            self.reject(counter, str(error), source)
            return
        total, count = self._sums.get(counter.name, (0.0, 0))
        self._sums[counter.name] = total + value, count + 1

    def reject(self, counter: Counter, reason: str, source: str) -> None:
        """Keep the reason why a sample does not count; the first reason of a counter stays."""
        self._source.setdefault(counter.name, (counter.unit, source))
        first, count = self._reasons.get(counter.name, (reason, 0))
        self._reasons[counter.name] = first, count + 1

    def expect(self, counter: Counter, source: str) -> None:
        """The file has a column for the counter, and this sample of it is empty."""
        self._source.setdefault(counter.name, (counter.unit, source))

    def finish(self, series: int) -> GpuCounters:
        """The means of what was counted."""
        metrics: list[Metric] = []
        missing: dict[str, str] = {}
        for name, (unit, source) in self._source.items():
            total, count = self._sums.get(name, (0.0, 0))
            if count:
                metrics.append(Metric(name=name, value=total / count, unit=unit, source=source))
            reason, bad = self._reasons.get(name, ("", 0))
            if bad:
                missing[name] = reason if count + bad == 1 else f"{bad} of {count + bad} samples left out: {reason}"
            elif not count:
                missing[name] = "no sample has a value"
        return GpuCounters(
            entity=self.entity,
            gpu=self.gpu,
            uuid=self.uuid,
            model=self.model,
            metrics=tuple(metrics),
            missing=missing,
            samples=max((count for _, count in self._sums.values()), default=0),
            series=series,
        )


def in_order(found: list[GpuCounters]) -> tuple[GpuCounters, ...]:
    """GPUs by index, then by name and UUID, whatever the order of the file."""
    return tuple(sorted(found, key=lambda g: (g.gpu is None, g.gpu or 0, g.entity, g.uuid or "")))
