"""Trains the layer norm that labml writes out on random features."""

import torch
from recipe_help import stand_in, train

stand_in("labml labml.configs labml.logger labml.utils labml_helpers labml_helpers.module")
from labml_nn.normalization.layer_norm import LayerNorm  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(LayerNorm(64), torch.nn.Linear(64, 64), LayerNorm(64), torch.nn.Linear(64, 64))


def step(model):
    return model(torch.randn(4, 32, 64)).square().mean()


train(model, step)
