"""How full the launches of a trace leave the device: occupancy, waves and SM efficiency, weighted by kernel time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.columns.intervals import Intervals
from advisor.columns.schema import KERNEL
from advisor.columns.table import Floats, Table
from advisor.hardware import SmLimits
from advisor.measured import Occupancy
from advisor.metrics import occupancy as formulas


@dataclass(frozen=True, slots=True, kw_only=True)
class Fullness:
    """Occupancy of the whole recording, and the share of the warps each activity's launch can hold (NaN unknown)."""

    mean: Occupancy
    achieved: Floats
    launches: formulas.Occupancy


def fullness(
    table: Table, limits: SmLimits | None, sm_count: int | None, chosen: npt.NDArray[np.bool_] | None = None
) -> Fullness:
    """Occupancy and SM efficiency of the chosen activities, all without a choice; parts that are not known are None.

    `sm_efficiency` and `recorded_percent` are of all kernels, as the profiler's own tools print them: its 0 for blocks
    of more than 48 KB of shared memory, which is no measurement, is in the latter and not in `percent`.
    """
    rows = table.activities
    grid = rows.grid_x.astype(np.float64) * rows.grid_y * rows.grid_z
    block = rows.block_x.astype(np.float64) * rows.block_y * rows.block_z
    named = (rows.grid_x > 0) & (rows.block_x > 0)
    found = formulas.occupancy(
        blocks=np.where(named, grid, np.nan),
        threads=np.where(named, block, np.nan),
        registers=np.where(rows.registers > 0, rows.registers, np.nan).astype(np.float64),
        shared_bytes=np.where(rows.shared >= 0, rows.shared, np.nan).astype(np.float64),
        limits=limits,
        sm_count=sm_count,
    )
    kernel = (rows.kind == KERNEL) & (chosen if chosen is not None else True)
    weight = np.where(kernel, np.maximum(rows.duration, 0.0), 0.0)
    known = kernel & ~np.isnan(found.achieved)
    total = float(weight.sum())
    blocks = np.where(rows.blocks_per_sm >= 0, rows.blocks_per_sm, found.blocks_per_sm)
    blind = (rows.occupancy == 0) & np.isnan(formulas.recorded_occupancy(rows.occupancy, rows.shared))
    every = np.where(rows.kind == KERNEL, np.maximum(rows.duration, 0.0), 0.0)
    recorded = np.where((rows.occupancy >= 0) & (rows.occupancy <= 100), rows.occupancy, np.nan)
    share = min(1.0, float(weight[known].sum()) / total) if total > 0 else None
    achieved = _mean(found.achieved, weight)
    return Fullness(
        mean=Occupancy(
            recorded_percent=_mean(recorded, every),
            recorded_unknown=float(every[blind].sum()) / float(every.sum()) if every.sum() > 0 else None,
            percent=None if achieved is None else 100 * achieved,
            known=share,
            sm_efficiency=_mean(np.minimum(blocks, 1.0), every),
            wave_efficiency=_mean(found.wave_efficiency, weight),
            limiters=_limiters(found, weight, known),
        ),
        achieved=np.where(known, found.achieved, np.nan),
        launches=found,
    )


def in_steps(table: Table, full: Fullness, windows: Intervals, device: int) -> float | None:
    """Estimated SM efficiency over steps that follow each other on a device, as the TensorBoard plugin defines it."""
    if not len(windows):
        return None
    rows = table.activities
    mine = (rows.kind == KERNEL) & (rows.device == device)
    return formulas.sliced_sm_efficiency(
        rows.start[mine],
        rows.duration[mine],
        np.where(rows.blocks_per_sm >= 0, rows.blocks_per_sm, full.launches.blocks_per_sm)[mine],
        begin_us=float(windows[0, 0]),
        end_us=float(windows[-1, 1]),
    )


def _mean(values: Floats, weight: Floats) -> float | None:
    known = ~np.isnan(values) & (weight > 0)
    total = float(weight[known].sum())
    return float((values[known] * weight[known]).sum()) / total if total > 0 else None


def _limiters(found: formulas.Occupancy, weight: Floats, known: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Shares of the kernel time by what limits its occupancy, largest first."""
    total = float(weight[known].sum())
    if total <= 0:
        return {}
    codes = found.limiter[known].astype(np.int64)
    _, first, place = np.unique(codes, return_index=True, return_inverse=True)
    times = np.bincount(place, weights=weight[known])
    rows = np.flatnonzero(known)[first]
    shares = {
        found.limiter_name(int(row)) or "unknown": min(1.0, float(time) / total)
        for row, time in zip(rows, times, strict=True)
    }
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))
