"""Families and least traffic of operators."""

from __future__ import annotations

import pytest

from advisor.ingest.traffic import family, least_bytes


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
        ("flash_attn::_flash_attn_forward", "custom"),
    ],
)
def test_families(name: str, expected: str) -> None:
    assert family(name) == expected


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "expected"),
    [
        ("aten::mul", ((8, 4), (4,)), ("float32", "float32"), 4 * (32 + 4 + 32)),
        ("aten::mul_", ((8, 4), (4,)), ("float32", "float32"), 4 * (32 + 4 + 32)),
        ("aten::sum", ((8, 4), ()), ("bfloat16", ""), 2 * 32),
        ("aten::copy_", ((8, 4), (8, 4), ()), ("bfloat16", "float32", ""), 6 * 32),
        ("aten::mm", ((3, 4), (4, 5)), ("bfloat16", "bfloat16"), 2 * (12 + 20 + 15)),
        ("aten::addmm", ((5,), (3, 4), (4, 5)), ("float32",) * 3, 4 * (5 + 12 + 20 + 15)),
        ("aten::embedding", ((1000, 8), (4, 2)), ("float32", "int64"), 8 * 8),
        ("aten::transpose", ((8, 4), (), ()), ("float32", "", ""), 0),
        ("aten::add", ((), ()), ("", ""), None),
    ],
)
def test_least_bytes(name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], expected: float) -> None:
    assert least_bytes(name, family(name), shapes, dtypes) == expected
