"""Counted operations against closed formulas and torch's own counter."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import op, save

from advisor.ingest.kineto import read_trace
from advisor.operators.arithmetic import COMPOSITES, Work, work_of
from advisor.operators.signatures import SIGNATURES
from advisor.operators.traffic import family, least_bytes

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
        ("aten::addmm_", [[3, 5], [3, 4], [4, 5], [], []], 2 * 3 * 4 * 5),  # in place
        ("aten::addbmm", [[3, 5], [7, 3, 4], [7, 4, 5]], 7 * 2 * 3 * 4 * 5),
        ("aten::addmv", [[3], [3, 4], [4]], 2 * 3 * 4),
        ("aten::_addmm_activation", [[5], [3, 4], [4, 5]], 2 * 3 * 4 * 5),
        ("aten::_grouped_mm", [[30, 4], [6, 4, 5], [6]], 2 * 30 * 4 * 5),  # rows of 30 tokens to 6 experts
        ("aten::_grouped_mm", [[6, 3, 4], [4, 50], [6]], 2 * 3 * 4 * 50),  # columns
        ("aten::_grouped_mm", [[3, 40], [40, 5], [6]], 2 * 3 * 40 * 5),  # terms: the gradient of the experts' weights
        ("aten::_grouped_mm", [[6, 3, 4], [6, 4, 5]], 6 * 2 * 3 * 4 * 5),
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


BF16 = ("bfloat16",) * 3


def test_composites_count_only_where_nothing_inside_does(tmp_path: Path) -> None:
    linear = op("aten::linear", 0.0, 10.0, dims=[[8, 4], [5, 4]], types=F32)
    onednn = op("aten::mkldnn_linear", 1.0, 5.0, dims=[[8, 4], [5, 4]], types=F32)
    assert [work.model for work in works(tmp_path, linear, onednn)] == [2 * 8 * 4 * 5]
    outer = op("aten::matmul", 20.0, 10.0, dims=[[2, 8, 4], [4, 5]], types=F32)
    inner = op("aten::linear", 21.0, 5.0, dims=[[2, 8, 4], [5, 4]], types=F32)
    assert [work.model for work in works(tmp_path, outer, inner)] == [2 * 2 * 8 * 4 * 5]  # one of the two
    assert {"aten::linear", "aten::matmul"} <= COMPOSITES


def test_broadcast_products() -> None:
    for left, right, flops in (
        ((3, 4), (4, 5), 2 * 3 * 4 * 5),
        ((7, 3, 4), (4, 5), 7 * 2 * 3 * 4 * 5),
        ((7, 1, 3, 4), (6, 4, 5), 7 * 6 * 2 * 3 * 4 * 5),
        ((4,), (4, 5), 2 * 4 * 5),
        ((7, 3, 4), (4,), 7 * 2 * 3 * 4),
    ):
        assert work_of("aten::matmul", (left, right), F32).model == flops


def test_packed_numbers_of_four_bits_are_two_to_an_element() -> None:
    shapes, dtypes = ((3, 4), (4, 5)), ("float4_e2m1fn_x2", "float4_e2m1fn_x2")
    assert work_of("aten::_scaled_mm", shapes, dtypes).model == 2 * 3 * 8 * 5


@pytest.mark.parametrize(
    ("name", "concrete"),
    [
        ("aten::convolution", "|||[2, 2]|[3, 3]|[1, 1]|False|[0, 0]|1"),
        ("aten::_convolution", "|||[2]|[3]|[1]|False|[0]|1|False|False|True|True"),
        ("aten::cudnn_convolution", "||[3, 3]|[2, 2]|[1, 1]|1|False|False|True"),
        ("aten::miopen_convolution", "|||[3, 3]|[2, 2]|[1, 1]|1|False|False"),
        ("aten::mkldnn_convolution", "|||[3, 3]|[2, 2]|[1, 1]|1"),
        ("aten::_slow_conv2d_forward", "||[7, 7]||[2, 2]|[3, 3]"),
    ],
)
def test_convolutions_of_every_backend(name: str, concrete: str) -> None:
    shapes = ((64, 3, 224, 224), (64, 3, 7, 7), ())
    once = 2 * 64 * 112 * 112 * 64 * 3 * 7 * 7
    assert work_of(name, shapes, F32, concrete.split("|")) == Work("convolution", once, once, once)
    assert work_of(name, shapes, F32) is None  # without its stride a convolution does not tell its output


def test_old_gradient_of_the_input_needs_no_constants() -> None:
    shapes = ((), (32, 256, 14, 14), (256, 128, 3, 3))
    assert work_of("aten::cudnn_convolution_backward_input", shapes, ("", "float32", "float32")).model == (
        2 * 32 * 14 * 14 * 256 * 128 * 3 * 3
    )
    assert work_of("aten::cudnn_convolution_backward_weight", ((), (32, 256, 14, 14), (32, 128, 14, 14)), F32) is None


def test_recurrent_layers() -> None:
    """A layer's matrices: [gates * hidden, input] and [gates * hidden, state], a projection [projected, hidden]."""
    constants = "||4||||{mode}|{hidden}|{projected}|{layers}|False|0.|True|{two}"
    torch = pytest.importorskip("torch")
    tokens = 7 * 3
    for mode, kind, options in (
        (2, "LSTM", {"num_layers": 2, "bidirectional": True}),
        (2, "LSTM", {"proj_size": 5, "num_layers": 3}),
        (3, "GRU", {"bidirectional": True}),
        (1, "RNN", {"num_layers": 4}),
    ):
        layer = getattr(torch.nn, kind)(11, 13, **options)
        matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 2)
        values = {
            "mode": mode,
            "hidden": 13,
            "projected": options.get("proj_size", 0),
            "layers": options.get("num_layers", 1),
            "two": options.get("bidirectional", False),
        }
        concrete = constants.format(**values).split("|")
        shapes = ((7, 3, 11), *[()] * 15)
        assert work_of("aten::_cudnn_rnn", shapes, F32, concrete).model == 2 * tokens * matrices
    assert work_of("aten::_cudnn_rnn", ((7, 3, 11),), F32) is None


