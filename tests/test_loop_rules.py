"""Rules about Python loops over tensors, parameters, gradients and experts, on recordings of whole scripts."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from recorded_loops import briefly

from advisor import codemod, match, registry, testing
from advisor import patch as patching
from advisor.correlate import correlate
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import read_trace
from advisor.ingest.probe import read_probe
from advisor.model import Decline, Environment, Finding, Hardware, Profile, Rewrite, Span
from advisor.patterns.clipping import ClipPlace
from advisor.rule import Context, step
from advisor.source import Source

torch = pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

# The cases of the PyTorch profiler's ForLoopIndexingPattern, and a recurrence.
INDEXING = """\
import torch
from torch import nn


def numbers(x):
    for i in range(100):
        x[i] = i  # store


def added(x):
    y = 0
    for i in range(100):
        y += x[i]  # sum
    return y


def multiplied(x):
    y = 1
    for i in range(100):
        y *= x[i]  # product
    return y


def products(x):
    y = x
    for _ in range(100):
        y = y @ x
    return y


def ranges(x):
    for i in range(100):
        x[i] = torch.arange(100) + i  # made


def recurrent(x):
    h = x[0]
    for i in range(1, 40):
        h = torch.tanh(h * 0.5 + x[i])  # recurrence
    return h


def mapped(x):
    return torch.stack([torch.exp(x[i]) for i in range(20)])  # map


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 4)
        self.tables = nn.Parameter(torch.randn(12, 4, 4))

    def forward(self, x):
        y = self.layer(x)
        total = y[0]
        for row in range(1, 30):
            total = total + y[row]  # captured by Dynamo
        for level in range(12):
            total = total @ self.tables[level]  # weights
        return total


