"""Softmax attention written out, in any spelling and layout: walk from softmax back and forth to both products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from advisor.model import Graph, Node, Ref
from advisor.patterns.axes import LAYOUTS, PRODUCTS, Product, Unclear, product
from advisor.patterns.reading import Attention, Reading, Stop
from advisor.patterns.regions import FORWARD_LIMIT, NearMiss
from advisor.patterns.samples import agrees
from advisor.patterns.softmaxes import Softmax, softmaxes
from advisor.semantics import operation


def attention_regions(graph: Graph) -> Iterator[Attention | NearMiss]:
    """softmax(scale q k^T + masks) v written out; a softmax of a product that is no attention is a near miss."""
    for found in softmaxes(graph):
        region = _Search(graph, found).result()
        if region is not None:
            yield region


def default_scale(region: Attention) -> bool:
    """Whether the scale is 1/sqrt(width of the queries), the default of scaled_dot_product_attention."""
    return math.isclose(region.scale, 1.0 / math.sqrt(region.sizes.width), rel_tol=1e-6)


@dataclass
class _Search:
    """The attention around one softmax."""

    graph: Graph
    softmax: Softmax
    dropout: int | None = None
    after: list[Node] = field(default_factory=list)  # from softmax to the product with the values

    def result(self) -> Attention | NearMiss | None:
        """None for a softmax that follows no product at all."""
        if not self._follows_product(self.softmax.source):
            return None
        try:
            steps, scores = self._to_scores(self.softmax.source)
            output = self._to_output()
            reading = Reading(self.graph, self.softmax, steps, scores, output, self.after, self.dropout)
            region = self._widest(reading)
            if agrees(self.graph, region) is False:
                raise Stop(region.root, "the region does not compute softmax attention on sample values")
        except Unclear as unclear:
            return NearMiss(graph=self.graph.index, node=self.softmax.node, reason=str(unclear))
        except Stop as stop:
            return NearMiss(graph=self.graph.index, node=stop.node, reason=str(stop))
        return region

    def _widest(self, reading: Reading) -> Attention:
        """The region with its inputs taken as far back as they can be; as they enter the products is an alternative."""
        try:
            far = reading.region(strip=True)
        except (Stop, Unclear):
            return reading.region(strip=False)
        try:
            near = reading.region(strip=False)
        except (Stop, Unclear):
            return far
        return far if far.inputs == near.inputs else replace(far, alternatives=(near,))

    def _follows_product(self, index: int) -> bool:
        """Whether a chain of elementwise operations starts from a product: any other softmax is no attention."""
        for _ in range(FORWARD_LIMIT):
            node = self.graph.nodes[index]
            if operation(node) in PRODUCTS:
                return True
            refs = [a.index for a in node.args if isinstance(a, Ref)]
            if not refs or not node.op.startswith("call_"):
                return False
            if any(operation(self.graph.nodes[i]) in PRODUCTS for i in refs):
                return True
            same = [i for i in refs if self.graph.nodes[i].shape == node.shape]
            index = next((i for i in same if self.graph.nodes[i].op.startswith("call_")), (same or refs)[0])
        return False

    def _to_scores(self, index: int) -> tuple[list[Node], Product]:
        """The steps from softmax back to the product of queries and keys, and the product."""
        steps: list[Node] = []
        for _ in range(4 * FORWARD_LIMIT):
            node = self.graph.nodes[index]
            if operation(node) in PRODUCTS:
                scores = product(self.graph, node)
                if scores is None:
                    reason = "the product before softmax is not one of queries and keys with the same leading axes"
                    raise Stop(index, reason)
                return steps, scores
            steps.append(node)
            before = self._before(node)
            if len(before) == 1:
                index = before[0]
                continue
            for first, last in ((before[0], False), (before[1], True)):  # a bias may come from a product of its own
                try:
                    more, scores = self._to_scores(first)
                except Stop:
                    if last:
                        raise
                else:
                    return [*steps, *more], scores
        raise Stop(index, "too many operations stand between the scores and softmax")

    def _before(self, node: Node) -> list[int]:
        """Where the scores may come from at one step, the likeliest first; raises `Stop` where that is not known."""
        kind = operation(node)
        refs = [a.index if isinstance(a, Ref) else None for a in node.args]
        wanted: list[int | None] = []
        if kind in ("mul", "add") and len(refs) == 2:
            wanted = refs
        elif kind in ("div", "sub", "masked_fill", *LAYOUTS):
            wanted = refs[:1]
        elif kind == "where" and len(refs) == 3:
            wanted = refs[1:]
        behind = [i for i in wanted if i is not None and self._follows_product(i)]
        behind += [
            i for i in wanted if i is not None and i not in behind and operation(self.graph.nodes[i]) in PRODUCTS
        ]
        if not behind:
            raise Stop(node.index, f"`{kind}` stands between the scores and softmax")
        return behind

    def _to_output(self) -> Product:
        """Walk forward from softmax to the product with the values."""
        node = self.graph.nodes[self.softmax.node]
        while True:
            if len(node.users) != 1:
                raise Stop(node.index, "the attention probabilities are used elsewhere as well")
            node, before = self.graph.nodes[node.users[0]], node
            kind = operation(node)
            if kind in PRODUCTS:
                found = product(self.graph, node, "o.")
                if found is None or (found.left == before.index) == (found.right == before.index):
                    raise Stop(node.index, "the product after softmax is not one of probabilities and values")
                return found
            if kind == "dropout" and self.dropout is None:
                self.dropout = node.index
            elif kind not in LAYOUTS:
                raise Stop(node.index, f"`{kind}` stands between softmax and the values")
            self.after.append(node)
