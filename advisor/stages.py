"""What each stage does with a job: call the stage's module, leave its file in the run directory, note what it found."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from advisor import analyze, calibration, match, patch, plan, summary
from advisor.capture import ncu
from advisor.capture.counters import Recording, Sampler, summarise, summarise_windows, visible_device
from advisor.capture.launch import Child, child_environment
from advisor.columns.table import Table
from advisor.correlate import Correlation, correlate
from advisor.errors import ArtifactError, NoStepsError, RuleError, ScriptError
from advisor.hardware import arch_name, lookup, reference_peak
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import Trace, read_trace
from advisor.ingest.probe import DeviceFacts, ProbeFacts, read_probe
from advisor.job import Job
from advisor.machine import environment
from advisor.measured import FileProfile
from advisor.model import Graph, Hardware, Outcome, Patch, Profile, Report, Safety, SingleCounters, Verdict
from advisor.rule import Rule
from advisor.verify import regions
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


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 step", "3 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ------------------------------------------------------------------------------------------------------------- capture


def capture(job: Job) -> None:
    """Stage 1: record the script, unless an interrupted run has; raises ArtifactError where a source has changed."""
    if job.run.has("probe.json") and job.run.has("capture.json"):
        check_sources(job)
        job.progress.note("taken from the interrupted run")
        return
    record(job, {name: getattr(job.config, name) for name in ("warmup", "steps", "profile_steps")})


def check_sources(job: Job) -> None:
    """Raises ArtifactError where a source is no longer the one that was recorded."""
    for path, digest in _captured(job)["sources"].items():
        if job.read(path).sha256 != digest:
            raise ArtifactError(f"{path} has changed since run {job.run.id} was recorded: start a new run")


def record(job: Job, options: Mapping[str, Any], *, least: int | None = None) -> int | None:
    """Run the script under the recording plan with its options; leaves the recordings and capture.json.

    Gives the number of steps of a script that ended by itself before everything was recorded, else None. Raises
    NoStepsError for such a script unless it made at least `least` steps.
    """
    work = job.run.folder("work") / "capture"
    spec = job.spec("advisor.capture.probe:CapturePlan", work, **options)
    marks: dict[str, float] = {}
    try:
        with sampled(job.run.path / "counters.json"), job.spawn(spec) as child:
            while (message := child.receive()) is not None:
                if message.get("event") == "phase":
                    marks[str(message["name"])] = time.monotonic()
                    job.progress.doing(str(message["name"]))
            child.wait()
            ended = _check_captured(child, options, least)
            steps = child.status().get("steps")
        _keep(job, work, "trace.json.gz", "annotated.json.gz", "graph.json", "probe.json")
    finally:  # the folder names places of this machine: of a failed run only what the script printed stays
        _keep(job, work, "output.log")
        shutil.rmtree(work.parent, ignore_errors=True)
    for name in ("trace.json.gz", "annotated.json.gz"):
        job.run.seal_trace(name)
    job.run.show_in_tensorboard("trace.json.gz")
    window = [marks[name] for name in ("timing", "profiling") if name in marks]
    sources = {path: job.read(path).sha256 for path in sorted(_recorded_sources(job))}
    job.run.write_json("capture.json", {"steps": steps, "timed_s": window, "sources": sources})
    return ended


def _keep(job: Job, work: Path, *names: str) -> None:
    for name in names:
        if (work / name).is_file():
            shutil.move(work / name, job.run.path / name)


def _captured(job: Job) -> dict[str, Any]:
    """What capture.json says; raises ArtifactError where it is of another form."""
    found = job.run.read_json("capture.json")
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("sources"), dict)
        or not isinstance(found.get("timed_s"), list)
    ):
        raise ArtifactError(f"capture.json of run {job.run.id} is damaged: start a new run")
    return found


def _recorded_sources(job: Job) -> set[str]:
    """The user's files that the recordings point into: their lines must not move under the run."""
    found = {os.path.relpath(job.script, job.root)}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            path = value.get("path")
            if isinstance(path, str) and "line" in value and (job.root / path).is_file():
                found.add(path)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)

    for name in ("graph.json", "probe.json"):
        if job.run.has(name):
            walk(job.run.read_json(name))
    return found