model = Rows()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(5):
    x = torch.ones(100, 100)
    numbers(x)
    added(x)
    multiplied(x)
    products(x)
    ranges(x)
    recurrent(x)
    mapped(x)
    model(torch.randn(30, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

UPDATES = """\
import copy
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
ema = copy.deepcopy(model)
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
trained = [p for p in model.parameters()]
file = open("losses.txt", "w")
for step in range(STEPS):
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    SCALED
    # clip
    total_norm = 0
    for p in model.parameters():
        if p.grad is None:
            continue
        grad_norm = p.grad.detach().norm(2)
        total_norm += grad_norm.item() ** 2
    total_norm = total_norm ** (1 / 2)
    clip_coef = 1e-3 / (total_norm + 1e-6)
    if clip_coef < 1:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach().mul_(clip_coef)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.mul_(0.9).add_(p.data, alpha=0.1)  # average
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + (1 - 0.9) * p  # shadow
        for q in trained:
            q.mul_(1 - 1e-4)
    print(repr(loss.item()), repr(float(total_norm)), file=file, flush=True)
"""

LIBRARY_CLIP = """\
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(5):
    loss = model(torch.randn(16, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1.0, foreach=False, norm_type=2.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

EXPERTS = """\
import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, width=16, experts=6):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        x = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out


model = Mixture()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.randn(4, 8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

MIXTRAL = """\
import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32,
)
config._experts_implementation = "eager"
model = MixtralForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    tokens = torch.randint(0, 64, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass
class Seen:
    """One recorded script and what a rule says of it."""

    folder: Path
    ctx: Context

    def source(self) -> Source:
        return self.ctx.read("train.py")

    def line(self, text: str) -> int:
        return next(n for n, line in enumerate(self.source().lines, start=1) if text in line)

    def ask(self, rule: str) -> tuple[dict[int, Finding], dict[int, str]]:
        """Findings and reasons of declines by line."""
        results = list(RULES[rule].match(self.ctx))
        findings = {r.span.line: r for r in results if isinstance(r, Finding)}
        declines = {r.span.line: r.reason for r in results if isinstance(r, Decline) and r.span is not None}
        assert len(findings) + len(declines) == len(results)
        return findings, declines

    def patched(self, finding: Finding) -> str:
        rewrite = RULES[finding.rule].rewrite(finding, self.source())
        assert isinstance(rewrite, Rewrite), rewrite
        return patching.build([rewrite], lambda _: self.source()).sources["train.py"]


def record(text: str, folder: Path, device: str = "cuda") -> Seen:
    """Run a script through a brief capture; its operators' times count as those of a device of this kind."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    out = briefly(folder)
    graphs, _ = read_graphs(out / "graph.json", folder)
    profile = Profile(
        environment=Environment(python="3", torch="2", cpu_count=2),
        hardware=Hardware(name="a device", kind=device),
        steps=(),
        step_us=read_probe(out / "probe.json", folder).step_us,
        graphs=graphs,
        costs=correlate(read_trace(out / "trace.json.gz"), read_trace(out / "annotated.json.gz"), graphs).costs,
    )
    return Seen(folder, match.context(profile, lambda path: Source.read(folder, path), worth=0.0))


# ------------------------------------------------------------------------------------------------------------- indexing


@pytest.fixture(scope="module")
def indexing(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return record(INDEXING, tmp_path_factory.mktemp("indexing"), device="cpu")


def test_each_loop_over_elements_is_found_once(indexing: Seen) -> None:
    findings, declines = indexing.ask("python-loop-index")
    expected = {
        "# store": "writes the elements",
        "# sum": "`sum` does it",
        "# product": "`prod` does it",
        "# made": "writes the elements",
        "# map": "treats the elements",
        "# captured by Dynamo": "`sum` does it",
    }
    assert {indexing.line(mark) for mark in expected} == set(findings)
    for mark, words in expected.items():
        assert words in findings[indexing.line(mark)].message
    assert "recurrence" not in declines
    assert declines[indexing.line("# recurrence")].startswith("every turn needs what the turn before computed")
    assert indexing.line("# weights") in declines
    assert len(declines) == 2, "products without an index are no loop over elements"


def test_a_loop_cites_the_time_of_its_operations(indexing: Seen) -> None:
    findings, _ = indexing.ask("python-loop-index")
    for finding in findings.values():
        by = {evidence.what: evidence.value for evidence in finding.evidence}
        assert finding.estimate.high_us > 0
        assert finding.estimate.high_us == pytest.approx(float(by["time of the loop's operations per step"]), abs=0.1)
    added = {e.what: e.value for e in findings[indexing.line("# sum")].evidence}
    assert added["elements taken or written one by one per step"] == 100
    assert float(added["operations the loop makes per step"]) == 200


def test_a_sum_of_rows_is_suggested_as_one_operation(indexing: Seen) -> None:
    findings, _ = indexing.ask("python-loop-index")
    assert "    y = 0\n    y += x[:100].sum(0)  # sum\n    return y\n" in indexing.patched(
        findings[indexing.line("# sum")]
    )
    assert "    y *= x[:100].prod(0)  # product\n" in indexing.patched(findings[indexing.line("# product")])
    rule = RULES["python-loop-index"]
    for mark in ("# store", "# made", "# map", "# captured by Dynamo"):  # the last does not start from 0
        assert isinstance(rule.rewrite(findings[indexing.line(mark)], indexing.source()), Decline)


# -------------------------------------------------------------------------------------------------------------- updates


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    text = UPDATES.replace("STEPS", "100").replace("SCALED", "pass")
    return record(text, tmp_path_factory.mktemp("updates"))


def losses(folder: Path, text: str) -> list[list[float]]:
    folder.mkdir()
    (folder / "train.py").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, env={"OMP_NUM_THREADS": "1", "PATH": ""})
    return [
        [float(v) for v in line.split()] for line in (folder / "losses.txt").read_text(encoding="utf-8").splitlines()
    ]


def test_clipping_by_hand_becomes_one_call(updates: Seen, tmp_path: Path) -> None:
    findings, declines = updates.ask("clip-grad-slow")
    assert not declines
    (finding,) = findings.values()
    assert finding.values == {}
    assert "makes every gradient NaN where one is" in finding.message
    by = {evidence.what: evidence.value for evidence in finding.evidence}
    assert by["waits of the host for a norm per step"] == 60
    assert float(by["launches per step"]) >= 180
    text = updates.patched(finding)
    assert (
        "    # clip\n    total_norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item()\n    optimizer.step()\n"
        in text
    )
    before, after = (
        losses(tmp_path / name, re.sub(r"range\(100\):\n    loss", "range(12):\n    loss", content))
        for name, content in (("before", updates.source().text), ("after", text))
    )
    assert len(before) == 12
    for left, right in zip(before, after, strict=True):
        assert left == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("+ 1e-6)", "+ 1e-8)", "the factor adds 1e-08 to the norm where torch adds 1e-6"),
        ("norm(2)", "norm(1)", "is not the square of a gradient's 2-norm"),
        ("norm(2)", "norm()", None),
        ("(1 / 2)", "(1 / 3)", "the norm is not the square root of the sum of squares"),
        ("    total_norm = total_norm ** (1 / 2)", "    total_norm **= 0.5", None),
        ("clip_coef < 1:", "clip_coef < 2:", "the gradients are scaled if `clip_coef < 2`"),
        ("total_norm = 0\n", "total_norm = 1\n", "the sum of squares does not start from 0"),
        ("grad is None:", "grad is None or p.ndim < 2:", "the loop over the norms does more than add them up"),
        ("for p in model.parameters():\n            if", "for p in trained:\n            if", "same parameters"),
        ("mul_(clip_coef)\n", "mul_(clip_coef * 2)\n", "something else than scale"),
        ("print(", "print(clip_coef, ", "`clip_coef` is read elsewhere"),
        ("print(", "print(p.shape, ", "`p` is read elsewhere"),
        ("1e-3 /", "total_norm * 0.1 /", "computed from the norm"),
    ],
)
def test_only_torchs_own_formula_is_rewritten(updates: Seen, old: str, new: str, reason: str | None) -> None:
    """The recording stays, the source is another: what is read off it decides."""
    text = updates.source().text
    assert old in text
    other = replace(updates.ctx, read=lambda path: Source(path, text.replace(old, new)))
    results = list(RULES["clip-grad-slow"].match(other))
    (finding,) = results
    assert isinstance(finding, Finding)
    if reason is None:
        assert finding.values == {}
    else:
        assert reason in finding.values["not applied"]
        declined = RULES["clip-grad-slow"].rewrite(finding, other.read("train.py"))
        assert isinstance(declined, Decline)


