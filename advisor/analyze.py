"""Stage 3b: is the trace fit for use, where does a step go, how far is it from the device's limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from advisor.model import (
    Graph,
    Hardware,
    Kernels,
    Node,
    NodeCost,
    Operators,
    OptimizerUse,
    Profile,
    Region,
    Span,
    Step,
    Utilisation,
)

COVERAGE = 0.95  # share of device activities whose launch must be recorded
LINES = 12  # source lines listed as regions
# Families whose floor does not follow from one call alone.
NO_FLOOR = frozenset({"communication", "host copies", "optimizer", "autograd", "view", "custom", "other"})
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "complex64": 8}


class Arithmetic(Protocol):
    """Operations of one call: needed by the maths, run by the call, needed with causal attention halved."""

    @property
    def family(self) -> str: ...
    @property
    def model(self) -> float: ...
    @property
    def executed(self) -> float: ...
    @property
    def causal(self) -> float | None: ...


class Measured(Protocol):
    """The steps of a trace with their phases, the device's busy share, time per step by optimizer class."""

    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def busy(self) -> float | None: ...
    @property
    def optimizer_us(self) -> Mapping[str, float]: ...


class Recorded(Protocol):
    """What this stage needs of a trace: columns in time order, times in microseconds."""

    @property
    def operators(self) -> Operators: ...
    @property
    def kernels(self) -> Kernels: ...
    @property
    def launches(self) -> Mapping[int, tuple[float, int]]: ...  # correlation -> start, thread
    @property
    def steps(self) -> Sequence[tuple[int, float, float]]: ...  # index, start, end
    @property
    def operator_phase(self) -> Sequence[str]: ...
    @property
    def kernel_phase(self) -> Sequence[str]: ...
    @property
    def work(self) -> Mapping[int, Arithmetic]: ...
    @property
    def family(self) -> Sequence[str]: ...
    @property
    def least_bytes(self) -> Sequence[float | None]: ...
    @property
    def working(self) -> Sequence[int]: ...  # rows that do something themselves
    @property
    def units(self) -> Sequence[tuple[str, int, float]]: ...  # family, operator row or -1, time
    @property
    def timeline(self) -> Measured: ...
    @property
    def defects(self) -> Mapping[str, int]: ...


def analyze(
    profile: Profile,
    trace: Recorded,
    *,
    reference_peak: tuple[float, str] | None,
    operator_cost: Sequence[int] = (),
    executions: Sequence[int] = (),
) -> Profile:
    """Fill in steps, phases, utilisation, roofline floors and regions of a profile that holds what was recorded.

    `profile` brings hardware, un-profiled step times, graphs, costs, optimizers and facts; `operator_cost` and
    `executions` come with its costs (operator row -> place in `costs`; runs of each node per step). `reference_peak` is
    the one peak that headline MFU divides by, in FLOP/s, and where it comes from. A trace that is not fit for use
    leaves no phases, no costs and `missing["trace"]`.
    """
    profile = replace(profile, operators=trace.operators, kernels=trace.kernels)
    missing = dict(profile.missing)
    problem = insufficient(trace, profile.hardware.kind)
    if problem is not None:
        missing["trace"] = f"insufficient trace, collect this: {problem}"
        return replace(profile, costs=(), linked_share=None, missing=missing)
    machine = _Machine(profile)
    count = _count(trace, machine)
    wall_us = profile.median_step_us()
    pace, notes = _pace(trace, wall_us)
    profile = replace(
        profile,
        steps=tuple(replace(step, tokens=profile.tokens_per_step) for step in trace.timeline.steps),
        costs=tuple(_scaled(cost, pace) for cost in profile.costs),
        optimizers=_with_times(profile.optimizers, trace.timeline.optimizer_us, pace),
        utilisation=replace(
            _utilisation(count, machine, wall_us, reference_peak, uncounted(trace), missing), busy=trace.timeline.busy
        ),
        missing=missing,
    )
    costs, operations = _with_floors(profile, trace, machine, operator_cost, executions)
    profile = replace(profile, costs=costs)
    regions = (
        *_family_regions(profile, trace, machine, pace, notes),
        *_line_regions(profile, machine, operations, executions, notes),
    )
    facts = {**profile.facts, **_arithmetic_facts(count, wall_us, reference_peak), "notes": tuple(notes)}
    return replace(profile, regions=regions, facts=facts)


