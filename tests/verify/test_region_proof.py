"""The region proof: true replacements pass in every dtype, broken ones are rejected, what is missing proves nothing."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from advisor import plan, registry, stages, testing
from advisor.config import Config
from advisor.job import Request, begin
from advisor.match import Matches
from advisor.model import (
    Estimate,
    Finding,
    Graph,
    Outcome,
    Place,
    RegionProof,
    Replacement,
    Rewrite,
    Safety,
    Span,
    Verdict,
)
from advisor.progress import Progress
from advisor.verify import regions

pytest.importorskip("torch")
import torch

from advisor.verify import proving

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.bias = nn.Parameter(torch.rand(16))
        self.register_buffer("tri", torch.tril(torch.ones(12, 12, dtype=torch.bool)), persistent=False)
        self.register_buffer("add", torch.full((12, 12), float("-inf")).triu(1), persistent=False)
        self.drop = nn.Dropout(0.25)

    def forward(self, {names}):
{body}


def get_init_inputs():
    return []


def get_inputs():
    torch.manual_seed(1)
    return [{inputs}]
"""

QKV = ", ".join(["torch.randn(2, 3, 12, 16, requires_grad=True)"] * 3)
X = "torch.randn(4, 6, 16, requires_grad=True)"
LAYER_NORM = """\
m = x.mean(-1, keepdim=True)
v = ((x - m) ** 2).mean(-1, keepdim=True)
return (x - m) / torch.sqrt(v + 1e-5) * self.weight + self.bias"""
GELU = "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))"
RMS_NORM = """\
h = x.float()
h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
return self.weight * h.to(x.dtype)"""
ATTENTION = """\
s = q @ k.transpose(-2, -1) / 4.0
return torch.softmax(s, dim=-1) @ v"""
CAUSAL = """\
s = (q @ k.transpose(-2, -1) / 4.0).masked_fill(~self.tri, float("-inf"))
return torch.softmax(s, dim=-1) @ v"""
ADDED = """\
s = q @ k.transpose(-2, -1) / 4.0 + self.add
return self.drop(torch.softmax(s.float(), dim=-1).to(q.dtype)) @ v"""
PADDED = """\
s = (q @ k.transpose(-2, -1) / 4.0).masked_fill(~keep, {fill})
return torch.softmax(s, dim=-1) @ v"""
KEEP = "(torch.arange(12) < torch.tensor([[9], [12]]))[:, None, None, :]"
LOSS = """\
p = torch.log_softmax(x, dim=-1)
return -p.gather(-1, labels[:, None]).mean()"""
LABELS = "torch.randn(10, 7, requires_grad=True), torch.randint(0, 7, (10,))"


def captured(body: str, folder: Path, names: str = "x", inputs: str = X) -> Graph:
    """The graph of a body, recorded by the product's own capture."""
    text = HEAD.replace("{names}", names).replace("{inputs}", inputs)
    (folder / testing.FILE).write_text(text.replace("{body}", textwrap.indent(body, " " * 8)), encoding="utf-8")
    return testing.capture(folder)[0]


def rewrite_of(
    graph: Graph, template: str, inputs: Mapping[str, str], constants: Mapping[str, Any] | None = None
) -> Rewrite:
    """A rewrite of all that a graph computes: its result is the region's, `inputs` maps a name to a node's name.

    A name that starts with a dot is the first node of that operation.
    """
    root = next(node for node in graph.nodes if node.op == "output").inputs()[0]
    found = {name: _node(graph, wanted) for name, wanted in inputs.items()}
    dropout = tuple(node.index for node in graph.nodes if node.target.endswith(".dropout"))
    place = Place(graph=graph.index, root=root, inputs=found, dropout=dropout)
    finding = Finding(
        rule="made",
        span=Span(path=testing.FILE, line=1),
        message="",
        evidence=(),
        estimate=Estimate(low_us=0.0, high_us=1.0, basis="bound"),
        fingerprint="0",
        replacement=Replacement(template=template, texts={}, places=(place,), constants=constants or {}),
    )
    return Rewrite(finding=finding, title="", safety=Safety.NUMERICS, edits=())


def _node(graph: Graph, wanted: str) -> int:
    if wanted.startswith("."):
        return next(n.index for n in graph.nodes if n.target.endswith(wanted))
    return next(n.index for n in graph.nodes if n.op == "placeholder" and wanted in n.name)


