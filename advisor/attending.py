"""Spell the call of scaled_dot_product_attention that is to stand where an aligned attention is written out."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from advisor import codemod
from advisor.alignment.align import Bound, Branch, Miss, outcome
from advisor.alignment.movable import check_said
from advisor.graphrule import Site
from advisor.model import Graph, Node, Replacement
from advisor.patterns import Attention, Mask, Region, default_scale
from advisor.patterns.shown_axes import rank_is_shown
from advisor.rule import Context, tensor_bytes
from advisor.source import Source
from advisor.usercode.handed import from_caller, least_axes, may_be_number, may_change, shows_dtype, written_in_place
from advisor.usercode.made import made, own_class
from advisor.usercode.triangles import attribute_changes, has_literal_diagonal, made_as_triangle


def sdpa_call(ctx: Context, graph: Graph, site: Site, region: Attention) -> Replacement:
    """The replacement of `region`, the first of a site's, as a call with scale, mask, dropout and order of axes.

    Raises `align.Miss` where a condition of the source can be neither said in the call nor put around it.
    """
    return _Call(ctx, graph, site, region).replacement()


def attention_floor_us(ctx: Context, graph: Graph, region: Attention) -> float:
    """Physical floor of an attention, forward and backward.

    Two products forward, four and one recomputed backward (Dao et al. 2022, 2.5 times the forward); a causal mask needs
    half of them. Query, key, value and result are moved once each way.
    """
    sizes = region.sizes
    query, value = graph.nodes[region.inputs["query"]], graph.nodes[region.inputs["value"]]
    forward = 2.0 * sizes.rows * sizes.queries * sizes.keys * (sizes.width + sizes.value_width)
    share = 0.5 if region.causal else 1.0
    traffic = 3 * (2 * tensor_bytes(query) + 2 * tensor_bytes(value))
    return ctx.floor_us(3.5 * share * forward, traffic, query.dtype)


class _Call:
    """Spells the call of scaled_dot_product_attention for one place in the source."""

    def __init__(self, ctx: Context, graph: Graph, site: Site, region: Attention) -> None:
        self.ctx, self.graph, self.site, self.region = ctx, graph, site, region
        self.constants: dict[str, tuple[str, Any]] = {}
        self.fixed = rank_is_shown(site.alignment, graph, region, region.root)  # tensors of one number of axes

    def replacement(self) -> Replacement:
        arguments = [self._operand(name) for name in ("query", "key", "value")]
        if self.region.causal and self._is_causal():
            under = self._under(0)
            arguments.append(f"is_causal=bool({under})" if under else "is_causal=True")
        elif self.region.masks:
            arguments.append(f"attn_mask={self._masks()}")
        scale = self._scale()
        if scale:
            arguments.append(f"scale={scale}")
        dropout = _dropout_text(self.ctx, self.site, self.region)
        under = self._conditions(self.region.dropout[0]) if dropout else ""
        if under:
            dropout = f"({dropout}) if {under} else 0.0"
        if dropout:
            arguments.append("dropout_p={dropout}")
            self.constants["dropout"] = (dropout, 0.0)
        template = f"F.scaled_dot_product_attention({', '.join(arguments)}){self._result()}"
        found = self.site.replacement(template, self.constants, says_branches=not self.site.alignment.unran)
        own = [self._own_constants(region) for region in self.site.regions]
        return replace(found, places=tuple(replace(p, constants=c) for p, c in zip(found.places, own, strict=True)))

    def _own_constants(self, region: Region) -> dict[str, Any]:
        """The values of the placeholders in one of the site's regions, where they are others than in the first."""
        assert isinstance(region, Attention)
        here: dict[str, Any] = {f"scale{k}": factor.value for k, factor in enumerate(region.factors)}
        if region.split is not None:
            here |= {f"heads{k}": size for k, size in enumerate(region.split[1])}
        return {n: v for n, v in here.items() if self.constants.get(n, ("", -1))[1] not in (-1, v)}

    # ----------------------------------------------------------------------------------------------------------- layout

    def _operand(self, name: str) -> str:
        """An input brought to batch, heads, positions, width."""
        text = f"{{{name}}}"
        if name in self.region.cut:
            text += f".unflatten({self.region.cut[name]}, ({self._heads()}))"
        text += _permuted(self.region.orders[name], self.fixed)
        return text + (f".unsqueeze({self.heads})" if self.region.batch == 1 else "")

    @property
    def heads(self) -> int:
        """Where an axis of one head is put in: counted from the last where the tensors may have more or fewer axes."""
        return 1 if self.fixed else -3

    def _heads(self) -> str:
        """The sizes of the two batch axes as the user's own view spells them."""
        assert self.region.split is not None
        node, sizes = self.region.split
        given = self._view_sizes(node)
        for pair in pairwise(given):
            if pair[0][0] in (sizes[0], -1) and pair[1][0] in (sizes[1], -1) and pair[0][0] != pair[1][0]:
                for k, (value, expression) in enumerate(pair):
                    self.constants[f"heads{k}"] = (self.site.alignment.source.segment(expression), value)
                return "{heads0}, {heads1}"
        raise Miss("the view that tells the heads apart does not write out how many there are")

    def _view_sizes(self, node: int) -> list[tuple[int, ast.expr]]:
        """The sizes a view is given, as numbers and as the source spells them."""
        found: list[tuple[int, ast.expr]] = []
        for place, value in enumerate(self.graph.nodes[node].args):
            bound = self.site.alignment.constants.get((node, place))
            if bound is None:
                continue
            if isinstance(value, int):
                found.append((value, bound.expression))
            elif isinstance(value, tuple) and isinstance(bound.expression, (ast.Tuple, ast.List)):
                sizes = bound.expression.elts
                pairs = zip(value, sizes, strict=True) if len(value) == len(sizes) else ()
                found += [(n, e) for n, e in pairs if isinstance(n, int)]
        return found

    def _result(self) -> str:
        text = f".squeeze({self.heads})" if self.region.batch == 1 else ""
        text += _permuted(self.region.orders["output"], self.fixed)
        place = self.region.cut.get("output")
        return text + (f".flatten({place}, {place + 1})" if place is not None else "")

    # ------------------------------------------------------------------------------------------------------------ masks

    def _masks(self) -> str:
        """The mask argument: masks under a condition only where it holds."""
        everything = list(range(len(self.region.masks)))
        under = {self._under(k) for k in everything} - {""}
        if not under:
            return self._mask(everything)
        if len(under) > 1:
            raise Miss("several masks depend on conditions of their own", self.site.span.line)
        always = [k for k in everything if not self._under(k)]
        mask, condition = self._mask(everything), under.pop()
        if mask in ("{mask0}", "~{mask0}"):
            text = codemod.spelled(mask, {"mask0": self._text("mask0")})
            if self.constants[condition[1:-1]][0] == f"{text} is not None":
                del self.constants[condition[1:-1]]
                return mask
        return f"{mask} if {condition} else {self._mask(always) if always else None}"

    def _text(self, name: str) -> str:
        return self.site.text(self.region.inputs[name])

    def _under(self, place: int) -> str:
        """The condition under which a mask is applied, as a placeholder; "" where it always is."""
        steps = (self.region.masks[place].step, self.region.inputs[f"mask{place}"])
        text = max((self._conditions(step) for step in steps), key=len)
        if not text:
            return ""
        name = next((n for n, (known, _) in self.constants.items() if n.startswith("if") and known == text), None)
        name = name or f"if{place}"
        self.constants[name] = (text, True)
        return f"{{{name}}}"

    def _mask(self, places: list[int]) -> str:
        masks = [(k, self.region.masks[k]) for k in places]
        keeps = [self._keep(k, m) for k, m in masks if m.kind != "bias"]
        biases = [self._bias(k, m) for k, m in masks if m.kind == "bias"]
        if not biases:
            return " & ".join(keeps)
        bias = " + ".join(biases).replace("+ -", "- ")
        if not keeps:
            return bias
        drops = [self._keep(k, m, opposite=True) for k, m in masks if m.kind != "bias"]
        bias = f"({bias})" if set(bias) & set("-+*/ ") else bias
        return f'{bias}.masked_fill({" | ".join(drops)}, float("-inf"))'

    def _keep(self, place: int, mask: Mask, opposite: bool = False) -> str:
        text = self._arranged(place, mask)
        if mask.kind == "nonzero":
            return f"({text} {'==' if opposite else '!='} 0)"
        return text if (mask.kind == "keep") is not opposite else f"~{text}"

    def _bias(self, place: int, mask: Mask) -> str:
        bound, source = self.site.alignment.values[mask.node], self.site.alignment.source
        if may_be_number(self.ctx.sources, source, bound.expression, bound.statement):
            text = source.segment(bound.expression)
            raise Miss(f"`{text}` may be a number, which is no mask", bound.expression.lineno)
        text = self._arranged(place, mask)
        text += f".to({self._dtype()})" if mask.cast or not self._has_dtype(mask) else ""
        for k, factor in enumerate(self.region.factors):
            if factor.node in mask.scaled_by:
                text += f" {'/' if factor.divides else '*'} {self._scaling(k)}"
        return text if mask.sign > 0 else f"-{text}"

    def _has_dtype(self, mask: Mask) -> bool:
        """Whether what is added to the scores is a mask of floating point for every caller: bool would keep pairs."""
        bound, source = self.site.alignment.values[mask.node], self.site.alignment.source
        place = (source, bound.expression, bound.statement)
        return shows_dtype(*place) or not from_caller(*place)

    def _dtype(self) -> str:
        """The dtype of the operands, read off one that is not computed for it."""
        for name in ("query", "key", "value"):
            bound = self.site.alignment.values[self.region.inputs[name]]
            if not any(isinstance(n, ast.Call) for n in ast.walk(bound.expression)):
                return f"{{{name}}}.dtype"
        raise Miss("the mask may have another dtype than the operands, none of which has a name")

    def _arranged(self, place: int, mask: Mask) -> str:
        """A mask brought to at least two axes, as the operands are laid out."""
        text = f"{{mask{place}}}"
        if mask.rank < 2:
            return f"torch.atleast_2d({text})"
        self._check_axes(mask)
        handed = self._is_handed(mask)
        if self.region.batch == 1 and (mask.rank == 3 or handed):
            return text + _permuted(mask.order) + f".unsqueeze({-3 if handed else self.heads})"
        return text + _permuted(mask.order)

    def _check_axes(self, mask: Mask) -> None:
        """What the call does with a mask must be right for a mask of any number of axes that a caller may give."""
        if not self._is_handed(mask):
            return
        bound, source = self.site.alignment.values[mask.node], self.site.alignment.source
        line = bound.expression.lineno
        if mask.order is not None and least_axes(source, bound.expression, bound.statement) < mask.rank:
            raise Miss("the axes of a mask that a caller gives would change places, and may be fewer", line)
        if self.region.split and mask.room == 3 and not _leads_with_one(bound.expression):
            raise Miss("a mask that a caller gives may tell apart heads that stand in one axis with the batch", line)

    def _is_handed(self, mask: Mask) -> bool:
        bound = self.site.alignment.values[mask.node]
        return from_caller(self.site.alignment.source, bound.expression, bound.statement)

    def _is_causal(self) -> bool:
        return shown_causal(self.ctx, self.graph, self.site, self.region.masks[0])

    # ------------------------------------------------------------------------------------------------------------ scale

    def _scale(self) -> str:
        """The scale argument, empty where it is the default at every size."""
        if not self.region.factors:
            return "1.0"
        if default_scale(self.region) and self._is_default():
            return ""
        above: list[str] = []
        below: list[str] = []
        for k, factor in enumerate(self.region.factors):
            (below if factor.divides else above).append(self._scaling(k))
        return " / ".join([" * ".join(above) or "1.0", *below])

    def _scaling(self, place: int) -> str:
        """The placeholder of one number that scales the scores."""
        factor, text = self.region.factors[place], self._number(place)
        under = self._conditions(factor.node)
        self.constants[f"scale{place}"] = (f"({text} if {under} else 1.0)" if under else text, factor.value)
        return f"{{scale{place}}}"

    def _conditions(self, node: int) -> str:
        """The condition under which a step runs, as source; "" where it always does or a guard holds it."""
        if self.site.alignment.unran:
            return ""
        found = self.site.alignment.conditions.get(node, ())
        branches = [branch for branch in found if not isinstance(branch.test, ast.Constant)]
        for branch in branches:
            check_said(self.site.alignment, branch)
        return " and ".join(_outcome(self.site.alignment.source, branch) for branch in branches)

    def _expression(self, place: int) -> ast.expr:
        name = f"factor{place}"
        if name in self.region.scalars:
            return self.site.alignment.values[self.region.scalars[name]].expression
        _, node, position = self.region.constants[name]
        return self.site.alignment.constants[(node, position)].expression

    def _number(self, place: int) -> str:
        return self.site.alignment.source.segment(self._expression(place))

    def _is_default(self) -> bool:
        """Whether the scale is written as the root of the width of an operand, so that it stays the default."""
        if len(self.region.factors) != 1 or self._conditions(self.region.factors[0].node):
            return False
        factor, expression = self.region.factors[0], self._expression(0)
        orders = {name: self.region.orders[name] for name in ("query", "key")}
        operands = {self._text(name) for name, order in orders.items() if order is None or order[-1] == len(order) - 1}
        return _is_root(expression, operands) if factor.divides else _is_inverse_root(expression, operands)


