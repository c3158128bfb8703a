"""The critical path: recorded steps come out as recorded, and what-ifs as measured, simulated or derived by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recordings import EMPTY, Event, call, copy, corpus, document, h200, kernel, launch, op, span, table_of
from simulated import ENTRY_US, RETURN_US, Loop, Operation, step_time

from advisor.columns.joins import launching_calls
from advisor.columns.schema import KERNEL
from advisor.columns.table import Table
from advisor.ingest.reader import read_table
from advisor.measured import CriticalPath, Gap
from advisor.metrics.critical import PARTS, StepGraph, critical_path, step_graph, typical_step, what_if
from advisor.metrics.schedule import largest_cycle_mean
from advisor.metrics.steps import find_steps
from advisor.metrics.totals import communicates

PAIRS = Path(__file__).parents[1] / "data" / "what_if"
STEADY = {  # recordings of steps that follow each other at one pace
    "h200_gpt_fused_compiled_bf16": lambda: h200("gpt_fused_compiled_bf16"),
    "h200_gpt_launch_bound_fp32": lambda: h200("gpt_launch_bound_fp32"),
    "h200_gpt_naive_bf16": lambda: h200("gpt_naive_bf16"),
    "h200_resnet50_dataloader_bound_fp32": lambda: h200("resnet50_dataloader_bound_fp32"),
} | {
    name: lambda name=name: corpus(name)
    for name in (
        "kineto-resnet50-nw0-steps5-10.pt.trace.json.gz",
        "kineto-resnet50-nw4-steps5-10.pt.trace.json.gz",
        "kineto-resnet50-nw4-steps16-21.pt.trace.json.gz",
        "hta-v100x2-ddp-rank1.json.gz",
        "hta-a100-ddp-nccl-meta-rank0.json.gz",
        "hta-a100x8-control-rank3.json.gz",
        "hta-a100x16-torchrec-rank0.json.gz",
        "tracelens-mi300-resnet-ddp8-actckpt-rank0.json.gz",
    )
}


def graph_of(table: Table, window: tuple[float, float] | None = None, repeats: bool = True) -> StepGraph:
    launches = launching_calls(table)
    found = step_graph(table, launches, window or typical_step(find_steps(table, launches)), repeats)
    assert isinstance(found, StepGraph)
    return found


def scaled(table: Table, share: float, rows: Any = None) -> dict[int, float]:
    """All kernels, or some activities, at a share of their time."""
    chosen = np.flatnonzero(table.activities.kind == KERNEL) if rows is None else rows
    return {int(row): float(table.activities.duration[row]) * share for row in chosen}


def step_if(graph: StepGraph, reduced: dict[int, float]) -> float:
    return what_if(graph, {"region": reduced})[0].step_us


def check(graph: StepGraph) -> CriticalPath:
    """What holds for the path of any step."""
    found = critical_path(graph)
    assert set(found.parts_us) == set(PARTS)
    assert sum(found.parts_us.values()) == pytest.approx(found.length_us, abs=1e-6)
    assert min(found.parts_us.values()) > -1e-6
    return found


# --------------------------------------------------------------------------------------------------- recorded as it was


@pytest.mark.parametrize("name", STEADY)
def test_the_path_is_as_long_as_the_recorded_step(name: str) -> None:
    table = STEADY[name]()
    measured = find_steps(table, launching_calls(table)).median_us
    assert measured is not None
    assert check(graph_of(table)).length_us == pytest.approx(measured, rel=0.02)


def test_every_trace_has_a_path_or_says_why_not() -> None:
    for name in sorted(path.name for path in _traces()):
        table = corpus(name)
        launches = launching_calls(table)
        steps = find_steps(table, launches)
        window = typical_step(steps) if len(steps) else (0.0, _last_moment(table))
        found = step_graph(table, launches, window, repeats=bool(len(steps)))
        if isinstance(found, Gap):
            assert not len(table.activities) or not len(steps), name
            continue
        check(found)
        assert found.length_us <= max(step_if(found, {}), found.length_us), name
        measured = found.length_us
        reduced = [step_if(found, scaled(table, share)) for share in (1.0, 0.5, 0.0)]
        assert measured == pytest.approx(reduced[0]) and measured + 1e-6 >= reduced[1] >= reduced[2] - 1e-6, name
        own = np.intersect1d(found.work.row, np.flatnonzero(table.activities.kind == KERNEL))
        assert measured - reduced[2] <= table.activities.duration[own].sum() + 1e-6, name


def _traces() -> list[Path]:
    folder = Path(__file__).parents[3] / "shared" / "corpus" / "traces"
    if not folder.exists():
        pytest.skip("the shared recordings are not beside this checkout")
    return [path for path in folder.iterdir() if path.is_file() and "rocprofv3" not in path.name]


def _last_moment(table: Table) -> float:
    ends = [rows.start + rows.duration for rows in (table.operators, table.calls, table.activities, table.ranges)]
    return max((float(end.max()) for end in ends if len(end)), default=0.0)


def test_the_path_of_the_event_sync_trace_by_hand() -> None:
    """From the moments in the file, less 1707417525509335 us, the begin of the one step.

    The host works until it calls cudaMemcpyAsync at 2917: in the calls of three launches for 36 + 10 + 12 us. The copy
    begins at 2935 (18 after its launch), takes 2; it is of pageable memory, so the call returns at 2946 (9 later). In
    cudaStreamSynchronize 6 us pass without anything to wait for. At 3027 the spinning kernel is launched, begins at
    3037 (10), takes 36 and ends at 3073; cudaEventSynchronize returns at 3081 (8). cudaDeviceSynchronize takes 8 for
    nothing. The step ends at 3154.
    """
    table = corpus("hta-a100-event-sync.json.gz")
    graph = graph_of(table)
    parts = check(graph).parts_us
    assert graph.length_us == pytest.approx(3154.0)
    assert parts["copy"] == pytest.approx(2.0)
    assert parts["compute"] == pytest.approx(36.0)
    assert parts["launch"] == pytest.approx(36 + 10 + 12 + 18 + 10)
    assert parts["sync"] == pytest.approx(9 + 6 + 8 + 8)
    assert parts["host"] == pytest.approx(3154 - 2 - 36 - 86 - 31)
    assert parts["idle"] == parts["communication"] == parts["data"] == 0.0
    names = [table.names[number] for number in table.activities.name[graph.activities].tolist()]
    assert len(names) == 2 and names[0].startswith("Memcpy DtoH") and "spin_kernel" in names[1]


def test_the_second_forward_of_alexnet_has_a_path_and_edges_between_streams() -> None:
    table = corpus("hta-a100-alexnet-bench.json.gz")
    ranges = table.ranges
    forwards = [row for row in range(len(ranges)) if table.names[ranges.name[row]].endswith("measure|forward]")]
    begin = float(ranges.start[forwards[1]])
    graph = graph_of(table, (begin, begin + float(ranges.duration[forwards[1]])), repeats=False)
    assert check(graph).length_us > 0
    whole = graph_of(table, (0.0, _last_moment(table)), repeats=False)
    assert whole.schedule.waits.events


# ----------------------------------------------------------------------------------------------------- what it would be


def test_a_launch_bound_step_gains_nothing_from_faster_kernels() -> None:
    table = h200("gpt_launch_bound_fp32")
    graph = graph_of(table)
    assert step_if(graph, scaled(table, 0.5)) > 0.9 * graph.length_us
    parts = graph.parts_us
    assert parts["launch"] + parts["host"] > 0.99 * graph.length_us


def test_a_kernel_of_a_device_bound_step_saves_what_it_is_shortened_by() -> None:
    table = h200("gpt_naive_bf16")
    graph = graph_of(table)
    own = graph.work.row
    longest = own[np.argsort(table.activities.duration[own])[-1:]]
    half = float(table.activities.duration[longest].sum()) / 2
    assert half > 4_000
    saved = graph.length_us - step_if(graph, scaled(table, 0.5, longest))
    assert 0.98 * half < saved <= half + 1e-6
    assert graph.parts_us["compute"] > 0.95 * graph.length_us


def test_launches_that_waited_for_the_device_are_no_work_of_the_host() -> None:
    """The host's step lasts 87 ms, most of it in launches while 1015 others are pending: it could go at 23 ms."""
    table = h200("gpt_naive_bf16")
    assert step_if(graph_of(table), scaled(table, 0.0)) < 30_000


