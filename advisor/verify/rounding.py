"""Inside the child: a float64 run disturbed as rounding would, which tells how well a region can be computed at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from advisor.verify.recompute import Watch, constant

EXACT = frozenset(
    "masked_fill masked_fill_ where getitem getattr view view_as reshape expand expand_as transpose permute unsqueeze "
    "squeeze contiguous clone flatten unflatten cat stack chunk split tril triu neg abs relu clamp max min amax amin "
    "maximum minimum roll flip repeat detach index_select gather unbind narrow t swapaxes movedim select".split()
)  # operations that move or choose values and round none
QUOTIENTS = frozenset("div div_ truediv itruediv true_divide mul".split())  # of an exponential and its sum
FEW = 4.0  # roundings by which a value may differ: a fused operation rounds at other places than the original
MOST = 0.02  # relative disturbance of an exponential; beyond it computing it again is another function
ATTENTION = "scaled_dot_product_attention"
EXPONENTIALS = frozenset("softmax log_softmax exp logsumexp sigmoid".split())


class Rounding(Watch):
    """Disturbs every rounded result, saved tensor and gradient of a float64 run as a few roundings would.

    How far the disturbed run goes astray is how well the region can be computed in a precision at all, whatever the
    order of its operations (Monte Carlo arithmetic: Parker, 1997). `kinds` maps a node to the dtype of its value in
    that precision. A fused backward pass computes again what the original has kept: exp(s) comes out with a relative
    error of |s| roundings, and so are the kept exponentials disturbed.
    """

    def __init__(self, kinds: Mapping[int, torch.dtype], coarsest: float, seed: int, device: torch.device) -> None:
        super().__init__()
        self._recorded = kinds
        self._coarsest = FEW * coarsest
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._made_of: dict[int, list[torch.Tensor]] = {}  # id of a value -> the tensors it was computed from
        self._exponents: dict[int, torch.Tensor] = {}  # place in memory of an exponential -> size of its exponent
        self._values: list[torch.Tensor] = []  # kept, so that no id or place comes twice
        self._read: list[torch.Tensor] = []
        self._now: torch.Tensor | None = None

    def before(self, node: Mapping[str, Any], arguments: list[Any]) -> None:
        """Keep what is read; the scores of attention that is one operation are disturbed by way of its queries."""
        fused = _plain_name(node) == ATTENTION and len(arguments) > 1
        if fused:
            arguments[0] = arguments[0] * (1.0 + self._size(node) * self._drawn(arguments[0]))
        self._read = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
        self._now = None
        name = _plain_name(node)
        if name in EXPONENTIALS and self._read:
            first = self._read[0]
            shifted = [t for t in self._made_of.get(id(first), ()) if t.shape == first.shape]  # less its largest
            self._now = torch.stack([t.detach().abs() for t in (first, *shifted)]).amax(0)
        elif fused:
            self._now = _scores(node, arguments[0].detach(), arguments[1].detach())
        elif name in QUOTIENTS and self._read:
            self._now = self._exponents.get(_place(self._read[0]))

    def after(self, node: Mapping[str, Any], value: Any) -> None:
        """Disturb a value in place, so that views of it see the same, and the gradients that will reach it."""
        super().after(node, value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        self._values.append(value)
        self._made_of[id(value)] = self._read
        if self._now is not None and self._now.shape == value.shape and _plain_name(node) != ATTENTION:
            self._exponents[_place(value)] = self._now
        self._now = None
        if _plain_name(node) in EXACT:
            return
        size = self._size(node)
        if all(step or n == 1 for step, n in zip(value.stride(), value.shape, strict=True)):
            value.data.mul_(1.0 + size * self._drawn(value))
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * (1.0 + size * self._drawn(gradient)))

    def _size(self, node: Mapping[str, Any]) -> float:
        kind = self._recorded.get(node["id"])
        return FEW * torch.finfo(kind).eps if kind is not None and kind.is_floating_point else self._coarsest

    def saved(self) -> AbstractContextManager[Any]:
        """Disturbs what the backward pass keeps."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        kept = tensor.detach()
        size = self._exponents.get(_place(kept), self._now)
        if size is None or size.numel() != kept.numel() or not kept.is_contiguous():
            return kept * (1.0 + self._coarsest * self._drawn(kept))
        roundings = (self._coarsest * size.reshape(kept.shape)).clamp(self._coarsest, MOST)
        rows = kept[..., :1] if kept.dim() else kept  # what normalises a row is rounded once for all of it
        return kept * (1.0 + roundings * (self._drawn(kept) + self._drawn(rows)))

    def _drawn(self, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(like.shape, generator=self._generator, dtype=torch.float64, device=like.device)
        return (2.0 * drawn - 1.0).to(like.dtype)


def _scores(node: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Sizes of the scores of attention that is one operation; None where heads are shared."""
    if query.shape[:-2] != key.shape[:-2]:
        return None
    scale = constant(node["kwargs"].get("scale"))
    return (query @ key.mT).abs() * (scale if isinstance(scale, float) else query.shape[-1] ** -0.5)


def _plain_name(node: Mapping[str, Any]) -> str:
    return str(node["target"]).rpartition(".")[2]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
