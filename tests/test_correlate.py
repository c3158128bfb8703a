"""Links from device time to graph nodes."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from advisor.correlate import NODE_RANGE, Correlation, correlate
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import Trace, read_trace
from advisor.model import Graph, Node, NodeCost

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny_gpt"
SHARED = Path(__file__).parents[2] / "shared" / "h200"


def graphs_of(trace: Trace) -> tuple[Graph, ...]:
    """A graph with the node names the ranges of an annotated trace mention."""
    matches = [NODE_RANGE.match(item.name) for item in trace.ranges]
    names = list(dict.fromkeys(match[2] for match in matches if match))
    nodes = tuple(Node(index=i, name=name, op="call_function", target="f") for i, name in enumerate(names))
    return (Graph(index=0, nodes=nodes),)


def cost(found: Correlation, graphs: tuple[Graph, ...], name: str) -> NodeCost:
    return next(item for item in found.costs if graphs[item.graph].nodes[item.node].name == name)


# ------------------------------------------------------------------------------------------------------ real recordings


def check_naive_gpt(found: Correlation, graphs: tuple[Graph, ...], how: str) -> None:
    total = sum(found.shares_us.values())
    assert found.shares_us["forward"] / total == pytest.approx(0.374, abs=0.002)
    assert found.shares_us["backward"] / total == pytest.approx(0.576, abs=0.002)
    assert found.shares_us["optimizer"] / total == pytest.approx(0.05, abs=0.003)
    assert found.linked_share is not None and found.linked_share > 0.9999
    head = cost(found, graphs, "lg")
    assert head.total_us / 1e3 == pytest.approx(39.9, abs=0.2)
    assert head.provenance == how
    assert max(found.costs, key=lambda item: item.total_us) == head


def test_an_annotated_gpu_step_links_all_its_time() -> None:
    trace = read_trace(DATA / "h200_gpt_naive_bf16_annotated.json.gz")
    assert len(trace.kernels) == 548
    graphs = graphs_of(trace)
    found = correlate(trace, trace, graphs)
    assert sum(found.shares_us.values()) / 1e3 == pytest.approx(86.27, abs=0.005)
    check_naive_gpt(found, graphs, "nesting, sequence")
    assert found.shares_us["unlinked"] / sum(found.shares_us.values()) < 5e-4


def test_profiled_gpu_steps_join_the_annotated_one() -> None:
    path = SHARED / "h200_gpt_naive_bf16.json.gz"
    if not path.is_file():
        pytest.skip("the recorded H200 traces are not beside this checkout")
    annotated = read_trace(DATA / "h200_gpt_naive_bf16_annotated.json.gz")
    graphs = graphs_of(annotated)
    check_naive_gpt(correlate(read_trace(path), annotated, graphs), graphs, "occurrence, sequence")


def test_the_cut_in_the_repository_says_what_the_recording_says() -> None:
    path = SHARED / "h200_gpt_naive_bf16_annotated.json.gz"
    if not path.is_file():
        pytest.skip("the recorded H200 traces are not beside this checkout")
    whole, cut = read_trace(path), read_trace(DATA / path.name)
    assert whole.kernels.name == cut.kernels.name and whole.operators.name == cut.operators.name
    graphs = graphs_of(whole)
    for left, right in zip(correlate(whole, whole, graphs).costs, correlate(cut, cut, graphs).costs, strict=True):
        assert left.total_us == pytest.approx(right.total_us)


@pytest.fixture(scope="module")
def tiny() -> tuple[Trace, Trace, tuple[Graph, ...]]:
    graphs, _ = read_graphs(TINY / "graph.json", TINY)
    return read_trace(TINY / "trace.json.gz"), read_trace(TINY / "annotated.json.gz"), graphs


def test_a_cpu_capture_links_operators(tiny: tuple[Trace, Trace, tuple[Graph, ...]]) -> None:
    found = correlate(*tiny)
    assert found.linked_share is not None and found.linked_share > 0.99
    assert found.missing == {}
    graph = tiny[2][0]
    targets = {graph.nodes[item.node].target for item in found.costs}
    assert {"operator.matmul", "method.masked_fill", "torch.nn.functional.softmax"} <= targets
    assert {item.provenance for item in found.costs} <= {"occurrence", "occurrence, sequence"}
    products = [item for item in found.costs if graph.nodes[item.node].target == "operator.matmul"]
    assert len(products) == 4 and all(item.forward_us > 0 and item.backward_us > 0 for item in products)


def test_forward_and_backward_of_one_operator_share_a_node(tiny: tuple[Trace, Trace, tuple[Graph, ...]]) -> None:
    trace, _, graphs = tiny
    found = correlate(*tiny)
    targets: dict[str, set[str]] = {}
    for row, place in enumerate(found.operator_cost):
        if place >= 0:
            target = graphs[0].nodes[found.costs[place].node].target
            targets.setdefault(trace.operators.name[row], set()).add(target)
    assert targets["aten::_softmax"] == targets["aten::_softmax_backward_data"] == {"torch.nn.functional.softmax"}
    assert targets["aten::gelu"] == targets["aten::gelu_backward"]
    assert targets["aten::masked_fill"] == {"method.masked_fill"}
    assert len(found.operator_cost) == len(trace.operators)


def test_order_of_events_does_not_matter(tmp_path: Path, tiny: tuple[Trace, Trace, tuple[Graph, ...]]) -> None:
    mixed = []
    for name in ("trace", "annotated"):
        document = json.loads(gzip.decompress((TINY / f"{name}.json.gz").read_bytes()))
        random.Random(5).shuffle(document["traceEvents"])
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        mixed.append(read_trace(path))
    assert correlate(mixed[0], mixed[1], tiny[2]) == correlate(*tiny)


# ------------------------------------------------------------------------------------------ small made-up ones

Event = dict[str, Any]


def op(name: str, ts: float, dur: float, tid: int = 1, seq: int | None = None, fwd: int = 0, dims: Any = None) -> Event:
    args: dict[str, Any] = {} if seq is None else {"Sequence number": seq, "Fwd thread id": fwd}
    if dims is not None:
        args |= {"Input Dims": dims, "Input type": ["float"] * len(dims)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def span(name: str, ts: float, dur: float) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}


def made(tmp_path: Path, name: str, events: list[Event]) -> Trace:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return read_trace(path)


def test_a_call_that_occurs_unequally_often_stays_unlinked(tmp_path: Path) -> None:
    annotated = made(
        tmp_path,
        "a",
        [
            span("advisor::0::x", 0, 10),
            op("aten::mul", 1, 5, dims=[[2]]),
            span("advisor::0::y", 20, 10),
            op("aten::add", 21, 5),
        ],
    )
    profiled = made(
        tmp_path,
        "p",
        [
            span("ProfilerStep#1", 0, 100),
            op("aten::mul", 1, 5, dims=[[2]]),
            op("aten::mul", 10, 5, dims=[[2]]),
            op("aten::add", 20, 7),
        ],
    )
    found = correlate(profiled, annotated, graphs_of(annotated))
    assert [(item.node, item.forward_us) for item in found.costs] == [(1, 7.0)]
    assert found.linked_share == pytest.approx(7 / 17)


def test_batches_of_other_lengths_are_joined_without_their_sizes(tmp_path: Path) -> None:
    annotated = made(tmp_path, "a", [span("advisor::0::x", 0, 10), op("aten::mul", 1, 5, dims=[[2, 9]])])
    profiled = made(tmp_path, "p", [span("ProfilerStep#1", 0, 100), op("aten::mul", 1, 5, dims=[[2, 7]])])
    assert correlate(profiled, annotated, graphs_of(annotated)).linked_share == 1.0


def test_the_last_call_with_a_sequence_number_created_the_gradient(tmp_path: Path) -> None:
    events = [
        span("advisor::0::mask", 0, 10),
        op("aten::tril", 1, 5, seq=4),  # needs no gradient: peeks at the next number and leaves it
        span("advisor::0::product", 20, 10),
        op("aten::matmul", 21, 8, seq=4),
        op("aten::mm", 22, 5, seq=4),
        op("autograd::engine::evaluate_function: MmBackward0", 50, 30, tid=2, seq=4, fwd=1),
        op("MmBackward0", 51, 20, tid=2, seq=4, fwd=1),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 85, 5, tid=2),
    ]
    trace = made(tmp_path, "a", events)
    found = correlate(trace, trace, graphs_of(trace))
    assert [(item.node, item.forward_us, item.backward_us) for item in found.costs] == [(0, 5.0, 0.0), (1, 8.0, 35.0)]


def test_times_are_means_over_the_steps_and_executions_are_counted(tmp_path: Path) -> None:
    annotated = made(
        tmp_path,
        "a",
        [span("advisor::0::x", 0, 10), op("aten::mul", 1, 5), span("advisor::0::x", 20, 10), op("aten::mul", 21, 5)],
    )
    events = []
    for step, duration in ((1, 5.0), (2, 9.0)):
        begin = step * 100.0
        events += [
            span(f"ProfilerStep#{step}", begin, 90),
            op("aten::mul", begin + 1, duration),
            op("aten::mul", begin + 31, duration),
        ]
    found = correlate(made(tmp_path, "p", events), annotated, graphs_of(annotated))
    assert [(item.forward_us, item.launches) for item in found.costs] == [(14.0, 2.0)]
    assert found.executions == (2,)


def test_kernels_launched_by_no_operator_go_by_their_name(tmp_path: Path) -> None:
    def launched(number: int, ts: float, name: str, dur: float) -> list[Event]:
        args = {"correlation": number}
        return [
            {
                "ph": "X",
                "cat": "cuda_driver",
                "name": "cuLaunchKernel",
                "pid": 1,
                "tid": 1,
                "ts": ts,
                "dur": 1,
                "args": args,
            },
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts + 500, "dur": dur, "args": args},
        ]

    annotated = made(tmp_path, "a", [span("advisor::0::x", 0, 10), *launched(1, 5, "mine", 3), op("aten::mul", 30, 1)])
    profiled = made(tmp_path, "p", [span("ProfilerStep#1", 0, 100), *launched(1, 5, "mine", 4), op("aten::mul", 30, 1)])
    found = correlate(profiled, annotated, graphs_of(annotated))
    assert [(item.node, item.forward_us) for item in found.costs] == [(0, 4.0)]
    assert found.linked_share == 1.0


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    plain = made(tmp_path, "p", [op("aten::mul", 1, 5)])
    annotated = made(tmp_path, "a", [span("advisor::0::x", 0, 10), op("aten::add", 1, 5)])
    graphs = graphs_of(annotated)
    assert "no graph was captured" in correlate(plain, annotated, ()).missing["links"]
    assert "names no node" in correlate(plain, plain, graphs).missing["links"]
    assert "is the model compiled" in correlate(plain, annotated, graphs).missing["links"]
    assert correlate(plain, annotated, graphs).linked_share == 0.0
