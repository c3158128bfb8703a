"""Other ways to realise a finding of a graph rule: compile the function that holds the region, call a kernel library.

Each is tried where the first form stands and kept only where it is measured to be faster.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from advisor.model import Form, Graph, Replacement
from advisor.patterns.sweeps import MODELLED
from advisor.semantics import operation
from advisor.source import Source


def compiled_form(source: Source, line: int, graphs: Iterable[Graph]) -> Form | None:
    """The function around a line under torch.compile, where all it computes is operations that a compiler fuses.

    None for a function that does more, such as a product or a draw, and where Dynamo did not capture it whole.
    """
    function = source.function_at(line)
    if function is None:
        return None
    mine = [
        (graph, node)
        for graph in graphs
        for node in graph.nodes
        if node.op.startswith("call_")
        and any(frame.path == source.path and holds(function, frame.line) for frame in node.frames)
    ]
    fused = all(graph.kind == "dynamo" and operation(node) in MODELLED for graph, node in mine)
    return Form(name="compiled", title=f"compile `{function.name}`") if mine and fused else None


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
