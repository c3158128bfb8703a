"""Inside the child: clock, memory and precision of the device, or of the host without a GPU, alike for every plan."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

ALLOCATOR = {"alloc_retries": "num_alloc_retries", "device_allocs": "num_device_alloc"}


def on_cuda() -> bool:
    """Whether the script has a GPU in use."""
    return bool(torch.cuda.is_initialized())


def synchronize() -> None:
    """Wait for the device; used only outside measured stretches."""
    if on_cuda():
        torch.cuda.synchronize()


def mark() -> Any:
    """This moment: an event in the device's own order, which costs no synchronisation, or host seconds."""
    return _event() if on_cuda() else time.perf_counter()


def marker(count: int) -> Callable[[], Any]:
    """`mark` at the least cost: what the first `count` calls need is made now, events by recording them once."""
    if not on_cuda():
        return time.perf_counter
    spare = [_event() for _ in range(count)]

    def take() -> Any:
        if not spare:
            return _event()
        event = spare.pop()
        event.record()
        return event

    return take


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def differences(marks: list[Any]) -> list[float]:
    """Microseconds between consecutive marks, on the device where they are events; these must have happened."""
    pairs = list(itertools.pairwise(marks))
    if marks and not isinstance(marks[0], float):
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
    return [(end - begin) * 1e6 for begin, end in pairs]


def peak_bytes() -> int:
    """Peak device memory since the last reset; without a GPU the process's peak resident memory so far.

    CUDA graphs keep the memory that they write, which the allocator does not count as in use: it is added.
    """
    if on_cuda():
        return int(torch.cuda.max_memory_allocated()) + graph_bytes(torch.cuda.memory_snapshot())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def graph_bytes(segments: Iterable[Mapping[str, Any]]) -> int:
    """What segments of the allocator's snapshot that belong to CUDA graphs hold besides what is counted as in use."""
    pools = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in pools)


def allocator() -> dict[str, int]:
    """Counts of the allocator so far, without waiting: how often it had to give cached memory back to get some, and
    what it took from the driver; empty without a GPU."""
    if not on_cuda():
        return {}
    stats = torch.cuda.memory_stats()
    return {name: int(stats[key]) for name, key in ALLOCATOR.items() if key in stats}


def matmul_precision() -> str:
    """`torch.get_float32_matmul_precision`, which raises where the script has set `fp32_precision` of a backend."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
