"""Trains the spatial self-attention and the attention block of latent diffusion on random features."""

import torch
from ldm.modules.attention import SpatialSelfAttention
from ldm.modules.diffusionmodules.model import AttnBlock, ResnetBlock
from recipe_help import train

torch.manual_seed(0)
model = torch.nn.Sequential(
    SpatialSelfAttention(32), ResnetBlock(in_channels=32, dropout=0.0, temb_channels=0), AttnBlock(32)
)


def step(model):
    x = torch.randn(2, 32, 8, 8)
    return model[2](model[1](model[0](x), None)).square().mean()


train(model, step)
