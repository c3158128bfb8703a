"""Counted operations against closed formulas and torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from traces import op, save

from advisor.ingest.arithmetic import Work
from advisor.ingest.kineto import read_trace

DATA = Path(__file__).parents[1] / "data"
F32 = ["float"] * 4


def works(tmp_path: Path, *events: dict[str, Any]) -> list[Work]:
    trace = read_trace(save(tmp_path / "t.json", list(events)))
    return [trace.work[row] for row in sorted(trace.work)]


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::mm", [[3, 4], [4, 5]], 2 * 3 * 4 * 5),
        ("aten::mm", [[3, 4], [4, 5], [3, 5]], 2 * 3 * 4 * 5),  # with an output argument, as compiled code calls it
        ("aten::addmm", [[5], [3, 4], [4, 5], [], []], 2 * 3 * 4 * 5),
        ("aten::bmm", [[7, 3, 4], [7, 4, 5]], 7 * 2 * 3 * 4 * 5),
        ("aten::baddbmm", [[7, 3, 5], [7, 3, 4], [7, 4, 5]], 7 * 2 * 3 * 4 * 5),
        ("aten::_scaled_mm", [[3, 4], [4, 5], [], []], 2 * 3 * 4 * 5),
        ("aten::mv", [[3, 4], [4]], 2 * 3 * 4),
        ("aten::dot", [[4], [4]], 2 * 4),
    ],
)
def test_products(tmp_path: Path, name: str, dims: list[list[int]], flops: int) -> None:
    (work,) = works(tmp_path, op(name, 0.0, 1.0, dims=dims, types=F32))
    assert work == Work("matmul", flops, flops, flops)


def test_convolutions_forward_and_backward(tmp_path: Path) -> None:
    constants = ["", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"]
    forward = op(
        "aten::convolution", 0.0, 1.0, dims=[[64, 3, 224, 224], [64, 3, 7, 7], []], types=F32, concrete=constants
    )
    flags = ["", "", "", "[0]", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, False]"]
    backward = op(
        "aten::convolution_backward",
        2.0,
        1.0,
        dims=[[64, 64, 112, 112], [64, 3, 224, 224], [64, 3, 7, 7]],
        types=F32,
        concrete=flags,
    )
    once = 2 * 64 * 112 * 112 * 64 * 3 * 7 * 7
    assert [work.model for work in works(tmp_path, forward, backward)] == [once, once]  # only the weight's gradient


def test_attention_backward_is_twice_forward_and_runs_two_and_a_half(tmp_path: Path) -> None:
    shape = [2, 4, 32, 16]
    forward = op(
        "aten::_scaled_dot_product_flash_attention",
        0.0,
        10.0,
        dims=[shape, shape, shape, [], []],
        concrete=["", "", "", "0.", "True", "False", ""],
    )
    inner = op("aten::_flash_attention_forward", 1.0, 5.0, dims=[[2, 32, 4, 16]] * 3)
    backward = op(
        "aten::_scaled_dot_product_flash_attention_backward",
        20.0,
        10.0,
        dims=[shape] * 6,
        concrete=[""] * 10 + ["0.", "True"],
    )
    once = 2 * 2 * 4 * 32 * 32 * (16 + 16)
    assert works(tmp_path, forward, inner, backward) == [
        Work("attention", once, once, once / 2),
        Work("attention", 2 * once, 2.5 * once, once),
    ]


def test_what_does_not_say_its_sizes_is_not_counted(tmp_path: Path) -> None:
    assert works(tmp_path, op("aten::mm", 0.0, 1.0), op("aten::convolution", 2.0, 1.0, dims=[[1, 2, 3, 4]])) == []


def test_a_product_is_counted_once(tmp_path: Path) -> None:
    outer = op("aten::linear", 0.0, 10.0, dims=[[8, 4], [5, 4]])
    inner = op("aten::addmm", 1.0, 5.0, dims=[[5], [8, 4], [4, 5]])
    assert [work.model for work in works(tmp_path, outer, inner)] == [2 * 8 * 4 * 5]


def test_recomputation_is_executed_but_not_needed(tmp_path: Path) -> None:
    dims = [[5], [8, 4], [4, 5]]
    events = [
        op("aten::addmm", 0.0, 5.0, dims=dims, sequence=3),
        op("autograd::engine::evaluate_function: CheckpointBackward", 10.0, 50.0, sequence=3, forward=1),
        op("aten::addmm", 12.0, 5.0, dims=dims, sequence=9),
        op("autograd::engine::evaluate_function: AddmmBackward0", 20.0, 20.0, sequence=9, forward=1),
        op("aten::mm", 22.0, 5.0, dims=[[8, 5], [5, 4]]),
    ]
    assert [(w.model, w.executed) for w in works(tmp_path, *events)] == [(320, 320), (0, 320), (320, 320)]


def test_a_transformer_step_is_six_n_plus_twelve_l_d_t() -> None:
    trace = read_trace(DATA / "tiny_gpt" / "trace.json.gz")
    layers, width, length, batch, vocabulary = 2, 32, 16, 4, 61
    parameters = layers * 12 * width**2 + vocabulary * width
    tokens = batch * length
    expected = tokens * (6 * parameters + 12 * layers * width * length)
    assert sum(work.model for work in trace.work.values()) / len(trace.steps) == pytest.approx(expected, rel=1e-9)


def _models() -> dict[str, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    nn, functional = torch.nn, torch.nn.functional
    linear = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 6, 3, dilation=2), nn.ConvTranspose2d(6, 4, 3, stride=2)
    )
    image = torch.randn(2, 3, 33, 31, requires_grad=True)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    rows = torch.randn(8, 16, requires_grad=True)
    left, right = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5)
    return {
        "linear": lambda: linear(rows),
        "convolution": lambda: convolutions(image),
        "same padding": lambda: functional.conv1d(
            torch.randn(2, 4, 20), torch.randn(6, 4, 5).requires_grad_(), padding=2
        ),
        "encoder": lambda: encoder(torch.randn(2, 6, 16)),
        "einsum": lambda: torch.einsum("bij,bjk->bik", left, right),
    }


@pytest.mark.parametrize("name", ["linear", "convolution", "same padding", "encoder", "einsum"])
def test_torch_counts_the_same(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    forward = _models()[name]
    with FlopCounterMode(display=False) as counter:
        forward().sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        forward().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    assert sum(work.executed for work in trace.work.values()) == counter.get_total_flops()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_a_real_checkpoint(tmp_path: Path, reentrant: bool) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    rows = torch.randn(8, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        checkpoint(model, rows, use_reentrant=reentrant).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    once = 2 * 8 * 16 * 32
    assert sum(work.model for work in trace.work.values()) == 6 * once
    assert 6 * once < sum(work.executed for work in trace.work.values()) <= 8 * once
