"""Stage 3b: is the trace fit for use, where does a step go, which share of the device's peak does it reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from advisor import roofline
from advisor.casttimes import cast_times
from advisor.devicereads import move_times, read_times
from advisor.model import NodeCost, OptimizerUse, Profile, Step, Utilisation, mean_us
from advisor.operators.families import ARITHMETIC, may_multiply
from advisor.roofline import Machine

COVERAGE = 0.95  # share of device activities whose launch must be recorded
GUARDS = "TorchDynamo Cache Lookup"  # the range in which compiled code is chosen
DEFINITION = (
    "model FLOPs per step (matrix products, convolutions and attention by their recorded shapes, attention backward as"
    " twice its forward, recomputation not counted, causal attention not halved) / ({time} x {peak})"
)


class Measured(roofline.OptimizerTimes, Protocol):
    """The steps of a trace with their phases, the device's busy share, time per step by optimizer class."""

    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def busy(self) -> float | None: ...
    @property
    def optimizer_idle_us(self) -> Mapping[str, float]: ...


class Recorded(roofline.Recorded, Protocol):
    """What this stage needs of a trace besides what floors and regions do."""

    @property
    def ranges(self) -> Sequence[tuple[str, float, float, int]]: ...  # name, start, duration, thread
    @property
    def launches(self) -> Mapping[int, tuple[float, int]]: ...  # correlation -> start, thread
    @property
    def timeline(self) -> Measured: ...
    @property
    def memory_calls(self) -> Mapping[str, tuple[float, float]]: ...  # name -> calls and the host's time per step
    @property
    def defects(self) -> Mapping[str, int]: ...


def analyze(
    profile: Profile,
    trace: Recorded,
    *,
    reference_peak: tuple[float, str] | None,
    operator_cost: Sequence[int] = (),
    operator_node: Sequence[tuple[int, int] | None] = (),
    executions: Sequence[int] = (),
) -> Profile:
    """Fill in steps, phases, utilisation, roofline floors and regions of a profile that holds what was recorded.

    `profile` brings hardware, un-profiled step times, graphs, costs, optimizers and facts; `operator_cost` and
    `executions` come with its costs (operator row -> place in `costs`; runs of each node per step), `operator_node`
    gives the node of each operator row. `reference_peak` is the one peak that headline MFU divides by, in FLOP/s, and
    where it comes from. A trace that is not fit for use leaves no phases, no costs and `missing["trace"]`.
    """
    profile = replace(profile, operators=trace.operators, kernels=trace.kernels)
    problem = insufficient(trace, profile.hardware.kind)
    if problem is not None:
        missing = {**profile.missing, "trace": f"insufficient trace, collect this: {problem}"}
        return replace(profile, costs=(), linked_share=None, missing=missing)
    machine = Machine(profile)
    pace, notes = _pace(trace, profile.median_step_us())
    profile = _with_utilisation(_with_times(profile, trace, pace), trace, machine, reference_peak)
    costs, operations = roofline.node_floors(profile, trace, machine, operator_cost, executions)
    profile = replace(profile, costs=costs)
    regions, cuts = roofline.regions(profile, trace, machine, pace, operations, executions)
    recorded = trace.kernels, trace.operators, costs, operator_cost, len(trace.steps)
    copies = {
        "reads_us": read_times(*recorded),
        "moves_us": move_times(trace.kernels, trace.operators, operator_node, len(trace.steps)),
        "casts_us": cast_times(*recorded),
        "memory_calls": trace.memory_calls,
    }
    facts = {**profile.facts, **copies, **_guards(trace, pace)}
    return replace(profile, regions=regions, facts=facts, notes=(*notes, *cuts))


def _guards(trace: Recorded, pace: float) -> dict[str, float]:
    """The host's time per step in which compiled code is chosen by its guards; nothing where no code is compiled."""
    found = [duration for name, _, duration, _ in trace.ranges if name == GUARDS]
    return {"guards_us": sum(found) / max(1, len(trace.steps)) * pace} if found else {}


def _pace(trace: Recorded, wall_us: float | None) -> tuple[float, list[str]]:
    """The factor from profiled to un-profiled time, at most 1, and the note on it.

    Without a GPU, times are the host's, and the profiler slows the host: costs, regions and optimizer times are scaled
    to the un-profiled step. Phases stay as recorded.
    """
    profiled = mean_us(trace.timeline.steps) or 0.0
    if len(trace.kernels) or wall_us is None or profiled <= wall_us:
        return 1.0, []
    pace = wall_us / profiled
    note = (
        f"operator times are scaled by {pace:.2f}, because the profiler slows the CPU: the profiled steps took "
        f"{profiled / 1e3:.1f} ms on average, the steps without it {wall_us / 1e3:.1f} ms (median)"
    )
    return pace, [note]


def _with_times(profile: Profile, trace: Recorded, pace: float) -> Profile:
    """Steps as measured, costs and optimizers with their times per step."""
    return replace(
        profile,
        steps=tuple(replace(step, tokens=profile.tokens_per_step) for step in trace.timeline.steps),
        costs=tuple(_scaled(cost, pace) for cost in profile.costs),
        optimizers=_timed(profile.optimizers, trace.timeline, pace, _idle_pace(trace, profile.median_step_us())),
    )


def _idle_pace(trace: Recorded, wall_us: float | None) -> float:
    """The factor from idle time of the device under the profiler to that without it, at most 1.

    The profiler slows the host and not the kernels: what a step without it takes less is idle time.
    """
    profiled = mean_us(trace.timeline.steps) or 0.0
    idle = (1.0 - (trace.timeline.busy or 0.0)) * profiled
    if wall_us is None or idle <= 0.0:
        return 1.0
    return min(1.0, max(0.0, wall_us - (profiled - idle)) / idle)


