"""Floors worked out by hand: max(FLOPs / peak, least bytes / bandwidth) per call, and their sums."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from made_traces import ALL_REDUCE, BF16, FLOAT, GEMM, LONG, POINTWISE, Loop, loops
from recordings import EMPTY, H200

from advisor.columns.schema import KERNEL
from advisor.columns.table import Table
from advisor.hardware import lookup
from advisor.ingest.reader import read_table
from advisor.measured import Cost
from advisor.metrics import floors as least
from advisor.metrics.floors import Floors
from advisor.metrics.totals import communicates
from advisor.model import Hardware

ROOT = Path(__file__).parents[2]
ANNOTATED = ROOT / "tests/data/h200_gpt_naive_bf16_annotated.json.gz"
BF16_PEAK, TF32_PEAK, FP32_PEAK, BANDWIDTH = 989.4e12, 494.7e12, 66.9e12, 4.8e12  # H200 SXM datasheet, dense
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass_80_simt_sgemm_128x64::Params)"


def hardware() -> Hardware:
    found = lookup("NVIDIA H200", 132)
    assert found is not None
    peaks = (found.peak_flops["bfloat16"], found.peak_flops["tfloat32"], found.peak_flops["float32"])
    assert (*peaks, found.hbm_bandwidth) == (BF16_PEAK, TF32_PEAK, FP32_PEAK, BANDWIDTH)
    return found


@dataclass
class Seen:
    """What the functions under test say of one table."""

    table: Table
    links: least.Links
    kinds: least.Kinds
    floors: Floors

    def costs(self, kind: str, steps: int = 1) -> dict[str, Cost]:
        (grouping,) = (g for g in least.groupings(self.table, self.links, self.kinds, self.floors) if g.kind == kind)
        chosen = np.ones(len(self.table.activities), dtype=bool)
        return {cost.title: cost for cost in least.costs(self.table, grouping, self.floors, chosen, steps)}


def seen(table: Table, device: Hardware | None = None) -> Seen:
    links = least.link(table)
    kinds = least.kinds(table, links)
    rows = least.rows(table, links, kinds)
    chosen = np.ones(len(table.activities), dtype=bool)
    return Seen(table, links, kinds, least.floors(table, links, kinds, rows, device or hardware(), chosen))


Read = Callable[..., Seen]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """A function from a loop to what is said of it."""
    return lambda loop, device=None: seen(read_table(loop.save(tmp_path / "trace.json"), 1), device)


# ---------------------------------------------------------------------------------------------------------- one call


def test_a_large_product_is_bound_by_arithmetic(read: Read) -> None:
    loop = Loop()
    loop.mm(4096, 4096, 4096, 250.0)
    found = read(loop)
    flops = 2 * 4096**3
    (cost,) = found.costs("operator").values()
    assert cost.title == "aten::mm [4096, 4096] x [4096, 4096] bfloat16"
    assert (cost.time_us, cost.bound, cost.flops, cost.count, cost.tensor_cores) == (250, "compute", flops, 1, True)
    assert cost.least_bytes == 3 * 4096**2 * 2
    assert cost.floor_us == pytest.approx(flops / BF16_PEAK * 1e6)
    assert cost.recoverable_us == pytest.approx(250 - flops / BF16_PEAK * 1e6)
    assert (found.floors.model, found.floors.executed, found.floors.causal) == ({"bfloat16": flops}, flops, None)


def test_a_thin_product_is_bound_by_memory(read: Read) -> None:
    """Scores of attention in bfloat16: 64 x [2048, 128] x [128, 2048] move 604 MB for 69 GFLOP."""
    loop = Loop()
    loop.call("aten::bmm", [[64, 2048, 128], [64, 128, 2048]], [BF16, BF16], GEMM, 400.0)
    (cost,) = read(loop).costs("operator").values()
    moved = 64 * (2 * 2048 * 128 + 2048 * 2048) * 2
    assert (cost.bound, cost.least_bytes) == ("memory", moved)
    assert cost.floor_us == pytest.approx(moved / BANDWIDTH * 1e6) == pytest.approx(125.83, abs=0.01)


def test_a_sum_reads_two_and_writes_one(read: Read) -> None:
    loop = Loop()
    loop.add(1 << 24, 100.0)
    (cost,) = read(loop).costs("operator").values()
    assert (cost.least_bytes, cost.bound, cost.flops, cost.tensor_cores) == (3 * 4 << 24, "memory", None, False)
    assert cost.floor_us == pytest.approx(3 * (4 << 24) / BANDWIDTH * 1e6)


def test_a_floor_is_never_more_than_was_measured(read: Read) -> None:
    """The cache can beat the bandwidth of the memory; then nothing is left to gain."""
    loop = Loop()
    loop.add(1 << 24, 10.0)
    (cost,) = read(loop).costs("operator").values()
    assert (cost.floor_us, cost.recoverable_us) == (10.0, 0.0)


def test_a_calls_floor_is_that_of_the_kernel_that_computes(read: Read) -> None:
    """Split products launch two kernels for one result: what the one that adds up had to do is not known."""
    loop = Loop()
    with loop.operator("aten::mm", [[4096, 4096], [4096, 4096]], [BF16, BF16]):
        loop.kernel(GEMM, 200.0)
        loop.kernel("splitKreduce_kernel", 50.0)
    found = read(loop)
    (operator,) = found.costs("operator").values()
    kernels = found.costs("kernel")
    floor = 2 * 4096**3 / BF16_PEAK * 1e6
    assert (operator.count, operator.time_us) == (2, 250)
    assert operator.floor_us == pytest.approx(floor)
    assert kernels[GEMM].floor_us == pytest.approx(min(floor, 200))
    assert kernels["splitKreduce_kernel"].floor_us is None and kernels["splitKreduce_kernel"].flops is None


@pytest.mark.parametrize(
    ("kernel", "dtype", "peak"),
    [
        (SIMT, "float32", FP32_PEAK),
        ("cutlass_80_tensorop_s1688gemm", "tfloat32", TF32_PEAK),
        ("unnamed", "tfloat32", TF32_PEAK),
    ],
)
def test_float32_has_the_peak_of_the_units_that_the_kernel_can_have_used(
    read: Read, kernel: str, dtype: str, peak: float
) -> None:
    """Where the name does not tell, the faster rate is taken: a floor of the slower one may be too high."""
    loop = Loop()
    loop.mm(4096, 4096, 4096, 5000.0, kernel=kernel, dtype=FLOAT)
    found = read(loop)
    assert found.floors.model == {dtype: 2 * 4096**3}
    assert found.costs("operator").popitem()[1].floor_us == pytest.approx(2 * 4096**3 / peak * 1e6)


def test_causal_attention_has_half_the_floor_and_backward_two_and_a_half_times_the_work(read: Read) -> None:
    shape = [4, 16, 2048, 128]
    forward = 4 * 4 * 16 * 2048 * 2048 * 128
    loop = Loop()
    name = "aten::_scaled_dot_product_flash_attention"
    dims, types, flags = (
        [shape] * 3 + [[]] * 4,
        [BF16] * 3 + ["Scalar"] * 3 + [""],
        ["", "", "", "0.", "True", "False", ""],
    )
    loop.call(name, dims, types, "flash_fwd_kernel", 400.0, concrete=flags)
    rest = [[4, 16, 2048], [], [], [], [], [], [], [], [], []]
    loop.call(
        f"{name}_backward", [shape] * 5 + rest, [BF16] * 5 + [FLOAT, "", "", *["Scalar"] * 4, "", "", ""],
        "flash_bwd_kernel", 1000.0, concrete=[*[""] * 8, "2048", "2048", "0.", "True", "", "", ""],
    )  # fmt: skip
    found = read(loop)
    assert found.floors.model == {"bfloat16": 3 * forward}
    assert found.floors.causal == 1.5 * forward
    assert found.floors.executed == 3.5 * forward
    cost = found.costs("family")["attention"]
    assert (cost.bound, cost.tensor_cores, cost.flops) == ("compute", True, 3.5 * forward)
    assert cost.floor_us == pytest.approx(1.5 * forward / BF16_PEAK * 1e6)


# ----------------------------------------------------------------------------------------------------- what counts once


def test_a_composite_counts_where_nothing_inside_does(read: Read) -> None:
    inside, alone = Loop(), Loop()
    dims, types = [[8192, 2048], [8192, 2048], []], [BF16, BF16, ""]
    with inside.operator("aten::linear", dims, types):
        inside.mm(8192, 2048, 8192, 400.0)
    with alone.operator("aten::linear", dims, types):
        alone.kernel(GEMM, 400.0)
    for loop, name in ((inside, "aten::mm"), (alone, "aten::linear")):
        found = read(loop)
        assert found.floors.executed == 2 * 8192 * 2048 * 8192
        assert [cost.name for cost in found.costs("operator").values()] == [name]


def test_work_inside_a_counted_call_belongs_to_it(read: Read) -> None:
    loop = Loop()
    with loop.operator("aten::addmm", [[512], [256, 128], [128, 512]], [BF16] * 3):
        loop.add(131072, 10.0, dtype=BF16)
        loop.kernel(GEMM, 20.0)
    found = read(loop)
    (cost,) = found.costs("operator").values()
    assert (cost.name, cost.time_us, cost.flops) == ("aten::addmm", 30, 2 * 256 * 128 * 512)


def test_a_recomputed_forward_is_executed_and_no_work_of_the_model(read: Read) -> None:
    """Activation checkpointing: the backward pass calls the forward operator again, which then records for autograd."""
    loop = Loop()
    with loop.operator("aten::mm", [[64, 64], [64, 64]], [BF16] * 2, sequence=5):
        loop.kernel(GEMM, 5.0)
    with (
        loop.operator("CheckpointFunctionBackward", sequence=9, forward_thread=1),
        loop.operator("aten::mm", [[64, 64], [64, 64]], [BF16] * 2, sequence=6),
    ):
        loop.kernel(GEMM, 5.0)
    with loop.operator("MmBackward0", sequence=5, forward_thread=1):
        loop.mm(64, 64, 64, 5.0)
    found = read(loop)
    assert found.floors.model == {"bfloat16": 2 * 2 * 64**3}
    assert found.floors.executed == 3 * 2 * 64**3


def test_what_no_operator_launched_and_communication_have_no_floor(read: Read) -> None:
    loop = Loop()
    loop.kernel("launched by nobody", 30.0)
    with loop.operator("c10d::allreduce_", [[1024]], [BF16]):
        loop.kernel(ALL_REDUCE, 40.0, stream=20)
    loop.spilled("left over", 7.0)
    found = read(loop)
    assert np.isnan(found.floors.floor_us).all() and (found.floors.unit == -1).all()
    assert all(cost.floor_us is None and cost.recoverable_us is None for cost in found.costs("kernel").values())
    assert found.costs("operator") == found.costs("family") == {}
    assert found.floors.unit_us == 77


def test_a_group_with_a_part_of_unknown_floor_recovers_from_the_rest_alone(read: Read) -> None:
    """One kernel, launched by an operator with shapes and by one without: the unknown call counts as fully used."""
    loop = Loop()
    loop.add(1 << 24, 100.0)
    loop.call("mine::work", [[8]], ["Strange"], POINTWISE, 900.0)
    cost = read(loop).costs("kernel")[POINTWISE]
    known = 3 * (4 << 24) / BANDWIDTH * 1e6
    assert cost.floor_us == pytest.approx(known + 900)
    assert cost.recoverable_us == pytest.approx(100 - known)


@pytest.mark.parametrize("name", ["autograd::engine::evaluate_function: MineBackward", "MineBackward", "aten::view"])
def test_a_kernel_of_a_node_that_moves_nothing_by_itself_has_no_floor(read: Read, name: str) -> None:
    """The node of a library's own backward pass launches its kernels itself: what they move is unknown, not nothing."""
    loop = Loop()
    loop.call(name, [[1 << 20]], [FLOAT], "their_kernel", 155.0)
    (cost,) = read(loop).costs("operator").values()
    assert (cost.floor_us, cost.recoverable_us, cost.least_bytes) == (None, None, None)


