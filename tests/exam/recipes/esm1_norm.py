"""Trains the LayerNorm that ESM-1 writes out, and its GELU, on random features."""

import torch
from esm.modules import ESM1LayerNorm, gelu
from recipe_help import train

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = ESM1LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


model = torch.nn.Sequential(Model(), Model())


def step(model):
    return model(torch.randn(4, 32, 64)).square().mean()


train(model, step)
