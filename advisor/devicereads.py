"""How long the host waits per step in reads of the device, and how long the device then has too little to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from advisor.model import UNLINKED_READS, Kernels, NodeCost, Operators

TO_HOST = re.compile(r"DtoH|DeviceToHost", re.IGNORECASE)


def read_times(
    kernels: Kernels, operators: Operators, costs: Sequence[NodeCost], operator_cost: Sequence[int], steps: int
) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Per node (graph, node) that copies from the device to the host: the host's time in it and what of that the device
    feels, in microseconds per step; reads that no node made stand under `UNLINKED_READS`.

    After a read the device has nothing queued. What it is idle until the next read, or as long as the host waited if
    that is less, is what reading later could save.
    """
    order = np.argsort(np.array(kernels.start_us), kind="stable").tolist()
    copies = [place for place, row in enumerate(order) if _reads(kernels, row)]
    if not copies or not steps:
        return {}
    start = np.array([kernels.start_us[row] for row in order])
    reached = np.maximum.accumulate(start + np.array([kernels.duration_us[row] for row in order]))
    idle = np.concatenate(([0.0], np.cumsum(np.maximum(0.0, start[1:] - reached[:-1]))))  # before each activity
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for place, until in zip(copies, [*copies[1:], len(order) - 1], strict=True):
        row = kernels.operator[order[place]]
        if kernels.step[order[place]] < 0:
            continue
        cost = operator_cost[row] if row < len(operator_cost) else -1
        node = (costs[cost].graph, costs[cost].node) if cost >= 0 else UNLINKED_READS
        waited, felt = found.get(node, (0.0, 0.0))
        host_us = operators.duration_us[row]
        after = float(idle[until] - idle[place])
        found[node] = (waited + host_us / steps, felt + min(host_us, after) / steps)
    return dict(sorted(found.items()))


def _reads(kernels: Kernels, row: int) -> bool:
    copied = kernels.category[row] == "memcpy" and TO_HOST.search(kernels.name[row]) is not None
    return copied and kernels.operator[row] >= 0
