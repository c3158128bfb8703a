"""Reads a trace file into a table, in this process or with helpers that decode chunks beside each other."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from advisor.columns.table import Table
from advisor.errors import ArtifactError
from advisor.ingest.assemble import assemble
from advisor.ingest.decode import Decoder, Part, decode
from advisor.ingest.events import Events
from advisor.ingest.stream import Stream
from advisor.workers import share

HELPERS_FROM_BYTES = 24 << 20  # stored size from which starting helpers pays
GZIP_HELPERS_FROM_BYTES = 3 << 20
KEPT_BYTES = 112 << 20  # of columns and texts; a trace of 1 GB takes 50 MiB
MOST_HELPERS = 8  # one process feeds them, and inflates
MODULE = "advisor.ingest.worker"


def read_table(path: Path, workers: int | None = None) -> Table:
    """Read a Kineto or Chrome trace, .json or .json.gz, in object or array form.

    A damaged or truncated file yields what is whole, with the reasons in `lost`. Raises ArtifactError for a file that
    holds no list of events. `workers` processes decode (default: as many as there are cores, one for a small file).
    """
    way = _Way(min(workers, MOST_HELPERS) if workers is not None else _workers(path), exact=False)
    while True:
        found = _read(path, way)
        if isinstance(found, Table):
            return found
        way = found


class _Way(NamedTuple):
    """How a file is read: by how many processes, and whether every place to cut is looked for event by event."""

    processes: int
    exact: bool


def _read(path: Path, way: _Way) -> Table | _Way:
    """The table of a file, or the way in which it has to be read instead."""
    stream = Stream(path)
    events = Events(path.name, stream.blocks(), exact=way.exact)
    chunks = events.chunks()
    try:
        parts = _beside(chunks, way) if way.processes > 1 else [decode(chunks, Decoder(KEPT_BYTES, exact=way.exact))]
    except ArtifactError as error:
        if stream.lost is None:
            raise
        raise ArtifactError(f"{error}; {stream.lost}") from None
    if any(part.torn for part in parts) and not way.exact:
        return way._replace(exact=True)
    stopped = next((part.stopped for part in parts if part.stopped), None)
    if stopped and way.processes > 1:  # what is kept of a file must not depend on which process was the faster
        return way._replace(processes=1)
    lost = [*([] if stream.lost is None else [stream.lost]), *events.lost]
    if stopped:
        lost.append(f"{stopped}: the rest was not read")
    table = assemble(parts, events.head, lost)
    return replace(table, skipped=table.skipped + events.skipped)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers(path: Path) -> int:
    least = GZIP_HELPERS_FROM_BYTES if path.suffix == ".gz" else HELPERS_FROM_BYTES
    return min(cores(), MOST_HELPERS) if Stream(path).stored_bytes >= least else 1


def _beside(chunks: Iterable[bytes], way: _Way) -> list[Part]:
    """Hand the chunks to helpers as they come free, and collect what they made of them."""
    arguments = (str(KEPT_BYTES // way.processes), "exact" if way.exact else "")
    answers = share(MODULE, chunks, way.processes, *arguments)
    answers.reverse()
    return [pickle.loads(answers.pop()) for _ in range(way.processes)]
