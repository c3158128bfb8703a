"""GitLab behind the Forge protocol, asked over HTTP of a fake that keeps state (see fakelab.py)."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakelab import FakeLab, FakeProject

from advisor.bot.forge import Annotation, Check, Forge, Suggestion
from advisor.bot.forges.failures import Patience
from advisor.bot.forges.gitlab import GitLab
from advisor.errors import ForgeConflict, ForgeMissing, ForgeRefused, ForgeUnavailable, UsageError

NAME = "research/models/trainer"
MARK = "<!-- advisor:report -->"
OLD = "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl\n"
NEW = "a\nb\nc\nd\ne\nF\nG\nG2\nh\ni\nj\nk\nl\n"
HEAD = "b" * 40


@pytest.fixture
def lab() -> Iterator[FakeLab]:
    with FakeLab() as lab:
        lab.add(NAME)
        yield lab


@pytest.fixture
def project(lab: FakeLab) -> FakeProject:
    return lab.projects[NAME]


class Naps:
    """Sleeps for no time and remembers for how long it would have."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)


def client(lab: FakeLab, *, who: str = "bot", naps: Naps | None = None, timeout_s: float = 10.0, **more: Any) -> GitLab:
    patience = Patience(sleep=naps or Naps(), clock=lambda: 0.0, **more)
    return GitLab(NAME, token=lab.token(who), base_url=lab.url, patience=patience, timeout_s=timeout_s)


@pytest.fixture
def forge(lab: FakeLab) -> GitLab:
    return client(lab)


def writes(lab: FakeLab) -> list[tuple[str, str]]:
    return [(method, path.rpartition("trainer/")[2]) for method, path, _ in lab.requests if method != "GET"]


def test_it_is_a_forge(forge: GitLab) -> None:
    as_forge: Forge = forge
    assert as_forge.kind == "gitlab"


# -------------------------------------------------------------------------------------------------------------- reading


def test_account_credentials_and_repository(lab: FakeLab, forge: GitLab) -> None:
    assert forge.account() == "bot"
    secret = lab.token("bot")
    assert forge.credentials().secret == secret
    assert secret not in repr(forge.credentials()) + repr(forge)
    found = forge.repository()
    assert (found.name, found.default_branch, found.archived) == (NAME, "main", False)
    assert found.clone_url == f"{lab.url}/{NAME}.git"


def test_a_gitlab_below_a_folder_of_its_host() -> None:
    with FakeLab(root="/tools/gitlab") as lab:
        lab.add(NAME)
        assert client(lab).repository().name == NAME