# ----------------------------------------------------------------------------------------------------------- attention


def attention(name: str, shapes: Any, **concrete: Any) -> Work | None:
    """A call of an attention operator with constants by argument name."""
    names = SIGNATURES[name][0]
    texts = [str(concrete.get(argument, "")) for argument in names]
    given = [*shapes, *[()] * (len(names) - len(shapes))]
    return work_of(name, given, [("bfloat16" if shape else "") for shape in given], texts)


def pairs(queries: int, keys: int, left: int | None, right: int | None, bottom_right: bool) -> int:
    """The mask written out."""
    shift = keys - queries if bottom_right else 0
    return sum(
        (left is None or key >= query + shift - left) and (right is None or key <= query + shift + right)
        for query in range(queries)
        for key in range(keys)
    )


@pytest.mark.parametrize("queries", [1, 5, 8, 13])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (3, 0), (2, 2), (40, 0), (-1, 3), (4, -1)])
def test_windows_are_counted_pair_by_pair(queries: int, window: tuple[int, int]) -> None:
    """[batch, tokens, heads, width]; a causal call sets the right side to 0 (`csrc/flash_attn/flash_api.cpp`)."""
    keys, (left, right) = 8, window
    each = 2 * 2 * 3 * (16 + 16)  # batch 2, three heads
    for causal in (False, True):
        work = attention(
            "flash_attn::_flash_attn_forward",
            [(2, queries, 3, 16), (2, keys, 1, 16), (2, keys, 1, 16)],
            dropout_p="0.",
            softmax_scale="0.25",
            causal=causal,
            window_size_left=left,
            window_size_right=right,
        )
        sides = (None if left < 0 else left, 0 if causal else None if right < 0 else right)
        exact = pairs(queries, keys, *sides, bottom_right=True)
        if sides == (None, 0) and queries == keys:
            exact = keys * keys / 2  # the convention for a square
        reach = keys if None in sides else min(keys, sum(sides) + 1)
        assert work == Work("attention", each * queries * reach, each * queries * reach, each * exact)


def test_causal_masks_of_torch_begin_at_the_top_left() -> None:
    for queries, keys in ((4, 9), (9, 4)):
        shapes = [(2, 3, queries, 16), (2, 3, keys, 16), (2, 3, keys, 16)]
        work = attention("aten::_scaled_dot_product_efficient_attention", shapes, is_causal=True)
        assert work.causal == 2 * 2 * 3 * 32 * pairs(queries, keys, None, 0, bottom_right=False)
        turned = [(b, t, h, d) for b, h, t, d in shapes]
        for kind, bottom_right in ((1, False), (2, True)):
            work = attention("aten::_efficient_attention_forward", turned, custom_mask_type=kind)
            assert work.causal == 2 * 2 * 3 * 32 * pairs(queries, keys, None, 0, bottom_right=bottom_right)


