"""The comparison with dropout on."""

from __future__ import annotations

import numpy as np
import pytest
from verify_bench import FUSED, SCORES, Bench

from advisor.verify.spread import spread_reasons


def recorded(seed: int, scale: float = 1.0, shift: float = 0.0) -> dict[str, object]:
    """What sixteen draws of a made-up output look like."""
    draws = np.random.default_rng(seed).normal(shift, scale, (16, 4096))
    return {"draws": 16, "variance": float(draws.var(axis=0, ddof=1).mean()), "means": draws.mean(axis=0).tolist()}


def test_two_samples_of_one_distribution_agree() -> None:
    assert spread_reasons({"spread": [recorded(1)]}, {"spread": [recorded(2)]}) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [(recorded(2, scale=1.6), "varies"), (recorded(2, scale=0.0), "varies"), (recorded(2, shift=0.9), "the mean of")],
)
def test_another_distribution_is_told(other: dict[str, object], words: str) -> None:
    (reason, *_) = spread_reasons({"spread": [recorded(1)]}, {"spread": [other]})
    assert words in reason


def test_nothing_random_is_nothing_to_compare() -> None:
    assert spread_reasons({}, {}) == []


def test_the_right_attention_with_dropout_passes(bench: Bench) -> None:
    found = bench.prove((SCORES, FUSED))
    assert found.ok, found.reasons
