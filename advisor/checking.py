"""`advisor check`: record scripts briefly, or read recorded runs, and say what the rules find; nothing is rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import advisor
from advisor import glance, patch, plan, rundir, stages, summary, why
from advisor.config import Config
from advisor.errors import AdvisorError, ArtifactError, RuleError, ScriptError, UsageError
from advisor.job import Job, Request, Rules, begin, load_rules
from advisor.model import CheckedFile, CheckReport, Explanation, Profile, ReportedFinding, Rewrite, RulePage
from advisor.progress import Progress
from advisor.redact import Redactor
from advisor.rundir import RunDir

SCHEMA = 1  # of the document of `advisor check`
STAGES = ("capture", "ingest", "analyze", "match", "plan", "patch")
BRIEF: Mapping[str, Any] = {"warmup": 2, "steps": 3, "profile_steps": 1}
LEAST_STEPS = 2  # one to warm up, one that is timed
NOT_MEASURED = "not measured"
GRAPHS = ("graph", "links", "trace")  # without one of these no graph rule can tell anything
DISPROVED = "compared alone, the replacement is not proved to be the same function"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asked for: scripts and folders of runs, or one run by its name; `why` is a file and a line of it.

    `steps` is the number of steps that are timed where the script makes enough of them.
    """

    paths: tuple[Path, ...]
    arguments: tuple[str, ...]
    config: Config
    entry: str | None = None
    out: Path | None = None
    run: str | None = None
    steps: int | None = None
    why: tuple[str, int] | None = None


@dataclass(frozen=True)
class Result:
    """The report, the errors in the order in which they happened, and the explanations that were asked for."""

    report: CheckReport
    errors: tuple[AdvisorError, ...]
    explanations: tuple[Explanation, ...]


@dataclass
class _Look:
    """What one target gave: an entry of the report, what went wrong, and the answer to `--why`."""

    file: CheckedFile
    errors: tuple[AdvisorError, ...] = ()
    explanation: Explanation | None = None


@dataclass(frozen=True)
class _Recorded(RunDir):
    """A run that is only read: what the stages leave behind is dropped."""

    def write(self, name: str, text: str) -> None:
        """Leave the run as it was recorded."""


def check(asked: Asked, progress: Progress) -> Result:
    """Look at every script and run; one that fails does not keep the others from being reported.

    Raises UsageError for paths, rules and runs that do not exist, before anything is started.
    """
    rules = load_rules(asked.config)
    redactor = Redactor.of_machine()
    runs = [rundir.find(asked.run, asked.out, redactor)] if asked.run is not None else []
    for path in asked.paths:
        _check_path(path)
    looks = [_at_run(RunDir(run.path, redactor), asked, rules, progress) for run in runs]
    for path in asked.paths:
        if path.is_dir():
            looks.append(_at_run(RunDir(path, redactor), asked, rules, progress))
        else:
            looks.append(_at_script(path, asked, rules, progress))
    errors: list[AdvisorError] = [*rules.errors]
    for look in looks:
        errors += [error for error in look.errors if error not in errors]
    report = CheckReport(
        schema_version=SCHEMA,
        advisor=advisor.__version__,
        files=tuple(look.file for look in looks),
        rules=_pages(rules),
    )
    explained = tuple(look.explanation for look in looks if look.explanation is not None)
    return Result(redactor.value(report), tuple(errors), redactor.value(explained))


def has_findings(report: CheckReport) -> bool:
    """Whether something was found; what only the source shows, or a proof rejected, does not count."""
    return any(found.status in ("found", "suggested") for file in report.files for found in file.findings)


def _check_path(path: Path) -> None:
    if not path.exists():
        raise UsageError(f"no such file: {path}")
    if path.is_dir() and not (path / rundir.REQUEST).is_file():
        raise UsageError(f"{path} is a directory: name the training scripts themselves, or the folder of a run")


def _pages(rules: Rules) -> tuple[RulePage, ...]:
    return tuple(
        RulePage(id=name, title=item.title, safety=item.rule.safety.value, page=item.page)
        for name, item in sorted(rules.pages.items())
    )


# -------------------------------------------------------------------------------------------------------------- targets


