"""Large graphs made of copies of a small one, and the processor time that work on them takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from advisor.model import Graph, Ref, Symbol

YARDSTICK_S = 0.105  # what the yardstick takes on the machine that the limits were set on


def shifted(arg: Any, by: int) -> Any:
    """An argument of a node with its references moved."""
    if isinstance(arg, Ref):
        return Ref(arg.index + by)
    if isinstance(arg, tuple):
        return tuple(shifted(item, by) for item in arg)
    return replace(arg, parts=shifted(arg.parts, by)) if isinstance(arg, Symbol) else arg


def repeated(graph: Graph, nodes: int) -> tuple[Graph, int]:
    """Copies of a graph one after the other, at least so many nodes; and how many copies."""
    size, copies = len(graph.nodes), -(-nodes // len(graph.nodes))
    shifts = [copy * size for copy in range(copies)]
    return replace(
        graph,
        nodes=tuple(
            replace(
                node,
                index=node.index + by,
                args=shifted(node.args, by),
                kwargs={name: shifted(arg, by) for name, arg in node.kwargs.items()},
                users=tuple(user + by for user in node.users),
            )
            for by in shifts
            for node in graph.nodes
        ),
    ), copies


def processor_s(work: Callable[[], object]) -> float:
    """Processor time of some work, the least of three."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def slowness() -> float:
    """How much slower this machine is now than the one that the limits were set on; never less than 1."""
    return max(1.0, processor_s(_yardstick) / YARDSTICK_S)


def _yardstick() -> int:
    found: dict[int, tuple[int, ...]] = {}
    for number in range(200_000):
        found[number] = (number, *found.get(number // 2, ())[:3])
    return sum(len(item) for item in found.values())
