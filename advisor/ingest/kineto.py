"""Reads a Kineto trace into columns: operator calls, device activities, launches, named ranges and steps."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.errors import ArtifactError
from advisor.ingest.trace import Launch, Range, StepRange, Trace, assemble
from advisor.model import Kernels, Operators

__all__ = ["Trace", "read_trace"]

STEP = re.compile(r"^ProfilerStep#(\d+)$")
NOT_A_NUMBER = re.compile(rb":\s*-?(?:inf|nan|Infinity|NaN)\b")
DEVICE_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
RAW_NONE = msgspec.Raw(b"")


# -------------------------------------------------------------------------------------------------------------- decode


class _Arguments(msgspec.Struct, gc=False):
    correlation: int | None = None
    stream: int | None = None
    order: int = msgspec.field(default=0, name="Ev Idx")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=RAW_NONE, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=RAW_NONE, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=RAW_NONE, name="Concrete Inputs")


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    tid: int | str = 0
    ts: float = 0.0
    dur: float | None = None
    args: _Arguments | None = None


class _Device(msgspec.Struct):
    name: str = ""


class _Document(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    devices: list[_Device] = msgspec.field(default_factory=list, name="deviceProperties")


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except FileNotFoundError:
        raise ArtifactError(f"{path.name} is missing: record the run again") from None
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read ({error.strerror or error}): record the run again") from None
    except (EOFError, zlib.error):
        raise ArtifactError(f"{path.name} is truncated: record the run again, it did not end properly") from None


def _decode(path: Path) -> _Document:
    """The whole file at once; a reader for files beyond memory replaces this function only."""
    data = _read_bytes(path)
    try:
        try:
            return msgspec.json.decode(data, type=_Document)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # Kineto divides bytes by a duration of 0 and writes the result as it is
            return msgspec.json.decode(NOT_A_NUMBER.sub(b": null", data), type=_Document)
    except msgspec.ValidationError as error:
        raise ArtifactError(
            f"{path.name} is no Kineto trace ({error}): export it with torch.profiler's export_chrome_trace"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path.name} is truncated or no JSON ({error}): record the run again") from None


# --------------------------------------------------------------------------------------------------------------- build

Value = TypeVar("Value")


class _Cache:
    """Decodes repeated argument texts once; equal calls then share one tuple."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, tuple[tuple[int, ...], ...]] = {}
        self._dtypes: dict[bytes, tuple[str, ...]] = {}

    def shapes(self, raw: msgspec.Raw) -> tuple[tuple[int, ...], ...]:
        """One shape per input; a list of tensors counts as one input of shape ()."""
        return _cached(self._shapes, raw, lambda value: tuple(_shape(item) for item in value))

    def dtypes(self, raw: msgspec.Raw) -> tuple[str, ...]:
        """One dtype name per input, "" for what is no tensor."""
        return _cached(self._dtypes, raw, lambda value: tuple(DTYPES.get(str(item), "") for item in value))


def _cached(known: dict[bytes, Value], raw: msgspec.Raw, convert: Callable[[list[object]], Value]) -> Value:
    key = bytes(raw)
    if key not in known:
        try:
            known[key] = convert(msgspec.json.decode(key, type=list[object]) if key else [])
        except msgspec.DecodeError as error:
            raise ArtifactError(f"operator arguments cannot be read ({error}): record the run again") from None
    return known[key]


def _shape(item: object) -> tuple[int, ...]:
    if isinstance(item, list) and all(isinstance(size, int) for size in item):
        return tuple(item)
    return ()


def read_trace(path: Path) -> Trace:
    """Read a trace written by torch.profiler (.json or .json.gz). Raises ArtifactError saying what to do."""
    document = _decode(path)
    complete = [event for event in document.events if event.ph == "X"]
    timed = [event for event in complete if event.cat in _KEPT]
    if not timed:
        raise ArtifactError(f"{path.name} holds no operator and no kernel: record with torch.profiler.profile()")
    origin = min(event.ts for event in timed)
    defects = {"negative_duration": sum(1 for event in timed if (event.dur or 0.0) < 0)}
    ranges = _ranges(timed, origin)
    steps = _steps(ranges)
    operators, concrete = _operators(timed, origin, steps)
    launches = _launches(timed, origin)
    kernels = _kernels(timed, origin, steps, operators, launches)
    recorded = _recorded(complete, origin)
    defects |= _misplaced(kernels, launches, recorded)
    return assemble(
        operators=operators,
        concrete=concrete,
        kernels=kernels,
        ranges=ranges,
        launches=launches,
        steps=steps,
        recorded=recorded,
        device_names=tuple(device.name for device in document.devices),
        defects=defects,
    )


