"""What the bot does and leaves alone: pure decisions over what the owner allows, what is open, and what was proved."""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.bot.forge import ChangedFile, PullRequest
from advisor.config import BotConfig, Config
from advisor.proposals import Examined, Proposal

PREFIX = "advisor/"  # of every branch the bot pushes
STACKED = "all"  # in place of a rule, of the one pull request with all rewrites
WEEK = datetime.timedelta(days=7)
GUIDES = (
    "CONTRIBUTING.md",
    ".github/CONTRIBUTING.md",
    "docs/CONTRIBUTING.md",
    "CONTRIBUTING.rst",
    ".github/PULL_REQUEST_TEMPLATE.md",
    ".github/pull_request_template.md",
    "README.md",
)
_AUTOMATED = r"(?:automated|automatic|bot|bots|bot-generated|machine-generated|auto-generated|unsolicited automated)"
_REQUESTS = r"(?:pull requests?|merge requests?|PRs?|MRs?|contributions?|patches)"
_REFUSALS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\bno\s+{_AUTOMATED}\s+{_REQUESTS}\b",
        rf"\b(?:do|does|will|can)\s*(?:not|n't|n\u2019t)\s+(?:want|accept|take|merge|review|allow|welcome)\s+(?:any\s+)?"
        rf"{_AUTOMATED}\s+{_REQUESTS}\b",
        rf"\b{_AUTOMATED}\s+{_REQUESTS}\s+(?:are|is|will be)\s+(?:not\s+(?:accepted|welcome|allowed|wanted)|closed|"
        r"rejected|refused|declined|ignored)\b",
        rf"\b{_REQUESTS}\s+(?:from|by|of)\s+bots?\s+(?:are|is|will be)\s+(?:not\s+(?:accepted|welcome|allowed|wanted)|"
        r"closed|rejected|refused|declined|ignored)\b",
    )
)


def refusal(read: Callable[[str], bytes | None]) -> str | None:
    """The sentence in which a repository says that it takes no automated pull requests; None where none does.

    `read` gives a file of the default branch. Only the files where projects say such things are looked at.
    """
    for path in GUIDES:
        text = (read(path) or b"")[:200_000].decode("utf-8", "replace")
        plain = re.sub(r"[*_`\s]+", " ", text)
        for pattern in _REFUSALS:
            found = pattern.search(plain)
            if found is not None:
                return f"{path}: {found[0]}"
    return None


def concerns(changed: Sequence[ChangedFile], bot: BotConfig) -> bool:
    """Whether a pull request touches training code: a path that the owner's patterns match, at any depth."""
    return matters([path for file in changed for path in (file.path, file.previous) if path is not None], bot)


def matters(paths: Iterable[str], bot: BotConfig) -> bool:
    """Whether one of some paths is matched by the owner's patterns, or holds the settings themselves."""
    patterns = (*bot.paths, "advisor.toml")
    return any(
        fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"*/{pattern}")
        for path in paths
        for pattern in patterns
    )


def branch_of(proposal: Proposal) -> str:
    """The branch of a proposal: advisor/<rule>-<fingerprint>."""
    return f"{PREFIX}{proposal.rule or STACKED}-{proposal.fingerprint}"


