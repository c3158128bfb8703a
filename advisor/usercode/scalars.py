"""Which expressions of a function are numbers, and which modules its object holds, as far as the source tells."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from advisor.source import Source

FLOATS: Mapping[str, float] = {
    f"{module}.{name}": value
    for module in ("math", "torch", "numpy")
    for name, value in {"pi": math.pi, "e": math.e, "inf": math.inf}.items()
}
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {"sqrt": math.sqrt, "exp": math.exp, "log": math.log}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_DEPTH = 6  # names that are followed


def constant_call(qualified: str) -> bool:
    """Whether a function gives a number for numbers."""
    return qualified.rpartition(".")[0] in ("math", "numpy")


class Scalars:
    """Answers for one function of a file; `this` is the name of its object, None outside of classes."""

    def __init__(self, source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._source = source
        self._function = function
        parent = source.parents.get(function)
        self._class = parent if isinstance(parent, ast.ClassDef) else None
        first = [*function.args.posonlyargs, *function.args.args][:1]
        self.this = first[0].arg if self._class is not None and first else None

    def constant(self, node: ast.expr, known: Mapping[str, float]) -> float | None:
        """The number an expression is, where the source tells it; `known` are names with numbers."""
        if isinstance(node, ast.Constant):
            value = node.value
            return value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.constant(node.operand, known)
            return None if inner is None else -inner
        if isinstance(node, ast.Attribute):
            return FLOATS.get(self._source.qualified(node) or "")
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.constant(node.left, known), self.constant(node.right, known)
            return None if left is None or right is None else _compute(_ARITHMETIC[type(node.op)], left, right)
        return self._constant_of_call(node, known) if isinstance(node, ast.Call) else None

    def _constant_of_call(self, node: ast.Call, known: Mapping[str, float]) -> float | None:
        if len(node.args) != 1 or node.keywords:
            return None
        argument = node.args[0]
        if isinstance(node.func, ast.Name) and node.func.id == "float" and isinstance(argument, ast.Constant):
            return _compute(float, argument.value)
        module, _, name = (self._source.qualified(node.func) or "").rpartition(".")
        value = self.constant(argument, known)
        if value is None or module not in ("math", "numpy") or name not in _FUNCTIONS:
            return None
        return _compute(_FUNCTIONS[name], value)

    def is_number(self, node: ast.expr) -> bool:
        """Whether an expression is a number and no tensor; False where that cannot be seen."""
        return self._is_number(node, self._function, _DEPTH)

    def held(self, callee: ast.expr) -> ast.Call | None:
        """The call that made the module `self.name`, where exactly one assignment of the class gives the name."""
        if not (isinstance(callee, ast.Attribute) and self._is_this(callee.value)):
            return None
        values = self._fields.get(callee.attr, [])
        return values[0][0] if len(values) == 1 and isinstance(values[0][0], ast.Call) else None

    # ------------------------------------------------------------------------------------------------------- following

    def _is_this(self, node: ast.expr) -> bool:
        return self.this is not None and isinstance(node, ast.Name) and node.id == self.this

    @cached_property
    def _fields(self) -> dict[str, list[tuple[ast.expr, ast.FunctionDef | ast.AsyncFunctionDef]]]:
        """Every value that the methods of the class give to a field, with the method."""
        found: dict[str, list[tuple[ast.expr, ast.FunctionDef | ast.AsyncFunctionDef]]] = {}
        methods = self._class.body if self._class is not None else []
        for method in methods:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
                continue
            this = method.args.args[0].arg
            for target, value in _assignments(method):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == this:
                    found.setdefault(target.attr, []).append((value, method))
        return found

    def _is_number(self, node: ast.expr, scope: ast.AST, depth: int) -> bool:
        if depth == 0:
            return False
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left, scope, depth) and self._is_number(node.right, scope, depth)
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand, scope, depth)
        if isinstance(node, ast.IfExp):
            return self._is_number(node.body, scope, depth) and self._is_number(node.orelse, scope, depth)
        if isinstance(node, ast.Call):
            return self._number_of_call(node)
        if isinstance(node, ast.Attribute):
            return self._number_of_attribute(node, scope, depth)
        return isinstance(node, ast.Name) and self._number_of_name(node.id, scope, depth)

    def _number_of_call(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Name):
            return node.func.id in ("int", "float", "len", "round")
        return constant_call(self._source.qualified(node.func) or "")

    def _number_of_attribute(self, node: ast.Attribute, scope: ast.AST, depth: int) -> bool:
        if (self._source.qualified(node) or "") in FLOATS:
            return True
        if self._is_this(node.value) or (scope is not self._function and _first(scope) == _name(node.value)):
            values = self._fields.get(node.attr, [])
            return len(values) == 1 and self._is_number(values[0][0], values[0][1], depth - 1)
        return _name(scope_root(node)) in _parameters(scope) and _is_init(scope)  # config.width

    def _number_of_name(self, name: str, scope: ast.AST, depth: int) -> bool:
        if name in _parameters(scope):
            return _is_init(scope) or _declares_number(scope, name)
        given = [value for target, value in _assignments(scope) if _name(target) == name]
        if not given and scope is not self._source.tree:
            return self._number_of_name(name, self._source.tree, depth - 1) if depth > 1 else False
        return len(given) == 1 and self._is_number(given[0], scope, depth - 1)


def scope_root(node: ast.expr) -> ast.expr:
    """The innermost value of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _compute(function: Callable[..., Any], *values: Any) -> float | None:
    try:
        result = function(*values)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return result if isinstance(result, int | float) and not math.isnan(result) else None


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _first(scope: ast.AST) -> str | None:
    arguments = scope.args.args if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return arguments[0].arg if arguments else None


def _parameters(scope: ast.AST) -> frozenset[str]:
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset()
    return frozenset(a.arg for a in ast.walk(scope.args) if isinstance(a, ast.arg))


def _is_init(scope: ast.AST) -> bool:
    """Arguments of a constructor are sizes and settings."""
    return isinstance(scope, ast.FunctionDef) and scope.name == "__init__"


def _declares_number(scope: ast.AST, name: str) -> bool:
    """Whether a parameter is annotated as a number, or has one as its default."""
    assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
    args = scope.args
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for argument, default in [
        *zip(positional, defaults, strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]:
        if argument.arg == name:
            number = isinstance(default, ast.Constant) and isinstance(default.value, float | int)
            return _name(argument.annotation) in ("int", "float") if argument.annotation is not None else number
    return False


def _assignments(scope: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of every assignment in a scope, tuples taken apart; a loop's target has itself for a value."""
    found: list[tuple[ast.expr, ast.expr]] = []
    body = list(getattr(scope, "body", []))
    while body:
        node = body.pop(0)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found += _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found.append((node.target, node.value))
        elif isinstance(node, ast.AugAssign):
            found.append((node.target, node.target))
        elif isinstance(node, ast.For):
            found += _pairs(node.target, node.target)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                body += getattr(node, name, [])
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    options = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    if any(not isinstance(o, ast.Tuple) or len(o.elts) != len(target.elts) for o in options):
        return [pair for element in target.elts for pair in _pairs(element, element)]
    first = options[0]
    assert isinstance(first, ast.Tuple)
    return [pair for t, v in zip(target.elts, first.elts, strict=True) for pair in _pairs(t, v)]
