"""Least traffic of the operators whose formula asks for their arguments by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from advisor.operators import attention, convolution, pointwise
from advisor.operators.arithmetic import PRODUCTS, recurrent, result_shape
from advisor.operators.calls import CODE_BYTES, Call, NotRecorded, numbers
from advisor.operators.moves import MOVES

# ------------------------------------------------------------------------------------------------------------ products


def _product(call: Call) -> float:
    """Both factors, what is added to the product, scales, and the result.

    `beta` = 0 leaves out the addend. Of the weights of a grouped product only one group's count: a group without rows
    is not read.
    """
    left, right = PRODUCTS[call.name]
    total = float(call.traffic(left))
    total += call.traffic(right) / (call.shape(right)[0] if _by_rows(call) else 1)
    if call.name == "aten::_addmm_activation" or call.name.startswith("aten::add") or call.name == "aten::baddbmm":
        total += 0 if _is_zero(call, "beta") else call.traffic("self")
    total += sum(call.traffic(extra) for extra in ("bias", "scale_a", "scale_b"))
    shape = result_shape(call)
    return total + math.prod(shape[1:] if call.name == "aten::addbmm" else shape) * _result_width(call, left)


def _by_rows(call: Call) -> bool:
    return "grouped" in call.name and len(call.shape("self")) == 2 and len(call.shape("mat2")) == 3


def _is_zero(call: Call, argument: str) -> bool:
    try:
        return float(call.text(argument) or 1) == 0.0
    except (NotRecorded, ValueError):
        return False


def _result_width(call: Call, left: str) -> int:
    if call.name == "aten::_int_mm":
        return 4
    try:
        return CODE_BYTES[call.integer("out_dtype")]
    except (NotRecorded, KeyError):
        return call.width(left)


def _recurrent(call: Call) -> float:
    """Weights, input and output once; backward reads the weights and the output's gradient and writes the input's."""
    sizes = recurrent(call)
    elements = sizes.weights + sizes.tokens * (sizes.inputs + sizes.outputs)
    if "output_mask" in call and call.flags("output_mask")[3:] == (True,):
        elements += sizes.weights
    return float(elements * call.width("input"))


# ------------------------------------------------------------------------------------------------- softmax and dropout


def _softmax(call: Call) -> float:
    """Read and written once; `half_to_float` writes float32."""
    try:
        wide = call.flag("half_to_float")
    except NotRecorded:
        wide = False
    return call.traffic("self") + math.prod(call.shape("self")) * (4 if wide else call.width("self"))


def _softmax_backward(call: Call) -> float:
    """Gradient and output read, the input's gradient written in `input_dtype`."""
    try:
        width = CODE_BYTES[call.integer("input_dtype")]
    except (NotRecorded, KeyError):
        width = min(2, call.width("grad_output"))
    read = call.traffic("grad_output") + call.traffic("output")
    return float(read + math.prod(call.shape("grad_output")) * width)


def _dropout(call: Call) -> float:
    """Read once; the result and a mask of one byte per element written."""
    source = "input" if "input" in call else "self"
    return float(call.traffic(source) + call.written(source) + math.prod(call.shape(source)))


# ------------------------------------------------------------------------------------------------------------ indexing


def _embedding(call: Call) -> float:
    """The indices and the rows they pick; of the table at least one row is read, which rows is data."""
    rows = math.prod(call.shape("indices"))
    return float(call.traffic("indices") + rows * math.prod(call.shape("weight")[1:]) * call.width("weight"))


def _index_select(call: Call) -> float:
    """The index and what it picks along one dimension, where that is not recorded along the longest."""
    source = call.shape("self")
    try:
        along = source[call.integer("dim")]
    except NotRecorded:
        along = max(source)
    picked = math.prod(source) // max(1, along) * math.prod(call.shape("index"))
    return float(call.traffic("index") + picked * call.width("self"))


def _gather(call: Call) -> float:
    """The index and one element for each of its elements."""
    return float(call.traffic("index") + math.prod(call.shape("index")) * call.width("self"))


def _scatter(call: Call) -> float:
    """The index and one element of the source for each of its elements; a number as source moves nothing."""
    source = call.width("src") * math.prod(call.shape("index")) if call.given("src") else 0
    return float(call.traffic("index") + source)


def _where(call: Call) -> float:
    """The condition, the smaller of the two sides, which may be all that is chosen, and the result."""
    sides = [side for side in ("self", "other") if call.given(side)]
    if not sides:
        raise NotRecorded("the dtype of two numbers")
    tensors = [call.dimensions(argument) for argument in ("condition", "self", "other")]
    result = math.prod(pointwise.broadcast(tensors)) * max(call.width(side) for side in sides)
    least = min(call.traffic(side) if call.dimensions(side) else 0 for side in ("self", "other"))
    return float(call.traffic("condition") + least + result)


def _to_copy(call: Call) -> float:
    """Read in one dtype, written in another."""
    text = call.text("dtype")
    width = CODE_BYTES.get(call.integer("dtype"), 1) if text else call.width("self")
    return float(call.traffic("self") + math.prod(call.dimensions("self")) * width)


