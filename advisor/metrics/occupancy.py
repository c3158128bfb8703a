"""How many warps and multiprocessors a kernel launch can fill: occupancy, its limiter, waves and SM efficiency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.hardware import SmLimits

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]

LIMITERS = ("warps", "registers", "shared memory", "blocks", "grid")
"""What keeps more warps from being resident; `Occupancy.limiter` is a set of them, bit i for entry i.

"grid" means that the launch has fewer blocks than would fit. Of the others several can bind at once.
"""

REASONS = (
    "the limits of this architecture are not on record",
    "the number of multiprocessors is unknown",
    "the trace does not record grid and block of this kernel",
    "the trace does not record the registers of this kernel",
    "the trace does not record the shared memory of this kernel",
    "the recorded launch exceeds the limits of this architecture",
)
"""Why the occupancy of a kernel is unknown, by the code in `Occupancy.reason`; -1 stands for known."""

# A block may have this much shared memory without the kernel opting in to more (CUDA C++ Programming Guide).
DEFAULT_BLOCK_SHARED_BYTES = 48 * 1024

_GRID = 1 << LIMITERS.index("grid")
_NO_LIMITS, _NO_SM_COUNT, _NO_LAUNCH, _NO_REGISTERS, _NO_SHARED, _EXCEEDS = range(len(REASONS))


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """How many blocks each resource of one multiprocessor holds, one entry per kernel; infinite where it sets no limit.

    NaN where the recorded launch does not say. The four are what Nsight Compute calls `launch__occupancy_limit_*`.
    """

    warps: Floats
    registers: Floats
    shared: Floats
    blocks: Floats


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of launches, one entry per kernel; NaN (and no bit in `limiter`) where unknown, `reason` says why.

    `blocks_fit` is the number of blocks that one multiprocessor can hold at once, `blocks_per_sm` the blocks of the
    grid over the multiprocessors. `theoretical` and `achieved` are shares of the warps a multiprocessor can hold:
    blocks_fit * warps / max_warps, and min(blocks_fit, blocks_per_sm) * warps / max_warps. `waves` is the number of
    times the device is filled, `wave_efficiency` the share of the block slots of those waves that a block uses.
    """

    blocks_fit: Floats
    blocks_per_sm: Floats
    theoretical: Floats
    achieved: Floats
    waves: Floats
    wave_efficiency: Floats
    limiter: Codes
    reason: Codes

    def limiter_name(self, kernel: int) -> str | None:
        """What limits this kernel, such as "registers and shared memory"; `None` where unknown."""
        names = [name for bit, name in enumerate(LIMITERS) if self.limiter[kernel] >> bit & 1]
        return " and ".join(names) or None

    def reason_text(self, kernel: int) -> str | None:
        """Why the occupancy of this kernel is unknown, `None` where it is known."""
        code = int(self.reason[kernel])
        return REASONS[code] if code >= 0 else None


