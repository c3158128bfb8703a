"""The graph of a step and its longest paths, for recorded and for reduced durations of activities.

A node is a moment of a host thread, or the start of an activity that something besides its stream waits for. The
activities between two such nodes of one stream form a chain. Their launches, however many, act on the node as the
largest of "from the launch through everything behind it in the chain": the graph stays small and loses nothing.

The host and every stream begin a step when they have ended the one before. A step that repeats takes as long as the
largest mean of the cycles of such begins and ends, the eigenvalue of their max-plus matrix (Baccelli, Cohen, Olsder and
Quadrat, "Synchronization and Linearity", 1992, chapter 3). The cycle tells what sets the pace: the host where the
device waits for it, a stream where the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.columns.table import Floats, Ints
from advisor.metrics.devicewaits import NOTHING, Waits
from advisor.metrics.hostwaits import AFTER, EARLIER, HOST, SINCE, Host
from advisor.metrics.stepwork import Window, Work

LIMIT = 100_000  # nodes: a graph of plain Python objects takes about 0.3 s there


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a path, in microseconds.

    `kind` is activity (its place in `activity`), host (`thread` works from `begin` to `end`), launch (from a launch to
    the start), sync (from the end of an activity until the host goes on, or a call that need not wait) or idle (the
    device waits for nothing known). `length` is what the piece adds to the path.
    """

    kind: str
    length: float
    activity: int = -1
    thread: int = -1
    begin: float = 0.0
    end: float = 0.0


class _Edge(NamedTuple):
    """From node to node: `constant` of a kind, the duration of activity `after`, the chain from `start` to `stop`.

    Of host time the last `entry` microseconds belong to a call that need not wait. `activity` ran during a constant of
    that kind.
    """

    source: int
    target: int
    constant: float
    kind: str
    thread: int = -1
    entry: float = 0.0
    activity: int = -1
    after: int = -1
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launches:
    """Edges from host moments to chains: `first` cuts the activities of each edge out of `place`, `offset` is the time
    from the moment to the start of the activity, `stop` the last activity of the chain."""

    source: Ints
    target: Ints
    stop: Ints
    first: Ints
    place: Ints
    offset: Floats


@dataclass(frozen=True, slots=True)
class _Times:
    """Weights of all edges, and for each node (rows) the longest path from each begin (columns)."""

    weights: list[float]
    reached: Floats


