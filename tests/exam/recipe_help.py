"""What recipes share: modules from files, stand-ins for packages that a model does not need, and the training loop."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # which looks for packages on import: before any stand-in


def load(
    file: str, name: str, *, until: str | None = None, instead: Mapping[str, str] | None = None
) -> types.ModuleType:
    """Run a file of the repository as a module, up to a text and with some texts replaced, lines at their numbers."""
    path = Path(__file__).parent / file
    text = path.read_text(encoding="utf-8")
    if until is not None:
        assert until in text, f"{file} does not hold {until!r}"
        text = text.partition(until)[0]
    for each, new in (instead or {}).items():
        assert each in text and each.count("\n") == new.count("\n"), f"{file}: {each!r}"
        text = text.replace(each, new)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def stand_in(names: str) -> None:
    """Put empty modules in place of packages."""
    for name in names.split():
        sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])


def package(name: str, folder: str) -> None:
    """A package whose modules can be imported without what its __init__ imports."""
    module = types.ModuleType(name)
    module.__path__ = [str(Path(__file__).parent / folder)]
    sys.modules[name] = module


def on_path(*folders: str) -> None:
    """Put folders of the repository in front of the import path."""
    sys.path[:0] = [str(Path(__file__).parent / folder) for folder in folders]


def train(
    model: torch.nn.Module,
    step: Callable[[torch.nn.Module], torch.Tensor],
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> None:
    """Thirty steps; `step` makes random inputs and gives the loss."""
    model.train()
    optimizer = kind(model.parameters(), lr=1e-4)
    for _ in range(30):
        loss = step(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
