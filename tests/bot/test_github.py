"""GitHub as a Forge, against a stateful stand-in over real HTTP and with real repositories."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fakehub_git
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from fakehub import ALL_RIGHTS, FakeHub
from forge_clock import Clock

from advisor.bot.forge import Annotation, Check, Forge, Suggestion
from advisor.bot.forges.appauth import InstallationAuth
from advisor.bot.forges.failures import Patience
from advisor.bot.forges.github import GitHub
from advisor.errors import ForgeConflict, ForgeError, ForgeMissing, ForgeRefused, ForgeUnavailable, UsageError

MARKER = "<!-- advisor:report -->"
US = "github-actions[bot]"
OLD = "".join(f"line {n}\n" for n in range(1, 41))
NEW = OLD.replace("line 10\n", "line ten\nline ten and a half\n").replace("line 30\n", "line thirty\n")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a pull request's branch, to be copied: making it takes a dozen processes."""
    with FakeHub(tmp_path_factory.mktemp("template")) as made:
        repo = made.add_repository("o/r")
        made.commit("o/r", "main", {"train.py": OLD, "other.py": "x = 1\n"})
        made.commit("o/r", "feature", {"train.py": NEW, "new.py": "y = 2\n"})
        return repo.bare


@pytest.fixture
def hub(tmp_path: Path, bare: Path) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "hub") as made:
        copy = tmp_path / "hub" / "o" / "r.git"
        shutil.copytree(bare, copy)
        made.add_repository("o/r", bare=copy, permissions={"alice": "write", "bob": "read", "carol": "admin"})
        made.open_pull("o/r", head="feature", title="Faster", body="please")
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _github(hub: FakeHub, clock: Clock | None = None, token: str | None = None, **more: object) -> GitHub:
    clock = clock or Clock()
    settings = {"patience_s": 100.0, "timeout_s": 5, "write_gap_s": 0.0, **more}
    return GitHub(
        "o/r", token or hub.workflow_token(), base_url=hub.url, sleep=clock.sleep, clock=clock.now, **settings
    )  # type: ignore[arg-type]


def _writes(hub: FakeHub) -> list[str]:
    return [f"{seen.method} {seen.path}" for seen in hub.requests if seen.method != "GET" and seen.path != "/graphql"]


def _head(hub: FakeHub) -> str:
    return hub.sync("o/r").pulls[1].head_sha


# ----------------------------------------------------------------------------------------------- account and repository


def test_it_is_a_forge_and_shows_no_token(hub: FakeHub) -> None:
    token = hub.workflow_token()
    forge: Forge = GitHub("o/r", token, base_url=hub.url)
    assert (forge.kind, repr(forge)) == ("github", "GitHub('o/r')")
    assert forge.credentials().user == "x-access-token"
    assert forge.credentials().secret == token
    assert token not in repr(forge.credentials())
    assert token not in repr(vars(forge))


