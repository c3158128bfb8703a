"""Kernels of Liger-Kernel and flash-attn as other forms of a finding, where the interpreter of the script has them.

A form calls the kernel where it takes its inputs and keeps the first form for every other caller: on the CPU, in
another dtype, at another shape.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor import codemod
from advisor.forms import kernel_form, transforms, words
from advisor.graphrule import Site
from advisor.model import Form, Graph, Replacement
from advisor.patterns import Attention
from advisor.patterns.sdpa import HALF
from advisor.patterns.shown_axes import rank_is_shown
from advisor.rule import Context
from advisor.source import Source

FLOATS = HALF | {"float32"}
LIGER_ROW = 65536  # elements of the longest row that one of its blocks holds
RMS_NORM_SINCE = (0, 6, 5)  # takes no weight as well, and the six arguments given here
LAYER_NORM_SINCE = (0, 8, 5)  # keeps its statistics in float32 for the backward pass
FLASH = "flash_attn_func"
FLASH_SINCE, FLASH_BEFORE = (2, 1, 0), (3, 0, 0)  # flash_attn_func of the second generation, causal at the bottom right
FLASH_WIDTH = 256  # of a head
FLASH_KEYWORDS = {"is_causal": "causal", "scale": "softmax_scale", "dropout_p": "dropout_p"}
SWAP = ".transpose(1, 2)"  # of heads and positions


def liger_rms_norm(ctx: Context, graph: Graph, site: Site, plain: Replacement) -> Iterator[Form]:
    """LigerRMSNormFunction in place of F.rms_norm over one axis.

    "gemma" is its name for what F.rms_norm does: all in float32, rounded once. It may not write into the gradient that
    it is given, which others may read.
    """
    when = _takes_rows(ctx, graph, site, plain, ("weight",), RMS_NORM_SINCE)
    if when is None or not isinstance(plain.constants["eps"], float):
        return
    name, weight = "LigerRMSNormFunction", "{weight}" if "weight" in site.regions[0].inputs else "None"
    if is_free(site.alignment.source, name, "liger_kernel"):
        yield kernel_form(
            "liger",
            "call Liger-Kernel's RMSNorm",
            plain,
            f'{name}.apply({{x}}, {weight}, {{eps}}, 0.0, "gemma", False)',
            when,
            (f"from liger_kernel.ops.rms_norm import {name}",),
        )


def liger_layer_norm(ctx: Context, graph: Graph, site: Site, plain: Replacement) -> Iterator[Form]:
    """LigerLayerNormFunction in place of F.layer_norm over one axis with weight and bias, without which it is none."""
    when = _takes_rows(ctx, graph, site, plain, ("weight", "bias"), LAYER_NORM_SINCE)
    if when is None or not {"weight", "bias"} <= set(site.regions[0].inputs):
        return
    name = "LigerLayerNormFunction"
    if is_free(site.alignment.source, name, "liger_kernel") and isinstance(plain.constants["eps"], float):
        yield kernel_form(
            "liger",
            "call Liger-Kernel's LayerNorm",
            plain,
            f"{name}.apply({{x}}, {{weight}}, {{bias}}, {{eps}})",
            when,
            (f"from liger_kernel.ops.layer_norm import {name}",),
        )


def _takes_rows(
    ctx: Context, graph: Graph, site: Site, plain: Replacement, vectors: Sequence[str], since: tuple[int, ...]
) -> str | None:
    """The test under which a norm of Liger-Kernel takes its inputs; None where it never does or is not there."""
    region = site.regions[0]
    tensors = ["x", *(name for name in vectors if name in region.inputs)]
    dtype = recorded_dtype(ctx, site, tensors)
    width = (graph.nodes[region.inputs["x"]].shape or (LIGER_ROW + 1,))[-1]
    if not kernels_of(ctx, "liger_kernel", since) or "triton" not in ctx.profile.environment.packages:
        return None
    if dtype not in FLOATS or "," in region.facts["axes"] or width > LIGER_ROW:
        return None
    if not all(is_plain_name(plain.texts[name]) for name in tensors):
        return None
    same = " == ".join(f"{{{name}}}.dtype" for name in tensors)
    tests = ["{x}.is_cuda", f"{same} == torch.{dtype}", f"{{x}}.shape[-1] <= {LIGER_ROW}"]
    if dtype in HALF:  # autocast gives a norm float32
        tests.append("not torch.is_autocast_enabled()")
    return " and ".join(tests)


# ----------------------------------------------------------------------------------------------------------- attention


def flash_attention(ctx: Context, graph: Graph, site: Site, region: Attention, plain: Replacement) -> Iterator[Form]:
    """flash_attn_func in place of scaled_dot_product_attention, where that takes no mask but a causal one.

    It wants (batch, positions, heads, width), aligns its causal mask at the bottom right, so that it is the same
    function at equal lengths only, and raises for other dtypes than half precision. Attention that drops elements is
    left out: the proof cannot switch off what the kernel drops.
    """
    call = _sdpa_of(plain.template)
    sizes, package = region.sizes, "flash_attn"
    dtype = recorded_dtype(ctx, site, ("query", "key", "value"))
    if call is None or dtype not in HALF or not kernels_of(ctx, package, FLASH_SINCE, FLASH_BEFORE):
        return
    if (sizes.queries, sizes.width) != (sizes.keys, sizes.value_width) or sizes.width > FLASH_WIDTH:
        return
    named = all(is_plain_name(plain.texts[name]) for name in ("query", "key", "value"))
    if not named or _drops(site, ctx) or named_in(ctx.sources, frozenset({"use_deterministic_algorithms"})):
        return
    if not is_free(site.alignment.source, FLASH, package):
        return
    query = call.operands[0]
    fixed = rank_is_shown(site.alignment, graph, region, region.root)
    tests = [
        "{query}.is_cuda",
        f"{{query}}.dtype == {{key}}.dtype == {{value}}.dtype == torch.{dtype}",
        " == ".join(f"{operand}.shape" for operand in call.operands),
        f"{query}.shape[-1] <= {FLASH_WIDTH}",
        *([] if fixed else [f"{query}.dim() == 4"]),
    ]
    arguments = [_swapped(operand) for operand in call.operands]
    arguments += [f"{FLASH_KEYWORDS[name]}={value}" for name, value in call.keywords.items()]
    yield kernel_form(
        "flash",
        "call flash_attn_func",
        plain,
        f"{FLASH}({', '.join(arguments)}){_swapped_back(call.tail)}",
        " and ".join(tests),
        (f"from {package} import {FLASH}",),
    )


@dataclass(frozen=True)
class _Sdpa:
    """A call of scaled_dot_product_attention as a template says it, and what follows it."""

    operands: tuple[str, ...]
    keywords: Mapping[str, str]
    tail: str


def _sdpa_of(template: str) -> _Sdpa | None:
    """The parts of a template that is such a call without a mask; placeholders keep their length."""
    text = codemod.PLACEHOLDER.sub(r"_\1_", template)
    found = [n for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Call)]
    call = next((n for n in found if ast.unparse(n.func) == "F.scaled_dot_product_attention"), None)
    if call is None or call.col_offset or {k.arg for k in call.keywords} - set(FLASH_KEYWORDS):
        return None

    def part(node: ast.expr) -> str:
        return template[node.col_offset : node.end_col_offset]

    keywords = {str(k.arg): part(k.value) for k in call.keywords}
    return _Sdpa(tuple(part(a) for a in call.args), keywords, template[call.end_col_offset :])


def _swapped(operand: str) -> str:
    """An operand with heads and positions the other way round."""
    return operand.removesuffix(SWAP) if operand.endswith(SWAP) else operand + SWAP


def _swapped_back(tail: str) -> str:
    return tail.removeprefix(SWAP) if tail.startswith(SWAP) else SWAP + tail


def _drops(site: Site, ctx: Context) -> bool:
    """Whether a recorded call dropped elements, or with which probability was not recorded."""
    nodes = [graph.nodes[index] for region, graph in site.pairs(ctx) for index in region.dropout]
    return any((n.args[1] if len(n.args) > 1 else n.kwargs.get("p")) != 0 for n in nodes)


# -------------------------------------------------------------------------------------------------------------- shared


def kernels_of(ctx: Context, package: str, since: tuple[int, ...], before: tuple[int, ...] | None = None) -> bool:
    """Whether the kernels of a package can be offered: it is installed in such a version, the device is a GPU, and the
    files ask for nothing that an autograd.Function of its own cannot give."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", ctx.profile.environment.packages.get(package, ""))
    if found is None or ctx.profile.hardware.kind != "cuda":
        return False
    version = tuple(int(part or 0) for part in found.groups())
    return since <= version and (before is None or version < before) and not any(map(transforms, ctx.sources))


def named_in(sources: Sequence[Source], names: frozenset[str]) -> bool:
    """Whether the files use one of some names: as a keyword of a call, an attribute, an import or a variable."""
    return any(words(source) & names for source in sources)


def recorded_dtype(ctx: Context, site: Site, names: Sequence[str]) -> str | None:
    """The one dtype in which inputs and result of every region were recorded, None where there are several."""
    pairs = site.pairs(ctx)
    kinds = {graph.nodes[region.inputs[name]].dtype for region, graph in pairs for name in names}
    kinds |= {graph.nodes[region.root].dtype for region, graph in pairs}
    return kinds.pop() if len(kinds) == 1 else None


def is_plain_name(text: str) -> bool:
    """Whether an expression can be said twice: a name, or attributes of one."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return False
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def is_free(source: Source, name: str, package: str) -> bool:
    """Whether a file can import a name of a package: it gives it to nothing else."""
    known = source.imports.get(name, "").startswith(f"{package}.")
    return known or re.search(rf"\b{name}\b", source.text) is None
