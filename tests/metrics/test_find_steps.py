"""Steps by mark, by optimizer and by repetition, and their windows on the device."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from recordings import CORPUS, EMPTY, NOT_HERE, Event, corpus, document, h200, kernel, launch, op, span, table_of, truth

from advisor.columns.intervals import clipped, intervals, length, merged
from advisor.columns.joins import launching_calls
from advisor.columns.table import Table
from advisor.ingest.kineto import trace_of
from advisor.metrics.optimizers import optimizer_steps
from advisor.metrics.periods import periods
from advisor.metrics.steps import Steps, find_steps, spill_over
from advisor.metrics.totals import marked_steps

MARKS = ("ProfilerStep#", "Optimizer.step#")
TRAINING = {  # recorded training loops whose steps are marked, and how many
    "kineto-resnet50-nw0-steps5-10.pt.trace.json.gz": 6,
    "kineto-resnet50-nw4-steps5-10.pt.trace.json.gz": 6,
    "hta-v100x2-ddp-rank1.json.gz": 5,
    "hta-a100-ddp-nccl-meta-rank0.json.gz": 3,
    "hta-a100x8-control-rank3.json.gz": 6,
    "hta-a100x16-torchrec-rank0.json.gz": 5,
    "tracelens-mi300-resnet-ddp8-actckpt-rank0.json.gz": 3,
}


def steps_of(table: Table) -> Steps:
    return find_steps(table, launching_calls(table))


def without(path: str, folder: Path, *prefixes: str) -> Table:
    """A trace of the corpus without the ranges whose names begin so."""
    found = document(CORPUS / "traces" / path)
    events = [item for item in found["traceEvents"] if not str(item.get("name")).startswith(prefixes)]
    return table_of(folder, events)


def loop(count: int, marks: bool = True, kernels: int = 3, begin: int = 0) -> list[Event]:
    """A training loop: per step of 100 us a forward, a backward and an optimizer kernel that take 20 us each."""
    events = []
    for number in range(begin, begin + count):
        start = 100.0 * number
        if marks:
            events.append(span(f"ProfilerStep#{number}", start, 100.0))
        names = ("aten::mm", "autograd::engine::evaluate_function: MmBackward0", "aten::add_")
        for place in range(kernels):
            moment, correlation = start + 10.0 + 30.0 * place, number * 10 + place + 1
            events += [
                op(names[place % 3], moment, 10.0),
                launch(correlation, moment + 2.0),
                kernel(f"kernel_{place}", moment + 6.0, 20.0, correlation),
            ]
    return events


# ------------------------------------------------------------------------------------------------------------- windows


def test_windows_are_adjacent_and_hold_the_wait_for_a_step(tmp_path: Path) -> None:
    steps = steps_of(table_of(tmp_path, loop(3)))
    assert (steps.source, steps.numbers, steps.on_device) == ("ProfilerStep", (0, 1, 2), True)
    assert steps.windows.tolist() == [[0.0, 96.0], [96.0, 196.0], [196.0, 296.0]]
    assert steps.extents.tolist() == [[16.0, 96.0], [116.0, 196.0], [216.0, 296.0]]
    assert steps.activity.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert steps.median_us == 100.0


def test_a_step_begins_when_what_was_launched_before_the_recording_has_ended(tmp_path: Path) -> None:
    spilled = [kernel("earlier", 3.0, 9.0, 901), kernel("earlier", 12.0, 5.0, 902)]
    table = table_of(tmp_path, [*loop(2), *spilled])
    assert spill_over(table, launching_calls(table)).sum() == 2
    steps = steps_of(table)
    assert steps.windows[0].tolist() == [17.0, 96.0]
    assert (steps.activity == -1).sum() == 2


def test_a_launch_that_was_lost_later_is_no_spill_over(tmp_path: Path) -> None:
    """Each stream on its own: the second one begins later, and of the third no launch is recorded."""
    later = [launch(800, 150.0), kernel("copied", 160.0, 5.0, 800, stream=20)]
    lost = [
        kernel("lost", 97.0, 2.0, 901),
        kernel("lost", 170.0, 5.0, 902, stream=20),
        kernel("lost", 50.0, 5.0, 903, stream=21),
    ]
    spilled = [kernel("earlier", 90.0, 5.0, 904, stream=20), kernel("earlier", 2.0, 5.0, 905, stream=21)]
    table = table_of(tmp_path, [*loop(2), *later, *lost, *spilled])
    found = spill_over(table, launching_calls(table))
    assert set(table.named(table.activities.name[found])) == {"earlier"} and found.sum() == 2


def test_steps_behind_a_hole_begin_anew(tmp_path: Path) -> None:
    steps = steps_of(table_of(tmp_path, [*loop(2), *loop(2, begin=7)]))
    assert steps.numbers == (0, 1, 7, 8)
    assert steps.windows.tolist() == [[0.0, 96.0], [96.0, 196.0], [700.0, 796.0], [796.0, 896.0]]


def test_a_marked_step_that_launched_nothing_has_no_window(tmp_path: Path) -> None:
    steps = steps_of(table_of(tmp_path, [*loop(2), span("ProfilerStep#2", 200.0, 5.0)]))
    assert (steps.numbers, steps.without_work) == ((0, 1), (2,))
    assert len(steps.host) == len(steps.windows) == len(steps.extents) == 2


def test_without_a_device_windows_are_those_of_the_host(tmp_path: Path) -> None:
    events = [item for item in loop(2) if item["cat"] in ("cpu_op", "user_annotation")]
    steps = steps_of(table_of(tmp_path, events))
    assert steps.windows.tolist() == [[0.0, 100.0], [100.0, 200.0]] and not steps.on_device


def test_a_mark_that_stands_twice_counts_once(tmp_path: Path) -> None:
    twice = [span(f"ProfilerStep#{number}", 100.0 * number + 1.0, 90.0, tid=9) for number in range(2)]
    assert steps_of(table_of(tmp_path, [*loop(2), *twice])).numbers == (0, 1)


def test_an_absurd_number_of_a_step_is_no_step(tmp_path: Path) -> None:
    assert steps_of(table_of(tmp_path, [*loop(1), span(f"ProfilerStep#{'9' * 5000}", 100.0, 9.0)])).numbers == (0,)


def test_an_empty_table_has_no_step() -> None:
    steps = steps_of(EMPTY)
    assert (steps.source, len(steps), steps.median_us) == (None, 0, None)


@pytest.mark.parametrize(
    "name", ["gpt_naive_bf16", "gpt_launch_bound_fp32", "gpt_fused_compiled_bf16", "resnet50_dataloader_bound_fp32"]
)
def test_a_run_and_a_survey_agree_on_the_duration_of_steps(name: str) -> None:
    table = h200(name)
    windows = steps_of(table).duration_us.tolist()
    assert windows == pytest.approx([step.duration_us for step in trace_of(table).timeline.steps], rel=1e-12)


@pytest.mark.parametrize(
    ("path", "busy_us", "span_us", "share"),
    [
        ("tracelens-h100-qwen15-05b.json.gz", 31_905, 34_892, 0.9144),
        ("tracelens-mi300-qwen15-05b.json.gz", 29_744, 33_131, 0.89776),
    ],
)
def test_spill_over_belongs_to_no_step(path: str, busy_us: float, span_us: float, share: float) -> None:
    """TraceLens' values: what the step launched, from its first start to its last end."""
    table = corpus(path)
    steps = steps_of(table)
    own = steps.activity == 0
    assert (~own).sum() == truth()[f"traces/{path}"]["right_extra"]["no_launch"]
    busy = length(merged(intervals(table.activities.start[own], table.activities.duration[own])))
    begin, end = steps.extents[0]
    assert busy == pytest.approx(busy_us, abs=0.5) and end - begin == pytest.approx(span_us, abs=0.5)
    assert busy / (end - begin) == pytest.approx(share, abs=1e-4)
    everything = merged(intervals(table.activities.start, table.activities.duration))
    assert length(clipped(everything, begin, end)) == pytest.approx(busy)