def block_limits(
    threads: npt.ArrayLike, registers: npt.ArrayLike, shared_bytes: npt.ArrayLike, limits: SmLimits
) -> BlockLimits | None:
    """Blocks of each launch that fit on one multiprocessor, by resource; `None` where a limit has no source.

    `threads` are per block, `registers` per thread, `shared_bytes` per block, static and dynamic together as a trace
    records them, without what the driver adds; one entry per kernel, NaN or not positive (shared memory: negative)
    where not recorded. A launch that no multiprocessor can take has 0 blocks.

    The rules are those of NVIDIA's occupancy calculator (cuda_occupancy.h): registers go to warps in units, warps are
    spread over the register files of a multiprocessor, shared memory goes to blocks in units after the driver's share
    was added, and every kernel is taken to opt in to the largest block of shared memory. Blocks launched as a cluster,
    which a trace does not record, may fit less often. On sm_60 the calculator also refuses what other Pascal chips
    cannot launch; such a launch is never recorded.
    """
    need = _complete(limits)
    if need is None:
        return None
    warps = np.ceil(_recorded(threads, least=1) / limits.warp_size)
    warps = np.where(warps * limits.warp_size > need.max_block_threads, np.inf, warps)
    per_warp = _up(_recorded(registers, least=1) * limits.warp_size, need.warp_registers_unit)
    # The launch check assumes that every register file serves the block.
    per_block = per_warp * _up(warps, need.partitions)
    files = need.partitions * np.floor(need.registers // need.partitions / per_warp)
    by_registers = np.floor(files / warps)
    refused = (per_block > need.block_registers) | (_recorded(registers, least=1) > need.thread_registers)
    allocated = _up(_recorded(shared_bytes, least=0) + need.reserved_shared_bytes, need.shared_unit_bytes)
    with np.errstate(divide="ignore"):
        by_shared = np.floor(need.shared_bytes / allocated)
    too_much = allocated > _up(np.float64(need.block_shared_bytes + need.reserved_shared_bytes), need.shared_unit_bytes)
    return BlockLimits(
        warps=np.floor(need.max_warps / warps),
        registers=np.where(refused, 0.0, by_registers),
        shared=np.where(too_much, 0.0, by_shared),
        blocks=np.where(np.isnan(warps), np.nan, float(need.max_blocks)),
    )


def occupancy(
    *,
    blocks: npt.ArrayLike,
    threads: npt.ArrayLike,
    registers: npt.ArrayLike,
    shared_bytes: npt.ArrayLike,
    limits: SmLimits | None,
    sm_count: int | None,
) -> Occupancy:
    """Occupancy, limiter and waves of each launch from what a trace records.

    `blocks` is the size of the grid, `threads` of a block, `registers` per thread, `shared_bytes` per block, static and
    dynamic together; one entry per kernel, NaN where not recorded (0 registers are a kernel that was not asked for
    them). `sm_count` are the multiprocessors of the device.

    A launch that exceeds the limits has run all the same, so its record or the architecture is wrong: it is unknown.
    """
    grid = _recorded(blocks, least=1)
    size = _recorded(threads, least=1)
    known = block_limits(threads, registers, shared_bytes, limits) if limits is not None else None
    nothing = np.full(grid.shape, np.nan)
    table = np.vstack((known.warps, known.registers, known.shared, known.blocks) if known else (nothing,) * 4)
    launched = ~(np.isnan(grid) | np.isnan(size))
    reason = np.full(grid.shape, -1, dtype=np.int8)
    # Later lines outweigh earlier ones: what is missing altogether comes last.
    reason[(table == 0).any(axis=0)] = _EXCEEDS
    reason[np.isnan(table[2])] = _NO_SHARED
    reason[np.isnan(table[1])] = _NO_REGISTERS
    reason[~launched] = _NO_LAUNCH
    if not sm_count:
        reason[:] = _NO_SM_COUNT
    if known is None or limits is None:
        reason[:] = _NO_LIMITS
    return _combined(grid, size, table, reason, limits, sm_count)


def estimated_sm_efficiency(blocks: npt.ArrayLike, sm_count: int | None) -> Floats:
    """Share of the multiprocessors that the grid of each kernel can reach, min(blocks / sm_count, 1); NaN if unknown.

    The definition of Kineto and its TensorBoard plugin: it says whether a launch could fill the multiprocessors, not
    whether they issue, and blocks of one thread count as much as full ones (kineto#59).
    """
    grid = _recorded(blocks, least=1)
    return np.minimum(grid / sm_count, 1.0) if sm_count else np.full(grid.shape, np.nan)


def sliced_sm_efficiency(
    start_us: npt.ArrayLike,
    duration_us: npt.ArrayLike,
    blocks_per_sm: npt.ArrayLike,
    *,
    begin_us: float,
    end_us: float,
) -> float | None:
    """Estimated SM efficiency of a window of one device as the TensorBoard plugin defines it, a share of all its time.

    Time is cut at every start and end of a kernel; in each slice the blocks per multiprocessor of the running kernels
    add up, at most to 1; the sum over slices is divided by the whole window, so idle time counts 0. Arrays hold one
    entry per kernel, in microseconds. `None` for an empty window, and where a kernel inside it has no recorded grid.
    """
    start, value = _floats(start_us), _recorded(blocks_per_sm, least=0)
    first = np.maximum(start, begin_us)
    last = np.minimum(start + _floats(duration_us), end_us)
    inside = last > first
    if end_us <= begin_us or bool(np.isnan(value[inside]).any()):
        return None
    first, last, value = first[inside], last[inside], value[inside]
    at = np.concatenate((first, last))
    order = np.argsort(at, kind="stable")
    at = at[order]
    # The running sum is exact to rounding only; an idle slice must not keep a remainder of it.
    running = np.cumsum(np.concatenate((value, -value))[order])
    active = np.cumsum(np.concatenate((np.ones_like(first), -np.ones_like(last)))[order])
    filled = np.where(active > 0, np.clip(running, 0.0, 1.0), 0.0)
    return float(np.sum(np.diff(at) * filled[:-1]) / (end_us - begin_us))


def recorded_occupancy(percent: npt.ArrayLike, shared_bytes: npt.ArrayLike) -> Floats:
    """Kineto's `est. achieved occupancy %` as a share, NaN where the recorder could not know it.

    The recorder asks the calculator without opting in to large shared memory, so a block above 48 KB is refused and
    comes out as 0: that value is missing, not a measurement.
    """
    share = _recorded(percent, least=0) / 100
    return np.where((share == 0) & (_floats(shared_bytes) > DEFAULT_BLOCK_SHARED_BYTES), np.nan, share)


@dataclass(frozen=True, slots=True)
class _Need:
    """The limits that an occupancy needs, all known."""

    max_warps: int
    max_blocks: int
    max_block_threads: int
    registers: int
    block_registers: int
    thread_registers: int
    warp_registers_unit: int
    partitions: int
    shared_bytes: int
    block_shared_bytes: int
    reserved_shared_bytes: int
    shared_unit_bytes: int


def _complete(limits: SmLimits) -> _Need | None:
    found = {name: getattr(limits, name) for name in _Need.__slots__}
    return None if None in found.values() else _Need(**found)


def _combined(
    grid: Floats, size: Floats, table: Floats, reason: Codes, limits: SmLimits | None, sm_count: int | None
) -> Occupancy:
    unknown = reason >= 0
    fit = np.where(unknown, np.nan, np.min(table, axis=0))
    per_sm = grid / sm_count if sm_count else np.full(grid.shape, np.nan)
    # Under a limit of one multiprocessor the fraction of a block is the mean over all of them.
    resident = np.minimum(fit, per_sm)
    share = np.ceil(size / limits.warp_size) / limits.max_warps if limits and limits.max_warps else np.nan
    slots = fit * (sm_count or np.nan)
    waves = grid / slots
    bits = np.left_shift(1, np.arange(len(table)))[:, None]
    limiter = np.where(per_sm < fit, _GRID, np.sum(np.where(table == fit, bits, 0), axis=0))
    return Occupancy(
        blocks_fit=fit,
        blocks_per_sm=per_sm,
        theoretical=fit * share,
        achieved=resident * share,
        waves=waves,
        wave_efficiency=waves / np.ceil(waves),
        limiter=np.where(unknown, 0, limiter).astype(np.int8),
        reason=reason,
    )


def _floats(values: npt.ArrayLike) -> Floats:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))


def _recorded(values: npt.ArrayLike, least: float) -> Floats:
    """The values as floats, NaN where they are below what can be recorded."""
    found = _floats(values)
    return np.where(found >= least, found, np.nan)


def _up(values: Floats | np.float64, unit: int) -> Floats:
    return np.asarray(np.ceil(values / unit) * unit, dtype=np.float64)
