"""Inside the child: what an arm changes about the script: no dropout, higher precision, a smaller batch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import autocast_mode
from torch.utils import _pytree as tree

Seen = tuple[float, int, bool]  # dropout probability, elements, inside compiled code


class DropoutLog:
    """Switches dropout off everywhere, as long as `off`, and keeps a list of what would have been dropped.

    `active` is whether calls are noted; a call made while a backward pass recomputes a checkpointed forward is not.
    """

    NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

    def __init__(self) -> None:
        self.active = False
        self.off = True
        self.calls: list[Seen] = []

    def install(self) -> None:
        """Replace the functional forms, which the modules and fused attention go through."""
        for name in self.NAMES:
            setattr(nn.functional, name, self._without_dropout(getattr(nn.functional, name)))
        nn.functional.scaled_dot_product_attention = self._attention(nn.functional.scaled_dot_product_attention)

    def take(self) -> list[list[Any]]:
        """What was noted since the last call, as [probability, elements, compiled, times], in sorted order."""
        counted = Counter(self.calls)
        self.calls.clear()
        return [[*key, count] for key, count in sorted(counted.items())]

    def _without_dropout(self, original: Callable[..., Any]) -> Callable[..., Any]:
        trains = "alpha" not in original.__name__  # the default of `training`

        @functools.wraps(original)
        def dropout(input: Any, p: float = 0.5, training: bool = trains, inplace: bool = False) -> Any:
            if training and p > 0:
                self._note(p, input.numel())
            return original(input, 0.0 if self.off and 0 <= p <= 1 else p, training, inplace)

        return dropout

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scaled_dot_product_attention(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
        ) -> Any:
            if dropout_p > 0:
                self._note(dropout_p, math.prod(query.shape[:-1]) * key.shape[-2])
            return original(query, key, value, attn_mask, 0.0 if self.off else dropout_p, *args, **kwargs)

        return scaled_dot_product_attention

    def _note(self, p: float, elements: int) -> None:
        if not self.active:
            return
        compiled = torch.compiler.is_compiling()
        if compiled or torch._C._current_graph_task_id() == -1:
            self.calls.append((p, elements, compiled))


class AutocastWatch:
    """Notes the dtypes autocast was entered with, or keeps it off altogether."""

    def __init__(self, off: bool) -> None:
        self._off = off
        self.dtypes: set[torch.dtype] = set()

    def install(self) -> None:
        """Wrap the one context manager every form of autocast ends in."""
        enter = autocast_mode.autocast.__enter__

        def entered(context: Any) -> Any:
            if self._off:
                context._enabled = False
            elif context._enabled:
                self.dtypes.add(context.fast_dtype)
            return enter(context)  # type: ignore[no-untyped-call]

        autocast_mode.autocast.__enter__ = entered  # type: ignore[method-assign]


class HigherPrecision:
    """Runs the script as found in "float32" (nothing lower anywhere) or "float64".

    A module is converted in place when it is called from outside for the first time, so that parameters keep their
    identity and their initial values. Random numbers are still drawn in float32.
    """

    DRAWS = ("randn", "rand", "randn_like", "rand_like")

    def __init__(self, target: str) -> None:
        self.dtype = {"float32": torch.float32, "float64": torch.float64}[target]
        self._converted: list[nn.Module] = []
        self._set_precision = torch.set_float32_matmul_precision

    def install(self) -> None:
        """Switch reduced-precision products off and keep them off."""
        self.enforce()
        torch.set_float32_matmul_precision = lambda precision: None

    def enforce(self) -> None:
        """Undo what the script set by other names."""
        self._set_precision("highest")
        torch.backends.cudnn.allow_tf32 = False

    def prepare(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Convert a module before its first call, and floating-point arguments before every call."""
        self.enforce()
        if all(module is not known for known in self._converted):
            self._converted.append(module)
            self._convert(module)
        return tree.tree_map(self._raise_input, (args, kwargs))  # type: ignore[no-any-return]

    def _convert(self, module: nn.Module) -> None:
        low = [t for t in (*module.parameters(), *module.buffers()) if self._lower(t)]
        if low:
            module.to(self.dtype)
        if self.dtype is torch.float64 and torch.get_default_dtype() is not torch.float64:
            torch.set_default_dtype(torch.float64)
            for name in self.DRAWS:
                setattr(torch, name, _drawn_in_single(getattr(torch, name)))

    def _lower(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() < self.dtype.itemsize

    def _raise_input(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and self._lower(value) else value


def _drawn_in_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """Draw in float32 what would be drawn in float64 by default, so that both see the same numbers."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is not None:
            return original(*args, **kwargs)
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if like is not None and like.dtype is not torch.float64:
            return original(*args, **kwargs)
        return original(*args, **(kwargs | {"dtype": torch.float32})).double()

    return draw


def first_rows(value: Any, divisor: int) -> Any:
    """The first 1/divisor of the rows of every tensor that shares the batch's leading dimension, at least one row."""
    sizes = [leaf.shape[0] for leaf in tree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes or divisor <= 1:
        return value
    rows = max(1, sizes[0] // divisor)

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == sizes[0]
        return leaf[:rows] if whole else leaf

    return tree.tree_map(cut, value)
