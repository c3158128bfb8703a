"""Spell the call of scaled_dot_product_attention that is to stand where an aligned attention is written out."""

from __future__ import annotations

import ast
from typing import Any

from advisor import codemod
from advisor.align import Bound, Branch, Miss, outcome
from advisor.model import Graph, Node, Replacement
from advisor.patterns import Attention, Mask, default_scale
from advisor.rule import Context, Site, tensor_bytes
from advisor.source import Source
from advisor.triangles import has_literal_diagonal, made_as_triangle


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
        dropout = _dropout_text(self.site, self.region)
        under = self._conditions(self.region.dropout[0]) if dropout else ""
        if under:
            dropout = f"({dropout}) if {under} else 0.0"
        if dropout:
            arguments.append("dropout_p={dropout}")
            self.constants["dropout"] = (dropout, 0.0)
        template = f"F.scaled_dot_product_attention({', '.join(arguments)}){self._result()}"
        return self.site.replacement(template, self.constants, says_branches=not self.site.alignment.unran)

    # ----------------------------------------------------------------------------------------------------------- layout

    def _operand(self, name: str) -> str:
        """An input brought to batch, heads, positions, width."""
        text = f"{{{name}}}"
        if name in self.region.cut:
            text += f".unflatten({self.region.cut[name]}, ({self._heads()}))"
        text += _permuted(self.region.orders[name])
        return text + (".unsqueeze(1)" if self.region.batch == 1 else "")

    def _heads(self) -> str:
        """The sizes of the two batch axes as the user's own view spells them."""
        assert self.region.split is not None
        node, sizes = self.region.split
        constants = self.site.alignment.constants
        for place in range(1, len(self.graph.nodes[node].args) - 1):
            found = [constants.get((node, place + k)) for k in (0, 1)]
            if self.graph.nodes[node].args[place : place + 2] == sizes and None not in found:
                source = self.site.alignment.source
                for k, bound in enumerate(found):
                    assert bound is not None
                    self.constants[f"heads{k}"] = (source.segment(bound.expression), sizes[k])
                return "{heads0}, {heads1}"
        return f"{sizes[0]}, {sizes[1]}" if len(self.site.regions) == 1 else f"-1, {sizes[1]}"

    def _result(self) -> str:
        text = ".squeeze(1)" if self.region.batch == 1 else ""
        text += _permuted(self.region.orders["output"])
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
        return f"{self._mask(everything)} if {under.pop()} else {self._mask(always) if always else None}"

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
        text = f"{{mask{place}}}" + self._arranged(mask)
        if mask.kind == "nonzero":
            return f"({text} {'==' if opposite else '!='} 0)"
        return text if (mask.kind == "keep") is not opposite else f"~{text}"

    def _bias(self, place: int, mask: Mask) -> str:
        text = f"{{mask{place}}}" + self._arranged(mask)
        text += ".to({query}.dtype)" if mask.cast else ""
        for k, factor in enumerate(self.region.factors):
            if factor.node in mask.scaled_by:
                text += f" {'/' if factor.divides else '*'} {self._scaling(k)}"
        return text if mask.sign > 0 else f"-{text}"

    def _arranged(self, mask: Mask) -> str:
        batched = self.region.batch == 1 and mask.rank == 3
        return _permuted(mask.order) + (".unsqueeze(1)" if batched else "")

    def _is_causal(self) -> bool:
        """Whether the mask is causal for every caller and at every length."""
        bound = self.site.alignment.values[self.region.inputs["mask0"]]
        source = self.site.alignment.source
        if source.reads_parameter(bound.expression, bound.statement) or not stays_triangle(source, bound):
            return False
        return always_causal(self.ctx, self.graph, self.region.masks[0])

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
        branches = self.site.alignment.conditions.get(node, ())
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
        operands = {self.site.text(self.region.inputs[name]) for name in ("query", "key")}
        return _is_root(expression, operands) if factor.divides else _is_inverse_root(expression, operands)


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


def _permuted(order: tuple[int, ...] | None) -> str:
    """A permutation as a method call: a transposition where it is one."""
    if order is None:
        return ""
    moved = [place for place, axis in enumerate(order) if place != axis]
    if len(moved) == 2:
        first, last = (m - len(order) if m >= len(order) - 2 and moved[0] >= len(order) - 2 else m for m in moved)
        return f".transpose({first}, {last})"
    return f".permute({', '.join(str(axis) for axis in order)})"


def stays_triangle(source: Source, bound: Bound) -> bool:
    """Whether the source shows the triangle a mask is, through local names of its function."""
    function = source.function_at(bound.statement.lineno)
    seen: set[str] = set()
    pending: list[ast.expr] = [bound.expression]
    while pending:
        expression = pending.pop()
        if not made_as_triangle(source, expression) or _may_vary(expression):
            return False
        for name in {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)} - seen:
            seen.add(name)
            assigned = [n for n in ast.walk(function or source.tree) if isinstance(n, ast.Assign)]
            pending += [n.value for n in assigned if any(isinstance(t, ast.Name) and t.id == name for t in n.targets)]
    return True


PURE = frozenset("tril triu view reshape unsqueeze bool to float byte type contiguous ones full size zeros".split())


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


def always_causal(ctx: Context, graph: Graph, mask: Mask) -> bool:
    """Whether a mask is causal at every length; the diagonal of a triangle made on the way must be written out."""
    return mask.causal and (mask.diagonal is None or _literal_diagonal(ctx, graph.nodes[mask.diagonal]))


def _literal_diagonal(ctx: Context, node: Node) -> bool:
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


def _dropout_text(site: Site, region: Attention) -> str:
    """The probability to drop, gated by training as the user's own call is; empty where there is no dropout."""
    if not region.dropout:
        return ""
    node = region.dropout[0]
    source = site.alignment.source
    callee = site.alignment.calls[node]
    name = source.segment(callee)
    if (source.qualified(callee) or "").startswith("torch."):
        return _functional_dropout(site, node)
    if not _always_dropout(source, callee):  # an identity stands there where nothing is dropped
        return f'getattr({name}, "p", 0.0) if {name}.training else 0.0'
    return f"{name}.p if {name}.training else 0.0"


def _always_dropout(source: Source, callee: ast.expr) -> bool:
    """Whether every value the file gives the attribute is a Dropout."""
    if not isinstance(callee, ast.Attribute):
        return False
    given = [
        n.value
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == callee.attr for t in n.targets)
    ]
    return all(isinstance(v, ast.Call) and ast.unparse(v.func).endswith("Dropout") for v in given)


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
    return f"{codemod.grouped(probability)} if {codemod.grouped(training)} else 0.0"
