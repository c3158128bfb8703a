"""Puts counters that lie beside a trace into what it says: of Nsight Compute, DCGM, nvidia-smi, or of a run."""

from __future__ import annotations

import math
import re
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
MATCHED = 0.5  # share of the launches that Nsight Compute saw which a trace of the same run has at least
NCU_MARKS = (b'"Kernel Name"', b"==PROF==", b"Section: GPU Speed Of Light", b"Section: Launch Statistics")


def with_counters(profile: FileProfile, table: Table, files: Sequence[Path]) -> FileProfile:
    """The profile with what files of counters of the same run say; raises UsageError, ArtifactError.

    Nsight Compute's kernels are joined to those of the trace; counters of a device stand for the whole run.
    """
    for path in files:
        profile = _with_kernels(profile, table, path) if _is_ncu(path) else _with_device(profile, path)
    return profile


def _is_ncu(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(PEEK_BYTES)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}") from None
    return any(mark in start for mark in NCU_MARKS)


def _with_kernels(profile: FileProfile, table: Table, path: Path) -> FileProfile:
    found, matched, launches = kernel_counters(table, [path])
    if matched < MATCHED * launches:
        note = (
            f"{matched} of the {launches} launches in {path.name} are in this trace by name, grid and block: it is of "
            "another run, and its counters are left out"
        )
        return replace(profile, notes=(*profile.notes, note))
    costs = tuple(
        replace(cost, counters=found.get(cost.name, ())) if cost.kind == "kernel" else cost for cost in profile.costs
    )
    note = (
        f"Nsight Compute: {matched} of {launches} launches in {path.name} are in this trace; counters of a kernel are "
        "means over the launches of its name that were seen"
    )
    return replace(profile, costs=costs, notes=(*profile.notes, note))


def _with_device(profile: FileProfile, path: Path) -> FileProfile:
    devices = read_counters(path)
    if len(devices) != 1:
        raise UsageError(
            f"{path.name} holds the counters of {len(devices)} GPUs and does not say which one the trace is of: keep "
            "the lines of that one"
        )
    found = devices[0]
    if found.model and profile.device and not _same(found.model, profile.device):
        raise UsageError(f"{path.name} is of a {found.model}, the trace of a {profile.device}: give those of one run")
    notes = [f"{path.name} does not say when it was sampled: its counters stand for all of the run"]
    notes += [f"{name}: {why}" for name, why in sorted(found.missing.items())]
    return replace(profile, counters=(*profile.counters, *found.metrics), notes=(*profile.notes, *notes))


def _same(model: str, device: str) -> bool:
    """Whether two names may be of one device: sources spell it with and without vendor and memory."""
    first, second = (set(re.findall(r"[a-z]+\d+\w*", name.lower())) for name in (model, device))
    return not first or not second or bool(first & second)


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
