"""Proven rewrites of the default branch become pull requests, are kept up to date, and are closed when superseded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from advisor.bot import handover, policy
from advisor.bot.desk import Desk, Measurement
from advisor.bot.forge import PullRequest
from advisor.bot.policy import CLOSED_BY_US, Close, Open, Wait
from advisor.config import Config
from advisor.errors import ForgeConflict, ForgeRefused
from advisor.proposals import Dashboard, Examined, OpenProposal, Proposal

DASHBOARD = "<!-- advisor:dashboard -->"
DASHBOARD_TITLE = "advisor: proven speed-ups of this repository"


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

    Raises ArtifactError, before anything is pushed or posted, for a file that does not pass. A pull request that the
    forge refuses keeps the others from being opened only where the forge does not answer at all.
    """
    files = desk.reader(commit)
    found = handover.read(data, base=commit, head=commit, purpose="propose", config=config, files=files)
    known = desk.forge.pull_requests(state="all", branch_prefix=policy.PREFIX)
    proposals = [proposal for script in found.scripts for proposal in script.proposals]
    open_rules = {rule for p in known if p.state == "open" and (rule := policy.rule_of(p.head_ref))}
    watched = open_rules & set(rules) if rules else open_rules
    ended = policy.gone(found.scripts, watched) if len(found.scripts) == len(config.bot.scripts) else {}
    actions = policy.decide(proposals, known, config, desk.now(), ended)
    numbers: dict[str, int] = {}
    notes: list[str] = []
    for action in actions:
        if isinstance(action, Open):
            try:
                pull_request = _open(desk, action, commit, config)
            except (ForgeConflict, ForgeRefused) as error:
                notes.append(f"{policy.rule_of(action.branch)}: {error}")
                desk.say(f"{action.branch} is not proposed: {error}")
                continue
            numbers[action.branch] = pull_request.number
        elif isinstance(action, Close):
            if action.by is not None and action.by not in numbers:
                continue  # what was to take its place is not there
            _close(desk, action, numbers.get(action.by or ""))
    waiting = {a.proposal.rule or policy.STACKED: a.reason for a in actions if isinstance(a, Wait)}
    show(desk, commit, config, found.scripts, waiting, notes)
    closed = sum(isinstance(action, Close) for action in actions)
    return f"{len(numbers)} proposed, {closed} closed, {len(waiting)} waiting at {commit[:12]}"


def _open(desk: Desk, action: Open, commit: str, config: Config) -> PullRequest:
    """Commit, push, open: in that order, and with the branch taken back where the pull request is refused."""
    from advisor.reports import pull_request as page

    proposal, branch = action.proposal, action.branch
    tip = desk.workspace.remote_head(branch)
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
    default = desk.forge.repository().default_branch
    marker = f"<!-- advisor:proposal {proposal.fingerprint} -->"
    try:
        return desk.forge.open_pull_request(
            branch=branch,
            base=default,
            title=page.pull_request_title(proposal),
            body=page.pull_request_body(
                proposal, marker=marker, base_branch=default, commit=commit, command=reproduction(proposal)
            ),
            labels=config.bot.labels,
            draft=config.bot.draft,
        )
    except (ForgeConflict, ForgeRefused):
        if tip is None:  # final: the branch alone would be half a pull request
            desk.workspace.delete(branch, expected=ours)
        raise


def reproduction(proposal: Proposal) -> str:
    """The command that measures a proposal again."""
    rules = () if proposal.rule is None else ("--select", proposal.rule)
    script, *arguments = proposal.report.environment.command or (proposal.report.script,)
    return " ".join(("advisor", "optimize", script, *rules, *(("--", *arguments) if arguments else ())))


def check_ours(desk: Desk, branch: str, tip: str | None, commit: str) -> None:
    """Raises ForgeConflict for a branch that somebody else has put commits on: it is theirs now."""
    if tip is None:
        return
    desk.workspace.fetch(f"refs/heads/{branch}")
    since = desk.workspace.merge_base(commit, tip)
    _, address = desk.author()
    if since is None or any(email != address for _, email in desk.workspace.authors_since(since, tip)):
        raise ForgeConflict(f"somebody else has pushed to {branch}: it is left alone, merge or close it by hand")


