"""Trains the linear attention of latent diffusion: a trap."""

import torch
from ldm.modules.attention import LinearAttention

torch.manual_seed(0)
model = torch.nn.Sequential(LinearAttention(32), LinearAttention(32))


def step(model):
    return model(torch.randn(2, 32, 8, 8)).square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
