"""What a rule is, what it sees, and the examples that document and test it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar

from advisor.model import (
    Decline,
    Estimate,
    Evidence,
    Finding,
    Graph,
    LoopCall,
    Node,
    NodeCost,
    OptimizerUse,
    Profile,
    Recompiled,
    Replacement,
    Rewrite,
    Safety,
    Span,
)
from advisor.patterns.callsites import differentiates_twice
from advisor.roofline import BYTES, optimizer_bytes
from advisor.source import Source, importing, with_imported
from advisor.usercode.places import is_own
from advisor.usercode.trainingloop import TrainingLoop, loops_around

# ------------------------------------------------------------------------------------------------------------- examples


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleProfile:
    """A made-up measurement for an example: one step and where its time goes, in microseconds.

    `optimizer` are times of the optimizer's kernels, `optimizer_idle_us` is how long the device waits for it.
    `nodes` is the share of the step spent in the captured graph, spread evenly over its operations; `kernels` are names
    and times of device kernels. `calls` gives calls per step and host microseconds in them by the name of a `LoopCall`,
    wherever the source makes that call, `called` the facts of such calls. `fetching` are facts of the loaders. `busy`
    is the share of the step in which the device works, `facts` are facts of the profile. `products` are operators of
    the step that multiply, each with the dtype of its inputs and the time of its one kernel; `arch` is the device's.
    `breaks` are places where the source's own compilation broke, by the text that stands there, with the reason,
    `recompiled` the frames that it compiled again, `values` the dtypes of tensors that were recorded, by the text that
    makes them. `moves` gives the host's time in a call that moves what a factory made, and what of it the device feels,
    by the text of the call. `trips` are values that become float32 and are cast back, by their text: what makes them so
    and the time of the casts. `memory` are the bytes in use at most and those of the device. `recomputed` are forward
    operators that the backward pass runs again, with their time. `sizes` are the shapes of the inputs of each of the
    `products`, `packages` the versions of installed kernel libraries, `padded` the share of tokens that a
    batch of labels shows to be padding.
    """

    step_us: float
    device: str = "cuda"
    optimizer: tuple[float, ...] = ()
    optimizer_idle_us: float = 0.0
    loader_wait_us: float = 0.0
    device_idle_us: float | None = None
    draws_global_rng: bool = False
    iterable: bool = False
    sparse: bool = False
    overrides_step: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    cores: int = 8
    nodes: float = 0.0
    kernels: tuple[tuple[str, float], ...] = ()
    products: tuple[tuple[str, str, float], ...] = ()
    arch: str | None = None
    calls: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    called: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fetching: Mapping[str, Any] = field(default_factory=dict)
    busy: float | None = None
    reads: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    breaks: Mapping[str, str] = field(default_factory=dict)
    recompiled: tuple[Recompiled, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[int, int] | None = None
    recomputed: tuple[tuple[str, float], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    padded: float | None = None
    moves: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    trips: Mapping[str, tuple[str, float]] = field(default_factory=dict)


def step(step_us: float, **parts: object) -> ExampleProfile:
    """A step of `step_us` microseconds; keywords are the fields of `ExampleProfile`, TypeError for any other."""
    known = [entry.name for entry in fields(ExampleProfile)]
    for name in parts:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise TypeError(f"step() has no keyword {name}" + (f": did you mean {near[0]}?" if near else ""))
    optimizer = parts.pop("optimizer", ())
    assert isinstance(optimizer, Iterable)
    return ExampleProfile(step_us=step_us, optimizer=tuple(optimizer), **parts)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Source before and after, under a profile. `after=None` means silent, and then `because` is the decline's reason.
    The same text before and after means a finding that is told and never edited.

    `saves` bounds the estimate in microseconds. A graph rule's source follows the KernelBench form (Model, get_inputs,
    get_init_inputs) and is executed, forward and backward, before and after.
    """

    before: str
    after: str | None
    profile: ExampleProfile
    saves: tuple[float, float] | None = None
    because: str | None = None


# -------------------------------------------------------------------------------------------------------------- context


