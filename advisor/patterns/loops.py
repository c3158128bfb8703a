"""Find what a Python loop made of a graph: one place of the source called again and again on other elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.model import Arg, Graph, Node, Ref, Span
from advisor.semantics import operation

REDUCTIONS: Mapping[str, str] = {"add": "sum", "mul": "prod", "maximum": "amax", "minimum": "amin"}
RUNNING: Mapping[str, str] = {"sum": "cumsum", "prod": "cumprod", "amax": "cummax", "amin": "cummin"}
COLLECTING = frozenset({"stack", "cat", "hstack", "vstack", "concat", "concatenate", "setitem", "output"})
LIBRARY = ("site-packages/", "dist-packages/", "lib/python3", "outside/")


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where the code of a node stands: `span` in the user's own code, else `library`, the place in a package."""

    span: Span | None
    library: str | None = None

    def key(self) -> tuple[str, int, int]:
        """To group and order by; nodes of one place have one key."""
        line, column = (self.span.line, self.span.column) if self.span is not None else (0, 0)
        return (self.library or (self.span.path if self.span is not None else ""), line, column)


@dataclass(frozen=True, kw_only=True)
class IndexLoop:
    """Elements of one tensor, taken or written one after the other at one place.

    `form` is store, reduction, map, weighted or recurrence; weighted is a map or reduction whose every turn reads
    parameters of its own. `reduction` is the operation that joins the elements; `inner` every node that belongs to a
    single turn of the loop or joins turns; `turns` the number of different indices.
    """

    graph: int
    spot: Spot
    nodes: tuple[int, ...]
    inner: frozenset[int]
    turns: int
    form: str
    reduction: str | None = None


def spot_of(graph: Graph, node: Node) -> Spot:
    """The place of a node: its own span, or for code of a package that place, shown at the user's call of it."""
    inner = node.frames[-1] if node.frames else None
    if inner is None or node.span == inner:
        return Spot(span=node.span)
    path = inner.path.replace("\\", "/")
    if not any(part in path for part in LIBRARY):
        return Spot(span=node.span)
    return Spot(span=node.span or graph.span, library=f"{path.rsplit('-packages/', 1)[-1]}:{inner.line}")


def index_loops(graph: Graph, least: int) -> Iterator[IndexLoop]:
    """Places that index one tensor with at least `least` different integers, in the order of their first node."""
    places: dict[tuple[tuple[str, int, int], str], list[tuple[Node, int]]] = {}
    written: dict[int, int] = {}  # a write of an element -> the tensor it and those before it write to
    for node in graph.nodes:
        if operation(node) == "setitem" and isinstance(node.args[0], Ref):
            written[node.index] = written.get(node.args[0].index, node.args[0].index)
        index = _index(graph, node, written)
        if index is not None:
            key = (spot_of(graph, node).key(), operation(node))
            places.setdefault(key, []).append((node, index))
    for (where, _), found in places.items():
        turns = len({index for _, index in found})
        if where[0] and turns >= least:
            yield _index_loop(graph, [node for node, _ in found], turns)


def _index(graph: Graph, node: Node, written: Mapping[int, int]) -> int | None:
    """The integer an element of a tensor is taken or written by; None for any other node."""
    if not node.op.startswith("call_") or not node.args or not isinstance(node.args[0], Ref):
        return None
    base = node.args[0].index
    if graph.nodes[written.get(base, base)].shape is None:  # a tuple's item
        return None
    kind = operation(node)
    if kind == "select" and len(node.args) == 3:
        return _integer(node.args[2])
    if kind not in ("getitem", "setitem"):
        return None
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    integers = [part for part in parts if _integer(part) is not None]
    return integers[0] if len(integers) == 1 else None


def _integer(value: Arg) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _index_loop(graph: Graph, nodes: Sequence[Node], turns: int) -> IndexLoop:
    spot = spot_of(graph, nodes[0])
    own = tuple(node.index for node in nodes)
    if operation(nodes[0]) == "setitem":
        inner, recurrent = _written(graph, nodes)
        form, joined = "recurrence" if recurrent else "store", None
    else:
        inner, form, joined = _read(graph, nodes)
        if form in ("map", "reduction") and _has_own_weights(graph, nodes, inner):
            form, joined = "weighted", None
    return IndexLoop(graph=graph.index, spot=spot, nodes=own, inner=inner, turns=turns, form=form, reduction=joined)


def _written(graph: Graph, nodes: Sequence[Node]) -> tuple[frozenset[int], bool]:
    """Nodes that make what is stored and are read by nothing else, and whether an element is made from others."""
    writes = {node.index for node in nodes}
    bases = {ref.index for node in nodes if isinstance(ref := node.args[0], Ref)} - writes
    inner = set(writes)
    for node in nodes:
        value = node.args[2] if len(node.args) > 2 else None
        pending = [value.index] if isinstance(value, Ref) else []
        seen: set[int] = set()
        while pending:
            made = graph.nodes[pending.pop()]
            if made.index in bases or made.index in writes:
                return frozenset(inner), True
            if made.index in seen or not made.op.startswith("call_"):
                continue
            seen.add(made.index)
            if all(user in inner for user in made.users):
                inner.add(made.index)
            if len(seen) > 64:
                break
            pending.extend(made.inputs())
    return frozenset(inner), False


