"""What graph nodes compute: spellings folded into canonical operations, and their meaning in float64 on small arrays.

A rule compares meanings, not names: it evaluates a region of the captured graph on sample values and compares the
result with the operation it would put in its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from advisor.model import Arg, Graph, Node, Ref, Symbol

Array: TypeAlias = npt.NDArray[Any]

SYNONYMS: Mapping[str, str] = {
    "__add__": "add", "iadd": "add", "__iadd__": "add", "__radd__": "add", "add_": "add",
    "__sub__": "sub", "isub": "sub", "__isub__": "sub", "sub_": "sub", "subtract": "sub",
    "__mul__": "mul", "imul": "mul", "__imul__": "mul", "__rmul__": "mul", "mul_": "mul", "multiply": "mul",
    "truediv": "div", "__truediv__": "div", "itruediv": "div", "div_": "div", "true_divide": "div", "divide": "div",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__gt__": "gt", "__rsub__": "rsub",
    "__neg__": "neg", "negative": "neg", "__pow__": "pow", "ipow": "pow", "float_power": "pow",
    "__matmul__": "matmul", "imatmul": "matmul", "bmm": "matmul", "mm": "matmul",
    "_softmax": "softmax", "masked_fill_": "masked_fill", "__getitem__": "getitem", "swapaxes": "transpose",
    "swapdims": "transpose", "float": "to", "half": "to", "bfloat16": "to", "double": "to", "type_as": "to",
    "type": "to",
    "absolute": "abs", "native_dropout": "dropout", "invert": "logical_not", "inv": "logical_not",
    "__invert__": "logical_not", "bitwise_not": "logical_not", "detach_": "detach",
    "linalg_norm": "norm", "linalg_vector_norm": "norm", "vector_norm": "norm",
    "silu_": "silu", "sigmoid_": "sigmoid", "tanh_": "tanh", "special_erf": "erf", "special_erfc": "erfc",
    "concat": "cat", "concatenate": "cat", "as_tensor": "tensor", "scalar_tensor": "tensor", "clamp_min": "clamp",
}  # fmt: skip

TRANSPARENT = frozenset({"to", "contiguous", "clone_"})  # change storage or precision, not the value


@functools.lru_cache(maxsize=4096)
def canonical(target: str) -> str:
    """The canonical operation of a node target: "operator.truediv" and "method.div" are both "div"."""
    name = target.rsplit(".", 1)[-1] if not target.startswith("torch.ops.") else target.split(".")[3]
    return SYNONYMS.get(name, name)


def operation(node: Node) -> str:
    """The canonical operation of a node; placeholders, attributes and outputs are their own kind."""
    return canonical(node.target) if node.op.startswith("call_") else node.op


REARRANGES = frozenset(  # select elements of one tensor or give it another shape
    "getitem view reshape transpose permute unsqueeze squeeze expand flatten unflatten chunk split getattr".split()
)
IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ipow", "imatmul"})


def in_place(node: Node) -> bool:
    """Whether a call writes into its first argument and returns it."""
    name = node.target.rsplit(".", 1)[-1]
    return node.op.startswith("call_") and (name in IN_PLACE or (name.endswith("_") and not name.endswith("__")))


class NotModelled(Exception):
    """A region reads a value that is not bound, or contains an operation without a meaning here."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(f"{why} ({node.target})")
        self.node = node


