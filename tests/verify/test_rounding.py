"""Disturbed runs of the region proof."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


def test_the_scores_of_attention_in_one_operation_are_disturbed() -> None:
    """A call of the fused operation has no steps between which a disturbance could come; what it keeps has."""
    from advisor.verify.rounding import FEW, Rounding

    epsilon = torch.finfo(torch.float32).eps
    rounding = Rounding({1: torch.float32}, epsilon, 0, torch.device("cpu"))
    query, key, value = (1e2 * torch.randn(2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    arguments: list[Any] = [query, key, value]
    node = {"id": 1, "target": "torch._C._nn.scaled_dot_product_attention", "kwargs": {"scale": {"float": "0.5"}}}
    rounding.before(node, arguments)
    away = ((arguments[0] - query) / query).abs().max()
    assert 0 < away <= FEW * epsilon
    assert arguments[1] is key
    with rounding.saved():
        result = torch.nn.functional.scaled_dot_product_attention(*arguments, scale=0.5)
    rounding.after(node, result)
    assert result.shape == value.shape
