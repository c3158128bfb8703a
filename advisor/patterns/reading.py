"""Read a softmax between two products off as attention: roles of the operands, order of axes, scale, masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from advisor.model import Graph, Node, Ref
from advisor.patterns.axes import LAYOUTS, Axes, Axis, Follow, Product, Unclear, constant_place, number, split_axes
from advisor.patterns.masks import MASKED, NotCausal, multiplied_fill, reads_batch, triangle_of
from advisor.patterns.regions import Region, changes_input, disturbed, escape, inner_nodes
from advisor.patterns.softmaxes import Softmax
from advisor.semantics import in_place, operation


class Stop(Exception):
    """Why this is no attention that can be written as one call; `node` is where it shows."""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A number that scales the scores, where it stands, and whether it divides."""

    node: int
    position: int | str
    value: float
    divides: bool


@dataclass(frozen=True, kw_only=True)
class Mask:
    """One step that masks or biases the scores.

    `node` is the mask, `step` the operation that applies it. `kind` is "keep" (True keeps a pair), "drop" (True removes
    it), "nonzero" (zeros are removed) or "bias" (added, multiplied by `sign`). `fill` is what removed scores become,
    None for a bias. `order` brings the mask's axes into the order batch..., query, key, None where they are; `rank` is
    their number and `room` that of the scores there; `axes` are the axes of the scores they meet, () where the mask is
    one long. `cast` tells that a bias has another dtype than the queries, `causal` that what it removes is causal at
    every length, if the `diagonal` of the triangle node of that name is a literal. A bias is scaled by the factors of
    the steps in `scaled_by` as well.
    """

    node: int
    step: int
    kind: str
    fill: float | None = None
    sign: int = 1
    order: tuple[int, ...] | None = None
    rank: int = 0
    room: int = 0
    axes: Axes = ()
    cast: bool = False
    causal: bool = False
    diagonal: int | None = None
    scaled_by: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths: rows of batch and heads together, queries, keys, width of queries and keys, width of values."""

    rows: int
    queries: int
    keys: int
    width: int
    value_width: int


@dataclass(frozen=True, kw_only=True)
class Attention(Region):
    """A region that computes softmax(scale * q k^T + masks) v; inputs "query", "key", "value", "mask0", "mask1" ...

    `orders` brings the axes of query, key and value into the order batch..., position, width, and the result from
    there to where it is read ("output"); None where nothing changes. `batch` is the number of batch axes, one or two.
    `split` is (node, sizes) of the view that cuts one batch axis in two, `cut` the axis of each input (and of the
    output) that has to be cut (joined). `causal` tells that the masks are one causal mask at every length, `diagonal`
    names a triangle whose diagonal must be a literal for that. `alternatives` are the same region with inputs less far
    back.
    """

    scale: float
    factors: tuple[Factor, ...]
    masks: tuple[Mask, ...]
    causal: bool
    diagonal: int | None
    orders: Mapping[str, tuple[int, ...] | None]
    batch: int
    split: tuple[int, tuple[int, int]] | None
    cut: Mapping[str, int]
    sizes: Sizes
    input_axes: Mapping[str, Axes]
    output_axes: Axes


@dataclass
class Reading:
    """What was found around one softmax, read off; raises `Stop` and `Unclear`."""

    graph: Graph
    softmax: Softmax
    steps: list[Node]  # from softmax back to the product of queries and keys
    scores: Product
    output: Product
    after: list[Node]  # from softmax to the product with the values
    dropout: int | None
    at: dict[int, Axes] = field(default_factory=dict)  # axes of the scores where a step begins

    def __post_init__(self) -> None:
        self.follow = Follow(self.scores.out, dict(self.scores.sizes))
        for node in reversed(self.steps):
            self.at[node.index] = self.follow.axes
            self._through(node)
        key = self.follow.axes[self.softmax.dim]
        for node in self.after:
            self._through(node)
        self._name(key)

    def _through(self, node: Node) -> None:
        before = self.follow.axes
        if operation(node) in LAYOUTS:
            self.follow.through(node)
        elif node.shape is not None and len(node.shape) != len(before):
            raise Unclear("a mask with more axes than the scores is added")

    def _name(self, key: Axis) -> None:
        """Tell queries from keys by the axis softmax runs over, and name the batch axes in order."""
        sides = {self.scores.left: self.scores.left_axes, self.scores.right: self.scores.right_axes}
        holders = [index for index, axes in sides.items() if key in axes]
        if len(key) > 1:
            raise Stop(self.softmax.node, "softmax runs over an axis that was cut or joined after the product")
        if len(sides) != 2 or len(key) != 1 or len(holders) != 1:
            raise Stop(self.softmax.node, "softmax does not run over the keys")
        self.key_name, self.key = key[0], holders[0]
        self.query = next(index for index in sides if index != self.key)
        rows = [axis for axis in sides[self.query] if axis not in sides[self.key]]
        if len(rows) != 1:
            raise Stop(self.scores.node, "the scores have no single axis of queries")
        self.query_name = rows[0][0]
        shared = tuple(axis for axis in self.scores.out if axis not in (key, rows[0]))
        self.batch = [name for axis in split_axes(shared, self.follow.splits) for name in axis]
        self.sides = sides
        self._name_output()

    def _name_output(self) -> None:
        """The axes of the values and of the result by the names of the scores; the keys must be summed over."""
        before = self.after[-1].index if self.after else self.softmax.node
        left = self.output.left == before
        mine, other = self.output.left_axes, self.output.right_axes
        if not left:
            mine, other = other, mine
        names: dict[Axis, Axis] = dict(zip(mine, self.follow.axes, strict=True))
        if names.get((self.output.summed,)) != (self.key_name,):
            raise Stop(self.output.node, "the product after softmax does not sum over the keys")
        free = [axis for axis in other if axis not in names]
        if len(free) != 1 or self.output.added is not None or self.output.scale != 1.0:
            raise Stop(self.output.node, "the product after softmax is not one of probabilities and values")
        names[free[0]] = ("width",)
        self.follow.sizes["width"] = self.output.sizes[free[0][0]]
        self.value = self.output.right if left else self.output.left
        self.value_axes = tuple(names[axis] for axis in other)
        self.output_axes = tuple(names[axis] for axis in self.output.out)

    # ----------------------------------------------------------------------------------------------------- the region

    def region(self, strip: bool) -> Attention:
        """The region; `strip` takes the inputs before casts, numbers that scale them, and swaps of their own."""
        inputs = {"query": self.query, "key": self.key, "value": self.value}
        axes = {"query": self.sides[self.query], "key": self.sides[self.key], "value": self.value_axes}
        factors = list(self._factors())
        if strip:
            for name in inputs:
                inputs[name], axes[name] = self._stripped(name, inputs[name], axes[name], factors)
        self._check_inputs(inputs, axes)
        masks = tuple(self._masks(self.graph.nodes[inputs["query"]].dtype))
        named = inputs | {f"mask{k}": mask.node for k, mask in enumerate(masks)}
        places = [constant_place(self.graph, f.node, f.position) for f in factors]
        scalars = {f"factor{k}": place[0] for k, place in enumerate(places) if place[1] is None}
        inner = inner_nodes(self.graph, self.output.node, frozenset({*named.values(), *scalars.values()}))
        self._check_alone(inner, inputs)
        causal = len(masks) == 1 and masks[0].causal
        wanted = {**axes, "output": self.output_axes}
        return Attention(
            graph=self.graph.index,
            root=self.output.node,
            inputs=named,
            inner=inner,
            constants={
                f"factor{k}": (f.value, place[0], place[1])
                for k, (f, place) in enumerate(zip(factors, places, strict=True))
                if place[1] is not None
            },
            scalars=scalars,
            dropout=() if self.dropout is None else (self.dropout,),
            scale=math.prod(1 / f.value if f.divides else f.value for f in factors),
            factors=tuple(factors),
            masks=masks,
            causal=causal,
            diagonal=masks[0].diagonal if causal else None,
            orders={name: self._order(found, name) for name, found in wanted.items()},
            batch=len(self.batch),
            split=self._split(),
            cut={name: place for name, found in wanted.items() if (place := self._cut(found)) is not None},
            sizes=self._sizes(),
            input_axes=axes,
            output_axes=self.output_axes,
        )

    def _sizes(self) -> Sizes:
        sizes = self.follow.sizes
        return Sizes(
            rows=math.prod(sizes[name] for name in self.batch),
            queries=sizes[self.query_name],
            keys=sizes[self.key_name],
            width=sizes[self.scores.summed],
            value_width=sizes["width"],
        )

    def _stripped(self, name: str, index: int, axes: Axes, factors: list[Factor]) -> tuple[int, Axes]:
        """An input before what nobody else reads: casts, numbers that scale it, a swap of its last two axes, and any
        other change of the places of axes that would have to be changed again."""
        rank = len(axes)
        while True:
            node = self.graph.nodes[index]
            kind = operation(node)
            if not node.op.startswith("call_") or len(node.users) != 1 or not node.args or in_place(node):
                return index, axes
            source = node.args[0]
            if kind in ("mul", "div") and name != "value" and len(node.args) == 2:
                found = self._factor(node)
                if found is None:
                    return index, axes
                factors.append(found[0])
                source = Ref(found[1])
            elif (order := _rearrangement(node, rank)) is not None:
                swaps = order == [*range(rank - 2), rank - 1, rank - 2]
                if not swaps and self._order(axes, name) is None:
                    return index, axes
                axes = tuple(axes[order.index(axis)] for axis in range(rank))
            elif kind not in ("to", "contiguous"):
                return index, axes
            if not isinstance(source, Ref):
                return index, axes
            index = source.index

    # ------------------------------------------------------------------------------------------------ scale and masks

    def _factors(self) -> Iterator[Factor]:
        for node in reversed(self.steps):
            if operation(node) not in ("mul", "div"):
                continue
            found = self._factor(node)
            if found is not None:
                yield found[0]
            elif operation(node) == "div" or self._multiplied(node) is None:
                raise Stop(node.index, "the scores are scaled by a tensor: the scale is not known before the run")
        if self.scores.scale != 1.0 and self.scores.scale_at is not None:
            value, position = self.scores.scale, self.scores.scale_at
            yield Factor(node=self.scores.node, position=position, value=value, divides=False)

    def _factor(self, node: Node) -> tuple[Factor, int] | None:
        """The number a mul or div scales a tensor by, and the tensor; None where two tensors meet."""
        for position in (1, 0):
            value, other = number(self.graph, node.args[position]), node.args[1 - position]
            divides = operation(node) == "div"
            if value is None or not isinstance(other, Ref) or (divides and position == 0):
                continue
            if value <= 0 or not math.isfinite(value):
                raise Stop(node.index, "the scores are scaled by zero or by a negative number")
            return Factor(node=node.index, position=position, value=value, divides=divides), other.index
        return None

    def _later(self, node: Node) -> float:
        """What the numbers that scale the scores after a step multiply to."""
        later = self.steps if node.index == self.scores.node else self.steps[: self.steps.index(node)]
        found = [self._factor(n) for n in later if operation(n) in ("mul", "div")]
        return math.prod(1 / f.value if f.divides else f.value for f, _ in filter(None, found))

    def _path(self, node: Node) -> int:
        """Which operand of a step holds the scores."""
        chain = {n.index for n in self.steps} | {self.scores.node}
        return next(i for i, a in enumerate(node.args) if isinstance(a, Ref) and a.index in chain)

    def _multiplied(self, node: Node) -> tuple[int, float, Node] | None:
        """(mask, fill, adding step) where zeros and ones are multiplied in and fill * (1 - mask) is added next."""
        place = self.steps.index(node)
        path = self._path(node)
        other = node.args[1 - path]
        adding = self.steps[place - 1] if place else None
        if adding is None or operation(adding) not in ("add", "sub") or not isinstance(other, Ref):
            return None
        added = adding.args[1 - self._path(adding)]
        if not isinstance(added, Ref) or (operation(adding) == "sub" and self._path(adding) == 1):
            return None
        fill = multiplied_fill(self.graph, other.index, added.index)
        if fill is None:
            return None
        return other.index, -fill if operation(adding) == "sub" else fill, adding

    def _masks(self, dtype: str | None) -> Iterator[Mask]:
        """Masks and biases in the order in which they are applied."""
        if self.scores.added is not None:
            index, factor = self.scores.added
            if factor != 1:
                raise Stop(self.scores.node, "the bias is scaled while it is added")
            bias = self._bias(self._narrow(index), self.scores.node, 1, self.scores.out, dtype)
            yield replace(bias, scaled_by=tuple(node.index for node in self.steps))
        done: set[int] = set()
        for node in reversed(self.steps):
            kind = operation(node)
            if kind in ("masked_fill", "where"):
                yield self._fill(node, kind)
            elif kind == "mul" and self._factor(node) is None:
                found = self._multiplied(node)
                assert found is not None
                index, fill, adding = found
                if fill * min(self._later(adding), 1.0) > MASKED:
                    raise Stop(adding.index, f"masked scores become {fill:g}, which does not remove them")
                done.add(adding.index)
                yield self._removing(node, index, "nonzero", fill)
            elif kind in ("add", "sub") and node.index not in done:
                yield from self._added(node, dtype)

    def _added(self, node: Node, dtype: str | None) -> Iterator[Mask]:
        path = self._path(node)
        other = node.args[1 - path]
        if operation(node) == "sub" and path == 1:
            raise Stop(node.index, "the scores are taken from something")
        if not isinstance(other, Ref):
            if number(self.graph, other) is None:
                raise Stop(node.index, "what is added to the scores is not known")
            raise Stop(node.index, "a number is added to the scores, which changes nothing: take it out first")
        bias = self._narrow(other.index)
        if node.kwargs.get("alpha", 1) != 1:
            raise Stop(node.index, "the bias is scaled while it is added")
        sign = -1 if operation(node) == "sub" else 1
        found = self._bias(bias, node.index, sign, self.at[node.index], dtype)
        removes = sign > 0 and bias.facts.get("fill") == "-inf"
        later = [n.index for n in self.steps[: self.steps.index(node)]]
        yield found if removes else replace(found, scaled_by=tuple(later))

    def _bias(self, bias: Node, step: int, sign: int, axes: Axes, dtype: str | None) -> Mask:
        if bias.dtype is None or "float" not in bias.dtype:
            raise Stop(bias.index, f"a tensor of {bias.dtype} is added to the scores: no attention mask has that type")
        order, met = self._mask_order(bias, axes)
        rank = len(bias.shape or ())
        cast = bias.dtype != dtype and not self._autocast()
        removes = sign > 0 and float(bias.facts.get("fill", "0")) <= MASKED
        causal = self._triangle(bias, "keep", order) if removes else None
        return Mask(
            node=bias.index,
            step=step,
            kind="bias",
            sign=sign,
            order=order,
            rank=rank,
            room=len(axes),
            axes=met,
            cast=cast,
            causal=causal is not None,
            diagonal=causal[0] if causal is not None else None,
        )

    def _fill(self, node: Node, kind: str) -> Mask:
        if kind == "masked_fill":
            mask, fill, side = node.args[1], node.args[2], "drop"
        else:
            path = self._path(node)
            mask, fill, side = node.args[0], node.args[3 - path], "keep" if path == 1 else "drop"
        value = number(self.graph, fill)
        if value is None or value * min(self._later(node), 1.0) > MASKED:
            shown = "a tensor" if value is None else f"{value:g}"
            raise Stop(node.index, f"masked scores are filled with {shown}, which does not remove them")
        if not isinstance(mask, Ref) or self.graph.nodes[mask.index].dtype != "bool":
            raise Stop(node.index, "the mask is not a tensor of bool")
        return self._removing(node, mask.index, side, value)

    def _removing(self, node: Node, index: int, side: str, fill: float) -> Mask:
        mask = self._narrow(index)
        order, met = self._mask_order(mask, self.at[node.index])
        causal = self._triangle(mask, side, order)
        return Mask(
            node=mask.index,
            step=node.index,
            kind=side,
            fill=fill,
            order=order,
            rank=len(mask.shape or ()),
            room=len(self.at[node.index]),
            axes=met,
            causal=causal is not None,
            diagonal=causal[0] if causal is not None else None,
        )

    def _narrow(self, index: int) -> Node:
        """A mask before it was expanded to the scores' shape: it is broadcast all the same."""
        node = self.graph.nodes[index]
        while operation(node) in ("expand", "expand_as") and isinstance(node.args[0], Ref):
            before = self.graph.nodes[node.args[0].index]
            if len(before.shape or ()) != len(node.shape or ()):
                break
            node = before
        return node

    def _mask_order(self, mask: Node, axes: Axes) -> tuple[tuple[int, ...] | None, Axes]:
        """How a mask's axes must be permuted, and the axes of the scores it meets."""
        if mask.shape is None or len(mask.shape) > len(axes):
            raise Unclear("the mask has more axes than the scores")
        met = split_axes(axes, self.follow.splits)[len(axes) - len(mask.shape) :]
        used = tuple(axis if size != 1 else () for axis, size in zip(met, mask.shape, strict=True))
        wanted: Axes = tuple((name,) for name in (*self.batch, self.query_name, self.key_name))
        if len(met) <= len(wanted) and all(
            u in ((), w) for u, w in zip(reversed(used), reversed(wanted), strict=False)
        ):
            return None, used
        if sorted(met) == sorted(wanted):
            return tuple(met.index(axis) for axis in wanted), used
        raise Unclear("the mask meets the scores in an order of axes that no attention mask has")

    def _triangle(self, mask: Node, kind: str, order: tuple[int, ...] | None) -> tuple[int | None] | None:
        """(triangle whose diagonal must be a literal,) where a mask is causal whatever the length, else None."""
        sizes = self.follow.sizes
        square = sizes[self.query_name] == sizes[self.key_name]
        if not square or order is not None or mask.facts.get(kind) != "causal" or reads_batch(self.graph, mask.index):
            return None
        try:
            return (triangle_of(self.graph, mask.index),)
        except NotCausal:
            return None

    # --------------------------------------------------------------------------------------------------------- checks

    def _autocast(self) -> bool:
        """Whether the product rounded its operands itself: autocast does the same to the fused operation's."""
        wide = {self.graph.nodes[i].dtype for i in (self.query, self.key)}
        return "float32" in wide and self.graph.nodes[self.scores.node].dtype in ("bfloat16", "float16")

    def _check_inputs(self, inputs: Mapping[str, int], axes: Mapping[str, Axes]) -> None:
        kinds = {self.graph.nodes[index].dtype for index in inputs.values()}
        if len(kinds) != 1 and not self._autocast():
            raise Stop(self.scores.node, "query, key and value do not have one dtype")
        if len(self.batch) not in (1, 2):
            count = {0: "no batch axis", 3: "three batch axes"}.get(len(self.batch), "many batch axes")
            raise Stop(self.scores.node, f"the products have {count}: the fused kernels take batch and heads")
        wanted = {
            "query": (self.query_name, self.scores.summed),
            "key": (self.key_name, self.scores.summed),
            "value": (self.key_name, "width"),
        }
        for name, found in axes.items():
            if sorted(self._flat(found)) != sorted((*self.batch, *wanted[name])):
                raise Stop(self.scores.node, "query, key and value do not have the same batch axes")

    def _check_alone(self, inner: frozenset[int], inputs: Mapping[str, int]) -> None:
        writes = changes_input(self.graph, inner)
        if writes is not None:
            raise Stop(writes, "it changes its input in place")
        leak = escape(self.graph, inner, self.output.node)
        if leak is not None:
            raise Stop(leak, f"the intermediate `{self.graph.nodes[leak].name}` is used elsewhere")
        disturbance = disturbed(self.graph, inner, self.output.node)
        if disturbance is not None:
            raise Stop(*disturbance)
        root, query = self.graph.nodes[self.output.node], self.graph.nodes[inputs["query"]]
        cast = any(operation(self.graph.nodes[i]) == "to" for i in inner) and not self._autocast()
        if root.dtype != query.dtype and cast:
            raise Stop(root.index, "the result has another dtype than the queries")

    # ----------------------------------------------------------------------------------------------------------- orders

    def _flat(self, axes: Axes) -> list[str]:
        return [name for axis in split_axes(axes, self.follow.splits) for name in axis]

    def _order(self, axes: Axes, name: str) -> tuple[int, ...] | None:
        have = self._flat(axes)
        ends = {
            "query": (self.query_name, self.scores.summed),
            "key": (self.key_name, self.scores.summed),
            "value": (self.key_name, "width"),
            "output": (self.query_name, "width"),
        }
        wanted = [*self.batch, *ends[name]]
        if name == "output":
            have, wanted = wanted, have
        return None if have == wanted else tuple(have.index(axis) for axis in wanted)

    def _split(self) -> tuple[int, tuple[int, int]] | None:
        if not self.follow.splits:
            return None
        if len(self.follow.splits) > 1 or len(self.batch) != 2:
            raise Unclear("the scores are cut along several axes")
        ((node, parts),) = self.follow.splits.values()
        return node, (self.follow.sizes[parts[0]], self.follow.sizes[parts[1]])

    def _cut(self, axes: Axes) -> int | None:
        """Which axis of an operand holds both batch axes."""
        found = [place for place, axis in enumerate(split_axes(axes, self.follow.splits)) if len(axis) > 1]
        return found[0] if found else None


def _rearrangement(node: Node, rank: int) -> list[int] | None:
    """Which axis of its tensor each axis of the result of a transposition or permutation is, None for others."""
    order = list(range(rank))
    if operation(node) == "transpose" or (operation(node) == "getattr" and node.args[1:] == ("mT",)):
        pair = node.args[1:3] if operation(node) == "transpose" else (-2, -1)
        first, second = (d % rank if isinstance(d, int) else 0 for d in pair)
        order[first], order[second] = second, first
        return order
    if operation(node) != "permute":
        return None
    dims = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple) else node.args[1:]
    found = [d % rank for d in dims if isinstance(d, int)]
    return found if sorted(found) == order else None