def test_the_mean_step_on_the_device() -> None:
    """The value of torch-tb-profiler, which extends steps to their last device work, too; on the host it is 174,829."""
    steps = steps_of(corpus("kineto-resnet50-nw0-steps5-10.pt.trace.json.gz"))
    assert float(steps.duration_us.mean()) == pytest.approx(177_592, abs=0.5)


def test_torchrec_steps_do_not_begin_in_the_middle_of_the_one_before() -> None:
    """872 activities of the step before the recording run for 152 ms beside what the first step has launched."""
    steps = steps_of(corpus("hta-a100x16-torchrec-rank0.json.gz"))
    assert steps.duration_us.max() / steps.duration_us.min() < 1.02


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
def test_every_marked_trace_has_the_steps_that_were_counted() -> None:
    for path, expected in truth().items():
        if not expected.get("right", {}).get("steps") or "rocprof" in path or "EXC" in expected["right"]:
            continue
        table = corpus(path)
        steps = steps_of(table)
        assert steps.source == "ProfilerStep", path
        assert len(steps) + len(steps.without_work) == expected["right"]["steps"] == len(marked_steps(table)), path
        assert bool((steps.windows[1:, 0] == steps.windows[:-1, 1]).all()) or not steps.on_device, path


# ---------------------------------------------------------------------------------------------------------- optimizers


