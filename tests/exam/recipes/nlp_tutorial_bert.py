"""Trains the BERT of 5-2.BERT/BERT.py on the text and with the settings that its own script part sets."""

import torch
from recipe_help import load, train

instead = {"if __name__ == '__main__':": "if True:"}
module = load("5-2.BERT/BERT.py", "tutorial", until="    model = BERT()", instead=instead)

torch.manual_seed(0)
model = module.BERT()
batch = [torch.LongTensor(each) for each in zip(*module.make_batch(), strict=True)]


def step(model):
    ids, segments, masked, positions, is_next = batch
    words, following = model(ids, segments, positions)
    loss = torch.nn.functional.cross_entropy(words.transpose(1, 2), masked)
    return loss + torch.nn.functional.cross_entropy(following, is_next)


train(model, step)
