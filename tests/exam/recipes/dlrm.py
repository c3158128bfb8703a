"""Trains DLRM on random categories: a control for graph rules."""

import sys

import numpy as np
import torch
from recipe_help import stand_in, train

stand_in(
    "onnx sklearn sklearn.metrics torchviz mlperf_logging fbgemm_gpu dlrm_data_pytorch tqdm optim optim.rwsadagrad"
)
stand_in("extend_distributed tricks tricks.md_embedding_bag tricks.qr_embedding_bag torch.utils.tensorboard")
sys.modules["extend_distributed"].my_size = 1
import dlrm_s_pytorch  # noqa: E402

torch.manual_seed(0)
model = dlrm_s_pytorch.DLRM_Net(
    16,
    np.array([50, 60, 70]),
    np.array([13, 32, 16]),
    np.array([22, 32, 1]),
    arch_interaction_op="dot",
    sigmoid_top=1,
    ndevices=-1,
    loss_function="bce",
)


def step(model):
    offsets = torch.arange(8).repeat(3, 1)
    score = model(torch.randn(8, 13), offsets, [torch.randint(0, 50, (8,)) for _ in range(3)])
    return torch.nn.functional.binary_cross_entropy(score, torch.rand(8, 1))


train(model, step, torch.optim.SGD)
