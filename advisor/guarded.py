"""A rewrite that holds only under the conditions of the recorded run: the code as it was stays for every other run."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from advisor import codemod
from advisor.blocks import joined, lines_inside_strings, unit_of
from advisor.model import Span
from advisor.source import Source


def guarded_instead(
    source: Source, at: Span, template: str, texts: Mapping[str, str], first: Span, guard: str
) -> list[codemod.Edit]:
    """The spelled template in place of the expression at `at`, but only where `guard` holds.

    The statements from the one at `first` to the one that holds the expression stay, in the `else` of the new `if`;
    only their indentation changes, and not even that where they end in a `return`. Raises `codemod.CannotEdit` where
    they share a line with other statements.
    """
    begin, end = _statement_at(source, first), _statement_around(source, at)
    if source.block_of(begin) != source.block_of(end):
        raise codemod.CannotEdit("the statements to guard are not in one block")
    last = end.end_lineno or end.lineno
    if len(codemod.sharing_lines(source, begin)) > 1 or len(codemod.sharing_lines(source, end)) > 1:
        raise codemod.CannotEdit("the statement shares its line with another")
    line = source.lines[begin.lineno - 1]
    indent = line[: len(line) - len(line.lstrip(" \t\x0c"))]
    if source.character(begin.lineno, begin.col_offset) != len(indent):
        raise codemod.CannotEdit("the statement shares its line with the head of its block")
    kept = lines_inside_strings(source)
    if kept & set(range(end.lineno, last + 1)):
        raise codemod.CannotEdit("the statement holds a text of several lines")
    unit, ending = unit_of(source, begin), "\r\n" if line.endswith("\r\n") else "\n"
    edits, template = codemod.named_modules(source, at.line, template)
    span, text = codemod.replace_expression(source, at, codemod.laid_out(source, at, codemod.spelled(template, texts)))
    rest = Span(
        path=source.path, line=end.lineno, column=source.span(end).column, end_line=span.line, end_column=span.column
    )
    head, tail = source.at(rest), source.at(_after(source, span, end))
    inner = f"{ending}{unit}".join(f"{head}{text}{tail}".split(ending))
    new = f"{indent}if {guard}:{ending}{indent}{unit}{inner}{ending}"
    if isinstance(end, ast.Return):
        return [*edits, codemod.insert(source.path, begin.lineno, 0, new)]
    edits.append(codemod.insert(source.path, begin.lineno, 0, f"{new}{indent}else:{ending}"))
    for number in range(begin.lineno, last + 1):
        if source.lines[number - 1].strip() and number not in kept:
            edits.append(codemod.insert(source.path, number, 0, unit))
    return joined(edits)


def _after(source: Source, span: Span, statement: ast.stmt) -> Span:
    """What follows a span up to the end of its statement."""
    whole = source.span(statement)
    assert span.end_line is not None and span.end_column is not None
    return Span(
        path=span.path,
        line=span.end_line,
        column=span.end_column,
        end_line=whole.end_line,
        end_column=whole.end_column,
    )


def _statement_at(source: Source, span: Span) -> ast.stmt:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.stmt) and (node.lineno, source.character(node.lineno, node.col_offset)) == (
            span.line,
            span.column,
        ):
            return node
    raise codemod.CannotEdit("the first statement to guard was not found")


def _statement_around(source: Source, span: Span) -> ast.stmt:
    """The statement that holds the expression at a span."""
    for node in source.expressions_at(span.line, span.column):
        if source.span(node).end_column == span.end_column and source.span(node).end_line == span.end_line:
            return source.statement_of(node)
    raise codemod.CannotEdit("the expression to guard was not found")
