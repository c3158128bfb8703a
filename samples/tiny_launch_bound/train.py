"""Fit a deep and narrow residual network to a function: hundreds of operations of a few microseconds each.

On a GPU every operation takes less time than its launch by Python, and the device waits for the host most of the step.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.scale * self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, features, width, depth):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-every", type=int, default=1000)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    model = Net(args.features, args.width, args.depth).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    inputs = torch.randn(64 * args.batch_size, args.features, device=args.device)
    targets = torch.sin(inputs.square().sum(-1)) + inputs[:, 0]
    for step in range(args.steps):
        first = step % 64 * args.batch_size
        x, y = inputs[first : first + args.batch_size], targets[first : first + args.batch_size]
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0:
            print(f"step {step:6d} | loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
