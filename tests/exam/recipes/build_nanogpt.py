"""Trains the GPT of build-nanogpt's train_gpt2.py, whose own loop needs data and a device: a control."""

import torch
from recipe_help import load, stand_in, train

stand_in("hellaswag")
module = load("train_gpt2.py", "train_gpt2", until="\nimport tiktoken")

torch.manual_seed(0)
model = module.GPT(module.GPTConfig(block_size=64, vocab_size=128, n_layer=2, n_head=2, n_embd=64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]


train(model, step)
