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
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from advisor.bot.mirrors.gitnames import UnfitChange, editable
from advisor.config import Config
from advisor.diffs import edited, unified
from advisor.errors import ArtifactError
from advisor.model import Report, Timing
from advisor.proposals import Comparison, Examination, Examined, FileEdit, Proposal
from advisor.redact import Redactor
from advisor.source import digest
from advisor.verify.timing import (
    CONFIDENCE,
    control_log_ratios,
    hodges_lehmann,
    judge,
    quad_log_ratios,
    signed_rank_interval,
)

NAME = "examination.json"
MOST_BYTES = 32 << 20
SCHEMA = 1  # of an examination
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
    return _shown_again(_whole(_redacted(found), config), files)


def _whole(found: Examination, config: Config) -> Examination:
    """The examination with an entry for each script of the owner: a missing one must not look like a good one."""
    named = {script.command for script in found.scripts}
    missing = (Examined(command=c, error="it was not measured") for c in config.bot.scripts if c not in named)
    return replace(found, scripts=(*found.scripts, *missing))


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
    if any(_ID.fullmatch(rule) is None for rule in found.rules):
        yield "a rule has no id"
    commands = [script.command for script in found.scripts]
    if len(set(commands)) != len(commands) or not set(commands) <= set(config.bot.scripts):
        yield "it names scripts that the owner did not"
    for script in found.scripts:
        if script.proposals if purpose == "examine" else (script.rewrites or script.comparison):
            yield f"it holds what is not measured to {purpose}"
        if script.comparison is not None and base == head:
            yield "it compares a commit with itself"
        yield from _wrong_script(script, config, files)


def _wrong_script(script: Examined, config: Config, files: Read) -> Iterator[str]:
    if script.comparison is not None:
        yield from _wrong_comparison(script.comparison, config.min_quads)
    if script.report is not None:
        yield from _wrong_report(script.report, config)
    if any(_ID.fullmatch(rule) is None for rule in script.undecided):
        yield "a rule has no id"
    if len(script.proposals) > MOST_PROPOSALS or len(script.rewrites) > MOST_PROPOSALS:
        yield "it holds too many proposals"
    if script.rewrites and (script.report is None or script.report.outcome != "improved"):
        yield "a rewrite is not proven"
    for fingerprint, edits in script.rewrites.items():
        if _FINGERPRINT.fullmatch(fingerprint) is None:
            yield "a fingerprint is none"
        yield from wrong_edits(edits, files)
    for proposal in script.proposals:
        yield from _wrong_proposal(proposal, config, files)


def _wrong_proposal(proposal: Proposal, config: Config, files: Read) -> Iterator[str]:
    named = (*proposal.rules, *((proposal.rule,) if proposal.rule is not None else ()))
    if not proposal.rules or any(_ID.fullmatch(name) is None for name in named):
        yield "a rule has no id"
    if proposal.rule is not None and set(proposal.rules) != {proposal.rule}:
        yield "a proposal of one rule holds others"
    if {f.rule for f in proposal.report.findings if f.status == "applied"} != set(proposal.rules):
        yield "a proposal is not of the rules that its report applied"
    if _FINGERPRINT.fullmatch(proposal.fingerprint) is None:
        yield "a fingerprint is none"
    if proposal.report.outcome != "improved" or proposal.report.numerics is None or not proposal.report.numerics.ok:
        yield "a proposal is not proven"
    yield from _wrong_report(proposal.report, config)
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
    for use, blocks in (
        (comparison.before, comparison.timing.base_step_us),
        (comparison.after, comparison.timing.step_us),
    ):
        if use is not None and not _of_blocks(use.step_ms, blocks):
            yield "a step time is not that of its blocks"


def _of_blocks(step_ms: float | None, block_us: Sequence[float]) -> bool:
    """Whether a step time in milliseconds is the median of the blocks it is said to be of."""
    return step_ms is not None and math.isclose(step_ms, statistics.median(block_us) / 1e3, rel_tol=CLOSE)


def _wrong_report(report: Report, config: Config) -> Iterator[str]:
    if report.outcome not in OUTCOMES:
        yield "an outcome is none"
    timing = report.timing
    if report.outcome == "improved":
        if timing is None or judge(timing, min_quads=config.min_quads)[0].value != "improved":
            yield "an improvement has no timing behind it"
        elif not _of_blocks(report.step_ms_before, timing.base_step_us) or not _of_blocks(
            report.step_ms_after, timing.step_us
        ):
            yield "a step time is not that of its blocks"
        if any(f.status == "applied" and f.safety not in ("exact", *config.allow) for f in report.findings):
            yield "it applies what the owner does not allow"
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
    """Whether what is said follows from the blocks it is said to be of; an interval may be wider, by the wall clock."""
    low, high = timing.interval
    try:
        quads = quad_log_ratios(timing.base_step_us, timing.step_us)
        ratio, (below, above, sure) = math.exp(-hodges_lehmann(quads)), signed_rank_interval(quads)
        noise = _noise_of(timing)
    except (ValueError, OverflowError):
        yield "block times are none"
        return
    if not math.isclose(ratio, timing.speedup, rel_tol=CLOSE) or len(timing.step_us) != 2 * timing.quads:
        yield "a speed-up does not follow from its blocks"
    if not 0 < low <= timing.speedup <= high:
        yield "an interval does not hold its speed-up"
    if low > math.exp(-above) * (1 + CLOSE) or high < math.exp(-below) * (1 - CLOSE):
        yield "an interval is narrower than that of its blocks"
    if timing.confidence > sure + CLOSE:
        yield "an interval is surer than that of its blocks"
    if noise is not None and (timing.noise is None or timing.noise < noise - CLOSE):
        yield "the noise is less than that of its blocks"


def _noise_of(timing: Timing) -> float | None:
    """Half-width of the A/A control's interval as a share; None where the blocks bound nothing."""
    controls = control_log_ratios(timing.base_step_us, timing.step_us)
    if not controls.size:
        return None
    low, high, sure = signed_rank_interval(controls)
    return math.expm1((high - low) / 2) if sure >= CONFIDENCE else None


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
    """Whether a path is that of a Python source below the root that the bot may write, spelled as git spells it."""
    try:
        editable(path)
    except UnfitChange:
        return False
    return len(path) <= 1000 and path.isprintable()


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
