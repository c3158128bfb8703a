"""Records pairs of steps that differ only in how long one region of device work takes, for tests/data/what_if.

`python tests/gpu/record_what_if.py FOLDER` on a machine with a GPU writes `NAME_1.json.gz` and, with the region at
REDUCED of its time, `NAME_0.25.json.gz`. Work of known length is a kernel that spins (torch.cuda._sleep); the host
sleeps where a step waits for data. Of the traces only what readers use is kept; threads are renumbered and times begin
at 0.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

REDUCED = 0.25
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
ARGUMENTS = ("correlation", "device", "stream", "Ev Idx", "Sequence number", "Fwd thread id", "bytes")
CYCLES_PER_MS = 1.98e6  # boost clock of an H200


def spin(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def region(milliseconds: float) -> None:
    with record_function("region"):
        spin(milliseconds)


class Spin(torch.autograd.Function):
    """Spins in the forward and, as the region, in the backward pass."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        context.scale = scale
        spin(0.2)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        region(0.4 * context.scale)
        return gradient, None


def queued(scale: float) -> None:
    """The host runs ahead."""
    for _ in range(20):
        spin(0.2)
        region(0.2 * scale)


def synced(scale: float) -> None:
    """The host reads a value back and then takes its time."""
    for _ in range(10):
        spin(0.1)
        region(0.3 * scale)
    torch.ones(1, device="cuda").sum().item()
    time.sleep(0.002)


def streams(scale: float) -> None:
    """Work on a side stream beside that of the main one, joined by events in both directions."""
    spin(0.5)
    SIDE.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE):
        region(2.0 * scale)
    spin(1.2)
    torch.cuda.current_stream().wait_stream(SIDE)
    spin(0.3)


def backward(scale: float) -> None:
    """A backward pass on the thread of autograd, its result read back."""
    value = torch.ones(64, device="cuda", requires_grad=True)
    found = value
    for _ in range(8):
        found = Spin.apply(found, scale)
    found.sum().backward()
    value.grad.sum().item()


def pageable(scale: float) -> None:
    """A copy from pageable memory waits for the work of the step before; meanwhile the host loads data."""
    time.sleep(0.003)
    batch = BATCH.to("cuda")
    spin(1.0)
    region(6.0 * scale)
    batch.add_(1)


SIDE = torch.cuda.Stream()
BATCH = torch.ones(1 << 18)
JOBS: tuple[Callable[[float], None], ...] = (queued, synced, streams, backward, pageable)


def record(job: Callable[[float], None], scale: float, path: Path) -> None:
    """Profile five steps and keep the trace."""
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=schedule(wait=1, warmup=2, active=5)) as profiler:
        for _ in range(8):
            job(scale)
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        keep(json.loads(plain.read_text(encoding="utf-8")), path)


def keep(document: dict[str, Any], path: Path) -> None:
    """Write what readers use of a trace."""
    events = [event for event in document["traceEvents"] if event.get("cat") in CATEGORIES and event.get("ph") == "X"]
    begin = min(event["ts"] for event in events)
    threads: dict[object, int] = {}
    for event in events:
        on_device = event["cat"] in CATEGORIES[:3]
        event["pid"] = event["args"]["device"] if on_device else 1
        event["tid"] = event["args"]["stream"] if on_device else threads.setdefault(event["tid"], len(threads) + 1)
        event["ts"] = round(event["ts"] - begin, 3)
        event["args"] = {name: value for name, value in event.get("args", {}).items() if name in ARGUMENTS}
    devices = [{"id": item["id"], "name": item["name"]} for item in document["deviceProperties"]]
    found = {"schemaVersion": document["schemaVersion"], "deviceProperties": devices, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))


if __name__ == "__main__":
    for each in JOBS:
        for part in (1.0, REDUCED):
            each(part)
            record(each, part, Path(sys.argv[1]) / f"{each.__name__}_{part:g}.json.gz")
