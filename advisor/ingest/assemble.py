"""Puts the columns of all chunks of a trace together, in an order that does not depend on that of the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from advisor.columns.table import ANNOTATION, COLUMNS, ROWS, Table
from advisor.ingest.decode import Part

_TYPES: Mapping[str, Any] = {"i": np.int32, "q": np.int64, "d": np.float64, "b": np.int8}
HEAD = (  # of what a document says besides its events: nothing that names people, paths or machines
    "schemaVersion",
    "deviceProperties",
    "computeProperties",
    "distributedInfo",
    "cuda_runtime_version",
    "cuda_driver_version",
    "hip_runtime_version",
    "hip_driver_version",
    "record_shapes",
    "with_stack",
)
_ORDER = {  # the last key decides first
    "operators": ("order", "thread", "-duration", "start"),
    "calls": ("duration", "correlation", "thread", "start"),
    "activities": ("name", "duration", "correlation", "stream", "device", "start"),
    "ranges": ("name", "thread", "-duration", "start"),
}


def assemble(parts: Sequence[Part], head: Mapping[str, Any], lost: Sequence[str]) -> Table:
    """Merge the columns of all chunks; the result does not depend on the order of the events."""
    names = _Merged([part.names for part in parts])
    threads = _Merged([part.threads for part in parts])
    signatures = _Merged([part.signatures for part in parts])
    collectives = _Merged([part.collectives for part in parts])
    numbered = {"name": names, "thread": threads, "signature": signatures, "collective": collectives}
    columns = {table: _columns(parts, table, numbered) for table in COLUMNS}
    origin = _origin(columns)
    for column in columns.values():
        column["start"] -= origin
    counts: dict[str, int] = {}
    for part in parts:
        for category, count in part.counts.items():
            counts[category] = counts.get(category, 0) + count
    return Table(
        **{table: ROWS[table](**_sorted(column, _ORDER[table])) for table, column in columns.items()},
        names=tuple(names.items),
        threads=tuple(threads.items),
        signatures=tuple(signatures.items),
        collectives=tuple(collectives.items),
        origin_us=origin,
        events=sum(part.events for part in parts),
        skipped=sum(part.skipped for part in parts),
        counts=dict(sorted(counts.items())),
        head={key: head[key] for key in HEAD if key in head},
        lost=tuple(lost),
    )


def _origin(columns: Mapping[str, Any]) -> float:
    """The earliest event; windows and modules may begin before anything is recorded."""
    marked = columns["ranges"]["start"][columns["ranges"]["kind"] == ANNOTATION]
    starts = [marked, *(columns[table]["start"] for table in ("operators", "calls", "activities"))]
    known = [float(values.min()) for values in starts if len(values)]
    return min(known, default=0.0)


class _Merged:
    """The texts of several parts as one sorted list, and for each part where its own went."""

    def __init__(self, lists: Sequence[Sequence[Any]]) -> None:
        self.items: list[Any] = sorted({item for items in lists for item in items}, key=repr)
        places = {item: place for place, item in enumerate(self.items)}
        self.places = [np.array([places[item] for item in items] + [-1], dtype=np.int32) for items in lists]


def _columns(parts: Sequence[Part], table: str, numbered: Mapping[str, _Merged]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, code in COLUMNS[table].items():
        pieces = [np.array(part.tables[table][column], dtype=_TYPES[code]) for part in parts]
        if column in numbered:  # -1 stays -1: it addresses the last place
            pieces = [numbered[column].places[place][piece] for place, piece in enumerate(pieces)]
        found[column] = np.concatenate(pieces) if pieces else np.empty(0, dtype=_TYPES[code])
        for part in parts:
            del part.tables[table][column]
    return found


def _sorted(columns: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    order = np.lexsort([-columns[key[1:]] if key.startswith("-") else columns[key] for key in keys])
    return {name: values[order] for name, values in columns.items()}