def _sort(call: Call) -> float:
    """Read once; values and 64-bit places written."""
    return float(call.traffic("self") + call.written("self") + 8 * math.prod(call.shape("self")))


def _topk(call: Call) -> float:
    """Read once; `k` values and 64-bit places written along one dimension."""
    source = call.shape("self")
    kept = math.prod(source) // max(1, source[call.integer("dim")]) * call.integer("k")
    return float(call.traffic("self") + kept * (call.width("self") + 8))


# -------------------------------------------------------------------------------------------- losses, pools, optimizer


def _loss(call: Call) -> float:
    """Both inputs; without a reduction (0) also the loss of each element."""
    read = sum(call.traffic(name) for name in ("self", "target", "weight"))
    return float(read + (call.written("self") if call.integer("reduction") == 0 else 0))


def _pool(call: Call) -> float:
    """What the windows touch, and the result; maxima come with 64-bit places."""
    source = call.shape("self")
    kernel = call.integers("kernel_size", 2)
    stride = call.integers("stride", 2) if call.text("stride").strip("[] ") else kernel
    dilation = call.integers("dilation", 2) if "dilation" in call else (1, 1)
    slides = convolution.windows(kernel, stride, call.integers("padding", 2), dilation)
    ceil = call.flag("ceil_mode")
    places = tuple(slide.positions(size, ceil) for slide, size in zip(slides, source[-2:], strict=True))
    read = convolution.share_touched(source[-2:], slides, places) * call.traffic("self")
    width = call.width("self") + (8 if "max" in call.name else 0)
    return read + math.prod(source[:-2]) * math.prod(places) * width


def _adaptive_pool(call: Call) -> float:
    """Everything is read, whatever the size of the result."""
    source = call.shape("self")
    return float(
        call.traffic("self") + math.prod(source[:-2]) * math.prod(call.integers("output_size", 2)) * call.width("self")
    )


def _upsample(call: Call) -> float:
    """The result, and along each dimension at least as many places of the input as the smaller of the two has."""
    source = call.shape("self")
    size = call.integers("output_size", len(source) - 2)
    if any(places < 0 for places in size):
        raise NotRecorded("output_size")
    read = math.prod(min(old, new) for old, new in zip(source[2:], size, strict=True))
    return float(math.prod(source[:2]) * (read + math.prod(size)) * call.width("self"))


def _upsample_backward(call: Call) -> float:
    """The gradient of the result read, that of the input written."""
    size = numbers(call.text("input_size"))
    if any(places < 0 for places in size):
        raise NotRecorded("input_size")
    return float(call.traffic("grad_output") + math.prod(size) * call.width("grad_output"))


def _sgd(call: Call) -> float:
    """Parameters and momentum read and written, gradients read; the first step only writes the momentum."""
    if not call.given("self"):
        raise NotRecorded("self")
    momentum = call.traffic("momentum_buffer_list")
    first = call.flag("is_first_step")
    return float(2 * call.traffic("self") + call.traffic("grads") + momentum * (1 if first else 2))


_SPECIAL: Mapping[str, Callable[[Call], float]] = {
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(attention.ATTENTIONS, attention.least_traffic),
    **dict.fromkeys(convolution.FORWARD | convolution.BACKWARD | convolution.BACKWARD_INPUT, convolution.least_traffic),
    **dict.fromkeys(
        ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::miopen_rnn", "aten::miopen_rnn_backward"), _recurrent
    ),
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax_backward_data": _softmax_backward,
    "aten::native_dropout": _dropout,
    "aten::_fused_dropout": _dropout,
    "aten::embedding": _embedding,
    "aten::index_select": _index_select,
    "aten::gather": _gather,
    "aten::scatter_": _scatter,
    "aten::scatter_add_": _scatter,
    "aten::where": _where,
    "aten::_s_where": _where,
    "aten::_to_copy": _to_copy,
    "aten::sort": _sort,
    "aten::topk": _topk,
    "aten::mse_loss": _loss,
    "aten::smooth_l1_loss": _loss,
    "aten::huber_loss": _loss,
    "aten::binary_cross_entropy": _loss,
    "aten::max_pool2d_with_indices": _pool,
    "aten::avg_pool2d": _pool,
    "aten::_adaptive_avg_pool2d": _adaptive_pool,
    "aten::upsample_nearest1d": _upsample,
    "aten::upsample_nearest2d": _upsample,
    "aten::upsample_bilinear2d": _upsample,
    "aten::upsample_bicubic2d": _upsample,
    "aten::upsample_nearest1d_backward": _upsample_backward,
    "aten::upsample_nearest2d_backward": _upsample_backward,
    "aten::upsample_bilinear2d_backward": _upsample_backward,
    "aten::upsample_bicubic2d_backward": _upsample_backward,
    "aten::_fused_sgd_": _sgd,
}
FORMULAS: Mapping[str, Callable[[Call], float]] = {
    **{name: moves.traffic for name, moves in MOVES.items()},
    **_SPECIAL,
}
CONSTANTS = frozenset({*_SPECIAL, *(name for name, moves in MOVES.items() if moves.mask is not None)})
