"""Families and least traffic of operators."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from advisor.operators.arithmetic import work_of
from advisor.operators.families import POINTWISE, plain_name
from advisor.operators.lists import dtype_of_list, with_list_dtype
from advisor.operators.traffic import family, least_bytes, reads_constants


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "matmul"),
        ("aten::linear", "matmul"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_log_softmax_backward_data", "softmax"),
        ("aten::native_layer_norm_backward", "normalization"),
        ("aten::cudnn_batch_norm", "normalization"),
        ("aten::linalg_vector_norm", "reduction"),
        ("aten::mean", "reduction"),
        ("aten::copy_", "copy"),
        ("aten::_to_copy", "copy"),
        ("aten::embedding_dense_backward", "indexing"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::_foreach_mul_", "elementwise"),
        ("aten::transpose", "view"),
        ("aten::_unsafe_view", "view"),
        ("triton_poi_fused_add_0", "compiled"),
        ("AddmmBackward0", "autograd"),
        ("autograd::engine::evaluate_function: MulBackward0", "autograd"),
        ("detach", "view"),
        ("flash_attn::_flash_attn_forward", "attention"),
        ("aiter::mha_batch_prefill", "attention"),
        ("aiter::gemm_a16w16", "matmul"),
        ("aiter::add_rmsnorm", "normalization"),
        ("sgl_kernel::rotary_embedding", "elementwise"),  # no look-up
        ("fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function", "indexing"),
        ("fbgemm::asynchronous_complete_cumsum", "reduction"),
        ("mylib::mystery", "custom"),
        ("Optimizer.step#SGD.step", "custom"),
        ("All2All_Pooled_Req", "communication"),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "copy"),
        ("CompiledFunction", "compiled"),
        ("CompiledFunctionBackward", "compiled"),
        ("autograd::engine::evaluate_function: CompiledFunctionBackward", "autograd"),
        ("torch::jit::(anonymous namespace)::DifferentiableGraphBackward", "compiled"),
        # "norm" and "conv" in other words
        ("aten::normal_", "random"),
        ("aten::log_normal_", "random"),
        ("aten::linalg_norm", "reduction"),
        ("aten::_foreach_norm", "reduction"),
        ("aten::_convert_indices_from_coo_to_csr", "other"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_index_put_impl_", "indexing"),
        ("aten::record_stream", "view"),
        ("aten::conj", "view"),
        ("aten::slice_scatter", "copy"),
        ("aten::scalar_tensor", "fill"),
        ("aten::tensordot", "matmul"),
        ("aten::topk", "sorting"),
        ("aten::upsample_nearest1d", "resampling"),
        ("aten::linalg_cholesky", "other"),
    ],
)
def test_families(name: str, expected: str) -> None:
    assert family(name) == expected


def moved(name: str, shapes: Any, dtypes: str, concrete: str = "", strides: Any = None) -> float | None:
    """`least_bytes` with dtypes by the letters of DTYPES and constants between bars."""
    names = [DTYPES[letter] for letter in dtypes]
    return least_bytes(name, family(name), shapes, names, concrete.split("|") if concrete else (), strides)


DTYPES = {"f": "float32", "d": "float64", "b": "bfloat16", "i": "int64", "?": "bool", "8": "float8_e4m3fn", "c": "int8"}
DTYPES |= {"-": "", "z": "complex64"}


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "expected"),
    [
        ("aten::mul", ((8, 4), (4,)), ("float32", "float32"), 4 * (32 + 4 + 32)),
        ("aten::mul_", ((8, 4), (4,)), ("float32", "float32"), 4 * (32 + 4 + 32)),
        ("aten::sum", ((8, 4), ()), ("bfloat16", ""), 2 * 32),
        ("aten::copy_", ((8, 4), (8, 4), ()), ("bfloat16", "float32", ""), 6 * 32),
        ("aten::mm", ((3, 4), (4, 5)), ("bfloat16", "bfloat16"), 2 * (12 + 20 + 15)),
        ("aten::addmm", ((5,), (3, 4), (4, 5)), ("float32",) * 3, 4 * (5 + 12 + 20 + 15)),
        ("aten::embedding", ((1000, 8), (4, 2)), ("float32", "int64"), 8 * 8 + 4 * 8 * 8),  # indices and rows
        ("aten::transpose", ((8, 4), (), ()), ("float32", "", ""), 0),
        ("aten::add", ((), ()), ("", ""), None),
    ],
)
def test_least_bytes(name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], expected: float) -> None:
    assert least_bytes(name, family(name), shapes, dtypes) == expected


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "expected"),
    [
        ("aten::add", ((8, 1), (1, 4), ()), "ff-", 4 * (8 + 4 + 32)),  # the result is larger than either input
        ("aten::add", ((8, 4), (), ()), "bd-", 2 * (32 + 32)),  # a number is an argument of the kernel
        ("aten::add", ((8, 4), (8, 4)), "bf", 2 * 32 + 4 * 32 + 4 * 32),  # promoted to float32
        ("aten::add", ((8, 4), (8, 4), (), (8, 4)), "ff-f", 4 * 3 * 32),  # out=
        ("aten::div", ((8, 4), (8, 4), (8, 4)), "fff", 4 * 3 * 32),  # out=, where a rounding mode may stand
        ("aten::clamp_min", ((8, 4), (), (8, 4)), "f-f", 4 * 2 * 32),  # relu in torch 1.8
        ("aten::relu", ((8, 4),), "f", 4 * 2 * 32),
        ("aten::gt", ((8, 4), (8, 4)), "ff", 4 * 2 * 32 + 32),  # truth values
        ("aten::div", ((8, 4), (8, 4)), "ii", 8 * 2 * 32 + 2 * 32),  # the default dtype, at least two bytes
        ("aten::abs", ((8, 4),), "z", 8 * 32 + 4 * 32),
        ("aten::add_", ((8, 4), (8, 4)), "bf", 2 * 32 + 4 * 32 + 2 * 32),
        ("aten::maximum", ((8, 4), (4,)), "ff", 4 * (32 + 4 + 32)),
        ("aten::max", ((8, 4), (4,)), "ff", 4 * (32 + 4 + 32)),  # of two tensors
        ("aten::addcmul", ((8, 4), (8, 4), (4,), ()), "fff-", 4 * (32 + 32 + 4 + 32)),
        ("aten::addcmul_", ((8, 4), (8, 4), (8, 4), ()), "fff-", 4 * 3 * 32),  # Adam squares one gradient
        ("aten::gelu_backward", ((8, 4), (8, 4), ()), "ff-", 4 * 3 * 32),
        ("aten::where", ((8, 4), (8, 4), (8, 4)), "?ff", 32 + 4 * 32 + 4 * 32),  # one side may be all of it
        ("aten::where", ((8, 4), (8, 4), ()), "?ff", 32 + 4 * 32),
        ("aten::masked_fill", ((8, 4), (8, 4), ()), "f?f", 32 + 4 * 32),
        ("aten::masked_fill_", ((8, 4), (8, 4), ()), "f?f", 32),
        ("aten::add", (((8, 4), (8, 4)), (8, 4)), "-f", None),
        ("aten::frobnicate", ((8, 4), (8, 4)), "ff", None),
        ("mylib::add", ((8, 4), (8, 4)), "ff", None),
    ],
)
def test_pointwise(name: str, shapes: Any, dtypes: str, expected: float | None) -> None:
    assert moved(name, shapes, dtypes) == expected


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        (((4, 1), (4, 1)), 4 * 3 * 32),
        (((4, 1), (0, 1)), 4 * (32 + 4 + 32)),  # a row that is repeated
        (((0, 0), (0, 1)), 4 * (1 + 4 + 32)),
        (((1, 1), (4, 1)), 4 * (11 + 32 + 32)),  # windows that overlap: 8 + 4 - 1 elements
        (((1, 8), (4, 1)), 4 * 3 * 32),  # a transposed tensor is all there
        (((400, 100), (4, 1)), 4 * 3 * 32),
    ],
)
def test_repeated_and_overlapping_elements_count_once(strides: Any, expected: float) -> None:
    assert moved("aten::add", ((8, 4), (8, 4)), "ff", strides=strides) == expected


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "concrete", "expected"),
    [
        ("aten::mm", ((3, 4), (4, 5), (3, 5)), "bbb", "", 2 * (12 + 20 + 15)),  # out=
        ("aten::addmm", ((3, 5), (3, 4), (4, 5), (), ()), "fff--", "|||0|1", 4 * (12 + 20 + 15)),  # beta 0
        ("aten::addmm_", ((3, 5), (3, 4), (4, 5), (), ()), "fff--", "|||1|1", 4 * (15 + 12 + 20 + 15)),
        ("aten::bmm", ((2, 3, 4), (2, 4, 5)), "ff", "", 4 * 2 * (12 + 20 + 15)),
        ("aten::addbmm", ((3, 5), (2, 3, 4), (2, 4, 5)), "fff", "", 4 * (15 + 24 + 40 + 15)),
        ("aten::mv", ((3, 4), (4,)), "ff", "", 4 * (12 + 4 + 3)),
        ("aten::dot", ((4,), (4,)), "ff", "", 4 * (4 + 4 + 1)),
        ("aten::linear", ((2, 3, 4), (5, 4), (5,)), "fff", "", 4 * (24 + 20 + 5 + 30)),
        ("aten::_int_mm", ((3, 4), (4, 5)), "cc", "", 12 + 20 + 4 * 15),
        ("aten::_scaled_mm", ((3, 4), (4, 5), (1,), (1,)), "88ff", "||||||15|", 12 + 20 + 4 + 4 + 2 * 15),
        # routed to 6 experts: only one expert's weights are read for certain
        ("aten::_grouped_mm", ((30, 4), (6, 4, 5), (6,)), "bb-", "", 2 * (120 + 20 + 150)),
        ("aten::_grouped_mm", ((6, 3, 4), (4, 50), (6,)), "bb-", "", 2 * (72 + 200 + 150)),
        ("aten::_grouped_mm", ((3, 40), (40, 5), (6,)), "bb-", "", 2 * (120 + 200 + 6 * 15)),
    ],
)
def test_products(name: str, shapes: Any, dtypes: str, concrete: str, expected: float) -> None:
    assert moved(name, shapes, dtypes, concrete) == expected


def test_a_product_of_an_expanded_matrix() -> None:
    strides = ((0, 4, 1), (20, 5, 1))
    assert moved("aten::bmm", ((2, 3, 4), (2, 4, 5)), "ff", strides=strides) == 4 * (12 + 40 + 30)


@pytest.mark.parametrize(
    ("constants", "touched"),
    [
        ("[1, 1]|[1, 1]|[1, 1]", 8 * 8),  # everything
        ("[2, 2]|[1, 1]|[1, 1]", 8 * 8),
        ("[4, 4]|[0, 0]|[1, 1]", 6 * 6),  # two windows of three, one place between them
        ("[4, 4]|[1, 1]|[1, 1]", 5 * 5),  # one place of the first window is padding
        ("[2, 2]|[0, 0]|[2, 2]", 4 * 4),  # every second place
        ("[1, 1]|[0, 0]|[2, 2]", 8 * 8),
    ],
)
def test_a_convolution_reads_what_its_windows_touch(constants: str, touched: int) -> None:
    torch = pytest.importorskip("torch")
    stride, padding, dilation = (int(part[1]) for part in constants.split("|"))
    source, weight = torch.ones(1, 1, 8, 8, requires_grad=True), torch.ones(1, 1, 3, 3)
    result = torch.nn.functional.conv2d(source, weight, stride=stride, padding=padding, dilation=dilation)
    result.sum().backward()
    assert int((source.grad != 0).sum()) == touched
    shapes = ((2, 5, 8, 8), (7, 5, 3, 3), ())
    expected = 4 * (2 * 5 * touched + 7 * 5 * 9 + 2 * 7 * result[0, 0].numel())
    assert moved("aten::convolution", shapes, "ff-", f"|||{constants}|False|[0, 0]|1") == expected


def test_convolutions_backward_move_what_is_asked_for() -> None:
    gradient, source, weight = (2, 7, 8, 8), (2, 5, 8, 8), (7, 5, 3, 3)
    g, s, w = (4 * prod(shape) for shape in (gradient, source, weight))
    constants = "|||[7]|[1, 1]|[1, 1]|[1, 1]|False|[0, 0]|1|"
    for flags, expected in (
        ("[True, True, True]", g + s + w + w + s + 4 * 7),
        ("[True, False, False]", g + w + s),
        ("[False, True, False]", g + s + w),
        ("[False, False, True]", g + 4 * 7),
    ):
        shapes = (gradient, source, weight)
        assert moved("aten::convolution_backward", shapes, "fff", constants + flags) == expected


def test_transposed_convolution() -> None:
    shapes, constants = ((2, 5, 4, 4), (5, 7, 2, 2), (7,)), "|||[2, 2]|[0, 0]|[1, 1]|True|[0, 0]|1"
    assert moved("aten::convolution", shapes, "fff", constants) == 4 * (2 * 5 * 16 + 5 * 7 * 4 + 7 + 2 * 7 * 64)


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "concrete", "expected"),
    [
        ("aten::_softmax", ((8, 4), (), ()), "b--", "|-1|False", 2 * 2 * 32),
        ("aten::_softmax", ((8, 4), (), ()), "b--", "|-1|True", 2 * 32 + 4 * 32),
        ("aten::_log_softmax_backward_data", ((8, 4), (8, 4), (), ()), "ff--", "||1|15", 4 * 2 * 32 + 2 * 32),
        ("aten::native_layer_norm", ((8, 4), (), (4,), (4,), ()), "f-ff-", "", 4 * (32 + 4 + 4 + 32)),
        (
            "aten::native_layer_norm_backward",
            ((8, 4), (8, 4), (), (8, 1), (8, 1), (4,), (4,), ()),
            "ff-ffff-",
            "|||||||[True, True, True]",
            4 * (32 + 32 + 8 + 8 + 4 + 32 + 4 + 4),
        ),
        (
            "aten::native_layer_norm_backward",
            ((8, 4), (8, 4), (), (8, 1), (8, 1), (), (), ()),
            "ff-ff---",
            "|||||||[True, False, False]",
            4 * (32 + 32 + 8 + 8 + 32),
        ),
        ("aten::_fused_rms_norm", ((8, 4), (), (4,), ()), "b-b-", "", 2 * (32 + 4 + 32)),
        ("aten::cudnn_batch_norm", ((8, 4, 3), (4,), (4,), (4,), (4,)), "fffff", "", 4 * (96 + 4 + 4 + 96)),
        (
            "aten::native_batch_norm_backward",
            ((8, 4, 3), (8, 4, 3), (4,), (), (), (4,), (4,), (), (), ()),
            "fff--ff---",
            "|||||||True|1e-5|[True, False, False]",
            4 * (96 + 96 + 4 + 4 + 4 + 96),
        ),
        ("aten::native_dropout", ((8, 4), (), ()), "b--", "", 2 * 2 * 32 + 32),
        ("aten::native_dropout_backward", ((8, 4), (8, 4), ()), "b?-", "", 2 * 2 * 32 + 32),
        ("aten::mse_loss", ((8, 4), (8, 4), ()), "ff-", "||1", 4 * 2 * 32),
        ("aten::mse_loss", ((8, 4), (8, 4), ()), "ff-", "||0", 4 * 3 * 32),
        ("aten::mse_loss_backward", ((), (8, 4), (8, 4), ()), "fff-", "", 4 * (1 + 3 * 32)),
        ("aten::nll_loss_forward", ((8, 50257), (8,), ()), "fi-", "", 8 * 8),  # which logits is data
        ("aten::embedding_dense_backward", ((6, 8), (6,), ()), "fi-", "", 4 * 48 + 8 * 6),  # a child clears the table
        ("aten::index_select", ((1000, 8), (), (6,)), "f-i", "|0|", 8 * 6 + 4 * 6 * 8),
        ("aten::index_select", ((1000, 8), (), (6,)), "f-i", "", 8 * 6 + 4 * 6 * 8),  # the longest dimension
        ("aten::gather", ((1000, 8), (), (6, 8)), "f-i", "", 8 * 48 + 4 * 48),
        ("aten::scatter_add", ((1000, 8), (), (6, 8), (6, 8)), "f-if", "", 8 * 48 + 4 * 48),
        ("aten::index_add_", ((1000, 8), (), (6,), (6, 8)), "f-if", "", 8 * 6 + 4 * 48),
        ("aten::index", ((1000, 8), ()), "f-", "", None),  # the indices are not recorded
        ("aten::_to_copy", ((8, 4),), "f", "|15|", 4 * 32 + 2 * 32),
        ("aten::clone", ((8, 4), ()), "f-", "", 4 * 2 * 32),
        ("aten::fill_", ((8, 4), ()), "f-", "", 4 * 32),
        ("aten::zero_", ((8, 4),), "f", "", 4 * 32),
        ("aten::uniform_", ((8, 4), (), ()), "f--", "", 4 * 32),
        ("aten::sum", ((8, 4), (), (), ()), "f---", "|[0]|False|", 4 * (32 + 4)),
        ("aten::sum", ((8, 4), (), (), ()), "f---", "|[-1]|False|15", 4 * 32 + 2 * 8),
        ("aten::argmax", ((8, 4), (), ()), "f--", "|-1|False", 4 * 32 + 8 * 8),
        ("aten::max", ((8, 4), (), ()), "f--", "|1|False", 4 * 32 + 8 * (4 + 8)),
        ("aten::var_mean", ((8, 4), (), (), ()), "f---", "|[1]||False", 4 * (32 + 2 * 8)),
        ("aten::std", ((8, 4), ()), "f-", "|True", 4 * 32),  # `unbiased`: everything is reduced
        ("aten::any", ((8, 4), (), ()), "?--", "|1|False", 32 + 8),
        ("aten::topk", ((8, 4), (), (), (), ()), "f----", "|2|-1|True|True", 4 * 32 + 8 * 2 * (4 + 8)),
        ("aten::sort", ((8, 4), (), ()), "f--", "", 4 * 2 * 32 + 8 * 32),
        ("aten::cumsum", ((8, 4), (), ()), "f--", "", 4 * 2 * 32),
        (
            "aten::max_pool2d_with_indices",
            ((2, 3, 8, 8), (), (), (), (), ()),
            "f-----",
            "|[3, 3]|[2, 2]|[1, 1]|[1, 1]|False",
            4 * 2 * 3 * 64 + (4 + 8) * 2 * 3 * 16,
        ),
        ("aten::avg_pool2d", ((2, 3, 9, 9), *[()] * 6), "f------", "|[2]|[]|[0]|False|True|", 4 * 6 * (64 + 16)),
        ("aten::avg_pool2d", ((2, 3, 9, 9), *[()] * 6), "f------", "|[2]|[]|[0]|True|True|", 4 * 6 * (81 + 25)),
        ("aten::_adaptive_avg_pool2d", ((2, 3, 8, 8), ()), "f-", "|[1, 1]", 4 * 6 * (64 + 1)),
        ("aten::upsample_nearest2d", ((2, 3, 4, 4), (), (), ()), "f---", "|[8, 8]||", 4 * 6 * (16 + 64)),
        ("aten::dropout", ((8, 4), (), ()), "f--", "", 0),  # through others
    ],
)
def test_operators_by_name(name: str, shapes: Any, dtypes: str, concrete: str, expected: float | None) -> None:
    assert moved(name, shapes, dtypes, concrete) == expected


def test_attention_reads_keys_once_for_all_queries_that_share_them() -> None:
    q, kv = (2, 8, 16, 4), (2, 2, 32, 4)
    shapes, constants = (q, kv, kv, (), (), (), ()), "|||0.|False|False|"
    name = "aten::_scaled_dot_product_flash_attention"
    assert moved(name, shapes, "bbb----", constants) == 2 * (2 * prod(q) + 2 * prod(kv))
    # queries begin at the first key: those past the last query are never seen
    assert moved(name, shapes, "bbb----", "|||0.|True|False|") == 2 * (2 * prod(q) + prod(kv))


def test_attention_within_a_window_reads_the_keys_in_it() -> None:
    """One query at the end of a cache of 4096 keys sees 128 before itself and itself."""
    q, kv = (1, 1, 8, 64), (1, 4096, 8, 64)
    shapes = (q, kv, kv, *[()] * 8)
    constants = "|||0.|0.125|True|127|0|0.||False"
    expected = 2 * (2 * prod(q) + 2 * 128 * 8 * 64)
    assert moved("flash_attn::_flash_attn_forward", shapes, "bbb--------", constants) == expected


def test_attention_backward_and_masks() -> None:
    shape, mask = (2, 8, 16, 4), (2, 8, 16, 16)
    name = "aten::_scaled_dot_product_efficient_attention"
    shapes = (shape, shape, shape, mask, (), (), (), ())
    strides = ((512, 64, 4, 1),) * 3 + ((0, 0, 16, 1), (), (), (), ())
    once = 2 * prod(shape)
    assert moved(name, shapes, "bbbb----", "||||False|0.|False|") == 4 * once + 2 * prod(mask)
    assert (
        moved(name, shapes, "bbbb----", "||||False|0.|False|", strides) == 4 * once + 2 * 16 * 16
    )  # one for all heads
    backward = (shape, shape, shape, shape, (), shape, (2, 8, 16))
    constants = "|||||||||0.|[True, True, True, False]|False|"
    assert moved(f"{name}_backward", backward, "bbbb-bf", constants) == 8 * once


def test_lists_of_tensors() -> None:
    pair = ((8, 4), (3,))
    size = 4 * (32 + 3)
    assert moved("aten::_foreach_mul_", (pair, ()), "f-") == 2 * size
    assert moved("aten::_foreach_add", (pair, pair, ()), "ff-") == 3 * size
    assert moved("aten::_foreach_addcmul_", (pair, pair, pair, ()), "fff-") == 3 * size  # Adam's square
    assert moved("aten::_foreach_addcdiv_", (pair, pair, (pair[1], pair[0]), ()), "fff-") == 4 * size
    assert moved("aten::_foreach_norm", (pair, ()), "f-") == size
    assert moved("aten::cat", (pair, ()), "f-", "|0") == 2 * size
    adam = (pair, pair, pair, pair, (), ((), ()))
    assert moved("aten::_fused_adamw_", adam, "ffffff") == 7 * size  # four read, three written
    amsgrad = (pair, pair, pair, pair, pair, ((), ()))
    assert moved("aten::_fused_adam_", amsgrad, "ffffff") == 9 * size
    sgd = (pair, pair, pair, *[()] * 7)
    assert moved("aten::_fused_sgd_", sgd, "fff-------", "|||0|0.9|0.1|0|False|False|False") == 5 * size
    assert moved("aten::_fused_sgd_", sgd, "fff-------", "|||0|0.9|0.1|0|False|False|True") == 4 * size
    # Kineto leaves out the shapes of lists of more than 30 tensors, and the dtype of all
    assert moved("aten::_fused_adamw_", ((),) * 6, "ffffff") is None
    assert moved("aten::_foreach_mul_", (pair, ()), "--") is None


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListMetadata<2>, at::native::(anonymous namespace)::BinaryOpListAlphaFunctor<c10::BFloat16, 2, 2, 0>"
            ", std::plus<float>, float>",
            "bfloat16",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
            "(at::native::ADAM_MODE)1, false>, float const*, double>",
            "float32",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListScalarListMetadata<float, 3>, at::native::(anonymous namespace)::PointwiseOpScalarListFunctor<"
            "c10::Half, 3, 3, 0>, std::divides<float> >",
            "float16",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::(anonymous namespace)::"
            "OpaqueType<2u>, unsigned int, 1, 128, 1, 16, 8>(char*)",
            "uint16",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >", None),
    ],
)
def test_dtype_of_lists_by_their_kernel(kernel: str, dtype: str | None) -> None:
    assert dtype_of_list(kernel) == dtype
    assert with_list_dtype((((3,), (4,)), ()), ("", ""), kernel) == (dtype or "", "")


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "concrete", "expected"),
    [
        # as recorded: names, shapes, and the lengths of the loops behind the tensors
        ("triton_poi_fused_gelu_view_10", ((8192, 8192), (4, 2048, 8192), ()), "bb-", "||67108864", 4 * 8192**2),
        ("triton_poi_fused_mm_3", ((8192, 50257), ()), "b-", "|57344", 0),  # the padding of a large buffer
        (
            "triton_red_fused_add_mean_mul_pow_rsqrt_0",
            ((8, 4096, 2048), (2048,), (8, 4096, 2048), (), ()),
            "bbb--",
            "|||32768|2048",
            2 * (2 * 2**26 + 2048),
        ),
        (  # gathers one logit of each row
            "triton_red_fused__log_softmax_nll_loss_forward_17",
            ((), (4, 2048), (8192, 50264), (8192, 1), (), ()),
            "fibf--",
            "||||1|8192",
            8 * 8192 + 4 * 8192,
        ),
        (  # the table is larger than the loops, the bias may be a slice
            "triton_red_fused_embedding_native_layer_norm_1",
            ((4, 2048, 1), (4, 2048), (50257, 2048), (2048,), (4, 2048, 2048), (), ()),
            "fiffb--",
            "|||||8192|2048",
            4 * 8192 + 8 * 8192 + 2 * 2**24,
        ),
        ("triton_poi_fused_add_0", ((64, 32), (64, 32), (), ()), "ff--", "||7|2048", 4 * 2 * 2048),  # a dynamic size
        ("triton_poi_fused_add_0", ((64, 32), (64, 32)), "ff", "", None),
        ("CompiledFunction", ((64, 32),), "f", "", None),
    ],
)
def test_compiled_kernels(name: str, shapes: Any, dtypes: str, concrete: str, expected: float | None) -> None:
    assert moved(name, shapes, dtypes, concrete) == expected


def test_constants_matter_where_a_formula_reads_them() -> None:
    for name in ("aten::convolution", "aten::addmm", "aten::sum", "aten::_to_copy", "aten::topk", "triton_poi_fused_0"):
        assert reads_constants(name), name
    for name in ("aten::add", "aten::view", "aten::native_layer_norm", "aten::copy_", "mylib::mystery"):
        assert not reads_constants(name), name


def test_pointwise_operators_are_those_torch_tags() -> None:
    torch = pytest.importorskip("torch")
    overloads: dict[str, list[Any]] = {}
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::") or any(argument.is_out for argument in schema.arguments):
            continue
        if any("Tensor" in str(argument.type) for argument in schema.arguments):
            overloads.setdefault(plain_name(schema.name), []).append(schema)
    untagged = set()
    for plain, arity in POINTWISE.items():
        known = [schema for schema in overloads[plain] if "_foreach" not in schema.name]
        assert arity.arguments == max(len(schema.arguments) for schema in known), plain
        assert arity.tensors == max(sum("Tensor" in str(a.type) for a in s.arguments) for s in known), plain
        tags = [torch._C._get_operation_overload(s.name, s.overload_name)[2] for s in known]
        if not any(torch.Tag.pointwise in found for found in tags):
            untagged.add(plain)
    assert all("backward" in name or name in UNTAGGED for name in untagged), untagged


UNTAGGED = set(
    """
    absolute and arctan arctan2 divide floor_divide greater greater_equal hardswish isclose less less_equal
    log_sigmoid_forward multiply negative not_equal or prelu prelu_kernel subtract
    """.split()
)


MIB = 2**20


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "concrete", "flops", "moves"),
    [
        # TraceLens 171dd74, reference reports of its H100 bert-small and MI300X TimeSformer traces. It adds the bias of
        # a product to the operations (141 * 512), and leaves that of the convolution out of the bytes (2 * 768).
        ("aten::addmm", ((512,), (141, 512), (512, 512)), "bbb", "", 0.0739968e9 - 141 * 512, 0.7763671875 * MIB),
        (
            "aten::_scaled_dot_product_flash_attention",
            ((1, 8, 141, 64), (1, 8, 141, 64), (1, 8, 141, 64), (), (), (), ()),
            "bbb----",
            "|||0.|False|False|0.125",
            0.040716288e9,
            0.55078125 * MIB,
        ),
        ("aten::add", ((1, 141, 512), (1, 141, 512), ()), "bb-", "", None, 0.4130859375 * MIB),
        ("aten::bmm", ((96, 3137, 64), (96, 64, 3137)), "bb", "", 120.923369472e9, 1875.4220581054688 * MIB),
        (
            "aten::convolution",
            ((128, 3, 224, 224), (768, 3, 16, 16), (768,), (), (), (), (), (), ()),
            "bbb------",
            "|||[16, 16]|[0, 0]|[1, 1]|False|[0, 0]|1",
            29.595009024e9,
            74.625 * MIB + 2 * 768,
        ),
    ],
)
def test_another_tool_counts_the_same(
    name: str, shapes: Any, dtypes: str, concrete: str, flops: float | None, moves: float
) -> None:
    work = work_of(name, shapes, [DTYPES[letter] for letter in dtypes], concrete.split("|"))
    assert (work.model if work else None) == (None if flops is None else pytest.approx(flops, rel=1e-12))
    assert moved(name, shapes, dtypes, concrete) == pytest.approx(moves, rel=1e-12)