def _pace(trace: Recorded, wall_us: float | None) -> tuple[float, list[str]]:
    """The factor from profiled to un-profiled time, at most 1, and the note on it.

    Without a GPU, times are the host's, and the profiler slows the host: costs, regions and optimizer times are scaled
    to the un-profiled step. Phases stay as recorded.
    """
    durations = [step.duration_us for step in trace.timeline.steps]
    profiled = sum(durations) / len(durations) if durations else 0.0
    if len(trace.kernels) or wall_us is None or profiled <= wall_us:
        return 1.0, []
    pace = wall_us / profiled
    note = (
        f"operator times are scaled by {pace:.2f}: the profiled steps took {profiled / 1e3:.1f} ms on average, "
        f"the un-profiled ones {wall_us / 1e3:.1f} ms"
    )
    return pace, [note]


def _scaled(cost: NodeCost, pace: float) -> NodeCost:
    return replace(cost, forward_us=cost.forward_us * pace, backward_us=cost.backward_us * pace)


def after(utilisation: Utilisation, speedup: float) -> Utilisation:
    """The utilisation at `speedup` times the speed: the same model arithmetic in less time. Busy is not known there."""

    def scaled(share: float | None) -> float | None:
        return None if share is None else share * speedup

    return replace(
        utilisation,
        busy=None,
        achieved_flops=scaled(utilisation.achieved_flops),
        mfu=scaled(utilisation.mfu),
        mfu_own_peak=scaled(utilisation.mfu_own_peak),
        mfu_causal=scaled(utilisation.mfu_causal),
        of_measured=scaled(utilisation.of_measured),
    )


# ---------------------------------------------------------------------------------------------------------------- gate


def insufficient(trace: Recorded, kind: str) -> str | None:
    """What to collect before anything may be said about this trace, None when it is fit for use (RULES.md, G0).

    Steps must be marked, no duration negative, on a GPU at least 95 % of the activities since the first step's first
    must have their launch, and at most 1 % may lie outside the window or before their launch (a clock that jumped).
    """
    if not trace.steps:
        return "the steps are not marked; profile with a schedule and call profiler.step() at the end of each step"
    if any(end <= begin for _, begin, end in trace.steps) or trace.defects.get("negative_duration"):
        return "events of negative duration; record again with this machine's clock left alone"
    kernels = trace.kernels
    if kind != "cuda":
        return None
    started = [start for start, step in zip(kernels.start_us, kernels.step, strict=True) if step >= 0]
    if not started:
        return "no device activity of a marked step; profile with ProfilerActivity.CUDA and CPU together"
    first = min(started)
    inside = [c for start, c in zip(kernels.start_us, kernels.correlation, strict=True) if start >= first]
    launched = sum(number in trace.launches for number in inside)
    if launched < COVERAGE * len(inside):
        return (
            f"only {launched} of {len(inside)} device activities have their launch; profile fewer steps at once, "
            "with ProfilerActivity.CPU"
        )
    strayed = trace.defects.get("outside_window", 0) + trace.defects.get("before_launch", 0)
    if strayed > 0.01 * len(kernels):
        return f"{strayed} device activities lie outside the recorded window or before their launch; record again"
    return None


# ---------------------------------------------------------------------------------------------------------- arithmetic