class Schedule:
    """Activities, host moments and what they wait for, as a graph from the begins of a step to its ends.

    `main` is the thread whose step it is, None where no host is recorded; it ends with the window. What does not repeat
    lasts from the begin of the window to the end of the last work.
    """

    def __init__(self, work: Work, host: Host, waits: Waits, window: Window, main: int | None, repeats: bool) -> None:
        self.work, self.host, self.waits = work, host, waits
        self._window, self._main, self._repeats = window, main, repeats
        self._tail = np.flatnonzero(_tails(work, host, waits))
        self._chain = np.searchsorted(self._tail, np.arange(len(work)))  # number of the chain of each activity
        streams = len(work.earlier)
        self._stream = len(host.moments)  # node of the first stream's begin; moment 0 is the begin of the host
        self._first = self._stream + streams  # node of the first chain
        self._end = self._first + len(self._tail)  # node of the host's end; those of the streams follow
        self.nodes = self._end + 1 + streams
        if self.fits:
            self._build()

    @property
    def fits(self) -> bool:
        """Whether the graph is small enough to be searched."""
        return self.nodes <= LIMIT

    def length_us(self, durations: Floats | None = None) -> float:
        """Microseconds that the step takes when its activities take `durations` (default: as recorded)."""
        return self._longest(self._recorded if durations is None else self._times(durations))[0]

    def path(self) -> list[Piece]:
        """The pieces of the recorded critical path in order; their lengths sum to that of the step.

        Of a cycle over several steps the pieces of all are there with their share of the length.
        """
        _, ways = self._longest(self._recorded)
        found = [piece for begin, end in ways for piece in self._way(begin, end)]
        return [replace(piece, length=piece.length / len(ways)) for piece in found] if len(ways) > 1 else found

    # ---------------------------------------------------------------------------------------------------- longest paths

    @cached_property
    def _recorded(self) -> _Times:
        return self._times(self.work.duration)

    @cached_property
    def _recorded_advances(self) -> Floats:
        return self._advances(self.work.duration)

    @cached_property
    def _recorded_path(self) -> Floats:
        return _summed(self._recorded_advances)

    def _times(self, taken: Floats) -> _Times:
        weights = self._weights(taken, _summed(self._advances(taken)))
        reached = np.full((self.nodes, self._first - self._stream + 1), -np.inf)
        reached[0, 0] = 0.0
        reached[self._stream + np.arange(self._first - self._stream), np.arange(1, reached.shape[1])] = 0.0
        rows = list(reached)
        for source, target, weight in zip(self._source, self._target, weights, strict=True):
            np.maximum(rows[target], rows[source] + weight, out=rows[target])
        return _Times(weights, reached)

    def _longest(self, times: _Times) -> tuple[float, list[tuple[int, int]]]:
        """The length of the step, and the ways (begin, end) that it consists of."""
        ends = times.reached[self._end :]
        if self._repeats:
            mean, cycle = largest_cycle_mean(ends.T)
            return mean, list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        end = int(np.argmax(ends[:, 0]))
        return float(ends[end, 0]), [(0, end)]

    def _advances(self, taken: Floats) -> Floats:
        """Microseconds from the start of each activity to that of the next on its stream, if that waits for it alone.

        Activities of one stream may overlap a little (programmatic dependent launch). One that begins before half of
        the one before it is over does not wait for its end.
        """
        work = self.work
        if not len(work):
            return np.zeros(0)
        gap = np.append(self.waits.gap[1:], np.nan)
        beside = gap < -work.duration / 2
        apart = np.append(work.begin[1:] - work.begin[:-1], np.nan)
        return np.nan_to_num(np.where(beside, apart, np.maximum(0.0, taken + gap)))

    def _weights(self, taken: Floats, path: Floats) -> list[float]:
        launches = self._launches
        weights = self._constant + np.append(taken, 0.0)[self._after] + path[self._stop] - path[self._start]
        if len(launches.first):
            longest = np.maximum.reduceat(launches.offset - path[launches.place], launches.first)
            weights = np.concatenate((weights, longest + path[launches.stop]))
        found: list[float] = weights[self._order].tolist()
        return found

    # ----------------------------------------------------------------------------------------------------- construction

    def _build(self) -> None:
        """Make the graph. It has no cycles: what waits begins later, and what a call of the host waits for was launched
        before it, as was everything in front of that on its stream."""
        import networkx as nx  # type: ignore[import-untyped]  # its import takes 0.3 s

        self._edges: list[_Edge] = [*self._host_edges(), *self._chain_edges(), *self._event_edges(), *self._end_edges()]
        self._constant = np.array([edge.constant for edge in self._edges], dtype=np.float64)
        columns = [
            [getattr(edge, name) for edge in self._edges] for name in ("source", "target", "after", "start", "stop")
        ]
        source, target, self._after, self._start, self._stop = np.array(columns, dtype=np.int64)
        self._launches = self._launch_edges()
        source = np.concatenate((source, self._launches.source))
        target = np.concatenate((target, self._launches.target))
        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.nodes))
        graph.add_edges_from(zip(source.tolist(), target.tolist(), strict=True))
        rank = np.empty(self.nodes, dtype=np.int64)
        rank[list(nx.topological_sort(graph))] = np.arange(self.nodes)
        self._order = np.argsort(rank[target], kind="stable")
        self._source, self._target = source[self._order].tolist(), target[self._order].tolist()
        self._into: dict[int, list[int]] = {}
        for number, node in enumerate(self._target):
            self._into.setdefault(node, []).append(number)

    def _node(self, activity: int) -> int:
        return self._first + int(self._chain[activity])

    def _host_edges(self) -> Iterator[_Edge]:
        for target, moment in enumerate(self.host.moments):
            for reason in moment.reasons:
                place, delay = reason.place, reason.delay
                if reason.kind == HOST:
                    yield _Edge(place, target, delay, "host", reason.thread, reason.entry)
                elif reason.kind == EARLIER:
                    yield _Edge(self._stream + place, target, delay, "sync")
                elif reason.kind == AFTER:
                    yield _Edge(self._node(place), target, delay, "sync", after=place)
                else:
                    yield _Edge(self._node(place), target, delay, "activity", activity=place)

    def _chain_edges(self) -> Iterator[_Edge]:
        """From chain to chain on one stream, and to the first of each stream from the work before the step."""
        work, waits = self.work, self.waits
        head = 0
        for tail in self._tail.tolist():
            stream = int(work.stream[head])
            if head > 0 and work.stream[head - 1] == stream:
                yield _Edge(self._node(head - 1), self._node(tail), 0.0, "idle", start=head - 1, stop=tail)
            elif self._repeats:
                delay = 0.0 if np.isnan(work.earlier[stream]) else float(waits.gap[head])
                yield _Edge(self._stream + stream, self._node(tail), delay, "idle", start=head, stop=tail)
            elif waits.released[head] == NOTHING:
                delay = float(work.begin[head]) - self._window[0]
                yield _Edge(0, self._node(tail), delay, "idle", start=head, stop=tail)
            head = tail + 1

    def _event_edges(self) -> Iterator[_Edge]:
        for producer, consumer, delay in self.waits.events:
            node, tail = self._node(consumer), int(self._tail[self._chain[consumer]])
            source = self._node(producer) if producer >= 0 else self._stream - 1 - producer
            yield _Edge(source, node, delay, "idle", after=max(producer, -1), start=consumer, stop=tail)

    def _end_edges(self) -> Iterator[_Edge]:
        if self._main is not None:
            place = self.host.last(self._main, self._window[1])
            delay = self._window[1] - self.host.moments[place].time
            yield _Edge(place, self._end, delay, "host", self._main)
        for stream, places in enumerate(self.work.streams()):
            last = places.stop - 1
            yield _Edge(self._node(last), self._end + 1 + stream, 0.0, "idle", after=last)

    def _launch_edges(self) -> _Launches:
        place = np.flatnonzero(self.waits.moment >= 0)
        moment, chain = self.waits.moment[place], self._chain[place]
        order = np.lexsort((place, moment, chain))
        place, moment, chain = place[order], moment[order], chain[order]
        new = (chain[1:] != chain[:-1]) | (moment[1:] != moment[:-1])
        first = np.flatnonzero(np.concatenate(([True], new))) if len(place) else np.zeros(0, dtype=np.int64)
        times = np.array([item.time for item in self.host.moments])
        return _Launches(
            source=moment[first],
            target=self._first + chain[first],
            stop=self._tail[chain[first]],
            first=first,
            place=place,
            offset=self.work.launched[place] - times[moment] + self.waits.launch_delay[place],
        )

    # --------------------------------------------------------------------------------------------------------- the path

    def _way(self, begin: int, end: int) -> list[Piece]:
        """The pieces of the longest way from a begin to an end, in order."""
        times = self._recorded
        reached = times.reached[:, begin].tolist()
        source, node = 0 if begin == 0 else self._stream + begin - 1, self._end + end
        parts: list[list[Piece]] = []
        while node != source:
            edge = max(self._into[node], key=lambda number: reached[self._source[number]] + times.weights[number])
            parts.append(self._pieces(int(self._order[edge])))
            node = self._source[edge]
        return [piece for part in reversed(parts) for piece in part if piece.length]

    def _pieces(self, number: int) -> list[Piece]:
        """What an edge consists of."""
        if number >= len(self._edges):
            return self._launch_pieces(number - len(self._edges))
        edge = self._edges[number]
        pieces = [Piece("activity", float(self.work.duration[edge.after]), edge.after)] if edge.after >= 0 else []
        own = edge.constant - edge.entry
        begin = self.host.moments[edge.source].time if edge.kind == "host" else 0.0
        pieces.append(Piece(edge.kind, own, edge.activity, edge.thread, begin, begin + own))
        pieces.append(Piece("sync", edge.entry))
        return pieces + self._chain_pieces(edge.start, edge.stop)

    def _launch_pieces(self, number: int) -> list[Piece]:
        """The launch that mattered for a chain: what its thread did before, the delay, what ran since."""
        launches = self._launches
        bounds = np.append(launches.first, len(launches.place))
        places = launches.place[bounds[number] : bounds[number + 1]]
        path = self._recorded_path[places]
        activity = int(places[np.argmax(launches.offset[bounds[number] : bounds[number + 1]] - path)])
        since = self.host.moments[int(launches.source[number])].time
        launched, thread = float(self.work.launched[activity]), int(self.work.thread[activity])
        return [
            Piece("host", launched - since, -1, thread, since, launched),
            Piece("launch", float(self.waits.launch_delay[activity])),
            *self._chain_pieces(activity, int(launches.stop[number])),
        ]

    def _chain_pieces(self, start: int, stop: int) -> list[Piece]:
        """Activities from `start` up to the start of `stop`, and the gaps between them."""
        durations = self.work.duration[start:stop]
        advances = self._recorded_advances[start:stop]
        pieces = []
        for activity, (advance, ran) in enumerate(zip(advances.tolist(), durations.tolist(), strict=True), start):
            pieces.append(Piece("activity", min(advance, ran), activity))
            pieces.append(Piece("idle", max(0.0, advance - ran)))
        return pieces


