"""Trains yunjey's residual network on random images: a control for graph rules."""

import sys

import torch
from recipe_help import load, stand_in, train

stand_in("torchvision torchvision.transforms")
sys.modules["torchvision"].datasets.CIFAR10.return_value = range(8)
module = load("tutorials/02-intermediate/deep_residual_network/main.py", "residual", until="\n# For updating learning")

torch.manual_seed(0)
model = module.model


def step(model):
    return torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.randint(0, 10, (2,)))


train(model, step)
