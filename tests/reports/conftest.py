"""A full example report and ways to vary it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import ARGUMENTS, CHROMIUM, Visit, visit_page

from advisor.model import (
    Baseline,
    Difference,
    Environment,
    Evidence,
    Hardware,
    Metric,
    Numerics,
    Outcome,
    Region,
    Report,
    ReportedFinding,
    Span,
    Timing,
    Trial,
    Utilisation,
)

ATTENTION_DIFF = """\
--- a/samples/nano_gpt/model.py
+++ b/samples/nano_gpt/model.py
@@ -38,10 +38,7 @@ class Attention(nn.Module):
         q, k, v = self.qkv(x).split(self.width, dim=2)
         q = q.view(b, t, self.heads, -1).transpose(1, 2)
         k = k.view(b, t, self.heads, -1).transpose(1, 2)
         v = v.view(b, t, self.heads, -1).transpose(1, 2)
-        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
-        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
-        weights = F.softmax(scores, dim=-1)
-        y = weights @ v
+        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
         y = y.transpose(1, 2).contiguous().view(b, t, c)
         return self.out(y)
"""

OPTIMIZER_DIFF = """\
--- a/samples/nano_gpt/train.py
+++ b/samples/nano_gpt/train.py
@@ -61,3 +61,3 @@ def main() -> None:
     model = GPT(config).cuda()
-    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
+    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
     batches = iter(loader)
"""

PADDING_DIFF = """\
--- a/samples/nano_gpt/model.py
+++ b/samples/nano_gpt/model.py
@@ -12,2 +12,2 @@ class Config:
-    vocabulary: int = 50257
+    vocabulary: int = 50304
     width: int = 2048
