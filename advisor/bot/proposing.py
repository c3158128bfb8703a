"""Proven rewrites of the default branch become pull requests, are kept up to date, and are closed when superseded."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
from collections.abc import Iterator, Sequence

from advisor.bot import handover, policy
from advisor.bot.desk import Desk, Measurement
from advisor.bot.forge import PullRequest
from advisor.bot.mirrors.gitnames import UnfitChange
from advisor.bot.policy import CLOSED_BY_US, Close, Open, Wait
from advisor.config import Config
from advisor.errors import ForgeConflict, ForgeMissing, ForgeRefused
from advisor.proposals import Dashboard, Examined, OpenProposal, Proposal

DASHBOARD = "<!-- advisor:dashboard -->"
DASHBOARD_TITLE = "advisor: proven speed-ups of this repository"
END = "<!-- advisor:end of what is written anew with each measurement; what stands below is kept -->"
# In which what was begun is done again; later, a label that is missing was taken off by a person, and the dashboard is
# as it was left.
SETTLING = datetime.timedelta(hours=1)


def propose(desk: Desk, rules: Sequence[str] = ()) -> str:
    """Measure the default branch and propose what is proven there; returns a line for the log.

    `rules` narrows it to some rules; the pull requests of others are left as they are.
    """
    repository = desk.forge.repository()
    commit = desk.tip(repository.default_branch)
    config = desk.settings(commit)
    why = unwanted(desk, commit, config)
    if why is not None:
        return f"nothing is proposed: {why}"
    if config.bot.stacked:
        rules = ()
    off = next((why for rule in rules if (why := policy.turned_off(rule, config))), None)
    if off is not None:
        return f"nothing is proposed: {off}"
    wanted = Measurement(purpose="propose", base=commit, head=commit, settings=commit, rules=tuple(rules))
    return offer(desk, commit, config, desk.measure(wanted, config), rules)


def unwanted(desk: Desk, commit: str, config: Config) -> str | None:
    """Why nothing may be proposed to a repository; None where something may."""
    if not config.bot.enabled:
        return "the bot is not enabled on the default branch"
    if not config.bot.scripts:
        return "no scripts are configured on the default branch"
    if desk.forge.repository().archived:
        return "the repository is archived"
    words = policy.refusal(desk.reader(commit))
    return None if words is None else f"the repository accepts no automated pull requests ({words})"


def offer(desk: Desk, commit: str, config: Config, data: bytes, rules: Sequence[str] = ()) -> str:
    """Propose what the measuring job wrote of a commit of the default branch, once it has passed every check.

    `config` are the settings it was measured under; what the owner wants is asked for again, for measuring takes long.
    Raises ArtifactError, before anything is pushed or posted, for a file that does not pass. A pull request that the
    forge refuses keeps the others from being opened only where the forge does not answer at all.
    """
    files = desk.reader(commit)
    found = handover.read(data, base=commit, head=commit, purpose="propose", config=config, files=files)
    found = dataclasses.replace(found, rules=found.rules or tuple(rules))
    tip = desk.tip(desk.forge.repository().default_branch)
    wishes = desk.settings(tip)
    why = unwanted(desk, tip, wishes)
    if why is not None:
        return f"nothing is proposed: {why}"
    known = mine(desk)
    actions = policy.decide(found, known, wishes, desk.now())
    moved = desk.workspace.changed_paths(commit, tip)
    if not policy.idle(moved, wishes.bot):
        actions = [*policy.outlasting(actions, known, moved)]
    done = _Done()
    for action in actions:
        _act(desk, action, commit, wishes, done)
    waiting = [(a.proposal.rule or policy.STACKED, a.reason) for a in actions if isinstance(a, Wait)]
    show(desk, commit, wishes, found.scripts, waiting, done.notes)
    return f"{len(done.numbers)} proposed, {done.closed} closed, {len(waiting)} waiting at {commit[:12]}"


def mine(desk: Desk) -> tuple[PullRequest, ...]:
    """The pull requests that this account made of proposals, newest first; a branch's name alone makes none ours."""
    every = desk.forge.pull_requests(state="all", branch_prefix=policy.PREFIX)
    account = desk.forge.account().lower()
    return tuple(p for p in every if p.author.lower() == account and policy.rule_of(p.head_ref) is not None)


@dataclasses.dataclass(slots=True)
class _Done:
    """What has become of the actions so far: pull requests by branch, how many were closed, what is to be told."""

    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    closed: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)


def _act(desk: Desk, action: policy.Action, commit: str, config: Config, done: _Done) -> None:
    """Do one thing; what the forge declines for good is noted and keeps the others from nothing."""
    if isinstance(action, Open):
        try:
            pull_request = _open(desk, action, commit, config)
        except (ForgeConflict, ForgeRefused, UnfitChange) as error:
            done.notes.append(f"{policy.rule_of(action.branch)}: {error}")
            desk.say(f"{action.branch} is not proposed: {error}")
            return
        done.numbers[action.branch] = pull_request.number
    elif isinstance(action, Close) and (action.by is None or action.by in done.numbers):
        _close(desk, action, done.numbers.get(action.by or ""))
        done.closed += 1


