"""Trains two layers of labml's multi-head attention on random sequences; its logger is not needed."""

import importlib.machinery
import pathlib
import sys
import types
from unittest import mock

import torch

for name in ("labml", "labml.configs", "labml.logger", "labml.utils", "labml.experiment", "labml.tracker", "labml_helpers", "labml_helpers.module"):
    sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
packages = ("transformers", "transformers.xl")
for name in packages:  # without what their __init__ imports
    package = types.ModuleType(f"labml_nn.{name}")
    package.__path__ = [str(pathlib.Path(__file__).parent / "labml_nn" / name.replace(".", "/"))]
    sys.modules[package.__name__] = package
from labml_nn.transformers.mha import MultiHeadAttention  # noqa: E402

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = MultiHeadAttention(4, 64), MultiHeadAttention(4, 64)

    def forward(self, x, mask):
        x = x + self.first(query=x, key=x, value=x, mask=mask)
        return x + self.second(query=x, key=x, value=x, mask=mask)


model = Model()
mask = torch.tril(torch.ones(24, 24)).unsqueeze(-1)


def step(model):
    return model(torch.randn(24, 2, 64), mask).square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