def test_gradients_in_half_precision_are_only_shown(updates: Seen) -> None:
    graphs = [
        replace(g, nodes=tuple(replace(n, dtype="bfloat16" if n.dtype == "float32" else n.dtype) for n in g.nodes))
        for g in updates.ctx.profile.graphs
    ]
    ctx = replace(updates.ctx, profile=replace(updates.ctx.profile, graphs=tuple(graphs)))
    (finding,) = RULES["clip-grad-slow"].match(ctx)
    assert isinstance(finding, Finding)
    assert finding.values["not applied"] == "the gradients are bfloat16: the norm would be rounded to that"


def test_averages_of_parameters_are_found_line_by_line(updates: Seen) -> None:
    findings, declines = updates.ask("ema-loop")
    assert not declines, "decay of the weights themselves is no average"
    assert set(findings) == {updates.line("# average"), updates.line("# shadow")}
    first = findings[updates.line("# average")]
    by = {evidence.what: evidence.value for evidence in first.evidence}
    assert by["decay"] == 0.9
    assert by["launches per step"] == 120
    assert (
        "        torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)(list(ema.parameters()), list(model.parameters()), 0)"
        in updates.patched(first)
    )
    other = findings[updates.line("# shadow")]
    assert "AveragedModel" in str(RULES["ema-loop"].rewrite(other, updates.source()))


