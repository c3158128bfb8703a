"""Trains the GPT of build-nanogpt's train_gpt2.py, whose own loop needs data and a device: a control."""

import pathlib
import sys
import types

import torch

path = pathlib.Path(__file__).with_name("train_gpt2.py")
text = path.read_text().split("# " + "-" * 77 + "\nimport tiktoken")[0].replace("from hellaswag import render_example, iterate_examples", "")
module = types.ModuleType("train_gpt2")
sys.modules["train_gpt2"] = module
exec(compile(text, str(path), "exec"), module.__dict__)
torch.manual_seed(0)
model = module.GPT(module.GPTConfig(block_size=64, vocab_size=128, n_layer=2, n_head=2, n_embd=64))


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
