"""Pull requests examined, rewrites proposed, kept up to date and closed: the real client, real git, a recorded run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fakehub_git
import pytest
from benches import NAME, SETTINGS, TRAIN, Bench, bench

from advisor.bot import examining, policy, proposing, publishing, work
from advisor.bot.desk import Desk, Measurement
from advisor.bot.policy import CLOSED_BY_US, Close
from advisor.bot.tasks import Task
from advisor.config import Config
from advisor.errors import ForgeError, ScriptError

OTHER = TRAIN.replace("Attention(64, 4)", "Attention(64, 2)")


@pytest.fixture
def b(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as found:
        yield found


def opened(b: Bench, files: dict[str, str | None] | None = None, **options: object) -> int:
    """Somebody changes the script's attention in a pull request."""
    if files is None:
        b.commit("main", {"train.py": OTHER})
        files = {"train.py": TRAIN}
    b.commit("feature", files)
    return b.hub.open_pull(NAME, head="feature", **options).number  # type: ignore[arg-type]


def text_at(b: Bench, branch: str, path: str = "train.py") -> str:
    done = subprocess.run(
        ["git", "-C", str(b.repo.bare), "show", f"{branch}:{path}"], capture_output=True, check=True, text=True
    )
    return done.stdout


def parents(b: Bench, branch: str) -> list[str]:
    return fakehub_git.git(b.repo.bare, "log", "-1", "--format=%P", branch).decode().split()


def main_tip(b: Bench) -> str:
    found = fakehub_git.commit_of(b.repo.bare, "refs/heads/main")
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------ examine


def test_a_pull_request_gets_one_check_and_one_comment(b: Bench) -> None:
    number = opened(b, {"note.py": "x = 1\n"})
    examining.examine(b.desk, number)
    pull = b.repo.pulls[number]
    check = b.repo.check("advisor", pull.head_sha)
    assert check is not None
    assert (check.status, check.conclusion) == ("completed", "success")
    (comment,) = b.comments(number)
    assert comment.body.startswith(examining.REPORT)
    assert "naive-attention" in comment.body
    assert pull.review_comments == []  # the rewrite's lines are not in the diff


def test_a_suggestion_where_the_whole_rewrite_lies_in_the_diff(b: Bench) -> None:
    number = opened(b, {"other.py": "x = 1\n"})
    b.hub.close(NAME, number)
    fakehub_git.git(b.repo.bare, "update-ref", "-d", "refs/heads/feature")
    b.commit("main", {"train.py": TRAIN.replace("        y = weights @ v\n", "        y = (weights @ v)\n")})
    b.commit("again", {"train.py": TRAIN})
    number = b.hub.open_pull(NAME, head="again").number
    examining.examine(b.desk, number)
    (found,) = b.repo.pulls[number].review_comments
    assert "```suggestion" in found["body"]
    assert "scaled_dot_product_attention" in found["body"]
    assert (found["path"], found["side"]) == ("train.py", "RIGHT")
    examining.examine(b.desk, number)
    assert len(b.repo.pulls[number].review_comments) == 1


def test_findings_go_to_code_scanning_where_the_owner_wants_that(b: Bench) -> None:
    number = opened(b)
    examining.examine(b.desk, number)
    assert not b.repo.sarifs
    b.commit("main", {"advisor.toml": SETTINGS + "code_scanning = true\n"})
    examining.examine(b.desk, number)
    (sarif,) = b.repo.sarifs
    assert sarif["commit_sha"] == b.repo.pulls[number].head_sha
    assert [r["ruleId"] for r in json.loads(sarif["document"])["runs"][0]["results"]] == ["naive-attention"]


def test_a_second_examination_edits_in_place_and_doubles_nothing(b: Bench) -> None:
    number = opened(b)
    for _ in range(2):
        examining.examine(b.desk, number)
    assert len(b.comments(number)) == 1
    assert {(c.name, c.head_sha) for c in b.repo.checks} == {("advisor", b.repo.pulls[number].head_sha)}
    b.commit("feature", {"more.py": "y = 2\n"})
    examining.examine(b.desk, number)
    assert len(b.comments(number)) == 1
    assert len({c.head_sha for c in b.repo.checks}) == 2


