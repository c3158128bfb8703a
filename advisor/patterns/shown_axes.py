"""Whether an axis that code counts from the front is the last one in every call, or in the recorded run alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor.alignment.aligned import Alignment
from advisor.model import Arg, Graph, Node, Ref, Symbol
from advisor.patterns.extents import Extents
from advisor.patterns.regions import Region
from advisor.semantics import REARRANGES, operation

ALONG = frozenset(  # operations that run along an axis they are given
    "mean sum var std var_mean std_mean max min amax amin argmax argmin norm normalize prod softmax log_softmax "
    "logsumexp gather scatter scatter_".split()
)
RANK_IN_NAME = {"bmm": 3, "baddbmm": 3, "mm": 2, "addmm": 2}


def axes_given(node: Node) -> tuple[int, ...]:
    """The axes that an operation is told to run along, as they were written: from the front or from the last."""
    if operation(node) not in ALONG or not node.op.startswith("call_"):
        return ()
    place = 2 if operation(node) in ("norm", "normalize") else 1
    named: Arg = node.kwargs.get("dim", node.kwargs.get("axis"))
    given = node.args[place] if len(node.args) > place else named
    axes = given if isinstance(given, tuple) else (given,)
    return tuple(a for a in axes if isinstance(a, int) and not isinstance(a, bool))


def axes_added(node: Node) -> tuple[int, ...]:
    """The places of the axes that an operation inserts: `x.unsqueeze(1)`, `x[:, None]`, `x[..., None]`."""
    given = node.args[1] if operation(node) in ("unsqueeze", "getitem") and len(node.args) > 1 else ()
    if operation(node) == "unsqueeze":
        return (given,) if isinstance(given, int) else ()
    parts = given if isinstance(given, tuple) else (given,)
    dots = next((i for i, p in enumerate(parts) if isinstance(p, Symbol) and p.kind == "ellipsis"), len(parts))
    return tuple(i - len(parts) if i > dots else i for i, part in enumerate(parts) if part is None)


def unshown_axis(alignment: Alignment, graph: Graph, region: Region) -> tuple[int, str] | None:
    """(node, reason) where a region runs along an axis counted from the front of a tensor whose number of axes the
    source does not show; None where it is the same axis in every call."""
    for index in sorted(region.inner):
        node = graph.nodes[index]
        added = axes_added(node) if "axes" in region.facts else ()  # a norm puts a reduced axis back
        front = [axis for axis in (*axes_given(node), *added) if axis >= 0]
        read = node.args[0] if node.args else None
        if not front or not isinstance(read, Ref) or rank_is_shown(alignment, graph, region, read.index):
            continue
        rank = len((node if added else graph.nodes[read.index]).shape or ())
        what = ", ".join("the last axis" if axis == rank - 1 else f"axis {axis - rank}" for axis in front)
        axes = f"axis {front[0]} is" if len(front) == 1 else f"axes {', '.join(map(str, front))} are"
        return index, f"{axes} {what} only for tensors of rank {rank}, and the source does not show the rank"
    return None


def rank_is_shown(alignment: Alignment, graph: Graph, region: Region, index: int) -> bool:
    """Whether the source shows that a value read or computed by a region has as many axes in every call.

    A tensor that is broadcast to the value is taken not to have more axes than it.
    """
    extents = Extents(alignment.source)
    seen: set[int] = set()
    pending = [index]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        node = graph.nodes[current]
        bound = alignment.values.get(current)
        if current in region.inner and node.op.startswith("call_"):
            if _fixes_rank(alignment, graph, node):
                return True
            pending += _as_long(graph, node)
        elif bound is not None and extents.rank(bound.expression, bound.statement) == len(node.shape or ()):
            return True
    return False


def _fixes_rank(alignment: Alignment, graph: Graph, node: Node) -> bool:
    """Whether an operation works for one number of axes only, or gives its result one by its arguments."""
    kind, name = operation(node), node.target.rsplit(".", 1)[-1]
    if kind == "einsum":
        return isinstance(node.args[0], str) and "." not in node.args[0]
    if name in RANK_IN_NAME or kind == "permute":
        return True
    if kind in ("view", "reshape"):
        given = [alignment.constants.get((node.index, place)) for place in range(1, len(node.args))]
        if len(given) == 1 and given[0] is not None and isinstance(node.args[1], tuple):
            sizes = given[0].expression
            return isinstance(sizes, (ast.Tuple, ast.List)) and not any(isinstance(s, ast.Starred) for s in sizes.elts)
        return None not in given and len(given) > 0
    return kind == "matmul" and any(_swapped_by_front(graph, arg) for arg in node.args)


def _swapped_by_front(graph: Graph, arg: Arg) -> bool:
    """Whether a factor is a tensor whose last two axes are exchanged by their places from the front: with another
    number of axes it could not be multiplied."""
    node = graph.nodes[arg.index] if isinstance(arg, Ref) else None
    if node is None or operation(node) != "transpose" or node.shape is None:
        return False
    rank = len(node.shape)
    return sorted(a for a in node.args[1:3] if isinstance(a, int)) == [rank - 2, rank - 1]


def _as_long(graph: Graph, node: Node) -> Iterator[int]:
    """The operands from whose number of axes that of the result follows."""
    operands = [a.index for a in (*node.args, *node.kwargs.values()) if isinstance(a, Ref)]
    if operation(node) in REARRANGES | ALONG - {"gather", "scatter", "scatter_"}:
        yield from operands[:1]
        return
    rank = len(node.shape or ())
    yield from (index for index in operands if len(graph.nodes[index].shape or ()) == rank)
