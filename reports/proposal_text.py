"""What the bot writes of one proposal: title and body of its pull request, and the message of its commit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from advisor.model import Report, ReportedFinding
from advisor.proposals import Proposal

from . import markdown_parts as parts
from . import wording
from .ladder import ladder
from .markdown_fit import LIMIT, Block, few, fitted
from .markdown_text import code, fence, folded, paragraph, plain, table, text

_TITLE = 120  # characters of a title; GitHub takes 256, GitLab 255
_SUBJECT = 72
_ELSEWHERE = "The whole report is among the artifacts of the job that measured it."
_LEVELS = ("exact", "numerics", "precision", "semantics", "suggest")  # by what they may change


def marked(marker: str) -> str:
    """The marker, which must be one HTML comment of ours."""
    assert re.fullmatch(r"<!-- [^<>\n]+ -->", marker), marker
    return marker


def pull_request_title(proposal: Proposal) -> str:
    """The title: plain text of at most 120 characters that mentions nobody and closes nothing."""
    title = plain(proposal.title, _TITLE)[: _TITLE - len("Rewrite: ")].strip() or "Proven rewrites"
    draft = re.match(r"\W*(?:draft|wip)\b", title, re.IGNORECASE)  # GitLab would take it for a draft
    return f"Rewrite: {title}" if draft or not title[0].isalnum() else title


# ---------------------------------------------------------------------------------------------------------------- body


def pull_request_body(
    proposal: Proposal, *, marker: str, base_branch: str, commit: str, command: str, limit: int = LIMIT
) -> str:
    """The description of the pull request; begins with `marker`, at most `limit` bytes of UTF-8 (8,000 or more).

    `commit` is the one of `base_branch` that was measured, `command` what measures it again.
    """
    head = Block(name="", weight=100, forms=(marked(marker),))
    blocks = [head, *_measured(proposal), *_changed(proposal), *_trust(proposal, base_branch, commit, command)]
    return fitted(blocks, limit, elsewhere=_ELSEWHERE).replace("\n\n", "\n", 1)


def _measured(proposal: Proposal) -> Iterator[Block]:
    report = wording.sayable(proposal.report)
    said = wording.headline(report)
    yield Block(name="verdict", weight=99, forms=(f"**{text(said.lead, 200)}**: {code(report.script, 160)}",))
    before, after = parts.uses(report)
    yield Block(name="figures", weight=98, forms=(parts.figures(before, after, ("before", "after")),))
    about = parts.machine(report.environment, report.hardware, before)
    lines = [line for line in (parts.speed(report.timing), about) if line]
    yield Block(name="machine", weight=95, forms=("\n".join(f"- {line}" for line in lines), ""))


def _changed(proposal: Proposal) -> Iterator[Block]:
    report = proposal.report
    applied = wording.by_status(report, "applied")
    forms = [f"### What changes\n\n{parts.rewrites(applied, rows)}" for rows in few(len(applied))]
    yield Block(name="rewrites", weight=90, forms=(*forms, ""))
    for entry in applied:
        if entry.evidence:
            told = parts.evidence(entry.evidence[:30])
            yield Block(name="evidence", weight=20, forms=(folded(f"Why: {parts.label(entry)}", told), ""))
    forms = [f"### Operators of a step\n\n{parts.operators(report.numerics, most)}" for most in (40, 8)]
    if parts.operators(report.numerics):
        yield Block(name="operators", weight=55, forms=(*forms, ""))
    rungs = [
        (rung.name, wording.percent(rung.before), wording.percent(rung.after))
        for rung in ladder(wording.sayable(report))
        if wording.known(rung.before) and wording.known(rung.after)
    ]
    if rungs:
        shown = table(("", "before", "after"), rungs, right=(1, 2))
        yield Block(name="utilisation", weight=30, forms=(folded("How the device is used", shown), ""))


def _trust(proposal: Proposal, base_branch: str, commit: str, command: str) -> Iterator[Block]:
    report = proposal.report
    numerics = report.numerics
    said = f"### Whether it computes the same\n\n{parts.proof(numerics)}."
    yield Block(name="proof", weight=85, forms=(said, ""))
    if numerics is not None and numerics.worst:
        forms = [parts.errors(numerics.worst, rows) for rows in few(len(numerics.worst)) if rows]
        yield Block(name="numeric errors", weight=60, forms=(*forms, ""))
    yield Block(name="risk", weight=84, forms=(_risk(report), ""))
    unverified = [*_not_verified(report)]
    forms = [f"### Not verified\n\n{parts.bullets(unverified, most)}" for most in (40, 12)]
    yield Block(name="what was not verified", weight=80, forms=(*forms, ""))
    yield Block(name="how to reproduce", weight=75, forms=(_reproduce(base_branch, commit, command), ""))
    yield Block(name="how to revert", weight=74, forms=(_revert(proposal), ""))


def level(report: Report) -> str | None:
    """The level of the rewrite that may change most; None where none is known."""
    found = {entry.safety for entry in wording.by_status(report, "applied")}
    return next((each for each in reversed(_LEVELS) if each in found), None)


def _risk(report: Report) -> str:
    found = level(report)
    if found is None:
        return "Equivalence class: not known. Risk: review it as a change of behaviour."
    return f"Equivalence class: **{found}**, {parts.LEVELS[found]}."


def _not_verified(report: Report) -> Iterator[str]:
    """What the report does not show, in sentences."""
    yield f"other devices than {report.hardware.name}, and several of them: one process on one device ran"
    yield "other batches, shapes, flags and versions than those of the command below"
    yield from _numbers_not_verified(report)
    if report.timing is None:
        yield "the speed: nothing was timed"
    else:
        yield from report.timing.notes
        if not wording.known(report.timing.noise):
            yield "the noise of the machine: there is no A/A control"
    for entry in wording.by_status(report, "applied"):
        for fact in entry.evidence:
            if fact.what == "not compared" and isinstance(fact.value, str):
                yield f"{entry.rule}, compared alone: {fact.value}"
    if report.linked_share is not None and wording.known(report.linked_share) and report.linked_share < 0.95:
        yield f"{wording.percent(1 - report.linked_share)} of the time of a step, which is linked to no source line"
    if report.environment.dirty:
        yield "the commit as it is: the work tree had uncommitted changes"
    yield from (f"{name}: {reason}" for name, reason in sorted(report.missing.items()))
    yield from report.rule_errors


def _numbers_not_verified(report: Report) -> Iterator[str]:
    numerics = report.numerics
    if numerics is None or not numerics.compared:
        yield "the numbers: none were compared"
        return
    if numerics.losses:
        yield f"the loss after the {len(numerics.losses):,} steps that were compared: convergence was not measured"
    else:
        yield "convergence: no losses were compared"
    yield from numerics.notes
    yield from numerics.reasons


def _reproduce(base_branch: str, commit: str, command: str) -> str:
    lines = f"On {code(base_branch, 120)} at {code(commit[:12])}, on the device named above:"
    return f"### To reproduce\n\n{lines}\n\n{fence(command, 'console')}"


def _revert(proposal: Proposal) -> str:
    rules = sorted(set(proposal.rules or ([proposal.rule] if proposal.rule else [])))[:40]
    off = f"[tool.advisor]\nignore = [{', '.join(json.dumps(rule) for rule in rules)}]"
    return (
        "### To revert\n\n`git revert` the commit. To keep it from coming back, turn the rule off in `pyproject.toml`, "
        f"and this pull request is closed:\n\n{fence(off, 'toml')}"
    )


# -------------------------------------------------------------------------------------------------------------- commit


def commit_message(proposal: Proposal) -> str:
    """Plain text of lines of at most 72 characters that closes nothing, mentions nobody and has no trailers."""
    report = wording.sayable(proposal.report)
    subject = pull_request_title(proposal)
    if len(subject) > _SUBJECT:
        subject = f"{subject[: _SUBJECT - 3].rstrip()}..."
    applied = wording.by_status(report, "applied")
    lines = [paragraph(f"- {_rewrite(entry)}", indent="  ") for entry in applied[:20]]
    lines += [f"- and {len(applied) - 20:,} more"] if len(applied) > 20 else []
    said = [*_speed(report), plain(wording.proof(report.numerics).lead) + "."]
    blocks = [subject, "\n".join(lines), "\n".join(paragraph(f"- {each}", indent="  ") for each in said)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _rewrite(entry: ReportedFinding) -> str:
    where = plain(f"{entry.path}:{entry.line}", 160) if entry.path is not None else ""
    return f"{where}: {plain(entry.title or entry.rule)}" if where else plain(entry.title or entry.rule)


def _speed(report: Report) -> Iterator[str]:
    """Measured gain and the machine it was measured on."""
    if wording.known(report.step_ms_after):
        change = wording.change(
            wording.milliseconds(report.step_ms_before), wording.milliseconds(report.step_ms_after), arrow="to"
        )
        interval = wording.ratio_interval(report.interval, report.confidence)
        yield f"Measured: {change} a step, {wording.ratio(report.speedup)}, {interval}."
    versions = f", torch {report.environment.torch}" if report.environment.torch else ""
    yield plain(f"On {report.hardware.name}{versions}.")