def test_a_device_without_figures_has_arithmetic_and_no_floor(read: Read) -> None:
    loop = Loop()
    loop.mm(64, 64, 64, 5.0)
    found = read(loop, Hardware(name="?", kind="cuda"))
    (cost,) = found.costs("operator").values()
    assert (cost.floor_us, cost.bound, cost.flops) == (None, None, 2 * 64**3)


def test_products_without_a_count_are_named(read: Read) -> None:
    """A product of a library that records nothing, and one that a compiler wrote: matrix units tell of both."""
    loop = Loop()
    loop.mm(64, 64, 64, 5.0)
    loop.call("vendor::fused_linear", [[64, 64]], [BF16], GEMM, 20.0)
    loop.call("triton_tem_fused_mm_3", [[64, 64]], [BF16], "triton_tem_fused_mm_3", 30.0)
    loop.add(64, 1000.0)
    found = read(loop)
    assert found.floors.uncounted == {"triton_tem_fused_mm_3": 30, "vendor::fused_linear": 20}
    assert found.floors.unit_us == 1055


def test_constants_that_nothing_depends_on_make_no_further_operator(read: Read) -> None:
    loop = Loop()
    for number in ("1", "2", "3"):
        loop.add(1024, 10.0, concrete=["", "", number])
    (cost,) = read(loop).costs("operator").values()
    assert (cost.count, cost.shapes) == (3, "[1024] x [1024] float32")


