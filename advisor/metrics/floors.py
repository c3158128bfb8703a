"""Floors of everything that ran: FLOPs, least bytes and least time per call, summed by kernel, operator and module.

A call's floor is max(FLOPs / peak, least bytes / bandwidth), the roofline bound. What no operator launched, and
communication, has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from advisor.columns import joins
from advisor.columns.inputs import Inputs, inputs_of
from advisor.columns.schema import KERNEL, MODULE
from advisor.columns.table import Floats, Ints, Table
from advisor.measured import Cost
from advisor.metrics.tensorcores import tensor_use
from advisor.metrics.totals import communicates
from advisor.model import Hardware
from advisor.operators.arithmetic import COMPOSITES, Work, work_of
from advisor.operators.calls import is_list
from advisor.operators.families import may_multiply
from advisor.operators.lists import with_list_dtype
from advisor.operators.traffic import family, least_bytes, reads_constants

Flags = npt.NDArray[np.bool_]
SHOWN = 40  # costs of each kind that are kept, largest recoverable time first


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Which call launched each activity and which operator encloses that call, and what encloses each operator.

    `call`, `operator` are one row per activity, `parent` one per operator; -1 where there is none.
    """

    call: Ints
    operator: Ints
    parent: Ints


def link(table: Table) -> Links:
    """Join activities to calls and operators."""
    call, parent = joins.launching_calls(table), joins.parents(table.operators)
    return Links(call=call, operator=joins.launching_operators(table, call, parent), parent=parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The distinct calls of a trace: `of_row` gives for each operator row its kind, the rest is one entry per kind."""

    of_row: Ints
    name: tuple[str, ...]
    inputs: tuple[Inputs, ...]
    work: tuple[Work | None, ...]
    family: tuple[str, ...]
    dtype: tuple[str, ...]  # of the arithmetic: the first floating-point input, "" where there is none
    least_bytes: Floats  # NaN where unknown


def kinds(table: Table, links: Links) -> Kinds:
    """Count each distinct call once, however often it was made."""
    rows = table.operators
    codes = rows.name.astype(np.int64) * max(1, len(table.signatures)) + rows.signature
    distinct, of_row = np.unique(codes, return_inverse=True)
    known = [inputs_of(signature) for signature in table.signatures]
    names = [table.names[code // max(1, len(table.signatures))] for code in distinct.tolist()]
    inputs = [known[code % max(1, len(table.signatures))] for code in distinct.tolist()]
    for place, kernel in _first_kernels(table, links, of_row).items():
        if any(is_list(entry) for entry in inputs[place].shapes):
            dtypes = with_list_dtype(inputs[place].shapes, inputs[place].dtypes, kernel)
            inputs[place] = replace(inputs[place], dtypes=dtypes)
    families = [family(name) for name in names]
    works, traffic = [], []
    for name, kind, item in zip(names, families, inputs, strict=True):
        works.append(work_of(name, item.shapes, item.dtypes, item.concrete))
        constants = item.concrete if reads_constants(name) else ()
        found = least_bytes(name, kind, item.shapes, item.dtypes, constants, item.strides or None)
        traffic.append(found or math.nan)  # what launches a kernel moves something: a view or autograd's node by itself
    return Kinds(
        of_row=of_row.astype(np.int64),
        name=tuple(names),
        inputs=tuple(inputs),
        work=tuple(works),
        family=tuple(families),
        dtype=tuple(_dtype(item) for item in inputs),
        least_bytes=np.array(traffic, dtype=np.float64),
    )


def _first_kernels(table: Table, links: Links, of_row: Ints) -> dict[int, str]:
    """A kernel that each kind of call launched."""
    launched = np.flatnonzero((links.operator >= 0) & (table.activities.kind == KERNEL))
    found, first = np.unique(of_row[links.operator[launched]], return_index=True)
    names = table.activities.name[launched[first]].tolist()
    return {place: table.names[name] for place, name in zip(found.tolist(), names, strict=True)}


def _dtype(inputs: Inputs) -> str:
    return next((dtype for dtype in inputs.dtypes if dtype.startswith(("float", "bfloat", "complex"))), "")


# ---------------------------------------------------------------------------------------------------------------- calls


def levels(parent: Ints) -> list[Ints]:
    """Rows by their depth of nesting, outermost first."""
    depths: list[int] = []
    for outer in parent.tolist():  # what encloses a row stands before it
        depths.append(depths[outer] + 1 if outer >= 0 else 0)
    depth = np.array(depths, dtype=np.int64)
    order = np.argsort(depth, kind="stable")
    return np.split(order, np.searchsorted(depth[order], np.arange(1, int(depth.max(initial=0)) + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Per operator row: `counted` is the row at or around it whose arithmetic counts, -1 where there is none;
    `recomputed` marks forward operators that a backward pass runs again."""

    counted: Ints
    recomputed: Flags


def rows(table: Table, links: Links, found: Kinds) -> Rows:
    """Which calls count: the outermost with a formula; a composite only where nothing inside it counts."""
    operators, parent = table.operators, links.parent
    has = np.array([work is not None for work in found.work], dtype=bool)[found.of_row] if len(operators) else _no(0)
    composite = (
        np.array([name in COMPOSITES for name in found.name], dtype=bool)[found.of_row] if len(operators) else (_no(0))
    )
    depths = levels(parent)
    plain = has & ~composite
    holds = plain.copy()  # a row with a counted one at or below it
    for depth in reversed(depths[1:]):
        np.logical_or.at(holds, parent[depth], holds[depth])
    chosen = plain | (has & composite & ~holds)
    counted = np.where(chosen, np.arange(len(operators)), -1)
    state = np.where(operators.forward_thread != 0, 1, 0)
    for depth in depths[1:]:
        above = parent[depth]
        counted[depth] = np.where(counted[above] >= 0, counted[above], counted[depth])
        again = (state[depth] == 0) & (state[above] == 1) & (operators.sequence[depth] >= 0)
        state[depth] = np.where(state[depth] == 1, 1, np.where(again, 2, state[above]))
    return Rows(counted=counted, recomputed=state == 2)


def _no(count: int) -> Flags:
    return np.zeros(count, dtype=bool)


# --------------------------------------------------------------------------------------------------------------- floors


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Least times of the activities that were asked for, and the arithmetic behind them.

    Per activity: `unit` is the operator row it belongs to (the one whose arithmetic counts, else the innermost; -1
    without one), `floor_us` its share of that call's floor by time (NaN unknown), `kernel_floor_us` its floor as a
    kernel of its own, `compute` whether arithmetic sets it.
    Over all calls: `model` FLOPs by dtype, `causal` (None where a call does not say what it hides) and `executed`;
    `uncounted` is the time of calls by name whose arithmetic matters and is not known, `unit_us` that of everything.
    """

    unit: Ints
    floor_us: Floats
    kernel_floor_us: Floats
    compute: Flags
    tensor: npt.NDArray[np.int8]  # 1 matrix units, 0 none, -1 unknown
    flops: Floats
    traffic: Floats
    model: Mapping[str, float]
    causal: float | None
    executed: float
    uncounted: Mapping[str, float]
    unit_us: float


def floors(table: Table, links: Links, found: Kinds, calls: Rows, hardware: Hardware, chosen: Flags) -> Floors:
    """Floors of the chosen activities (the kernels of the steps); the others get no unit.

    float32 products may have run as tfloat32; where the kernel's name does not tell, the faster rate is taken, so that
    the floor stays one.
    """
    activities = table.activities
    unit = np.where(links.operator >= 0, links.operator, -1)
    outer = calls.counted[np.maximum(unit, 0)] if len(calls.counted) else np.full(len(unit), -1)
    unit = np.where((unit >= 0) & (outer >= 0), outer, unit)
    counts = chosen & ~communicates(table) & (activities.kind == KERNEL)
    unit = np.where(counts, unit, -1)
    tensor = _tensor(table, found, unit, hardware.arch)
    units, place = np.unique(unit, return_inverse=True)
    time = lengths(table)
    measured = np.bincount(place, weights=time, minlength=len(units))
    matrix = np.full(len(units), -1, dtype=np.int64)
    np.maximum.at(matrix, place, tensor)
    least = _least(table, found, calls, units, matrix, hardware)
    floor = np.minimum(np.fmax(least.compute_us, least.memory_us), measured)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(measured[place] > 0, time / measured[place], 0.0)
        by_compute = np.nan_to_num(least.compute_us, nan=-1.0) >= np.nan_to_num(least.memory_us, nan=-1.0)
    return Floors(
        unit=unit,
        floor_us=floor[place] * share,
        kernel_floor_us=_of_kernels(table, unit, place, tensor, floor, np.isnan(least.flops)),
        compute=by_compute[place],
        tensor=tensor,
        flops=least.flops[place] * share,
        traffic=least.traffic[place] * share,
        model=least.model,
        causal=least.causal,
        executed=least.executed,
        unit_us=float(time[chosen].sum()),
        uncounted=_uncounted(table, found, unit, np.where(counts, least.flops[place], 0.0), tensor),
    )


def _of_kernels(
    table: Table, unit: Ints, place: Ints, tensor: npt.NDArray[np.int8], floor: Floats, moves_only: Flags
) -> Floats:
    """Microseconds that each activity takes at least as a kernel of its own.

    Of a call with several kernels those on matrix units have its floor; what the others, which convert, pad or add up,
    had to do is not known. Where no kernel is known to use matrix units only a call with one kernel name has one.
    """
    time, names = lengths(table), table.activities.name
    count = len(floor)
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.full(count, -1, dtype=np.int64)
    np.minimum.at(first, place, names)
    np.maximum.at(last, place, names)
    matrix = (tensor == 1) & ~moves_only[place]
    some = np.bincount(place, weights=matrix, minlength=count) > 0
    owns = (unit >= 0) & np.where(some[place], matrix, (first == last)[place])
    whole = np.bincount(place, weights=time * owns, minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(owns & (whole[place] > 0), time / whole[place], np.nan)
    return np.minimum(floor[place] * share, time)


def lengths(table: Table) -> Floats:
    """Microseconds of each activity; a negative duration, which a clock that was set back leaves, counts as none."""
    return np.maximum(table.activities.duration, 0.0)


def _uncounted(table: Table, found: Kinds, unit: Ints, flops: Floats, tensor: npt.NDArray[np.int8]) -> dict[str, float]:
    """Microseconds by name of work that computes products, or may, without a count.

    Matrix units in use tell it of kernels whose operator says nothing, such as a compiler's.
    """
    kind = np.where(unit >= 0, found.of_row[np.maximum(unit, 0)] if len(found.of_row) else -1, -1)
    may = [may_multiply(name, family) for name, family in zip(found.name, found.family, strict=True)]
    computes = (tensor == 1) | np.array([*may, False], dtype=bool)[kind]
    rows = np.flatnonzero(np.isnan(flops) & computes)
    time = lengths(table)
    times: dict[str, float] = {}
    for row, number in zip(rows.tolist(), kind[rows].tolist(), strict=True):
        name = found.name[number] if number >= 0 else table.names[table.activities.name[row]]
        times[name] = times.get(name, 0.0) + float(time[row])
    return dict(sorted(times.items(), key=lambda item: (-item[1], item[0])))


def _tensor(table: Table, found: Kinds, unit: Ints, arch: str | None) -> npt.NDArray[np.int8]:
    """Whether each activity uses matrix units, asked once per kernel name and kind of call."""
    kind = np.where(unit >= 0, found.of_row[np.maximum(unit, 0)] if len(found.of_row) else -1, -1)
    codes = table.activities.name.astype(np.int64) * (len(found.name) + 1) + kind + 1
    distinct, place = np.unique(codes, return_inverse=True)
    answers = np.full(len(distinct), -1, dtype=np.int8)
    for row, code in enumerate(distinct.tolist()):
        name, number = table.names[code // (len(found.name) + 1)], code % (len(found.name) + 1) - 1
        family_, dtype = (found.family[number], found.dtype[number] or None) if number >= 0 else (None, None)
        used = tensor_use(name, family_, dtype, arch)
        answers[row] = -1 if used is None else int(used)
    found_ = answers[place]
    return np.where(table.activities.kind == KERNEL, found_, 0).astype(np.int8)


@dataclass(frozen=True)
class _Least:
    compute_us: Floats
    memory_us: Floats
    flops: Floats
    traffic: Floats
    model: dict[str, float]
    causal: float | None
    executed: float


def _least(table: Table, found: Kinds, calls: Rows, units: Ints, matrix: Ints, hardware: Hardware) -> _Least:
    count = len(units)
    compute, flops, traffic = np.full(count, np.nan), np.full(count, np.nan), np.full(count, np.nan)
    real = units >= 0
    kind = found.of_row[np.maximum(units, 0)] if len(found.of_row) else np.zeros(count, dtype=np.int64)
    if len(found.least_bytes):
        traffic[real] = found.least_bytes[kind[real]]
    model: dict[str, float] = {}
    causal, executed, flagged, unsaid = 0.0, 0.0, False, False
    counts = np.array([found.work[k] is not None for k in range(len(found.work))], dtype=bool)
    for place in np.flatnonzero(real & counts[kind] if len(counts) else real & False).tolist():
        work, row = found.work[kind[place]], int(units[place])
        if work is None or calls.counted[row] != row:
            continue
        dtype = ran_in(found.dtype[kind[place]], int(matrix[place]), hardware)
        flops[place] = work.executed
        rate = hardware.peak_flops.get(dtype) or hardware.measured_flops.get(dtype)
        if rate:
            compute[place] = work.least / rate * 1e6
        executed += work.executed
        if not calls.recomputed[row]:
            model[dtype or "unknown"] = model.get(dtype or "unknown", 0.0) + work.model
            flagged |= work.family == "attention"
            unsaid |= work.causal is None
            causal += work.causal or 0.0
    bandwidth = hardware.hbm_bandwidth or hardware.measured_bandwidth
    memory = traffic / bandwidth * 1e6 if bandwidth else np.full(count, np.nan)
    known = causal if flagged and not unsaid else None
    return _Least(compute, memory, flops, traffic, dict(sorted(model.items())), known, executed)


def ran_in(dtype: str, matrix: int, hardware: Hardware) -> str:
    """The arithmetic of a float32 product: tfloat32 unless its kernel is known to use no matrix units."""
    faster = dtype == "float32" and matrix != 0 and "tfloat32" in hardware.peak_flops
    return "tfloat32" if faster else dtype


# ---------------------------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """A way to sum up activities: a number per activity (-1: not in it), the name of each number, and where names
    alone do not tell them apart their shapes."""

    kind: str
    group: Ints
    names: Sequence[str]
    shapes: Sequence[str] | None = None


def groupings(table: Table, links: Links, found: Kinds, result: Floors) -> tuple[Grouping, ...]:
    """By kernel name, by kind of operator call, by operator family and by module class."""
    unit = result.unit
    kind = np.where(unit >= 0, found.of_row[np.maximum(unit, 0)] if len(found.of_row) else -1, -1)
    families = sorted(set(found.family))
    of_family = np.array([families.index(item) for item in found.family] or [0], dtype=np.int64)
    modules, names = _modules(table, links, unit)
    return (
        Grouping(kind="kernel", group=table.activities.name.astype(np.int64), names=table.names),
        _operators(found, kind),
        Grouping(kind="family", group=np.where(kind >= 0, of_family[np.maximum(kind, 0)], -1), names=families),
        Grouping(kind="module", group=modules, names=names),
    )


def _operators(found: Kinds, kind: Ints) -> Grouping:
    """Calls of one name with tensors of the same sizes and dtype are one operator, whatever their constants."""
    pairs = [(name, sizes(item)) for name, item in zip(found.name, found.inputs, strict=True)]
    distinct = sorted(set(pairs))
    places = {pair: place for place, pair in enumerate(distinct)}
    of_kind = np.array([places[pair] for pair in pairs] or [0], dtype=np.int64)
    return Grouping(
        kind="operator",
        group=np.where(kind >= 0, of_kind[np.maximum(kind, 0)], -1),
        names=[name for name, _ in distinct],
        shapes=[shown for _, shown in distinct],
    )


def sizes(inputs: Inputs) -> str:
    """The sizes of the first tensors of a call and the dtype of its arithmetic, to tell calls of one name apart."""
    shown = [f"[{', '.join(map(str, shape))}]" for shape, d in zip(inputs.shapes, inputs.dtypes, strict=False) if d]
    return " ".join(part for part in (" x ".join(shown[:4]), _dtype(inputs)) if part)


def _modules(table: Table, links: Links, unit: Ints) -> tuple[Ints, list[str]]:
    """The innermost module at the launch of each activity; backward work goes to the module of its forward call."""
    ranges, operators = table.ranges, table.operators
    chosen = np.flatnonzero(ranges.kind == MODULE)
    none = np.full(len(unit), -1, dtype=np.int64)
    if not len(chosen) or not len(operators):
        return none, []
    picked = type(ranges)(**{f: getattr(ranges, f)[chosen] for f in ("name", "start", "duration", "thread", "kind")})
    codes, of_range = np.unique(picked.name, return_inverse=True)
    names = [_module_class(table.names[code]) for code in codes.tolist()]
    classes = sorted(set(names))
    parent = joins.nested(picked.thread, picked.start, picked.start + picked.duration)
    row = joins.innermost(operators.thread, operators.start, picked, parent)
    forward = np.where((operators.sequence >= 0) & (operators.forward_thread == 0) & (row >= 0))[0]
    creator = dict(zip(operators.sequence[forward].tolist(), row[forward].tolist(), strict=True))
    behind = np.flatnonzero((operators.forward_thread != 0) & (operators.sequence >= 0))
    row[behind] = [creator.get(number, -1) for number in operators.sequence[behind].tolist()]
    for depth in levels(links.parent)[1:]:
        row[depth] = np.where(row[depth] < 0, row[links.parent[depth]], row[depth])
    of_class = np.array([classes.index(name) for name in names], dtype=np.int64)[of_range]
    module = np.where(unit >= 0, row[np.maximum(unit, 0)], -1)
    return np.where(module >= 0, of_class[np.maximum(module, 0)], -1), classes


def _module_class(name: str) -> str:
    """`nn.Module: Linear_3` is the fourth Linear."""
    plain = name.partition(": ")[2]
    head, _, number = plain.rpartition("_")
    return head if head and number.isdigit() else plain


def costs(
    table: Table,
    grouping: Grouping,
    result: Floors,
    chosen: Flags,
    steps: int,
    fill: Mapping[str, Floats] | None = None,
) -> tuple[Cost, ...]:
    """Time, floor and arithmetic of each group per step, largest recoverable time first, then largest time.

    A group's floor is the sum over its parts; what has none counts as fully used there, so the recoverable time never
    exceeds what is known. `fill` may bring an `occupancy` share per activity.
    """
    rows_ = np.flatnonzero(chosen & (grouping.group >= 0))
    if not len(rows_):
        return ()
    group, duration = grouping.group[rows_], lengths(table)[rows_]
    size = len(grouping.names)
    time = np.bincount(group, weights=duration, minlength=size)
    floors_ = (result.kernel_floor_us if grouping.kind == "kernel" else result.floor_us)[rows_]
    known = ~np.isnan(floors_)
    own = known if grouping.kind == "kernel" else np.ones(len(rows_), dtype=bool)  # whose FLOPs and bytes are its own
    floor = np.bincount(group, weights=np.where(known, floors_, duration), minlength=size)
    some = np.bincount(group, weights=known, minlength=size) > 0
    compute = np.bincount(group, weights=duration * result.compute[rows_] * known, minlength=size)
    told = np.bincount(group, weights=duration * known, minlength=size)
    flops = np.bincount(group, weights=np.where(own, np.nan_to_num(result.flops[rows_]), 0.0), minlength=size)
    traffic = np.bincount(group, weights=np.where(own, np.nan_to_num(result.traffic[rows_]), 0.0), minlength=size)
    yes, no = (
        np.bincount(group, weights=duration * (result.tensor[rows_] == value), minlength=size) for value in (1, 0)
    )
    count = np.bincount(group, minlength=size)
    occupancy = _mean(group, duration, fill["occupancy"][rows_], size) if fill else np.full(size, np.nan)
    order = sorted(
        np.flatnonzero(count).tolist(),
        key=lambda item: (floor[item] - time[item] if some[item] else 0.0, -time[item], grouping.names[item]),
    )
    largest = sorted(np.flatnonzero(count).tolist(), key=lambda item: (-time[item], grouping.names[item]))
    kept = sorted({*order[:SHOWN], *largest[: SHOWN // 2]}, key=order.index)
    return tuple(
        Cost(
            kind=grouping.kind,
            name=grouping.names[item],
            shapes=grouping.shapes[item] or None if grouping.shapes is not None else None,
            count=float(count[item]) / steps,
            time_us=float(time[item]) / steps,
            floor_us=float(floor[item]) / steps if some[item] else None,
            bound=("compute" if compute[item] > told[item] / 2 else "memory") if some[item] else None,
            flops=float(flops[item]) / steps if flops[item] else None,
            least_bytes=float(traffic[item]) / steps if traffic[item] else None,
            tensor_cores=True if yes[item] > time[item] / 2 else False if no[item] > time[item] / 2 else None,
            occupancy_percent=None if np.isnan(occupancy[item]) else float(occupancy[item]) * 100,
        )
        for item in kept
    )


def _mean(group: Ints, weight: Floats, value: Floats, size: int) -> Floats:
    known = ~np.isnan(value)
    total = np.bincount(group, weights=np.where(known, value, 0.0) * weight, minlength=size)
    over = np.bincount(group, weights=weight * known, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(over > 0, total / over, np.nan)
