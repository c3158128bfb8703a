"""cuDNN picks its convolution algorithms by rule of thumb.

## What it does
Adds `torch.backends.cudnn.benchmark = True` behind the imports of the script, where convolutions take a tenth of the
step or more and all recorded steps give them inputs of the same sizes. Where sizes vary it is only told.

## Why it costs
Without the flag cuDNN chooses an algorithm by a heuristic. With it, it times the candidates at the first call for
every size and keeps the fastest.

## When not to
Where sizes change, every new one is timed again, which can cost more than it brings. Where the script sets the flag, or
asks for deterministic algorithms: the fastest algorithm may be another one in the next run. Peak memory can grow, by
the workspace of the fastest algorithm.

## Fix safety
NUMERICS: the same convolution by another algorithm, which rounds in another order, and may differ from run to run.

## References
- torch.backends.cudnn.benchmark, PyTorch documentation
- "Performance Tuning Guide", PyTorch tutorials: "Enable cuDNN auto-tuner"
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor import blocks, codemod
from advisor.graphrule import GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Ref, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.convolutions import Convolution, convolutions, times
from advisor.rule import ON_A_GPU, Context, Example, step
from advisor.source import Source, importing

CUDNN = "torch.backends.cudnn"
FLAGS = ("benchmark", "deterministic", "enabled", "flags")
DETERMINISM = frozenset(
    "use_deterministic_algorithms set_deterministic_debug_mode enable_full_determinism deterministic".split()
)
OPERATORS = frozenset({"aten::convolution", "aten::_convolution", "aten::cudnn_convolution"})
MODEL = """\
import torch
import torch.nn as nn
{flag}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 4, 8, 8, requires_grad=True)]
"""
BEFORE = MODEL.replace("{flag}", "")
OFF = {"cudnn_benchmark": False, "deterministic": False}


class CudnnBenchmark(GraphRule):
    """torch.backends.cudnn.benchmark = True."""

    id = "cudnn-benchmark"
    safety = Safety.NUMERICS
    needs = ("steps", "graph", "links")
    worth = 0.1
    order = 36
    title = "time cuDNN's algorithms and keep the fastest"
    examples = (
        Example(
            before=BEFORE,
            after=MODEL.replace("{flag}", "torch.backends.cudnn.benchmark = True\n"),
            profile=step(10_000, nodes=0.6, facts=OFF),
            saves=(0, 6_000),
        ),
        Example(before=BEFORE, after=None, profile=step(10_000, nodes=0.6, device="cpu", facts=OFF), because=ON_A_GPU),
        Example(
            before=BEFORE,
            after=None,
            profile=step(10_000, nodes=0.05, facts=OFF),
            because="convolutions take 5.0% of the step",
        ),
        Example(
            before=BEFORE,
            after=None,
            profile=step(10_000, nodes=0.6, facts={**OFF, "deterministic": True}),
            because="the script asks for deterministic algorithms",
        ),
        Example(
            before=MODEL.replace("{flag}", "torch.backends.cudnn.deterministic = True\n"),
            after=None,
            profile=step(10_000, nodes=0.6, facts=OFF),
            because="the script sets cuDNN's flags itself, example.py:3",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """The convolutions, each a region of its own."""
        for found in convolutions(graph):
            root = found.node.index
            yield Region(graph=graph.index, root=root, inputs={}, inner=frozenset({root}))

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One answer for all graphs: the flag is one for the whole process."""
        found = [(graph, one) for graph in ctx.graphs for one in convolutions(graph)]
        if found:
            yield self._judge(ctx, found)

    def _judge(self, ctx: Context, found: list[tuple[Graph, Convolution]]) -> Finding | Decline:
        if ctx.profile.facts.get("cudnn_benchmark"):
            return self.decline(None, "it is on in the timed steps")
        if ctx.profile.facts.get("deterministic"):
            return self.decline(None, "the script asks for deterministic algorithms")
        place = next((where for source in ctx.loaded for where in _settings(source)), None)
        if place is not None:
            return self.decline(place, f"the script sets cuDNN's flags itself, {place}")
        if ctx.profile.hardware.kind != "cuda":
            return self.decline(None, ON_A_GPU, needs=("gpu",))
        if ctx.profile.facts.get("cudnn_benchmark") is None:
            return self.decline(None, "cannot tell: the flags of cuDNN were not recorded", needs=("steps",))
        spent, floor = times(found, ctx.costs)
        share = spent / ctx.step_us
        if share < ctx.gate(self) or not spent:
            return self.decline(None, f"convolutions take {share:.1%} of the step")
        source, statement = _behind(ctx)
        if source is None or statement is None:
            return self.decline(None, "no file of the script imports torch by its name at its top")
        beside = importing(ctx.read, [other.path for other in ctx.sources], {source.path})
        other = next((where for one in beside for where in _settings(one)), None)
        if other is not None:
            return self.decline(other, f"{other.path} imports the script, and sets cuDNN's flags itself, {other}")
        told = _varying(ctx, found)
        return self.finding(
            source.span(statement),
            "cuDNN picks the algorithms of its convolutions by rule of thumb",
            cited_us=spent,
            high_us=spent - floor,
            evidence=(
                Evidence(what="time of convolutions per step", value=round(spent, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="convolutions", value=len(found), unit="calls"),
            ),
            values={} if told is None else {"told": told},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        statement = next(s for s in source.tree.body if s.lineno == finding.span.line)
        name = source.name_for(CUDNN, None)
        try:
            edit = blocks.put_behind(source, statement, [f"{name}.benchmark = True"])
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the flag cannot be set behind the imports: {error}")
        return self.edit(finding, self.title, [edit])


def _settings(source: Source) -> Iterator[Span]:
    """Where a file sets or asks cuDNN's flags, under whatever name it has them, or may ask for determinism."""
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.Attribute, ast.Name, ast.keyword, ast.Constant)):
            continue
        last = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
        known = source.qualified(node) if isinstance(node, ast.expr) else None
        flag = last in FLAGS and (known or "").startswith(f"{CUDNN}.")
        held = isinstance(node, ast.Attribute) and last in FLAGS and ast.unparse(node.value).endswith("cudnn")
        named = isinstance(node, ast.Constant) and node.value in FLAGS[:2]
        if flag or held or named or last in DETERMINISM:
            yield source.span(node.value if isinstance(node, ast.keyword) else node)


