"""A report on one screen of a terminal: how much faster, whether it is safe, what changed, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from advisor.model import Baseline, Report, ReportedFinding, SingleCounters

from . import wording
from .lines import LABEL, STYLES, column, encodable, headline, plain, print_line, row, wrapped

_TITLES: Mapping[str, tuple[str, int]] = {  # heading and the most that are shown
    "applied": ("changed", 8),
    "rejected": ("tried and rejected", 3),
    "suggested": ("suggested, not applied", 3),
    "declined": ("looked at and left alone", 3),
}
_HEIGHT = 40  # lines of one screen
_BASELINES = 5
_WRAPPED = 4  # most lines of one finding where nobody looks at a screen
_INDENT = 6  # of the second line of a finding


def render_terminal(report: Report, console: Console, *, folder: str | None = None) -> None:
    """Print the report; `folder` is where the run's files lie, `.advisor/runs/<run>` where it is not given."""
    report = wording.sayable(report)
    width = max(console.width, 40)
    for line in _lines(report, width, most=2 if console.is_terminal else _WRAPPED):
        print_line(console, line, width)
    for line in _next_steps(report, folder):
        console.print(encodable(line, console.encoding), highlight=False, soft_wrap=True)


def _lines(report: Report, width: int, most: int) -> Iterator[Text]:
    head = [*_verdict(report, width), *_figures(report, width), Text()]
    tail = [*_baselines(report.baselines, width), Text()] if report.baselines else []
    yield from head
    if report.findings:
        yield from _findings(report, width, room=_HEIGHT - len(head) - len(tail) - 3, most=most)
        yield Text()
    yield from tail


# ------------------------------------------------------------------------------------------------------------- verdict


def _verdict(report: Report, width: int) -> Iterator[Text]:
    yield from headline(wording.headline(report), width)
    about = f"{plain(report.script)} on {plain(report.hardware.name)}, run {plain(report.run)}"
    yield Text(f"  {about}", style="dim")
    if report.outcome != "improved":
        for reason in report.reasons[:2]:
            yield Text(f"  {plain(reason)}")
    yield Text()


def _figures(report: Report, width: int) -> Iterator[Text]:
    if wording.known(report.tokens_per_s_before) or wording.known(report.tokens_per_s_after):
        before, after = report.tokens_per_s_before, report.tokens_per_s_after
        unit = "samples/s" if report.throughput_unit == "samples" else "tokens/s"
        yield row(unit, _change(wording.count(before), wording.count(after)))
    yield row("MFU", *_mfu(report))
    if wording.known(report.peak_gib_before) or wording.known(report.peak_gib_after):
        yield row("memory", _change(wording.gib(report.peak_gib_before), wording.gib(report.peak_gib_after)), " peak")
    yield from _proof(report, width)
    yield from _singles(report.single_counters, width)
    if missing := sorted(report.missing):
        yield row("not known", ", ".join(plain(name) for name in missing), style="")
    for failure in report.rule_errors[:2]:
        yield row("rule error", plain(failure), style="red")


def _singles(found: tuple[SingleCounters, ...], width: int) -> Iterator[Text]:
    """The kernel and the operator with most recoverable time, and how many more the page has."""
    counted = [each for each in found if each.counters]
    for kind in ("kernel", "operator"):
        first = next((each for each in counted if each.kind == kind), None)
        if first is not None:
            name = plain(first.name)
            room = width - LABEL - 2
            yield row(kind, name if cell_len(name) <= room else f"{name[: room - 3]}...")
            yield row("", plain(wording.metrics(first.counters)))
    if len(found) > 2:
        yield row("", f"counters of {len(found)} kernels and operators are in the page")


def _change(before: str, after: str) -> str:
    return before if after == wording.UNKNOWN else wording.change(before, after)


def _mfu(report: Report) -> tuple[str, str]:
    if not (wording.known(report.mfu_before) or wording.known(report.mfu_after)):
        reason = wording.why_missing(report.missing, "mfu", "peak", "flops", "tokens")
        return wording.UNKNOWN, f" ({plain(reason)})"
    shares = _change(wording.percent(report.mfu_before), wording.percent(report.mfu_after))
    of_peak = wording.of_peak(report.before)
    return shares, f" {plain(of_peak)}" if of_peak else ""


def _proof(report: Report, width: int) -> Iterator[Text]:
    said = wording.proof(report.numerics)
    yield row("numbers", plain(said.lead), style=STYLES[said.tone])
    compared, worst = plain(said.compared), plain(said.worst)
    if compared and cell_len(compared) + cell_len(worst) + LABEL + 4 <= width:
        yield row("", f"{compared}; {worst}" if worst else compared)
    else:
        yield from (row("", text) for text in (compared, worst) if text)
    if report.numerics is not None and not report.numerics.ok:
        yield from (row("", plain(reason)) for reason in report.numerics.reasons[:2])


