"""Products in float32 run without the tensor cores, because TF32 is off.

## What it does
Inserts `torch.set_float32_matmul_precision("high")` into the script, behind its imports or where it seeds torch, before
anything is multiplied. A script that other files import gets it under its `if __name__ == "__main__":`.

## Why it costs
Tensor cores do not take float32. As TF32 (the same exponent, 10 bits of mantissa, sums in float32) an A100 multiplies 8
times as many numbers per second, an H100 7 times. torch leaves that off for matrix products by default and on for
convolutions.

## When not to
Devices older than compute capability 8.0 have no TF32. Products of a few microseconds, and steps in which the device
mostly waits for the host, gain nothing. Where the files set the precision of products themselves, it has been decided.
With bfloat16 autocast (`no-mixed-precision`), only what stays in float32 is left to gain.

## Fix safety
PRECISION: factors are rounded to 10 bits of mantissa. Applied only with `--allow precision`; the loss is compared over
the steps of the proof.

## References
- torch.set_float32_matmul_precision, PyTorch documentation
- huggingface/transformers#16588: 2.2 times faster from TF32
- NVIDIA A100 and H100 datasheets: 19.5 and 67 TFLOP/s in float32, 156 and 495 in TF32 (dense)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from advisor import blocks, codemod
from advisor.model import Decline, Evidence, Finding, Rewrite, Safety, Span
from advisor.patterns.lowered import is_product
from advisor.patterns.precision import Products, arithmetic, capability
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source

LEAST = (8, 0)
IDLE = 0.5  # share of the step above which the device waits for the host, not the host for the device
FAMILIES = ("matmul", "attention")  # what the setting holds for
CALL = 'torch.set_float32_matmul_precision("high")'
SETTINGS = ("fp32_precision", "allow_tf32", "allow_fp16_reduced_precision_reduction")
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
SCRIPT = """\
import torch
from torch import nn
{seed}

model = nn.Linear(4096, 4096).cuda()
for x in loader:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""
MADE = {"module": (1.0, 0.0)}
OFF = {"matmul_precision": "highest"}
LARGE = (("aten::mm", "float32", 300.0),) * 20


def _script(*lines: str) -> str:
    return SCRIPT.replace("{seed}\n", "".join(f"{line}\n" for line in lines))


