"""Cross entropy written out on scores: found from log-softmax forward, told from its look-alikes by evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from advisor.model import Graph, Node, Ref
from advisor.patterns.losses import cross_entropy
from advisor.patterns.reading_losses import DEFAULT_IGNORED, Meaning, Reading, Target, agree, arguments
from advisor.patterns.regions import (
    FORWARD_LIMIT,
    NearMiss,
    Region,
    calls,
    changes_input,
    disturbed,
    escape,
    forward_from,
    inner_nodes,
)
from advisor.patterns.shown_axes import axes_added, axes_given
from advisor.semantics import operation

PICKS = frozenset({"gather", "one_hot", "nll_loss", "cross_entropy", "scatter", "scatter_"})
PASSED_ON = frozenset({"to", "view", "reshape", "flatten", "transpose", "permute", "contiguous", "squeeze"})
INDEXED = frozenset({"gather", "scatter", "scatter_"})


def cross_entropy_regions(graph: Graph) -> Iterator[Region | NearMiss]:
    """Cross entropy of scores and classes (or of scores and probabilities) that is not one call of F.cross_entropy.

    Inputs are "x", the scores before any softmax, and "target". Facts: "axis" is the class axis of the scores,
    "reduction" mean, sum or none, "soft" whether the target holds probabilities, "classes" how many there are,
    "smoothing" the label smoothing, "flat" whether the scores have one axis of rows, "anchor" the node of the softmax,
    "widened" whether scores of half precision give a float32 result (`_Search._widened`), "counted" the arguments that
    were taken for the number of rows, as "node position", "ends" from where the class axis is counted: "front", "back",
    or both, "picks" the nodes that gather or scatter, "indexed" those that index the scores by the classes, "broadcast"
    whether the target is multiplied with the scores, which takes one that is broadcast, "reshaped" whether the target
    is read in another shape alone. The constants "ignore_index" and "label_smoothing" are there where they are not
    torch's defaults.
    """
    claimed: set[int] = set()
    for node in calls(graph, "cross_entropy", "nll_loss", "log_softmax"):
        twice = _softmax_twice(graph, node)
        if twice is not None:
            claimed |= {node.index, *forward_from(graph, node.index, 1)}
            yield twice
    for node in calls(graph, "log_softmax", "logsumexp", "softmax"):
        if node.index in claimed or not node.args or not isinstance(node.args[0], Ref):
            continue
        found = _Search(graph, node).found()
        if isinstance(found, Region):
            claimed |= found.inner
        if found is not None:
            yield found


def bare_loss(graph: Graph, region: Region) -> bool:
    """Whether a region is log-softmax and nll_loss with views and nothing else, which is what F.cross_entropy runs."""
    kinds = {operation(graph.nodes[index]) for index in region.inner}
    return {"log_softmax", "nll_loss"} <= kinds and kinds <= {"log_softmax", "nll_loss"} | PASSED_ON | {"unsqueeze"}


def _called(graph: Graph, index: int) -> str:
    """The name of a node, empty where capture has numbered it and the source may not hold it."""
    name = graph.nodes[index].name
    stem, _, number = name.rpartition("_")
    numbered = number.isdigit() and any(node.name == stem for node in graph.nodes)
    return "" if numbered else f"`{name}`"


def _softmax_twice(graph: Graph, node: Node) -> NearMiss | None:
    """A loss that takes scores and is given what a softmax made of them."""
    current = node.args[0] if node.args else node.kwargs.get("input")
    for _ in range(FORWARD_LIMIT):
        if not isinstance(current, Ref):
            return None
        before = graph.nodes[current.index]
        kind = operation(before)
        if kind == "softmax":
            reason = (
                "F.nll_loss takes log-probabilities and is given probabilities: a mistake that a rewrite would hide"
                if operation(node) == "nll_loss"
                else "softmax is applied twice, here and inside the loss: a mistake that a rewrite would hide"
            )
            return NearMiss(graph=graph.index, node=node.index, reason=reason)
        if kind not in PASSED_ON or not before.args:
            return None
        current = before.args[0]
    return None


class _Search(Reading):
    """The search around one softmax: its input is the scores."""

    def found(self) -> Region | NearMiss | None:
        """The widest region that stands alone, else why there is none; None where nothing resembles a loss."""
        if self.axis is None or self.classes < 2 or self.rows < 2:
            return None
        near: NearMiss | None = None
        for root in reversed(forward_from(self.graph, self.anchor.index)):
            node = self.graph.nodes[root]
            if node.shape is None or operation(node) in ("log_softmax", "softmax", "logsumexp"):
                continue
            if math.prod(node.shape) not in (1, self.rows):  # a loss is one number, or one for every row
                continue
            for target in self.targets(root):
                meaning = self.meaning(root, target)
                if meaning is None:
                    continue
                region = self._region(root, target, meaning)
                if isinstance(region, Region):
                    return region
                near = near or region
                break
        return near or self._look_alike()

    # -------------------------------------------------------------------------------------------------------- region

    def _region(self, root: int, target: Target, meaning: Meaning) -> Region | NearMiss:
        inputs = {"x": self.scores.index, "target": target.node}
        inner = inner_nodes(self.graph, root, frozenset(inputs.values()))
        widened = self._widened(inner, target)
        if widened == "float" and self.scores.target == "method.float" and isinstance(self.scores.args[0], Ref):
            inputs["x"] = self.scores.args[0].index
            inner |= {self.scores.index}
        region = Region(
            graph=self.graph.index,
            root=root,
            inputs=inputs,
            inner=inner,
            constants=self._constants(root, inner, meaning),
            facts={
                "axis": str(self.axis),
                "reduction": meaning.reduction,
                "soft": str(target.soft),
                "anchor": str(self.anchor.index),
                "classes": str(self.classes),
                "smoothing": repr(meaning.smoothing),
                "flat": str(len(self.shape) == 2),
                "widened": widened,
                "counted": ";".join(f"{node} {place}" for node, place in meaning.counted),
                "ends": " ".join(sorted(self._ends(inner))),
                "picks": self._listed(inner, lambda node: operation(node) in INDEXED),
                "broadcast": str(target.soft or any(operation(self.graph.nodes[i]) == "one_hot" for i in inner)),
                "reshaped": str(self._reshapes(inner, target.node)),
                "indexed": self._listed(inner, self._index_of_rows),
            },
        )
        reason = self._unfit(region, target, meaning)
        return region if reason is None else self._near(*reason)

    def _widened(self, inner: frozenset[int], target: Target) -> str:
        """Whether the region gives float32 for scores of half precision: "float" where it says `.float()`, "promoted"
        where it computes with a float32 tensor that is not made of them and has not the dtype of the target."""
        scored = {self.scores.index}  # nodes that depend on the scores
        like_target = {target.node} if target.soft else set[int]()
        wide = "float" if self.scores.target == "method.float" else ""
        for index in sorted(inner):
            node = self.graph.nodes[index]
            read = [self.graph.nodes[i] for i in node.inputs()]
            mine = [n for n in read if n.index in scored]
            if not mine:
                if read and all(n.index in like_target for n in read) and operation(node) != "to":
                    like_target.add(index)
                continue
            scored.add(index)
            known = scored | like_target
            fixed = [n for n in read if n.index in inner and n.index not in known and n.dtype == "float32"]
            if node.target == "method.float":
                return "float"
            if not wide and any(n.shape or not any(m.shape for m in mine) for n in fixed):
                wide = "promoted"
        return wide

    def _reshapes(self, inner: frozenset[int], target: int) -> bool:
        """Whether the region reads the target in another shape alone, as `target.view(-1, 1)` for one of any shape."""
        users = [self.graph.nodes[index] for index in self.graph.nodes[target].users if index in inner]
        return bool(users) and all(operation(node) in ("view", "reshape", "flatten") for node in users)

    def _listed(self, inner: frozenset[int], kind: Callable[[Node], bool]) -> str:
        return " ".join(str(index) for index in sorted(inner) if kind(self.graph.nodes[index]))

    def _ends(self, inner: frozenset[int]) -> set[str]:
        """From which ends the region counts the class axis: what counts from one end holds for any number of axes."""
        rank, found = len(self.shape), set[str]()
        for node in (self.graph.nodes[index] for index in inner):
            kind = operation(node)
            read = self.graph.nodes[node.args[0].index] if node.args and isinstance(node.args[0], Ref) else None
            places = [axis for axis in axes_given(node) if read is not None and len(read.shape or ()) == rank]
            if kind == "squeeze" and read is not None and len(read.shape or ()) == rank:
                places += [axis for axis in node.args[1:2] if isinstance(axis, int)]
            elif kind in ("nll_loss", "cross_entropy") or self._index_of_rows(node):
                places += [1]
            elif kind == "one_hot" and self.axis == rank - 1:
                places += [-1]
            elif len(node.shape or ()) == rank:
                places += axes_added(node)
            found |= {"front" if axis >= 0 else "back" for axis in places if axis % rank == self.axis}
        return found

    def _index_of_rows(self, node: Node) -> bool:
        """`scores[index of the rows, classes]`."""
        item = node.args[1] if operation(node) == "getitem" else None
        return isinstance(item, tuple) and any(isinstance(part, Ref) for part in item)

    def _constants(
        self, root: int, inner: frozenset[int], meaning: Meaning
    ) -> Mapping[str, tuple[float, int, int | str]]:
        found: dict[str, tuple[float, int, int | str]] = {}
        if meaning.ignored not in (None, DEFAULT_IGNORED):
            for index in sorted(inner):
                node = self.graph.nodes[index]
                places = [
                    place
                    for place, arg in arguments(node)
                    if isinstance(arg, int) and not isinstance(arg, bool) and arg == meaning.ignored
                ]
                if places and operation(node) in ("eq", "ne", "nll_loss", "cross_entropy"):
                    found["ignore_index"] = (float(meaning.ignored or 0), index, places[0])
                    break
        if meaning.smoothing:
            near = [c for c in self.floats(root) if math.isclose(c[0], meaning.smoothing, rel_tol=1e-12)]
            spread = [
                c for c in self.floats(root) if math.isclose(c[0] * self.classes, meaning.smoothing, rel_tol=1e-9)
            ]
            found["label_smoothing"] = (near or spread)[0]
        return found

    def _near(self, node: int, reason: str) -> NearMiss:
        return NearMiss(graph=self.graph.index, node=node, reason=reason)

    def _unfit(self, region: Region, target: Target, meaning: Meaning) -> tuple[int, str] | None:
        """Why a region that computes the loss cannot be replaced, with the node to show."""
        graph, root = self.graph, self.graph.nodes[region.root]
        writes = changes_input(graph, region.inner)
        if writes is not None:
            return writes, "it changes its input in place"
        disturbance = disturbed(graph, region.inner, region.root)
        if disturbance is not None:
            return disturbance
        leak = escape(graph, region.inner, region.root)
        if leak is not None:
            kind = operation(graph.nodes[leak])
            what = "log-probabilities" if kind in ("log_softmax", "log", "softmax") else "intermediate"
            called = _called(graph, leak)
            named = f" {called}" if called else ""
            return leak, f"the {what}{named} {'are' if what[-1] == 's' else 'is'} used elsewhere"
        widened = region.facts["widened"]
        double = widened == "promoted" and self.anchor.dtype == "float64"
        wanted = "float32" if widened and not double else self.anchor.dtype
        if root.dtype != wanted or (operation(self.anchor) == "logsumexp" and self._half()):
            return root.index, (
                f"its dtypes differ: {self.scores.dtype} in, {root.dtype} out; F.cross_entropy would return another"
            )
        if "dtype" in self.anchor.kwargs or len(self.anchor.args) > 3:
            return self.anchor.index, "softmax is given a dtype: F.cross_entropy has no such argument"
        if meaning.reduction == "none":
            return self._weighted(root)
        if root.shape != ():
            return root.index, f"its result has the shape {root.shape}; F.cross_entropy returns a single number"
        return None

    def _half(self) -> bool:
        return self.scores.dtype in ("float16", "bfloat16")

    def _weighted(self, root: Node) -> tuple[int, str] | None:
        """One loss for every row, multiplied by a tensor that is no mask: a policy gradient has this form."""
        for user in root.users:
            node = self.graph.nodes[user]
            if operation(node) != "mul":
                continue
            for arg in node.args:
                if isinstance(arg, Ref) and arg.index != root.index and not self._is_mask(arg.index):
                    return node.index, (
                        f"the log-probabilities are weighted by {_called(self.graph, arg.index) or 'another tensor'}: "
                        "a policy gradient or a weighting of its own, not cross entropy"
                    )
        return None

    def _is_mask(self, index: int) -> bool:
        """Whether a tensor is made of booleans or integers, cast or viewed."""
        for _ in range(FORWARD_LIMIT):
            node = self.graph.nodes[index]
            if (node.dtype or "").startswith(("bool", "int", "uint")):
                return True
            if operation(node) not in PASSED_ON | {"unsqueeze"} or not isinstance(node.args[0], Ref):
                return False
            index = node.args[0].index
        return False

    # ---------------------------------------------------------------------------------------------------- look-alikes

    def _look_alike(self) -> NearMiss | None:
        """Why what follows the softmax is no cross entropy, where it picks the class of a target."""
        order = forward_from(self.graph, self.anchor.index)
        picks = [i for i in order if self._picks(i)]
        if not picks:
            return None
        if operation(self.anchor) == "softmax":
            return self._inside_logarithm(order)
        if operation(self.anchor) == "logsumexp":
            return None
        for root in reversed(order):
            reason = self._difference(root)
            if reason is not None:
                return self._near(root, f"not the same function: {reason}")
        for index in order:
            node = self.graph.nodes[index]
            others = [a.index for a in node.args if isinstance(a, Ref) and a.index not in order]
            floating = [i for i in others if (self.graph.nodes[i].dtype or "").startswith(("float", "bfloat"))]
            if operation(node) == "mul" and floating and index not in picks and not self._is_mask(floating[0]):
                return self._near(
                    index,
                    f"the log-probabilities are weighted by {_called(self.graph, floating[0]) or 'another tensor'}: "
                    "a policy gradient or a weighting of its own, not cross entropy",
                )
        return self._near(picks[0], "what is made of the log-probabilities is no loss that F.cross_entropy computes")

    def _picks(self, index: int) -> bool:
        node = self.graph.nodes[index]
        if operation(node) in PICKS or any(self._is_one_hot(i) for i in node.inputs()):
            return True
        return self._index_of_rows(node)

    def _is_one_hot(self, index: int) -> bool:
        for _ in range(FORWARD_LIMIT):
            node = self.graph.nodes[index]
            if operation(node) in ("one_hot", "scatter", "scatter_"):
                return True
            if operation(node) not in PASSED_ON or not isinstance(node.args[0], Ref):
                return False
            index = node.args[0].index
        return False

    def _inside_logarithm(self, order: list[int]) -> NearMiss | None:
        for index in order:
            node = self.graph.nodes[index]
            before = self.graph.nodes[node.args[0].index] if node.args and isinstance(node.args[0], Ref) else None
            if operation(node) == "log" and before is not None and operation(before) in ("add", "clamp", "clamp_min"):
                return self._near(
                    index, "not the same function: a constant inside the logarithm changes small probabilities"
                )
        return None

    def _difference(self, root: int) -> str | None:
        """How a node differs from cross entropy, where the difference is a known one."""
        for target in self.targets(root):
            computed = self.value(root, target, target.value.data)
            if computed is None:
                continue
            value = computed[0]
            mean = cross_entropy(self.x.data, target.value.data, "mean")
            if value.ndim == 0 and agree(value * self.classes, mean):
                return "it divides by the number of classes as well, which F.cross_entropy does not"
            reduction, _ = self.plain_loss(root, value, target.value.data)
            if reduction is not None and self.ignored(root):
                return "rows without a target count otherwise than F.cross_entropy counts them"
            for fraction in self.fractions(root):
                spread = fraction * self.classes / (self.classes - 1)
                for kind in ("none",) if value.ndim else ("mean", "sum"):
                    if spread < 1 and agree(
                        value, cross_entropy(self.x.data, target.value.data, kind, smoothing=spread)
                    ):
                        return "the smoothing is spread over the other classes, F.cross_entropy spreads it over all"
        return None
