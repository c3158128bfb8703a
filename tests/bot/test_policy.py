"""What the bot decides: pure functions over what is open, allowed and proved."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest
from handed import proposal_of, report_of

from advisor.bot import policy
from advisor.bot.forge import ChangedFile, PullRequest
from advisor.bot.policy import CLOSED_BY_US, Close, Open, Wait
from advisor.config import BotConfig, Config
from advisor.proposals import Examined, Proposal

NOW = datetime.datetime(2026, 5, 20, 12, tzinfo=datetime.timezone.utc)
ON = Config(bot=BotConfig(enabled=True, scripts=("train.py",)))


def proposal(rule: str | None = "naive-attention", fingerprint: str = "a" * 12) -> Proposal:
    return dataclasses.replace(proposal_of(), rule=rule, fingerprint=fingerprint)


def pull(number: int, branch: str, state: str = "open", days: float = 30, body: str = "") -> PullRequest:
    created = NOW - datetime.timedelta(days=days)
    fields: dict[str, Any] = {"base_ref": "main", "base_sha": "1" * 40, "head_sha": "2" * 40, "labels": (), "url": ""}
    return PullRequest(
        number=number,
        title="t",
        body=body,
        state=state,  # type: ignore[arg-type]
        draft=False,
        author="advisor[bot]",
        head_ref=branch,
        head_repository="o/r",
        created=created,
        **fields,
    )


def told(*args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
    """The actions in short."""
    said: list[tuple[str, Any]] = []
    for action in policy.decide(*args, **kwargs):
        if isinstance(action, Open):
            said.append(("open", action.known.number if action.known else action.branch))
        elif isinstance(action, Close):
            said.append(("close", action.known.number))
        else:
            said.append(("wait", action.reason))
    return said


A, B = "a" * 12, "b" * 12


def test_a_first_proposal_is_opened_and_the_same_one_is_brought_up_to_date() -> None:
    assert told([proposal()], [], ON, NOW, {}) == [("open", f"advisor/naive-attention-{A}")]
    assert told([proposal()], [pull(7, f"advisor/naive-attention-{A}")], ON, NOW, {}) == [("open", 7)]


def test_another_proposal_of_the_rule_takes_the_place_of_the_open_one() -> None:
    known = [pull(7, f"advisor/naive-attention-{B}")]
    actions = policy.decide([proposal()], known, ON, NOW, {})
    assert [type(action) for action in actions] == [Open, Close]
    assert isinstance(actions[1], Close)
    assert (actions[1].known.number, actions[1].by) == (7, f"advisor/naive-attention-{A}")


def test_at_most_one_is_open_a_rule() -> None:
    assert told([proposal(), proposal(fingerprint=B)], [], ON, NOW, {}) == [("open", f"advisor/naive-attention-{A}")]


@pytest.mark.parametrize(("body", "again"), [("", False), (f"text\n{CLOSED_BY_US}\n", True)])
def test_what_a_person_closed_is_not_made_again_what_the_bot_closed_may_be(body: str, again: bool) -> None:
    known = [pull(7, f"advisor/naive-attention-{A}", "closed", body=body)]
    said = told([proposal()], known, ON, NOW, {})
    assert said[0][0] == ("open" if again else "wait")


def test_a_merged_one_does_not_keep_a_new_one_of_the_rule_from_being_opened() -> None:
    known = [pull(7, f"advisor/naive-attention-{B}", "merged")]
    assert told([proposal()], known, ON, NOW, {}) == [("open", f"advisor/naive-attention-{A}")]


def test_no_more_are_open_or_opened_than_the_owner_allows() -> None:
    one = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, max_open=1))
    both = [proposal(), proposal("unfused-gelu")]
    said = told(both, [], one, NOW, {})
    assert said[0] == ("open", f"advisor/naive-attention-{A}")
    assert said[1][0] == "wait"
    assert "max_open" in said[1][1]
    weekly = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, per_week=1))
    known = [pull(7, f"advisor/unfused-rope-{A}", "merged", days=6)]
    assert "per_week" in told([proposal()], known, weekly, NOW, {})[0][1]
    known = [pull(7, f"advisor/unfused-rope-{A}", "merged", days=8)]
    assert told([proposal()], known, weekly, NOW, {})[0][0] == "open"


def test_a_replacement_does_not_count_twice_towards_the_open_ones() -> None:
    one = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, max_open=1))
    said = told([proposal()], [pull(7, f"advisor/naive-attention-{B}")], one, NOW, {})
    assert said == [("open", f"advisor/naive-attention-{A}"), ("close", 7)]


def test_rules_that_are_off_are_closed_and_not_opened() -> None:
    off = dataclasses.replace(ON, ignore=("naive-attention",))
    known = [pull(7, f"advisor/naive-attention-{A}"), pull(8, f"advisor/unfused-gelu-{A}")]
    assert told([proposal()], known, off, NOW, {}) == [("close", 7)]
    only = dataclasses.replace(ON, select=("unfused-gelu",))
    assert told([proposal()], known, only, NOW, {}) == [("close", 7)]
    none = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, enabled=False))
    assert told([], known, none, NOW, {}) == [("close", 7), ("close", 8)]
    stacked = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, stacked=True))
    assert told([proposal(None)], known, stacked, NOW, {}) == [("close", 7), ("close", 8), ("open", f"advisor/all-{A}")]


def test_branches_of_others_with_the_prefix_are_never_touched() -> None:
    known = [pull(7, "advisor/my-own-work"), pull(8, "advisor/naive-attention-zzzzzzzzzzzz")]
    assert told([], known, ON, NOW, {"my-own-work": "x", "my": "x"}) == []


def test_what_is_gone_is_closed_unless_it_is_proposed_after_all() -> None:
    known = [pull(7, f"advisor/naive-attention-{A}")]
    assert told([], known, ON, NOW, {"naive-attention": "gone"}) == [("close", 7)]
    assert told([], known, ON, NOW, {}) == []
    assert told([proposal()], known, ON, NOW, {"naive-attention": "gone"}) == [("open", 7)]


# --------------------------------------------------------------------------------------------------------------- gone


def test_only_a_measurement_that_ended_says_that_something_is_gone() -> None:
    report = report_of()
    rule = "unfused-gelu"
    assert set(policy.gone([Examined(command="c", report=report)], [rule])) == {rule}
    for outcome in ("inconclusive", "failed"):
        undecided = dataclasses.replace(report, outcome=outcome)
        assert policy.gone([Examined(command="c", report=undecided)], [rule]) == {}
    assert policy.gone([Examined(command="c", error="it raised")], [rule]) == {}
    assert policy.gone([Examined(command="c", report=report), Examined(command="d", error="x")], [rule]) == {}
    assert policy.gone([], [rule]) == {}
    assert policy.gone([Examined(command="c", report=report, undecided=(rule,))], [rule]) == {}


def test_a_rule_that_still_finds_its_place_is_not_gone() -> None:
    report = report_of()
    assert any(f.rule == "naive-attention" and f.status == "applied" for f in report.findings)
    assert policy.gone([Examined(command="c", report=report)], ["naive-attention"]) == {}


# ------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    "text",
    [
        "Please: **no automated pull requests**.",
        "We do not accept bot PRs.",
        "Automated contributions are not welcome here.",
        "Pull requests from bots will be closed without a word.",
        "We don\u2019t accept any automated\npull requests",
    ],
)
def test_a_repository_that_wants_no_bots_is_believed(text: str) -> None:
    assert policy.refusal({"CONTRIBUTING.md": text.encode()}.get) is not None


@pytest.mark.parametrize(
    "text",
    [
        "Pull requests are welcome!",
        "Automated pull requests by dependabot are merged weekly.",
        "Bots are fun. We do not accept pull requests without tests.",
        "There is no automated test for pull requests yet.",
        "",
    ],
)
def test_and_one_that_says_something_else_is_not_misread(text: str) -> None:
    assert policy.refusal({"CONTRIBUTING.md": text.encode()}.get) is None


def test_a_guide_that_is_no_text_is_no_refusal() -> None:
    assert policy.refusal({"CONTRIBUTING.md": b"\xff\xfe\x00" * 1000}.get) is None


@pytest.mark.parametrize(
    ("path", "matters"),
    [
        ("train.py", True),
        ("a/b/train.py", True),
        ("requirements-dev.txt", True),
        ("pkg/requirements.txt", True),
        ("advisor.toml", True),
        ("README.md", False),
        ("train.pyc", False),
        ("docs/x.py.md", False),
    ],
)
def test_which_changes_matter(path: str, matters: bool) -> None:
    assert policy.matters([path], BotConfig()) is matters


def test_a_renamed_file_matters_by_its_old_name_too() -> None:
    assert policy.concerns([ChangedFile(path="x.txt", status="renamed", previous="train.py")], BotConfig())


def test_branch_and_rule() -> None:
    assert policy.rule_of(policy.branch_of(proposal())) == "naive-attention"
    assert policy.rule_of(policy.branch_of(proposal(None))) == policy.STACKED
    assert policy.rule_of("main") is None
    assert Path(policy.branch_of(proposal())).parts[0] == "advisor"
    assert isinstance(Wait(proposal=proposal(), reason="x"), Wait)
