"""Trains whisper's model as it is: a control on random audio."""

import torch
from recipe_help import train
from whisper.model import ModelDimensions, Whisper

torch.manual_seed(0)
model = Whisper(ModelDimensions(16, 32, 64, 4, 2, 128, 16, 64, 4, 2))
torch.nn.init.normal_(model.decoder.positional_embedding)


def step(model):
    tokens = torch.randint(0, 128, (2, 17))
    scores = model(torch.randn(2, 16, 64), tokens[:, :-1])
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


train(model, step)
