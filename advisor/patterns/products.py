"""Matrix products of a captured graph: their sizes, and which of them are no multiple of what tensor cores read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from advisor.model import Graph, Node, Ref
from advisor.patterns.regions import ALIASES, NearMiss, Region, calls
from advisor.semantics import operation

ELEMENTS = {"float16": 8, "bfloat16": 8, "float32": 4}  # 16 bytes; float32 as TF32
KINDS = ("linear", "matmul", "addmm", "conv1d", "conv2d", "conv3d")


@dataclass(frozen=True)
class Product:
    """`batch` products of (rows, inner) by (inner, columns). `dtype` is that of the result: autocast chooses it."""

    node: Node
    batch: int
    rows: int
    inner: int
    columns: int
    dtype: str

    @property
    def flops(self) -> float:
        """Of the forward pass: a product and a sum for each element of the result and of the inner dimension."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


def product_of(graph: Graph, node: Node) -> Product | None:
    """The sizes of a matrix product: linear, matmul, addmm, or a convolution with a window of one element."""
    kind = operation(node)
    position = 1 if kind == "addmm" else 0
    if kind not in KINDS or len(node.args) < position + 2 or node.shape is None or node.dtype is None:
        return None
    left, right = (_shape(graph, arg) for arg in node.args[position : position + 2])
    if left is None or right is None or 0 in (*left, *right):
        return None
    if kind.startswith("conv"):
        if set(right[2:]) != {1} or len(right) < 3 or _groups(node) != 1:
            return None
        pixels = math.prod(node.shape) // max(right[0], 1)
        return Product(node, 1, pixels, right[1], right[0], node.dtype)
    if kind == "linear":
        if len(right) != 2:
            return None
        return Product(node, 1, math.prod(left[:-1]), right[1], right[0], node.dtype)
    if len(left) < 2 or len(right) < 2:
        return None
    if len(right) == 2:
        return Product(node, 1, math.prod(left[:-1]), left[-1], right[-1], node.dtype)
    return Product(node, math.prod(node.shape[:-2]), left[-2], left[-1], right[-1], node.dtype)


def _shape(graph: Graph, arg: Any) -> tuple[int, ...] | None:
    return graph.nodes[arg.index].shape if isinstance(arg, Ref) else None


def _groups(node: Node) -> int:
    given = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    return given if isinstance(given, int) else 1


def odd_products(graph: Graph) -> Iterator[Region | NearMiss]:
    """Products whose inner or column size is no multiple of 16 bytes of their dtype.

    Facts: "columns" and "inner" are the sizes, "odd" which of them are odd, "dtype" the dtype of the result, "flops" of
    the forward pass. A linear layer has the inputs "x", "weight" and "bias". Products with a vector are left out. The
    number of rows is the batch and no leading dimension of the forward product, and is not looked at.
    """
    for node in calls(graph, *KINDS):
        product = product_of(graph, node)
        if product is None or product.dtype not in ELEMENTS or min(product.columns, product.inner, product.rows) == 1:
            continue
        step = ELEMENTS[product.dtype]
        names = [n for n, size in (("columns", product.columns), ("inner", product.inner)) if size % step]
        if operation(node).startswith("conv") and "inner" in names and product.inner <= 4:
            names.remove("inner")  # an image has one to four channels
        if not names or (product.dtype == "float32" and node.span is None):
            continue
        yield Region(
            graph=graph.index,
            root=node.index,
            inputs=_inputs(node),
            inner=frozenset({node.index}),
            facts={
                "columns": str(product.columns),
                "inner": str(product.inner),
                "odd": " ".join(names),
                "dtype": product.dtype,
                "flops": repr(product.flops),
                "kind": operation(node),
                "viewed": _viewed(graph, node, product.columns) or "",
            },
        )


def _inputs(node: Node) -> dict[str, int]:
    if operation(node) != "linear":
        return {f"operand{i}": arg.index for i, arg in enumerate(node.args) if isinstance(arg, Ref)}
    given = [*node.args, *([None] * 3)][:3]
    given[2] = node.kwargs.get("bias", given[2])
    return {name: arg.index for name, arg in zip(("x", "weight", "bias"), given, strict=True) if isinstance(arg, Ref)}


MAY_ALIAS = ALIASES | {"view", "view_as"}


def _viewed(graph: Graph, node: Node, columns: int) -> str | None:
    """A view of the result, or of a view of it, that a slice of a wider one could not give: it joins the last axis with
    another."""
    pending, seen = [node.index], {node.index}
    while pending:
        before = graph.nodes[pending.pop()]
        for index in before.users:
            after = graph.nodes[index]
            reads = bool(after.args) and after.args[0] == Ref(before.index)
            if index in seen or not reads:
                continue
            kind, joins = operation(after), _joins(before, after, columns)
            if kind == "as_strided" or (kind in ("view", "view_as") and joins):
                return after.name
            copies = (kind in ("reshape", "flatten") and joins) or kind == "contiguous" or after.dtype != before.dtype
            if kind in MAY_ALIAS and not (copies and before.shape is not None and after.shape is not None):
                seen.add(index)
                pending.append(index)
    return None


def _joins(before: Node, after: Node, columns: int) -> bool:
    """Whether the last axis of the product begins an axis before an operation and none after it."""
    return _begins(before.shape, columns) and not _begins(after.shape, columns)


def _begins(shape: tuple[int, ...] | None, columns: int) -> bool:
    return shape is not None and any(math.prod(shape[axis:]) == columns for axis in range(len(shape)))


def viewed_elsewhere(graphs: Iterable[Graph], node: Node, columns: int) -> str | None:
    """A view, in another graph, of a tensor like the result that joins its last axis with another."""
    for graph in graphs:
        for given in graph.nodes:
            if given.op == "placeholder" and given.facts.get("origin") != "state" and given.shape == node.shape:
                found = _viewed(graph, given, columns)
                if found is not None:
                    return found
    return None


def is_vocabulary(graphs: tuple[Graph, ...], size: int) -> bool:
    """Whether an embedding of a graph has so many entries."""
    return any(_entries(graph, node) == size for graph in graphs for node in calls(graph, "embedding"))


def embedding_with(graph: Graph, size: int) -> Node | None:
    """The first embedding of a graph with so many entries."""
    return next((node for node in calls(graph, "embedding") if _entries(graph, node) == size), None)


def _entries(graph: Graph, node: Node) -> int | None:
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    shape = _shape(graph, weight)
    return shape[0] if shape else None
