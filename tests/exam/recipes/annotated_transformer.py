"""Trains the model of the annotated transformer on random tokens; packages for its plots and data are not needed."""

import importlib.machinery
import sys
from unittest import mock

import torch
import torch.nn.functional as F

torch._dynamo.config.suppress_errors  # Dynamo looks for pandas: load it before the stand-ins below
for name in "altair GPUtil spacy pandas torchtext torchtext.vocab torchtext.data torchtext.data.functional torchtext.datasets".split():
    stand_in = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
    sys.modules.setdefault(name, stand_in)
import the_annotated_transformer as annotated  # noqa: E402

torch.manual_seed(0)
model = annotated.make_model(128, 128, N=2, d_model=64, d_ff=128, h=4)


def step(model):
    source, target = torch.randint(1, 128, (2, 16)), torch.randint(1, 128, (2, 13))
    source[:, 14:] = 0
    mask = (source != 0).unsqueeze(-2)
    hidden = model(source, target[:, :-1], mask, annotated.Batch.make_std_mask(target[:, :-1], 0))
    return F.nll_loss(model.generator(hidden).flatten(0, 1), target[:, 1:].flatten())

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
