"""Trains torchbench's nanogpt, on its path for torch without scaled_dot_product_attention, on random tokens."""

import torch
from recipe_help import on_path, train

on_path("torchbenchmark/models/nanogpt")
from model import GPT, GPTConfig  # noqa: E402

torch.manual_seed(0)
model = GPT(GPTConfig(block_size=64, vocab_size=128, n_layer=2, n_head=2, n_embd=64))
for block in model.transformer.h:
    block.attn.flash = False
    block.attn.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    scores = model(tokens[:, :-1].contiguous())
    scores = scores[0] if isinstance(scores, tuple) else scores
    return torch.nn.functional.cross_entropy(scores[:, -1], tokens[:, -1])


train(model, step)