def test_a_loader_bound_step_gains_little_from_faster_kernels() -> None:
    table = h200("resnet50_dataloader_bound_fp32")
    graph = graph_of(table)
    assert step_if(graph, scaled(table, 0.5)) > 0.95 * graph.length_us
    assert graph.parts_us["data"] > 0.6 * graph.length_us


def test_ranks_without_their_waiting_take_as_long_as_the_one_they_wait_for() -> None:
    """Rank 7 of this job comes last and takes 12.5 ms. The others have the same program: without communication each of
    them should take about that. Nothing of rank 7's trace goes into their what-ifs."""
    last = graph_of(corpus("param-dlrm8/rank7.pt.trace.json.gz")).length_us
    assert last == pytest.approx(12_509, abs=1)
    for rank in (0, 1, 2, 6):
        table = corpus(f"param-dlrm8/rank{rank}.pt.trace.json.gz")
        nothing = scaled(table, 0.0, np.flatnonzero(communicates(table)))
        assert step_if(graph_of(table), nothing) == pytest.approx(last, rel=0.02)


@pytest.mark.parametrize("name", ["queued", "synced", "streams", "backward", "pageable"])
def test_the_predicted_step_is_the_one_that_was_measured(name: str) -> None:
    """On an H200, with a region of the step at a quarter of its time (tests/gpu/record_what_if.py)."""
    before, after = (read_table(PAIRS / f"{name}_{share}.json.gz", workers=1) for share in ("1", "0.25"))
    launches = launching_calls(before)
    ranges = before.ranges
    regions = [row for row in range(len(ranges)) if before.names[ranges.name[row]] == "region"]
    called = np.append(before.calls.start, np.nan)[launches]
    rows = [
        row
        for row, moment in enumerate(called.tolist())
        if any(0 <= moment - ranges.start[region] <= ranges.duration[region] for region in regions)
    ]
    graph = graph_of(before)
    predicted = step_if(graph, scaled(before, 0.25, rows))
    steps = find_steps(after, launching_calls(after))
    measured = max(float(np.median(np.diff(steps.host[:, 0]))), float(np.median(steps.duration_us)))
    assert predicted == pytest.approx(measured, rel=0.05)
    assert graph.length_us - measured > 0.25 * graph.length_us


