"""What the columns of one trace say: every formula asked once, put together as a `FileProfile`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from advisor import calibration
from advisor.columns.intervals import NO_INTERVALS
from advisor.columns.schema import KERNEL
from advisor.columns.table import Ints, Table
from advisor.hardware import arch_name, identify, reference_peak, sm_limits, unidentified
from advisor.ingest.recorded import device_of, place
from advisor.measured import Breakdown, Cost, FileProfile, Gap, HostFacts
from advisor.metrics import floors as least
from advisor.metrics.breakdown import Phases, busiest_device, phases
from advisor.metrics.fullness import Fullness, fullness, in_steps
from advisor.metrics.gate import CAUSES, DEVICE, FLOPS, IDLE, OPERATORS, PEAK, STEPS, Gate, check
from advisor.metrics.hostfacts import host_facts
from advisor.metrics.ranks import Collectives, RankInput, collectives_of
from advisor.metrics.savings import path_of_step
from advisor.metrics.steps import Steps, find_steps, trimmed
from advisor.metrics.totals import totals
from advisor.model import Hardware, Utilisation

TIME = "median step of the recording, on the device and under the profiler"
DEFINITION = (
    "model FLOPs per step (matrix products, convolutions, attention and recurrent layers by their recorded shapes, "
    "attention backward as twice its forward, recomputation not counted, causal attention not halved) / ({time} x peak)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device of a trace: `hardware` has no figures where it is not known, `reason` says why; `peak` is the one MFU
    divides by, in FLOP/s, with its source."""

    name: str | None
    hardware: Hardware
    reason: str | None
    peak: tuple[float, str] | None
    arch: str | None


def machine_of(table: Table, peak_flops: float | None, measured: Path | None) -> Machine:
    """The device that ran most of a trace; `peak_flops` overrides its peak, `measured` is the file of calibrations.

    Calibrations are kept under the name that the device itself gives.
    """
    device = device_of(table.head, busiest_device(table) if len(table.activities) else None)
    major, minor = device.compute or (None, None)
    known = identify(device.name, device.sm_count, major, minor, device.memory_bytes)
    base = known or Hardware(
        name=device.name or "unknown device",
        kind="cuda",
        sm_count=device.sm_count,
        arch=arch_name(major, minor, device.warp_size),
    )
    hardware = calibration.measured(measured, base, device.name, device.sm_count) if measured is not None else base
    peak = (peak_flops, "given with --peak") if peak_flops else reference_peak(hardware)
    return Machine(
        name=device.name or None,
        hardware=hardware,
        reason=None if known else unidentified(device.name, device.sm_count, major, minor, device.memory_bytes),
        peak=peak or calibration.reference(hardware),
        arch=hardware.arch,
    )


def profile_of(path: Path, table: Table, machine: Machine) -> FileProfile:
    """Everything one trace says of itself; what it does not support is a gap."""
    return told_of(path, table, machine)[0]


def told_of(path: Path, table: Table, machine: Machine) -> tuple[FileProfile, RankInput]:
    """Everything one trace says of itself, and what it says as one rank of a job."""
    links = least.link(table)
    marked = find_steps(table, links.call)
    steps, stretches, gate = supported(table, links.call, marked, machine)
    notes = [*remarks(table, marked, steps)]
    kinds = least.kinds(table, links)
    calls = least.rows(table, links, kinds)
    chosen = (steps.activity >= 0) if len(steps) else np.ones(len(table.activities), dtype=bool)
    found = least.floors(table, links, kinds, calls, machine.hardware, chosen)
    full = fullness(table, sm_limits(machine.arch), machine.hardware.sm_count, chosen)
    windows = steps.windows if steps.on_device else NO_INTERVALS
    sliced = in_steps(table, full, windows, busiest_device(table)) if len(windows) else None
    count = max(1, len(steps))
    groupings = least.groupings(table, links, kinds, found)
    costs = [
        cost
        for grouping in groupings
        for cost in least.costs(table, grouping, found, chosen, count, {"occupancy": full.achieved})
    ]
    use, gaps = utilisation(found, steps, machine, devices_in(table, chosen))
    parts = per_step(stretches.total() if stretches is not None else None, count)
    host = host_facts(table, links.call, links.parent, marked)
    whole = replace(
        sums(path, table, machine),
        mfu=use.mfu,
        mfu_causal=use.mfu_causal,
        mfu_own_peak=use.mfu_own_peak,
        hfu=use.hfu,
        without_launch=int((links.call < 0).sum()),
        host=host,
        steps_from=steps.source,
        device_step_us=steps.median_us if steps.on_device else None,
        host_step_us=None if steps.on_device else steps.median_us,
        utilisation=replace(use, busy=_busy(parts)),
        breakdown=parts,
        occupancy=replace(full.mean, sm_efficiency_in_steps=sliced),
        tensor_time=tensor_time(table, found, chosen),
        recoverable_us=recoverable(costs, parts),
        costs=tuple(limited(costs, table, full)),
        gaps=(*gate.gaps, *without(gaps, gate)),
        notes=(*notes, *of_host(host), *of_overlap(costs, parts)),
    )
    profile = allowed(whole, gate)
    if not {STEPS, DEVICE, CAUSES} & gate.blocked.keys():
        path_found, open_questions = path_of_step(table, links.call, steps, groupings, found)
        profile = replace(profile, critical_path=path_found, gaps=(*profile.gaps, *open_questions))
    return profile, as_rank(profile, collectives_of(table, steps))


