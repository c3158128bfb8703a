"""What the source of a written-out cross entropy shows for other tensors than those of the run: axes, rows, classes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cached_property

from advisor.alignment.aligned import Alignment, Bound
from advisor.model import Arg, Graph, Node, Ref
from advisor.patterns.extents import Extents
from advisor.patterns.regions import Region
from advisor.patterns.shown_axes import rank_is_shown
from advisor.semantics import operation
from advisor.usercode.reaching import reaching

VIEWS = frozenset("view reshape flatten transpose permute contiguous squeeze unsqueeze".split())
KEEPING = frozenset("view reshape flatten long to contiguous clone detach squeeze unsqueeze cuda cpu".split())

FLOATING = frozenset("softmax sigmoid float half double bfloat16 rand randn rand_like exp".split())


class WrittenLoss:
    """One region of `cross_entropy_regions` with its source."""

    def __init__(self, alignment: Alignment, graph: Graph, region: Region) -> None:
        self.alignment, self.graph, self.region, self.source = alignment, graph, region, alignment.source
        self.axis, self.ends = int(region.facts["axis"]), region.facts["ends"]
        self.bound = {name: alignment.values[region.inputs[name]] for name in ("x", "target")}
        self.ranks = {name: len(graph.nodes[region.inputs[name]].shape or ()) for name in ("x", "target")}

    # ----------------------------------------------------------------------------------------------------------- axes

    @cached_property
    def rank_is_shown(self) -> bool:
        """Whether the source holds for one number of axes: it shows the rank, or counts the classes from both ends."""
        if self.ends == "back front":
            return True
        picks = [self.graph.nodes[int(index)].args[2:3] for index in self.region.facts["picks"].split()]
        indices = [arg.index for args in picks for arg in args if isinstance(arg, Ref)]
        tensors = (self.region.inputs["x"], *indices)
        return any(rank_is_shown(self.alignment, self.graph, self.region, index) for index in tensors)

    @property
    def from_front(self) -> bool:
        """Whether the class axis stays the second one, where F.cross_entropy looks for it; else it stays the last."""
        return self.axis == 1 and (self.ranks["x"] > 2 or "front" in self.ends or self.rank_is_shown)

    def another_loss(self) -> str | None:
        """Why the source may compute another loss for other tensors, or None."""
        moves = "front" in self.ends if self.axis != 1 else self.ranks["x"] > 2 and "back" in self.ends
        if moves and not self.rank_is_shown:
            rank = self.ranks["x"]
            return f"its axes are those of a loss only for scores of rank {rank}, and the source does not show the rank"
        if self.region.facts["widened"] == "promoted" and not _is_named(self.bound["x"].expression):
            return "the scores have no name that their dtype could be read from"
        target = self.bound["target"]
        if self.region.facts["indexed"] and not self._never_negative(target.expression, target.statement):
            text = self.source.segment(target.expression)
            return f"an index takes class -1 for the last one, F.cross_entropy refuses it, and `{text}` may hold it"
        return self.another_target()

    # --------------------------------------------------------------------------------------------------------- targets

    @cached_property
    def fitted_target(self) -> str:
        """The target as a template, in the shape and dtype that F.cross_entropy asks for, which multiplication with
        the scores does not."""
        soft, named = self.region.facts["soft"] == "True", _is_named(self.bound["x"].expression)
        if not named or self.region.facts["broadcast"] != "True":
            return "{target}"
        if not soft:
            return "{target}" if self.from_front else "{target}.expand({x}.shape[:-1])"
        if self._target_is_floating:
            return "{target}.expand_as({x})"
        scores = "torch.float32" if self.region.facts["widened"] else "{x}.dtype"
        return f"{{target}}.to(torch.promote_types({{target}}.dtype, {scores})).expand_as({{x}})"

    @cached_property
    def _target_is_floating(self) -> bool:
        return self._is_floating(self.bound["target"].expression, self.bound["target"].statement)

    def another_target(self) -> str | None:
        """Why a target of another shape or dtype, with which the scores are multiplied, may give another loss."""
        if self.region.facts["broadcast"] != "True":
            return None
        named = {name: _is_named(bound.expression) for name, bound in self.bound.items()}
        if not named["x"] and not self.from_front:
            return "the scores have no name that their shape could be read from, and the target may be broadcast to it"
        if self.region.facts["soft"] == "True" and not self._target_is_floating and not all(named.values()):
            text = self.source.segment(self.bound["target"].expression)
            return f"F.cross_entropy takes integers for classes, and `{' '.join(text.split())}` may hold integers"
        return None

    def _is_floating(self, node: ast.expr, at: ast.stmt, depth: int = 6) -> bool:
        """Whether the source shows that a tensor holds floating-point numbers."""
        if isinstance(node, ast.Name):
            found = reaching(self.source, node.id, at) if depth else []
            given = [(d.value, d.statement) for d in found if d.item is None and d.value is not None]
            return len(given) == len(found) > 0 and all(
                s is not None and v is not None and self._is_floating(v, s, depth - 1) for v, s in given
            )
        if isinstance(node, ast.BinOp):
            either = (node.left, node.right)
            return isinstance(node.op, ast.Div) or any(self._is_floating(side, at, depth) for side in either)
        if isinstance(node, ast.Constant):
            return isinstance(node.value, float)
        if isinstance(node, (ast.UnaryOp, ast.Subscript)):
            return self._is_floating(node.operand if isinstance(node, ast.UnaryOp) else node.value, at, depth)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        known, attribute = self.source.qualified(node.func), node.func.attr
        if not (known or "torch.").startswith("torch.") or ast.unparse(node.func.value) == "self":
            return False
        if attribute in KEEPING - {"long", "to"}:
            kept = node.args[0] if known and node.args else node.func.value
            return self._is_floating(kept, at, depth)
        return attribute in FLOATING

    # -------------------------------------------------------------------------------------------------------- numbers

    @property
    def counted(self) -> tuple[tuple[int, int], ...]:
        """The arguments that were taken for the number of rows: node and position."""
        items = (item.split() for item in self.region.facts["counted"].split(";") if item)
        return tuple((int(node), int(place)) for node, place in items)

    @property
    def followed(self) -> frozenset[tuple[int, int | str]]:
        """Constants that follow the tensors: what counts the rows, the index of the rows beside the classes, and the
        width of a one-hot target, which is multiplied with the scores."""
        fitted = [i for i in self.region.inner if operation(self.graph.nodes[i]) in ("one_hot", "arange")]
        return frozenset([*self.counted, *((i, place) for i in fitted for place in (0, 1, "num_classes", "end"))])

    def fractions(self) -> Mapping[tuple[int, int | str], Bound]:
        """The floating-point numbers that the region computes with."""
        return {
            (index, position): bound
            for (index, position), bound in self.alignment.constants.items()
            if index in self.region.inner and isinstance(_argument(self.graph.nodes[index], position), float)
        }

    def counts_rows(self, node: ast.expr, at: ast.stmt) -> bool:
        """Whether a number is the number of rows in every call: the elements of the target, or the first size where
        there is one axis of rows."""
        if ast.unparse(node) == f"{ast.unparse(self.bound['target'].expression)}.numel()":
            return self.region.facts["soft"] != "True"
        if self.region.facts["flat"] != "True" or not self.rank_is_shown:
            return False
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len" and len(node.args) == 1:
            return self._input(node.args[0], at) is not None
        size = self._extents.size(node, at)
        name = self._input(size.tensor, size.statement) if size is not None else None
        return size is not None and name is not None and size.axis == -self.ranks[name]

    def counts_classes(self, node: ast.expr, at: ast.stmt) -> bool:
        """Whether a number is the number of classes in every call: a size of the scores, or what one_hot is given."""
        given = self.alignment.constants
        for index in self.region.inner:
            width = given.get((index, 1)) or given.get((index, "num_classes"))
            one_hot = operation(self.graph.nodes[index]) == "one_hot"
            if one_hot and width is not None and ast.unparse(width.expression) == ast.unparse(node):
                return True
        size = self._extents.size(node, at)
        scores = size is not None and self._input(size.tensor, size.statement) == "x"
        return size is not None and scores and size.axis == self.axis - self.ranks["x"]

    @cached_property
    def _extents(self) -> Extents:
        return Extents(self.source, {ast.unparse(b.expression): self.ranks[name] for name, b in self.bound.items()})

    def _input(self, tensor: ast.expr, at: ast.stmt) -> str | None:
        """Which input of the region an expression is."""
        for name, bound in self.bound.items():
            kept = not isinstance(tensor, ast.Name) or self._extents.same(tensor.id, at, bound.statement)
            if kept and ast.unparse(bound.expression) == ast.unparse(tensor):
                return name
        return None

    def _never_negative(self, node: ast.expr, at: ast.stmt, depth: int = 6) -> bool:
        """Whether the source shows that a tensor of integers holds no negative number."""
        if isinstance(node, ast.Name):
            found = reaching(self.source, node.id, at) if depth else []
            given = [(d.value, d.statement) for d in found if d.item is None and d.value is not None]
            return len(given) == len(found) > 0 and all(
                s is not None and v is not None and self._never_negative(v, s, depth - 1) for v, s in given
            )
        if isinstance(node, ast.Subscript):
            return self._never_negative(node.value, at, depth)
        if isinstance(node, ast.BinOp):
            divisor = node.right.value if isinstance(node.right, ast.Constant) else None
            return isinstance(node.op, ast.Mod) and isinstance(divisor, int) and divisor > 0
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        method = self.source.qualified(node.func) is None
        given_to = [node.func.value, *node.args] if method else node.args
        if node.func.attr in ("clamp", "clamp_min", "clip"):
            bounds = [*given_to[1:2], *(k.value for k in node.keywords if k.arg == "min")]
            return len(bounds) == 1 and isinstance(bounds[0], ast.Constant) and bounds[0].value in (0, 1)
        if node.func.attr in KEEPING and given_to:
            return self._never_negative(given_to[0], at, depth)
        return node.func.attr in ("argmax", "argmin", "abs")


def _is_named(node: ast.expr) -> bool:
    """Whether an expression is a name or a view of one, which may be said twice."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Attribute)
            if node.func.attr not in VIEWS:
                return False
            node = node.func.value
        else:
            node = node.value
    return isinstance(node, (ast.Name, ast.Attribute))


def _argument(node: Node, position: int | str) -> Arg:
    if isinstance(position, str):
        return node.kwargs.get(position)
    return node.args[position] if position < len(node.args) else None
