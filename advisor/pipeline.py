"""optimize(): the stages in order, each reading what the one before it left in the run directory."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from advisor import analyze, match, patch, plan, registry, rundir, summary
from advisor.capture.launch import Child
from advisor.config import Config
from advisor.correlate import Correlation, correlate
from advisor.errors import NoStepsError, RuleError, ScriptError, UsageError
from advisor.hardware import lookup, reference_peak
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import Trace, read_trace
from advisor.ingest.probe import DeviceFacts, ProbeFacts, read_probe
from advisor.machine import environment, project_root
from advisor.model import Graph, Hardware, Patch, Profile, Report, Safety, Verdict
from advisor.progress import Progress
from advisor.redact import Redactor
from advisor.rundir import RunDir
from advisor.session import Spec
from advisor.source import Source
from advisor.verify.lab import ProcessLab, Settings
from advisor.verify.search import search

CONVENTION = """\
# either: a file with these three names (the KernelBench form)
class Model(torch.nn.Module): ...
def get_init_inputs(): return [arguments, of, Model]
def get_inputs(): return [tensors, of, one, forward]

# or: --entry module:function, where the function returns (model, batch) or (model, batch, loss)
def entry():
    model = MyModel()
    batch = (torch.randn(8, 128),)
    return model, batch, lambda output: output.float().square().mean()
"""


@dataclass
class Request:
    """What the user asked for; `run_id` is set as soon as the run has a directory."""

    script: Path | None
    arguments: tuple[str, ...]
    config: Config
    entry: str | None = None
    out: Path | None = None
    resume: str | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class Result:
    """The report, where it lies, and the errors of rules that raised."""

    report: Report
    folder: Path
    errors: tuple[RuleError, ...]


@dataclass
class _Job:
    """One run on its way through the stages."""

    script: Path
    arguments: tuple[str, ...]
    entry: str | None
    root: Path
    config: Config
    run: RunDir
    progress: Progress
    sources: dict[str, Source] = field(default_factory=dict)

    def read(self, path: str) -> Source:
        """A source of the user, parsed once."""
        if path not in self.sources:
            self.sources[path] = Source.read(self.root, path)
        return self.sources[path]

    def spec(self, plan_name: str, out: Path, **options: Any) -> Spec:
        """A run of the user's script under a plan."""
        return Spec(
            script=str(self.script),
            argv=self.arguments,
            root=str(self.root),
            out=str(out),
            plan=plan_name,
            seed=self.config.seed,
            entry=self.entry,
            options=options,
        )

    def spawn(self, spec: Spec) -> Child:
        """Start a child for a spec; the way every stage runs the user's script."""
        return Child(spec, interpreter=self.config.python or sys.executable, redact=self.run.redactor.text)


def optimize(request: Request, progress: Progress) -> Result:
    """Run all stages; raises AdvisorError for what the user can mend, KeyboardInterrupt leaves a resumable run."""
    job = _begin(request, progress)
    with progress.stage("capture"):
        _capture(job)
    with progress.stage("ingest"):
        recorded = _ingest(job)
    with progress.stage("analyze"):
        profile = _analyze(job, recorded)
    with progress.stage("match"):
        rules, matches, errors = _match(job, profile)
    with progress.stage("plan"):
        planned = plan.plan(matches.findings, rules, job.read, frozenset(Safety(name) for name in job.config.allow))
        errors = (*errors, *planned.errors)
        progress.note(_counted(len(planned.rewrites), "rewrite") + " to try")
        job.run.write_json("plan.json", {"order": [r.id for r in planned.rewrites]})
    with progress.stage("patch"):
        whole = patch.build(planned.rewrites, job.read)
        progress.note(_counted(len(whole.sources), "file") + " to change")
    with progress.stage("verify"):
        verdict = _verify(job, profile, planned)
    with progress.stage("report"):
        report = _report(job, profile, matches, planned, verdict, rules, errors)
        progress.note(f"{os.path.relpath(job.run.path / 'report.html')}")
    return Result(report, job.run.path, errors)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --------------------------------------------------------------------------------------------------------------- begin


def _begin(request: Request, progress: Progress) -> _Job:
    redactor = Redactor.of_machine()
    if request.resume is not None:
        run = rundir.find(request.resume, request.out, redactor)
        asked = rundir.request_of(run)
        root = (run.path / asked["root"]).resolve()
        script, arguments, entry = root / asked["script"], tuple(asked["arguments"]), asked["entry"]
    else:
        assert request.script is not None
        if not request.script.exists():
            raise UsageError(f"no such file: {request.script}")
        script, arguments, entry = request.script.resolve(), request.arguments, request.entry
        root = project_root(script)
        Source.read(root, os.path.relpath(script, root))
        run = rundir.create(request.out, redactor)
    request.run_id = run.id
    job = _Job(script, arguments, entry, root, request.config, run, progress)
    job.read(os.path.relpath(script, root))
    if request.resume is None:
        run.write_json(
            rundir.REQUEST,
            {
                "schema": summary.SCHEMA,
                "script": os.path.relpath(script, root),
                "arguments": list(arguments),
                "entry": entry,
                "root": os.path.relpath(root, run.path.resolve()),
            },
        )
    return job