def evaluate(
    graph: Graph, root: int, bound: Mapping[int, Array], limit: int = 64, through: frozenset[int] = frozenset()
) -> Array:
    """Value of node `root` when the nodes in `bound` have the given float64 values.

    Nodes in `through` pass their first argument on: dropout, where the caller accounts for it. Dropout has no meaning
    of its own here, so that no search takes it for part of a function.

    Raises `NotModelled` when the region between `root` and the bound nodes is not closed, contains an operation that
    has no meaning here, or has more than `limit` nodes.
    """
    known: dict[int, Any] = dict(bound)

    def value(index: int) -> Any:
        if index in known:
            return known[index]
        node = graph.nodes[index]
        if index in through:
            known[index] = resolve(node.args[0])
            return known[index]
        if len(known) > limit:
            raise NotModelled(node, "the region is too large")
        meaning = MEANINGS.get(operation(node))
        if meaning is None:
            raise NotModelled(node, "not part of a closed region")
        arguments = [resolve(arg) for arg in node.args]
        keywords = {name: resolve(arg) for name, arg in node.kwargs.items()}
        try:
            known[index] = meaning(*arguments, **keywords)
        except (TypeError, ValueError, IndexError) as error:
            raise NotModelled(node, f"arguments are not understood: {error}") from error
        return known[index]

    def resolve(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return value(arg.index)
        if isinstance(arg, tuple):
            return tuple(resolve(item) for item in arg)
        if isinstance(arg, Symbol) and arg.kind == "slice":
            return slice(*(resolve(part) for part in arg.parts))
        return arg

    with np.errstate(all="ignore"):
        return np.asarray(value(root))


def same(left: Array, right: Array, relative: float = 1e-9) -> bool:
    """Whether two float64 results agree everywhere, NaN never agreeing, relative to the largest magnitude."""
    if left.shape != right.shape or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return False
    scale = max(float(np.abs(right).max(initial=0.0)), 1e-300)
    return bool(np.abs(left - right).max(initial=0.0) <= relative * scale)


# ------------------------------------------------------------------------------------------------------------ meanings


def _axes(dim: Any, default: Any = None) -> Any:
    return default if dim is None else (tuple(dim) if isinstance(dim, tuple) else dim)


def _mean(x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return np.asarray(np.mean(x, axis=_axes(dim), keepdims=keepdim))


def _sum(x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return np.asarray(np.sum(x, axis=_axes(dim), keepdims=keepdim))


def _var(x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None) -> Array:
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    ddof = correction if correction is not None else (1 if unbiased in (None, True) else 0)
    return np.asarray(np.var(x, axis=_axes(dim), ddof=ddof, keepdims=keepdim))


def _std(x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None) -> Array:
    return np.sqrt(_var(x, dim, unbiased, keepdim, correction))


def _softmax(x: Array, dim: int = -1, *_ignored: Any, dtype: Any = None, **_more: Any) -> Array:
    shifted = np.exp(x - np.max(x, axis=dim, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=dim, keepdims=True))


def _where(condition: Array, kept: Any, other: Any) -> Array:
    return np.asarray(np.where(condition, kept, other))


def _pow(base: Any, exponent: Any) -> Array:
    return np.asarray(np.power(np.asarray(base, dtype=np.float64), exponent))


def _arithmetic(function: Callable[..., Any], reverse: bool = False) -> Callable[..., Any]:
    def apply(left: Any, right: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> Any:
        if rounding_mode is not None:
            raise ValueError("rounding division")
        right = right * alpha if alpha != 1 else right
        return function(right, left) if reverse else function(left, right)

    return apply


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x: function(x)


def _keep(x: Array, *_args: Any, **_kwargs: Any) -> Array:
    return x


def erf(x: Array) -> Array:
    """The error function, elementwise."""
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _erfc(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erfc, otypes=[np.float64])(x))


def _norm(x: Array, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = None, dtype: Any = None) -> Array:
    """The Euclidean length along one axis; other norms have no meaning here."""
    degree = p if ord is None else ord
    axis = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    if degree not in (2, "fro", None) or not isinstance(axis, int):
        raise ValueError("not a Euclidean norm over one axis")
    return np.asarray(np.sqrt(np.sum(np.abs(x) ** 2, axis=axis, keepdims=keepdim)))


def _normalize(x: Array, p: Any = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Array:
    return np.asarray(x / np.maximum(_norm(x, p, dim, True), eps))


def _clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    """A lower bound alone: an upper one may lie beyond every sample."""
    if min is None or max is not None:
        raise ValueError("not a lower bound")
    return np.asarray(np.maximum(x, min))


def _tensor(value: Any, *_args: Any, **_kwargs: Any) -> Array:
    return np.asarray(value, dtype=np.float64)


def _gelu(x: Array, approximate: str = "none") -> Array:
    return gelu_tanh(x) if approximate == "tanh" else gelu_erf(x)


def _getitem(x: Any, item: Any) -> Any:
    return x[item]


def _attribute(x: Any, name: str) -> Any:
    if name != "mT":
        raise ValueError(f"the attribute {name}")
    return np.swapaxes(x, -1, -2)


def _chunk(x: Array, chunks: int, dim: int = 0) -> tuple[Array, ...]:
    size = -(-x.shape[dim] // chunks)
    return tuple(np.split(x, range(size, x.shape[dim], size), axis=dim))


def _split(x: Array, split_size: Any, dim: int = 0) -> tuple[Array, ...]:
    ends = np.cumsum(split_size)[:-1] if isinstance(split_size, tuple) else range(split_size, x.shape[dim], split_size)
    return tuple(np.split(x, ends, axis=dim))


def _unbind(x: Array, dim: int = 0) -> tuple[Array, ...]:
    return tuple(np.moveaxis(x, dim, 0))


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape((*x.shape[:start], -1, *x.shape[end + 1 :]))


def _unflatten(x: Array, dim: int, sizes: tuple[int, ...]) -> Array:
    dim %= x.ndim
    return x.reshape((*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def _view_as_complex(x: Array) -> Array:
    return np.asarray(x[..., 0] + 1j * x[..., 1])


def _view_as_real(x: Array) -> Array:
    return np.stack((x.real, x.imag), axis=-1)


def _both(spread: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """torch.var_mean and torch.std_mean: a spread and the mean of the same axes."""

    def apply(x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None) -> Any:
        return spread(x, dim, unbiased, keepdim, correction), _mean(x, dim, keepdim)

    return apply


MEANINGS: Mapping[str, Callable[..., Any]] = {
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "rsub": _arithmetic(np.subtract, reverse=True),
    "mul": _arithmetic(np.multiply),
    "div": _arithmetic(np.divide),
    "pow": _pow,
    "neg": _unary(np.negative),
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: 1.0 / np.sqrt(x)),
    "reciprocal": _unary(lambda x: 1.0 / x),
    "square": _unary(np.square),
    "abs": _unary(np.abs),
    "exp": _unary(np.exp),
    "log": _unary(np.log),
    "tanh": _unary(np.tanh),
    "erf": _unary(erf),
    "sigmoid": _unary(lambda x: 1.0 / (1.0 + np.exp(-x))),
    "mean": _mean,
    "sum": _sum,
    "var": _var,
    "std": _std,
    "softmax": _softmax,
    "where": _where,
    "masked_fill": lambda x, mask, value: np.where(mask, value, x),
    "logical_not": _unary(np.logical_not),
    "eq": _arithmetic(np.equal),
    "ne": _arithmetic(np.not_equal),
    "matmul": _arithmetic(np.matmul),
    "transpose": lambda x, first, second: np.swapaxes(x, first, second),
    "to": _keep,
    "contiguous": _keep,
    "erfc": _unary(_erfc),
    "silu": lambda x, inplace=False: x / (1.0 + np.exp(-x)),
    "gelu": _gelu,
    "norm": _norm,
    "normalize": _normalize,
    "clamp": _clamp,
    "maximum": _arithmetic(np.maximum),
    "var_mean": _both(_var),
    "std_mean": _both(_std),
    "tensor": _tensor,
    "getitem": _getitem,
    "getattr": _attribute,
    "einsum": lambda equation, *operands: np.einsum(equation.replace(" ", ""), *operands),
    "baddbmm": lambda x, a, b, beta=1, alpha=1: alpha * (a @ b) + (beta * x if beta else 0.0),
    "permute": lambda x, *dims: np.transpose(x, dims[0] if len(dims) == 1 else dims),
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
    "cat": lambda tensors, dim=0: np.concatenate(tensors, axis=dim),
    "stack": lambda tensors, dim=0: np.stack(tensors, axis=dim),
    "unsqueeze": lambda x, dim: np.expand_dims(x, dim),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
}


def gelu_tanh(x: Array) -> Array:
    """GELU, tanh approximation (Hendrycks and Gimpel 2016): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))


def gelu_erf(x: Array) -> Array:
    """GELU (Hendrycks and Gimpel 2016): 0.5 x (1 + erf(x / sqrt(2)))."""
    return np.asarray(0.5 * x * (1.0 + erf(x / math.sqrt(2.0))))


def quick_gelu(x: Array) -> Array:
    """The sigmoid approximation of GELU (Hendrycks and Gimpel 2016, section 2): x sigmoid(1.702 x)."""
    return np.asarray(x / (1.0 + np.exp(-1.702 * x)))


def silu(x: Array) -> Array:
    """SiLU, also called swish (Elfwing et al. 2018): x sigmoid(x)."""
    return np.asarray(x / (1.0 + np.exp(-x)))


def rms_norm(x: Array, weight: Array | None, eps: float, axes: tuple[int, ...] = (-1,), outside: bool = False) -> Array:
    """RMSNorm over `axes` (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps), times a weight.

    `outside` gives a look-alike that is not it: eps added to the root instead of the mean square.
    """
    square = np.mean(x**2, axis=axes, keepdims=True)
    result: Array = x / (np.sqrt(square) + eps if outside else np.sqrt(square + eps))
    return result if weight is None else result * weight


def layer_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    ddof: int = 0,
    outside: bool = False,
    axes: tuple[int, ...] = (-1,),
) -> Array:
    """LayerNorm over `axes` (Ba et al. 2016); `ddof` and `outside` give the look-alikes that are not it.

    `ddof=1` divides the variance by N-1, `outside` adds eps to the standard deviation instead of the variance.
    """
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = x.var(axis=axes, ddof=ddof, keepdims=True)
    spread = np.sqrt(variance) + eps if outside else np.sqrt(variance + eps)
    result: Array = centred / spread
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


def rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary position embedding (Su et al. 2021): pairs (a, b) of the last axis become (a cos - b sin, b cos + a sin).

    `interleaved` pairs neighbours (2i, 2i+1), else the halves (i, i + D/2). The tables hold one angle per pair or, in
    the layout of `x`, each angle twice.
    """
    half = x.shape[-1] // 2
    first = x[..., 0::2] if interleaved else x[..., :half]
    second = x[..., 1::2] if interleaved else x[..., half:]
    left, right = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    wide = cos.shape[-1] == x.shape[-1]
    a = first * (cos[..., left] if wide else cos) - second * (sin[..., left] if wide else sin)
    b = second * (cos[..., right] if wide else cos) + first * (sin[..., right] if wide else sin)
    if interleaved:
        return np.stack((a, b), axis=-1).reshape(x.shape)
    return np.concatenate((a, b), axis=-1)


def attention(q: Array, k: Array, v: Array, scale: float, bias: Array | float = 0.0) -> Array:
    """softmax(q k^T scale + bias) v, a bias of -inf removing a pair; shapes (..., T, D)."""
    scores = (q @ np.swapaxes(k, -2, -1)) * scale + bias
    return np.asarray(_softmax(scores) @ v)
