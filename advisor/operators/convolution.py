"""Convolutions: the arithmetic and the data of a recorded call, from its shapes, stride, padding and dilation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.operators.calls import Call, NotRecorded, Shape

FORWARD = frozenset(
    {
        "aten::convolution",
        "aten::convolution_overrideable",
        "aten::_convolution",
        "aten::cudnn_convolution",
        "aten::cudnn_convolution_relu",
        "aten::cudnn_convolution_add_relu",
        "aten::cudnn_convolution_transpose",
        "aten::miopen_convolution",
        "aten::miopen_convolution_relu",
        "aten::miopen_convolution_add_relu",
        "aten::miopen_convolution_transpose",
        "aten::miopen_depthwise_convolution",
        "aten::mkldnn_convolution",
        "aten::_conv_depthwise2d",
        "aten::conv_depthwise3d",
        "aten::_slow_conv2d_forward",
        "aten::slow_conv3d_forward",
        "aten::slow_conv_dilated2d",
        "aten::slow_conv_dilated3d",
    }
)
BACKWARD = frozenset({"aten::convolution_backward", "aten::convolution_backward_overrideable"})
# torch before 1.10 has one operator per gradient; the gradient of the input is [, gradient of the output, weight].
BACKWARD_INPUT = frozenset({"aten::cudnn_convolution_backward_input", "aten::miopen_convolution_backward_input"})


MOST_PLACES = 10_000_000  # under a kernel along one dimension, when they have to be listed


class Window(NamedTuple):
    """How a kernel slides along one dimension, in elements."""

    width: int
    stride: int
    padding: int
    dilation: int

    @property
    def span(self) -> int:
        """From the first to past the last element under one position."""
        return self.dilation * (self.width - 1) + 1

    def positions(self, size: int, ceil: bool = False) -> int:
        """Positions along `size` elements (`torch.nn.Conv2d`, `torch.nn.MaxPool2d`: "Shape").

        `ceil` rounds up, but no position starts in the padding to the right. NotRecorded where there is none.
        """
        room = size + 2 * self.padding - self.span
        found = (room + (self.stride - 1 if ceil else 0)) // self.stride + 1
        if ceil and (found - 1) * self.stride >= size + self.padding:
            found -= 1
        if found < 1:
            raise NotRecorded("a kernel that fits its input")
        return found

    def touched(self, size: int, positions: int) -> int:
        """Elements of `size` that lie under any position: a stride wider than the kernel leaves some out."""
        if (self.dilation == 1 and self.stride <= self.width) or (self.stride == 1 and positions >= self.dilation):
            return max(0, min(size, (positions - 1) * self.stride + self.span - self.padding))  # no gaps
        if positions * self.width > MOST_PLACES:
            raise NotRecorded("sizes of a convolution")
        starts = np.arange(positions) * self.stride - self.padding
        places = np.unique(starts[:, None] + np.arange(self.width) * self.dilation)
        return int(np.count_nonzero((places >= 0) & (places < size)))


def windows(
    widths: Shape, strides: Sequence[int], paddings: Sequence[int], dilations: Sequence[int]
) -> tuple[Window, ...]:
    """One window per dimension."""
    return tuple(Window(*each) for each in zip(widths, strides, paddings, dilations, strict=True))


def share_touched(sizes: Shape, slides: Sequence[Window], positions: Sequence[int]) -> float:
    """The share of a tensor's places that a kernel reads."""
    share = 1.0
    for size, slide, count in zip(sizes, slides, positions, strict=True):
        share *= slide.touched(size, count) / size
    return share


class Geometry(NamedTuple):
    """A convolution seen from its wide side: `wide` places, of which each of `narrow` positions reads one window.

    The wide side is the input, or the output of a transposed convolution.
    """

    wide: Shape
    narrow: Shape
    slides: tuple[Window, ...]
    transposed: bool


