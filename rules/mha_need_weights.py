"""nn.MultiheadAttention returns its averaged weights and the call drops them, so the fused kernel is not used.

## What it does
Adds `need_weights=False` to a call of `torch.nn.MultiheadAttention` that throws the second result away: `out, _ =
attn(...)` where `_` is read nowhere, or `attn(...)[0]`. Every call is judged on its own.

## Why it costs
`need_weights` defaults to True. The module then computes the scores, softmax and product as separate kernels, stores
the scores of every head for the backward pass, and averages them over the heads; with `need_weights=False` it calls
`scaled_dot_product_attention` (torch.nn.functional.multi_head_attention_forward). In lyuwenyu/RT-DETR#678 nine kernels
per call became three.

## When not to
When the weights are returned, stored, regularised or may be read by a forward hook. When the user's files may put
another class than nn.MultiheadAttention in its place. When `is_causal` is given and the source does not show that the
mask is one causal triangle at every length and for every caller: torch ignores the hint while it computes weights and
the mask once it does not. A row whose every key is masked gives NaN with weights and may give zeros without.

## Fix safety
NUMERICS: the same sum in another order. With dropout the draws come from another place of the random stream.

## References
- torch.nn.MultiheadAttention, PyTorch documentation, `need_weights`
- lyuwenyu/RT-DETR#678 and #680
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from advisor import codemod
from advisor.graphrule import UNLINKED, GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Node, Ref, Rewrite, Safety
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import call_at, keyword, names, package_file, read_after, scope_of, spreads
from advisor.patterns.regions import calls
from advisor.patterns.sdpa import FUSED, MATH
from advisor.rule import Context, Example, floor_evidence, step, tensor_bytes
from advisor.source import Source
from advisor.usercode.made import made
from advisor.usercode.swallowed import hooked, other_module
from advisor.usercode.triangles import shows_triangle

MODULE = "torch.nn.modules.activation.MultiheadAttention"
# Parameters of multi_head_attention_forward by position, as nn.MultiheadAttention passes them.
BIAS_K, BIAS_V, ADD_ZERO = 7, 8, 9
BEFORE_MORE_KEYS = 4  # arguments of nn.MultiheadAttention before add_bias_kv
MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 6, 16, requires_grad=True)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class MhaNeedWeights(GraphRule):
    """attn(q, k, v)[0] -> attn(q, k, v, need_weights=False)[0]."""

    id = "mha-need-weights"
    safety = Safety.NUMERICS
    worth = 0.02
    runs = FUSED
    avoids = (MATH,)
    examples = (
        Example(
            before=_model("a, _ = self.attn(x, x, x)", "return x + a"),
            after=_model("a, _ = self.attn(x, x, x, need_weights=False)", "return x + a"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("return x + self.attn(", "    x, x, x,", "    need_weights=True,  # default", ")[0]"),
            after=_model("return x + self.attn(", "    x, x, x,", "    need_weights=False,  # default", ")[0]"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("a, w = self.attn(x, x, x)", "return a + w.sum()"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the attention weights are used after this call",
        ),
        Example(
            before=_model("a, _ = self.attn(x, x, x)", "return x + a"),
            after=None,
            profile=step(10_000, nodes=0.001),
            because="it takes 0.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """Every attention module that was asked for its weights; the region is its one operation."""
        for node in calls(graph, "multi_head_attention_forward"):
            if node.kwargs.get("need_weights", True) is not True:
                continue
            reason = _unsuitable(graph, node)
            if reason is not None:
                yield NearMiss(graph=graph.index, node=node.index, reason=reason)
                continue
            inputs = {
                name: arg.index
                for name, arg in zip(("query", "key", "value"), node.args[:3], strict=True)
                if isinstance(arg, Ref)
            }
            yield Region(graph=graph.index, root=node.index, inputs=inputs, inner=frozenset({node.index}))

    def _place(self, ctx: Context, graphs: Mapping[int, Graph], regions: list[Region]) -> Finding | Decline:
        """The finding for one call in the source, whatever modules it has called."""
        nodes = [(graphs[r.graph], graphs[r.graph].nodes[r.root]) for r in regions]
        first = nodes[0][1]
        assert first.span is not None
        cost = [c for graph, node in nodes if (c := ctx.cost_us(graph.index, (node.index,))) is not None]
        if not cost:
            return self.decline(first.span, UNLINKED, needs=("links",))
        share = sum(cost) / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(first.span, f"it takes {share:.1%} of the step")
        source = ctx.read(first.span.path)
        call = call_at(source, first, lambda c: _is_module_call(source, c, first))
        if call is None:
            return self.decline(first.span, "the call of the module was not found in this line")
        reason = _kept(source, call) or _other_modules(graphs, regions, first)
        reason = reason or _in_another_instance(ctx, source, call) or _hint_elsewhere(ctx, source, call, nodes)
        reason = reason or ctx.needs_unfused_attention
        if reason is not None:
            return self.decline(source.span(call), reason)
        floor = sum(_floor_us(ctx, graph, node) for graph, node in nodes)
        return self.finding(
            source.span(call),
            "nn.MultiheadAttention computes weights that this call drops, without the fused kernel",
            cited_us=sum(cost),
            high_us=sum(cost) - floor,
            evidence=(
                Evidence(what="time of the attention module per step", value=round(sum(cost), 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                *floor_evidence("physical floor of the same module", floor),
                Evidence(what="calls of this code per step", value=len(nodes), unit="calls"),
            ),
            bindings={"given": source.span(given)} if (given := keyword(call, "need_weights")) is not None else {},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "given" in finding.bindings:
            return self.edit(finding, "need_weights=False", [codemod.replace(finding.bindings["given"], "False")])
        try:
            edit = codemod.set_keywords(source, finding.span, {"need_weights": "False"})
        except codemod.CannotEdit as error:
            return self.decline(finding.span, str(error))
        return self.edit(finding, "need_weights=False", [edit])


# ---------------------------------------------------------------------------------------------------------- the module


def _unsuitable(graph: Graph, node: Node) -> str | None:
    """Why the weights of this operation cannot be left out, as far as the graph tells."""
    if package_file(node) is not None:
        return f"the call stands in an installed package ({package_file(node)})"
    if node.module_class != MODULE:
        return "the attention is not called through nn.MultiheadAttention itself: its own code asks for the weights"
    if any(_is_weights(graph.nodes[user]) for user in node.users):
        return "the attention weights are used after this call"
    if not all(_is_output(graph.nodes[user]) for user in node.users):
        return "the result is passed on together with the weights"
    if node.kwargs.get("is_causal"):
        return _unsafe_hint(graph, node)
    return None


def _is_weights(user: Node) -> bool:
    return user.target == "operator.getitem" and user.args[1] != 0


def _is_output(user: Node) -> bool:
    return user.target == "operator.getitem" and user.args[1] == 0


def _unsafe_hint(graph: Graph, node: Node) -> str | None:
    """Why `is_causal=True` would mean another mask: without weights torch drops the mask and believes the hint.

    torch.nn.functional.multi_head_attention_forward: the mask stays when there is a key padding mask, which another
    call may not pass; a causal flag would hide the appended bias key, which the mask shows.
    """
    mask = node.kwargs.get("attn_mask")
    seen = graph.nodes[mask.index].facts.get("keep") if isinstance(mask, Ref) else None
    if seen != "causal":
        return "is_causal=True is given and the mask was not causal in the run: torch would drop the mask"
    if len(node.args) > ADD_ZERO and (node.args[BIAS_K] is not None or node.args[BIAS_V] is not None):
        return "is_causal=True is given with a bias key, which the causal kernel would hide"
    if len(node.args) > ADD_ZERO and node.args[ADD_ZERO]:
        return "is_causal=True is given with add_zero_attn, whose key the causal kernel would hide"
    return None


def _other_modules(graphs: Mapping[int, Graph], regions: list[Region], first: Node) -> str | None:
    """Something else that the same call has run: a module of another class in another turn of a loop."""
    known = {(r.graph, r.root) for r in regions}
    modules = {graphs[r.graph].nodes[r.root].module for r in regions}
    span = first.span
    assert span is not None
    for graph in graphs.values():
        for node in graph.nodes:
            place = node.span
            here = place is not None and (place.path, place.line, place.column) == (span.path, span.line, span.column)
            if not here or not node.op.startswith("call_") or (graph.index, node.index) in known:
                continue
            if node.target == graphs[regions[0].graph].nodes[regions[0].root].target:
                return "the same call also runs where its weights are needed"
            if place is not None and place.end_column is None:
                continue  # without columns every operation of the line is here
            if node.module is not None and node.module not in modules:
                return f"the same call also runs `{node.module}`, for which it may need the weights"
    return None


def _floor_us(ctx: Context, graph: Graph, node: Node) -> float:
    """Floor of the module forward and backward, in microseconds.

    Four projections to width E of every row: 2 E FLOPs per row and input column, three times with the backward pass.
    Attention: 4 q K E for q query rows over K keys, 3.5 times with the recomputing backward pass (Dao et al. 2022).
    The least traffic is the three inputs read and the output written, forward, and the same of their gradients.
    """
    query, key, value = (graph.nodes[arg.index] for arg in node.args[:3] if isinstance(arg, Ref))
    if query.shape is None or key.shape is None or value.shape is None:
        return 0.0
    width, rows = query.shape[-1], _rows(query.shape)
    columns = 2 * rows * width + _rows(key.shape) * key.shape[-1] + _rows(value.shape) * value.shape[-1]
    flops = 3 * 2.0 * width * columns + 3.5 * 4.0 * rows * key.shape[0] * width
    traffic = 2 * (2 * tensor_bytes(query) + tensor_bytes(key) + tensor_bytes(value))
    return ctx.floor_us(flops, traffic, query.dtype)


def _rows(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[:-1]:
        count *= size
    return count


# ------------------------------------------------------------------------------------------------------------ the call


def _is_module_call(source: Source, call: ast.Call, node: Node) -> bool:
    """Whether a call can be the module's: query, key and value are there, and the callee is no known function."""
    given = {k.arg for k in call.keywords}
    if len(call.args) + len(given & {"query", "key", "value"}) < 3 or source.qualified(call.func) is not None:
        return False
    if isinstance(call.func, ast.Attribute):
        return (node.module or "").rsplit(".", 1)[-1] == call.func.attr
    if isinstance(call.func, ast.Name):
        scope = scope_of(source, call)
        return any(names(scope, call.func.id, ast.Store)) and not _is_function(source, call.func.id)
    return isinstance(call.func, ast.Subscript)


