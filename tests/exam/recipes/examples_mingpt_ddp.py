"""Trains the GPT of pytorch/examples' distributed/minGPT-ddp on random tokens."""

import torch
from recipe_help import on_path, train

on_path("distributed/minGPT-ddp/mingpt")
from model import GPT, GPTConfig  # noqa: E402

torch.manual_seed(0)
model = GPT(GPTConfig(model_type=None, n_layer=2, n_head=2, n_embd=64, vocab_size=128, block_size=64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]


train(model, step)