@contextmanager
def sampled(path: Path) -> Iterator[None]:
    """Sample the device's counters beside what runs inside, and keep them in a file."""
    sampler = Sampler(visible_device(os.environ))
    sampler.start()
    try:
        yield
    finally:
        sampler.stop().save(path)


def _check_captured(child: Child, options: Mapping[str, Any], least: int | None) -> int | None:
    """None for a script that was stopped once all was recorded, else the number of its steps, at least `least`."""
    status = child.status()
    if status.get("status") == "stopped":
        return None
    if status.get("status") != "ended":
        raise child.failure()
    steps = int(status.get("steps", 0))
    if steps == 0:
        raise NoStepsError(
            "the script ended without an optimizer step: give it arguments that make it train, or one of these forms",
            detail=CONVENTION,
        )
    if least is None or steps < least:
        needed = least or options["warmup"] + options["steps"] + options["profile_steps"] + 4
        raise NoStepsError(
            f"the script ended after {counted(steps, 'optimizer step')}, {needed} are needed: let it train for longer"
        )
    return steps


# ------------------------------------------------------------------------------------------------- ingest and analyze


@dataclass(frozen=True)
class Recorded:
    """What was recorded of a run, as typed values; `missing` gives the reason for what was not."""

    facts: ProbeFacts
    trace: Trace | None
    graphs: tuple[Graph, ...]
    correlation: Correlation | None
    missing: dict[str, str]
    software: dict[str, Any]


def ingest(job: Job) -> Recorded:
    """Stages 2 and 3: read the recordings, and link the time of the profiled steps to the nodes of the graphs."""
    path = job.run.path
    facts = read_probe(path / "probe.json", job.root)
    missing = dict(facts.missing)
    software = job.run.read_json("probe.json").get("software", {})
    trace = read_trace(path / "trace.json.gz") if job.run.has("trace.json.gz") else None
    if trace is None:
        missing["kineto"] = "the script ended before its steps were profiled"
    graphs: tuple[Graph, ...] = ()
    correlation = None
    if job.run.has("graph.json"):
        graphs, gaps = read_graphs(path / "graph.json", job.root)
        missing |= gaps
    else:
        missing.setdefault("graph", "the annotated run did not finish")
    if graphs and job.run.has("annotated.json.gz") and trace is not None:
        correlation = correlate(trace, read_trace(path / "annotated.json.gz"), graphs)
        missing |= correlation.missing
    nodes = sum(len(g.nodes) for g in graphs)
    job.progress.note(f"{len(trace.operators) if trace else 0} operators, {nodes} graph nodes")
    return Recorded(facts, trace, graphs, correlation, missing, software)


def _hardware(device: DeviceFacts) -> Hardware:
    """The datasheet's figures where the device is known, beside what was measured in the run."""
    known = lookup(device.name, device.sm_count) if device.name else None
    major, minor = device.capability or (None, None)
    arch = arch_name(major, minor, None if _is_amd(device) else 32)
    base = known or Hardware(name=device.name or "CPU", kind=device.kind, arch=arch, sm_count=device.sm_count)
    return replace(base, measured_flops=device.measured_flops, measured_bandwidth=device.measured_bandwidth)


def _is_amd(device: DeviceFacts) -> bool:
    return device.name is not None and device.name.startswith(("AMD", "Radeon"))


def _reference(job: Job, hardware: Hardware) -> tuple[float, str] | None:
    """The peak MFU divides by: the one that was given, the datasheet's, else what was calibrated."""
    if job.config.peak_flops:
        return job.config.peak_flops, "given with --peak"
    unmeasured = replace(hardware, measured_flops={}, measured_bandwidth=None)
    calibrated = calibration.measured(calibration.default_path(), unmeasured)
    return reference_peak(hardware) or calibration.reference(calibrated)


