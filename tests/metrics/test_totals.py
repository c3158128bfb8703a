"""Plain sums: unions that overlap, communication that is hidden, steps marked twice, durations that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import EMPTY, Event, activity, copy, kernel, op, span, table_of

from advisor.metrics.totals import communicates, marked_steps, totals

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_overlap_counts_once_in_unions_and_twice_in_the_sum(tmp_path: Path) -> None:
    events = [kernel("a", 10, 10, 1), kernel("b", 15, 10, 2, stream=8), copy("Memcpy HtoD", 30, 5, 3)]
    events.append(activity("gpu_memset", "Memset (Device)", 33, 4, 4))
    found = totals(table_of(tmp_path, events))
    assert (found.kernels, found.memcpys, found.memsets) == (2, 1, 1)
    assert (found.kernel_us, found.kernels_busy_us, found.busy_us, found.span_us) == (20, 15, 22, 27)


def test_exposed_is_what_no_other_kernel_hides(tmp_path: Path) -> None:
    """Copies hide no communication here: the right values of the corpus are defined so."""
    events = [kernel(NCCL, 0, 20, 1, stream=9), kernel("a", 5, 5, 2), copy("Memcpy DtoD", 12, 4, 3)]
    found = totals(table_of(tmp_path, events))
    assert (found.nccl_kernels, found.nccl_us, found.exposed_comm_us) == (1, 20, 15)


def test_two_collectives_at_once_are_exposed_once(tmp_path: Path) -> None:
    events = [kernel(NCCL, 0, 20, 1, stream=9), kernel("rccl_kernel", 10, 20, 2, stream=10), kernel("a", 25, 30, 3)]
    found = totals(table_of(tmp_path, events))
    assert (found.nccl_us, found.exposed_comm_us) == (40, 25)


def test_a_copy_that_names_nccl_is_no_collective(tmp_path: Path) -> None:
    table = table_of(tmp_path, [copy("Memcpy nccl", 0, 5, 1), kernel("void NCCL_thing()", 6, 1, 2)])
    assert communicates(table).tolist() == [False, True]


def test_steps_are_distinct_names_of_the_host(tmp_path: Path) -> None:
    events = [span(f"ProfilerStep#{n}", 100.0 * n, 80.0) for n in (3, 1, 2)]
    events += [span("ProfilerStep#2", 205.0, 10.0, tid=9), span("ProfilerStep", 0.0, 900.0), op("ProfilerStep#x", 1, 1)]
    events.append({**span("ProfilerStep#7", 500.0, 10.0), "cat": "gpu_user_annotation"})
    events.append(kernel("a", 150, 100, 1))
    table = table_of(tmp_path, events)
    assert len(marked_steps(table)) == 3
    found = totals(table)
    assert (found.steps, found.step_mean_us) == (3, 80)
    window = 380 - 100  # from the first to the last
    assert found.busy_in_steps == pytest.approx(100 / window)
    assert found.kernels_busy_in_steps == found.busy_in_steps


def test_nothing_on_a_device_is_not_zero(tmp_path: Path) -> None:
    found = totals(table_of(tmp_path, [op("aten::mm", 0, 5), span("ProfilerStep#1", 0, 9)]))
    assert (found.kernels, found.nccl_kernels, found.nccl_us) == (0, 0, 0.0)
    absent = (found.kernel_us, found.busy_us, found.kernels_busy_us, found.span_us, found.exposed_comm_us)
    assert absent == (None,) * 5
    assert (found.busy_in_steps, found.kernels_busy_in_steps) == (None, None)
    assert totals(EMPTY).step_mean_us is None


def test_a_window_without_length_has_no_share(tmp_path: Path) -> None:
    assert totals(table_of(tmp_path, [span("ProfilerStep#1", 4, 0), kernel("a", 0, 9, 1)])).busy_in_steps is None


def test_a_negative_duration_counts_as_none(tmp_path: Path) -> None:
    """A clock that was set back takes nothing away from what other kernels took, and makes no negative span."""
    found = totals(table_of(tmp_path, [kernel("a", 10, -500, 1), kernel("b", 20, 5, 2), kernel(NCCL, 30, -7, 3)]))
    assert (found.kernels, found.kernel_us, found.busy_us, found.span_us) == (3, 5, 5, 20)
    assert (found.nccl_us, found.exposed_comm_us) == (0, 0)
    alone = totals(table_of(tmp_path, [kernel("a", 10, -500, 1)]))
    assert (alone.kernel_us, alone.busy_us, alone.span_us) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------ against a plain count

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from(["a", NCCL, "copy", "set"]), st.integers(7, 9)),
    max_size=12,
)


def made(spans: list[tuple[int, int, str, int]]) -> list[Event]:
    """The activities that stand for some spans, each with an id of its own."""
    category = {"copy": "gpu_memcpy", "set": "gpu_memset"}
    return [
        activity(category.get(name, "kernel"), name, start, duration, number, stream)
        for number, (start, duration, name, stream) in enumerate(spans, start=1)
    ]


@settings(max_examples=60, deadline=None)
@given(spans=SPANS, step=st.tuples(st.integers(0, 40), st.integers(1, 40)), data=st.data())
def test_every_sum_is_that_of_a_count_by_microseconds(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int, str, int]], step: tuple[int, int], data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    events = [span("ProfilerStep#1", *step), *made(spans)]
    found = totals(table_of(folder, data.draw(st.permutations(events))))

    def moments(*names: str) -> set[int]:
        return {t for start, length, name, _ in spans if name in names for t in range(start, start + length)}

    if spans:
        every, kernels = moments("a", NCCL, "copy", "set"), moments("a", NCCL)
        assert found.busy_us == len(every)
        assert found.kernels_busy_us == len(kernels)
        assert found.exposed_comm_us == len(kernels - moments("a"))
        assert found.kernel_us == sum(length for _, length, name, _ in spans if name in ("a", NCCL))
        assert found.span_us == max(s + length for s, length, _, _ in spans) - min(s for s, _, _, _ in spans)
        window = set(range(step[0], sum(step)))
        assert found.busy_in_steps == pytest.approx(len(every & window) / step[1])
        assert found.kernels_busy_in_steps == pytest.approx(len(kernels & window) / step[1])
        assert found.busy_us <= found.span_us
        assert found.kernels_busy_us <= min(found.busy_us, found.kernel_us)
        assert 0 <= found.exposed_comm_us <= found.nccl_us
    assert found.steps == 1