def without(gaps: Sequence[Gap], gate: Gate) -> tuple[Gap, ...]:
    """Gaps of the share of the peak that say more than the gate; where it distrusts the steps, that is the reason."""
    if PEAK in gate.blocked:
        return ()
    if STEPS not in gate.blocked:
        return tuple(gaps)
    return tuple(replace(gap, why=gate.blocked[STEPS], collect=gate.gaps[0].collect) for gap in gaps)


def remarks(table: Table, marked: Steps, steps: Steps) -> Iterator[str]:
    """What of the recording the figures do not cover."""
    if len(steps) and len(steps) < len(marked):
        left = len(marked) - len(steps)
        yield (
            f"{left} of {len(marked)} steps took less than half or more than twice the median and are left out of "
            "all that is said per step"
        )
    rows = table.activities
    count = len(np.unique(rows.device[rows.kind == KERNEL]))
    if count > 1:
        yield (
            f"kernels of {count} devices: busy time, exposed communication and costs are over all of them, the steps "
            "and what fills them are those of the device that ran most"
        )


def of_host(facts: HostFacts) -> Iterator[str]:
    """What the host did that a reader has to know, from a twentieth of its time on."""
    if facts.starved is not None and facts.starved > 0.5:
        yield f"{facts.starved:.0%} of the launches found nothing left to do on the device: the host sets the pace"
    if facts.data_share is not None and facts.data_share > 0.05:
        yield f"the data loader takes {facts.data_share:.1%} of the host's steps ({facts.data_ranges} calls)"
    for wait in facts.waits[:2]:
        if wait.time_us > 1e3 and wait.operators:  # a call outside of any operator may be the profiler's
            inside = " > ".join(wait.operators[-2:])
            yield f"the host waits {wait.time_us / 1e3:.1f} ms in {wait.count} calls of {wait.call} inside {inside}"
    if facts.pageable_h2d_us > 1e3:
        yield f"{facts.pageable_h2d} copies of pageable memory to the device take {facts.pageable_h2d_us / 1e3:.1f} ms"


def of_overlap(costs: Sequence[Cost], parts: Breakdown | None) -> Iterator[str]:
    """Times of kernels that run beside each other add up to more than the device computes."""
    total = sum(cost.time_us for cost in costs if cost.kind == "family")
    if parts is not None and total > 1.02 * parts.compute_us > 0:
        yield (
            f"kernels run beside each other: their times add up to {total / parts.compute_us:.2f} times the time in "
            "which the device computes, and shares of the step to more than it has"
        )


def as_rank(profile: FileProfile, collectives: tuple[Collectives, ...]) -> RankInput:
    """What a profile contributes to the comparison of ranks."""
    parts = profile.breakdown
    return RankInput(
        path=profile.path,
        rank=profile.rank,
        world_size=profile.world_size,
        step_us=profile.device_step_us if profile.device_step_us is not None else profile.host_step_us,
        compute_us=parts.compute_us if parts is not None else None,
        exposed_comm_us=parts.exposed_comm_us if parts is not None else None,
        collectives=collectives,
    )


def supported(table: Table, calls: Ints, marked: Steps, machine: Machine) -> tuple[Steps, Phases | None, Gate]:
    """The steps that may be spoken of, what the device did in them, and the gate.

    Where the gate does not trust the steps there are none: everything is then said of the whole recording.
    """
    stretches = phases(table, calls, marked.windows if len(marked) and marked.on_device else None)
    gate = check(table, calls, marked, stretches)
    if len(marked) and STEPS in gate.blocked:
        stretches = phases(table, calls)
        gate = check(table, calls, marked, stretches)
        return Steps(activity=np.full(len(table.activities), -1, dtype=np.int64)), stretches, named(gate, machine)
    steps = trimmed(marked)
    if len(steps) < len(marked) and steps.on_device:
        stretches = phases(table, calls, steps.windows)
    return steps, stretches, named(gate, machine)


