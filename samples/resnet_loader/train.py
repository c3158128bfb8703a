"""Train a ResNet on JPEG files that the training process decodes itself, one after the other, while the GPU waits.

`python train.py` makes a few small JPEGs and trains a small ResNet on a CPU; `--preset h200` trains ResNet-50 on
500 x 375 pictures, about the size of ImageNet's. Needs Pillow.
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

PRESETS = {
    "h200": dict(images=512, repeat=100, picture=500, crop=224, width=64, blocks="3,4,6,3", classes=1000, batch_size=32)
}


def make_pictures(folder, count, size, classes, seed):
    """Pictures of random gradients and noise, `size` wide and three quarters as high, once per folder."""
    draw = np.random.default_rng(seed)
    height = size * 3 // 4
    rows, columns = np.mgrid[0:height, 0:size].astype(np.float32) / size
    noise = draw.normal(0, 12, (height, size, 3)).astype(np.float32)
    for number in range(count):
        path = folder / f"{number:06d}_{number % classes:04d}.jpg"
        if path.exists():
            continue
        across, down = draw.uniform(3, 40, (2, 3)).astype(np.float32)
        waves = np.sin(rows[..., None] * down + columns[..., None] * across)
        picture = 127 + 90 * waves + np.roll(noise, number, axis=1)
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path, quality=90)


class JpegFolder(Dataset):
    """JPEG files with their class in the name, each `repeat` times in other crops, which are alike in every run."""

    def __init__(self, folder, repeat, crop, seed):
        self.paths = sorted(folder.glob("*.jpg")) * repeat
        self.crop = crop
        self.seed = seed

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        draw = random.Random(self.seed * 1_000_003 + index)
        image = Image.open(path).convert("RGB")
        side = int(min(image.size) * draw.uniform(0.5, 1.0))
        left, top = draw.randint(0, image.width - side), draw.randint(0, image.height - side)
        image = image.resize((self.crop, self.crop), Image.BILINEAR, box=(left, top, left + side, top + side))
        if draw.random() < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float().div_(255).sub_(0.45).div_(0.225), int(path.stem.split("_")[1])


class Bottleneck(nn.Module):
    def __init__(self, inner, outer, stride, before):
        super().__init__()
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Identity()
        if stride != 1 or before != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(before, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(self.bn3(self.conv3(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 with blocks 3, 4, 6, 3 and width 64 (He et al. 2015, with the stride in the 3 x 3 convolution)."""

    def __init__(self, blocks, width, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, before = [], width
        for number, count in enumerate(blocks):
            inner = width * 2**number
            for block in range(count):
                stages.append(Bottleneck(inner, 4 * inner, 2 if number and not block else 1, before))
                before = 4 * inner
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(self.stages(x).mean((2, 3)))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a named set of sizes; other flags still win")
    parser.add_argument("--data", type=Path, help="folder for the pictures; a temporary one by default")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=4, help="how often an epoch shows each picture")
    parser.add_argument("--picture", type=int, default=160, help="width of a picture")
    parser.add_argument("--crop", type=int, default=32)
    parser.add_argument("--blocks", default="1,1")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    preset = parser.parse_known_args()[0].preset
    if preset:
        parser.set_defaults(**PRESETS[preset])
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    folder = args.data or Path(tempfile.gettempdir()) / f"resnet_loader_{args.images}_{args.picture}_{args.classes}"
    folder.mkdir(parents=True, exist_ok=True)
    make_pictures(folder, args.images, args.picture, args.classes, args.seed)
    loader = DataLoader(JpegFolder(folder, args.repeat, args.crop, args.seed), batch_size=args.batch_size, shuffle=True)

    device = torch.device(args.device)
    model = ResNet([int(n) for n in args.blocks.split(",")], args.width, args.classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model.train()
    for epoch in range(args.epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch:3d} | loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
