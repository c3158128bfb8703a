"""Trains the layer norm that labml writes out on random features."""

import importlib.machinery
import sys
from unittest import mock

import torch

for name in ("labml", "labml.configs", "labml.logger", "labml.utils", "labml.experiment", "labml.tracker", "labml_helpers", "labml_helpers.module"):
    sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
from labml_nn.normalization.layer_norm import LayerNorm  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(LayerNorm(64), torch.nn.Linear(64, 64), LayerNorm(64), torch.nn.Linear(64, 64))


def step(model):
    return model(torch.randn(4, 32, 64)).square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
