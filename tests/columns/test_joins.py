"""Joins of columns against plain loops: launches, nesting, the operator around a moment, steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_of

from advisor.columns.joins import (
    by_thread,
    innermost,
    launching_calls,
    launching_operators,
    nested,
    parents,
    step_of,
)

Event = dict[str, Any]


def event(category: str, ts: float, dur: float = 1, tid: int = 1, **args: Any) -> Event:
    name = args.pop("name", category)
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


# -- launches

LAUNCHES = st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 12)), max_size=10)


@settings(deadline=None)
@given(LAUNCHES, LAUNCHES)
def test_launching_calls(launches: list[tuple[int, int]], kernels: list[tuple[int, int]]) -> None:
    """The last launch with the id before the activity, else the first with the id; an id below 0 is none."""
    launches = sorted(set(launches))
    events = [event("cuda_runtime", start, correlation=number) for number, start in launches]
    table = table_of([*events, *(event("kernel", start, correlation=number) for number, start in kernels)])
    calls, activities = table.calls, table.activities
    for row, call in enumerate(launching_calls(table).tolist()):
        number, start = activities.correlation[row], activities.start[row]
        same = [place for place in range(len(calls)) if calls.correlation[place] == number >= 0]
        before = [place for place in same if calls.start[place] <= start]
        expected = calls.start[(before or same[:1])[-1]] if same else None
        assert (None if call < 0 else calls.start[call]) == expected
        assert call < 0 or calls.correlation[call] == number


def test_ids_that_repeat_cost_no_more() -> None:
    """Also where all activities and all launches have one id."""
    rows = 20_000
    table = table_of(
        event(category, place, correlation=0) for category in ("kernel", "cuda_runtime") for place in range(rows)
    )
    began = time.process_time()
    assert launching_calls(table).tolist() == list(range(rows))
    assert time.process_time() - began < 2


def test_no_launches() -> None:
    assert launching_calls(table_of([])).tolist() == []
    assert launching_calls(table_of([event("kernel", 1, correlation=3)])).tolist() == [-1]
    assert launching_calls(table_of([event("cuda_runtime", 1, correlation=3)])).tolist() == []


# -- nesting

SPANS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 15), st.integers(0, 8)), max_size=14)


def laid_out(spans: list[tuple[int, int, int]]) -> tuple[Any, Any, Any]:
    """Thread, start and end in the order of operators: by start, longer ones first."""
    rows = sorted(spans, key=lambda item: (item[1], -item[2], item[0]))
    thread, start, duration = (np.array([row[place] for row in rows], dtype=float) for place in range(3))
    return thread.astype(np.int64), start, start + duration


@settings(deadline=None, max_examples=300)
@given(SPANS)
def test_nested(spans: list[tuple[int, int, int]]) -> None:
    thread, start, end = laid_out(spans)
    expected = []
    for row in range(len(start)):
        open_then = [place for place in range(row) if thread[place] == thread[row] and end[place] > start[row]]
        expected.append(open_then[-1] if open_then else -1)
    assert nested(thread, start, end).tolist() == expected


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_well_nested(seed: int, count: int) -> None:
    """Calls that lie wholly inside of each other, as operators do, with and without length."""
    draw = np.random.default_rng(seed)
    spans: list[tuple[int, int, int]] = []

    def fill(begin: int, end: int, depth: int) -> None:
        place = begin
        while place <= end and len(spans) < count:
            start = int(draw.integers(place, end + 1))
            stop = int(draw.integers(start, end + 1))
            spans.append((1, start, stop - start))
            if depth < 4 and stop > start and draw.random() < 0.7:
                fill(start, stop, depth + 1)
            place = stop + int(draw.integers(0, 2))
            if draw.random() < 0.2:
                return

    fill(0, 30, 0)
    test_nested.hypothesis.inner_test(spans)


@settings(deadline=None, max_examples=200)
@given(SPANS, st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 25)), max_size=12))
def test_innermost(spans: list[tuple[int, int, int]], asked: list[tuple[int, int]]) -> None:
    operators = table_of(event("cpu_op", start, duration, thread) for thread, start, duration in spans).operators
    names = {str(number): number for number in range(9)}
    table = table_of(event("cpu_op", start, duration, thread) for thread, start, duration in spans)
    threads = [names[thread] for _, thread in table.threads]
    numbers = {thread: place for place, thread in enumerate(threads)}
    origin = table.origin_us
    thread = np.array([numbers.get(number, 99) for number, _ in asked], dtype=np.int64)
    moment = np.array([time - origin for _, time in asked], dtype=float)
    found = innermost(thread, moment, operators, parents(operators))
    ends = operators.start + operators.duration
    for place, row in enumerate(found.tolist()):
        around = [
            candidate
            for candidate in range(len(operators))
            if operators.thread[candidate] == thread[place]
            and operators.start[candidate] <= moment[place] < ends[candidate]
        ]
        assert row == (around[-1] if around else -1)


def test_launching_operators() -> None:
    table = table_of(
        [
            event("cpu_op", 0, 100, name="outer"),
            event("cpu_op", 10, 20, name="inner"),
            event("cuda_runtime", 15, correlation=1),
            event("cuda_runtime", 50, correlation=2),
            event("cuda_runtime", 50, tid=2, correlation=3),
            event("cuda_runtime", 100, correlation=4),
            *(event("kernel", 200 + number, correlation=number) for number in range(1, 6)),
        ]
    )
    rows = launching_operators(table, launching_calls(table), parents(table.operators))
    assert [table.names[table.operators.name[row]] if row >= 0 else None for row in rows.tolist()] == [
        "inner",
        "outer",
        None,
        None,
        None,
    ]


def test_deep_nesting_and_many_threads_cost_linear_time() -> None:
    depth = 20_000
    deep = np.arange(depth, dtype=float)
    began = time.process_time()
    found = nested(np.zeros(depth, dtype=np.int64), deep, 2 * depth - deep)
    assert found.tolist() == list(range(-1, depth - 1))
    found = nested(np.arange(depth), deep, deep + 5)
    assert (found == -1).all()
    assert time.process_time() - began < 5


@settings(deadline=None)
@given(st.lists(st.integers(-2, 4), max_size=20))
def test_by_thread(threads: list[int]) -> None:
    found = by_thread(np.array(threads, dtype=np.int64))
    assert {number: rows.tolist() for number, rows in found.items()} == {
        number: [place for place, thread in enumerate(threads) if thread == number] for number in set(threads)
    }
    assert list(found) == sorted(set(threads))


# -- steps


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(-2, 40), max_size=12))
def test_step_of(gaps: list[int], times: list[int]) -> None:
    edges = np.cumsum(gaps)
    edges = edges[: len(edges) // 2 * 2]
    windows = edges.reshape(-1, 2).astype(float)
    found = step_of(windows, np.array(times, dtype=float))
    for moment, place in zip(times, found.tolist(), strict=True):
        inside = [row for row, (begin, end) in enumerate(windows.tolist()) if begin <= moment < end]
        assert place == (inside[-1] if inside else -1)


def test_no_time_is_in_no_step() -> None:
    windows = np.array([[0.0, 1.0], [1.0, 2.0]])
    assert step_of(windows, np.array([np.nan, 0.0, 1.0, 2.0])).tolist() == [-1, 0, 1, -1]
    assert step_of(np.empty((0, 2)), np.array([1.0, np.nan])).tolist() == [-1, -1]
