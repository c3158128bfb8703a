"""Ninety-one operators on one NVIDIA H200: what we say of their launches against what its counters measured.

`data/h200_operators/README.md` says how the files were made and what the numbers mean.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.columns.inputs import inputs_of
from advisor.columns.joins import launching_calls, launching_operators, parents
from advisor.columns.schema import KERNEL
from advisor.columns.table import Table
from advisor.hardware import sm_limits
from advisor.ingest.ncu import NcuKernel, read_ncu
from advisor.ingest.ncu_join import Basis, Match, TraceKernels, join
from advisor.ingest.ncu_metrics import number
from advisor.ingest.reader import read_table
from advisor.metrics.occupancy import (
    DEFAULT_BLOCK_SHARED_BYTES,
    Occupancy,
    block_limits,
    occupancy,
    recorded_occupancy,
)
from advisor.metrics.tensorcores import tensor_use
from advisor.operators.families import family

DATA = Path(__file__).parent / "data" / "h200_operators"
MULTIPROCESSORS = 132
# Cycles of the tensor pipe spent in matrix instructions; `sm__pipe_tensor_cycles_active` counts others, too.
MATRIX_CYCLES = (
    "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
)
TENSOR_INSTRUCTIONS = "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"
ROUNDING = 0.01  # Nsight Compute prints percentages with two decimals


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> tuple[NcuKernel, ...]:
    path = tmp_path_factory.mktemp("ncu") / "ncu.csv"
    path.write_bytes(gzip.decompress((DATA / "ncu.csv.gz").read_bytes()))
    return read_ncu(path)


@pytest.fixture(scope="module")
def table() -> Table:
    return read_table(DATA / "operators.json.gz")


@dataclass(frozen=True)
class Kernels:
    """The kernels of the trace in launch order; every field has one entry per kernel."""

    rows: Any
    names: list[str]
    grid: list[tuple[int, int, int]]
    block: list[tuple[int, int, int]]
    shared: Any
    recorded: Any
    launch: Occupancy


@pytest.fixture(scope="module")
def kernels(table: Table) -> Kernels:
    found = table.activities
    assert set(found.stream[found.kind == KERNEL]) == {7}  # one stream: launch order is the order of the starts
    rows = np.flatnonzero(found.kind == KERNEL)
    rows = rows[np.argsort(found.start[rows], kind="stable")]
    grid = [tuple(int(n[row]) for n in (found.grid_x, found.grid_y, found.grid_z)) for row in rows]
    block = [tuple(int(n[row]) for n in (found.block_x, found.block_y, found.block_z)) for row in rows]
    launch = occupancy(
        blocks=np.prod(grid, axis=1),
        threads=np.prod(block, axis=1),
        registers=found.registers[rows],
        shared_bytes=found.shared[rows],
        limits=sm_limits("sm_90"),
        sm_count=MULTIPROCESSORS,
    )
    names = [table.names[number] for number in found.name[rows]]
    return Kernels(rows, names, grid, block, found.shared[rows], found.occupancy[rows], launch)


@pytest.fixture(scope="module")
def matches(profile: tuple[NcuKernel, ...], kernels: Kernels) -> tuple[Match, ...]:
    return join(profile, TraceKernels(kernels.names, kernels.grid, kernels.block))


@dataclass(frozen=True)
class Pair:
    """One distinct kernel: name, grid and block. Percentages; `measured` is the mean over its launches."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    duration_us: float
    waves: float
    wave_efficiency: float
    resident: float
    bound: float
    measured: float

    @property
    def difference(self) -> float:
        return self.bound - self.measured


