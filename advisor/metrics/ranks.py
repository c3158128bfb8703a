"""What several ranks of one job say together: who waits for whom, how uneven the work is, which ranks are not there.

Clocks of machines are not synchronised, so times of different files are never compared, only durations. A collective
ends on all ranks when the last one has joined: what its kernel takes on the rank that came last is transfer, what it
takes longer elsewhere is waiting for that rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.columns.table import Table
from advisor.measured import Ranks, RankTime
from advisor.metrics.steps import Steps
from advisor.metrics.totals import communicates

WORTH = 0.02  # of a step: less waiting is noise, as for rules (`rule.Rule.worth`)
POINT_TO_POINT = re.compile(r"^(send|recv|coalesced)", re.IGNORECASE)  # names of record_param_comms
MOST_RANKS = 1 << 20  # more than any job has: a number above is damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The collectives of one kind that one rank recorded, in order: step numbers and durations of their kernels.

    `key` names the kind the same way on all ranks: process group, its ranks and the collective where they are recorded,
    else stream and kernel. `group_size` is None where no group is recorded; `named` is True where its ranks are in the
    key, so that another group of the same name is another kind.
    """

    key: str
    group_size: int | None
    named: bool
    steps: tuple[int, ...]
    durations_us: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInput:
    """What one file contributes; times in microseconds per step, None where unknown.

    `compute_us` is the union of kernels that do not communicate, `steps` how many steps were recorded.
    """

    path: str
    rank: int | None
    world_size: int | None
    step_us: float | None = None
    compute_us: float | None = None
    exposed_comm_us: float | None = None
    collectives: tuple[Collectives, ...] = ()


def collectives_of(table: Table, steps: Steps) -> tuple[Collectives, ...]:
    """The collectives of a trace by kind, those outside of its steps left out; without steps all count as one.

    Transfers between two ranks (send, recv) are left out where the trace tells them from collectives: which ones belong
    together it does not say.
    """
    rows, groups = table.activities, _groups(table)
    chosen = np.flatnonzero(communicates(table) & ((steps.activity >= 0) if len(steps) else True))
    found: dict[tuple[str, int, bool], tuple[list[int], list[float]]] = {}
    for row in chosen[np.argsort(rows.start[chosen], kind="stable")].tolist():
        number = int(rows.collective[row])
        if number >= 0:
            what = table.collectives[number]
            if POINT_TO_POINT.match(what.name):
                continue
            members = groups.get(what.group)
            kind = f"group {what.group} {members or ''}: {what.name}", what.group_size, members is not None
        else:
            kernel = re.split(r"[(<]", table.names[rows.name[row]], maxsplit=1)[0]
            kind = f"stream {rows.stream[row]}: {kernel}", 0, False
        numbers, durations = found.setdefault(kind, ([], []))
        numbers.append(steps.numbers[steps.activity[row]] if len(steps) else 0)
        durations.append(float(rows.duration[row]))
    return tuple(
        Collectives(
            key=key,
            group_size=size if size > 0 else None,
            named=named,
            steps=tuple(numbers),
            durations_us=tuple(durations),
        )
        for (key, size, named), (numbers, durations) in sorted(found.items())
    )


def _groups(table: Table) -> dict[str, str]:
    """The ranks of each process group that the document lists, as text."""
    info = table.head.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    return {
        item["pg_name"]: str(item["ranks"])
        for item in (listed if isinstance(listed, list) else ())
        if isinstance(item, dict) and isinstance(item.get("pg_name"), str) and item.get("ranks")
    }


def ranks(profiles: Sequence[RankInput]) -> Ranks:
    """Compare the ranks of one job; the order of `profiles` does not matter.

    A collective is matched over ranks by kind, step and place in the step. Its transfer is the shortest of the
    durations, the rest is waiting (both per step). Where kinds do not occur equally often on the ranks that have them
    nothing is said about them. The straggler is the rank that waits least, if the others wait for longer than noise and
    all ranks are there. `imbalance` is (slowest compute - mean) / mean.
    """
    ordered = sorted(profiles, key=lambda item: (item.rank is None, item.rank or 0, item.path))
    members = _members(ordered)
    sizes = sorted({item.world_size for item in ordered if item.world_size is not None})
    notes = _notes(ordered, sizes)
    world = sizes[0] if len(sizes) == 1 and sizes[0] <= MOST_RANKS else None
    missing = tuple(sorted(set(range(world)) - {item.rank for item in members})) if world is not None else ()
    complete = world is not None and not missing
    split: Mapping[str, _Split] = {}
    if len(sizes) <= 1 and len(members) > 1:
        split, said = _split(members, world if complete else None)
        notes += said
    found = tuple(
        RankTime(
            path=item.path,
            rank=item.rank,
            step_us=item.step_us,
            compute_us=item.compute_us,
            exposed_comm_us=item.exposed_comm_us,
            transfer_us=split[item.path].transfer_us if item.path in split else None,
            wait_us=split[item.path].wait_us if item.path in split else None,
        )
        for item in ordered
    )
    waits = {item.rank: split[item.path].wait_us for item in members if item.path in split and item.rank is not None}
    steps = [item.step_us for item in members if item.step_us is not None]
    return Ranks(
        ranks=found,
        straggler=_straggler(waits, steps) if complete and len(waits) == len(members) else None,
        imbalance=_imbalance([item.compute_us for item in members]) if complete else None,
        missing=missing,
        notes=tuple(notes),
    )