def test_query_heads_decide_where_they_share_keys() -> None:
    shared = attention(
        "aten::_scaled_dot_product_flash_attention", [(2, 32, 64, 16), (2, 4, 64, 16), (2, 4, 64, 8)], is_causal=False
    )
    assert shared.model == 2 * 2 * 32 * 64 * 64 * (16 + 8)


def test_packed_sequences_count_only_where_all_are_as_long_as_the_longest() -> None:
    packed = {"cum_seq_q": (5,), "cum_seq_k": (5,)}
    shapes = [(4 * 64, 3, 16), (4 * 32, 3, 16), (4 * 32, 3, 16), *packed.values()]
    equal = attention("aten::_flash_attention_forward", shapes, max_q=64, max_k=32, is_causal=False)
    assert equal.model == 2 * 4 * 3 * 64 * 32 * (16 + 16)
    assert attention("aten::_flash_attention_forward", shapes, max_q=80, max_k=32, is_causal=False) is None
    assert attention("aten::_flash_attention_forward", shapes[:3], max_q=64, max_k=32, is_causal=False) is None


def test_keys_in_a_cache_are_not_counted() -> None:
    names = SIGNATURES["flash_attn::_flash_attn_varlen_forward"][0]
    shapes = [
        {"q": (256, 3, 16), "k": (99, 16, 3, 16), "v": (99, 16, 3, 16), "block_table": (4, 8)}.get(n, ()) for n in names
    ]
    dtypes = ["bfloat16" if shape else "" for shape in shapes]
    texts = [{"causal": "True", "window_size_left": "-1", "window_size_right": "-1"}.get(n, "") for n in names]
    assert work_of("flash_attn::_flash_attn_varlen_forward", shapes, dtypes, texts) is None


def test_a_call_that_does_not_say_what_it_hides() -> None:
    shape = (2, 3, 8, 16)
    masked = attention("aten::_scaled_dot_product_efficient_attention", [shape] * 3 + [(2, 3, 8, 8)], is_causal=False)
    silent = work_of("aten::_scaled_dot_product_flash_attention", [shape] * 3, BF16)
    once = 2 * 2 * 3 * 8 * 8 * 32
    assert masked == silent == Work("attention", once, once, None)
    assert masked.least == once
    # operators that take a window say nothing without their constants
    assert work_of("flash_attn::_flash_attn_forward", [shape] * 3, BF16) is None
    assert work_of("aiter::_flash_attn_forward", [shape] * 3, BF16) is None


def test_backward_of_flash_attn() -> None:
    shape = (2, 8, 3, 16)
    constants = {"causal": True, "window_size_left": -1, "window_size_right": -1}
    work = attention("flash_attn::_flash_attn_backward", [shape] * 9, **constants)
    once = 2 * 2 * 3 * 8 * 8 * 32
    assert work == Work("attention", 2 * once, 2.5 * once, once)
    assert work.least == once


def test_fp8_attention_has_its_scales_between_values_and_constants() -> None:
    """`_scaled_dot_product_flash_attention.quantized` takes three more tensors."""
    shape = (2, 3, 8, 16)
    texts = ["", "", "", "", "", "", "0.", "True", "False", ""]
    work = work_of("aten::_scaled_dot_product_flash_attention", [shape] * 3 + [()] * 7, BF16, texts)
    assert work.causal == work.model / 2


# ------------------------------------------------------------------------------------------------------ torch's schemas


def test_argument_names_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    known: dict[str, list[list[str]]] = {}
    for schema in torch._C._jit_get_all_schemas():
        known.setdefault(schema.name, []).append([argument.name for argument in schema.arguments])
    ours = [name for name in SIGNATURES if name.startswith("aten::") and name in known]
    assert len(ours) > 150
    for name in ours:
        for names in SIGNATURES[name]:
            assert any(list(names) == other[: len(names)] for other in known[name]), name


# ------------------------------------------------------------------------------------------------------ torch's counter


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


