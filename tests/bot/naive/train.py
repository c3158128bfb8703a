"""A small transformer block that trains on noise."""

import math
import sys

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        weights = torch.softmax(scores, dim=-1)
        y = weights @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    torch.manual_seed(0)
    model = Attention(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(100_000):
        x = torch.randn(2, length, 64)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
