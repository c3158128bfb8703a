"""A Kineto trace as the later stages of a run read it: operator calls, device activities, launches, ranges, steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from advisor.columns import joins
from advisor.columns.inputs import inputs_of
from advisor.columns.schema import MODULE, WINDOW
from advisor.columns.table import Ints, Table
from advisor.errors import ArtifactError
from advisor.ingest.reader import read_table
from advisor.ingest.recorded import devices
from advisor.ingest.trace import Launch, Range, StepRange, Trace, assemble
from advisor.model import Kernels, Operators
from advisor.operators.traffic import reads_constants

__all__ = ["Trace", "read_trace"]

STEP = re.compile(r"^ProfilerStep#(\d+)$")
MEMORY = frozenset({"cudaMalloc", "cudaFree", "hipMalloc", "hipFree"})
KINDS = ("kernel", "memcpy", "memset")  # by the numbers of `decode`


def read_trace(path: Path) -> Trace:
    """Read a trace written by torch.profiler (.json or .json.gz). Raises ArtifactError saying what to do.

    A run records its own traces: one that is not whole is refused here, unlike what `read_table` makes of it.
    """
    table = read_table(path)
    if table.lost:
        raise ArtifactError(f"{path.name} is not whole ({'; '.join(table.lost)}): record the run again")
    if table.skipped:
        raise ArtifactError(
            f"{path.name} holds {table.skipped} events that cannot be read: export it with torch.profiler"
        )
    if not (len(table.operators) or len(table.activities) or len(table.calls)):
        raise ArtifactError(f"{path.name} holds no operator and no kernel: record with torch.profiler.profile()")
    return trace_of(table)


def trace_of(table: Table) -> Trace:
    """The trace that a table holds."""
    called = np.array([_is_operator(name) for name in table.names], dtype=bool)[table.operators.name]
    ranges = _ranges(table, ~called)
    steps = _steps(ranges)
    operators, concrete = _operators(table, called, steps)
    launches = _launches(table)
    kernels = _kernels(table, steps, operators, launches)
    recorded = _recorded(table)
    defects = {"negative_duration": _negative(table), **_misplaced(kernels, launches, recorded)}
    return assemble(
        operators=operators,
        concrete=concrete,
        kernels=kernels,
        ranges=ranges,
        launches=launches,
        steps=steps,
        recorded=recorded,
        device_names=tuple(device.name for device in devices(table.head)),
        memory_calls=_memory_calls(table, steps),
        defects=defects,
    )


def _is_operator(name: str) -> bool:
    """Whether a cpu_op is an operator call: Dynamo records its own phases ("Torch-Compiled Region: 0/0") as such."""
    return " " not in name or name.startswith("autograd::engine::")


def _threads(table: Table, numbers: Ints) -> list[int]:
    """Thread ids; a thread that is named by a text is -1."""
    ids = [int(thread) if thread.lstrip("-").isdigit() else -1 for _, thread in table.threads]
    return [ids[number] for number in numbers.tolist()]


def _ranges(table: Table, phases: npt.NDArray[np.bool_]) -> tuple[Range, ...]:
    """Annotations, and the phases that stand among the operators."""
    found = []
    marked = (table.ranges.kind != MODULE) & (table.ranges.kind != WINDOW)
    for rows, chosen in ((table.ranges, marked), (table.operators, phases)):
        threads = _threads(table, rows.thread[chosen])
        times = zip(rows.start[chosen].tolist(), rows.duration[chosen].tolist(), threads, strict=True)
        found += [Range(name, *item) for name, item in zip(table.named(rows.name[chosen]), times, strict=True)]
    return tuple(sorted(found, key=lambda item: (item.start_us, -item.duration_us, item.thread, item.name)))


def _steps(ranges: Sequence[Range]) -> tuple[StepRange, ...]:
    found = []
    for item in ranges:
        match = STEP.match(item.name)
        if match:
            found.append(StepRange(int(match[1]), item.start_us, item.start_us + item.duration_us))
    return tuple(found)


def _numbers(steps: Sequence[StepRange], time: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """The index of the step whose host range holds each time, -1 outside."""
    windows = np.array([(step.start_us, step.end_us) for step in steps], dtype=np.float64).reshape(-1, 2)
    numbers = [*(step.number for step in steps), -1]
    return tuple(numbers[place] for place in joins.step_of(windows, time).tolist())


def _operators(
    table: Table, called: npt.NDArray[np.bool_], steps: Sequence[StepRange]
) -> tuple[Operators, dict[int, tuple[str, ...]]]:
    rows = type(table.operators)(
        **{item.name: getattr(table.operators, item.name)[called] for item in fields(table.operators)}
    )
    inputs = [inputs_of(signature) for signature in table.signatures]
    shapes = [tuple(entry if all(isinstance(n, int) for n in entry) else () for entry in i.shapes) for i in inputs]
    signature = rows.signature.tolist()
    operators = Operators(
        name=tuple(table.named(rows.name)),
        start_us=tuple(rows.start.tolist()),
        duration_us=tuple(rows.duration.tolist()),
        thread=tuple(_threads(table, rows.thread)),
        sequence=tuple(rows.sequence.tolist()),
        forward_thread=tuple(rows.forward_thread.tolist()),
        parent=tuple(joins.parents(rows).tolist()),
        step=_numbers(steps, rows.start),
        shapes=tuple(shapes[number] for number in signature),
        dtypes=tuple(inputs[number].dtypes for number in signature),
    )
    concrete = {row: inputs[number].concrete for row, number in enumerate(signature) if inputs[number].concrete}
    return operators, {row: texts for row, texts in concrete.items() if reads_constants(operators.name[row])}


def _launches(table: Table) -> dict[int, Launch]:
    """Launches by correlation id; a repeated id keeps its first launch."""
    calls, found = table.calls, dict[int, Launch]()
    threads = _threads(table, calls.thread)
    for number, start, thread in zip(calls.correlation.tolist(), calls.start.tolist(), threads, strict=True):
        if number >= 0:
            found.setdefault(number, Launch(start, thread))
    return dict(sorted(found.items()))


def _memory_calls(table: Table, steps: Sequence[StepRange]) -> dict[str, tuple[float, float]]:
    """Per step the calls that take memory from the driver or give it back, and the host's time in them."""
    calls = table.calls
    chosen = np.array([name in MEMORY for name in table.names], dtype=bool)[calls.name]
    chosen &= np.array(_numbers(steps, calls.start), dtype=np.int64) >= 0
    found: dict[str, tuple[float, float]] = {}
    for name, duration in zip(table.named(calls.name[chosen]), calls.duration[chosen].tolist(), strict=True):
        number, time = found.get(name, (0.0, 0.0))
        found[name] = (number + 1 / len(steps), time + duration / len(steps))
    return dict(sorted(found.items()))


def _kernels(table: Table, steps: Sequence[StepRange], operators: Operators, launches: Mapping[int, Launch]) -> Kernels:
    rows = table.activities
    correlation = rows.correlation.tolist()
    launched = np.array([launches[c].start_us if c in launches else np.nan for c in correlation], dtype=np.float64)
    return Kernels(
        name=tuple(table.named(rows.name)),
        category=tuple(KINDS[kind] for kind in rows.kind.tolist()),
        start_us=tuple(rows.start.tolist()),
        duration_us=tuple(rows.duration.tolist()),
        stream=tuple(rows.stream.tolist()),
        correlation=tuple(correlation),
        operator=_launching_operators(operators, launches, correlation),
        step=_numbers(steps, launched),
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


def _recorded(table: Table) -> tuple[float, float] | None:
    rows, chosen = table.ranges, table.ranges.kind == WINDOW
    if not chosen.any():
        return None
    return float(rows.start[chosen].min()), float((rows.start[chosen] + rows.duration[chosen]).max())


def _negative(table: Table) -> int:
    """Events whose duration is negative: a clock that was set back."""
    return sum(
        int((rows.duration < 0).sum()) for rows in (table.operators, table.calls, table.activities, table.ranges)
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