def _scaled(cost: NodeCost, pace: float) -> NodeCost:
    return replace(cost, forward_us=cost.forward_us * pace, backward_us=cost.backward_us * pace)


def _timed(uses: Sequence[OptimizerUse], measured: Measured, pace: float, idle_pace: float) -> tuple[OptimizerUse, ...]:
    """Optimizers with their time per step.

    A trace names the class alone: several of one class share its time by the elements that they update, and what the
    device waits for by their tensors. One that made no step has none.
    """
    times, idle = measured.optimizer_us, measured.optimizer_idle_us
    alike: dict[str, list[OptimizerUse]] = {}
    for use in uses:
        if use.stepped:
            alike.setdefault(use.kind.rpartition(".")[2], []).append(use)
    found: list[OptimizerUse] = []
    for use in uses:
        kind = use.kind.rpartition(".")[2]
        if kind in times and use.stepped:
            elements = tensors = 1.0
            if len(alike[kind]) > 1:
                elements = use.elements / max(1, sum(other.elements for other in alike[kind]))
                tensors = use.parameters / max(1, sum(other.parameters for other in alike[kind]))
            waits = idle.get(kind, 0.0) * idle_pace * tensors
            use = replace(use, step_us=times[kind] * pace * elements, idle_us=waits)
        found.append(use)
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------------- gate


def insufficient(trace: Recorded, kind: str) -> str | None:
    """What to collect before anything may be said about this trace, None when it is fit for use.

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


# ---------------------------------------------------------------------------------------------------------- utilisation


@dataclass(frozen=True)
class _Count:
    """Operations per step."""

    model: Mapping[str, float]  # by the dtype they ran in
    executed: float
    causal: float | None

    @property
    def total(self) -> float:
        return sum(self.model.values())


def _count(trace: Recorded, machine: Machine) -> _Count:
    steps = len(trace.steps)
    model: dict[str, float] = {}
    executed, causal, flagged, unknown = 0.0, 0.0, False, False
    for row, work in trace.work.items():
        if trace.operators.step[row] < 0:
            continue
        dtype = roofline.dtype_of(trace, row, machine)
        model[dtype] = model.get(dtype, 0.0) + work.model / steps
        executed += work.executed / steps
        flagged |= work.family == "attention"
        unknown |= work.causal is None
        causal += (work.causal or 0.0) / steps
    return _Count(dict(sorted(model.items())), executed, causal if flagged and not unknown else None)


def uncounted(trace: Recorded) -> str | None:
    """Which calls do arithmetic that is not counted, where they take more than 1 % of the operator time."""
    times: dict[str, float] = {}
    for family, row, time_us in trace.units:
        name = trace.operators.name[row] if row >= 0 else ""
        known = family in ARITHMETIC and row in trace.work
        if not known and may_multiply(name, family):
            times[name] = times.get(name, 0.0) + time_us
    total = sum(time_us for _, _, time_us in trace.units)
    named = [name for name in sorted(times, key=lambda name: (-times[name], name)) if times[name] > 0.01 * total]
    if not named:
        return None
    share = sum(times[name] for name in named) / total
    return (
        f"the arithmetic of {', '.join(named)} ({share:.0%} of the operator time) is not counted: MFU is a lower bound"
    )


def _with_utilisation(
    profile: Profile, trace: Recorded, machine: Machine, reference: tuple[float, str] | None
) -> Profile:
    """The shares of the peak a step reaches; what cannot be said stays None and gets its reason in `missing`."""
    count, wall_us = _count(trace, machine), profile.median_step_us()
    gap, missing = uncounted(trace), dict(profile.missing)
    use = Utilisation(busy=trace.timeline.busy)
    if gap is not None:
        missing["flops"] = gap
    if reference is None:
        missing["mfu"] = (
            f"the dense peak of {machine.hardware.name} is not known: pass it with --peak, or run "
            "`advisor doctor --calibrate`"
        )
    if not count.total:
        missing["flops"] = "no matrix product, convolution or attention with recorded shapes: record with record_shapes"
    elif wall_us is None:
        missing["mfu"] = "no step was timed without the profiler: record with --steps"
        use = replace(use, model_flops_per_step=count.total)
    else:
        use = replace(_utilisation(count, machine, wall_us / 1e6, reference), busy=use.busy)
    facts = {"model_flops_by_dtype": count.model}
    return replace(profile, utilisation=use, missing=missing, facts={**profile.facts, **facts})


def _utilisation(count: _Count, machine: Machine, seconds: float, reference: tuple[float, str] | None) -> Utilisation:
    """What the operations of a step come to when it takes so many seconds."""
    achieved = count.total / seconds
    peak, source = reference if reference is not None else (None, None)
    main = max(count.model, key=lambda dtype: count.model[dtype])
    rate = machine.measured(main)
    ideal = [flops / machine.hardware.peak_flops.get(dtype, math.nan) for dtype, flops in count.model.items()]
    own = sum(ideal) / seconds

    def share(flops: float | None) -> float | None:
        return flops / seconds / peak if peak and flops is not None else None

    return Utilisation(
        model_flops_per_step=count.total,
        achieved_flops=achieved,
        mfu=share(count.total),
        mfu_own_peak=None if math.isnan(own) else own,
        mfu_causal=share(count.causal),
        hfu=share(count.executed),
        of_measured=achieved / rate if rate else None,
        peak_flops=peak,
        peak_source=source,
        definition=DEFINITION.format(
            time="median time of the un-profiled steps", peak=source or "a peak that is not known"
        ),
    )


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
        hfu=scaled(utilisation.hfu),
        of_measured=scaled(utilisation.of_measured),
    )
