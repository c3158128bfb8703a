"""Finds the launches that Nsight Compute profiled in a trace of the same program, by name, grid, block and order.

Nsight Compute and the profiler of PyTorch demangle differently: `<unnamed>` for `(anonymous namespace)`, `(int)4` or
`0` for `4ul` or `false`, `[lambda() (instance 2)]` for `{lambda()#2}`, `T1` for a parameter's type, and Nsight Compute
leaves out namespaces (`at::` for `at::native::`). Names are therefore compared without namespaces, parameter lists,
`const` and `void`, and with literals and lambdas in one spelling. What is left out could tell two kernels apart; where
it does, in one grid and block, there is no match.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from advisor.ingest.ncu import Extent, NcuKernel
from advisor.model import Metric


class TraceKernels(NamedTuple):
    """The kernels of a trace in launch order, one column per field; None where the trace has no launch shape."""

    name: Sequence[str]
    grid: Sequence[Extent | None]
    block: Sequence[Extent | None]


class Basis(str, enum.Enum):
    """How sure the place of a profiled launch in the trace is."""

    ONLY = "only"  # the one launch of its kind in both
    ORDER = "order"  # as many equal launches in both: the n-th is taken for the n-th
    GROUP = "group"  # not all equal launches are in both: it is one of `rows`, unknown which
    NONE = "none"  # not found, or not to be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where one profiled launch is in the trace.

    `row` is its row, None unless `basis` is ONLY or ORDER. `rows` are all rows of equal name, grid and block,
    ascending. `reason` says in words what the basis rests on, and for NONE why there is no match.
    """

    row: int | None
    rows: tuple[int, ...]
    basis: Basis
    reason: str


def join(kernels: Sequence[NcuKernel], trace: TraceKernels) -> tuple[Match, ...]:
    """For each profiled launch its place in the trace; both in launch order.

    A profile often holds a part of the launches only (`--kernel-name`, `--launch-skip`, `--launch-count`), and a trace
    other steps than the profile. Where the numbers of equal launches differ, order says nothing: such launches match as
    a group, whose mean holds for each of its rows (`metrics_by_row`). A trace is of one rank: of a profile of several
    processes or devices give the launches of that rank (`NcuKernel.process`, `NcuKernel.device`).
    """
    rows = _groups(trace.name, trace.grid, trace.block)
    profiled = _groups(
        [kernel.name for kernel in kernels], [kernel.grid for kernel in kernels], [kernel.block for kernel in kernels]
    )
    wanted = {kind: _candidates(kind, rows) for kind in profiled}
    claims: dict[_Kind, int] = defaultdict(int)
    for found in wanted.values():
        for kind in found:
            claims[kind] += 1
    matches: list[Match | None] = [None] * len(kernels)
    for kind, members in profiled.items():
        reason = _obstacle(kind, members, wanted[kind], rows, claims)
        places = () if reason else tuple(rows[wanted[kind][0]].members)
        for nth, member in enumerate(members.members):
            matches[member] = _unmatched(reason) if reason else _match(nth, len(members.members), places)
    return tuple(match or _unmatched("the profile does not give its grid and block") for match in matches)


def metrics_by_row(kernels: Sequence[NcuKernel], matches: Sequence[Match]) -> dict[int, tuple[Metric, ...]]:
    """The figures of each matched row of the trace: its own, or the mean over its group where it matched as a group.

    The mean is over launches, unweighted; a figure that some launches of a group lack is the mean over the others.
    """
    found: dict[int, tuple[Metric, ...]] = {}
    groups: dict[tuple[int, ...], list[NcuKernel]] = defaultdict(list)
    for kernel, match in zip(kernels, matches, strict=True):
        if match.row is not None:
            found[match.row] = kernel.metrics
        elif match.basis is Basis.GROUP:
            groups[match.rows].append(kernel)
    for rows, members in groups.items():
        found.update(dict.fromkeys(rows, _mean(members)))
    return dict(sorted(found.items()))


def _mean(kernels: Sequence[NcuKernel]) -> tuple[Metric, ...]:
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        for metric in kernel.metrics:
            values[metric.name, metric.unit, metric.source].append(metric.value)
    return tuple(
        Metric(name=name, value=sum(figures) / len(figures), unit=unit, source=source)
        for (name, unit, source), figures in values.items()
    )


# --------------------------------------------------------------------------------------------------------------- groups


