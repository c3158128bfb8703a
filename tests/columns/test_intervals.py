"""Interval arithmetic against sets of moments, and what is always true of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.columns.intervals import (
    NO_INTERVALS,
    Intervals,
    clipped,
    complement,
    covered,
    intersection,
    intervals,
    length,
    merged,
    partition,
    without,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=14)
LIMITS = st.tuples(st.integers(-3, 45), st.integers(-3, 45)).map(sorted)


def of(pairs: list[tuple[int, int]]) -> Intervals:
    """The union of intervals given by start and duration."""
    starts, durations = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return merged(intervals(starts, durations))


def moments(found: Intervals) -> set[int]:
    """The unit stretches that intervals with whole ends cover."""
    return {place for start, end in found.tolist() for place in range(int(start), int(end))}


def span(pairs: list[tuple[int, int]]) -> set[int]:
    return {place for start, duration in pairs for place in range(start, start + duration)}


def disjoint(found: Intervals) -> bool:
    return bool((found[:, 0] <= found[:, 1]).all() and (found[1:, 0] > found[:-1, 1]).all())


@settings(deadline=None)
@given(PAIRS)
def test_merged(pairs: list[tuple[int, int]]) -> None:
    found = of(pairs)
    assert moments(found) == span(pairs) and disjoint(found)
    assert length(found) == len(span(pairs)) <= sum(duration for _, duration in pairs)
    assert np.array_equal(merged(found), found)
    assert np.array_equal(of(pairs[::-1]), found)


@settings(deadline=None)
@given(PAIRS, PAIRS)
def test_of_two(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    left, right = of(one), of(other)
    both = intersection(left, right)
    assert moments(both) == span(one) & span(other)
    assert moments(without(left, right)) == span(one) - span(other)
    assert length(both) + length(without(left, right)) == length(left)
    assert np.array_equal(both, intersection(right, left))
    assert length(merged(np.concatenate((left, right)))) == length(left) + length(right) - length(both)


@settings(deadline=None)
@given(PAIRS, LIMITS)
def test_in_a_window(pairs: list[tuple[int, int]], limits: list[int]) -> None:
    begin, end = limits
    found, inside = of(pairs), set(range(begin, end))
    assert moments(clipped(found, begin, end)) == span(pairs) & inside
    assert moments(complement(found, begin, end)) == inside - span(pairs)
    assert length(clipped(found, begin, end)) + length(complement(found, begin, end)) == end - begin
    assert covered(found, begin, end).tolist() == [len(span(pairs) & inside)]


@settings(deadline=None)
@given(PAIRS, st.lists(LIMITS, max_size=6))
def test_many_windows(pairs: list[tuple[int, int]], windows: list[list[int]]) -> None:
    found = covered(of(pairs), [begin for begin, _ in windows], [end for _, end in windows])
    assert found.tolist() == [len(span(pairs) & set(range(begin, end))) for begin, end in windows]


@settings(deadline=None)
@given(st.lists(PAIRS, max_size=4), LIMITS)
def test_partition(layers: list[list[tuple[int, int]]], limits: list[int]) -> None:
    """A moment belongs to the first layer that has it; all moments belong to one."""
    begin, end = limits
    parts = partition(begin, end, [(str(place), of(pairs)) for place, pairs in enumerate(layers)], "rest")
    left = set(range(begin, end))
    for place, pairs in enumerate(layers):
        assert parts[str(place)] == len(left & span(pairs))
        left -= span(pairs)
    assert parts["rest"] == len(left)
    assert sum(parts.values()) == end - begin
    assert list(parts) == [*map(str, range(len(layers))), "rest"]


def test_the_rest_may_have_a_layer() -> None:
    parts = partition(0, 10, [("a", of([(0, 4)])), ("rest", of([(2, 4)]))], "rest")
    assert parts == {"a": 4, "rest": 6}


@pytest.mark.parametrize("pairs", [[], [(5, 0)], [(5, 0), (5, 0)]])
def test_nothing(pairs: list[tuple[int, int]]) -> None:
    found = of(pairs)
    assert length(found) == 0
    for other in (NO_INTERVALS, of([(0, 10)]), found):
        assert length(intersection(found, other)) == 0
        assert length(without(found, other)) == 0
        assert length(without(other, found)) == length(other)
    assert covered(found, [], []).tolist() == []
    assert length(complement(found, 0, 10)) == 10
    assert len(clipped(found, 6, 3)) == 0 and len(complement(of([(0, 10)]), 3, 3)) == 0


def test_negative_durations_are_none() -> None:
    """A clock that ran backwards makes no time."""
    assert intervals([5, 1], [-3, 2]).tolist() == [[5, 5], [1, 3]]
    assert length(merged(intervals([5, 1, 2], [-100, 2, 2]))) == 3


def test_touching_intervals_are_one() -> None:
    assert merged(np.array([[0.0, 1.0], [1.0, 2.0]])).tolist() == [[0, 2]]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e3)), min_size=1, max_size=60))
def test_what_is_busy_is_within_the_wall(pairs: list[tuple[float, float]]) -> None:
    spans = intervals([start for start, _ in pairs], [duration for _, duration in pairs])
    found = merged(spans)
    wall = float(spans[:, 1].max() - spans[:, 0].min())
    assert length(found) <= wall * (1 + 1e-12)
    parts = partition(float(spans[0, 0]), float(spans[:, 1].max()), [("busy", found)], "idle")
    assert sum(parts.values()) == pytest.approx(float(spans[:, 1].max() - spans[0, 0]), abs=1e-6)
    assert min(parts.values()) >= 0
