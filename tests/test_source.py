"""Lines of a source file are those of Python and git, whatever else looks like the end of a line."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from advisor.codemod import apply, replace
from advisor.ingest.frames import Frames
from advisor.patch import unified
from advisor.source import Source, split_lines

ODD = [
    pytest.param("x = 1\n\x0cy = f(x)\nz = 3\n", id="form feed"),
    pytest.param("x = 'a\u2028b\x85c\x1cd'\ny = f(x)\nz = 3\n", id="separators"),
    pytest.param("x = 1\r\ny = f(x)\r\nz = 3\r\n", id="CRLF"),
    pytest.param("x = 1\ry = f(x)\rz = 3\r", id="lone CR"),
    pytest.param("x = 1\n# \x0b \u2029\ny = f(x)", id="no final newline"),
]


def test_split_lines() -> None:
    assert split_lines("a\r\nb\rc\n\x0cd\u2028e\x85\n\nf") == ["a\r\n", "b\r", "c\n", "\x0cd\u2028e\x85\n", "\n", "f"]
    assert split_lines("") == []
    assert split_lines("a\n") == ["a\n"]


@pytest.mark.parametrize("text", ODD)
def test_an_edit_hits_its_expression(text: str, tmp_path: Path) -> None:
    source = Source("train.py", text)
    call = next(node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    assert source.segment(call) == "f(x)"
    assert apply(source, [replace(source.span(call), "g(x)")]) == text.replace("f(x)", "g(x)")
    (tmp_path / "train.py").write_text(text, encoding="utf-8", newline="")
    frame = Frames(tmp_path).span("train.py", call.lineno, text="y = f(x)", column=4, end_column=8)
    assert source.at(frame) == "f(x)"


@pytest.mark.parametrize("text", ODD)
def test_git_applies_the_diff(text: str, tmp_path: Path) -> None:
    wanted = text.replace("f(x)", "g(x)")
    (tmp_path / "train.py").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "p.diff").write_text(unified("train.py", text, wanted), encoding="utf-8", newline="")
    subprocess.run(["git", "apply", "p.diff"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "train.py").read_bytes().decode() == wanted
