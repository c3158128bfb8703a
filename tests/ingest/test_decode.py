"""Columns out of events: what of an event is kept, and events that are not as profilers write them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import differences, some_events, table_of

from advisor.columns.schema import ANNOTATION, KERNEL, MEMCPY, MEMSET, MODULE, WINDOW, Collective
from advisor.columns.table import Table
from advisor.ingest.assemble import assemble
from advisor.ingest.decode import Decoder

KERNEL_EVENT = {
    "ph": "X",
    "cat": "kernel",
    "name": "k",
    "pid": 0,
    "tid": 7,
    "ts": 10.5,
    "dur": 2.25,
    "args": {"correlation": 5, "device": 0, "stream": 7, "grid": [4, 2, 1], "block": [128, 1, 1]},
}


def decoded(text: bytes | str) -> Table:
    """The table of one chunk `{...},{...}`."""
    decoder = Decoder(1 << 40, exact=True)
    decoder.feed(text.encode() if isinstance(text, str) else text)
    return assemble([decoder.part()], {}, [])


def kernel(**changes: Any) -> dict[str, Any]:
    return {**KERNEL_EVENT, **changes}


# -- what is kept


def test_a_kernel() -> None:
    args = {
        **KERNEL_EVENT["args"],  # type: ignore[dict-item]
        "registers per thread": 32,
        "shared memory": 1024,
        "est. achieved occupancy %": 41,
        "blocks per SM": 0.25,
        "graph id": 3,
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "dtype": "Float",
        "Group size": 8,
        "Process Group Name": "dp",
        "queued": 0,
        "context": 1,
    }
    table = table_of([kernel(args=args)])
    rows = table.activities
    row = {name: getattr(rows, name)[0] for name in rows.__dataclass_fields__}
    assert table.names[row.pop("name")] == "k" and table.origin_us == 10.5
    assert table.collectives[row.pop("collective")][:2] == ("allreduce", 1024.0)
    assert np.isnan(table.collectives[0].elements_out) and table.collectives[0][3:] == ("Float", "dp", 8)
    assert np.isnan(row.pop("bytes"))
    assert row == {
        "start": 0,
        "duration": 2.25,
        "kind": KERNEL,
        "device": 0,
        "stream": 7,
        "correlation": 5,
        "graph": 3,
        "grid_x": 4,
        "grid_y": 2,
        "grid_z": 1,
        "block_x": 128,
        "block_y": 1,
        "block_z": 1,
        "registers": 32,
        "shared": 1024,
        "occupancy": 41,
        "blocks_per_sm": 0.25,
    }


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("kernel", KERNEL),
        ("Kernel", KERNEL),
        ("gpu_memcpy", MEMCPY),
        ("Memcpy", MEMCPY),
        ("gpu_memset", MEMSET),
        ("Memset", MEMSET),
    ],
)
def test_kinds_of_activities(category: str, kind: int) -> None:
    assert table_of([kernel(cat=category)]).activities.kind.tolist() == [kind]


@pytest.mark.parametrize("category", ["gpu_user_annotation", "cuda_sync", "ac2g", "overhead", "mtia_ccp_events"])
def test_what_is_no_work_of_the_device(category: str) -> None:
    table = table_of([kernel(cat=category)])
    assert len(table.activities) == 0 and table.counts == {category: 1} and table.skipped == 0


@pytest.mark.parametrize("category", ["cuda_runtime", "cuda_driver", "Runtime", "Driver", "runtime"])
def test_calls(category: str) -> None:
    table = table_of([kernel(cat=category, name="cudaLaunchKernel")])
    assert table.named(table.calls.name) == ["cudaLaunchKernel"] and table.calls.correlation.tolist() == [5]


def test_ranges() -> None:
    names = {
        "ProfilerStep#12": ANNOTATION,
        "Optimizer.step#SGD.step": ANNOTATION,
        "enumerate(DataLoader)#_Iter.__next__": ANNOTATION,
        "DistributedDataParallel.forward": ANNOTATION,
        "## forward ##": ANNOTATION,
    }
    operators = [{**KERNEL_EVENT, "cat": "Operator", "name": name} for name in names]
    annotations = [{**KERNEL_EVENT, "cat": "user_annotation", "name": "mine"}]
    modules = [
        {**KERNEL_EVENT, "cat": "python_function", "name": name} for name in ("nn.Module: Linear_0", "f.py(3): g")
    ]
    windows = [{**KERNEL_EVENT, "cat": "Trace", "name": "PyTorch Profiler (0)"}]
    table = table_of([*operators, *annotations, *modules, *windows])
    found = dict(zip(table.named(table.ranges.name), table.ranges.kind.tolist(), strict=True))
    assert found == {**names, "mine": ANNOTATION, "nn.Module: Linear_0": MODULE, "PyTorch Profiler (0)": WINDOW}
    assert len(table.operators) == 0


def test_absent_is_absent() -> None:
    rows = table_of([kernel(args={}, pid="GPU 0", tid="stream")]).activities
    for name in ("device", "stream", "correlation", "graph", "grid_x", "block_z", "registers", "shared", "collective"):
        assert getattr(rows, name).tolist() == [-1], name
    for name in ("occupancy", "blocks_per_sm", "bytes"):
        assert np.isnan(getattr(rows, name)).all(), name
    operators = table_of([kernel(cat="cpu_op", args={})])
    assert operators.operators.sequence.tolist() == [-1]
    assert operators.signatures == ((b"", b"", b"", b""),)


def test_the_lane_tells_the_device_and_the_stream() -> None:
    """Kineto writes them as process and thread; a hand-cut trace has nothing else."""
    rows = table_of([kernel(args={}, pid=2, tid=20)]).activities
    assert (rows.device.tolist(), rows.stream.tolist()) == ([2], [20])
    rows = table_of([kernel(args={}, pid=-1, tid=-7)]).activities
    assert (rows.device.tolist(), rows.stream.tolist()) == ([-1], [-1])


def test_metadata_and_flows_are_counted() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "i"},
        {"ph": "X"},
        {},
        {"ph": "f", "cat": "ac2g"},
        {"cat": ""},
    ]
    table = table_of(events)
    assert table.counts == {"ac2g": 1, "phase ": 2, "phase M": 1, "phase X": 1, "phase i": 1}
    assert (table.events, table.skipped) == (6, 0)


def test_a_sequence_number_beyond_all() -> None:
    event = kernel(cat="cpu_op", args={"Sequence number": 18446744073709551615, "Ev Idx": 3, "Fwd thread id": 1})
    rows = table_of([event]).operators
    assert (rows.sequence.tolist(), rows.order.tolist(), rows.forward_thread.tolist()) == ([-1], [3], [1])


def test_numbers_beyond_64_bits_in_what_is_not_kept() -> None:
    table = table_of([kernel(args={"correlation": 5, "Comms Id": 10159970886766084423, "x": 10**400})])
    assert table.activities.correlation.tolist() == [5] and table.skipped == 0


# -- what is not as it should be: one damaged event neither raises nor takes another one with it

GOOD = [
    kernel(name="good", ts=1),
    kernel(name="good", cat="cpu_op", ts=2),
    kernel(name="good", cat="cuda_runtime", ts=3),
]


def beside_good(text: str | bytes) -> Table:
    """The table of an event between good ones; these must not change."""
    raw = text.encode() if isinstance(text, str) else text
    table = decoded(b",".join((json.dumps(GOOD[0]).encode(), raw, *(json.dumps(event).encode() for event in GOOD[1:]))))
    kept = [table.named(rows.name).count("good") for rows in (table.activities, table.operators, table.calls)]
    assert kept == [1, 1, 1]
    for rows in (table.activities, table.calls):
        assert rows.correlation[[name == "good" for name in table.named(rows.name)]].tolist() == [5]
    return table


WRONG = [None, True, -1, 1.5, 1e308, 10**30, -(10**30), "", "x", "7", "nan", [], [1], {}, {"a": 1}]
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "bp")
ARGUMENTS = (
    *("correlation", "device", "stream", "grid", "block", "registers per thread", "shared memory", "bytes"),
    *("est. achieved occupancy %", "blocks per SM", "graph id", "Collective name", "In msg nelems", "dtype"),
    *("Out msg nelems", "Process Group Name", "Group size", "Ev Idx", "Sequence number", "Fwd thread id"),
    *("Input Dims", "Input type", "Concrete Inputs", "Input Strides"),
)


@pytest.mark.parametrize("category", ["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation", "Trace"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_wrong_types(category: str, value: object) -> None:
    for field in FIELDS:
        table = beside_good(json.dumps({**kernel(cat=category), field: value}))
        assert table.events + table.skipped >= 4 and table.skipped <= 1
    for field in ARGUMENTS:
        table = beside_good(json.dumps(kernel(cat=category, args={"correlation": 9, field: value})))
        assert (table.events, table.skipped <= 1) == (4, True)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "NaN", "Infinity", "-Infinity", "-nan", "1e400", "-1e400"])
@pytest.mark.parametrize("field", ["ts", "dur", "correlation", "bytes", "est. achieved occupancy %", "GB/s"])
def test_what_is_no_number(field: str, number: str) -> None:
    event = {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 5, "dur": 1, "args": {"correlation": 9, "bytes": 8}}
    (event if field in event else event["args"])[field] = "@"  # type: ignore[index]
    table = beside_good(json.dumps(event).replace('"@"', number))
    rows = table.activities
    copies = rows.kind == MEMCPY
    assert copies.sum() + table.skipped == 1
    for name in ("start", "duration"):
        assert np.isfinite(getattr(rows, name)).all()
    assert not np.isinf(rows.bytes).any() and not np.isinf(rows.occupancy).any()
    if field == "GB/s":
        assert copies.sum() == 1


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"ts": "5.5", "dur": "2"}, True),  # numbers as texts
        ({"ts": 1e17}, True),
        ({"ts": -1e17}, True),
        ({"ts": 1e19}, False),
        ({"dur": 1e19}, False),
        ({"dur": -3}, True),  # an error of the recorder, which the gate counts
        ({"dur": None}, True),
        ({"ts": None}, False),
        ({"pid": 1.0, "tid": 2.0}, True),
        ({"pid": None, "tid": None}, True),
        ({"tid": 2**64}, False),
        ({"name": 5}, False),
        ({"args": None}, True),
        ({"args": []}, True),
        ({"args": {"correlation": "9"}}, True),
        ({"args": {"correlation": 9.0}}, True),
        ({"args": {"correlation": 2**63}}, False),
        ({"args": {"grid": [1, 2]}}, True),
        ({"args": {"grid": "1"}}, False),
    ],
)
def test_kept_or_counted(changes: dict[str, Any], kept: bool) -> None:
    table = beside_good(json.dumps({**kernel(name="odd"), **changes}))
    assert ("odd" in table.named(table.activities.name)) is kept
    assert table.skipped == (not kept)


def test_without_a_time() -> None:
    event = kernel(name="odd")
    del event["ts"]
    assert beside_good(json.dumps(event)).skipped == 1
    event = kernel(name="odd")
    del event["dur"]
    table = beside_good(json.dumps(event))
    assert table.skipped == 0 and sorted(table.activities.duration.tolist()) == [0, 2.25]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (rb"\ud800", "?"),
        (rb"a\udc00b", "a?b"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"a\tb\nc\x01", "a\tb\nc\x01"),
        (rb"\u0000", "\0"),
        ("ü☃".encode(), "ü☃"),
        (rb"\"{\\", '"{\\'),
        (b"n" * 100_000, "n" * 100_000),
    ],
)
def test_names(name: bytes, read: str) -> None:
    """Every name can be written out again."""
    table = beside_good(json.dumps(kernel(name="@")).encode().replace(b"@", name))
    assert read in table.named(table.activities.name) and table.skipped == 0
    assert all(text.encode() is not None for text in table.names)


@pytest.mark.parametrize("value", [rb'"\ud800"', b'"\xff"', b'"a\tb"', b"1" * 5000, b"1e999"])
@pytest.mark.parametrize("field", ["other", "dtype", "Input Dims"])
def test_odd_values_in_arguments(value: bytes, field: str) -> None:
    args = {"correlation": 9, "Collective name": "x", field: "@"}
    table = beside_good(json.dumps(kernel(name="odd", args=args)).encode().replace(b'"@"', value))
    assert table.events == 4 and table.skipped <= 1
    assert table.skipped == 0 or field == "dtype"
    assert all(part.encode() is not None for item in table.collectives for part in item if isinstance(part, str))


def test_deep_arguments() -> None:
    for deep in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 500 + "]" * 500):
        table = beside_good(json.dumps(kernel(name="odd", args="@")).replace('"@"', deep))
        assert table.skipped <= 1


def test_keys_twice() -> None:
    table = beside_good(
        '{"ph":"M","ts":1,"ph":"X","cat":"kernel","name":"a","name":"b","dur":1,"args":{},"args":{"stream":3}}'
    )
    assert "b" in table.named(table.activities.name) and 3 in table.activities.stream.tolist()


def test_one_damaged_event_does_not_change_how_others_are_read() -> None:
    """Events are read many at once where all are whole and one by one where not: with the same result."""
    for odd in (b'{"ph":"X","cat":"kernel","ts":"x"}', b'{"ph":"X","cat":"kernel","ts":1,"dur":1,"args":{"grid":5}}'):
        for special in (
            b'{"ph":"X","cat":"kernel","name":"s","ts":1,"dur":1,"args":{"x":"\xff","correlation":3}}',
            b'{"ph":"X","cat":"cpu_op","name":"s","ts":1,"dur":1,"args":{"Input Dims":[["\xff"]]}}',
            b'{"ph":"X","cat":"cpu_op","name":"s","ts":1,"dur":1,"args":{"Input Dims":[[1.0, 1e999]]}}',
            b'{"ph":"X","cat":"kernel","name":"s","ts":1,"dur":1,"args":{"x":' + b"1" * 5000 + b"}}",
        ):
            alone, beside = decoded(special), decoded(special + b"," + odd)
            assert alone.names == beside.names[-1:] and alone.signatures == beside.signatures
            assert (alone.skipped, beside.skipped) == (0, 1)


CATEGORIES = (
    *("ac2g", "async", "async_cpu_to_gpu", "async_gpu", "cpu_instant_event", "cuda_sync", "fwdbwd", "overhead"),
    *("gpu_user_annotation", "python_function", "kernel", "cpu_op", "cuda_driver", "user_annotation", "Trace"),
)


@pytest.mark.parametrize("category", CATEGORIES)
def test_categories_are_read_the_same_way_beside_unknown_ones(category: str) -> None:
    """A chunk whose categories are all known is read in another way than one with others."""
    for field in FIELDS:
        for value in (*WRONG, "@"):
            event = json.dumps({**kernel(cat=category), field: value}).replace('"@"', "NaN")
            alone, beside = decoded(event), decoded(event + ',{"ph":"M"}')
            if field == "cat":
                continue
            assert dict(beside.counts) == {**alone.counts, "phase M": beside.counts["phase M"]}
            assert (beside.events - 1, beside.skipped) == (alone.events, alone.skipped)
            assert beside.counts["phase M"] == 1 or (field, value) == ("ph", "M")
            for table in ("operators", "calls", "activities", "ranges"):
                assert len(getattr(alone, table)) == len(getattr(beside, table))


# -- the order of events


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_any_order(seed: int, draw: Any) -> None:
    events = some_events(seed)
    mixed = list(events)
    draw.shuffle(mixed)
    assert differences(table_of(events), table_of(mixed)) == []


def test_equal_events_and_equal_times() -> None:
    """Whatever ties is told apart by all that it holds."""
    events = [
        kernel(args={"correlation": 5, "grid": [x, y, 1], "bytes": b}) for x in (1, 2) for y in (1, 2) for b in (1, 2)
    ]
    events += [
        kernel(cat="cpu_op", ts=1, name=name, args={"Input Dims": dims}) for name in "ab" for dims in ([[1]], [[2]])
    ]
    events += events
    expected = table_of(events)
    for turn in range(1, len(events)):
        assert differences(expected, table_of(events[turn:] + events[:turn])) == []
    assert differences(expected, table_of(events[::-1])) == []


def test_outer_operators_first() -> None:
    names = ("inner", "middle", "outer")
    events = [
        kernel(cat="cpu_op", name=name, ts=5, dur=dur, args={"Ev Idx": order})
        for name, dur, order in zip(names, (2, 4, 4), (3, 2, 1), strict=True)
    ]
    table = table_of(events)
    assert table.named(table.operators.name) == ["outer", "middle", "inner"]


def test_parts_in_any_order() -> None:
    """As helpers give them: texts are numbered anew, and not a number is the same in all parts."""
    events = some_events(3, 60) + [
        kernel(args={"Collective name": "allreduce", "Group size": 2, "correlation": place}) for place in range(4)
    ]
    expected = table_of(events)
    for count in (2, 3, 7):
        parts = []
        for place in range(count):
            decoder = Decoder(1 << 40, exact=True)
            decoder.feed(json.dumps(events[place::count])[1:-1].encode())
            parts.append(decoder.part())
        assert differences(expected, assemble(parts[::-1], {}, [])) == []
    assert [item for item in expected.collectives if item.elements != item.elements].count(expected.collectives[0]) <= 1
    assert isinstance(expected.collectives[0], Collective)


# -- arbitrary values

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["X", "kernel", "cpu_op", "user_annotation", "cuda_runtime", "nan", "1e999"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from((*FIELDS, *ARGUMENTS)), inner, max_size=6)
    ),
    max_leaves=12,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.just("X") | VALUES, "cat": st.sampled_from(["kernel", "cpu_op", "cuda_runtime", "Trace"]) | VALUES},
    optional={
        "name": st.text(max_size=5) | VALUES,
        "ts": st.floats(-1e6, 1e6) | VALUES,
        "dur": st.floats(0, 1e6) | VALUES,
        "pid": VALUES,
        "tid": VALUES,
        "args": st.dictionaries(st.sampled_from(ARGUMENTS), VALUES, max_size=6) | VALUES,
    },
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=6))
def test_any_events(events: list[dict[str, Any]]) -> None:
    text = json.dumps(events)[1:-1]
    table = decoded(text)
    assert 0 <= table.skipped <= len(events) and table.events <= len(events)
    kept = len(table.activities) + len(table.operators) + len(table.calls) + len(table.ranges)
    assert kept + table.skipped <= len(events)
    for rows in (table.activities, table.operators, table.calls, table.ranges):
        assert np.isfinite(rows.start).all() and np.isfinite(rows.duration).all()
        assert (np.diff(rows.start) >= 0).all()
    assert all(text.encode() is not None for text in table.names)
