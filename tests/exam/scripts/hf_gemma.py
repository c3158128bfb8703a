"""Trains a small GemmaForCausalLM of transformers with its written-out attention on random tokens."""

import torch
from transformers import GemmaConfig, GemmaForCausalLM

torch.manual_seed(0)
config = GemmaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attn_implementation="eager",
)
model = GemmaForCausalLM(config).train()


def step():
    tokens = torch.randint(0, 128, (2, 48))
    return model(input_ids=tokens, labels=tokens).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
