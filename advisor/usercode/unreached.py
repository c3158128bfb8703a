"""Code of the user's files that does not run when another script is started: what only a file's own start calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor.source import Source

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def unreached(sources: Sequence[Source], script: str | None) -> frozenset[ast.AST]:
    """Statements of files other than the script that cannot run: `if __name__ == "__main__"`, and functions of a
    module whose name nothing else mentions, neither as a name nor in a string, where nothing looks names up that it
    computes. Nothing where the script is not known, or a file may start another one in its own process.
    """
    if script is None or any(_starts_another(source) for source in sources):
        return frozenset()
    others = [source for source in sources if source.path != script]
    dead: set[ast.AST] = {s for source in others for s in source.tree.body if _starts(s)}
    named = [source for source in others if not any(_looks_up(other, source) for other in sources)]
    functions = [(source, s) for source in named for s in source.tree.body if isinstance(s, Function)]
    while True:
        here = {source.path: set(_mentioned(source.tree, dead, everything=True)) for source in sources}
        abroad = {source.path: set(_mentioned(source.tree, dead, _takes_all(source))) for source in sources}
        more = {
            function
            for source, function in functions
            if function not in dead and not function.decorator_list and not function.name.startswith("__")
            if function.name not in here[source.path]
            if not any(function.name in names for path, names in abroad.items() if path != source.path)
        }
        if not more:
            return frozenset(dead)
        dead |= more


def asleep(sources: Sequence[Source], script: str | None) -> frozenset[ast.AST]:
    """Every node of the statements that are `unreached`."""
    return frozenset(inner for statement in unreached(sources, script) for inner in ast.walk(statement))


def _looks_up(source: Source, module: Source) -> bool:
    """Whether a file may take what it computes the name of from a module: `models.__dict__[args.arch]`."""
    stem = module.path.replace("\\", "/").removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]
    for node in ast.walk(source.tree):
        if source is module and isinstance(node, ast.Name) and node.id in ("globals", "locals"):
            return True
        if source is module and isinstance(node, ast.Attribute) and source.qualified(node) == "sys.modules":
            return True
        if isinstance(node, ast.Attribute) and node.attr == "__dict__" and _is_module(source, node.value, stem):
            return True
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        said = [isinstance(argument, ast.Constant) for argument in node.args]
        if name in ("import_module", "__import__") and not said[0]:
            return True
        looks = name in ("vars", "dir", "getmembers") or (name == "getattr" and not all(said[1:2]))
        if looks and _is_module(source, node.args[0], stem):
            return True
    return False


def _is_module(source: Source, node: ast.expr, stem: str) -> bool:
    return (source.qualified(node) or "").rpartition(".")[2] == stem


def _starts_another(source: Source) -> bool:
    """Whether a file may run another one as `__main__`: by `runpy`, or by `exec` of its text."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == "exec":
            return True
        if isinstance(node, (ast.Name, ast.Attribute)) and (source.qualified(node) or "").startswith("runpy."):
            return True
    return False


def _starts(statement: ast.stmt) -> bool:
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return test is not None and ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _takes_all(source: Source) -> bool:
    """Whether a file imports every name of another, so that its names may be those of the other."""
    return any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(source.tree))


def _mentioned(tree: ast.Module, dead: set[ast.AST], everything: bool) -> Iterator[str]:
    """Names that code outside of some statements mentions; a function's mention of itself does not count.

    Without `everything` only what can mean another file's: imports, attributes and strings.
    """
    pending: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while pending:
        node, inside = pending.pop()
        if node in dead:
            continue
        if everything or not isinstance(node, ast.Name):
            yield from (name for name in _names(node) if name != inside)
        if isinstance(node, Function) and inside is None:
            inside = node.name
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.replace(":", ".").split(".")
