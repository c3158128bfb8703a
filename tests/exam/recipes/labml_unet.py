"""Trains the attention block of labml's diffusion U-Net and its swish on random features."""

import importlib.machinery
import sys
from unittest import mock

import torch

for name in ("labml", "labml.configs", "labml.logger", "labml.utils", "labml.experiment", "labml.tracker", "labml_helpers", "labml_helpers.module"):
    sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
from labml_nn.diffusion.ddpm.unet import AttentionBlock, Swish  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(AttentionBlock(32), Swish(), torch.nn.Conv2d(32, 32, 1), AttentionBlock(32))


def step(model):
    return model(torch.randn(2, 32, 8, 8)).square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
