"""Align a region of a captured graph with the expressions of the user's source that computed it.

The walk goes down the syntax tree and up the graph together: an expression computes a node when it stands where the
node was recorded, its operation is the node's and its operands compute the node's inputs; a local name is followed to
the assignment that gave it its value, through the branches that ran. What cannot be aligned exactly is a `Miss` with
the reason, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields

from advisor.alignment.aligned import Alignment, Bound, Branch, Guard, Miss, outcome
from advisor.alignment.movable import check_movable
from advisor.alignment.walk import BINARY, State, Walk
from advisor.model import Arg, Graph, Node, Ref, Symbol
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.draws import drawing_places
from advisor.usercode.places import Place, Scope, is_own
from advisor.usercode.reaching import binds, changes, stored_names

__all__ = ["BINARY", "Alignment", "Bound", "Branch", "Guard", "Miss", "align", "align_all", "outcome"]

Read = Callable[[str], Source]


def align(
    source: Source,
    graph: Graph,
    root: int,
    boundary: frozenset[int],
    *,
    branches: bool = False,
    read: Read | None = None,
) -> Alignment:
    """Align the region that ends in node `root` and begins at `boundary`; raises `Miss`.

    Without `branches`, a region of which another run may compute something else, because a condition decides it, is a
    miss. With it the caller must heed `Alignment.branches`: say every one in its replacement (`conditions`), or put
    the replacement under `guarded()`, and it has no choice but the guard where `unran` is not empty. `read` opens
    other files of the project; without it helpers there are not followed.
    """
    return align_all(source, [(graph, root, {str(i): i for i in boundary})], branches=branches, read=read)


def align_all(
    source: Source,
    regions: Sequence[tuple[Graph, int, Mapping[str, int]]],
    *,
    branches: bool = False,
    read: Read | None = None,
) -> Alignment:
    """Align every region (graph, root, inputs by name) that one place computed; raises `Miss` where they differ.

    Gives the alignment of the first region.
    """
    search = _Search(source, branches, read)
    (graph, root, inputs), *others = regions
    first, known = search.found(graph, graph.nodes[root], inputs)
    codes = {_code(graph, root, inputs)}
    for graph, root, inputs in others:
        code = _code(graph, root, inputs)
        if code is not None and code in codes:
            continue
        codes.add(code)
        _, form = search.found(graph, graph.nodes[root], inputs)
        if form.branches != known.branches:
            raise Miss("calls of the same code take different branches", first.root.statement.lineno)
        if form != known:
            differing = next(f.name for f in fields(form) if getattr(form, f.name) != getattr(known, f.name))
            raise Miss(f"calls of the same code differ in their {differing}", first.root.statement.lineno)
    return first


REGION = 256  # nodes up to which a region's code is compared before it is aligned


def _code(graph: Graph, root: int, inputs: Mapping[str, int]) -> Hashable | None:
    """All that a walk reads of a region, its nodes numbered as they are met: equal codes have equal alignments.

    None where more than `REGION` nodes stand before the root.
    """
    names: dict[int, list[str]] = {}
    for name, index in inputs.items():
        names.setdefault(index, []).append(name)
    numbers, parts, pending = {root: 0}, list[Hashable](), [root]

    def numbered(arg: Arg) -> Hashable:
        if isinstance(arg, Ref):
            if arg.index not in numbers:
                numbers[arg.index] = len(numbers)
                pending.append(arg.index)
            return "node", numbers[arg.index]
        if isinstance(arg, tuple):
            return tuple(map(numbered, arg))
        if isinstance(arg, Symbol):
            return arg.kind, tuple(map(numbered, arg.parts))
        return type(arg), arg

    while pending:
        node = graph.nodes[pending.pop()]
        given = () if node.index in names else (*node.args, *node.kwargs, *node.kwargs.values())
        module = node.module and tuple(node.module.split(".")[-2:])  # as far as `is_module_call` reads it
        named = tuple(sorted(names.get(node.index, ())))
        place = (node.op, node.target, node.frames, node.span, node.shape is None, module, node.module_class)
        parts.append((numbers[node.index], named, place, tuple(map(numbered, given))))
        if len(parts) > REGION:
            return None
    return graph.kind, len(names), tuple(parts)


@dataclass(frozen=True)
class _Form:
    """What two alignments of the same code must have in common, without the numbers of their nodes."""

    branches: tuple[object, ...]
    place: tuple[object, ...]
    inputs: frozenset[object]
    constants: tuple[object, ...]
    calls: tuple[object, ...]
    statements: tuple[object, ...]


def _form(alignment: Alignment, inputs: Mapping[str, int]) -> _Form:
    def place(node: ast.AST) -> tuple[int, ...]:
        ends = ("lineno", "col_offset", "end_lineno", "end_col_offset")
        return tuple(-1 if (at := getattr(node, end, None)) is None else at for end in ends)

    def bound(found: Bound) -> tuple[object, ...]:
        return place(found.expression), place(found.statement)

    return _Form(
        branches=tuple((place(b.at), b.taken, b.lost) for b in alignment.branches),
        place=(alignment.source.path, *bound(alignment.root)),
        inputs=frozenset((name, bound(alignment.values[index])) for name, index in inputs.items()),
        constants=tuple(sorted(map(bound, alignment.constants.values()), key=repr)),
        calls=tuple(sorted(map(place, alignment.calls.values()))),
        statements=tuple(map(place, alignment.consumed)),
    )


class _Search:
    """Aligns regions; what may move is judged once for all that are the same code."""

    def __init__(self, source: Source, branches: bool, read: Read | None) -> None:
        self.source, self.branches, self.read = source, branches, read
        self.judged: dict[_Form, Miss | None] = {}

    def found(self, graph: Graph, node: Node, inputs: Mapping[str, int]) -> tuple[Alignment, _Form]:
        """The alignment of one region, and its form before anything was folded or left out."""
        if node.span is None:
            raise Miss("the operation has no position in the user's source")
        first: Miss | None = None
        for depth in reversed([i for i, f in enumerate(node.frames) if is_own(f)]):
            path = node.frames[depth].path
            try:
                here = self.source if path == self.source.path else self.read(path) if self.read is not None else None
                if here is not None:
                    return self._judged(self._align_in(here, graph, node, depth, inputs), graph, inputs)
            except Miss as miss:
                first = first or miss
        raise first or Miss("the operation has no position in this file", node.span.line)

    def _align_in(self, source: Source, graph: Graph, node: Node, depth: int, inputs: Mapping[str, int]) -> Alignment:
        """Align in the function of one of the root's frames: its own, or one that called a helper that computes it."""
        frame, boundary = node.frames[depth], frozenset(inputs.values())
        scope = Scope(source, node.frames[:depth])
        found: list[Alignment] = []
        misses: list[Miss] = []
        for expression in source.expressions_at(frame.line, frame.column if frame.end_column is not None else None):
            if isinstance(expression, (ast.Name, ast.Slice, ast.Tuple, ast.List, ast.Dict)):
                continue
            statement = source.statement_of(expression)
            walk = Walk(graph, boundary, self.read)
            try:
                walk.visit(Place(expression, statement, scope), node.index)
                if boundary - set(walk.state.values):
                    raise Miss("an input of the region is not read by this code", expression.lineno)
            except Miss as miss:
                misses.append(miss)
                continue
            found.append(_finished(source, Bound(expression, statement), walk.state))
        if len(found) > 1:
            raise Miss("several expressions on this line could be the operation", frame.line)
        if not found and any(isinstance(s, ast.AugAssign) for s in source.statements_at(frame.line)):
            raise Miss("the result is computed by an assignment in place", frame.line)
        if not found:  # the reason of the widest expression tells most
            nothing = Miss("no expression at this place matches the captured operations", frame.line)
            raise misses[0] if misses else nothing
        return found[0]

    def _judged(self, alignment: Alignment, graph: Graph, inputs: Mapping[str, int]) -> tuple[Alignment, _Form]:
        if alignment.branches and not self.branches:
            raise _depends(alignment)
        form = _form(alignment, inputs)
        if form not in self.judged:
            try:
                dropout = [i for i in alignment.calls if operation(graph.nodes[i]) == "dropout"]
                check_movable(alignment, dropout, drawing_places(graph))
                self.judged[form] = None
            except Miss as miss:
                self.judged[form] = miss
        known = self.judged[form]
        if known is not None:
            raise known
        return alignment, form


