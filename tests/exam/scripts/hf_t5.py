"""Trains a small T5ForConditionalGeneration of transformers with its written-out attention on random tokens."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(
    vocab_size=128,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
    attn_implementation="eager",
)
model = T5ForConditionalGeneration(config).train()


def step():
    tokens = torch.randint(0, 128, (2, 48))
    return model(input_ids=tokens, labels=tokens).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