def here(jobs: Sequence[regions.Job]) -> list[dict[str, Any]]:
    return [proving.prove(job) for job in jobs]


def proof_of(rewrite: Rewrite, graph: Graph) -> RegionProof:
    return regions.prove([rewrite], [graph], here)[rewrite.id]


PARAMETERS = {"x": "args_0", "weight": "weight", "bias": "bias"}
QUERIES = {"query": "args_0", "key": "args_1", "value": "args_2"}
SDPA = "F.scaled_dot_product_attention({query}, {key}, {value}"
TRUE = {
    "layer norm": (LAYER_NORM, "F.layer_norm({x}, {weight}.shape, {weight}, {bias}, {eps})", PARAMETERS, {"eps": 1e-5}),
    "gelu": (GELU, "F.gelu({x}, approximate='tanh')", {"x": "args_0"}, {}),
    "rms norm": (RMS_NORM, "F.rms_norm({x}, {weight}.shape, {weight}, 1e-6)", {"x": "args_0", "weight": "weight"}, {}),
    "attention": (ATTENTION, f"{SDPA}, scale={{scale}})", QUERIES, {"scale": 0.25}),
    "causal attention": (CAUSAL, f"{SDPA}, is_causal=True)", {**QUERIES, "mask": ".invert"}, {}),
    "added mask": (ADDED, f"{SDPA}, {{mask}}, 0.25)", {**QUERIES, "mask": "add"}, {}),
    "dropout switched off": (
        ADDED,
        f"{SDPA}, dropout_p={{p}}, is_causal=True)",
        {**QUERIES, "mask": "add"},
        {"p": 0.0},
    ),
}


def case(body: str, folder: Path) -> Graph:
    if "q @" in body:
        return captured(body, folder, "q, k, v", QKV)
    return captured(body, folder)


@pytest.mark.parametrize("name", TRUE)
def test_a_true_replacement_is_accepted_in_float32_and_bfloat16(name: str, tmp_path: Path) -> None:
    body, template, inputs, constants = TRUE[name]
    graph, threads = case(body, tmp_path), torch.get_num_threads()
    torch.set_num_threads(1)  # threads of OpenMP that wait for a core spend processor time
    begun = time.process_time()  # not the clock: other processes may hold the cores
    proof = proof_of(rewrite_of(graph, template, inputs, constants), graph)
    spent = time.process_time() - begun
    torch.set_num_threads(threads)
    assert proof.ok, proof.reasons
    assert {"float32", "bfloat16"} <= set(proof.dtypes)
    assert proof.compared >= 20
    assert proof.worst and all(d.ok and d.error <= d.limit for d in proof.worst)
    assert spent < 3


