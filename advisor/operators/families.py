"""The family of a recorded operator call, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_VIEW_NAMES = """
adjoint alias as_strided broadcast_tensors broadcast_to can_cast chunk conj detach diagonal dsplit empty empty_like
empty_strided expand expand_as flatten has_compatible_shallow_copy_type hsplit imag is_nonzero is_pinned is_same_size
item lift lift_fresh local_scalar_dense matrix_H mH mT moveaxis movedim narrow new_empty new_empty_strided numpy_T
permute ravel real record_stream reshape reshape_alias resize resolve_conj resolve_neg result_type select set slice
split split_with_sizes squeeze swapaxes swapdims t tensor_split to transpose unbind unflatten unflatten_dense_tensors
unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsafe_view unsqueeze view view_as view_as_complex
view_as_real vsplit
"""
VIEWS = frozenset(_VIEW_NAMES.split())


class Arity(NamedTuple):
    """Most arguments and most tensors among them that a plain call of a pointwise operator takes."""

    arguments: int
    tensors: int


# The operators that torch tags as pointwise (`native_functions.yaml`), and the few activations and their backward
# operators that it leaves untagged; names without the underscores of in-place and internal variants.
_POINTWISE = {
    (1, 1): """
abs absolute acos acosh angle arctan asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad digamma erf
erfc erfinv exp exp2 expm1 floor frac frexp hardsigmoid hardswish i0 isfinite isinf isnan isneginf isposinf lgamma log
log10 log1p log2 log_sigmoid_forward logical_not mish neg negative positive rad2deg reciprocal relu relu6 rsqrt selu
sgn sigmoid sign signbit silu sin sinc sinh sqrt square tan tanh trunc
""",
    (2, 1): "celu gelu hardshrink leaky_relu logit polygamma round softshrink",
    (2, 2): """
and arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp_max clamp_min copysign
eq float_power floor_divide fmax fmin fmod gcd ge greater greater_equal gt hardsigmoid_backward hardswish_backward
heaviside hypot igamma igammac ilshift ixor lcm ldexp le less less_equal logaddexp logaddexp2 logical_and logical_or
logical_xor lshift lt maximum minimum mish_backward mul multiply ne nextafter not_equal or pow prelu prelu_kernel
remainder rshift sigmoid_backward silu_backward tanh_backward true_divide xlogy xor
""",
    (3, 1): "hardtanh softplus threshold",
    (3, 2): """
add div divide gelu_backward hardshrink_backward logit_backward native_dropout_backward rsub softshrink_backward sub
subtract threshold_backward
""",
    (3, 3): "clamp clip lerp log_sigmoid_backward",
    (4, 1): "elu nan_to_num",
    (4, 2): "hardtanh_backward leaky_relu_backward softplus_backward",
    (4, 3): "addcdiv addcmul",
    (5, 2): "isclose",
    (6, 2): "elu_backward",
}
POINTWISE: Mapping[str, Arity] = {name: Arity(*arity) for arity, names in _POINTWISE.items() for name in names.split()}
_NAMES = {
    "matmul": """
addbmm addmm addmm_activation addmv baddbmm bilinear bmm chain_matmul dot einsum grouped_mm int_mm linalg_multi_dot
linear matmul mm mv scaled_grouped_mm scaled_mm tensordot trilinear vdot weight_int4pack_mm weight_int8pack_mm
""",
    "reduction": """
all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum dist frobenius_norm
linalg_matrix_norm linalg_norm linalg_vector_norm logcumsumexp logsumexp max mean median min mode nanmean nansum
native_norm norm norm_except_dim nuclear_norm prod renorm std std_mean sum trace var var_mean
""",
    "sorting": "argsort kthvalue msort sort topk unique unique2 unique_consecutive unique_dim",
    "indexing": """
bincount bucketize gather gather_backward index index_add index_copy index_fill index_put index_put_impl index_reduce
index_select isin masked_scatter masked_select nonzero one_hot put repeat_interleave roll scatter scatter_add
scatter_reduce searchsorted select_backward slice_backward take take_along_dim unfold_backward
value_selecting_reduction_backward where_index
""",
    "copy": """
cat clone concat concatenate constant_pad_nd contiguous copy flatten_dense_tensors flip pad pin_memory pixel_shuffle
pixel_unshuffle repeat rot90 select_scatter slice_scatter stack tile to_copy tril triu type_as
""",
    "fill": """