def test_it_is_measured_against_where_it_left_the_base_branch_under_the_settings_of_its_tip(b: Bench) -> None:
    left = main_tip(b)
    b.commit("feature", {"train.py": TRAIN + "\n"})
    b.commit("main", {"advisor.toml": SETTINGS + 'paths = ["*.py"]\n'})
    number = b.hub.open_pull(NAME, head="feature").number
    examining.examine(b.desk, number)
    (asked,) = b.replay.asked
    assert (asked.base, asked.settings) == (left, main_tip(b))


@pytest.mark.parametrize(
    ("settings", "files", "options", "why"),
    [
        ("[bot]\nenabled = false\n", None, {}, "not enabled"),
        ("", None, {}, "not enabled"),
        (SETTINGS.replace('scripts = ["train.py 512"]', ""), None, {}, "no scripts"),
        (SETTINGS + "pull_requests = false\n", None, {}, "pull_requests is off"),
        (SETTINGS, {"README.md": "hello\n"}, {}, "changes no file"),
        (SETTINGS, None, {"draft": True}, "a draft"),
    ],
)
def test_what_the_owner_did_not_ask_for_is_left_alone_without_a_word(
    b: Bench, settings: str, files: dict[str, str | None] | None, options: dict[str, object], why: str
) -> None:
    b.commit("main", {"advisor.toml": settings})
    number = opened(b, files, **options)
    assert why in examining.examine(b.desk, number)
    assert not b.replay.asked
    assert not b.comments(number)
    assert not b.repo.checks


def test_only_the_settings_of_the_base_branch_count(b: Bench) -> None:
    """A pull request that turns the bot on, adds scripts, or widens what may be applied changes nothing."""
    b.commit("main", {"advisor.toml": "[bot]\nenabled = false\n"})
    number = opened(b, {"train.py": TRAIN + "\n", "advisor.toml": SETTINGS + 'forks = true\nfail_on = "regression"\n'})
    assert "not enabled" in examining.examine(b.desk, number)
    assert not b.replay.asked


def test_settings_that_cannot_be_read_are_said_beside_the_commit(b: Bench) -> None:
    b.commit("main", {"advisor.toml": "[bot]\nenabeld = true\n"})
    number = opened(b)
    examining.examine(b.desk, number)
    (check,) = b.repo.checks
    assert check.conclusion == "neutral"
    assert "enabeld" in (check.summary or "")
    assert not b.comments(number)


def test_a_fork_is_examined_only_where_the_owner_lets_forks_be(b: Bench) -> None:
    b.commit("main", {"train.py": OTHER})
    b.hub.fork(NAME, "guest")
    b.hub.commit("guest/model", "theirs", {"train.py": TRAIN})
    number = b.hub.open_pull(NAME, head="theirs", head_repo="guest/model", author="guest").number
    assert "fork" in examining.examine(b.desk, number)
    assert not b.replay.asked
    b.commit("main", {"advisor.toml": SETTINGS + "forks = true\n"})
    said = examining.examine(b.desk, number)
    assert "examined: success" in said
    assert len(b.replay.asked) == 1
    assert len(b.comments(number)) == 1


def test_a_measurement_that_failed_is_neutral_and_says_why(b: Bench) -> None:
    number = opened(b)
    b.replay.raises = ScriptError("the script raised ValueError: </details><script>alert(1)</script> @octocat")
    assert "could not be measured" in examining.examine(b.desk, number)
    (check,) = b.repo.checks
    assert check.conclusion == "neutral"
    assert "<script>" not in (check.summary or "")
    assert "@octocat" not in (check.summary or "")