def _at_script(path: Path, asked: Asked, rules: Rules, progress: Progress) -> _Look:
    """A script: recorded briefly; where that fails, its source alone is looked at."""
    request = Request(script=path, arguments=asked.arguments, config=asked.config, entry=asked.entry, out=asked.out)
    try:
        job = begin(request, progress)
    except UsageError as error:
        return _Look(_unreadable(path, error), (error,))
    job.rules = rules
    job.run.write_json(rundir.CHECKED, {})  # from now on nobody takes it for a run with a verdict
    try:
        with _stage(progress, "capture", path):
            ended = _record(job, asked.steps)
        look = _matched(job, path, asked, progress, ended, prove=True)
    except (ScriptError, ArtifactError) as error:
        look = _from_source(job, path, error)
    job.run.write_json(rundir.CHECKED, summary.plain(look.file))
    return look


def _at_run(run: RunDir, asked: Asked, rules: Rules, progress: Progress) -> _Look:
    """A recorded run: read, never started again and never written to."""
    try:
        request = rundir.request_of(run)
        root = rundir.root_of(run, request)
        for name in ("capture.json", "probe.json"):
            if not run.has(name):
                raise ArtifactError(f"run {run.id} has no {name}: its recording did not finish; start a new run")
        job = Job(
            root / request["script"],
            tuple(request["arguments"]),
            request["entry"],
            root,
            asked.config,
            _Recorded(run.path, run.redactor),
            progress,
            rules,
        )
        stages.check_sources(job)
        return _matched(job, run.path, asked, progress, None, prove=False)
    except (ScriptError, ArtifactError, UsageError) as error:
        return _Look(_unreadable(run.path, error, run.id), (error,))


@contextmanager
def _stage(progress: Progress, name: str, path: Path) -> Iterator[None]:
    with progress.stage(name):
        progress.note(path.name)
        yield


# -------------------------------------------------------------------------------------------------------------- capture


def _record(job: Job, steps: int | None) -> int | None:
    """Record the script; one that ends early is run again, with the steps it makes dealt out.

    Gives the number of its steps where even then not everything could be recorded.
    """
    options = {**BRIEF, **({} if steps is None else {"steps": steps})}
    steps_made = stages.record(job, options, least=LEAST_STEPS)
    if steps_made is None:
        return None
    ended: int | None = steps_made
    for again in dealt(steps_made):
        try:
            ended = stages.record(job, again, least=LEAST_STEPS)
        except ScriptError:  # it ran before: what the first run left stands
            ended = steps_made
    return ended


def dealt(steps: int) -> tuple[dict[str, Any], ...]:
    """Options of the recording plan, run by run, for a script that makes so many steps, at least two.

    From seven steps on one run holds all: one step warms up, up to three are timed, two belong to the profiler, three
    to the annotated run. With four to six the graphs come from a run of their own and the times from a second. With
    three there is time for the graphs alone, and for two for a timed step.
    """
    timed = {"warmup": 1, "steps": 1, "profile_steps": 1}
    if steps >= 7:
        return ({**timed, "steps": min(3, steps - 6)},)
    graphs = {"warmup": 1, "steps": 1, "brief": True}
    if steps >= 4:
        return (graphs, {**timed, "steps": steps - 3, "annotate": False})
    return (graphs,) if steps == 3 else (timed,)


# ---------------------------------------------------------------------------------------------------------------- match


def _matched(job: Job, path: Path, asked: Asked, progress: Progress, ended: int | None, *, prove: bool) -> _Look:
    """What the rules find in what was recorded; `prove` compares every region with its replacement, which runs both."""
    with _stage(progress, "ingest", path):
        recorded = stages.ingest(job)
        if ended is not None:
            recorded = replace(recorded, missing=_because_it_ended(recorded.missing, ended))
    with _stage(progress, "analyze", path):
        profile = stages.analyse(job, recorded)
    with _stage(progress, "match", path):
        matched = stages.find(job, profile)
    with _stage(progress, "plan", path):
        planned = stages.order(job, matched)
    if prove:
        with _stage(progress, "patch", path):
            planned = stages.prove_regions(job, profile, planned)
            progress.note(f"{stages.counted(len(planned.rejected), 'rewrite')} not the same function")
    untold = any(name in profile.missing for name in GRAPHS)
    glanced, glance_errors = _glances(job) if untold else ((), ())
    errors = (*matched.errors, *planned.errors, *glance_errors)
    file = _file(job, path, profile, matched, planned)
    covered = {(found.rule, found.path) for found in file.findings}
    more = [found for found in glanced if (found.rule, found.path) not in covered]
    file = replace(
        file,
        status="partial" if untold or ended is not None else "measured",
        findings=tuple(sorted((*file.findings, *more), key=_place)),
        rule_errors=tuple(str(error) for error in errors),
    )
    own = tuple(error for error in errors if error not in job.rules.errors)
    return _Look(_redacted(file, job.run.redactor), own, _explained(asked, job, profile, matched))


