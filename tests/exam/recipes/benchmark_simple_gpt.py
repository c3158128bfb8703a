"""Trains the norm and the feed-forward of torchbench's simple_gpt on random features."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "torchbenchmark/models/simple_gpt"))
from model import RMSNorm  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(RMSNorm(64), torch.nn.Linear(64, 64), RMSNorm(64), torch.nn.Linear(64, 64))


def step(model):
    return model(torch.randn(4, 32, 64)).square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
