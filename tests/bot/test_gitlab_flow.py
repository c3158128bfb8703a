"""On GitLab: merge requests examined, rewrites proposed, kept and closed; the real client and git, a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fakehub_git
import pytest
from benches import SETTINGS, TRAIN
from labbenches import ACCOUNT, NAME, LabBench, commit, lab_bench

from advisor.bot import examining, proposing, publishing, work
from advisor.bot.desk import Measurement
from advisor.bot.forges.gitlab_text import with_references
from advisor.bot.tasks import Task
from advisor.errors import ForgeError, ScriptError

OTHER = TRAIN.replace("Attention(64, 4)", "Attention(64, 2)")
OFF = SETTINGS.replace("[bot]", 'ignore = ["naive-attention"]\n[bot]')


@pytest.fixture
def b(tmp_path: Path) -> Iterator[LabBench]:
    with lab_bench(tmp_path) as found:
        yield found


def opened(b: LabBench, files: dict[str, str | None] | None = None, **options: str) -> int:
    """Somebody changes the script's attention in a merge request."""
    if files is None:
        b.commit("main", {"train.py": OTHER})
        files = {"train.py": TRAIN}
    b.commit("feature", files)
    return b.lab.open_merge_request(NAME, "ada", source="feature", **options)


# ------------------------------------------------------------------------------------------------------------ examine


def test_a_merge_request_gets_one_status_and_one_note(b: LabBench) -> None:
    number = opened(b, {"note.py": "x = 1\n"})
    examining.examine(b.desk, number)
    status = b.status(b.head_of(number))
    assert status is not None
    assert (status["name"], status["status"]) == ("advisor", "success")
    assert "measuring" not in status["description"]
    (note,) = b.notes(number)
    assert note["body"].startswith(examining.REPORT)
    assert "naive-attention" in note["body"]
    (asked,) = b.replay.asked
    assert (asked.head, asked.base) == (b.head_of(number), b.tip("main"))


def test_a_second_examination_edits_in_place_and_doubles_nothing(b: LabBench) -> None:
    number = opened(b)
    for _ in range(2):
        examining.examine(b.desk, number)
    report = [n for n in b.notes(number) if n["body"].startswith(examining.REPORT)]
    assert len(report) == 1
    b.commit("feature", {"more.py": "y = 2\n"})
    examining.examine(b.desk, number)
    again = [n for n in b.notes(number) if n["body"].startswith(examining.REPORT)]
    assert [n["id"] for n in again] == [report[0]["id"]]
    assert len({s["sha"] for s in b.project.statuses}) == 2
    assert all(s["status"] == "success" for s in b.project.statuses if s["latest"])
    assert not b.lab.carried_out


def test_a_suggestion_where_the_whole_rewrite_lies_in_the_diff(b: LabBench) -> None:
    b.commit("main", {"train.py": TRAIN.replace("        y = weights @ v\n", "        y = (weights @ v)\n")})
    number = opened(b, {"train.py": TRAIN})
    for _ in range(2):
        examining.examine(b.desk, number)
    (found,) = [n for n in b.notes(number) if n["type"] == "DiffNote"]
    assert "```suggestion:-" in found["body"]
    assert "scaled_dot_product_attention" in found["body"]
    assert found["position"]["new_path"] == "train.py"


def test_a_fork_is_examined_only_where_the_owner_lets_forks_be(b: LabBench, tmp_path: Path) -> None:
    b.commit("main", {"train.py": OTHER})
    fork = tmp_path / "lab" / "fork.git"
    fakehub_git.git(tmp_path, "clone", "--quiet", "--bare", str(b.bare), str(fork))
    b.lab.add("guest/trainer", bare=fork)
    head = commit(fork, "theirs", {"train.py": TRAIN})
    number = b.lab.open_merge_request(NAME, "guest", source="theirs", fork="guest/trainer")
    assert "fork" in examining.examine(b.desk, number)
    assert not b.replay.asked
    assert not b.notes(number)
    b.commit("main", {"advisor.toml": SETTINGS + "forks = true\n"})
    assert "examined: success" in examining.examine(b.desk, number)
    assert [n["body"].startswith(examining.REPORT) for n in b.notes(number)] == [True]
    status = b.status(head)  # on no branch of this project: GitLab takes it on the merge request alone
    assert status is not None
    assert status["ref"] == f"refs/merge-requests/{number}/head"


