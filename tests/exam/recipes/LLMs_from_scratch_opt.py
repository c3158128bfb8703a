"""Trains the GPT of chapter 5's 01_opt_single_gpu.py on random tokens: a control."""

import torch
from recipe_help import load, stand_in, train

stand_in("tiktoken matplotlib matplotlib.pyplot requests")
module = load("ch05/10_llm-training-speed/01_opt_single_gpu.py", "optimised")

torch.manual_seed(0)
model = module.GPTModel(
    {
        "vocab_size": 128,
        "context_length": 64,
        "emb_dim": 64,
        "n_heads": 4,
        "n_layers": 2,
        "drop_rate": 0.1,
        "qkv_bias": False,
    }
)


def step(model):
    tokens = torch.randint(0, 128, (4, 65))
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


train(model, step)