def analyse(job: Job, recorded: Recorded) -> Profile:
    """Stage 3b: the profile that the rules are asked about; leaves env.json."""
    facts, hardware = recorded.facts, _hardware(recorded.facts.device)
    peak = _reference(job, hardware)
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
        calls=facts.calls,
        breaks=facts.breaks,
        recompiled=facts.recompiled,
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
            operator_node=correlation.operator_node if correlation else (),
            executions=correlation.executions if correlation else (),
        )
    profile = _with_counters(job, profile)
    waits = [step.phases_us["data"] for step in profile.steps if "data" in step.phases_us]
    if hardware.kind == "cuda" and waits:
        profile = replace(profile, facts={**profile.facts, "data_idle_us": sum(waits) / len(waits)})
    job.run.write_json("env.json", summary.plain(profile.environment))
    _note_profile(job, profile)
    return profile


def _with_counters(job: Job, profile: Profile) -> Profile:
    """Device counters of the timed steps; on a machine without a GPU there are none to miss."""
    if profile.hardware.kind != "cuda" or not job.run.has("counters.json"):
        return profile
    recording = Recording.load(job.run.path / "counters.json")
    window = _captured(job)["timed_s"]
    counters = summarise(recording.samples, *window) if len(window) == 2 else ()
    return replace(profile, counters=counters, missing={**profile.missing, **recording.missing})


def _note_profile(job: Job, profile: Profile) -> None:
    median = profile.median_step_us()
    parts = [f"{median / 1e3:.1f} ms a step"] if median else []
    if profile.utilisation.mfu is not None:
        parts.append(f"MFU {profile.utilisation.mfu:.1%}")
    if profile.linked_share is not None:
        parts.append(f"{profile.linked_share:.1%} of the time linked to source lines")
    job.progress.note(", ".join(parts))


def count_singly(job: Job) -> tuple[SingleCounters, ...]:
    """Counters of the kernels and operators with most recoverable time, where they were asked for; leaves ncu.csv."""
    if not (job.config.ncu or job.config.replay) or not job.run.has("trace.json.gz"):
        return ()
    from advisor import singles

    table, profile = singles.look(job.run.path / "trace.json.gz")
    interpreter = job.config.python or sys.executable
    found: list[SingleCounters] = []
    if job.config.ncu:
        job.progress.doing("counting kernels with Nsight Compute")
        found += _count_kernels(job, table, profile, interpreter)
    if job.config.replay:
        job.progress.doing("replaying operators")
        found += singles.replayed(table, profile, interpreter)
    job.run.write_json("singles.json", [summary.plain(item) for item in found])
    return tuple(found)


def _count_kernels(job: Job, table: Table, profile: FileProfile, interpreter: str) -> tuple[SingleCounters, ...]:
    """By calls of the operators that launch them; what these do not launch, a compiler's kernels, in the script."""
    from advisor import singles

    pages = [job.run.path / "ncu.csv", job.run.path / "ncu_step.csv"]
    work = job.run.folder("work") / "ncu"
    names = [cost.name for cost in singles.top(profile, "kernel", singles.KERNELS)]
    try:
        calls = singles.launching(table, names)
        if calls:
            work.mkdir(parents=True, exist_ok=True)
            ncu.profile_calls(calls, names, pages[0], work, interpreter=interpreter)
        found = singles.counted(table, profile, [page for page in pages if page.is_file()])
        left = [item.name for item in found if item.reason is not None]
        if left:
            spec = job.spec(ncu.PLAN, work, warmup=job.config.warmup)
            ncu.profile_script(spec, left, pages[1], interpreter=interpreter)
            found = singles.counted(table, profile, [page for page in pages if page.is_file()])
    finally:
        shutil.rmtree(work.parent, ignore_errors=True)
    return found


# -------------------------------------------------------------------------------------------------------- match, verify


@dataclass(frozen=True)
class Matched:
    """The rules that were asked, what they said, and the errors of rules that raised or could not be loaded."""

    rules: dict[str, Rule]
    matches: match.Matches
    errors: tuple[RuleError, ...]


