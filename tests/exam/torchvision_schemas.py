"""Lets torchvision's Python part import where its compiled part cannot be loaded, as its CUDA build on a CPU torch."""

import importlib.util
import pathlib

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor a, Tensor b, float c, SymInt d, SymInt e, int f, bool g) -> Tensor",
    "_roi_align_backward(Tensor a, Tensor b, float c, SymInt d, SymInt e, SymInt f, SymInt g, SymInt h, SymInt i, "
    "int j, bool k) -> Tensor",
    "roi_pool(Tensor a, Tensor b, float c, SymInt d, SymInt e) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor a, Tensor b, Tensor c, float d, SymInt e, SymInt f, SymInt g, SymInt h, SymInt i, "
    "SymInt j) -> Tensor",
    "ps_roi_align(Tensor a, Tensor b, float c, SymInt d, SymInt e, int f) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor a, Tensor b, Tensor c, float d, SymInt e, SymInt f, int g, SymInt h, SymInt i, "
    "SymInt j, SymInt k) -> Tensor",
    "ps_roi_pool(Tensor a, Tensor b, float c, SymInt d, SymInt e) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor a, Tensor b, Tensor c, float d, SymInt e, SymInt f, SymInt g, SymInt h, SymInt i, "
    "SymInt j) -> Tensor",
    "deform_conv2d(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, SymInt f, SymInt g, SymInt h, SymInt i, SymInt j, "
    "SymInt k, SymInt l, SymInt m, bool n) -> Tensor",
    "_deform_conv2d_backward(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, SymInt g, SymInt h, SymInt i, "
    "SymInt j, SymInt k, SymInt l, SymInt m, SymInt n, bool o) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def declare() -> None:
    """Declare the operators whose schemas torchvision's import asks for, unless its compiled part can be loaded."""
    if not _loads():
        _kept.append(torch.library.Library("torchvision", "DEF"))
        for schema in SCHEMAS:
            _kept[-1].define(schema)


_kept: list[torch.library.Library] = []  # a library that is collected takes its operators away


def _loads() -> bool:
    found = importlib.util.find_spec("torchvision")
    assert found is not None and found.origin is not None, "torchvision is not installed"
    for compiled in pathlib.Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            return False
    return True
