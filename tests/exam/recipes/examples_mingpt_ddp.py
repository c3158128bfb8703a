"""Trains the GPT of pytorch/examples' distributed/minGPT-ddp on random tokens."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "distributed" / "minGPT-ddp" / "mingpt"))
from model import GPT, GPTConfig  # noqa: E402

torch.manual_seed(0)
model = GPT(GPTConfig(model_type=None, n_layer=2, n_head=2, n_embd=64, vocab_size=128, block_size=64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