def find(job: Job, profile: Profile) -> Matched:
    """Stage 4: ask the selected rules; leaves findings.json."""
    rules = job.rules.asked
    if profile.median_step_us() is None:
        raise ScriptError("no step was timed: let the script train for longer")
    script = os.path.relpath(job.script, job.root)
    ctx = match.context(profile, job.read, job.config.worth, script, job.files_in)
    matches = match.match(ctx, list(rules.values()), frozenset(Safety(name) for name in job.config.allow))
    job.run.write_json(
        "findings.json",
        {
            "findings": [summary.plain(f) for f in matches.findings],
            "declines": [summary.plain(d) for d in matches.declines],
        },
    )
    job.progress.note(f"{counted(len(matches.findings), 'finding')}, {counted(len(matches.declines), 'decline')}")
    return Matched(rules, matches, (*job.rules.errors, *matches.errors))


def order(job: Job, matched: Matched) -> plan.Plan:
    """Stage 5: the rewrites in the order in which they are tried; leaves plan.json."""
    allowed = frozenset(Safety(name) for name in job.config.allow)
    planned = plan.plan(matched.matches.findings, matched.rules, job.read, allowed, frozenset(job.config.select))
    suggested = [{"finding": f"{finding.rule}@{finding.span}", "reason": why} for finding, why in planned.suggestions]
    job.run.write_json("plan.json", {"order": [r.id for r in planned.rewrites], "suggested": suggested})
    job.progress.note(counted(len(planned.rewrites), "rewrite") + " to try")
    return planned


def prove_regions(job: Job, profile: Profile, planned: plan.Plan) -> plan.Plan:
    """Run every region that a rewrite replaces alone, against its replacement; leaves regions.json.

    A rewrite whose region is not proved to be the same function is rejected before a script runs with it.
    """
    interpreter = job.config.python or sys.executable

    def run(asked: Sequence[regions.Job]) -> Sequence[Mapping[str, Any]]:
        job.progress.doing("comparing regions with their replacements")
        work = job.run.folder("work") / "regions"
        work.mkdir(parents=True, exist_ok=True)
        environment = child_environment(job.spec("", work), interpreter)
        try:
            return regions.run_child(asked, work, interpreter=interpreter, environment=environment)
        finally:
            shutil.rmtree(work.parent, ignore_errors=True)

    proofs = regions.prove(planned.rewrites, profile.graphs, run)
    job.run.write_json("regions.json", summary.plain(proofs))
    wrong = {name: "; ".join(proof.reasons) for name, proof in proofs.items() if not proof.ok}
    return replace(
        planned,
        rewrites=tuple(r for r in planned.rewrites if r.id not in wrong),
        rejected=tuple((r, wrong[r.id]) for r in planned.rewrites if r.id in wrong),
        proofs=proofs,
    )


def check_patch(job: Job, planned: plan.Plan) -> None:
    """Stage 6: all rewrites in their first form together; notes how many do not fit, before the script runs again."""
    whole = patch.build([rewrite for rewrite in planned.rewrites if rewrite.form is None], job.read)
    left = f", {counted(len(whole.skipped), 'rewrite')} in conflict" if whole.skipped else ""
    left += f", {counted(len(planned.rejected), 'rewrite')} not the same function" if planned.rejected else ""
    job.progress.note(counted(len(whole.sources), "file") + " to change" + left)