def test_foreach_off_is_taken_out_and_unscale_stays(tmp_path: Path) -> None:
    seen = record(LIBRARY_CLIP, tmp_path)
    findings, _ = seen.ask("clip-grad-slow")
    (finding,) = findings.values()
    assert finding.span.line == seen.line("clip_grad_norm_(model")
    assert seen.patched(finding) == LIBRARY_CLIP.replace(", foreach=False", "")
    on_cpu = replace(seen.ctx, profile=replace(seen.ctx.profile, hardware=Hardware(name="CPU", kind="cpu")))
    (declined,) = RULES["clip-grad-slow"].match(on_cpu)
    assert isinstance(declined, Decline)
    assert declined.reason == "on a CPU there are no launches that foreach could save"
    plain = replace(seen.ctx, read=lambda path: Source(path, LIBRARY_CLIP.replace(", foreach=False", "")))
    (declined,) = RULES["clip-grad-slow"].match(plain)
    assert isinstance(declined, Decline)
    assert declined.reason == "torch clips tensor by tensor on this device or for these tensors"


# -------------------------------------------------------------------------------------------------------------- experts


def test_a_loop_over_experts_that_dynamo_cannot_capture(tmp_path: Path) -> None:
    seen = record(EXPERTS, tmp_path)
    findings, declines = seen.ask("expert-loop")
    assert not declines
    (finding,) = findings.values()
    assert finding.span.line == seen.line("out.index_add_")
    by = {evidence.what: evidence.value for evidence in finding.evidence}
    assert by["experts"] == 6
    assert float(by["launches per step"]) > 100
    assert "torch._grouped_mm" in str(RULES["expert-loop"].rewrite(finding, seen.source()))
    assert seen.ask("python-loop-index") == ({}, {})


def test_experts_of_a_library_are_shown_at_the_users_call(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    seen = record(MIXTRAL, tmp_path)
    findings, declines = seen.ask("expert-loop")
    assert not declines
    (finding,) = findings.values()
    assert finding.span.line == seen.line("model(input_ids=tokens")
    assert finding.library is not None
    assert finding.library.startswith("transformers/models/mixtral/modeling_mixtral.py:")
    by = {evidence.what: evidence.value for evidence in finding.evidence}
    assert (by["experts"], by["layers with this code"]) == (4, 2)
    assert "experts_implementation" in RULES["expert-loop"].in_library


# ------------------------------------------------------------------------------------------- what another form would do

CLIPPED = """\
import math
import torch
from math import sqrt
from torch import nn


def clip(model, limit):
    total = 0.0
    for p in model.parameters():
        total += p.grad.norm(2) ** 2
    total = total ** 0.5
    coef = limit / (total + 1e-6)
    # scale
    coef = torch.clamp(coef, max=1.0)
    for p in model.parameters():
        p.grad.mul_(coef)
"""
BELOW = "    if coef < 1:\n        for p in model.parameters():\n            p.grad.mul_"
SQUARE, ROOT = "total += p.grad.norm(2) ** 2", "total = total ** 0.5"


def clipped(text: str) -> str:
    """What becomes of the text, or why it is left as it is."""
    source = Source("train.py", text)
    mark = "+= " if "+= " in text else "clip_grad_norm_"
    line = next(n for n, line in enumerate(source.lines, start=1) if mark in line)
    read = ClipPlace.read(source, Span(path="train.py", line=line, column=0))
    assert isinstance(read, ClipPlace)
    return read.inexact or codemod.apply(source, read.edits(source))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("p.grad.norm(2)", "torch.linalg.norm(p.grad, 2)", "is not the square of a gradient's 2-norm"),
        ("p.grad.norm(2)", "torch.linalg.norm(p.grad)", "    nn.utils.clip_grad_norm_(model.parameters(), limit)\n"),
        (SQUARE, f"_ = seen.append(p.grad)\n        {SQUARE}", "does more than add them up"),
        (SQUARE, f"g = p.grad.mul_(0.5)\n        {SQUARE}", "does more than add them up"),
        (SQUARE, "g = p.grad.norm(2)\n        total += g ** 2", "clip_grad_norm_(model.parameters(), limit)\n"),
        ("model.parameters()", "model.w, model.b", "clip_grad_norm_((model.w, model.b), limit)"),
        ("model.parameters()", "*model.a, *model.b", "clip_grad_norm_((*model.a, *model.b), limit)"),
        ("mul_(coef)\n", "mul_(coef)\n    del coef, p\n", "`coef` is read elsewhere"),
        ("mul_(coef)\n", "mul_(coef)\n    coef *= 2\n", "`coef` is read elsewhere"),
        ("    total = 0.0", "    a = 1; total = 0.0", "shares its line"),
        ("    ", "\t", "\n\t# scale\n\tnn.utils.clip_grad_norm_(model.parameters(), limit)\n"),
    ],
)
def test_clipping_in_other_words(old: str, new: str, told: str) -> None:
    assert told in clipped(CLIPPED.replace(old, new))


