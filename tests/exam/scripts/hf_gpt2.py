"""Trains a small GPT2LMHeadModel of transformers with its written-out attention on random tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=128,
    n_positions=64,
    n_embd=64,
    n_layer=2,
    n_head=4,
    attn_implementation="eager",
)
model = GPT2LMHeadModel(config).train()


def step():
    tokens = torch.randint(0, 128, (2, 48))
    return model(input_ids=tokens, labels=tokens).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