# ------------------------------------------------------------------------------------------------------------ simulated


def operations(streams: int) -> st.SearchStrategy[list[Operation]]:
    stream = st.integers(0, streams - 1)
    time = st.integers(1, 80).map(float)
    launched = st.tuples(st.just("launch"), stream, time)
    one: st.SearchStrategy[list[Operation]] = st.one_of(
        launched.map(lambda item: [item]),
        launched.map(lambda item: [item]),
        st.tuples(st.just("host"), time).map(lambda item: [item]),
        st.tuples(st.just("sync"), stream).map(lambda item: [item]),
        st.just([("device",)]),
        st.tuples(stream, stream, time).map(
            lambda item: [("wait", item[0], item[1]), ("launch", item[0], item[2])] if item[0] != item[1] else []
        ),
    )
    return st.tuples(st.lists(one, max_size=12), time).map(
        lambda item: [*itertools.chain.from_iterable(item[0]), ("launch", 0, item[1])]
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_what_ifs_agree_with_a_simulation(data: st.DataObject, streams: int) -> None:
    """Where steps come at one pace the recorded one takes as long as in the long run. With shorter kernels no more is
    promised than the simulation gives, but for what a call takes by itself and after the device, which shows only where
    it is clear what the call waited for: 4 us each here. With one stream that nothing waits for it is just that."""
    program = data.draw(operations(streams))
    kernels = sum(item[0] == "launch" for item in program)
    shares = data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.1, 0.0]), min_size=kernels, max_size=kernels))
    loop = Loop().run(program, 16)
    table, begins = loop.table(), [begin for begin, _ in loop.marks]
    graph = graph_of(table, (begins[-2], begins[-1]))
    check(graph)
    rows = graph.work.row[np.argsort(graph.work.launched)]
    reduced = {int(row): float(table.activities.duration[row]) * share for row, share in zip(rows, shares, strict=True)}
    predicted, saved = step_if(graph, reduced), sum(table.activities.duration[rows]) - sum(reduced.values())
    assert graph.length_us - saved - 1e-6 <= predicted <= graph.length_us + 1e-6
    assume(np.ptp(np.diff(begins[-7:])) < 1e-6)  # else two kinds of steps follow each other
    calls, truth = sum(item[0] in ("sync", "device") for item in program), step_time(program, shares)
    assert graph.length_us == pytest.approx(step_time(program), abs=1e-6)
    assert predicted >= truth - calls * (ENTRY_US + RETURN_US) - 1e-6
    if streams == 1 and not calls:
        assert predicted == pytest.approx(truth, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(operations(2), st.randoms(use_true_random=False))
def test_less_work_never_takes_longer(program: list[Operation], chance: random.Random) -> None:
    table = Loop().run(program, 6).table()
    graph = graph_of(table)
    some = {int(row): float(table.activities.duration[row]) * chance.random() for row in graph.work.row}
    less = {row: time * chance.random() for row, time in some.items()}
    assert step_if(graph, less) <= step_if(graph, some) + 1e-6 <= graph.length_us + 2e-6


@settings(max_examples=60, deadline=None)
@given(operations(3), st.randoms(use_true_random=False))
def test_damaged_recordings_have_a_path_all_the_same(program: list[Operation], chance: random.Random) -> None:
    """Times and numbers that cannot be, also out of order: parts still sum to the length and what-ifs shorten it."""
    table = Loop().run(program, 4).table()

    def damaged(rows: Any, numbers: tuple[str, ...]) -> Any:
        columns = {name: getattr(rows, name).copy() for name in ("start", "duration", *numbers)}
        for name, column in columns.items():
            for row in range(len(column)):
                if chance.random() < 0.1:
                    column[row] = chance.choice(
                        [-1, 0, 1, 2, 3] if name in numbers else [-1e9, -50.0, 0.0, 30.0, 1e6, 1e15]
                    )
        found = replace(rows, **columns)
        order = np.argsort(found.start, kind="stable")
        return replace(found, **{name: getattr(found, name)[order] for name in rows.__dataclass_fields__})

    calls = damaged(table.calls, ("thread", "correlation"))
    table = replace(table, calls=calls, activities=damaged(table.activities, ("stream", "correlation")))
    launches = launching_calls(table)
    for window, repeats in (((0.0, 200.0), True), ((0.0, 1e6), False), ((-1e9, 1e15), False)):
        found = step_graph(table, launches, window, repeats)
        if isinstance(found, StepGraph):
            length = critical_path(found).length_us
            assert sum(found.parts_us.values()) == pytest.approx(length)
            assert min(found.parts_us.values()) >= -1e-9 * length
            assert 0 <= step_if(found, dict.fromkeys(range(5), 0.0)) <= length * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------- by hand


def stepped(*events: Event, steps: int = 3, length: float = 1000.0) -> list[Event]:
    """Steps of one length that each hold the events, moved in time, with correlation ids of their own."""
    found = []
    for number in range(steps):
        found.append(span(f"ProfilerStep#{number}", number * length, length))
        for item in events:
            moved = {**item, "ts": item["ts"] + number * length, "args": dict(item["args"])}
            if moved["args"].get("correlation", -1) >= 0:
                moved["args"]["correlation"] += 1000 * number
            found.append(moved)
    return found


def test_the_host_sets_the_pace_where_the_device_waits_for_it(tmp_path: Path) -> None:
    events = stepped(op("aten::mm", 100, 50), launch(1, 110, 6), kernel("k", 120, 300, 1))
    graph = graph_of(table_of(tmp_path, events))
    assert graph.length_us == 1000
    assert graph.parts_us["launch"] == 6 and graph.parts_us["host"] == 994
    assert not len(graph.activities)
    assert step_if(graph, {0: 0.0, 1: 0.0, 2: 0.0}) == 1000


def test_a_stream_sets_the_pace_where_the_host_runs_ahead(tmp_path: Path) -> None:
    """Three steps of 100 us on the host and 400 us on the device."""
    events = []
    for number in range(3):
        begin = 100.0 * number
        events.append(span(f"ProfilerStep#{number}", begin, 100))
        for part, (name, time) in enumerate((("a", 250.0), ("b", 150.0))):
            correlation = 10 * number + part
            events.append(launch(correlation, begin + 10 + part))
            events.append(kernel(name, 20 + 400.0 * number + 250.0 * part, time, correlation))
    table = table_of(tmp_path, events)
    graph = graph_of(table)
    assert graph.length_us == 400 and graph.parts_us["compute"] == 400
    assert len(graph.activities) == 2
    assert step_if(graph, scaled(table, 0.5)) == 200
    assert step_if(graph, scaled(table, 0.0)) == 100  # what the host needs


def test_collectives_on_the_path_count_as_communication(tmp_path: Path) -> None:
    """The main stream waits for an all-reduce that waits for it; the host waits for the end of both."""
    events = stepped(
        launch(1, 100),
        kernel("backward", 110, 200, 1),
        call("cudaStreamWaitEvent", 105, 1),
        launch(2, 107),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 312, 300, 2, stream=20),
        call("cudaStreamWaitEvent", 112, 1),
        launch(3, 114),
        kernel("optimizer", 614, 100, 3),
        call("cudaDeviceSynchronize", 120, 600),
    )
    table = table_of(tmp_path, events)
    graph = graph_of(table)
    parts = graph.parts_us
    assert parts["communication"] == 300 and parts["compute"] == 300 and parts["sync"] == pytest.approx(6)
    assert parts["launch"] == pytest.approx(10) and parts["idle"] == pytest.approx(4)
    collective = np.flatnonzero(communicates(table))
    assert step_if(graph, scaled(table, 0.0, collective)) == pytest.approx(700)


