"""A small model around a body of code, captured for real, and the region of everything it computes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from advisor import testing
from advisor.alignment.align import Alignment, align
from advisor.model import Graph
from advisor.source import Source

HEAD = """\
import math
import torch
import torch.nn.functional as F
import torch.nn.functional as nnf
from torch import einsum, nn
from torch.nn.functional import softmax as soft


def scaled(x, factor=2.0):
    return x * factor


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def checked(x):
    assert x.dim() == 4
    return x * 2.0


class AlwaysDropout(nn.Dropout):
    def forward(self, x):
        return F.dropout(x, self.p, True)


class QuietDropout(nn.Dropout):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)
        self.none = None
        self.always = AlwaysDropout(0.0)
        self.quiet = QuietDropout(0.0)
        self.layers = nn.ModuleList([nn.Dropout(0.0), nn.GELU()])
        self.stack = nn.Sequential(nn.Dropout(0.0), nn.GELU())
        self.act = nn.GELU()
        self.kept = F.silu
        self.flag = True
        self.off = False
        self.scale = 0.5
        self.register_buffer("tri", torch.ones(8, 8, dtype=torch.bool).tril(), persistent=False)

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) * self.scale

    def forward(self, q, k, v{more}):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    given = [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
    return [*given{given}]
"""


MASK = ("mask=None", "(torch.ones(8, 8).tril() == 0)")
MASKED = "if mask is not None:\n    s = s.masked_fill(mask, -1e9)\n"


def text_of(body: str, more: str = "", given: str = "") -> str:
    text = HEAD.replace("{body}", textwrap.indent(body, " " * 8))
    return text.replace("{more}", f", {more}" if more else "").replace("{given}", f", {given}" if given else "")


def captured(folder: Path, text: str) -> tuple[Source, Graph]:
    (folder / "example.py").write_text(text, encoding="utf-8")
    (graph,) = testing.capture(folder)
    return Source.read(folder, "example.py"), graph


def called(folder: Path, text: str) -> tuple[Source, Graph]:
    """The calls of one step as the eager recorder sees them."""
    from advisor.capture.annotate import Annotation
    from advisor.capture.eager import EagerRecorder
    from advisor.ingest.graph import read_graphs

    (folder / "example.py").write_text(text, encoding="utf-8")
    module = testing.load_module(folder / "example.py")
    model, inputs = module.Model(), module.get_inputs()
    annotation = Annotation([model], folder, str(folder), loop=EagerRecorder(), steps=2, dynamo=False)
    annotation.begin()
    for _ in range(2):
        model(*inputs)
        annotation.advance()
    annotation.write()
    (graph,) = read_graphs(folder / "graph.json", folder)[0]
    return Source.read(folder, "example.py"), graph


def whole(graph: Graph) -> tuple[int, frozenset[int]]:
    """The region from everything the graph is given to what it returns."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    (root,) = output.inputs()
    return root, frozenset(n.index for n in graph.nodes if n.op in ("placeholder", "get_attr"))


def texts(found: Alignment) -> set[str]:
    return {found.source.segment(bound.expression) for bound in found.values.values()}


def whole_of(folder: Path, body: str, more: str = "", given: str = "", **options: bool) -> Alignment:
    source, graph = captured(folder, text_of(body, more, given))
    return align(source, graph, *whole(graph), read=lambda path: Source.read(folder, path), **options)


def shown(found: Alignment) -> list[tuple[str, bool, bool]]:
    """Every branch: test, outcome, whether other code would be lost."""
    return [(found.source.segment(b.test), b.taken, b.lost is not None) for b in found.branches]


def under(found: Alignment) -> Mapping[str, list[str]]:
    """The conditions of every value that has some."""
    return {
        found.source.segment(bound.expression): [found.source.segment(b.test) for b in found.conditions[index]]
        for index, bound in found.values.items()
        if index in found.conditions
    }
