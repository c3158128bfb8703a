"""Does a written-out function return the dtype of its input in every call, as one fused operation does?"""

from __future__ import annotations

import ast

from advisor.alignment.aligned import Alignment
from advisor.model import Graph, Node, Ref
from advisor.patterns.regions import Region, reads
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.reaching import reaching


def casts_of(graph: Graph, region: Region) -> list[Node]:
    """The casts of a region, in order."""
    return [graph.nodes[index] for index in sorted(region.inner) if operation(graph.nodes[index]) == "to"]


def ends_in_a_cast(graph: Graph, region: Region) -> str | None:
    """Why a region of one input "x" is to begin or end at another node: a cast that nothing takes back is no part of
    it."""
    casts, main = casts_of(graph, region), region.inputs["x"]
    if not casts:
        return None
    readers = [user for user in graph.nodes[main].users if user in region.inner]
    begins = all(reads(node) == (main,) for node in casts) and len(readers) == len(casts)
    if begins or [node.index for node in casts] == [region.root]:
        return "it casts to a dtype that another input may not have"
    return None


def another_dtype(alignment: Alignment, graph: Graph, region: Region) -> str | None:
    """Why the result may have another dtype than the input "x" in another call, as far as the source shows."""
    main = region.inputs["x"]
    of_input = {main: True}  # node -> whether its dtype is the input's
    for index in sorted(region.inner):
        node = graph.nodes[index]
        if operation(node) == "to":
            of_input[index] = _casts_back(alignment, node, main)
        else:
            known = [of_input[i] for i in reads(node) if i in of_input]
            if known:
                of_input[index] = all(known)
    return None if of_input[region.root] else "it casts to a dtype of its own: another call may give another dtype"


def _casts_back(alignment: Alignment, node: Node, main: int) -> bool:
    """Whether a cast is one to the dtype of the input: `.to(x.dtype)`, `.type_as(x)`."""
    if any(arg == Ref(main) for arg in node.args[1:]):
        return True
    callee, bound = alignment.calls.get(node.index), alignment.values.get(main)
    call = alignment.source.parents.get(callee) if callee is not None else None
    if not isinstance(call, ast.Call) or bound is None:
        return False
    given = [*call.args, *(k.value for k in call.keywords if k.arg in ("dtype", "other"))]
    wanted = f"{ast.unparse(bound.expression)}.dtype"
    return len(given) == 1 and _spells(alignment.source, given[0], wanted)


def _spells(source: Source, expression: ast.expr, wanted: str) -> bool:
    """Whether an expression is `wanted`, or a name that is given it once."""
    if ast.unparse(expression) == wanted:
        return True
    if not isinstance(expression, ast.Name):
        return False
    found = reaching(source, expression.id, source.statement_of(expression))
    return len(found) == 1 and found[0].value is not None and ast.unparse(found[0].value) == wanted