@pytest.mark.parametrize(
    ("new", "leaves"),
    [
        ("coef = torch.clamp(coef, max=1.0)", False),
        ("coef = min(coef, 1.0)", False),
        ("coef = min(1.0, coef)", True),
    ],
)
def test_the_forms_that_a_nan_leaves_unscaled(new: str, leaves: bool) -> None:
    assert math.isnan(min(math.nan, 1.0))
    assert min(1.0, math.nan) == 1.0
    for text, wanted in (
        (CLIPPED.replace("coef = torch.clamp(coef, max=1.0)", new), leaves),
        (CLIPPED.replace("    for p in model.parameters():\n        p.grad.mul_", BELOW), True),
    ):
        line = next(n for n, line in enumerate(text.splitlines(), start=1) if "+= " in line)
        read = ClipPlace.read(Source("train.py", text), Span(path="train.py", line=line, column=0))
        assert isinstance(read, ClipPlace)
        assert read.form is not None, read
        assert read.form.leaves_nan == wanted


@pytest.mark.parametrize("root", ["math.sqrt(total)", "sqrt(total)"])
def test_a_norm_that_was_a_number_stays_one(root: str) -> None:
    text = CLIPPED.replace(ROOT, f"total = {root}").replace("torch.clamp(coef, max=1.0)", "min(coef, 1.0)")
    assert "total = nn.utils.clip_grad_norm_(model.parameters(), limit).item()" in clipped(f"{text}    return total\n")
    tensor = CLIPPED.replace(ROOT, "total = torch.sqrt(total)")
    assert "total = nn.utils.clip_grad_norm_(model.parameters(), limit)\n" in clipped(f"{tensor}    return total\n")


@pytest.mark.parametrize(
    ("given", "once"),
    [
        ("model.parameters()", True),
        ("filter(None, model.parameters())", True),
        ("(p for p in model.parameters())", True),
        ("list(model.parameters())", False),
        ("model.trained", False),
    ],
)
def test_parameters_that_only_the_first_loop_sees(given: str, once: bool) -> None:
    """A generator given to a function, assigned in it or in the module: the second loop scales nothing."""
    inside = CLIPPED.replace("model.parameters()", "params")
    for text in (
        inside.replace("model, limit", "params, limit") + f"\n\nclip({given}, 1.0)\n",
        inside.replace("    total = 0.0", f"    params = {given}\n    total = 0.0"),
        inside.replace("def clip", f"params = {given}\n\n\ndef clip"),
    ):
        assert ("can be run over only once" in clipped(text)) == once, text
    kept = inside.replace("    total = 0.0", "    params = list(params)\n    total = 0.0")
    assert "run over" not in clipped(kept.replace("model, limit", "params, limit") + f"\n\nclip({given}, 1.0)\n")


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        ("foreach=False, parameters=p, max_norm=1.0", "parameters=p, max_norm=1.0"),
        ("p, (1.0), foreach=False", "p, (1.0)"),
        ("p, max_norm=(a + b), foreach=False, norm_type=2.0", "p, max_norm=(a + b), norm_type=2.0"),
        ("p, *rest, foreach=False, **more", "p, *rest, **more"),
        ("\n    p,\n    (a\n     + b),  # bound\n    foreach=False,\n", "\n    p,\n    (a\n     + b),  # bound\n"),
    ],
)
def test_only_the_option_is_cut_out_of_the_call(arguments: str, after: str) -> None:
    assert clipped(f"torch.nn.utils.clip_grad_norm_({arguments})\n") == f"torch.nn.utils.clip_grad_norm_({after})\n"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("stride", None, "a gradient is sparse"),
        ("requires_grad", True, "the gradients are differentiated again"),
    ],
)
def test_gradients_that_torch_clips_in_another_way(updates: Seen, field: str, value: object, reason: str) -> None:
    graphs = [
        replace(g, nodes=tuple(replace(n, **{field: value}) for n in g.nodes))  # type: ignore[arg-type]
        for g in updates.ctx.profile.graphs
    ]
    ctx = replace(updates.ctx, profile=replace(updates.ctx.profile, graphs=tuple(graphs)))
    (finding,) = RULES["clip-grad-slow"].match(ctx)
    assert isinstance(finding, Finding)
    assert reason in finding.values["not applied"]


