"""One task of the bot from the queue or the command line: who may ask for it, and what is done."""

from __future__ import annotations

from collections.abc import Callable

from advisor.bot import examining, policy, proposing
from advisor.bot.desk import Desk
from advisor.bot.tasks import Task
from advisor.bot.told import told
from advisor.errors import AdvisorError, ForgeError, OutputError

ANSWER = "advisor:answer"  # of the marker of an answer, with the number of the comment


def handle(task: Task, desk: Desk) -> str:
    """Do a task; returns a line for the log. Raises AdvisorError; every part that was done is not done twice."""
    if task.kind == "examine":
        assert task.number is not None
        return examining.examine(desk, task.number)
    if task.kind == "propose":
        return proposing.propose(desk, (task.argument,) if task.argument else ())
    if task.kind == "maintain":
        if task.branch not in (None, desk.forge.repository().default_branch):
            return f"a push to {task.branch}, which is not the default branch"
        return proposing.maintain(desk)
    return command(task, desk)


def command(task: Task, desk: Desk) -> str:
    """Follow a `/advisor` command: of those who may push, where the owner has commands on."""
    assert task.number is not None and task.comment is not None
    commit = desk.tip(desk.forge.repository().default_branch)
    config = desk.settings(commit)
    if not config.bot.enabled or not config.bot.commands:
        return "commands are off"
    if task.requested_by is None or not desk.forge.may_write(task.requested_by):
        desk.forge.react(task.number, task.comment, "confused")
        return "a command of somebody who may not push"
    follow = _VERBS.get(task.verb or "")
    if follow is None:
        desk.forge.react(task.number, task.comment, "confused")
        return _answer(task, desk, _help())
    desk.forge.react(task.number, task.comment, "eyes")
    try:
        return follow(task, desk)
    except (ForgeError, OutputError):  # of the bot's own; done again, or for its log
        raise
    except AdvisorError as error:  # of their scripts or settings: whoever asked waits for an answer
        return _answer(task, desk, f"It could not be done: {_sentence(told(error))}")


def _answer(task: Task, desk: Desk, text: str) -> str:
    """Answer a command once."""
    marker = f"<!-- {ANSWER} {task.comment} -->"
    assert task.number is not None
    desk.forge.add_comment(task.number, marker, f"{marker}\n{text}")
    return f"answered comment {task.comment}"


def _help() -> str:
    from advisor.reports import pull_request as page

    return str(page.command_help())


def _optimize(task: Task, desk: Desk) -> str:
    from advisor import registry

    if task.argument is not None and task.argument not in registry.load(None)[0]:
        return _answer(task, desk, f"There is no rule `{task.argument}`.\n\n{_help()}")
    line = proposing.propose(desk, (task.argument,) if task.argument else ())
    _answer(task, desk, _sentence(line))
    return line


def _profile(task: Task, desk: Desk) -> str:
    assert task.number is not None
    if task.on_issue:
        return _answer(task, desk, "This is an issue: give the command in the pull request that is to be measured.")
    return examining.examine(desk, task.number, asked=True)


def _rebase(task: Task, desk: Desk) -> str:
    assert task.number is not None
    if task.on_issue:
        return _answer(task, desk, "This is an issue: give the command in the pull request that is to be rebased.")
    pull_request = desk.forge.pull_request(task.number)
    rule = policy.rule_of(pull_request.head_ref)
    if rule is None or pull_request.head_repository != desk.forge.repository().name:
        return _answer(task, desk, "Only pull requests of the bot can be rebased by it.")
    line = proposing.propose(desk, () if rule == policy.STACKED else (rule,))
    _answer(task, desk, _sentence(line))
    return line


def _explain(task: Task, desk: Desk) -> str:
    from advisor import registry
    from advisor.reports import pull_request as page

    item = registry.load(None)[0].get(task.argument or "")
    if item is None:
        return _answer(task, desk, f"There is no rule `{task.argument}`.\n\n{_help()}")
    return _answer(task, desk, page.explained(item.page, item.rule.id))


def _status(task: Task, desk: Desk) -> str:
    mine = [f"- #{each.number}" for each in proposing.mine(desk) if each.state == "open"]
    return _answer(task, desk, "\n".join(("Open pull requests of the bot:", *mine)) if mine else "Nothing is open.")


def _sentence(line: str) -> str:
    from advisor.reports import markdown_text

    return str(markdown_text.text(f"{line[:1].upper()}{line[1:]}."))


_VERBS: dict[str, Callable[[Task, Desk], str]] = {
    "optimize": _optimize,
    "profile": _profile,
    "rebase": _rebase,
    "explain": _explain,
    "status": _status,
    "help": lambda task, desk: _answer(task, desk, _help()),
}