# ------------------------------------------------------------------------------------------------------------ findings


def _findings(report: Report, width: int, *, room: int, most: int) -> Iterator[Text]:
    groups = {status: wording.by_status(report, status) for status in wording.statuses(report)[: len(_TITLES) + 1]}
    shown = _selection(groups, room)
    every = [finding for found in shown.values() for finding in found]
    rules = iter(column((plain(each.rule) for each in every), 24))
    places = iter(column((_place(each) for each in every), max(16, width // 3)))
    spare = room - sum(1 + len(shown[each]) + (len(shown[each]) < len(found)) for each, found in groups.items())
    for status, found in groups.items():
        title = _TITLES.get(status, (plain(status), 0))[0]
        yield Text.assemble((title, "bold"), f" ({len(found):,})")
        for finding in shown[status]:
            rule = (next(rules), "green" if status == "applied" else "")
            start = Text.assemble("  ", rule, "  ", (next(places), "dim"), "  ")
            remark = _remark(finding)
            parts = wrapped(remark, width - cell_len(start.plain), width - _INDENT)
            if most == _WRAPPED and len(parts) > most:
                parts[most - 1 :] = [" ".join(parts[most - 1 :])]
            if len(parts) > most or len(parts) - 1 > spare:
                parts = [remark]
            spare -= len(parts) - 1
            yield start.append(parts[0])
            yield from (Text(" " * _INDENT + part) for part in parts[1:])
        if len(found) > len(shown[status]):
            yield Text(f"  and {len(found) - len(shown[status]):,} more in the HTML report", style="dim")


def _selection(groups: Mapping[str, tuple[ReportedFinding, ...]], room: int) -> dict[str, tuple[ReportedFinding, ...]]:
    """The first findings of every group, one more of each in turn while `room` lines hold them."""
    counts = dict.fromkeys(groups, 0)
    lines = sum(1 + bool(found) for found in groups.values())  # a heading each, and the line that counts the rest
    for status in [status for turn in range(_HEIGHT) for status in groups if turn < _TITLES.get(status, ("", 2))[1]]:
        if lines < room and counts[status] < len(groups[status]):
            counts[status] += 1
            lines += counts[status] < len(groups[status])
    return {status: found[: counts[status]] for status, found in groups.items()}


def _remark(finding: ReportedFinding) -> str:
    saved = wording.saving(finding)
    if finding.status == "applied":
        said = f"{saved} per step" if saved else "saving not measured alone"
        return f"{said}, {plain(finding.safety)}" if finding.safety else said
    said = plain(finding.reason or finding.title)
    if finding.status == "suggested" and saved:
        return f"{saved} per step: {said}"
    if finding.needs:
        return f"{said} (needs {', '.join(plain(each) for each in finding.needs)})"
    return said


def _place(finding: ReportedFinding) -> str:
    if finding.path is None:
        return "-"
    path = plain(finding.path)
    return path if finding.line is None else f"{path}:{finding.line}"


# ----------------------------------------------------------------------------------------------------------- baselines


def _baselines(baselines: tuple[Baseline, ...], width: int) -> Iterator[Text]:
    yield Text("for comparison", style="bold")
    shown = baselines[:_BASELINES]
    labels = column((plain(each.label) for each in shown), max(20, width // 3))
    steps = [wording.milliseconds(each.step_us / 1000) if each.step_us is not None else "-" for each in shown]
    most = max(len(step) for step in steps)
    for label, step, baseline in zip(labels, steps, shown, strict=True):
        rest = []
        if wording.known(baseline.speedup):
            rest.append(f"{wording.ratio(baseline.speedup):>7}")
        if wording.known(baseline.mfu):
            rest.append(f"MFU {wording.percent(baseline.mfu)}")
        if baseline.reason:
            rest.append(plain(baseline.reason))
        yield Text.assemble("  ", label, "  ", step.rjust(most), "  ", "  ".join(rest))


# ---------------------------------------------------------------------------------------------------------- next steps


def _next_steps(report: Report, folder: str | None) -> Iterator[Text]:
    run = plain(report.run)
    if report.diff and report.outcome == "improved":
        yield Text.assemble(("apply   ", "dim"), (f"advisor apply {shlex.quote(run)}", "bold"))
    elif report.outcome == "inconclusive":
        yield Text("a longer run can settle it: give more time with --time")
    where = plain(folder) if folder is not None else f".advisor/runs/{run}"
    yield Text.assemble(("report  ", "dim"), f"{where.rstrip('/')}/report.html")
