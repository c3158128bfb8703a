"""Trains the BERT of 5-2.BERT/BERT.py on the text and with the settings that its own script part sets."""

import pathlib
import sys
import types

import torch

path = pathlib.Path(__file__).parent / "5-2.BERT" / "BERT.py"
text = path.read_text().split("    model = BERT()")[0].replace("if __name__ == '__main__':", "if True:")
module = types.ModuleType("tutorial_bert")
sys.modules[module.__name__] = module
exec(compile(text, str(path), "exec"), module.__dict__)
torch.manual_seed(0)
model = module.BERT()
batch = [torch.LongTensor(each) for each in zip(*module.make_batch())]


def step(model):
    ids, segments, masked, positions, is_next = batch
    words, following = model(ids, segments, positions)
    loss = torch.nn.functional.cross_entropy(words.transpose(1, 2), masked)
    return loss + torch.nn.functional.cross_entropy(following, is_next)

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