@dataclass(slots=True)
class _Split:
    """Communication of one rank per step, in microseconds."""

    transfer_us: float = 0.0
    wait_us: float = 0.0


@dataclass(slots=True)
class _Kind:
    """One kind of collective: for each file and step number the durations in order."""

    group_size: int | None
    named: bool
    by_file: dict[str, dict[int, list[float]]] = field(default_factory=dict)


def _members(ordered: Sequence[RankInput]) -> list[RankInput]:
    """The files with a rank, of a rank that stands twice the first by path."""
    seen: set[int] = set()
    found = []
    for item in ordered:
        if item.rank is not None and item.rank not in seen:
            seen.add(item.rank)
            found.append(item)
    return found


def _notes(ordered: Sequence[RankInput], sizes: Sequence[int]) -> list[str]:
    notes = []
    unknown = sum(item.rank is None for item in ordered)
    if unknown:
        notes.append(f"{unknown} of {len(ordered)} files do not say which rank they are and are not compared")
    known = [item.rank for item in ordered if item.rank is not None]
    twice = sorted({rank for rank in known if known.count(rank) > 1})
    if twice:
        listed = ", ".join(str(rank) for rank in twice)
        notes.append(f"more than one file says that it is rank {listed}: the first by path is compared")
    if len(sizes) > 1:
        listed = ", ".join(str(size) for size in sizes)
        notes.append(f"the files come from jobs of different sizes ({listed} ranks): give one job at a time")
    return notes


def _split(members: Sequence[RankInput], world: int | None) -> tuple[dict[str, _Split], list[str]]:
    """Transfer and waiting of the ranks in the steps that all of them recorded, and what cannot be said.

    `world` is the number of ranks of the job where all are there, else None.
    """
    silent = sum(not item.collectives for item in members)
    if silent:
        return {}, [f"{silent} of {len(members)} ranks recorded no collective"] if silent < len(members) else []
    common = set.intersection(*({step for found in item.collectives for step in found.steps} for item in members))
    if not common:
        return {}, ["the ranks recorded no step in common: waiting cannot be told from transfer"]
    kinds: dict[str, _Kind] = {}
    for item in members:
        for found in item.collectives:
            kind = kinds.setdefault(found.key, _Kind(found.group_size, found.named))
            steps = kind.by_file.setdefault(item.path, {})
            for step, duration in zip(found.steps, found.durations_us, strict=True):
                if step in common:
                    steps.setdefault(step, []).append(duration)
    split: dict[str, _Split] = {}
    matched = total = 0.0
    for _, kind in sorted(kinds.items()):
        total += sum(sum(durations) for steps in kind.by_file.values() for durations in steps.values())
        if _comparable(kind, len(members), world):
            matched += _share_out(kind, split, len(common))
    if not split:
        return {}, ["the ranks' collectives do not match: waiting cannot be told from transfer"]
    notes = []
    if matched < total * (1 - 1e-9):
        notes.append(f"{matched / total:.0%} of the communication could be matched over the ranks and is split")
    if world is None:
        notes.append(
            "not all ranks are known to be there: those given may wait longer than said, for one of the others"
        )
    return split, notes


def _comparable(kind: _Kind, members: int, world: int | None) -> bool:
    """Whether the files that have a kind have it equally often in each step, and are the ranks of one group.

    Groups of other ranks may bear the same name, which shows only if the ranks of the group are recorded or all ranks
    of the job are there. Without a recorded group all files must have the kind.
    """
    files, size = len(kind.by_file), kind.group_size
    counts = {tuple(sorted((step, len(found)) for step, found in steps.items())) for steps in kind.by_file.values()}
    if size is None:
        of_one_group = files == members
    else:
        of_one_group = files <= size if kind.named else files == size and world is not None
    return files > 1 and len(counts) == 1 and of_one_group


def _share_out(kind: _Kind, split: dict[str, _Split], steps: int) -> float:
    """Add a kind to what the ranks transfer and wait per step; gives the sum of all its durations."""
    files = sorted(kind.by_file)
    table = np.array([[value for _, found in sorted(kind.by_file[file].items()) for value in found] for file in files])
    transfer = table.min(axis=0, initial=np.inf)
    for file, durations in zip(files, table, strict=True):
        found = split.setdefault(file, _Split())
        found.transfer_us += float(transfer.sum()) / steps
        found.wait_us += float((durations - transfer).sum()) / steps
    return float(table.sum())


def _straggler(waits: Mapping[int, float], steps: Sequence[float]) -> int | None:
    """The rank that waits least, if the median of the others waits longer by more than noise."""
    if len(waits) < 2 or not steps:
        return None
    least = min(waits, key=lambda rank: (waits[rank], rank))
    others = [wait for rank, wait in waits.items() if rank != least]
    told = float(np.median(others)) - waits[least] > WORTH * float(np.median(steps)) and min(others) > waits[least]
    return least if told else None


def _imbalance(compute: Sequence[float | None]) -> float | None:
    known = [item for item in compute if item is not None]
    mean = sum(known) / len(known) if known else 0.0
    return (max(known) - mean) / mean if len(known) > 1 and len(known) == len(compute) and mean > 0 else None
