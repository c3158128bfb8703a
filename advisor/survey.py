"""`advisor analyze`: from the paths of traces, ranks or runs to what they say, file by file and together."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.besides import of_run, with_counters
from advisor.columns.table import Table
from advisor.errors import AdvisorError, UsageError
from advisor.fileprofile import machine_of, profile_of
from advisor.helpers import received, share
from advisor.ingest.reader import cores, read_table
from advisor.ingest.store import KEEP_FROM_BYTES, Store
from advisor.ingest.store import default_folder as cache_folder
from advisor.measured import FileProfile, Survey
from advisor.rundir import TENSORBOARD

__all__ = ["Options", "analyze_file", "cache_folder", "survey"]

MODULE = "advisor.survey"
TRACE = "trace.json.gz"  # of a run
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


def survey(paths: Sequence[Path], options: Options, on_file: Callable[[FileProfile], None] = lambda _: None) -> Survey:
    """Analyze files, folders of ranks and run folders; a file that cannot be read is refused with its reason.

    Raises UsageError for a path that does not exist or a folder without traces.
    """
    files = [file for path in paths for file in _files(path)]
    if options.counters and len(files) != 1:
        raise UsageError(f"--counters belong to one recording, {len(files)} are given: analyze that one alone")
    found = []
    for profile in _profiles(files, options):
        on_file(profile)
        found.append(profile)
    found.sort(key=lambda profile: (profile.rank is None, profile.rank or 0, profile.path))
    return Survey(files=tuple(found))


def _files(path: Path) -> list[Path]:
    """The traces of a path. Of a run folder it is the trace of the profiled steps."""
    if path.is_dir():
        found = sorted(item for item in path.rglob("*") if item.name.endswith(SUFFIXES) and _is_trace(item))
        if not found:
            raise UsageError(f"no trace (.json, .json.gz) in {path}: give a trace, a folder of ranks or a run folder")
        return found
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a trace, a folder of ranks or a run folder")
    return [path]


def _is_trace(path: Path) -> bool:
    """Whether a file may be a trace: of a run's files only the recording of its steps is."""
    if not path.is_file() or path.parent.parent.name == TENSORBOARD:
        return False
    return path.name == TRACE or not (path.parent / "probe.json").is_file()


def _profiles(files: Sequence[Path], options: Options) -> Iterable[FileProfile]:
    count = min(len(files), options.workers or cores())
    if count <= 1 or sum(file.stat().st_size for file in files) < BESIDE_FROM_BYTES:
        yield from (analyze_file(file, options) for file in files)
        return
    alone = dataclasses.replace(options, workers=1)
    pieces = (pickle.dumps((file, alone)) for file in files)
    for answer in share(MODULE, pieces, count):
        yield from pickle.loads(answer)


def analyze_file(path: Path, options: Options) -> FileProfile:
    """What one file says; never raises for what the file holds."""
    try:
        table = _table(path, options)
    except AdvisorError as error:
        return FileProfile(path=str(path), status="refused", reason=str(error))
    if not (len(table.operators) or len(table.activities) or len(table.calls) or len(table.ranges)):
        reason = "none of its events is an operator, a launch or a kernel: give a trace that torch.profiler exported"
        return FileProfile(path=str(path), status="refused", reason=reason, events=table.events)
    profile = profile_of(path, table, machine_of(table, options.peak_flops, options.calibration))
    return with_counters(of_run(profile, path.parent), table, options.counters)


def _table(path: Path, options: Options) -> Table:
    store = Store(options.store) if options.store is not None and path.stat().st_size >= KEEP_FROM_BYTES else None
    table = store.get(path) if store is not None else None
    if table is None:
        table = read_table(path, options.workers)
        if store is not None:
            store.put(path, table)
    return table


if __name__ == "__main__":
    answers = [analyze_file(*pickle.loads(piece)) for piece in received(sys.stdin.buffer)]
    pickle.dump(answers, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
