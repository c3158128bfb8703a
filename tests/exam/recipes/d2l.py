"""Trains d2l's multi-head attention and its additive attention on random sequences."""

import torch
from recipe_help import stand_in, train

stand_in("gym pandas matplotlib matplotlib.pyplot matplotlib_inline IPython requests torchvision scipy PIL")
stand_in("scipy.spatial")
from d2l import torch as d2l  # noqa: E402

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(d2l.TransformerEncoderBlock(64, 128, 4, 0.1) for _ in range(2))
        self.additive = d2l.AdditiveAttention(64, 0.1)

    def forward(self, x, lengths):
        for block in self.blocks:
            x = block(x, lengths)
        return self.additive(x, x, x, lengths)


model = Model()


def step(model):
    return model(torch.randn(2, 12, 64), torch.tensor([9, 12])).square().mean()


train(model, step)
