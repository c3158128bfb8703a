"""Trains labml's relative attention (shifted scores: a trap) on random sequences."""

import sys
import types

import torch
from recipe_help import package, stand_in, train

stand_in("labml labml.configs labml.logger labml.utils labml_helpers labml_helpers.module")
# A mock called between softmax and the product would end the captured graph there.
sys.modules["labml"].tracker = types.SimpleNamespace(debug=lambda name, value: None)
package("labml_nn.transformers", "labml_nn/transformers")  # without its __init__
package("labml_nn.transformers.xl", "labml_nn/transformers/xl")
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention  # noqa: E402

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = RelativeMultiHeadAttention(4, 64), RelativeMultiHeadAttention(4, 64)

    def forward(self, x, mask):
        x = x + self.first(query=x, key=x, value=x, mask=mask)
        return x + self.second(query=x, key=x, value=x, mask=mask)


model = Model()
mask = torch.tril(torch.ones(24, 24)).unsqueeze(-1)


def step(model):
    return model(torch.randn(24, 2, 64), mask).square().mean()


train(model, step)
