"""What bfloat16 autocast would make of the operations of a captured graph: which values become bfloat16, and what fails
or is rounded there that is not meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.model import Graph, Node, Ref, Symbol
from advisor.semantics import REARRANGES

# What autocast on CUDA computes in bfloat16 and what in float32 (ATen/autocast_mode.h), by the names of the language.
LOWER = frozenset(
    "linear matmul imatmul mm bmm addmm addbmm baddbmm addmv addr mv chain_matmul multi_dot vecdot einsum conv1d conv2d"
    " conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu scaled_dot_product_attention"
    " multi_head_attention_forward".split()
)
UPPER = frozenset(
    "acos asin cosh erfinv square exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow ipow rpow rtruediv"
    " softplus layer_norm rms_norm group_norm norm vector_norm matrix_norm cosine_similarity poisson_nll_loss"
    " cosine_embedding_loss cross_entropy nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss"
    " mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss"
    " binary_cross_entropy_with_logits dist pdist cdist renorm prod softmax softmin log_softmax cumprod cumsum sum"
    " interpolate gaussian_nll_loss".split()
)
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
TO = frozenset("to type type_as float double half bfloat16".split())
SAME_DTYPE = frozenset(  # operations that raise where the tensors they are given differ in dtype
    "index_add index_add_ index_copy index_copy_ index_put_ scatter scatter_ scatter_add_ scatter_reduce"
    " scatter_reduce_ masked_scatter masked_scatter_ put_ lerp lerp_ index_reduce_ searchsorted"
    " bucketize".split()
)
NO_BFLOAT16 = frozenset(
    "view_as_complex polar complex quantile nanquantile histc numpy inverse cholesky svd qr det slogdet"
    " ctc_loss".split()
)
NO_BFLOAT16_IN = ("torch.fft.", "torch.linalg.", "torch._C._fft.", "torch._C._linalg.")
LINALG = frozenset("norm vector_norm matrix_norm multi_dot vecdot".split())  # of torch.linalg, those that take it


@dataclass(frozen=True)
class Hazard:
    """An operation that would fail, or would round what must stay exact, and why."""

    node: Node
    why: str


def name_of(node: Node) -> str:
    """The last part of what a node calls, without the underscores of a special method."""
    last = node.target.rsplit(".", 1)[-1]
    return last.strip("_") if last.startswith("__") else last.lstrip("_")


def is_product(node: Node) -> bool:
    """Whether autocast computes an operation in bfloat16: a matrix product, a convolution, attention."""
    return node.op.startswith("call_") and name_of(node) in LOWER


def hazards(graph: Graph) -> Iterator[Hazard]:
    """What of a graph would fail under autocast, or round the loss."""
    low: set[int] = set()
    gradients = True
    for node in graph.nodes:
        name = name_of(node)
        if name == "set_grad_enabled" and node.args:
            gradients = bool(node.args[0])
        given = [graph.nodes[i] for i in node.inputs()]
        if is_product(node) and not gradients and any(_is_trained(n) for n in given):
            yield Hazard(node, "a weight is used without gradients, and autocast would keep that copy of it")
        if name in RECURRENT and node.op.startswith("call_") and node.dtype in (None, "float32"):
            yield Hazard(node, "autocast computes recurrent layers in float16, which needs a GradScaler")
        problem = _problem(node, name, given, low)
        if problem is not None:
            yield Hazard(node, problem)
        if _is_low(node, name, given, low):
            low.add(node.index)
            if node.shape == () and node.requires_grad and name not in REARRANGES and node.op != "placeholder":
                yield Hazard(node, "a scalar that is differentiated would be rounded to bfloat16")


def _is_trained(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr") and node.requires_grad and node.facts.get("origin") == "state"


def _problem(node: Node, name: str, given: Sequence[Node], low: set[int]) -> str | None:
    lowered = [n for n in given if n.index in low]
    if not lowered or not node.op.startswith("call_"):
        return None
    mixed = [n for n in given if n.dtype == "float32" and n.index not in low]
    last = node.target.rsplit(".", 1)[-1]
    if last in SAME_DTYPE and mixed:
        return "its arguments would differ in dtype"
    if name == "setitem" and len(node.args) > 1 and _has_tensor(node.args[1]):
        target, value = node.args[0], node.args[2] if len(node.args) > 2 else None
        if isinstance(target, Ref) and isinstance(value, Ref) and (target.index in low) != (value.index in low):
            return "the value would differ in dtype from what it is written into"
    foreign = node.target.startswith(NO_BFLOAT16_IN) and name.removeprefix("linalg_") not in LINALG
    if last in NO_BFLOAT16 or foreign:
        return "it takes no bfloat16"
    if last == "view" and any(isinstance(a, Symbol) and a.kind == "dtype" for a in node.args):
        return "it reads the bits of a value that would be bfloat16"
    if name == "binary_cross_entropy":
        return "autocast refuses it"
    return None


def _has_tensor(arg: Any) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(_has_tensor(item) for item in arg))


def _is_low(node: Node, name: str, given: Sequence[Node], low: set[int]) -> bool:
    """Whether autocast makes a float32 value bfloat16."""
    if node.op == "placeholder":  # what another graph computed, not data
        return node.dtype == "float32" and node.requires_grad and node.facts.get("origin") != "state" and _sized(node)
    if node.op == "get_attr" or node.dtype not in (None, "float32"):
        return False
    if name in LOWER:
        return True
    if name in UPPER or name in TO:
        return False
    lowered = [n for n in given if n.index in low]
    mixed = [n for n in given if n.dtype == "float32" and n.index not in low and _sized(n)]
    return bool(lowered) and (not mixed or name in REARRANGES or node.target.rsplit(".", 1)[-1].endswith("_"))


def _sized(node: Node) -> bool:
    return node.shape is None or len(node.shape) > 0
