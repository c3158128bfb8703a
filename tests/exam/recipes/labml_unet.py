"""Trains the attention block of labml's diffusion U-Net and its swish on random features."""

import torch
from recipe_help import stand_in, train

stand_in("labml labml.configs labml.logger labml.utils labml_helpers labml_helpers.module")
from labml_nn.diffusion.ddpm.unet import AttentionBlock, Swish  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(AttentionBlock(32), Swish(), torch.nn.Conv2d(32, 32, 1), AttentionBlock(32))


def step(model):
    return model(torch.randn(2, 32, 8, 8)).square().mean()


train(model, step)
