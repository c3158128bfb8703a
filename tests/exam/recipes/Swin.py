"""Trains the Swin transformer of models/ on random images."""

import torch
from recipe_help import on_path, train
from torchvision_schemas import declare

declare()
on_path("models")
from swin_transformer import SwinTransformer  # noqa: E402

torch.manual_seed(0)
model = SwinTransformer(
    img_size=32, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4, num_classes=10
)


def step(model):
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))


train(model, step)