def _leads_with_one(expression: ast.expr) -> bool:
    """Whether a mask has an axis of one in front: `mask[None]`, `mask.unsqueeze(0)`."""
    if isinstance(expression, ast.Subscript):
        first = expression.slice.elts[0] if isinstance(expression.slice, ast.Tuple) else expression.slice
        return isinstance(first, ast.Constant) and first.value is None
    return ast.unparse(expression).endswith(".unsqueeze(0)")


def _is_width(node: ast.expr, operands: set[str]) -> bool:
    """Whether an expression is the last size of one of the operands: q.size(-1), q.shape[-1]."""
    text = ast.unparse(node)
    return any(text in (f"{name}.size(-1)", f"{name}.shape[-1]", f"{name}.size(dim=-1)") for name in operands)


def _is_root(node: ast.expr, operands: set[str]) -> bool:
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return ast.unparse(node.func) in ("math.sqrt", "np.sqrt", "numpy.sqrt") and _is_width(node.args[0], operands)
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Pow)
        and _power(node) == 0.5
        and (_is_width(node.left, operands))
    )


def _is_inverse_root(node: ast.expr, operands: set[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.left, ast.Constant):
        return bool(node.left.value == 1) and _is_root(node.right, operands)
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Pow)
        and _power(node) == -0.5
        and (_is_width(node.left, operands))
    )


