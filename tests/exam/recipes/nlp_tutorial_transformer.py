"""Trains the model of 5-1.Transformer/Transformer.py with the settings that its own script part sets."""

import torch
from recipe_help import load, stand_in, train

stand_in("matplotlib matplotlib.pyplot")
instead = {"if __name__ == '__main__':": "if True:"}
module = load("5-1.Transformer/Transformer.py", "tutorial", until="    model = Transformer()", instead=instead)

torch.manual_seed(0)
model = module.Transformer()
source, target, labels = module.make_batch(module.sentences)


def step(model):
    return torch.nn.functional.cross_entropy(model(source, target)[0], labels.contiguous().view(-1))


train(model, step)
