"""Trains DETR's transformer on random features."""

import torch
from recipe_help import load, train

module = load("models/transformer.py", "detr_transformer")

torch.manual_seed(0)
model = module.Transformer(
    d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, return_intermediate_dec=True
)


def step(model):
    features, places = torch.randn(2, 64, 4, 6), torch.randn(2, 64, 4, 6)
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    mask[:, :, 5] = True
    decoded, _ = model(features, mask, torch.randn(10, 64), places)
    return decoded.square().mean()


train(model, step)