@dataclass(frozen=True)
class Context:
    """What a rule may look at: the profile and the user's sources, both read-only; `script` is the path of the one
    that ran, `files_in` gives the paths of the Python files of a folder. `left` is the share of a step that the finding
    of the rule `largest` leaves, of which the gates of the rules are shares, and `left_compiles` that it compiles the
    model; `worth` replaces all gates."""

    profile: Profile
    read: Callable[[str], Source]
    worth: float | None = None
    costs: Mapping[tuple[int, int], NodeCost] = field(default_factory=dict)
    script: str | None = None
    files_in: Callable[[str], tuple[str, ...]] = lambda folder: ()
    left: float = 1.0
    largest: str | None = None
    left_compiles: bool = False

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The user's files: the script, those that the run has shown, what they import, and what lies beside them and
        imports them."""
        known = {source.path: source for source in self.loaded}
        folders = {path.replace("\\", "/").rpartition("/")[0] for path in self.ran}
        beside = [path for folder in sorted(folders) for path in self.files_in(folder)]
        known |= {source.path: source for source in importing(self.read, beside, self.ran)}
        return tuple(known[path] for path in sorted(known))

    @cached_property
    def loaded(self) -> tuple[Source, ...]:
        """Those of the user's files that may have run: the script, those that the run has shown, what they import."""
        return with_imported(self.read, self.ran)

    @cached_property
    def ran(self) -> frozenset[str]:
        """The paths of the script and of the user's files that the run has shown."""
        spans = [g.span for g in self.profile.graphs]
        spans += [use.span for use in self.profile.optimizers] + [loader.span for loader in self.profile.loaders]
        spans += [frame for call in self.profile.calls for frame in call.frames]
        spans += [frame for g in self.profile.graphs for node in g.nodes for frame in node.frames]
        paths = {span.path for span in spans if span is not None and is_own(span)}
        return frozenset(paths if self.script is None else paths | {self.script})

    @cached_property
    def needs_unfused_attention(self) -> str | None:
        """Why fused attention would fail: the call of the user's files that asks for gradients of gradients."""
        calls = (differentiates_twice(source) for source in self.sources)
        first = next((call for call in calls if call is not None), None)
        reason = "differentiates gradients again or forward, for which fused attention has no derivative"
        return None if first is None else f"`{first}` {reason}"

    @property
    def idle_us(self) -> float | None:
        """Time per step in which the device has nothing to do; None where that was not measured."""
        busy = self.profile.utilisation.busy
        if busy is None:
            return None
        profiled = self.profile.profiled_step_us() or self.step_us
        return max(0.0, self.step_us - busy * profiled)  # the profiler slows the host, not the kernels

    def calls(self, *names: str) -> tuple[LoopCall, ...]:
        """The calls of the loop that have one of some names, and a position in the user's own code."""
        return tuple(call for call in self.profile.calls if call.name in names and call.frames)

    @cached_property
    def loops(self) -> tuple[TrainingLoop, ...]:
        """The loops of the user's that an optimizer step was made from, each once.

        One over several optimizers, `for one in optimizers: one.step()`, is none of them: a loop that trains holds a
        backward pass too, where any around the step does.
        """
        backward = [frame for call in self.calls("backward") for frame in call.frames]
        known: dict[tuple[str, int], TrainingLoop] = {}
        for call in self.calls("optimizer.step"):
            around = list(loops_around(call, self.read, self.sources))
            trains = (loop for loop in around if any(loop.holds(frame) for frame in backward))
            loop = next(trains, around[0] if around else None)
            if loop is not None:
                known[(loop.source.path, loop.node.lineno)] = loop
        return tuple(known[key] for key in sorted(known))

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs captured in training mode."""
        return tuple(g for g in self.profile.graphs if g.training)

    @property
    def step_us(self) -> float:
        """Median un-profiled step time; rules run only when it is known."""
        median = self.profile.median_step_us()
        assert median is not None
        return median

    def cost_us(self, graph: int, nodes: Iterable[int]) -> float | None:
        """Measured forward and backward time per step of some nodes of a graph, None where none of them has any."""
        known = [self.costs[(graph, n)].total_us for n in nodes if (graph, n) in self.costs]
        return sum(known) if known else None

    def floor_us(self, flops: float, least_bytes: float, dtype: str | None) -> float:
        """Physical floor of a region, max(FLOPs / peak, bytes / bandwidth); 0, which bounds nothing, where the device's
        figures are unknown: shown by `floor_evidence`."""
        hardware = self.profile.hardware
        rates = {**hardware.measured_flops, **hardware.peak_flops}
        peak = rates.get(dtype or "") or rates.get("float32")
        bandwidth = hardware.hbm_bandwidth or hardware.measured_bandwidth
        times = [flops / peak if peak else 0.0, least_bytes / bandwidth if bandwidth else 0.0]
        return max(times) * 1e6

    def optimizer_floor_us(self, use: OptimizerUse) -> float:
        """Floor of one update: gradient read, parameter and state read and written once; 0 where not known."""
        return self.floor_us(0.0, optimizer_bytes([use]) or 0.0, None)

    def gate(self, rule: Rule) -> float:
        """Share of a step below which the rule stays silent."""
        return rule.worth * self.left if self.worth is None else self.worth


def floor_evidence(what: str, floor_us: float) -> tuple[Evidence, ...]:
    """The floor of a region as evidence; none where the device's figures are unknown."""
    return (Evidence(what=what, value=round(floor_us, 1), unit="us"),) if floor_us > 0.0 else ()


