"""What graph nodes compute: spellings folded into canonical operations, and their meaning in float64 on small arrays.

A rule compares meanings, not names: it evaluates a region of the captured graph on sample values and compares the
result with the operation it would put in its place.
"""

from __future__ import annotations

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
}  # fmt: skip

TRANSPARENT = frozenset({"to", "contiguous", "clone_"})  # change storage or precision, not the value


def canonical(target: str) -> str:
    """The canonical operation of a node target: "operator.truediv" and "method.div" are both "div"."""
    name = target.rsplit(".", 1)[-1] if not target.startswith("torch.ops.") else target.split(".")[3]
    return SYNONYMS.get(name, name)


def operation(node: Node) -> str:
    """The canonical operation of a node; placeholders, attributes and outputs are their own kind."""
    return canonical(node.target) if node.op.startswith("call_") else node.op


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
}


def gelu_tanh(x: Array) -> Array:
    """GELU, tanh approximation (Hendrycks and Gimpel 2016): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))


def layer_norm(
    x: Array, weight: Array | None, bias: Array | None, eps: float, ddof: int = 0, outside: bool = False
) -> Array:
    """LayerNorm over the last axis (Ba et al. 2016); `ddof` and `outside` give the look-alikes that are not it.

    `ddof=1` divides the variance by N-1, `outside` adds eps to the standard deviation instead of the variance.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = x.var(axis=-1, ddof=ddof, keepdims=True)
    spread = np.sqrt(variance) + eps if outside else np.sqrt(variance + eps)
    result: Array = centred / spread
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


def attention(q: Array, k: Array, v: Array, scale: float, keep: Array | None = None) -> Array:
    """softmax(q k^T scale) v with the pairs outside `keep` removed; shapes (..., T, D)."""
    scores = (q @ np.swapaxes(k, -2, -1)) * scale
    if keep is not None:
        scores = np.where(keep, scores, -np.inf)
    return np.asarray(_softmax(scores) @ v)
