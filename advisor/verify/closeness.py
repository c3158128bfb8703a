"""Inside the child: whether a replacement's tensors are as close to a float64 reference as the original's are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Item: TypeAlias = dict[str, Any]

LARGEST = 2.0  # floors for the largest error, the extreme of a whole tensor
UNRESOLVED = 0.1  # relative error of the original from which its largest error is noise


@dataclass(frozen=True)
class Judge:
    """The criterion for one draw: error <= ratio x error of the original + floor, both relative to the reference.

    `label` names the draw; `floor` is the declared floor as a share of the reference's norm or largest element.
    """

    label: str
    floor: float
    ratio: float

    def quantity(
        self,
        name: str,
        old: torch.Tensor,
        new: torch.Tensor,
        reference: torch.Tensor,
        disturbed: Callable[[], Iterable[torch.Tensor]],
    ) -> list[Item]:
        """Relative L2 and largest error against their limits; nothing where the original has no finite element.

        Elements that the original leaves NaN or overflows to infinity may be anything; an infinity that is the true
        value must be there. Where the plain criterion fails, the original's error counts as no less than that of runs
        with disturbed rounding: it may be exact by luck, as in a softmax that has one probability of 1.
        """
        wide = torch.complex128 if reference.is_complex() else torch.float64
        mine, theirs = old.to(wide), new.to(wide)
        infinite = torch.isinf(mine) & (mine == reference)
        told = torch.isfinite(mine) & torch.isfinite(reference)
        wrong = int((told & ~torch.isfinite(theirs)).sum()) + int((infinite & (theirs != mine)).sum())
        if wrong:
            return [self._item(name, 0.0, math.inf, self.floor, wrong)]
        if not bool(told.any()):
            return []
        base, error = _errors(mine, reference, told), _errors(theirs, reference, told)
        found = self._judged(name, base, error)
        if not all(item["ok"] for item in found):
            runs = [_errors(value.to(wide), reference, told) for value in disturbed()]
            found = self._judged(name, [max(values) for values in zip(base, *runs, strict=True)], error)
        return found

    def _judged(self, name: str, base: Sequence[float], errors: Sequence[float]) -> list[Item]:
        items = [self._item(name, base[0], errors[0], self.ratio * base[0] + self.floor)]
        if base[0] <= UNRESOLVED:
            limit = self.ratio * base[1] + LARGEST * self.floor
            items.append(self._item(f"the largest element of {name}", base[1], errors[1], limit))
        return items

    def _item(self, name: str, base: float, error: float, limit: float, wrong: int = 0) -> Item:
        return {
            "name": f"{name} ({self.label})",
            "base_error": base,
            "error": error,
            "limit": limit,
            "ok": error <= limit and not wrong,
            "wrong": wrong,
        }


def _errors(value: torch.Tensor, reference: torch.Tensor, told: torch.Tensor) -> tuple[float, float]:
    """Relative L2 error, and largest error over the largest magnitude; absolute where the reference is zero."""
    told = told & torch.isfinite(value)
    if not bool(told.any()):
        return 0.0, 0.0
    exact, away = reference[told], (value - reference)[told]
    norm, most = float(torch.linalg.vector_norm(exact)), float(exact.abs().max())
    return float(torch.linalg.vector_norm(away)) / (norm or 1.0), float(away.abs().max()) / (most or 1.0)


def said(item: Mapping[str, Any]) -> str:
    """One failing quantity in words."""
    if item["wrong"]:
        return f"{item['name']} has {item['wrong']:,} wrong elements, not finite where the original's are or otherwise"
    return (
        f"{item['name']} is off by {item['error']:.2g}, more than the allowed {item['limit']:.2g}; "
        f"the original itself is off by {item['base_error']:.2g}"
    )


def excess(item: Mapping[str, Any]) -> float:
    """Error over limit."""
    error, limit = float(item["error"]), float(item["limit"])
    return error / limit if limit else error
