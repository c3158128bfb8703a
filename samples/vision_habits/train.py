"""Train a convolutional network with the habits that tutorials and debugging leave behind in a loop on a GPU.

`python train.py` trains a small one on made-up pictures, on whatever device there is; `--preset h200` takes sizes for a
large GPU.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

PRESETS = {"h200": dict(stages="3,4,6,3", width=128, classes=1000, side=192, batch_size=128, steps=20_000)}


class Block(nn.Module):
    """A 3 x 3 convolution, then a pointwise feed-forward network with a squared ReLU (So et al. 2021)."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, 4 * width, 1)
        self.shrink = nn.Conv2d(4 * width, width, 1)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)))
        h = F.relu(self.expand(h)) ** 2
        return x + self.shrink(h)


class Net(nn.Module):
    """Stages of blocks, each at half the resolution and twice the width of the one before."""

    def __init__(self, stages, width, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        layers = []
        for number, count in enumerate(stages):
            if number:
                layers.append(nn.Conv2d(width, 2 * width, 2, stride=2))
                width *= 2
            layers += [Block(width) for _ in range(count)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a named set of sizes; other flags still win")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", default="1,1")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-every", type=int, default=50)
    preset = parser.parse_known_args()[0].preset
    if preset:
        parser.set_defaults(**PRESETS[preset])
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    stages = [int(count) for count in args.stages.split(",")]
    model = Net(stages, args.width, args.classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    pool = torch.randint(0, 256, (4 * args.batch_size, 3, args.side, args.side), dtype=torch.uint8, device=device)
    classes = torch.randint(0, args.classes, (4 * args.batch_size,), device=device)
    running = 0.0
    for step in range(1, args.steps + 1):
        first = step % 4 * args.batch_size
        pixels = pool[first : first + args.batch_size].float() / 255
        images = pixels - torch.full((args.batch_size, 3, args.side, args.side), 0.45).to(device)
        labels = classes[first : first + args.batch_size]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        running += loss.item()
        if step % args.log_every == 0:
            print(f"step {step:5d} | loss {running / args.log_every:.4f}", flush=True)
            running = 0.0


if __name__ == "__main__":
    main()
