"""Arithmetic of intervals of time: unions, intersections, what one set leaves of another.

Intervals are rows of an array [n, 2] with start and end in one unit. "Disjoint" means in order and without overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.float64]
NO_INTERVALS: Intervals = np.empty((0, 2))


def intervals(start: npt.ArrayLike, duration: npt.ArrayLike) -> Intervals:
    """Intervals from starts and durations; a negative duration, which a damaged trace may hold, counts as none."""
    begin = np.asarray(start, dtype=np.float64).reshape(-1)
    return np.column_stack((begin, begin + np.maximum(np.asarray(duration, dtype=np.float64).reshape(-1), 0.0)))


def merged(found: Intervals) -> Intervals:
    """The union of intervals as disjoint ones in order."""
    if len(found) == 0:
        return NO_INTERVALS
    ordered = found[np.argsort(found[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    opens = np.concatenate(([True], ordered[1:, 0] > reach[:-1]))
    last = np.concatenate((np.flatnonzero(opens)[1:] - 1, [len(ordered) - 1]))
    return np.column_stack((ordered[opens, 0], reach[last]))


def length(disjoint: Intervals) -> float:
    """Sum of the lengths."""
    return float((disjoint[:, 1] - disjoint[:, 0]).sum())


def clipped(disjoint: Intervals, begin: float, end: float) -> Intervals:
    """The part of disjoint intervals that lies in a window."""
    first = int(np.searchsorted(disjoint[:, 1], begin, side="right"))
    last = int(np.searchsorted(disjoint[:, 0], end, side="left"))
    return np.clip(disjoint[first : max(first, last)], begin, end)


def without(disjoint: Intervals, other: Intervals) -> Intervals:
    """What two disjoint sets leave: the moments of the first that the second does not cover."""
    if not len(disjoint) or not len(other):
        return disjoint
    inside = intersection(disjoint, complement(other, float(disjoint[0, 0]), float(disjoint[-1, 1])))
    return inside


def complement(disjoint: Intervals, begin: float, end: float) -> Intervals:
    """The gaps of a disjoint set in a window."""
    cut = clipped(disjoint, begin, end)
    edges = np.concatenate(([begin], cut.reshape(-1), [end])).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def intersection(disjoint: Intervals, other: Intervals) -> Intervals:
    """The moments that two disjoint sets both cover, as a disjoint set."""
    if not len(disjoint) or not len(other):
        return NO_INTERVALS
    first = np.searchsorted(other[:, 1], disjoint[:, 0], side="right")
    last = np.searchsorted(other[:, 0], disjoint[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(disjoint)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + offsets
    begin = np.maximum(disjoint[mine, 0], other[theirs, 0])
    end = np.minimum(disjoint[mine, 1], other[theirs, 1])
    kept = end > begin
    return np.column_stack((begin[kept], end[kept]))


def covered(disjoint: Intervals, begin: npt.ArrayLike, end: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """For many windows at once the length that a disjoint set covers in each."""
    lengths = np.concatenate(([0.0], np.cumsum(disjoint[:, 1] - disjoint[:, 0])))

    def until(moment: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        place = np.searchsorted(disjoint[:, 0], moment, side="right")
        behind = np.maximum(place - 1, 0)
        if not len(disjoint):
            return np.zeros(len(moment))
        over = np.maximum(0.0, disjoint[behind, 1] - moment)
        return np.where(place > 0, lengths[place] - over, 0.0)

    first, last = np.asarray(begin, dtype=np.float64), np.asarray(end, dtype=np.float64)
    return np.maximum(0.0, until(np.atleast_1d(last)) - until(np.atleast_1d(first)))


def partition(begin: float, end: float, layers: Iterable[tuple[str, Intervals]], rest: str) -> dict[str, float]:
    """Split a window into phases: a moment belongs to the first layer that covers it, else to `rest`.

    The intervals of a layer are disjoint and in order; `rest` may have a layer, too, and stands last.
    """
    cover, reached, parts = NO_INTERVALS, 0.0, {}
    for name, found in layers:
        cover = merged(np.concatenate((cover, clipped(found, begin, end))))
        total = length(cover)
        parts[name], reached = max(0.0, total - reached), total
    parts[rest] = parts.pop(rest, 0.0) + max(0.0, end - begin - reached)
    return parts