def test_a_backward_pass_belongs_to_the_path_of_the_thread_that_waits_for_it(tmp_path: Path) -> None:
    """The main thread is silent while that of autograd launches and synchronizes; the kernel is on the path of both."""
    engine = "autograd::engine::evaluate_function: MmBackward0"
    events = stepped(
        op("aten::mm", 0, 100),
        op(engine, 150, 700, tid=2, **{"Fwd thread id": 1, "Sequence number": 1}),
        launch(1, 160, tid=2),
        kernel("k", 170, 500, 1),
        call("cudaStreamSynchronize", 180, 500, tid=2),
        op("aten::add_", 900, 50),
    )
    graph = graph_of(table_of(tmp_path, events))
    assert graph.length_us == 1000 and graph.parts_us["compute"] == 500
    assert step_if(graph, {0: 100.0, 1: 100.0, 2: 100.0}) == pytest.approx(600)


def test_a_copy_to_the_device_holds_the_host_until_it_begins(tmp_path: Path) -> None:
    """The copy waits 500 us for the kernel before it; the call returns 20 us after its begin, 80 before its end."""
    events = stepped(
        launch(1, 10),
        kernel("k", 20, 500, 1),
        call("cudaMemcpyAsync", 30, 510, 2),
        copy("Memcpy HtoD (Pageable -> Device)", 520, 100, 2),
    )
    graph = graph_of(table_of(tmp_path, events))
    assert graph.length_us == 1000 and graph.parts_us["compute"] == 500 and graph.parts_us["copy"] == 20
    assert step_if(graph, {0: 100.0, 2: 100.0, 4: 100.0}) == pytest.approx(600)


