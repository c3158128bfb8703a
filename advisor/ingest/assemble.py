"""Puts the columns of all chunks of a trace together, in an order that does not depend on that of the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from advisor.columns.schema import ANNOTATION, COLUMNS
from advisor.columns.table import ROWS, Table
from advisor.ingest.decode import Part
from advisor.ingest.events import HEAD

_TYPES: Mapping[str, Any] = {"i": np.int32, "q": np.int64, "d": np.float64, "b": np.int8}
_ORDER = {  # the last key decides first
    "operators": ("name", "order", "thread", "-duration", "start"),
    "calls": ("name", "duration", "correlation", "thread", "start"),
    "activities": ("name", "duration", "correlation", "stream", "device", "start"),
    "ranges": ("name", "thread", "-duration", "start"),
}
_ODD = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, as of multiplicative hashing (Knuth, TAOCP 3, 6.4)


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
    """The texts of several parts as one sorted list, and for each part where its own went.

    Items are told apart by what they print: NaN in an item is not equal to itself.
    """

    def __init__(self, lists: Sequence[Sequence[Any]]) -> None:
        printed = {repr(item): item for items in lists for item in items}
        places = {text: place for place, text in enumerate(sorted(printed))}
        self.items: list[Any] = [printed[text] for text in places]
        self.places = [np.array([places[repr(item)] for item in items] + [-1], dtype=np.int32) for items in lists]


def _columns(parts: Sequence[Part], table: str, numbered: Mapping[str, _Merged]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, code in COLUMNS[table].items():
        pieces = [np.frombuffer(part.tables[table].pop(column), dtype=_TYPES[code]) for part in parts]
        if column in numbered:  # -1 stays -1: it addresses the last place
            pieces = [numbered[column].places[place][piece] for place, piece in enumerate(pieces)]
        found[column] = np.concatenate(pieces) if len(pieces) != 1 else pieces[0]
    return found


def _sorted(columns: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Rows by the keys, and by all they hold where the keys tie; takes the columns over."""
    order = np.lexsort([-columns[key[1:]] if key.startswith("-") else columns[key] for key in keys])
    tied = np.ones(max(0, len(order) - 1), dtype=bool)
    for key in keys:
        values = columns[key.removeprefix("-")][order]
        tied &= values[1:] == values[:-1]
    if tied.any():
        places = np.flatnonzero(np.concatenate((tied, [False])) | np.concatenate(([False], tied))).astype(np.int32)
        rows = order[places].astype(np.int32)
        groups = np.cumsum(np.concatenate(([True], ~tied)), dtype=np.int32)[places]
        order[places] = rows[np.lexsort((_digest(columns, rows), groups))]
    return {name: columns.pop(name)[order] for name in list(columns)}


def _digest(columns: Mapping[str, Any], rows: Any) -> Any:
    """One number for all that each of some rows holds."""
    found = np.zeros(len(rows), dtype=np.uint64)
    for values in columns.values():
        wide = np.float64 if values.dtype == np.float64 else np.int64
        found ^= values[rows].astype(wide, copy=False).view(np.uint64)
        found *= np.uint64(_ODD)
        found ^= found >> np.uint64(29)
    return found