def _power(node: ast.BinOp) -> float | None:
    """The exponent where it is written as a number."""
    try:
        value = ast.literal_eval(node.right)
    except ValueError:
        return None
    return float(value) if isinstance(value, (int, float)) else None


def _outcome(source: Source, branch: Branch) -> str:
    """The test of a branch as it came out in the run."""
    text = outcome(source, branch)
    return f"({text})" if isinstance(branch.test, (ast.BoolOp, ast.IfExp)) else text


def _permuted(order: tuple[int, ...] | None, fixed: bool = True) -> str:
    """A permutation as a method call: a transposition where it is one.

    Its axes are counted from the last where those in front of them may be more or fewer; raises `Miss` where that
    cannot be.
    """
    if order is None:
        return ""
    moved = [place for place, axis in enumerate(order) if place != axis]
    if len(moved) == 2:
        from_last = moved[0] >= len(order) - 2 or not fixed
        first, last = (m - len(order) if from_last else m for m in moved)
        return f".transpose({first}, {last})"
    if not fixed:
        raise Miss("its axes change places, and the source does not show how many there are")
    return f".permute({', '.join(str(axis) for axis in order)})"


def stays_triangle(source: Source, bound: Bound, others: Iterable[Source]) -> bool:
    """Whether the source shows the triangle a mask is, through local names of its function, and no file changes it."""
    function = source.function_at(bound.statement.lineno)
    for expression in _followed(source, bound):
        if not made_as_triangle(source, expression, others) or _may_vary(expression):
            return False
        named = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        if function is not None and any(written_in_place(function, name) for name in named):
            return False
    return True


