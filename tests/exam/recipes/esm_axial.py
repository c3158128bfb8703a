"""Trains ESM's row self-attention, whose scores are summed over rows: a trap."""

import torch
from esm.axial_attention import RowSelfAttention

torch.manual_seed(0)
model = RowSelfAttention(64, 4, dropout=0.0)


def step(model):
    return model(torch.randn(6, 16, 2, 64))[0].square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
