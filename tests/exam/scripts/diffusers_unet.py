"""Trains a small conditional U-Net of diffusers with its written-out attention on random latents."""

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor

torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32, 32),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=24,
    attention_head_dim=8,
    norm_num_groups=8,
)
model.set_attn_processor(AttnProcessor())


def step():
    noise = torch.randn(2, 4, 8, 8)
    return (model(noise, torch.tensor([5, 9]), torch.randn(2, 6, 24)).sample - noise).square().mean()


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(16):
    loss = step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
