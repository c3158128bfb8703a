"""What bounds a node, an operator family or a source line: the least time its arithmetic and its traffic can take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from advisor.model import Graph, Hardware, Kernels, Node, NodeCost, Operators, OptimizerUse, Profile, Region, Span

LINES = 12  # source lines listed as regions
# Families whose floor does not follow from one call alone.
NO_FLOOR = frozenset({"communication", "host copies", "optimizer", "autograd", "view", "custom", "other"})
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "complex64": 8}
FASTER = {  # why a measured time is shorter than its floor
    "compute": "the device computes faster than the floor assumes, or leaves out part of the counted operations",
    "memory": "its data moves faster than the memory bandwidth the floor assumes, as it does from a cache",
}
STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1, "SGD": 0}


class Arithmetic(Protocol):
    """Operations of one call: needed by the maths, run by the call, with causal attention halved, in a floor."""

    @property
    def family(self) -> str: ...
    @property
    def model(self) -> float: ...
    @property
    def executed(self) -> float: ...
    @property
    def causal(self) -> float | None: ...
    @property
    def least(self) -> float: ...


class OptimizerTimes(Protocol):
    """Time per step by optimizer class."""

    @property
    def optimizer_us(self) -> Mapping[str, float]: ...


class Recorded(Protocol):
    """What floors and regions need of a trace: columns in time order, times in microseconds."""

    @property
    def operators(self) -> Operators: ...
    @property
    def kernels(self) -> Kernels: ...
    @property
    def steps(self) -> Sequence[tuple[int, float, float]]: ...  # index, start, end
    @property
    def operator_phase(self) -> Sequence[str]: ...
    @property
    def work(self) -> Mapping[int, Arithmetic]: ...
    @property
    def least_bytes(self) -> Sequence[float | None]: ...
    @property
    def working(self) -> Sequence[int]: ...  # rows that do something themselves
    @property
    def units(self) -> Sequence[tuple[str, int, float]]: ...  # family, operator row or -1, time
    @property
    def timeline(self) -> OptimizerTimes: ...


# ---------------------------------------------------------------------------------------------------------------- rates


class Machine:
    """The device's rates: dense datasheet peaks where they are known, else what the run measured."""

    def __init__(self, profile: Profile) -> None:
        self.hardware: Hardware = profile.hardware
        flags = profile.facts
        cuda = self.hardware.kind == "cuda"
        self._tf32 = {
            "matmul": cuda and flags.get("matmul_precision", "highest") != "highest",
            **dict.fromkeys(("convolution", "recurrent"), cuda and bool(flags.get("cudnn_tf32", True))),
        }

    def ran_in(self, dtype: str, family: str) -> str:
        """The arithmetic an input dtype was computed in: float32 products may run as tfloat32."""
        return "tfloat32" if dtype == "float32" and self._tf32.get(family) else dtype

    def measured(self, dtype: str) -> float | None:
        """FLOP/s of a large product in this run; float32 was measured under the script's own precision setting."""
        found = self.hardware.measured_flops
        return found.get(dtype) or (found.get("float32") if dtype == "tfloat32" and self._tf32["matmul"] else None)

    def rate(self, dtype: str) -> float | None:
        """FLOP/s to hold a floor against: the dense datasheet peak, else what was measured."""
        return self.hardware.peak_flops.get(dtype) or self.measured(dtype)

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s to hold a floor against."""
        return self.hardware.hbm_bandwidth or self.hardware.measured_bandwidth

    def compute_us(self, flops: Mapping[str, float]) -> float | None:
        """Least time for operations by dtype; None where a dtype's rate is unknown."""
        rates = {dtype: self.rate(dtype) for dtype in flops}
        if not all(rates.values()):
            return None
        return sum(count / (rates[dtype] or math.inf) for dtype, count in flops.items()) * 1e6

    def memory_us(self, traffic: float) -> float | None:
        """Least time to move so many bytes."""
        return traffic / self.bandwidth * 1e6 if self.bandwidth else None


