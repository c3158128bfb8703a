"""Trains bert_pytorch's BERT with its language model head on random tokens."""

import torch
from bert_pytorch.model import BERT, BERTLM
from recipe_help import train

torch.manual_seed(0)
model = BERTLM(BERT(128, hidden=64, n_layers=2, attn_heads=4), 128)
criterion = torch.nn.NLLLoss(ignore_index=0)


def step(model):
    tokens = torch.randint(1, 128, (4, 32))
    tokens[:, 28:] = 0  # padding
    segments = torch.ones_like(tokens)
    following, words = model(tokens, segments)
    target = torch.randint(1, 128, (4, 32))
    return criterion(words.transpose(1, 2), target) + criterion(following, torch.ones(4, dtype=torch.long))


train(model, step)