class Tf32Off(Rule):
    """import torch -> import torch; torch.set_float32_matmul_precision("high")."""

    id = "tf32-off"
    safety = Safety.PRECISION
    needs = ("steps", "calls")
    worth = 0.05
    order = 20
    examples = (
        Example(
            before=_script(),
            after=_script("", CALL),
            profile=step(10_000, products=LARGE, calls=MADE, arch="sm_80", facts=OFF),
            saves=(0, 6_000),
        ),
        Example(
            before=_script("torch.manual_seed(0)"),
            after=_script("torch.manual_seed(0)", CALL),
            profile=step(10_000, products=LARGE, calls=MADE, arch="sm_90", facts=OFF),
            saves=(0, 6_000),
        ),
        Example(
            before=_script(),
            after=None,
            profile=step(10_000, products=LARGE, calls=MADE, facts=OFF, device="cpu"),
            because=ON_A_GPU,
        ),
        Example(
            before=_script('torch.set_float32_matmul_precision("highest")'),
            after=None,
            profile=step(10_000, products=LARGE, calls=MADE, arch="sm_90", facts=OFF),
            because="the files set the precision of products themselves (example.py:3)",
        ),
        Example(
            before=_script(),
            after=None,
            profile=step(10_000, products=LARGE[:1], calls=MADE, arch="sm_90", facts=OFF),
            because="float32 products take 3.0% of the step",
        ),
        Example(
            before=_script(),
            after=None,
            profile=step(10_000, products=LARGE, calls=MADE, arch="sm_75", facts=OFF),
            because="example device has no TF32",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        called = ctx.calls("module") or ctx.calls("backward")
        if not called:
            return
        first = called[0].frames[0]
        source = ctx.read(ctx.script or first.path)
        anchor = _anchor(source, first)
        place = source.span(anchor)
        reason, setting = _settled(ctx.loaded), ctx.profile.facts.get("matmul_precision")
        if reason is None and setting is None:
            reason = "cannot tell: how float32 products are computed was not recorded"
        elif reason is None and setting != "highest":
            reason = "float32 products are computed in TF32 already"
        if reason is not None:
            yield self.decline(place, reason)
        elif ctx.profile.hardware.kind != "cuda":
            if any(node.dtype == "float32" and is_product(node) for g in ctx.graphs for node in g.nodes):
                yield self.decline(place, ON_A_GPU, needs=("gpu",))
        else:
            yield self._measured(ctx, source, anchor)

    def _measured(self, ctx: Context, source: Source, anchor: ast.stmt) -> Finding | Decline:
        place, hardware = source.span(anchor), ctx.profile.hardware
        products, able = arithmetic(ctx.profile).of("float32", *FAMILIES), capability(hardware)
        if not products.calls:
            return self.decline(place, "no product in float32 was recorded")
        if able is None:
            return self.decline(place, f"cannot tell: whether {hardware.name} has TF32 is not known")
        if able < LEAST:
            return self.decline(place, f"{hardware.name} has no TF32")
        share, idle = products.time_us / ctx.step_us, (ctx.idle_us or 0.0) / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(place, f"float32 products take {share:.1%} of the step")
        if not products.large_us:
            return self.decline(place, f"its float32 products take at most {products.longest_us:.0f} us each")
        if idle > IDLE:
            return self.decline(
                place, f"the device is idle in {idle:.0%} of the step: it does not wait for its products"
            )
        return self._found(ctx, source, anchor, products)

    def _found(self, ctx: Context, source: Source, anchor: ast.stmt, products: Products) -> Finding:
        share = products.time_us / ctx.step_us
        work = float(ctx.profile.facts.get("model_flops_by_dtype", {}).get("float32", 0.0))
        others = ", ".join(_importers(ctx.sources, source))
        return self.finding(
            source.span(anchor),
            f"matrix products in float32 take {share:.0%} of the step, and TF32 is off",
            cited_us=products.time_us,
            high_us=products.time_us - ctx.floor_us(work, 0.0, "tfloat32"),
            evidence=(
                Evidence(what="time of float32 products per step", value=round(products.time_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="float32 products per step", value=round(products.calls, 1), unit="operators"),
                Evidence(what="precision of float32 products", value="highest", unit=""),
            ),
            values={"imported by": others} if others else {},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        anchor = next(s for s in source.tree.body if source.span(s) == finding.span)
        guard = _guarded(source)
        imported = finding.values.get("imported by")
        if imported is not None and guard is None:
            return self.decline(
                finding.span,
                f"{imported} imports this file, and would compute in TF32 too: set it where the run begins",
            )
        at = finding.span.line if imported is None else guard[0].lineno  # type: ignore[index]
        edits, call = codemod.named_modules(source, at, CALL)
        try:
            if imported is not None and guard is not None:
                edits.append(blocks.put_before(source, guard[0], [call]))
            else:
                is_import = isinstance(anchor, (ast.Import, ast.ImportFrom))
                edits.append(blocks.put_behind(source, anchor, ["", call] if is_import else [call]))
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the setting cannot be put here: {error}")
        return self.edit(finding, "TF32 for float32 products", edits)


def _settled(sources: tuple[Source, ...]) -> str | None:
    """Where the files say how float32 products are to be computed."""
    for source in sources:
        for node in ast.walk(source.tree):
            named = isinstance(node, ast.Attribute) and node.attr in ("set_float32_matmul_precision", *SETTINGS)
            told = isinstance(node, ast.Constant) and node.value in VARIABLES
            by_name = isinstance(node, ast.Name) and (source.qualified(node) or "").endswith(
                ".set_float32_matmul_precision"
            )
            if named or told or by_name:
                line = getattr(node, "lineno", 1)
                return f"the files set the precision of products themselves ({source.path}:{line})"
    return None


def _anchor(source: Source, first: Span) -> ast.stmt:
    """The top-level statement to put the setting behind: one that seeds torch, else the last import before the work."""
    last = first.line if first.path == source.path else source.tree.body[-1].lineno + 1
    before = [s for s in source.tree.body if s.lineno < last]
    seeds = (s for s in before if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call))
    seed = next((s for s in seeds if source.qualified(s.value.func) == "torch.manual_seed"), None)  # type: ignore[attr-defined]
    imports = [s for s in before if isinstance(s, (ast.Import, ast.ImportFrom))]
    return seed or (imports[-1] if imports else source.tree.body[0])


def _importers(sources: tuple[Source, ...], script: Source) -> tuple[str, ...]:
    """The other files that import a script by its name."""
    stem = script.path.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    found = []
    for source in sources:
        nodes = [n for n in ast.walk(source.tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        names = {a.name for n in nodes for a in n.names} | {
            n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)
        }
        if source.path != script.path and any(name.rpartition(".")[2] == stem for name in names):
            found.append(source.path)
    return tuple(found)


def _guarded(source: Source) -> list[ast.stmt] | None:
    """The statements under `if __name__ == "__main__":`."""
    for statement in source.tree.body:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare):
            sides = {ast.unparse(side) for side in (statement.test.left, *statement.test.comparators)}
            if sides == {"__name__", "'__main__'"}:
                return statement.body
    return None
