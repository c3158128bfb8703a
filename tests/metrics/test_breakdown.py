"""Device time splits without a rest, and idle time goes to what the launching thread did."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import (
    CORPUS,
    EMPTY,
    NOT_HERE,
    Event,
    activity,
    call,
    copy,
    corpus,
    h200,
    kernel,
    launch,
    op,
    readable,
    span,
    table_of,
    truth,
)

from advisor.columns.joins import launching_calls, parents
from advisor.columns.table import Table
from advisor.measured import Breakdown
from advisor.metrics.breakdown import CAUSES, breakdown, phases
from advisor.metrics.gate import check
from advisor.metrics.hostfacts import host_facts
from advisor.metrics.hosttime import blocking_calls
from advisor.metrics.steps import find_steps
from advisor.metrics.totals import totals


def split(table: Table, windows: Any = None) -> Breakdown:
    found = breakdown(table, launching_calls(table), windows)
    assert found is not None
    return found


def in_steps(table: Table) -> Breakdown:
    return split(table, find_steps(table, launching_calls(table)).windows)


def assert_whole(found: Breakdown) -> None:
    parts = found.compute_us + found.exposed_comm_us + found.exposed_copy_us + found.idle_us
    assert parts == pytest.approx(found.length_us, rel=1e-9, abs=1e-6)
    assert sum(found.idle_by_cause_us.values()) == pytest.approx(found.idle_us, rel=1e-9, abs=1e-6)
    assert tuple(found.idle_by_cause_us) == CAUSES
    assert min(found.idle_by_cause_us.values()) >= 0


def causes(found: Breakdown) -> dict[str, float]:
    return {cause: round(time, 6) for cause, time in found.idle_by_cause_us.items() if time}


# ------------------------------------------------------------------------------------------------------- what is busy


def test_what_nothing_hides_is_exposed(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        [
            kernel("gemm", 0.0, 10.0, 1),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5.0, 15.0, 2, stream=20),
            copy("Memcpy HtoD (Pinned -> Device)", 8.0, 20.0, 3, stream=21),
            kernel("gemm", 40.0, 10.0, 4),
        ],
    )
    found = split(table)
    assert_whole(found)
    assert (found.length_us, found.compute_us, found.exposed_comm_us) == (50.0, 20.0, 10.0)
    assert (found.exposed_copy_us, found.idle_us) == (8.0, 12.0)


def test_each_window_on_its_own(tmp_path: Path) -> None:
    table = table_of(tmp_path, [kernel("gemm", 0.0, 10.0, 1), kernel("gemm", 30.0, 10.0, 2)])
    found = phases(table, launching_calls(table), np.array([[0.0, 20.0], [20.0, 20.0], [20.0, 45.0]]))
    assert found is not None
    first, last = found.each()
    assert (first.compute_us, first.idle_us, last.compute_us, last.idle_us) == (10.0, 10.0, 10.0, 15.0)


def test_only_one_device_is_split(tmp_path: Path) -> None:
    events = [kernel("gemm", 0.0, 10.0, 1), kernel("gemm", 0.0, 40.0, 2, device=1), kernel("gemm", 50.0, 10.0, 3)]
    table = table_of(tmp_path, events)
    calls = launching_calls(table)
    assert split(table).length_us == 40.0
    other = breakdown(table, calls, device=0)
    assert other is not None and (other.length_us, other.idle_us) == (60.0, 40.0)
    assert breakdown(table, calls, device=2) is None


def test_nothing_is_said_of_nothing(tmp_path: Path) -> None:
    assert breakdown(EMPTY, launching_calls(EMPTY)) is None
    assert breakdown(table_of(tmp_path, [op("aten::mm", 0.0, 1.0)]), launching_calls(EMPTY)) is None


# --------------------------------------------------------------------------------------------------------- causes


def test_the_loader_and_the_launch(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        [
            kernel("gemm", 0.0, 10.0, 900),
            span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5.0, 25.0),
            op("aten::to", 6.0, 4.0),  # what the loader calls is part of the wait for it
            op("aten::mm", 35.0, 20.0),
            launch(1, 40.0, 2.0),
            kernel("gemm", 46.0, 10.0, 1),
        ],
    )
    # 10-30 in the loader, 30-35 in Python, 35-42 in the operator, 42-46 latency of the launch
    assert causes(split(table)) == {"data": 20.0, "other": 5.0, "launch": 11.0}


def test_peers_that_the_loader_waits_for_are_the_loaders(tmp_path: Path) -> None:
    events = [
        kernel("gemm", 0.0, 10.0, 900),
        span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 10.0, 20.0),
        op("c10d::barrier", 15.0, 20.0),
        call("cudaStreamSynchronize", 20.0, 20.0),
        launch(1, 40.0, 1.0),
        kernel("gemm", 41.0, 10.0, 1),
    ]
    assert causes(split(table_of(tmp_path, events))) == {"data": 20.0, "communication": 5.0, "sync": 5.0, "launch": 1.0}


def test_a_wait_for_the_device(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        [
            kernel("gemm", 0.0, 10.0, 900),
            op("aten::item", 2.0, 20.0),
            op("aten::_local_scalar_dense", 3.0, 18.0),
            call("cudaStreamSynchronize", 4.0, 12.0),
            launch(1, 23.0, 1.0),
            kernel("gemm", 25.0, 10.0, 1),
        ],
    )
    assert causes(split(table)) == {"sync": 6.0, "launch": 8.0, "other": 1.0}


@pytest.mark.parametrize(
    ("name", "copied", "cause"),
    [
        ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)", "sync"),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pinned -> Device)", "launch"),
        ("hipMemcpyWithStream", "Memcpy HtoD (Host -> Device)", "sync"),
    ],
)
def test_copies_that_hold_the_host(name: str, copied: str, cause: str, tmp_path: Path) -> None:
    events = [kernel("gemm", 0.0, 10.0, 900), call(name, 10.0, 9.0, 1), copy(copied, 16.0, 3.0, 1)]
    assert causes(split(table_of(tmp_path, events))) == {cause: 6.0}


@pytest.mark.parametrize(
    "waiting",
    [
        op("c10d::barrier", 12.0, 6.0),
        op("_c10d_functional::wait_tensor", 12.0, 6.0),
        span("gloo:all_reduce", 12.0, 6.0, 5),
    ],
)
def test_a_wait_for_peers(waiting: Event, tmp_path: Path) -> None:
    """Collectives on the host run on threads of their own while the launching thread has nothing to show."""
    events = [kernel("gemm", 0.0, 10.0, 900), waiting, launch(1, 20.0, 1.0), kernel("gemm", 21.0, 3.0, 1)]
    assert causes(split(table_of(tmp_path, events))) == {"communication": 6.0, "other": 4.0, "launch": 1.0}


def test_a_gap_in_a_full_queue_is_not_the_hosts(tmp_path: Path) -> None:
    events = [kernel("gemm", 0.0, 10.0, 900), launch(1, 5.0, 2.0), kernel("gemm", 13.0, 3.0, 1)]
    assert causes(split(table_of(tmp_path, events))) == {"queued": 3.0}


def test_a_launch_that_does_not_arrive_is_not_the_hosts(tmp_path: Path) -> None:
    events = [kernel("gemm", 0.0, 10.0, 900), launch(1, 12.0, 2.0), kernel("gemm", 214.0, 3.0, 1)]
    assert causes(split(table_of(tmp_path, events))) == {"launch": 2.0, "queued": 200.0, "other": 2.0}


def test_an_unknown_launch_blames_nobody(tmp_path: Path) -> None:
    events = [kernel("gemm", 0.0, 10.0, 900), op("aten::mm", 0.0, 30.0), kernel("gemm", 13.0, 3.0, 901)]
    assert causes(split(table_of(tmp_path, events))) == {"other": 3.0}


def test_the_thread_that_launches_decides(tmp_path: Path) -> None:
    """The loader of another thread is no cause; while autograd's thread has nothing to do, the others count."""
    events = [
        kernel("gemm", 0.0, 10.0, 900),
        op("aten::mse_loss", 12.0, 8.0, tid=1),
        launch(7, 13.0, 1.0, tid=1),
        kernel("early", 2.0, 1.0, 7),
        span("enumerate(DataLoader)#x", 10.0, 30.0, tid=3),
        op("autograd::engine::evaluate_function: MmBackward0", 24.0, 10.0, tid=2),
        launch(1, 26.0, 2.0, tid=2),
        kernel("gemm", 30.0, 3.0, 1),
    ]
    # 12-20 an operator of the thread that launches, too; 24-28 the operator of autograd's; 28-30 latency
    assert causes(split(table_of(tmp_path, events))) == {"launch": 14.0, "other": 6.0}