def test_costs_are_per_step_and_the_most_recoverable_comes_first(read: Read) -> None:
    loop = Loop()
    for _ in range(2):
        loop.mm(4096, 4096, 4096, 150.0)
        loop.add(1 << 24, 400.0)
        loop.call("aten::index", [[1 << 20]], [LONG], "index_kernel", 900.0)
    costs = list(read(loop).costs("family", steps=2).values())
    assert [cost.name for cost in costs] == ["elementwise", "matmul", "indexing"]
    assert [(cost.count, cost.time_us) for cost in costs] == [(1, 400), (1, 150), (1, 900)]
    assert costs[2].floor_us is None


def test_a_negative_duration_takes_nothing_from_the_others(read: Read) -> None:
    loop = Loop()
    loop.mm(64, 64, 64, 5.0)
    loop.mm(64, 64, 64, 5.0)
    loop.events[-2]["dur"] = -1e6
    costs = read(loop).costs("family")
    assert costs["matmul"].time_us == 5
    assert 0 <= costs["matmul"].floor_us <= 5  # type: ignore[operator]


def test_an_empty_table_has_no_costs() -> None:
    found = seen(EMPTY)
    assert [found.costs(kind) for kind in ("kernel", "operator", "family", "module")] == [{}] * 4
    assert (found.floors.model, found.floors.executed, found.floors.unit_us) == ({}, 0, 0)


