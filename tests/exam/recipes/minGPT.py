"""Trains mingpt.model.GPT on random tokens."""

import torch
from mingpt.model import GPT
from recipe_help import train

torch.manual_seed(0)
config = GPT.get_default_config()
config.model_type = None
config.n_layer, config.n_head, config.n_embd = 2, 2, 64
config.vocab_size, config.block_size = 128, 64
model = GPT(config)


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]


train(model, step)
