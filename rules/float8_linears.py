"""Large bfloat16 linear layers of a compiled model could multiply in float8.

## What it does
On request (`--select float8-linears`): puts `convert_to_float8_training(model, ...)` of torchao in front of the call
that compiles the model. The filter leaves out the output layer and every layer whose sizes are no multiples of 16.

## Why it costs
A device of compute capability 8.9 or newer multiplies twice as many float8 numbers per second as bfloat16 ones. The
estimate is the time of the large products against what float8 would take at the same share of the peak; scaling and
casting take a part of that.

## When not to
Without `torch.compile`: scaling and casting are operations of their own there, and cost more than float8 brings. Where
large products, all of whose sizes are multiples of 16 and at least 1024, take less than 30 % of the step. Where torchao
is not installed, which is told. Models that are wrapped for several processes: torchao has options of its own for them.
On a device older than 8.9.

## Fix safety
PRECISION: inputs, weights and gradients are rounded to 3 bits of mantissa or 2, with a scale for each tensor. Tried
only where the rule is asked for by name; the loss is compared over the steps of the proof.

## References
- torchao.float8, documentation: "With torch.compile on" up to 1.25 times the throughput on 8 GPUs, 1.5 on 512
- pytorch/torchtitan, float8: compiling is required, it fuses the kernels that scale and cast
- GPT of 0.7 B parameters, batch 16, one H200: 275.3 to 233.6 ms a step, output layer excluded
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import blocks, codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Node, Operators, Rewrite, Safety, Span
from advisor.patterns import checkpoints, uncompiled
from advisor.patterns.lowered import is_product
from advisor.patterns.precision import capability, products_of
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.callees import named

LEAST = (8, 9)  # compute capability with float8 tensor cores
MULTIPLE, LARGE = 16, 1024  # of every size of a product
HALF = 0.5  # of the time, at twice the peak
PARALLEL = ("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard", "parallelize_module")
CONVERT = "torchao.float8.convert_to_float8_training"
IMPORT = "from torchao.float8 import convert_to_float8_training"
SCRIPT = """\
import torch
{imports}
model = GPT()
{convert}{compile}for x, y in loader:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
"""
COMPILED = "model = torch.compile(model)\n"
FILTER = "not (module.in_features % 16 or module.out_features % 16)"
CONVERTED = f"""\
convert_to_float8_training(
    model,
    module_filter_fn=lambda module, name: name != "head" and {FILTER},
)
"""
PRODUCTS = (("aten::mm", "bfloat16", 400.0),) * 15
CALLED = {"module": (1.0, 0.0), "torch.compile": (0.0, 0.0)}
INSTALLED = {"torchao": "0.18.0"}
LARGE_SIZES = ((16384, 4096), (4096, 4096))


def _script(compiled: str = COMPILED, convert: str = "", imports: str = "") -> str:
    return SCRIPT.replace("{compile}", compiled).replace("{convert}", convert).replace("{imports}", imports)


class Float8Linears(Rule):
    """convert_to_float8_training(model, ...) in front of torch.compile."""

    id = "float8-linears"
    safety = Safety.PRECISION
    needs = ("steps", "calls")
    worth = 0.05
    order = 41
    on_request = True
    examples = (
        Example(
            before=_script(),
            after=_script(
                convert=CONVERTED,
                imports=f"{IMPORT}\n",
            ),
            profile=step(10_000, products=PRODUCTS, sizes=LARGE_SIZES, calls=CALLED, arch="sm_90", packages=INSTALLED),
            saves=(0, 3_001),
        ),
        Example(  # told: torchao is not installed
            before=_script(),
            after=_script(),
            profile=step(10_000, products=PRODUCTS, sizes=LARGE_SIZES, calls=CALLED, arch="sm_90"),
        ),
        Example(
            before=_script(""),
            after=None,
            profile=step(10_000, products=PRODUCTS, sizes=LARGE_SIZES, calls=CALLED, arch="sm_90", packages=INSTALLED),
            because="float8 pays only in a compiled model",
        ),
        Example(
            before=_script(),
            after=None,
            profile=step(10_000, products=PRODUCTS, sizes=LARGE_SIZES, calls=CALLED, arch="sm_80"),
            because="compute capability 8.0 has no float8 products",
        ),
        Example(
            before=_script(),
            after=None,
            profile=step(10_000, products=PRODUCTS, sizes=((4096, 1000), (1000, 50)), calls=CALLED, arch="sm_90"),
            because="large bfloat16 products take 0.0% of the step",
        ),
        Example(
            before=_script(),
            after=None,
            profile=step(10_000, products=PRODUCTS, sizes=LARGE_SIZES, calls=CALLED, device="cpu"),
            because=ON_A_GPU,
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        called = ctx.calls("module")
        if not called or called[0].span is None or _is_converted(ctx):
            return
        place = called[0].frames[0]
        if ctx.profile.hardware.kind != "cuda":
            if any(node.dtype == "bfloat16" and is_product(node) for g in ctx.graphs for node in g.nodes):
                yield self.decline(place, ON_A_GPU, needs=("gpu",))
            return
        halves = products_of(ctx.profile, "matmul", "bfloat16")
        if halves:
            yield self._judge(ctx, place, halves)

    def _judge(self, ctx: Context, place: Span, times: dict[int, float]) -> Finding | Decline:
        able = capability(ctx.profile.hardware)
        if able is None or able < LEAST:
            which = "its compute capability is not known" if able is None else f"compute capability {able[0]}.{able[1]}"
            return self.decline(place, f"{which} has no float8 products" if able else f"cannot tell: {which}")
        steps = len({step for step in ctx.profile.kernels.step if step >= 0})
        large = [row for row in times if _is_large(ctx.profile.operators, row)]
        time_us = min(sum(times[row] for row in large) / steps, ctx.step_us)
        share = time_us / ctx.step_us
        if share < max(0.3, ctx.gate(self)):
            return self.decline(place, f"large bfloat16 products take {share:.1%} of the step")
        compiling = ctx.calls("torch.compile")
        if not compiling:
            return self.decline(place, "float8 pays only in a compiled model")
        return self._found(ctx, compiling, time_us, len(large) / steps)

    def _found(self, ctx: Context, compiling: tuple[LoopCall, ...], time_us: float, count: float) -> Finding:
        span = compiling[0].span
        assert span is not None
        head, told = _head(ctx), _told(ctx, compiling)
        return self.finding(
            span,
            "large linear layers multiply in bfloat16 where the device has float8",
            cited_us=time_us,
            high_us=HALF * time_us,
            evidence=(
                Evidence(what="time of large bfloat16 products per step", value=round(time_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(time_us / ctx.step_us, 4), unit="share"),
                Evidence(what="large products per step", value=round(count, 1), unit="products"),
            ),
            values={"head": head or "", "called": _called(ctx)} | ({} if told is None else {"told": told}),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        try:
            statement, model = _compiled(source, finding.span)
            head, called = finding.values["head"], finding.values["called"]
            if called not in (model, *_targets(statement)):
                raise codemod.CannotEdit(f"`{model}` may be another module than `{called}`, which the loop calls")
            names = f'name != "{head}" and ' if head else ""
            lines = [f"{model},", f"module_filter_fn=lambda module, name: {names}{FILTER},"]
            call = ["convert_to_float8_training(", *(f"    {line}" for line in lines), ")"]
            edits = [codemod.add_import(source, IMPORT), blocks.put_before(source, statement, call)]
        except codemod.CannotEdit as error:
            return self.decline(finding.span, str(error))
        return self.edit(finding, "float8 linear layers", edits)


def _is_converted(ctx: Context) -> bool:
    trees = [source.tree for source in ctx.sources]
    return named(trees, ("convert_to_float8_training", "Float8LinearConfig", "fp8_autocast")) is not None


def _is_large(operators: Operators, row: int) -> bool:
    sizes = [size for shape in operators.shapes[row] for size in shape if len(shape) > 1]
    return bool(sizes) and all(size % MULTIPLE == 0 and size >= LARGE for size in sizes)


def _head(ctx: Context) -> str | None:
    """The module of the output layer: the last linear layer of the largest captured graph."""
    graphs = [graph for graph in ctx.graphs if graph.kind == "dynamo" and graph.nodes]
    largest = max(graphs, key=lambda graph: len(graph.nodes), default=None)
    linears = [] if largest is None else [node for node in largest.nodes if _is_linear(node)]
    module = linears[-1].module if linears else None
    return None if module is None else module.removeprefix("_orig_mod.").removeprefix("module.")


def _is_linear(node: Node) -> bool:
    return node.op.startswith("call_") and node.target.rpartition(".")[2] == "linear"


def _told(ctx: Context, compiling: tuple[LoopCall, ...]) -> str | None:
    """Why nothing is written; None where the model can be converted in front of the call that compiles it."""
    if "torchao" not in ctx.profile.environment.packages:
        return "install torchao, whose float8 training this is"
    if len({call.span for call in compiling}) > 1:
        return f"several calls compile: convert the model before the first of them, with {CONVERT}"
    if named([source.tree for source in ctx.sources], PARALLEL) is not None:
        return "the model is wrapped for several processes, for which torchao has options of its own"
    if _head(ctx) is None:
        return "cannot tell which layer is the output layer, which stays in bfloat16"
    return None


def _compiled(source: Source, at: Span) -> tuple[ast.stmt, str]:
    """The statement that compiles a model and how it spells the model; raises `CannotEdit` where there is none."""
    call = checkpoints.call_at(source, at)
    if call is None or checkpoints.asked(source, call) is not None:
        raise codemod.CannotEdit("an option asks for compiling: convert the model in front of it")
    statement = source.statement_of(call)
    if source.qualified(call.func) == uncompiled.COMPILE:
        model = call.args[0] if call.args else None
    else:
        model = call.func.value if isinstance(call.func, ast.Attribute) else None
        loop = source.parents[statement]
        if isinstance(loop, ast.For) and ast.unparse(loop.target) == ast.unparse(model or loop.target):
            statement, model = loop, _owner(loop.iter)
    if not isinstance(model, (ast.Name, ast.Attribute)):
        raise codemod.CannotEdit("the model has no name in front of the call that compiles it")
    return statement, source.segment(model)


def _called(ctx: Context) -> str:
    """How the training loop spells the model."""
    span = ctx.calls("module")[0].span
    assert span is not None
    call = checkpoints.call_at(ctx.read(span.path), span)
    return "" if call is None else ast.unparse(call.func)


def _targets(statement: ast.stmt) -> list[str]:
    return [ast.unparse(target) for target in statement.targets] if isinstance(statement, ast.Assign) else []


def _owner(container: ast.expr) -> ast.expr:
    """The model of `model.blocks`."""
    while isinstance(container, ast.Attribute):
        container = container.value
    return container