def _followed(source: Source, bound: Bound) -> Iterator[ast.expr]:
    """An expression, and what the local names in it are given, one into the other."""
    function = source.function_at(bound.statement.lineno)
    assigned = [n for n in ast.walk(function or source.tree) if isinstance(n, ast.Assign)]
    seen: set[str] = set()
    pending: list[ast.expr] = [bound.expression]
    while pending:
        expression = pending.pop()
        yield expression
        for name in {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)} - seen:
            seen.add(name)
            pending += [n.value for n in assigned if any(isinstance(t, ast.Name) and t.id == name for t in n.targets)]


PURE = frozenset(
    "finfo tril triu view reshape unsqueeze bool to float byte type contiguous ones full size zeros".split()
)


def _may_vary(expression: ast.expr) -> bool:
    """Whether an expression chooses, or calls what may: its mask may be another one elsewhere."""
    for node in ast.walk(expression):
        if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.NamedExpr)):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name not in PURE and name not in ("masked_fill", "logical_not", "ones_like", "len", "int"):
                return True
    return False


def shown_causal(ctx: Context, graph: Graph, site: Site, mask: Mask) -> bool:
    """Whether the source shows that a mask of the first region is causal for every caller and at every length."""
    bound, source = site.alignment.values[mask.node], site.alignment.source
    if from_caller(source, bound.expression, bound.statement) or not stays_triangle(source, bound, ctx.sources):
        return False
    return always_causal(ctx, graph, mask)


