"""Publish what another job measured: commits are told by the forge and its event, figures and edits by the file."""

from __future__ import annotations

from advisor.bot import examining, proposing
from advisor.bot.desk import Desk
from advisor.errors import UsageError


def publish_examined(desk: Desk, head: str, data: bytes) -> str:
    """Publish an examination of the open pull request whose head is a commit; returns a line for the log.

    The owner's settings decide here as well: the job that measured ran beside code that may not be the owner's.
    """
    pull_request = desk.forge.pull_request_at(head)
    if pull_request is None:
        return f"no open pull request has {head[:12]} as its head: nothing to say"
    settings = desk.tip(pull_request.base_ref)
    config = desk.settings(settings)
    changed = desk.forge.changed_files(pull_request.number)
    why = examining.unwanted(desk, pull_request, changed, config, asked=False)
    if why is not None:
        return f"#{pull_request.number} is not examined: {why}"
    base = examining.fetch_head(desk, pull_request, settings)
    if base is None:
        return f"#{pull_request.number} moved on: the next run is of the new head"
    return examining.tell(desk, pull_request, base, config, data, changed)


def publish_proposed(desk: Desk, commit: str, data: bytes) -> str:
    """Propose what was measured of a commit of the default branch; returns a line for the log."""
    tip = desk.tip(desk.forge.repository().default_branch)
    if desk.workspace.merge_base(commit, tip) != commit:
        raise UsageError(f"{commit[:12]} is no commit of the default branch: measure that branch")
    config = desk.settings(tip)
    why = proposing.unwanted(desk, tip, config)
    if why is not None:
        return f"nothing is proposed: {why}"
    return proposing.offer(desk, commit, config, data)
