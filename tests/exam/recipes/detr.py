"""Trains DETR's transformer on random features."""

import importlib.util
import pathlib
import sys

import torch

path = pathlib.Path(__file__).parent / "models" / "transformer.py"
spec = importlib.util.spec_from_file_location("detr_transformer", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
torch.manual_seed(0)
model = module.Transformer(
    d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, return_intermediate_dec=True
)


def step(model):
    features, places = torch.randn(2, 64, 4, 6), torch.randn(2, 64, 4, 6)
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    mask[:, :, 5] = True
    decoded, _ = model(features, mask, torch.randn(10, 64), places)
    return decoded.square().mean()

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
