"""The figures and sentences that tell what `advisor analyze` found, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advisor.measured import Breakdown, Cost, CriticalPath, FileProfile, Gap, WhatIf

from . import wording
from .ladder import Rung, counters, definition
from .wording import Headline, Tone, duration, known, percent

KINDS: Mapping[str, str] = {"family": "families", "module": "modules", "operator": "operators", "kernel": "kernels"}
"""Kinds of cost from the widest view to the narrowest, with their plural."""

_STEPS: Mapping[str, str] = {  # where steps come from
    "ProfilerStep": "steps marked by ProfilerStep",
    "optimizer": "steps that end with the optimizer",
    "device gaps": "steps found as what the device repeats",
}
_HOST: Mapping[str, str] = {  # what the host did meanwhile: words for the keys of idle causes and critical paths
    "data": "data loader",
    "communication": "communication wait",
    "sync": "synchronization",
    "launch": "host launch",
    "queued": "between queued work",
    "host": "other host time",
    "other": "other",
}
_CAUSE_KINDS: Mapping[str, str] = {"communication": "comm", "queued": "idle"}  # colours of causes that are no keys

# ---------------------------------------------------------------------------------------------------------------- file


def per_step(profile: FileProfile) -> bool:
    """Whether the costs and the breakdown are per step; otherwise they are over all that was recorded."""
    return profile.steps_from is not None


def stretch(profile: FileProfile) -> str:
    """The stretch of time that the costs and the breakdown speak of."""
    return "step" if per_step(profile) else "recording"


def where(profile: FileProfile) -> str:
    """The heading of the breakdown."""
    return "where a step goes" if per_step(profile) else "where the recorded time goes"


def stretch_us(profile: FileProfile) -> float | None:
    """The length that the share of a cost is a share of."""
    if profile.breakdown is not None and known(profile.breakdown.length_us):
        return profile.breakdown.length_us
    return (profile.device_step_us or profile.host_step_us) if per_step(profile) else profile.span_us


def headline(profile: FileProfile) -> Headline:
    """The answer in one line: how long a step takes and how much of it lies above the floor, or why nothing is said."""
    tone: Tone = "open" if profile.status == "partial" else "flat"
    if profile.status == "refused":
        return Headline("bad", "refused", profile.reason or "no reason was recorded")
    above = _above_floor(profile)
    if known(profile.device_step_us):
        return Headline(tone, f"{duration(profile.device_step_us)} per step", above)
    if known(profile.step_mean_us):
        host = "mean of the ProfilerStep ranges on the host"
        return Headline(tone, f"{duration(profile.step_mean_us)} per step", f"{host}; {above}" if above else host)
    if profile.kernels == 0:
        return Headline("open", "no GPU work was recorded", "")
    spanned = f"{duration(profile.span_us)} from the first GPU work to the last" if known(profile.span_us) else ""
    return Headline(tone, "no step was found", "; ".join(part for part in (spanned, above) if part))


def _above_floor(profile: FileProfile) -> str:
    if not known(profile.recoverable_us):
        return ""
    whole = "the mean step" if per_step(profile) else "the GPU span"
    part = _share(profile.recoverable_us, stretch_us(profile))
    said = f" ({percent(part)} of {whole})" if part is not None else ""
    return f"{duration(profile.recoverable_us)}{said} above the floor"


def about(profile: FileProfile) -> str:
    """Where the file comes from: device, rank, what it holds; empty where nothing is known."""
    parts = [profile.device] if profile.device else []
    if profile.rank is not None:
        parts.append(f"rank {profile.rank:,}" + (f" of {profile.world_size:,}" if profile.world_size else ""))
    for count, noun in ((profile.events, "events"), (profile.kernels, "kernels")):
        if count is not None:
            parts.append(f"{count:,} {noun if count != 1 else noun[:-1]}")
    return ", ".join(parts)


def step_times(profile: FileProfile) -> tuple[str, ...]:
    """Step time as the device saw it and as the host marked it, each under its own name."""
    found = []
    if known(profile.device_step_us):
        source = f", {_STEPS.get(profile.steps_from, profile.steps_from)}" if profile.steps_from else ""
        found.append(f"{duration(profile.device_step_us)} median on the device{source}")
    if known(profile.host_step_us):
        found.append(f"{duration(profile.host_step_us)} median on the host, no device was recorded")
    if known(profile.step_mean_us):
        many = f"{profile.steps:,} " if profile.steps else ""
        plural = "range" if profile.steps == 1 else "ranges"
        found.append(f"{duration(profile.step_mean_us)} mean of {many}ProfilerStep {plural} on the host")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Busy:
    """One GPU busy share, what it is a share of, the same in a word for a table, and what counts as busy."""

    share: float
    of: str
    short: str
    meaning: str


def busy(profile: FileProfile) -> tuple[Busy, ...]:
    """GPU busy under every denominator that is known: they say different things and none stands alone."""
    union = "any kernel, copy or memset runs"
    found = (
        (profile.utilisation.busy if per_step(profile) else None, "the steps on the device", "steps", union),
        (profile.busy_in_steps, "the ProfilerStep window", "ProfilerStep", f"{union}; the window is that of the host"),
        (_share(profile.busy_us, profile.span_us), "the GPU span", "GPU span", f"{union}; from the first to the last"),
    )
    return tuple(Busy(share, *rest) for share, *rest in found if share is not None and known(share))


def _share(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None or not (known(part) and known(whole)) or whole <= 0:
        return None
    return part / whole


def mfu(profile: FileProfile) -> tuple[str, str]:
    """The headline MFU with the peak it is a share of, or why it is not known."""
    if not known(profile.mfu):
        return wording.UNKNOWN, why(profile, "mfu", "peak", "flops")
    return percent(profile.mfu), wording.of_peak(profile.utilisation) or "of a peak that is not recorded"


def other_mfu(profile: FileProfile) -> str:
    """The shares that stand beside the headline MFU, each under its own name."""
    named = (
        ("{} of its own peaks", profile.mfu_own_peak),
        ("{} causal", profile.mfu_causal),
        ("HFU {}", profile.hfu),
        ("{} of the measured matmul rate", profile.utilisation.of_measured),
    )
    return ", ".join(text.format(percent(share)) for text, share in named if known(share))


def tensor_time(profile: FileProfile) -> str:
    """How much of the kernel time ran on tensor cores; empty where nothing is said."""
    words = (("yes", "{} of kernel time"), ("no", "not in {}"), ("unknown", "unknown for {}"))
    shares = ((text, profile.tensor_time.get(key)) for key, text in words)
    return ", ".join(text.format(percent(share)) for text, share in shares if known(share))


def occupancy(profile: FileProfile) -> tuple[str, ...]:
    """Occupancy as we compute it with its limiters, and as the profiler recorded it."""
    found, full = [], profile.occupancy
    if full.percent is not None and known(full.percent):
        part = f" ({percent(full.known)} of it is known)" if known(full.known) else ""
        found.append(f"{percent(full.percent / 100)} mean over kernel time{part}")
    if limits := ordered_shares(full.limiters):
        found.append("limited by " + ", ".join(f"{name} {percent(share)}" for name, share in limits))
    if full.recorded_percent is not None and known(full.recorded_percent):
        blind = full.recorded_unknown
        zero = (
            f", which wrote 0 for {percent(blind)} of it that it cannot judge"
            if blind is not None and blind > 0.005
            else ""
        )
        found.append(f"{percent(full.recorded_percent / 100)} as the profiler estimated it{zero}")
    return tuple(found)


def sm_efficiency(profile: FileProfile) -> str:
    """Whether the launches can fill the multiprocessors; empty where nothing is said."""
    full, found = profile.occupancy, []
    if known(full.sm_efficiency):
        found.append(f"{percent(full.sm_efficiency)} of kernel time, estimated")
    if known(full.sm_efficiency_in_steps):
        found.append(f"{percent(full.sm_efficiency_in_steps)} of the steps with their idle time")
    if known(full.wave_efficiency):
        found.append(f"waves {percent(full.wave_efficiency)} full")
    return ", ".join(found)


def ordered_shares(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """Shares that say something, the largest first."""
    return sorted(((name, share) for name, share in shares.items() if known(share) and share > 0), key=_descending)


def _descending(item: tuple[str, float]) -> tuple[float, str]:
    return (-item[1], item[0])


def why(profile: FileProfile, *names: str) -> str:
    """The first recorded reason why a figure is missing."""
    return wording.why_missing({each.what: each.why for each in reversed(profile.gaps)}, *names)


def gap(each: Gap) -> str:
    """What cannot be said and why."""
    return f"{each.what}, with care: {each.why}" if each.qualifies else f"cannot say {each.what} because {each.why}"


def ladder(profile: FileProfile) -> tuple[Rung, ...]:
    """The same stretch of time from the most flattering figure to the headline figure."""
    found = [
        Rung(name=f"GPU busy, of {each.of}", meaning=each.meaning, before=each.share, after=None)
        for each in busy(profile)
    ]
    full, use = profile.occupancy, profile.utilisation
    percents = (
        ("Occupancy", "resident warps of the most possible, from registers, threads and shared memory", full.percent),
        ("Occupancy, as recorded", "the profiler's own estimate", full.recorded_percent),
    )
    shares = (
        ("SM efficiency, estimated", "of kernel time: multiprocessors that can get a block", full.sm_efficiency),
        ("Wave efficiency", "block slots of the waves that hold a block", full.wave_efficiency),
        *((name, meaning, None if value is None else value / 100) for name, meaning, value in percents),
        ("Tensor-core time", "kernel time in kernels that use tensor cores", profile.tensor_time.get("yes")),
    )
    mfus = (
        ("Share of the measured matmul rate", "model FLOP/s over the rate this device reached", use.of_measured),
        ("HFU", "FLOP/s that ran, recomputation included, over the peak of MFU", profile.hfu),
        ("MFU of its own peaks", "model FLOP/s over the peak of each operator's data type", profile.mfu_own_peak),
        ("MFU, causal", "MFU that counts only the half of causal attention that is needed", profile.mfu_causal),
    )
    found += [Rung(name=name, meaning=said, before=share, after=None) for name, said, share in shares if known(share)]
    found += counters(profile.counters)
    found += [Rung(name=name, meaning=said, before=share, after=None) for name, said, share in mfus if known(share)]
    reason = None if known(profile.mfu) else why(profile, "mfu", "peak", "flops")
    meaning = definition(use.definition, use)
    return (*found, Rung(name="MFU", meaning=meaning, before=profile.mfu, after=None, reason=reason))


# ----------------------------------------------------------------------------------------------------------- breakdown


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step: `kind` names its colour, `within` what it is part of."""

    name: str
    us: float
    share: float
    kind: str
    within: str | None = None


