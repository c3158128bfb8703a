"""A report of `advisor optimize` or `advisor check` as GitHub-flavoured Markdown that stays under a forge's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.model import Baseline, CheckedFile, CheckReport, Report, ReportedFinding, Trial

from . import markdown_parts as parts
from . import wording
from .ladder import ladder
from .markdown_fit import LIMIT, Block, few, fitted
from .markdown_text import cell, code, folded, table, text

_ELSEWHERE = "The whole report: `advisor report --html`, or `--json`."
_TITLES = {"rejected": "Tried and rejected", "suggested": "Suggested, not applied"}
_EVIDENCE = 40  # rewrites whose evidence is given


def render_markdown(report: Report, *, limit: int = LIMIT) -> str:
    """The whole report in at most `limit` bytes of UTF-8, and so in at most as many characters; 8,000 or more.

    What does not fit is shortened, the least important first, and named at the end: trials, what was left alone,
    evidence, then lines of the diff. The verdict and its table stay. ValueError for a limit that is too small.
    """
    return fitted([*_report(wording.sayable(report))], limit, elsewhere=_ELSEWHERE)


def _report(report: Report) -> Iterator[Block]:
    yield Block(name="verdict", weight=100, forms=(_verdict(report),))
    before, after = parts.uses(report)
    yield Block(name="figures", weight=99, forms=(parts.figures(before, after, ("as found", "with the patch")),))
    yield from _reasons(report)
    if applied := wording.by_status(report, "applied"):
        forms = [f"### Changed\n\n{parts.rewrites(applied, rows)}" for rows in few(len(applied))]
        yield Block(name="rewrites", weight=90, forms=(*forms, ""))
    if report.diff:
        yield parts.patches("the patch", 80, "The patch", report.diff)
    for status in wording.statuses(report):
        if status not in ("applied", "declined"):
            title = _TITLES.get(status, text(status.capitalize(), 60))
            found = wording.by_status(report, status)
            yield parts.listing("other findings", 60, title, found)
            for entry in found[:_EVIDENCE]:
                if entry.diff:
                    yield parts.patches("diffs not applied", 30, f"Not applied: {parts.label(entry)}", entry.diff)
    yield from _baselines(report.baselines)
    yield from _details(report)


def _verdict(report: Report) -> str:
    said = wording.headline(report)
    about = f"{code(report.script, 160)} on {cell(report.hardware.name, 80)}, run {code(report.run, 80)}"
    return f"## {text(said.lead, 200)}\n\n{about}" + (f"; {text(said.rest, 300)}" if said.rest else "")


def _reasons(report: Report) -> Iterator[Block]:
    lines = [parts.speed(report.timing), parts.proof(report.numerics)]
    told = "\n".join(f"- {line}" for line in lines if line)
    more = parts.bullets((*report.reasons, *(report.numerics.reasons if report.numerics else ())))
    yield Block(name="reasons", weight=85, forms=(f"{told}\n{more}".strip(), told, ""))
    if report.rule_errors:
        failed = f"Rules that failed:\n\n{parts.bullets(report.rule_errors)}"
        yield Block(name="rules that failed", weight=84, forms=(failed, f"{len(report.rule_errors)} rules failed", ""))


def _baselines(baselines: Sequence[Baseline]) -> Iterator[Block]:
    if not baselines:
        return
    rows = [
        (
            cell(each.label, 80),
            wording.milliseconds(None if each.step_us is None else each.step_us / 1000),
            wording.ratio(each.speedup),
            wording.percent(each.mfu),
            cell(each.reason or "", 200),
        )
        for each in baselines
    ]
    head = ("", "step", "speed-up", "MFU", "")
    forms = [table(head, rows[:most], right=(1, 2, 3)) for most in few(len(rows)) if most]
    yield Block(name="comparison", weight=50, forms=(*(f"### For comparison\n\n{form}" for form in forms), ""))


# ------------------------------------------------------------------------------------------------------------- details


def _details(report: Report) -> Iterator[Block]:
    yield from _evidence(report)
    if declined := wording.by_status(report, "declined"):
        yield parts.listing("what was left alone", 20, "Looked at and left alone", declined, fold=True)
    rungs = [
        (rung.name, wording.percent(rung.before), wording.percent(rung.after), cell(rung.reason or rung.meaning))
        for rung in ladder(report)
    ]
    shown = table(("", "as found", "with the patch", "what it is"), rungs, right=(1, 2))
    yield _folded("utilisation", 45, "From GPU utilisation to MFU", shown)
    yield from _time(report)
    if report.numerics is not None and report.numerics.worst:
        worst = report.numerics.worst
        forms = [
            folded(f"Errors against the {text(report.numerics.reference, 60)} reference", parts.errors(worst, rows))
            for rows in few(len(worst))
            if rows
        ]
        yield Block(name="numeric errors", weight=40, forms=(*forms, ""))
    if told := parts.operators(report.numerics, 200):
        yield _folded("operators", 38, "Operators of a step", told)
    if report.trials:
        title = f"Trials ({len(report.trials):,})"
        forms = [folded(title, _trials(report.trials, most)) for most in few(len(report.trials))]
        yield Block(name="trials", weight=10, forms=(*forms, ""))
    yield _folded("machine", 30, "The machine and the command", _environment(report))
    if report.missing:
        reasons = [f"{name}: {reason}" for name, reason in sorted(report.missing.items())]
        yield _folded("what is not known", 35, "Not known", parts.bullets(reasons, 40))
    if report.notes:
        yield _folded("notes on the figures", 33, "Notes on the figures", parts.bullets(report.notes, 40))


def _folded(name: str, weight: int, title: str, body: str) -> Block:
    return Block(name=name, weight=weight, forms=(folded(title, body), ""))


def _evidence(report: Report) -> Iterator[Block]:
    told = [entry for entry in report.findings if entry.evidence and entry.status != "declined"][:_EVIDENCE]
    for entry in told:
        yield _folded("evidence", 25, f"Evidence: {parts.label(entry)}", parts.evidence(entry.evidence[:30]))


def _time(report: Report) -> Iterator[Block]:
    phases = [(cell(name, 40), wording.microseconds(value)) for name, value in wording.phases(report)]
    regions = [
        (
            cell(each.name, 120),
            wording.microseconds(each.measured_us),
            wording.microseconds(each.floor_us),
            wording.microseconds(each.recoverable_us),
            cell(each.bound or "", 40),
        )
        for each in report.regions[:30]
    ]
    shown = [table(("phase", "time"), phases, right=(1,))] if phases else []
    if regions:
        head = ("kind of work", "time", "physical floor", "above it", "bound by")
        shown.append(table(head, regions, right=(1, 2, 3)))
    if shown:
        yield _folded("where a step goes", 42, "Where a step as found goes", "\n\n".join(shown))


def _trials(trials: Sequence[Trial], most: int) -> str:
    rows = [
        (
            cell(each.label, 120),
            cell(each.outcome.value),
            parts.speed(each.timing) or "-",
            cell("; ".join(each.reasons)),
        )
        for each in trials[:most]
    ]
    return parts.listed(table(("tried", "outcome", "speed-up", "reasons"), rows), len(trials), most)


def _environment(report: Report) -> str:
    about = report.environment
    lines = [parts.machine(about, report.hardware, parts.uses(report)[0])]
    if about.command:
        lines.append(f"command: {code(' '.join(about.command))}")
    facts = (("platform", about.platform), ("CPU", about.cpu), ("date", about.date), ("advisor", about.advisor))
    lines += [f"{name}: {cell(value)}" for name, value in facts if value]
    if about.commit:
        lines.append(f"commit: {code(about.commit)}{' with uncommitted changes' if about.dirty else ''}")
    lines += [f"{code(name)}: {cell(value)}" for name, value in sorted(about.variables.items())[:40]]
    if stages := wording.stages(report):
        lines.append("time of the stages: " + ", ".join(f"{cell(n, 40)} {wording.seconds(s)}" for n, s in stages[:20]))
    if report.mfu_definition:
        lines.append(f"MFU counts {cell(report.mfu_definition)}")
    return "\n".join(f"- {line}" for line in lines)


# --------------------------------------------------------------------------------------------------------------- check


def render_check_markdown(report: CheckReport, *, limit: int = LIMIT) -> str:
    """What `advisor check` found, shortened as a report is."""
    return fitted([*_check(report)], limit, elsewhere="Everything: `advisor check --output-format json`.")


def _check(report: CheckReport) -> Iterator[Block]:
    every = [entry for file in report.files for entry in file.findings]
    declines = sum(len(file.declines) for file in report.files)
    count = f"{len(every):,} finding{'s' * (len(every) != 1)}, {declines:,} left alone, {len(report.files):,} "
    yield Block(name="verdict", weight=100, forms=(f"## {count}file{'s' * (len(report.files) != 1)}",))
    for file in report.files:
        head = f"### {code(file.path)}\n\n{_state(file)}"
        yield Block(name="files", weight=90, forms=(head, code(file.path, 100), ""))
        yield from _findings(file.findings)
        if file.declines:
            yield parts.listing("what was left alone", 20, "Looked at and left alone", file.declines, fold=True)
        reasons = [f"{name}: {reason}" for name, reason in sorted(file.missing.items())]
        if reasons:
            yield _folded("what is not known", 30, "Not known", parts.bullets(reasons))
        if file.rule_errors:
            failed = f"Rules that failed:\n\n{parts.bullets(file.rule_errors)}"
            yield Block(name="rules that failed", weight=70, forms=(failed, ""))


def _state(file: CheckedFile) -> str:
    if file.status == "not measured":
        return f"not measured: {text(file.reason or 'it could not be run', 600)}"
    said = [f"{wording.milliseconds(file.step_ms)} a step"] if wording.known(file.step_ms) else []
    said += [f"on {text(file.device, 80)}"] if file.device else []
    if file.status == "partial":
        said.append(f"in part: {text(file.reason, 600)}" if file.reason else "in part")
    return ", ".join(said) or "measured"


def _findings(found: Sequence[ReportedFinding]) -> Iterator[Block]:
    if found:
        rows = few(len(found))
        yield Block(name="findings", weight=80, forms=(*(_found(found, most) for most in rows), ""))
    for entry in found:
        if entry.diff:
            yield parts.patches("rewrites", 40, f"Rewrite: {parts.label(entry)}", entry.diff)


def _found(found: Sequence[ReportedFinding], rows: int) -> str:
    shown = [
        (cell(entry.status, 40), wording.saving(entry) or "-", code(entry.rule), parts.place(entry), _said(entry))
        for entry in found[:rows]
    ]
    return parts.listed(table(("", "per step", "rule", "where", "what"), shown), len(found), rows)


def _said(entry: ReportedFinding) -> str:
    why = entry.reason if entry.status in ("suggested", "rejected") else None
    said = parts.what(entry) + (f"; not rewritten: {cell(why)}" if why else "")
    return f"{said} (needs {', '.join(cell(each, 60) for each in entry.needs)})" if entry.needs else said
