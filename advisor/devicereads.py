"""How long the host waits per step in reads of the device, and how long the device then has too little to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from advisor.model import UNLINKED_READS, Kernels, NodeCost, Operators

TO_HOST = re.compile(r"DtoH|DeviceToHost", re.IGNORECASE)
TO_DEVICE = re.compile(r"HtoD|HostToDevice", re.IGNORECASE)


def read_times(
    kernels: Kernels, operators: Operators, costs: Sequence[NodeCost], operator_cost: Sequence[int], steps: int
) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Per node (graph, node) that copies from the device to the host: the host's time in it and what of that the device
    feels, in microseconds per step; reads that no node made stand under `UNLINKED_READS`.

    After a read the device has nothing queued. What it is idle until the next read, or as long as the host waited if
    that is less, is what reading later could save.
    """
    found = _copies(kernels, operators, owners(costs, operator_cost), steps, TO_HOST)
    return {node: (waited, felt) for node, (waited, felt, _) in found.items()}


def owners(costs: Sequence[NodeCost], operator_cost: Sequence[int]) -> list[tuple[int, int]]:
    """The node (graph, node) whose time each operator row is, `UNLINKED_READS` where it is none's."""
    return [(costs[cost].graph, costs[cost].node) if cost >= 0 else UNLINKED_READS for cost in operator_cost]


def move_times(
    kernels: Kernels, operators: Operators, operator_node: Sequence[tuple[int, int] | None], steps: int
) -> Mapping[tuple[int, int], tuple[float, float, float]]:
    """Per node that copies from the host to the device: the host's time in it, what of that the device feels, and the
    device's time, in microseconds per step. A copy that the host waits for leaves nothing queued, as a read does."""
    nodes = [node if node is not None else UNLINKED_READS for node in operator_node]
    return _copies(kernels, operators, nodes, steps, TO_DEVICE)


def _copies(
    kernels: Kernels,
    operators: Operators,
    nodes: Sequence[tuple[int, int]],
    steps: int,
    direction: re.Pattern[str],
) -> dict[tuple[int, int], tuple[float, float, float]]:
    order = np.argsort(np.array(kernels.start_us), kind="stable").tolist()
    copies = [place for place, row in enumerate(order) if _copies_so(kernels, row, direction)]
    if not copies or not steps:
        return {}
    start = np.array([kernels.start_us[row] for row in order])
    reached = np.maximum.accumulate(start + np.array([kernels.duration_us[row] for row in order]))
    idle = np.concatenate(([0.0], np.cumsum(np.maximum(0.0, start[1:] - reached[:-1]))))  # before each activity
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for place, until in zip(copies, [*copies[1:], len(order) - 1], strict=True):
        row = kernels.operator[order[place]]
        if kernels.step[order[place]] < 0:
            continue
        node = nodes[row] if row < len(nodes) else UNLINKED_READS
        waited, felt, copied = found.get(node, (0.0, 0.0, 0.0))
        host_us = operators.duration_us[row]
        after = float(idle[until] - idle[place])
        copied += kernels.duration_us[order[place]] / steps
        found[node] = (waited + host_us / steps, felt + min(host_us, after) / steps, copied)
    return dict(sorted(found.items()))


def _copies_so(kernels: Kernels, row: int, direction: re.Pattern[str]) -> bool:
    named = kernels.category[row] == "memcpy" and direction.search(kernels.name[row]) is not None
    return named and kernels.operator[row] >= 0
