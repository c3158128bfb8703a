"""The dtype of tensor lists, which a trace records without one, from the name of the kernel that worked on them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from advisor.operators.calls import Entries, is_list

_FOREACH = re.compile(r"multi_tensor_apply_kernel<.*?Functor<\s*(?P<type>[\w:<>]+?)\s*[,>]")
_CAT = re.compile(r"CatArrayBatchedCopy\w*<[^<]*?OpaqueType<(?P<bytes>\d+)u?>")
_TYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
}
_OPAQUE = {"1": "uint8", "2": "uint16", "4": "uint32", "8": "uint64", "16": "complex128"}


def dtype_of_list(kernel: str) -> str | None:
    """The dtype of the lists that a `_foreach_`, fused optimizer or `cat` kernel worked on; None for other kernels.

    `cat` copies elements without knowing what they are: the dtype then only has their width.
    """
    if found := _FOREACH.search(kernel):
        return _TYPES.get(found["type"])
    found = _CAT.search(kernel)
    return _OPAQUE.get(found["bytes"]) if found else None


def with_list_dtype(shapes: Entries, dtypes: Sequence[str], kernel: str) -> tuple[str, ...]:
    """The dtypes of a call's inputs with those of its lists filled in from one of its kernels."""
    known = dtype_of_list(kernel) or ""
    return tuple(
        dtype or (known if place < len(shapes) and is_list(shapes[place]) else "") for place, dtype in enumerate(dtypes)
    )
