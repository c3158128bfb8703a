"""Which expressions draw random numbers: one of them may not be evaluated after another draw that came later."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator

from advisor.alignment.aligned import Alignment, Bound, Miss
from advisor.model import Graph
from advisor.semantics import operation
from advisor.source import Source

# what functions and modules that draw are called: attn_drop, F.dropout, drop_path, torch.rand_like, x.bernoulli_
NAMED = re.compile(
    r"drop(?!na)|^rand|bernoulli|multinomial|poisson(?!_nll)|^normal_?$|^uniform_?$|exponential_|gumbel|rrelu"
)
OPERATIONS = frozenset(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rand randn randint "
    "randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal normal_ uniform_ exponential_ "
    "rrelu gumbel_softmax".split()
)

Places = frozenset[tuple[str, int, int]]


def drawing_places(graph: Graph) -> Places:
    """Where the recorded run drew random numbers, as path, line and column of every caller."""
    drawn = [node for node in graph.nodes if node.op.startswith("call_") and operation(node) in OPERATIONS]
    return frozenset((f.path, f.line, f.column) for node in drawn for f in node.frames if f.end_column is not None)


def draws(source: Source, node: ast.AST, places: Places = frozenset()) -> Iterator[ast.Call]:
    """The calls inside a part of the tree that draw random numbers, by their names or as the run has shown."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        func = call.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        fused = name == "scaled_dot_product_attention" and any(k.arg == "dropout_p" for k in call.keywords)
        seen = any((source.path, line, column) in places for line, column in source.starts(call))
        if fused or seen or NAMED.search(name):
            yield call


def check_draws(
    alignment: Alignment, bounds: Iterable[Bound], swallowed: Collection[ast.expr], places: Places, body: ast.AST
) -> None:
    """Raise `Miss` where an expression that draws would be evaluated after a draw that used to come later.

    `swallowed` are the callees whose draws the region makes itself.
    """
    source, root = alignment.source, alignment.root
    moved = {id(b.expression): b for b in bounds if any(draws(source, b.expression, places))}
    if not moved:
        return
    first = next(iter(moved.values()))
    text = " ".join(source.segment(first.expression).split())
    if len(moved) > 1:
        raise Miss(
            f"`{text}` and another input draw random numbers, in an order that may change", first.statement.lineno
        )
    if first.statement is root.statement:
        return
    mine = {id(n) for part in (first.expression, root.expression) for n in ast.walk(part)}
    for call in draws(source, body, places):
        between = _start(first.statement) <= _start(call) < _start(root.expression)
        if between and id(call) not in mine and call.func not in swallowed:
            raise Miss(f"`{text}` draws random numbers, and so does what comes after it", call.lineno)


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset
