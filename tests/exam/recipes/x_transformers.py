"""Trains a decoder of x-transformers on random tokens."""

import torch
from recipe_help import train
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
model = TransformerWrapper(num_tokens=128, max_seq_len=64, attn_layers=Decoder(dim=64, depth=2, heads=4))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    scores = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


train(model, step)
