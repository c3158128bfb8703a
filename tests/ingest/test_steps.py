"""Windows and phases of steps."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from traces import Event, kernel, launch, op, save, span

from advisor.columns.intervals import merged, partition
from advisor.ingest.kineto import read_trace
from advisor.ingest.phases import Stretch, stretches

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("seed", range(20))
def test_partition_agrees_with_counting_moments(seed: int) -> None:
    draw = random.Random(seed)

    def layer() -> np.ndarray:
        starts = [draw.randrange(0, 100) for _ in range(draw.randrange(0, 12))]
        return np.array([(s, s + draw.randrange(0, 15)) for s in starts], dtype=np.float64).reshape(-1, 2)

    layers = {name: layer() for name in ("a", "b", "c")}
    begin, end = 20, 80
    expected = dict.fromkeys((*layers, "rest"), 0)
    for moment in range(begin, end):
        inside = (name for name, intervals in layers.items() if any(s <= moment < e for s, e in intervals))
        expected[next(inside, "rest")] += 1
    parts = partition(begin, end, [(name, merged(intervals)) for name, intervals in layers.items()], "rest")
    assert parts == expected


def test_device_steps_are_adjacent_and_hold_their_own_wait_for_data(tmp_path: Path) -> None:
    events = []
    for index, begin in ((1, 0.0), (2, 1000.0)):
        events += [
            span(f"ProfilerStep#{index}", begin, 990.0),
            span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin + 10, 500.0),
            op("aten::mm", begin + 520, 10.0, sequence=index * 10),
            launch(index * 10, begin + 521),
            kernel("gemm", begin + 600, 100.0, index * 10),
            launch(index * 10 + 1, begin + 530),
            kernel("Memcpy HtoD (Pageable -> Device)", begin + 650, 100.0, index * 10 + 1, cat="gpu_memcpy", stream=8),
            op(
                "autograd::engine::evaluate_function: MmBackward0", begin + 600, 50.0, 2, sequence=index * 10, forward=1
            ),
            launch(index * 10 + 2, begin + 610, tid=2),
            kernel("gemm", begin + 760, 40.0, index * 10 + 2),
            span("Optimizer.step#SGD.step", begin + 700, 50.0),
            launch(index * 10 + 3, begin + 710),
            kernel("update", begin + 820, 30.0, index * 10 + 3),
        ]
    trace = read_trace(save(tmp_path / "t.json", events))
    first, second = trace.timeline.steps
    assert first.duration_us == pytest.approx(850.0)
    assert second.duration_us == pytest.approx(1000.0)
    for step in (first, second):
        assert sum(step.phases_us.values()) == pytest.approx(step.duration_us, rel=1e-6)
        assert step.phases_us["forward"] == pytest.approx(100.0)
        assert step.phases_us["copy"] == pytest.approx(50.0)  # the other half runs under the product
        assert step.phases_us["backward"] == pytest.approx(40.0)
        assert step.phases_us["optimizer"] == pytest.approx(30.0)
        assert step.phases_us["data"] == pytest.approx(500.0)
    assert trace.timeline.busy == pytest.approx(2 * 220.0 / 1850.0)
    assert trace.timeline.optimizer_us == {"SGD": pytest.approx(30.0)}
    assert trace.timeline.optimizer_idle_us == {"SGD": 0.0}  # the device copies and multiplies meanwhile


def test_the_device_waits_for_the_launches_of_an_optimizer(tmp_path: Path) -> None:
    events = []
    for index, begin in ((1, 0.0), (2, 1000.0)):
        events += [
            span(f"ProfilerStep#{index}", begin, 990.0),
            op("aten::mm", begin + 20, 10.0, sequence=index * 10),
            launch(index * 10, begin + 21),
            kernel("gemm", begin + 30, 100.0, index * 10),
            span("Optimizer.step#Adam.step", begin + 100, 400.0),
            launch(index * 10 + 1, begin + 200),
            kernel("update", begin + 210, 20.0, index * 10 + 1),
            launch(index * 10 + 2, begin + 480),
            kernel("update", begin + 490, 50.0, index * 10 + 2),
        ]
    trace = read_trace(save(tmp_path / "t.json", events))
    assert trace.timeline.optimizer_us == {"Adam": pytest.approx(70.0)}
    busy = 30.0 + 20.0 + 10.0  # of the 400 us that the host is in `step`
    assert trace.timeline.optimizer_idle_us == {"Adam": pytest.approx(400.0 - busy)}


def test_work_left_over_from_before_belongs_to_no_step(tmp_path: Path) -> None:
    events = [
        span("ProfilerStep#3", 0.0, 100.0),
        op("aten::mm", 10.0, 10.0),
        launch(1, 11.0),
        kernel("old", 5.0, 295.0, 77),
        kernel("gemm", 300.0, 50.0, 1),
    ]
    (step,) = read_trace(save(tmp_path / "t.json", events)).timeline.steps
    assert step.duration_us == pytest.approx(50.0)
    assert step.phases_us["idle"] == 0.0


def test_collectives_count_where_they_are_exposed(tmp_path: Path) -> None:
    events = [
        span("ProfilerStep#1", 0.0, 100.0),
        op("aten::mm", 1.0, 10.0),
        launch(1, 2.0),
        launch(2, 20.0),
        kernel("gemm", 30.0, 40.0, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 50.0, 40.0, 2, stream=9),
    ]
    (step,) = read_trace(save(tmp_path / "t.json", events)).timeline.steps
    assert step.phases_us["comm"] == pytest.approx(20.0)
    assert step.phases_us["forward"] == pytest.approx(40.0)


def closure_step(begin: float, sequence: int) -> list[Event]:
    """A step of 1000 us whose optimizer is given a closure; two gradient passes, then it updates for 90 us."""
    step = [
        span("Optimizer.step#LBFGS.step", begin + 100, 900.0),
        span("advisor::closure", begin + 110, 600.0),
        op("aten::linear", begin + 120, 100.0, sequence=sequence),
        span("Optimizer.zero_grad#LBFGS.zero_grad", begin + 230, 20.0),
        op("aten::zero_", begin + 232, 10.0),
        span("advisor::backward", begin + 300, 200.0),
        op("MmBackward0", begin + 310, 180.0, sequence=sequence, forward=1),
        op("aten::_foreach_norm", begin + 600, 50.0),
        span("advisor::closure", begin + 720, 190.0),
        op("aten::linear", begin + 730, 40.0, sequence=sequence + 1),
        span("advisor::backward", begin + 780, 60.0),
        op("MmBackward0", begin + 785, 50.0, sequence=sequence + 1, forward=1),
        op("aten::_foreach_norm", begin + 850, 30.0),
        op("aten::addcdiv_", begin + 920, 70.0),
    ]
    return [span(f"ProfilerStep#{sequence // 10}", begin, 1000.0), *step]


def test_an_optimizer_does_not_own_what_its_closure_runs(tmp_path: Path) -> None:
    events = [*closure_step(0.0, 10), *closure_step(1000.0, 20)]
    trace = read_trace(save(tmp_path / "t.json", events))
    phases = [*zip(trace.operators.name, trace.operator_phase, strict=True)]
    assert phases[:7] == [
        ("aten::linear", "forward"),
        ("aten::zero_", "other"),
        ("MmBackward0", "backward"),
        ("aten::_foreach_norm", "forward"),  # another backward pass follows
        ("aten::linear", "forward"),
        ("MmBackward0", "backward"),
        ("aten::_foreach_norm", "other"),
    ]
    assert phases[7] == ("aten::addcdiv_", "optimizer")
    assert trace.timeline.optimizer_us == {"LBFGS": pytest.approx(900.0 - 600.0 - 190.0)}
    for step in trace.timeline.steps:
        assert step.phases_us == {
            "data": 0.0,
            "backward": pytest.approx(260.0),
            "optimizer": pytest.approx(110.0),
            "forward": pytest.approx(600.0 - 200.0 - 20.0 + 190.0 - 60.0 - 30.0),
            "other": pytest.approx(100.0 + 20.0 + 30.0),
        }


def test_kernels_launched_in_a_closure_are_not_the_optimizers(tmp_path: Path) -> None:
    """The same on a device: what counts is where a kernel was launched."""
    events = closure_step(0.0, 10)
    for number, (at, duration) in enumerate(
        [(130.0, 300.0), (320.0, 500.0), (610.0, 40.0), (790.0, 60.0), (930.0, 30.0)]
    ):
        events += [launch(number, at), kernel("k", 1000.0 + 1000 * number, duration, number)]
    events += [launch(9, 915.0), kernel("loose", 9000.0, 7.0, 9)]  # by no operator, after the last closure
    trace = read_trace(save(tmp_path / "t.json", events))
    assert trace.kernel_phase == ("forward", "backward", "forward", "backward", "optimizer", "optimizer")
    assert trace.timeline.optimizer_us == {"LBFGS": pytest.approx(37.0)}
    (step,) = trace.timeline.steps
    assert (step.phases_us["forward"], step.phases_us["backward"]) == (pytest.approx(340.0), pytest.approx(560.0))
    assert step.phases_us["optimizer"] == pytest.approx(37.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_innermost_range_decides(seed: int) -> None:
    draw = random.Random(seed)
    names = {"advisor::data": "data", "advisor::closure": "forward", "advisor::backward": "backward"}
    ranges: list[tuple[str, float, float, int]] = []

    def nest(begin: int, end: int, depth: int) -> None:
        cuts = sorted(draw.sample(range(begin, end + 1), min(6, (end - begin + 1) // 2 * 2)))
        for inner, outer in zip(cuts[::2], cuts[1::2], strict=True):
            ranges.append((draw.choice([*names, "user's own"]), float(inner), float(outer - inner), 1))
            if depth and outer - inner > 4:
                nest(inner, outer, depth - 1)

    nest(0, 200, 3)
    order = sorted(range(len(ranges)), key=lambda place: (ranges[place][1], -ranges[place][2], place))
    ranges = [ranges[place] for place in order]
    found = stretches(ranges).get(1, [])
    assert all(one.end_us <= other.start_us for one, other in pairwise(found))
    for moment in range(200):
        around = [item for item in ranges if item[0] in names and item[1] <= moment < item[1] + item[2]]
        expected = names[around[-1][0]] if around else None
        assert next((s.phase for s in found if s.start_us <= moment < s.end_us), None) == expected


def test_ranges_that_overlap_share_the_time_in_between() -> None:
    found = stretches([("advisor::closure", 0.0, 10.0, 1), ("advisor::backward", 5.0, 10.0, 1)])
    assert found == {
        1: [Stretch(0.0, 5.0, "forward", "advisor::closure"), Stretch(5.0, 15.0, "backward", "advisor::backward")]
    }


def test_lightning_gives_its_optimizer_a_closure() -> None:
    trace = read_trace(DATA / "lightning" / "trace.json.gz")
    names: dict[str, set[str]] = {}
    for name, phase, step in zip(trace.operators.name, trace.operator_phase, trace.operators.step, strict=True):
        if step >= 0:
            names.setdefault(phase, set()).add(name)
    assert {"aten::linear", "aten::cross_entropy_loss"} <= names["forward"]
    assert "aten::addcdiv_" in names["optimizer"]
    assert not {"aten::linear", "aten::mm", "aten::cross_entropy_loss"} & names["optimizer"]
    outer = [item.start_us for item in trace.ranges if item.name == "Optimizer.step#AdamW.step"]
    closures = [item.duration_us for item in trace.ranges if item.name == "advisor::closure"]
    ends = [step.end_us for step in trace.steps]  # the hook that ends a step runs inside the optimizer's range
    own = sum(end - start - closure for start, closure, end in zip(outer, closures, ends, strict=True))
    assert trace.timeline.optimizer_us["AdamW"] == pytest.approx(own / 2)
    for step in trace.timeline.steps:
        assert sum(step.phases_us.values()) == pytest.approx(step.duration_us, rel=1e-6)
        assert step.phases_us["optimizer"] < 0.6 * (step.phases_us["forward"] + step.phases_us["backward"])


def test_host_phases_of_a_real_capture() -> None:
    trace = read_trace(DATA / "tiny_gpt" / "trace.json.gz")
    assert trace.timeline.busy is None
    assert set(trace.timeline.optimizer_us) == {"AdamW"}
    for step, (_, begin, end) in zip(trace.timeline.steps, trace.steps, strict=True):
        assert step.duration_us == pytest.approx(end - begin)
        assert sum(step.phases_us.values()) == pytest.approx(step.duration_us, rel=1e-6)
        assert all(step.phases_us[name] > 0 for name in ("data", "forward", "backward", "optimizer", "other"))
    assert trace.timeline.optimizer_us["AdamW"] <= sum(s.phases_us["optimizer"] for s in trace.timeline.steps) / 2 + 100


def test_clipping_and_zero_grad_are_neither_forward_nor_optimizer() -> None:
    trace = read_trace(DATA / "tiny_gpt" / "trace.json.gz")
    names = {n for n, p in zip(trace.operators.name, trace.operator_phase, strict=True) if p == "other"}
    assert "aten::_foreach_norm" in names
