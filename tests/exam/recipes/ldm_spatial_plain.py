"""Trains the spatial transformer of latent diffusion on random features, without its activation checkpoints."""

import torch
from ldm.modules.attention import SpatialTransformer

torch.manual_seed(0)
model = SpatialTransformer(32, 2, 16, depth=1, context_dim=24)
for block in model.transformer_blocks:
    block.checkpoint = False


def step(model):
    return model(torch.randn(2, 32, 8, 8), torch.randn(2, 10, 24)).square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