# ------------------------------------------------------------------------------------------------------------- capture


def _capture(job: _Job) -> None:
    if job.run.has("probe.json") and job.run.has("capture.json"):
        job.progress.note("taken from the interrupted run")
        return
    work = job.run.folder("work") / "capture"
    options = {name: getattr(job.config, name) for name in ("warmup", "steps", "profile_steps")}
    spec = job.spec("advisor.capture.probe:CapturePlan", work, **options)
    with job.spawn(spec) as child:
        while (message := child.receive()) is not None:
            if message.get("event") == "phase":
                job.progress.doing(str(message["name"]))
        child.wait()
        _check_captured(job, child)
    for name in ("trace.json.gz", "annotated.json.gz", "graph.json", "probe.json", "output.log"):
        if (work / name).is_file():
            shutil.move(work / name, job.run.path / name)
    for name in ("trace.json.gz", "annotated.json.gz"):
        job.run.seal_trace(name)
    job.run.write_json("capture.json", {"steps": child.status().get("steps")})
    shutil.rmtree(work.parent, ignore_errors=True)


def _check_captured(job: _Job, child: Child) -> None:
    status = child.status()
    if status.get("status") == "stopped":
        return
    if status.get("status") != "ended":
        raise child.failure()
    steps = int(status.get("steps", 0))
    needed = job.config.warmup + job.config.steps + job.config.profile_steps + 4
    if steps == 0:
        raise NoStepsError(
            "the script ended without an optimizer step: give it arguments that make it train, or one of these forms",
            detail=CONVENTION,
        )
    raise NoStepsError(f"the script ended after {steps} optimizer steps, {needed} are needed: let it train for longer")


# ------------------------------------------------------------------------------------------------- ingest and analyze


@dataclass(frozen=True)
class _Recorded:
    facts: ProbeFacts
    trace: Trace | None
    graphs: tuple[Graph, ...]
    correlation: Correlation | None
    missing: dict[str, str]
    software: dict[str, Any]


def _ingest(job: _Job) -> _Recorded:
    path = job.run.path
    facts = read_probe(path / "probe.json", job.root)
    missing = dict(facts.missing)
    software = json.loads((path / "probe.json").read_text(encoding="utf-8")).get("software", {})
    trace = read_trace(path / "trace.json.gz") if job.run.has("trace.json.gz") else None
    if trace is None:
        missing["kineto"] = "the script ended before its steps were profiled"
    graphs: tuple[Graph, ...] = ()
    correlation = None
    if job.run.has("graph.json") and job.run.has("annotated.json.gz") and trace is not None:
        graphs, gaps = read_graphs(path / "graph.json", job.root)
        missing |= gaps
        correlation = correlate(trace, read_trace(path / "annotated.json.gz"), graphs)
        missing |= correlation.missing
    else:
        missing["graph"] = "the annotated run did not finish"
    nodes = sum(len(g.nodes) for g in graphs)
    job.progress.note(f"{len(trace.operators) if trace else 0} operators, {nodes} graph nodes")
    return _Recorded(facts, trace, graphs, correlation, missing, software)


def _hardware(device: DeviceFacts) -> Hardware:
    """The datasheet's figures where the device is known, beside what was measured in the run."""
    known = lookup(device.name, device.sm_count) if device.name else None
    base = known or Hardware(name=device.name or "CPU", kind=device.kind, sm_count=device.sm_count)
    return replace(base, measured_flops=device.measured_flops, measured_bandwidth=device.measured_bandwidth)


def _analyze(job: _Job, recorded: _Recorded) -> Profile:
    facts, hardware = recorded.facts, _hardware(recorded.facts.device)
    peak = (job.config.peak_flops, "given with --peak-flops") if job.config.peak_flops else reference_peak(hardware)
    command = (os.path.relpath(job.script, job.root), *job.arguments)
    correlation = recorded.correlation
    profile = Profile(
        environment=environment(job.root, command, job.config.seed, recorded.software, hardware),
        hardware=hardware,
        steps=(),
        graphs=recorded.graphs,
        costs=correlation.costs if correlation else (),
        loaders=facts.loaders,
        optimizers=facts.optimizers,
        step_us=facts.step_us,
        tokens_per_step=facts.tokens_per_step,
        tokens_source=facts.tokens_source,
        losses=facts.losses,
        peak_bytes=facts.peak_bytes,
        linked_share=correlation.linked_share if correlation else None,
        facts=dict(facts.flags),
        missing=recorded.missing,
    )
    if recorded.trace is not None:
        profile = analyze.analyze(
            profile,
            recorded.trace,
            reference_peak=peak,
            operator_cost=correlation.operator_cost if correlation else (),
            executions=correlation.executions if correlation else (),
        )
    waits = [step.phases_us["data"] for step in profile.steps if "data" in step.phases_us]
    if hardware.kind == "cuda" and waits:
        profile = replace(profile, facts={**profile.facts, "data_idle_us": sum(waits) / len(waits)})
    job.run.write_json("env.json", summary.plain(profile.environment))
    _note_profile(job, profile)
    return profile


