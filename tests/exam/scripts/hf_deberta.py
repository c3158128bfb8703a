"""Trains a small DebertaV2ForMaskedLM of transformers (disentangled attention: a trap) on random tokens."""

import torch
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

torch.manual_seed(0)
config = DebertaV2Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    relative_attention=True,
    position_biased_input=False,
    pos_att_type=["p2c", "c2p"],
    attn_implementation="eager",
)
model = DebertaV2ForMaskedLM(config).train()


def step():
    tokens = torch.randint(0, 128, (2, 48))
    return model(input_ids=tokens, labels=tokens).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
