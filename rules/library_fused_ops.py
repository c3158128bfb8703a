"""A Hugging Face model runs its loss, norms, gates or rotations as many small kernels for which Liger has fused ones.

## What it does
Points at the line that makes the model and names the one kernel of Liger-Kernel that the measured time speaks for. The
source is left alone, because the package has to be there and its kernels are judged by measurement; the examples show
the call that applies the kernel before the model is made.

## Why it costs
RMSNorm, rotary embedding and gated MLP read and write the activation once per operation. The loss is the largest: the
logits of every token over the vocabulary are stored, cast to float32 and stored again; the fused form computes them
block by block from the hidden states (Hsu et al. 2024). On an H200 the fused loss alone took a compiled Hugging Face
Llama of 0.7 billion parameters from 157.6 to 137.7 ms per step, all other kernels of Liger together to 156.9 ms.

## When not to
For model types outside Liger's map; on a CPU; below a share of 3 % of the step. `cross_entropy` and
`fused_linear_cross_entropy` exclude each other and are never both on. Types whose functions lack a kernel are not
given it: granite has no fused linear loss, gpt_oss and deepseek_v4 no SwiGLU, nemotron only the losses. The fused loss
returns no logits in training: a script that reads them cannot use it.

## Fix safety
SUGGEST: other kernels of another package, which patch classes of transformers for the whole process.

## References
- Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024
- linkedin/Liger-Kernel 0.8.5, liger_kernel/transformers/monkey_patch.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from advisor import codemod
from advisor.graphrule import GraphRule
from advisor.libraries import LIGER, Liger
from advisor.model import Decline, Evidence, Finding, Graph, Node, Ref, Rewrite, Safety, Span
from advisor.patterns import NearMiss, Region
from advisor.patterns.callsites import package_file, scope_of
from advisor.patterns.regions import calls
from advisor.rule import Context, Example, step, tensor_bytes
from advisor.source import Source

PREFIX = "transformers.models."
LOSS_FILE = "transformers/loss/loss_utils.py"
LARGE = 0.15  # share of peak memory from which logits are worth a slower kernel (catalogue, logits-memory)
WHAT = {
    "fused_linear_cross_entropy": "the output layer and the loss",
    "cross_entropy": "the loss",
    "rms_norm": "RMSNorm",
    "rope": "the rotary embedding",
    "swiglu": "the gate of the MLP",
    "geglu": "the gate of the MLP",
}
MODEL = """\
import sys
import types
import torch
from torch import nn
from transformers import {config}, {model}

