"""The file that the measuring job hands to the publishing job: written by one, trusted by nobody, checked by the other.

The code that was measured ran beside the writer and may have changed the file, figures included. What cannot be checked
is whether step times are true; that they fit together, that edits apply to the very commit and touch nothing but Python
sources, and that nothing is said of another commit, can be, and is.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from advisor.config import Config
from advisor.diffs import edited, unified
from advisor.errors import ArtifactError
from advisor.model import Report, Timing
from advisor.proposals import Comparison, Examination, Examined, FileEdit, Proposal
from advisor.redact import Redactor
from advisor.source import digest
from advisor.verify.timing import hodges_lehmann, judge, quad_log_ratios

NAME = "examination.json"
MOST_BYTES = 32 << 20
SCHEMA = 1
MOST_FILES = 50  # of one proposal
MOST_PROPOSALS = 50
CLOSE = 1e-6  # relative, of a figure worked out again
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")
OUTCOMES = ("improved", "neutral", "regressed", "wrong", "inconclusive", "failed")

Read = Callable[[str], bytes | None]  # a regular file of the head commit by its path; None where there is none


def write(examination: Examination, path: Path) -> None:
    """Write the examination, redacted where text may hold a secret; edits are exact (those that could not be are left
    out when they are made)."""
    from advisor.reports.jsonform import encode

    path.write_text(json.dumps(encode(Examination, _redacted(examination)), allow_nan=False), encoding="utf-8")


def _redacted(examination: Examination) -> Examination:
    clean: Examination = Redactor.of_machine().value(examination)
    scripts = tuple(_exact(whole, shown) for whole, shown in zip(examination.scripts, clean.scripts, strict=True))
    return replace(clean, base=examination.base, head=examination.head, scripts=scripts)


def _exact(whole: Examined, shown: Examined) -> Examined:
    """The redacted entry with its edits as they were: digests and program text that hold no secret."""
    proposals = tuple(
        replace(b, files=a.files, fingerprint=a.fingerprint)
        for a, b in zip(whole.proposals, shown.proposals, strict=True)
    )
    return replace(shown, command=whole.command, rewrites=whole.rewrites, proposals=proposals)


def read(data: bytes, *, base: str, head: str, purpose: str, config: Config, files: Read) -> Examination:
    """The examination if it is sound, of the expected commits and of scripts that the owner named.

    `files` reads the head commit. Raises ArtifactError that says what is wrong; nothing of the file is then used.
    """
    from advisor.reports.jsonform import decode

    if len(data) > MOST_BYTES:
        raise ArtifactError(f"{NAME} has more than {MOST_BYTES >> 20} MiB: nothing of it is used")
    try:
        found: Examination = decode(Examination, json.loads(data, parse_constant=_no_number), "examination")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{NAME} is damaged: {error}: measure again") from error
    wrong = next(_wrong(found, base, head, purpose, config, files), None)
    if wrong is not None:
        raise ArtifactError(f"{NAME} is not what the measuring job writes: {wrong}: nothing of it is used")
    return _shown_again(_redacted(found), files)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


# ------------------------------------------------------------------------------------------------------------- checks


def _wrong(found: Examination, base: str, head: str, purpose: str, config: Config, files: Read) -> Iterator[str]:
    if found.schema != SCHEMA:
        yield f"schema {found.schema}, this version reads {SCHEMA}"
    if (found.base, found.head) != (base, head):
        yield "it is of other commits"
    if found.purpose != purpose:
        yield f"it was measured to {found.purpose[:20]!r}"
    commands = [script.command for script in found.scripts]
    if len(set(commands)) != len(commands) or not set(commands) <= set(config.bot.scripts):
        yield "it names scripts that the owner did not"
    for script in found.scripts:
        yield from _wrong_script(script, config.min_quads, files)


def _wrong_script(script: Examined, quads: int, files: Read) -> Iterator[str]:
    if script.comparison is not None:
        yield from _wrong_comparison(script.comparison, quads)
    if script.report is not None:
        yield from _wrong_report(script.report, quads)
    if any(_ID.fullmatch(rule) is None for rule in script.undecided):
        yield "a rule has no id"
    if len(script.proposals) > MOST_PROPOSALS or len(script.rewrites) > MOST_PROPOSALS:
        yield "it holds too many proposals"
    for fingerprint, edits in script.rewrites.items():
        if _FINGERPRINT.fullmatch(fingerprint) is None:
            yield "a fingerprint is none"
        yield from wrong_edits(edits, files)
    for proposal in script.proposals:
        yield from _wrong_proposal(proposal, quads, files)


def _wrong_proposal(proposal: Proposal, quads: int, files: Read) -> Iterator[str]:
    named = (*proposal.rules, *((proposal.rule,) if proposal.rule is not None else ()))
    if not proposal.rules or any(_ID.fullmatch(name) is None for name in named):
        yield "a rule has no id"
    if _FINGERPRINT.fullmatch(proposal.fingerprint) is None:
        yield "a fingerprint is none"
    if proposal.report.outcome != "improved" or proposal.report.numerics is None or not proposal.report.numerics.ok:
        yield "a proposal is not proven"
    yield from _wrong_report(proposal.report, quads)
    yield from wrong_edits(proposal.files, files)


def _wrong_comparison(comparison: Comparison, quads: int) -> Iterator[str]:
    if comparison.outcome not in OUTCOMES:
        yield "an outcome is none"
    if comparison.timing is None:
        if comparison.outcome != "failed":
            yield "an outcome has no timing behind it"
        return
    yield from _wrong_timing(comparison.timing)
    if comparison.outcome not in (judge(comparison.timing, min_quads=quads)[0].value, "inconclusive"):
        yield "an outcome does not follow from its timing"


def _wrong_report(report: Report, quads: int) -> Iterator[str]:
    if report.outcome not in OUTCOMES:
        yield "an outcome is none"
    timing = report.timing
    if report.outcome == "improved":
        if timing is None or judge(timing, min_quads=quads)[0].value != "improved":
            yield "an improvement has no timing behind it"
        if report.numerics is None or not report.numerics.ok:
            yield "an improvement has no proof behind it"
    if timing is None:
        return
    yield from _wrong_timing(timing)
    if report.speedup is None or not math.isclose(report.speedup, timing.speedup, rel_tol=CLOSE):
        yield "a speed-up is not that of its timing"
    if report.interval is None or any(
        not math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(report.interval, timing.interval, strict=True)
    ):
        yield "an interval is not that of its timing"


def _wrong_timing(timing: Timing) -> Iterator[str]:
    """Whether the ratio follows from the blocks it is said to be of."""
    try:
        ratio = math.exp(-hodges_lehmann(quad_log_ratios(timing.base_step_us, timing.step_us)))
    except (ValueError, OverflowError):
        yield "block times are none"
        return
    if not math.isclose(ratio, timing.speedup, rel_tol=CLOSE) or len(timing.step_us) != 2 * timing.quads:
        yield "a speed-up does not follow from its blocks"
    low, high = timing.interval
    if not 0 < low <= timing.speedup <= high:
        yield "an interval does not hold its speed-up"


def wrong_edits(edits: Mapping[str, FileEdit], files: Read) -> Iterator[str]:
    """Why edits must not be used: paths that leave the tree, files that are not those proved, results that are not."""
    if not 0 < len(edits) <= MOST_FILES:
        yield "a proposal edits no file, or too many"
    for path, edit in edits.items():
        if not is_source(path):
            yield "an edit is of a path that is no Python source of the repository"
            continue
        before = text_of(files(path))
        if before is None or digest(before) != edit.base:
            yield f"{path} is not the text that was measured"
            continue
        try:
            after = edited(before, edit)
            ast.parse(after)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            yield f"the edits of {path} do not give a Python source"
            continue
        if digest(after) != edit.result or after == before:
            yield f"the edits of {path} do not give the text that was proved"


def is_source(path: str) -> bool:
    """Whether a path is that of a Python source below the root, spelled the one way git spells it."""
    parts = PurePosixPath(path).parts
    return (
        0 < len(path) <= 1000
        and path == "/".join(parts)
        and not path.startswith("/")
        and path.endswith(".py")
        and path.isprintable()
        and "\\" not in path
        and not any(part in (".", "..") or part.startswith(".git") for part in (each.lower() for each in parts))
    )


def text_of(data: bytes | None) -> str | None:
    """A source as text with the line ends it has; None of none and of what is not UTF-8."""
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def results(edits: Mapping[str, FileEdit], files: Read) -> dict[str, str]:
    """The texts that edits make of the head commit's; to be called for edits that nothing is wrong with."""
    found = {}
    for path, edit in edits.items():
        before = text_of(files(path))
        assert before is not None
        found[path] = edited(before, edit)
    return found


def _shown_again(examination: Examination, files: Read) -> Examination:
    """The examination with diffs made anew from the edits, so that what is shown is what would be committed."""

    def proposal(each: Proposal) -> Proposal:
        return replace(each, report=replace(each.report, diff=_diff(each.files, files)))

    def script(each: Examined) -> Examined:
        report = each.report
        if report is not None:
            diffs = {fingerprint: _diff(edits, files) for fingerprint, edits in each.rewrites.items()}
            findings = tuple(
                replace(f, diff=diffs.get(f.fingerprint or "", "")) if f.status == "applied" else f
                for f in report.findings
            )
            report = replace(report, findings=findings, diff="")
        return replace(each, report=report, proposals=tuple(proposal(p) for p in each.proposals))

    return replace(examination, scripts=tuple(script(each) for each in examination.scripts))


def _diff(edits: Mapping[str, FileEdit], files: Read) -> str:
    after = results(edits, files)
    before = {path: text_of(files(path)) or "" for path in after}
    diff = "".join(unified(path, before[path], after[path]) for path in sorted(after))
    shown: Any = Redactor.of_machine().text(diff)
    return str(shown)