def tensor_bytes(node: Node) -> int:
    """Bytes of a node's value, 0 where its shape is not known."""
    if node.shape is None:
        return 0
    count = 1
    for size in node.shape:
        count *= size
    return count * BYTES.get(node.dtype or "", 4)


# ----------------------------------------------------------------------------------------------------------------- rule

# what a profile can hold, as rules name it
NEEDS = ("steps", "kineto", "graph", "links", "optimizers", "loaders", "calls", "gpu")
ON_A_GPU = "cannot tell: needs a GPU profile"


class Rule(ABC):
    """One piece of knowledge. Neither method touches the rule, a global, a device or a file.

    `needs` names what the profile must hold (words of NEEDS); `worth` is the share of a step below which a finding is
    noise; `tolerance` the error floor of the rewrite in machine epsilons. Of rewrites with one `group` one is applied.
    """

    id: ClassVar[str]
    safety: ClassVar[Safety]
    needs: ClassVar[tuple[str, ...]] = ("steps",)  # words of NEEDS
    worth: ClassVar[float] = 0.02
    tolerance: ClassVar[float] = 16.0
    group: ClassVar[str | None] = None
    runs: ClassVar[tuple[str, ...]] = ()  # operators of which one must run after the rewrite
    avoids: ClassVar[tuple[str, ...]] = ()  # operators that must not begin to run
    in_library: ClassVar[str] = "ask the library for its fused form"  # what to do where a library holds the code
    on_request: ClassVar[bool] = False  # whether its rewrites are tried only where `select` names the rule
    compiles: ClassVar[bool] = False  # whether it compiles the model, which one rule at most does
    # in the plan: starvation 10, precision 20, structure 30, compile 40, memory 50, communication 55, optimizer 60
    order: ClassVar[int] = 50
    examples: ClassVar[tuple[Example, ...]] = ()

    @abstractmethod
    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """Yield what was found and what was looked at and left alone."""

    @abstractmethod
    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        """The edits that realise a finding, or why this source cannot be edited."""

    # -------------------------------------------------------------------------------------------------------- helpers

    def finding(
        self,
        span: Span,
        message: str,
        *,
        cited_us: float,
        high_us: float,
        evidence: tuple[Evidence, ...],
        low_us: float = 0.0,
        basis: str = "bound",
        bindings: Mapping[str, Span] | None = None,
        values: Mapping[str, str] | None = None,
        consumed: tuple[Span, ...] = (),
        library: str | None = None,
        replacement: Replacement | None = None,
    ) -> Finding:
        """A finding of this rule; the estimate is clamped to the time it cites."""
        high = min(max(high_us, 0.0), cited_us)
        digest = hashlib.sha256(f"{self.id}\0{span.path}\0{span.function}\0{message}".encode()).hexdigest()[:16]
        return Finding(
            rule=self.id,
            span=span,
            message=message,
            evidence=evidence,
            estimate=Estimate(low_us=min(low_us, high), high_us=high, basis=basis),
            fingerprint=digest,
            bindings=bindings or {},
            values=values or {},
            consumed=consumed,
            library=library,
            replacement=replacement,
        )

    def forms(self, finding: Finding, source: Source) -> Iterator[Rewrite]:
        """Other ways to realise a finding, to be measured against `rewrite`; `codemod.CannotEdit` ends them."""
        return iter(())

    def decline(self, span: Span | None, reason: str, needs: tuple[str, ...] = ()) -> Decline:
        """A decline of this rule."""
        return Decline(rule=self.id, span=span, reason=reason, needs=needs)

    def edit(self, finding: Finding, title: str, edits: Iterable[tuple[Span, str]]) -> Rewrite:
        """A rewrite of this rule."""
        return Rewrite(
            finding=finding,
            title=title,
            safety=self.safety,
            edits=tuple(edits),
            tolerance=self.tolerance,
            group=self.group,
            runs=self.runs,
            avoids=self.avoids,
        )
