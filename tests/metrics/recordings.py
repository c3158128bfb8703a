"""Recorded traces of the shared corpus, and builders for small ones."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.columns.schema import COLUMNS
from advisor.columns.table import ROWS, Table
from advisor.ingest.reader import read_table

SHARED = Path(__file__).parents[3] / "shared"
CORPUS, H200 = SHARED / "corpus", SHARED / "h200"
NOT_HERE = "the shared recordings are not beside this checkout"

Event = dict[str, Any]

_TYPES = {"i": np.int32, "q": np.int64, "d": np.float64, "b": np.int8}
EMPTY = Table(
    **{
        table: ROWS[table](**{name: np.empty(0, dtype=_TYPES[code]) for name, code in columns.items()})
        for table, columns in COLUMNS.items()
    }
)


@functools.cache
def truth() -> dict[str, Any]:
    """What plain scripts found in the corpus, by path; empty where the corpus is not there."""
    path = CORPUS / "truth.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def readable() -> list[str]:
    """The paths of the traces that can be read."""
    refused = ("rocprofv3",)
    return [path for path in truth() if path.startswith("traces/") and not any(part in path for part in refused)]


@functools.cache
def corpus(path: str) -> Table:
    """A trace of the corpus, by its path in `traces`."""
    return _read(CORPUS / "traces" / path.removeprefix("traces/"))


@functools.cache
def h200(name: str) -> Table:
    """A trace recorded on an H200."""
    return _read(H200 / f"h200_{name}.json.gz")


def _read(path: Path) -> Table:
    if not path.exists():
        pytest.skip(NOT_HERE)
    return read_table(path, workers=1)


def document(path: Path) -> dict[str, Any]:
    """The whole document of a trace."""
    if not path.exists():
        pytest.skip(NOT_HERE)
    found = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    assert isinstance(found, dict)
    return found


def event(category: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    """A complete event of the host."""
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def op(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    """An operator call."""
    return event("cpu_op", name, ts, dur, tid, **args)


def span(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    """A named range of the host."""
    return event("user_annotation", name, ts, dur, tid)


def call(name: str, ts: float, dur: float, correlation: int = -1, tid: int = 1) -> Event:
    """A call of the runtime."""
    return event("cuda_runtime", name, ts, dur, tid, correlation=correlation)


def launch(correlation: int, ts: float, dur: float = 1.0, tid: int = 1) -> Event:
    """The launch of a kernel."""
    return call("cudaLaunchKernel", ts, dur, correlation, tid)


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7, device: int = 0) -> Event:
    """A kernel on a device."""
    return activity("kernel", name, ts, dur, correlation, stream, device)


def copy(name: str, ts: float, dur: float, correlation: int, stream: int = 7) -> Event:
    """A copy on a device."""
    return activity("gpu_memcpy", name, ts, dur, correlation, stream)


def activity(
    category: str, name: str, ts: float, dur: float, correlation: int, stream: int = 7, device: int = 0
) -> Event:
    """Anything that runs on a device."""
    args = {"device": device, "stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur, "args": args}


def table_of(folder: Path, events: list[Event], **more: Any) -> Table:
    """Read a trace that holds the events."""
    path = folder / "trace.json"
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], **more}
    path.write_text(json.dumps({**head, "traceEvents": events}), encoding="utf-8")
    return read_table(path, workers=1)
