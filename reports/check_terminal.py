"""What `advisor check` found as lines: for a terminal, and as workflow commands that GitHub shows beside a change."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from advisor.model import CheckedFile, CheckReport, Explanation, Looked, ReportedFinding

from . import wording
from .lines import encodable, plain, wrapped

_DECLINES = 8  # most that are shown of one file; --output-format json has them all
_INDENT = 6

# ------------------------------------------------------------------------------------------------------------- terminal


def render_terminal(report: CheckReport, console: Console) -> None:
    """Print findings and declines of every file, a line or two each."""
    width = max(console.width, 40)
    for line in _lines(report, width):
        console.print(encodable(line, console.encoding), highlight=False, soft_wrap=True)


def _lines(report: CheckReport, width: int) -> Iterator[Text]:
    for file in report.files:
        yield Text.assemble((plain(file.path), "bold"), f"  {_state(file)}")
        for entry in file.findings:
            yield from _entry(entry, width)
        if file.declines:
            yield Text(f"  looked at and left alone ({len(file.declines):,})", style="dim")
        for entry in file.declines[:_DECLINES]:
            yield from _entry(entry, width)
        if len(file.declines) > _DECLINES:
            yield Text(f"    and {len(file.declines) - _DECLINES:,} more: --json lists them", style="dim")
        for name, reason in sorted(file.missing.items()):
            yield Text(f"  not known: {plain(name)}: {plain(reason)}", style="dim")
        for failure in file.rule_errors:
            yield Text(f"  rule error: {plain(failure)}", style="red")
        yield Text()
    yield Text(_total(report), style="bold")


def _state(file: CheckedFile) -> str:
    if file.status == "not measured":
        return f"not measured: {plain(file.reason or 'it could not be run')}"
    parts = [wording.milliseconds(file.step_ms) + " a step"] if wording.known(file.step_ms) else []
    parts += [f"on {plain(file.device)}"] if file.device else []
    if file.status == "partial":
        parts.append(f"in part: {plain(file.reason)}" if file.reason else "in part")
    return ", ".join(parts) + (f", run {plain(file.run)}" if file.run else "")


def _entry(entry: ReportedFinding, width: int) -> Iterator[Text]:
    style = {"found": "bold yellow", "declined": "dim"}.get(entry.status, "yellow")
    start = Text.assemble("  ", (f"{place(entry)}: ", ""), (plain(entry.rule), style), "  ")
    parts = wrapped(_said(entry), width - len(start.plain), width - _INDENT)
    yield start.append(parts[0])
    yield from (Text(" " * _INDENT + part) for part in parts[1:])


def _said(entry: ReportedFinding) -> str:
    """The message with what it could save, why nothing is rewritten, and what is missing to tell."""
    said = plain(entry.title)
    if entry.estimate_us is not None and wording.known(entry.estimate_us[1]):
        said += f"; could save up to {wording.duration(entry.estimate_us[1])} per step"
    if entry.status in ("suggested", "rejected") and entry.reason:
        said += f"; not rewritten: {plain(entry.reason)}"
    if entry.status == "not measured":
        said += "; not measured"
    if entry.needs:
        said += f" (needs {', '.join(plain(each) for each in entry.needs)})"
    return said


def place(entry: ReportedFinding) -> str:
    """`file:line`, a dash for what has no place."""
    if entry.path is None:
        return "-"
    return plain(entry.path) if entry.line is None else f"{plain(entry.path)}:{entry.line}"


def _total(report: CheckReport) -> str:
    every = [entry for file in report.files for entry in file.findings]
    unmeasured = sum(entry.status == "not measured" for entry in every)
    declines = sum(len(file.declines) for file in report.files)
    files = f"{len(report.files)} file{'s' * (len(report.files) != 1)}"
    found = len(every) - unmeasured
    text = f"{found} finding{'s' * (found != 1)}, {declines} decline{'s' * (declines != 1)} in {files}"
    return text + (f"; {unmeasured} more seen in the source, not measured" if unmeasured else "")


# ------------------------------------------------------------------------------------------------------------------ why


def render_explanation(explanation: Explanation, console: Console) -> None:
    """Print why there is or is no finding at a line."""
    for line in _explained(explanation):
        console.print(encodable(Text(line), console.encoding), highlight=False, soft_wrap=True)


def _explained(told: Explanation) -> Iterator[str]:
    here = f"{plain(told.path)}:{told.line}"
    yield here
    for rule in sorted({each.rule for each in told.looked}):
        yield f"  {plain(rule)}"
        yield from (line for each in told.looked if each.rule == rule for line in _looked(each))
    if not told.looked:
        yield "  no rule's pattern starts here"
        if told.closest is not None:
            yield f"  the closest place a rule looked at ({plain(told.closest.rule)}):"
            yield from _looked(told.closest)
    if told.recorded:
        yield f"  recorded at this line ({len(told.recorded)}):"
        yield from (f"    {plain(node)}" for node in told.recorded)
    else:
        yield f"  no operation was recorded at this line{_elsewhere(told)}"
    if "graph" in told.missing:
        yield f"  the graph is not known: {plain(told.missing['graph'])}"


def _looked(each: Looked) -> Iterator[str]:
    where = f"line {each.line}" if each.line is not None else "no line"
    yield f"    {each.kind} ({where}): {plain(each.reason)}"
    if each.seen:
        yield f"      {plain(each.seen)}"


def _elsewhere(told: Explanation) -> str:
    if told.nearest is None:
        return ", nor in this file: it did not run under the capture, or the name is another"
    return f"; the nearest line with recorded operations is {told.nearest}"


# --------------------------------------------------------------------------------------------------------------- github


def render_github(report: CheckReport) -> str:
    """Workflow commands, one a finding: a warning where there is a rewrite, else a notice; lines end with a newline.

    Their escaping is that of github.com/actions/toolkit, packages/core/src/command.ts.
    """
    lines = []
    for file in report.files:
        for entry in file.findings:
            level = "warning" if entry.status == "found" else "notice"
            lines.append(f"::{level} {_properties(entry)}::{_message(_said(entry))}")
        if file.status == "not measured":
            reason = f"{plain(file.path)} was not measured: {plain(file.reason or 'it could not be run')}"
            lines.append(f"::notice file={_property(file.path)}::{_message(reason)}")
    return "".join(f"{line}\n" for line in lines)


def _properties(entry: ReportedFinding) -> str:
    given = {"title": entry.rule}
    if entry.path is not None and entry.line is not None:
        given = {"file": entry.path, "line": str(entry.line), "endLine": str(entry.end_line or entry.line), **given}
    return ",".join(f"{name}={_property(value)}" for name, value in given.items())


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(plain(text)).replace(":", "%3A").replace(",", "%2C")