def _is_function(source: Source, name: str) -> bool:
    return any(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name for n in ast.walk(source.tree))


def _kept(source: Source, call: ast.Call) -> str | None:
    """Why the weights of this call may be read, or None where it drops them."""
    if spreads(call):
        return "arguments passed with * or ** may ask for the weights"
    if len(call.args) > 4:
        return "need_weights is given by position"
    wanted = keyword(call, "need_weights")
    if wanted is not None and not (isinstance(wanted, ast.Constant) and wanted.value is True):
        return "need_weights is computed: another run may want the weights"
    parent = source.parents.get(call)
    if isinstance(parent, ast.Subscript) and parent.value is call:
        first = isinstance(parent.slice, ast.Constant) and parent.slice.value == 0
        return None if first else "the attention weights are used after this call"
    if isinstance(parent, ast.Assign) and parent.value is call and len(parent.targets) == 1:
        return _kept_by(source, parent, parent.targets[0])
    return "the result is passed on together with the weights"


def _in_another_instance(ctx: Context, source: Source, call: ast.Call) -> str | None:
    """Why the call may reach another class in another instance, or a hook on the module may read the weights."""
    reason = other_module(ctx.sources, source, call.func, "MultiheadAttention")
    if reason is not None:
        return reason
    hook = hooked(ctx.sources, call.func, "MultiheadAttention", "forward_hook")
    return None if hook is None else f"{hook} may read the weights"


