"""The integrity gate: what a trace cannot support, told before anything is said about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from advisor.columns.intervals import clipped, length
from advisor.columns.schema import WINDOW
from advisor.columns.table import Ints, Table
from advisor.measured import Gap
from advisor.metrics.breakdown import LATENCY_US, QUEUED, Phases, busiest_device
from advisor.metrics.hosttime import Flags, matching
from advisor.metrics.steps import MARKED, Steps, spill_over

STEPS = "step times"
DEVICE = "device time"
IDLE = "idle time"
CAUSES = "causes of idle time"
OPERATORS = "time by operator"
FLOPS = "FLOPs"
PEAK = "share of the peak"
COUNTERS = "counters"
CLAIMS = (STEPS, DEVICE, IDLE, CAUSES, OPERATORS, FLOPS, PEAK, COUNTERS)
ON_DEVICE = (DEVICE, IDLE, CAUSES, PEAK)
IN_TIME = (STEPS, DEVICE, IDLE, CAUSES, OPERATORS)

COVERAGE = 0.95  # share of what must be there: launches of activities, kernels of launches
STRAYED = 0.01  # share of activities that may lie where none can be
EARLY_US = 100.0  # clocks of host and device agree better than this
OUTSIDE_US = 1e3  # the profiler's own window is not exact to less

KERNEL_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperativeKernel")
GRAPH_LAUNCH = re.compile(r"GraphLaunch")
CAPTURE = re.compile(r"Stream(Begin|End)Capture")
FOREIGN = re.compile(r"^(mtia|hpu|glow|privateuse1)_")
RANGES = "cuda_profiler_range"
_DIGIT = re.compile(rb"\d")

RECORD_DEVICE = (
    "record with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]), no other CUDA "
    "profiler attached"
)
MARK_STEPS = (
    "record with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)) and call "
    "profiler.step() at the end of each step"
)
FEWER_STEPS = "record again with fewer steps at once (schedule(active=2)) and ProfilerActivity.CPU"
SETTLED = "record again with fewer steps at once and torch.cuda.synchronize() before the first of them"
REPLAYS = "record steps that run without CUDA graphs (torch.compile without mode='reduce-overhead')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a trace does not support. `blocked` has every claim that may not be made, with the first reason."""

    gaps: tuple[Gap, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Found:
    """A reason that blocks some claims; one that blocks none qualifies the claim it is `about`."""

    blocks: tuple[str, ...]
    why: str
    collect: str
    about: str = ""

    @property
    def gap(self) -> Gap:
        return Gap(
            what=", ".join(self.blocks) or self.about,
            why=self.why,
            collect=self.collect,
            qualifies=not self.blocks,
        )


@dataclass(frozen=True, slots=True)
class _Case:
    table: Table
    calls: Ints
    steps: Steps
    phases: Phases | None
    counters: tuple[float, float] | None


def check(
    table: Table,
    calls: Ints,
    steps: Steps,
    phases: Phases | None = None,
    counters: tuple[float, float] | None = None,
) -> Gate:
    """Ask what a trace supports before anything is said about it.

    `calls` comes from `launching_calls`, `steps` from `find_steps`, `phases` are those of the steps or of the whole
    recording; `counters` is the window of counters that were sampled beside the run, in microseconds of the table. The
    gaps come in a fixed order. Thresholds are those of `analyze.insufficient`.
    """
    case = _Case(table, calls, steps, phases, counters)
    found = [item for question in _QUESTIONS for item in question(case)]
    blocked: dict[str, str] = {}
    for item in found:
        for claim in item.blocks:
            blocked.setdefault(claim, item.why)
    return Gate(gaps=tuple(item.gap for item in found), blocked={key: blocked[key] for key in CLAIMS if key in blocked})


# ------------------------------------------------------------------------------------------------------ what is missing


def _device(case: _Case) -> Iterator[_Found]:
    """Why nothing ran on a device, as far as the trace tells."""
    if len(case.table.activities):
        return
    table = case.table
    launches = int(matching(table, KERNEL_LAUNCH, table.calls.name).sum())
    foreign = sorted(category for category in table.counts if FOREIGN.match(category))
    on_nccl = any(name.startswith("nccl:") for name in table.names)
    if foreign:
        why = f"the accelerator is not known here: its events ({', '.join(foreign)}) are not read"
        yield _Found(ON_DEVICE, why, "only the host's side of such a trace can be analyzed")
    elif RANGES in table.counts:
        why = (
            f"the trace holds {table.counts[RANGES]} counter ranges of CUPTI's range profiler and no kernel: that "
            "profiler runs kernels one by one, so this is not an idle GPU"
        )
        yield _Found((*ON_DEVICE, STEPS), why, f"{RECORD_DEVICE}, without experimental_config")
    elif table.lost:
        why = f"{'; '.join(table.lost)}, before any device activity"
        yield _Found(ON_DEVICE, why, "export the trace again and copy the whole file")
    elif launches:
        why = f"{launches} kernel launches are recorded and not one kernel"
        yield _Found((*ON_DEVICE, STEPS), why, RECORD_DEVICE)
    elif on_nccl:
        why = "collectives ran on nccl, so there was a GPU, but nothing of it is recorded"
        yield _Found((*ON_DEVICE, STEPS), why, RECORD_DEVICE)
    else:
        why = "nothing of a device is recorded: times are those of the host"
        yield _Found(ON_DEVICE, why, f"on a machine with a GPU {RECORD_DEVICE}")


def _steps(case: _Case) -> Iterator[_Found]:
    """Whether steps are marked and what they launched is there."""
    steps = case.steps
    if steps.source is None:
        yield _Found((STEPS,), "the steps are not marked", MARK_STEPS)
    elif not len(steps):
        yield _Found((STEPS,), "no device activity was launched in a marked step", RECORD_DEVICE)
    elif bool((steps.host[:, 1] <= steps.host[:, 0]).any()):
        yield _Found((STEPS,), "a step ends before it begins", "record again with the machine's clock left alone")
    elif steps.source != MARKED:
        named = "optimizer steps" if steps.source == "optimizer" else "the repeated sequence of kernels"
        yield _Found((), f"the steps are not marked; they were found by {named}", MARK_STEPS, about=STEPS)


def _operators(case: _Case) -> Iterator[_Found]:
    """Operators with shapes are what FLOPs are counted from."""
    table = case.table
    if not len(table.operators):
        if not table.lost:
            collect = "record with ProfilerActivity.CPU as well, and record_shapes=True"
            yield _Found((OPERATORS, FLOPS), "no operator is recorded", collect)
        return
    if not any(_DIGIT.search(signature.dims) for signature in table.signatures):
        yield _Found((FLOPS,), "the shapes of the operators' inputs are not recorded", "record with record_shapes=True")


def _name(case: _Case) -> Iterator[_Found]:
    """A device without a name has no peak on record."""
    if not len(case.table.activities):
        return
    listed = case.table.head.get("deviceProperties") or case.table.head.get("computeProperties")
    names = [item.get("name") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    if not any(names):
        why = "the trace names the device with an empty text" if names else "the trace does not name the device"
        yield _Found((PEAK,), why, "pass the dense peak of the device with --peak")


def _several(case: _Case) -> Iterator[_Found]:
    """Idle time is that of one device."""
    numbers = np.unique(case.table.activities.device)
    if len(numbers) > 1:
        chosen = busiest_device(case.table)
        why = f"{len(numbers)} devices are recorded; idle time and its causes are those of device {chosen}"
        yield _Found((), why, "one process per device (DistributedDataParallel)", about=IDLE)


# ------------------------------------------------------------------------------------------------------ what is damaged


def _negative(case: _Case) -> Iterator[_Found]:
    """Durations below zero: a clock that was set back."""
    table = case.table
    kinds = (table.operators, table.calls, table.activities, table.ranges)
    count = sum(int((rows.duration < 0).sum()) for rows in kinds)
    if count:
        worst = -min(float(rows.duration.min()) for rows in kinds if len(rows))
        why = f"{count} events have a negative duration, down to -{worst:.0f} us: the clock was set back"
        yield _Found(IN_TIME, why, "record again with the machine's clock left alone")


def _launches(case: _Case) -> Iterator[_Found]:
    """The share of activities whose launch is recorded, what was launched before the recording left out."""
    rows = case.table.activities
    counted = ~spill_over(case.table, case.calls)
    if len(case.steps) and case.steps.on_device:
        counted &= rows.start >= case.steps.windows[0, 0]
    total, launched = int(counted.sum()), int((counted & (case.calls >= 0)).sum())
    if launched < COVERAGE * total:
        why = f"only {launched} of {total} device activities have their launch"
        yield _Found((STEPS, CAUSES, OPERATORS), why, FEWER_STEPS)


def _clocks(case: _Case) -> Iterator[_Found]:
    """Activities that run before their launch: the clocks of host and device disagree by at least that much."""
    known = np.flatnonzero(case.calls >= 0)
    ahead = case.table.calls.start[case.calls[known]] - case.table.activities.start[known]
    early = ahead > EARLY_US
    if early.any():
        why = (
            f"{int(early.sum())} of {len(known)} device activities start before their launch, by {ahead.max():.0f} us "
            "at most: the clocks of host and device are apart"
        )
        blocks = (STEPS, CAUSES) if early.sum() > STRAYED * len(known) else ()
        yield _Found(blocks, why, "record again; update the driver if it stays", about=CAUSES)


def _window(case: _Case) -> Iterator[_Found]:
    """Activities outside the window that the profiler says it recorded."""
    rows, ranges = case.table.activities, case.table.ranges
    chosen = ranges.kind == WINDOW
    if not len(rows) or not chosen.any():
        return
    begin = float(ranges.start[chosen].min())
    end = float((ranges.start[chosen] + ranges.duration[chosen]).max())
    outside = (rows.end < begin - OUTSIDE_US) | (rows.start > end + OUTSIDE_US)
    if outside.any():
        away = max(begin - float(rows.end[outside].min()), float(rows.start[outside].max()) - end)
        why = (
            f"{int(outside.sum())} of {len(rows)} device activities lie outside the window that the profiler recorded, "
            f"by {away:.0f} us at most"
        )
        blocks = (STEPS, DEVICE, IDLE, CAUSES) if outside.sum() > STRAYED * len(rows) else ()
        yield _Found(blocks, why, "record again with one profiler at a time", about=DEVICE)


def _dropped(case: _Case) -> Iterator[_Found]:
    """Kernel launches without a kernel: captured into a graph, which is as it should be, or dropped records."""
    table, rows = case.table, case.table.calls
    if not len(table.activities):
        return
    launch = matching(table, KERNEL_LAUNCH, rows.name)
    without = launch & ~np.isin(rows.correlation, table.activities.correlation)
    captured = without & _capturing(table)
    lost, total = int((without & ~captured).sum()), int(launch.sum())
    if captured.sum() > (1 - COVERAGE) * total:
        why = f"{int(captured.sum())} of {total} kernel launches were captured into a graph and did not run"
        yield _Found((STEPS, DEVICE, IDLE, CAUSES, OPERATORS), why, "record steps that replay the graph")
    if lost > (1 - COVERAGE) * total:
        why = f"{lost} of {total} kernel launches have no kernel: records of the device were dropped"
        yield _Found(IN_TIME, why, FEWER_STEPS)


def _capturing(table: Table) -> Flags:
    """For each call whether a stream was being captured."""
    rows = table.calls
    edge = matching(table, CAPTURE, rows.name)
    change = np.where(matching(table, re.compile("Begin"), rows.name), 1, -1) * edge
    return np.cumsum(change) > 0


def _graphs(case: _Case) -> Iterator[_Found]:
    """Replays of graphs of which no activity is recorded."""
    table, rows = case.table, case.table.calls
    replays = np.flatnonzero(matching(table, GRAPH_LAUNCH, rows.name))
    if not len(replays) or not len(table.activities):
        return
    counts = np.bincount(case.calls[case.calls >= 0], minlength=len(rows))[replays]
    empty = int((counts == 0).sum())
    if empty:
        why = f"{empty} of {len(replays)} graph launches have no device activity: what the graphs ran is not recorded"
        yield _Found((DEVICE, IDLE, CAUSES, OPERATORS), why, REPLAYS)


def _stalls(case: _Case) -> Iterator[_Found]:
    """A device that stands still with work in its queue for long ran something that is not recorded, or waited for it.

    More than 5 % of the time in such pauses of more than 100 us each is no idle time that could be explained.
    """
    if case.phases is None:
        return
    pauses = case.phases.idle[QUEUED]
    long = pauses[pauses[:, 1] - pauses[:, 0] > LATENCY_US]
    stalled, whole = length(long), length(case.phases.windows)
    if stalled > (1 - COVERAGE) * whole:
        replays = bool(matching(case.table, GRAPH_LAUNCH, case.table.calls.name).any())
        why = (
            f"for {stalled / 1e3:.1f} ms of {whole / 1e3:.1f} ms the device ran nothing that is recorded although work "
            "was in its queue: activities are missing" + (" (of replayed graphs, for one)" if replays else "")
        )
        yield _Found((IDLE, CAUSES), why, REPLAYS if replays else SETTLED)


def _counters(case: _Case) -> Iterator[_Found]:
    """Counters say something about the steps only when they were sampled during them."""
    if case.counters is None or not len(case.steps):
        return
    windows = case.steps.windows
    shared = length(clipped(windows, *case.counters))
    if shared < COVERAGE * length(windows):
        why = f"the counters cover {shared / length(windows):.0%} of the steps in the trace"
        yield _Found((COUNTERS,), why, "sample counters and trace in one run, over the same steps")


_QUESTIONS: tuple[Callable[[_Case], Iterator[_Found]], ...] = (
    _device,
    _steps,
    _negative,
    _clocks,
    _window,
    _launches,
    _dropped,
    _graphs,
    _stalls,
    _operators,
    _name,
    _several,
    _counters,
)