@dataclass
class _Flow:
    """Which turns a value was made from, first and last, and the operation that joined several of them."""

    first: int
    last: int
    joined: str | None = None
    changed: bool = False  # after it joined several turns


def _read(graph: Graph, nodes: Sequence[Node]) -> tuple[frozenset[int], str, str | None]:
    """What becomes of elements that are read: inner nodes, the form, the reduction."""
    flows = {node.index: _Flow(turn, turn) for turn, node in enumerate(nodes)}
    joins: set[str] = set()
    several, inner = 0, set(flows)
    written: dict[int, dict[int | None, _Flow]] = {}  # a tensor -> its elements -> the turns they were written from
    for node in graph.nodes[nodes[0].index :]:
        sources = [flows[i] for i in dict.fromkeys(node.inputs()) if i in flows]
        if node.index in flows:
            if _from_memory(graph, node, written):
                return frozenset(inner), "recurrence", None
            continue
        if operation(node) == "setitem" and sources:
            elements = written.setdefault(_memory(graph, node), {})
            elements[_index(graph, node, {})] = _Flow(sources[0].first, sources[0].last, changed=True)
            continue
        sources += _from_memory(graph, node, written)
        if not sources or operation(node) in COLLECTING or node.op == "output":
            continue
        flow = _Flow(min(s.first for s in sources), max(s.last for s in sources))
        ahead = len({(s.first, s.last) for s in sources}) > 1
        if not ahead:
            flow.joined = sources[0].joined
            flow.changed = flow.joined is not None or any(s.changed for s in sources)
        elif any(s.changed for s in sources) or operation(node) not in REDUCTIONS:
            if any(s.changed for s in sources) or len(sources) == 2:
                return frozenset(inner), "recurrence", None
            continue
        else:
            flow.joined = operation(node)
            joins.add(flow.joined)
            several += len(node.users) > 1
        flows[node.index] = flow
        if not flow.changed:
            inner.add(node.index)
    if len(joins) != 1:
        return frozenset(inner), "recurrence" if joins else "map", None
    name = REDUCTIONS[joins.pop()]
    return frozenset(inner), "reduction", RUNNING[name] if several >= len(nodes) // 2 else name


def _memory(graph: Graph, node: Node) -> int:
    """The tensor that a write of an element, or a tensor that was written to, is."""
    while operation(node) == "setitem" and isinstance(node.args[0], Ref):
        node = graph.nodes[node.args[0].index]
    return node.index


def _from_memory(graph: Graph, node: Node, written: Mapping[int, Mapping[int | None, _Flow]]) -> list[_Flow]:
    """The turns that wrote what a node reads from a tensor that elements were written into, as one flow."""
    index = _index(graph, node, {}) if operation(node) in ("getitem", "select") else None
    found: list[_Flow] = []
    for elements in (written.get(_memory(graph, graph.nodes[i]), {}) for i in node.inputs()):
        found += [flow for place, flow in elements.items() if None in (index, place) or place == index]
    return [_Flow(min(f.first for f in found), max(f.last for f in found), changed=True)] if found else []


def _has_own_weights(graph: Graph, nodes: Sequence[Node], inner: frozenset[int]) -> bool:
    """Whether what becomes of every element, before it is joined to others, reads a parameter that no other turn
    reads."""
    readers: dict[int, set[int]] = {}
    for turn, node in enumerate(nodes):
        for state in _states_beside(graph, node, inner):
            readers.setdefault(state, set()).add(turn)
    own = {next(iter(turns)) for turns in readers.values() if len(turns) == 1}
    return len(own) == len(nodes)


def _states_beside(graph: Graph, element: Node, inner: frozenset[int], limit: int = 12) -> set[int]:
    """The parameters and buffers that are read beside an element by what is computed from it alone."""
    mine = [element.index]
    beside: list[int] = []
    for index in mine:
        for user in graph.nodes[index].users:
            node = graph.nodes[user]
            others = [i for i in node.inputs() if i not in mine]
            if user in inner and user not in mine and not inner & set(others) and len(mine) < limit:
                mine.append(user)
                beside += others
    seen: set[int] = set()
    while beside and len(seen) < limit:
        index = beside.pop()
        if index not in seen and index not in inner:
            seen.add(index)
            beside += graph.nodes[index].inputs()
    return {index for index in seen if graph.nodes[index].facts.get("origin") == "state"}


# ------------------------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True, kw_only=True)
class ExpertLoop:
    """The same matrix products at one place for one expert after the other.

    `products` are those nodes, `inner` with everything between the tokens and what the experts' results are added to;
    `experts` is how many different weights they read, `tokens` how many each gets, where that is the same for all.
    `alike` is False where experts differ in the shapes of their weights or in their operations; `stacked` is True where
    each multiplies rows of a matrix with one matrix cut from a single tensor.
    """

    graph: int
    spot: Spot
    products: tuple[int, ...]
    inner: frozenset[int]
    experts: int
    tokens: int | None
    alike: bool
    stacked: bool


