"""Train a segmentation network on volumes that worker processes prepare and the loop copies to the GPU as they come.

`python train.py` trains a small one on made-up volumes, on whatever device there is; `--preset h200` takes sizes for a
large GPU.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PRESETS = {"h200": dict(side=64, volumes=64, repeat=2000, width=8, depth=3, classes=6, batch_size=16, workers=8)}


class Volumes(Dataset):
    """Made-up scans with a class for every voxel, each `repeat` times."""

    def __init__(self, count, repeat, side, classes, seed):
        draw = torch.Generator().manual_seed(seed)
        coarse = torch.randn(count, 1, 4, 4, 4, generator=draw)
        scans = F.interpolate(coarse, size=(side, side, side), mode="trilinear", align_corners=True)
        self.masks = ((scans[:, 0] + 2) * classes / 4).long().clamp_(0, classes - 1)
        self.scans = scans + 0.3 * torch.randn(scans.shape, generator=draw)
        self.repeat = repeat

    def __len__(self):
        return len(self.scans) * self.repeat

    def __getitem__(self, index):
        number = index % len(self.scans)
        return self.scans[number], self.masks[number]


def convolutions(before, after):
    layers = []
    for inner in (before, after):
        layers += [nn.Conv3d(inner, after, 3, padding=1, bias=False), nn.BatchNorm3d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A 3D U-Net (Cicek et al. 2016) with `depth` halvings of the resolution."""

    def __init__(self, width, depth, classes):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(convolutions(b, a) for b, a in zip([1, *widths], widths))
        self.up = nn.ModuleList(convolutions(a + b, b) for b, a in zip(widths, widths[1:]))
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x):
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if not level else F.max_pool3d(x, 2))
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = F.interpolate(x, scale_factor=2)
            x = self.up[level](torch.cat((x, kept[level]), dim=1))
        return self.head(x)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a named set of sizes; other flags still win")
    parser.add_argument("--side", type=int, default=16)
    parser.add_argument("--volumes", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=4, help="how often an epoch shows each volume")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
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
    data = Volumes(args.volumes, args.repeat, args.side, args.classes, args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    device = torch.device(args.device)
    model = UNet(args.width, args.depth, args.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        for step, (scans, masks) in enumerate(loader):
            scans, masks = scans.to(device), masks.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(scans), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.log_every == 0:
                print(f"epoch {epoch:3d} | step {step:5d} | loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