def _depends(alignment: Alignment) -> Miss:
    """Why an alignment with branches is none for a caller that does not handle them."""
    branch = next(iter(alignment.unran), alignment.branches[0])
    text = " ".join(alignment.source.segment(branch.test).split())
    if branch.lost is None:
        return Miss(f"part of it is computed only when `{text}`", branch.test.lineno)
    state = "false" if branch.taken else "true"
    reason = f"line {branch.lost} changes it when `{text}` is {state}, which did not happen in this run"
    return Miss(reason, branch.test.lineno)


def _finished(source: Source, root: Bound, state: State) -> Alignment:
    reads = [n for n in ast.walk(root.expression) if isinstance(n, ast.Name)]
    branches = tuple(
        sorted(
            (
                Branch(d.at, d.statement, d.taken, _lost(d.at, d.taken, state.consumed, reads))
                for d in state.decisions.values()
            ),
            key=lambda b: (b.test.lineno, b.test.col_offset) if isinstance(b.at, ast.IfExp) else (b.at.lineno, -1),
        )
    )  # fmt: skip
    for statement in state.consumed:
        _check_pieces(statement, state)
    alignment = Alignment(
        source, root, state.values, state.constants, state.calls, sorted(state.consumed, key=lambda s: s.lineno)
    )
    alignment.branches = branches
    places: dict[int | tuple[int, int | str], Bound] = {}
    for found in (state.visited, state.values, state.constants):
        places.update(found)  # type: ignore[arg-type]
    for key, bound in places.items():
        under = _conditions(source, bound, branches)
        if under:
            alignment.conditions[key] = under
    return alignment


