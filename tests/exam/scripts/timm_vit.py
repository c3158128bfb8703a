"""Trains a small ViT of timm with fused attention switched off on random images."""

import torch
from torchvision_schemas import declare

declare()
import timm  # noqa: E402
from timm.layers import set_fused_attn  # noqa: E402

torch.manual_seed(0)
set_fused_attn(False)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)


def step():
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
