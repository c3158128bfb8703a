"""Trains torchvision's ResNet-50 on small random images: a control for attention and norms."""

import torch
from torchvision_schemas import declare

declare()
from torchvision.models import resnet50  # noqa: E402

torch.manual_seed(0)
model = resnet50(num_classes=10)


def step():
    return torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.randint(0, 10, (2,)))


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(12):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