def test_thirty_steps_of_a_loop_that_nothing_marked() -> None:
    steps = steps_of(corpus("param-2080ti-resnet-cifar-30steps.json.gz"))
    assert (steps.source, len(steps)) == ("optimizer", 30)


def test_five_steps_of_ten_ranges() -> None:
    """The recording has 5 optimizer steps and copies each range to the device's lane: 10 ranges, 5 steps.

    Five losses and five backward passes were called.
    """
    table = corpus("hta-gp100-sgd-10steps.json.gz")
    steps = steps_of(table)
    assert (steps.source, len(steps)) == ("optimizer", 5)
    called = table.named(table.operators.name)
    assert called.count("aten::mse_loss") == called.count("MseLossBackward0") == 5
    assert (np.bincount(steps.activity) == 28).all()  # 26 kernels and 2 copies each, the last step's as well


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
@pytest.mark.parametrize("path", TRAINING)
def test_optimizers_end_the_steps_that_the_profiler_marked(path: str, tmp_path: Path) -> None:
    """The step in which the recording begins counts only when it is whole."""
    table = corpus(path)
    marked, (numbers, host) = marked_steps(table), optimizer_steps(table, launching_calls(table))
    assert TRAINING[path] - 1 <= len(numbers) <= TRAINING[path]
    inner = [length(host[row : row + 1]) for row in range(len(host))][1:-1]
    expected = [length(marked[row : row + 1]) for row in range(len(marked))][1:-1]
    assert np.mean(inner) == pytest.approx(np.mean(expected), rel=0.05)


def training(count: int, optimizers: str) -> list[Event]:
    """Steps of 100 us in which a backward pass (b) and optimizers (capital letters) follow each other."""
    events: list[Event] = []
    for number in range(count):
        for place, letter in enumerate(optimizers):
            start = 100.0 * number + 10.0 * place
            backward = "autograd::engine::evaluate_function: MmBackward0"
            name = backward if letter == "b" else f"Optimizer.step#{letter}.step"
            events.append(op(name, start, 8.0) if letter == "b" else span(name, start, 8.0))
            correlation = number * 10 + place + 1
            events += [launch(correlation, start + 1.0), kernel(letter, start + 3.0, 4.0, correlation)]
    return events