def test_clocks_that_disagree_do_not_hide_what_a_call_waited_for(tmp_path: Path) -> None:
    events = stepped(launch(1, 10), kernel("k", 50, 500, 1), call("hipDeviceSynchronize", 20, 500))
    graph = graph_of(table_of(tmp_path, events))
    parts = graph.parts_us
    assert parts["compute"] == 500 and parts["sync"] == 0 and parts["launch"] == 10  # 40 - 30 that the end is late
    assert step_if(graph, {0: 100.0, 1: 100.0, 2: 100.0}) == pytest.approx(600)


def test_kernels_of_one_stream_that_run_beside_each_other(tmp_path: Path) -> None:
    """b begins 10 us after a and does not wait for its end; c begins when b has ended."""
    events = stepped(
        launch(1, 10),
        kernel("a", 20, 100, 1),
        launch(2, 12),
        kernel("b", 30, 200, 2),
        launch(3, 14),
        kernel("c", 230, 100, 3),
        call("cudaDeviceSynchronize", 20, 315),
    )
    table = table_of(tmp_path, events)
    graph = graph_of(table)
    first = [row for row in range(len(table.activities)) if table.names[table.activities.name[row]] == "a"]
    assert step_if(graph, scaled(table, 0.0, first)) == pytest.approx(graph.length_us)
    assert step_if(graph, scaled(table, 0.5)) == pytest.approx(1000 - 150)


def test_what_the_trace_does_not_explain_is_said(tmp_path: Path) -> None:
    events = stepped(
        launch(1, 10),
        kernel("a", 20, 100, 1),
        launch(2, 12),
        kernel("b", 500, 100, 2),
        kernel("lost", 200, 100, -1),
        call("cudaDeviceSynchronize", 20, 590),
    )
    graph = graph_of(table_of(tmp_path, events))
    whys = [gap.why for gap in graph.gaps]
    assert whys == [
        "1 of 3 activities of the step have no launch in the trace",
        "on 28% of it the device waits for no recorded reason, which is taken to last",
    ]
    assert all(gap.qualifies for gap in graph.gaps)


