"""The nouns every stage speaks: frozen, plain values with their unit in the name.

Times are microseconds unless the name says otherwise, rates are per second, shapes are in elements. A value that is
not known is `None`, never 0, -1 or infinity; in columns of row numbers -1 is no row. This module imports the standard
library only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

# ---------------------------------------------------------------------------------------------------------------- where


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a source file: lines from 1, columns from 0 in characters, the end exclusive.

    `path` is relative to the project root for the user's own files and absolute for library files.
    """

    path: str
    line: int
    column: int = 0
    end_line: int | None = None
    end_column: int | None = None
    function: str | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


# ------------------------------------------------------------------------------------------------------------- machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device: datasheet figures (dense) beside figures measured in the run, both optional.

    `peak_flops` and `measured_flops` map a dtype name ("bfloat16") to FLOP/s; bandwidths are bytes/s; `sources` maps a
    figure's name to where it comes from.
    """

    name: str
    kind: str  # "cuda" or "cpu"
    arch: str | None = None
    sm_count: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    measured_flops: Mapping[str, float] = field(default_factory=dict)
    hbm_bytes: int | None = None
    hbm_bandwidth: float | None = None
    measured_bandwidth: float | None = None
    link_bandwidth: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What makes two runs comparable or not: an allow-list of facts, never a dump of the environment.

    `packages` are the kernel libraries that the script's interpreter can import, by distribution name, with versions.
    """

    python: str
    torch: str | None
    cuda: str | None = None
    driver: str | None = None
    platform: str | None = None
    gpus: tuple[str, ...] = ()
    cpu: str | None = None
    cpu_count: int | None = None
    threads: int | None = None
    command: tuple[str, ...] = ()
    commit: str | None = None
    dirty: bool | None = None
    seed: int | None = None
    date: str | None = None
    advisor: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    collectors: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One measured or derived figure: absent when unknown, never zero. `source` is ncu, gpm, dcgm, kineto, nvml or
    derived."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleCounters:
    """Device counters of one kernel in the run (`kind` kernel, by Nsight Compute) or of one operator call replayed
    alone (`kind` operator, by GPM); `time_us` is its time per step in the trace. Where there are none, `reason` says
    why.
    """

    kind: str
    name: str
    time_us: float | None = None
    counters: tuple[Metric, ...] = ()
    reason: str | None = None