sys.modules["liger_kernel.transformers"] = types.SimpleNamespace({function}=lambda **options: None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = {config}(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
        )
{made}
        self.register_buffer("labels", torch.arange(12).view(2, 6), persistent=False)

    def forward(self, x):
        return self.model(inputs_embeds=x, labels=self.labels).loss


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(2, 6, 32, requires_grad=True)]
"""


def _model(kind: str, *made: str) -> str:
    text = MODEL.replace("{config}", f"{kind}Config").replace("{model}", f"{kind}ForCausalLM")
    lines = "\n".join(f"        {line}" for line in made)
    return text.replace("{function}", f"apply_liger_kernel_to_{kind.lower()}").replace("{made}", lines)


@dataclass(frozen=True)
class _Share:
    """What one option of Liger would replace: the nodes, by graph, and the bytes of logits it would not store."""

    option: str
    nodes: Mapping[int, frozenset[int]]
    logits_bytes: int = 0


class LibraryFusedOps(GraphRule):
    """apply_liger_kernel_to_<type>(<the one option that pays>) before the model is made."""

    id = "library-fused-ops"
    safety = Safety.SUGGEST
    worth = 0.03
    title = "apply one kernel of Liger"
    examples = (
        Example(
            before=_model("Llama", "self.model = LlamaForCausalLM(config)"),
            after=_model(
                "Llama",
                "apply_liger_kernel_to_llama(",
                "    rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True",
                ")",
                "self.model = LlamaForCausalLM(config)",
            ).replace(
                "LlamaForCausalLM\n",
                "LlamaForCausalLM\nfrom liger_kernel.transformers import apply_liger_kernel_to_llama\n",
            ),
            profile=step(10_000, nodes=0.9),
            saves=(0, 9_000),
        ),
        Example(
            before=_model("Llama", "self.model = LlamaForCausalLM(config)"),
            after=None,
            profile=step(10_000, nodes=0.9, device="cpu"),
            because="the kernels of Liger need a GPU",
        ),
        Example(
            before=_model("Llama", "self.model = LlamaForCausalLM(config)"),
            after=None,
            profile=step(10_000, nodes=0.001),
            because="nothing that Liger replaces in llama takes 3.0% of the step",
        ),
    )

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        return iter(())

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """At most one result: for the outermost model of transformers in the run."""
        kind = _outermost_type(ctx)
        liger = LIGER.get(kind or "")
        if kind is None or liger is None:
            return
        called = next((g.span or _first_span(g, kind) for g in ctx.graphs if _has_type(g, kind)), None)
        if ctx.profile.hardware.kind != "cuda":
            yield self.decline(called, "the kernels of Liger need a GPU")
            return
        shares = _shares(ctx, liger, kind)
        if any(_trains_on_logits(source) for source in ctx.sources):
            shares = [share for share in shares if share.option != "fused_linear_cross_entropy"]
        measured = [(cost, s) for s in shares if (cost := _cost(ctx, s)) is not None]
        worth = [(cost, s) for cost, s in measured if cost / ctx.step_us >= ctx.gate(self)]
        if not worth:
            reason = f"nothing that Liger replaces in {kind} takes {ctx.gate(self):.1%} of the step"
            yield self.decline(called, reason, needs=() if measured else ("links",))
            return
        large = [item for item in worth if _logits_are_large(ctx, item[1])]
        cost, best = max(large or worth, key=lambda item: (item[0], item[1].option))
        yield self._finding(ctx, kind, liger, best, cost)

    def _finding(self, ctx: Context, kind: str, liger: Liger, best: _Share, cost: float) -> Finding | Decline:
        graphs = [g for g in ctx.graphs if best.nodes.get(g.index)]
        called = graphs[0].span or _first_span(graphs[0], kind)
        if called is None:
            return self.decline(
                None, f"{WHAT[best.option]} of {kind} may be fused by Liger, but no line made the model"
            )
        source = ctx.read(called.path)
        made = _construction(source, kind)
        if _applied(source):
            return self.decline(called, "the script applies Liger already")
        memory = (
            ()
            if not best.logits_bytes
            else (Evidence(what="logits that would not be stored", value=best.logits_bytes, unit="bytes"),)
        )
        return self.finding(
            source.span(made) if made is not None else called,
            f"{WHAT[best.option]} of {kind} could run as one kernel of Liger ({best.option}); needs liger_kernel",
            cited_us=cost,
            high_us=cost,
            evidence=(
                Evidence(what=f"time of {WHAT[best.option]} per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost / ctx.step_us, 4), unit="share"),
                *memory,
            ),
            values={"function": f"apply_liger_kernel_to_{liger.name}", "options": _options(liger, best.option)}
            | ({"not applied": "the line that makes the model was not found"} if made is None else {}),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "not applied" in finding.values:
            return self.decline(finding.span, finding.values["not applied"])
        name = finding.values["function"]
        statement = next(source.statement_of(e) for e in source.expressions_at(finding.span.line, finding.span.column))
        place = source.span(statement)
        line = source.lines[place.line - 1]
        indent = line[: place.column]
        if indent.strip():
            return self.decline(finding.span, "the model is made on a line with other statements")
        ending = "\r\n" if line.endswith("\r\n") else "\n"
        call = codemod.call_text(source, place, name, finding.values["options"].split(", "))
        edits = [
            codemod.insert(source.path, place.line, 0, f"{indent}{call}{ending}"),
            codemod.add_import(source, f"from liger_kernel.transformers import {name}"),
        ]
        return self.edit(finding, self.title, edits)


# --------------------------------------------------------------------------------------------------------------- graph


def _type_of(node: Node) -> str | None:
    """The model type whose code made a node, by the class of its module: "llama"."""
    name = node.module_class or ""
    return name.removeprefix(PREFIX).split(".", 1)[0] if name.startswith(PREFIX) else None


def _has_type(graph: Graph, kind: str) -> bool:
    return any(_type_of(node) == kind for node in graph.nodes)


def _first_span(graph: Graph, kind: str) -> Span | None:
    return next((n.span for n in graph.nodes if _type_of(n) == kind and n.span is not None), None)


def _outermost_type(ctx: Context) -> str | None:
    """The type of the outermost module of transformers, which decides about Liger's function; None without one."""
    found = [
        (node.module.count(".") if node.module else -1, graph.index, node.index, kind)
        for graph in ctx.graphs
        for node in graph.nodes
        if node.op.startswith("call_") and (kind := _type_of(node)) is not None
    ]
    return min(found)[3] if found else None


def _cost(ctx: Context, share: _Share) -> float | None:
    known = [c for graph, nodes in share.nodes.items() if (c := ctx.cost_us(graph, nodes)) is not None]
    return sum(known) if known else None


