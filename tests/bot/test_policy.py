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
from advisor.model import Outcome, Trial
from advisor.proposals import Examination, Examined, Proposal

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


def found(*scripts: Examined, rules: tuple[str, ...] = ()) -> Examination:
    return Examination(schema=1, advisor="1", purpose="propose", base=HEX, head=HEX, scripts=scripts, rules=rules)


def offering(*proposals: Proposal, command: str = "train.py", **more: Any) -> Examined:
    return Examined(command=command, proposals=proposals, report=report_of(), **more)


def body(command: str = "train.py", device: str | None = None, title: str = "t") -> str:
    """What the description of one of the bot's pull requests begins with."""
    report = report_of()
    if device is not None:
        report = dataclasses.replace(report, hardware=dataclasses.replace(report.hardware, name=device))
    return policy.marker_of(dataclasses.replace(proposal_of(), report=report), command, title)


def told(proposals: list[Proposal], *args: Any) -> list[tuple[str, Any]]:
    return told_of(found(offering(*proposals)), *args)


def told_of(*args: Any) -> list[tuple[str, Any]]:
    """The actions in short."""
    said: list[tuple[str, Any]] = []
    for action in policy.decide(*args):
        if isinstance(action, Open):
            said.append(("open", action.known.number if action.known else action.branch))
        elif isinstance(action, Close):
            said.append(("close", action.known.number))
        else:
            said.append(("wait", action.reason))
    return said


HEX = "1" * 40
A, B = "a" * 12, "b" * 12


def test_a_first_proposal_is_opened_and_the_same_one_is_brought_up_to_date() -> None:
    assert told([proposal()], [], ON, NOW) == [("open", f"advisor/naive-attention-{A}")]
    assert told([proposal()], [pull(7, f"advisor/naive-attention-{A}")], ON, NOW) == [("open", 7)]


def test_another_proposal_of_the_rule_takes_the_place_of_the_open_one() -> None:
    known = [pull(7, f"advisor/naive-attention-{B}")]
    actions = policy.decide(found(offering(proposal())), known, ON, NOW)
    assert [type(action) for action in actions] == [Open, Close]
    assert isinstance(actions[1], Close)
    assert (actions[1].known.number, actions[1].by) == (7, f"advisor/naive-attention-{A}")


def test_at_most_one_is_open_a_rule_and_the_other_waits() -> None:
    said = told([proposal(), proposal(fingerprint=B)], [], ON, NOW)
    assert said[0] == ("open", f"advisor/naive-attention-{A}")
    assert said[1] == ("wait", "one is open a rule at a time: it waits for that one's end")


TWO = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, scripts=("train.py", "other.py")))


def test_what_another_script_proposes_takes_no_place_of_what_is_open() -> None:
    """Two scripts, one rule: whichever is open stays so until it is merged, closed or gone; then comes the other."""
    mine, theirs = proposal(), proposal(fingerprint=B)
    both = found(offering(mine), offering(theirs, command="other.py"))
    known = [pull(7, f"advisor/naive-attention-{B}", body=body("other.py"))]
    assert told_of(both, known, TWO, NOW)[0] == ("open", 7)
    assert [kind for kind, _ in told_of(both, known, TWO, NOW)] == ["open", "wait"]
    unsettled = found(offering(mine), Examined(command="other.py", error="it raised"))
    ((kind, reason),) = told_of(unsettled, known, TWO, NOW)
    assert kind == "wait"
    assert "#7" in reason
    nothing = dataclasses.replace(report_of(), findings=())
    ended = found(offering(mine), Examined(command="other.py", report=nothing))
    assert told_of(ended, known, TWO, NOW) == [("open", f"advisor/naive-attention-{A}"), ("close", 7)]


def test_the_old_one_is_closed_also_where_the_bot_was_stopped_after_opening_the_new_one() -> None:
    known = [
        pull(8, f"advisor/naive-attention-{A}", body=body()),
        pull(7, f"advisor/naive-attention-{B}", body=body()),
    ]
    assert told([proposal()], known, ON, NOW) == [("open", 8), ("close", 7)]


def test_of_a_script_that_is_not_measured_any_more_the_place_is_free() -> None:
    known = [pull(7, f"advisor/naive-attention-{B}", body=body("former.py"))]
    assert told_of(found(offering(proposal())), known, TWO, NOW) == [
        ("open", f"advisor/naive-attention-{A}"),
        ("close", 7),
    ]


