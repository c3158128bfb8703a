"""What the bot does and leaves alone: pure decisions over what the owner allows, what is open, and what was proved."""

from __future__ import annotations

import datetime
import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from advisor.bot.forge import ChangedFile, PullRequest
from advisor.config import BotConfig, Config
from advisor.model import Report
from advisor.proposals import Examination, Examined, Proposal

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


TEXTS = (".md", ".rst")  # suffixes of what only people read
FOR_THE_FORGE = (".github", ".gitlab", ".circleci", "LICENSE", "LICENSE.txt", ".gitlab-ci.yml")  # at the root


def idle(paths: Iterable[str], bot: BotConfig) -> bool:
    """Whether a change of some paths cannot change what a script does, so that what was proved before still holds.

    Only texts and the forge's own files are known not to: a script may read any other file, settings and data above
    all, and what is installed may stand in one.
    """
    return all(
        not matters((path,), bot)
        and (PurePosixPath(path).suffix in TEXTS or PurePosixPath(path).parts[:1][0] in FOR_THE_FORGE)
        for path in paths
    )


def branch_of(proposal: Proposal) -> str:
    """The branch of a proposal: advisor/<rule>-<fingerprint>."""
    return f"{PREFIX}{proposal.rule or STACKED}-{proposal.fingerprint}"


def rule_of(branch: str) -> str | None:
    """The rule a branch of the bot is of; None of any other branch."""
    found = re.fullmatch(rf"{PREFIX}([a-z0-9][a-z0-9-]*)-[0-9a-f]{{12,64}}", branch)
    return found[1] if found is not None else None


# ------------------------------------------------------------------------------------------------------------- origins


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the description of a pull request of the bot says of where it is from; all but `rules` as short digests.

    `title` is that of the title that the bot gave it: a person may have given it another one.
    """

    rules: tuple[str, ...]
    command: str
    device: str
    title: str


_ORIGIN = re.compile(
    r"<!-- advisor:proposal [0-9a-f]{12,64} of ([a-z0-9-]+(?:,[a-z0-9-]+)*)"
    r" command=([0-9a-f]{12}) device=([0-9a-f]{12}) title=([0-9a-f]{12}) -->"
)


def short(text: str) -> str:
    """A short digest."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def marker_of(proposal: Proposal, command: str, title: str) -> str:
    """The marker that the description of a proposal's pull request begins with."""
    device = short(proposal.report.hardware.name)
    said = f"command={short(command)} device={device} title={short(title)}"
    return f"<!-- advisor:proposal {proposal.fingerprint} of {','.join(proposal.rules)} {said} -->"


def origin_of(body: str) -> Origin | None:
    """What a description says; None where it does not, because a person has written another one."""
    found = _ORIGIN.search(body)
    if found is None:
        return None
    return Origin(rules=tuple(found[1].split(",")), command=found[2], device=found[3], title=found[4])


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Push the branch and open its pull request, or bring the open one up to date; `command` is what was measured."""

    proposal: Proposal
    command: str
    branch: str
    known: PullRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Close a pull request, with the reason as a sentence; `by` is the branch of what takes its place.

    `off` is of a rule that the owner has turned off, whatever was measured.
    """

    known: PullRequest
    reason: str
    by: str | None = None
    off: bool = False


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
    return unselected(rule, config)


def unselected(rule: str, config: Config) -> str | None:
    """Why a rule is not asked at all; None where it is."""
    if rule in config.ignore:
        return f"the rule {rule} was turned off ([tool.advisor], ignore)"
    if config.select and rule not in config.select:
        return f"the rule {rule} is not among those selected ([tool.advisor], select)"
    return None


def closings(known: Sequence[PullRequest], config: Config) -> Iterator[Close]:
    """Open pull requests of the bot of which a rule has been turned off since; nothing needs to be measured for it."""
    for each in known:
        rule, origin = rule_of(each.head_ref), origin_of(each.body)
        if rule is None or each.state != "open":
            continue
        reasons = (turned_off(rule, config), *(unselected(one, config) for one in (origin.rules if origin else ())))
        reason = next((one for one in reasons if one is not None), None)
        if reason is not None:
            yield Close(known=each, reason=reason, off=True)


def decide(found: Examination, known: Sequence[PullRequest], config: Config, now: datetime.datetime) -> list[Action]:
    """What to do about what was measured, given every pull request of the bot, open or not, newest first.

    At most one is open a rule, and stays open while its script proposes it; a proposal whose pull request a person
    closed is not made again; a new pull request waits while `max_open` are open or `per_week` were opened in seven
    days. One whose rule was measured and has nothing to propose any more is closed.
    """
    actions: list[Action] = list(closings(known, config))
    off = {close.known.number for close in actions if isinstance(close, Close)}
    opened = {p.head_ref: p for p in known if p.state == "open" and p.number not in off and rule_of(p.head_ref)}
    ended = gone(found, tuple(opened.values()))
    recent = sum(1 for p in known if rule_of(p.head_ref) and now - p.created < WEEK)
    count, taken = len(opened), dict[str, str]()  # rule -> branch that has its place
    ending = set[str]()  # branches whose pull requests another one takes the place of
    for proposal, command in _offers(found, opened):
        rule, branch = proposal.rule or STACKED, branch_of(proposal)
        if turned_off(rule, config) is not None or taken.get(rule) == branch:
            continue
        if rule in taken:
            actions.append(Wait(proposal=proposal, reason="one is open a rule at a time: it waits for that one's end"))
            continue
        ended_by_hand = next(
            (p for p in known if p.head_ref == branch and p.state == "closed" and not closed_by_us(p)), None
        )
        if ended_by_hand is not None and branch not in opened:
            reason = f"it was closed in #{ended_by_hand.number}, and is not made again"
            actions.append(Wait(proposal=proposal, reason=reason))
            continue
        taken[rule] = branch
        others = [p for p in opened.values() if rule_of(p.head_ref) == rule and p.head_ref != branch]
        replaced = [p for p in others if p.number in ended or _replaceable(p, command, config.bot)]
        kept = next((p for p in others if p not in replaced), None)
        if kept is not None and branch not in opened:
            reason = f"one is open a rule at a time: it waits for the end of #{kept.number}"
            actions.append(Wait(proposal=proposal, reason=reason))
            continue
        if branch not in opened:
            limit = _limit(count - len(replaced), recent, config.bot)
            if limit is not None:
                actions.append(Wait(proposal=proposal, reason=limit))
                continue
            count, recent = count + 1, recent + 1
        count -= len(replaced)
        ending |= {p.head_ref for p in replaced}
        actions.append(Open(proposal=proposal, command=command, branch=branch, known=opened.get(branch)))
        actions += [Close(known=p, reason="a newer proposal takes its place", by=branch) for p in replaced]
    left = [
        p for p in opened.values() if p.head_ref not in ending and taken.get(rule_of(p.head_ref) or "") != p.head_ref
    ]
    return actions + [Close(known=p, reason=ended[p.number]) for p in left if p.number in ended]


