"""Runs a script without dropout and prints as JSON the loss and the norm of the gradient of every backward pass.

`python replay.py SCRIPT [DTYPE]`: floating point numbers are of that type unless the script says otherwise.

With dropout the draws of two ways to compute the same thing differ, and so would the losses. Parameters are moved away
from where they start: there, scores are near zero and another scale or mask would hardly show in the loss.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from typing import Any

import torch
import torch.nn.functional as F

attention = F.scaled_dot_product_attention
backward = torch.Tensor.backward
prepare = torch.optim.Optimizer.__init__
losses: list[tuple[float, float]] = []
parameters: list[torch.Tensor] = []


def without_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """What dropout is in evaluation."""
    return input


def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Fused attention without dropout."""
    return attention(*args[:4], **{**kwargs, "dropout_p": 0.0})


def recorded(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """The backward pass, its loss and the norm of the gradient noted."""
    backward(loss, *args, **kwargs)
    squares = [p.grad.double().square().sum().item() for p in parameters if p.grad is not None]
    losses.append((loss.item(), sum(squares) ** 0.5))


def prepared(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """An optimizer whose parameters are moved: matrices by the inverse root of their last axis, vectors by a tenth."""
    prepare(optimizer, *args, **kwargs)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameters.append(parameter)
            size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=draws).to(parameter), alpha=size)


if __name__ == "__main__":
    torch.optim.Optimizer.__init__ = prepared
    F.dropout, F.scaled_dot_product_attention, torch.Tensor.backward = without_dropout, attend, recorded
    torch.nn.functional.dropout, torch.dropout = without_dropout, without_dropout
    script = sys.argv[1]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    torch.set_default_dtype(getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "float32"))
    torch.manual_seed(0)
    random.seed(0)
    runpy.run_path(script, run_name="__main__")
    print("\n" + json.dumps(losses))
