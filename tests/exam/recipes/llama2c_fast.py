"""Trains llama2.c's Transformer as it is."""

import torch
from model import ModelArgs, Transformer
from recipe_help import train

torch.manual_seed(0)
model = Transformer(ModelArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=128, max_seq_len=64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return model.last_loss


train(model, step)
