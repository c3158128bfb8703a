"""Edits of whole statements: put under a header, removed, put before or behind others; other characters stay."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from advisor import codemod
from advisor.model import Span
from advisor.source import Source


def put_under(source: Source, statements: Sequence[ast.stmt], header: str) -> list[codemod.Edit]:
    """Indent neighbouring statements of one block under `header` ("with torch.no_grad():").

    Raises `codemod.CannotEdit` where they share a line with others or hold a text of several lines.
    """
    first, last = statements[0], statements[-1]
    _check_alone(source, statements)
    indent = indent_of(source, first)
    kept = lines_inside_strings(source)
    end = last.end_lineno or last.lineno
    if kept & set(range(first.lineno, end + 1)):
        raise codemod.CannotEdit("the statement holds a text of several lines")
    unit = unit_of(source, first)
    edits = [codemod.insert(source.path, first_line(first), 0, f"{indent}{header}{codemod.line_ending(source)}")]
    for number in range(first_line(first), end + 1):
        if source.lines[number - 1].strip():
            edits.append(codemod.insert(source.path, number, 0, unit))
    return joined(edits)


def removed(source: Source, statement: ast.stmt) -> list[codemod.Edit]:
    """Remove a statement; `pass` stands in its place where its block would be empty.

    Raises `codemod.CannotEdit` where it shares a line with the head of its block.
    """
    block = source.block_of(statement)
    if block == [statement]:
        return [(source.span(statement), "pass")]
    return codemod.remove_statements(source, [source.span(statement)])


def put_before(source: Source, statement: ast.stmt, lines: Sequence[str]) -> codemod.Edit:
    """New lines, indented as the statement they stand before."""
    _check_alone(source, [statement])
    text = "".join(f"{indent_of(source, statement)}{line}{codemod.line_ending(source)}" for line in lines)
    return codemod.insert(source.path, first_line(statement), 0, text)


def put_behind(source: Source, statement: ast.stmt, lines: Sequence[str]) -> codemod.Edit:
    """New lines, indented as the statement they stand behind."""
    _check_alone(source, [statement])
    last, ending = statement.end_lineno or statement.lineno, codemod.line_ending(source)
    text = "".join(f"{indent_of(source, statement)}{line}{ending}" for line in lines)
    if not source.lines[last - 1].endswith("\n"):  # the file ends here, without the end of a line
        return codemod.insert(source.path, last, len(source.lines[last - 1]), ending + text.removesuffix(ending))
    return codemod.insert(source.path, last + 1, 0, text)


def first_line(statement: ast.stmt) -> int:
    """The line a statement begins at, its decorators included."""
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return statement.lineno
    return min([statement.lineno, *(d.lineno for d in statement.decorator_list)])


def indent_of(source: Source, statement: ast.stmt) -> str:
    """The white space before a statement."""
    line = source.lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip(" \t\x0c"))]


def _check_alone(source: Source, statements: Sequence[ast.stmt]) -> None:
    for statement in statements:
        if len(codemod.sharing_lines(source, statement)) > 1:
            raise codemod.CannotEdit("the statement shares its line with another")
        if source.character(statement.lineno, statement.col_offset) != len(indent_of(source, statement)):
            raise codemod.CannotEdit("the statement shares its line with the head of its block")


def joined(edits: Sequence[codemod.Edit]) -> list[codemod.Edit]:
    """Insertions at one position as one edit, in the order given."""
    found: dict[Span, str] = {}
    for span, text in edits:
        found[span] = found.get(span, "") + text
    return list(found.items())


def unit_of(source: Source, statement: ast.stmt) -> str:
    """One level of indentation as the function around a statement is written."""
    parent = source.parents[statement]
    if isinstance(parent, ast.Module):
        return "    "
    outer, inner = source.lines[parent.lineno - 1], source.lines[statement.lineno - 1]  # type: ignore[attr-defined]
    widths = [len(text) - len(text.lstrip(" \t\x0c")) for text in (outer, inner)]
    return inner[widths[0] : widths[1]] or "    "


def lines_inside_strings(source: Source) -> set[int]:
    """Lines that begin inside a string literal: to indent them would change its value."""
    found: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno is not None:
            quoted = isinstance(node, ast.JoinedStr) or isinstance(node.value, (str, bytes))
            if quoted and node.end_lineno > node.lineno:
                found |= set(range(node.lineno + 1, node.end_lineno + 1))
    return found
