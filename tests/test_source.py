"""Lines of a source file are those of Python and git, whatever else looks like the end of a line."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from advisor.codemod import apply, replace
from advisor.diffs import unified
from advisor.errors import SourceError
from advisor.ingest.frames import Frames
from advisor.source import Source, parsed, split_lines

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


def test_where_a_chain_over_several_lines_is_recorded() -> None:
    source = Source("m.py", "y = (\n    x.exp()\n    .mül(2)\n    .T\n)\n")
    found = {source.segment(e).split("\n")[-1].strip(): source.starts(e) for e in source.expressions_at(2, 4)}
    assert found[".T"] == {(2, 4), (4, 5)}
    assert found[".mül(2)"] == {(2, 4), (3, 5)}
    assert found["x.exp()"] == {(2, 4)}
    assert [source.segment(e)[-2:] for e in source.expressions_at(4, 5)] == [".T"]


def test_an_import_inside_a_function_names_what_it_imports() -> None:
    text = "import torch\ndef f(x):\n    import torch.nn.functional as fun\n    return fun.silu(x)\n"
    source = Source("m.py", text)
    call = next(n for n in ast.walk(source.tree) if isinstance(n, ast.Call))
    assert source.qualified(call.func) == "torch.nn.functional.silu"
    assert "fun" not in source.imports  # it cannot be spelled elsewhere
    twice = Source("m.py", text + "def g(x):\n    import math as fun\n    return fun.erf(x)\n")
    assert twice.qualified(next(n for n in ast.walk(twice.tree) if isinstance(n, ast.Call)).func) is None


def test_a_byte_order_mark_moves_no_position(tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbfx = 1; y = f(x)\nz = x\n")
    source = Source.read(tmp_path, "marked.py")
    call = next(node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    span = source.span(call)
    assert source.at(span) == "f(x)"
    edited = apply(source, [replace(span, "g(x)")])
    assert edited.encode("utf-8") == b"\xef\xbb\xbfx = 1; y = g(x)\nz = x\n"
    assert ast.dump(parsed(edited, "marked.py")) == ast.dump(ast.parse("x = 1; y = g(x)\nz = x\n"))


def test_an_expression_nested_too_deeply_is_an_error_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("x = " + "+".join(["1"] * 100_000) + "\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"deep\.py nests expressions too deeply"):
        Source.read(tmp_path, "deep.py")