def module(loop: Loop, name: str, begin: float) -> None:
    """The Python call of a module around what a loop did since."""
    events = {"ph": "X", "cat": "python_function", "name": f"nn.Module: {name}", "pid": 77, "tid": 1}
    loop.events.append({**events, "ts": begin, "dur": loop.moment - begin, "args": {}})


def test_modules_own_their_backward_pass(read: Read) -> None:
    loop = Loop()
    for number, us in ((0, 10.0), (1, 20.0)):
        begin = loop.moment
        loop.moment += 1
        with loop.operator("aten::mm", [[64, 64], [64, 64]], [BF16] * 2, sequence=number + 3):
            loop.kernel(GEMM, us)
        loop.moment += 1
        module(loop, f"Linear_{number}" if number else "Head", begin)
    for sequence in (4, 3):
        with loop.operator("MmBackward0", sequence=sequence, forward_thread=1):
            loop.mm(64, 64, 64, 100.0 * sequence)
    loop.add(64, 7.0)
    found = read(loop).costs("module")
    assert {name: cost.time_us for name, cost in found.items()} == {"Linear": 420, "Head": 310}


# -------------------------------------------------------------------------------------------------- recorded on an H200

WIDTH, TOKENS, BATCH, LAYERS, VOCABULARY = 2048, 2048, 4, 2, 50257
WEIGHTS = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH  # of the products, language model head included
LINEAR = 6 * WEIGHTS * BATCH * TOKENS
ATTENTION = 12 * LAYERS * WIDTH * TOKENS * BATCH * TOKENS


@cache
def annotated() -> Seen:
    return seen(read_table(ANNOTATED, 1))


@cache
def recorded(name: str) -> Seen:
    path = H200 / f"h200_{name}.json.gz"
    if not path.exists():
        pytest.skip("the recordings are not beside this checkout")
    return seen(read_table(path, 1))


