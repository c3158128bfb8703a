"""Trains the Transformer of pytorch/examples' word_language_model on random tokens."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "word_language_model"))
from model import TransformerModel  # noqa: E402

torch.manual_seed(0)
model = TransformerModel(128, 64, 4, 128, 2)


def step(model):
    tokens = torch.randint(0, 128, (25, 4))
    return torch.nn.functional.nll_loss(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
