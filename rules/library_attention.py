"""A library's model runs its written-out attention although the library can call the fused one.

## What it does
Changes the line of the script that chose the slow form: `attn_implementation="eager"` of transformers becomes "sdpa",
`set_fused_attn(False)` of timm becomes True, `AttnProcessor()` of diffusers becomes `AttnProcessor2_0()`, and a layer
stack of x-transformers gets `attn_flash=True`. The library itself is never edited.

## Why it costs
The scores of every head go through memory once per operation, forward and backward, as in naive-attention. The step of
a Hugging Face Llama of 0.7 billion parameters on an H200 went from 379 to 216 ms (bf16 autocast, batch 8 x 2048, torch
2.11, transformers 5.17).

## When not to
When the script wants the weights (`output_attentions`, `.attentions`, `return_attn`, a forward hook) or gradients of
gradients; where the library has no other form: DeBERTa's disentangled attention, torchvision's Swin, types and classes
without `_supports_sdpa`; where the chosen options exclude it (talking heads of x-transformers, which is declined).
Where several lines could have made the model, or one line makes models of several types (an Auto class that gets its
name or config from an argument, a table or a condition), the place is shown and left alone: another type may have no
fused form, and raises.

## Fix safety
NUMERICS: the same sum in another order. With dropout the draws come from another place of the random stream. Rows whose
every key is padding get other values, which a padded loss does not read; the proof compares the losses.

## References
- transformers documentation, Attention backends
- timm/layers/config.py, `set_fused_attn`
- diffusers documentation, Attention Processor
- x-transformers/x_transformers/attend.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from advisor import codemod
from advisor.attending import attention_floor_us
from advisor.graphrule import UNLINKED, GraphRule
from advisor.libraries import (
    NO_SDPA,
    TIMM_EXPERIMENTAL,
    X_TRANSFORMERS_ATTENTION,
    X_TRANSFORMERS_PLAIN,
    X_TRANSFORMERS_REFUSED,
)
from advisor.model import Decline, Evidence, Finding, Graph, Rewrite, Safety, Span
from advisor.patterns import Attention, NearMiss, Region, attention_regions
from advisor.patterns.callsites import keyword, package_file, spreads
from advisor.patterns.regions import calls
from advisor.patterns.sdpa import FUSED, MATH
from advisor.rule import Context, Example, floor_evidence, step
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.model_types import type_of_call, types_made

EAGER = "eager_attention_forward"  # what transformers calls its exchangeable written-out attention
ATTEND = "x_transformers.attend.Attend"
MODEL = """\
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4{choice}
        )
        self.model = LlamaModel{made}

    def forward(self, x):
        return self.model(inputs_embeds=x{wanted}).last_hidden_state


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 6, 32, requires_grad=True)]
"""


def _model(choice: str = "", made: str = "(config)", wanted: str = "") -> str:
    return MODEL.replace("{choice}", choice).replace("{made}", made).replace("{wanted}", wanted)


@dataclass(frozen=True)
class _Switch:
    """The line that chose the slow form: what to replace by what, and an import that needs."""

    path: str
    call: Span
    place: Span
    text: str
    added: Mapping[str, str]  # keyword arguments for the call at `place` instead of a replacement
    imported: str = ""
    model: str | None = None  # the one type of model of transformers that the line is for, where it says one


class LibraryAttention(GraphRule):
    """attn_implementation="eager" -> "sdpa", and what corresponds to it in other libraries."""

    id = "library-attention"
    safety = Safety.NUMERICS
    worth = 0.03
    runs = FUSED
    avoids = (MATH,)
    title = "ask the library for fused attention"
    examples = (
        Example(
            before=_model(made='._from_config(config, attn_implementation="eager")'),
            after=_model(made='._from_config(config, attn_implementation="sdpa")'),
            profile=step(10_000, nodes=0.6),
            saves=(0, 6_000),
        ),
        Example(
            before=_model(choice=",\n            attn_implementation='eager',  # for now"),
            after=_model(choice=",\n            attn_implementation='sdpa',  # for now"),
            profile=step(10_000, nodes=0.6),
            saves=(0, 6_000),
        ),
        Example(
            before=_model(choice=',\n            attn_implementation="eager"'),
            after=None,
            profile=step(10_000, nodes=0.001),
            because="the written-out attention of transformers takes 0.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """Attention in installed packages, and x-transformers' attention by its class: it keeps every intermediate."""
        keeps = {s.index: s.module for s in calls(graph, "softmax") if s.module_class == ATTEND and package_file(s)}
        for found in attention_regions(graph):
            node = graph.nodes[found.root if isinstance(found, Region) else found.node]
            if package_file(node) is not None and node.module not in keeps.values():
                yield found
        for module in keeps.values():
            mine = [n.index for n in graph.nodes if n.op.startswith("call_") and n.module == module]
            yield Region(graph=graph.index, root=mine[-1], inputs={}, inner=frozenset(mine))

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """One result for each package that runs written-out attention, and a decline for each that only looks so."""
        packages: dict[str, list[tuple[Graph, Region]]] = {}
        missed: dict[str, Decline] = {}
        for graph in ctx.graphs:
            for found in self.search(graph):
                node = graph.nodes[found.root if isinstance(found, Region) else found.node]
                file = package_file(node) or ""
                if isinstance(found, Region):
                    packages.setdefault(file.split("/", 1)[0], []).append((graph, found))
                else:
                    reason = f"{file}:{node.frames[-1].line}: {found.reason}"
                    missed.setdefault(reason, self.decline(node.span or graph.span, reason))
        for package, regions in sorted(packages.items()):
            yield self._judged(ctx, package, regions)
        yield from (missed[reason] for reason in sorted(missed))

    def _judged(self, ctx: Context, package: str, found: list[tuple[Graph, Region]]) -> Finding | Decline:
        graph, region = found[0]
        called = graph.nodes[region.root].span or graph.span
        known = [c for g, r in found if (c := ctx.cost_us(g.index, r.inner)) is not None]
        if not known:
            return self.decline(called, f"{package}: {UNLINKED}", needs=("links",))
        cost = sum(known)
        share = cost / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(called, f"the written-out attention of {package} takes {share:.1%} of the step")
        refused = _refused(ctx, found) if package == "x_transformers" else None
        if refused is not None:
            return self.decline(called, f"x_transformers has no fused attention with `{refused}`")
        switch = _switch(ctx, package, found)
        if isinstance(switch, _Switch):
            span = switch.call
        elif called is None:
            return self.decline(None, f"the attention of {package} takes {share:.1%} of the step: {switch}")
        else:
            span = called
        return self._finding(ctx, package, found, cost, span, switch)

    def _finding(
        self,
        ctx: Context,
        package: str,
        found: list[tuple[Graph, Region]],
        cost: float,
        span: Span,
        switch: _Switch | str,
    ) -> Finding:
        graph, region = found[0]
        floor = sum(attention_floor_us(ctx, g, r) for g, r in found if isinstance(r, Attention))
        where = f"{package_file(graph.nodes[region.root])}:{graph.nodes[region.root].frames[-1].line}"
        values = (
            {"not applied": switch} if isinstance(switch, str) else {"text": switch.text, "import": switch.imported}
        )
        if isinstance(switch, _Switch):
            values |= {f"keyword {name}": text for name, text in switch.added.items()}
        return self.finding(
            span,
            f"{package} runs attention written out: the score matrix is stored and re-read by every operation",
            cited_us=cost,
            high_us=cost - floor,
            evidence=(
                Evidence(what="time of the written-out attention per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
                *floor_evidence("physical floor of the same attention", floor),
                Evidence(what="first of its places", value=where, unit="line"),
                Evidence(what="calls of this code per step", value=len(found), unit="calls"),
            ),
            bindings={"place": switch.place} if isinstance(switch, _Switch) else {},
            values=values,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        place = finding.bindings["place"]
        added = {n.split(" ", 1)[1]: text for n, text in finding.values.items() if n.startswith("keyword ")}
        try:
            edits = (
                [codemod.set_keywords(source, place, added)]
                if added
                else [codemod.replace(place, finding.values["text"])]
            )
        except codemod.CannotEdit as error:
            return self.decline(finding.span, str(error))
        if finding.values["import"]:
            edits.append(codemod.add_import(source, finding.values["import"]))
        return self.edit(finding, self.title, edits)


# ---------------------------------------------------------------------------------------------------------- the script


def _switch(ctx: Context, package: str, found: list[tuple[Graph, Region]]) -> _Switch | str:
    """The one line of the script that chose written-out attention, or why there is nothing to change."""
    reason = _no_other_form(package, found) or ctx.needs_unfused_attention
    if reason is not None:
        return reason
    look = LOOK.get(package)
    if look is None:
        return f"no switch of {package} is known: ask it for its fused form"
    switches: list[_Switch] = []
    for source in ctx.sources:
        reason = _needs_weights(source)
        if reason is not None:
            return reason
        result = look(source)
        if isinstance(result, str):
            return result
        switches += result
    if len(switches) == 1:
        return (_other_types(ctx, switches[0]) if package == "transformers" else None) or switches[0]
    return f"{len(switches)} lines of the script choose it" if switches else MISSING[package]


MISSING = {
    "transformers": "no line of the script names attn_implementation: the class or a checkpoint chose eager",
    "timm": "no line of the script switches it off: look for TIMM_FUSED_ATTN=0 in the environment",
    "diffusers": "no line of the script sets AttnProcessor: set AttnProcessor2_0",
    "x_transformers": "no line of the script makes its layers: give them attn_flash=True",
}


def _no_other_form(package: str, found: list[tuple[Graph, Region]]) -> str | None:
    for graph, region in found:
        node = graph.nodes[region.root]
        file = package_file(node) or ""
        if package == "torchvision":
            return "torchvision has no switch for it: Swin adds its biases to the scores by hand"
        if package == "timm" and file.rsplit("/", 1)[-1] in TIMM_EXPERIMENTAL:
            return f"{file} is fused only with set_fused_attn(True, experimental=True)"
        if package == "transformers":
            kind = file.split("/")[2] if file.startswith("transformers/models/") else file
            if node.frames[-1].function != EAGER:
                return f"the attention of {kind} is its own and cannot be exchanged"
            if kind in NO_SDPA:
                return f"transformers has no other attention for {kind}"
    return None


def _other_types(ctx: Context, switch: _Switch) -> str | None:
    """Why the line that chose eager attention may be for a type of model that has no other; None where it is not."""
    if switch.model is not None:
        found: set[str | None] = {switch.model}
    else:
        found = types_made(ctx.sources)
    if None in found or not found:
        return "which type of model the line is for is chosen while the script runs, and not every type has sdpa"
    if len(found) > 1:
        kinds = ", ".join(sorted(map(str, found)))
        return f"the script names several types of model, and not every type has sdpa: {kinds}"
    kind = str(min(map(str, found)))
    without = {name.replace("_", "") for name in NO_SDPA}
    return f"transformers has no other attention for {kind}" if kind.lower() in without else None


READS = frozenset("attentions cross_attentions decoder_attentions encoder_attentions".split())
READS |= {"pre_softmax_attn", "post_softmax_attn"}  # of x-transformers
ASKS = frozenset({"output_attentions", "return_attn", "return_attn_z_loss", "head_mask"})
WANTED = "asks for the weights, which only the written-out attention gives"


def _needs_weights(source: Source) -> str | None:
    """Why a file needs the written-out attention; None where nothing says so."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in READS:
            return f"`{ast.unparse(node)}` {WANTED}"
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in READS:
            return f"`{ast.unparse(node)}` {WANTED}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("register_forward_hook", "_extractor")):
            return f"`{ast.unparse(node.func)}` in line {node.lineno} may read the weights"
        if isinstance(node, ast.Call) and _sets_any_name(node):
            return f"`{ast.unparse(node)}` in line {node.lineno} may ask for the weights"
        asked = [name for name, value in _named_values(node) if name in ASKS and not _is(value, False)]
        if asked:
            return f"{asked[0]} {WANTED}"
    return None


def _named_values(node: ast.AST) -> Iterator[tuple[str | None, ast.expr]]:
    """What a node gives to names: keyword arguments, keys of a dictionary, an attribute, setattr."""
    if isinstance(node, ast.Call):
        yield from ((k.arg, k.value) for k in node.keywords if not _is(k.value, None))
        if _names(node.func) == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            yield str(node.args[1].value), node.args[2]
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from ((str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        yield node.targets[0].attr, node.value


def _sets_any_name(call: ast.Call) -> bool:
    """Whether a call is a setattr whose name is computed."""
    return _names(call.func) == "setattr" and not (len(call.args) == 3 and isinstance(call.args[1], ast.Constant))


def _names(expression: ast.expr) -> str | None:
    return expression.id if isinstance(expression, ast.Name) else None


def _calls(source: Source) -> list[ast.Call]:
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _quoted_like(source: Source, old: ast.expr, word: str) -> str:
    mark = source.segment(old)[-1]
    return f"{mark}{word}{mark}"


def _transformers(source: Source) -> list[_Switch] | str:
    chosen: list[tuple[ast.expr, ast.expr | ast.stmt]] = []
    for call in _calls(source):
        chosen += [(k.value, call) for k in call.keywords if k.arg in ("attn_implementation", "_attn_implementation")]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "set_attn_implementation" and call.args:
            chosen.append((call.args[0], call))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Attribute) and target.attr in ("_attn_implementation", "attn_implementation"):
                chosen.append((node.value, node))
        if isinstance(node, ast.Dict):
            chosen += [(value, node) for name, value in _named_values(node) if name == "attn_implementation"]
    set_false = (n for n in ast.walk(source.tree) if isinstance(n, ast.Assign) and _is(n.value, False))
    if chosen and any(_names(node.targets[0]) == "_supports_sdpa" for node in set_false):
        return "a class of the script says that it has no other attention (_supports_sdpa)"
    open_choice = [value for value, _ in chosen if not isinstance(value, ast.Constant)]
    if open_choice:
        return f"the attention is chosen by `{ast.unparse(open_choice[0])}`: pass it sdpa"
    return [
        _Switch(
            source.path,
            source.span(place),
            source.span(value),
            _quoted_like(source, value, "sdpa"),
            {},
            model=type_of_call(source, place) if isinstance(place, ast.Call) else None,
        )
        for value, place in chosen
        if isinstance(value, ast.Constant) and value.value == "eager"
    ]


def _timm(source: Source) -> list[_Switch] | str:
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and node.value == "TIMM_FUSED_ATTN":
            return f"line {node.lineno} sets TIMM_FUSED_ATTN"
        if any(name == "fused_attn" and not _is(value, True) for name, value in _named_values(node)):
            return "the script sets fused_attn of the modules itself"
    for call in _calls(source):
        if (source.qualified(call.func) or ast.unparse(call.func)).rsplit(".", 1)[-1] == "set_fused_attn":
            enable = call.args[0] if call.args else keyword(call, "enable")
            if enable is not None and _is(enable, False):
                found.append(_Switch(source.path, source.span(call), source.span(enable), "True", {}))
            elif enable is not None and not _is(enable, True):
                return f"fused attention is chosen by `{ast.unparse(enable)}`"
    return found


def _diffusers(source: Source) -> list[_Switch] | str:
    found = []
    for call in _calls(source):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else None
        if method not in ("set_attn_processor", "set_processor") or len(call.args) != 1:
            continue
        made = call.args[0].func if isinstance(call.args[0], ast.Call) else None
        name = source.qualified(made) if made is not None else None
        if made is None or name is None or name.rsplit(".", 1)[-1] != "AttnProcessor":
            continue
        module = name.rsplit(".", 1)[0]
        imported = f"from {module} import AttnProcessor2_0" if isinstance(made, ast.Name) else ""
        text = "AttnProcessor2_0" if isinstance(made, ast.Name) else f"{ast.unparse(made)}2_0"
        found.append(_Switch(source.path, source.span(call), source.span(made), text, {}, imported))
    return found


STACKS = ("Encoder", "Decoder")
PREFIX = re.compile("^(enc_|dec_)?(cross_attn_|attn_)?")


def _attention_makers(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Calls of classes of x-transformers that make attention, with the name of the class."""
    for call in _calls(source):
        name = source.qualified(call.func) or ""
        last = name.rsplit(".", 1)[-1]
        if name.startswith("x_transformers.") and last in (*STACKS, "Attention", "XTransformer", "CrossAttender"):
            yield call, last


def _refused_argument(call: ast.Call) -> str | None:
    """The argument with which x-transformers has no fused attention."""
    for given in call.keywords:
        off = _is(given.value, False) or _is(given.value, None)
        if given.arg and PREFIX.sub("", given.arg) in X_TRANSFORMERS_REFUSED and not off:
            return given.arg
    return None


# operations of Attend: talking heads, top-k, sigmoid attention, clamped scores
REFUSING = frozenset({"conv2d", "topk", "sigmoid", "tanh"})


def _refused(ctx: Context, found: list[tuple[Graph, Region]]) -> str | None:
    """The argument, or an operation, because of which no attention that the script makes has a fused form."""
    refused = [_refused_argument(call) for source in ctx.sources for call, _ in _attention_makers(source)]
    if refused and None not in refused:
        return refused[0]
    between = [REFUSING & _operations(graph, graph.nodes[region.root].module or "") for graph, region in found]
    return min(between[0]) if all(between) else None


def _operations(graph: Graph, module: str) -> set[str]:
    """What a module and the modules inside it compute."""
    return {operation(n) for n in graph.nodes if n.module is not None and f"{n.module}.".startswith(f"{module}.")}


def _x_transformers(source: Source) -> list[_Switch] | str:
    found = []
    for call, name in _attention_makers(source):
        if name not in (*STACKS, "Attention"):
            continue
        plain = X_TRANSFORMERS_PLAIN if name in STACKS else X_TRANSFORMERS_ATTENTION
        refused = _refused_argument(call)
        given = {k.arg for k in call.keywords if k.arg and PREFIX.sub("", k.arg) not in X_TRANSFORMERS_REFUSED}
        unknown = [refused] if refused else sorted(given - plain)
        if spreads(call) or unknown or (call.args and name in STACKS) or len(call.args) > 1:
            what = f"`{unknown[0]}`" if unknown else "arguments"
            return f"{what} given to {name} may exclude fused attention"
        span = source.span(call)
        option = "attn_flash" if name in STACKS else "flash"
        found.append(_Switch(source.path, span, span, "", {option: "True"}))
    return found


LOOK: Mapping[str, Callable[[Source], list[_Switch] | str]] = {
    "transformers": _transformers,
    "timm": _timm,
    "diffusers": _diffusers,
    "x_transformers": _x_transformers,
}
