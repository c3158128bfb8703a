"""Trains a small Swin of torchvision on random images."""

import torch
from torchvision_schemas import declare

declare()
from torchvision.models.swin_transformer import SwinTransformer  # noqa: E402

torch.manual_seed(0)
model = SwinTransformer(
    patch_size=[2, 2], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10
)


def step():
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
