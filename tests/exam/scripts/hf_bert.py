"""Trains a small BertForMaskedLM of transformers with its written-out attention on random tokens."""

import torch
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(0)
config = BertConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    attn_implementation="eager",
)
model = BertForMaskedLM(config).train()


def step():
    tokens = torch.randint(0, 128, (2, 48))
    mask = torch.ones_like(tokens)
    mask[:, 40:] = 0
    return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
