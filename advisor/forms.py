"""Other ways to realise a finding of a graph rule: compile the function that holds the region, call a kernel library.

Each is tried where the first form stands and kept only where it is measured to be faster; unfused-rope has no other
form than the compiled one, which then is the first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from advisor.model import Form, Graph, Replacement
from advisor.patterns.sweeps import MODELLED
from advisor.semantics import operation
from advisor.source import Source

# what kernels written as an autograd.Function of their own know nothing of: gradients of gradients, the transforms of
# torch.func, TorchScript, distributed tensors
TRANSFORMS = frozenset(
    "create_graph functorch vmap vjp jvp jacrev jacfwd hessian forward_ad gradgradcheck DTensor distribute_tensor "
    "distribute_module parallelize_module".split()
)
Importing = (ast.Import, ast.ImportFrom)
TRANSFORM_MODULES = ("torch.func", "torch.jit", "torch.autograd.functional")


def compiled_form(sources: Sequence[Source], source: Source, line: int, graphs: Iterable[Graph]) -> Form | None:
    """The function around a line under torch.compile, where all it computes is operations that a compiler fuses.

    None for a function that does more, such as a product, a draw or complex numbers, and where Dynamo did not capture
    it whole; and in a program whose `sources` do what compiled functions do not take, such as gradients of gradients.
    """
    function = source.function_at(line)
    if function is None or any(transforms(other) for other in sources):
        return None
    mine = [
        (graph, node)
        for graph in graphs
        for node in graph.nodes
        if node.op.startswith("call_")
        and any(frame.path == source.path and holds(function, frame.line) for frame in node.frames)
    ]
    fused = all(
        graph.kind == "dynamo" and operation(node) in MODELLED and not (node.dtype or "").startswith("complex")
        for graph, node in mine
    )
    return Form(name="compiled", title=f"compile `{function.name}`") if mine and fused else None


def is_compiled(source: Source, line: int) -> bool:
    """Whether the function around a line is compiled where it is defined."""
    function = source.function_at(line)
    return function is not None and any(_compiles(source, d) for d in function.decorator_list)


def _compiles(source: Source, decorator: ast.expr) -> bool:
    """Whether a decorator is torch.compile, with arguments, by `partial`, or alone."""
    if isinstance(decorator, ast.Call):
        return any(_compiles(source, part) for part in (decorator.func, *decorator.args))
    return source.qualified(decorator) == "torch.compile"


def holds(function: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> bool:
    """Whether a line lies in the body of a function."""
    return function.body[0].lineno <= line <= (function.end_lineno or function.lineno)


def kernel_form(
    name: str,
    title: str,
    plain: Replacement,
    call: str,
    when: str,
    imports: tuple[str, ...],
    constants: Mapping[str, tuple[str, Any]] | None = None,
) -> Form:
    """A kernel library's `call` where it takes its inputs (`when`), else what the first form does.

    `call` and `when` are templates over the placeholders of `plain` and of `constants`: name -> (text, value).
    """
    given = constants or {}
    return Form(
        name=name,
        title=title,
        replacement=replace(
            plain,
            template=f"({call} if {when} else {plain.template})",
            texts={**plain.texts, **{key: text for key, (text, _) in given.items()}},
            constants={**plain.constants, **{key: value for key, (_, value) in given.items()}},
            imports=(*plain.imports, *imports),
        ),
    )


def transforms(source: Source) -> bool:
    """Whether a file uses what kernels of their own and compiled functions know nothing of."""
    imported = [(n, alias) for n in ast.walk(source.tree) if isinstance(n, Importing) for alias in n.names]
    modules = [alias.name if isinstance(n, ast.Import) else f"{n.module}.{alias.name}" for n, alias in imported]
    modules += [source.qualified(n) or "" for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)]
    inside = any(name == m or name.startswith(f"{m}.") for name in modules for m in TRANSFORM_MODULES)
    return inside or bool(words(source) & TRANSFORMS)


def words(source: Source) -> set[str]:
    """Every name that a file reads, imports, passes as a keyword or takes from an object."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            found.add(node.arg)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, Importing):
            found |= {part for alias in node.names for part in alias.name.split(".")}
    return found