@pytest.fixture(scope="module")
def pairs(profile: tuple[NcuKernel, ...], kernels: Kernels, matches: tuple[Match, ...]) -> list[Pair]:
    """What a launch allows against what was measured.

    `Occupancy.achieved` is a mean over all multiprocessors, so a grid of 4 blocks counts 128 idle ones. Nsight Compute
    counts the cycles in which a multiprocessor holds a warp: there one that works at all has at least one block.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, kernel in enumerate(profile):
        groups[kernel.name, kernel.grid, kernel.block].append(place)
    found = []
    launch = kernels.launch
    for members in groups.values():
        first, row = profile[members[0]], matches[members[0]].row
        assert row is not None
        threads = int(np.prod(kernels.block[row]))
        resident = float(min(launch.blocks_fit[row], max(1.0, launch.blocks_per_sm[row])))
        found.append(
            Pair(
                name=first.name,
                grid=kernels.grid[row],
                threads=threads,
                duration_us=float(np.mean([value(profile[place], "duration_us") for place in members])),
                waves=float(launch.waves[row]),
                wave_efficiency=float(launch.wave_efficiency[row]),
                resident=resident,
                bound=100 * resident * np.ceil(threads / 32) / 64,
                measured=float(np.mean([value(profile[place], "achieved_occupancy") for place in members])),
            )
        )
    return found


def value(kernel: NcuKernel, name: str) -> float:
    found = kernel.value(name)
    assert found is not None
    return found


def percent(kernel: NcuKernel, metric: str) -> float:
    found = number(kernel.raw[metric])
    assert found is not None
    return found


# ----------------------------------------------------------------------------------------------------------------- join


def test_every_profiled_launch_is_found_in_the_trace(
    profile: tuple[NcuKernel, ...], kernels: Kernels, matches: tuple[Match, ...]
) -> None:
    """The two tools spell 104 of the 118 names differently; the join tells all kernels apart.

    Both ran the same program, so the n-th launch is the n-th kernel. The join does not use that.
    """
    assert len(profile) == len(kernels.names) == 184
    assert {match.basis for match in matches} == {Basis.ONLY, Basis.ORDER}
    assert [match.row for match in matches] == list(range(184))
    spelled = {(ncu.name, name) for ncu, name in zip(profile, kernels.names, strict=True)}
    assert len(spelled) == 118
    assert sum(ours != theirs for ours, theirs in spelled) == 104


def test_a_profile_of_some_kernels_only_joins_as_well(profile: tuple[NcuKernel, ...], kernels: Kernels) -> None:
    trace = TraceKernels(kernels.names, kernels.grid, kernels.block)
    for place, kernel in enumerate(profile):
        (match,) = join([kernel], trace)
        assert match.basis in (Basis.ONLY, Basis.GROUP)
        assert place in match.rows


def test_the_trace_records_what_the_profile_launched(
    profile: tuple[NcuKernel, ...], table: Table, kernels: Kernels
) -> None:
    """Occupancy rests on these: registers and shared memory of the trace are those of the launch."""
    for row, kernel in enumerate(profile):
        assert value(kernel, "sm_count") == MULTIPROCESSORS
        assert value(kernel, "registers") == table.activities.registers[kernels.rows[row]]
        dynamic, static = value(kernel, "dynamic_shared_bytes"), value(kernel, "static_shared_bytes")
        assert dynamic + static == kernels.shared[row]


# ------------------------------------------------------------------------------------------------------------ occupancy


def test_theoretical_occupancy_is_that_of_nsight_compute(profile: tuple[NcuKernel, ...], kernels: Kernels) -> None:
    theirs = np.array([value(kernel, "theoretical_occupancy") for kernel in profile])
    ours = 100 * kernels.launch.theoretical
    assert len({(kernel.name, kernel.grid, kernel.block) for kernel in profile}) == 135
    assert np.abs(ours - theirs).max() <= ROUNDING
    assert len(set(theirs)) == 8  # 12.5 to 100 %


def test_each_limit_is_that_of_nsight_compute(profile: tuple[NcuKernel, ...], table: Table, kernels: Kernels) -> None:
    """Nsight Compute's limit of shared memory is that of the split with the L1 cache which the driver chose.

    The driver chose a split that limits nothing beyond the other resources; ours is the limit of the largest split.
    """
    limits = sm_limits("sm_90")
    assert limits is not None
    registers = table.activities.registers[kernels.rows]
    found = block_limits(np.prod(kernels.block, axis=1), registers, kernels.shared, limits)
    assert found is not None
    theirs = {
        name: np.array([value(kernel, f"block_limit_{name}") for kernel in profile])
        for name in ("warps", "registers", "blocks", "shared")
    }
    assert np.array_equal(found.warps, theirs["warps"])
    assert np.array_equal(found.registers, theirs["registers"])
    assert np.array_equal(found.blocks, theirs["blocks"])
    assert (found.shared >= theirs["shared"]).all()
    largest = np.array([value(kernel, "shared_config_bytes") for kernel in profile]) == limits.shared_bytes
    assert int(largest.sum()) >= 10
    assert np.array_equal(found.shared[largest], theirs["shared"][largest])
    assert np.array_equal(kernels.launch.blocks_fit, np.min(list(theirs.values()), axis=0))


def test_the_profiler_reads_zero_above_48_kb_of_shared_memory(profile: tuple[NcuKernel, ...], kernels: Kernels) -> None:
    """Kineto asks its calculator without the opt-in to large shared memory. Nsight Compute measured 11 to 18 %."""
    large = np.flatnonzero(kernels.shared > DEFAULT_BLOCK_SHARED_BYTES)
    assert len(large) == 18
    assert set(kernels.recorded[large]) == {0.0}
    assert np.isnan(recorded_occupancy(kernels.recorded, kernels.shared)[large]).all()
    measured = [value(profile[row], "achieved_occupancy") for row in large]
    assert min(measured) > 10
    assert (kernels.launch.theoretical[large] >= 0.125).all()


def test_elsewhere_the_profiler_and_we_say_the_same(kernels: Kernels) -> None:
    """Its percentage is whole, and it counts threads where the device counts warps: 80 threads are 3 warps, not 2.5."""
    small = kernels.shared <= DEFAULT_BLOCK_SHARED_BYTES
    threads = np.prod(kernels.block, axis=1)
    whole = small & (threads % 32 == 0)
    assert np.abs(100 * kernels.launch.achieved - kernels.recorded)[whole].max() <= 0.51
    assert set(threads[small & ~whole]) == {1, 80}
    ragged = small & (threads == 80)
    assert (100 * kernels.launch.achieved[ragged] * 2.5 / 3 - kernels.recorded[ragged]).max() <= 0.51


def test_no_kernel_is_fuller_than_its_launch_allows(pairs: list[Pair]) -> None:
    """The estimate is a bound from above on all 135 kernels, so a low one is never the estimate's fault."""
    assert len(pairs) == 135
    assert min(pair.difference for pair in pairs) >= -ROUNDING


