"""Which work of a step could take its floor: durations by region, for asking what the step would then take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from advisor.columns.table import Ints, Table
from advisor.measured import CriticalPath, Gap
from advisor.metrics.critical import StepGraph, critical_path, step_graph, typical_step
from advisor.metrics.floors import Floors, Grouping
from advisor.metrics.steps import Steps

REGIONS = 6  # of each kind of grouping
KINDS = ("family", "module")


def path_of_step(
    table: Table, calls: Ints, steps: Steps, groupings: Sequence[Grouping], found: Floors
) -> tuple[CriticalPath | None, tuple[Gap, ...]]:
    """The critical path of the step of median length, and what the step would take if regions took their floors.

    None without steps or without a device; gaps say why there is none, or what its parts leave open.
    """
    if not len(steps) or not steps.on_device:
        return None, ()
    graph = step_graph(table, calls, typical_step(steps))
    if isinstance(graph, Gap):
        return None, (graph,)
    return critical_path(graph, savings(table, graph, groupings, found)), graph.gaps


def savings(
    table: Table, graph: StepGraph, groupings: Sequence[Grouping], found: Floors
) -> dict[str, dict[int, float]]:
    """For the regions of a step with most recoverable time the floor of each of their activities, in microseconds.

    First stands everything that has a floor.
    """
    rows = graph.activities
    rows = rows[~np.isnan(found.floor_us[rows])]
    gain = table.activities.duration[rows] - found.floor_us[rows]
    floor = dict(zip(rows.tolist(), found.floor_us[rows].tolist(), strict=True))
    if not floor:
        return {}
    chosen = {"all work": floor}
    for grouping in groupings:
        if grouping.kind not in KINDS:
            continue
        group = grouping.group[rows]
        inside = group >= 0
        total = np.bincount(group[inside], weights=gain[inside], minlength=len(grouping.names))
        order = sorted(np.flatnonzero(total > 0).tolist(), key=lambda place: (-total[place], grouping.names[place]))
        for place in order[:REGIONS]:
            name = f"{grouping.kind} {grouping.names[place]}"
            chosen[name] = {row: floor[row] for row in rows[group == place].tolist()}
    return chosen
