"""Occupancy and waves of whole recordings: weighted by kernel time, unknown where a launch does not say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import EMPTY, Event, copy, kernel, table_of

from advisor.columns.schema import KERNEL
from advisor.columns.table import Table
from advisor.hardware import sm_limits
from advisor.ingest.reader import read_table
from advisor.metrics.fullness import Fullness, fullness

DATA = Path(__file__).parents[1] / "data"
SMS = 132
GEMM = {"grid": [2, 66, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 213_188}
SMALL = {"grid": [66, 1, 1], "block": [1024, 1, 1], "registers per thread": 32, "shared memory": 0}
WHOLE = {"grid": [264, 1, 1], "block": [1024, 1, 1], "registers per thread": 32, "shared memory": 0}


def launched(name: str, ts: float, dur: float, number: int, launch: dict[str, Any], **more: Any) -> Event:
    found = kernel(name, ts, dur, number)
    found["args"] |= {**launch, **more}
    return found


def on_h200(table: Table) -> Fullness:
    return fullness(table, sm_limits("sm_90"), SMS)


def test_a_product_with_213_kb_of_shared_memory_fills_12_of_64_warps(tmp_path: Path) -> None:
    """The recorder says 0 of it, Nsight Compute 14.8 % achieved of 18.75 % (tests/data/ncu)."""
    event = launched("nvjet", 0, 10, 1, GEMM, **{"est. achieved occupancy %": 0, "blocks per SM": 1.0})
    found = on_h200(table_of(tmp_path, [event])).mean
    assert found.percent == 100 * 12 / 64
    assert found.recorded_percent == 0  # as recorded
    assert (found.known, found.sm_efficiency, found.wave_efficiency) == (1, 1, 1)
    assert found.limiters == {"registers and shared memory": 1}


def test_means_are_over_kernel_time(tmp_path: Path) -> None:
    """30 us at 18.75 %, 10 us at 25 % (half of the multiprocessors get one of two blocks), 60 us full."""
    events = [
        launched("nvjet", 0, 30, 1, GEMM),
        launched("small", 30, 10, 2, SMALL),
        launched("whole", 40, 60, 3, WHOLE),
        copy("Memcpy DtoD", 100, 900, 4),
    ]
    found = on_h200(table_of(tmp_path, events)).mean
    assert found.percent == pytest.approx(0.3 * 18.75 + 0.1 * 25 + 0.6 * 100)
    assert found.sm_efficiency == pytest.approx(0.3 + 0.1 * 0.5 + 0.6)
    assert found.wave_efficiency == pytest.approx(0.3 + 0.1 * 66 / 264 + 0.6)
    assert list(found.limiters) == ["warps and registers", "registers and shared memory", "grid"]
    assert sum(found.limiters.values()) == pytest.approx(1)
    assert found.recorded_percent is None


def test_what_is_not_recorded_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    events = [launched("nvjet", 0, 30, 1, GEMM), kernel("bare", 30, 10, 2)]
    events.append(launched("no registers", 40, 60, 3, {"grid": [264, 1, 1], "block": [1024, 1, 1]}))
    found = on_h200(table_of(tmp_path, events))
    assert (found.mean.percent, found.mean.known) == (18.75, 0.3)
    assert np.isnan(found.achieved).tolist() == [False, True, True]
    assert found.mean.sm_efficiency == 1  # of the kernels whose grid is known


def test_an_architecture_without_limits_has_no_occupancy(tmp_path: Path) -> None:
    table = table_of(tmp_path, [launched("nvjet", 0, 30, 1, GEMM, **{"est. achieved occupancy %": 18})])
    found = fullness(table, None, None).mean
    assert (found.percent, found.known, found.limiters) == (None, 0, {})
    assert found.recorded_percent == 18


def test_no_kernel_says_nothing(tmp_path: Path) -> None:
    for table in (EMPTY, table_of(tmp_path, [copy("Memcpy DtoD", 0, 5, 1)])):
        found = on_h200(table).mean
        assert (found.percent, found.known, found.sm_efficiency, found.recorded_percent) == (None,) * 4
        assert found.limiters == {}


def test_what_cannot_be_a_percentage_is_left_out(tmp_path: Path) -> None:
    """A damaged file, or a clock that was set back: neither moves a mean out of its bounds."""
    events = [
        launched("a", 0, 10, 1, WHOLE, **{"est. achieved occupancy %": 4e9, "blocks per SM": -3}),
        launched("b", 10, 10, 2, WHOLE, **{"est. achieved occupancy %": -1, "blocks per SM": 1e300}),
        launched("c", 20, 10, 3, WHOLE, **{"est. achieved occupancy %": 60}),
        launched("d", 30, -1000, 4, GEMM, **{"est. achieved occupancy %": 0}),
    ]
    found = on_h200(table_of(tmp_path, events)).mean
    assert (found.recorded_percent, found.sm_efficiency, found.percent, found.known) == (60, 1, 100, 1)
    assert found.limiters["warps and registers"] == 1


def test_the_recorders_zero_for_cluster_launches_is_not_taken_for_one() -> None:
    table = read_table(DATA.parents[1] / "samples/nano_gpt/h200/trace.json.gz", 1)
    found = on_h200(table)
    rows = table.activities
    nvjet = np.array(["nvjet" in name for name in table.named(rows.name)])
    assert (rows.occupancy[nvjet] == 0).all()
    assert found.achieved[nvjet].min() > 0.04 and found.achieved[nvjet].max() <= 0.1875
    assert found.mean.percent is not None and found.mean.recorded_percent is not None
    time = rows.duration * (rows.kind == KERNEL)
    assert found.mean.percent == pytest.approx(100 * np.nansum(found.achieved * time) / time.sum())
    assert found.mean.percent > found.mean.recorded_percent


def test_an_amd_trace_has_no_estimate_of_the_recorder() -> None:
    found = fullness(
        read_table(DATA / "corpus/traces/tracelens-mi300-vit-nsfw.json.gz", 1), sm_limits("gfx942"), 304
    ).mean
    assert found.recorded_percent is None


SIZES = st.integers(-1, 2048)
LAUNCHES = st.fixed_dictionaries(
    {
        "grid": st.lists(SIZES, min_size=3, max_size=3),
        "block": st.lists(st.integers(-1, 1024), min_size=3, max_size=3),
        "registers per thread": st.integers(-1, 300),
        "shared memory": st.integers(-1, 300_000),
        "est. achieved occupancy %": st.integers(-5, 105),
        "blocks per SM": st.floats(-1, 1e9),
    }
)


@settings(max_examples=60, deadline=None)
@given(launches=st.lists(st.tuples(LAUNCHES, st.floats(-5, 400)), min_size=1, max_size=8))
def test_every_share_is_one(
    tmp_path_factory: pytest.TempPathFactory, launches: list[tuple[dict[str, Any], float]]
) -> None:
    events = [
        launched(f"kernel {number}", 500.0 * number, dur, number, launch)
        for number, (launch, dur) in enumerate(launches, start=1)
    ]
    found = on_h200(table_of(tmp_path_factory.getbasetemp(), events))
    mean = found.mean
    percents = [None if value is None else value / 100 for value in (mean.percent, mean.recorded_percent)]
    for share in (*percents, mean.known, mean.sm_efficiency, mean.wave_efficiency, *mean.limiters.values()):
        assert share is None or (math.isfinite(share) and 0 <= share <= 1 + 1e-12)
    assert (mean.percent is None) == (not mean.known) == (not mean.limiters)
    if mean.limiters:
        assert sum(mean.limiters.values()) == pytest.approx(1)
    known = found.achieved[~np.isnan(found.achieved)]
    assert ((known >= 0) & (known <= 1)).all()