def _open(desk: Desk, action: Open, commit: str, config: Config) -> PullRequest:
    """Commit, push, open: in that order, and with the branch taken back where no pull request comes of it."""
    from advisor.reports import pull_request as page

    proposal, branch = action.proposal, action.branch
    default = desk.forge.repository().default_branch
    known = None if action.known is None else still_ours(desk, action.known, default)
    tip = desk.workspace.remote_head(branch)
    if tip is None and known is not None:
        raise ForgeConflict(f"somebody has deleted {branch}, of which #{known.number} is: it is left alone")
    check_ours(desk, branch, tip, commit)
    ours = desk.workspace.commit(
        commit,
        handover.results(proposal.files, desk.reader(commit)),
        message=page.commit_message(proposal),
        author=desk.author(),
        date=desk.workspace.date_of(commit),
    )
    if tip != ours:
        desk.workspace.push(branch, ours, expected=tip)
    given = page.pull_request_title(proposal)
    body = page.pull_request_body(
        proposal,
        marker=policy.marker_of(proposal, action.command, given),
        base_branch=default,
        commit=commit,
        command=reproduction(proposal, action.command),
    )
    title, body = (given, f"{body}\n{END}\n") if known is None else told_apart(known, given, body)
    labels = config.bot.labels if known is None or desk.now() - known.created < SETTLING else ()
    try:
        return desk.forge.open_pull_request(
            branch=branch, base=default, title=title, body=body, labels=labels, draft=config.bot.draft
        )
    except (ForgeConflict, ForgeRefused) as error:  # final: the branch alone would be half a pull request
        opened = desk.forge.pull_requests(state="open", branch_prefix=branch)
        there = next((each for each in opened if each.head_ref == branch), None)
        if there is None:
            desk.workspace.delete(branch, expected=ours)
            raise
        desk.say(f"#{there.number} is open, but not all of it was taken: {error}")
        return there


def still_ours(desk: Desk, known: PullRequest, default: str) -> PullRequest:
    """A pull request as it is now; raises ForgeConflict for one that people have ended or turned to another branch."""
    fresh = desk.forge.pull_request(known.number)
    if fresh.state != "open":
        raise ForgeConflict(f"#{fresh.number} is {fresh.state} by now: it is left alone")
    if fresh.base_ref != default:
        raise ForgeConflict(f"#{fresh.number} goes to {fresh.base_ref}, not to {default}: it is left alone")
    return fresh


def told_apart(known: PullRequest, title: str, body: str) -> tuple[str, str]:
    """Title and description for an open pull request, with what people have made of them.

    A title that is not the one we gave is a person's, and stays. What stands below our part of the description stays;
    where our part is not to be found, all of it is a person's.
    """
    origin = policy.origin_of(known.body)
    theirs = origin is None or policy.short(known.title) != origin.title
    _, ours, below = known.body.rpartition(END)  # the last: the words may be quoted from a source above
    words = below.replace(CLOSED_BY_US, "").strip() if ours or origin is None else ""
    return known.title if theirs else title, f"{body}\n{END}\n" + (f"\n{words}\n" if words else "")


def reproduction(proposal: Proposal, command: str) -> str:
    """The command that measures a proposal again; `command` is what the owner wrote."""
    script, *arguments = [word for word in shlex.split(command) if word != "--"]
    rules = () if proposal.rule is None else ("--select", proposal.rule)
    return shlex.join(("advisor", "optimize", script, *rules, *(("--", *arguments) if arguments else ())))


def check_ours(desk: Desk, branch: str, tip: str | None, commit: str) -> None:
    """Raises ForgeConflict for a branch that somebody else has put commits on: it is theirs now."""
    if tip is None:
        return
    try:
        desk.workspace.fetch(f"refs/heads/{branch}")
    except ForgeMissing:
        raise ForgeConflict(f"somebody else has deleted {branch} just now: it is left alone") from None
    since = desk.workspace.merge_base(commit, tip)
    _, address = desk.author()
    if since is None or any(email != address for _, email in desk.workspace.authors_since(since, tip)):
        raise ForgeConflict(f"somebody else has pushed to {branch}: it is left alone, merge or close it by hand")


def _close(desk: Desk, action: Close, successor: int | None) -> None:
    """Mark a pull request as ended by us, say why, delete its branch if nobody else is on it, and close it.

    In that order, so that whatever keeps us from the next step, doing it again does all: a pull request that is closed
    is not looked at again, so its branch goes before it. One that a person has ended meanwhile stays that person's.
    """
    known = desk.forge.pull_request(action.known.number)
    if known.state != "open":
        return
    if not policy.closed_by_us(known):
        marked = f"{CLOSED_BY_US}\n{known.body}"  # first: what is too long is cut at its end
        desk.forge.edit_pull_request(known.number, title=known.title, body=marked)
    reason = action.reason if successor is None else f"{action.reason}: #{successor}"
    told = f"{CLOSED_BY_US}\nClosed: {reason}."
    desk.forge.add_comment(known.number, CLOSED_BY_US, told)
    try:
        _drop(desk, known.head_ref)
    except (ForgeConflict, ForgeRefused) as error:
        desk.say(str(error))
    desk.forge.close_pull_request(known.number, CLOSED_BY_US, told)


