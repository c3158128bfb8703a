"""Floors of nodes, families and source lines, on a recording and on numbers chosen by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiles import GPU, TINY, blank, gpu_step, made, tiny_profile

from advisor.analyze import analyze
from advisor.ingest.kineto import read_trace
from advisor.model import Graph, Node, OptimizerUse, Profile, Ref
from advisor.roofline import boundary_bytes, optimizer_bytes, roofline


@pytest.fixture(scope="module")
def tiny() -> Profile:
    return tiny_profile(read_trace(TINY / "trace.json.gz"), read_trace(TINY / "annotated.json.gz"))


def test_costs_of_a_cpu_run(tiny: Profile) -> None:
    graph = tiny.graphs[0]
    products = [cost for cost in tiny.costs if graph.nodes[cost.node].target == "operator.matmul"]
    once = 2 * 4 * 2 * 16 * 16 * 16
    assert [cost.flops for cost in products] == [3 * once] * 4
    first = products[0]
    tensors = 4 * (2 * 4 * 2 * 16 * 16 + 4 * 2 * 16 * 16)
    assert first.least_bytes == 2 * tensors
    assert first.floor_us == pytest.approx(max(3 * once / 1e11, 2 * tensors / 2e10) * 1e6)
    views = [cost for cost in tiny.costs if graph.nodes[cost.node].target == "method.transpose"]
    assert views and all(cost.least_bytes == 0 and cost.floor_us == 0 for cost in views)


def test_regions_of_a_cpu_run(tiny: Profile) -> None:
    families = {region.name: region for region in tiny.regions if region.span is None}
    assert {"matmul", "softmax", "elementwise", "optimizer"} <= set(families)
    lines = [region for region in tiny.regions if region.span is not None]
    assert lines == sorted(lines, key=lambda region: -region.measured_us)
    source = (TINY / "train.py").read_text(encoding="utf-8").splitlines()
    softmax = next(r for r in lines if "softmax" in r.name and r.span and "softmax" in source[r.span.line - 1])
    assert softmax.name.endswith("in Block")
    assert sum(region.measured_us for region in families.values()) < 1.01 * (tiny.median_step_us() or 0)


def test_the_optimizer_gets_its_time(tiny: Profile) -> None:
    (optimizer,) = tiny.optimizers
    region = next(region for region in tiny.regions if region.name == "optimizer")
    assert optimizer.step_us == pytest.approx(region.measured_us)
    assert region.floor_us == pytest.approx(min(29184 * 4 * 7 / 2e10 * 1e6, region.measured_us))


def test_no_figure_is_infinite(tiny: Profile) -> None:
    figures = [region.measured_us for region in tiny.regions] + [cost.least_bytes or 0.0 for cost in tiny.costs]
    assert all(math.isfinite(figure) for figure in figures)


@pytest.mark.parametrize(("precision", "peak"), [("high", 5e13), ("highest", None)])
def test_float32_products_run_in_the_precision_that_is_set(tmp_path: Path, precision: str, peak: float | None) -> None:
    text = json.dumps(gpu_step()).replace("c10::BFloat16", "float")
    profile = blank(GPU, step_us=(1000.0,), facts={"matmul_precision": precision})
    use = analyze(profile, made(tmp_path, json.loads(text)), reference_peak=(1e14, "x")).utilisation
    flops = 20 * 2 * 512**3
    assert use.mfu == pytest.approx(flops / 1e-3 / 1e14)
    assert use.mfu_own_peak == (None if peak is None else pytest.approx(flops / 1e-3 / peak))


def test_a_floor_above_the_measured_time_is_cut_with_a_note(tmp_path: Path) -> None:
    slow = replace(GPU, peak_flops={"bfloat16": 1e12})
    profile = analyze(blank(slow, step_us=(1000.0,)), made(tmp_path, gpu_step()), reference_peak=None)
    (region,) = profile.regions
    assert region.floor_us == region.measured_us and region.recoverable_us == 0
    (note,) = profile.notes
    assert note.startswith("matmul: measured at 800 us per step, less than the floor of 5369 us")
    assert note.endswith("or leaves out part of the counted operations")  # bound by arithmetic, no word of caches


def test_roofline() -> None:
    assert roofline(3.0, 5.0) == (5.0, "memory")
    assert roofline(3.0, None) == (3.0, "compute")
    assert roofline(None, None) is None


def test_boundary_bytes_leave_inner_values_out() -> None:
    def node(index: int, *inputs: int, users: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Node:
        args = tuple(Ref(place) for place in inputs)
        return Node(
            index=index,
            name=f"n{index}",
            op="call_function",
            target="f",
            args=args,
            users=users,
            shape=(10, 4),
            stride=stride,
            dtype="float32",
        )

    nodes = (node(0, users=(1, 2)), node(1, 0, 0, users=(2,)), node(2, 1, 0, users=(3,)), node(3, 2, users=()))
    graph = Graph(index=0, nodes=nodes)
    assert boundary_bytes(graph, frozenset({1})) == 2 * 160
    assert boundary_bytes(graph, frozenset({1, 2})) == 2 * 160
    repeated = (replace(nodes[0], stride=(0, 1)), *nodes[1:])
    assert boundary_bytes(Graph(index=0, nodes=repeated), frozenset({1})) == 160 + 16


def use(kind: str, **arguments: Any) -> OptimizerUse:
    return OptimizerUse(
        span=None,
        kind=kind,
        arguments=arguments,
        given=(),
        parameters=1,
        elements=100,
        devices=("cuda",),
        dtypes=("float32",),
        sparse=False,
        overrides_step=False,
        groups=1,
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (use("torch.optim.adamw.AdamW"), 100 * 4 * 7),
        (use("torch.optim.adam.Adam", amsgrad=True), 100 * 4 * 9),
        (use("torch.optim.sgd.SGD", momentum=0.0), 100 * 4 * 3),
        (use("torch.optim.sgd.SGD", momentum=0.9), 100 * 4 * 5),
        (use("mine.Muon"), None),
    ],
)
def test_optimizer_bytes(optimizer: OptimizerUse, expected: float | None) -> None:
    assert optimizer_bytes((optimizer,)) == expected
    assert optimizer_bytes(()) is None