def test_achieved_occupancy_agrees_on_more_than_thirty_kernels(pairs: list[Pair]) -> None:
    near = [pair for pair in pairs if pair.difference <= 5]
    assert len(near) == 58
    assert len([pair for pair in pairs if pair.difference <= 1]) == 26
    # With the last wave weighted by its fill the estimate is a mean and no bound: half as far off.
    weighted = [pair.bound * (pair.wave_efficiency if pair.waves > 1 else 1.0) - pair.measured for pair in pairs]
    assert np.median([pair.difference for pair in pairs]) == pytest.approx(9.28, abs=0.05)
    assert np.median(np.abs(weighted)) == pytest.approx(5.36, abs=0.05)


def _alone(pair: Pair) -> bool:
    return pair.resident == 1


def _several(pair: Pair, low: float, high: float, low_us: float = 0, high_us: float = np.inf) -> bool:
    return pair.resident > 1 and low < pair.waves <= high and low_us <= pair.duration_us < high_us


# What may lie between the bound and the measurement, in points: number of kernels, median, worst. The README explains.
CLASSES: dict[str, tuple[Callable[[Pair], bool], int, float, float]] = {
    "one block at a time, 5 us or more": (
        lambda p: _alone(p) and p.threads != 384 and p.duration_us >= 5,
        14,
        0.05,
        1.0,
    ),
    "one block at a time, shorter": (lambda p: _alone(p) and p.threads != 384 and p.duration_us < 5, 9, 1.5, 9.0),
    "one block of specialised warps": (lambda p: _alone(p) and p.threads == 384, 9, 4.1, 8.0),
    "up to one wave": (lambda p: _several(p, 0, 1), 22, 2.0, 19.0),
    "more waves, 40 us or more": (lambda p: _several(p, 1, np.inf, 40), 9, 2.0, 13.0),
    "more waves, 20 to 40 us": (lambda p: _several(p, 1, np.inf, 20, 40), 25, 12.5, 53.0),
    "more waves, 10 to 20 us": (lambda p: _several(p, 1, np.inf, 10, 20), 40, 17.5, 25.0),
    "more waves, under 10 us": (lambda p: _several(p, 1, np.inf, 0, 10), 7, 25.5, 79.0),
}


@pytest.mark.parametrize("name", CLASSES)
def test_achieved_occupancy_by_class(pairs: list[Pair], name: str) -> None:
    chosen, count, median, worst = CLASSES[name]
    found = [pair.difference for pair in pairs if chosen(pair)]
    assert len(found) == count
    assert np.median(found) <= median
    assert max(found) <= worst


def test_the_classes_are_all_kernels_once(pairs: list[Pair]) -> None:
    assert [sum(chosen(pair) for chosen, *_ in CLASSES.values()) for pair in pairs] == [1] * 135


def test_the_worst_kernels_start_a_block_in_every_cycle(profile: tuple[NcuKernel, ...], pairs: list[Pair]) -> None:
    """No kernel starts more than 1.02 blocks per cycle of the whole device; the three furthest off come nearest.

    Their blocks end before the multiprocessors can be filled, so what a multiprocessor could hold says nothing of them.
    """
    cycles = {(kernel.name, kernel.grid): value(kernel, "sm_active_cycles") for kernel in profile}
    rate = [float(np.prod(pair.grid)) / cycles[pair.name, pair.grid] for pair in pairs]
    difference = [pair.difference for pair in pairs]
    assert max(rate) < 1.02
    assert set(np.argsort(rate)[-3:]) == set(np.argsort(difference)[-3:])
    assert min(np.sort(difference)[-3:]) > 50 > 30 > np.sort(difference)[-4]


# -------------------------------------------------------------------------------------------------------- matrix units