def test_a_draft_is_left_alone_and_a_measurement_that_failed_says_why(b: LabBench) -> None:
    number = opened(b, title="Draft: Wait")
    assert "a draft" in examining.examine(b.desk, number)
    b.project.merges[number] |= {"title": "Now", "draft": False}
    b.replay.raises = ScriptError("the script raised ValueError: wrong_shape of @ada <b>")
    assert "could not be measured" in examining.examine(b.desk, number)
    status = b.status(b.head_of(number))
    assert status is not None
    assert status["status"] == "success"  # GitLab has no neutral
    assert "it could not be measured: the script raised ValueError: wrong_shape of @ada <b>" in status["description"]


def test_settings_that_cannot_be_read_are_said_beside_the_commit(b: LabBench) -> None:
    b.commit("main", {"advisor.toml": "[bot]\nenabeld = true\n"})
    number = opened(b)
    examining.examine(b.desk, number)
    status = b.status(b.head_of(number))
    assert status is not None
    assert "enabeld" in status["description"]
    assert not b.notes(number)


def test_an_examination_that_another_job_made_is_published(b: LabBench) -> None:
    number = opened(b)
    head, base = b.head_of(number), b.tip("main")
    assert base is not None
    wanted = Measurement(purpose="examine", base=base, head=head, settings=base)
    data = b.replay(wanted, b.desk.settings(b.desk.tip("main")))
    assert "examined: success" in publishing.publish_examined(b.desk, head, data)
    assert len(b.notes(number)) == 1
    assert "no open pull request" in publishing.publish_examined(b.desk, base, data)


# ------------------------------------------------------------------------------------------------------------ propose


def test_a_proven_rewrite_becomes_a_merge_request_and_the_same_again_doubles_nothing(b: LabBench) -> None:
    proposing.propose(b.desk)
    (merge,) = b.proposed()
    branch = merge["source_branch"]
    assert branch.startswith("advisor/naive-attention-")
    assert merge["labels"] == ["advisor"]
    assert b.parents(branch) == [b.tip("main")]
    assert "scaled_dot_product_attention" in b.text_at(branch)
    (issue,) = b.project.issues.values()
    assert issue["title"] == proposing.DASHBOARD_TITLE
    assert f"| !{merge['iid']} |" in issue["description"]
    before, asked = b.tip(branch), len(b.lab.requests)
    proposing.propose(b.desk)
    (again,) = b.proposed()
    assert (again["iid"], b.tip(branch)) == (merge["iid"], before)
    assert len(b.project.issues) == 1
    assert [(verb, path) for verb, path, _ in b.lab.requests[asked:] if verb != "GET"] == []
    assert not b.lab.carried_out


def test_a_merge_request_that_is_refused_leaves_no_branch(b: LabBench) -> None:
    b.lab.fail("POST", r"/merge_requests$", 403)
    proposing.propose(b.desk)
    assert not b.proposed()
    assert list(b.project.branches) == ["main"]


def test_one_that_is_made_while_the_answer_is_lost_is_not_made_twice(b: LabBench) -> None:
    b.lab.fail("POST", r"/merge_requests$", 502, done=True)
    proposing.propose(b.desk)
    assert len(b.proposed()) == 1


def test_a_forge_that_is_down_is_tried_again_later_and_then_nothing_is_doubled(b: LabBench) -> None:
    b.lab.fail("POST", r"/merge_requests$", 503, times=500)
    with pytest.raises(ForgeError):
        proposing.propose(b.desk)
    b.lab.plans.clear()
    proposing.propose(b.desk)
    assert len(b.proposed()) == 1


def test_what_is_not_proven_any_more_is_closed_with_the_reason(b: LabBench) -> None:
    proposing.propose(b.desk)
    (merge,) = b.proposed()
    b.replay.proposes = False
    b.commit("main", {"train.py": OTHER})
    proposing.propose(b.desk)
    assert not b.proposed()
    assert "finds nothing" in b.notes(merge["iid"])[-1]["body"]
    assert b.tip(merge["source_branch"]) is None


def test_a_branch_that_somebody_pushed_to_is_theirs(b: LabBench) -> None:
    proposing.propose(b.desk)
    (merge,) = b.proposed()
    theirs = b.commit(merge["source_branch"], {"train.py": b.text_at(merge["source_branch"]) + "# mine\n"})
    b.commit("main", {"other.py": "x = 1\n"})
    proposing.propose(b.desk)
    assert b.tip(merge["source_branch"]) == theirs
    b.commit("main", {"advisor.toml": OFF})
    proposing.maintain(b.desk)
    assert not b.proposed()  # closed, their commits stay
    assert b.tip(merge["source_branch"]) == theirs


def test_a_rule_that_is_turned_off_closes_its_merge_request_once(b: LabBench) -> None:
    proposing.propose(b.desk)
    (merge,) = b.proposed()
    b.commit("main", {"advisor.toml": OFF})
    for _ in range(2):
        proposing.maintain(b.desk)
    assert not b.proposed()
    assert ["was turned off" in n["body"] for n in b.notes(merge["iid"])] == [True]
    assert len(b.replay.asked) == 1


