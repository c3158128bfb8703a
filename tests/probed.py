"""Training under the hooks of a capture that can be taken off and put on again, to tell what they cost.

Only the hooks differ between the two: process, model, memory and everything that was compiled are the same. The plan is
the one of a capture in its timed steps: no profiler runs.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset

from advisor import clock
from advisor.capture.child import Session, load_plan
from advisor.capture.hooks import is_our_file
from advisor.session import Spec

OPTIONS = {"warmup": 2, "steps": 10**9, "profile_steps": 1, "annotate": False, "device_rates": False}
HOOK_TABLES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
ABSENT = object()


class Hooked:
    """The hooks of a capture, on from the start; `without` takes them off."""

    def __init__(self) -> None:
        before = _torch_attributes()
        self._tables = {name: dict(getattr(optimizers, name)) for name in HOOK_TABLES}
        spec = Spec(
            script=__file__,
            argv=(),
            root=os.path.dirname(__file__),
            out=tempfile.gettempdir(),
            plan="advisor.capture.probe:CapturePlan",
            options=OPTIONS,
            outbox=os.open(os.devnull, os.O_WRONLY),
        )
        self.session = Session(spec, load_plan(spec.plan))
        self.session.plan.session = self.session
        self.session.hooks.install()
        self.session.plan.start()
        self._originals = [
            (owner, name, before.get((id(owner), name), (owner, ABSENT))[1])
            for (_, name), (owner, value) in _torch_attributes().items()
            if _is_ours(value)
        ]

    @property
    def names(self) -> set[str]:
        """Names of the attributes of torch that the hooks replace."""
        return {name for _, name, _ in self._originals}

    def make_events(self, count: int) -> None:
        """Make events for the coming steps, as a capture does before those that it times, to be used in turn."""
        if clock.on_cuda():
            spare = itertools.cycle([clock.mark() for _ in range(count)])
            self.session.plan.mark = lambda: _record(next(spare))

    @contextmanager
    def without(self) -> Iterator[None]:
        """While inside, torch is as it was before."""
        current = [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in self._originals]
        tables = {name: dict(getattr(optimizers, name)) for name in HOOK_TABLES}
        self._put(self._originals, self._tables)
        try:
            yield
        finally:
            self._put(current, tables)

    def close(self) -> None:
        """Take the hooks off for good."""
        self._put(self._originals, self._tables)

    def _put(self, values: list[tuple[Any, str, Any]], tables: dict[str, dict[int, Any]]) -> None:
        for owner, name, value in values:
            if value is not ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        for name, hooks in tables.items():
            table = getattr(optimizers, name)
            table.clear()
            table.update(hooks)


def _record(event: Any) -> Any:
    """Record an event again and return it."""
    event.record()
    return event


def _torch_attributes() -> dict[tuple[int, str], tuple[Any, Any]]:
    """Every attribute of torch's modules and of the classes in them, by its owner's identity and its name."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    classes = {id(v): v for module in modules for v in list(vars(module).values()) if issubclass(type(v), type)}
    owners = [*modules, *(cls for cls in classes.values() if str(cls.__module__).partition(".")[0] == "torch")]
    return {(id(owner), name): (owner, value) for owner in owners for name, value in list(vars(owner).items())}


def _is_ours(value: Any) -> bool:
    return type(value) is FunctionType and is_our_file(value.__code__.co_filename)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, 4, width // 4).transpose(1, 2) for t in self.qkv(self.first(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Training:
    """A loop over a loader's batches; `steps` goes on where it stopped."""

    def __init__(self, model: nn.Module, data: TensorDataset, device: str) -> None:
        self.model = model.to(device)
        self.device = device
        self.loader = DataLoader(data, batch_size=8)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._batches = self._endless()

    def _endless(self) -> Iterator[list[torch.Tensor]]:
        while True:
            yield from self.loader

    def steps(self, count: int) -> None:
        """Take steps as a script does, in functions of its own."""
        for _ in range(count):
            self.step()

    def step(self) -> None:
        """One training step."""
        x, y = next(self._batches)
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()


def transformer(device: str) -> Training:
    """Four layers of a transformer."""
    width, length = (256, 128) if device == "cuda" else (48, 16)
    blocks = nn.Sequential(*(Block(width) for _ in range(4)), nn.Flatten(), nn.Linear(width * length, 10))
    return Training(blocks, TensorDataset(torch.randn(4096, length, width), torch.randint(0, 10, (4096,))), device)


def launches(device: str) -> Training:
    """A perceptron that is nothing but launches."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    return Training(model, TensorDataset(torch.randn(65536, 32), torch.randint(0, 10, (65536,))), device)


WORKLOADS: dict[str, Callable[[str], Training]] = {"transformer": transformer, "launches": launches}