arange eye fill fill_diagonal full full_like linspace logspace new_full new_ones new_zeros ones ones_like scalar_tensor
tril_indices triu_indices zero zeros zeros_like
""",
    "random": """
bernoulli cauchy exponential geometric log_normal multinomial normal normal_functional poisson rand rand_like randint
randint_like randn randn_like random randperm uniform
""",
    "optimizer": "fused_adagrad fused_adam fused_adamw fused_sgd",
    "elementwise": """
amp_foreach_non_finite_check_and_unscale amp_update_scale diff masked_fill s_where where
""",
}
_EXACT = {name: family for family, names in _NAMES.items() for name in names.split()}
_EXACT |= dict.fromkeys(POINTWISE, "elementwise")
_CONTAINED = tuple(
    (re.compile(pattern), family)
    for pattern, family in (
        ("attention", "attention"),
        (r"conv(?!ert)", "convolution"),
        ("softmax", "softmax"),
        ("norm", "normalization"),
        ("embedding", "indexing"),
        ("loss|cross_entropy", "loss"),
        ("dropout", "dropout"),
        ("pool", "pooling"),
        ("upsample|grid_sampler", "resampling"),
        ("rnn|lstm|gru", "recurrent"),
        ("^special_", "elementwise"),
    )
)
# Operators that torch does not bring, by what their authors call them; the first pattern found decides.
_ELSEWHERE = tuple(
    (re.compile(pattern, re.IGNORECASE), family)
    for pattern, family in (
        (r"all_?reduce|all_?gather|reduce_?scatter|all_?(to|2)_?all", "communication"),
        (r"attn|attention|(^|_)f?mha(_|$)|sdpa", "attention"),
        (r"norm", "normalization"),
        (r"rotary|(^|_)rope(_|$)|silu|gelu|swiglu|geglu", "elementwise"),
        (r"gemm|matmul|(^|_)mm(_|$)|(^|_)linear(_|$)|fused_moe", "matmul"),
        (r"embedding|embs|permute|gather|scatter|index|indices|bucketize", "indexing"),
        (r"cumsum", "reduction"),
        (r"quantized|(^|_)copy(_|$)|(^|_)kv_|store_cache|reshape_and_cache", "copy"),
    )
)
_COMMUNICATION = ("nccl:", "gloo:", "c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_COMPILED = frozenset({"CompiledFunction", "CompiledFunctionBackward", "<forward op>", "<backward op>"})


def plain_name(name: str) -> str:
    """An `aten` operator's name without the marks of in-place, internal and list variants."""
    return name.removeprefix("aten::").strip("_").removeprefix("foreach_")


def family(name: str) -> str:
    """The family of an operator by its name.

    "view" moves no data, "compiled" is code a compiler made, "optimizer" an update that is one operator.

    "custom" are operators and autograd functions that torch does not bring and whose names do not say what they do,
    "other" are operators of torch without a family.
    """
    if name.startswith("triton_") or name in _COMPILED or name.endswith("DifferentiableGraphBackward"):
        return "autograd" if name.startswith("autograd::") else "compiled"
    if name.startswith(_COMMUNICATION) or name == "record_param_comms":
        return "communication"
    if name.startswith("aten::"):
        return _of_torch(plain_name(name))
    if name in ("detach", "detach_"):
        return "view"
    if "autograd::" in name or ("Backward" in name and "::" not in name):
        return "autograd"
    return _of_others(name)


def _of_torch(plain: str) -> str:
    if plain in VIEWS:
        return "view"
    if plain in _EXACT:
        return _EXACT[plain]
    return next((found for pattern, found in _CONTAINED if pattern.search(plain)), "other")


def _of_others(name: str) -> str:
    space, _, plain = name.rpartition("::")
    if space.startswith("torch") and space.endswith("reducer"):  # gradient buckets of DistributedDataParallel
        return "copy" if "copy" in plain else "elementwise"
    if "#" in name or " " in name:  # a named range, not an operator
        return "custom"
    return next((found for pattern, found in _ELSEWHERE if pattern.search(plain)), "custom")


ARITHMETIC = frozenset({"matmul", "convolution", "attention", "recurrent"})  # families that FLOPs are counted of
TEMPLATES = ("triton_tem_", "triton_mm", "triton_bmm", "triton_conv", "triton_flex")  # products a compiler wrote itself


def may_multiply(name: str, kind: str) -> bool:
    """Whether a call of family `kind` computes products, or may: a custom operator and a compiler's template can."""
    return kind in ARITHMETIC or kind == "custom" or name.startswith(TEMPLATES)
