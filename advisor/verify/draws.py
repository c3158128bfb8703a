"""Inside the child: how far outputs spread over draws of dropout, so that two arms can be compared with dropout on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DRAWS = 16
SAMPLED = 4096  # elements of an output whose means are kept
FIRST_SEED = 10_000


def spread_of(call: Callable[[], list[Any]]) -> list[dict[str, Any]]:
    """Mean and variance of every floating output of `call` over seeded draws.

    Per output: the variance over draws as a mean over sampled elements, the elements' means, and the number of draws.
    The elements are evenly spaced, at most `SAMPLED` of them.
    """
    seen: list[list[torch.Tensor]] = []
    for draw in range(DRAWS):
        torch.manual_seed(FIRST_SEED + draw)
        outputs = [t for t in call() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        seen.append([_sampled(output) for output in outputs])
    found = []
    for values in zip(*seen, strict=True):
        stacked = torch.stack(values)  # [draws, elements]
        found.append(
            {
                "draws": DRAWS,
                "variance": float(stacked.var(dim=0).mean()),
                "means": [float(value) for value in stacked.mean(dim=0)],
            }
        )
    return found


def _sampled(output: torch.Tensor) -> torch.Tensor:
    flat = output.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    return flat[::step][:SAMPLED].double().cpu()
