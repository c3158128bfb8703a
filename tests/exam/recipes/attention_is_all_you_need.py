"""Trains transformer.Models.Transformer on random tokens with padding."""

import torch
from recipe_help import train
from transformer.Models import Transformer

torch.manual_seed(0)
model = Transformer(
    128, 128, src_pad_idx=1, trg_pad_idx=1, d_word_vec=64, d_model=64, d_inner=128, n_layers=2, n_head=4, d_k=16, d_v=16
)


def step(model):
    source = torch.randint(2, 128, (4, 24))
    target = torch.randint(2, 128, (4, 20))
    source[:, 20:] = 1
    target[:, 17:] = 1
    scores = model(source, target[:, :-1])
    return torch.nn.functional.cross_entropy(scores, target[:, 1:].reshape(-1), ignore_index=1)


train(model, step)