TIED = """\
import torch
from torch import nn


class Once:
    def __init__(self, model):
        self.model, self.turn = model, 0

    def __iter__(self):
        self.turn += 1
        return iter(list(self.model.parameters()) if self.turn % 2 else [])


model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
trained = GIVEN
for step in range(5):
    model(torch.randn(4, 8)).square().mean().backward()
    for p in model.parameters():
        p.grad.div_(2)
    total = 0.0
    for p in trained:
        total += p.grad.norm(2) ** 2
    total = total**0.5
    coef = 1e-3 / (total + 1e-6)
    coef = torch.clamp(coef, max=1.0)
    for p in trained:
        p.grad.mul_(coef)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("list(model.parameters()) + [model[0].weight]", "a gradient is clipped more than once"),
        ("Once(model)", "no gradient was scaled"),
    ],
)
def test_gradients_that_a_loop_scales_twice_or_never(name: str, reason: str, tmp_path: Path) -> None:
    seen = record(TIED.replace("GIVEN", name), tmp_path)
    (found,) = RULES["clip-grad-slow"].match(seen.ctx)
    assert isinstance(found, Finding)
    assert reason in found.values["not applied"]


AVERAGE = "for e, p in zip(ema.parameters(), model.parameters()):\n            e.mul_(0.9).add_(p.data, alpha=0.1)"
SWAPPED = "for p, e in zip(model.parameters(), ema.parameters()):\n            "


@pytest.mark.parametrize(
    ("loop", "after"),
    [
        (SWAPPED + "e.mul_(0.9).add_(p.data, alpha=1 - 0.9)", "(0.9)(list(ema.parameters()), list(model.parameters())"),
        (SWAPPED + "e.mul_(1 - mix).add_(p, alpha=mix)", "(1 - mix)(list(ema.parameters()), list(model.parameters())"),
        (SWAPPED + "e.lerp_(p, mix)", "(1 - mix)(list(ema.parameters())"),
        (SWAPPED + "e.mul_(decay).add_(p, alpha=mix)", None),
        (SWAPPED + "e.mul_(rate(p)).add_(p, alpha=1 - rate(p))", None),
        (SWAPPED + "e.lerp_(p, rate(e))", None),
        (SWAPPED.replace("model.parameters(), ema", "trained, ema") + "e.lerp_(p, mix)", "list(trained)"),
    ],
)
def test_only_one_decay_for_all_tensors_is_read_off(updates: Seen, loop: str, after: str | None) -> None:
    """The recording stays, the source is another."""
    findings, _ = updates.ask("ema-loop")
    finding = findings[updates.line("# average")]
    assert AVERAGE in updates.source().text
    text = updates.source().text.replace(AVERAGE, loop)
    rewrite = RULES["ema-loop"].rewrite(finding, Source("train.py", text))
    assert isinstance(rewrite, Rewrite) == (after is not None)
    assert after is None or after in rewrite.edits[-1][1]  # type: ignore[union-attr]
    behind = text.replace("    print(repr(loss", "    print(e)\n    print(repr(loss")
    assert isinstance(RULES["ema-loop"].rewrite(finding, Source("train.py", behind)), Decline), "`e` is read after it"


def test_an_average_in_another_dtype_or_of_arguments_is_only_shown(updates: Seen) -> None:
    findings, _ = updates.ask("ema-loop")
    finding = findings[updates.line("# average")]
    loop = AVERAGE.replace("ema.parameters(), model.parameters()", "old, new").replace("        ", "    ")
    function = f"def update(old, new):\n    {loop}\n"
    shown = replace(finding, span=replace(finding.span, line=3))
    assert isinstance(RULES["ema-loop"].rewrite(shown, Source("train.py", function)), Decline)
    half = [
        replace(
            g, nodes=tuple(replace(n, dtype="bfloat16") if n.facts.get("kind") == "parameter" else n for n in g.nodes)
        )
        for g in updates.ctx.profile.graphs
    ]
    ctx = replace(updates.ctx, profile=replace(updates.ctx.profile, graphs=tuple(half)))
    told = [f.values.get("not applied") for f in RULES["ema-loop"].match(ctx) if isinstance(f, Finding)]
    assert any(t is not None and "another dtype" in t for t in told)


# ------------------------------------------------------------------------------------------------------- small modules

SMALL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.rand(5, 8, 8) / 8)
        self.list = nn.ParameterList(torch.rand(8, 8) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.mix = nn.Parameter(torch.rand(12))

    def forward(self, x):
        gate = x.flatten(1)[:, :4].softmax(0)
        out = torch.zeros_like(x)
{body}


def get_init_inputs():
    return []


def get_inputs():
    return [torch.rand({shape}, requires_grad=True)]
"""