def test_an_examination_that_was_tampered_with_is_not_published(b: Bench) -> None:
    number = opened(b)
    b.replay.change = {"head": "0" * 40}
    assert "could not be measured" in examining.examine(b.desk, number)
    assert not b.comments(number)
    assert "other commits" in (b.repo.checks[0].summary or "")


def test_the_bots_own_pull_requests_are_not_examined(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    assert "own" in examining.examine(b.desk, pull.number)


def test_one_that_ends_or_moves_while_it_is_measured_gets_no_comment_and_its_check_ends(b: Bench) -> None:
    number = opened(b)
    head = b.repo.pulls[number].head_sha
    real = b.desk.measure

    def meanwhile(change: Callable[[], object]) -> Desk:
        def measure(wanted: Measurement, config: Config) -> bytes:
            change()
            return real(wanted, config)

        return dataclasses.replace(b.desk, measure=measure)

    for change in (
        lambda: setattr(b.hub.repo(NAME).pulls[number], "base", "other"),
        lambda: b.hub.close(NAME, number),
    ):
        assert "moved on or ended" in examining.examine(meanwhile(change), number)
        assert not b.comments(number)
        check = b.repo.check("advisor", head)
        assert check is not None
        assert (check.status, check.conclusion) == ("completed", "neutral")
        b.repo.pulls[number].base = "main"


def test_settings_are_named_as_in_the_repository(b: Bench) -> None:
    b.commit("main", {"advisor.toml": "[bot]\nenabeld = true\n"})
    number = opened(b)
    line = examining.examine(b.desk, number)
    assert "/tmp" not in (b.repo.checks[0].summary or "") + line
    assert "advisor.toml" in line


def test_a_change_of_what_is_installed_is_said_not_to_be_measured(b: Bench) -> None:
    number = opened(b, {"requirements.txt": "torch==9\n"})
    examining.examine(b.desk, number)
    (comment,) = b.comments(number)
    assert "requirements.txt: base and head ran with the same installed packages" in comment.body
    assert "same installed packages" in (b.repo.checks[0].summary or "")


def test_a_script_that_is_missing_in_the_file_makes_no_success(b: Bench) -> None:
    b.commit("main", {"advisor.toml": SETTINGS.replace('["train.py 512"]', '["train.py 512", "slow.py"]')})
    number = opened(b)
    assert "examined: neutral" in examining.examine(b.desk, number)
    assert "slow.py" in b.comments(number)[0].body


def test_a_locked_conversation_still_has_its_check_and_one_that_takes_no_check_ends_the_first(b: Bench) -> None:
    number = opened(b)
    b.hub.fail("POST", r"/comments$", 403, body={"message": "Unable to create comment because issue is locked."})
    assert "examined: success" in examining.examine(b.desk, number)
    assert any("locked" in line for line in b.log)
    b.commit("feature", {"more.py": "x = 1\n"})
    b.hub.fail("PATCH", r"/check-runs/", 422, body={"message": "Invalid request."})
    with pytest.raises(ForgeError):
        examining.examine(b.desk, number)
    assert [c.status for c in b.repo.checks] == ["completed", "completed"]


# ------------------------------------------------------------------------------------------------------------ propose


def test_a_proven_rewrite_becomes_a_pull_request(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    assert pull.head.startswith("advisor/naive-attention-")
    assert pull.labels == ["advisor"]
    assert parents(b, pull.head) == [main_tip(b)]
    assert "scaled_dot_product_attention" in text_at(b, pull.head)
    assert "2.0" in (pull.body or "")
    (issue,) = b.repo.issues.values()
    assert issue.title == proposing.DASHBOARD_TITLE
    assert f"#{pull.number}" in (issue.body or "")


def test_the_same_again_doubles_nothing_and_pushes_nothing(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    before = pull.head_sha, pull.edits
    proposing.propose(b.desk)
    (again,) = b.proposed()
    assert (again.number, again.head_sha, again.edits) == (pull.number, *before)
    assert len(b.repo.issues) == 1


def test_a_repository_that_wants_no_bots_gets_nothing(b: Bench) -> None:
    b.commit("main", {"CONTRIBUTING.md": "# How\n\nWe do not accept automated pull requests.\n"})
    assert "accepts no automated" in proposing.propose(b.desk)
    assert not b.replay.asked
    assert not b.proposed()


def test_what_is_not_proven_any_more_is_closed_with_the_reason(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.replay.proposes = False
    b.commit("main", {"train.py": OTHER})
    proposing.propose(b.desk)
    assert not b.proposed()
    assert "finds nothing" in b.comments(pull.number)[-1].body
    assert fakehub_git.commit_of(b.repo.bare, f"refs/heads/{pull.head}") is None


def test_a_branch_that_somebody_pushed_to_is_theirs(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    theirs = b.commit(pull.head, {"train.py": text_at(b, pull.head) + "# mine\n"})
    b.commit("main", {"other.py": "x = 1\n"})
    proposing.propose(b.desk)
    assert fakehub_git.commit_of(b.repo.bare, f"refs/heads/{pull.head}") == theirs
    assert any("somebody else has pushed" in line for line in b.log)
    b.commit("main", {"advisor.toml": SETTINGS.replace("[bot]", 'ignore = ["naive-attention"]\n[bot]')})
    proposing.maintain(b.desk)
    assert not b.proposed()  # the pull request is closed, their commits stay
    assert fakehub_git.commit_of(b.repo.bare, f"refs/heads/{pull.head}") == theirs


def test_a_pull_request_that_is_refused_leaves_no_branch(b: Bench) -> None:
    b.hub.fail("POST", r"/pulls$", 403, body={"message": "Resource not accessible by integration"}, times=9)
    proposing.propose(b.desk)
    assert not b.proposed()
    refs = fakehub_git.git(b.repo.bare, "for-each-ref", "--format=%(refname)", "refs/heads/advisor")
    assert refs.strip() == b""


def test_one_that_is_made_while_the_answer_is_lost_is_not_made_twice(b: Bench) -> None:
    b.hub.fail("POST", r"/pulls$", 502, after_doing=True)
    proposing.propose(b.desk)
    assert len(b.proposed()) == 1


def test_a_forge_that_is_down_is_tried_again_later_and_then_nothing_is_doubled(b: Bench) -> None:
    b.hub.fail("*", r"/pulls$", 503, times=500)
    with pytest.raises(ForgeError):
        proposing.propose(b.desk)
    b.hub.planned.clear()
    proposing.propose(b.desk)
    assert len(b.proposed()) == 1


def test_what_people_have_written_into_the_pull_request_stays(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    pull.title, pull.labels = "perf: fused attention", []
    pull.created_at = "2020-01-01T00:00:00Z"
    pull.body = (pull.body or "").replace("2.0", "9.9") + "\nReviewed with Ada.\n"
    for _ in range(2):
        b.commit("main", {"other.py": f"x = {_}\n"})
        proposing.propose(b.desk)
        assert pull.title == "perf: fused attention"
        assert "9.9" not in (pull.body or "")
        assert (pull.body or "").count("Reviewed with Ada.") == 1
        assert pull.labels == []
    pull.body = "All mine."
    for _ in range(2):
        proposing.propose(b.desk)
        assert (pull.body or "").startswith("<!-- advisor:proposal ")
        assert (pull.body or "").count("All mine.") == 1


def test_what_a_person_opens_from_a_branch_with_such_a_name_is_that_persons(b: Bench) -> None:
    proposing.propose(b.desk)
    branch = "advisor/unfused-gelu-0123456789ab"
    head = b.commit(branch, {"train.py": OTHER})
    number = b.hub.open_pull(NAME, head=branch).number
    b.commit("main", {"advisor.toml": "[bot]\nenabled = false\n"})
    proposing.maintain(b.desk)
    theirs = b.repo.pulls[number]
    assert (theirs.state, theirs.head_sha, theirs.edits, b.comments(number)) == ("open", head, 0, [])
    assert [p.state for p in b.repo.pulls.values()] == ["closed", "open"]


def test_a_pull_request_that_a_person_turned_to_another_branch_is_left_alone(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.commit("release", {"note.txt": "x\n"})
    pull.base, head = "release", pull.head_sha
    b.commit("main", {"other.py": "x = 1\n"})
    for work_on in (proposing.maintain, proposing.propose):
        work_on(b.desk)
        assert (pull.base, b.repo.pulls[pull.number].head_sha, pull.state) == ("release", head, "open")
    assert any("goes to release" in line for line in b.log)


def test_one_that_a_person_closes_meanwhile_stays_closed_by_that_person(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.replay.proposes = False
    known = b.desk.forge.pull_requests(state="open", branch_prefix="advisor/")
    b.hub.close(NAME, pull.number)
    proposing._close(b.desk, Close(known=known[0], reason="gone"), None)
    assert CLOSED_BY_US not in (pull.body or "")
    b.replay.proposes = True
    proposing.propose(b.desk)
    assert not b.proposed()


def test_labels_that_are_refused_do_not_take_the_pull_request_back(b: Bench) -> None:
    b.hub.fail("POST", r"/labels$", 422, body={"message": "Validation Failed"})
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    assert fakehub_git.commit_of(b.repo.bare, f"refs/heads/{pull.head}") is not None
    assert any("not all of it was taken" in line for line in b.log)


def test_a_branch_of_an_earlier_try_goes_too_where_the_pull_request_is_refused_in_the_end(b: Bench) -> None:
    b.hub.fail("POST", r"/pulls$", 503, times=99)
    with pytest.raises(ForgeError):
        proposing.propose(b.desk)
    b.hub.planned.clear()
    assert len(fakehub_git.heads(b.repo.bare)) == 2
    b.hub.fail("POST", r"/pulls$", 403, body={"message": "Resource not accessible by integration"}, times=9)
    proposing.propose(b.desk)
    assert list(fakehub_git.heads(b.repo.bare)) == ["main"]


def test_without_issues_there_is_no_dashboard_and_all_the_rest(b: Bench) -> None:
    b.hub.fail("*", r"/issues$", 410, body={"message": "Issues are disabled for this repo"}, times=9)
    assert "1 proposed" in proposing.propose(b.desk)
    assert any("dashboard" in line for line in b.log)


def test_what_the_owner_wants_counts_when_it_is_published_not_when_it_was_measured(b: Bench) -> None:
    real = b.desk.measure

    def measure(wanted: Measurement, config: Config) -> bytes:
        b.commit("main", {"advisor.toml": "[bot]\nenabled = false\n"})
        return real(wanted, config)

    assert "nothing is proposed" in proposing.propose(dataclasses.replace(b.desk, measure=measure))
    assert not b.proposed()


def test_a_file_that_changed_while_it_was_measured_is_not_proposed_on_the_old_commit(b: Bench) -> None:
    real = b.desk.measure

    def measure(wanted: Measurement, config: Config) -> bytes:
        b.commit("main", {"train.py": OTHER})
        return real(wanted, config)

    assert "0 proposed, 0 closed, 1 waiting" in proposing.propose(dataclasses.replace(b.desk, measure=measure))
    assert not b.proposed()


def test_an_old_measurement_puts_nothing_back_and_closes_nothing(b: Bench) -> None:
    old = main_tip(b)
    data = b.replay(Measurement(purpose="propose", base=old, head=old, settings=old), Config())
    b.replay.proposes = False
    nothing = b.replay(Measurement(purpose="propose", base=old, head=old, settings=old), Config())
    b.replay.proposes = True
    b.commit("main", {"other.py": "x = 1\n"})
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    before = pull.head_sha, pull.body
    for each in (data, nothing):
        publishing.publish_proposed(b.desk, old, each)
        assert b.proposed() == [pull]
        assert (b.repo.pulls[pull.number].head_sha, pull.body) == before


def test_the_command_to_reproduce_is_the_owners(b: Bench) -> None:
    b.commit("main", {"advisor.toml": SETTINGS.replace("train.py 512", "train.py --name 'a b; rm -rf x'")})
    b.replay.command = "train.py --name 'a b; rm -rf x'"
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    assert "advisor optimize train.py --select naive-attention -- --name 'a b; rm -rf x'" in (pull.body or "")


# ----------------------------------------------------------------------------------------------------------- maintain


def test_a_rule_that_is_turned_off_closes_its_pull_request(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.commit("main", {"advisor.toml": SETTINGS.replace("[bot]", 'ignore = ["naive-attention"]\n[bot]')})
    proposing.maintain(b.desk)
    assert not b.proposed()
    assert "was turned off" in b.comments(pull.number)[-1].body
    asked = len(b.replay.asked)
    proposing.maintain(b.desk)
    assert len(b.replay.asked) == asked
    assert len(b.comments(pull.number)) == 1


def test_on_a_moved_base_the_branch_is_put_on_top_where_nothing_measured_changed(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.commit("main", {"README.md": "hello\n"})
    assert "1 rebased" in proposing.maintain(b.desk)
    assert parents(b, pull.head) == [main_tip(b)]
    assert len(b.replay.asked) == 1
    assert len(b.proposed()) == 1
    assert text_at(b, pull.head, "README.md") == "hello\n"


def test_and_measured_again_where_code_changed(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.commit("main", {"other.py": "x = 1\n"})
    proposing.maintain(b.desk)
    assert b.replay.asked[-1].rules == ("naive-attention",)
    assert b.replay.asked[-1].head == main_tip(b)
    (again,) = b.proposed()
    assert again.number == pull.number
    assert parents(b, again.head) == [main_tip(b)]


@pytest.mark.parametrize("path", ["config.yaml", "data/input.json", "requirements.txt", "advisor.toml", "uv.lock"])
def test_and_where_anything_else_changed_that_a_script_may_read(b: Bench, path: str) -> None:
    b.commit("main", {"advisor.toml": SETTINGS + 'paths = ["*.py"]\n'})
    proposing.propose(b.desk)
    b.commit("main", {path: SETTINGS + 'paths = ["train.py"]\n'})
    proposing.maintain(b.desk)
    assert len(b.replay.asked) == 2


def test_a_push_to_another_branch_measures_nothing(b: Bench) -> None:
    proposing.propose(b.desk)
    b.commit("main", {"other.py": "x = 1\n"})
    task = Task(kind="maintain", forge="github", repository=NAME, branch="feature")
    assert "not the default branch" in work.handle(task, b.desk)
    assert len(b.replay.asked) == 1
    work.handle(dataclasses.replace(task, branch="main"), b.desk)
    assert len(b.replay.asked) == 2


def test_the_bot_turned_off_closes_everything(b: Bench) -> None:
    proposing.propose(b.desk)
    b.commit("main", {"advisor.toml": "[bot]\nenabled = false\n"})
    proposing.maintain(b.desk)
    assert not b.proposed()


def test_a_proposal_that_a_person_closed_is_not_made_again(b: Bench) -> None:
    proposing.propose(b.desk)
    (pull,) = b.proposed()
    b.hub.close(NAME, pull.number)
    proposing.propose(b.desk)
    assert not b.proposed()
    assert "not made again" in next(iter(b.repo.issues.values())).body  # type: ignore[operator]


# ----------------------------------------------------------------------------------------------------------- commands


def said(b: Bench, author: str, verb: str, argument: str | None = None) -> tuple[Task, int]:
    number = next(iter(b.repo.pulls), None) or opened(b)
    comment = b.hub.comment(NAME, number, author, f"/advisor {verb}")
    task = Task(
        kind="command",
        forge="github",
        repository=NAME,
        number=number,
        requested_by=author,
        comment=comment.id,
        verb=verb,
        argument=argument,
    )
    return task, comment.id


def reactions(b: Bench, comment: int) -> list[str]:
    return [content for each in b.repo.comments if each.id == comment for _, content in each.reactions]


def test_a_command_of_somebody_who_may_push_is_followed_and_answered_once(b: Bench) -> None:
    task, comment = said(b, "octocat", "explain", "naive-attention")
    for _ in range(2):
        work.handle(task, b.desk)
    assert reactions(b, comment) == ["eyes"]
    answers = [c for c in b.comments(task.number or 0) if "advisor:answer" in c.body]
    assert len(answers) == 1
    assert "softmax" in answers[0].body


def test_a_command_of_anybody_else_is_not(b: Bench) -> None:
    for author in ("guest", "nobody"):
        task, comment = said(b, author, "optimize")
        work.handle(task, b.desk)
        assert reactions(b, comment) == ["confused"]
    assert not b.replay.asked


def test_optimize_proposes_profile_examines_status_lists(b: Bench) -> None:
    b.commit("main", {"train.py": OTHER})
    b.commit("feature", {"train.py": TRAIN})
    b.hub.open_pull(NAME, head="feature", draft=True)
    task, _ = said(b, "octocat", "profile")
    work.handle(task, b.desk)
    assert b.replay.asked[-1].purpose == "examine"
    b.hub.merge(NAME, task.number or 0)
    task, _ = said(b, "octocat", "optimize", "naive-attention")
    work.handle(task, b.desk)
    assert b.replay.asked[-1].rules == ("naive-attention",)
    (pull,) = b.proposed()
    task, _ = said(b, "octocat", "status")
    work.handle(task, b.desk)
    assert f"#{pull.number}" in b.comments(task.number or 0)[-1].body


def test_whoever_asked_is_told_once_why_it_could_not_be_done(b: Bench) -> None:
    task, _ = said(b, "octocat", "optimize")
    b.replay.raises = ScriptError("the script raised ValueError: <script> @octocat")
    for _ in range(2):
        work.handle(task, b.desk)
    (answer,) = [c for c in b.comments(task.number or 0) if "advisor:answer" in c.body]
    assert "It could not be done" in answer.body
    assert "<script>" not in answer.body
    assert " @octocat" not in answer.body


def test_an_unknown_command_or_rule_is_answered_with_help(b: Bench) -> None:
    for verb, argument in (("dance", None), ("explain", "no-such-rule")):
        task, _ = said(b, "octocat", verb, argument)
        work.handle(task, b.desk)
        assert "/advisor optimize" in b.comments(task.number or 0)[-1].body


def test_on_an_issue_there_is_no_pull_request_to_measure(b: Bench) -> None:
    proposing.propose(b.desk)
    (issue,) = b.repo.issues.values()
    comment = b.hub.comment(NAME, issue.number, "octocat", "/advisor profile")
    task = Task(
        kind="command",
        forge="github",
        repository=NAME,
        number=issue.number,
        requested_by="octocat",
        comment=comment.id,
        verb="profile",
        on_issue=True,
    )
    for verb in ("profile", "rebase"):
        work.handle(dataclasses.replace(task, verb=verb), b.desk)
    answers = [c for c in b.comments(issue.number) if "advisor:answer" in c.body]
    assert len(answers) == 1
    assert "This is an issue" in answers[0].body


def test_words_that_a_source_quotes_are_no_ends_and_no_marks_of_ours(b: Bench) -> None:
    proposing.propose(b.desk)
    (known,) = b.desk.forge.pull_requests(state="open", branch_prefix="advisor/")
    marker, _, rest = known.body.partition("\n")
    quoted = dataclasses.replace(known, body=f"{marker}\n{proposing.END} {CLOSED_BY_US}\n{rest}\nMine.\n")
    title, body = proposing.told_apart(quoted, known.title, "anew")
    assert (title, body) == (known.title, f"anew\n{proposing.END}\n\nMine.\n")
    assert not policy.closed_by_us(quoted)