@pytest.mark.parametrize(
    ("optimizers", "last"), [("bA", 18.0), ("bAA", 28.0), ("bAB", 28.0), ("bAbB", 38.0), ("bbA", 28.0)]
)
def test_several_optimizers_end_one_step(optimizers: str, last: float, tmp_path: Path) -> None:
    table = table_of(tmp_path, training(4, optimizers))
    _, host = optimizer_steps(table, launching_calls(table))
    assert host[:, 1].tolist() == [100.0 * number + last for number in range(4)]


def test_an_optimizer_that_runs_now_and_then_ends_no_step(tmp_path: Path) -> None:
    table = table_of(tmp_path, [*training(4, "bA"), span("Optimizer.step#EMA.step", 220.0, 5.0)])
    assert len(optimizer_steps(table, launching_calls(table))[0]) == 4


def test_an_optimizer_inside_another_is_one(tmp_path: Path) -> None:
    inner = [span("Optimizer.step#Inner.step", 100.0 * number + 12.0, 2.0) for number in range(4)]
    table = table_of(tmp_path, [*training(4, "bA"), *inner])
    assert len(optimizer_steps(table, launching_calls(table))[0]) == 4


def test_half_a_step_in_front_does_not_count(tmp_path: Path) -> None:
    events = [item for item in training(4, "bA") if item["ts"] >= 10.0]
    table = table_of(tmp_path, events)
    assert len(optimizer_steps(table, launching_calls(table))[0]) == 3


def test_one_optimizer_step_bounds_nothing(tmp_path: Path) -> None:
    assert steps_of(table_of(tmp_path, training(1, "bA"))).source is None


# ------------------------------------------------------------------------------------------------------------- periods


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
@pytest.mark.parametrize("path", TRAINING)
def test_repetition_finds_the_steps_of_real_loops(path: str) -> None:
    """Exact repetition leaves at most the step in which the longest pause does not come first."""
    table = corpus(path)
    numbers, times = periods(table, launching_calls(table))
    assert TRAINING[path] - 1 <= len(numbers) <= TRAINING[path]
    starts = np.diff(times[:, 0])
    assert np.median(starts) == pytest.approx(np.median(np.diff(marked_steps(table)[:, 0])), rel=0.05)


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
def test_a_loop_without_any_mark(tmp_path: Path) -> None:
    path = "hta-gp100-sgd-10steps.json.gz"
    bare, marked = steps_of(without(path, tmp_path, *MARKS)), steps_of(corpus(path))
    assert (bare.source, bare.on_device) == ("device gaps", True)
    assert bare.median_us == pytest.approx(marked.median_us, rel=0.05)


def test_without_launches_the_device_tells_the_steps(tmp_path: Path) -> None:
    events = [item for item in loop(5, marks=False) if item["cat"] == "kernel"]
    for item in events:
        item["name"] = item["name"].replace("kernel_1", "layer_norm_backward")
    steps = steps_of(table_of(tmp_path, events))
    assert (steps.source, len(steps)) == ("device gaps", 5)
    assert steps.duration_us[1:].tolist() == [100.0] * 4


def test_layers_that_repeat_are_no_steps(tmp_path: Path) -> None:
    events = [item for item in loop(9, marks=False) if "Backward" not in item["name"]]
    assert steps_of(table_of(tmp_path, events)).source is None


def test_a_loop_that_changes_is_not_certain(tmp_path: Path) -> None:
    events = loop(5, marks=False)
    next(item for item in reversed(events) if item["name"] == "kernel_0")["name"] = "another"
    assert steps_of(table_of(tmp_path, events)).source is None


def test_a_single_step_repeats_nothing() -> None:
    assert steps_of(h200("gpt_naive_bf16_annotated")).source is None


def test_order_of_events_does_not_matter(tmp_path: Path) -> None:
    events = [*loop(4), kernel("earlier", 3.0, 9.0, 901)]
    mixed = events.copy()
    random.Random(5).shuffle(mixed)
    straight, other = steps_of(table_of(tmp_path, events)), steps_of(table_of(tmp_path, mixed))
    assert straight.windows.tolist() == other.windows.tolist()
    assert straight.activity.tolist() == other.activity.tolist()