# --------------------------------------------------------------------------------------------------- recorded traces


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
@pytest.mark.parametrize("path", readable())
def test_every_trace_splits_without_a_rest(path: str) -> None:
    table = corpus(path)
    calls = launching_calls(table)
    steps = find_steps(table, calls)
    for windows in (None, steps.windows if steps.on_device else None):
        found = phases(table, calls, windows)
        assert (found is None) == (not len(table.activities))
        if found is None:
            continue
        total, each = found.total(), found.each()
        for part in (total, *each):
            assert_whole(part)
            assert part.compute_us + part.exposed_comm_us + part.exposed_copy_us <= part.length_us * (1 + 1e-9)
        assert sum(part.length_us for part in each) == pytest.approx(total.length_us)
        assert sum(part.exposed_comm_us for part in each) == pytest.approx(total.exposed_comm_us, abs=1e-6)


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
@pytest.mark.parametrize("path", readable())
def test_the_whole_recording_agrees_with_plain_sums(path: str) -> None:
    table = corpus(path)
    found, sums = breakdown(table, launching_calls(table)), totals(table)
    if found is None:
        assert sums.busy_us is None
        return
    assert found.length_us == pytest.approx(sums.span_us)
    assert found.length_us - found.idle_us == pytest.approx(sums.busy_us)
    assert found.exposed_comm_us == pytest.approx(sums.exposed_comm_us, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "share"),
    [
        ("kineto-resnet50-nw0-steps5-10.pt.trace.json.gz", 0.3337),
        ("kineto-resnet50-nw4-steps5-10.pt.trace.json.gz", 0.0084),
    ],
)
def test_the_loaders_share_of_the_step(path: str, share: float) -> None:
    """torch-tb-profiler says 33.37 % and 0.84 %: it counts the loader where the device does nothing else, as we do."""
    found = in_steps(corpus(path))
    assert found.idle_by_cause_us["data"] / found.length_us == pytest.approx(share, abs=0.003)