class Floor(NamedTuple):
    """A physical lower bound in microseconds and what sets it: compute or memory."""

    time_us: float
    bound: str


def roofline(compute_us: float | None, memory_us: float | None) -> Floor | None:
    """max(FLOPs / peak, bytes / bandwidth); one of them alone is still a lower bound."""
    known = [Floor(t, b) for t, b in ((compute_us, "compute"), (memory_us, "memory")) if t is not None]
    return max(known, key=lambda floor: floor.time_us, default=None)


def dtype_of(trace: Recorded, row: int, machine: Machine) -> str:
    """The arithmetic a counted call ran in, by its first floating-point input; unknown where it has none."""
    dtypes = trace.operators.dtypes[row]
    first = next((dtype for dtype in dtypes if dtype.startswith(("float", "bfloat", "complex"))), "unknown")
    return machine.ran_in(first, trace.work[row].family)


# -------------------------------------------------------------------------------------------------------------- traffic


def _elements(node: Node) -> int:
    """Distinct elements of a node's value; a dimension of stride 0 repeats what is there."""
    if node.shape is None:
        return 0
    strides = node.stride if node.stride is not None and len(node.stride) == len(node.shape) else (1,) * len(node.shape)
    return math.prod(size for size, stride in zip(node.shape, strides, strict=True) if stride != 0)


def _bytes(node: Node) -> float:
    return float(_elements(node) * BYTES.get(node.dtype or "", 1))


def boundary_bytes(graph: Graph, inside: frozenset[int]) -> float:
    """Bytes that nodes taken as one must move at least: what they read from outside and what is used outside, once."""
    read = {index for member in inside for index in graph.nodes[member].inputs()} - inside
    written = [m for m in inside if not graph.nodes[m].users or not set(graph.nodes[m].users) <= inside]
    return sum(_bytes(graph.nodes[index]) for index in read) + sum(_bytes(graph.nodes[index]) for index in written)


def optimizer_bytes(uses: Sequence[OptimizerUse]) -> float | None:
    """Least traffic of one update: read the gradient, read and write parameter and state. None for unknown optimizers.

    State follows the kind (Adam: two moments); momentum of SGD and RMSprop and AMSGrad's maximum add one each.
    """
    total = 0.0
    for use in uses:
        kind = use.kind.rpartition(".")[2]
        if kind not in STATES or use.overrides_step:
            return None
        states = STATES[kind] + sum(bool(use.arguments.get(name)) for name in ("momentum", "amsgrad"))
        size = max((BYTES.get(dtype, 1) for dtype in use.dtypes), default=4)
        total += use.elements * size * (3 + 2 * states)
    return total if uses else None


# ---------------------------------------------------------------------------------------------------------------- nodes


@dataclass
class _Own:
    """What a node's operators did: model operations by dtype over all steps, and the passes in which it moved data."""

    flops: dict[str, float]
    passes: set[str]


def _owned(trace: Recorded, machine: Machine, operator_cost: Sequence[int]) -> dict[int, _Own]:
    owned: dict[int, _Own] = {}
    inside = [row for row, place in enumerate(operator_cost) if place >= 0 and trace.operators.step[row] >= 0]
    chosen = set(inside)
    for row in trace.working:
        if row in chosen:
            owned.setdefault(operator_cost[row], _Own({}, set())).passes.add(trace.operator_phase[row])
    for row in inside:
        if row in trace.work:
            flops = owned.setdefault(operator_cost[row], _Own({}, set())).flops
            dtype = dtype_of(trace, row, machine)
            flops[dtype] = flops.get(dtype, 0.0) + trace.work[row].least
    return owned


