"""Compare two arms with dropout on: their outputs must have the same mean and spread over seeded draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_ELEMENTS = 256  # below, sixteen draws say too little about a variance
VARIANCES = (0.5, 2.0)  # allowed ratio; p = 0.2 in place of 0.1 is 2.25
MEANS = 4.0  # allowed squared distance of means, in multiples of what the draws alone explain


def spread_reasons(base: Mapping[str, Any], cand: Mapping[str, Any]) -> list[str]:
    """Why the candidate's randomness is not the original's; empty when it is, or where nothing is random.

    With n draws, the means of two equal distributions differ by (variance + variance) / n in the square, on average.
    """
    before: Sequence[Mapping[str, Any]] = base.get("spread", ())
    after: Sequence[Mapping[str, Any]] = cand.get("spread", ())
    if len(before) != len(after):
        return [f"with dropout on there are {len(after)} outputs instead of {len(before)}"]
    found = []
    for number, (one, two) in enumerate(zip(before, after, strict=True)):
        if len(one["means"]) < LEAST_ELEMENTS or one["variance"] <= 0:
            continue
        ratio = two["variance"] / one["variance"]
        if not VARIANCES[0] <= ratio <= VARIANCES[1]:
            found.append(f"with dropout on, output {number} varies {ratio:.2f} times as much as the original's")
        apart = sum((a - b) ** 2 for a, b in zip(one["means"], two["means"], strict=True)) / len(one["means"])
        explained = (one["variance"] + two["variance"]) / one["draws"]
        if not apart <= MEANS * explained:
            found.append(f"with dropout on, the mean of output {number} is another one")
    return found