def _drop(desk: Desk, branch: str) -> None:
    """Delete a branch; raises ForgeConflict where somebody else is on it, ForgeRefused where it is protected."""
    tip = desk.workspace.remote_head(branch)
    if tip is not None:
        check_ours(desk, branch, tip, desk.tip(desk.forge.repository().default_branch))
        desk.workspace.delete(branch, expected=tip)


# ----------------------------------------------------------------------------------------------------------- maintain


def maintain(desk: Desk) -> str:
    """Bring what is open in line with the default branch and its settings; returns a line for the log.

    Pull requests of rules that are off are closed. On a moved base a branch is put on top again where nothing that was
    measured has changed; where it has, its rule is measured again.
    """
    commit = desk.tip(desk.forge.repository().default_branch)
    config = desk.settings(commit)
    every = mine(desk)
    known = tuple(each for each in every if each.state == "open")
    lately = any(each.ended is not None and desk.now() - each.ended < SETTLING for each in every)
    closed = list(policy.closings(known, config))
    for action in closed:
        _close(desk, action, None)
    gone = {action.known.number for action in closed}
    stale: list[str] = []
    moved = 0
    for each in (each for each in known if each.number not in gone):
        try:
            done = _rebased(desk, each, commit, config)
        except (ForgeConflict, ForgeRefused, UnfitChange) as error:
            desk.say(str(error))
            continue
        moved += done is True
        if done is None:
            stale.append(policy.rule_of(each.head_ref) or policy.STACKED)
    line = f"{len(closed)} closed, {moved} rebased"
    if stale:
        again = () if policy.STACKED in stale else sorted(set(stale))
        return f"{line}; measured again: {propose(desk, again)}"
    if closed or lately:  # of late: also where we were stopped after the last was closed
        show(desk, commit, config, (), (), ())
    return line


def _rebased(desk: Desk, known: PullRequest, commit: str, config: Config) -> bool | None:
    """Put a branch on top of the base: True where that was done, False where it was there, None to measure again."""
    still_ours(desk, known, desk.forge.repository().default_branch)
    tip = desk.workspace.remote_head(known.head_ref)
    if tip is None:
        return False
    check_ours(desk, known.head_ref, tip, commit)
    since = desk.workspace.merge_base(commit, tip)
    assert since is not None, "check_ours has found it"
    if since == commit:
        return False
    changed = desk.workspace.changed_paths(since, commit)
    edited = desk.workspace.changed_paths(since, tip)
    if not policy.idle(changed, config.bot) or set(changed) & set(edited):
        return None
    files = {path: desk.workspace.read(tip, path) for path in edited}
    kept = {path: data for path, data in files.items() if data is not None}
    ours = desk.workspace.commit(
        commit,
        kept,
        message=desk.workspace.message_of(tip),
        author=desk.author(),
        date=desk.workspace.date_of(commit),
    )
    desk.workspace.push(known.head_ref, ours, expected=tip)
    return True


# ---------------------------------------------------------------------------------------------------------- dashboard


def show(
    desk: Desk,
    commit: str,
    config: Config,
    scripts: tuple[Examined, ...],
    waiting: Sequence[tuple[str, str]],
    notes: Sequence[str],
) -> None:
    """Write the dashboard issue, where the owner wants one and the forge takes issues."""
    from advisor.reports import pull_request as page

    if not config.bot.dashboard:
        return
    known = mine(desk)
    board = Dashboard(
        commit=commit,
        date=desk.now().date().isoformat(),
        proposals=tuple(_lines(known, waiting)),
        scripts=scripts,
        settings={field.name: _said(getattr(config.bot, field.name)) for field in dataclasses.fields(config.bot)},
        notes=tuple(notes),
    )
    try:
        desk.forge.upsert_issue(DASHBOARD, DASHBOARD_TITLE, page.dashboard(board, marker=DASHBOARD))
    except (ForgeConflict, ForgeMissing, ForgeRefused) as error:  # issues may be turned off
        desk.say(f"the dashboard is not written: {error}")


def _lines(known: Sequence[PullRequest], waiting: Sequence[tuple[str, str]]) -> Iterator[OpenProposal]:
    for each in known:
        rule = policy.rule_of(each.head_ref)
        if rule is not None:
            yield OpenProposal(rule=rule, state=each.state, number=each.number, note=each.title)
    for rule, reason in waiting:
        yield OpenProposal(rule=rule, state="waiting", number=None, note=reason)


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
