"""Trains ESM-2 on random residues, with the head weights asked for as its contact head does."""

import torch
from esm.model.esm2 import ESM2
from recipe_help import train

torch.manual_seed(0)
model = ESM2(num_layers=2, embed_dim=64, attention_heads=4)


def step(model):
    tokens = torch.randint(4, 24, (2, 32))
    tokens[:, 28:] = model.padding_idx
    scores = model(tokens, need_head_weights=True)["logits"]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.randint(4, 24, (64,)))


train(model, step)
