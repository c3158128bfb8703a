"""Edits change what they name and nothing else."""

from __future__ import annotations

import ast

import pytest

from advisor import codemod
from advisor.model import Span
from advisor.source import Source


def call_span(source: Source) -> Span:
    call = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call))
    return source.span(call)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()", "f(a=1)"),
        ("f(x)", "f(x, a=1)"),
        ("f(x, y=2)", "f(x, y=2, a=1)"),
        ("f(x,)", "f(x, a=1,)"),
        ("f(a=0, b=2)", "f(a=1, b=2)"),
        ("f(x, old=0)", "f(x, a=1)"),
        ("f(\n    x,\n    y=2,\n)", "f(\n    x,\n    y=2,\n    a=1,\n)"),
        ("f(\n    x,  # first\n    y=2,  # second\n)", "f(\n    x,  # first\n    y=2,  # second\n    a=1,\n)"),
        ("f(x,\n  y=2)  # end", "f(x,\n  y=2,\n  a=1)  # end"),
        ("f(\n    x,\n)", "f(\n    x,\n    a=1,\n)"),
        ("f(x)['é']  # é", "f(x, a=1)['é']  # é"),
    ],
)
def test_set_keywords(before: str, after: str) -> None:
    source = Source("m.py", before + "\n")
    edit = codemod.set_keywords(source, call_span(source), {"a": "1"}, drop=("old",))
    assert codemod.apply(source, [edit]) == after + "\n"


def test_star_star_arguments_are_refused() -> None:
    source = Source("m.py", "f(x, **options)\n")
    with pytest.raises(codemod.CannotEdit, match=r"\*\*"):
        codemod.set_keywords(source, call_span(source), {"a": "1"})


@pytest.mark.parametrize(
    ("before", "gone", "after"),
    [
        ("a = 1\nb = 2\nc = 3\n", ["b = 2"], "a = 1\nc = 3\n"),
        ("a = 1  # note\nc = 3\n", ["a = 1"], "c = 3\n"),
        ("a = 1; b = 2; c = 3\n", ["a = 1", "b = 2"], "c = 3\n"),
        ("a = 1; b = 2; c = 3\n", ["b = 2", "c = 3"], "a = 1\n"),
        ("a = 1; b = 2; c = 3\n", ["a = 1", "c = 3"], "b = 2\n"),
        ("a = 1; b = 2\nc = 3\n", ["a = 1", "b = 2"], "c = 3\n"),
        ("a = (\n    1\n)\nc = 3\n", ["a = (\n    1\n)"], "c = 3\n"),
        ("b = 2\r\nc = 3\r\n", ["b = 2"], "c = 3\r\n"),
        ("c = 3\nb = 2", ["b = 2"], "c = 3\n"),
    ],
)
def test_remove_statements(before: str, gone: list[str], after: str) -> None:
    source = Source("m.py", before)
    spans = [source.span(s) for s in source.tree.body if source.segment(s).replace("\r\n", "\n") in gone]
    assert len(spans) == len(gone)
    assert codemod.apply(source, codemod.remove_statements(source, spans)) == after


@pytest.mark.parametrize(
    ("text", "spelled", "added"),
    [
        ("import torch.nn.functional as F\n", "F", ""),
        ("from torch.nn import functional as fun\n", "fun", ""),
        ("from torch import nn\nimport torch\n", "nn.functional", ""),
        ("import torch\n", "torch.nn.functional", ""),
        ('"""Doc."""\nfrom __future__ import annotations\nx = 1\n', "F", "import torch.nn.functional as F\n"),
        ("x = 1\n", "F", "import torch.nn.functional as F\n"),
    ],
)
def test_functional_is_spelled_as_the_file_does(text: str, spelled: str, added: str) -> None:
    source = Source("m.py", text)
    name, edits = codemod.module_name(source, 1, "torch.nn.functional")
    assert name == spelled
    after = codemod.apply(source, edits)
    assert after.replace(added, "", 1) == text if added else after == text
    assert ast.get_docstring(ast.parse(after)) == ast.get_docstring(ast.parse(text))
    compile(after, "m.py", "exec")


def test_a_shadowed_alias_is_not_used() -> None:
    source = Source("m.py", "import torch\nimport torch.nn.functional as F\n\ndef f(F):\n    return F\n")
    assert codemod.module_name(source, 5, "torch.nn.functional")[0] == "torch.nn.functional"


def test_overlapping_edits_conflict() -> None:
    source = Source("m.py", "abcdef\n")
    here = Span(path="m.py", line=1, column=0, end_line=1, end_column=3)
    there = Span(path="m.py", line=1, column=2, end_line=1, end_column=4)
    with pytest.raises(codemod.Conflict):
        codemod.apply(source, [(here, "x"), (there, "y")])
