"""The other samples as recorded on one NVIDIA H200, replayed without a GPU: what the rules find in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import job_of, restore

from advisor import stages
from advisor.model import Finding
from advisor.stages import Matched

SAMPLES = Path(__file__).parent.parent / "samples"


def matched(script: str, recording: str, folder: Path, *arguments: str, select: str = "") -> tuple[Matched, float]:
    """What the rules say of a recorded run of a sample, and the median of its steps in microseconds."""
    restore(SAMPLES / recording, folder)
    job = job_of(SAMPLES / script, arguments, (SAMPLES / script).parent, folder)
    if select:
        job = replace(job, config=replace(job.config, select=(select,)))
    profile = stages.analyse(job, stages.ingest(job))
    found = stages.find(job, profile)
    assert not found.errors
    step_us = profile.median_step_us()
    assert step_us is not None
    return found, step_us


def lines(script: str, findings: tuple[Finding, ...]) -> dict[str, str]:
    """The line of the script that each finding is about; `misaligned-dims` finds two and keeps the second."""
    text = {path: (SAMPLES / script).with_name(path).read_text(encoding="utf-8").splitlines() for path in
            {finding.span.path for finding in findings}}  # fmt: skip
    return {finding.rule: text[finding.span.path][finding.span.line - 1].strip() for finding in findings}


def test_launches_and_the_optimizer_of_a_tiny_model(tmp_path: Path) -> None:
    script = "tiny_launch_bound/train.py"
    found, step_us = matched(script, "tiny_launch_bound/h200", tmp_path)
    assert lines(script, found.matches.findings) == {
        "launch-bound": "model = Net(args.features, args.width, args.depth).to(args.device)",
        "optimizer-not-fused": "optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)",
    }
    assert sum(finding.estimate.high_us for finding in found.matches.findings) < step_us


def test_a_model_that_waits_for_its_pictures(tmp_path: Path) -> None:
    script = "resnet_loader/train.py"
    found, _ = matched(script, "resnet_loader/h200", tmp_path, "--preset", "h200")
    where = lines(script, found.matches.findings)
    assert where["dataloader-bound"].startswith("loader = DataLoader(JpegFolder(")


def test_everything_in_float32(tmp_path: Path) -> None:
    """What is small beside products in float32, the optimizer and an odd vocabulary, is found without them."""
    script = "nano_gpt/train_fp32.py"
    arguments = ("--preset", "h200", "--steps", "20000")
    found, step_us = matched(script, "nano_gpt/h200/fp32", tmp_path, *arguments)
    assert step_us == pytest.approx(1_873_600, rel=0.01)
    where = lines(script, found.matches.findings)
    assert where["no-mixed-precision"] == "_, loss = model(x, y)"
    assert where["optimizer-not-fused"].startswith("optimizer = torch.optim.AdamW(")
    assert {"naive-attention", "unfused-gelu", "unfused-layernorm", "misaligned-dims", "tf32-off"} <= set(where)
    assert "pointwise-chain" in where


def test_habits_of_a_loop_over_pictures(tmp_path: Path) -> None:
    script = "vision_habits/train.py"
    found, step_us = matched(script, "vision_habits/h200", tmp_path, "--preset", "h200")
    where = lines(script, found.matches.findings)
    assert where.pop("cudnn-benchmark").startswith("import")
    assert where == {
        "channels-last": "model = Net(stages, args.width, args.classes).to(device)",
        "cast-storm": "h = F.relu(self.expand(h)) ** 2",
        "cpu-create-then-copy": "images = pixels - torch.full((args.batch_size, 3, args.side, args.side), 0.45)"
        ".to(device)",
        "clip-grad-slow": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)",
        "optimizer-not-fused": "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)",
    }
    assert all(0 < finding.estimate.high_us < step_us for finding in found.matches.findings)
    idle = next(decline for decline in found.matches.declines if decline.rule == "host-sync")
    assert "0.1% of the step" in idle.reason


def test_float8_is_found_where_it_is_asked_for(tmp_path: Path) -> None:
    script, recording = "nano_gpt/train_compiled.py", "nano_gpt/h200/float8"
    arguments = ("--preset", "h200", "--vocab", "50304", "--steps", "20000")
    found, _ = matched(script, recording, tmp_path, *arguments, select="float8-linears")
    assert lines(script, found.matches.findings) == {"float8-linears": "model = torch.compile(model)"}


def test_two_processes_reduce_in_every_micro_step() -> None:
    """What `advisor check` said of one of two processes, and what leaving seven of eight reductions out saved."""
    said = json.loads((SAMPLES / "accum_sync/h200/two_processes.json").read_text(encoding="utf-8"))
    found = next(finding for finding in said["findings"] if finding["rule"] == "ddp-settings")
    measured = json.loads((SAMPLES / "accum_sync/h200/accumulation.json").read_text(encoding="utf-8"))
    (run,) = (run["variants"] for run in measured["runs"] if run["processes"] == 2)
    saved_us = 1e3 * (run["as found"]["step_ms"] - run["no_sync"]["step_ms"])
    assert found["line"] == 96
    assert 0 < saved_us < found["estimate_us"][1]


def test_the_readme_quotes_what_compiling_brought() -> None:
    said = json.loads((SAMPLES / "nano_gpt/h200/compiled.json").read_text(encoding="utf-8"))
    text = " ".join((SAMPLES / "nano_gpt/README.md").read_text(encoding="utf-8").split())
    blocks, whole, together = (trial["timing"] for trial in said["trials"])
    assert said["outcome"] == "improved" and {trial["quads"] for trial in (blocks, whole, together)} == {8}
    for timing in (blocks, whole):
        low, high = timing["interval"]
        assert f"{timing['speedup']:.3f}x ({low:.3f}x to {high:.3f}x)" in text
    low, high = together["interval"]
    assert f"improved, {together['speedup']:.3f}x (96.1 % interval {low:.3f}x to {high:.3f}x over 8 quads)" in text
    assert f"MFU {said['mfu_before']:.1%} -> {said['mfu_after']:.1%}".replace("%", " %") in text


@pytest.mark.parametrize(("sample", "report"), [("nano_gpt", "tf32.json"), ("volume_batches", "report.json")])
def test_the_readme_claims_nothing_of_too_few_quads(sample: str, report: str) -> None:
    said = json.loads((SAMPLES / sample / "h200" / report).read_text(encoding="utf-8"))
    text = " ".join((SAMPLES / sample / "README.md").read_text(encoding="utf-8").split())
    low, high = said["interval"]
    assert (said["outcome"], said["step_ms_after"]) == ("inconclusive", None)
    assert f"after {said['timing']['quads']} of 8 quads" in text
    assert f"{said['speedup']:.3f}x ({low:.3f}x to {high:.3f}x, {said['confidence']:.1%})".replace("%", " %") in text


def test_copies_of_pageable_volumes(tmp_path: Path) -> None:
    script = "volume_batches/train.py"
    found, step_us = matched(script, "volume_batches/h200", tmp_path, "--preset", "h200")
    assert {finding.rule for finding in found.matches.findings} == {"cudnn-benchmark", "pageable-h2d"}
    (finding,) = (finding for finding in found.matches.findings if finding.rule == "pageable-h2d")
    assert lines(script, (finding,)) == {"pageable-h2d": "scans, masks = scans.to(device), masks.to(device)"}
    assert 0.1 < finding.estimate.high_us / step_us < 0.13


@pytest.mark.parametrize(
    "sample",
    ["tiny_launch_bound", "resnet_loader", "accum_sync", "vision_habits", "nano_gpt/h200/fp32", "nano_gpt/h200/float8"],
)
def test_the_readme_quotes_its_report(sample: str) -> None:
    folder = SAMPLES / sample
    report = json.loads(
        (folder if "h200" in sample else folder / "h200").joinpath("report.json").read_text(encoding="utf-8")
    )
    text = " ".join((SAMPLES / sample.split("/")[0] / "README.md").read_text(encoding="utf-8").split())
    assert f"{report['outcome']}," in text
    if report["speedup"] is not None:
        low, high = report["interval"]
        assert f"**{report['speedup']:.2f}x** (96.1 % interval {low:.2f}x to {high:.2f}x" in text