@pytest.mark.parametrize(
    ("name", "cause", "least"),
    [("resnet50_dataloader_bound_fp32", "data", 0.6), ("gpt_launch_bound_fp32", "launch", 0.6)],
)
def test_what_holds_the_device_up(name: str, cause: str, least: float) -> None:
    found = in_steps(h200(name))
    assert found.idle_by_cause_us[cause] / found.length_us > least
    assert max(found.idle_by_cause_us, key=lambda key: found.idle_by_cause_us[key]) == cause


def test_owlv2_waits_for_its_loader() -> None:
    found = in_steps(corpus("tracelens-mi300-owlv2.json.gz"))
    # A step alone ends with the host's range: 46 ms of it lie behind the last kernel.
    assert found.idle_by_cause_us["data"] / found.idle_us > 0.9


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
def test_dlrm_ranks_wait_in_communication() -> None:
    """Exposed communication as counted by a plain script."""
    for rank in range(8):
        path = f"traces/param-dlrm8/rank{rank}.pt.trace.json.gz"
        table = corpus(path)
        found = breakdown(table, launching_calls(table))
        assert found is not None
        assert found.exposed_comm_us == pytest.approx(truth()[path]["right_extra"]["exposed_comm_us"], abs=0.1)


# ------------------------------------------------------------------------------------------------------- generated


