"""Trains a small ViT of transformers with its written-out attention on random images."""

import torch
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
config = ViTConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
    num_labels=10,
    attn_implementation="eager",
)
model = ViTForImageClassification(config).train()


def step():
    return model(pixel_values=torch.randn(4, 3, 32, 32), labels=torch.randint(0, 10, (4,))).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