def _close(desk: Desk, action: Close, successor: int | None) -> None:
    """Close a pull request with the reason, mark it as closed by us, and delete its branch if nobody else is on it."""
    known = action.known
    reason = action.reason if successor is None else f"{action.reason}: #{successor}"
    if CLOSED_BY_US not in known.body:
        desk.forge.edit_pull_request(known.number, title=known.title, body=f"{known.body}\n{CLOSED_BY_US}\n")
    desk.forge.close_pull_request(known.number, CLOSED_BY_US, f"{CLOSED_BY_US}\nClosed: {reason}.")
    tip = desk.workspace.remote_head(known.head_ref)
    if tip is None:
        return
    try:
        check_ours(desk, known.head_ref, tip, desk.tip(desk.forge.repository().default_branch))
    except ForgeConflict as error:
        desk.say(str(error))
        return
    desk.workspace.delete(known.head_ref, expected=tip)


# ----------------------------------------------------------------------------------------------------------- maintain


def maintain(desk: Desk) -> str:
    """Bring what is open in line with the default branch and its settings; returns a line for the log.

    Pull requests of rules that are off are closed. On a moved base a branch is put on top again where nothing that was
    measured has changed; where it has, its rule is measured again.
    """
    commit = desk.tip(desk.forge.repository().default_branch)
    config = desk.settings(commit)
    known = desk.forge.pull_requests(state="open", branch_prefix=policy.PREFIX)
    known = tuple(each for each in known if policy.rule_of(each.head_ref) is not None)
    closed = list(policy.closings(known, config))
    for action in closed:
        _close(desk, action, None)
    gone = {action.known.number for action in closed}
    stale: list[str] = []
    moved = 0
    for each in (each for each in known if each.number not in gone):
        try:
            done = _rebased(desk, each, commit, config)
        except ForgeConflict as error:
            desk.say(str(error))
            continue
        moved += done is True
        if done is None:
            stale.append(policy.rule_of(each.head_ref) or policy.STACKED)
    line = f"{len(closed)} closed, {moved} rebased"
    if stale:
        again = () if policy.STACKED in stale else sorted(set(stale))
        return f"{line}; measured again: {propose(desk, again)}"
    if closed or moved:
        show(desk, commit, config, (), {}, ())
    return line


def _rebased(desk: Desk, known: PullRequest, commit: str, config: Config) -> bool | None:
    """Put a branch on top of the base: True where that was done, False where it was there, None to measure again."""
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
    if policy.matters(changed, config.bot) or set(changed) & set(edited):
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
    waiting: dict[str, str],
    notes: Sequence[str],
) -> None:
    """Write the dashboard issue, where the owner wants one."""
    from advisor.reports import pull_request as page

    if not config.bot.dashboard:
        return
    known = desk.forge.pull_requests(state="all", branch_prefix=policy.PREFIX)
    board = Dashboard(
        commit=commit,
        date=desk.now().date().isoformat(),
        proposals=tuple(_lines(known, waiting)),
        scripts=scripts,
        settings={field.name: _said(getattr(config.bot, field.name)) for field in dataclasses.fields(config.bot)},
        notes=tuple(notes),
    )
    desk.forge.upsert_issue(DASHBOARD, DASHBOARD_TITLE, page.dashboard(board, marker=DASHBOARD))


def _lines(known: Sequence[PullRequest], waiting: dict[str, str]) -> Iterator[OpenProposal]:
    for each in known:
        rule = policy.rule_of(each.head_ref)
        if rule is not None:
            yield OpenProposal(rule=rule, state=each.state, number=each.number, note=each.title)
    for rule, reason in waiting.items():
        yield OpenProposal(rule=rule, state="waiting", number=None, note=reason)


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
