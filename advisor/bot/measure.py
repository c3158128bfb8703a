"""The measuring job: race base and head, search the head's rewrites, and write down what the publishing job may say.

It runs the repository's code and therefore holds no token; what it writes is untrusted to everybody else.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import advisor
from advisor import comparing, patch
from advisor.bot.desk import MOST_ALONE
from advisor.bot.handover import SCHEMA, is_source
from advisor.bot.told import told
from advisor.config import Config
from advisor.errors import AdvisorError, UsageError
from advisor.job import Request, begin, load_rules
from advisor.model import Patch, Report, Rewrite
from advisor.pipeline import Result, optimize
from advisor.progress import Progress
from advisor.proposals import Comparison, Examination, Examined, FileEdit, Proposal
from advisor.redact import Redactor
from advisor.source import Source

RACE_SHARE = 0.3  # of the time of a search, for the race of base and head


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure: two checkouts (the same one where nothing is compared), their commits, the owner's settings.

    `config` is that of the base branch. `rules` narrows proposals to some rules; empty means all that are on.
    """

    purpose: str  # examine or propose
    base: Path
    head: Path
    base_commit: str
    head_commit: str
    config: Config
    out: Path
    rules: tuple[str, ...] = ()


def measure(order: Order, progress: Progress) -> Examination:
    """Measure every configured script; what fails in one is said there and keeps the others."""
    if not order.config.bot.scripts:
        raise UsageError("no script to measure: name some in [tool.advisor.bot], scripts")
    order = replace(order, rules=_there(order))
    return Examination(
        schema=SCHEMA,
        advisor=advisor.__version__,
        purpose=order.purpose,
        base=order.base_commit,
        head=order.head_commit,
        scripts=tuple(_measured(order, command, progress) for command in order.config.bot.scripts),
        rules=order.rules,
    )


def _there(order: Order) -> tuple[str, ...]:
    """Those of the rules asked for that there are: a pull request may be of one that had another name once."""
    if not order.rules:
        return ()
    known = load_rules(replace(order.config, select=(), ignore=())).asked
    found = tuple(rule for rule in order.rules if rule in known)
    if not found:
        raise UsageError(f"there is no rule {order.rules[0]}: `advisor rules` lists them")
    return found


def _measured(order: Order, command: str, progress: Progress) -> Examined:
    try:
        if order.purpose == "propose":
            return _proposed(order, command, progress)
        return _examined(order, command, progress)
    except AdvisorError as error:  # of the user's code or settings: part of the answer
        return Examined(command=command, error=_told(order, error))


def _told(order: Order, error: AdvisorError) -> str:
    """What went wrong, with the files of the checkouts by their path in the repository."""
    text = told(error)
    for root in (order.out, order.base, order.head):
        text = text.replace(f"{root}/", "").replace(str(root), ".")
    return text


# ------------------------------------------------------------------------------------------------------------ examine


def _examined(order: Order, command: str, progress: Progress) -> Examined:
    comparison: Comparison | None = None
    if order.base_commit != order.head_commit:
        comparison = _compared(order, command, progress)
    try:
        found = _optimized(order, command, progress)
    except AdvisorError as error:
        return Examined(command=command, comparison=comparison, error=_told(order, error))
    rewrites: dict[str, dict[str, FileEdit]] = {}
    if found.report.outcome == "improved":
        for rewrite in found.patch.rewrites:
            edits = _edits(patch.build([rewrite], _reader(order.head)), order.head)
            if edits is not None:
                rewrites[rewrite.finding.fingerprint] = edits
    return Examined(command=command, comparison=comparison, report=found.report, rewrites=rewrites)


def _compared(order: Order, command: str, progress: Progress) -> Comparison:
    config = replace(order.config, out=str(order.out))
    jobs = []
    for name, root in (("base", order.base), ("head", order.head)):
        script, arguments = _words(root, command)
        if not script.is_file():
            return comparing.failed(f"{script.relative_to(root)} is not there at the {name}")
        with inside(root):
            jobs.append(begin(Request(script=script, arguments=arguments, config=config, out=order.out), progress))
    profiles = []
    for job, name in zip(jobs, ("base", "head"), strict=True):
        try:
            with inside(job.root):
                profiles.append(comparing.recorded(job))
        except AdvisorError as error:
            return comparing.failed(f"the {name} could not be measured: {_told(order, error)}", *profiles)
    return comparing.compare(jobs[0], jobs[1], profiles[0], profiles[1], seconds=RACE_SHARE * config.bot.time_s)


