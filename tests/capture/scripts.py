"""Training scripts as their users write them, for tests that run them through capture unedited."""

from __future__ import annotations

TRAINER = """\
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 128, (32,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager",
)
model = LlamaForCausalLM(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, max_steps=60, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, logging_steps=50,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
"""

LIGHTNING = """\
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def training_step(self, batch, _index):
        x, y = batch
        return nn.functional.cross_entropy(self.body(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(1024, 32), torch.randint(0, 8, (1024,)))
trainer = lightning.Trainer(
    max_steps=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(data, batch_size=16))
"""

KERNEL_BENCH = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.layer(x))


def get_init_inputs():
    return [16]


def get_inputs():
    return [torch.randn(4, 16)]
"""

LOOP = """\
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    {body}
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

CHECKPOINTED_BATCH_NORM = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(100):
    net(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