def _random_calls(torch: Any, seed: int) -> list[tuple[str, Callable[[], Any]]]:
    """Sixty products and convolutions of random sizes, forward and backward."""
    choose = random.Random(seed)
    torch.manual_seed(seed)

    def size(most: int = 12) -> int:
        return choose.randint(1, most)

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, requires_grad=choose.random() < 0.7)

    calls: list[tuple[str, Callable[[], Any]]] = []
    for number in range(30):
        batch, m, k, n = size(), size(), size(), size()
        pick = choose.choice(["mm", "bmm", "addmm", "baddbmm", "linear", "einsum", "matmul"])
        factors = {
            "mm": (tensor(m, k), tensor(k, n)),
            "bmm": (tensor(batch, m, k), tensor(batch, k, n)),
            "addmm": (tensor(n), tensor(m, k), tensor(k, n)),
            "baddbmm": (tensor(batch, m, n), tensor(batch, m, k), tensor(batch, k, n)),
            "linear": (tensor(batch, m, k), tensor(n, k), tensor(n)),
            "einsum": ("bik,bkj->bij", tensor(batch, m, k), tensor(batch, k, n)),
            "matmul": (tensor(batch, m, k), tensor(k, n)),
        }[pick]
        function = torch.nn.functional.linear if pick == "linear" else getattr(torch, pick)
        calls.append((f"{number} {pick}", partial(function, *factors)))
    for number in range(30, 60):
        places, transposed = choose.randint(1, 3), choose.random() < 0.4
        inputs, outputs, width = size(5), size(5), choose.randint(1, 3)
        options = {
            "stride": choose.randint(1, 3),
            "padding": choose.randint(0, width - 1),
            "dilation": choose.randint(1, 2),
        }
        span = options["dilation"] * (width - 1) + 1
        kernel = (inputs, outputs) if transposed else (outputs, inputs)
        source = tensor(size(3), inputs, *(span + size(6) for _ in range(places)))
        name = f"conv{'_transpose' if transposed else ''}{places}d"
        function = getattr(torch.nn.functional, name)
        calls.append((f"{number} {name}", partial(function, source, tensor(*kernel, *[width] * places), **options)))
    return calls


@pytest.mark.parametrize("seed", [1, 2])
def test_torch_counts_the_same_for_random_sizes(tmp_path: Path, seed: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    calls, counted = _random_calls(torch, seed), []

    def run(call: Callable[[], Any]) -> None:
        result = call()
        if result.requires_grad:
            result.sum().backward()

    for _, call in calls:
        with FlopCounterMode(display=False) as counter:
            run(call)
        counted.append(counter.get_total_flops())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for name, call in calls:
            with torch.profiler.record_function(f"call {name}"):
                run(call)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    spans = {item.name: item for item in trace.ranges if item.name.startswith("call ")}
    found = []
    for name, _ in calls:
        span = spans[f"call {name}"]
        inside = (
            span.start_us <= trace.operators.start_us[row] < span.start_us + span.duration_us for row in trace.work
        )
        found.append(sum(work.executed for work, here in zip(trace.work.values(), inside, strict=True) if here))
    assert found == counted
    assert sum(counted) > 0


def test_attention_on_a_cpu_by_hand(tmp_path: Path) -> None:
    """torch's counter has no formula for the CPU's flash attention; the maths backend's products it has."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    once = 2 * 2 * 3 * 8 * 8 * (16 + 16)
    for backend, executed in ((SDPBackend.FLASH_ATTENTION, 3.5 * once), (SDPBackend.MATH, 3 * once)):
        with (
            sdpa_kernel(backend),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler,
        ):
            torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
        path = tmp_path / f"{backend}.json"
        profiler.export_chrome_trace(str(path))
        work = read_trace(path).work.values()
        assert sum(item.executed for item in work) == executed
        assert sum(item.model for item in work) == 3 * once


# ------------------------------------------------------------------------------------------------------ damaged records

ENTRIES = st.one_of(
    st.tuples(),
    st.lists(st.integers(0, 2**62), max_size=5).map(tuple),
    st.lists(st.lists(st.integers(0, 99), max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "True", "False", "[]", "[1, 1]", "[0]", "-1", "0.5", "[True, False, True]", "nan", "9" * 5000]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.text(max_size=8),
)


@given(
    name=st.sampled_from(sorted(SIGNATURES)),
    shapes=st.lists(ENTRIES, max_size=18),
    dtypes=st.lists(st.sampled_from(["", "float32", "bfloat16", "int64", "float4_e2m1fn_x2"]), max_size=18),
    concrete=st.lists(TEXTS, max_size=18),
)
@settings(max_examples=300, deadline=None)
def test_whatever_was_recorded_gives_a_number_or_none(
    name: str, shapes: list[Any], dtypes: list[str], concrete: list[str]
) -> None:
    work = work_of(name, tuple(shapes), tuple(dtypes), tuple(concrete))
    assert work is None or 0 <= work.least <= work.model <= work.executed
    moved = least_bytes(name, family(name), tuple(shapes), tuple(dtypes), tuple(concrete), tuple(shapes))
    assert moved is None or moved >= 0