_KEPT = frozenset({"cpu_op", "user_annotation", *DEVICE_CATEGORIES, *LAUNCH_CATEGORIES})


def _thread(event: _Event) -> int:
    return event.tid if isinstance(event.tid, int) else -1


def _is_operator(name: str) -> bool:
    """Whether a cpu_op is an operator call: Dynamo records its own phases ("Torch-Compiled Region: 0/0") as such."""
    return " " not in name or name.startswith("autograd::engine::")


def _ranges(events: Sequence[_Event], origin: float) -> tuple[Range, ...]:
    found = [
        Range(event.name, event.ts - origin, event.dur or 0.0, _thread(event))
        for event in events
        if event.cat == "user_annotation" or (event.cat == "cpu_op" and not _is_operator(event.name))
    ]
    return tuple(sorted(found, key=lambda item: (item.start_us, -item.duration_us, item.thread, item.name)))


def _steps(ranges: Sequence[Range]) -> tuple[StepRange, ...]:
    found = []
    for item in ranges:
        match = STEP.match(item.name)
        if match:
            found.append(StepRange(int(match[1]), item.start_us, item.start_us + item.duration_us))
    return tuple(found)


def step_of(steps: Sequence[StepRange], times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The index of the step whose host range holds each time (microseconds), -1 outside."""
    if not steps:
        return np.full(len(times), -1, dtype=np.int64)
    starts = np.array([step.start_us for step in steps])
    ends = np.array([step.end_us for step in steps])
    index = np.array([step.number for step in steps], dtype=np.int64)
    place = np.searchsorted(starts, times, side="right") - 1
    inside = (place >= 0) & (times < ends[np.maximum(place, 0)])
    return np.where(inside, index[np.maximum(place, 0)], -1)


def _operators(
    events: Sequence[_Event], origin: float, steps: Sequence[StepRange]
) -> tuple[Operators, dict[int, tuple[str, ...]]]:
    chosen = [event for event in events if event.cat == "cpu_op" and _is_operator(event.name)]
    nothing = _Arguments()
    chosen.sort(key=lambda e: (e.ts, -(e.dur or 0.0), _thread(e), (e.args or nothing).order, e.name))
    arguments = [event.args or nothing for event in chosen]
    start = np.array([event.ts for event in chosen], dtype=np.float64) - origin
    duration = np.array([event.dur or 0.0 for event in chosen], dtype=np.float64)
    threads = [_thread(event) for event in chosen]
    cache = _Cache()
    operators = Operators(
        name=tuple(event.name for event in chosen),
        start_us=tuple(start.tolist()),
        duration_us=tuple(duration.tolist()),
        thread=tuple(threads),
        sequence=tuple(_sequence(item.sequence) for item in arguments),
        forward_thread=tuple(item.forward_thread for item in arguments),
        parent=_parents(threads, start, start + duration),
        step=tuple(step_of(steps, start).tolist()),
        shapes=tuple(cache.shapes(item.dims) for item in arguments),
        dtypes=tuple(cache.dtypes(item.types) for item in arguments),
    )
    concrete = {row: item.concrete for row, item in enumerate(arguments) if bytes(item.concrete)}
    return operators, {row: _texts(raw) for row, raw in concrete.items() if _wants_concrete(operators.name[row])}


def _wants_concrete(name: str) -> bool:
    return "convolution" in name or "attention" in name


def _texts(raw: msgspec.Raw) -> tuple[str, ...]:
    value = msgspec.json.decode(bytes(raw))
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _sequence(number: int) -> int:
    """Gradient accumulators carry the largest unsigned number instead of a place in the sequence."""
    return number if 0 <= number < 1 << 62 else -1


def _parents(threads: Sequence[int], start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Row of the innermost enclosing call on the same thread, -1 for none; rows are in time order, outer first."""
    open_rows: dict[int, list[int]] = {}
    parents = []
    begins, ends = start.tolist(), end.tolist()
    for row, thread in enumerate(threads):
        stack = open_rows.setdefault(thread, [])
        while stack and ends[stack[-1]] <= begins[row]:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(row)
    return tuple(parents)


def _launches(events: Sequence[_Event], origin: float) -> dict[int, Launch]:
    """Launches by correlation id; a repeated id keeps its first launch."""
    found: dict[int, Launch] = {}
    for event in events:
        if event.cat in LAUNCH_CATEGORIES and event.args is not None and event.args.correlation is not None:
            launch = Launch(event.ts - origin, _thread(event))
            known = found.get(event.args.correlation)
            if known is None or launch < known:
                found[event.args.correlation] = launch
    return dict(sorted(found.items()))


def _kernels(
    events: Sequence[_Event],
    origin: float,
    steps: Sequence[StepRange],
    operators: Operators,
    launches: Mapping[int, Launch],
) -> Kernels:
    chosen = [(event, event.args or _Arguments()) for event in events if event.cat in DEVICE_CATEGORIES]
    chosen.sort(key=lambda pair: (pair[0].ts, pair[1].stream or 0, pair[1].correlation or -1, pair[0].name))
    correlation = [-1 if args.correlation is None else args.correlation for _, args in chosen]
    launched = np.array([launches[c].start_us if c in launches else np.nan for c in correlation], dtype=np.float64)
    return Kernels(
        name=tuple(event.name for event, _ in chosen),
        category=tuple(DEVICE_CATEGORIES[event.cat or ""] for event, _ in chosen),
        start_us=tuple(event.ts - origin for event, _ in chosen),
        duration_us=tuple(event.dur or 0.0 for event, _ in chosen),
        stream=tuple(-1 if args.stream is None else args.stream for _, args in chosen),
        correlation=tuple(correlation),
        operator=_launching_operators(operators, launches, correlation),
        step=tuple(step_of(steps, launched).tolist()),
    )


def _launching_operators(
    operators: Operators, launches: Mapping[int, Launch], correlation: Sequence[int]
) -> tuple[int, ...]:
    """Row of the innermost operator around each launch, -1 where there is none."""
    rows_of: dict[int, list[int]] = {}
    for row, thread in enumerate(operators.thread):
        rows_of.setdefault(thread, []).append(row)
    starts = {thread: np.array([operators.start_us[row] for row in rows]) for thread, rows in rows_of.items()}
    found = []
    for number in correlation:
        launch = launches.get(number)
        rows = rows_of.get(launch.thread) if launch is not None else None
        if launch is None or rows is None:
            found.append(-1)
            continue
        place = int(np.searchsorted(starts[launch.thread], launch.start_us, side="right")) - 1
        row = rows[place] if place >= 0 else -1
        while row >= 0 and operators.start_us[row] + operators.duration_us[row] <= launch.start_us:
            row = operators.parent[row]
        found.append(row)
    return tuple(found)


def _recorded(events: Sequence[_Event], origin: float) -> tuple[float, float] | None:
    spans = [event for event in events if event.cat == "Trace" and event.dur is not None]
    if not spans:
        return None
    return (
        min(span.ts for span in spans) - origin,
        max(span.ts + (span.dur or 0.0) for span in spans) - origin,
    )


def _misplaced(
    kernels: Kernels, launches: Mapping[int, Launch], recorded: tuple[float, float] | None
) -> dict[str, int]:
    """Activities outside the profiler's own window, and those that run more than 100 us before their launch."""
    outside = early = 0
    for start, duration, number in zip(kernels.start_us, kernels.duration_us, kernels.correlation, strict=True):
        if recorded is not None and (start + duration < recorded[0] - 1e3 or start > recorded[1] + 1e3):
            outside += 1
        if number in launches and start < launches[number].start_us - 100.0:
            early += 1
    return {"outside_window": outside, "before_launch": early}
