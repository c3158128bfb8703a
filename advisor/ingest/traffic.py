"""The family of a recorded operator call and the least memory traffic its recorded inputs imply."""

from __future__ import annotations

import math
from itertools import pairwise

from advisor.model import Operators

BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
_VIEW_NAMES = (
    "alias as_strided chunk detach diagonal expand expand_as flatten lift_fresh movedim narrow numpy_T permute"
    " ravel reshape reshape_alias resolve_conj resolve_neg select slice split split_with_sizes squeeze swapaxes t"
    " transpose unbind unfold unflatten unsafe_chunk unsafe_split unsafe_view unsqueeze view view_as to"
    " empty empty_like empty_strided new_empty new_empty_strided result_type item local_scalar_dense is_nonzero"
    " can_cast broadcast_tensors set resize"
)
VIEWS = frozenset(_VIEW_NAMES.split())
_EXACT = {
    name: family
    for family, names in {
        "matmul": "mm bmm addmm baddbmm addbmm mv addmv dot matmul linear einsum scaled_mm grouped_mm addmm_activation",
        "reduction": "sum mean var var_mean std std_mean amax amin max min argmax argmin any all cumsum prod logsumexp"
        " linalg_vector_norm norm",
        "indexing": "index index_select gather scatter scatter_add index_put index_add select_backward slice_backward"
        " where_index nonzero masked_select roll",
        "copy": "copy clone contiguous to_copy cat stack constant_pad_nd pin_memory",
        "fill": "fill zero zeros zeros_like ones ones_like full arange new_zeros",
        "random": "bernoulli normal uniform randn rand randperm random",
    }.items()
    for name in names.split()
}
_CONTAINED = (
    ("attention", "attention"),
    ("conv", "convolution"),
    ("softmax", "softmax"),
    ("norm", "normalization"),
    ("embedding", "indexing"),
    ("loss", "loss"),
    ("cross_entropy", "loss"),
    ("dropout", "dropout"),
    ("pool", "pooling"),
    ("rnn", "recurrent"),
    ("lstm", "recurrent"),
    ("gru", "recurrent"),
)


def family(name: str) -> str:
    """The family of an operator by its name.

    "view" moves no data, "compiled" is code a compiler made.

    "custom" are operators and autograd functions that torch does not bring.
    """
    if name.startswith("triton_"):
        return "compiled"
    if name.startswith(("nccl:", "c10d::", "gloo:", "record_param_comms")):
        return "communication"
    if not name.startswith("aten::"):
        if "Backward" in name or "autograd::" in name:
            return "autograd"
        return "view" if name in ("detach", "detach_") else "custom"
    plain = name[6:].strip("_")
    if plain in VIEWS:
        return "view"
    if plain in _EXACT:
        return _EXACT[plain]
    return next((kind for part, kind in _CONTAINED if part in plain), "elementwise")


def least_bytes(name: str, kind: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> float | None:
    """Bytes a call moves at least: inputs once and, where its size follows from them, the output once.

    A lower bound: outputs of reductions and convolutions and the tables of look-ups are left out. None where the inputs
    were not recorded.
    """
    sizes = [math.prod(s) * BYTES[d] for s, d in zip(shapes, dtypes, strict=False) if d in BYTES]
    if not sizes:
        return None
    total, largest = float(sum(sizes)), float(max(sizes))
    if kind in ("view", "autograd", "communication") or name == "aten::dropout":  # which moves data through others
        return 0.0
    if kind == "matmul":
        return total + _product_bytes(shapes, dtypes)
    if kind == "indexing" or "nll_loss" in name:
        return total - largest
    if kind in ("reduction", "convolution", "loss", "compiled") or name in (
        "aten::copy_",
        "aten::fill_",
        "aten::zero_",
    ):
        return total
    return total + (sizes[0] if name.endswith("_") else largest)


def _product_bytes(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> float:
    """Bytes of a matrix product's result, from its last two inputs that are matrices."""
    matrices = [(s, d) for s, d in zip(shapes, dtypes, strict=False) if len(s) >= 2 and d in BYTES]
    pairs = [(left, right) for left, right in pairwise(matrices) if left[0][-1] == right[0][-2]]
    if not pairs:
        return 0.0
    (left, dtype), (right, _) = pairs[0]
    return float(math.prod(left[:-1]) * right[-1] * BYTES[dtype])


def families(operators: Operators) -> tuple[str, ...]:
    """The family of every row."""
    known = {name: family(name) for name in set(operators.name)}
    return tuple(known[name] for name in operators.name)


def traffic(operators: Operators, kinds: tuple[str, ...]) -> tuple[float | None, ...]:
    """`least_bytes` of every row."""
    return tuple(
        least_bytes(name, kind, shapes, dtypes)
        for name, kind, shapes, dtypes in zip(operators.name, kinds, operators.shapes, operators.dtypes, strict=True)
    )