def largest_cycle_mean(matrix: Floats) -> tuple[float, list[int]]:
    """The largest mean weight of the cycles of a square matrix (from row to column, -inf for no way), and that cycle.

    Karp's algorithm (R. M. Karp, "A characterization of the minimum cycle mean in a digraph", 1978) from all nodes at
    once. Without a cycle the mean is -inf and the cycle empty.
    """
    size = len(matrix)
    longest = np.full((size + 1, size), -np.inf)
    before = np.zeros((size + 1, size), dtype=np.int64)
    longest[0] = 0.0
    for steps in range(1, size + 1):
        ways = longest[steps - 1][:, None] + matrix
        before[steps], longest[steps] = np.argmax(ways, axis=0), ways.max(axis=0)
    if np.isinf(longest[size]).all():
        return -np.inf, []
    with np.errstate(invalid="ignore"):
        means = (longest[size] - longest[:size]) / np.arange(size, 0, -1)[:, None]
    least = np.where(np.isinf(longest[size]), -np.inf, np.where(np.isinf(longest[:size]), np.inf, means).min(axis=0))
    node = int(np.argmax(least))
    walk = [node]
    for steps in range(size, 0, -1):
        walk.append(int(before[steps, walk[-1]]))
    first = next(place for place in range(len(walk)) if walk[place] in walk[:place])
    again = walk.index(walk[first])
    return float(least[node]), walk[again:first][::-1]


def _summed(advances: Floats) -> Floats:
    """Microseconds from the start of the first activity of all to that of each, as far as streams go."""
    return np.concatenate(([0.0], np.cumsum(advances)))


def _tails(work: Work, host: Host, waits: Waits) -> npt.NDArray[np.bool_]:
    """For each activity whether something besides the next one of its stream may wait for it."""
    found = np.zeros(len(work), dtype=bool)
    for places in work.streams():
        found[places.stop - 1] = True
    for moment in host.moments:
        found[[reason.place for reason in moment.reasons if reason.kind in (AFTER, SINCE)]] = True
    for producer, consumer, _ in waits.events:
        if producer >= 0:
            found[producer] = True
        if consumer > 0:
            found[consumer - 1] = True
    return found
