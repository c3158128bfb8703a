"""The nouns of `advisor analyze`: what one recorded process says, and what several say together.

Times are microseconds, shares lie between 0 and 1, rates are per second. A value that is not known is None. This module
imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.model import Metric, Utilisation

SCHEMA = 1
ITEM = frozenset({"aten::item", "aten::_local_scalar_dense"})  # read one number from a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something the data does not support: what cannot be said, why, and what to collect for it.

    `why` is a clause that can follow "because", `collect` names or asks for the data, with the command or argument.
    `qualifies` is True where `what` is said all the same and `why` is to be kept in mind.
    """

    what: str
    why: str
    collect: str
    qualifies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One stretch of device time, split: compute + exposed communication + exposed copies + idle = length.

    `idle_by_cause_us` splits the idle part by what the thread that launched the next work did meanwhile: data, sync,
    launch, communication, other; `queued` is idle although work had been launched, which is not the host's doing.
    """

    length_us: float
    compute_us: float
    exposed_comm_us: float
    exposed_copy_us: float
    idle_us: float
    idle_by_cause_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One kind of wait of the host for the device: the call, the operators around it (outermost first), how often.

    `reads_scalar` says that the wait is for one number on its way to Python (`.item()`, `float(t)`, `if t:`).
    """

    call: str
    operators: tuple[str, ...]
    count: int
    time_us: float

    @property
    def reads_scalar(self) -> bool:
        """Whether one of the operators reads a number."""
        return not ITEM.isdisjoint(self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the host did, over the whole recording unless a field says "steps"; times in microseconds, None if unknown.

    `short_kernels` run for less than 10 us. `without_launch` counts activities whose launch is not recorded, and
    `spill_over` those of them that were launched before the recording. `sync_calls` counts the synchronising calls by
    name; `waits` are what holds the host for the device within the steps, blocking copies included, the longest first.
    `pageable_h2d` counts the copies of pageable memory to the device. `data_us` is the plain sum of the data loader's
    ranges, `data_share` their share of the host's steps.

    `queue_delay_us` is the median time from the return of a launch to the start of the first activity it launched. A
    delay of a few microseconds is the latency of a launch into an empty queue. `starved` is the share of the launches
    that returned when the device had finished all it had been given before: near 1, the host sets the pace.
    """

    kernels: int
    short_kernels: int
    without_launch: int
    spill_over: int
    sync_calls: Mapping[str, int] = field(default_factory=dict)
    sync_us: float = 0.0
    waits: tuple[Wait, ...] = ()
    pageable_h2d: int = 0
    pageable_h2d_us: float = 0.0
    data_ranges: int = 0
    data_us: float = 0.0
    data_share: float | None = None
    queue_delay_us: float | None = None
    starved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How full the launches leave the multiprocessors: means over kernel time, in percent where the name says so.

    `recorded_percent` is the profiler's own estimate, as it is. `percent` is ours over the share `known`
    of the kernel time for which registers, threads and shared memory were recorded; `limiters` are shares of that time.
    """

    recorded_percent: float | None = None
    recorded_unknown: float | None = None  # share of the kernel time for which it reads 0 and could not know
    percent: float | None = None
    known: float | None = None
    sm_efficiency: float | None = None  # of kernel time: share of multiprocessors that could get a block
    sm_efficiency_in_steps: float | None = None  # the same by slices of time, idle time as 0: what TensorBoard shows
    wave_efficiency: float | None = None
    limiters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One kind of work, per step where steps are known, else over the recording.

    `kind` is kernel, operator, family or module; `floor_us` is max(FLOPs / peak, least bytes / bandwidth), at most the
    measured time, None where neither is known; `bound` says which of the two it is.
    """

    kind: str
    name: str
    count: float
    time_us: float
    floor_us: float | None = None
    bound: str | None = None
    flops: float | None = None
    least_bytes: float | None = None
    tensor_cores: bool | None = None
    occupancy_percent: float | None = None
    limiter: str | None = None
    shapes: str | None = None  # of an operator's inputs, with the dtype of its arithmetic
    counters: tuple[Metric, ...] = ()  # of Nsight Compute, or of the call replayed alone

    @property
    def title(self) -> str:
        """What it is called where one line names it: an operator with its shapes."""
        return f"{self.name} {self.shapes}" if self.shapes else self.name

    @property
    def recoverable_us(self) -> float | None:
        """Measured time above the floor."""
        return None if self.floor_us is None else max(0.0, self.time_us - self.floor_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of work that sets the time of a step, by what it consists of; parts sum to `length_us`.

    `length_us` is a step at the pace of its slowest cycle, of the host or of a stream; it need not be the median step.
    `what_if` tells the length if one kind of work took its floor, everything behind it moving up.
    """

    length_us: float
    parts_us: Mapping[str, float]
    what_if: tuple[WhatIf, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """If one kind of work took its floor, the step would take `step_us` instead of `measured_us`."""

    name: str
    measured_us: float
    step_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProfile:
    """What one file says. The first block of fields is stable: tools may rely on it.

    `status` is ok, partial (some of the file could not be read, `reason` says what) or refused (nothing is said).
    Sums are over all that was recorded: kernel_us is the plain sum, busy_us the union of kernels, copies and memsets,
    span_us the time from the first of them to the last, step_mean_us the mean of the ProfilerStep ranges on the host.
    exposed_comm_us is the union of all kernels less that of the kernels that do not communicate.
    """

    path: str
    status: str
    reason: str | None = None
    events: int | None = None
    kernels: int | None = None
    kernel_us: float | None = None
    busy_us: float | None = None
    span_us: float | None = None
    steps: int | None = None
    step_mean_us: float | None = None
    nccl_kernels: int | None = None
    exposed_comm_us: float | None = None
    device: str | None = None
    rank: int | None = None
    world_size: int | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    mfu_own_peak: float | None = None
    hfu: float | None = None
    # ------------------------------------------------------------------------------------------------ not yet stable
    form: str = "kineto"
    memcpys: int | None = None
    memsets: int | None = None
    nccl_us: float | None = None
    kernels_busy_us: float | None = None  # union of kernels alone
    without_launch: int | None = None
    busy_in_steps: float | None = None  # share of the ProfilerStep window
    kernels_busy_in_steps: float | None = None
    steps_from: str | None = None  # ProfilerStep, optimizer, device gaps
    device_step_us: float | None = None  # median of the steps as the device saw them
    host_step_us: float | None = None  # median of the steps of a recording without a device
    utilisation: Utilisation = field(default_factory=Utilisation)
    breakdown: Breakdown | None = None  # per step
    host: HostFacts | None = None
    occupancy: Occupancy = field(default_factory=Occupancy)
    tensor_time: Mapping[str, float] = field(default_factory=dict)  # yes, no, unknown: shares of kernel time
    recoverable_us: float | None = None  # per step
    costs: tuple[Cost, ...] = ()
    critical_path: CriticalPath | None = None
    counters: tuple[Metric, ...] = ()
    gaps: tuple[Gap, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """One rank of a job, per step: communication split in transfer and waiting for ranks that come later."""

    path: str
    rank: int | None
    step_us: float | None
    compute_us: float | None
    exposed_comm_us: float | None
    transfer_us: float | None
    wait_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Several ranks of one job. `straggler` is the rank the others wait for; None where it cannot be told."""

    ranks: tuple[RankTime, ...]
    straggler: int | None = None
    imbalance: float | None = None  # (slowest compute - mean) / mean
    missing: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What `advisor analyze` found in some files, in the order of rank and path."""

    files: tuple[FileProfile, ...]
    ranks: Ranks | None = None
    schema: int = SCHEMA
