"""Trains the network of pytorch/examples' mnist on random images: a control."""

import sys
import importlib.machinery
import types
from pathlib import Path

import torch

torchvision = types.ModuleType("torchvision")
torchvision.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
torchvision.datasets = torchvision.transforms = None
sys.modules["torchvision"] = torchvision
sys.path.insert(0, str(Path(__file__).parent / "mnist"))
from main import Net  # noqa: E402

torch.manual_seed(0)
model = Net()


def step(model):
    return torch.nn.functional.nll_loss(model(torch.randn(4, 1, 28, 28)), torch.randint(0, 10, (4,)))

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
