"""Stage 3: from device time to operator calls to nodes of the captured graphs, each link with its provenance.

The annotated step says which node a forward operator belongs to, because operators nest under ranges named
`advisor::<graph>::<node>`. The profiled steps say how long things take. They are joined by the order in which equal
calls occur; backward operators follow by the autograd sequence number of the forward operator that created them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from advisor.model import Graph, Kernels, NodeCost, Operators

NODE_RANGE = re.compile(r"^advisor::(\d+)::(.+)$")
ACCUMULATE = "torch::autograd::AccumulateGrad"
LINKABLE = frozenset({"forward", "backward", "optimizer"})
CALLED = frozenset({"forward", "other"})  # phases in which the program makes calls that can be nodes


class Recorded(Protocol):
    """What this stage needs of a trace: columns in time order, times in microseconds."""

    @property
    def operators(self) -> Operators: ...
    @property
    def kernels(self) -> Kernels: ...
    @property
    def ranges(self) -> Sequence[tuple[str, float, float, int]]: ...  # name, start, duration, thread
    @property
    def launches(self) -> Mapping[int, tuple[float, int]]: ...  # correlation -> start, thread
    @property
    def steps(self) -> Sequence[tuple[int, float, float]]: ...  # index, start, end
    @property
    def operator_phase(self) -> Sequence[str]: ...
    @property
    def kernel_phase(self) -> Sequence[str]: ...
    @property
    def outermost(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """Where the time of the profiled steps belongs.

    `costs` has one entry per node that owns time, in graph order. `operator_cost` gives, for each operator row, its
    place in `costs` or -1, `operator_node` its node (graph, node), also one that owns no time; `executions` says how
    often a step runs each of the nodes. `shares_us` sums the time per step by how it was linked: forward, backward,
    other (after the backward pass, such as clipping: what is linked of it), optimizer, unlinked. `linked_share` is all
    but the last over all of it, None when nothing was recorded. `missing` says why links are absent.
    """

    costs: tuple[NodeCost, ...]
    linked_share: float | None
    operator_cost: tuple[int, ...]
    operator_node: tuple[tuple[int, int] | None, ...]
    executions: tuple[int, ...]
    shares_us: Mapping[str, float]
    missing: Mapping[str, str] = field(default_factory=dict)


class _Link(NamedTuple):
    node: tuple[int, int]  # graph, node
    how: str  # nesting, occurrence, sequence


class _Piece(NamedTuple):
    """A stretch of time to be owned: a device activity, or on a CPU-only run an outermost operator call."""

    row: int  # operator row, -1 for an activity launched outside any operator
    kernel: int  # kernel row, -1 on a CPU-only run
    phase: str
    time_us: float


def correlate(trace: Recorded, annotated: Recorded, graphs: Sequence[Graph]) -> Correlation:
    """Link the time of `trace` (un-annotated profiled steps) to graph nodes by way of `annotated` (one step).

    Passing the annotated trace as both links by nesting alone. Times are microseconds per step, means over the profiled
    steps. On a GPU they are kernel durations, reached by launch, enclosing operator, node; without kernels they are the
    durations of outermost operator calls. Linear in the number of events apart from sorting.
    """
    named = {(g.index, node.name): (g.index, node.index) for g in graphs for node in g.nodes}
    nested = _Nesting(annotated, named)
    operators = _forward_links(trace, annotated, nested)
    operators |= _backward_links(trace, operators)
    loose = _kernel_links(trace, annotated, nested)
    steps = max(1, len(trace.steps))
    costs, shares = _add_up(_pieces(trace), operators, loose, steps)
    order = {cost: place for place, cost in enumerate(sorted(costs))}
    total = sum(shares.values())
    return Correlation(
        costs=tuple(costs[key] for key in order),
        linked_share=1 - shares["unlinked"] / total if total > 0 else None,
        operator_cost=tuple(order.get(operators[row].node, -1) if row in operators else -1 for row in trace.outermost),
        operator_node=tuple(operators[row].node if row in operators else None for row in trace.outermost),
        executions=tuple(nested.executions.get(key, 1) for key in order),
        shares_us=shares,
        missing=_missing(graphs, nested, operators),
    )


def _missing(graphs: Sequence[Graph], nested: _Nesting, operators: Mapping[int, _Link]) -> dict[str, str]:
    if not graphs:
        return {"links": "no graph was captured, so no time can be given to a source line"}
    if not nested:
        return {"links": "the annotated step names no node of the captured graphs: record the run again"}
    if not operators:
        return {"links": "no operator of the profiled steps occurs in the annotated step: is the model compiled?"}
    return {}


# ------------------------------------------------------------------------------------------------------ annotated step


class _Nesting:
    """The node whose range encloses a moment of a thread in the annotated step."""

    def __init__(self, annotated: Recorded, named: Mapping[tuple[int, str], tuple[int, int]]) -> None:
        self._nodes: dict[int, list[tuple[float, float, tuple[int, int]]]] = {}
        self.executions: dict[tuple[int, int], int] = {}
        for name, start, duration, thread in annotated.ranges:
            match = NODE_RANGE.match(name)
            node = named.get((int(match[1]), match[2])) if match else None
            if node is not None:
                self._nodes.setdefault(thread, []).append((start, start + duration, node))
                self.executions[node] = self.executions.get(node, 0) + 1
        self._starts = {thread: np.array([item[0] for item in items]) for thread, items in self._nodes.items()}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def at(self, thread: int, time_us: float) -> tuple[int, int] | None:
        items = self._nodes.get(thread)
        if items is None:
            return None
        place = int(np.searchsorted(self._starts[thread], time_us, side="right")) - 1
        return items[place][2] if place >= 0 and time_us < items[place][1] else None


# --------------------------------------------------------------------------------------------------------------- links


def _outer_calls(trace: Recorded) -> Iterator[int]:
    """Rows of outermost calls the program makes itself, before the backward pass or after it.

    Calls inside data loading, the optimizer or the backward pass do not count.
    """
    for row, parent in enumerate(trace.operators.parent):
        if parent < 0 and trace.operator_phase[row] in CALLED:
            yield row


Key: TypeAlias = tuple[object, ...]
KeyFunction: TypeAlias = Callable[[Operators, int], Key]


def _exact(operators: Operators, row: int) -> Key:
    return operators.name[row], operators.shapes[row], operators.dtypes[row]


def _by_rank(operators: Operators, row: int) -> Key:
    """The call without its sizes, for batches whose lengths differ from step to step."""
    return operators.name[row], tuple(len(shape) for shape in operators.shapes[row]), operators.dtypes[row]


def _forward_links(trace: Recorded, annotated: Recorded, nested: _Nesting) -> dict[int, _Link]:
    """Outermost rows of `trace` that the program called -> node.

    The k-th call of a kind in a profiled step is the k-th call of that kind in the annotated step, before the backward
    pass as after it. Kinds are compared with their sizes first, without them for what is left; a kind that occurs
    unequally often stays unlinked, because its order then says nothing.
    """
    own = annotated.operators
    nodes = {row: nested.at(own.thread[row], own.start_us[row]) for row in _outer_calls(annotated)}
    if trace is annotated:
        return {row: _Link(node, "nesting") for row, node in nodes.items() if node is not None}
    found: dict[int, _Link] = {}
    rows_of: dict[int, list[int]] = {}
    for row in _outer_calls(trace):
        if trace.operators.step[row] >= 0 or not trace.steps:
            rows_of.setdefault(trace.operators.step[row], []).append(row)
    for rows in rows_of.values():
        left, model = rows, list(nodes)
        passes = _passes(_kinds(trace, left, _by_rank), _kinds(annotated, model, _by_rank))
        for key in (_exact, _by_rank):
            pairs = _pair(_kinds(trace, left, key), _kinds(annotated, model, key), passes)
            for row, other in pairs.items():
                node = nodes[other]
                if node is not None:
                    found[row] = _Link(node, "occurrence")
            used = set(pairs.values())
            left = [row for row in left if row not in pairs]
            model = [row for row in model if row not in used]
    return found


def _kinds(trace: Recorded, rows: Sequence[int], key: KeyFunction) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for row in rows:
        found.setdefault((trace.operator_phase[row], *key(trace.operators, row)), []).append(row)
    return found


def _pair(here: Mapping[Key, list[int]], there: Mapping[Key, list[int]], passes: int) -> dict[int, int]:
    """Rows of two steps that are the same call: equal keys in the same phase, occurring equally often, in order.

    A step that makes several forward `passes`, as where a loop skips its update, has its calls so many times as often:
    the passes are paired one after another.
    """
    return {
        row: there[kind][place % len(there[kind])]
        for kind, mine in here.items()
        if kind in there and len(mine) in (len(there[kind]), passes * len(there[kind]))
        for place, row in enumerate(mine)
    }


def _passes(here: Mapping[Key, list[int]], there: Mapping[Key, list[int]]) -> int:
    """How many times as often as in the other step forward calls occur; one where under three in four kinds agree.

    What a loop does once in a step, such as keeping its loss, has one call whatever the number of passes.
    """
    ratios = [len(rows) / len(there[kind]) for kind, rows in here.items() if kind in there and kind[0] == "forward"]
    passes = max(sorted(set(ratios)), key=ratios.count, default=1.0)
    return int(passes) if passes.is_integer() and 4 * ratios.count(passes) >= 3 * len(ratios) else 1


def _backward_links(trace: Recorded, forward: Mapping[int, _Link]) -> dict[int, _Link]:
    """Outermost backward rows -> node, through the sequence number both passes carry.

    Several forward calls can carry one number: outer calls, and calls that created no gradient function before the one
    that did. The last of them is the creator. A gradient accumulator has no number; autograd runs it right after the
    function that produced the gradient, so it goes with that one.
    """
    operators = trace.operators
    creator: dict[int, int] = {}
    for row, number in enumerate(operators.sequence):
        if number >= 0 and trace.operator_phase[row] != "backward":
            creator[number] = trace.outermost[row]
    found: dict[int, _Link] = {}
    latest: dict[int, _Link | None] = {}
    for row, outer in enumerate(trace.outermost):
        if trace.operator_phase[row] != "backward":
            continue
        if operators.forward_thread[row] and operators.sequence[row] >= 0:
            link = forward.get(creator.get(operators.sequence[row], -1))
            if link is not None and outer not in found:
                found[outer] = _Link(link.node, "sequence")
            if row == outer:
                latest[operators.thread[row]] = found.get(outer)
        elif row == outer and operators.name[row].endswith(ACCUMULATE):
            before = latest.get(operators.thread[row])
            if before is not None:
                found[outer] = before
    return found


def _kernel_links(trace: Recorded, annotated: Recorded, nested: _Nesting) -> dict[int, _Link]:
    """Kernel rows launched outside any operator -> node, by the order in which kernels of one name occur."""
    nodes: dict[str, list[tuple[int, int] | None]] = {}
    for row in _loose(annotated):
        start, thread = annotated.launches[annotated.kernels.correlation[row]]
        nodes.setdefault(annotated.kernels.name[row], []).append(nested.at(thread, start))
    rows_of: dict[tuple[int, str], list[int]] = {}
    for row in _loose(trace):
        rows_of.setdefault((trace.kernels.step[row], trace.kernels.name[row]), []).append(row)
    how = "nesting" if trace is annotated else "occurrence"
    return {
        row: _Link(node, how)
        for (_, name), rows in rows_of.items()
        if len(rows) == len(nodes.get(name, ()))
        for row, node in zip(rows, nodes[name], strict=True)
        if node is not None
    }


def _loose(trace: Recorded) -> list[int]:
    """Forward activities with a launch but no operator, in launch order."""
    found = [
        row
        for row, operator in enumerate(trace.kernels.operator)
        if operator < 0 and trace.kernel_phase[row] == "forward" and trace.kernels.correlation[row] in trace.launches
    ]
    return sorted(found, key=lambda row: trace.launches[trace.kernels.correlation[row]])


# ---------------------------------------------------------------------------------------------------------------- time


def _pieces(trace: Recorded) -> Iterator[_Piece]:
    """The time of the profiled steps, or of the whole window when it has no steps."""
    kernels, operators = trace.kernels, trace.operators
    if len(kernels):
        for row, operator in enumerate(kernels.operator):
            if kernels.step[row] >= 0 or (not trace.steps and kernels.correlation[row] in trace.launches):
                outer = trace.outermost[operator] if operator >= 0 else -1
                yield _Piece(outer, row, trace.kernel_phase[row], kernels.duration_us[row])
        return
    for row, parent in enumerate(operators.parent):
        if parent < 0 and (operators.step[row] >= 0 or not trace.steps):
            yield _Piece(row, -1, trace.operator_phase[row], operators.duration_us[row])


@dataclass
class _Tally:
    forward_us: float = 0.0
    backward_us: float = 0.0
    launches: int = 0
    how: set[str] = field(default_factory=set)


def _add_up(
    pieces: Iterator[_Piece], operators: Mapping[int, _Link], loose: Mapping[int, _Link], steps: int
) -> tuple[dict[tuple[int, int], NodeCost], dict[str, float]]:
    """Cost per node and time per kind of link, both per step. Data loading, copies and clean-up are no part of it."""
    tallies: dict[tuple[int, int], _Tally] = {}
    shares = {"forward": 0.0, "backward": 0.0, "other": 0.0, "optimizer": 0.0, "unlinked": 0.0}
    for piece in pieces:
        link = operators.get(piece.row) if piece.row >= 0 else loose.get(piece.kernel)
        if piece.phase not in LINKABLE and (piece.phase != "other" or link is None):
            continue
        if piece.phase == "optimizer":
            shares["optimizer"] += piece.time_us / steps
        elif link is None:
            shares["unlinked"] += piece.time_us / steps
        else:
            tally = tallies.setdefault(link.node, _Tally())
            tally.launches += 1
            tally.how.add(link.how)
            if piece.phase == "backward":
                tally.backward_us += piece.time_us
            else:
                tally.forward_us += piece.time_us
            shares[piece.phase] += piece.time_us / steps
    costs = {
        node: NodeCost(
            graph=node[0],
            node=node[1],
            forward_us=tally.forward_us / steps,
            backward_us=tally.backward_us / steps,
            launches=tally.launches / steps,
            provenance=", ".join(sorted(tally.how)),
        )
        for node, tally in tallies.items()
    }
    return costs, shares
