"""Trains the model of the annotated transformer on random tokens; packages for its plots and data are not needed.

Importing it steps an optimizer that trains nothing, to plot a schedule.
"""

import torch
from recipe_help import stand_in, train

stand_in("altair GPUtil spacy pandas torchtext torchtext.vocab torchtext.data torchtext.data.functional")
stand_in("torchtext.datasets")
import the_annotated_transformer as annotated  # noqa: E402

torch.manual_seed(0)
model = annotated.make_model(128, 128, N=2, d_model=64, d_ff=128, h=4)


def step(model):
    source, target = torch.randint(1, 128, (2, 16)), torch.randint(1, 128, (2, 13))
    source[:, 14:] = 0
    mask = (source != 0).unsqueeze(-2)
    hidden = model(source, target[:, :-1], mask, annotated.Batch.make_std_mask(target[:, :-1], 0))
    return torch.nn.functional.nll_loss(model.generator(hidden).flatten(0, 1), target[:, 1:].flatten())


train(model, step)
