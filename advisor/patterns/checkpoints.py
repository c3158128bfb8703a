"""Calls of activation checkpointing in the source: what asks for them, what they repeat, and the plain call."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence

from advisor import blocks, codemod
from advisor.model import Span
from advisor.source import Source
from advisor.usercode.callees import callees, named

CHECKPOINT = "torch.utils.checkpoint.checkpoint"
ENABLING = ("gradient_checkpointing_enable", "set_grad_checkpointing", "enable_gradient_checkpointing")
OPTION = "gradient_checkpointing"  # of the arguments of a trainer
USUAL = ("training", "is_grad_enabled", "requires_grad")  # what a condition asks for that is no option
CHOSEN = ("context_fn", "determinism_check", "debug", "early_stop")
GROWS = frozenset("append extend insert update add pop clear setdefault appendleft".split())
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def call_at(source: Source, span: Span) -> ast.Call | None:
    """The call that begins at a position."""
    here = (n for n in source.expressions_at(span.line, span.column) if isinstance(n, ast.Call))
    wanted = (span.end_line, span.end_column)
    exact = (n for n in here if span.end_line is None or _ends(source, n) == wanted)
    return next(exact, None)


def _ends(source: Source, node: ast.expr) -> tuple[int | None, int | None]:
    span = source.span(node)
    return span.end_line, span.end_column


def enabling(sources: Sequence[Source]) -> list[tuple[Source, ast.Call]]:
    """The calls by which the user's files ask a library for checkpointing."""
    return [
        (source, node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and _enables(node)
    ]


def _enables(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ENABLING:
        return not any(_is(value, False) for value in (*call.args, *(k.value for k in call.keywords)))
    return any(k.arg == OPTION and not _is(k.value, False) for k in call.keywords)


def asked(source: Source, node: ast.AST) -> int | None:
    """The line of the option under which a function makes a call, or leaves it out by an early end; None without."""
    child, parent = node, source.parents.get(node)
    while parent is not None and not isinstance(parent, SCOPES):
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test and not _is_usual(parent.test):
            return parent.lineno
        if isinstance(parent, ast.BoolOp):
            return parent.lineno
        child, parent = parent, source.parents.get(parent)
    if not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    before = (n for n in ast.walk(parent) if isinstance(n, ast.If) and n.lineno < getattr(node, "lineno", 0))
    return next((n.lineno for n in before if _ends_early(n) and not _is_usual(n.test)), None)


def _ends_early(choice: ast.If) -> bool:
    ends = (ast.Return, ast.Continue, ast.Break)
    return any(isinstance(block[-1], ends) for block in (choice.body, choice.orelse) if block)


def _is_usual(test: ast.expr) -> bool:
    """Whether a condition is one on training or on gradients alone, or on the name of the module."""
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__":
        return True
    leaves = [n for n in ast.walk(test) if isinstance(n, ast.Attribute)]
    outer = [n for n in leaves if not any(n is other.value for other in leaves)]
    names = [n for n in ast.walk(test) if isinstance(n, ast.Name)]
    bases = [n for leaf in leaves for n in ast.walk(leaf) if isinstance(n, ast.Name)]
    return bool(outer) and all(n.attr in USUAL for n in outer) and all(any(n is b for b in bases) for n in names)


def repeats(sources: Sequence[Source], around: Sequence[Span]) -> str | None:
    """What a forward pass changes that is not its result, and a second one changes again; None where nothing is seen.

    The functions `around` the calls run once, those that the calls are passed and every other forward pass twice.
    """
    here = [(source, span) for source in sources for span in around if span.path == source.path]
    once = [source.function_at(span.line) for source, span in here]
    passed = [(source, value) for source, span in here if (value := _passed(source, span)) is not None]
    names = {"forward"} | {getattr(n, "id", getattr(n, "attr", "")) for _, value in passed for n in ast.walk(value)}
    twice: list[tuple[Source, Function]] = [
        (source, node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in names and node not in once
    ]
    twice += [(source, n) for source, value in passed for n in ast.walk(value) if isinstance(n, ast.Lambda)]
    called = callees(sources, [node for _, node in twice])
    for source, function in (*twice, *called):
        if function in once or getattr(function, "name", "") == "__init__":
            continue
        changed = next(_changes(source, function), None)
        if changed is not None:
            return f"line {changed.lineno} of {source.path} keeps a value in the forward pass, twice with a checkpoint"
        drawn = next(_drawn(source, function), None)
        if drawn is not None:
            return f"line {drawn.lineno} of {source.path} draws random numbers that a checkpoint does not put back"
    if named([source.tree for source in sources], ("spectral_norm",)) is not None:
        return "spectral_norm changes its estimate in the forward pass, twice with a checkpoint"
    return None


def _passed(source: Source, at: Span) -> ast.expr | None:
    """The function that a call of `checkpoint` at a position is passed."""
    call = call_at(source, at)
    if call is None or not call.args or source.qualified(call.func) != CHECKPOINT:
        return None
    return call.args[0]


def _changes(source: Source, function: Function) -> Iterator[ast.expr | ast.stmt]:
    """Where a function changes what is there when it has ended: a module, an argument, a name outside of it."""
    given = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)} - {"self"}
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    kept = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and _root(node.value) == "self"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    local = (given | stored) - kept
    outer = {*source.imports, None}
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield node
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if _root(node) not in local - given | {None}:
                yield node
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if _root(node) not in local | {None}:
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            root, name = _root(node.func.value), node.func.attr
            in_place = name.endswith("_") and not name.endswith("__") and root not in local
            if root not in outer and (in_place or (name in GROWS and root not in local - given)):
                yield node


def _root(node: ast.expr) -> str | None:
    """The name that an attribute or an element is one of."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _drawn(source: Source, function: Function) -> Iterator[ast.Call]:
    """Random numbers of Python, of NumPy and of a generator of the script's own: a checkpoint keeps torch's state."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            owned = any(k.arg == "generator" and not _is(k.value, None) for k in node.keywords)
            if owned or (source.qualified(node.func) or "").startswith(("random.", "numpy.random.")):
                yield node


# ---------------------------------------------------------------------------------------------------------------- edits


def plain_call(source: Source, call: ast.Call) -> codemod.Edit:
    """`checkpoint(f, x, use_reentrant=False)` as `f(x)`. Raises `codemod.CannotEdit` saying why it is left alone."""
    if not call.args or isinstance(call.args[0], ast.Starred):
        raise codemod.CannotEdit("what it runs is not its first argument")
    for keyword in call.keywords:
        if keyword.arg is None:
            raise codemod.CannotEdit("the call passes ** arguments, which may hold its options")
        if keyword.arg in CHOSEN:
            raise codemod.CannotEdit(f"`{keyword.arg}` chooses how it is computed again")
        if keyword.arg == "preserve_rng_state" and not _is(keyword.value, True):
            raise codemod.CannotEdit("random numbers may be drawn anew in what is computed again")
    if _has_comment(source.segment(call)):
        raise codemod.CannotEdit("comments stand among its arguments")
    options = ("use_reentrant", "preserve_rng_state")
    arguments = [source.segment(value) for value in call.args[1:]]
    arguments += [f"{k.arg}={source.segment(k.value)}" for k in call.keywords if k.arg not in options]
    text = f"{codemod.grouped(source.segment(call.args[0]))}({', '.join(arguments)})"
    return source.span(call), text


def not_enabled(source: Source, call: ast.Call) -> list[codemod.Edit]:
    """A library not asked for checkpointing. Raises `codemod.CannotEdit` where the call cannot go."""
    line = asked(source, call)
    if line is not None:
        raise codemod.CannotEdit(f"the condition at line {line} asks for it: leave that off")
    option = next((k for k in call.keywords if k.arg == OPTION), None)
    if option is not None and not (isinstance(call.func, ast.Attribute) and call.func.attr in ENABLING):
        if not _is(option.value, True):
            raise codemod.CannotEdit(f"`{OPTION}` is an option: leave that off")
        return [(source.span(option.value), "False")]
    statement = source.statement_of(call)
    if not isinstance(statement, ast.Expr) or statement.value is not call:
        raise codemod.CannotEdit("its line does more than this")
    if any(
        not isinstance(value, (ast.Constant, ast.Dict)) for value in (*call.args, *(k.value for k in call.keywords))
    ):
        raise codemod.CannotEdit("an option asks for it: leave that off")
    return blocks.removed(source, statement)


def _is(value: ast.expr, constant: bool | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


def _has_comment(text: str) -> bool:
    tokens = tokenize.generate_tokens(io.StringIO(f"({text})").readline)
    return any(token.type == tokenize.COMMENT for token in tokens)
