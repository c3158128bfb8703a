"""Trains Transformer-XL's relative attention (a trap) layers on random features; its import asks for a CUDA version."""

import torch
from recipe_help import on_path, train

torch.version.cuda = torch.version.cuda or "12.0"
on_path("pytorch", "pytorch/utils")
from mem_transformer import RelPartialLearnableMultiHeadAttn  # noqa: E402

torch.manual_seed(0)
torch.version.cuda = None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.place_bias = (torch.nn.Parameter(torch.randn(4, 16)) for _ in range(2))
        self.layers = torch.nn.ModuleList(RelPartialLearnableMultiHeadAttn(4, 64, 16, 0.0) for _ in range(2))

    def forward(self, x, places, mask):
        for layer in self.layers:
            x = layer(x, places, self.bias, self.place_bias, attn_mask=mask)
        return x


model = Model()
mask = torch.triu(torch.ones(24, 24, dtype=torch.bool), diagonal=1)[:, :, None]


def step(model):
    return model(torch.randn(24, 2, 64), torch.randn(24, 1, 64), mask).square().mean()


train(model, step)
