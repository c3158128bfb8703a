"""Builders for small Kineto traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def op(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    """An operator call; keywords `sequence`, `forward`, `dims`, `types`, `concrete`, `order` become its arguments."""
    names = {
        "sequence": "Sequence number",
        "forward": "Fwd thread id",
        "dims": "Input Dims",
        "types": "Input type",
        "concrete": "Concrete Inputs",
        "order": "Ev Idx",
    }
    recorded = {names[key]: value for key, value in args.items()}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": recorded}


def span(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    """A named host range."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def launch(correlation: int, ts: float, tid: int = 1) -> Event:
    """The host call that launches a kernel."""
    args = {"correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "dur": 1.0,
        "args": args,
    }


def kernel(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel", stream: int = 7) -> Event:
    """A device activity."""
    args = {"correlation": correlation, "stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def save(path: Path, events: list[Event], **more: Any) -> Path:
    """Write a trace file."""
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **more}), encoding="utf-8")
    return path