def test_a_recording_without_steps_lasts_until_its_last_work(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 30), launch(1, 10), kernel("a", 20, 100, 1), launch(2, 25), kernel("b", 121, 100, 2)]
    table = table_of(tmp_path, events)
    graph = graph_of(table, (0.0, 221.0), repeats=False)
    parts = check(graph).parts_us
    assert graph.length_us == 221 and parts["compute"] == 200 and parts["idle"] == 1
    assert parts["launch"] == 10 and parts["host"] == 10
    assert step_if(graph, scaled(table, 0.5)) == 121


def test_the_order_of_events_does_not_matter(tmp_path: Path) -> None:
    document_ = document(PAIRS / "streams_1.json.gz")
    found = []
    for seed in range(3):
        random.Random(seed).shuffle(document_["traceEvents"])
        table = table_of(tmp_path, document_["traceEvents"])
        graph = graph_of(table)
        found.append((graph.length_us, dict(graph.parts_us), step_if(graph, scaled(table, 0.3))))
    assert found[0] == found[1] == found[2]


# ---------------------------------------------------------------------------------------------------------- the choices


def test_the_typical_step_is_the_one_of_median_length(tmp_path: Path) -> None:
    def lasting(*lengths: float) -> Table:
        events, begin = [], 0.0
        for number, length in enumerate(lengths):
            events += [span(f"ProfilerStep#{number}", begin, length - 10), launch(number, begin + length - 30)]
            events.append(kernel("k", begin + length - 20, 5, number))
            begin += length
        return table_of(tmp_path, events)

    def chosen(table: Table) -> tuple[float, float]:
        return typical_step(find_steps(table, launching_calls(table)))

    assert chosen(lasting(300, 100, 200)) == (400, 590)  # the last step ends with its own range
    assert chosen(lasting(300, 100, 200, 500)) == (400, 600)
    assert chosen(lasting(100, 100, 100)) == (100, 200)


def test_without_steps_there_is_no_typical_one() -> None:
    with pytest.raises(ValueError, match="no steps"):
        typical_step(find_steps(EMPTY, launching_calls(EMPTY)))


def test_a_step_without_device_work_has_no_path(tmp_path: Path) -> None:
    table = table_of(tmp_path, [span("ProfilerStep#0", 0, 100), op("aten::mm", 10, 10)])
    found = step_graph(table, launching_calls(table), (0.0, 100.0))
    assert isinstance(found, Gap) and found.why == "the device did nothing for the step" and not found.qualifies
    assert isinstance(step_graph(EMPTY, launching_calls(EMPTY), (0.0, 0.0)), Gap)


def test_a_graph_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.metrics.schedule.LIMIT", 4)
    table = table_of(tmp_path, stepped(launch(1, 10), kernel("a", 20, 100, 1), call("cudaDeviceSynchronize", 20, 110)))
    found = step_graph(table, launching_calls(table), (0.0, 1000.0))
    assert isinstance(found, Gap) and "waits between streams and threads" in found.why


@pytest.mark.parametrize("time", [-1.0, float("nan")])
def test_a_time_that_cannot_be_is_an_error(tmp_path: Path, time: float) -> None:
    table = table_of(tmp_path, stepped(launch(1, 10), kernel("a", 20, 100, 1)))
    with pytest.raises(ValueError, match="negative or undefined"):
        what_if(graph_of(table), {"region": {0: time}})


def test_more_time_than_recorded_and_rows_of_other_steps_change_nothing(tmp_path: Path) -> None:
    table = table_of(tmp_path, stepped(launch(1, 10), kernel("a", 20, 100, 1), call("cudaDeviceSynchronize", 20, 110)))
    graph = graph_of(table, (0.0, 1000.0))
    assert step_if(graph, {0: 1e9, 1: 0.0, 2: 0.0, 99: 0.0}) == graph.length_us
    assert what_if(graph, {}) == () and critical_path(graph).what_if == ()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.data())
def test_the_largest_cycle_mean_is_that_of_all_cycles(size: int, data: st.DataObject) -> None:
    entry = st.one_of(st.just(-np.inf), st.integers(-20, 20).map(float))
    matrix = np.array([[data.draw(entry) for _ in range(size)] for _ in range(size)])
    ways = nx.DiGraph([(i, j) for i in range(size) for j in range(size) if matrix[i, j] > -np.inf])

    def mean(cycle: list[int]) -> float:
        return float(np.mean([matrix[i, j] for i, j in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]))

    found, cycle = largest_cycle_mean(matrix)
    expected = max((mean(item) for item in nx.simple_cycles(ways)), default=-np.inf)
    assert found == pytest.approx(expected)
    assert cycle == [] if expected == -np.inf else mean(cycle) == pytest.approx(found)
