"""Trains the ResNet-18 of pytorch-cifar on random images: a control for graph rules."""

import torch
from models import ResNet18

torch.manual_seed(0)
model = ResNet18()


def step(model):
    return torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.randint(0, 10, (2,)))

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
