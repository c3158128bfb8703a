"""What a mask of attention scores is: what it removes, whether it is causal at every length, where it comes from."""

from __future__ import annotations

import numpy as np

from advisor.model import Arg, Graph, Ref, Symbol
from advisor.semantics import NotModelled, evaluate, operation, same

MASKED = -1e4  # an additive or fill value at or below this removes a pair after softmax in fp16 and wider
VIEWS = frozenset({"getitem", "view", "reshape", "unsqueeze", "expand", "expand_as", "squeeze", "to", "detach"})
TESTS = frozenset({"eq", "ne", "gt", "lt", "logical_not", "bool"})


class NotCausal(Exception):
    """Why a mask is not known to be causal at every length; `node` is where that shows."""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def triangle_of(graph: Graph, index: int) -> int | None:
    """Follow a mask to where its triangle comes from; raises `NotCausal` unless it is causal whatever the length.

    Either a buffer that is a lower triangle as a whole, cut from its corner, or a triangle made in the graph. Gives the
    node of a `triu` or `tril` whose diagonal must be a literal in the source, None where nothing is left to check.
    """
    while True:
        node = graph.nodes[index]
        kind = operation(node)
        if node.op in ("placeholder", "get_attr"):
            if {node.facts.get(name) for name in ("keep", "drop", "nonzero", "zero")} & {"causal"}:
                return None
            raise NotCausal(
                index, "the mask's buffer is not a triangle as a whole: at another length it is another mask"
            )
        if kind in ("tril", "triu"):
            diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal")
            if (kind, diagonal) == ("tril", None):
                return None
            if (kind, diagonal) in (("triu", 1), ("tril", 0)):
                return index
            raise NotCausal(index, "the diagonal of the mask is not that of a causal mask")
        if kind == "getitem" and not _from_the_corner(node.args[1]):
            raise NotCausal(index, "the mask is cut from its buffer at an offset")
        if kind not in VIEWS | TESTS or not isinstance(node.args[0], Ref):
            reason = f"the mask is made by `{kind}`: that it is causal at this length does not prove it always is"
            raise NotCausal(index, reason)
        index = node.args[0].index


def _from_the_corner(item: Arg) -> bool:
    """Whether an index leaves the last two axes as they are or cuts their beginning; a start that is 0 here may not
    be."""
    parts = item if isinstance(item, tuple) else (item,)
    for part in parts:
        whole = part is None or isinstance(part, int) or (isinstance(part, Symbol) and part.kind == "ellipsis")
        cut = isinstance(part, Symbol) and part.kind == "slice" and part.parts[0] is None and part.parts[2] is None
        if not (whole or cut):
            return False
    return not any(isinstance(part, int) for part in parts[-2:]) or len(parts) <= 2


def reads_batch(graph: Graph, index: int) -> bool:
    """Whether a value is computed from what the module was called with, not only from its state and from shapes."""
    seen: set[int] = set()
    pending = [index]
    while pending:
        node = graph.nodes[pending.pop()]
        if node.index in seen:
            continue
        seen.add(node.index)
        if node.op == "placeholder" and node.facts.get("origin") != "state":
            return True
        pending.extend(node.inputs())
    return False


def may_be_empty(graph: Graph, index: int, side: str) -> bool:
    """Whether some query may keep no key at all: seen in the run, or not excluded by it.

    `side` is "keep" where True keeps a pair, "drop" where True drops it. Only a whole buffer is the same in every run.
    """
    if f"{side}_empty" in graph.nodes[index].facts:
        return True
    node = graph.nodes[index]
    while node.op.startswith("call_"):
        if operation(node) not in VIEWS | TESTS or not isinstance(node.args[0], Ref):
            return True
        if operation(node) == "getitem" and _cuts(node.args[1]):
            return True
        node = graph.nodes[node.args[0].index]
    return node.op == "placeholder" and node.facts.get("origin") != "state"


def _cuts(item: Arg) -> bool:
    """Whether an index takes a part: another length may take a row that keeps nothing."""
    parts = item if isinstance(item, tuple) else (item,)
    return any(isinstance(p, Symbol) and p.kind == "slice" and any(x is not None for x in p.parts) for p in parts)


def multiplied_fill(graph: Graph, mask: int, added: int) -> float | None:
    """The fill where `added` is fill * (1 - mask) for a mask of zeros and ones, as in `w * b - 1e4 * (1 - b)`."""
    if "nonzero" not in graph.nodes[mask].facts and graph.nodes[mask].facts.get("keep") is None:
        return None
    samples = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    try:
        value = evaluate(graph, added, {mask: samples})
    except NotModelled:
        return None
    if value.shape != samples.shape:
        return None
    fill = float(value[0, 1])
    return fill if abs(fill) >= -MASKED and same(value, fill * (1.0 - samples)) else None