@pytest.mark.parametrize(
    "name", ["o", "o/r/x", "../r", "o/..", "o/.", "/r", "o/", "o/r?x", "o/r#", "o/r\n", "-o/r", "o /r", "http://o/r"]
)
def test_a_name_that_is_no_repository_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="owner/name"):
        GitHub(name, "token")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h",
        "http://ghe.example/api/v3",
        "https://user:pw@h/api",
        "https://",
        "h/api",
        "https://h:x/",
        "https://h?a=b",
    ],
)
def test_a_base_url_that_would_give_the_token_away_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="base URL") as caught:
        GitHub("o/r", "token", base_url=url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("token", ["", " ", "ghp_abc\nX-Header: 1", "ghp_abc def", "ghp_ü"])
def test_what_can_be_no_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(UsageError, match="GITHUB_TOKEN") as caught:
        GitHub("o/r", token)
    assert "ghp" not in str(caught.value)


def test_threads_may_share_one(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    forge = _github(hub)
    send, inside, most = forge._api._requester.requestJson, [0], [0]

    def counted(*arguments: object) -> object:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        try:
            return send(*arguments)  # type: ignore[arg-type]
        finally:
            inside[0] -= 1

    monkeypatch.setattr(forge._api._requester, "requestJson", counted)
    failed: list[str] = []

    def read() -> None:
        for _ in range(10):
            if forge.read_file("train.py", "main") != OLD.encode() or forge.pull_request(1).number != 1:
                failed.append("an answer to another request")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert most == [1], "PyGithub keeps a request in the connection that the threads share"


def test_the_account_of_a_person(hub: FakeHub) -> None:
    assert _github(hub, token=hub.user_token("machine-user")).account() == "machine-user"


def test_the_account_of_a_workflow_and_of_an_installation_that_only_its_token_is_known_of(hub: FakeHub) -> None:
    assert _github(hub).account() == US
    app = hub.add_app("speedy", "")
    assert _github(hub, token=hub.installation_token(app, None, ALL_RIGHTS)).account() == "speedy[bot]"
    hub.fail("POST", "/graphql", 403)
    assert _github(hub).account() == US


def test_the_account_is_asked_for_once(hub: FakeHub) -> None:
    forge = _github(hub)
    assert [forge.account() for _ in range(3)] == [US] * 3
    assert len(hub.requests) == 2


def test_the_repository(hub: FakeHub) -> None:
    found = _github(hub).repository()
    assert (found.name, found.default_branch, found.archived) == ("o/r", "main", False)
    assert found.clone_url == hub.repo("o/r").clone_url


def test_enterprise_servers_have_a_prefix(tmp_path: Path) -> None:
    with FakeHub(tmp_path, prefix="/api/v3") as ghe:
        ghe.add_repository("o/r")
        ghe.commit("o/r", "main", {"a.py": "1\n"})
        forge = _github(ghe)
        assert forge.repository().name == "o/r"
        assert forge.account() == US  # GraphQL lies beside the prefix and is not served here
        ghe.commit("o/r", "b", {"a.py": "2\n"})
        assert forge.open_pull_request(branch="b", base="main", title="t", body="x", labels=(), draft=False).number == 1


@pytest.mark.parametrize(
    ("user", "may"),
    [("alice", True), ("carol", True), ("bob", False), ("ALICE", True), ("nobody", False), ("..", False), ("", False)],
)
def test_who_may_write(hub: FakeHub, user: str, may: bool) -> None:
    assert _github(hub).may_write(user) is may


@pytest.mark.parametrize("user", ["../../x", "a/b", "a?b", "a#b", "a%2fb", "a\nb", "a b"])
def test_a_name_that_is_no_user_is_not_even_asked_for(hub: FakeHub, user: str) -> None:
    assert _github(hub).may_write(user) is False
    assert hub.requests == []


def test_files_are_read_at_a_commit_or_branch(hub: FakeHub) -> None:
    forge = _github(hub)
    odd = "a b/ü#?%2f&.toml"
    sha = hub.commit(
        "o/r", "main", {odd: b"\x00\xff\r\n", "empty": b"", "big": b"x" * (1 << 20), "bigger": b"x" * ((1 << 20) + 1)}
    )
    assert forge.read_file("train.py", "main") == OLD.encode()
    assert forge.read_file("train.py", _head(hub)) == NEW.encode()
    assert forge.read_file(odd, sha) == b"\x00\xff\r\n"
    assert forge.read_file("empty", sha) == b""
    assert forge.read_file("big", sha) == b"x" * (1 << 20)
    for missing in ("none.py", "a b", "train.py/x"):
        assert forge.read_file(missing, "main") is None
    assert forge.read_file("train.py", "no-such-branch") is None
    with pytest.raises(ForgeConflict, match="bigger is larger than the 1 MiB"):
        forge.read_file("bigger", sha)
    hub.fail("GET", "contents", 403, body={"message": "This API returns blobs up to 1 MB. The blob is too large."})
    with pytest.raises(ForgeConflict, match="larger than"):
        forge.read_file("big", sha)


def test_a_link_and_a_submodule_are_no_files(hub: FakeHub) -> None:
    bare = hub.repo("o/r").bare
    blob = fakehub_git.git(bare, "hash-object", "-w", "--stdin", data=b"/etc/passwd").decode().strip()
    head = fakehub_git.commit_of(bare, "main")
    tree = f"120000 blob {blob}\tlink\n160000 commit {head}\tsub\n".encode()
    made = fakehub_git.git(bare, "commit-tree", fakehub_git.git(bare, "mktree", data=tree).decode().strip(), "-m", "x")
    forge = _github(hub)
    assert forge.read_file("link", made.decode().strip()) is None
    assert forge.read_file("sub", made.decode().strip()) is None


@pytest.mark.parametrize("path", ["../x", "a/../../x", "./a", "/a", "a//b", "a/", "", ".", "a\x00b", "a\\b"])
def test_a_path_that_leads_elsewhere_is_no_file_and_not_asked_for(hub: FakeHub, path: str) -> None:
    assert _github(hub).read_file(path, "main") is None
    assert hub.requests == []


def test_branches(hub: FakeHub) -> None:
    forge = _github(hub)
    made = hub.commit("o/r", "advisor/rule-1", {"other.py": "x = 2\n"})
    assert forge.branch_head("advisor/rule-1") == made
    assert forge.branch_head("advisor/rule") is None
    forge.delete_branch("advisor/rule-1")
    forge.delete_branch("advisor/rule-1")
    assert forge.branch_head("advisor/rule-1") is None
    hub.repo("o/r").protected.add("main")
    with pytest.raises(ForgeConflict, match="protected"):
        forge.delete_branch("main")


@pytest.mark.parametrize(
    "branch", ["", "..", "../../x", "a..b", "a b", "a?b", "/a", "a/", "a//b", "a/.b", "-a", "a.lock"]
)
def test_a_name_that_is_no_branch_is_not_asked_for(hub: FakeHub, branch: str) -> None:
    forge = _github(hub)
    assert forge.branch_head(branch) is None
    forge.delete_branch(branch)
    assert hub.requests == []


def test_an_empty_repository_has_no_branch(hub: FakeHub) -> None:
    hub.fail("GET", "git/ref", 409, body={"message": "Git Repository is empty."})
    assert _github(hub).branch_head("main") is None


# ------------------------------------------------------------------------------------------------------- pull requests


def test_a_pull_request_is_read(hub: FakeHub) -> None:
    found = _github(hub).pull_request(1)
    repo = hub.repo("o/r")
    assert (found.number, found.title, found.body, found.state, found.draft) == (1, "Faster", "please", "open", False)
    assert (found.base_ref, found.head_ref, found.head_repository) == ("main", "feature", "o/r")
    assert found.base_sha == fakehub_git.commit_of(repo.bare, "main")
    assert found.head_sha == fakehub_git.commit_of(repo.bare, "feature")
    assert found.created.utcoffset() is not None
    assert found.ended is None
    with pytest.raises(ForgeMissing, match="it is not there, or the token may not see it"):
        _github(hub).pull_request(99)


def test_states_of_pull_requests(hub: FakeHub) -> None:
    forge = _github(hub)
    hub.merge("o/r", 1)
    assert forge.pull_request(1).state == "merged"
    assert forge.pull_request(1).ended is not None
    hub.commit("o/r", "second", {"other.py": "x = 3\n"})
    hub.open_pull("o/r", head="second")
    hub.close("o/r", 2)
    assert forge.pull_request(2).state == "closed"


def test_a_deleted_fork_and_a_deleted_account(hub: FakeHub) -> None:
    hub.fork("o/r", "eve")
    hub.commit("eve/r", "evil", {"other.py": "x = 4\n"})
    pull = hub.open_pull("o/r", head="evil", head_repo="eve/r", author="eve")
    forge = _github(hub)
    assert forge.pull_request(pull.number).head_repository == "eve/r"
    del hub.repos["eve/r"]
    assert forge.pull_request(pull.number).head_repository is None
    assert forge.changed_files(pull.number)[0].path == "other.py"


def test_pull_requests_of_a_prefix_are_those_of_our_own_branches_newest_first(hub: FakeHub) -> None:
    hub.fork("o/r", "eve")
    for index in range(130):
        branch = f"advisor/b{index}"
        fakehub_git.git(hub.repo("o/r").bare, "branch", branch, "feature")
        hub.open_pull("o/r", head=branch)
    hub.commit("eve/r", "advisor/fake", {"other.py": "x = 4\n"})
    fake = hub.open_pull("o/r", head="advisor/fake", head_repo="eve/r", author="eve")
    hub.close("o/r", 2)
    forge = _github(hub)
    every = forge.pull_requests(state="all", branch_prefix="advisor/")
    assert [pull.number for pull in every] == list(range(131, 1, -1))
    assert fake.number not in {pull.number for pull in every}
    opened = forge.pull_requests(state="open", branch_prefix="advisor/b1")
    assert {pull.head_ref for pull in opened} == {f"advisor/b{n}" for n in (1, *range(10, 20), *range(100, 130))}


def test_the_pull_request_of_a_commit_is_found_also_for_a_fork(hub: FakeHub) -> None:
    forge = _github(hub)
    head = _head(hub)
    assert forge.pull_request_at(head).number == 1  # type: ignore[union-attr]
    hub.fork("o/r", "eve")
    sha = hub.commit("eve/r", "change", {"other.py": "x = 5\n"})
    fork = hub.open_pull("o/r", head="change", head_repo="eve/r", author="eve")
    assert forge.pull_request_at(sha).number == fork.number  # type: ignore[union-attr]
    assert forge.pull_request_at("0" * 40) is None
    assert forge.pull_request_at("main") is None
    hub.commit("o/r", "feature", {"new.py": "y = 3\n"})
    assert forge.pull_request_at(head) is None, "a commit below the head is not the head"
    hub.close("o/r", fork.number)
    assert forge.pull_request_at(sha) is None


def test_changed_files_know_the_lines_of_the_diff(hub: FakeHub) -> None:
    hub.commit(
        "o/r",
        "feature",
        {"image.bin": b"\0\1", "other.py": None, "moved.py": NEW.replace("line 2\n", "line two\n"), "train.py": None},
    )
    files = {file.path: file for file in _github(hub).changed_files(1)}
    assert files["new.py"].status == "added"
    assert files["new.py"].added == frozenset({1})
    assert files["other.py"].status == "removed"
    assert files["other.py"].lines == frozenset()
    assert files["image.bin"].lines == frozenset()
    assert (files["moved.py"].status, files["moved.py"].previous) == ("renamed", "train.py")
    assert files["moved.py"].added == frozenset({2, 10, 11, 31})
    assert files["moved.py"].lines == frozenset((*range(1, 6), *range(7, 15), *range(28, 35)))


def test_many_changed_files_come_in_pages(hub: FakeHub) -> None:
    hub.commit("o/r", "feature", {f"f{n:03}.py": f"{n}\n" for n in range(230)})
    files = _github(hub).changed_files(1)
    assert len(files) == 232
    assert [file.path for file in files] == sorted(file.path for file in files)


def _open(forge: GitHub, **more: object) -> int:
    fields = {"branch": "advisor/x", "base": "main", "title": "T", "body": "B", "labels": ("perf",), "draft": False}
    return forge.open_pull_request(**{**fields, **more}).number  # type: ignore[arg-type]


@pytest.fixture
def branch(hub: FakeHub) -> str:
    hub.commit("o/r", "advisor/x", {"other.py": "x = 9\n"})
    return "advisor/x"


def test_a_pull_request_is_opened_once_and_then_edited(hub: FakeHub, branch: str) -> None:
    forge = _github(hub)
    assert [_open(forge), _open(forge), _open(forge, title="T2")] == [2, 2, 2]
    pull = hub.repo("o/r").pulls[2]
    assert (pull.title, pull.body, pull.labels, pull.author, pull.edits) == ("T2", "B", ["perf"], US, 1)
    hub.commit("o/r", "release", {"x.py": "1\n"})
    _open(forge, title="T2", base="release", labels=("perf", "gpu"))
    assert (pull.base, pull.labels) == ("release", ["perf", "gpu"])
    assert _writes(hub).count("POST /repos/o/r/pulls") == 1


def test_one_that_was_closed_is_not_reopened(hub: FakeHub, branch: str) -> None:
    forge = _github(hub)
    _open(forge)
    hub.close("o/r", 2)
    assert _open(forge) == 3


def test_a_fork_with_a_branch_of_the_same_name_is_not_ours(hub: FakeHub, branch: str) -> None:
    hub.fork("o/r", "eve")
    hub.commit("eve/r", branch, {"other.py": "evil\n"})
    theirs = hub.open_pull("o/r", head=branch, head_repo="eve/r", author="eve")
    assert _open(_github(hub)) == theirs.number + 1
    assert theirs.title == "A change"


def test_a_draft_is_opened_as_one(hub: FakeHub, branch: str) -> None:
    _open(_github(hub), draft=True)
    assert hub.repo("o/r").pulls[2].draft


def test_what_github_says_of_an_impossible_pull_request(hub: FakeHub) -> None:
    with pytest.raises(ForgeConflict, match="Validation Failed; PullRequest head invalid"):
        _open(_github(hub), branch="no-such")
    fakehub_git.git(hub.repo("o/r").bare, "branch", "same", "main")
    with pytest.raises(ForgeConflict, match="No commits between main and same"):
        _open(_github(hub), branch="same")


def test_title_and_body_are_edited_where_they_differ(hub: FakeHub) -> None:
    forge = _github(hub)
    forge.edit_pull_request(1, title="Faster", body="please")
    forge.edit_pull_request(1, title="Faster", body="please\r\n")
    assert _writes(hub) == []
    forge.edit_pull_request(1, title="Slower", body="please")
    assert hub.repo("o/r").pulls[1].title == "Slower"


def test_closing_says_why_once(hub: FakeHub) -> None:
    forge = _github(hub)
    hub.fail("PATCH", "/pulls/1", 502, times=100)
    with pytest.raises(ForgeUnavailable):
        forge.close_pull_request(1, "<!-- advisor:closed -->", "The rule was turned off.")
    hub.planned.clear()
    for _ in range(2):
        forge.close_pull_request(1, "<!-- advisor:closed -->", "The rule was turned off.")
    assert hub.repo("o/r").pulls[1].state == "closed"
    assert [c.body for c in hub.repo("o/r").comments] == ["<!-- advisor:closed -->\nThe rule was turned off."]


def test_one_that_was_merged_is_left_alone(hub: FakeHub) -> None:
    hub.merge("o/r", 1)
    _github(hub).close_pull_request(1, "<!-- m -->", "why")
    assert _writes(hub) == []


# -------------------------------------------------------------------------------------------------------- conversation


def test_the_comment_is_written_once_and_edited_in_place(hub: FakeHub) -> None:
    forge = _github(hub)
    first = forge.upsert_comment(1, MARKER, f"{MARKER}\none")
    again = forge.upsert_comment(1, MARKER, f"{MARKER}\none")
    assert (first.id, first.author, first.url) == (again.id, US, again.url)
    assert forge.upsert_comment(1, MARKER, f"{MARKER}\ntwo").body == f"{MARKER}\ntwo"
    (comment,) = hub.repo("o/r").comments
    assert (comment.body, comment.edits) == (f"{MARKER}\ntwo", 1)


def test_comments_of_others_are_never_edited(hub: FakeHub) -> None:
    theirs = [
        hub.comment("o/r", 1, author, f"{MARKER}\nfake") for author in ("eve", "github-actions", "dependabot[bot]")
    ]
    ours = _github(hub).upsert_comment(1, MARKER, f"{MARKER}\nreal")
    assert ours.id not in {comment.id for comment in theirs}
    assert [comment.edits for comment in theirs] == [0, 0, 0]
    assert len(hub.repo("o/r").comments) == 4


def test_a_marker_in_the_middle_is_none(hub: FakeHub) -> None:
    quoted = hub.comment("o/r", 1, US, f"> {MARKER}\nquoted")
    _github(hub).upsert_comment(1, MARKER, f"{MARKER}\nreal")
    assert quoted.edits == 0


def test_of_several_of_ours_the_oldest_is_kept(hub: FakeHub) -> None:
    ours = [hub.comment("o/r", 1, US, f"{MARKER}\n{n}") for n in range(3)]
    other = hub.comment("o/r", 1, US, "<!-- advisor:command 3 -->\nanswer")
    assert _github(hub).upsert_comment(1, MARKER, f"{MARKER}\nnew").id == ours[0].id
    assert hub.repo("o/r").comments == [ours[0], other]


def test_the_comment_is_found_behind_many_others(hub: FakeHub) -> None:
    for n in range(205):
        hub.comment("o/r", 1, "chatty", f"{n}")
    forge = _github(hub)
    first = forge.upsert_comment(1, MARKER, f"{MARKER}\none")
    assert forge.upsert_comment(1, MARKER, f"{MARKER}\ntwo").id == first.id


def test_a_comment_that_is_too_long_is_cut_so_that_it_still_renders(hub: FakeHub) -> None:
    body = f"{MARKER}\n<details><summary>x</summary>\n\n```text\n" + "row of numbers\n" * 10_000
    shown = _github(hub).upsert_comment(1, MARKER, body).body
    assert len(shown) <= 65_536
    assert "```\n</details>\n\n\n_Cut here: " in shown


def test_an_answer_is_given_once(hub: FakeHub) -> None:
    forge = _github(hub)
    first = forge.add_comment(1, "<!-- advisor:command 7 -->", "<!-- advisor:command 7 -->\nyes")
    assert forge.add_comment(1, "<!-- advisor:command 7 -->", "<!-- advisor:command 7 -->\nno").id == first.id
    assert len(hub.repo("o/r").comments) == 1


def test_reactions(hub: FakeHub) -> None:
    comment = hub.comment("o/r", 1, "alice", "/advisor optimize")
    forge = _github(hub)
    forge.react(1, comment.id, "eyes")
    forge.react(1, comment.id, "eyes")
    assert comment.reactions == [(US, "eyes")]
    with pytest.raises(ForgeMissing):
        forge.react(1, 5, "+1")


def test_the_dashboard_issue(hub: FakeHub) -> None:
    marker = "<!-- advisor:dashboard -->"
    forge = _github(hub)
    for author in ("eve", "alice"):
        hub.open_pull("o/r", head="feature", body=f"{marker}\nx", author=author)
    first = forge.upsert_issue(marker, "Dashboard", f"{marker}\n1")
    assert forge.upsert_issue(marker, "Dashboard", f"{marker}\n1") == first
    edited = forge.upsert_issue(marker, "Dashboard", f"{marker}\n2")
    assert (edited.number, edited.body) == (first.number, f"{marker}\n2")
    hub.close("o/r", first.number)
    assert forge.upsert_issue(marker, "Dashboard", f"{marker}\n3").number != first.number


@pytest.mark.parametrize("status", [200, 422])
def test_the_dashboard_is_found_where_github_does_not_know_the_author(hub: FakeHub, status: int) -> None:
    marker = "<!-- advisor:dashboard -->"
    forge = _github(hub)
    first = forge.upsert_issue(marker, "D", f"{marker}\n1")
    hub.fail("GET", "/issues$", status, body=[] if status == 200 else {"message": "Validation Failed"})
    assert forge.upsert_issue(marker, "D", f"{marker}\n2").number == first.number


def test_a_repository_without_issues(hub: FakeHub) -> None:
    hub.repo("o/r").has_issues = False
    with pytest.raises(ForgeMissing, match="Issues are disabled"):
        _github(hub).upsert_issue("<!-- m -->", "t", "<!-- m -->")


# -------------------------------------------------------------------------------------------------------------- checks


def _check(hub: FakeHub, count: int = 0, **more: object) -> Check:
    annotations = tuple(
        Annotation(path="train.py", start_line=n, end_line=n, level="warning", title=f"t{n}", message=f"m{n}")
        for n in range(1, count + 1)
    )
    fields = {"name": "advisor", "head_sha": _head(hub), "conclusion": "neutral", "title": "t", "summary": "s"}
    return Check(**{**fields, "annotations": annotations, **more})  # type: ignore[arg-type]


def test_a_check_with_many_annotations(hub: FakeHub) -> None:
    url = _github(hub).post_check(_check(hub, 120))
    (run,) = hub.repo("o/r").checks
    assert url == f"https://github.example/o/r/runs/{run.id}"
    assert [annotation["message"] for annotation in run.annotations] == [f"m{n}" for n in range(1, 121)]
    assert (run.conclusion, run.edits) == ("neutral", 2)
    posts = [seen.body for seen in hub.requests if seen.method in ("POST", "PATCH") and "check-runs" in seen.path]
    assert [body["status"] for body in posts] == ["in_progress", "in_progress", "completed"]


@pytest.mark.parametrize("count", [0, 1, 50, 51, 100])
def test_posting_the_same_check_again_changes_nothing(hub: FakeHub, count: int) -> None:
    forge = _github(hub)
    forge.post_check(_check(hub, count))
    before = _writes(hub)
    forge.post_check(_check(hub, count))
    assert _writes(hub) == before
    assert len(hub.repo("o/r").checks) == 1
    assert len(hub.repo("o/r").checks[0].annotations) == count


def test_a_check_in_progress_is_completed_in_place(hub: FakeHub) -> None:
    forge = _github(hub)
    forge.post_check(_check(hub, conclusion=None, title="running"))
    assert hub.repo("o/r").checks[0].status == "in_progress"
    forge.post_check(_check(hub, 60, conclusion="failure"))
    (run,) = hub.repo("o/r").checks
    assert (run.status, run.conclusion, run.title, len(run.annotations)) == ("completed", "failure", "t", 60)


def test_annotations_that_no_longer_hold_make_a_new_run_that_stands_for_the_check(hub: FakeHub) -> None:
    forge = _github(hub)
    forge.post_check(_check(hub, 3))
    forge.post_check(_check(hub, 2, title="later"))
    shown = hub.repo("o/r").check("advisor", _head(hub))
    assert shown is not None
    assert (shown.title, len(shown.annotations)) == ("later", 2)
    forge.post_check(_check(hub, 2, title="later still"))
    assert len(hub.repo("o/r").checks) == 2
    assert shown.title == "later still"


def test_the_same_name_of_another_app_or_job_is_not_ours(hub: FakeHub) -> None:
    app = hub.add_app("other", "")
    _github(hub, token=hub.installation_token(app, None, ALL_RIGHTS)).post_check(_check(hub, title="theirs"))
    _github(hub).post_check(_check(hub, title="ours"))
    hub.repo("o/r").checks[-1].external_id = "a job of the workflow"
    _github(hub).post_check(_check(hub, title="ours too"))
    assert [(run.app, run.title, run.edits) for run in hub.repo("o/r").checks] == [
        ("other", "theirs", 0),
        ("github-actions", "ours", 0),
        ("github-actions", "ours too", 0),
    ]


def test_long_texts_of_a_check_are_cut(hub: FakeHub) -> None:
    long = Annotation(path="train.py", start_line=1, end_line=2, level="notice", title="ü" * 300, message="ü" * 70_000)
    summary = "| a | b |\n" * 9_000
    forge = _github(hub)
    for _ in range(2):
        forge.post_check(_check(hub, title="x" * 1000, summary=summary, annotations=(long, long)))
    (run,) = hub.repo("o/r").checks
    assert run.edits == 0
    assert len(run.annotations) == 1
    assert len(run.summary or "") <= 65_535
    assert "more characters" in (run.summary or "")


@pytest.mark.parametrize(
    "said", ["You must authenticate via a GitHub App.", "Resource not accessible by personal access token"]
)
def test_a_person_can_make_no_check_and_everything_else_goes_on(hub: FakeHub, said: str) -> None:
    hub.fail("POST", r"/check-runs$", 403, body={"message": said})
    assert _github(hub, token=hub.user_token("alice")).post_check(_check(hub)) == ""
    assert not hub.repo("o/r").checks


def test_an_app_without_the_right_to_make_checks_is_told_so(hub: FakeHub) -> None:
    with pytest.raises(ForgeRefused, match=r"not accessible by integration.*checks: write"):
        _github(hub, token=hub.workflow_token({"checks": "read"})).post_check(_check(hub))


# --------------------------------------------------------------------------------------------------------- suggestions


def _suggestion(key: str, start: int, end: int, *lines: str, path: str = "train.py") -> Suggestion:
    return Suggestion(key=key, path=path, start_line=start, end_line=end, remark=f"Remark {key}.", lines=lines)


def test_suggestions_are_posted_as_one_review_and_once(hub: FakeHub) -> None:
    forge = _github(hub)
    both = [_suggestion("a", 10, 11, "line 10"), _suggestion("b", 31, 31, "one", "two")]
    assert forge.post_suggestions(1, _head(hub), both) == 2
    assert forge.post_suggestions(1, _head(hub), both) == 0
    assert forge.post_suggestions(1, _head(hub), [*both, _suggestion("c", 1, 1, "x", path="new.py")]) == 1
    pull = hub.repo("o/r").pulls[1]
    assert len(pull.reviews) == 2
    first, second, _ = pull.review_comments
    assert first["body"] == "<!-- advisor:suggestion a -->\nRemark a.\n\n```suggestion\nline 10\n```\n"
    assert (first["start_line"], first["line"], first["side"], first["start_side"]) == (10, 11, "RIGHT", "RIGHT")
    assert "start_line" not in second
    assert first["commit_id"] == _head(hub)


def test_suggestions_outside_of_the_diff_are_left_out(hub: FakeHub) -> None:
    outside = [
        _suggestion("far", 20, 20, "x"),
        _suggestion("edge", 13, 15, "x"),
        _suggestion("p", 1, 1, path="other.py"),
    ]
    assert _github(hub).post_suggestions(1, _head(hub), outside) == 0
    assert _writes(hub) == []
    assert _github(hub).post_suggestions(1, _head(hub), [*outside, _suggestion("in", 31, 31, "x")]) == 1


def test_one_that_github_refuses_does_not_lose_the_others(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    forge = _github(hub)
    files = forge.changed_files(1)
    stale = tuple(  # a diff that shows more than the one that GitHub has by now
        type(file)(path=file.path, status=file.status, lines=frozenset(range(1, 42)), added=file.added)
        for file in files
    )
    monkeypatch.setattr(forge, "changed_files", lambda _: stale)
    four = [
        _suggestion("a", 10, 10, "x"),
        _suggestion("b", 20, 20, "x"),
        _suggestion("c", 31, 31, "x"),
        _suggestion("d", 9, 9, "x"),
    ]
    assert forge.post_suggestions(1, _head(hub), four) == 3
    assert forge.post_suggestions(1, _head(hub), four[:1]) == 0
    keys = [c["body"].split(" -->")[0].rpartition(" ")[2] for c in hub.repo("o/r").pulls[1].review_comments]
    assert sorted(keys) == ["a", "c", "d"]
    with pytest.raises(ForgeConflict, match="Line could not be resolved"):
        forge.post_suggestions(1, _head(hub), four[1:2])


def test_a_deletion_and_backticks_in_the_code(hub: FakeHub) -> None:
    ticks = _suggestion("ticks", 31, 31, 'x = """', "````suggestion", '"""')
    assert _github(hub).post_suggestions(1, _head(hub), [_suggestion("gone", 10, 11), ticks]) == 2
    gone, fenced = (c["body"] for c in hub.repo("o/r").pulls[1].review_comments)
    assert gone.endswith("```suggestion\n```\n")
    assert fenced.endswith('`````suggestion\nx = """\n````suggestion\n"""\n`````\n')


def test_a_key_cannot_end_its_marker(hub: FakeHub) -> None:
    evil = _suggestion("--> <img src=x>", 31, 31, "x")
    forge = _github(hub)
    assert [forge.post_suggestions(1, _head(hub), [evil]) for _ in range(2)] == [1, 0]
    assert "<img" not in hub.repo("o/r").pulls[1].review_comments[0]["body"].split("\n")[0]


def test_a_stranger_with_our_marker_does_not_keep_us_from_posting(hub: FakeHub) -> None:
    forge, eve = _github(hub), _github(hub, token=hub.user_token("eve"))
    assert eve.post_suggestions(1, _head(hub), [_suggestion("a", 31, 31, "x")]) == 1
    assert forge.post_suggestions(1, _head(hub), [_suggestion("a", 31, 31, "x")]) == 1


def test_a_suggestion_longer_than_a_comment_is_left_out(hub: FakeHub) -> None:
    long = _suggestion("long", 10, 10, "x" * 70_000)
    assert _github(hub).post_suggestions(1, _head(hub), [long, _suggestion("a", 31, 31, "x")]) == 1


# ------------------------------------------------------------------------------------------------------- code scanning


def test_code_scanning(hub: FakeHub) -> None:
    forge = _github(hub)
    document = '{"version": "2.1.0", "ü": 1}'
    forge.upload_sarif(document, head_sha=_head(hub), ref="refs/pull/1/head")
    assert hub.repo("o/r").sarifs == [{"commit_sha": _head(hub), "ref": "refs/pull/1/head", "document": document}]
    hub.repo("o/r").code_scanning = False
    forge.upload_sarif(document, head_sha=_head(hub), ref="refs/pull/1/head")
    hub.fail("POST", "sarifs", 404, body={"message": "Not Found"})
    forge.upload_sarif(document, head_sha=_head(hub), ref="refs/pull/1/head")
    with pytest.raises(ForgeRefused, match="security events: write"):
        _github(hub, token=hub.workflow_token({"contents": "read"})).upload_sarif("{}", head_sha="0" * 40, ref="x")


# ------------------------------------------------------------------------------------------------------------ failures


WRITES: dict[str, tuple[Callable[[GitHub, FakeHub], object], str, str]] = {
    "comment": (lambda f, h: f.upsert_comment(1, MARKER, MARKER), "POST", "/issues/1/comments$"),
    "answer": (lambda f, h: f.add_comment(1, MARKER, MARKER), "POST", "/issues/1/comments$"),
    "issue": (lambda f, h: f.upsert_issue(MARKER, "t", MARKER), "POST", "/issues$"),
    "check": (lambda f, h: f.post_check(_check(h, 3)), "POST", "/check-runs$"),
    "annotations": (lambda f, h: f.post_check(_check(h, 130)), "PATCH", "/check-runs/"),
    "suggestions": (lambda f, h: f.post_suggestions(1, _head(h), [_suggestion("a", 31, 31, "x")]), "POST", "/reviews$"),
    "pull request": (lambda f, h: _open(f), "POST", "/pulls$"),
    "labels": (lambda f, h: _open(f), "POST", "/labels$"),
    "close": (lambda f, h: f.close_pull_request(1, MARKER, "why"), "PATCH", "/pulls/1$"),
    "branch": (lambda f, h: f.delete_branch("advisor/x"), "DELETE", "/git/refs/heads/advisor/x"),
}


def _state(hub: FakeHub) -> object:
    repo = hub.sync("o/r")
    checks = [(c.name, c.status, c.conclusion, [a["message"] for a in c.annotations]) for c in repo.checks]
    pulls = [(p.title, p.state, p.labels, len(p.review_comments), len(p.reviews)) for p in repo.pulls.values()]
    return checks, pulls, [c.body for c in repo.comments], [i.title for i in repo.issues.values()]


@pytest.mark.parametrize("status", [502, "drop"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_was_done_without_an_answer_is_not_done_twice(
    hub: FakeHub, branch: str, clock: Clock, name: str, status: int | str, tmp_path: Path
) -> None:
    write, method, path = WRITES[name]
    hub.fail(method, path, status, after_doing=True)  # type: ignore[arg-type]
    forge = _github(hub, clock)
    write(forge, hub)
    assert hub.planned[0].times == 0, "the failure took place"
    assert clock.slept
    seen = _state(hub)
    write(forge, hub)
    assert _state(hub) == seen
    with FakeHub(tmp_path / "calm") as calm:  # the same without a failure
        calm.add_repository("o/r", bare=hub.repo("o/r").bare)
        _again(calm)
        write(_github(calm), calm)
        assert _state(calm) == seen


def _again(calm: FakeHub) -> None:
    bare = calm.repo("o/r").bare
    if fakehub_git.commit_of(bare, "refs/heads/advisor/x") is None:
        fakehub_git.commit(bare, "advisor/x", {"other.py": "x = 9\n"})
    calm.open_pull("o/r", head="feature", title="Faster", body="please")


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_was_not_done_is_tried_again(hub: FakeHub, branch: str, clock: Clock, name: str) -> None:
    write, method, path = WRITES[name]
    hub.fail(method, path, 503, times=3)
    write(_github(hub, clock), hub)
    assert len(clock.slept) == 3


@pytest.mark.parametrize("name", WRITES)
def test_a_process_that_dies_at_any_request_leaves_what_the_next_one_finishes(
    hub: FakeHub, branch: str, name: str
) -> None:
    write, _, _ = WRITES[name]
    for alive in range(40):
        hub.fail("*", "", 502, times=10_000, skip=alive, after_doing=alive % 2 == 0)
        try:
            write(_github(hub, patience_s=0.0), hub)
        except ForgeUnavailable:
            hub.planned.clear()
            continue
        break
    hub.planned.clear()
    seen = _state(hub)
    checks, _, comments, issues = seen  # type: ignore[misc]
    assert len(checks) + len(comments) + len(issues) <= 1
    assert all(len(messages) == len(set(messages)) for _, _, _, messages in checks)
    write(_github(hub), hub)
    assert _state(hub) == seen


def test_a_time_out(hub: FakeHub, clock: Clock) -> None:
    hub.fail("POST", "comments", "hang", after_doing=True)
    _github(hub, clock, timeout_s=1).upsert_comment(1, MARKER, MARKER)
    assert len(hub.repo("o/r").comments) == 1
    hub.fail("GET", "pulls", "hang", times=9)
    with pytest.raises(ForgeUnavailable, match="got no usable answer: ReadTimeout"):
        _github(hub, clock, timeout_s=1, patience_s=0.0).pull_request(1)


def test_a_server_that_is_not_there(clock: Clock) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        forge = GitHub("o/r", "token", base_url=url, sleep=clock.sleep, clock=clock.now, patience_s=20.0)
        with pytest.raises(ForgeUnavailable, match=r"ConnectionError.*tried [56] times"):
            forge.repository()
    assert 5.0 < clock.now() <= 20.0


def test_the_primary_rate_limit_is_waited_for_within_patience(hub: FakeHub, clock: Clock) -> None:
    headers = {"x-ratelimit-remaining": "0", "x-ratelimit-limit": "5000", "date": "Fri, 15 Jan 2027 08:00:00 GMT"}
    body = {"message": "API rate limit exceeded for installation ID 1."}
    hub.fail("GET", "pulls/1", 403, {**headers, "x-ratelimit-reset": "1800000050"}, body)
    assert _github(hub, clock).pull_request(1).number == 1
    assert clock.slept == [51.0]
    hub.fail("GET", "pulls/1", 403, {**headers, "x-ratelimit-reset": "1800003000"}, body)
    with pytest.raises(ForgeUnavailable, match="try again in 3001 s") as caught:
        _github(hub, clock).pull_request(1)
    assert caught.value.retry_after_s == 3001.0


@pytest.mark.parametrize("status", [403, 429])
def test_the_secondary_rate_limit(hub: FakeHub, clock: Clock, status: int) -> None:
    hub.fail(
        "POST", "comments", status, {"retry-after": "30"}, {"message": "You have exceeded a secondary rate limit."}
    )
    _github(hub, clock).upsert_comment(1, MARKER, MARKER)
    assert clock.slept == [30.0]
    assert len(hub.repo("o/r").comments) == 1


def test_a_wrong_token_is_told_and_not_tried_again(hub: FakeHub, clock: Clock) -> None:
    forge = _github(hub, clock, token="ghp_wrongwrongwrongwrong")
    for ask in (forge.account, forge.repository, lambda: forge.pull_request(1)):
        with pytest.raises(ForgeRefused, match="answered 401: Bad credentials; the token is wrong"):
            ask()
    assert clock.slept == []


@pytest.mark.parametrize(
    ("right", "write"),
    [
        ("checks: write", lambda f, h: f.post_check(_check(h))),
        ("pull requests: write", lambda f, h: f.upsert_comment(1, MARKER, MARKER)),
        ("pull requests: write", lambda f, h: _open(f)),
        ("issues: write", lambda f, h: f.upsert_issue(MARKER, "t", MARKER)),
        ("contents: write", lambda f, h: f.delete_branch("advisor/x")),
    ],
)
def test_a_right_that_lacks_is_named(
    hub: FakeHub, branch: str, clock: Clock, right: str, write: Callable[[GitHub, FakeHub], object]
) -> None:
    reader = hub.workflow_token(dict.fromkeys(ALL_RIGHTS, "read"))
    with pytest.raises(ForgeRefused, match=f"Resource not accessible by integration; the token needs {right}"):
        write(_github(hub, clock, token=reader), hub)
    assert clock.slept == []


def test_what_cannot_be_read_is_an_error_of_the_forge(hub: FakeHub, clock: Clock) -> None:
    hub.fail("GET", "pulls/1", 200, body="<html>a proxy's page</html>", times=2)
    assert _github(hub, clock).pull_request(1).number == 1
    assert len(clock.slept) == 2
    for body in ("[]", '{"number": "one"}', "null", "[" * 50_000):
        hub.fail("GET", "pulls/1", 200, body=body)
        with pytest.raises(ForgeError):
            _github(hub, patience_s=0.0).pull_request(1)


def test_a_repository_that_moved(hub: FakeHub) -> None:
    hub.fail("GET", "/repos/o/r$", 301, {"location": "https://elsewhere.example/repos/o/r"})
    with pytest.raises(ForgeMissing, match="redirected"):
        _github(hub).repository()
    hub.fail("POST", "comments", 307, {"location": f"{hub.url}/repositories/1/x"}, {"message": "Moved Permanently"})
    with pytest.raises(ForgeMissing, match="the repository has moved"):
        _github(hub).upsert_comment(1, MARKER, MARKER)


def test_pages_that_lead_in_a_circle_end(hub: FakeHub) -> None:
    circle = {"link": f'<{hub.url}/repos/o/r/pulls?page=2>; rel="next"'}
    hub.fail("GET", "/pulls$", 200, circle, [], times=50)
    assert _github(hub).pull_requests(state="all", branch_prefix="") == ()
    assert sum(seen.path.endswith("/pulls") for seen in hub.requests) == 2


def test_the_next_page_is_asked_of_the_forge_only(hub: FakeHub) -> None:
    hub.fail("GET", "/pulls$", 200, {"link": '<https://evil.example/steal?page=1&state=open>; rel="next"'}, [])
    assert len(_github(hub).pull_requests(state="open", branch_prefix="")) == 1


def test_a_token_is_in_no_message_and_no_log(
    hub: FakeHub, clock: Clock, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "github")  # as github.enable_console_debug_logging does
    token = "an-odd-token-without-any-known-shape"
    hub.tokens[token] = hub.tokens[hub.workflow_token()]
    for status, body in ((500, {"message": f"oops {token}"}), (422, {"errors": [token]}), (403, {"message": token})):
        hub.fail("GET", "pulls/1", status, body=body)
        with pytest.raises(ForgeError) as caught:
            _github(hub, clock, token=token, patience_s=0.0).pull_request(1)
        assert token not in str(caught.value) + repr(caught.value) + repr(caught.value.detail)
    _github(hub, token=token).pull_request(1)
    shown = caplog.text + "".join(capfd.readouterr())
    assert "urllib3" in shown, "the log is at its most talkative"
    assert token not in shown


def test_two_jobs_at_once_leave_one_comment_and_one_pull_request(hub: FakeHub, branch: str) -> None:
    token = hub.workflow_token()
    failed: list[Exception] = []

    def job(number: int) -> None:
        try:
            forge = _github(hub, token=token)
            forge.upsert_comment(1, MARKER, f"{MARKER}\n{number}")
            _open(forge)
        except ForgeConflict as error:  # the other one was first: GitHub refuses the second of a branch
            failed.append(error)

    jobs = [threading.Thread(target=job, args=(n,)) for n in range(8)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    forge = _github(hub, token=token)
    forge.upsert_comment(1, MARKER, f"{MARKER}\nlast")
    assert [c.body for c in hub.repo("o/r").comments] == [f"{MARKER}\nlast"]
    assert len(hub.repo("o/r").pulls) == 2
    assert not failed, "one that was opened in between is edited instead"


# ---------------------------------------------------------------------------------------------------------- GitHub App


@pytest.fixture(scope="module")
def keys() -> tuple[str, str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return secret.decode(), public.decode()


def _app_auth(hub: FakeHub, keys: tuple[str, str], repository: str = "o/r", **more: object) -> InstallationAuth:
    app = hub.apps[0] if hub.apps else hub.add_app("speedy", keys[1])
    clock = Clock()
    patience = Patience(limit_s=20.0, sleep=clock.sleep, clock=clock.now)
    return InstallationAuth(app.id, keys[0], repository, base_url=hub.url, patience=patience, **more)  # type: ignore[arg-type]


def test_an_app_acts_with_a_token_of_its_installation(hub: FakeHub, keys: tuple[str, str]) -> None:
    auth = _app_auth(hub, keys)
    forge = GitHub("o/r", auth, base_url=hub.url, write_gap_s=0.0)
    assert forge.account() == "speedy[bot]"
    assert forge.upsert_comment(1, MARKER, MARKER).author == "speedy[bot]"
    assert forge.upsert_comment(1, MARKER, f"{MARKER}\n2").author == "speedy[bot]"
    forge.post_check(_check(hub, 60))
    forge.post_check(_check(hub, 60))
    assert [(run.app, len(run.annotations)) for run in hub.repo("o/r").checks] == [("speedy", 60)]
    assert sum("access_tokens" in seen.path for seen in hub.requests) == 1
    held = hub.tokens[forge.credentials().secret]
    assert (held.login, held.repositories) == ("speedy[bot]", ("o/r",))


def test_the_token_is_renewed_before_it_ends(hub: FakeHub, keys: tuple[str, str]) -> None:
    forge = GitHub("o/r", _app_auth(hub, keys), base_url=hub.url)
    first = forge.credentials().secret
    assert forge.credentials().secret == first
    hub.token_life_s = 600.0  # those of the next kind are renewed at once: they end within fifteen minutes
    forge._auth._held.expires_at = forge._auth._held.expires_at.replace(year=2020)  # type: ignore[union-attr]
    second = forge.credentials().secret
    third = forge.credentials().secret
    assert len({first, second, third}) == 3


def test_rights_that_were_not_granted_are_not_asked_for(hub: FakeHub, keys: tuple[str, str]) -> None:
    hub.add_app("speedy", keys[1], {"contents": "read", "checks": "write", "administration": "write"})
    auth = _app_auth(hub, keys)
    held = hub.tokens[auth.token]
    assert held.rights == {"contents": "read", "checks": "write", "metadata": "read"}


def test_an_app_that_is_not_installed(hub: FakeHub, keys: tuple[str, str]) -> None:
    auth = _app_auth(hub, keys, repository="o/other")
    with pytest.raises(ForgeMissing, match="GET /repos/o/other/installation answered 404"):
        _ = auth.token
    hub.fail("GET", "installation", 503, times=2)
    assert _app_auth(hub, keys).token


def test_a_key_of_another_app_is_refused_by_github(hub: FakeHub, keys: tuple[str, str]) -> None:
    auth = InstallationAuth(1, keys[0], "o/r", base_url=hub.url)
    with pytest.raises(ForgeRefused, match="401"):
        auth.login()


@pytest.mark.parametrize(
    "damage", [lambda key: "", lambda key: "nonsense", lambda key: key[:-100], lambda key: key[40:]]
)
def test_a_key_that_is_none_is_told_without_showing_it(keys: tuple[str, str], damage: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="private key of the GitHub App cannot be read") as caught:
        InstallationAuth(1, damage(keys[0]), "o/r")
    assert caught.value.__cause__ is None
    assert not any(line and line in str(caught.value) for line in keys[0].split("\n")[1:-2])


def test_neither_key_nor_token_is_shown(hub: FakeHub, keys: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "github")  # as github.enable_console_debug_logging does
    auth = _app_auth(hub, keys)
    token = auth.token
    GitHub("o/r", auth, base_url=hub.url).repository()
    shown = repr(auth) + repr(vars(auth)) + caplog.text
    assert token not in shown
    assert not any(line in shown for line in keys[0].split("\n")[1:-2])
    assert hub.apps[0].public_key not in shown
