"""Reads a trace file into a table, in this process or with helpers that decode chunks beside each other."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from advisor.columns.table import Table
from advisor.errors import ArtifactError
from advisor.helpers import received, share
from advisor.ingest.assemble import assemble
from advisor.ingest.decode import Decoder, Part
from advisor.ingest.events import Events
from advisor.ingest.stream import Stream

HELPERS_FROM_BYTES = 24 << 20  # stored size from which starting helpers pays
GZIP_HELPERS_FROM_BYTES = 3 << 20
MODULE = "advisor.ingest.reader"


def read_table(path: Path, workers: int | None = None) -> Table:
    """Read a Kineto or Chrome trace, .json or .json.gz, in object or array form.

    A damaged or truncated file yields what is whole, with the reasons in `lost`. Raises ArtifactError for a file that
    holds no list of events. `workers` processes decode (default: as many as there are cores, one for a small file).
    """
    stream = Stream(path)
    events = Events(path.name, stream.blocks())
    count = workers if workers is not None else _workers(path, stream.stored_bytes)
    chunks = events.chunks()
    try:
        parts = [_decode(chunks)] if count <= 1 else _decode_beside(chunks, count)
    except ArtifactError as error:
        if stream.lost is None:
            raise
        raise ArtifactError(f"{error}; {stream.lost}") from None
    lost = [*([] if stream.lost is None else [stream.lost]), *events.lost]
    table = assemble(parts, events.head, lost)
    return replace(table, skipped=table.skipped + events.skipped)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers(path: Path, stored: int) -> int:
    least = GZIP_HELPERS_FROM_BYTES if path.suffix == ".gz" else HELPERS_FROM_BYTES
    return min(cores(), 8) if stored >= least else 1


def _decode(chunks: Iterable[bytes]) -> Part:
    decoder = Decoder()
    for chunk in chunks:
        decoder.feed(chunk)
    return decoder.part()


def _decode_beside(chunks: Iterable[bytes], count: int) -> list[Part]:
    """Hand the chunks to helpers as they come free, and collect what they made of them."""
    return [pickle.loads(answer) for answer in share(MODULE, chunks, count)]


if __name__ == "__main__":
    pickle.dump(_decode(received(sys.stdin.buffer)), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
