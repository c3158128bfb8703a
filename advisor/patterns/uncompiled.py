"""The source without a call of `torch.compile`: a wrapper, a method, a decorator."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from advisor import blocks, codemod
from advisor.model import Span
from advisor.patterns.checkpoints import asked
from advisor.source import Source
from advisor.usercode.callees import named

COMPILE = "torch.compile"
# what tells the wrapper that `torch.compile(model)` returns from the model: "_orig_mod." stands before its names
KEYS = ("state_dict", "load_state_dict", "named_parameters", "named_modules", "named_buffers", "named_children")
WRAPPED = ("_orig_mod", "OptimizedModule", "save_pretrained", "save_model", "push_to_hub")


def without(source: Source, at: Span, sources: Sequence[Source]) -> list[codemod.Edit]:
    """Edits that take out what compiles at a place. Raises `codemod.CannotEdit` where that changes more."""
    for function in (n for n in ast.walk(source.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for decorator in function.decorator_list:
            if decorator.lineno == at.line and _compiles(source, decorator):
                return [_without_line(source, decorator)]
    call = next((n for n in source.expressions_at(at.line) if isinstance(n, ast.Call) and _is(source, n, at)), None)
    if call is None:
        raise codemod.CannotEdit("no call of the compiler stands at the recorded place")
    line = asked(source, call)
    if line is not None:
        raise codemod.CannotEdit(f"the condition at line {line} asks for it: leave that off")
    if source.qualified(call.func) != COMPILE:
        return _without_method(source, call)
    return _unwrapped(source, call, sources)


def _compiles(source: Source, decorator: ast.expr) -> bool:
    return source.qualified(decorator.func if isinstance(decorator, ast.Call) else decorator) == COMPILE


def _is(source: Source, call: ast.Call, at: Span) -> bool:
    if at.end_line is not None and (source.span(call).line, source.span(call).column) != (at.line, at.column):
        return False
    method = isinstance(call.func, ast.Attribute) and call.func.attr == "compile"
    return source.qualified(call.func) == COMPILE or method


def _without_line(source: Source, decorator: ast.expr) -> codemod.Edit:
    first, last = decorator.lineno, decorator.end_lineno or decorator.lineno
    return codemod.replace(Span(path=source.path, line=first, end_line=last + 1, end_column=0), "")


def _without_method(source: Source, call: ast.Call) -> list[codemod.Edit]:
    """`model.compile()`, or `for block in model.blocks: block.compile()`."""
    statement = source.statement_of(call)
    if not isinstance(statement, ast.Expr) or statement.value is not call:
        raise codemod.CannotEdit("its line does more than this")
    loop = source.parents[statement]
    if isinstance(loop, ast.For) and loop.body == [statement] and not loop.orelse:
        statement = loop
    return blocks.removed(source, statement)


def _unwrapped(source: Source, call: ast.Call, sources: Sequence[Source]) -> list[codemod.Edit]:
    if not call.args or isinstance(call.args[0], ast.Starred):
        raise codemod.CannotEdit("what it compiles is not its first argument")
    compiled, statement = call.args[0], source.statement_of(call)
    if not _is_function(source, compiled):
        telling = named([one.tree for one in sources], (*KEYS, *WRAPPED))
        if telling is not None or _saves(sources):
            where = f"line {telling.lineno}" if isinstance(telling, (ast.expr, ast.keyword)) else "torch.save"
            raise codemod.CannotEdit(
                f"{where} may see the names of its parameters, which begin with `_orig_mod.` while it is compiled"
            )
    again = isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1
    if again and ast.unparse(statement.targets[0]) == ast.unparse(compiled):  # type: ignore[attr-defined]
        return blocks.removed(source, statement)
    text = source.segment(compiled)
    return [(source.span(call), text if isinstance(statement, ast.Assign) else codemod.grouped(text))]


def _is_function(source: Source, compiled: ast.expr) -> bool:
    """Whether a name is that of a function of the file, which has no parameters to name."""
    defined = {n.name for n in ast.walk(source.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return isinstance(compiled, ast.Name) and compiled.id in defined


def _saves(sources: Sequence[Source]) -> bool:
    calls = ((one, n) for one in sources for n in ast.walk(one.tree) if isinstance(n, ast.Call))
    return any(one.qualified(call.func) in ("torch.save", "copy.deepcopy", "pickle.dump") for one, call in calls)
