"""Trains a small ConvNeXt of timm on random images: a control for attention and norms."""

import torch
from torchvision_schemas import declare

declare()
import timm  # noqa: E402

torch.manual_seed(0)
model = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), num_classes=10)


def step():
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