def rule_of(branch: str) -> str | None:
    """The rule a branch of the bot is of; None of any other branch."""
    found = re.fullmatch(rf"{PREFIX}([a-z0-9][a-z0-9-]*)-[0-9a-f]{{12,64}}", branch)
    return found[1] if found is not None else None


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Push the branch and open its pull request, or bring the open one up to date."""

    proposal: Proposal
    branch: str
    known: PullRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Close a pull request, with the reason as a sentence; `by` is the branch of what takes its place."""

    known: PullRequest
    reason: str
    by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Proven, and not proposed now, for a reason that the dashboard tells."""

    proposal: Proposal
    reason: str


Action = Open | Close | Wait


def turned_off(rule: str, config: Config) -> str | None:
    """Why a rule must not propose anything any more; None where it may."""
    if not config.bot.enabled:
        return "the bot was turned off ([tool.advisor.bot], enabled)"
    if rule == STACKED:
        return None if config.bot.stacked else "pull requests are opened one a rule now ([tool.advisor.bot], stacked)"
    if config.bot.stacked:
        return "all rewrites come in one pull request now ([tool.advisor.bot], stacked)"
    if rule in config.ignore:
        return f"the rule {rule} was turned off ([tool.advisor], ignore)"
    if config.select and rule not in config.select:
        return f"the rule {rule} is not among those selected ([tool.advisor], select)"
    return None


def closings(known: Sequence[PullRequest], config: Config) -> Iterator[Close]:
    """Open pull requests of the bot whose rule has been turned off since; nothing needs to be measured for it."""
    for each in known:
        rule = rule_of(each.head_ref)
        reason = turned_off(rule, config) if rule is not None and each.state == "open" else None
        if reason is not None:
            yield Close(known=each, reason=reason)


def decide(
    proposals: Sequence[Proposal],
    known: Sequence[PullRequest],
    config: Config,
    now: datetime.datetime,
    gone: Mapping[str, str],
) -> list[Action]:
    """What to do about the proposals of a commit, given every pull request of the bot, open or not, newest first.

    At most one is open a rule; a proposal whose pull request a person closed is not made again; a new pull request
    waits while `max_open` are open or `per_week` were opened in seven days. `gone` are rules (with the reason) that
    were measured and have nothing to propose any more: their open pull requests are closed.
    """
    actions: list[Action] = list(closings(known, config))
    off = {close.known.number for close in actions if isinstance(close, Close)}
    opened = {p.head_ref: p for p in known if p.state == "open" and p.number not in off and rule_of(p.head_ref)}
    recent = sum(1 for p in known if rule_of(p.head_ref) and now - p.created < WEEK)
    count, settled = len(opened), set[str]()
    for proposal in proposals:
        rule, branch = proposal.rule or STACKED, branch_of(proposal)
        if rule in settled or turned_off(rule, config) is not None:
            continue
        if branch in opened:
            settled.add(rule)
            actions.append(Open(proposal=proposal, branch=branch, known=opened[branch]))
            continue
        ended = next((p for p in known if p.head_ref == branch and p.state == "closed"), None)
        if ended is not None and not _ours(ended):
            actions.append(Wait(proposal=proposal, reason=f"it was closed in #{ended.number}, and is not made again"))
            continue
        settled.add(rule)
        replaced = [p for p in opened.values() if rule_of(p.head_ref) == rule]
        limit = _limit(count - len(replaced), recent, config.bot)
        if limit is not None:
            actions.append(Wait(proposal=proposal, reason=limit))
            continue
        count, recent = count - len(replaced) + 1, recent + 1
        actions.append(Open(proposal=proposal, branch=branch))
        actions += [Close(known=p, reason="a newer proposal takes its place", by=branch) for p in replaced]
    for pull_request in opened.values():
        rule = rule_of(pull_request.head_ref) or STACKED
        if rule in gone and rule not in settled:
            actions.append(Close(known=pull_request, reason=gone[rule]))
    return actions


def gone(scripts: Sequence[Examined], rules: Iterable[str]) -> dict[str, str]:
    """Of some rules those that have nothing to propose on the measured commit any more, each with the reason.

    Only a measurement that reached its end says so: a rule that still finds its place, and was only not confirmed this
    time, is not among them.
    """
    if not scripts or any(s.report is None or s.report.outcome in ("failed", "inconclusive") for s in scripts):
        return {}
    found = {f.rule for s in scripts if s.report for f in s.report.findings if f.status != "declined"}
    proposed = {p.rule or STACKED for s in scripts for p in s.proposals}
    ended: dict[str, str] = {}
    for rule in set(rules) - proposed - {r for s in scripts for r in s.undecided}:
        if rule == STACKED:
            if not found:
                ended[rule] = "no rewrite is found on the current base any more"
        elif rule not in found:
            ended[rule] = "the rule finds nothing that pays on the current base any more"
        elif rule in _wrong(scripts):
            ended[rule] = "on the current base its rewrite is not proved to compute the same"
    return ended


def _wrong(scripts: Sequence[Examined]) -> set[str]:
    """Rules of which a rewrite was tried and changed the numbers."""
    tried = [trial for s in scripts if s.report for trial in s.report.trials if trial.outcome == "wrong"]
    return {name.partition("@")[0] for trial in tried for name in trial.patch if name not in trial.against}


CLOSED_BY_US = "<!-- advisor:closed -->"  # in the body of a pull request that the bot closed itself


def _ours(pull_request: PullRequest) -> bool:
    return CLOSED_BY_US in pull_request.body


def _limit(opened: int, recent: int, bot: BotConfig) -> str | None:
    if opened >= bot.max_open:
        return f"{opened} are open, and at most {bot.max_open} may be ([tool.advisor.bot], max_open)"
    if recent >= bot.per_week:
        return f"{recent} were opened in seven days, and at most {bot.per_week} may be ([tool.advisor.bot], per_week)"
    return None
