"""Trains the norm and the feed-forward of torchbench's simple_gpt on random features."""

import torch
from recipe_help import on_path, train

on_path("torchbenchmark/models/simple_gpt")
from model import RMSNorm  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(RMSNorm(64), torch.nn.Linear(64, 64), RMSNorm(64), torch.nn.Linear(64, 64))


def step(model):
    return model(torch.randn(4, 32, 64)).square().mean()


train(model, step)