def named(gate: Gate, machine: Machine) -> Gate:
    """The gate; a device without a name blocks the share of the peak only where no peak is given."""
    if machine.peak is None or machine.name is not None:
        return gate
    gaps = tuple(gap for gap in gate.gaps if gap.what != PEAK)
    others = any(PEAK in gap.what for gap in gaps)
    blocked = {claim: why for claim, why in gate.blocked.items() if claim != PEAK or others}
    return Gate(gaps=gaps, blocked=blocked)


def devices_in(table: Table, chosen: least.Flags) -> int:
    """How many devices ran the kernels that are spoken of."""
    rows = table.activities
    return max(1, len(np.unique(rows.device[chosen & (rows.kind == KERNEL)])))


def allowed(profile: FileProfile, gate: Gate) -> FileProfile:
    """The profile without what the gate does not let it claim; plain sums of what was recorded stay.

    The floors of kernels come from the operators that launched them and go with these.
    """
    blocked = gate.blocked
    if {DEVICE, IDLE} & blocked.keys():
        profile = replace(profile, breakdown=None, utilisation=replace(profile.utilisation, busy=None))
    elif CAUSES in blocked and profile.breakdown is not None:
        profile = replace(profile, breakdown=replace(profile.breakdown, idle_by_cause_us={}))
    if OPERATORS in blocked:
        kernels = tuple(
            replace(cost, floor_us=None, bound=None, flops=None, least_bytes=None)
            for cost in profile.costs
            if cost.kind == "kernel"
        )
        profile = replace(profile, costs=kernels, recoverable_us=None)
    if {PEAK, FLOPS} & blocked.keys():
        none = Utilisation(busy=profile.utilisation.busy)
        profile = replace(profile, mfu=None, mfu_causal=None, mfu_own_peak=None, hfu=None, utilisation=none)
    return profile


def sums(path: Path, table: Table, machine: Machine) -> FileProfile:
    """The plain sums, whatever else can be said."""
    found, where = totals(table), place(table.head)
    return FileProfile(
        path=str(path),
        status="partial" if table.lost or table.skipped else "ok",
        reason=_loss(table),
        events=table.events,
        device=machine.name,
        rank=where.rank,
        world_size=where.world_size,
        kernels=found.kernels,
        kernel_us=found.kernel_us,
        busy_us=found.busy_us,
        span_us=found.span_us,
        steps=found.steps,
        step_mean_us=found.step_mean_us,
        nccl_kernels=found.nccl_kernels,
        exposed_comm_us=found.exposed_comm_us,
        memcpys=found.memcpys,
        memsets=found.memsets,
        nccl_us=found.nccl_us,
        kernels_busy_us=found.kernels_busy_us,
        busy_in_steps=found.busy_in_steps,
        kernels_busy_in_steps=found.kernels_busy_in_steps,
    )


def _loss(table: Table) -> str | None:
    parts = list(table.lost)
    if table.skipped:
        parts.append(f"{table.skipped} {'event' if table.skipped == 1 else 'events'} could not be read")
    return f"{'; '.join(parts)}; what is whole was read" if parts else None


def _busy(parts: Breakdown | None) -> float | None:
    return None if parts is None or parts.length_us <= 0 else 1 - parts.idle_us / parts.length_us


def per_step(parts: Breakdown | None, steps: int) -> Breakdown | None:
    """A breakdown divided by the number of steps it covers."""
    if parts is None:
        return None
    return Breakdown(
        length_us=parts.length_us / steps,
        compute_us=parts.compute_us / steps,
        exposed_comm_us=parts.exposed_comm_us / steps,
        exposed_copy_us=parts.exposed_copy_us / steps,
        idle_us=parts.idle_us / steps,
        idle_by_cause_us={cause: time / steps for cause, time in parts.idle_by_cause_us.items()},
    )