# ------------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step, timed on the device; the phases sum to the duration.

    Phase names: data, forward, backward, optimizer, comm, copy, other, idle.
    """

    index: int
    duration_us: float
    tokens: int | None = None
    phases_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operator calls of the profiled steps, one column per field, row i of each column being one call.

    `parent` is the row of the enclosing operator or -1; `sequence` the autograd sequence number or -1; `forward_thread`
    is non-zero for an operator that runs in the backward pass; `step` is the index of its step or -1. `shapes` and
    `dtypes` hold one entry per input.
    """

    name: tuple[str, ...] = ()
    start_us: tuple[float, ...] = ()
    duration_us: tuple[float, ...] = ()
    thread: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()
    forward_thread: tuple[int, ...] = ()
    parent: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    dtypes: tuple[tuple[str, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The device activities of the profiled steps (kernels, copies, fills), one column per field.

    `category` is kernel, memcpy or memset; `operator` is a row of `Operators` or -1; `correlation` joins the launch.
    """

    name: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    start_us: tuple[float, ...] = ()
    duration_us: tuple[float, ...] = ()
    stream: tuple[int, ...] = ()
    correlation: tuple[int, ...] = ()
    operator: tuple[int, ...] = ()
    step: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the result of another node of the same graph."""

    index: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is a torch constant or a slice: `kind` is dtype, device, layout, ellipsis, slice or opaque.

    A slice keeps its bounds in `parts` (start, stop, step).
    """

    kind: str
    text: str = ""
    parts: tuple[Any, ...] = ()


Arg: TypeAlias = Any  # Ref | Symbol | None | bool | int | float | complex | str | tuple[Arg, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a captured FX graph, as the user's program called it.

    `target` is a qualified name: "operator.matmul", "torch.nn.functional.softmax", "method.masked_fill". `frames` are
    the source positions of the call, outermost first, library frames included; `span` is the innermost one in the
    user's own code. `facts` are properties of the value seen in the annotated run, such as {"mask": "causal"}.
    """

    index: int
    name: str
    op: str
    target: str
    args: tuple[Arg, ...] = ()
    kwargs: Mapping[str, Arg] = field(default_factory=dict)
    users: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    stride: tuple[int, ...] | None = None
    device: str | None = None
    requires_grad: bool = False
    module: str | None = None
    module_class: str | None = None
    frames: tuple[Span, ...] = ()
    span: Span | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def inputs(self) -> tuple[int, ...]:
        """Indices of the nodes this one reads, in argument order, repeats kept."""
        found: list[int] = []

        def walk(arg: Arg) -> None:
            if isinstance(arg, Ref):
                found.append(arg.index)
            elif isinstance(arg, tuple):
                for item in arg:
                    walk(item)
            elif isinstance(arg, Symbol):
                for item in arg.parts:
                    walk(item)

        for arg in (*self.args, *self.kwargs.values()):
            walk(arg)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A place where graph capture had to leave the graph.

    Of the script's own compilation, `count` is how often that happened while it compiled, `frames` are the positions of
    the call, outermost first, library frames included, `span` is the innermost one in the user's own code, and `whole`
    tells that the function was left to Python as a whole.
    """

    reason: str
    span: Span | None = None
    count: int = 1
    frames: tuple[Span, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompiled:
    """A frame that the script's own compilation compiled `count` times more, for these `reasons` (guards that failed).

    `place` is where its function begins, in the user's own code or not; `resumes` tells that it is what follows a break
    in that function. At the `limit` it is left to Python. `host_us` is the mean time of compiling it per timed step.
    """

    place: Span
    resumes: bool
    limit: bool
    count: int
    reasons: tuple[str, ...]
    host_us: float


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One captured graph. `training` tells whether it ran with gradients; `span` is where the user's code called it.

    `kind` is "dynamo" for what Dynamo captured of a module, "eager" for the calls a step made outside of those, one by
    one as the program made them: the loss, clipping, averaging.
    """

    index: int
    nodes: tuple[Node, ...]
    breaks: tuple[Break, ...] = ()
    training: bool = True
    span: Span | None = None
    kind: str = "dynamo"

    @cached_property
    def by_target(self) -> Mapping[str, tuple[Node, ...]]:
        """The calls among the nodes by their target, each in graph order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.op.startswith("call_"):
                found.setdefault(node.target, []).append(node)
        return {target: tuple(nodes) for target, nodes in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Measured time of one graph node per step, from the un-annotated steps; `provenance` says how it was linked.

    `flops` counts forward and backward of the node per step; `least_bytes` the least traffic its tensors need.
    """

    graph: int
    node: int
    forward_us: float
    backward_us: float
    launches: float
    provenance: str
    flops: float | None = None
    least_bytes: float | None = None
    floor_us: float | None = None

    @property
    def total_us(self) -> float:
        """Forward and backward time per step."""
        return self.forward_us + self.backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A DataLoader as it was constructed and how long the loop waited for it.

    `fetch_us` is the time of one `next()` (equal to the fetch itself without workers). `draws_global_rng` tells that
    fetching consumed a global random stream, so that workers would change the data. `fetched` is where the loop asks
    for a batch, `through` are the positions in the user's code through which it does, outermost first, generators that
    hand batches on included. `facts` of the fetching: {"start_method": "fork", "batch": "list", "batch_bytes": 1024,
    "batch_devices": ["cpu"], "only_tensors": True, "shared_memory": bytes free there, "fetch_us": a fetch in one
    process, "changed_by_fetch" and "changed_by_loop": the dataset's own values, "late": random numbers are drawn
    between iter() and the first batch, "shards": an iterable dataset asks which worker it runs in,
    "start_us_per_step": of the wait, what was for first batches, "beside": other datasets read by loaders made at
    the same place}.
    """

    span: Span | None
    arguments: Mapping[str, Any]
    given: tuple[str, ...]
    wait_us_per_step: float | None
    fetch_us: float | None
    batches: int
    dataset: str
    iterable: bool
    picklable: bool | None = None
    draws_global_rng: bool | None = None
    fetched: Span | None = None
    through: tuple[Span, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUse:
    """An optimizer as it was constructed and what its step costs, in microseconds per step.

    `step_us` is the time of its kernels, `idle_us` the time in which the device has nothing to do while the host is in
    `step`; on a CPU `step_us` is the time in it. Where several of one class step, both are shares of what all take.
    `stepped` tells that it made a step in the run.
    """

    span: Span | None
    kind: str  # qualified class name
    arguments: Mapping[str, Any]
    given: tuple[str, ...]
    parameters: int
    elements: int
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    sparse: bool
    overrides_step: bool
    groups: int
    stepped: bool = True
    step_us: float | None = None
    idle_us: float = 0.0


UNLINKED_READS = (-1, -1)  # the key of `Profile.facts["reads_us"]` for reads that no node of a graph made


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCall:
    """Calls of one function of the loop around the model from one place, as a run made them.

    `name` is "module" (an outermost module), "backward", "optimizer.step", "zero_grad", "detect_anomaly",
    "use_deterministic_algorithms", "ddp.reduce" (a backward pass that reduces the gradients of a
    DistributedDataParallel), "evaluation" (`eval()`, with the time until `train()`), or a qualified name of torch;
    `frames` are the positions in the user's own code, outermost first. `calls` counts the whole run; `per_step` and
    `host_us` are the mean number of calls and the host's time in them per timed step. `facts` are arguments:
    {"set_to_none": False}.
    """

    name: str
    frames: tuple[Span, ...]
    calls: int
    per_step: float
    host_us: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def span(self) -> Span | None:
        """The innermost position in the user's own code."""
        return self.frames[-1] if self.frames else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a step's time goes against its physical floor: an operator family or a source line."""

    name: str
    measured_us: float
    floor_us: float | None
    bound: str | None = None  # compute or memory
    span: Span | None = None

    @property
    def recoverable_us(self) -> float | None:
        """Measured time minus the floor, never negative."""
        return None if self.floor_us is None else max(0.0, self.measured_us - self.floor_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """The ladder from "GPU utilisation" to MFU; shares between 0 and 1.

    `mfu` divides model FLOP/s by the device's dense bf16 peak, `mfu_own_peak` by the peak of the dtype each operator
    ran in, `of_measured` by the matmul rate measured in the run; `hfu` divides the FLOP/s that were executed, recompute
    included, by the peak of `mfu`.
    """

    busy: float | None = None
    model_flops_per_step: float | None = None
    achieved_flops: float | None = None
    mfu: float | None = None
    mfu_own_peak: float | None = None
    mfu_causal: float | None = None
    hfu: float | None = None
    of_measured: float | None = None
    peak_flops: float | None = None
    peak_source: str | None = None
    definition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything known about a run of the script as found."""

    environment: Environment
    hardware: Hardware
    steps: tuple[Step, ...]
    operators: Operators = field(default_factory=Operators)
    kernels: Kernels = field(default_factory=Kernels)
    counters: tuple[Metric, ...] = ()
    graphs: tuple[Graph, ...] = ()
    costs: tuple[NodeCost, ...] = ()
    loaders: tuple[Loader, ...] = ()
    optimizers: tuple[OptimizerUse, ...] = ()
    calls: tuple[LoopCall, ...] = ()
    breaks: tuple[Break, ...] = ()  # of the script's own compilation
    recompiled: tuple[Recompiled, ...] = ()
    regions: tuple[Region, ...] = ()
    utilisation: Utilisation = field(default_factory=Utilisation)
    step_us: tuple[float, ...] = ()  # device-side times of the un-profiled steps; short ones share their mean
    tokens_per_step: int | None = None
    tokens_source: str | None = None
    losses: tuple[float, ...] = ()
    peak_bytes: int | None = None
    linked_share: float | None = None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def median_step_us(self) -> float | None:
        """Median of the un-profiled, device-side step times."""
        ordered = sorted(self.step_us)
        if not ordered:
            return None
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def profiled_step_us(self) -> float | None:
        """Mean of the profiled steps' times, which the profiler makes longer; None where none was profiled."""
        return mean_us(self.steps)

    def pace(self) -> float:
        """Un-profiled over profiled time of a step, at most 1; 1 where either is not known."""
        median, profiled = self.median_step_us(), self.profiled_step_us()
        return min(1.0, median / profiled) if median and profiled else 1.0


def mean_us(steps: Sequence[Step]) -> float | None:
    """Mean duration of some steps in microseconds; None of none."""
    return sum(step.duration_us for step in steps) / len(steps) if steps else None


# ------------------------------------------------------------------------------------------------------------ findings


class Safety(str, enum.Enum):
    """What a rewrite may change; each level is a plan of verification."""

    EXACT = "exact"  # bit-identical loss under deterministic mode, where two runs of the original have one
    NUMERICS = "numerics"  # the same maths in another rounding order
    PRECISION = "precision"  # lower precision: bf16, TF32, fp8
    SEMANTICS = "semantics"  # training semantics, random streams, shapes or checkpoints change
    SUGGEST = "suggest"  # never applied


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measured fact behind a sentence. `refs` name kernels, nodes or steps."""

    what: str
    value: float | str
    unit: str
    refs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a change could save per step: 0 <= low <= high <= the cited time. `basis` is bound, model or measured."""

    low_us: float
    high_us: float
    basis: str
    scope: str = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A region of a captured graph: the node that gives its result, its tensors by name, its dropout nodes.

    The region proof passes the input of `dropout` nodes on. `constants` are the values of those of a replacement that
    are others here than where it was read off.
    """

    graph: int
    root: int
    inputs: Mapping[str, int]
    dropout: tuple[int, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The expression that is to stand in place of a region, once for the source and once for the proof.

    `template` is a Python expression over `torch`, `F` (torch.nn.functional) and placeholders in braces:
    "F.gelu({x}, approximate='tanh')". `texts` is how the user's source spells each placeholder. Placeholders that are
    inputs of the places are tensors; `constants` gives the value of every other one as captured, for the proof.
    `places` are all the regions that the same source computed. `guard` is (first statement of the region, test) where
    the expression is right only under that test, and what is there now must stay for the other case. `imports` are the
    import statements of other names that the template uses.
    """

    template: str
    texts: Mapping[str, str]
    places: tuple[Place, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    guard: tuple[Span, str] | None = None
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Another way to realise a finding, tried after the first and kept where it is measured to be faster.

    `name` is one word, unique within the finding. Without a replacement it compiles the function that holds the region.
    """

    name: str
    title: str
    replacement: Replacement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A place where a change pays.

    `bindings` name the source spans a rewrite needs ("query", "scale"), `values` what it needs as text or flag,
    `consumed` the statements the rewrite makes superfluous. `library` is the place in an installed package that holds
    the code: such a finding is shown at the user's call and never rewritten there. A finding of a graph rule carries
    the `replacement` of its region, which is proved alone before any script runs with it. `forms` are other ways to
    realise it, of which measurement keeps the fastest.
    """

    rule: str
    span: Span
    message: str
    evidence: tuple[Evidence, ...]
    estimate: Estimate
    fingerprint: str
    bindings: Mapping[str, Span] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    consumed: tuple[Span, ...] = ()
    library: str | None = None
    replacement: Replacement | None = None
    forms: tuple[Form, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """A place a rule looked at and left alone; a non-empty `needs` means "cannot tell yet, collect this"."""

    rule: str
    span: Span | None
    reason: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Edits that realise one finding. An edit is (span to replace, new text); an empty span inserts.

    `tolerance` is the rule's declared error floor in multiples of the machine epsilon of the compute dtype;
    `requires` are rules of which a rewrite has to be kept for this one to be tried; `group` names rewrites of which at
    most one may be kept, the fastest; `form` tells those of one finding apart. `runs` are operators of which one must
    run once the rewrite is in place, `avoids` operators that must not begin to run: a silent fallback is a failure.
    """

    finding: Finding
    title: str
    safety: Safety
    edits: tuple[tuple[Span, str], ...]
    tolerance: float = 16.0
    requires: tuple[str, ...] = ()
    group: str | None = None
    runs: tuple[str, ...] = ()
    avoids: tuple[str, ...] = ()
    form: str | None = None

    @property
    def id(self) -> str:
        """Stable name of the rewrite: rule, place and form."""
        return f"{self.finding.rule}@{self.finding.span}" + (f" as {self.form}" if self.form is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Rewrites applied together to the sources as found.

    `sources` maps a path relative to the root to its patched text, `base` maps it to the SHA-256 of the text as found.
    """

    base: Mapping[str, str]
    rewrites: tuple[Rewrite, ...]
    diff: str
    sources: Mapping[str, str]
    skipped: tuple[tuple[Rewrite, str], ...] = ()


# ------------------------------------------------------------------------------------------------------------- verdict


class Outcome(str, enum.Enum):
    """What a measurement allows to be said."""

    IMPROVED = "improved"
    NEUTRAL = "neutral"
    REGRESSED = "regressed"
    WRONG = "wrong"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """An interleaved A/B measurement. `speedup` is old/new; `interval` its confidence bounds at `confidence`.

    `noise` is the half-width of the A/A control's interval as a share; `base_step_us` and `step_us` hold the mean step
    time of every block.
    """

    speedup: float
    interval: tuple[float, float]
    confidence: float
    quads: int
    noise: float | None
    base_step_us: tuple[float, ...]
    step_us: tuple[float, ...]
    base_peak_bytes: int | None = None
    peak_bytes: int | None = None
    warmup_s: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared quantity of the numerics proof: relative L2 errors against the higher-precision reference."""

    name: str
    base_error: float
    error: float
    limit: float
    ok: bool
    max_ulp: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The numerics proof of one candidate. `reasons` is empty when it holds.

    `fallbacks` says why the operators that ran are not those the rewrite is for; the numbers may agree all the same.
    `operators_gone` ran in a step of the script as found and not in one of the patched script, `operators_new` the
    other way round; both are empty where that was not recorded.
    """

    ok: bool
    reference: str
    compared: int
    worst: tuple[Difference, ...] = ()
    losses: tuple[float, ...] = ()
    base_losses: tuple[float, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    operators_gone: tuple[str, ...] = ()
    operators_new: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionProof:
    """The proof of a replacement alone, original against replacement, before a script runs with it.

    `regions` counts the distinct regions of a rewrite, `compared` their draws, each forward and backward; `skipped`
    says why others were not (reason -> draws). `reasons` is empty when it holds; nothing compared never holds.
    """

    ok: bool
    regions: int
    compared: int
    dtypes: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    worst: tuple[Difference, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One combination that was tried: `patch` holds the ids of its rewrites, `against` those it was measured on top
    of."""

    label: str
    patch: tuple[str, ...]
    against: tuple[str, ...]
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    numerics: Numerics | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What one line would have bought: step time of a variant nobody had to rewrite for. Null where not measured."""

    label: str
    step_us: float | None
    speedup: float | None
    mfu: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer, computed once. `kept` are the ids of the rewrites in the proven patch."""

    outcome: Outcome
    reasons: tuple[str, ...]
    kept: tuple[str, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    saved_us: Mapping[str, float] = field(default_factory=dict)
    timing: Timing | None = None
    numerics: Numerics | None = None
    before: Utilisation | None = None
    after: Utilisation | None = None
    trials: tuple[Trial, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    counters_before: tuple[Metric, ...] = ()
    counters_after: tuple[Metric, ...] = ()


# -------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedEdit:
    """Text to stand in place of a part of a file; lines count from 1, columns, in characters, from 0."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFinding:
    """A finding or decline as the reader sees it.

    `status` is applied, suggested, rejected or declined. `advisor check` applies nothing: there it is found (with the
    edits that would realise it), suggested (without, for `reason`), declined, or "not measured", which is what the
    source alone shows. `edits` are left out where the redactor would change them.
    """

    rule: str
    path: str | None
    line: int | None
    end_line: int | None
    status: str
    title: str
    reason: str | None
    estimate_us: tuple[float, float] | None
    saved_us: float | None
    safety: str | None
    evidence: tuple[Evidence, ...] = ()
    diff: str = ""
    needs: tuple[str, ...] = ()
    column: int | None = None
    end_column: int | None = None
    fingerprint: str | None = None
    edits: tuple[ReportedEdit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The only thing renderers see; everything in it has passed the redactor."""

    schema: int
    run: str
    script: str
    outcome: str
    reasons: tuple[str, ...]
    speedup: float | None
    interval: tuple[float, float] | None
    confidence: float | None
    mfu_before: float | None
    mfu_after: float | None
    mfu_definition: str
    step_ms_before: float | None
    step_ms_after: float | None
    tokens_per_s_before: float | None
    tokens_per_s_after: float | None
    throughput_unit: str = "tokens"  # what the two rates before count: tokens or samples
    peak_gib_before: float | None
    peak_gib_after: float | None
    environment: Environment
    hardware: Hardware
    before: Utilisation
    after: Utilisation | None
    phases_us: Mapping[str, float]
    regions: tuple[Region, ...]
    findings: tuple[ReportedFinding, ...]
    baselines: tuple[Baseline, ...]
    timing: Timing | None
    numerics: Numerics | None
    trials: tuple[Trial, ...]
    counters_before: tuple[Metric, ...]
    counters_after: tuple[Metric, ...]
    diff: str
    stage_seconds: Mapping[str, float]
    linked_share: float | None
    missing: Mapping[str, str]
    rule_errors: tuple[str, ...] = ()
    single_counters: tuple[SingleCounters, ...] = ()
    notes: tuple[str, ...] = ()  # how figures came about: times that are scaled, rows left out


# --------------------------------------------------------------------------------------------------------------- check


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """What `advisor check` says of one script. `path` is relative to the working directory, `run` its recorded run.

    `status` is measured, partial (the script ended before everything was recorded: `missing` says what) or
    "not measured" (it could not be run, for `reason`, and only its source was looked at).
    """

    path: str
    run: str | None
    status: str
    reason: str | None
    step_ms: float | None
    device: str | None
    linked_share: float | None
    missing: Mapping[str, str]
    findings: tuple[ReportedFinding, ...]
    declines: tuple[ReportedFinding, ...]
    rule_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePage:
    """A rule as documents describe it: its id, first line, what a rewrite may change, and its page in Markdown."""

    id: str
    title: str
    safety: str
    page: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `advisor check` found in all scripts it was given; everything in it has passed the redactor."""

    schema_version: int
    advisor: str
    files: tuple[CheckedFile, ...]
    rules: tuple[RulePage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What one rule made of a place: `kind` is finding, decline, near miss or region.

    `node` is the graph node it is about, `seen` describes it: operation, shape, dtype, module.
    """

    rule: str
    kind: str
    path: str | None
    line: int | None
    reason: str
    node: str | None = None
    seen: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why there is or is no finding at a line; `recorded` describes the graph nodes that the line computed.

    `nearest` is the closest line of the file with recorded nodes where this one has none, `closest` what a rule said
    of the closest place in the file where none said anything here.
    """

    path: str
    line: int
    looked: tuple[Looked, ...]
    recorded: tuple[str, ...]
    nearest: int | None
    closest: Looked | None
    missing: Mapping[str, str]