@st.composite
def recordings(draw: st.DrawFn) -> list[Event]:
    """Any events in any place: operators, calls, launches, kernels, copies and ranges on a few threads and streams."""

    def time(most: int = 400) -> float:
        return draw(st.integers(0, most)) / draw(st.sampled_from([1, 4]))

    def thread() -> int:
        return draw(st.integers(1, 3))

    events: list[Event] = []
    for number in range(draw(st.integers(0, 12))):
        if draw(st.booleans()):
            name = draw(
                st.sampled_from(["cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "hipMemcpyWithStream"])
            )
            events.append(call(name, time(), time(20), number, thread()))
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(["gemm", "ncclKernel", "layer_norm_backward"]))
            stream, device = draw(st.integers(6, 8)), draw(st.sampled_from([0, 0, 0, 1]))
            if draw(st.integers(0, 4)):
                events.append(kernel(name, time(), time(40), number, stream, device))
            else:
                kind = draw(st.sampled_from(["gpu_memcpy", "gpu_memset"]))
                events.append(
                    activity(kind, "Memcpy HtoD (Pageable -> Device)", time(), time(40), number, stream, device)
                )
    names = ["aten::mm", "c10d::barrier", "autograd::engine::evaluate_function: MmBackward0", "aten::item"]
    for _ in range(draw(st.integers(0, 6))):
        events.append(op(draw(st.sampled_from(names)), time(), time(60), thread()))
    for _ in range(draw(st.integers(0, 4))):
        events.append(
            call(draw(st.sampled_from(["cudaStreamSynchronize", "cudaEventQuery"])), time(), time(60), -1, thread())
        )
    marks = ["enumerate(DataLoader)#x", "gloo:all_reduce", "Optimizer.step#Adam.step", "## forward ##"]
    for _ in range(draw(st.integers(0, 5))):
        events.append(span(draw(st.sampled_from(marks)), time(), time(80), thread()))
    begin = time()
    for number in range(draw(st.integers(0, 3))):
        events.append(span(f"ProfilerStep#{number}", begin, 60.0))
        begin += 60.0
    return events


def inside(moment: float, rows: Any, chosen: Any, threads: Any) -> bool:
    """Whether a moment lies in one of the chosen rows of some threads."""
    end = rows.start + rows.duration
    found = (rows.start <= moment) & (moment < end) & np.isin(rows.thread, threads)
    return bool(found[np.asarray(chosen, dtype=np.int64)].any())


def expected_cause(table: Table, calls: Any, device: int, moment: float, gap: float) -> str:
    """The rule of `phases`, word by word, for one idle moment; `gap` is when the device ran dry."""
    rows, names = table.activities, table.names
    following = next(
        (row for row in range(len(rows)) if rows.device[row] == device and rows.start[row] >= moment), None
    )
    if following is None or calls[following] < 0:
        return "other"
    launched = int(calls[following])
    returned = table.calls.start[launched] + table.calls.duration[launched]
    if returned <= gap:
        return "queued"
    if moment >= returned:
        return "launch" if rows.start[following] - returned <= 100.0 else "queued"
    loader = [row for row, name in enumerate(table.ranges.name) if names[name].startswith("enumerate(DataLoader)#")]
    gloo = [row for row, name in enumerate(table.ranges.name) if names[name].startswith("gloo:")]
    barrier = [row for row, name in enumerate(table.operators.name) if names[name] == "c10d::barrier"]
    every = np.arange(len(table.operators)), np.arange(len(table.calls))
    thread = [int(table.calls.thread[launched])]
    launching = sorted({int(table.calls.thread[row]) for row in calls if row >= 0})
    for threads, beside in ((thread, thread), (launching, range(len(table.threads)))):
        if inside(moment, table.ranges, loader, threads):
            return "data"
        if inside(moment, table.operators, barrier, threads) or inside(moment, table.ranges, gloo, list(beside)):
            return "communication"
        if inside(moment, table.calls, blocking_calls(table, calls), threads):
            return "sync"
        if inside(moment, table.operators, every[0], threads) or inside(moment, table.calls, every[1], threads):
            return "launch"
    return "other"


def moment_by_moment(table: Table, calls: Any, device: int) -> Counter[str]:
    """Idle time by cause from the span of a device, found at one moment between any two edges."""
    rows = table.activities
    mine = rows.device == device
    start, end = rows.start[mine], rows.end[mine]
    edges = sorted(
        {*start, *end}
        | {
            moment
            for kind in (table.operators, table.calls, table.ranges)
            for moment in (*kind.start, *(kind.start + kind.duration))
        }
    )
    found: Counter[str] = Counter()
    for begin, until in pairwise(edges):
        moment = (begin + until) / 2
        if moment < start.min() or moment > end.max() or bool(((start <= moment) & (moment < end)).any()):
            continue
        gap = max((float(item) for item in (*end, *start[start == end]) if item <= moment), default=0.0)
        found[expected_cause(table, calls, device, moment, gap)] += until - begin
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=recordings(), seed=st.integers(0, 1000))
def test_any_recording(events: list[Event], seed: int, folder: Path) -> None:
    """Sums are whole, causes are those of the rule, and the order of events changes nothing."""
    table = table_of(folder, events)
    mixed = events.copy()
    random.Random(seed).shuffle(mixed)
    results = []
    for one in (table, table_of(folder, mixed)):
        calls = launching_calls(one)
        steps = find_steps(one, calls)
        assert bool((steps.duration_us >= 0).all()) and bool((steps.windows[1:, 0] >= steps.windows[:-1, 1]).all())
        found = phases(one, calls)
        in_windows = phases(one, calls, steps.windows) if steps.on_device else None
        for item in (found, in_windows):
            for part in (item.total(), *item.each()) if item is not None else ():
                assert_whole(part)
        facts = host_facts(one, calls, parents(one.operators), steps)
        gate = check(one, calls, steps, in_windows or found)
        results.append((found and found.total(), in_windows and in_windows.each(), steps.windows.tolist(), facts, gate))
    assert results[0] == results[1]
    whole = results[0][0]
    if whole is not None:
        calls = launching_calls(table)
        device = max(
            sorted({*table.activities.device.tolist()}),
            key=lambda number: table.activities.duration[table.activities.device == number].sum(),
        )
        expected = moment_by_moment(table, calls, device)
        for cause in CAUSES:
            assert whole.idle_by_cause_us[cause] == pytest.approx(expected[cause], abs=1e-6), cause


def test_an_empty_table_raises_nothing() -> None:
    calls = launching_calls(EMPTY)
    steps = find_steps(EMPTY, calls)
    assert phases(EMPTY, calls) is None
    assert host_facts(EMPTY, calls, parents(EMPTY.operators), steps).kernels == 0
    assert check(EMPTY, calls, steps).blocked