def test_one_that_a_person_closed_stays_closed_though_the_bot_closed_a_later_one() -> None:
    branch = f"advisor/naive-attention-{A}"
    known = [pull(8, branch, "closed", body=CLOSED_BY_US), pull(7, branch, "closed")]
    assert told([proposal()], known, ON, NOW)[0][0] == "wait"


def test_on_a_base_that_has_moved_on_only_what_nothing_contradicts_is_done() -> None:
    known = [pull(7, f"advisor/unfused-gelu-{A}", body=body())]
    off = dataclasses.replace(ON, ignore=("unfused-gelu",))
    actions = policy.decide(found(offering(proposal())), known, off, NOW)
    assert [type(a) for a in policy.outlasting(actions, known, ["other.py"])] == [Close, Open]
    assert [type(a) for a in policy.outlasting(actions, known, ["train.py"])] == [Close, Wait]
    known = [pull(7, f"advisor/naive-attention-{B}", body=body())]
    actions = policy.decide(found(offering(proposal())), known, ON, NOW)
    assert [type(a) for a in actions] == [Open, Close]
    assert [type(a) for a in policy.outlasting(actions, known, ["other.py"])] == [Wait]


@pytest.mark.parametrize(
    ("body", "again"), [("", False), (f"text\n{CLOSED_BY_US}\n", False), (f"{CLOSED_BY_US}\ntext\n", True)]
)
def test_what_a_person_closed_is_not_made_again_what_the_bot_closed_may_be(body: str, again: bool) -> None:
    known = [pull(7, f"advisor/naive-attention-{A}", "closed", body=body)]
    said = told([proposal()], known, ON, NOW)
    assert said[0][0] == ("open" if again else "wait")


def test_a_merged_one_does_not_keep_a_new_one_of_the_rule_from_being_opened() -> None:
    known = [pull(7, f"advisor/naive-attention-{B}", "merged")]
    assert told([proposal()], known, ON, NOW) == [("open", f"advisor/naive-attention-{A}")]


def test_no_more_are_open_or_opened_than_the_owner_allows() -> None:
    one = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, max_open=1))
    both = [proposal(), proposal("unfused-gelu")]
    said = told(both, [], one, NOW)
    assert said[0] == ("open", f"advisor/naive-attention-{A}")
    assert said[1][0] == "wait"
    assert "max_open" in said[1][1]
    weekly = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, per_week=1))
    known = [pull(7, f"advisor/unfused-rope-{A}", "merged", days=6)]
    assert "per_week" in told([proposal()], known, weekly, NOW)[0][1]
    known = [pull(7, f"advisor/unfused-rope-{A}", "merged", days=8)]
    assert told([proposal()], known, weekly, NOW)[0][0] == "open"


def test_a_replacement_does_not_count_twice_towards_the_open_ones() -> None:
    one = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, max_open=1))
    said = told([proposal()], [pull(7, f"advisor/naive-attention-{B}")], one, NOW)
    assert said == [("open", f"advisor/naive-attention-{A}"), ("close", 7)]


def test_rules_that_are_off_are_closed_and_not_opened() -> None:
    off = dataclasses.replace(ON, ignore=("naive-attention",))
    known = [pull(7, f"advisor/naive-attention-{A}"), pull(8, f"advisor/unfused-gelu-{A}")]
    assert told([proposal()], known, off, NOW) == [("close", 7)]
    only = dataclasses.replace(ON, select=("unfused-gelu",))
    assert told([proposal()], known, only, NOW) == [("close", 7)]
    none = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, enabled=False))
    assert told([], known, none, NOW) == [("close", 7), ("close", 8)]
    stacked = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, stacked=True))
    assert told([proposal(None)], known, stacked, NOW) == [("close", 7), ("close", 8), ("open", f"advisor/all-{A}")]


def test_the_one_with_all_rewrites_is_closed_too_where_a_rule_in_it_is_off() -> None:
    stacked = dataclasses.replace(ON, bot=dataclasses.replace(ON.bot, stacked=True))
    known = [pull(7, f"advisor/all-{A}", body=body())]
    assert told([], known, stacked, NOW) == []
    assert told([], known, dataclasses.replace(stacked, ignore=("naive-attention",)), NOW) == [("close", 7)]
    assert told([], known, dataclasses.replace(stacked, select=("unfused-gelu",)), NOW) == [("close", 7)]


def test_branches_of_others_with_the_prefix_are_never_touched() -> None:
    known = [pull(7, "advisor/my-own-work", body=body()), pull(8, "advisor/naive-attention-zzzzzzzzzzzz", body=body())]
    assert told([], known, ON, NOW) == []


