"""Let what reads a tensor after it was changed in place read the change: `x.add_(1); y = x * 2` reads as one chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from advisor.model import Arg, Node, Ref, Symbol
from advisor.semantics import in_place


def reread(nodes: Sequence[Node]) -> list[Node]:
    """The nodes with later reads of a computed tensor pointed at the operation that changed it in place.

    Changes through a view, and of what the graph did not compute itself, stay as recorded: searches decline where such
    an operation stands between theirs.
    """
    latest: dict[int, int] = {}
    result: list[Node] = []
    for node in nodes:
        if latest:
            args = tuple(_reread(arg, latest) for arg in node.args)
            node = replace(node, args=args, kwargs={name: _reread(arg, latest) for name, arg in node.kwargs.items()})
        result.append(node)
        target = node.args[0] if node.args else None
        if not in_place(node) or not isinstance(target, Ref) or not result[target.index].op.startswith("call_"):
            continue
        for old in [old for old, new in latest.items() if new == target.index]:
            latest[old] = node.index
        latest[target.index] = node.index
    return result


def _reread(arg: Arg, latest: Mapping[int, int]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(latest.get(arg.index, arg.index))
    if isinstance(arg, tuple):
        return tuple(_reread(item, latest) for item in arg)
    if isinstance(arg, Symbol) and arg.parts:
        return replace(arg, parts=tuple(_reread(part, latest) for part in arg.parts))
    return arg