def parts(breakdown: Breakdown | None) -> tuple[Part, ...]:
    """The parts of a stretch that take time, idle time followed by its causes."""
    if breakdown is None or not known(breakdown.length_us) or breakdown.length_us <= 0:
        return ()
    whole, causes = breakdown.length_us, breakdown.idle_by_cause_us
    order = [*_HOST, *sorted(set(causes) - set(_HOST))]
    named = [
        ("compute", breakdown.compute_us, "compute", None),
        ("exposed communication", breakdown.exposed_comm_us, "comm", None),
        ("exposed copies", breakdown.exposed_copy_us, "copy", None),
        ("idle", breakdown.idle_us, "idle", None),
        *((_HOST.get(key, key), causes[key], _CAUSE_KINDS.get(key, key), "idle") for key in order if key in causes),
    ]
    return tuple(Part(name, us, us / whole, kind, within) for name, us, kind, within in named if known(us) and us > 0)


def path_parts(path: CriticalPath) -> list[tuple[str, float]]:
    """What the critical path consists of, the longest first."""
    words = {**_HOST, "communication": "communication", "launch": "calls that launch", "host": "host between launches"}
    return [(words.get(name, name), us) for name, us in ordered_shares(path.parts_us)]


def what_ifs(profile: FileProfile) -> tuple[WhatIf, ...]:
    """What the floors would change end to end, the most first."""
    path = profile.critical_path
    every = [each for each in (path.what_if if path else ()) if known(each.measured_us) and known(each.step_us)]
    return tuple(sorted(every, key=lambda each: (each.step_us - each.measured_us, each.name)))


