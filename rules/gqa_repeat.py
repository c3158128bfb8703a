"""Keys and values are repeated for grouped-query attention, though the kernel can share one head between queries.

## What it does
Passes the keys and values as they were before the repeat and adds `enable_gqa=True` to scaled_dot_product_attention.
`repeat_interleave`, `expand` with `reshape`, and a helper function that does either are recognised in the captured
graph by their shapes.

## Why it costs
The repeat writes the keys and values of every query head, reads them again in the kernel, keeps them for the backward
pass, and sums their gradients over the repeats there. With `enable_gqa=True` the kernel reads each head once.

## When not to
Where no fused kernel takes the call: torch then repeats the heads itself on the math path (transformers#46960). On CUDA
this rule therefore asks for half precision, no mask and a head dimension of at most 256, as transformers does
(integrations/sdpa_attention.py, use_gqa_in_sdpa); on a CPU the fused kernel takes grouped heads
(PyTorch, aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, use_flash_attention_cpp). Where the device is older than
sm_80 or the files leave the flash kernel out of those that attention may take. Where the helper that repeats does
something else in another call. Tiling (`repeat(1, n, 1, 1)`) orders the heads in another way and is another function.

## Fix safety
NUMERICS: the same sum; the gradients of a shared head are added in another order.

## References
- torch.nn.functional.scaled_dot_product_attention, PyTorch documentation, `enable_gqa`
- Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints, 2023
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor import codemod
from advisor.graphrule import UNLINKED, GraphRule
from advisor.model import Decline, Evidence, Finding, Graph, Place, Replacement, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import call_at, keyword, package_file, spreads
from advisor.patterns.repeats import Operand, Unread, operand_of
from advisor.patterns.sdpa import HALF, MATH, POSITIONAL, Repeat, Sdpa, call_of, math_cause, repeated_heads, sdpa_calls
from advisor.rule import Context, Example, step, tensor_bytes
from advisor.source import Source

FLASH_ARCH = 80  # compute capability from which the flash kernel runs
FUNCTION = "torch.nn.functional.scaled_dot_product_attention"
MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


def repeat_kv(x, n_rep):
    b, h, t, d = x.shape
    if n_rep == 1:
        return x
    return x[:, :, None, :, :].expand(b, h, n_rep, t, d).reshape(b, h * n_rep, t, d)


class Model(nn.Module):
    def forward(self, q, k, v):
{body}

def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2)]
"""


def _model(*lines: str) -> str:
    return MODEL.replace("{body}", "".join(f"        {line}\n" for line in lines))


