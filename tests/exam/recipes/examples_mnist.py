"""Trains the network of pytorch/examples' mnist on random images: a control."""

import torch
from recipe_help import on_path, stand_in, train

stand_in("torchvision")
on_path("mnist")
from main import Net  # noqa: E402

torch.manual_seed(0)
model = Net()


def step(model):
    return torch.nn.functional.nll_loss(model(torch.randn(4, 1, 28, 28)), torch.randint(0, 10, (4,)))


train(model, step)
