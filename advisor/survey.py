"""`advisor analyze`: from the paths of traces, ranks or runs to what they say, file by file and together."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from advisor.columns.table import Table
from advisor.errors import AdvisorError, UsageError
from advisor.ingest.reader import cores, read_table
from advisor.ingest.store import KEEP_FROM_BYTES, Store
from advisor.ingest.store import default_folder as cache_folder
from advisor.measured import FileProfile, Survey
from advisor.metrics.ranks import RankInput, ranks
from advisor.rundir import REQUEST, TRACE
from advisor.workers import received, share

__all__ = ["Options", "analyze_file", "cache_folder", "survey"]

MODULE = "advisor.survey"
LEAST_PEAK, MOST_PEAK = 1e10, 1e18  # FLOP/s; between a microcontroller and a rack
SUFFIXES = (".json", ".json.gz")
BESIDE_FROM_BYTES = 4 << 20  # stored bytes of all files from which processes of their own pay


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How files are read and what is known besides.

    `store` is the folder of the cache or None, `workers` the number of processes or None for as many as there are
    cores, `peak_flops` a dense peak in FLOP/s that overrides the table, `calibration` the file of measured devices,
    `counters` are outputs of Nsight Compute, DCGM or nvidia-smi of the same run.
    """

    store: Path | None = None
    workers: int | None = None
    peak_flops: float | None = None
    calibration: Path | None = None
    counters: tuple[Path, ...] = ()


def survey(paths: Sequence[Path], options: Options) -> Survey:
    """Analyze files, folders of ranks and run folders; a file that cannot be read is refused with its reason.

    Raises UsageError for a path that does not exist, a folder without traces and a peak that is none.
    """
    if options.peak_flops is not None and not LEAST_PEAK <= options.peak_flops <= MOST_PEAK:
        raise UsageError(f"a peak of {options.peak_flops:g} FLOP/s is none: give the dense peak, such as 989.4e12")
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    if options.counters and len(files) != 1:
        raise UsageError(f"--counters belong to one recording, {len(files)} are given: analyze that one alone")
    found = []
    for profile, rank in _told(files, options):
        found.append((profile, rank))
    found.sort(key=lambda pair: (pair[0].rank is None, pair[0].rank or 0, pair[0].path))
    members = [rank for _, rank in found if rank is not None]
    several = len(members) > 1 and any(rank.rank is not None for rank in members)
    return Survey(files=tuple(profile for profile, _ in found), ranks=ranks(members) if several else None)


def _files(path: Path) -> list[Path]:
    """The traces of a path. Of a run, wherever in a folder it lies, it is the trace of its profiled steps alone."""
    if path.is_dir():
        every = sorted(item for item in path.rglob("*") if item.name.endswith(SUFFIXES) and item.is_file())
        runs = {item.parent for item in every if _marks_a_run(item)}
        found = [
            item for item in every if (item.name == TRACE if item.parent in runs else runs.isdisjoint(item.parents))
        ]
        if not found:
            raise UsageError(f"no trace (.json, .json.gz) in {path}: give a trace, a folder of ranks or a run folder")
        return found
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a trace, a folder of ranks or a run folder")
    return [path]


def _marks_a_run(path: Path) -> bool:
    """Whether a file is one by which a run's folder is known, that of a run which failed early included."""
    return path.name == "probe.json" or (path.name == REQUEST and (path.parent / "output.log").is_file())


def _told(files: Sequence[Path], options: Options) -> Iterable[tuple[FileProfile, RankInput | None]]:
    count = min(len(files), options.workers or cores(), 4 * cores())
    if count <= 1 or sum(map(_size, files)) < BESIDE_FROM_BYTES:
        yield from (analyze_rank(file, options) for file in files)
        return
    alone = dataclasses.replace(options, workers=1)
    groups = [[pickle.dumps((file, alone)) for file in group] for group in _dealt(files, count)]
    with ThreadPoolExecutor(count) as pool:  # one process for each group: a file name is no work that makes one wait
        for answers in pool.map(lambda pieces: share(MODULE, pieces, 1), groups):
            for answer in answers:
                yield from pickle.loads(answer)


def _dealt(files: Sequence[Path], count: int) -> list[list[Path]]:
    """Files in groups of about the same number of bytes, the largest first."""
    groups: list[list[Path]] = [[] for _ in range(count)]
    loads = [0] * count
    for size, file in sorted(((_size(file), file) for file in files), key=lambda pair: (-pair[0], pair[1])):
        least = loads.index(min(loads))
        groups[least].append(file)
        loads[least] += size + 1
    return groups


def _size(path: Path) -> int:
    """Stored bytes; none of a file that has gone meanwhile, which reading it will say."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def analyze_file(path: Path, options: Options) -> FileProfile:
    """What one file says; never raises for what the file holds."""
    return analyze_rank(path, options)[0]


def analyze_rank(path: Path, options: Options) -> tuple[FileProfile, RankInput | None]:
    """What one file says, and what it says as one rank of a job, None where it is refused."""
    loading = threading.Thread(target=_load, daemon=True)  # while other processes read
    loading.start()
    try:
        table = _table(path, options)
    except AdvisorError as error:
        return FileProfile(path=str(path), status="refused", reason=str(error)), None
    if not (len(table.operators) or len(table.activities) or len(table.calls) or len(table.ranges)):
        reason = "none of its events is an operator, a launch or a kernel: give a trace that torch.profiler exported"
        return FileProfile(path=str(path), status="refused", reason=reason, events=table.events), None
    from advisor.fileprofile import machine_of, told_of

    profile, rank = told_of(path, table, machine_of(table, options.peak_flops, options.calibration))
    if options.counters or path.name == TRACE:
        from advisor.besides import of_run, with_counters

        profile = with_counters(of_run(profile, path), table, options.counters)
    return profile, rank


def _load() -> None:
    """Import what the analysis needs."""
    for module in ("advisor.fileprofile", "networkx"):
        importlib.import_module(module)


def _table(path: Path, options: Options) -> Table:
    store = Store(options.store) if options.store is not None and _size(path) >= KEEP_FROM_BYTES else None
    table = store.get(path) if store is not None else None
    if table is None:
        table = read_table(path, options.workers)
        if store is not None:
            store.put(path, table)
    return table


if __name__ == "__main__":
    answers = [analyze_rank(*pickle.loads(piece)) for piece in received(sys.stdin.buffer)]
    pickle.dump(answers, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