class _Kind(NamedTuple):
    """What equal launches have in common."""

    name: str  # comparable
    grid: Extent
    block: Extent


class _Members(NamedTuple):
    """The places of equal launches and the names they were given."""

    members: list[int]
    names: set[str]


def _groups(
    names: Sequence[str], grids: Sequence[Extent | None], blocks: Sequence[Extent | None]
) -> dict[_Kind, _Members]:
    found: dict[_Kind, _Members] = {}
    comparable: dict[str, str] = {}
    for place, (name, grid, block) in enumerate(zip(names, grids, blocks, strict=True)):
        if grid is None or block is None:
            continue
        if name not in comparable:
            comparable[name] = comparable_name(name)
        group = found.setdefault(_Kind(comparable[name], grid, block), _Members([], set()))
        group.members.append(place)
        group.names.add(name)
    return found


def _candidates(kind: _Kind, rows: Mapping[_Kind, _Members]) -> list[_Kind]:
    """The kinds of the trace this kind of the profile may be: the same name, else one that is part of the other."""
    if kind in rows:
        return [kind]
    return [other for other in rows if other[1:] == kind[1:] and _partly(kind.name, other.name)]


def _partly(one: str, other: str) -> bool:
    """Whether one name is the other without template arguments, or cut off inside them."""
    short, long = sorted((one, other), key=len)
    if "<" not in short:
        return long.partition("<")[0] == short
    return short.count("<") > short.count(">") and long.startswith(short)


def _obstacle(
    kind: _Kind,
    members: _Members,
    found: Sequence[_Kind],
    rows: Mapping[_Kind, _Members],
    claims: Mapping[_Kind, int],
) -> str:
    """Why launches of this kind cannot be placed; empty when they can."""
    if not found:
        if any(other.name == kind.name for other in rows):
            return "the trace has this kernel with another grid or block only"
        return "the trace has no kernel of this name"
    if len(found) > 1 or len(rows[found[0]].names) > 1:
        return "the trace has several kernels of this name, grid and block that the profile's name does not tell apart"
    if len(members.names) > 1 or (found[0] != kind and claims[found[0]] > 1):
        return "the profile has several kernels of this grid and block that the trace's name does not tell apart"
    return ""


def _match(nth: int, profiled: int, rows: tuple[int, ...]) -> Match:
    if profiled != len(rows):
        reason = f"{profiled} equal launches in the profile, {len(rows)} in the trace: which is which is unknown"
        return Match(row=None, rows=rows, basis=Basis.GROUP, reason=reason)
    if profiled == 1:
        return Match(row=rows[0], rows=rows, basis=Basis.ONLY, reason="the only launch of its name, grid and block")
    reason = f"number {nth + 1} of {profiled} equal launches in both"
    return Match(row=rows[nth], rows=rows, basis=Basis.ORDER, reason=reason)


def _unmatched(reason: str) -> Match:
    return Match(row=None, rows=(), basis=Basis.NONE, reason=reason)


# ---------------------------------------------------------------------------------------------------------------- names

_SPELLINGS = (
    (re.compile(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}"), "unnamed"),
    (re.compile(r"\boperator\s*\(\)"), "operator_call"),
    (re.compile(r"\s*\(instance (\d+)\)"), r"#\1"),
    (re.compile(r"\([\w: ]+\)(?=-?\d)"), ""),  # the type of a literal: (int)4
    (re.compile(r"\b(\d+)(?:ull|ul|u|ll|l)\b"), r"\1"),
    (re.compile(r"\btrue\b"), "1"),
    (re.compile(r"\bfalse\b"), "0"),
)
_DROPPED = re.compile(r"\b(?:const|void)\b|\b\w+::|\s+")


def comparable_name(name: str) -> str:
    """A demangled name in the form that both tools' spellings of it have in common; linear in its length.

    `void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int,
    ...)` becomes `vectorized_elementwise_kernel<4,FillFunctor<float>,array<char*,1>>`.
    """
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    # Namespaces go first: `f(int)::[lambda#1]` would otherwise become `f::[lambda#1]` and lose the f.
    return _without_parameters(_DROPPED.sub("", name)).replace("{", "[").replace("}", "]")


def _without_parameters(name: str) -> str:
    """The name without what stands in parentheses; one that is cut off inside them ends there."""
    kept: list[str] = []
    depth = 0
    for part in re.split(r"([()])", name):
        if part == "(":
            depth += 1
        elif part == ")":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(part)
    return "".join(kept)