BROKEN = {
    "lower precision": (GELU, "F.gelu({x}.bfloat16(), approximate='tanh').to({x}.dtype)", "is off by"),
    "half precision": (GELU, "F.gelu({x}.half(), approximate='tanh').to({x}.dtype)", "is off by|not finite"),
    "another form": (GELU, "F.gelu({x})", "is off by"),
    "no gradient": (GELU, "F.gelu({x}.detach(), approximate='tanh')", "requires no gradient"),
    "half the gradient": (
        GELU,
        "F.gelu({x}, approximate='tanh') * 0.5 + F.gelu({x}.detach(), approximate='tanh') * 0.5",
        "the gradient of x",
    ),
    "a cached result": (
        GELU,
        "torch.kept.setdefault(0, F.gelu({x}.detach(), approximate='tanh')) + 0 * {x}",
        "is off by",
    ),
    "another dtype": (GELU, "F.gelu({x}, approximate='tanh').double()", "has dtype float64"),
    "another shape": (GELU, "F.gelu({x}, approximate='tanh')[:1]", "has shape"),
    "its own input": (GELU, "F.gelu({x}, approximate='tanh').copy_({x}) * 0 + {x}.mul_(1)", "raises|in place"),
    "noise": (GELU, "F.gelu({x}, approximate='tanh') + 1e-4 * torch.randn_like({x})", "is off by"),
    "an exception": (GELU, "F.gelu({x}, approximate='exact')", "raises"),
    "more dropout": (GELU, "F.dropout(F.gelu({x}, approximate='tanh'), 0.5)", "the replacement drops 0.5 of"),
    "eps outside": (
        LAYER_NORM,
        "({x} - {x}.mean(-1, keepdim=True)) / ({x}.std(-1, keepdim=True, unbiased=False) + 1e-5) * {weight} + {bias}",
        "is off by",
    ),
    "another eps": (LAYER_NORM, "F.layer_norm({x}, {weight}.shape, {weight}, {bias}, 1e-6)", "is off by"),
    "no weight": (LAYER_NORM, "F.layer_norm({x}, {weight}.shape, None, {bias}, 1e-5)", "gradient of weight"),
    "unbiased variance": (
        LAYER_NORM,
        "({x} - {x}.mean(-1, keepdim=True)) / ({x}.var(-1, keepdim=True) + 1e-5).sqrt() * {weight} + {bias}",
        "is off by",
    ),
    "no mask": (CAUSAL, f"{SDPA})", "is off by"),
    "another scale": (CAUSAL, f"{SDPA}, is_causal=True, scale=0.2501)", "is off by"),
    "the inverted mask": (CAUSAL, f"{SDPA}, {{mask}})", "is off by|not finite"),
    "aligned at the other corner": (
        CAUSAL,
        f"{SDPA}, torch.ones({{query}}.size(-2), {{key}}.size(-2), dtype=torch.bool).tril(1))",
        "is off by",
    ),
    "softmax without its maximum": (
        ATTENTION,
        "(e := ({query} @ {key}.transpose(-2, -1) / 4.0).exp()) / e.sum(-1, keepdim=True) @ {value}",
        "not finite",
    ),
    "a swapped axis": (ATTENTION, f"{SDPA}).transpose(1, 2).contiguous().view_as({{query}})", "is off by"),
    "dropout forgotten": (ADDED, f"{SDPA}, {{mask}})", "drops nothing where the original drops 0.25 of 864 elements"),
    "another probability": (
        ADDED,
        f"{SDPA}, {{mask}}, 0.1)",
        "drops 0.1 of 864 elements where the original drops 0.25",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_replacement_is_rejected_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.kept", {}, raising=False)
    body, template, reason = BROKEN[name]
    graph = case(body, tmp_path)
    inputs = PARAMETERS if body == LAYER_NORM else {"x": "args_0"}
    if "q @" in body:
        masks = {CAUSAL: {"mask": ".invert"}, ADDED: {"mask": "add"}}
        inputs = {**QUERIES, **masks.get(body, {})}
    proof = proof_of(rewrite_of(graph, template, inputs), graph)
    assert not proof.ok
    assert _matches(reason, proof.reasons), proof.reasons


def _matches(reason: str, found: Sequence[str]) -> bool:
    return any(part in text for text in found for part in reason.split("|"))


def test_a_mask_from_the_batch_is_compared_with_other_masks_than_the_recorded_one(tmp_path: Path) -> None:
    """The recorded keys are all kept: a replacement that drops the mask agrees on them, and only there."""
    body = PADDED.replace("{fill}", 'float("-inf")')
    everything = f"{QKV}, torch.ones(2, 1, 1, 12, dtype=torch.bool)"
    graph = captured(body, tmp_path, "q, k, v, keep", everything)
    inputs = {**QUERIES, "keep": "args_3"}
    dropped = proof_of(rewrite_of(graph, f"{SDPA})", inputs), graph)
    assert not dropped.ok
    assert any("a mask with" in reason for reason in dropped.reasons), dropped.reasons
    kept = proof_of(rewrite_of(graph, f"{SDPA}, {{keep}})", inputs), graph)
    assert kept.ok, kept.reasons


def test_a_fully_masked_row_with_a_finite_fill_must_stay_what_it_is(tmp_path: Path) -> None:
    """With -1e9 a row that keeps nothing is the mean of the values; a boolean mask gives something else there."""
    graph = captured(PADDED.replace("{fill}", "-1e9"), tmp_path, "q, k, v, keep", f"{QKV}, {KEEP}")
    inputs = {**QUERIES, "keep": "args_3"}
    boolean = proof_of(rewrite_of(graph, f"{SDPA}, {{keep}})", inputs), graph)
    assert not boolean.ok
    assert all("an empty row" in reason for reason in boolean.reasons), boolean.reasons
    filled = f"{SDPA}, torch.zeros_like({{keep}}, dtype={{query}}.dtype).masked_fill(~{{keep}}, -1e9))"
    proof = proof_of(rewrite_of(graph, filled, inputs), graph)
    assert not any("an empty row" not in reason for reason in proof.reasons), proof.reasons


def test_whole_numbers_are_indices(tmp_path: Path) -> None:
    graph = captured(LOSS, tmp_path, "x, labels", LABELS)
    inputs = {"x": "args_0", "labels": "args_1"}
    proof = proof_of(rewrite_of(graph, "F.cross_entropy({x}, {labels})", inputs), graph)
    assert proof.ok, proof.reasons
    summed = proof_of(rewrite_of(graph, "F.cross_entropy({x}, {labels}, reduction='sum') / 9", inputs), graph)
    assert not summed.ok


def test_the_same_tensor_twice_is_one_input(tmp_path: Path) -> None:
    graph = captured("return torch.softmax(x @ x.transpose(-2, -1), dim=-1) @ x", tmp_path)
    inputs = {"query": "args_0", "key": "args_0", "value": "args_0"}
    proof = proof_of(rewrite_of(graph, f"{SDPA}, scale=1.0)", inputs), graph)
    assert proof.ok, proof.reasons


def test_literal_sizes_keep_the_recorded_sizes(tmp_path: Path) -> None:
    """A mean written as a sum over the recorded width is no reason to reject at another width."""
    body = "m = x.sum(-2, keepdim=True) / x.size(-2)\nreturn x - m"
    graph = captured(body, tmp_path)
    proof = proof_of(rewrite_of(graph, "{x} - {x}.mean(-2, keepdim=True)", {"x": "args_0"}), graph)
    assert proof.ok, proof.reasons
    assert any(label.startswith("an odd length") and "literal" in label for label in proof.skipped), proof.skipped


def test_a_region_is_run_under_the_autocast_it_was_recorded_with(tmp_path: Path) -> None:
    body = "with torch.autocast('cpu', dtype=torch.bfloat16):\n" + textwrap.indent(
        "h = x @ self.weight.diag()\nreturn torch.softmax(h @ h.transpose(-2, -1), dim=-1)", "    "
    )
    graph = captured(body, tmp_path)
    inner = [n for n in graph.nodes if n.target.endswith("softmax")]
    rewrite = rewrite_of(graph, "torch.softmax({h} @ {h}.transpose(-2, -1), -1)", {"h": ".matmul"})
    assert inner
    proof = proof_of(_at(rewrite, inner[0].index), graph)
    assert proof.ok, proof.reasons


def _at(rewrite: Rewrite, root: int) -> Rewrite:
    found = rewrite.finding.replacement
    assert found is not None
    places = tuple(replace(place, root=root) for place in found.places)
    return replace(rewrite, finding=replace(rewrite.finding, replacement=replace(found, places=places)))


# ------------------------------------------------------------------------------------------------------- fails closed


def test_what_cannot_be_run_is_not_proved(tmp_path: Path) -> None:
    graph = captured("return x.contiguous(memory_format=torch.contiguous_format) * 2", tmp_path)
    proof = proof_of(rewrite_of(graph, "{x} * 2", {"x": "args_0"}), graph)
    assert not proof.ok
    assert "was not recorded" in proof.reasons[0]
    graph = captured("return x + torch.rand_like(x)", tmp_path)
    proof = proof_of(rewrite_of(graph, "{x} + torch.rand_like({x})", {"x": "args_0"}), graph)
    assert "random numbers" in proof.reasons[0]
    graph = captured("return x * self.weight", tmp_path)
    proof = proof_of(rewrite_of(graph, "{x} * 1.0", {"x": "args_0"}), graph)
    assert "none of its inputs" in proof.reasons[0]


def test_equal_regions_are_proved_once(tmp_path: Path) -> None:
    graph = captured(GELU, tmp_path)
    rewrite = rewrite_of(graph, "F.gelu({x}, approximate='tanh')", {"x": "args_0"})
    found = rewrite.finding.replacement
    assert found is not None
    twice = replace(rewrite.finding, replacement=replace(found, places=found.places * 3))
    asked: list[int] = []

    def run(jobs: Sequence[regions.Job]) -> list[dict[str, Any]]:
        asked.append(len(jobs))
        return here(jobs)

    proof = regions.prove([replace(rewrite, finding=twice)], [graph], run)[rewrite.id]
    assert proof.ok and proof.regions == 1 and asked == [1]


@pytest.mark.parametrize(
    "answer", [[], [{}], [{"ok": True}], [{"ok": True, "compared": 0}], [{"ok": 1, "compared": 3}]]
)
def test_a_missing_or_empty_answer_is_a_rejection(answer: list[dict[str, Any]], tmp_path: Path) -> None:
    graph = captured(GELU, tmp_path)
    rewrite = rewrite_of(graph, "F.gelu({x}, approximate='tanh')", {"x": "args_0"})
    proof = regions.prove([rewrite], [graph], lambda jobs: answer)[rewrite.id]
    assert not proof.ok
    assert proof.reasons


def test_the_child_proves_what_this_process_proves(tmp_path: Path) -> None:
    graph = captured(GELU, tmp_path)
    right = rewrite_of(graph, "F.gelu({x}, approximate='tanh')", {"x": "args_0"})
    crash = rewrite_of(graph, "__import__('os')._exit(3) or {x}", {"x": "args_0"})
    wrong = rewrite_of(graph, "F.gelu({x})", {"x": "args_0"})
    jobs = [regions.jobs_of(rewrite, {0: graph})[0] for rewrite in (crash, right, wrong)]
    work = tmp_path / "work"
    work.mkdir()
    found = regions.run_child(jobs, work)
    assert [bool(answer.get("ok")) for answer in found] == [False, True, False]
    assert "exit status 3" in found[0]["reasons"][0]


def test_an_interpreter_that_does_not_start_proves_nothing(tmp_path: Path) -> None:
    graph = captured(GELU, tmp_path)
    rewrite = rewrite_of(graph, "F.gelu({x}, approximate='tanh')", {"x": "args_0"})
    jobs = regions.jobs_of(rewrite, {0: graph})
    found = regions.run_child(jobs, tmp_path, interpreter=str(tmp_path / "nothing"))
    assert len(found) == 1 and not found[0].get("ok")


# -------------------------------------------------------------------------------------------------------------- wiring


@pytest.mark.parametrize("template", ["F.gelu({x}, approximate='tanh')", "F.gelu({x})"])
def test_a_run_tries_what_is_proved_and_reports_what_is_rejected(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage in a real child: the wrong replacement never reaches the search, and the report says why."""
    rule = registry.load()[0]["unfused-gelu"].rule
    example = rule.examples[0]
    ctx, source = testing.context_of(rule, example.before, example.profile, tmp_path)
    monkeypatch.chdir(tmp_path)
    request = Request(script=tmp_path / testing.FILE, arguments=(), config=Config())
    job = begin(request, Progress(Console(quiet=True)))
    (finding,) = [found for found in rule.match(ctx) if isinstance(found, Finding)]
    rewrite = rule.rewrite(finding, source)
    assert isinstance(rewrite, Rewrite) and finding.replacement is not None
    changed = replace(finding, replacement=replace(finding.replacement, template=template))
    rewrite = replace(rewrite, finding=changed)
    planned = stages.prove_regions(job, ctx.profile, plan.Plan(rewrites=(rewrite,), suggestions=()))
    assert not (job.run.path / "work").exists()
    assert job.run.read_json("regions.json")[rewrite.id]["compared"] >= 20
    right = template == finding.replacement.template.replace('"', "'")
    assert [r.id for r in planned.rewrites] == ([rewrite.id] if right else [])
    matched = stages.Matched({rule.id: rule}, Matches(findings=(finding,), declines=(), errors=()), ())
    verdict = Verdict(outcome=Outcome.IMPROVED, reasons=(), kept=(rewrite.id,) if right else ())
    report, _, _ = stages.report(job, ctx.profile, matched, planned, verdict)
    (told,) = report.findings
    assert told.status == ("applied" if right else "rejected")
    assert any("compared" in fact.what and fact.value for fact in told.evidence)
    assert right or "is off by" in str(told.reason)
    assert told.diff
