"""Trains a decoder of x-transformers on random tokens."""

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
model = TransformerWrapper(num_tokens=128, max_seq_len=64, attn_layers=Decoder(dim=64, depth=2, heads=4))


def step():
    tokens = torch.randint(0, 128, (4, 65))
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
