"""optimize(): the stages in order, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from advisor import stages
from advisor.errors import RuleError
from advisor.job import Request, begin
from advisor.model import Patch, Report
from advisor.progress import Progress


@dataclass(frozen=True)
class Result:
    """The report, where it lies, the proven patch and its project, and the errors of rules that raised."""

    report: Report
    folder: Path
    root: Path
    patch: Patch
    errors: tuple[RuleError, ...]


def optimize(request: Request, progress: Progress) -> Result:
    """Run all stages; raises AdvisorError for what the user can mend, KeyboardInterrupt leaves a resumable run."""
    job = begin(request, progress)
    with progress.stage("capture"):
        stages.capture(job)
    with progress.stage("ingest"):
        recorded = stages.ingest(job)
    with progress.stage("analyze"):
        profile = stages.analyse(job, recorded)
        singles = stages.count_singly(job)
    with progress.stage("match"):
        matched = stages.find(job, profile)
    with progress.stage("plan"):
        planned = stages.order(job, matched)
    with progress.stage("patch"):
        planned = stages.prove_regions(job, profile, planned)
        stages.check_patch(job, planned)
    with progress.stage("verify"):
        verdict = stages.verify(job, profile, planned)
    with progress.stage("report"):
        report, proven, errors = stages.report(job, profile, matched, planned, verdict, singles)
    return Result(report, job.run.path, job.root, proven, errors)