class GqaRepeat(GraphRule):
    """sdpa(q, repeat(k), repeat(v)) -> sdpa(q, k, v, enable_gqa=True)."""

    id = "gqa-repeat"
    safety = Safety.NUMERICS
    worth = 0.01
    runs = (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    )
    avoids = (MATH,)
    examples = (
        Example(
            before=_model(
                "k = k.repeat_interleave(2, dim=1)",
                "v = v.repeat_interleave(2, dim=1)  # as many as q",
                "return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            ),
            after=_model("return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)"),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model(
                "return F.scaled_dot_product_attention(",
                "    q,",
                "    repeat_kv(k, 2),",
                "    repeat_kv(v, 2),",
                ")",
            ),
            after=_model(
                "return F.scaled_dot_product_attention(", "    q,", "    k,", "    v,", "    enable_gqa=True,", ")"
            ),
            profile=step(10_000, nodes=0.4),
            saves=(0, 4_000),
        ),
        Example(
            before=_model("return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))"),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the heads are tiled (0 1 0 1), where enable_gqa repeats each in turn (0 0 1 1): another function",
        ),
        Example(
            before=_model(
                "k, w = repeat_kv(k, 2), repeat_kv(v, 2)", "return F.scaled_dot_product_attention(q, k, w) + w"
            ),
            after=None,
            profile=step(10_000, nodes=0.4),
            because="the repeated heads are used elsewhere as well",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """Calls with repeated keys and values; the region ends in the call and begins before the repeats."""
        for call in sdpa_calls(graph):
            key, value = repeated_heads(graph, call.key), repeated_heads(graph, call.value)
            if call.enable_gqa or (key is None and value is None):
                continue
            reason = _unsuitable(graph, call, key, value)
            if reason is not None:
                yield NearMiss(graph=graph.index, node=call.node.index, reason=reason)
            elif isinstance(key, Repeat) and isinstance(value, Repeat):
                yield Region(
                    graph=graph.index,
                    root=call.node.index,
                    inputs={"query": call.query, "key": key.source, "value": value.source}
                    | ({} if call.mask is None else {"mask": call.mask}),
                    inner=key.inner | value.inner | {call.node.index},
                )

    def _place(self, ctx: Context, graphs: Mapping[int, Graph], regions: list[Region]) -> Finding | Decline:
        """The finding for one call in the source; its cost is that of the repeats alone."""
        graph = graphs[regions[0].graph]
        call = call_of(graph, regions[0])
        span = call.node.span
        assert span is not None
        cost = [c for r in regions if (c := ctx.cost_us(r.graph, r.inner - {r.root})) is not None]
        if not cost:
            return self.decline(span, UNLINKED, needs=("links",))
        share = sum(cost) / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(span, f"it takes {share:.1%} of the step")
        if _others(graphs, regions, span):
            return self.decline(span, "the same code also attends without repeated heads")
        arch = ctx.profile.hardware.arch or ""
        if (
            graph.nodes[call.query].device == "cuda"
            and arch[:3] == "sm_"
            and arch[3:].isdigit()
            and int(arch[3:]) < FLASH_ARCH
        ):
            return self.decline(
                span, f"the kernel that takes grouped heads needs sm_{FLASH_ARCH}, this device is {arch}"
            )
        chosen = _kernels_chosen(ctx.sources)
        if chosen is not None:
            return self.decline(
                span, f"{chosen} chooses the kernels of attention: of those none may take grouped heads"
            )
        source = ctx.read(span.path)
        try:
            spot = _Spot.of(ctx, source, graph, call)
        except Unread as unread:
            return self.decline(span, f"the source cannot be rewritten safely: {unread}")
        repeats = sum(_copied_bytes(graphs[r.graph], r) for r in regions)
        return self.finding(
            source.span(spot.call),
            "keys and values are repeated in memory for grouped-query attention",
            cited_us=sum(cost),
            high_us=sum(cost),
            evidence=(
                Evidence(what="time of the repeats per step", value=round(sum(cost), 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="repeated keys and values", value=repeats, unit="bytes"),
                Evidence(what="calls of this code per step", value=len(regions), unit="calls"),
            ),
            bindings={
                "key": source.span(spot.key.repeated),
                "value": source.span(spot.value.repeated),
                "call": source.span(spot.call),
            },
            values={"key": _in_place_of(source, spot.key), "value": _in_place_of(source, spot.value)},
            consumed=tuple(source.span(s) for s in (spot.key.idle, spot.value.idle) if s is not None),
            replacement=_replacement(source, graphs, regions, spot),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        gone = {(s.line, s.end_line) for s in finding.consumed}
        edits = list(codemod.remove_statements(source, finding.consumed))
        for name in ("key", "value"):
            place = finding.bindings[name]
            if not any(first <= place.line and (place.end_line or 0) <= (last or 0) for first, last in gone):
                edits.append(codemod.replace(place, finding.values[name]))
        edits.append(_appended(source, finding.bindings["call"], "enable_gqa=True"))
        return self.edit(finding, "enable_gqa=True", edits)


# --------------------------------------------------------------------------------------------------------------- graph


def _unsuitable(graph: Graph, call: Sdpa, key: Repeat | str | None, value: Repeat | str | None) -> str | None:
    """Why the heads of this call cannot be shared, or None."""
    for found in (key, value):
        if isinstance(found, str):
            return found
    if not isinstance(key, Repeat) or not isinstance(value, Repeat) or key.count != value.count:
        return "keys and values are not repeated alike"
    if package_file(call.node) is not None:
        return f"the call stands in an installed package ({package_file(call.node)})"
    own = {call.node.index}
    for found in (key, value):
        if any(user not in found.inner | own for index in found.inner for user in graph.nodes[index].users):
            return "the repeated heads are used elsewhere as well"
    cause = math_cause(graph, call)
    if cause is not None:
        return f"the call takes the math path already: {cause[1]}"
    query, values = graph.nodes[call.query], graph.nodes[call.value]
    if query.device == "cpu":
        return None
    if query.device != "cuda":
        return f"whether the kernel for {query.device} takes grouped heads is not known"
    if query.dtype not in HALF:
        return f"the kernel that takes grouped heads on CUDA needs half precision, not {query.dtype}"
    if call.mask is not None:
        return "the kernel that takes grouped heads on CUDA takes no mask"
    width = (query.shape or (0,))[-1]
    if width > 256 or width != (values.shape or (0,))[-1]:
        return "the kernel that takes grouped heads on CUDA needs one head dimension of at most 256"
    return None


def _others(graphs: Mapping[int, Graph], regions: list[Region], span: Span) -> bool:
    """Whether the same code attends with as many key heads as query heads that no repeat made, or fewer.

    With one head for each query `enable_gqa` changes nothing, so that alone is no reason.
    """
    mine = {(r.graph, r.root) for r in regions}
    for graph in graphs.values():
        for call in sdpa_calls(graph):
            place = call.node.span
            if (graph.index, call.node.index) in mine or place is None:
                continue
            if (place.path, place.line, place.column) == (span.path, span.line, span.column):
                return True
    return False


def _kernels_chosen(sources: Sequence[Source]) -> str | None:
    """The line that may leave out the flash kernel, the only one on CUDA that takes grouped heads."""
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            given = ", ".join(ast.unparse(part) for part in (*node.args, *node.keywords))
            wants = {"sdpa_kernel": "FLASH_ATTENTION", "sdp_kernel": "enable_flash=True", "enable_flash_sdp": "True"}
            if name in wants and wants[name] not in given:
                return f"{source.path}:{node.lineno}"
    return None


def _copied_bytes(graph: Graph, region: Region) -> int:
    call = call_of(graph, region)
    return tensor_bytes(graph.nodes[call.key]) + tensor_bytes(graph.nodes[call.value])


# -------------------------------------------------------------------------------------------------------------- source


@dataclass(frozen=True)
class _Spot:
    call: ast.Call
    key: Operand
    value: Operand
    given: Mapping[str, ast.expr]

    @staticmethod
    def of(ctx: Context, source: Source, graph: Graph, found: Sdpa) -> _Spot:
        """The call and its repeated operands; raises `Unread`."""
        call = call_at(source, found.node, lambda c: source.qualified(c.func) == FUNCTION)
        if call is None or spreads(call):
            raise Unread("the call of scaled_dot_product_attention was not found in this line")
        given = dict(zip(POSITIONAL, call.args, strict=False))
        given |= {name: value for name in (*POSITIONAL, "scale", "enable_gqa") if (value := keyword(call, name))}
        if "enable_gqa" in given:
            raise Unread("enable_gqa is given already")
        operands = []
        for name, index in (("key", found.key), ("value", found.value)):
            repeat = repeated_heads(graph, index)
            assert isinstance(repeat, Repeat)
            operands.append(operand_of(ctx.read, source, graph, repeat, given[name], source.statement_of(call)))
        return _Spot(call, operands[0], operands[1], given)


# ---------------------------------------------------------------------------------------------------------- the rewrite


def _replacement(source: Source, graphs: Mapping[int, Graph], regions: list[Region], spot: _Spot) -> Replacement:
    """The call with grouped heads over the tensors before the repeats, for the proof."""
    graph = graphs[regions[0].graph]
    call = call_of(graph, regions[0])
    texts = {"query": source.segment(spot.given["query"])}
    parts = ["{query}"]
    for name, index, operand in (("key", call.key, spot.key), ("value", call.value, spot.value)):
        repeat = repeated_heads(graph, index)
        assert isinstance(repeat, Repeat)
        parts.append(f"{{{name}}}" + "".join(f".transpose({a}, {b})" for a, b in repeat.after))
        texts[name] = source.segment(operand.plain)
    if call.mask is not None:
        parts.append("attn_mask={mask}")
        texts["mask"] = source.segment(spot.given["attn_mask"])
    constants = {}
    for name in ("dropout_p", "is_causal", "scale"):
        if name in spot.given and name in call.given:
            parts.append(f"{name}={{{name}}}")
            texts[name] = source.segment(spot.given[name])
            constants[name] = getattr(call, name)
    return Replacement(
        template=f"F.scaled_dot_product_attention({', '.join(parts)}, enable_gqa=True)",
        texts=texts,
        places=tuple(Place(graph=r.graph, root=r.root, inputs=dict(r.inputs)) for r in regions),
        constants=constants,
    )


def _appended(source: Source, at: Span, argument: str) -> codemod.Edit:
    """Insert an argument behind the last one of the call at `at`, in the call's own style."""
    call = next(
        e for e in source.expressions_at(at.line, at.column) if isinstance(e, ast.Call) and source.span(e) == at
    )
    last = max((source.span(a) for a in (*call.args, *(k.value for k in call.keywords))), key=_end)
    assert at.end_line is not None and at.end_column is not None
    place, closing = source.offset(*_end(last)), source.offset(at.end_line, at.end_column) - 1
    comma = _behind(source.text, place, closing, ",")
    if comma is None:
        end = _behind(source.text, place, closing, ")") or place
        return codemod.insert(source.path, *_position(source, end), f", {argument}")
    line, column = _position(source, comma)
    own = source.lines[line - 1]
    if line in (at.line, at.end_line):
        return codemod.insert(source.path, line, column, f" {argument},")
    indent, ending = own[: len(own) - len(own.lstrip())], "\r\n" if own.endswith("\r\n") else "\n"
    return codemod.insert(source.path, line + 1, 0, f"{indent}{argument},{ending}")


def _in_place_of(source: Source, operand: Operand) -> str:
    """What is repeated, as it must stand where the repeat stands now."""
    text = source.segment(operand.plain)
    parent = source.parents.get(operand.repeated)
    alone = isinstance(parent, (ast.Assign, ast.keyword)) or (
        isinstance(parent, ast.Call) and parent.func is not operand.repeated
    )
    return text if alone and "\n" not in text else codemod.grouped(text)


def _end(span: Span) -> tuple[int, int]:
    assert span.end_line is not None and span.end_column is not None
    return span.end_line, span.end_column


def _behind(text: str, begin: int, end: int, mark: str) -> int | None:
    """The position behind the last `mark` between two positions, comments left out."""
    found, comment = None, False
    for at in range(begin, end):
        comment = text[at] != "\n" and (comment or text[at] == "#")
        if text[at] == mark and not comment:
            found = at + 1
    return found


def _position(source: Source, at: int) -> tuple[int, int]:
    """Line and column of a position in the text."""
    line = next(n for n in range(len(source.lines), 0, -1) if source.offset(n, 0) <= at)
    return line, at - source.offset(line, 0)