def _check_pieces(statement: ast.stmt, state: State) -> None:
    """Every value of a consumed `a, b = x, y` must be part of the region."""
    value = getattr(statement, "value", None)
    followed = {piece for owner, piece in state.pieces if owner is statement}
    if isinstance(value, (ast.Tuple, ast.List)) and not set(value.elts) <= followed:
        raise Miss("another value is computed by the same assignment", statement.lineno)


def _lost(at: ast.If | ast.IfExp, taken: bool, consumed: Sequence[ast.stmt], reads: Sequence[ast.Name]) -> int | None:
    """The line of code on the other side of a condition that would change what the region computes."""
    if isinstance(at, ast.IfExp):
        side = at.orelse if taken else at.body
        passes = (
            isinstance(side, ast.Name)
            and taken
            and any(isinstance(n, ast.Name) and n.id == side.id for n in ast.walk(at.body))
        )
        return None if passes else side.lineno
    names = {name for s in consumed for name in stored_names(s)}
    block = at.orelse if taken else at.body
    other = next((s.lineno for s in block if any(binds(s, name) or changes(s, name) for name in sorted(names))), None)
    if other is not None or not taken:
        return other
    return next((at.lineno for name in sorted(names) if not _continues(at.body, name, consumed, reads)), None)


def _continues(block: Sequence[ast.stmt], name: str, consumed: Sequence[ast.stmt], after: Sequence[ast.Name]) -> bool:
    """Whether a block that is left out leaves a name with the value that the block would have worked on.

    True for what the block keeps to itself.
    """
    inside = {id(n) for s in block for n in ast.walk(s)}
    if not any(binds(s, name) or changes(s, name) for s in block):
        return True
    mentions = ([n for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == name] for s in block)
    first = next(found for found in mentions if found)
    added = any(isinstance(s, ast.AugAssign) and s.target is first[0] for s in block)
    if added or any(isinstance(n.ctx, ast.Load) for n in first):
        return True
    outside = [n for s in consumed for n in ast.walk(s) if isinstance(n, ast.Name) and id(n) not in inside]
    return not any(n.id == name and isinstance(n.ctx, ast.Load) for n in (*outside, *after))


def _conditions(source: Source, bound: Bound, branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """The branches that an expression stands in, outermost first."""
    inside: set[ast.AST] = set()
    node: ast.AST = bound.expression if bound.expression in source.parents else bound.statement
    while node in source.parents:
        node, below = source.parents[node], node
        test = node.test if isinstance(node, (ast.If, ast.IfExp)) else None
        if test is not None and below is not test:
            inside.add(node)
    return tuple(branch for branch in branches if branch.at in inside)