class _Machine:
    """The device's rates: dense datasheet peaks where they are known, else what the run measured."""

    def __init__(self, profile: Profile) -> None:
        self.hardware: Hardware = profile.hardware
        flags = profile.facts
        cuda = self.hardware.kind == "cuda"
        self._tf32 = {
            "matmul": cuda and flags.get("matmul_precision", "highest") != "highest",
            "convolution": cuda and bool(flags.get("cudnn_tf32", True)),  # torch's own defaults
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


@dataclass(frozen=True)
class _Count:
    """Operations per step."""

    model: Mapping[str, float]  # by the dtype they ran in
    executed: float
    causal: float | None

    @property
    def total(self) -> float:
        return sum(self.model.values())


def _dtype_of(trace: Recorded, row: int, machine: _Machine) -> str:
    dtypes = trace.operators.dtypes[row]
    first = next((dtype for dtype in dtypes if dtype.startswith(("float", "bfloat", "complex"))), "unknown")
    return machine.ran_in(first, trace.work[row].family)


def _count(trace: Recorded, machine: _Machine) -> _Count:
    steps = len(trace.steps)
    model: dict[str, float] = {}
    executed, causal, flagged, unknown = 0.0, 0.0, False, False
    for row, work in trace.work.items():
        if trace.operators.step[row] < 0:
            continue
        dtype = _dtype_of(trace, row, machine)
        model[dtype] = model.get(dtype, 0.0) + work.model / steps
        executed += work.executed / steps
        flagged |= work.family == "attention"
        unknown |= work.causal is None
        causal += (work.causal or 0.0) / steps
    return _Count(dict(sorted(model.items())), executed, causal if flagged and not unknown else None)


TEMPLATES = ("triton_tem_", "triton_mm", "triton_bmm", "triton_conv", "triton_flex")  # products a compiler wrote itself


def uncounted(trace: Recorded) -> str | None:
    """Which calls do arithmetic that is not counted, where they take more than 1 % of the operator time."""
    times: dict[str, float] = {}
    for family, row, time_us in trace.units:
        name = trace.operators.name[row] if row >= 0 else ""
        known = family in ("matmul", "convolution", "attention") and row in trace.work
        if not known and (family in ("attention", "recurrent", "custom") or name.startswith(TEMPLATES)):
            times[name] = times.get(name, 0.0) + time_us
    total = sum(time_us for _, _, time_us in trace.units)
    named = [name for name in sorted(times, key=lambda name: (-times[name], name)) if times[name] > 0.01 * total]
    if not named:
        return None
    share = sum(times[name] for name in named) / total
    return (
        f"the arithmetic of {', '.join(named)} ({share:.0%} of the operator time) is not counted: MFU is a lower bound"
    )


DEFINITION = (
    "model FLOPs per step (matrix products, convolutions and attention by their recorded shapes, attention backward as"
    " twice its forward, recomputation not counted, causal attention not halved) / ({time} x {peak})"
)


def _utilisation(
    count: _Count,
    machine: _Machine,
    wall_us: float | None,
    reference: tuple[float, str] | None,
    gap: str | None,
    missing: dict[str, str],
) -> Utilisation:
    """The shares of the peak a step reaches; what cannot be said stays None and gets its reason in `missing`."""
    if gap is not None:
        missing["flops"] = gap
    if reference is None:
        missing["mfu"] = f"the dense peak of {machine.hardware.name} is not known: pass it with --peak-flops"
    if not count.total:
        missing["flops"] = "no matrix product, convolution or attention with recorded shapes: record with record_shapes"
        return Utilisation()
    if wall_us is None:
        missing["mfu"] = "no step was timed without the profiler: record with --steps"
        return Utilisation(model_flops_per_step=count.total)
    seconds = wall_us / 1e6
    achieved = count.total / seconds
    peak = reference[0] if reference else None
    main = max(count.model, key=lambda dtype: count.model[dtype])
    rate = machine.measured(main)
    ideal = [flops / machine.hardware.peak_flops.get(dtype, math.nan) for dtype, flops in count.model.items()]
    own = sum(ideal) / seconds
    return Utilisation(
        model_flops_per_step=count.total,
        achieved_flops=achieved,
        mfu=achieved / peak if peak else None,
        mfu_own_peak=None if math.isnan(own) else own,
        mfu_causal=count.causal / seconds / peak if peak and count.causal is not None else None,
        of_measured=achieved / rate if rate else None,
        peak_flops=peak,
        peak_source=reference[1] if reference else None,
        definition=DEFINITION.format(
            time="median time of the un-profiled steps", peak=reference[1] if reference else "a peak that is not known"
        ),
    )


def _arithmetic_facts(count: _Count, wall_us: float | None, reference: tuple[float, str] | None) -> dict[str, object]:
    """Operations by dtype, and HFU: as mfu, with recomputation and the attention kernels' own recomputation counted."""
    facts: dict[str, object] = {"model_flops_by_dtype": count.model, "executed_flops_per_step": count.executed}
    if wall_us and reference and count.total:
        facts["hfu"] = count.executed / (wall_us / 1e6) / reference[0]
    return facts


# --------------------------------------------------------------------------------------------------------------- costs


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


@dataclass
class _Own:
    """What a node's operators did: model operations by dtype over all steps, and the passes in which it moved data."""

    flops: dict[str, float]
    passes: set[str]


def _owned(trace: Recorded, machine: _Machine, operator_cost: Sequence[int]) -> dict[int, _Own]:
    owned: dict[int, _Own] = {}
    inside = [row for row, place in enumerate(operator_cost) if place >= 0 and trace.operators.step[row] >= 0]
    chosen = set(inside)
    for row in trace.working:
        if row in chosen:
            owned.setdefault(operator_cost[row], _Own({}, set())).passes.add(trace.operator_phase[row])
    for row in inside:
        if row in trace.work:
            flops = owned.setdefault(operator_cost[row], _Own({}, set())).flops
            dtype = _dtype_of(trace, row, machine)
            flops[dtype] = flops.get(dtype, 0.0) + trace.work[row].model
    return owned


def _with_floors(
    profile: Profile,
    trace: Recorded,
    machine: _Machine,
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


def _with_times(uses: Sequence[OptimizerUse], times: Mapping[str, float], pace: float) -> tuple[OptimizerUse, ...]:
    """Optimizers with their time per step; two of one class cannot be told apart and stay without."""
    kinds = [use.kind.rpartition(".")[2] for use in uses]
    return tuple(
        replace(use, step_us=times[kind] * pace) if kind in times and kinds.count(kind) == 1 else use
        for use, kind in zip(uses, kinds, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------- regions


@dataclass
class _Sum:
    """Time and least times of a region over all profiled steps, in microseconds."""

    measured: float = 0.0
    floor: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    known: bool = False

    def add(self, compute_us: float | None, memory_us: float | None) -> None:
        """Add the floor of one part; a part without one adds nothing, the sum is still a lower bound."""
        floor = roofline(compute_us, memory_us)
        if floor is None:
            return
        self.known = True
        self.floor += floor.time_us
        self.compute += compute_us or 0.0
        self.memory += memory_us or 0.0

    def region(self, name: str, steps: int, notes: list[str], span: Span | None = None) -> Region:
        """Per step; a floor above the measured time is cut to it, with a note."""
        measured, floor = self.measured / steps, self.floor / steps
        if self.known and floor > measured * (1 + 1e-9):
            notes.append(
                f"{name}: the floor of {floor:.0f} us exceeds the measured {measured:.0f} us and is cut to it; "
                "its tensors stay in a cache, or the device beats the rate the floor assumes"
            )
            floor = measured
        bound = None if not self.known else "compute" if self.compute > self.memory else "memory"
        return Region(name=name, measured_us=measured, floor_us=floor if self.known else None, bound=bound, span=span)


def _family_regions(
    profile: Profile, trace: Recorded, machine: _Machine, pace: float, notes: list[str]
) -> tuple[Region, ...]:
    """Time per operator family, largest first, down to a thousandth of all."""
    steps, moving = len(trace.steps), set(trace.working)
    sums: dict[str, _Sum] = {}
    for family, row, time_us in trace.units:
        total = sums.setdefault(family, _Sum())
        total.measured += time_us * pace
        work = trace.work.get(row)
        if row < 0 or family in NO_FLOOR or (work is None and row not in moving):
            continue
        flops = {_dtype_of(trace, row, machine): work.model} if work else None
        traffic = trace.least_bytes[row]
        total.add(machine.compute_us(flops) if flops else None, None if traffic is None else machine.memory_us(traffic))
    if "optimizer" in sums:
        if not len(trace.kernels):  # on a CPU the host's work between the operators counts, too
            sums["optimizer"].measured = sum(trace.timeline.optimizer_us.values()) * steps * pace
        traffic = optimizer_bytes(profile.optimizers)
        sums["optimizer"].add(None, None if traffic is None else machine.memory_us(traffic * steps))
    least = 1e-3 * sum(item.measured for item in sums.values())
    ordered = sorted(sums.items(), key=lambda item: (-item[1].measured, item[0]))
    return tuple(item.region(family, steps, notes) for family, item in ordered if item.measured > least)


STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1, "SGD": 0}


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


@dataclass
class _Line:
    """One source line: its time per step, and its nodes by the module instance that ran them."""

    total: _Sum
    costs: list[NodeCost]


def _line_regions(
    profile: Profile,
    machine: _Machine,
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