def test_what_is_gone_is_closed_unless_it_is_proposed_after_all() -> None:
    nothing = dataclasses.replace(report_of(), findings=())
    known = [pull(7, f"advisor/naive-attention-{A}", body=body())]
    assert told_of(found(Examined(command="train.py", report=nothing)), known, ON, NOW) == [("close", 7)]
    assert told([], known, ON, NOW) == []
    assert told([proposal()], known, ON, NOW) == [("open", 7)]


# --------------------------------------------------------------------------------------------------------------- gone

GELU = pull(7, f"advisor/unfused-gelu-{A}", body=body())


def gone(script: Examined, known: PullRequest = GELU, rules: tuple[str, ...] = ()) -> bool:
    return known.number in policy.gone(found(script, rules=rules), (known,))


def test_only_a_measurement_that_ended_says_that_something_is_gone() -> None:
    report = report_of()
    assert gone(Examined(command="train.py", report=report))
    for outcome in ("inconclusive", "failed"):
        assert not gone(Examined(command="train.py", report=dataclasses.replace(report, outcome=outcome)))
    assert not gone(Examined(command="train.py", error="it raised"))
    assert not gone(Examined(command="train.py", report=report, undecided=("unfused-gelu",)))
    assert not policy.gone(found(), (GELU,))


def test_another_device_command_or_choice_of_rules_says_nothing_and_neither_does_a_rule_that_failed() -> None:
    report = report_of()
    script = Examined(command="train.py", report=report)
    assert not gone(script, pull(7, GELU.head_ref, body=body(device="NVIDIA H100")))
    assert not gone(script, pull(7, GELU.head_ref, body=body("train.py --large")))
    assert not gone(script, pull(7, GELU.head_ref, body="what a person has written"))
    assert not gone(script, rules=("naive-attention",))
    assert gone(script, rules=("unfused-gelu",))
    failed = dataclasses.replace(report, rule_errors=("rule unfused-gelu raised KeyError: 'x'",))
    assert not gone(Examined(command="train.py", report=failed))


def test_a_rule_that_still_finds_its_place_is_not_gone() -> None:
    report = report_of()
    known = pull(7, f"advisor/naive-attention-{A}", body=body())
    assert any(f.rule == "naive-attention" and f.status == "applied" for f in report.findings)
    assert not gone(Examined(command="train.py", report=report), known)


def test_unless_each_of_its_rewrites_was_tried_alone_and_changed_the_numbers() -> None:
    known = pull(7, f"advisor/naive-attention-{A}", body=body())
    (first, *_) = report_of().trials

    def after(*trials: Trial) -> bool:
        return gone(Examined(command="train.py", report=dataclasses.replace(report_of(), trials=trials)), known)

    wrong = dataclasses.replace(first, outcome=Outcome.WRONG)
    elsewhere = dataclasses.replace(wrong, patch=("naive-attention@b.py:1",))
    assert after(wrong)
    assert after(wrong, elsewhere)
    assert not after(wrong, dataclasses.replace(elsewhere, outcome=Outcome.INCONCLUSIVE))
    assert not after(dataclasses.replace(wrong, patch=(*wrong.patch, "unfused-gelu@b.py:1")))


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


@pytest.mark.parametrize(
    ("path", "idle"),
    [
        ("README.md", True),
        ("docs/how.rst", True),
        (".github/workflows/ci.yml", True),
        ("config.yaml", False),
        ("data/train.json", False),
        ("input.txt", False),
        ("requirements.txt", False),
        ("uv.lock", False),
        ("advisor.toml", False),
        ("pyproject.toml", False),
        ("train.py", False),
        ("csrc/kernel.cu", False),
        ("LICENSE", True),
        ("data/LICENSE", False),
    ],
)
def test_only_texts_are_known_to_change_nothing_that_was_proved(path: str, idle: bool) -> None:
    assert policy.idle([path], BotConfig(paths=("*.py",))) is idle
    assert policy.idle(["README.md", path], BotConfig()) is idle


def test_a_renamed_file_matters_by_its_old_name_too() -> None:
    assert policy.concerns([ChangedFile(path="x.txt", status="renamed", previous="train.py")], BotConfig())


def test_branch_and_rule() -> None:
    assert policy.rule_of(policy.branch_of(proposal())) == "naive-attention"
    assert policy.rule_of(policy.branch_of(proposal(None))) == policy.STACKED
    assert policy.rule_of("main") is None
    assert Path(policy.branch_of(proposal())).parts[0] == "advisor"
    assert isinstance(Wait(proposal=proposal(), reason="x"), Wait)