def node_floors(
    profile: Profile,
    trace: Recorded,
    machine: Machine,
    operator_cost: Sequence[int],
    executions: Sequence[int],
) -> tuple[tuple[NodeCost, ...], list[dict[str, float]]]:
    """Costs with operations, least traffic and floor, and the operations per step by dtype of each.

    Least traffic is inputs plus outputs once per pass that moved data: a backward pass moves at least as much as the
    forward pass. The floor never exceeds the measured time; tensors that stay in a cache can beat the memory's rate.
    """
    graphs = {graph.index: graph for graph in profile.graphs}
    owned = _owned(trace, machine, operator_cost)
    costs: list[NodeCost] = []
    operations: list[dict[str, float]] = []
    for place, cost in enumerate(profile.costs):
        own = owned.get(place, _Own({}, set()))
        flops = {dtype: count / len(trace.steps) for dtype, count in own.flops.items()}
        once = boundary_bytes(graphs[cost.graph], frozenset({cost.node}))
        runs = executions[place] if place < len(executions) else 1
        traffic = once * runs * len(own.passes & {"forward", "backward"})
        floor = roofline(machine.compute_us(flops) if flops else None, machine.memory_us(traffic))
        operations.append(flops)
        costs.append(
            replace(
                cost,
                flops=sum(flops.values()) if flops else None,
                least_bytes=traffic,
                floor_us=None if floor is None else min(floor.time_us, cost.total_us),
            )
        )
    return tuple(costs), operations


# -------------------------------------------------------------------------------------------------------------- regions


@dataclass
class _Sum:
    """Time and least times of a region over all profiled steps, in microseconds."""

    measured: float = 0.0
    floor: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    known: bool = False

    def add(self, compute_us: float | None, memory_us: float | None, without_us: float = 0.0) -> None:
        """Add the floor of one part; a part without one counts as fully used and adds the time that it took."""
        floor = roofline(compute_us, memory_us)
        if floor is None:
            self.floor += without_us
            return
        self.known = True
        self.floor += floor.time_us
        self.compute += compute_us or 0.0
        self.memory += memory_us or 0.0

    def region(self, name: str, steps: int, notes: list[str], span: Span | None = None) -> Region:
        """Per step; a floor above the measured time is cut to it, with a note."""
        measured, floor = self.measured / steps, self.floor / steps
        bound = None if not self.known else "compute" if self.compute > self.memory else "memory"
        if bound is not None and floor > measured * (1 + 1e-9):
            notes.append(
                f"{name}: measured at {measured:.0f} us per step, less than the floor of {floor:.0f} us, so no time "
                f"counts as recoverable; {FASTER[bound]}"
            )
            floor = measured
        return Region(name=name, measured_us=measured, floor_us=floor if self.known else None, bound=bound, span=span)


def regions(
    profile: Profile,
    trace: Recorded,
    machine: Machine,
    pace: float,
    operations: Sequence[Mapping[str, float]],
    executions: Sequence[int],
) -> tuple[tuple[Region, ...], list[str]]:
    """The operator families, then the source lines that own most time, and notes on floors that were cut.

    `pace` scales the trace's times, `operations` and `executions` belong to the profile's costs.
    """
    notes: list[str] = []
    families = _family_regions(profile, trace, machine, pace, notes)
    return (*families, *_line_regions(profile, machine, operations, executions, notes)), notes


def _family_regions(
    profile: Profile, trace: Recorded, machine: Machine, pace: float, notes: list[str]
) -> tuple[Region, ...]:
    """Time per operator family, largest first, down to a thousandth of all."""
    steps, moving = len(trace.steps), set(trace.working)
    sums: dict[str, _Sum] = {}
    for family, row, time_us in trace.units:
        total = sums.setdefault(family, _Sum())
        total.measured += time_us * pace
        work = trace.work.get(row)
        if row < 0 or family in NO_FLOOR or (work is None and row not in moving):
            total.add(None, None, time_us * pace)
            continue
        flops = {dtype_of(trace, row, machine): work.least} if work else None
        traffic = trace.least_bytes[row]
        compute, memory = machine.compute_us(flops) if flops else None, None
        if traffic is not None:
            memory = machine.memory_us(traffic)
        total.add(compute, memory, time_us * pace)
    if "optimizer" in sums:
        if not len(trace.kernels):  # on a CPU the host's work between the operators counts, too
            sums["optimizer"].measured = sum(trace.timeline.optimizer_us.values()) * steps * pace
        traffic = optimizer_bytes(profile.optimizers)
        sums["optimizer"].floor = 0.0
        sums["optimizer"].add(None, None if traffic is None else machine.memory_us(traffic * steps))
    least = 1e-3 * sum(item.measured for item in sums.values())
    ordered = sorted(sums.items(), key=lambda item: (-item[1].measured, item[0]))
    return tuple(item.region(family, steps, notes) for family, item in ordered if item.measured > least)