def verify(job: Job, profile: Profile, planned: plan.Plan) -> Verdict:
    """Stage 7: search the rewrites for the best proven patch; leaves verdicts.json.

    The work folder goes, the trials stay for a resumed run.
    """
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
        counters = work / "counters.json"
        with sampled(counters), ProcessLab(job.spawn, spec, work, settings, on_progress=job.progress.doing) as lab:
            verdict = search(
                planned.rewrites,
                lambda rewrites: patch.build(rewrites, job.read),
                lab,
                allow=frozenset(Safety(name) for name in config.allow),
                min_quads=config.min_quads,
                physical_floor_us=_physical_floor_us(profile),
                baselines=config.baselines,
                on_progress=job.progress.doing,
            )
            kept = [r for r in planned.rewrites if r.id in verdict.kept]
            windows = [lab.block_windows(patch.build(rewrites, job.read)) for rewrites in ((), kept)]
        if device.kind == "cuda" and verdict.outcome is Outcome.IMPROVED:
            samples = Recording.load(counters).samples
            before, after = (summarise_windows(samples, found) for found in windows)
            verdict = replace(verdict, counters_before=before, counters_after=after)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    verdict = replace(verdict, before=profile.utilisation)
    job.run.write_json("verdicts.json", summary.plain(verdict))
    job.progress.note(f"{verdict.outcome.value}, {counted(len(verdict.trials), 'trial')}")
    return verdict


def _physical_floor_us(profile: Profile) -> float | None:
    """Least step time the model's arithmetic needs at the datasheet's peak; None where there is no datasheet."""
    flops, peaks = profile.utilisation.model_flops_per_step, profile.hardware.peak_flops
    return flops / max(peaks.values()) * 1e6 if flops and peaks else None


def _batch_divisor(profile: Profile) -> int:
    """Share of the batch the proof uses, so that activations in twice the precision fit beside what else is there."""
    memory, peak = profile.hardware.hbm_bytes, profile.peak_bytes
    if profile.hardware.kind != "cuda" or not memory or not peak:
        return 1
    return next((n for n in (1, 2, 4, 8) if 2 * peak / n <= 0.8 * memory), 16)


def report(
    job: Job,
    profile: Profile,
    matched: Matched,
    planned: plan.Plan,
    verdict: Verdict,
    singles: tuple[SingleCounters, ...] = (),
) -> tuple[Report, Patch, tuple[RuleError, ...]]:
    """Stage 8: the report as JSON and as a page, the proven patch, and the errors of rules on the way."""
    from advisor.reports.html import render_html
    from advisor.reports.jsonform import render_json

    kept = [r for r in planned.rewrites if r.id in verdict.kept]
    proven = patch.build(kept, job.read)
    diffs = {rewrite.id: diff for rewrite, diff in patch.steps(proven, job.read) if diff}
    for rewrite in (*planned.rewrites, *(rewrite for rewrite, _ in planned.rejected)):
        diffs.setdefault(rewrite.id, patch.build([rewrite], job.read).diff)
    errors = (*matched.errors, *planned.errors)
    results = summary.Results(
        run=job.run.id,
        script=os.path.relpath(job.script, job.root),
        profile=profile,
        declines=matched.matches.declines,
        plan=planned,
        patch=proven,
        diffs=diffs,
        verdict=verdict,
        safety={name: rule.safety.value for name, rule in matched.rules.items()},
        seconds=dict(job.progress.seconds),
        errors=errors,
    )
    whole = replace(summary.report_of(results), single_counters=singles)
    found = job.run.redactor.value(whole)
    found = replace(found, findings=summary.exact(whole.findings, found.findings))
    _write_patch(job, proven)
    job.run.write("report.json", render_json(found))
    job.run.write("report.html", render_html(found))
    job.progress.note(os.path.relpath(job.run.path / "report.html"))
    return found, proven, errors


def _write_patch(job: Job, proven: Patch) -> None:
    """The whole patch and one diff per rewrite to read, and the edits themselves, which `advisor apply` uses."""
    job.run.write("patch.diff", proven.diff)
    changing = [(rewrite, diff) for rewrite, diff in patch.steps(proven, job.read) if diff]
    for number, (rewrite, diff) in enumerate(changing, start=1):
        job.run.write(f"{number:02d}-{rewrite.finding.rule}.patch", diff)
    files = {path: summary.plain(edit) for path, edit in patch.edits(proven, job.read).items()}
    job.run.write_json("patch.json", {"rewrites": [r.id for r in proven.rewrites], "files": files})
