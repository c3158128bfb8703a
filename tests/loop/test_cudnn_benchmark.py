"""cuDNN's choice of algorithms: where sizes vary it is told, where the script sets the flags it is left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import registry, testing
from advisor.errors import SourceError
from advisor.model import Decline, Finding, Operators, Rewrite, Span
from advisor.rule import Context, step
from advisor.source import Source

pytest.importorskip("torch")
RULE = registry.load()[0]["cudnn-benchmark"].rule
OFF = {"cudnn_benchmark": False, "deterministic": False}
BEFORE = RULE.examples[0].before


def profiled(text: str, folder: Path, *shapes: tuple[int, ...]) -> tuple[Context, Source]:
    """An example on a GPU whose trace holds one convolution in each of some steps."""
    ctx, source = testing.context_of(RULE, text, step(10_000, nodes=0.6, facts=OFF), folder)
    count = len(shapes)
    rows = Operators(
        name=("aten::cudnn_convolution",) * count,
        start_us=tuple(float(i) for i in range(count)),
        duration_us=(1.0,) * count,
        thread=(1,) * count,
        sequence=(-1,) * count,
        forward_thread=(0,) * count,
        parent=(-1,) * count,
        step=tuple(range(count)),
        shapes=tuple((shape,) for shape in shapes),
        dtypes=(("float32",),) * count,
    )
    return replace(ctx, profile=replace(ctx.profile, operators=rows)), source


def reader(files: Mapping[str, Source]) -> Callable[[str], Source]:
    def read(path: str) -> Source:
        if path not in files:
            raise SourceError(f"there is no {path}")
        return files[path]

    return read


def test_the_same_sizes_in_every_step(tmp_path: Path) -> None:
    ctx, source = profiled(BEFORE, tmp_path, (2, 4, 8, 8), (2, 4, 8, 8))
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding) and isinstance(RULE.rewrite(found, source), Rewrite)


def test_sizes_that_vary_are_told(tmp_path: Path) -> None:
    ctx, source = profiled(BEFORE, tmp_path, (2, 4, 8, 8), (2, 4, 12, 8))
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    told = RULE.rewrite(found, source)
    assert isinstance(told, Decline) and "sizes vary" in told.reason


def test_cudnn_sees_a_convolution_over_one_axis_with_two(tmp_path: Path) -> None:
    ctx, source = profiled(BEFORE, tmp_path, (2, 4, 8, 8), (2, 4, 8, 1, 8))
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    assert isinstance(RULE.rewrite(found, source), Rewrite)


@pytest.mark.parametrize(
    ("imports", "line"),
    [
        ("import torch\nimport torch.nn as nn", "torch.backends.cudnn.benchmark = True"),
        (
            "import os\n\nos.environ['A'] = '1'\nimport torch\nfrom torch import nn",
            "torch.backends.cudnn.benchmark = True",
        ),
        ("import torch\nfrom torch import nn\nfrom torch.backends import cudnn", "cudnn.benchmark = True"),
    ],
)
def test_the_flag_stands_behind_the_imports(tmp_path: Path, imports: str, line: str) -> None:
    text = BEFORE.replace("import torch\nimport torch.nn as nn", imports)
    ctx, source = profiled(text, tmp_path, (2, 4, 8, 8))
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    rewrite = RULE.rewrite(found, source)
    assert isinstance(rewrite, Rewrite)
    ((span, added),) = rewrite.edits
    assert added == f"{line}\n" and span.line == len(imports.splitlines()) + 1


@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cudnn.benchmark = False",
        "torch.backends.cudnn.deterministic = True",
        "torch.backends.cudnn.enabled = False",
        "torch.backends.cudnn.flags(benchmark=False)",
        "setattr(torch.backends.cudnn, 'benchmark', False)",
        "backends = torch.backends\nbackends.cudnn.benchmark = False",
        "if False:\n    torch.use_deterministic_algorithms(True)",
        "dict(deterministic=True)",
    ],
)
def test_a_script_that_sets_the_flags_is_left_alone(tmp_path: Path, setting: str) -> None:
    ctx, _ = profiled(BEFORE.replace("as nn\n", f"as nn\n\n{setting}\n"), tmp_path, (2, 4, 8, 8))
    (said,) = RULE.match(ctx)
    assert isinstance(said, Decline) and "sets cuDNN's flags itself" in said.reason


def test_flags_that_another_script_sets(tmp_path: Path) -> None:
    """They are not set here; but where that script imports this one, the flag that is put here would follow them."""
    ctx, source = profiled(BEFORE, tmp_path, (2, 4, 8, 8))

    def beside(text: str) -> Finding | Decline:
        files = {source.path: source, "evaluate.py": Source("evaluate.py", text), "net.py": Source("net.py", "")}
        graph = replace(ctx.graphs[0], span=Span(path="net.py", line=1, column=0, end_line=1, end_column=1))
        profile = replace(ctx.profile, graphs=(graph, *ctx.graphs[1:]))
        there = replace(ctx, profile=profile, read=reader(files), script=source.path, files_in=lambda _: tuple(files))
        (found,) = RULE.match(there)
        return found

    setting = "import torch\n\ntorch.backends.cudnn.benchmark = False\n"
    assert isinstance(beside(f"import net\n{setting}"), Finding)
    assert isinstance(beside("from example import Model\n"), Finding)
    said = beside(f"from example import Model\n{setting}")
    assert isinstance(said, Decline)
    assert said.reason == "evaluate.py imports the script, and sets cuDNN's flags itself, evaluate.py:4"