def utilisation(
    found: least.Floors, steps: Steps, machine: Machine, devices: int = 1
) -> tuple[Utilisation, tuple[Gap, ...]]:
    """The shares of the peak a step reaches, and why those that are missing are; of several devices their mean.

    The time of a step comes from a recording under the profiler, which slows the host down.
    """
    flops = sum(found.model.values())
    if not flops:
        why = "no matrix product, convolution or attention of a step has recorded shapes"
        return Utilisation(), (Gap(what="MFU", why=why, collect="torch.profiler.profile(record_shapes=True, ...)"),)
    if steps.median_us is None or steps.median_us < RESOLUTION_US:
        why = "it is not known how long a step takes"
        return Utilisation(), (Gap(what="MFU", why=why, collect="call profiler.step() at the end of each step"),)
    covered, share_of = uncounted(found)
    if share_of > TOO_MUCH:
        return Utilisation(), (Gap(what="MFU", why=covered, collect=UNCOUNTED),)
    seconds = steps.median_us / 1e6
    per_step_flops = flops / len(steps) / devices
    peak, source = machine.peak if machine.peak is not None else (None, None)
    peaks = machine.hardware.peak_flops
    known = all(dtype in peaks for dtype in found.model)
    ideal = sum(count / peaks[dtype] for dtype, count in found.model.items()) / len(steps) / devices if known else None

    def share(count: float | None) -> float | None:
        return count / len(steps) / devices / seconds / peak if count is not None and peak else None

    gaps: tuple[Gap, ...] = ()
    if share_of > 0.01:
        gaps = (Gap(what="MFU", why=f"{covered}: MFU is a lower bound", collect=UNCOUNTED, qualifies=True),)
    if peak is None:
        why = machine.reason or f"the dense peak of {machine.hardware.name} is not known"
        gaps += (Gap(what="MFU", why=why, collect="advisor doctor --calibrate on that machine, or --peak FLOP/S here"),)
    elif (share(flops) or 0.0) > 1:
        why = f"the step would reach {share(flops):.0%} of {peak:.3g} FLOP/s: that is not the device's peak"
        return Utilisation(), (Gap(what="MFU", why=why, collect="give the dense peak in FLOP/s, such as 989.4e12"),)
    main = max(found.model, key=lambda dtype: found.model[dtype])
    reached = machine.hardware.measured_flops.get(main)
    return Utilisation(
        model_flops_per_step=per_step_flops,
        achieved_flops=per_step_flops / seconds,
        mfu=share(flops),
        mfu_own_peak=ideal / seconds if ideal is not None else None,
        mfu_causal=share(found.causal),
        hfu=share(found.executed),
        of_measured=per_step_flops / seconds / reached if reached else None,
        peak_flops=peak,
        peak_source=source,
        definition=DEFINITION.format(time=TIME),
    ), gaps


RESOLUTION_US = 1e-3  # of a trace
TOO_MUCH = 0.2  # of the kernel time in calls whose arithmetic is not counted: the share of the peak says nothing
UNCOUNTED = "a recent torch with record_shapes=True; arithmetic of custom operators cannot be counted"


def uncounted(found: least.Floors) -> tuple[str, float]:
    """Which calls do arithmetic that is not counted, and their share of the time of all calls in the steps."""
    total = found.unit_us
    share = sum(found.uncounted.values()) / total if total > 0 else 0.0
    names = list(found.uncounted)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"the arithmetic of {shown} ({share:.0%} of the kernel time) is not counted", share


def tensor_time(table: Table, found: least.Floors, chosen: least.Flags) -> dict[str, float]:
    """Shares of the kernel time in kernels that use matrix units, that do not, and of which it is not known."""
    kernel = (table.activities.kind == KERNEL) & chosen
    time = least.lengths(table)
    total = float(time[kernel].sum())
    if total <= 0:
        return {}
    return {
        name: min(1.0, float(time[kernel & (found.tensor == value)].sum()) / total)
        for name, value in (("yes", 1), ("no", 0), ("unknown", -1))
    }


def recoverable(costs: Sequence[Cost], parts: Breakdown | None) -> float | None:
    """Time per step above the floors of the operators, None where no operator has one.

    Kernels that run beside each other have more time together than the device computes: no more than that is gained.
    """
    known = [cost.recoverable_us for cost in costs if cost.kind == "family" and cost.recoverable_us is not None]
    most = parts.compute_us if parts is not None else math.inf
    return min(sum(known), most) if known else None


def limited(costs: Sequence[Cost], table: Table, full: Fullness) -> list[Cost]:
    """Kernels with what limits the occupancy of the launch that took longest."""
    rows = table.activities
    longest: dict[str, int] = {}
    order = np.argsort(rows.duration, kind="stable")
    numbers = dict(zip(rows.name[order].tolist(), order.tolist(), strict=True))
    for number, row in numbers.items():
        longest[table.names[number]] = row
    return [
        replace(cost, limiter=full.launches.limiter_name(longest[cost.name])) if cost.kind == "kernel" else cost
        for cost in costs
    ]