def outlasting(actions: Sequence[Action], known: Sequence[PullRequest], moved: Sequence[str]) -> Iterator[Action]:
    """Of what was decided on a commit that the branch has left since, what holds all the same.

    A rule that is off is off, and a rewrite of files that are as they were may be proposed. Nothing is closed for what
    an older commit shows, and nothing that is open is put back onto it.
    """
    there = {rule_of(p.head_ref) for p in known if p.state == "open"}
    for action in actions:
        if isinstance(action, Open) and (rule_of(action.branch) in there or set(action.proposal.files) & set(moved)):
            yield Wait(proposal=action.proposal, reason="the default branch has moved on: it is to be measured again")
            continue
        if not isinstance(action, Close) or action.off:
            yield action


def _offers(found: Examination, opened: Mapping[str, PullRequest]) -> list[tuple[Proposal, str]]:
    """The proposals with the commands they are of, those first whose pull requests are open: they keep their place."""
    offers = [(proposal, script.command) for script in found.scripts for proposal in script.proposals]
    return sorted(offers, key=lambda offer: branch_of(offer[0]) not in opened)


def _replaceable(pull_request: PullRequest, command: str, bot: BotConfig) -> bool:
    """Whether a new proposal of the same rule takes the place of one: of the same script, or of one not measured now.

    Where a person has removed what tells the script, it is that of the new one if there is no other.
    """
    origin = origin_of(pull_request.body)
    if origin is None:
        return len(bot.scripts) <= 1
    return origin.command == short(command) or origin.command not in {short(each) for each in bot.scripts}


def gone(found: Examination, opened: Sequence[PullRequest]) -> dict[int, str]:
    """Of some open pull requests those that nothing stands behind any more on the measured commit, with the reason.

    Only a measurement of the same command on the same kind of device says so, one that asked the rule, in which no
    rule failed and that reached its end. A rule that still finds its place, and was only not confirmed this time, is
    not gone.
    """
    ended: dict[int, str] = {}
    for pull_request in opened:
        rule, origin = rule_of(pull_request.head_ref), origin_of(pull_request.body)
        if rule is None or origin is None or (found.rules and rule not in found.rules):
            continue
        script = next((each for each in found.scripts if short(each.command) == origin.command), None)
        if script is not None and (why := _nothing_left(script, rule, origin.device)) is not None:
            ended[pull_request.number] = why
    return ended


def _nothing_left(script: Examined, rule: str, device: str) -> str | None:
    report = script.report
    if report is None or script.error is not None or report.outcome in ("failed", "inconclusive"):
        return None
    if report.rule_errors or short(report.hardware.name) != device or rule in script.undecided:
        return None
    if rule in {proposal.rule or STACKED for proposal in script.proposals}:
        return None
    found = {finding.rule for finding in report.findings if finding.status != "declined"}
    if rule == STACKED:
        return None if found else "no rewrite is found on the current base any more"
    if rule not in found:
        return "the rule finds nothing that pays on the current base any more"
    return "on the current base its rewrite is not proved to compute the same" if rule in _wrong(report) else None


def _wrong(report: Report) -> set[str]:
    """Rules whose every trial, each of them alone on top of others', changed the numbers."""
    outcomes: dict[str, set[str]] = {}
    for trial in report.trials:
        changed = {name.partition("@")[0] for name in trial.patch if name not in trial.against}
        for rule in changed:
            outcomes.setdefault(rule, set()).add(trial.outcome.value if len(changed) == 1 else "together")
    return {rule for rule, seen in outcomes.items() if seen == {"wrong"}}


CLOSED_BY_US = "<!-- advisor:closed -->"  # begins the description of a pull request that the bot closed itself


def closed_by_us(pull_request: PullRequest) -> bool:
    """Whether a pull request says that the bot closes it; further down, the words may be quoted from a source."""
    return pull_request.body.lstrip().startswith(CLOSED_BY_US)


def _limit(opened: int, recent: int, bot: BotConfig) -> str | None:
    if opened >= bot.max_open:
        return f"{opened} are open, and at most {bot.max_open} may be ([tool.advisor.bot], max_open)"
    if recent >= bot.per_week:
        return f"{recent} were opened in seven days, and at most {bot.per_week} may be ([tool.advisor.bot], per_week)"
    return None
