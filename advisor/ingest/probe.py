"""Reads probe.json, what the hooks saw of the loop around the model: steps, loaders, optimizers, device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from advisor.ingest.documents import read_document
from advisor.ingest.frames import Frames
from advisor.model import Break, Loader, LoopCall, OptimizerUse, Recompiled, Span

_LOSSES = "torch.nn.modules.loss."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device as it describes itself, and its rates as measured (FLOP/s per dtype, bytes/s)."""

    kind: str  # "cuda" or "cpu"
    name: str | None = None
    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    count: int | None = None
    threads: int | None = None
    measured_flops: Mapping[str, float] = field(default_factory=dict)
    measured_bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFacts:
    """Everything probe.json says. `step_us` are device-side times of the steps run without a profiler.

    `tokens_source` says what `tokens_per_step` counts, since not every model eats tokens.
    """

    loaders: tuple[Loader, ...]
    optimizers: tuple[OptimizerUse, ...]
    calls: tuple[LoopCall, ...]
    breaks: tuple[Break, ...]
    recompiled: tuple[Recompiled, ...]
    step_us: tuple[float, ...]
    losses: tuple[float, ...]
    tokens_per_step: int | None
    tokens_source: str | None
    peak_bytes: int | None
    device: DeviceFacts
    flags: Mapping[str, Any]
    steps_seen: int
    backwards: int
    missing: Mapping[str, str]


class _Place(msgspec.Struct):
    path: str
    line: int
    function: str | None = None
    columns: tuple[int | None, int | None, int | None, int | None] | None = None


class _Loader(msgspec.Struct):
    span: _Place | None
    given: list[str]
    arguments: dict[str, Any]
    wait_us_per_step: float | None
    fetch_us: float | None
    batches: int
    dataset: str
    iterable: bool
    picklable: bool | None = None
    draws_global_rng: bool | None = None
    fetched: _Place | None = None
    through: list[_Place] = []
    facts: dict[str, Any] = {}


class _Optimizer(msgspec.Struct):
    span: _Place | None
    given: list[str]
    kind: str
    arguments: dict[str, Any]
    parameters: int
    elements: int
    devices: list[str]
    dtypes: list[str]
    sparse: bool
    overrides_step: bool
    groups: int
    stepped: bool = True


class _LoopCall(msgspec.Struct):
    name: str
    frames: list[_Place]
    calls: int
    per_step: float
    host_us: float
    facts: dict[str, Any] = {}


class _Break(msgspec.Struct):
    reason: str
    frames: list[_Place]
    count: int = 1
    whole: bool = False


class _Recompiled(msgspec.Struct):
    frame: _Place
    resumes: bool
    limit: bool
    count: int
    reasons: list[str]
    host_us: float


class _Compiled(msgspec.Struct):
    seconds: float = 0.0
    breaks: list[_Break] = []
    recompiles: list[_Recompiled] = []


class _Tensor(msgspec.Struct):
    shape: list[int]
    dtype: str


class _Call(msgspec.Struct):
    module: str
    training: bool
    inputs: list[_Tensor]


class _Device(msgspec.Struct):
    kind: str
    name: str | None = None
    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    count: int | None = None
    threads: int | None = None
    measured_flops: dict[str, float] = {}
    measured_bandwidth: float | None = None


class _Document(msgspec.Struct):
    step_us: list[float]
    device: _Device
    losses: list[float] = []
    loaders: list[_Loader] = []
    optimizers: list[_Optimizer] = []
    root_calls: list[_Call] = []
    calls: list[_LoopCall] = []
    compiled: _Compiled = msgspec.field(default_factory=_Compiled)
    flags: dict[str, Any] = {}
    peak_bytes: int | None = None
    allocator: dict[str, int] = {}
    steps_seen: int = 0
    backwards: int = 0
    missing: dict[str, str] = {}


