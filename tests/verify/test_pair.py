"""Two resident copies of a real script taking turns."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from conftest import MakeBench
from verify_bench import FUSED, NOTHING, QUICK, SCORES, SCRIPT, edited, patch_of, rewrite

from advisor.capture.launch import Child
from advisor.errors import NoStepsError, ScriptError
from advisor.model import Outcome, Patch, Safety
from advisor.session import Process, Spec
from advisor.verify.lab import BASELINE_PLAN
from advisor.verify.pair import ResidentArm, race
from advisor.verify.search import TrialFailed, search

STEP = "        optimizer.step()\n"
SLOW = edited((STEP, STEP + "        import time\n        time.sleep(0.3)\n"))


def test_a_right_but_slower_rewrite_is_rejected(make_bench: MakeBench) -> None:
    settings = dataclasses.replace(QUICK, min_quads=6, max_quads=6, block_s=0.02)
    bench = make_bench(SCRIPT, "--steps", "100000", settings=settings)
    slow = rewrite("sleep")

    def build(rewrites: object) -> Patch:
        return Patch(base={}, rewrites=(slow,), diff="", sources={"train.py": SLOW}) if rewrites else NOTHING

    verdict = search([slow], build, bench.lab, allow=frozenset({Safety.NUMERICS}), min_quads=6, baselines=False)
    assert verdict.numerics is not None
    assert verdict.numerics.ok, verdict.numerics.reasons
    assert verdict.outcome is Outcome.REGRESSED, verdict.reasons
    assert verdict.kept == ()
    assert verdict.timing is not None
    assert verdict.timing.speedup < 0.8


def test_a_script_that_ends_is_started_again(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, "--steps", "60")
    with ResidentArm(Child, bench.spec) as arm:
        blocks = [arm.run_block(12) for _ in range(5)]
    assert all(len(block.step_us) == 12 for block in blocks)
    assert arm.restarts == 1


def test_two_arms_take_turns(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, "--steps", "100000")
    with ResidentArm(Child, bench.spec) as base, ResidentArm(Child, bench.spec) as cand:
        timing = race(base, cand, min_quads=1, max_quads=1, block_s=0.05, seconds=60.0)
    assert (timing.quads, len(timing.base_step_us), len(timing.step_us)) == (1, 2, 2)
    assert timing.warmup_s is not None
    assert min(timing.warmup_s) > 0
    assert timing.peak_bytes is not None
    assert timing.peak_bytes > 1 << 20


def test_a_script_too_short_to_time_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, "--steps", "2")
    with ResidentArm(Child, bench.spec) as arm:
        with pytest.raises(NoStepsError, match="ended by itself after 2 steps, before its step times were stable"):
            arm.start()
        assert arm.failed


def test_a_rewrite_that_fails_late_loses_the_race_only(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, "--steps", "100000")
    late = edited((STEP, STEP + "        assert step < 12, 'late'\n"))
    with pytest.raises(TrialFailed, match="the rewritten script fails: the script raised AssertionError: late"):
        bench.lab.race(NOTHING, patch_of(late), 60.0)


def test_an_original_that_fails_is_raised(make_bench: MakeBench) -> None:
    bench = make_bench(edited((STEP, STEP + "        assert step < 2, 'early'\n")))
    with pytest.raises(ScriptError, match="the script raised AssertionError: early"):
        bench.lab.race(NOTHING, patch_of(edited((SCORES, FUSED))), 60.0)


def test_a_waiting_arm_uses_no_processor(make_bench: MakeBench) -> None:
    started: list[Child] = []

    def spawn(spec: Spec) -> Process:
        started.append(Child(spec))
        return started[-1]

    bench = make_bench(SCRIPT, "--steps", "100000")
    with ResidentArm(spawn, bench.spec) as arm:
        block = arm.run_block(5)
        assert len(block.step_us) == 5
        assert sum(block.step_us) <= block.wall_us * 1.01
        time.sleep(0.3)
        before = _processor_s(started[0])
        time.sleep(1.0)
        assert _processor_s(started[0]) - before < 0.1
    assert started[0].wait(0) is not None


def _processor_s(child: Child) -> float:
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_baseline_compiles_the_model(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, "--steps", "100000")
    row = bench.lab.baseline("as found + torch.compile", "compile", NOTHING)
    assert row.step_us is None or row.step_us > 0
    assert (row.step_us is None) == (row.reason is not None)
    tf32 = bench.lab.baseline("as found + TF32", "tf32", NOTHING)
    assert tf32.reason == "TF32 exists on NVIDIA GPUs only"
    assert BASELINE_PLAN.endswith("BaselinePlan")


def test_repeated_measurements_come_from_the_store(make_bench: MakeBench, tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, trials=tmp_path / "trials")
    first = make_bench(SCRIPT, "--steps", "100000", settings=settings)
    patch = patch_of(edited((SCORES, FUSED)))
    proof, timing = first.lab.prove(patch), first.lab.race(NOTHING, patch, 30.0)
    first.lab.close()
    again = make_bench(SCRIPT, "--steps", "100000", settings=settings)
    begin = time.monotonic()
    assert again.lab.prove(patch) == proof
    assert again.lab.race(NOTHING, patch, 30.0) == timing
    assert time.monotonic() - begin < 1.0
