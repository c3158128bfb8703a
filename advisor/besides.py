"""Puts counters that lie beside a trace into what it says: of Nsight Compute, DCGM, nvidia-smi, or of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from advisor.capture.counters import Recording, summarise
from advisor.columns.table import Table
from advisor.errors import ArtifactError, UsageError
from advisor.ingest.dcgm import read_counters
from advisor.ingest.documents import read_document
from advisor.measured import FileProfile
from advisor.model import Metric, SingleCounters
from advisor.rundir import TRACE
from advisor.singles import kernel_counters

PEEK_BYTES = 1 << 16
NCU_MARKS = (b'"Kernel Name"', b"==PROF==", b"Section: GPU Speed Of Light", b"Section: Launch Statistics")


def with_counters(profile: FileProfile, table: Table, files: Sequence[Path]) -> FileProfile:
    """The profile with what files of counters of the same run say; raises UsageError, ArtifactError.

    Nsight Compute's kernels are joined to those of the trace; counters of a device stand for the whole run.
    """
    for path in files:
        if _is_ncu(path):
            profile = _with_kernels(profile, table, path)
        else:
            profile = replace(profile, counters=(*profile.counters, *_of_device(path)))
    return profile


def _is_ncu(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(PEEK_BYTES)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}") from None
    return any(mark in start for mark in NCU_MARKS)


def _with_kernels(profile: FileProfile, table: Table, path: Path) -> FileProfile:
    found = kernel_counters(table, [path])
    costs = tuple(
        replace(cost, counters=found.get(cost.name, ())) if cost.kind == "kernel" else cost for cost in profile.costs
    )
    if any(cost.counters for cost in costs):
        return replace(profile, costs=costs)
    note = f"no kernel of {path.name} is one of this trace: same name, grid and block are asked for"
    return replace(profile, notes=(*profile.notes, note))


def _of_device(path: Path) -> tuple[Metric, ...]:
    devices = read_counters(path)
    if len(devices) != 1:
        raise UsageError(
            f"{path.name} holds the counters of {len(devices)} GPUs and does not say which one the trace is of: keep "
            "the lines of that one"
        )
    return devices[0].metrics


class _Captured(msgspec.Struct):
    """What capture.json says of the timed steps: begin and end on the clock of the counters, in seconds."""

    timed_s: list[float] = []


def of_run(profile: FileProfile, path: Path) -> FileProfile:
    """The profile of a run's trace with the counters that the run sampled and those of single kernels and operators.

    A trace that is not a run's stays as it is; counters that cannot be read are a note.
    """
    if path.name != TRACE:
        return profile
    for add in (_sampled, _singles):
        try:
            profile = add(profile, path.parent)
        except ArtifactError as error:
            profile = replace(profile, notes=(*profile.notes, f"counters of the run are left out: {error}"))
    return profile


def _sampled(profile: FileProfile, folder: Path) -> FileProfile:
    if not (folder / "counters.json").is_file() or not (folder / "capture.json").is_file():
        return profile
    window = read_document(folder / "capture.json", _Captured).timed_s
    if len(window) != 2:
        return profile
    return replace(profile, counters=_known(summarise(Recording.load(folder / "counters.json").samples, *window)))


def _singles(profile: FileProfile, folder: Path) -> FileProfile:
    if not (folder / "singles.json").is_file():
        return profile
    singles = read_document(folder / "singles.json", list[SingleCounters])
    known = {(item.kind, item.name): _known(item.counters) for item in singles}
    costs = (replace(cost, counters=known.get((cost.kind, cost.title), cost.counters)) for cost in profile.costs)
    return replace(profile, costs=tuple(costs))


def _known(metrics: Sequence[Metric]) -> tuple[Metric, ...]:
    return tuple(metric for metric in metrics if math.isfinite(metric.value))
