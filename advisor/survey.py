"""`advisor analyze`: from the paths of traces, ranks or runs to what they say, file by file and together."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.columns.table import Table
from advisor.errors import AdvisorError, UsageError
from advisor.helpers import received, share
from advisor.ingest.reader import cores, read_table
from advisor.ingest.recorded import devices, place
from advisor.ingest.store import KEEP_FROM_BYTES, Store
from advisor.measured import FileProfile, Survey
from advisor.metrics.totals import totals

MODULE = "advisor.survey"
SUFFIXES = (".json", ".json.gz")
BESIDE_FROM_BYTES = 4 << 20  # stored bytes of all files from which processes of their own pay


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How files are read: `store` is the folder of the cache or None, `workers` the number of processes or None for as
    many as there are cores, `peak_flops` a dense peak in FLOP/s for devices the table does not know."""

    store: Path | None = None
    workers: int | None = None
    peak_flops: float | None = None


def survey(paths: Sequence[Path], options: Options, on_file: Callable[[FileProfile], None] = lambda _: None) -> Survey:
    """Analyze files, folders of ranks and run folders; a file that cannot be read is refused with its reason.

    Raises UsageError for a path that does not exist or a folder without traces.
    """
    files = [file for path in paths for file in _files(path)]
    found = []
    for profile in _profiles(files, options):
        on_file(profile)
        found.append(profile)
    found.sort(key=lambda profile: (profile.rank is None, profile.rank or 0, profile.path))
    return Survey(files=tuple(found))


def _files(path: Path) -> list[Path]:
    """The traces of a path. Of a run folder it is the trace of the profiled steps."""
    if path.is_dir():
        run = path / "trace.json.gz"
        if run.is_file() and (path / "probe.json").is_file():
            return [run]
        found = sorted(item for item in path.rglob("*") if item.name.endswith(SUFFIXES) and item.is_file())
        if not found:
            raise UsageError(f"no trace (.json, .json.gz) in {path}: give a trace, a folder of ranks or a run folder")
        return found
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a trace, a folder of ranks or a run folder")
    return [path]


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
    return profile_of(path, table, options)


def _table(path: Path, options: Options) -> Table:
    store = Store(options.store) if options.store is not None and path.stat().st_size >= KEEP_FROM_BYTES else None
    table = store.get(path) if store is not None else None
    if table is None:
        table = read_table(path, options.workers)
        if store is not None:
            store.put(path, table)
    return table


def profile_of(path: Path, table: Table, options: Options) -> FileProfile:
    """What the columns of one file say."""
    sums, where = totals(table), place(table.head)
    return FileProfile(
        path=str(path),
        status="partial" if table.lost or table.skipped else "ok",
        reason=_loss(table),
        events=table.events,
        device=_device_name(table),
        rank=where.rank,
        world_size=where.world_size,
        kernels=sums.kernels,
        kernel_us=sums.kernel_us,
        busy_us=sums.busy_us,
        span_us=sums.span_us,
        steps=sums.steps,
        step_mean_us=sums.step_mean_us,
        nccl_kernels=sums.nccl_kernels,
        exposed_comm_us=sums.exposed_comm_us,
        memcpys=sums.memcpys,
        memsets=sums.memsets,
        nccl_us=sums.nccl_us,
        kernels_busy_us=sums.kernels_busy_us,
        busy_in_steps=sums.busy_in_steps,
        kernels_busy_in_steps=sums.kernels_busy_in_steps,
    )


def _loss(table: Table) -> str | None:
    parts = list(table.lost)
    if table.skipped:
        parts.append(f"{table.skipped} events could not be read")
    return f"{'; '.join(parts)}; what is whole was read" if parts else None


def _device_name(table: Table) -> str | None:
    """The name of the device that ran most, None where the trace names none."""
    listed = devices(table.head)
    used = table.activities.device[table.activities.device >= 0].tolist()
    number = max(set(used), key=used.count) if used else 0
    return (listed[number].name if number < len(listed) else "") or None


if __name__ == "__main__":
    answers = [analyze_file(*pickle.loads(piece)) for piece in received(sys.stdin.buffer)]
    pickle.dump(answers, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