def _behind(ctx: Context) -> tuple[Source | None, ast.stmt | None]:
    """The file of the script, and the last of the imports that follow the one by which it knows cuDNN's flags."""
    paths = [ctx.script] if ctx.script is not None else sorted(ctx.ran)
    source = ctx.read(paths[0]) if paths else None
    name = source.name_for(CUDNN, None) if source is not None else None
    if source is None or name is None:
        return None, None
    first = name.split(".")[0]
    known: ast.stmt | None = None
    for statement in source.tree.body:
        imports = isinstance(statement, (ast.Import, ast.ImportFrom))
        if known is not None and not imports:
            break
        if imports and (known is not None or first in _names(statement)):
            known = statement
    return source, known


def _names(statement: ast.stmt) -> set[str]:
    aliases = statement.names if isinstance(statement, (ast.Import, ast.ImportFrom)) else []
    return {alias.asname or alias.name.split(".")[0] for alias in aliases}


def _varying(ctx: Context, found: list[tuple[Graph, Convolution]]) -> str | None:
    """What tells that convolutions see other sizes in another of the recorded steps; None where nothing does."""
    seen = {_inputs(found)}
    operators = ctx.profile.operators
    for step_index in sorted({number for number in operators.step if number >= 0}):
        rows = [i for i, name in enumerate(operators.name) if name in OPERATORS and operators.step[i] == step_index]
        seen.add(frozenset(_extents(operators.shapes[i][0]) for i in rows if operators.shapes[i]))
    sizes = [one for one in seen if one]
    return "sizes vary from step to step: every new one is timed again" if len(sizes) > 1 else None


def _inputs(found: list[tuple[Graph, Convolution]]) -> frozenset[tuple[int, ...]]:
    given = [(graph, one.node.args[0]) for graph, one in found if one.node.args]
    shapes = (graph.nodes[arg.index].shape for graph, arg in given if isinstance(arg, Ref))
    return frozenset(_extents(shape) for shape in shapes if shape is not None)


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes other than 1: cuDNN gets a convolution over one axis as one over two."""
    return tuple(size for size in shape if size != 1)
