"""Trains the graph attention of pytorch/examples on a random graph: a trap."""

import torch
from recipe_help import on_path, train

on_path("gat")
from main import GAT  # noqa: E402

torch.manual_seed(0)
model = GAT(in_features=32, n_hidden=16, n_heads=4, num_classes=5)
adjacency = (torch.rand(40, 40) > 0.7).float() + torch.eye(40)


def step(model):
    return torch.nn.functional.nll_loss(model(torch.randn(40, 32), adjacency), torch.randint(0, 5, (40,)))


train(model, step)