@pytest.fixture(scope="module")
def used(table: Table, kernels: Kernels) -> list[bool | None]:
    """`tensor_use` of each kernel from its name, operator and data type."""
    operators = launching_operators(table, launching_calls(table), parents(table.operators))[kernels.rows]
    found = []
    for name, row in zip(kernels.names, operators, strict=True):
        if row < 0:
            found.append(tensor_use(name, None, None, "sm_90"))
            continue
        dtypes = inputs_of(table.signatures[table.operators.signature[row]]).dtypes
        operator = table.names[table.operators.name[row]]
        found.append(tensor_use(name, family(operator), next(iter(dtypes), None), "sm_90"))
    return found


def test_matrix_use_is_what_the_counter_says(profile: tuple[NcuKernel, ...], used: list[bool | None]) -> None:
    """Every kernel either spent 23 % or more of its cycles in matrix instructions or less than 0.1 %."""
    cycles = np.array([percent(kernel, MATRIX_CYCLES) for kernel in profile])
    multiplies = cycles > 1
    assert cycles[multiplies].min() > 23
    assert cycles[~multiplies].max() < 0.1
    answers = np.array([{None: -1, False: 0, True: 1}[answer] for answer in used])
    assert not (answers[multiplies] == 0).any()
    assert [profile[place].name for place in np.flatnonzero(~multiplies & (answers == 1))] == []
    assert int(multiplies.sum()) == 19
    assert int((answers[multiplies] == 1).sum()) >= 15


def test_the_tensor_pipe_runs_other_instructions_too(profile: tuple[NcuKernel, ...], used: list[bool | None]) -> None:
    """A few percent of tensor pipe are no proof of a matrix product: pointwise kernels reach 5.8 % without one.

    There the pipe is busy for one cycle per instruction; a matrix instruction takes 2 or more.
    """
    without = [kernel for kernel in profile if percent(kernel, MATRIX_CYCLES) == 0]
    busy = [value(kernel, "tensor_active") for kernel in without]
    assert len(without) > 140
    assert sum(share > 1 for share in busy) > 15
    assert max(busy) < 6
    for kernel in without:
        assert percent(kernel, TENSOR_INSTRUCTIONS) == pytest.approx(value(kernel, "tensor_active"), abs=0.11)
    for kernel in profile:
        if percent(kernel, MATRIX_CYCLES) > 1:
            assert value(kernel, "tensor_active") >= 1.99 * percent(kernel, TENSOR_INSTRUCTIONS)
    over = {kernel.name for kernel, share in zip(without, busy, strict=True) if share > 5}
    assert len(over) == 2 and all("elementwise_kernel" in name for name in over)
    assert all(used[kernel.order] is False for kernel in without if kernel.name in over)


# --------------------------------------------------------------------------------------------------- states and replays

# The design's measurements on another H200: ms per step, MFU, SM active, occupancy, tensor active in percent.
STATES = {
    "naive": (535, 15.0, 97.6, 58.9, 17.1),
    "sdpa": (344, 23.4, 96.3, 49.6, 25.8),
    "sdpa, norm, gelu": (226, 35.5, 95.3, 26.3, 42.4),
    "padded vocabulary": (158, 50.9, 93.8, 32.4, 60.0),
    "compiled, batch 16": (275, 58.3, 95.6, 24.0, 71.3),
}
REPLAYS = {  # columns of the lm head, 16384 x 2048 x columns in bfloat16
    50257: {"sm_active": 99.7, "tensor_active": 20.3, "dram_active": 3.3},
    50304: {"tensor_active": 92.9},
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "states.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", STATES)
def test_device_counters_of_training_states(recorded: dict[str, Any], name: str) -> None:
    state = recorded["states"][name]
    step_ms, mfu, *expected = STATES[name]
    measured = [state["counters"][metric] for metric in ("sm_active", "sm_occupancy", "tensor_active")]
    assert measured == pytest.approx(expected, rel=0.10)
    assert state["step_ms"] == pytest.approx(step_ms, rel=0.10)
    assert 100 * state["mfu"] == pytest.approx(mfu, rel=0.10)
    assert state["counters"]["gpu_utilisation"] > 99  # in every state, whatever the MFU
    assert state["missing"] == {}


@pytest.mark.parametrize("columns", REPLAYS)
def test_device_counters_of_replayed_operators(recorded: dict[str, Any], columns: int) -> None:
    (replayed,) = [item for item in recorded["operators"] if item["shapes"][-1] == [2048, columns]]
    assert replayed["reason"] is None
    measured = {name: replayed["counters"][name] for name in REPLAYS[columns]}
    assert measured == pytest.approx(REPLAYS[columns], rel=0.10)


def test_every_operator_was_replayed(recorded: dict[str, Any]) -> None:
    """A float constant without a digit, an argument by keyword and a call of a microsecond are among them."""
    assert len(recorded["operators"]) == 7
    assert all(item["reason"] is None and item["counters"] for item in recorded["operators"])
