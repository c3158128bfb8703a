"""optimize(): the stages in order, nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from advisor import patch, plan, stages
from advisor.errors import RuleError
from advisor.job import Request, begin
from advisor.model import Report, Safety
from advisor.progress import Progress


@dataclass(frozen=True)
class Result:
    """The report, where it lies, and the errors of rules that raised."""

    report: Report
    folder: Path
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
    with progress.stage("match"):
        rules, matches, errors = stages.find(job, profile)
    with progress.stage("plan"):
        planned = plan.plan(matches.findings, rules, job.read, frozenset(Safety(name) for name in job.config.allow))
        errors = (*errors, *planned.errors)
        progress.note(stages.counted(len(planned.rewrites), "rewrite") + " to try")
        job.run.write_json("plan.json", {"order": [r.id for r in planned.rewrites]})
    with progress.stage("patch"):
        whole = patch.build(planned.rewrites, job.read)
        progress.note(stages.counted(len(whole.sources), "file") + " to change")
    with progress.stage("verify"):
        verdict = stages.verify(job, profile, planned)
    with progress.stage("report"):
        report = stages.report(job, profile, matches, planned, verdict, rules, errors)
        progress.note(f"{os.path.relpath(job.run.path / 'report.html')}")
    return Result(report, job.run.path, errors)