"""


def finding(rule: str, path: str | None, line: int | None, status: str, title: str, **more: Any) -> ReportedFinding:
    """A finding with everything optional absent."""
    given: dict[str, Any] = {"end_line": line, "reason": None, "estimate_us": None, "saved_us": None, "safety": None}
    return ReportedFinding(rule=rule, path=path, line=line, status=status, title=title, **(given | more))


def timing(speedup: float, base_us: float, *, spread: float = 0.01, quads: int = 12) -> Timing:
    """Blocks A B B A around two step times, with a small deterministic wobble."""
    wobble = [1 + 0.004 * math.sin(2.3 * i) for i in range(2 * quads)]
    return Timing(
        speedup=speedup,
        interval=(speedup * (1 - spread), speedup * (1 + spread)),
        confidence=0.95,
        quads=quads,
        noise=0.0041,
        base_step_us=tuple(base_us * each for each in wobble),
        step_us=tuple(base_us / speedup * each for each in reversed(wobble)),
        base_peak_bytes=65_700_000_000,
        peak_bytes=41_200_000_000,
        warmup_s=(9.4, 12.1),
        notes=("clocks held between 1,965 and 1,980 MHz in both arms",),
    )


def numerics() -> Numerics:
    """A proof that holds, with a worst gradient near its limit."""
    names = ("loss", "gradient of blocks.3.attention.qkv.weight", "gradient of head.weight", "blocks.0.norm.weight")
    errors = ((2.1e-6, 2.0e-6), (1.8e-3, 1.9e-3), (9.1e-4, 8.8e-4), (3.1e-5, 3.0e-5))
    return Numerics(
        ok=True,
        reference="float32",
        compared=297,
        worst=tuple(
            Difference(name=name, base_error=base, error=found, limit=1.5 * base + 6e-7, ok=True, max_ulp=ulp)
            for name, (base, found), ulp in zip(names, errors, (None, 14.0, 9.0, 2.0), strict=True)
        ),
        base_losses=tuple(10.83 - 0.21 * i + 0.05 * math.sin(i) for i in range(20)),
        losses=tuple(10.83 - 0.21 * i + 0.05 * math.sin(i) + 0.002 * math.cos(3 * i) for i in range(20)),
        notes=("dropout is off in the script: nothing random differs",),
    )


def utilisation(mfu: float, busy: float) -> Utilisation:
    """A consistent ladder on a 989.4 TFLOP/s device whose matmul rate was measured at 789."""
    achieved = mfu * 989.4e12
    return Utilisation(
        busy=busy,
        model_flops_per_step=7.94e13,
        achieved_flops=achieved,
        mfu=mfu,
        mfu_own_peak=mfu,
        mfu_causal=mfu * 0.93,
        hfu=mfu * 1.02,
        of_measured=achieved / 789e12,
        peak_flops=989.4e12,
        peak_source="datasheet, dense bfloat16",
        definition="matmul and attention FLOPs of the model, causal not halved, recomputation not counted",
    )


def applied() -> tuple[ReportedFinding, ...]:
    """Findings whose rewrite is part of the proven patch."""
    model, train = "samples/nano_gpt/model.py", "samples/nano_gpt/train.py"
    return (
        finding(
            "naive-attention", model, 42, "applied", "attention spells out its score matrix", end_line=45,
            estimate_us=(142_000.0, 201_000.0), saved_us=182_400.0, safety="numerics", diff=ATTENTION_DIFF,
            reason="the score matrix of 8 x 16 x 2048 x 2048 is written and read six times",
            evidence=(
                Evidence(what="measured time of the region", value=218_000.0, unit="us per step", refs=("step 12",)),
                Evidence(what="least time at the device's bandwidth", value=17_000.0, unit="us per step"),
                Evidence(what="kernels", value="masked_fill, softmax, bmm", unit="", refs=("elementwise_kernel",)),
            ),
        ),
        finding(
            "unfused-layernorm", model, 21, "applied", "layer norm is built from six operators", end_line=26,
            estimate_us=(30_000.0, 52_000.0), saved_us=46_600.0, safety="numerics",
            diff=ATTENTION_DIFF.replace("38,10 +38,7", "21,10 +21,7"),
        ),
        finding(
            "unfused-gelu", model, 63, "applied", "GELU is spelled out through tanh",
            estimate_us=(48_000.0, 80_000.0), saved_us=71_100.0, safety="numerics",
        ),
        finding(
            "optimizer-not-fused", train, 62, "applied", "AdamW updates its parameters without the fused kernel",
            estimate_us=(4_000.0, 12_000.0), saved_us=9_200.0, safety="numerics", diff=OPTIMIZER_DIFF,
        ),
    )  # fmt: skip


def not_applied() -> tuple[ReportedFinding, ...]:
    """Rejected, suggested and declined findings."""
    model, train = "samples/nano_gpt/model.py", "samples/nano_gpt/train.py"
    return (
        finding(
            "pointwise-chain", train, 66, "rejected", "compile the blocks one by one", safety="numerics",
            reason="0.97x on top of the kept rewrites (95 % interval 0.96x to 0.98x)", estimate_us=(0.0, 20_000.0),
            saved_us=-6_900.0,
        ),
        finding(
            "misaligned-dims", model, 13, "suggested", "the vocabulary of 50257 misses the fast matmul",
            safety="semantics", estimate_us=(60_000.0, 71_000.0), diff=PADDING_DIFF,
            reason="changes the shape of two parameters, so old checkpoints need padding: allow it with semantics",
            evidence=(Evidence(what="lm head, forward and backward", value=34.5, unit="ms per step"),),
        ),
        finding(
            "headroom-batch", train, 40, "suggested", "memory is left for twice the batch", safety="semantics",
            reason="changes the optimization, so it is yours to decide", estimate_us=(0.0, 12_000.0),
        ),
        finding("dataloader-bound", train, 33, "declined", "", reason="the loop waits 0.1 ms of 535.3 ms per step"),
        finding("host-sync", train, 81, "declined", "", reason="no device idle time follows the read of the loss"),
        finding("gqa-repeat", None, None, "declined", "", reason="every head has its own keys and values"),
        finding("needless-checkpoint", None, None, "declined", "", reason="no recomputation was seen"),
        finding(
            "misaligned-batch", model, 90, "declined", "", reason="cannot tell without counters", needs=("ncu", "gpm")
        ),
    )  # fmt: skip


def trials() -> tuple[Trial, ...]:
    """The search that led to the patch."""
    attention, norm, gelu = "naive-attention@model.py:42", "unfused-layernorm@model.py:21", "unfused-gelu@model.py:63"
    compiled = "pointwise-chain@train.py:66"
    wrong = dataclasses.replace(
        numerics(),
        ok=False,
        worst=(Difference(name="gradient of v", base_error=1e-3, error=math.nan, limit=1.5e-3, ok=False),),
        reasons=("the loss of step 3 is not finite",),
    )
    return (
        Trial(
            label="attention", patch=(attention,), against=(), outcome=Outcome.IMPROVED,
            numerics=numerics(), timing=timing(1.53, 526_000.0),
        ),
        Trial(
            label="+ layer norm", patch=(norm,), against=(attention,), outcome=Outcome.IMPROVED,
            numerics=numerics(), timing=timing(1.157, 343_700.0),
        ),
        Trial(
            label="+ GELU", patch=(gelu,), against=(attention, norm), outcome=Outcome.IMPROVED,
            numerics=numerics(), timing=timing(1.315, 297_100.0),
        ),
        Trial(
            label="+ compiled blocks", patch=(compiled,), against=(attention, norm, gelu), outcome=Outcome.REGRESSED,
            reasons=("the whole interval lies below 1",), numerics=numerics(), timing=timing(0.971, 226_000.0),
        ),
        Trial(
            label="attention in fp16", patch=(attention,), against=(), outcome=Outcome.WRONG,
            reasons=("the loss of step 3 is not finite",), numerics=wrong,
        ),
        Trial(
            label="whole model compiled", patch=(), against=(), outcome=Outcome.FAILED,
            reasons=("torch._dynamo.exc.InternalTorchDynamoError in the second block",),
        ),
    )  # fmt: skip


def example() -> Report:
    """The report of a run that went well on one H200."""
    environment = Environment(
        python="3.12.4", torch="2.11.0", cuda="13.0", driver="580.65", platform="Linux x86_64", gpus=("NVIDIA H200",),
        cpu="16 cores", cpu_count=16, threads=8, command=("python", "samples/nano_gpt/train.py"), commit="3f2a9c1",
        dirty=False, seed=1337, date="2026-11-29", advisor="0.1.0", variables={"OMP_NUM_THREADS": "8"},
        collectors=("kineto", "nvml"),
    )  # fmt: skip
    hardware = Hardware(
        name="NVIDIA H200", kind="cuda", arch="sm_90", sm_count=132,
        peak_flops={"bfloat16": 989.4e12, "tfloat32": 494.7e12, "float32": 66.9e12},
        measured_flops={"bfloat16": 789e12, "tfloat32": 411e12, "float32": 51e12},
        hbm_bytes=150_754_820_096, hbm_bandwidth=4.8e12, measured_bandwidth=4.3e12,
        sources={"bfloat16": "datasheet https://resources.nvidia.com/h200, dense"},
    )  # fmt: skip
    model = "samples/nano_gpt/model.py"
    regions = (
        Region(name="attention", measured_us=218_000.0, floor_us=17_000.0, bound="memory",
               span=Span(path=model, line=42, end_line=45)),
        Region(name="linear layers", measured_us=121_000.0, floor_us=94_000.0, bound="compute"),
        Region(name="GELU", measured_us=74_000.0, floor_us=4_100.0, bound="memory", span=Span(path=model, line=63)),
        Region(name="layer norm", measured_us=52_000.0, floor_us=5_800.0, bound="memory",
               span=Span(path=model, line=21)),
        Region(name="lm head", measured_us=34_500.0, floor_us=4_300.0, bound="compute", span=Span(path=model, line=88)),
        Region(name="optimizer", measured_us=12_300.0, floor_us=3_400.0, bound="memory"),
        Region(name="cross entropy", measured_us=9_100.0, floor_us=None),
    )  # fmt: skip
    before, after = utilisation(0.150, 0.998), utilisation(0.355, 0.991)
    return Report(
        schema=1, run="20261129-101500-3f2a", script="samples/nano_gpt/train.py", outcome="improved",
        reasons=("the whole interval lies above the floor of 1.01x", "gradients agree with the float32 reference"),
        speedup=2.369, interval=(2.345, 2.392), confidence=0.95, mfu_before=0.150, mfu_after=0.355,
        mfu_definition=before.definition, step_ms_before=535.3, step_ms_after=226.0,
        tokens_per_s_before=30_607.0, tokens_per_s_after=72_495.0, peak_gib_before=61.2, peak_gib_after=38.4,
        environment=environment, hardware=hardware, before=before, after=after,
        phases_us={"forward": 192_000.0, "backward": 318_000.0, "optimizer": 12_300.0, "data": 1_100.0, "copy": 800.0,
                   "idle": 11_100.0},
        regions=regions, findings=(*applied(), *not_applied()),
        baselines=(
            Baseline(label="as found", step_us=535_300.0, speedup=1.0, mfu=0.150),
            Baseline(label="as found + TF32", step_us=534_900.0, speedup=1.001, mfu=0.150),
            Baseline(label="as found + torch.compile", step_us=197_400.0 * 1.4, speedup=1.937, mfu=0.291),
            Baseline(label="the patch", step_us=226_000.0, speedup=2.369, mfu=0.355),
            Baseline(label="the patch + torch.compile", step_us=None, speedup=None, reason="ran out of memory"),
        ),
        timing=timing(2.369, 535_300.0), numerics=numerics(), trials=trials(),
        counters_before=(
            Metric(name="sm_active", value=97.6, unit="%", source="gpm"),
            Metric(name="sm_occupancy", value=58.9, unit="%", source="gpm"),
            Metric(name="tensor_active", value=17.1, unit="%", source="gpm"),
            Metric(name="power", value=512.0, unit="W", source="nvml"),
        ),
        counters_after=(
            Metric(name="sm_active", value=95.3, unit="%", source="gpm"),
            Metric(name="sm_occupancy", value=26.3, unit="%", source="gpm"),
            Metric(name="tensor_active", value=42.4, unit="%", source="gpm"),
        ),
        diff=ATTENTION_DIFF + OPTIMIZER_DIFF,
        stage_seconds={"capture": 41.2, "ingest": 2.1, "analyze": 1.4, "match": 0.8, "plan": 0.1, "verify": 512.0},
        linked_share=0.998,
        missing={"ncu": "Nsight Compute was not asked for", "dcgm": "no exporter answers on this machine"},
    )  # fmt: skip


def empty() -> Report:
    """A report in which everything that may be absent is absent."""
    return Report(
        schema=1, run="r", script="train.py", outcome="inconclusive", reasons=(), speedup=None, interval=None,
        confidence=None, mfu_before=None, mfu_after=None, mfu_definition="", step_ms_before=None, step_ms_after=None,
        tokens_per_s_before=None, tokens_per_s_after=None, peak_gib_before=None, peak_gib_after=None,
        environment=Environment(python="3.12.4", torch=None), hardware=Hardware(name="cpu", kind="cpu"),
        before=Utilisation(), after=None, phases_us={}, regions=(), findings=(), baselines=(), timing=None,
        numerics=None, trials=(), counters_before=(), counters_after=(), diff="", stage_seconds={}, linked_share=None,
        missing={},
    )  # fmt: skip


@pytest.fixture
def report() -> Report:
    """The full example."""
    return example()


@pytest.fixture
def bare() -> Report:
    """The report that knows nothing."""
    return empty()


@pytest.fixture
def poison() -> Callable[[Report, str], Report]:
    """A function that puts a text into every text field of a report, however deep."""

    def walk(value: Any, text: str) -> Any:
        if isinstance(value, Outcome):
            return value
        if isinstance(value, str):
            return text
        if isinstance(value, tuple):
            return tuple(walk(item, text) for item in value)
        if isinstance(value, dict):
            return {f"{text}{i}": walk(item, text) for i, item in enumerate(value.values())}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kept = {"status", "kind"} if not isinstance(value, Hardware) else {"kind"}
            changed = {
                field.name: walk(getattr(value, field.name), text)
                for field in dataclasses.fields(value)
                if field.name not in kept
            }
            return dataclasses.replace(value, **changed)
        return value

    def poisoned(report: Report, text: str) -> Report:
        return walk(report, text)  # type: ignore[no-any-return]

    return poisoned


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    """A function that opens the text of a page."""
    contexts = []

    def go(text: str, *, scheme: str = "light", width: int = 1280) -> Visit:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        contexts.append(
            browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        )
        return visit_page(contexts[-1], path)

    yield go
    for context in contexts:
        context.close()
