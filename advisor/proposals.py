"""What the bot measured of two commits and what it would propose: the nouns its renderers and its forges share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.model import Environment, Hardware, Report, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one commit makes of the device in a step; None is "not known", `missing` says why (figure -> reason)."""

    step_ms: float | None
    tokens_per_s: float | None
    throughput_unit: str = "tokens"  # what the rate counts: tokens or samples
    peak_gib: float | None
    mfu: float | None
    peak_flops: float | None  # FLOP/s, dense, that MFU is a share of
    peak_source: str | None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A step of one script at two commits, raced in quads A B B A. `timing.speedup` is old over new: base over head.

    `outcome` is improved, neutral, regressed, inconclusive, or failed where either could not be timed; `reasons` are
    sentences. Nothing is said of whether both compute the same: a pull request may change the maths on purpose.
    """

    outcome: str
    reasons: tuple[str, ...]
    timing: Timing | None
    before: Use | None
    after: Use | None
    environment: Environment | None
    hardware: Hardware | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEdit:
    """The edits of one file: SHA-256 of the text they were proved on and of the text that was proved.

    A replacement is (first character, character after the last, new text) of the text as found; they are in order and
    do not overlap.
    """

    base: str
    result: str
    replacements: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rule rewrites, or all proven rewrites together (`rule` is then None), to be merged as one change.

    `report` is of a run whose patch is exactly `files` (path relative to the root of the repository -> edits).
    `fingerprint` is of the findings behind it: the same proposal on a later commit has the same one.
    """

    rule: str | None
    fingerprint: str
    title: str
    files: Mapping[str, FileEdit]
    report: Report
    rules: tuple[str, ...] = ()  # of every rewrite in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One configured script: `command` is what the owner wrote. `error` is why nothing could be measured of it.

    `report` is of `advisor optimize` on the commit that is proposed (the head), `rewrites` holds what each of its
    applied findings edits there, by fingerprint of the finding. `undecided` are rules whose rewrites alone the
    measurement did not settle.
    """

    command: str
    comparison: Comparison | None = None
    report: Report | None = None
    rewrites: Mapping[str, Mapping[str, FileEdit]] = field(default_factory=dict)
    proposals: tuple[Proposal, ...] = ()
    undecided: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What the measuring job hands to the publishing job. `purpose` is examine (a pull request) or propose (a branch).

    `base` and `head` are commits; both are the same where there is nothing to compare. `rules` are those that the
    measurement was narrowed to, empty for all that are on.
    """

    schema: int
    advisor: str
    purpose: str
    base: str
    head: str
    scripts: tuple[Examined, ...]
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProposal:
    """A line of the dashboard: a rule, its state (open, merged, closed, waiting, off) and the pull request if any."""

    rule: str
    state: str
    number: int | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """What the dashboard issue shows: the state of every proposal, the last runs, the settings in force."""

    commit: str
    date: str
    proposals: tuple[OpenProposal, ...]
    scripts: tuple[Examined, ...]
    settings: Mapping[str, str]
    notes: tuple[str, ...] = ()
