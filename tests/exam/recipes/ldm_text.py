"""Trains the text transformer of latent diffusion."""

import torch
from ldm.modules.x_transformer import Encoder, TransformerWrapper
from recipe_help import train

torch.manual_seed(0)
model = TransformerWrapper(num_tokens=128, max_seq_len=64, attn_layers=Encoder(dim=64, depth=2, heads=4))


def step(model):
    scores = model(torch.randint(0, 128, (2, 64)))
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.randint(0, 128, (128,)))


train(model, step)
