"""Keeps the columns of traces as Parquet files, so that a second look at a large trace does not read it again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from advisor.columns.schema import COLUMNS, Collective, Signature
from advisor.columns.table import ROWS, Table

SCHEMA = 2  # raise it when a column or its meaning changes
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
        self._looked_up: dict[Path, str] = {}

    def get(self, path: Path) -> Table | None:
        """The table of a file, None when it is not here."""
        try:
            self._looked_up[path] = key = _key(path)
            table = _load(self._folder / key)
        except (OSError, ValueError, KeyError, ImportError):
            return None
        with suppress(OSError):  # a folder that is only read tells nothing of use
            os.utime(self._folder / key)
        return table

    def put(self, path: Path, table: Table) -> None:
        """Keep the table of a file, and drop the entries that were not used for longest.

        After `get` it is kept as the table of the file as it was then: who looked it up has read it since.
        """
        try:
            key = self._looked_up.get(path) or _key(path)
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            work = Path(tempfile.mkdtemp(dir=self._folder))
        except OSError:
            return
        try:
            _save(work, table)
            shutil.rmtree(self._folder / key, ignore_errors=True)  # one that cannot be read stands in the way
            work.rename(self._folder / key)
        except (OSError, ValueError, ImportError, RecursionError):
            shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # others prune, too
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


def _save(entry: Path, table: Table) -> None:
    files = {f"{name}.parquet": _packed(getattr(table, name), name) for name in COLUMNS}
    files["texts.json"] = json.dumps(_texts(table)).encode()
    for name, content in files.items():
        (entry / name).write_bytes(content)
    seal = {name: hashlib.blake2b(content).hexdigest() for name, content in files.items()}
    (entry / "seal.json").write_text(json.dumps(seal), encoding="utf-8")


def _load(entry: Path) -> Table:
    """The table of an entry; raises OSError, ValueError or KeyError for one that is damaged."""
    seal = json.loads((entry / "seal.json").read_bytes())
    files = {name: (entry / name).read_bytes() for name in (*(f"{table}.parquet" for table in COLUMNS), "texts.json")}
    if {name: hashlib.blake2b(content).hexdigest() for name, content in files.items()} != seal:
        raise ValueError("the content is not what was written")
    return _table(json.loads(files["texts.json"]), {name: _rows(files[f"{name}.parquet"], name) for name in COLUMNS})


def _packed(rows: Any, table: str) -> bytes:
    import polars

    file = io.BytesIO()
    columns = {name: getattr(rows, name) for name in COLUMNS[table]}
    polars.DataFrame(columns).write_parquet(file, compression="zstd", compression_level=1)
    return file.getvalue()


def _rows(content: bytes, table: str) -> Any:
    import polars

    frame = polars.read_parquet(io.BytesIO(content))
    return ROWS[table](**{name: frame[name].to_numpy() for name in COLUMNS[table]})


def _texts(table: Table) -> dict[str, Any]:
    return {
        "names": table.names,
        "threads": table.threads,
        "signatures": [[part.decode("latin-1") for part in item] for item in table.signatures],
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
    fixed["signatures"] = tuple(Signature(*(part.encode("latin-1") for part in item)) for item in fixed["signatures"])
    fixed["collectives"] = tuple(Collective(*item) for item in fixed["collectives"])
    return Table(**rows, **fixed)
