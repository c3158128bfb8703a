"""Keeps the columns of traces as Parquet files, so that a second look at a large trace does not read it again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.columns.table import COLUMNS, ROWS, Collective, Signature, Table

SCHEMA = 1  # raise it when a column or its meaning changes
KEEP_FROM_BYTES = 8 << 20  # a smaller file is read again sooner than found
ENTRIES = 64  # of the last used
_EDGE_BYTES = 1 << 16


def default_folder() -> Path:
    """Where entries are kept: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "advisor" / "traces"


class Store:
    """Tables by the file they were read from.

    An entry stands for one path with one size, time of change, beginning and end; any other file is another entry. An
    entry that cannot be read counts as absent, and a store that cannot be written stays as it is: both cost time only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, path: Path) -> Table | None:
        """The table of a file, None when it is not here."""
        entry = self._folder / _key(path)
        try:
            texts = json.loads((entry / "texts.json").read_text(encoding="utf-8"))
            rows = {name: _read(entry / f"{name}.parquet", name) for name in COLUMNS}
            os.utime(entry)
        except (OSError, ValueError, KeyError, ImportError):
            return None
        return _table(texts, rows)

    def put(self, path: Path, table: Table) -> None:
        """Keep the table of a file, and drop the entries that were not used for longest."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            work = Path(tempfile.mkdtemp(dir=self._folder))
        except OSError:
            return
        try:
            for name in COLUMNS:
                _write(work / f"{name}.parquet", getattr(table, name))
            (work / "texts.json").write_text(json.dumps(_texts(table)), encoding="utf-8")
            work.rename(self._folder / _key(path))
        except (OSError, ImportError):
            shutil.rmtree(work, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        entries = sorted(self._folder.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in entries[ENTRIES:]:
            shutil.rmtree(entry, ignore_errors=True)


def _key(path: Path) -> str:
    whole = path.resolve()
    state = whole.stat()
    digest = hashlib.sha256(f"{SCHEMA} {whole} {state.st_size} {state.st_mtime_ns} {COLUMNS}".encode())
    with whole.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(0, state.st_size - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()[:32]


def _write(path: Path, rows: Any) -> None:
    import polars

    columns = {name: getattr(rows, name) for name in COLUMNS[path.stem]}
    polars.DataFrame(columns).write_parquet(path, compression="zstd", compression_level=1)


def _read(path: Path, table: str) -> Any:
    import polars

    try:
        frame = polars.read_parquet(path)
        return ROWS[table](**{name: frame[name].to_numpy() for name in COLUMNS[table]})
    except polars.exceptions.PolarsError as error:
        raise ValueError(str(error)) from None


def _texts(table: Table) -> dict[str, Any]:
    return {
        "names": table.names,
        "threads": table.threads,
        "signatures": [[part.decode("utf-8", "replace") for part in item] for item in table.signatures],
        "collectives": table.collectives,
        "origin_us": table.origin_us,
        "events": table.events,
        "skipped": table.skipped,
        "counts": dict(table.counts),
        "head": dict(table.head),
        "lost": table.lost,
    }


def _table(texts: Mapping[str, Any], rows: Mapping[str, Any]) -> Table:
    fixed = {**texts}
    for name in ("names", "lost"):
        fixed[name] = tuple(fixed[name])
    fixed["threads"] = tuple((process, thread) for process, thread in fixed["threads"])
    fixed["signatures"] = tuple(Signature(*(part.encode() for part in item)) for item in fixed["signatures"])
    fixed["collectives"] = tuple(Collective(*item) for item in fixed["collectives"])
    return Table(**rows, **fixed)