def _file(job: Job, path: Path, profile: Profile, matched: stages.Matched, planned: plan.Plan) -> CheckedFile:
    safety = {name: rule.safety.value for name, rule in matched.rules.items()}
    median_us = profile.median_step_us()
    declines = (summary.declined(decline, safety.get(decline.rule)) for decline in matched.matches.declines)
    return CheckedFile(
        path=_shown(path),
        run=job.run.id,
        status="measured",
        reason=next((profile.missing[name] for name in GRAPHS if name in profile.missing), None),
        step_ms=None if median_us is None else median_us / 1e3,
        device=profile.hardware.name,
        linked_share=profile.linked_share,
        missing=profile.missing,
        findings=tuple(sorted(_findings(job, planned, safety), key=_place)),
        declines=tuple(sorted(declines, key=_place)),
    )


def _because_it_ended(missing: Mapping[str, str], steps: int) -> dict[str, str]:
    needed = BRIEF["warmup"] + BRIEF["steps"] + BRIEF["profile_steps"] + 4
    return {
        name: f"{reason} (it ended after {stages.counted(steps, 'step')}, {needed} are enough)"
        if name in ("kineto", "graph", "links")
        else reason
        for name, reason in missing.items()
    }


def _findings(job: Job, planned: plan.Plan, safety: Mapping[str, str]) -> Iterator[ReportedFinding]:
    tried: list[tuple[Rewrite, str, str | None]] = [(rewrite, "found", None) for rewrite in planned.rewrites]
    tried += [(rewrite, "rejected", f"{DISPROVED}: {reason}") for rewrite, reason in planned.rejected]
    for rewrite, status, reason in (item for item in tried if item[0].form is None):
        yield summary.reported(
            rewrite.finding,
            status,
            reason,
            rewrite.safety.value,
            title=rewrite.title,
            diff=patch.build([rewrite], job.read).diff,
            edits=rewrite.edits if status == "found" else (),
        )
    for finding, reason in planned.suggestions:
        yield summary.reported(finding, "suggested", reason, safety.get(finding.rule))


def _place(entry: ReportedFinding) -> tuple[str, int, int, str, str]:
    return entry.path or "", entry.line or 0, entry.column or 0, entry.rule, entry.title


def _redacted(file: CheckedFile, redactor: Redactor) -> CheckedFile:
    clean = redactor.value(file)
    return replace(clean, findings=summary.exact(file.findings, clean.findings))


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _explained(asked: Asked, job: Job, profile: Profile, matched: stages.Matched) -> Explanation | None:
    if asked.why is None:
        return None
    name, line = asked.why
    given = Path(name).resolve()
    inside = given.is_relative_to(job.root) and given.is_file()
    path = os.path.relpath(given, job.root) if inside else name
    return why.explain(profile, list(matched.rules.values()), matched.matches, path, line)


# --------------------------------------------------------------------------------------------------------- source alone


def _from_source(job: Job, path: Path, error: AdvisorError) -> _Look:
    """What the source shows of a script that could not be recorded."""
    glanced, errors = _glances(job)
    file = _empty(_shown(path), job.run.id, str(error))
    file = replace(file, findings=tuple(glanced), rule_errors=tuple(str(each) for each in errors))
    return _Look(_redacted(file, job.run.redactor), (error, *errors))


def _glances(job: Job) -> tuple[Sequence[ReportedFinding], tuple[RuleError, ...]]:
    rules = job.rules
    found, errors = glance.look(rules.asked, job.read(os.path.relpath(job.script, job.root)))
    entries = [
        ReportedFinding(
            rule=rule,
            status=NOT_MEASURED,
            title=seen.message,
            reason="not measured: only the source was looked at",
            estimate_us=None,
            saved_us=None,
            safety=rules.asked[rule].safety.value,
            fingerprint=seen.fingerprint(rule),
            **summary.placed(seen.span),
        )
        for rule, seen in found
    ]
    return sorted(entries, key=_place), errors


def _unreadable(path: Path, error: AdvisorError, run: str | None = None) -> CheckedFile:
    return _empty(_shown(path), run, str(error))


def _empty(path: str, run: str | None, reason: str) -> CheckedFile:
    return CheckedFile(
        path=path,
        run=run,
        status=NOT_MEASURED,
        reason=reason,
        step_ms=None,
        device=None,
        linked_share=None,
        missing={},
        findings=(),
        declines=(),
    )
