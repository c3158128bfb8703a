"""The columns of a trace by name and type, and the nouns their numbers stand for.

It imports no array library, so that a process that only decodes starts fast.
"""

from __future__ import annotations

from typing import NamedTuple

KERNEL, MEMCPY, MEMSET = 0, 1, 2  # kinds of activities
ANNOTATION, MODULE, WINDOW = 0, 1, 2  # kinds of ranges

_TIMED = {"name": "i", "start": "d", "duration": "d"}
COLUMNS: dict[str, dict[str, str]] = {  # array type codes: i and q integers, d floats, b small integers
    "operators": {**_TIMED, "thread": "i", **dict.fromkeys(("order", "sequence", "forward_thread"), "q")}
    | {"signature": "i"},
    "calls": {**_TIMED, "thread": "i", "correlation": "q"},
    "activities": {**_TIMED, "kind": "b"}
    | dict.fromkeys(("device", "stream", "correlation", "graph"), "q")
    | dict.fromkeys(("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers", "shared"), "q")
    | dict.fromkeys(("occupancy", "blocks_per_sm", "bytes"), "d")
    | {"collective": "i"},
    "ranges": {**_TIMED, "thread": "i", "kind": "b"},
}


class Signature(NamedTuple):
    """What an operator call recorded of its inputs, as JSON texts, empty where it was not recorded."""

    dims: bytes
    types: bytes
    concrete: bytes
    strides: bytes


class Collective(NamedTuple):
    """What a communication kernel recorded of its collective; sizes in elements, NaN and -1 where unknown."""

    name: str
    elements: float
    elements_out: float
    dtype: str
    group: str
    group_size: int
