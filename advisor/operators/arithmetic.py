"""Floating-point operations of recorded operator calls, from their names, input shapes and constant arguments.

A multiplication and an addition count as two operations. What runs on matrix units is counted: products, convolutions,
attention, recurrent layers. Each piece of arithmetic is counted once, at the outermost operator that has a formula:
`aten::addmm`, not the `aten::linear` that calls it, because `aten::linear` is among the COMPOSITES, which count only
where nothing inside them does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from advisor.model import Operators
from advisor.operators import attention, convolution
from advisor.operators.calls import UNREADABLE, Call, Entries, Entry, NotRecorded, Shape, Texts


class Work(NamedTuple):
    """Arithmetic of one call, in floating-point operations.

    `model` is what the mathematics needs (attention backward = twice forward, a recomputed forward = 0), `executed`
    what this call runs (attention backward = 2.5 times forward, because the kernel recomputes the scores), `causal`
    equals `model` with the pairs that a causal mask hides left out (half of a square), None when the call does not say
    what it hides.
    """

    family: str  # matmul, attention, convolution or recurrent
    model: float
    executed: float
    causal: float | None

    @property
    def least(self) -> float:
        """What a floor may count: operations that the call's own arguments do not let any implementation leave out.

        A mask that is a tensor counts as hiding nothing.
        """
        return self.model if self.causal is None else self.causal


COMPOSITES = frozenset({"aten::linear", "aten::matmul", "aten::scaled_dot_product_attention"})


def work_of(name: str, shapes: Entries, dtypes: Texts, concrete: Texts = ()) -> Work | None:
    """The arithmetic of one call; None when it has none or does not say its sizes.

    `shapes` has one entry per input, a list of tensors one shape per tensor; `dtypes` are names such as "bfloat16", ""
    for what is no tensor; `concrete` holds the constants as Kineto writes them. A call of COMPOSITES counts only if no
    call inside it does.
    """
    plain = name if name in _FAMILY else name.removesuffix("_")
    family = _FAMILY.get(plain)
    if family is None:
        return None
    call = Call(plain, shapes, dtypes, concrete)
    try:
        if family == "attention":
            return Work(family, *attention.count(call))
        flops = convolution.flops(call) if family == "convolution" else _FORMULAS[plain](call)
    except UNREADABLE:
        return None
    return Work(family, flops, flops, flops)


# ------------------------------------------------------------------------------------------------------------ products

PRODUCTS: Mapping[str, tuple[str, str]] = {  # the two factors, by argument
    "aten::mm": ("self", "mat2"),
    "aten::bmm": ("self", "mat2"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::_addmm_activation": ("mat1", "mat2"),
    "aten::addbmm": ("batch1", "batch2"),
    "aten::baddbmm": ("batch1", "batch2"),
    "aten::_int_mm": ("self", "mat2"),
    "aten::_scaled_mm": ("self", "mat2"),
    "aten::_grouped_mm": ("self", "mat2"),
    "aten::_scaled_grouped_mm": ("self", "mat2"),
    "aten::mv": ("self", "vec"),
    "aten::addmv": ("mat", "vec"),
    "aten::dot": ("self", "tensor"),
    "aten::vdot": ("self", "other"),
    "aten::matmul": ("self", "other"),
    "aten::linear": ("input", "weight"),
}


def result_shape(call: Call) -> Shape:
    """The shape of a product's result.

    A grouped product has its groups in a leading dimension or, laid end to end and cut by `offs`, in rows of the left
    factor, columns of the right one, or the shared dimension of both.
    """
    left, right = (call.shape(argument) for argument in PRODUCTS[call.name])
    if call.name == "aten::linear":
        return (*left[:-1], *right[:-1])
    if "grouped" in call.name and len(left) + len(right) < 6:
        groups = () if 3 in (len(left), len(right)) else (call.shape("offs")[0],)
        return (*groups, left[-2], right[-1])
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else ()
    return (*_broadcast(left[:-2], right[:-2]), *rows, *columns)


def _broadcast(left: Shape, right: Shape) -> Shape:
    count = max(len(left), len(right))
    padded = ((1,) * (count - len(left)) + left, (1,) * (count - len(right)) + right)
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


def _product(call: Call) -> float:
    """[m, k] x [k, n]: 2 * m * k * n, times the batch.

    Grouped by `offs`, each row, column or term belongs to one group, so the groups' products add up to one product of
    the whole sizes; rows behind the last group (padding) are counted with it. Packed 4-bit numbers count twice in k.
    """
    left, right = (call.shape(argument) for argument in PRODUCTS[call.name])
    shared = left[-1] * (2 if call.dtype(PRODUCTS[call.name][0]) == "float4_e2m1fn_x2" else 1)
    rows, columns = left[-2] if len(left) > 1 else 1, right[-1] if len(right) > 1 else 1
    if "grouped" in call.name and len(left) + len(right) < 6:
        return 2.0 * rows * shared * columns
    return 2.0 * shared * math.prod(result_shape(call))


# ----------------------------------------------------------------------------------------------------------- recurrent

GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # ReLU, tanh, LSTM, GRU: cudnnRNNMode_t and miopenRNNMode_t agree


class Recurrent(NamedTuple):
    """Tokens of all sequences, elements of all weight matrices, and features of a token on the way in and out."""

    tokens: int
    weights: int
    inputs: int
    outputs: int


def recurrent(call: Call) -> Recurrent:
    """The sizes of a cuDNN or MIOpen call, from its constants; NotRecorded where one is missing.

    A layer has, per direction, gates * hidden rows over its input and gates * hidden over the state, and with a
    projection projected * hidden more.
    """
    *places, inputs = call.shape("input")
    hidden, layers = call.integer("hidden_size"), call.integer("num_layers")
    projected = call.integer("proj_size") if "proj_size" in call else 0
    directions = 2 if call.flag("bidirectional") else 1
    gates = GATES.get(call.integer("mode"))
    if gates is None:
        raise NotRecorded("mode")
    state = projected or hidden
    features = inputs + (layers - 1) * directions * state + layers * state
    weights = directions * (gates * hidden * features + layers * projected * hidden)
    return Recurrent(math.prod(places), weights, inputs, directions * state)


def _recurrent(call: Call) -> float:
    """Each token meets each element of the weight matrices once: 2 * tokens * elements.

    Backward does as much for the gradients of the data (cuDNN always computes them) and, where `output_mask` asks for
    it, for those of the weights.
    """
    sizes = recurrent(call)
    passes = 1 + ("output_mask" in call and call.flags("output_mask")[3:] == (True,))
    return 2.0 * sizes.tokens * sizes.weights * passes


def _one_layer(call: Call) -> float:
    """oneDNN runs one layer and direction at a time: 2 * tokens * elements of its two matrices, backward twice."""
    backward = "output" in call
    matrices = ("weight1", "weight2") if backward else ("weight0", "weight1")
    elements = sum(math.prod(call.shape(matrix)) for matrix in matrices)
    return 2.0 * math.prod(call.shape("input")[:-1]) * elements * (2 if backward else 1)


_RECURRENT: Mapping[str, Callable[[Call], float]] = {
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent,
    "aten::miopen_rnn": _recurrent,
    "aten::miopen_rnn_backward": _recurrent,
    "aten::mkldnn_rnn_layer": _one_layer,
    "aten::mkldnn_rnn_layer_backward": _one_layer,
}
_FORMULAS: Mapping[str, Callable[[Call], float]] = {**dict.fromkeys(PRODUCTS, _product), **_RECURRENT}
_FAMILY: Mapping[str, str] = {
    **dict.fromkeys(PRODUCTS, "matmul"),
    **dict.fromkeys(_RECURRENT, "recurrent"),
    **dict.fromkeys(convolution.FORWARD | convolution.BACKWARD | convolution.BACKWARD_INPUT, "convolution"),
    **dict.fromkeys(attention.ATTENTIONS, "attention"),
}


# ----------------------------------------------------------------------------------------------------------- all calls


def count_work(operators: Operators, concrete: Mapping[int, Texts]) -> dict[int, Work]:
    """The arithmetic of every row that does any, none of it twice.

    A forward operator that records for autograd while a backward pass runs it is activation recomputation: its
    `executed` operations stay, its `model` operations are 0.
    """
    known: dict[tuple[str, Sequence[Entry], Texts, Texts], Work | None] = {}
    works: list[Work | None] = []
    for row, name in enumerate(operators.name):
        key = (name, operators.shapes[row], operators.dtypes[row], tuple(concrete.get(row, ())))
        if key not in known:
            known[key] = work_of(*key)
        works.append(known[key])
    state = passes(operators)
    return {
        row: work._replace(model=0.0, causal=0.0) if state[row] == RECOMPUTED else work
        for row in counted(operators, works)
        if (work := works[row]) is not None
    }


def counted(operators: Operators, works: Sequence[Work | None]) -> tuple[int, ...]:
    """The rows whose arithmetic counts: the outermost with any; a composite only where nothing inside it counts."""
    composite = [name in COMPOSITES for name in operators.name]
    chosen: set[int] = set()
    inside = bytearray(len(operators))  # 1: at or below a counted row
    holds = bytearray(len(operators))  # 1: above one
    for leaves in (False, True):
        for row, parent in enumerate(operators.parent):
            if parent >= 0 and inside[parent]:
                inside[row] = 1
            elif works[row] is not None and composite[row] == leaves and not inside[row] and not holds[row]:
                inside[row] = 1
                chosen.add(row)
                while parent >= 0 and not holds[parent]:
                    holds[parent] = 1
                    parent = operators.parent[parent]
    return tuple(sorted(chosen))


BACKWARD, RECOMPUTED = 1, 2


def passes(operators: Operators) -> bytearray:
    """Per row: 0 in the forward pass, else BACKWARD or RECOMPUTED."""
    found = bytearray(len(operators))
    for row, parent in enumerate(operators.parent):
        state = found[parent] if parent >= 0 else 0
        if operators.forward_thread[row]:
            state = BACKWARD
        elif state == BACKWARD and operators.sequence[row] >= 0:
            state = RECOMPUTED
        found[row] = state
    return found
