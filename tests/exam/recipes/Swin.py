"""Trains the Swin transformer of models/ on random images."""

import pathlib
import sys

import torch
import torchvision_schemas

sys.path.insert(0, str(pathlib.Path(__file__).with_name("models")))
from swin_transformer import SwinTransformer  # noqa: E402

torch.manual_seed(0)
model = SwinTransformer(
    img_size=32, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4, num_classes=10
)


def step(model):
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