def small(rule: str, body: str, folder: Path, shape: str = "12, 8") -> tuple[Finding | Decline, Rewrite | Decline, str]:
    text = SMALL.replace("{body}", "".join(f"        {line}\n" for line in body.split("\n"))).replace("{shape}", shape)
    ctx, source = testing.context_of(RULES[rule], text, step(10_000, nodes=0.9), folder)
    (found,) = RULES[rule].match(ctx)
    if isinstance(found, Decline):
        return found, found, text
    rewrite = RULES[rule].rewrite(found, source)
    if isinstance(rewrite, Rewrite):
        after = patching.build([rewrite], lambda _: source).sources["example.py"]
        testing.check_same_function(text, after, 64.0, body)
        return found, rewrite, after
    return found, rewrite, text


TURN = "for e in range(4):\n    rows = gate[:, e].topk(3).indices\n    "
PUT = "out = out.index_add(0, rows, x[rows] @ self.up[e])"
EXPERT_LOOPS = {
    "plain": (f"{TURN}{PUT}\nreturn out", "12, 8", True),
    "inside a loop": (
        f"for _ in range(2):\n    {TURN}{PUT}\nreturn out".replace("\n    r", "\n        r").replace(
            "\n    out", "\n        out"
        ),
        "12, 8",
        True,
    ),
    "weights in a list": (f"{TURN}{PUT}\nreturn out".replace("self.up", "self.list"), "12, 8", False),
    "weights in a dictionary": (
        f"up = {{i: self.up[i] for i in range(4)}}\n{TURN}{PUT}\nreturn out".replace("self.up[e]", "up[e]"),
        "12, 8",
        False,
    ),
    "three axes": (f"{TURN}{PUT}\nreturn out", "12, 4, 8", False),
    "rows read after it": (f"{TURN}{PUT}\nreturn out + out[rows].sum()", "12, 8", False),
    "the number read after it": (f"{TURN}{PUT}\nreturn out * e", "12, 8", False),
    "a second name": (f"{TURN}{PUT}\nreturn out + idx.sum()".replace("rows = ", "rows = idx = "), "12, 8", False),
    "rows of the turn before": (
        f"rows = torch.arange(3)\nfor e in range(4):\n    rows = (rows + e) % 12\n    {PUT}\nreturn out",
        "12, 8",
        False,
    ),
}