def _note_profile(job: _Job, profile: Profile) -> None:
    median = profile.median_step_us()
    parts = [f"{median / 1e3:.1f} ms a step"] if median else []
    if profile.utilisation.mfu is not None:
        parts.append(f"MFU {profile.utilisation.mfu:.1%}")
    if profile.linked_share is not None:
        parts.append(f"{profile.linked_share:.1%} of the time linked to source lines")
    job.progress.note(", ".join(parts))


# -------------------------------------------------------------------------------------------------------- match, verify


def _match(job: _Job, profile: Profile) -> tuple[dict[str, Any], match.Matches, tuple[RuleError, ...]]:
    folder = Path(job.config.rules_folder) if job.config.rules_folder else None
    loaded, errors = registry.load(folder)
    unknown = [r for r in (*job.config.select, *job.config.ignore) if r not in loaded]
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]}: `advisor rules` lists them")
    rules = {
        name: item.rule
        for name, item in loaded.items()
        if name not in job.config.ignore and (not job.config.select or name in job.config.select)
    }
    if profile.median_step_us() is None:
        raise ScriptError("no step was timed: let the script train for longer")
    matches = match.match(match.context(profile, job.read, job.config.worth), list(rules.values()))
    job.run.write_json(
        "findings.json",
        {
            "findings": [summary.plain(f) for f in matches.findings],
            "declines": [summary.plain(d) for d in matches.declines],
        },
    )
    job.progress.note(f"{_counted(len(matches.findings), 'finding')}, {_counted(len(matches.declines), 'decline')}")
    return rules, matches, (*errors, *matches.errors)


def _verify(job: _Job, profile: Profile, planned: plan.Plan) -> Verdict:
    """Search the rewrites for the best proven patch; the work folder goes, the trials stay for a resumed run."""
    config, device = job.config, profile.hardware
    work = job.run.folder("work")
    context = f"{profile.environment.torch} {device.name} {profile.environment.driver}"
    settings = Settings(
        seconds=config.time_s,
        trajectory_steps=config.trajectory_steps,
        min_quads=config.min_quads,
        context=context,
        trials=job.run.path / "trials",
        first_divisor=_batch_divisor(profile),
    )
    spec = job.spec("", work)
    try:
        with ProcessLab(job.spawn, spec, work, settings, on_progress=job.progress.doing) as lab:
            verdict = search(
                planned.rewrites,
                lambda rewrites: patch.build(rewrites, job.read),
                lab,
                allow=frozenset(Safety(name) for name in config.allow),
                baselines=config.baselines,
                on_progress=job.progress.doing,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    verdict = replace(verdict, before=profile.utilisation, counters_before=profile.counters)
    job.run.write_json("verdicts.json", summary.plain(verdict))
    job.progress.note(f"{verdict.outcome.value}, {_counted(len(verdict.trials), 'trial')}")
    return verdict


def _batch_divisor(profile: Profile) -> int:
    """Share of the batch the proof uses, so that activations in twice the precision fit beside what else is there."""
    memory, peak = profile.hardware.hbm_bytes, profile.peak_bytes
    if profile.hardware.kind != "cuda" or not memory or not peak:
        return 1
    return next((n for n in (1, 2, 4, 8) if 2 * peak / n <= 0.8 * memory), 16)


def _report(
    job: _Job,
    profile: Profile,
    matches: match.Matches,
    planned: plan.Plan,
    verdict: Verdict,
    rules: dict[str, Any],
    errors: Sequence[RuleError],
) -> Report:
    from advisor.reports.html import render_html
    from advisor.reports.jsonform import render_json

    kept = [r for r in planned.rewrites if r.id in verdict.kept]
    proven = patch.build(kept, job.read)
    diffs = {rewrite.id: diff for rewrite, diff in patch.steps(proven, job.read)}
    for rewrite in planned.rewrites:
        diffs.setdefault(rewrite.id, patch.build([rewrite], job.read).diff)
    results = summary.Results(
        run=job.run.id,
        script=os.path.relpath(job.script, job.root),
        profile=profile,
        declines=matches.declines,
        plan=planned,
        patch=proven,
        diffs=diffs,
        verdict=verdict,
        safety={name: rule.safety.value for name, rule in rules.items()},
        seconds=dict(job.progress.seconds),
        errors=errors,
    )
    report = job.run.redactor.value(summary.report_of(results))
    _write_patch(job, proven)
    job.run.write("report.json", render_json(report))
    job.run.write("report.html", render_html(report))
    return report


def _write_patch(job: _Job, proven: Patch) -> None:
    """The whole patch and one diff per rewrite to read, and the edits themselves, which `advisor apply` uses."""
    job.run.write("patch.diff", proven.diff)
    for number, (rewrite, diff) in enumerate(patch.steps(proven, job.read), start=1):
        job.run.write(f"{number:02d}-{rewrite.finding.rule}.patch", diff)
    edits = [summary.plain(edit) for rewrite in proven.rewrites for edit in rewrite.edits]
    job.run.write_json(
        "patch.json", {"base": dict(proven.base), "rewrites": [r.id for r in proven.rewrites], "edits": edits}
    )
