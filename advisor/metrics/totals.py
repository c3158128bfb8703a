"""Plain sums over everything a trace recorded: kernels, busy time, communication, marked steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.columns.intervals import Intervals, clipped, intervals, length, merged
from advisor.columns.schema import ANNOTATION, KERNEL, MEMCPY, MEMSET
from advisor.columns.table import Ints, Table

STEP = re.compile(r"^ProfilerStep#(\d+)$")
NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
# Collectives that are not NCCL's: vLLM's custom_all_reduce.cuh, torch's CUDASymmetricMemoryOps.cu, NVSHMEM.
OTHERS = re.compile(
    r"cross_device_reduce|(one|two)_shot_all_reduce|multimem_(all|one_shot|reduce)|nvshmem", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the whole recording, times in microseconds; None where nothing of the kind was recorded.

    `busy_us` is the union of kernels, copies and memsets, `span_us` the time from the first to the last of them,
    `exposed_comm_us` the union of all kernels less the union of those that do not communicate. `steps` counts the
    distinct ProfilerStep ranges of the host; shares "in steps" are of the time from the first of them to the last.
    A negative duration, which a clock that was set back leaves, counts as none.
    """

    kernels: int
    memcpys: int
    memsets: int
    kernel_us: float | None
    busy_us: float | None
    kernels_busy_us: float | None
    span_us: float | None
    nccl_kernels: int
    nccl_us: float
    exposed_comm_us: float | None
    steps: int
    step_mean_us: float | None
    busy_in_steps: float | None
    kernels_busy_in_steps: float | None


def communicates(table: Table) -> npt.NDArray[np.bool_]:
    """For each activity whether it is a kernel of a collective, by its name."""
    return _named(table, NCCL) | _named(table, OTHERS)


def _named(table: Table, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """For each activity whether it is a kernel whose name has a pattern."""
    rows = table.activities
    found = np.array([pattern.search(name) is not None for name in table.names], dtype=bool)
    return found[rows.name] & (rows.kind == KERNEL) if len(rows) else np.zeros(0, dtype=bool)


def marked_steps(table: Table) -> Intervals:
    """The distinct ProfilerStep ranges of the host, in order of time, as intervals."""
    rows = table.ranges
    kept = first_ranges(table, [place for place, name in enumerate(table.names) if STEP.match(name)])
    return intervals(rows.start[kept], rows.duration[kept])


def first_ranges(table: Table, names: Sequence[int]) -> Ints:
    """The first of the host's ranges for each of some names (numbers into the table's), as rows in order of time."""
    rows = table.ranges
    chosen = np.flatnonzero((rows.kind == ANNOTATION) & np.isin(rows.name, names))
    _, first = np.unique(rows.name[chosen], return_index=True)
    return chosen[np.sort(first)]


def totals(table: Table) -> Totals:
    """Sum up a table."""
    rows = table.activities
    kernel = rows.kind == KERNEL
    everything = intervals(rows.start, rows.duration)
    busy, kernels = merged(everything), merged(everything[kernel])
    comm, nccl = communicates(table), _named(table, NCCL)
    steps = marked_steps(table)
    window = (float(steps[0, 0]), float(steps[:, 1].max())) if len(steps) else None
    some = bool(len(rows))
    duration = np.maximum(rows.duration, 0.0)
    return Totals(
        kernels=int(kernel.sum()),
        memcpys=int((rows.kind == MEMCPY).sum()),
        memsets=int((rows.kind == MEMSET).sum()),
        kernel_us=float(duration[kernel].sum()) if some else None,
        busy_us=length(busy) if some else None,
        kernels_busy_us=length(kernels) if some else None,
        span_us=float(busy[-1, 1] - busy[0, 0]) if some else None,
        nccl_kernels=int(nccl.sum()),
        nccl_us=float(duration[nccl].sum()),
        exposed_comm_us=max(0.0, length(kernels) - length(merged(everything[kernel & ~comm]))) if some else None,
        steps=len(steps),
        step_mean_us=float((steps[:, 1] - steps[:, 0]).mean()) if len(steps) else None,
        busy_in_steps=_share(busy, window) if some else None,
        kernels_busy_in_steps=_share(kernels, window) if some else None,
    )


def _share(busy: Intervals, window: tuple[float, float] | None) -> float | None:
    if window is None or window[1] <= window[0]:
        return None
    return length(clipped(busy, *window)) / (window[1] - window[0])