def may_be_another(ctx: Context, site: Site, mask: Mask) -> bool:
    """Whether a mask of the first region comes from a caller or is written again after it was made."""
    bound, source = site.alignment.values[mask.node], site.alignment.source
    if from_caller(source, bound.expression, bound.statement) or may_change(source, bound.expression):
        return True
    return any(attribute_changes(source, e, ctx.sources) for e in _followed(source, bound))


def always_causal(ctx: Context, graph: Graph, mask: Mask) -> bool:
    """Whether a mask is causal at every length; the diagonal of a triangle made on the way must be written out."""
    return mask.causal and (mask.diagonal is None or diagonal_is_literal(ctx, graph.nodes[mask.diagonal]))


def diagonal_is_literal(ctx: Context, node: Node) -> bool:
    """Whether the source writes out the diagonal of a recorded `tril` or `triu`."""
    if node.span is None or node.span.end_column is None:
        return False
    found = [
        expression
        for expression in ctx.read(node.span.path).expressions_at(node.span.line, node.span.column)
        if isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Attribute)
        and expression.func.attr in ("tril", "triu")
    ]
    return len(found) == 1 and has_literal_diagonal(found[0])


def _dropout_text(ctx: Context, site: Site, region: Attention) -> str:
    """The probability to drop, gated by training as the user's own call is; empty where there is no dropout."""
    if not region.dropout:
        return ""
    node = region.dropout[0]
    source = site.alignment.source
    callee = site.alignment.calls[node]
    if (source.qualified(callee) or "").startswith("torch."):
        return _functional_dropout(site, node)
    name = source.segment(callee)
    if isinstance(callee, ast.Call):  # a module that was just made is in training
        return f"{name}.p"
    if not _same_object(site, callee):
        raise Miss(f"`{name}` is a name of the function that drops, not of the one that is rewritten", callee.lineno)
    if not _always_dropout(ctx, source, callee):  # an identity stands there where nothing is dropped
        return f'getattr({name}, "p", 0.0) if {name}.training else 0.0'
    return f"{name}.p if {name}.training else 0.0"


def _same_object(site: Site, callee: ast.expr) -> bool:
    """Whether a module that a helper calls has the same name where the result is computed: both read it from `self`."""
    source, root = site.alignment.source, site.alignment.root.statement
    here, there = source.function_at(root.lineno), source.function_at(callee.lineno)
    if here is there:
        return True
    base = callee
    while isinstance(base, (ast.Attribute, ast.Subscript)):
        base = base.value
    if here is None or there is None or own_class(source, base) is None:
        return False
    called = [n.func for n in ast.walk(here) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    receivers = [f.value for f in called if f.attr == there.name]
    alike = all(ast.unparse(r) == ast.unparse(base) and own_class(source, r) is not None for r in receivers)
    return bool(receivers) and alike


def _always_dropout(ctx: Context, source: Source, callee: ast.expr) -> bool:
    """Whether every module that the files put there is a Dropout."""
    try:
        return {one.kind for one in made(ctx.sources, source, callee)} == {"Dropout"}
    except Miss:
        return False


def _functional_dropout(site: Site, node: int) -> str:
    """F.dropout(x, p, training): its own expressions, with torch's defaults p=0.5 and training=True."""
    source = site.alignment.source

    def text(position: int, keyword: str) -> str | None:
        bound = site.alignment.constants.get((node, keyword)) or site.alignment.constants.get((node, position))
        return source.segment(bound.expression) if bound is not None else None

    probability = text(1, "p") or "0.5"
    training = text(2, "training") or text(2, "train")  # the second is torch.dropout's word
    if training in (None, "True"):
        return probability
    if training == "False":
        return ""
    return f"{codemod.grouped(probability)} if {codemod.grouped(training)} else 0.0"