# ------------------------------------------------------------------------------------------------------------ propose


def _proposed(order: Order, command: str, progress: Progress) -> Examined:
    """Search with every rule, then measure what each rule that was kept brings alone: one proposal a rule.

    A rule whose rewrites pay only beside others' has no proposal of its own until those are merged.
    """
    whole = _optimized(order, command, progress, order.rules)
    if whole.report.outcome != "improved":
        return Examined(command=command, report=whole.report)
    rules = tuple(dict.fromkeys(rewrite.finding.rule for rewrite in whole.patch.rewrites))
    results: list[tuple[str | None, Result]] = []
    if order.config.bot.stacked or len(rules) == 1:
        results.append((None if order.config.bot.stacked else rules[0], whole))
    else:
        first = _by_saving(whole.report, rules)[:MOST_ALONE]
        results += [(rule, _optimized(order, command, progress, (rule,))) for rule in first]
    proposals = [_proposal(order, rule, result) for rule, result in results if result.report.outcome == "improved"]
    settled = {rule for rule, each in results if each.report.outcome not in ("inconclusive", "failed")}
    return Examined(
        command=command,
        report=whole.report,
        proposals=tuple(p for p in proposals if p is not None),
        undecided=() if order.config.bot.stacked else tuple(rule for rule in rules if rule not in settled),
    )


def _by_saving(report: Report, rules: Sequence[str]) -> list[str]:
    saved = dict.fromkeys(rules, 0.0)
    for found in report.findings:
        if found.status == "applied" and found.rule in saved:
            saved[found.rule] += found.saved_us or 0.0
    return sorted(rules, key=lambda rule: -saved[rule])


def _proposal(order: Order, rule: str | None, result: Result) -> Proposal | None:
    files = _edits(result.patch, order.head)
    if not files:
        return None
    rewrites = result.patch.rewrites
    prints = sorted({rewrite.finding.fingerprint for rewrite in rewrites})
    digest = hashlib.sha256("\0".join((result.report.script, *prints)).encode()).hexdigest()
    return Proposal(
        rule=rule,
        fingerprint=digest[:12],
        title=_title(rewrites, result.report.script),
        files=files,
        report=result.report,
        rules=tuple(dict.fromkeys(rewrite.finding.rule for rewrite in rewrites)),
    )


def _title(rewrites: Sequence[Rewrite], script: str) -> str:
    titles = list(dict.fromkeys(rewrite.title for rewrite in rewrites))
    paths = sorted({span.path for rewrite in rewrites for span, _ in rewrite.edits})
    where = paths[0] if len(paths) == 1 else f"{len(paths)} files"
    first = titles[0] if len(titles) == 1 else f"{len(titles)} rewrites for {script}"
    return f"{first} in {where}" if len(titles) == 1 else first


# ------------------------------------------------------------------------------------------------------------- engine


def _optimized(order: Order, command: str, progress: Progress, rules: tuple[str, ...] = ()) -> Result:
    script, arguments = _words(order.head, command)
    config = replace(order.config, time_s=order.config.bot.time_s, baselines=False, select=rules or order.config.select)
    with inside(order.head):
        return optimize(Request(script=script, arguments=arguments, config=config, out=order.out), progress)


def _words(root: Path, command: str) -> tuple[Path, tuple[str, ...]]:
    """The script, which must lie in the repository, and its arguments."""
    words = [word for word in shlex.split(command) if word != "--"]
    if not words:
        raise UsageError("a command names no script: give one in [tool.advisor.bot], scripts")
    path = PurePosixPath(words[0])
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(f"{words[0]} lies outside of the repository: name scripts by their path from its root")
    return root / path, tuple(words[1:])


def _reader(root: Path) -> patch.Read:
    return lambda path: Source.read(root, path)


def _edits(found: Patch, root: Path) -> dict[str, FileEdit] | None:
    """The edits of a patch; None where the bot may not make them, or one would have to be redacted.

    What is redacted is not what was proved.
    """
    redactor = Redactor.of_machine()
    files = patch.edits(found, _reader(root))
    texts = [new for edit in files.values() for _, _, new in edit.replacements]
    if any(redactor.text(text) != text for text in (*texts, *files)) or not all(map(is_source, files)):
        return None
    return files


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, as the owner of the script would."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
