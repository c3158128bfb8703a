"""Trains the model of 5-1.Transformer/Transformer.py with the settings that its own script part sets."""

import pathlib
import sys
import types

import torch

path = pathlib.Path(__file__).parent / "5-1.Transformer" / "Transformer.py"
text = path.read_text().split("    model = Transformer()")[0].replace("if __name__ == '__main__':", "if True:")
module = types.ModuleType("tutorial_transformer")
sys.modules[module.__name__] = module
sys.modules.setdefault("matplotlib", types.ModuleType("matplotlib"))
sys.modules.setdefault("matplotlib.pyplot", types.ModuleType("matplotlib.pyplot"))
exec(compile(text, str(path), "exec"), module.__dict__)
module.n_layers, module.d_model, module.d_ff, module.d_k, module.d_v, module.n_heads = 2, 64, 128, 16, 16, 4
torch.manual_seed(0)
model = module.Transformer()
source, target, labels = module.make_batch(module.sentences)


def step(model):
    return torch.nn.functional.cross_entropy(model(source, target)[0], labels.contiguous().view(-1))

model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for _ in range(30):
    loss = step(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
