"""Trains the Transformer of pytorch/examples' word_language_model on random tokens."""

import torch
from recipe_help import on_path, train

on_path("word_language_model")
from model import TransformerModel  # noqa: E402

torch.manual_seed(0)
model = TransformerModel(128, 64, 4, 128, 2)


def step(model):
    tokens = torch.randint(0, 128, (25, 4))
    return torch.nn.functional.nll_loss(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())


train(model, step)
