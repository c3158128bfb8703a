"""Trains the GPT of chapter 5's 00_orig.py, whose own loop needs data and a device, on random tokens."""

import importlib.util
import pathlib
import sys
import types

import torch

path = pathlib.Path(__file__).parent / "ch05/10_llm-training-speed/00_orig.py"
for name in ("tiktoken", "matplotlib", "matplotlib.pyplot", "requests"):
    sys.modules.setdefault(name, types.ModuleType(name))
spec = importlib.util.spec_from_file_location("orig", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
torch.manual_seed(0)
model = module.GPTModel(
    dict(vocab_size=128, context_length=64, emb_dim=64, n_heads=4, n_layers=2, drop_rate=0.1, qkv_bias=False)
)


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