PRODUCTS = frozenset({"linear", "matmul", "addmm", "einsum"})
ROUTES = frozenset({"getitem", "index_select", "masked_select", "gather", "take_along_dim"})
RETURNS = frozenset({"index_add", "index_add_", "setitem", "index_put", "index_put_", "scatter_add", "scatter_add_"})


def expert_loops(graph: Graph, least: int) -> Iterator[ExpertLoop]:
    """Loops over at least `least` experts: products with different weights of tokens picked for each of them.

    What the tokens are picked from and what the results are added to is the same for every expert: so layers that run
    one after the other are told from experts that run beside each other.
    """
    places: dict[tuple[str, int, int], list[Node]] = {}
    for node in graph.nodes:
        if node.op.startswith("call_") and operation(node) in ROUTES and _picks(graph, node):
            source = node.args[0]
            assert isinstance(source, Ref)
            places.setdefault((*spot_of(graph, node).key()[:2], source.index), []).append(node)
    for picks in places.values():
        if len(picks) >= least:
            found = _experts(graph, picks)
            if found is not None and found.experts >= least:
                yield found


def _picks(graph: Graph, node: Node) -> bool:
    """Whether a node takes rows by a tensor of positions or a mask."""
    index = next((a for a in node.args[1:] if isinstance(a, (Ref, tuple))), node.kwargs.get("index"))
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(first, Ref) or not isinstance(node.args[0], Ref):
        return False
    kind = graph.nodes[first.index].dtype
    return kind in ("int64", "int32", "bool") and len(graph.nodes[first.index].shape or ()) > 0


def _experts(graph: Graph, picks: Sequence[Node]) -> ExpertLoop | None:
    products: list[int] = []
    inner: set[int] = set()
    weights: set[int] = set()
    kinds: set[tuple[object, ...]] = set()
    bases: set[int | None] = set()
    for pick in picks:
        mine, reached = _expert(graph, pick)
        own = [index for index in mine if operation(graph.nodes[index]) in PRODUCTS]
        if not own or not reached:
            continue
        products += own
        inner |= mine
        weights.add(_weight(graph, graph.nodes[own[0]]))
        kinds.add(_kind(graph, mine, own))
        bases.add(_cut_from(graph, pick, own))
    if not products:
        return None
    sizes = {(graph.nodes[pick.index].shape or (None,))[0] for pick in picks}
    return ExpertLoop(
        graph=graph.index,
        spot=spot_of(graph, picks[0]),
        products=tuple(sorted(products)),
        inner=frozenset(inner),
        experts=len(weights),
        tokens=sizes.pop() if len(sizes) == 1 else None,
        alike=len(kinds) == 1,
        stacked=len(bases) == 1 and None not in bases,
    )


def _kind(graph: Graph, mine: set[int], products: Sequence[int]) -> tuple[object, ...]:
    """What one expert computes: its operations and the shapes of what it multiplies by, not the number of tokens."""
    operations = sorted(operation(graph.nodes[index]) for index in mine)
    shapes = sorted(str([graph.nodes[i].shape for i in graph.nodes[index].inputs()[1:]]) for index in products)
    return (*operations, *shapes)


def _cut_from(graph: Graph, pick: Node, products: Sequence[int]) -> int | None:
    """The stack of matrices that an expert's only product takes one from, None where there is no such thing."""
    product = graph.nodes[products[0]]
    weight = graph.nodes[product.inputs()[1]] if len(product.inputs()) == 2 else None
    if weight is None or operation(weight) not in ("getitem", "select") or len(weight.inputs()) != 1:
        return None
    if weight.span is None or product.span is None or weight.span.line != product.span.line:
        return None  # taken from a list or a dictionary, which was filled elsewhere
    base = graph.nodes[weight.inputs()[0]]
    ranks = [len(node.shape or ()) for node in (pick, weight, base)]
    return base.index if len(products) == 1 and ranks == [2, 2, 3] else None


def _expert(graph: Graph, pick: Node) -> tuple[set[int], bool]:
    """The nodes from one expert's tokens to where its result is put back, and whether that was reached."""
    mine = {pick.index, *(i for i in pick.inputs()[1:] if graph.nodes[i].op.startswith("call_"))}
    pending, reached = [pick.index], False
    while pending and len(mine) < 64:
        for user in graph.nodes[pending.pop()].users:
            node = graph.nodes[user]
            if user in mine:
                continue
            mine.add(user)
            if operation(node) in RETURNS or node.target.endswith(("index_add_", "index_put_")):
                reached = True
            else:
                pending.append(user)
    return mine, reached


def _weight(graph: Graph, product: Node) -> int:
    """What tells one expert's product from another's: the parameter, or the index into stacked ones."""
    refs = product.inputs()
    for index in refs[1:]:
        return index
    return refs[0]
