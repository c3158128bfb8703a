"""The recording of the sample on one NVIDIA H200, replayed without a GPU and without torch."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import job_of, restore

from advisor import patch, registry, stages
from advisor.job import Job
from advisor.model import Profile
from advisor.plan import Plan
from advisor.redact import Redactor
from advisor.rundir import RunDir
from advisor.stages import Matched

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "samples" / "nano_gpt"
RECORDED = SAMPLE / "h200"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    run = tmp_path_factory.mktemp("run")
    restore(RECORDED, run)
    return job_of(SAMPLE / "train.py", ("--preset", "h200"), ROOT, run)


@pytest.fixture(scope="module")
def profile(job: Job) -> Profile:
    return stages.analyse(job, stages.ingest(job))


@pytest.fixture(scope="module")
def matched(job: Job, profile: Profile) -> Matched:
    return stages.find(job, profile)


@pytest.fixture(scope="module")
def planned(job: Job, matched: Matched) -> Plan:
    return stages.order(job, matched)


def test_the_step_and_its_utilisation(profile: Profile) -> None:
    assert profile.hardware.name == "NVIDIA H200 SXM"
    assert profile.median_step_us() == pytest.approx(533_000, rel=0.01)
    assert profile.tokens_per_step == 8 * 2048
    assert profile.utilisation.mfu == pytest.approx(0.151, abs=0.002)
    width, layers, tokens, vocabulary = 2048, 12, 2048, 50257
    weights = layers * 12 * width**2 + vocabulary * width
    per_token = 6 * weights + 12 * layers * width * tokens
    assert profile.utilisation.model_flops_per_step == pytest.approx(per_token * 8 * 2048, rel=0.01)
    assert profile.utilisation.busy == pytest.approx(0.99, abs=0.01)
    assert profile.linked_share is not None
    assert profile.linked_share > 0.999


def test_the_counters_are_those_of_the_timed_steps(profile: Profile) -> None:
    """An earlier recording has 97.6, 58.9 and 17.1 for this model; a busy device is not a well used one."""
    seen = {metric.name: metric.value for metric in profile.counters}
    assert seen["sm_active"] == pytest.approx(97.6, rel=0.05)
    assert seen["sm_occupancy"] == pytest.approx(58.9, rel=0.05)
    assert seen["tensor_active"] == pytest.approx(17.1, rel=0.05)


def test_phases_sum_to_the_step(profile: Profile) -> None:
    for step in profile.steps:
        assert sum(step.phases_us.values()) == pytest.approx(step.duration_us, rel=1e-6)


def test_every_rule_finds_its_lines(matched: Matched) -> None:
    assert not matched.errors
    lines = (SAMPLE / "train.py").read_text(encoding="utf-8").splitlines()
    found = {f.rule: lines[f.span.line - 1].strip() for f in matched.matches.findings}
    assert found["naive-attention"] == "y = att @ v"
    assert found["unfused-layernorm"] == "return self.weight * x + self.bias"
    assert "torch.tanh(" in found["unfused-gelu"]
    assert "torch.optim.AdamW(" in found["optimizer-not-fused"]
    dims = [lines[f.span.line - 1].strip() for f in matched.matches.findings if f.rule == "misaligned-dims"]
    assert dims == [
        "logits = self.lm_head(self.ln_f(x))",
        "self.lm_head = nn.Linear(cfg.width, cfg.vocab, bias=False)",
    ]
    declines = matched.matches.declines
    unseen = {decline.rule for decline in declines if "calls" in decline.needs}  # an older run: without these
    assert unseen == {n for n, loaded in registry.load()[0].items() if "calls" in loaded.rule.needs}
    assert {decline.rule: decline.reason for decline in declines if decline.rule not in unseen} == {
        "cast-storm": "autocast runs softmax in float32 by its own policy: the casts there and back take 10.2% of the "
        "step",
        "dataloader-bound": "waiting for it takes 0.1% of the step",
        "logits-memory": "the logits are returned as well, so they have to be there as a whole",
    }


def test_no_estimate_promises_more_than_the_time_it_cites(matched: Matched, profile: Profile) -> None:
    step_us = profile.median_step_us()
    assert step_us is not None
    assert sum(f.estimate.high_us for f in matched.matches.findings) < step_us
    for finding in matched.matches.findings:
        cited = next(float(e.value) for e in finding.evidence if e.unit == "us")
        assert 0 <= finding.estimate.low_us <= finding.estimate.high_us <= cited


def test_the_patch_is_the_one_that_was_proved(job: Job, planned: Plan) -> None:
    """Of the rules that were asked when the run was recorded; rules written since then have more to say."""
    report = json.loads((RECORDED / "report.json").read_text(encoding="utf-8"))
    assert report["outcome"] == "improved"
    asked = {finding["rule"] for finding in report["findings"]}
    rewrites = [r for r in planned.rewrites if r.finding.rule in asked and r.form is None]  # the run had no other forms
    assert patch.build(rewrites, job.read).diff == report["diff"]


def test_the_recorded_verdict_supports_what_the_documents_say() -> None:
    report = json.loads((RECORDED / "report.json").read_text(encoding="utf-8"))
    assert report["interval"][0] > 1.0
    assert report["mfu_after"] >= 0.35
    assert sum(report["stage_seconds"].values()) < 600
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    for figure in (f"{report['step_ms_before']:.1f}", f"{report['step_ms_after']:.1f}", f"{report['speedup']:.2f}x"):
        assert figure in readme


def test_why_there_is_no_graph_is_said(job: Job, tmp_path: Path) -> None:
    probe = json.loads((RECORDED / "probe.json").read_text(encoding="utf-8"))
    probe["missing"] = {"graph": "the annotated run raised RuntimeError"}
    (tmp_path / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    shutil.copy(RECORDED / "trace.json.gz", tmp_path / "trace.json.gz")
    recorded = stages.ingest(replace(job, run=RunDir(tmp_path, Redactor.of_machine())))
    assert recorded.missing["graph"] == "the annotated run raised RuntimeError"