def test_a_merge_request(lab: FakeLab, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada", title="Draft: Faster", description="why", labels="perf,gpu")
    found = forge.pull_request(number)
    assert (found.number, found.title, found.body, found.draft, found.state) == (number, "Faster", "why", True, "open")
    assert (found.base_ref, found.base_sha, found.head_ref, found.head_sha) == ("main", "a" * 40, "topic", HEAD)
    assert (found.author, found.head_repository, found.labels) == ("ada", NAME, ("perf", "gpu"))
    assert found.created == datetime.datetime(2026, 1, 1, 0, 1, tzinfo=datetime.timezone.utc)
    assert found.ended is None


def test_a_merge_request_from_a_fork(lab: FakeLab, forge: GitLab) -> None:
    lab.add("eve/trainer")
    number = lab.open_merge_request(NAME, "eve", fork="eve/trainer")
    assert forge.pull_request(number).head_repository == "eve/trainer"
    lab.projects[NAME].merges[number]["sha"] = HEAD
    del lab.projects["eve/trainer"]
    gone = client(lab).pull_request(number)
    assert (gone.head_repository, gone.head_sha) == (None, HEAD)


def test_a_merge_request_that_is_still_prepared(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada")
    project.merges[number]["preparing"] = True
    assert forge.pull_request(number).base_sha == "a" * 40  # of the target branch


@pytest.mark.parametrize("state", ["closed", "merged"])
def test_an_ended_merge_request(lab: FakeLab, project: FakeProject, forge: GitLab, state: str) -> None:
    number = lab.open_merge_request(NAME, "ada")
    project.merges[number] |= {"state": state, f"{state}_at": "2026-03-01T12:00:00.000+02:00"}
    found = forge.pull_request(number)
    assert (found.state, found.ended) == (state, datetime.datetime(2026, 3, 1, 10, tzinfo=datetime.timezone.utc))


def test_merge_requests_of_a_prefix(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.add("eve/trainer")
    lab.token("bot")
    wanted = [lab.open_merge_request(NAME, "bot", source=f"advisor/{name}") for name in ("a", "b", "c")]
    by_hand = lab.open_merge_request(NAME, "ada", source="advisor/d")
    lab.open_merge_request(NAME, "ada", source="other")
    lab.open_merge_request(NAME, "eve", source="advisor/evil", fork="eve/trainer")
    project.merges[wanted[1]] |= {"state": "closed", "closed_at": "2026-03-01T12:00:00Z"}
    opened = forge.pull_requests(state="open", branch_prefix="advisor/")
    assert [one.number for one in opened] == [by_hand, wanted[2], wanted[0]]
    assert {one.base_sha for one in opened} == {"a" * 40}
    every = forge.pull_requests(state="all", branch_prefix="advisor/")
    assert [one.number for one in every] == [by_hand, wanted[2], wanted[1], wanted[0]]


def test_lists_of_several_pages() -> None:
    with FakeLab(per_page=3) as lab:
        lab.add(NAME)
        for number in range(8):
            lab.open_merge_request(NAME, "ada", source=f"advisor/{number}")
        lab.fail("GET", "merge_requests$", 502)
        assert len(client(lab).pull_requests(state="open", branch_prefix="advisor/")) == 8


def test_the_merge_request_at_a_commit(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.add("eve/trainer")
    number = lab.open_merge_request(NAME, "eve", fork="eve/trainer", sha="e" * 40)
    other = lab.open_merge_request(NAME, "ada", sha="f" * 40)
    project.merges[other]["commits"] = ["e" * 40]  # holds the commit, is not at it
    found = forge.pull_request_at("e" * 40)
    assert found is not None and found.number == number
    project.merges[number]["state"] = "closed"
    assert forge.pull_request_at("e" * 40) is None
    assert forge.pull_request_at("0" * 40) is None
    assert forge.pull_request_at("../..") is None


def test_changed_files(lab: FakeLab, forge: GitLab) -> None:
    texts = {"train.py": (OLD, NEW), "new.py": (None, "x"), "gone.py": ("x\n", None), "a.py => b.py": ("x\n", "x\ny\n")}
    number = lab.open_merge_request(NAME, "ada", texts={**texts, "big.bin": ("x", "x")})
    found = {one.path: one for one in forge.changed_files(number)}
    assert [one.status for one in found.values()] == ["modified", "added", "removed", "renamed", "modified"]
    assert (found["train.py"].lines, found["train.py"].added) == (set(range(3, 12)), {6, 7, 8})
    assert found["new.py"].added == {1}
    assert (found["b.py"].previous, found["b.py"].added) == ("a.py", {2})
    assert found["big.bin"].lines == found["gone.py"].lines == frozenset()


@pytest.mark.parametrize(
    ("member", "user", "may"),
    [
        ({"access_level": 30}, {}, True),
        ({"access_level": 50}, {}, True),
        ({"access_level": 20}, {}, False),
        ({"access_level": 40, "membership_state": "awaiting"}, {}, False),
        ({"access_level": 40}, {"state": "blocked"}, False),
        (None, {}, False),
    ],
)
def test_who_may_write(lab: FakeLab, project: FakeProject, forge: GitLab, member: Any, user: Any, may: bool) -> None:
    lab.user("Ada", **user)
    lab.user("adamant")
    project.members["adamant"] = {"access_level": 40}
    if member:
        project.members["Ada"] = member
    assert forge.may_write("ada") is forge.may_write("ADA") is may
    assert forge.may_write("nobody") is False
    assert forge.may_write("") is False


def test_a_file(project: FakeProject, forge: GitLab) -> None:
    project.files["main", "a folder/ä.toml"] = b"\xff\x00x"
    project.files["main", "big"] = bytes((1 << 20) + 1)
    project.files["main", "fits"] = bytes(1 << 20)
    assert forge.read_file("a folder/ä.toml", "main") == b"\xff\x00x"
    assert forge.read_file("a folder/ä.toml", "other") is None
    assert forge.read_file("..", "main") is None
    assert forge.read_file("\udcff\ud800", "main") is None
    assert len(forge.read_file("fits", "main") or b"") == 1 << 20
    with pytest.raises(ForgeConflict, match="larger than"):
        forge.read_file("big", "main")


def test_branches(project: FakeProject, forge: GitLab) -> None:
    project.branches["advisor/a#b"] = "9" * 40
    assert forge.branch_head("advisor/a#b") == "9" * 40
    forge.delete_branch("advisor/a#b")
    forge.delete_branch("advisor/a#b")
    assert forge.branch_head("advisor/a#b") is None
    project.protected.add("main")
    with pytest.raises(ForgeRefused, match="role Developer"):
        forge.delete_branch("main")


def test_a_hidden_project_is_not_an_absent_file(project: FakeProject, forge: GitLab) -> None:
    project.visible = False
    asked: list[Callable[[], object]] = [
        lambda: forge.read_file("x", "main"),
        lambda: forge.branch_head("main"),
        lambda: forge.delete_branch("main"),
        lambda: forge.pull_request_at(HEAD),
        lambda: forge.pull_request(1),
        forge.repository,
    ]
    for ask in asked:
        with pytest.raises(ForgeMissing, match="Project Not Found"):
            ask()


# ------------------------------------------------------------------------------------------------------------- comments


def test_the_sticky_note(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada")
    lab.comment(NAME, number, "eve", f"{MARK}\nfake")
    lab.comment(NAME, number, "bot", f"{MARK} closed", system=True)
    lab.comment(NAME, number, "bot", f"see {MARK}")
    first = forge.upsert_comment(number, MARK, f"{MARK}\none\n")
    assert (first.author, first.body) == ("bot", f"{MARK}\none")
    again = forge.upsert_comment(number, MARK, f"{MARK}\none\n")
    assert again == first
    assert writes(lab) == [("POST", f"merge_requests/{number}/notes")]
    edited = forge.upsert_comment(number, MARK, f"{MARK}\ntwo")
    assert (edited.id, edited.body) == (first.id, f"{MARK}\ntwo")
    assert [note["body"] for note in project.notes[number]] == [
        f"{MARK}\nfake",
        f"{MARK} closed",
        f"see {MARK}",
        f"{MARK}\ntwo",
    ]


def test_of_several_sticky_notes_the_oldest_is_kept(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada")
    oldest = lab.comment(NAME, number, "bot", f"{MARK}\nx")
    lab.comment(NAME, number, "bot", f"{MARK}\ny")
    assert forge.upsert_comment(number, MARK, f"{MARK}\nz").id == oldest
    assert [note["body"] for note in project.notes[number]] == [f"{MARK}\nz"]


def test_two_workers_that_write_the_sticky_note_at_the_same_time(
    lab: FakeLab, project: FakeProject, forge: GitLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = lab.open_merge_request(NAME, "ada")
    late = client(lab)
    look = late._our_notes
    answers: list[Any] = [[]]
    monkeypatch.setattr(late, "_our_notes", lambda *asked: answers.pop() if answers else look(*asked))
    first = forge.upsert_comment(number, MARK, f"{MARK}\none")
    assert late.upsert_comment(number, MARK, f"{MARK}\ntwo").id == first.id
    assert [note["body"] for note in project.notes[number]] == [f"{MARK}\ntwo"]


def test_a_sticky_note_among_many() -> None:
    with FakeLab(per_page=5) as lab:
        number = lab.open_merge_request(lab.add(NAME).name, "ada")
        ours = lab.comment(NAME, number, "bot", MARK)
        for _ in range(23):
            lab.comment(NAME, number, "ada", "hm")
        assert client(lab).upsert_comment(number, MARK, f"{MARK}\nx").id == ours


def test_an_answer_is_given_once(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada")
    for _ in range(2):
        forge.add_comment(number, "<!-- advisor:answer 7 -->", "<!-- advisor:answer 7 -->\nhelp")
    forge.add_comment(number, "<!-- advisor:answer 8 -->", "without a mark")
    assert [note["body"] for note in project.notes[number]] == [
        "<!-- advisor:answer 7 -->\nhelp",
        "<!-- advisor:answer 8 -->\nwithout a mark",
    ]


@pytest.mark.parametrize("line", ["/merge", "\r/merge", "/\rmerge", "x\r/close", "/CLOSE now"])
def test_no_text_is_carried_out_as_a_command(lab: FakeLab, project: FakeProject, forge: GitLab, line: str) -> None:
    number = lab.open_merge_request(NAME, "ada", texts={"t.py": (OLD, NEW)})
    body = f"{MARK}\n{line}\n{line} \n"
    forge.upsert_comment(number, MARK, body)
    forge.upsert_comment(number, MARK, body + line)
    forge.add_comment(number, "<!-- a -->", line)
    forge.close_pull_request(number, "<!-- c -->", line)
    forge.upsert_issue(MARK, "title", body)
    forge.upsert_issue(MARK, "title", body + line)
    project.branches["advisor/x"] = "9" * 40
    opened = forge.open_pull_request(branch="advisor/x", base="main", title="t", body=line, labels=(), draft=False)
    forge.edit_pull_request(opened.number, title="u", body=body)
    one = Suggestion(key="k", path="t.py", start_line=6, end_line=6, remark=line, lines=("x",))
    project.merges[number]["state"] = "opened"
    assert forge.post_suggestions(number, HEAD, [one]) == 1
    posted = forge.post_suggestions(number, HEAD, [replace(one, key="l", lines=("```", line, "````"))])
    assert posted == (0 if line.lstrip("\r").startswith("/") else 1)
    for text in ("```\n/approve\n````", "````\n/approve\n````"):
        forge.upsert_comment(number, MARK, f"{MARK}\n{text}")
    assert lab.carried_out == []


def test_a_reaction_is_given_once(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada")
    note = lab.comment(NAME, number, "ada", "/advisor help")
    forge.react(number, note, "eyes")
    forge.react(number, note, "eyes")
    forge.react(number, note, "+1")
    assert [one["name"] for one in project.emoji[note]] == ["eyes", "thumbsup"]
    with pytest.raises(ForgeMissing):
        forge.react(number, 1, "eyes")


# --------------------------------------------------------------------------------------------------------------- checks

CHECK = Check(
    name="advisor / train.py",
    head_sha=HEAD,
    conclusion=None,
    title="profiling",
    summary="a **long**\n\nsummary",
    annotations=(Annotation(path="t.py", start_line=1, end_line=1, level="warning", title="t", message="m"),),
)


def test_a_check_is_a_commit_status(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.open_merge_request(NAME, "ada")
    for check in (CHECK, CHECK, replace(CHECK, title="still profiling")):
        assert forge.post_check(check) == ""
    assert [(one["status"], one["description"]) for one in project.statuses] == [("running", "profiling")]
    done = replace(CHECK, conclusion="neutral", title="no difference worth having")
    forge.post_check(done)
    forge.post_check(done)
    assert [(one["status"], one["description"]) for one in project.statuses] == [("success", done.title)]
    assert len(writes(lab)) == 2
    forge.post_check(replace(CHECK, conclusion="failure", title="regressed"))
    latest = [one for one in project.statuses if one["latest"]]
    assert [(one["status"], one["description"]) for one in latest] == [("failed", "regressed")]
    forge.post_check(CHECK)
    assert [one["status"] for one in project.statuses if one["latest"]] == ["running"]


def test_a_check_of_a_forks_commit(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.add("eve/trainer")
    number = lab.open_merge_request(NAME, "eve", fork="eve/trainer", sha="e" * 40)
    for _ in range(2):
        forge.post_check(replace(CHECK, head_sha="e" * 40, conclusion="success"))
    assert [one["ref"] for one in project.statuses] == [f"refs/merge-requests/{number}/head"]
    with pytest.raises(ForgeMissing):
        forge.post_check(replace(CHECK, head_sha="0" * 40))


def test_a_check_of_long_texts(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.open_merge_request(NAME, "ada")
    long = replace(CHECK, name="n" * 999, title="\u202e" * 999, conclusion="success")
    forge.post_check(long)
    forge.post_check(long)
    assert len(project.statuses) == 1


def test_a_status_of_somebody_else_is_left_alone(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.open_merge_request(NAME, "ada")
    client(lab, who="eve").post_check(CHECK)
    forge.post_check(CHECK)
    assert [one["author"]["username"] for one in project.statuses] == ["eve", "bot"]


# ---------------------------------------------------------------------------------------------------------- suggestions


def suggest(key: str, start: int, end: int, *lines: str, path: str = "train.py") -> Suggestion:
    return Suggestion(key=key, path=path, start_line=start, end_line=end, remark="**why**", lines=lines)


def test_suggestions(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada", texts={"train.py": (OLD, NEW)})
    wanted = [
        suggest("one added line", 6, 6, "x"),
        suggest("one old line", 10, 10, "y", "z"),
        suggest("from old to added", 5, 8, "```py", "````"),
        suggest("from added to old", 8, 9),
        suggest("no such file", 6, 6, "x", path="other.py"),
        suggest("outside of the diff", 1, 1, "x"),
        suggest("partly outside", 10, 13, "x"),
        suggest("upside down", 7, 6, "x"),
    ]
    assert forge.post_suggestions(number, HEAD, wanted) == 4
    notes = project.notes[number]
    assert [note["body"].split("\n", 1)[1] for note in notes] == [
        "**why**\n\n```suggestion:-0+0\nx\n```",
        "**why**\n\n```suggestion:-0+0\ny\nz\n```",
        "**why**\n\n`````suggestion:-3+0\n```py\n````\n`````",
        "**why**\n\n```suggestion:-1+0\n```",
    ]
    first = {name: notes[0]["position"].get(name) for name in ("old_line", "new_line", "line_range")}
    assert first == {"old_line": None, "new_line": 6, "line_range": None}
    assert notes[1]["position"]["old_line"] == 9
    assert [end["new_line"] for end in notes[2]["position"]["line_range"].values()] == [5, 8]
    before = len(writes(lab))
    assert forge.post_suggestions(number, HEAD, wanted) == 0
    assert len(writes(lab)) == before


def test_suggestions_in_a_renamed_file(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada", texts={"old.py => new.py": (OLD, NEW)})
    assert forge.post_suggestions(number, HEAD, [suggest("k", 5, 6, "x", path="new.py")]) == 1
    position = project.notes[number][0]["position"]
    assert (position["old_path"], position["new_path"]) == ("old.py", "new.py")


def test_a_mark_that_somebody_else_wrote_hides_no_suggestion(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada", texts={"train.py": (OLD, NEW)})
    forge.post_suggestions(number, HEAD, [suggest("k", 6, 6, "x")])
    stolen = project.notes[number].pop()["body"]
    lab.comment(NAME, number, "eve", stolen)
    assert forge.post_suggestions(number, HEAD, [suggest("k", 6, 6, "x")]) == 1


def test_suggestions_for_a_head_that_moved_on(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "ada", texts={"train.py": (OLD, NEW)})
    project.branches["topic"] = "8" * 40
    with pytest.raises(ForgeConflict, match="no longer at"):
        forge.post_suggestions(number, HEAD, [suggest("k", 6, 6, "x")])
    assert forge.post_suggestions(number, HEAD, []) == 0
    assert writes(lab) == []


def test_suggestions_wait_for_the_diff(lab: FakeLab, project: FakeProject) -> None:
    number = lab.open_merge_request(NAME, "ada", texts={"train.py": (OLD, NEW)})
    project.merges[number]["preparing"] = True

    def nap(seconds: float) -> None:
        project.merges[number]["preparing"] = False

    forge = GitLab(NAME, token=lab.token("bot"), base_url=lab.url, patience=Patience(sleep=nap))
    assert forge.post_suggestions(number, HEAD, [suggest("k", 6, 6, "x")]) == 1


# ------------------------------------------------------------------------------------------------------- merge requests


def propose(forge: GitLab, **more: Any) -> Any:
    wanted = {"branch": "advisor/x", "base": "main", "title": "Fuse", "body": "why", "labels": ("perf",), "draft": True}
    return forge.open_pull_request(**{**wanted, **more})


def test_a_proposal_is_opened_once(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    project.branches |= {"advisor/x": "9" * 40, "dev": "7" * 40}
    first = propose(forge)
    assert (first.title, first.draft, first.labels, first.head_sha) == ("Fuse", True, ("perf",), "9" * 40)
    assert propose(forge) == first
    assert len(writes(lab)) == 1
    project.merges[first.number]["labels"].append("theirs")
    edited = propose(forge, title="Fuse it", body="because", labels=("perf", "gpu"), base="dev", draft=False)
    assert (edited.number, edited.title, edited.body, edited.base_ref) == (first.number, "Fuse it", "because", "dev")
    assert edited.labels == ("perf", "theirs", "gpu")
    assert edited.draft  # what it is, its people decide
    assert len(writes(lab)) == 2


def test_the_same_branch_of_a_fork_is_another(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    lab.add("eve/trainer")
    evil = lab.open_merge_request(NAME, "eve", source="advisor/x", fork="eve/trainer")
    project.branches["advisor/x"] = "9" * 40
    assert propose(forge).number != evil


def test_a_proposal_without_its_branch(forge: GitLab) -> None:
    with pytest.raises(ForgeConflict, match="source_branch does not exist"):
        propose(forge)


def test_a_proposal_that_another_worker_opens_at_the_same_time(
    lab: FakeLab, project: FakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.branches["advisor/x"] = "9" * 40
    slow, fast = client(lab), client(lab)
    look = slow._open_from
    answers: list[Callable[[], Any]] = [lambda: None]
    monkeypatch.setattr(slow, "_open_from", lambda branch: answers.pop()() if answers else look(branch))
    first = propose(fast)
    assert propose(slow, title="Later") == replace(first, title="Later")
    assert len(project.merges) == 1


@pytest.mark.parametrize("title", ["Draft: Fuse", "[draft] draft: Fuse"])
def test_a_title_makes_no_draft(project: FakeProject, forge: GitLab, title: str) -> None:
    project.branches["advisor/x"] = "9" * 40
    opened = propose(forge, title=title, draft=False)
    assert (opened.title, opened.draft) == ("Fuse", False)
    forge.edit_pull_request(opened.number, title=title, body="why")
    assert not forge.pull_request(opened.number).draft


def test_a_long_title(project: FakeProject, forge: GitLab) -> None:
    project.branches["advisor/x"] = "9" * 40
    first = propose(forge, title="x" * 999)
    assert propose(forge, title="x" * 999) == first


def test_edits_send_what_differs(lab: FakeLab, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "bot", title="Draft: One", description="text")
    forge.edit_pull_request(number, title="One", body="text\n")
    assert writes(lab) == []
    forge.edit_pull_request(number, title="Two", body="text")
    assert lab.requests[-1][2] == {"title": "Draft: Two"}


def test_an_edit_that_is_refused_is_told(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "bot")
    project.merges[number]["state"] = "closed"
    lab.fail("PUT", "merge_requests", 422)
    with pytest.raises(ForgeConflict):
        forge.edit_pull_request(number, title="Two", body="")


def test_a_proposal_is_closed_with_a_reason(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "bot")
    lab.fail("PUT", "merge_requests", 403)
    with pytest.raises(ForgeRefused):
        forge.close_pull_request(number, "<!-- closed -->", "superseded")
    for _ in range(2):
        forge.close_pull_request(number, "<!-- closed -->", "superseded")
    assert project.merges[number]["state"] == "closed"
    assert [note["body"] for note in project.notes[number]] == ["<!-- closed -->\nsuperseded"]


def test_a_proposal_that_is_merged_while_we_close_it(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    number = lab.open_merge_request(NAME, "bot")
    lab.fail("PUT", "merge_requests", 422)
    with pytest.raises(ForgeConflict):
        forge.close_pull_request(number, "<!-- closed -->", "superseded")

    class Merges(dict[int, Any]):
        looks = 0

        def __getitem__(self, key: int) -> Any:
            found = super().__getitem__(key)
            self.looks += 1
            if self.looks == 2:  # the first is whether it is open, then come the notes of its conversation
                found["state"] = "merged"
            return found

    project.merges = Merges(project.merges)
    forge.close_pull_request(number, "<!-- closed -->", "superseded")
    assert project.merges[number]["state"] == "merged"


# --------------------------------------------------------------------------------------------------------------- issues


def test_the_dashboard(lab: FakeLab, project: FakeProject, forge: GitLab) -> None:
    mark = "<!-- advisor:dashboard -->"
    client(lab, who="eve").upsert_issue(mark, "Fake", f"{mark}\nx")
    first = forge.upsert_issue(mark, "Advisor", f"{mark}\none")
    assert forge.upsert_issue(mark, "Advisor", f"{mark}\none") == first
    second = forge.upsert_issue(mark, "Advisor", f"{mark}\ntwo")
    assert (second.number, second.body, second.state) == (first.number, f"{mark}\ntwo", "open")
    project.issues[first.number]["state"] = "closed"
    assert forge.upsert_issue(mark, "Advisor", f"{mark}\nthree").number != first.number
    assert project.issues[1]["title"] == "Fake"


def test_sarif_asks_for_nothing(lab: FakeLab, forge: GitLab) -> None:
    forge.upload_sarif("{}", head_sha=HEAD, ref="refs/heads/main")
    assert lab.requests == []


# ------------------------------------------------------------------------------------------------------------- failures

WRITES: dict[str, tuple[str, Callable[[GitLab, int, int], object]]] = {
    "sticky": ("/notes$", lambda forge, number, note: forge.upsert_comment(number, MARK, f"{MARK}\nx")),
    "answer": ("/notes$", lambda forge, number, note: forge.add_comment(number, MARK, f"{MARK}\nx")),
    "emoji": ("/award_emoji$", lambda forge, number, note: forge.react(number, note, "eyes")),
    "check": ("/statuses/", lambda forge, number, note: forge.post_check(replace(CHECK, conclusion="success"))),
    "running": ("/statuses/", lambda forge, number, note: forge.post_check(CHECK)),
    "issue": ("/issues$", lambda forge, number, note: forge.upsert_issue(MARK, "t", f"{MARK}\nx")),
    "proposal": ("/merge_requests$", lambda forge, number, note: propose(forge)),
    "suggestion": (
        "/discussions$",
        lambda forge, number, note: forge.post_suggestions(
            number, HEAD, [suggest("k", 6, 6, "x"), suggest("l", 7, 7, "y")]
        ),
    ),
}


def everything(project: FakeProject) -> tuple[int, ...]:
    notes = sum(len(notes) for notes in project.notes.values())
    emoji = sum(len(emoji) for emoji in project.emoji.values())
    return notes, emoji, len(project.statuses), len(project.issues), len(project.merges)


def prepared(lab: FakeLab) -> tuple[int, int]:
    lab.projects[NAME].branches["advisor/x"] = "9" * 40
    number = lab.open_merge_request(NAME, "ada", texts={"train.py": (OLD, NEW)})
    return number, lab.comment(NAME, number, "ada", "/advisor help")


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize(("status", "done"), [(502, True), (502, False), (0, True), (0, False), (200, True)])
def test_a_post_that_may_have_been_done_is_not_doubled(what: str, status: int, done: bool) -> None:
    outcomes = []
    for failing in (False, True):
        with FakeLab() as lab:
            project = lab.add(NAME)
            number, note = prepared(lab)
            path, write = WRITES[what]
            if failing:
                lab.fail("POST", path, status, done=done, body=b"<html>")  # 200 with a proxy's page is no answer
            write(client(lab), number, note)
            write(client(lab), number, note)
            outcomes.append(everything(project))
            assert not lab.plans
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("what", WRITES)
def test_a_call_that_gave_up_can_be_made_again(lab: FakeLab, project: FakeProject, what: str) -> None:
    number, note = prepared(lab)
    path, write = WRITES[what]
    before = everything(project)
    lab.fail("POST", path, 503, done=True)
    with pytest.raises(ForgeUnavailable):
        write(client(lab, limit_s=0.0), number, note)
    write(client(lab), number, note)
    after = everything(project)
    assert sum(after) - sum(before) == (2 if what == "suggestion" else 1)


def test_a_post_that_is_answered_too_late(lab: FakeLab, project: FakeProject) -> None:
    number, _ = prepared(lab)
    lab.fail("POST", "/notes$", -1, done=True)
    client(lab, timeout_s=0.3).upsert_comment(number, MARK, f"{MARK}\nx")
    assert len(project.notes[number]) == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, ForgeRefused), (403, ForgeRefused), (404, ForgeMissing), (409, ForgeConflict), (422, ForgeConflict)],
)
def test_failures_that_time_does_not_heal(lab: FakeLab, status: int, kind: type[Exception]) -> None:
    naps = Naps()
    number, _ = prepared(lab)
    lab.fail("POST", "/notes$", status, times=9, body=b'{"message":{"base":["says no"]}}')
    with pytest.raises(kind, match=rf"POST .*notes answered {status}: base says no"):
        client(lab, naps=naps).upsert_comment(number, MARK, f"{MARK}\nx")
    assert len(writes(lab)) == 1
    assert naps.taken == []


def test_a_rate_limit_is_waited_for(lab: FakeLab) -> None:
    naps = Naps()
    lab.fail("GET", "/user", 429, times=2, Retry_After="7", body=b"Retry later\n")
    assert client(lab, naps=naps).account() == "bot"
    assert len(naps.taken) == 2 and min(naps.taken) >= 7


def test_a_rate_limit_that_outlasts_the_patience(lab: FakeLab) -> None:
    naps = Naps()
    lab.fail("GET", "/user", 429, times=9, Retry_After="3600")
    with pytest.raises(ForgeUnavailable) as caught:
        client(lab, naps=naps).account()
    assert caught.value.retry_after_s == 3600
    assert naps.taken == []


def test_a_gitlab_that_is_not_there(lab: FakeLab) -> None:
    naps = Naps()
    patience = Patience(limit_s=10, sleep=naps, clock=lambda: sum(naps.taken))
    forge = GitLab(NAME, token="glpat-x", base_url="http://127.0.0.1:9", patience=patience)
    with pytest.raises(ForgeUnavailable, match="no usable answer"):
        forge.account()
    assert 3 <= len(naps.taken) <= 6


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"id":"x","username":"y"}', b"[" * 100_000, b"\xff", b""])
def test_an_answer_that_is_none(lab: FakeLab, body: bytes) -> None:
    lab.fail("GET", "/user", 200, times=99, body=body)
    with pytest.raises(ForgeUnavailable, match="no usable answer"):
        client(lab, limit_s=0.0).account()


def test_no_redirect_is_followed_with_the_token(lab: FakeLab) -> None:
    with FakeLab() as elsewhere:
        for status in (301, 302, 307, 308):
            lab.fail("GET", "/user", status, Location=f"{elsewhere.url}/api/v4/user")
            with pytest.raises(ForgeMissing, match="moved"):
                client(lab).account()
            lab.fail("POST", "/notes", status, Location=f"{elsewhere.url}/api/v4/user")
            number = lab.open_merge_request(NAME, "ada", source=f"s{status}")
            with pytest.raises(ForgeMissing, match="moved"):
                client(lab).add_comment(number, MARK, MARK)
        assert elsewhere.requests == []


def test_pages_are_asked_of_this_gitlab_alone(lab: FakeLab) -> None:
    with FakeLab() as elsewhere:
        link = f'<{elsewhere.url}/api/v4/x?page=2>; rel="next"'
        lab.fail("GET", "merge_requests", 200, body=b"[]", Link=link, X_Next_Page="2")
        assert client(lab).pull_requests(state="open", branch_prefix="") == ()
        assert elsewhere.requests == []
        lab.fail("GET", "merge_requests", 200, body=b"[]", X_Next_Page="1", times=2)  # would go on for ever
        assert client(lab).pull_requests(state="open", branch_prefix="") == ()
        assert lab.plans[0].times == 1


@pytest.mark.parametrize("text", ["{token}", '{{"message": "token {token} is bad"}}', '{{"error": ["{token}"]}}'])
def test_no_message_holds_the_token(lab: FakeLab, text: str) -> None:
    token = lab.token("bot")
    for status in (200, 401, 500):
        lab.fail("GET", "/user", status, body=text.format(token=token).encode())
        with pytest.raises((ForgeRefused, ForgeUnavailable)) as caught:
            client(lab, limit_s=0.0).account()
        assert token not in f"{caught.value!r} {caught.value} {caught.value.detail} {caught.value.__cause__}"


def test_an_own_word_of_the_forge_is_shown_visibly(lab: FakeLab) -> None:
    lab.fail("GET", "/user", 403, body='{"message": "\x1b[2J\u202eno"}'.replace("\x1b", "\\u001b").encode())
    with pytest.raises(ForgeRefused) as caught:
        client(lab).account()
    assert "\x1b" not in str(caught.value) and "\u202e" not in str(caught.value)


@pytest.mark.parametrize(
    ("project", "token", "url"),
    [
        (NAME, "", "https://gitlab.com"),
        (NAME, "a b", "https://gitlab.com"),
        (NAME, "a\r\nX: y", "https://gitlab.com"),
        ("trainer", "t", "https://gitlab.com"),
        ("a/../b", "t", "https://gitlab.com"),
        ("a/b?x", "t", "https://gitlab.com"),
        (NAME, "t", "gitlab.com"),
        (NAME, "t", "file:///etc"),
        (NAME, "t", "https://me:secret@gitlab.com"),
    ],
)
def test_what_names_no_project(project: str, token: str, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        GitLab(project, token=token, base_url=url)
    assert "secret" not in str(caught.value)


def test_settings_of_the_environment_add_no_credentials(
    lab: FakeLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    seen: list[str | None] = []
    outcome = lab._outcome

    def looked(handler: Any, *more: Any) -> Any:
        seen.append(handler.headers.get("Authorization"))
        return outcome(handler, *more)

    monkeypatch.setattr(lab, "_outcome", looked)
    assert client(lab).account() == "bot"
    assert seen == [None]
