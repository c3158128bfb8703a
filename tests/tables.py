"""Tables out of events in memory, traces that hold a bit of everything, and whether two tables are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from advisor.columns.schema import COLUMNS
from advisor.columns.table import Table
from advisor.ingest.assemble import assemble
from advisor.ingest.decode import Decoder

Event = dict[str, Any]


def table_of(events: Iterable[Event], **head: Any) -> Table:
    """The table that some events make, whatever file they could stand in."""
    decoder = Decoder(1 << 40, exact=True)
    text = json.dumps(list(events)).encode()
    decoder.feed(text[1:-1])
    return assemble([decoder.part()], head, [])


def differences(one: Table, other: Table, *, layout: bool = False) -> list[str]:
    """What two tables do not have in common; not a number equals not a number.

    With `layout` the texts of signatures may have other spaces, and so other numbers.
    """
    found = []
    if layout:
        left, right = (
            [[json.loads(part or b"0") for part in table.signatures[number]] for number in table.operators.signature]
            for table in (one, other)
        )
        found += ["signatures"] if left != right else []
    for table, columns in COLUMNS.items():
        for column in columns:
            if layout and column == "signature":
                continue
            left, right = getattr(getattr(one, table), column), getattr(getattr(other, table), column)
            if left.dtype != right.dtype or not np.array_equal(left, right, equal_nan=left.dtype == np.float64):
                found.append(f"{table}.{column}")
    for field in ("names", "threads", "signatures", "collectives", "head", "counts", "lost"):
        if not (layout and field == "signatures") and repr(getattr(one, field)) != repr(getattr(other, field)):
            found.append(field)
    found += [field for field in ("origin_us", "events", "skipped") if getattr(one, field) != getattr(other, field)]
    return found


NAMES = (
    "aten::mm",
    'quoted "name", {"ph": "X"}',
    "back\\slash\\",
    "ünï\u2603 \U0001f600",
    "void k<int, {lambda()#1}>(A[3], B{}) [clone .x]",
    "]}",
    ', {"ph"',
    "tab\tand\nline",
    "",
)


def some_events(seed: int, count: int = 40) -> list[Event]:
    """Events of every kind that profilers write, and of some that they do not; times repeat."""
    draw = random.Random(seed)
    makers = (_operator, _operator, _call, _kernel, _kernel, _copy, _range, _other)
    return [draw.choice(makers)(draw) for _ in range(count)]


def _complete(draw: random.Random, category: str, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": draw.choice(NAMES),
        "pid": draw.choice((1, "1", "Spans")),
        "tid": draw.choice((1, 2, "thread")),
        "ts": draw.choice((1000, 1000.5, 1000 + draw.randrange(40))),
        "dur": draw.choice((0, 1, 2.25, 1e-3, draw.randrange(20))),
        **({"args": args} if args else {}),
    }


def _operator(draw: random.Random) -> Event:
    args: dict[str, Any] = {"External id": draw.randrange(9), "Ev Idx": draw.randrange(5)}
    if draw.random() < 0.5:
        args |= {"Input Dims": [[2, 3], [], [[1], [2, 2]]], "Input type": ["float", "Scalar", "TensorList"]}
        args |= {"Input Strides": [[3, 1], [], [[1], [2, 1]]], "Concrete Inputs": ["", "1.5", ""]}
    if draw.random() < 0.5:
        args |= {"Sequence number": draw.choice((7, 18446744073709551615)), "Fwd thread id": draw.randrange(2)}
    return _complete(draw, draw.choice(("cpu_op", "Operator")), **args)


def _call(draw: random.Random) -> Event:
    return _complete(draw, "cuda_runtime", correlation=draw.randrange(9), cbid=211)


def _kernel(draw: random.Random) -> Event:
    args: dict[str, Any] = {"correlation": draw.randrange(9), "stream": draw.choice((7, 20)), "device": 0}
    args |= {"grid": [draw.randrange(1, 4), 1, 1], "block": [128, 1, 1], "registers per thread": 32}
    args |= {"shared memory": 0, "est. achieved occupancy %": draw.randrange(100), "blocks per SM": 0.25}
    if draw.random() < 0.3:
        args |= {"Collective name": "allreduce", "Group size": 2, "dtype": "Float"}
        args |= draw.choice(({}, {"In msg nelems": 1024, "Out msg nelems": 1024}))
    return _complete(draw, draw.choice(("kernel", "Kernel")), **args)


def _copy(draw: random.Random) -> Event:
    return _complete(draw, "gpu_memcpy", correlation=draw.randrange(9), stream=7, device=0, bytes=4096)


def _range(draw: random.Random) -> Event:
    event = _complete(draw, draw.choice(("user_annotation", "Trace", "python_function")))
    event["name"] = draw.choice(("ProfilerStep#3", "nn.Module: Linear_0", "Optimizer.step#SGD.step"))
    return event


def _other(draw: random.Random) -> Event:
    return draw.choice(
        (
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1001, "args": {"Bytes": -512}},
            {"ph": "s", "id": 5, "pid": 1, "tid": 1, "ts": 1002, "cat": "ac2g", "name": "ac2g"},
            {"ph": "C", "name": "[GPU]", "pid": 0, "ts": 1002, "args": {"value": 0.5}},
            {"ph": "X", "cat": "kernel", "name": "bare", "pid": 1, "tid": 7, "ts": 1010, "dur": 3},
            {"ph": "X", "cat": "mystery", "name": "x", "ts": 1, "dur": 1, "args": {"ph": {"ph": [{"ph": 1}]}}},
            {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "ts": 1003, "dur": 1, "args": {"x": [1, {"ph": "X"}]}},
            {"ph": "X", "cat": "kernel", "name": "k", "ts": 1004, "dur": 1, "args": {"x": [{"ph": 1}, {"ph": 2}, 3]}},
        )
    )
