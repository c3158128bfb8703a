"""Trains the DeepViT (re-attention: a trap) of vit-pytorch on random images."""

import torch
from recipe_help import train
from torchvision_schemas import declare

declare()
from vit_pytorch.deepvit import DeepViT  # noqa: E402

torch.manual_seed(0)
model = DeepViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)


def step(model):
    return torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))


train(model, step)
