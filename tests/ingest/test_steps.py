"""Windows and phases of steps."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from traces import kernel, launch, op, save, span

from advisor.ingest.kineto import read_trace
from advisor.ingest.steps import merged, partition

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