def _shares(ctx: Context, liger: Liger, kind: str) -> list[_Share]:
    """What each option of Liger that helps this type would replace."""
    found = []
    for option in liger.useful:
        if option in ("cross_entropy", "fused_linear_cross_entropy"):
            found.append(_loss(ctx, option))
        else:
            found.append(_Share(option, {g.index: _nodes(g, option, kind) for g in ctx.graphs}))
    return found


def _nodes(graph: Graph, option: str, kind: str) -> frozenset[int]:
    products = {n.index for n in calls(graph, "linear", "matmul", "addmm")}
    made = (n for n in graph.nodes if n.op.startswith("call_") and n.index not in products)
    return frozenset(n.index for n in made if _of_option(n, option, kind))


def _of_option(node: Node, option: str, kind: str) -> bool:
    file = package_file(node) or ""
    if not file.startswith("transformers/"):
        return False
    if option == "rms_norm":
        return _type_of(node) == kind and (node.module_class or "").endswith("RMSNorm")
    if option == "rope":
        functions = {frame.function for frame in node.frames}
        return _type_of(node) == kind and "apply_rotary_pos_emb" in functions
    return any(part.startswith("mlp") or part == "feed_forward" for part in (node.module or "").split("."))


def _loss(ctx: Context, option: str) -> _Share:
    """The loss of transformers and, for the fused form, the output layer that feeds it."""
    nodes: dict[int, frozenset[int]] = {}
    logits = 0
    for graph in ctx.graphs:
        products = {n.index for n in calls(graph, "linear")}
        for node in calls(graph, "cross_entropy"):
            if package_file(node) is None or not any(
                f.path.replace("\\", "/").endswith(LOSS_FILE) for f in node.frames
            ):
                continue
            chain = {node.index}
            before = node.args[0] if node.args else node.kwargs.get("input")
            while option == "fused_linear_cross_entropy" and isinstance(before, Ref):
                step_back = graph.nodes[before.index]
                chain.add(step_back.index)
                if before.index in products:
                    logits += tensor_bytes(step_back)
                    break
                before = step_back.args[0] if step_back.op.startswith("call_") and step_back.args else None
            nodes[graph.index] = nodes.get(graph.index, frozenset()) | chain
    return _Share(option, nodes, logits)


def _logits_are_large(ctx: Context, share: _Share) -> bool:
    peak = ctx.profile.peak_bytes
    return share.logits_bytes > 0 and (peak is None or share.logits_bytes >= LARGE * peak)


# -------------------------------------------------------------------------------------------------------------- source


def _options(liger: Liger, chosen: str) -> str:
    """Every option spelled out, because most of them are on by default; at most one of the two losses is on."""
    return ", ".join(f"{name}={name == chosen}" for name in liger.options)


def _applied(source: Source) -> bool:
    """Whether a script uses Liger: a call of its functions or classes, or the trainer's option for it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            by_name = name.startswith(("apply_liger_kernel", "_apply_liger_kernel"))
            if by_name or any(k.arg == "use_liger_kernel" and _is_on(k.value) for k in node.keywords):
                return True
    return any(target.startswith("liger_kernel") for target in source.imports.values())


def _is_on(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value is False)


def _trains_on_logits(source: Source) -> bool:
    """Whether code that trains reads the logits, which the fused loss does not give in training.

    That is code beside a call of `backward`, and functions named after training or the loss.
    """
    nodes = list(ast.walk(source.tree))
    reads = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "logits" and isinstance(n.ctx, ast.Load)]
    calls_of = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    trains = [scope_of(source, n) for n in calls_of if isinstance(n.func, ast.Attribute) and n.func.attr == "backward"]
    scopes = [scope_of(source, read) for read in reads]
    named = [s.name for s in scopes if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return any(s in trains for s in scopes) or any("train" in name or "loss" in name for name in named)


def _construction(source: Source, kind: str) -> ast.Call | None:
    """The only call that makes a model of transformers: `LlamaForCausalLM(...)`, `AutoModel.from_pretrained(...)`."""
    stem = kind.replace("_", "")
    found = []
    for node in ast.walk(source.tree):
        name = source.qualified(node.func) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or name is None or not name.startswith("transformers."):
            continue
        parts = name.split(".")
        maker = parts[-1] in ("from_pretrained", "from_config", "_from_config")
        made = parts[-2] if maker else parts[-1]
        auto = maker and made.startswith("AutoModel")
        model = made.lower().startswith(stem) and ("For" in made or made.endswith("Model"))
        if auto or model:
            found.append(node)
    return found[0] if len(found) == 1 else None