def test_the_products_of_one_step_are_those_of_the_model() -> None:
    """6 N per token for the weights and 12 L d T for attention, written as two products of all pairs."""
    found = annotated().floors
    assert (LINEAR, ATTENTION) == (10_006_837_592_064, 824_633_720_832)
    assert found.model == {"bfloat16": LINEAR + ATTENTION}
    assert found.executed == LINEAR + ATTENTION
    assert found.causal is None  # nothing says which of the products a mask makes useless
    assert found.uncounted == {}


def test_the_floor_of_the_products() -> None:
    """The weights' are bound by arithmetic; the twelve of attention, 604 MB each, by memory."""
    costs = annotated().costs("family")
    thin = 64 * (2 * 2048 * 128 + 2048 * 2048) * 2
    products = LINEAR / BF16_PEAK * 1e6 + 6 * LAYERS * thin / BANDWIDTH * 1e6
    assert costs["matmul"].floor_us == pytest.approx(products, rel=1e-6)
    assert costs["matmul"].flops == pytest.approx(LINEAR + ATTENTION)


@pytest.mark.parametrize(("steps", "words"), [(1, 2.5), (2, 3)])
def test_the_floor_of_naive_softmax(steps: int, words: float) -> None:
    """Forward reads and writes the scores in float32, backward reads two and writes one.

    The recording of one step has no constants: its result may have been written in 16 bits.
    """
    operators = (annotated() if steps == 1 else recorded("gpt_naive_bf16")).costs("operator", steps)
    scores = BATCH * 16 * TOKENS * TOKENS * 4
    (forward,) = (cost for cost in operators.values() if cost.name == "aten::_softmax")
    (backward,) = (cost for cost in operators.values() if cost.name == "aten::_softmax_backward_data")
    assert forward.floor_us == pytest.approx(LAYERS * 2 * scores / BANDWIDTH * 1e6)
    assert backward.floor_us == pytest.approx(LAYERS * words * scores / BANDWIDTH * 1e6)


def test_the_fused_optimizer_moves_seven_words_per_parameter() -> None:
    """Weight, gradient and two moments are read, weight and moments written; the head shares the embedding's weight."""
    biases_and_norms = LAYERS * (9 * WIDTH + 2 * 2 * WIDTH) + 2 * WIDTH
    parameters = WEIGHTS + TOKENS * WIDTH + biases_and_norms
    found = recorded("gpt_fused_compiled_bf16").costs("family", steps=2)["optimizer"]
    assert parameters == 207_841_280
    assert found.least_bytes == pytest.approx(7 * 4 * parameters, rel=1e-6)


def test_the_compiled_model_pads_its_vocabulary() -> None:
    """50257 columns become 50264; attention stays one operator, whose mask the floor takes into account."""
    found = recorded("gpt_fused_compiled_bf16")
    padded = 6 * (WEIGHTS + 7 * WIDTH) * BATCH * TOKENS
    assert found.floors.model == {"bfloat16": 2 * (padded + ATTENTION)}
    assert found.floors.causal == 2 * (padded + ATTENTION / 2)
    assert found.floors.executed == 2 * (padded + ATTENTION + ATTENTION / 3 / 2)
    families = found.costs("family")
    assert families["matmul"].floor_us == pytest.approx(2 * padded / BF16_PEAK * 1e6, rel=1e-6)
    assert families["attention"].floor_us == pytest.approx(ATTENTION / BF16_PEAK * 1e6, rel=1e-6)


def test_float32_without_tensor_cores() -> None:
    """Four layers of 256, 8 x 256 tokens, 8192 words, float32 with the default precision."""
    found = recorded("gpt_launch_bound_fp32")
    weights = 4 * 12 * 256**2 + 8192 * 256
    per_step = 6 * weights * 2048 + 12 * 4 * 256 * 256 * 2048
    assert found.floors.model == {"float32": 2 * per_step}
    assert found.costs("family", steps=2)["matmul"].floor_us > per_step / FP32_PEAK * 1e6 * 0.999  # type: ignore[operator]