@pytest.mark.parametrize("name", EXPERT_LOOPS)
def test_experts_are_batched_only_where_no_turn_needs_another(name: str, tmp_path: Path) -> None:
    body, shape, fits = EXPERT_LOOPS[name]
    found, rewrite, _ = small("expert-loop", body, tmp_path, shape)
    assert isinstance(found, Finding)
    assert isinstance(rewrite, Rewrite) == fits, rewrite


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Expert(width) for", "Expert(width, number) for"),
        ("Expert(width) for", "Expert(width, act=F.silu if number % 2 else torch.tanh) for"),
    ],
)
def test_experts_that_differ_are_no_finding(old: str, new: str, tmp_path: Path) -> None:
    text = EXPERTS.replace("self, width):", "self, width, number=1, act=F.silu):").replace(
        "2 * width", "(1 + number) * width"
    )
    text = text.replace(
        "super().__init__()\n        self.up", "super().__init__()\n        self.act = act\n        self.up"
    )
    text = text.replace("F.silu(self.up(x))", "self.act(self.up(x))").replace(
        "for _ in range(experts)", "for number in range(experts)"
    )
    seen = record(text.replace(old, new), tmp_path)
    findings, declines = seen.ask("expert-loop")
    assert not findings
    assert [reason.split(" in the")[0] for reason in declines.values()] == ["its experts differ"]


SUM = "y = 0.0\nfor i in range(12):\n    y = y + x[i]\nreturn y"
INDEX_LOOPS = {
    "plain": (SUM, True),
    "a size": (SUM.replace("12", "x.size(0)"), True),
    "a difference": (SUM.replace("range(12)", "range(len(x) - 0)"), None),
    "integers": (SUM.replace("y = 0.0", "x = (x * 9).to(torch.uint8)\ny = 0"), None),
    "made for it": ("y = torch.zeros(8)\nfor i in range(12):\n    y += x[i]\nreturn y", True),
    "a view of the rows": ("z = x * 1\ny = z[0]\nfor i in range(12):\n    y += z[i]\nreturn y + z[0]", None),
    "partial sums": (f"c = []\n{SUM}".replace("x[i]\nreturn y", "x[i]\n    c.append(y)\nreturn torch.stack(c)"), None),
    "heads": ("return torch.stack([h(x[i]) for i, h in enumerate(self.heads)])", False),
    "weights of heads": (
        "y, w = 0.0, self.mix.softmax(0)\nfor i, h in enumerate(self.heads):\n    y = y + w[i] * h(x)\nreturn y",
        False,
    ),
    "one head": ("return torch.stack([self.heads[0](x[i]) for i in range(12)])", None),
}


@pytest.mark.parametrize("name", INDEX_LOOPS)
def test_a_loop_over_rows_is_what_it_is(name: str, tmp_path: Path) -> None:
    """True: rewritten; None: shown; False: no finding, because every turn has its own weights."""
    body, fits = INDEX_LOOPS[name]
    found, rewrite, _ = small("python-loop-index", body, tmp_path)
    assert isinstance(found, Finding) == (fits is not False), found
    assert isinstance(rewrite, Rewrite) == bool(fits), rewrite
    assert fits is not False or (isinstance(found, Decline) and found.reason == "every turn has weights of its own")
    assert name != "partial sums" or "`cumsum`" in getattr(found, "message", "")


def test_rows_written_from_the_rows_before_are_a_recurrence(tmp_path: Path) -> None:
    body = "z = x * 1\nfor i in range(1, 12):\n    z[i] = z[i - 1] + x[i]\nreturn z"
    text = SMALL.replace("{body}", "".join(f"        {line}\n" for line in body.split("\n"))).replace(
        "{shape}", "12, 8"
    )
    ctx, _ = testing.context_of(RULES["python-loop-index"], text, step(10_000, nodes=0.9), tmp_path)
    found = list(RULES["python-loop-index"].match(ctx))
    assert len(found) == 3
    assert all(isinstance(f, Decline) and f.reason.startswith("every turn needs") for f in found), found
