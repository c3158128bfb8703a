"""What the bot says on a pull request: the comment, the check beside the commit, and its answers to commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from advisor.model import Report, ReportedFinding
from advisor.proposals import Comparison, Dashboard, Examination, Examined, Use

from . import markdown_parts as parts
from . import wording
from .markdown_fit import LIMIT, Block, few, fitted
from .markdown_page import neutralised
from .markdown_text import cell, code, plain, table, text
from .proposal_text import commit_message, marked, pull_request_body, pull_request_title
from .untrusted import clip

__all__ = [
    "annotations",
    "check_output",
    "command_help",
    "comment",
    "commit_message",
    "conclusion",
    "dashboard",
    "explained",
    "pull_request_body",
    "pull_request_title",
    "suggestion_remark",
]

Note: TypeAlias = tuple[str, int, int, Literal["notice", "warning"], str, str]
"""Path, first line, last line, level, title and message of an annotation."""

_ELSEWHERE = "The whole report is among the artifacts of the job that measured it."
_SETTLED = {
    "neutral": "no difference in speed worth having",
    "regressed": "slower",
    "inconclusive": "inconclusive: the measurement does not settle it",
}
_WORDS = {"improved": "faster", "regressed": "slower", "inconclusive": "inconclusive"}
_TITLE = 120  # characters of a title; GitHub takes 255 for an annotation
_MESSAGE = 2_000

COMMANDS: Mapping[str, str] = {
    "optimize": "look for rewrites on the default branch and open a pull request for each that is proven",
    "optimize RULE": "the same for one rule",
    "profile": "measure this pull request again",
    "rebase": "make this pull request of the bot again on what the default branch is now",
    "explain RULE": "show the page of a rule",
    "status": "list the open pull requests of the bot",
    "help": "show this list",
}
"""What can be written in a comment after `/advisor`, and what it does."""


# ------------------------------------------------------------------------------------------------------------- comment


def comment(examination: Examination, *, marker: str, notes: tuple[str, ...] = (), limit: int = LIMIT) -> str:
    """The comment on a pull request; begins with `marker`, at most `limit` bytes of UTF-8 (8,000 or more).

    `marker` is an HTML comment of ours, `notes` are sentences in plain text for the end.
    """
    head = Block(name="", weight=100, forms=(marked(marker),))
    return fitted([head, *_page(examination, notes)], limit, elsewhere=_ELSEWHERE).replace("\n\n", "\n", 1)


def _page(examination: Examination, notes: Sequence[str]) -> Iterator[Block]:
    if not examination.scripts:
        yield Block(name="verdict", weight=99, forms=("**Nothing was measured**: no script is configured.",))
    several = len(examination.scripts) > 1
    if several:
        yield Block(name="verdict", weight=99, forms=(f"**{_title(examination)}**",))
    for script in examination.scripts:
        yield from _script(script)
    if notes:
        yield Block(name="notes", weight=70, forms=(parts.bullets(notes), parts.bullets(notes, 3), ""))
    yield Block(name="commits", weight=98, forms=(_commits(examination),))


def _commits(examination: Examination) -> str:
    commits = [f"head {_commit(examination.head)}"]
    if examination.base != examination.head:
        commits = [f"base {_commit(examination.base)}", *commits]
    return f"<sub>{', '.join(commits)}, advisor {cell(examination.advisor, 40)}</sub>"


def _commit(sha: str) -> str:
    return code(sha[:12])


def _script(script: Examined) -> Iterator[Block]:
    lines = _verdict(script)
    forms = ("\n\n".join(lines), lines[0], "")
    yield Block(name="verdicts of some scripts", weight=95, forms=forms)
    measured = script.comparison
    if measured is not None and _worth_a_table(script):
        shown = parts.figures(measured.before, measured.after, ("base", "head"))
        yield Block(name="tables of some scripts", weight=90, forms=(shown, ""))
    if script.report is not None:
        yield from _found(script, script.report)


def _verdict(script: Examined) -> list[str]:
    """The verdict in one line, then what stands behind it."""
    lines = [f"**{_outcome(script)}**: {code(script.command, 160)}{_behind(script.comparison)}"]
    if script.error is not None:
        lines.append(f"It could not be measured: {text(script.error, 1_000)}")
    measured = script.comparison
    if measured is not None:
        if measured.outcome not in ("improved", "neutral") and measured.reasons:
            lines.append(parts.bullets(measured.reasons, 5))
        if measured.outcome != "failed":
            about = parts.machine(measured.environment, measured.hardware, measured.before or measured.after)
            lines.append(f"<sub>{about}; speed only: whether both commits compute the same is not compared</sub>")
    elif script.report is not None:
        about = parts.machine(script.report.environment, script.report.hardware, parts.uses(script.report)[0])
        lines.append(f"<sub>{about}</sub>")
    return lines


def _outcome(script: Examined) -> str:
    """What is to be said of a script in a few words."""
    measured = script.comparison
    if measured is None:
        if script.error is not None:
            return "not measured"
        proven = len(_applied(script))
        return f"{proven} proven rewrite{'s' * (proven != 1)}" if proven else "nothing to propose"
    if measured.outcome in ("improved", "regressed"):
        word = "faster" if measured.outcome == "improved" else "slower"
        return f"{wording.ratio(measured.timing.speedup)}, {word}" if measured.timing else word
    if measured.outcome == "failed":
        return "base and head could not be compared"
    return _SETTLED.get(measured.outcome) or text(measured.outcome, 60) or "no outcome"


def _behind(measured: Comparison | None) -> str:
    """The figures of a verdict."""
    said = []
    if measured is not None and measured.timing is not None:
        said.append(parts.speed(measured.timing, ratio=measured.outcome not in ("improved", "regressed")))
    if measured is not None and measured.outcome == "neutral" and measured.after is not None:
        said.append(f"{wording.milliseconds(measured.after.step_ms)} a step")
    return f", {'; '.join(said)}" if said else ""


def _worth_a_table(script: Examined) -> bool:
    """A neutral result has no table, unless the memory has changed or there is something to propose."""
    measured = script.comparison
    if measured is None or measured.outcome != "neutral" or _applied(script):
        return True
    was, now = _peak(measured.before), _peak(measured.after)
    return was is not None and now is not None and abs(now - was) > 0.05 * max(was, now)


def _peak(use: Use | None) -> float | None:
    return use.peak_gib if use is not None and wording.known(use.peak_gib) else None


def _applied(script: Examined) -> tuple[ReportedFinding, ...]:
    """The proven rewrites of the head."""
    if script.report is None or script.report.outcome != "improved":
        return ()
    return wording.by_status(script.report, "applied")


def _found(script: Examined, report: Report) -> Iterator[Block]:
    applied = _applied(script)
    if applied:
        lead = f"On the head, {_count(len(applied), 'rewrite')} proven, together {parts.speed(report.timing)}:"
        forms = [f"{lead}\n\n{parts.rewrites(applied, rows)}" for rows in few(len(applied))]
        yield Block(name="rewrites", weight=80, forms=(*forms, ""))
        for entry in applied:
            if entry.diff:
                yield parts.patches("diffs", 40, parts.label(entry), entry.diff)
        yield Block(name="proof", weight=60, forms=(f"Numbers: {parts.proof(report.numerics)}.", ""))
    suggested = wording.by_status(report, "suggested")
    if suggested:
        yield parts.listing("suggestions", 30, "Suggested, not applied", suggested, fold=True)
    alone = [*wording.by_status(report, "rejected"), *wording.by_status(report, "declined")]
    if alone and (applied or suggested):
        yield parts.listing("what was left alone", 20, "Looked at and left alone", alone, fold=True)
    if script.undecided:
        told = (
            f"Not settled by the measurement, each alone: {', '.join(code(rule, 80) for rule in script.undecided[:40])}"
        )
        yield Block(name="what was not settled", weight=50, forms=(told, ""))
    if report.rule_errors:
        failed = f"Rules that failed:\n\n{parts.bullets(report.rule_errors, 5)}"
        yield Block(name="rules that failed", weight=70, forms=(failed, ""))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s are' if number != 1 else ' is'}"


# --------------------------------------------------------------------------------------------------------------- check


def check_output(examination: Examination, *, notes: tuple[str, ...] = (), limit: int = LIMIT) -> tuple[str, str]:
    """Title (plain text, one line) and summary (Markdown) of the check beside the head commit; `notes` as there."""
    return _title(examination), fitted([*_page(examination, notes)], limit, elsewhere=_ELSEWHERE)


def _title(examination: Examination) -> str:
    scripts = examination.scripts
    if len(scripts) == 1:
        proven = len(_applied(scripts[0]))
        more = f"; {proven} proven rewrite{'s' * (proven != 1)}" if proven and scripts[0].comparison else ""
        return plain(_plain_outcome(scripts[0]) + more, _TITLE)
    counts: dict[str, int] = {}
    for script in scripts:
        said = _WORDS.get(_outcome_of(script) or "") or _plain_outcome(script)
        counts[said] = counts.get(said, 0) + 1
    told = ", ".join(f"{count} {said}" for said, count in list(counts.items())[:6])
    return plain(f"{len(scripts)} scripts: {told}" if scripts else "nothing was measured", _TITLE)


def _outcome_of(script: Examined) -> str | None:
    return script.comparison.outcome if script.comparison is not None else None


def _plain_outcome(script: Examined) -> str:
    known = _outcome_of(script) in (None, "improved", "failed", *_SETTLED)
    return _outcome(script) if known else plain(_outcome_of(script) or "", 60) or "no outcome"


def conclusion(
    examination: Examination, fail_on: Literal["never", "regression"]
) -> Literal["success", "neutral", "failure"]:
    """What the check says of the commit: failure for a regression where the owner wants that, else never.

    Success needs every script to be measured, and none to be slower.
    """
    outcomes = {_outcome_of(script) for script in examination.scripts if script.error is None}
    failed = any(script.error is not None for script in examination.scripts)
    if "regressed" in outcomes:
        return "failure" if fail_on == "regression" else "neutral"
    if failed or not outcomes or not outcomes <= {"improved", "neutral", None}:
        return "neutral"
    return "success"


def annotations(examination: Examination) -> tuple[Note, ...]:  # type: ignore[no-redef] # not the future one
    """Remarks on lines of the head: a warning for a proven rewrite, a notice for a suggestion; plain text.

    Paths are relative to the root of the repository. A place in an installed package has no remark.
    """
    found: dict[Note, None] = {}
    for script in examination.scripts:
        if script.report is None:
            continue
        inside = _folder(script)
        for entry in (*_applied(script), *wording.by_status(script.report, "suggested")):
            path = _repository_path(inside, entry.path)
            if path is not None and entry.line is not None and entry.line > 0:
                last = max(entry.line, entry.end_line or entry.line)
                level: Literal["notice", "warning"] = "warning" if entry.status == "applied" else "notice"
                found[path, entry.line, last, level, clip(entry.rule, _TITLE), _message(entry)] = None
    return tuple(found)


def _message(entry: ReportedFinding) -> str:
    saved = wording.saving(entry)
    said = [entry.title or entry.reason or entry.rule]
    said += [f"{saved} per step" + (", measured" if entry.status == "applied" else "")] if saved else []
    said += [f"not applied: {entry.reason}"] if entry.status != "applied" and entry.reason else []
    said += [f"level: {entry.safety}"] if entry.safety else []
    return clip("; ".join(said), _MESSAGE)


def suggestion_remark(finding: ReportedFinding) -> str:
    """What stands above a suggestion block: what it does, what it saves, what it may change."""
    saved = wording.saving(finding)
    level = f"; level {cell(finding.safety, 40)}" if finding.safety else ""
    return (
        f"{code(finding.rule, 80)}: {parts.what(finding)}" + (f"; {saved} per step, measured" if saved else "") + level
    )


def _folder(script: Examined) -> str:
    """The folder of the repository that paths of the report are relative to, with a slash; empty for the root."""
    places = {entry.fingerprint: entry.path for entry in script.report.findings} if script.report else {}
    for fingerprint, edits in script.rewrites.items():
        path = places.get(fingerprint)
        for name in edits:
            if path and (name == path or name.endswith(f"/{path}")):
                return name.removesuffix(path)
    return ""


def _repository_path(inside: str, path: str | None) -> str | None:
    if path is None or path.startswith(("/", "~", "<")) or ".." in path.split("/"):
        return None
    return f"{inside}{path}"


# ------------------------------------------------------------------------------------------------ dashboard and answers


def dashboard(dashboard: Dashboard, *, marker: str, limit: int = LIMIT) -> str:
    """The body of the dashboard issue; begins with `marker`."""
    return fitted([*_dashboard(dashboard, marker)], limit, elsewhere="").replace("\n\n", "\n", 1)


def _dashboard(shown: Dashboard, marker: str) -> Iterator[Block]:
    yield Block(name="", weight=100, forms=(marked(marker),))
    about = f"State of {_commit(shown.commit)} on {cell(shown.date, 40)}. This issue is edited in place."
    yield Block(name="state", weight=99, forms=(about,))
    rows = [
        (code(each.rule), cell(each.state, 40), f"#{each.number}" if each.number else "-", cell(each.note))
        for each in shown.proposals
    ]
    head = ("rule", "state", "pull request", "note")
    forms = [parts.listed(table(head, rows[:most]), len(rows), most) for most in few(len(rows))]
    empty = "Nothing has been proposed yet."
    told = tuple(f"### Proposals\n\n{form}" for form in forms)
    yield Block(name="proposals", weight=90, forms=(*told, "") if rows else (empty,))
    if shown.scripts:
        yield _runs(shown.scripts)
    if shown.settings:
        settings = [(code(name), code(value)) for name, value in sorted(shown.settings.items())[:100]]
        yield Block(name="settings", weight=60, forms=(f"### Settings\n\n{table(('setting', 'value'), settings)}", ""))
    if shown.notes:
        yield Block(name="notes", weight=70, forms=(parts.bullets(shown.notes), parts.bullets(shown.notes, 3), ""))


def _runs(scripts: Sequence[Examined]) -> Block:
    runs = [
        (code(script.command, 120), _outcome(script) + _behind(script.comparison), cell(script.error or "", 200))
        for script in scripts
    ]
    head = ("command", "last run", "error")
    forms = [parts.listed(table(head, runs[:most]), len(runs), most) for most in few(len(runs))]
    return Block(name="scripts", weight=80, forms=(*(f"### Scripts\n\n{form}" for form in forms), ""))


def command_help(commands: Mapping[str, str] = COMMANDS) -> str:
    """The answer to `/advisor help`: what can be asked for, by those who may push to the repository."""
    rows = [(code(f"/advisor {name}"), text(does)) for name, does in commands.items()]
    return f"{table(('command', 'what it does'), rows)}\n\nOnly those who may push to this repository are answered."


def explained(page_markdown: str, rule: str) -> str:
    """The answer to `/advisor explain RULE`: the rule's page.

    The page is Markdown of an installed rule and keeps its headings, links and code; it mentions nobody, refers to no
    issue, runs no command and holds no HTML.
    """
    page = neutralised(page_markdown)
    head = f"### {code(rule)}"
    forms = (f"{head}\n\n{page}", f"{head}\n\nThe page is too long to be shown here: `advisor explain` prints it.")
    return fitted([Block(name="page", weight=1, forms=forms)], LIMIT, elsewhere="").removesuffix("\n")