def test_one_that_was_closed_by_us_is_made_again_when_the_rule_is_back(b: LabBench) -> None:
    proposing.propose(b.desk)
    b.commit("main", {"advisor.toml": OFF})
    proposing.maintain(b.desk)
    b.commit("main", {"advisor.toml": SETTINGS})
    proposing.propose(b.desk)
    assert len(b.proposed()) == 1


def test_a_proposal_that_a_person_closed_is_not_made_again(b: LabBench) -> None:
    proposing.propose(b.desk)
    (merge,) = b.proposed()
    merge |= {"state": "closed", "closed_at": "2026-01-02T00:00:00.000Z"}
    proposing.propose(b.desk)
    assert not b.proposed()
    assert "not made again" in next(iter(b.project.issues.values()))["description"]


def test_on_a_moved_base_the_branch_is_put_on_top_or_measured_again(b: LabBench) -> None:
    proposing.propose(b.desk)
    (merge,) = b.proposed()
    branch = merge["source_branch"]
    b.commit("main", {"README.md": "hello\n"})
    assert "1 rebased" in proposing.maintain(b.desk)
    assert b.parents(branch) == [b.tip("main")]
    assert len(b.replay.asked) == 1
    b.commit("main", {"other.py": "x = 1\n"})
    proposing.maintain(b.desk)
    assert b.replay.asked[-1].rules == ("naive-attention",)
    assert [one["iid"] for one in b.proposed()] == [merge["iid"]]
    assert b.parents(branch) == [b.tip("main")]


def test_references_are_gitlabs_and_code_stays_code() -> None:
    same = "&#64;x `a #1 b` a#1 /#2 <!-- #3 -->\n```diff\n+# 1\n+#1\n```\n#\u200b4 # 5"
    assert with_references(same) == same
    assert with_references("Closed: a newer one takes its place: #12.\n| #3 |") == (
        "Closed: a newer one takes its place: !12.\n| !3 |"
    )


# ----------------------------------------------------------------------------------------------------------- commands


def said(b: LabBench, author: str, verb: str, argument: str | None = None) -> Task:
    number = next(iter(b.project.merges), None) or opened(b)
    comment = b.lab.comment(NAME, number, author, f"/advisor {verb}")
    return Task(
        kind="command",
        forge="gitlab",
        repository=NAME,
        number=number,
        requested_by=author,
        comment=comment,
        verb=verb,
        argument=argument,
    )


def emoji(b: LabBench, task: Task) -> list[str]:
    return [one["name"] for one in b.project.emoji.get(task.comment or 0, [])]


def test_a_command_of_somebody_who_may_push_is_followed_and_answered_once(b: LabBench) -> None:
    task = said(b, "ada", "explain", "naive-attention")
    for _ in range(2):
        work.handle(task, b.desk)
    assert emoji(b, task) == ["eyes"]
    answers = [n for n in b.notes(task.number or 0) if "advisor:answer" in n["body"]]
    assert len(answers) == 1
    assert "softmax" in answers[0]["body"]


@pytest.mark.parametrize("author", ["guest", "nobody"])
def test_a_command_of_anybody_else_is_not(b: LabBench, author: str) -> None:
    task = said(b, author, "optimize")
    work.handle(task, b.desk)
    assert emoji(b, task) == ["confused"]
    assert not b.replay.asked


def test_optimize_proposes_profile_examines_rebase_refuses_help_helps(b: LabBench) -> None:
    b.commit("main", {"train.py": OTHER})
    number = opened(b, {"train.py": TRAIN}, title="Draft: Wait")
    work.handle(said(b, "ada", "profile"), b.desk)
    assert b.replay.asked[-1].purpose == "examine"
    work.handle(said(b, "ada", "rebase"), b.desk)
    assert "Only pull requests of the bot" in b.notes(number)[-1]["body"]
    for verb, argument in (("dance", None), ("explain", "no-such-rule")):
        work.handle(said(b, "ada", verb, argument), b.desk)
        assert "/advisor optimize" in b.notes(number)[-1]["body"]
    fakehub_git.git(b.bare, "update-ref", "refs/heads/main", "refs/heads/feature")
    work.handle(said(b, "ada", "optimize", "naive-attention"), b.desk)
    assert b.replay.asked[-1].rules == ("naive-attention",)
    (merge,) = b.proposed()
    work.handle(said(b, "ada", "status"), b.desk)
    assert f"- !{merge['iid']}" in b.notes(number)[-1]["body"]
    assert merge["author"]["username"] == ACCOUNT
    assert not b.lab.carried_out
