"""Statements with which a loop adds up, collects or keeps numbers, and what can be told from how they are spelled."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from advisor.patterns.hostreads import read_operand
from advisor.source import Source

EXACT_OPERATIONS = (ast.Add, ast.Sub, ast.Mult)
TESTS = frozenset("eq ne gt lt ge le isnan isinf isfinite logical_and logical_or logical_not".split())


class Name(NamedTuple):
    """A local name that holds numbers read from the device: a running sum, a list, or one value."""

    text: str
    kind: str  # sum, list, value


def target_of(statement: ast.stmt) -> Name | None:
    """The name that a statement may add to, append to or assign."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        adds = isinstance(statement.op, (ast.Add, ast.Sub))
        return Name(statement.target.id, "sum") if adds else None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr == "append" and len(call.args) == 1:
            owner = call.func.value
            return Name(owner.id, "list") if isinstance(owner, ast.Name) and not call.keywords else None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        again = any(is_name(n, name) for n in ast.walk(statement.value))
        return Name(name, "sum" if again else "value")
    return None


def given_value(statement: ast.stmt) -> ast.expr:
    """The expression whose value an update adds, appends or assigns."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return statement.value.args[0]
    assert isinstance(statement, (ast.AugAssign, ast.Assign))
    return statement.value


def assignments(statement: ast.stmt) -> Iterable[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment with their values, those of tuples one by one."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return [(statement.target, statement.value)]
    found: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                found += zip(target.elts, statement.value.elts, strict=False)
            else:
                found.append((target, statement.value))
    return found


def surroundings(source: Source, node: ast.AST) -> list[ast.AST]:
    """What a node stands in, innermost first."""
    found = []
    parent = source.parents.get(node)
    while parent is not None:
        found.append(parent)
        parent = source.parents.get(parent)
    return found


def dominates(source: Source, first: ast.stmt, then: ast.stmt) -> bool:
    """Whether a statement stands before another in a block that holds it."""
    block = source.block_of(first)
    holder = next((s for s in (then, *surroundings(source, then)) if s in block), None)
    return isinstance(holder, ast.stmt) and block.index(first) < block.index(holder)


def defines(node: ast.AST, name: str) -> bool:
    """Whether a node defines a function of a name."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name


def is_name(node: ast.AST, name: str) -> bool:
    """Whether a node mentions a name."""
    return isinstance(node, ast.Name) and node.id == name


def is_empty_list(value: ast.expr) -> bool:
    """Whether an expression is `[]` or `list()`."""
    if isinstance(value, ast.Call):
        return is_name(value.func, "list") and not value.args
    return isinstance(value, ast.List) and not value.elts


def last_name(called: ast.expr) -> str:
    """The last part of a dotted name, empty for other expressions."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def is_count(read: ast.expr) -> bool:
    """Whether a read is one of an integer whatever the tensors are: a sum of comparisons, a place."""
    operand = read_operand(read)
    if not isinstance(operand, ast.Call) or (isinstance(read, ast.Call) and is_name(read.func, "float")):
        return False
    counted = [operand.func.value] if isinstance(operand.func, ast.Attribute) else []
    counted += operand.args[:1]
    if last_name(operand.func) == "sum":
        return any(
            isinstance(c, ast.Compare) or (isinstance(c, ast.Call) and last_name(c.func) in TESTS) for c in counted
        )
    return last_name(operand.func) in ("argmax", "argmin", "count_nonzero")


def is_integer(node: ast.expr) -> bool:
    """Whether an expression is spelled as an integer that the host knows is one."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, (ast.Call, ast.Subscript)) and is_number(node)


def is_number(node: ast.expr) -> bool:
    """Whether an expression is spelled as numbers that the host knows are; that no tensor is among them, a run says."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("len", "size", "numel")
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_number(node.value))


def parsed_expression(text: str) -> ast.expr:
    """The expression that a text spells, a constant None where it spells none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return ast.Constant(value=None)
