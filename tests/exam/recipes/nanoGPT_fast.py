"""Trains nanoGPT as it is: a control."""

import torch
from model import GPT, GPTConfig
from recipe_help import train

torch.manual_seed(0)
model = GPT(GPTConfig(block_size=64, vocab_size=128, n_layer=2, n_head=2, n_embd=64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]


train(model, step)