def _hint_elsewhere(ctx: Context, source: Source, call: ast.Call, nodes: list[tuple[Graph, Node]]) -> str | None:
    """Why `is_causal` may mean another mask in another call than those of the run, or None where it cannot."""
    hint, mask = keyword(call, "is_causal"), keyword(call, "attn_mask")
    if hint is None or (isinstance(hint, ast.Constant) and hint.value is False) or mask is None:
        return None  # torch refuses the hint without a mask
    if not all(node.kwargs.get("is_causal") for _, node in nodes):
        return "is_causal is computed: where it is true torch would drop the mask"
    if not shows_triangle(source, mask):
        return "is_causal is given and the source does not show one causal mask for all: torch would drop the mask"
    for one in made(ctx.sources, source, call.func):
        more = [k for k in one.call.keywords if k.arg in (None, "add_bias_kv", "add_zero_attn")]
        named = [k for k in more if not (isinstance(k.value, ast.Constant) and k.value.value is False)]
        if named or len(one.call.args) > BEFORE_MORE_KEYS or any(isinstance(a, ast.Starred) for a in one.call.args):
            return "is_causal is given and another instance may have a bias key, which the causal kernel would hide"
    return None


def _kept_by(source: Source, statement: ast.Assign, target: ast.expr) -> str | None:
    if isinstance(target, ast.Name):
        return _kept_in(source, statement, target.id)
    pair = isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == 2
    second = target.elts[1] if pair and isinstance(target, (ast.Tuple, ast.List)) else None
    if not isinstance(second, ast.Name):
        return "the weights are stored"
    line = read_after(source, statement, second.id)
    return None if line is None else f"the weights are named `{second.id}` and may be read in line {line}"


def _kept_in(source: Source, statement: ast.Assign, name: str) -> str | None:
    """A name for the pair drops the weights where every read of it takes the first element."""
    scope = scope_of(source, statement)
    reads = list(names(scope, name, ast.Load))
    firsts = [
        isinstance(up := source.parents.get(read), ast.Subscript)
        and up.value is read
        and isinstance(up.slice, ast.Constant)
        and up.slice.value == 0
        for read in reads
    ]
    alone = len(list(names(scope, name, ast.Store))) == 1 and not isinstance(scope, ast.Module)
    if alone and reads and all(firsts):
        return None
    return f"the result is kept as `{name}` together with the weights"
