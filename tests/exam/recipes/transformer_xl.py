"""Trains Transformer-XL's plain attention layers on random features; its import asks for a CUDA version."""

import torch
from recipe_help import on_path, train

torch.version.cuda = torch.version.cuda or "12.0"
on_path("pytorch", "pytorch/utils")
from mem_transformer import MultiHeadAttn  # noqa: E402

torch.manual_seed(0)
torch.version.cuda = None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(MultiHeadAttn(4, 64, 16, 0.0) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, attn_mask=mask)
        return x


model = Model()
mask = torch.triu(torch.ones(24, 24, dtype=torch.bool), diagonal=1)[:, :, None]


def step(model):
    return model(torch.randn(24, 2, 64), mask).square().mean()


train(model, step)