def what_if(profile: FileProfile, each: WhatIf) -> str:
    """One such sentence."""
    was, now = duration(each.measured_us), duration(each.step_us)
    start = f"if {each.name} took its floor, the {stretch(profile)} would"
    return f"{start} still take {was}" if was == now else f"{start} take {now} instead of {was}"


# --------------------------------------------------------------------------------------------------------------- costs


def cost_groups(profile: FileProfile) -> tuple[tuple[str, tuple[Cost, ...]], ...]:
    """Costs by kind, the most recoverable first; those without a floor follow by their time."""
    kinds = dict.fromkeys([*KINDS, *sorted({each.kind for each in profile.costs})])
    groups = ((kind, tuple(each for each in profile.costs if each.kind == kind)) for kind in kinds)
    return tuple((kind, tuple(sorted(found, key=_rank))) for kind, found in groups if found)


def recoverable_us(cost: Cost) -> float | None:
    """What lies above the floor, None where time or floor is no number."""
    return cost.recoverable_us if known(cost.time_us) and known(cost.floor_us) else None


def _rank(cost: Cost) -> tuple[bool, float, float, str]:
    gain, time = recoverable_us(cost), cost.time_us if known(cost.time_us) else 0.0
    return (gain is None, -(gain or 0.0), -time, cost.title)


def group_title(kind: str) -> str:
    """The heading of one kind of cost."""
    return f"{KINDS.get(kind, kind)} by recoverable time"


def rest(costs: Sequence[Cost], shown: int) -> str:
    """What a table leaves out: how many, and the longest without a floor, which no ranking by floors can place."""
    hidden = costs[shown:]
    if not hidden:
        return ""
    said = f"and {len(hidden):,} more in --json"
    longest = max(
        (each for each in hidden if recoverable_us(each) is None and known(each.time_us)), key=_time, default=None
    )
    return said if longest is None else f"{said}; longest without a floor: {duration(longest.time_us)} {longest.name}"


def _time(cost: Cost) -> float:
    return cost.time_us


def cost_share(profile: FileProfile, cost: Cost) -> str:
    """The time of a cost as a share of the step or the recording."""
    return percent(_share(cost.time_us, stretch_us(profile)))


def count(cost: Cost) -> str:
    """How often, whole numbers without decimals."""
    return (
        wording.count(cost.count) if known(cost.count) and cost.count == int(cost.count) else wording.figure(cost.count)
    )


def tensor(cost: Cost) -> str:
    """Whether tensor cores did the work."""
    return {True: "yes", False: "no", None: "unknown"}[cost.tensor_cores]


def cost_occupancy(cost: Cost) -> str:
    """Occupancy and what limits it."""
    if cost.occupancy_percent is None or not known(cost.occupancy_percent):
        return wording.UNKNOWN
    return percent(cost.occupancy_percent / 100) + (f" {cost.limiter}" if cost.limiter else "")
