"""Trains torchbench's speech transformer attention on random features."""

import importlib.util
import sys
from pathlib import Path

import torch

path = Path(__file__).parent / "torchbenchmark/models/speech_transformer/speech_transformer/transformer/attention.py"
spec = importlib.util.spec_from_file_location("speech_attention", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
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

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