def read_probe(path: Path, root: Path) -> ProbeFacts:
    """Read probe.json; places in files below `root` get relative paths. Raises ArtifactError saying what to do."""
    document = read_document(path, _Document)
    frames = Frames(root)
    tokens, source = count_tokens([(c.module, [(t.shape, t.dtype) for t in c.inputs]) for c in document.root_calls])
    return ProbeFacts(
        loaders=tuple(_loader(item, frames) for item in document.loaders),
        optimizers=tuple(_optimizer(item, frames) for item in document.optimizers),
        calls=tuple(_loop_call(item, frames) for item in document.calls),
        breaks=tuple(_break(item, frames) for item in document.compiled.breaks),
        recompiled=tuple(_recompiled(item, frames) for item in document.compiled.recompiles),
        step_us=tuple(document.step_us),
        losses=tuple(document.losses),
        tokens_per_step=tokens,
        tokens_source=source,
        peak_bytes=document.peak_bytes,
        device=DeviceFacts(**msgspec.structs.asdict(document.device)),
        flags=document.flags
        | document.allocator
        | ({"compile_s": document.compiled.seconds} if document.compiled.seconds else {}),
        steps_seen=document.steps_seen,
        backwards=document.backwards,
        missing=document.missing,
    )


def count_tokens(
    calls: Sequence[tuple[str, Sequence[tuple[Sequence[int], str]]]],
) -> tuple[int | None, str | None]:
    """Tokens per step and what they count, from the outermost calls of one step (class, inputs as (shape, dtype)).

    Calls whose first integer input with two or more dimensions holds token ids: their elements, summed. Without such a
    call, samples: the first dimension of the first input of the first module called, summed over its calls. Loss
    modules do not count; their integer inputs are targets.
    """
    real = [(module, inputs) for module, inputs in calls if inputs and not module.startswith(_LOSSES)]
    found = [
        next((shape for shape, dtype in inputs if dtype.startswith(("int", "uint")) and len(shape) >= 2), None)
        for _, inputs in real
    ]
    tokens = [math.prod(shape) for shape in found if shape is not None]
    if tokens:
        return sum(tokens), f"tokens: elements of the integer input, {_calls(len(tokens))}"
    if not real or not real[0][1][0][0]:
        return None, None
    sizes = [inputs[0][0][0] for module, inputs in real if module == real[0][0] and inputs[0][0]]
    return sum(sizes), f"samples: first dimension of the first input, {_calls(len(sizes))}"


def _calls(count: int) -> str:
    return "one call per step" if count == 1 else f"{count} calls per step"


def _place(place: _Place | None, frames: Frames) -> Span | None:
    if place is None or frames.relative(place.path) is None:
        return None
    return frames.position(place.path, place.line, place.function, place.columns or (None, None, None, None))


def _loader(item: _Loader, frames: Frames) -> Loader:
    return Loader(
        span=_place(item.span, frames),
        arguments=item.arguments,
        given=tuple(item.given),
        wait_us_per_step=item.wait_us_per_step,
        fetch_us=item.fetch_us,
        batches=item.batches,
        dataset=item.dataset,
        iterable=item.iterable,
        picklable=item.picklable,
        draws_global_rng=item.draws_global_rng,
        fetched=_place(item.fetched, frames),
        through=tuple(place for one in item.through if (place := _place(one, frames)) is not None),
        facts=item.facts,
    )


def _optimizer(item: _Optimizer, frames: Frames) -> OptimizerUse:
    return OptimizerUse(
        span=_place(item.span, frames),
        kind=item.kind,
        arguments=item.arguments,
        given=tuple(item.given),
        parameters=item.parameters,
        elements=item.elements,
        devices=tuple(item.devices),
        dtypes=tuple(item.dtypes),
        sparse=item.sparse,
        overrides_step=item.overrides_step,
        groups=item.groups,
        stepped=item.stepped,
    )


def _loop_call(item: _LoopCall, frames: Frames) -> LoopCall:
    places = [_place(place, frames) for place in item.frames]
    return LoopCall(
        name=item.name,
        frames=tuple(place for place in places if place is not None),
        calls=item.calls,
        per_step=item.per_step,
        host_us=item.host_us,
        facts=item.facts,
    )


def _anywhere(place: _Place, frames: Frames) -> Span:
    return frames.position(place.path, place.line, place.function, place.columns or (None, None, None, None))


def _break(item: _Break, frames: Frames) -> Break:
    own = [place for place in (_place(place, frames) for place in item.frames) if place is not None]
    return Break(
        reason=item.reason,
        span=own[-1] if own else None,
        count=item.count,
        frames=tuple(_anywhere(place, frames) for place in item.frames),
        whole=item.whole,
    )


def _recompiled(item: _Recompiled, frames: Frames) -> Recompiled:
    return Recompiled(
        place=_anywhere(item.frame, frames),
        resumes=item.resumes,
        limit=item.limit,
        count=item.count,
        reasons=tuple(item.reasons),
        host_us=item.host_us,
    )
