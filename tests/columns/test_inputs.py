"""Recorded inputs out of their texts, and texts that are not as they should be."""

from __future__ import annotations

import contextlib
import json
import re
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.columns.inputs import DTYPES, inputs_of
from advisor.columns.schema import Signature
from advisor.ingest.reader import read_table


def signature(dims: object = (), types: object = (), concrete: object = (), strides: object = ()) -> Signature:
    return Signature(*(json.dumps(part).encode() for part in (dims, types, concrete, strides)))


def test_a_call() -> None:
    found = inputs_of(
        signature(
            [[2, 3], [], [[1], [2, 2]], [0, 5], []],
            ["float", "Scalar", "TensorList", "c10::BFloat16", ""],
            ["", "1.5", "", "", "[1, 2]"],
            [[3, 1], [], [[1], [2, 1]], [5, 1], []],
        )
    )
    assert found.shapes == ((2, 3), (), ((1,), (2, 2)), (0, 5), ())
    assert found.dtypes == ("float32", "", "", "bfloat16", "")
    assert found.strides == ((3, 1), (), ((1,), (2, 1)), (5, 1), ())
    assert found.concrete == ("", "1.5", "", "", "[1, 2]")


def test_nothing_recorded() -> None:
    found = inputs_of(Signature(b"", b"", b"", b""))
    assert (found.shapes, found.dtypes, found.strides, found.concrete) == ((), (), (), ())


def test_strides_of_a_large_tensor_are_kept() -> None:
    """Their product is beyond 64 bits where each of them is not."""
    shape = [8, 512, 64, 224, 224]
    strides = [512 * 64 * 224 * 224, 64 * 224 * 224, 224 * 224, 224, 1]
    found = inputs_of(signature([shape], ["float"], [""], [strides]))
    assert found.shapes == (tuple(shape),) and found.strides == (tuple(strides),)


@pytest.mark.parametrize(
    "item",
    [
        [-1, 2],
        [1.5],
        ["2"],
        [True],
        [None],
        [2**62],
        [2**40, 2**40],
        [10**30],
        [[1, -1]],
        [[1], 2],
        {"a": 1},
        "x",
        None,
        7,
    ],
)
def test_what_is_no_shape(item: object) -> None:
    assert inputs_of(signature([item, [4]])).shapes == ((), (4,))
    assert inputs_of(signature(strides=[[-1], [1.5], [2**62], [4]])).strides == ((), (), (), (4,))


@pytest.mark.parametrize(
    "text", [b"", b"null", b"{}", b"7", b'"x"', b"[", b"[[1,]]", b"\xff", b'["\xff"]', b"[" * 100_000, b"[1e999]"]
)
def test_what_is_no_list(text: bytes) -> None:
    found = inputs_of(Signature(text, text, text, text))
    assert found.shapes in ((), ((),)) and found.dtypes in ((), ("",))


def test_long_lists_cost_linear_time() -> None:
    began = time.process_time()
    found = inputs_of(signature([[2**61] * 200_000, [[3] * 10] * 50_000], strides=[[1] * 200_000]))
    assert found.shapes[0] == () and len(found.shapes[1]) == 50_000
    assert time.process_time() - began < 5


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=10,
)


@settings(deadline=None)
@given(VALUES, VALUES, VALUES, VALUES)
def test_any_values(dims: object, types: object, concrete: object, strides: object) -> None:
    found = inputs_of(signature(dims, types, concrete, strides))
    for entry in (*found.shapes, *found.strides):
        sizes = [size for part in entry for size in (part if isinstance(part, tuple) else (part,))]
        assert all(isinstance(size, int) and 0 <= size < 1 << 62 for size in sizes)
    assert set(found.dtypes) <= {*DTYPES.values(), ""}
    assert all(isinstance(text, str) for text in found.concrete)


def test_the_names_that_torch_records(tmp_path: Path) -> None:
    """Every dtype that tensors of this torch can have, as its profiler names it."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    tensors = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        if not re.match(r"quint|qint|bits|u?int[1-7]$", name):  # what holds no numbers of its own
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tensors[name] = torch.empty(4, dtype=dtype)
    assert {"float32", "bfloat16", "int64", "bool", "float8_e4m3fn"} <= set(tensors)
    recorded = {}
    for name, tensor in tensors.items():
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            tensor.view(2, 2)
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        table = read_table(tmp_path / "t.json", 1)
        views = [row for row, call in enumerate(table.named(table.operators.name)) if call == "aten::view"]
        found = inputs_of(table.signatures[table.operators.signature[views[0]]])
        assert found.shapes[0] == (4,)
        recorded[name] = found.dtypes[0]
    assert recorded == {name: name for name in tensors}
