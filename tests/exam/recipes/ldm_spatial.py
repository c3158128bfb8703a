"""Trains the spatial transformer of latent diffusion on random features."""

import torch
from ldm.modules.attention import SpatialTransformer
from recipe_help import train

torch.manual_seed(0)
model = SpatialTransformer(32, 2, 16, depth=1, context_dim=24)


def step(model):
    return model(torch.randn(2, 32, 8, 8), torch.randn(2, 10, 24)).square().mean()


train(model, step)
