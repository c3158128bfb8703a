"""Device time per step in conversions between floating point dtypes, by the graph node that made or caused them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from advisor.devicereads import owners
from advisor.model import UNLINKED_READS, Kernels, NodeCost, Operators

CAST = "aten::_to_copy"
FLOATS = ("float32", "bfloat16", "float16")
Shape = tuple[int, ...]


def cast_times(
    kernels: Kernels, operators: Operators, costs: Sequence[NodeCost], operator_cost: Sequence[int], steps: int
) -> Mapping[tuple[int, int], Mapping[Shape, float]]:
    """Per node (graph, node) the time of its casts, forward and backward, by the shape of what is cast.

    A node's casts are those that it asks for, those that autocast makes of its inputs, and those of their gradients.
    Casts that no node made stand under `UNLINKED_READS`.
    """
    nodes = owners(costs, operator_cost)
    found: dict[tuple[int, int], dict[Shape, float]] = {}
    for row, inner in enumerate(kernels.operator):
        if kernels.step[row] < 0 or inner < 0 or kernels.category[row] != "kernel" or not steps:
            continue
        cast = _cast_around(operators, inner)
        if cast < 0 or not operators.dtypes[cast] or operators.dtypes[cast][0] not in FLOATS:
            continue
        node = nodes[cast] if cast < len(nodes) else UNLINKED_READS
        shape = tuple(operators.shapes[cast][0]) if operators.shapes[cast] else ()
        times = found.setdefault(node, {})
        times[shape] = times.get(shape, 0.0) + kernels.duration_us[row] / steps
    return dict(sorted(found.items()))


def _cast_around(operators: Operators, row: int) -> int:
    """The innermost cast around an operator, -1 where there is none."""
    while row >= 0 and operators.name[row] != CAST:
        row = operators.parent[row]
    return row