def geometry(call: Call) -> Geometry:
    """Sizes of a forward call; NotRecorded where a constant is missing."""
    weight = call.shape("weight")
    source = call.shape("input" if "input" in call else "self")[2:]
    slides = _slides(call, weight)
    if not _transposed(call):
        return Geometry(source, tuple(s.positions(n) for s, n in zip(slides, source, strict=True)), slides, False)
    extra = call.integers("output_padding", len(source))
    wide = tuple(
        (size - 1) * slide.stride - 2 * slide.padding + slide.span + more
        for size, slide, more in zip(source, slides, extra, strict=True)
    )
    if min(wide, default=1) < 1:
        raise NotRecorded("a kernel that fits its output")
    return Geometry(wide, source, slides, True)


def _slides(call: Call, weight: Shape) -> tuple[Window, ...]:
    places = len(weight) - 2
    dilation = call.integers("dilation", places) if "dilation" in call else (1,) * places
    return windows(weight[2:], call.integers("stride", places), call.integers("padding", places), dilation)


def _transposed(call: Call) -> bool:
    return "convolution_transpose" in call.name or ("transposed" in call and call.flag("transposed"))


def flops(call: Call) -> float:
    """2 * batch * narrow positions * elements of the weight.

    A weight is [outputs, inputs / groups, kernel], transposed [inputs, outputs / groups, kernel]; either way each
    position of the narrow side meets every element of it once. Products with padding count, as they do in torch's own
    counter. Backward does as much for each of the gradients of input and weight that is asked for.
    """
    if call.name in BACKWARD_INPUT:
        gradient, weight = call.shape("grad_output"), call.shape("weight")
        return 2.0 * gradient[0] * math.prod(gradient[2:]) * math.prod(weight)
    if call.name in BACKWARD:
        wanted = sum(call.flags("output_mask")[:2])
        narrow = call.shape("input" if _transposed(call) else "grad_output")
        return 2.0 * narrow[0] * math.prod(narrow[2:]) * math.prod(call.shape("weight")) * wanted
    batch = call.shape("input" if "input" in call else "self")[0]
    return 2.0 * batch * math.prod(geometry(call).narrow) * math.prod(call.shape("weight"))


def least_traffic(call: Call) -> float:
    """Bytes: what the kernel touches of the input, the weight and the bias read once, the output written once.

    Backward reads the gradient and, for the gradient of the weight, the input, for that of the input, the weight, and
    writes the gradients that are asked for.
    """
    if call.name in BACKWARD:
        return _backward_traffic(call)
    if call.name in BACKWARD_INPUT:
        return float(call.traffic("grad_output") + call.traffic("weight"))
    name = "input" if "input" in call else "self"
    source, weight, shape = call.shape(name), call.shape("weight"), geometry(call)
    if shape.transposed:
        channels, read, places = weight[1] * call.integer("groups"), 1.0, shape.wide
    else:
        channels, read, places = weight[0], share_touched(shape.wide, shape.slides, shape.narrow), shape.narrow
    written = source[0] * channels * math.prod(places) * call.width(name)
    return read * call.traffic(name) + sum(call.traffic(part) for part in ("weight", "bias", "z")) + written


def _backward_traffic(call: Call) -> float:
    weight = call.shape("weight")
    slides, transposed = _slides(call, weight), _transposed(call)
    wide, narrow = ("grad_output", "input") if transposed else ("input", "grad_output")
    share = {wide: share_touched(call.shape(wide)[2:], slides, call.shape(narrow)[2:]), narrow: 1.0}
    flags = call.flags("output_mask")
    if len(flags) != 3:
        raise NotRecorded("output_mask")
    of_input, of_weight, of_bias = flags
    total = 0.0
    if of_input or of_weight:
        total += share["grad_output"] * call.traffic("grad_output")
    if of_bias:
        channels = call.shape("grad_output")[1]
        total = call.traffic("grad_output") + channels * call.width("weight")
    if of_weight:
        total += share["input"] * call.traffic("input") + call.written("weight")
    if of_input:
        total += call.traffic("weight") + call.written("input")
    return total
