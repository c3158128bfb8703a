"""Trains torchbench's speech transformer attention on random features."""

import torch
from recipe_help import load, train

FOLDER = "torchbenchmark/models/speech_transformer/speech_transformer/transformer"
module = load(f"{FOLDER}/attention.py", "speech_attention")

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(module.MultiHeadAttention(4, 64, 16, 16) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x, _ = layer(x, x, x, mask=mask)
        return x


model = Model()


def step(model):
    mask = torch.zeros(2, 24, 24, dtype=torch.bool)
    mask[:, :, 20:] = True
    return model(torch.randn(2, 24, 64), mask).square().mean()


train(model, step)
