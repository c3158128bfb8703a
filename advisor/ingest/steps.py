"""What a trace alone says about its steps: their windows, the phases that fill them, how busy the device was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.columns.intervals import Intervals, clipped, covered, intervals, length, merged, partition
from advisor.ingest.phases import OPTIMIZER_RANGE, NamedRange, StepTimes, Stretch, stretches
from advisor.model import Kernels, Operators, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The profiled steps as measured.

    `steps` have phases that sum to their duration; `busy` is the share of the steps in which the device ran anything,
    None on a CPU; `optimizer_us` is the time per step of each optimizer class's `step`, a closure it calls left out;
    `optimizer_idle_us` is how long the device has nothing to do meanwhile.
    """

    steps: tuple[Step, ...] = ()
    busy: float | None = None
    optimizer_us: Mapping[str, float] = field(default_factory=dict)
    optimizer_idle_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rows:
    """The columns a timeline is made of, in time order, with a phase for every row."""

    operators: Operators
    kernels: Kernels
    ranges: Sequence[NamedRange]
    launches: Mapping[int, tuple[float, int]]
    steps: Sequence[StepTimes]
    operator_phase: Sequence[str]
    kernel_phase: Sequence[str]


def measure(rows: Rows) -> Timeline:
    """Windows, phases and busy share of the marked steps; empty where none is marked."""
    if not len(rows.kernels):
        steps = _host_steps(rows)
        return Timeline(steps=steps, optimizer_us=_optimizer_times(rows, max(1, len(steps))))
    windows = device_windows(rows.kernels, rows.steps)
    kernels = intervals(rows.kernels.start_us, rows.kernels.duration_us)
    union = merged(kernels)
    layers = _device_layers(rows, kernels)
    wall = sum(end - begin for begin, end in windows.values())
    return Timeline(
        steps=tuple(
            Step(index=index, duration_us=end - begin, phases_us=partition(begin, end, layers, "idle"))
            for index, (begin, end) in windows.items()
        ),
        busy=sum(length(clipped(union, *window)) for window in windows.values()) / wall if wall > 0 else None,
        optimizer_us=_optimizer_times(rows, max(1, len(windows))),
        optimizer_idle_us=_optimizer_idle(rows, union, max(1, len(windows))),
    )


def _ranges_of(rows: Rows, phase: str) -> Intervals:
    chosen = [(s.start_us, s.end_us) for items in stretches(rows.ranges).values() for s in items if s.phase == phase]
    return np.array(chosen, dtype=np.float64).reshape(-1, 2)


def device_windows(kernels: Kernels, steps: Sequence[StepTimes]) -> dict[int, tuple[float, float]]:
    """Device-side window of every step that ran kernels: from the end of the work before it to the end of its own.

    Host ranges only show when a step was launched. Windows so defined are adjacent, hold the idle time in which the
    device waited for that step's data, and have the length of a step also for the last one.
    """
    spans = intervals(kernels.start_us, kernels.duration_us)
    step = np.array(kernels.step, dtype=np.int64)
    windows: dict[int, tuple[float, float]] = {}
    reached: float | None = None
    order = np.argsort(step, kind="stable")
    bounds = {index: np.searchsorted(step[order], [index, index + 1]) for index, _, _ in steps}
    for index, begin, _ in steps:
        own = spans[order[slice(*bounds[index])]]
        if not len(own):
            continue
        first = float(own[:, 0].min())
        if reached is None:
            earlier = spans[(step < 0) & (spans[:, 0] < first), 1]
            reached = min(first, max([begin, *earlier.tolist()]))
        end = max(reached, float(own[:, 1].max()))
        windows[index] = (reached, end)
        reached = end
    return windows


def _device_layers(rows: Rows, kernels: Intervals) -> list[tuple[str, Intervals]]:
    """What the device does, first come first: collectives and host copies count only where nothing else runs.

    Idle time under a data loading range of the host is `data`.
    """
    phase = np.array(rows.kernel_phase)
    names = ("forward", "backward", "optimizer", "other", "comm", "copy")
    layers = [(name, merged(kernels[phase == name])) for name in names]
    layers.append(("data", merged(np.concatenate((kernels[phase == "data"], _ranges_of(rows, "data"))))))
    return layers


def _host_steps(rows: Rows) -> tuple[Step, ...]:
    """The steps on a CPU: host time of the thread that runs them.

    `forward` is the time inside operators outside data loading, backward pass and optimizer, and what a closure of the
    optimizer spends outside its backward pass; `other` is the rest.
    """
    layers = [("data", merged(_ranges_of(rows, "data")))]
    threads = {thread for name, _, _, thread in rows.ranges if name.startswith("ProfilerStep#")}
    for phase in ("backward", "optimizer", "other", "forward"):
        chosen = [
            row
            for row, parent in enumerate(rows.operators.parent)
            if parent < 0 and rows.operator_phase[row] == phase and rows.operators.thread[row] in threads
        ]
        start = [rows.operators.start_us[row] for row in chosen]
        duration = [rows.operators.duration_us[row] for row in chosen]
        layers.append((phase, merged(np.concatenate((_ranges_of(rows, phase), intervals(start, duration))))))
    return tuple(
        Step(index=index, duration_us=end - begin, phases_us=partition(begin, end, layers, "other"))
        for index, begin, end in rows.steps
    )


def _optimizer_times(rows: Rows, steps: int) -> dict[str, float]:
    """Microseconds per step by optimizer class, inside its `Optimizer.step#` ranges but outside what they enclose.

    Device time where there is a device: of the kernels that were launched there.
    """
    found = sorted(_optimizer_stretches(rows))
    kinds = [_kind(item) for item in found]
    times = dict.fromkeys(kinds, 0.0)
    if not len(rows.kernels):
        for item, kind in zip(found, kinds, strict=True):
            times[kind] += (item.end_us - item.start_us) / steps
        return times
    starts = [item.start_us for item in found]
    for row, number in enumerate(rows.kernels.correlation):
        if rows.kernel_phase[row] == "optimizer" and number in rows.launches:
            place = bisect_right(starts, rows.launches[number][0]) - 1
            if place >= 0 and rows.launches[number][0] < found[place].end_us:
                times[kinds[place]] += rows.kernels.duration_us[row] / steps
    return times


def _optimizer_idle(rows: Rows, busy: Intervals, steps: int) -> dict[str, float]:
    """Microseconds per step that the device is idle while the host is in an optimizer's `step`, by class.

    The host that is ahead of the device leaves none; one that is behind makes the device wait for every launch.
    """
    found = list(_optimizer_stretches(rows))
    times = dict.fromkeys(map(_kind, found), 0.0)
    begin, end = [item.start_us for item in found], [item.end_us for item in found]
    for item, used in zip(found, covered(busy, begin, end).tolist(), strict=True):
        times[_kind(item)] += (item.end_us - item.start_us - used) / steps
    return times


def _kind(item: Stretch) -> str:
    """The class of the optimizer whose `step` a stretch is."""
    return item.name[len(OPTIMIZER_RANGE) :].rpartition(".")[0]


def _optimizer_stretches(rows: Rows) -> Iterator[Stretch]:
    """What the optimizers do themselves in the marked steps; the hook that ends a step runs inside their range."""
    begins = [begin for _, begin, _ in rows.steps]
    for item in (item for items in stretches(rows.ranges).values() for item in items if item.phase == "optimizer"):
        place = bisect_right(begins, item.start_us) - 1
        if place >= 0 and item.start_us < rows.steps[place][2]:
            yield item._replace(end_us=min(item.end_us, rows.steps[place][2]))
