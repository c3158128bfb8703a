"""Race one script at two commits, each in its own checkout: is the step of the second slower or faster?"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from advisor import checking, stages
from advisor.analyze import after
from advisor.capture.launch import Child
from advisor.errors import ScriptError
from advisor.job import Job
from advisor.model import Outcome, Profile, Timing, Utilisation
from advisor.proposals import Comparison, Use
from advisor.session import Spec
from advisor.verify.pair import ResidentArm, race
from advisor.verify.timing import judge

GIB = float(1 << 30)
MAX_QUADS = 40


def recorded(job: Job) -> Profile:
    """The profile of a script after a brief run; raises ScriptError or ArtifactError."""
    stages.record(job, checking.BRIEF, least=checking.LEAST_STEPS)
    return stages.analyse(job, stages.ingest(job))


def compare(base: Job, head: Job, before: Profile, later: Profile, *, seconds: float) -> Comparison:
    """Race two recorded scripts for about `seconds`; where that fails the outcome is "failed", with the reason."""
    try:
        timing = _race(base, head, seconds)
    except ScriptError as error:
        return failed(f"the two could not be timed against each other: {error}", before)
    outcome, reasons = judge(timing, min_quads=head.config.min_quads)
    unlike = _unlike(before, later)
    if unlike is not None:
        outcome, reasons = Outcome.INCONCLUSIVE, (unlike, *reasons)
    return Comparison(
        outcome=outcome.value,
        reasons=reasons,
        timing=timing,
        before=use_of(before, timing.base_step_us, timing.base_peak_bytes),
        after=use_of(later, timing.step_us, timing.peak_bytes),
        environment=later.environment,
        hardware=later.hardware,
    )


def _unlike(before: Profile, later: Profile) -> str | None:
    """Why step times of two commits must not be compared; None where nothing is known to speak against it."""
    if before.hardware.name != later.hardware.name:
        return "base and head ran on different devices"
    was, now = before.tokens_per_step, later.tokens_per_step
    if was is None or now is None or (was, before.tokens_source) == (now, later.tokens_source):
        return None
    at_base, at_head = f"{was:,} {_unit(before)}", f"{now:,} {_unit(later)}"
    if at_base == at_head:
        return None
    return f"a step is not the same work: {at_base} at the base, {at_head} at the head; compare the rates"


def _unit(profile: Profile) -> str:
    return "samples" if (profile.tokens_source or "").startswith("samples") else "tokens"


def failed(reason: str, profile: Profile | None = None) -> Comparison:
    """A comparison of which nothing can be said but why."""
    return Comparison(
        outcome=Outcome.FAILED.value,
        reasons=(reason,),
        timing=None,
        before=None,
        after=None,
        environment=profile.environment if profile else None,
        hardware=profile.hardware if profile else None,
    )


def use_of(profile: Profile, block_us: tuple[float, ...], peak_bytes: int | None) -> Use:
    """What a commit makes of the device at the step time of the race (median of its blocks, microseconds)."""
    step_us = statistics.median(block_us)
    tokens, recorded_us = profile.tokens_per_step, profile.median_step_us()
    raced: Utilisation = profile.utilisation
    if recorded_us:
        raced = after(raced, recorded_us / step_us)
    return Use(
        step_ms=step_us / 1e3,
        tokens_per_s=tokens / (step_us / 1e6) if tokens else None,
        throughput_unit=_unit(profile),
        peak_gib=None if peak_bytes is None else peak_bytes / GIB,
        mfu=raced.mfu,
        peak_flops=raced.peak_flops,
        peak_source=raced.peak_source,
        missing=profile.missing,
    )


def _race(base: Job, head: Job, seconds: float) -> Timing:
    with _arm(base) as first, _arm(head) as second:
        return race(
            first, second, seconds=seconds, min_quads=head.config.min_quads, max_quads=MAX_QUADS, start_s=2 * seconds
        )


@contextmanager
def _arm(job: Job) -> Iterator[ResidentArm]:
    """The script in its own checkout, which is also its working directory."""

    def spawn(spec: Spec) -> Child:
        interpreter = job.config.python or sys.executable
        return Child(spec, interpreter=interpreter, redact=job.run.redactor.text, cwd=str(job.root))

    spec = replace(job.spec("", Path(job.run.folder("work")) / "timed"), options={})
    with ResidentArm(spawn, spec) as arm:
        yield arm
