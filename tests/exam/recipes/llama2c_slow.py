"""Trains llama2.c's Transformer on its path for torch without scaled_dot_product_attention."""

import torch
from model import ModelArgs, Transformer
from recipe_help import train

torch.manual_seed(0)
model = Transformer(ModelArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=128, max_seq_len=64))
for layer in model.layers:
    layer.attention.flash = False
    mask = torch.triu(torch.full((1, 1, 64, 64), float("-inf")), diagonal=1)
    layer.attention.register_buffer("mask", mask)


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return model.last_loss


train(model, step)