@dataclass
class _Line:
    """One source line: its time per step, and its nodes by the module instance that ran them."""

    total: _Sum
    costs: list[NodeCost]


def _line_regions(
    profile: Profile,
    machine: Machine,
    operations: Sequence[Mapping[str, float]],
    executions: Sequence[int],
    notes: list[str],
) -> tuple[Region, ...]:
    """The source lines that own most time, largest first.

    The nodes of one line in one module instance count as one operation: its floor moves only what crosses its boundary.
    """
    graphs = {graph.index: graph for graph in profile.graphs}
    places_of: dict[tuple[str, int, int, str], list[int]] = {}
    for place, cost in enumerate(profile.costs):
        node = graphs[cost.graph].nodes[cost.node]
        if node.span is not None:
            key = (node.span.path, node.span.line, cost.graph, node.module or "")
            places_of.setdefault(key, []).append(place)
    lines: dict[tuple[str, int], _Line] = {}
    for (path, number, graph, _), places in places_of.items():
        costs = [profile.costs[place] for place in places]
        line = lines.setdefault((path, number), _Line(_Sum(), []))
        line.costs.extend(costs)
        line.total.measured += sum(cost.total_us for cost in costs)
        flops: dict[str, float] = {}
        for place in places:
            for dtype, count in operations[place].items():
                flops[dtype] = flops.get(dtype, 0.0) + count
        runs = max((executions[place] for place in places if place < len(executions)), default=1)
        traffic = _group_bytes(graphs[graph], costs) * runs
        line.total.add(machine.compute_us(flops) if flops else None, machine.memory_us(traffic))
    ordered = sorted(lines.items(), key=lambda item: (-item[1].total.measured, item[0]))
    return tuple(
        line.total.region(_line_name(graphs, line.costs), 1, notes, _line_span(graphs, line.costs))
        for _, line in ordered[:LINES]
    )


def _group_bytes(graph: Graph, costs: Sequence[NodeCost]) -> float:
    """Least traffic of some nodes taken as one operation, over the passes in which any of them moved data."""
    if not any(cost.least_bytes for cost in costs):
        return 0.0
    passes = any(cost.forward_us > 0 for cost in costs) + any(cost.backward_us > 0 for cost in costs)
    return boundary_bytes(graph, frozenset(cost.node for cost in costs)) * passes


def _line_name(graphs: Mapping[int, Graph], costs: Sequence[NodeCost]) -> str:
    """What a line does: its operations by cost, and the user's class or function they stand in."""
    time: dict[str, float] = {}
    for cost in costs:
        plain = graphs[cost.graph].nodes[cost.node].target.rpartition(".")[2]
        time[plain] = time.get(plain, 0.0) + cost.total_us
    names = sorted(time, key=lambda name: (-time[name], name))
    nodes = [graphs[cost.graph].nodes[cost.node] for cost in costs]
    own = [n.module_class for n in nodes if n.module_class and not n.module_class.startswith("torch.")]
    where = own[0].rpartition(".")[2] if own else nodes[0].span.function if nodes[0].span else None
    shown = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
    return f"{shown} in {where}" if where else shown


def _line_span(graphs: Mapping[int, Graph], costs: Sequence[NodeCost]) -> Span | None:
    """The whole line, without the columns of one of its expressions."""
    span = graphs[costs[0].graph].nodes[costs[0].node].span
    return None if span is None else Span(path=span.path, line=span.line, function=span.function)
