"""Reading traces: columns, nesting, launches, steps, and what is refused."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from traces import kernel, launch, op, save, span

from advisor.errors import ArtifactError
from advisor.ingest.kineto import read_trace

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny_gpt" / "trace.json.gz"
SHARED = Path(__file__).parents[3] / "shared" / "h200"


def test_a_real_capture() -> None:
    trace = read_trace(TINY)
    operators = trace.operators
    assert len(operators) > 3000
    assert [step.number for step in trace.steps] == [1, 2]
    assert set(operators.step) == {1, 2}
    assert set(trace.operator_phase) == {"data", "forward", "backward", "optimizer", "other"}
    first = operators.name.index("aten::linear")
    assert operators.shapes[first] == ((4, 16, 32), (96, 32), (96,))
    assert operators.dtypes[first] == ("float32", "float32", "float32")
    assert not any(trace.defects.values())


def test_children_lie_inside_their_parents() -> None:
    operators = read_trace(TINY).operators
    nested = 0
    for row, parent in enumerate(operators.parent):
        if parent < 0:
            continue
        nested += 1
        assert parent < row and operators.thread[parent] == operators.thread[row]
        assert operators.start_us[parent] <= operators.start_us[row]
        end = operators.start_us[parent] + operators.duration_us[parent]
        assert operators.start_us[row] + operators.duration_us[row] <= end + 0.01
    assert nested > 1000


def test_order_of_events_does_not_matter(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(TINY.read_bytes()))
    random.Random(3).shuffle(document["traceEvents"])
    mixed = tmp_path / "mixed.json"
    mixed.write_text(json.dumps(document), encoding="utf-8")
    assert read_trace(mixed) == read_trace(TINY)


def test_launches_join_kernels_to_the_innermost_operator(tmp_path: Path) -> None:
    trace = read_trace(
        save(
            tmp_path / "t.json",
            [
                span("ProfilerStep#5", 100.0, 100.0),
                op("aten::linear", 110.0, 40.0),
                op("aten::addmm", 115.0, 20.0),
                launch(1, 120.0),
                launch(2, 140.0),
                launch(3, 160.0),
                kernel("gemm", 300.0, 10.0, 1),
                kernel("Memset (Device)", 310.0, 1.0, 2, cat="gpu_memset"),
                kernel("triton_mine", 320.0, 5.0, 3),
                kernel("left over", 101.0, 5.0, 99),
            ],
        )
    )
    assert trace.kernels.name == ("left over", "gemm", "Memset (Device)", "triton_mine")
    assert trace.kernels.operator == (-1, 1, 0, -1)
    assert trace.kernels.step == (-1, 5, 5, 5)
    assert trace.kernels.category == ("kernel", "kernel", "memset", "kernel")
    assert trace.outermost == (0, 0)


def test_odd_events_are_taken_or_left(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "s": "g", "name": "Iteration Start", "pid": "Traces", "tid": "Trace PyTorch Profiler", "ts": 1},
        {"ph": "X", "cat": "Trace", "name": "Profiler", "pid": "Spans", "tid": "P", "ts": 0, "dur": 50, "args": None},
        {"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 3},
        op("torch::autograd::AccumulateGrad", 4.0, 1.0, sequence=18446744073709551615),
        op("Torch-Compiled Region: 0/0", 2.0, 20.0),
        op("aten::cat", 6.0, 1.0, dims=[[[2, 3], [2, 3]], []], types=["TensorList", "Scalar"]),
    ]
    trace = read_trace(save(tmp_path / "t.json", events))
    assert trace.operators.name == ("aten::add", "torch::autograd::AccumulateGrad", "aten::cat")
    assert trace.operators.sequence == (-1, -1, -1)
    assert trace.operators.shapes[2] == ((), ())
    assert [item.name for item in trace.ranges] == ["Torch-Compiled Region: 0/0"]
    assert trace.recorded == (-2.0, 48.0)


def test_defects_are_counted(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "Trace", "name": "Profiler", "pid": "Spans", "tid": "P", "ts": 0, "dur": 5000},
        op("aten::add", 100.0, -3.0),
        launch(1, 4000.0),
        kernel("k", 1000.0, 1.0, 1),
        kernel("k", 90000.0, 1.0, 2),
    ]
    trace = read_trace(save(tmp_path / "t.json", events))
    assert trace.defects == {"negative_duration": 1, "outside_window": 1, "before_launch": 1}


@pytest.mark.parametrize("figure", ["inf", "-nan", "NaN", "Infinity"])
def test_bandwidths_that_are_no_numbers_are_passed_over(tmp_path: Path, figure: str) -> None:
    path = save(tmp_path / "t.json", [kernel("Memset (Device)", 40.0, 0.0, 1, cat="gpu_memset")])
    text = path.read_text(encoding="utf-8").replace('"stream": 7', f'"stream": 7, "memory bandwidth (GB/s)": {figure}')
    path.write_text(text, encoding="utf-8")
    assert read_trace(path).kernels.stream == (7,)


def test_a_repeated_correlation_id_keeps_its_first_launch(tmp_path: Path) -> None:
    events = [launch(1, 30.0), launch(1, 10.0), op("aten::a", 5.0, 10.0), kernel("k", 40.0, 1.0, 1)]
    assert read_trace(save(tmp_path / "t.json", events)).kernels.operator == (0,)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"{}", "no list of traceEvents"),
        (b"not json", "no JSON"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": "soon"}]}', "1 events that cannot be read"),
        (b'{"traceEvents": [{"ph": "X"', "truncated"),
        (b'{"traceEvents": []}', "holds no operator"),
        (gzip.compress(b'{"traceEvents": []}' * 100, mtime=0)[:-20], "truncated"),
        (b"\x1f\x8bnot gzip at all", "gzip stream is damaged"),
    ],
)
def test_broken_files_say_what_to_do(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=part) as error:
        read_trace(path)
    assert str(tmp_path) not in str(error.value)
    assert "record" in str(error.value) or "export" in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"trace\.json\.gz is missing"):
        read_trace(tmp_path / "trace.json.gz")


@pytest.mark.parametrize(
    ("name", "kernels", "kernel_ms"),
    [
        ("gpt_naive_bf16", 1724, 224.045),
        ("gpt_fused_compiled_bf16", 393, 61.733),
        ("resnet50_dataloader_bound_fp32", 1474, 62.684),
        ("gpt_launch_bound_fp32", 2232, 9.186),
    ],
)
def test_facts_of_the_recorded_gpu_traces(name: str, kernels: int, kernel_ms: float) -> None:
    path = SHARED / f"h200_{name}.json.gz"
    if not path.is_file():
        pytest.skip("the recorded H200 traces are not beside this checkout")
    trace = read_trace(path)
    chosen = [
        duration
        for duration, category in zip(trace.kernels.duration_us, trace.kernels.category, strict=True)
        if category == "kernel"
    ]
    assert len(chosen) == kernels
    assert sum(chosen) / 1e3 == pytest.approx(kernel_ms, abs=5e-4)
    assert trace.device_names[0] == "NVIDIA H200"
    assert not any(trace.defects.values())
