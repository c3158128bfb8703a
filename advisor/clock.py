"""Inside the child: the clock and memory of the device, or of the host without a GPU, read alike by every plan."""

from __future__ import annotations

import itertools
import resource
import time
from typing import Any

import torch


def on_cuda() -> bool:
    """Whether the script has a GPU in use."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def synchronize() -> None:
    """Wait for the device; used only outside measured stretches."""
    if on_cuda():
        torch.cuda.synchronize()


def mark() -> Any:
    """This moment: an event in the device's own order, which costs no synchronisation, or host seconds."""
    if on_cuda():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def differences(marks: list[Any]) -> list[float]:
    """Microseconds between consecutive marks, on the device where they are events; these must have happened."""
    pairs = list(itertools.pairwise(marks))
    if marks and not isinstance(marks[0], float):
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
    return [(end - begin) * 1e6 for begin, end in pairs]


def peak_bytes() -> int:
    """Peak device memory since the last reset; without a GPU the process's peak resident memory so far."""
    if on_cuda():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