def resnet50() -> float:
    """Multiplications of ResNet-50 forward for one image of 224 x 224, layer by layer (He et al. 2015, table 1)."""
    total, size, inputs = 3 * 64 * 49 * 112**2, 56, 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            before = size
            size = size // stride if block == 0 else size
            total += inputs * width * before**2 + 9 * width**2 * size**2 + width * 4 * width * size**2
            total += inputs * 4 * width * size**2 if block == 0 else 0
            inputs = 4 * width
    return float(total + 2048 * 1000)


def test_convolutions_are_those_of_resnet50() -> None:
    """Backward is twice forward, but the first layer needs no gradient of the image."""
    assert resnet50() == pytest.approx(4.089e9, rel=1e-3)
    found = recorded("resnet50_dataloader_bound_fp32").floors
    per_image = 2 * (3 * resnet50() - 3 * 64 * 49 * 112**2)
    assert sum(found.model.values()) == pytest.approx(2 * 64 * per_image, rel=1e-9)


# ----------------------------------------------------------------------------------------------------------- invariants


def hold(found: Seen) -> None:
    """What is true of every table."""
    rows = found.table.activities
    time = np.maximum(rows.duration, 0.0)
    floor = found.floors.floor_us
    assert (np.isnan(floor) | ((floor >= 0) & (floor <= time * (1 + 1e-9) + 1e-9))).all()
    linked = (found.links.operator >= 0) & (rows.kind == KERNEL) & ~communicates(found.table)
    assert ((found.floors.unit >= 0) == linked).all()
    for kind in ("operator", "family"):
        costs = found.costs(kind).values()
        if len(costs) < least.SHOWN:
            assert sum(cost.time_us for cost in costs) == pytest.approx(float(time[linked].sum()), abs=1e-6)
    kernels = found.costs("kernel").values()
    if len(kernels) < least.SHOWN:
        assert sum(cost.time_us for cost in kernels) == pytest.approx(float(time.sum()), abs=1e-6)
    recoverable: dict[str, float] = {}
    for kind in ("kernel", "operator", "family"):
        for cost in found.costs(kind).values():
            assert cost.floor_us is None or 0 <= cost.floor_us <= cost.time_us * (1 + 1e-9) + 1e-9
            assert cost.recoverable_us is None or 0 <= cost.recoverable_us <= cost.time_us
            assert (cost.bound is None) == (cost.floor_us is None)
            assert all(
                value is None or (math.isfinite(value) and value > 0) for value in (cost.flops, cost.least_bytes)
            )
            recoverable[kind] = recoverable.get(kind, 0.0) + (cost.recoverable_us or 0.0)
        if len(found.costs(kind)) >= least.SHOWN:
            return
    # However it is summed up, the same is left to gain; of kernels some have no floor of their own.
    assert recoverable.get("operator", 0.0) == pytest.approx(recoverable.get("family", 0.0), abs=1e-6)
    assert recoverable.get("kernel", 0.0) <= recoverable.get("family", 0.0) + 1e-6
    assert sum(found.floors.model.values()) <= found.floors.executed * (1 + 1e-9)


FOREIGN = "xprof-tf-chrome-trace-foreign.json"
CORPUS = sorted(path for path in (ROOT / "tests/data/corpus/traces").rglob("*.json*") if path.name != FOREIGN)


@pytest.mark.parametrize("path", [ANNOTATED, *CORPUS], ids=lambda path: path.name)
def test_recordings_hold(path: Path) -> None:
    hold(seen(read_table(path, 1)))


@settings(max_examples=1200, deadline=None)
@given(loop=loops())
def test_made_up_loops_hold(tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> None:
    hold(seen(read_table(loop.save(tmp_path_factory.getbasetemp() / "made.json"), 1)))


def test_the_order_of_the_events_does_not_matter(tmp_path: Path) -> None:
    loop = Loop()
    for stream in (7, 8, 7, 9):
        loop.mm(512, 512, 512, 20.0, stream=stream)
        loop.add(4096, 0.0, stream=stream)
    first = seen(read_table(loop.save(tmp_path / "a.json"), 1))
    random.Random(3).shuffle(loop.events)
    second = seen(read_table(loop.save(tmp_path / "b.json"), 1))
    for kind in ("kernel", "operator", "family"):
        assert first.costs(kind) == second.costs(kind) != {}
    assert first.floors.model == second.floors.model
