"""The mirror of a repository, over a real git remote: HTTP with a token, and files."""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gitserver import GitServer, commit, environment, git

from advisor.bot.forge import Credentials
from advisor.bot.mirrors.gitremote import checked_url
from advisor.bot.mirrors.workspace import ProtectedBranch, StaleBranch, UnfitChange, Workspace
from advisor.errors import (
    ForgeConflict,
    ForgeError,
    ForgeMissing,
    ForgeRefused,
    ForgeUnavailable,
    OutputError,
    UsageError,
)

TOKEN = "ghs_" + "a1B2c3D4" * 4
ACCESS = Credentials(user="x-access-token", secret=TOKEN)
NAME = "own/repo.git"
FILES = {"train.py": "print(1)\n", "pkg/a.py": "x = 1\n", "pkg/data.txt": "1\n", ".github/x.py": "1\n"}
WHEN = datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.timezone.utc)
BOT = ("advisor[bot]", "advisor@example.org")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with GitServer(tmp_path / "served", token=TOKEN) as started:
        started.create(NAME, FILES)
        yield started


@pytest.fixture
def workspace(server: GitServer, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "state", server.url(NAME), ACCESS)


@pytest.fixture
def local(tmp_path: Path) -> Workspace:
    """Over file://, which is faster."""
    bare = GitServer(tmp_path / "served").create(NAME, FILES)
    return Workspace(tmp_path / "state", f"file://{bare}")


def served(tmp_path: Path) -> Path:
    return tmp_path / "served" / NAME


def head(workspace: Workspace, branch: str = "main") -> str:
    return workspace.fetch(f"refs/heads/{branch}")[f"refs/heads/{branch}"]


def changed(workspace: Workspace, parent: str, text: str = "x = 2\n") -> str:
    return workspace.commit(parent, {"pkg/a.py": text}, message="faster\n", author=BOT, date=WHEN)


def everything_under(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# ------------------------------------------------------------------------------------------------------ fetch and read


def test_a_branch_and_the_head_of_a_pull_request_are_fetched_over_http(server: GitServer, workspace: Workspace) -> None:
    bare = server.root / NAME
    pull = commit(bare, "refs/pull/7/head", {"pkg/a.py": "x = 3\n"}, parent=git(bare, "rev-parse", "main"))
    found = workspace.fetch("refs/heads/main", "refs/pull/7/head")
    assert found == {"refs/heads/main": git(bare, "rev-parse", "main"), "refs/pull/7/head": pull}
    assert workspace.resolve("refs/pull/7/head") == pull
    assert workspace.merge_base(found["refs/heads/main"], pull) == found["refs/heads/main"]
    assert workspace.read(pull, "pkg/a.py") == b"x = 3\n"
    assert workspace.changed_paths(found["refs/heads/main"], pull) == ("pkg/a.py",)


def test_a_commit_is_fetched_by_its_id_and_not_again(server: GitServer, workspace: Workspace) -> None:
    sha = commit(server.root / NAME, "refs/pull/8/head", {"pkg/a.py": "x = 4\n"})
    assert workspace.fetch(sha) == {sha: sha}
    before = len(server.seen)
    assert workspace.fetch(sha) == {sha: sha}
    assert len(server.seen) == before


def test_a_branch_that_went_is_forgotten(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    commit(bare, "refs/heads/topic", {"a.py": "1\n"})
    head(local, "topic")
    git(bare, "update-ref", "-d", "refs/heads/topic")
    with pytest.raises(ForgeMissing, match="refs/heads/topic"):
        head(local, "topic")
    assert local.resolve("refs/heads/topic") is None


def test_a_branch_may_become_a_folder_and_may_be_forced(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    commit(bare, "refs/heads/a", {"a.py": "1\n"})
    head(local, "a")
    git(bare, "update-ref", "-d", "refs/heads/a")
    first = commit(bare, "refs/heads/a/b", {"a.py": "2\n"}, parent=git(bare, "rev-parse", "main"))
    assert head(local, "a/b") == first
    forced = commit(bare, "refs/heads/a/b", {"a.py": "3\n"}, parent=git(bare, "rev-parse", "main"))
    assert head(local, "a/b") == forced


def test_only_regular_files_are_read_and_listed(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    link = git(bare, "hash-object", "-w", "--stdin", stdin=b"/etc/passwd")
    blob = git(bare, "hash-object", "-w", "--stdin", stdin=b"1\n")
    inner = git(bare, "mktree", stdin=f"100755 blob {blob}\tb.py\n".encode())
    lines = f"120000 blob {link}\tl.py\n040000 tree {inner}\td\n160000 commit {'1' * 40}\ts.py\n120000 blob {link}\te\n"
    sha = git(bare, "commit-tree", git(bare, "mktree", "--missing", stdin=lines.encode()), "-m", "odd")
    git(bare, "update-ref", "refs/heads/odd", sha)
    head(local, "odd")
    assert local.files(sha, "*.py") == ("d/b.py",)
    assert local.read(sha, "d/b.py") == b"1\n"
    for path in ("l.py", "s.py", "d", "e", "e/passwd", "none", "../x", "/d/b.py", "d//b.py", "d/./b.py", "*.py", ""):
        assert local.read(sha, path) is None, path


def test_what_is_not_there_is_said_to_be_missing(server: GitServer, workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(ForgeMissing):
        workspace.fetch("f" * 40)
    with pytest.raises(ForgeMissing, match="not found"):
        Workspace(tmp_path / "state", server.url("own/none.git"), ACCESS).fetch("refs/heads/main")
    with pytest.raises(ForgeMissing):
        Workspace(tmp_path / "state", f"file://{tmp_path}/none.git").fetch("refs/heads/main")
    assert workspace.resolve("refs/heads/main") is None and workspace.resolve("e" * 40) is None
    with pytest.raises(ForgeConflict):
        workspace.merge_base("e" * 40, "f" * 40)


@pytest.mark.parametrize("ref", ["main", "-x", "refs/heads/../x", "refs/heads/a:b", "refs/heads/*", "HEAD", "+refs/x"])
def test_only_full_names_are_fetched(local: Workspace, ref: str) -> None:
    with pytest.raises(UsageError):
        local.fetch(ref)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.git",
        "ssh://git@example.org/a",
        "git@example.org:a.git",
        f"https://x-access-token:{TOKEN}@example.org/a.git",
        "ext::sh -c id",
        "file://host/a",
        "/some/path",
        "https://example.org/a?x=1",
        "https://exa mple.org/a",
        "-u",
        "https://",
        "https://example.org:port/a",
    ],
)
def test_odd_addresses_are_refused_without_showing_a_secret(url: str) -> None:
    with pytest.raises(UsageError) as told:
        checked_url(url)
    assert TOKEN not in str(told.value)


def test_a_pack_with_a_git_folder_in_it_is_refused(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    sha = hostile_commit(bare, ".git")
    with pytest.raises(ForgeConflict, match=r"hasDotgit|fsck"):
        head(local, "hostile")
    assert local.resolve(sha) is None


def test_a_submodule_that_runs_a_command_is_refused(local: Workspace, tmp_path: Path) -> None:
    commit(served(tmp_path), "refs/heads/odd", {".gitmodules": '[submodule "s"]\n\turl = x\n\tupdate = !touch pwned\n'})
    with pytest.raises(ForgeConflict, match="gitmodules"):
        head(local, "odd")


def hostile_commit(bare: Path, name: str, *, content: bytes = b"[core]\n\tfsmonitor = touch /tmp/pwned\n") -> str:
    """A commit whose tree no honest git writes."""
    blob = git(bare, "hash-object", "-w", "--stdin", stdin=content)
    tree = b"100644 config\0" + bytes.fromhex(blob)
    inner = git(bare, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=tree)
    outer = f"40000 {name}".encode() + b"\0" + bytes.fromhex(inner)
    top = git(bare, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=outer)
    body = f"tree {top}\nauthor A <a@b> 1 +0000\ncommitter A <a@b> 1 +0000\n\nx\n"
    sha = git(bare, "hash-object", "-w", "-t", "commit", "--literally", "--stdin", stdin=body.encode())
    git(bare, "update-ref", "refs/heads/hostile", sha)
    return sha


# -------------------------------------------------------------------------------------------------------- credentials


def test_a_wrong_token_is_refused_and_a_fresh_one_is_asked_for(server: GitServer, tmp_path: Path) -> None:
    tokens = iter([TOKEN[::-1], TOKEN])
    asked = Workspace(
        tmp_path / "state", server.url(NAME), lambda: Credentials(user="x-access-token", secret=next(tokens))
    )
    with pytest.raises(ForgeRefused, match="Authentication failed") as told:
        asked.remote_head("main")
    assert TOKEN[::-1] not in f"{told.value}{told.value.detail}"
    assert asked.remote_head("main") == git(server.root / NAME, "rev-parse", "main")
    with pytest.raises(ForgeRefused):
        Workspace(tmp_path / "state", server.url(NAME)).remote_head("main")


def test_the_token_is_in_no_file_no_argument_and_no_environment(server: GitServer, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def look(_: str) -> None:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if entry.name.isdigit() and is_ours(int(entry.name)) and int(entry.name) != os.getpid():
                    seen.append((entry / "cmdline").read_bytes() + b"\n" + (entry / "environ").read_bytes())

    server.answer = look  # type: ignore[assignment]
    workspace = Workspace(tmp_path / "state", server.url(NAME), ACCESS)
    ours = changed(workspace, head(workspace))
    workspace.push("advisor/x", ours, expected=None)
    workspace.checkout(ours, tmp_path / "tree")
    assert any(b"remote-http" in each for each in seen) and any(b"GIT_ASKPASS" in each for each in seen)
    pair = base64.b64encode(f"x-access-token:{TOKEN}".encode())
    for secret in (TOKEN.encode(), pair):
        assert not any(secret in each for each in seen)
        assert secret not in everything_under(tmp_path / "state")
        assert secret not in everything_under(tmp_path / "tree")
    assert any(each.authorization == f"Basic {pair.decode()}" for each in server.seen)


def is_ours(pid: int) -> bool:
    """Whether a process was started by this test process."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_a_server_that_says_the_secret_back_does_not_get_it_into_a_message(server: GitServer, tmp_path: Path) -> None:
    bare = server.root / NAME
    hook = bare / "hooks" / "pre-receive"
    hook.write_text(f"#!/bin/sh\nprintf 'you sent x{TOKEN}y \\033[31mred\\n' >&2\nexit 1\n")
    hook.chmod(0o755)
    workspace = Workspace(tmp_path / "state", server.url(NAME), ACCESS)
    ours = changed(workspace, head(workspace))
    with pytest.raises(ProtectedBranch) as told:
        workspace.push("advisor/x", ours, expected=None)
    assert told.value.detail is not None and "you sent x<redacted>y" in told.value.detail
    assert "\033" not in told.value.detail


def test_another_host_gets_no_credentials(server: GitServer, tmp_path: Path) -> None:
    with GitServer(tmp_path / "other", token="other") as other:
        other.create(NAME, FILES)
        server.answer = lambda path: (301, {"Location": other.url(path[1:])})
        workspace = Workspace(tmp_path / "state", server.url(NAME), ACCESS)
        with pytest.raises(ForgeRefused, match="redirects to"):
            workspace.remote_head("main")
        assert other.seen == []


def test_a_redirect_within_the_host_is_followed(server: GitServer, workspace: Workspace) -> None:
    (server.root / NAME).rename(server.root / "moved.git")
    server.answer = lambda path: (
        (301, {"Location": path.replace(NAME, "moved.git")}) if path.startswith(f"/{NAME}") else None
    )
    main = head(workspace)
    workspace.push("advisor/x", changed(workspace, main), expected=None)
    assert git(server.root / "moved.git", "rev-parse", "advisor/x^") == main
    server.answer = lambda path: (302, {"Location": path})
    with pytest.raises(ForgeUnavailable, match="redirects"):
        workspace.remote_head("main")


def test_a_netrc_and_the_configuration_of_the_account_do_not_count(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text(f"machine 127.0.0.1 login x-access-token password {TOKEN}\n")
    (home / ".gitconfig").write_text(
        f'[credential]\n\thelper = "!touch {home}/pwned; false"\n[core]\n\tfsmonitor = touch {home}/pwned\n'
        f'[alias]\n\tfetch = "!touch {home}/pwned"\n[filter "x"]\n\tsmudge = touch {home}/pwned\n'
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "http.extraHeader")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "Authorization: Basic x")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(ForgeRefused):
        Workspace(tmp_path / "state", server.url(NAME)).fetch("refs/heads/main")
    workspace = Workspace(tmp_path / "state", server.url(NAME), ACCESS)
    commit(server.root / NAME, "refs/heads/main", {".gitattributes": "* filter=x\n"})
    workspace.checkout(head(workspace), tmp_path / "tree")
    assert not (home / "pwned").exists()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, ForgeRefused), (403, ForgeRefused), (404, ForgeMissing), (429, ForgeUnavailable), (502, ForgeUnavailable)],
)
def test_answers_of_the_forge_are_told_apart(
    server: GitServer, workspace: Workspace, status: int, kind: type[ForgeError]
) -> None:
    server.answer = lambda _: (status, {})
    with pytest.raises(kind):
        workspace.fetch("refs/heads/main")
    with pytest.raises(kind):
        workspace.remote_head("main")


def test_no_server_is_unavailable(tmp_path: Path) -> None:
    with GitServer(tmp_path / "served") as server:
        url = server.url(NAME)
    with pytest.raises(ForgeUnavailable):
        Workspace(tmp_path / "state", url, ACCESS).fetch("refs/heads/main")


def test_credentials_with_a_line_break_are_refused(server: GitServer, tmp_path: Path) -> None:
    odd = Workspace(tmp_path / "state", server.url(NAME), Credentials(user="x", secret="a\nb"))
    with pytest.raises(UsageError):
        odd.remote_head("main")


# ------------------------------------------------------------------------------------------------------------- commits


def test_a_commit_is_the_same_for_the_same_input_and_keeps_everything_else(local: Workspace, tmp_path: Path) -> None:
    main = head(local)
    ours = changed(local, main)
    assert ours == changed(local, main)
    assert local.read(ours, "pkg/a.py") == b"x = 2\n"
    assert local.changed_paths(main, ours) == ("pkg/a.py",)
    assert local.committer_of(ours) == BOT and local.committer_of(main) == ("Ada", "ada@example.org")
    assert local.message_of(ours) == "faster\n" and local.date_of(ours) == WHEN
    local.push("advisor/a", ours, expected=None)
    assert git(served(tmp_path), "log", "-1", "--format=%an %ae %cn %ce %aI %B", "advisor/a") == (
        "advisor[bot] advisor@example.org advisor[bot] advisor@example.org 2026-03-01T12:30:00+00:00 faster"
    )
    assert git(served(tmp_path), "fsck", "--strict") == ""


def test_modes_are_kept(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    blob = git(bare, "hash-object", "-w", "--stdin", stdin=b"1\n")
    sha = git(bare, "commit-tree", git(bare, "mktree", stdin=f"100755 blob {blob}\tr.py\n".encode()), "-m", "x")
    git(bare, "update-ref", "refs/heads/mode", sha)
    ours = local.commit(head(local, "mode"), {"r.py": b"2\n"}, message="m", author=BOT, date=WHEN)
    local.push("advisor/m", ours, expected=None)
    assert git(bare, "ls-tree", "advisor/m").startswith("100755 blob")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/x.py", "../x.py", "pkg/../a.py", "./train.py", "pkg//a.py", "pkg\\a.py", "pkg/a.py\0", "pkg/a\n.py",
        "a.py/", ".git/hooks/x.py", ".GIT/x.py", "pkg/.git/x.py", ".g\u200cit/x.py", "git~1/x.py", ".git /x.py",
        ".git./x.py", ".git::$INDEX_ALLOCATION/x.py", ".github/x.py", ".github/workflows/ci.yml", "pkg/data.txt",
        "none.py", "pkg/none.py", "train.py/x.py", "pkg", "", "pkg/a.py ", "C:/x.py", "\ud800.py",
    ],
)  # fmt: skip
def test_paths_that_the_bot_does_not_write(local: Workspace, path: str) -> None:
    main = head(local)
    with pytest.raises(UnfitChange):
        local.commit(main, {"train.py": "print(2)\n", path: "1\n"}, message="m", author=BOT, date=WHEN)


def test_links_and_submodules_are_not_written_through(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    link = git(bare, "hash-object", "-w", "--stdin", stdin=b"../outside")
    lines = f"120000 blob {link}\td\n120000 blob {link}\tl.py\n160000 commit {'1' * 40}\ts\n"
    sha = git(bare, "commit-tree", git(bare, "mktree", "--missing", stdin=lines.encode()), "-m", "odd")
    git(bare, "update-ref", "refs/heads/odd", sha)
    head(local, "odd")
    for path in ("d/a.py", "l.py", "s/a.py"):
        with pytest.raises(UnfitChange):
            local.commit(sha, {path: "1\n"}, message="m", author=BOT, date=WHEN)


def test_a_commit_of_nothing_or_with_odd_words_is_refused(local: Workspace) -> None:
    main = head(local)
    with pytest.raises(UnfitChange, match="nothing"):
        local.commit(main, {"train.py": FILES["train.py"]}, message="m", author=BOT, date=WHEN)
    for odd in ({"message": "a\0b"}, {"message": " "}, {"author": ("a\nb", "c")}, {"author": ("a", "<b>")}):
        with pytest.raises(UsageError):
            local.commit(main, {"train.py": "2\n"}, **({"message": "m", "author": BOT, "date": WHEN} | odd))
    with pytest.raises(UsageError, match="time zone"):
        local.commit(main, {"train.py": "2\n"}, message="m", author=BOT, date=WHEN.replace(tzinfo=None))


# ---------------------------------------------------------------------------------------------------------------- push


def test_a_push_again_is_no_error_and_a_moved_branch_is_stale(server: GitServer, workspace: Workspace) -> None:
    bare = server.root / NAME
    main = head(workspace)
    first, second = changed(workspace, main), changed(workspace, main, "x = 3\n")
    workspace.push("advisor/x", first, expected=None)
    workspace.push("advisor/x", first, expected=None)
    with pytest.raises(StaleBranch):
        workspace.push("advisor/x", second, expected=None)
    workspace.push("advisor/x", second, expected=first)
    theirs = commit(bare, "refs/heads/advisor/x", {"train.py": "print(7)\n"})
    with pytest.raises(StaleBranch, match="somebody else"):
        workspace.push("advisor/x", first, expected=second)
    assert workspace.remote_head("advisor/x") == theirs
    with pytest.raises(StaleBranch):
        workspace.delete("advisor/x", expected=second)
    head(workspace, "advisor/x")
    assert workspace.authors_since(main, theirs) == (("Ada", "ada@example.org"), BOT)
    workspace.delete("advisor/x", expected=theirs)
    workspace.delete("advisor/x", expected=theirs)
    assert workspace.remote_head("advisor/x") is None


def test_a_push_between_the_lease_and_the_update_is_stale(server: GitServer, workspace: Workspace) -> None:
    """Somebody pushes after our client has read the remote's refs: the remote itself compares once more."""
    bare = server.root / NAME
    main = head(workspace)
    first, second = changed(workspace, main), changed(workspace, main, "x = 3\n")
    workspace.push("advisor/x", first, expected=None)

    def meddle(path: str) -> None:
        if path.endswith("/git-receive-pack"):
            git(bare, "update-ref", "refs/heads/advisor/x", main)

    server.answer = meddle  # type: ignore[assignment]
    with pytest.raises(StaleBranch):
        workspace.push("advisor/x", second, expected=first)
    assert git(bare, "rev-parse", "advisor/x") == main


def test_protected_branches_and_foreign_names(server: GitServer, workspace: Workspace) -> None:
    main = head(workspace)
    ours = changed(workspace, main)
    server.protect(NAME, "refs/heads/advisor/locked*")
    with pytest.raises(ProtectedBranch, match="declines") as told:
        workspace.push("advisor/locked", ours, expected=None)
    assert told.value.detail is not None and "GH006" in told.value.detail
    for branch in ("main", "refs/heads/main", "other/x", "advisor", "advisor/../main", "advisor/x:refs/heads/main"):
        with pytest.raises(UsageError):
            workspace.push(branch, ours, expected=main)
        with pytest.raises(UsageError):
            workspace.delete(branch, expected=main)
    git(server.root / NAME, "update-ref", "refs/heads/advisor/y", main)
    with pytest.raises(ForgeConflict) as stands:
        workspace.push("advisor/y/z", ours, expected=None)
    assert not isinstance(stands.value, StaleBranch)


def test_a_large_push_goes_in_pieces(server: GitServer, workspace: Workspace) -> None:
    main = head(workspace)
    noise = os.urandom(2 << 20).hex()
    ours = workspace.commit(main, {"train.py": f"# {noise}\n"}, message="m", author=BOT, date=WHEN)
    workspace.push("advisor/large", ours, expected=None)
    assert git(server.root / NAME, "cat-file", "-s", "advisor/large:train.py") == str(len(noise) + 3)


# ------------------------------------------------------------------------------------------------------------ checkout


def test_a_checkout_stands_alone(local: Workspace, tmp_path: Path) -> None:
    main = head(local)
    tree = tmp_path / "tree"
    local.checkout(main, tree)
    assert {str(p.relative_to(tree)) for p in tree.rglob("*.py")} == {"train.py", "pkg/a.py", ".github/x.py"}
    assert git(tree, "rev-parse", "HEAD") == main and git(tree, "status", "--porcelain") == ""
    assert git(tree, "remote") == "" and git(tree, "rev-list", "--count", "HEAD") == "1"
    kept = everything_under(tree / ".git")
    assert str(tmp_path).encode() not in kept and b"mirror" not in kept
    assert not (tree / ".git" / "objects" / "info" / "alternates").exists()
    assert not any((tree / ".git").rglob("hooks"))
    mirrored = {path.stat().st_ino for path in (tmp_path / "state").rglob("*") if path.is_file()}
    assert not mirrored & {path.stat().st_ino for path in tree.rglob("*") if path.is_file()}
    with pytest.raises(OutputError):
        local.checkout(main, tree)


def test_the_bytes_of_a_checkout_are_those_of_the_commit(local: Workspace, tmp_path: Path) -> None:
    text = "a = 1  # $Id$\nb = 2\n"
    files = {
        "x.py": text,
        "big.bin": "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        ".gitattributes": "*.py text eol=crlf ident working-tree-encoding=UTF-16\n*.bin filter=lfs diff=lfs\n",
        ".gitmodules": '[submodule "s"]\n\tpath = s\n\turl = ../../other\n',
        ".lfsconfig": "[lfs]\n\turl = http://127.0.0.1:1/\n",
    }
    commit(served(tmp_path), "refs/heads/odd", files)
    local.checkout(head(local, "odd"), tmp_path / "tree")
    for name, content in files.items():
        assert (tmp_path / "tree" / name).read_text() == content


def test_links_are_kept_and_lead_no_checkout_astray(local: Workspace, tmp_path: Path) -> None:
    bare, outside = served(tmp_path), tmp_path / "outside"
    outside.mkdir()
    link = git(bare, "hash-object", "-w", "--stdin", stdin=str(outside).encode())
    blob = git(bare, "hash-object", "-w", "--stdin", stdin=b"1\n")
    inner = git(bare, "mktree", stdin=f"100644 blob {blob}\tfile.py\n".encode())
    # a link and a folder of one name, told apart by case only: no trouble on this file system, none may leave the tree
    lines = f"120000 blob {link}\tD\n040000 tree {inner}\td\n"
    sha = git(bare, "commit-tree", git(bare, "mktree", stdin=lines.encode()), "-m", "links")
    git(bare, "update-ref", "refs/heads/links", sha)
    local.checkout(head(local, "links"), tmp_path / "tree")
    assert os.readlink(tmp_path / "tree" / "D") == str(outside) and list(outside.iterdir()) == []


@pytest.mark.parametrize("name", [".git", "..", ".GIT", ".g\u200cit", "git~1"])
def test_a_tree_that_would_write_into_git_is_refused(local: Workspace, tmp_path: Path, name: str) -> None:
    """Put into the mirror itself, past the check of what arrives."""
    (mirror,) = (tmp_path / "state").glob("*/mirror.git")
    sha = hostile_commit(mirror, name)
    with pytest.raises(ForgeConflict):
        local.checkout(sha, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_tree_of_endless_size_is_refused(local: Workspace, tmp_path: Path) -> None:
    bare = served(tmp_path)
    blob = git(bare, "hash-object", "-w", "--stdin", stdin=b"1\n")
    tree = git(bare, "mktree", stdin="".join(f"100644 blob {blob}\tf{n}\n" for n in range(10)).encode())
    for _ in range(9):
        tree = git(bare, "mktree", stdin="".join(f"040000 tree {tree}\td{n}\n" for n in range(10)).encode())
    git(bare, "update-ref", "refs/heads/bomb", git(bare, "commit-tree", tree, "-m", "bomb"))
    sha = head(local, "bomb")
    began = time.monotonic()
    with pytest.raises(ForgeConflict, match=r"answered with more|too large"):
        local.checkout(sha, tmp_path / "tree")
    with pytest.raises(ForgeConflict):
        local.files(sha, "*.py")
    assert time.monotonic() - began < 30


# ------------------------------------------------------------------------------------------------ crashes and company


def test_a_mirror_left_half_made_is_made_anew(local: Workspace, tmp_path: Path) -> None:
    main = head(local)
    (mirror,) = (tmp_path / "state").glob("*/mirror.git")
    (mirror.parent / "making.dead" / "mirror.git").mkdir(parents=True)
    (mirror / "packed-refs.lock").touch()
    (mirror / "refs" / "seen" / "x.lock").touch()
    again = Workspace(tmp_path / "state", local.url)
    assert head(again) == main
    assert not list(mirror.parent.glob("making.*")) and not list(mirror.rglob("*.lock"))
    (mirror / "config").write_text("[core")
    assert head(Workspace(tmp_path / "state", local.url)) == main
    (mirror / "HEAD").unlink()
    assert head(Workspace(tmp_path / "state", local.url)) == main


def test_a_damaged_mirror_is_noticed_and_made_anew(local: Workspace, tmp_path: Path) -> None:
    main = head(local)
    (mirror,) = (tmp_path / "state").glob("*/mirror.git")
    for path in (mirror / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"")
    with pytest.raises(ForgeUnavailable, match="made anew"):
        local.read(main, "train.py")
    assert head(local) == main
    assert local.read(main, "train.py") == b"print(1)\n"


FETCH = """
import sys
from pathlib import Path
from advisor.bot.mirrors.workspace import Workspace
for _ in range(3):
    print(Workspace(Path(sys.argv[1]), sys.argv[2]).fetch("refs/heads/main")["refs/heads/main"], flush=True)
"""


def test_several_processes_share_a_mirror(tmp_path: Path) -> None:
    bare = GitServer(tmp_path / "served").create(NAME, FILES)
    command = [sys.executable, "-c", FETCH, str(tmp_path / "state"), f"file://{bare}"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    expected = {git(bare, "rev-parse", "main")}
    for process in started:
        said, complaint = process.communicate(timeout=60)
        assert process.returncode == 0 and set(said.split()) == expected, complaint


def test_a_killed_process_leaves_no_lock(server: GitServer, tmp_path: Path) -> None:
    """The process dies in the middle of a fetch; git may live on for a moment, the lock does not."""
    waiting, go_on = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        waiting.set()
        go_on.wait(30)

    server.token = None
    server.answer = hold  # type: ignore[assignment]
    command = [sys.executable, "-c", FETCH, str(tmp_path / "state"), server.url(NAME)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        assert waiting.wait(30)
        hurried = Workspace.__new__(Workspace)
        with pytest.raises(ForgeUnavailable, match="busy"):
            hurried.__init__(tmp_path / "state", server.url(NAME), patience_s=0.2)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.wait()
    server.answer = lambda _: None
    go_on.set()
    assert head(Workspace(tmp_path / "state", server.url(NAME), patience_s=10.0))


def test_git_that_hangs_is_stopped_with_all_it_started(
    server: GitServer, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.bot.mirrors.workspace.NETWORK_S", 0.5)
    go_on = threading.Event()
    server.answer = lambda _: go_on.wait(30) and None  # type: ignore[func-returns-value,return-value]
    with pytest.raises(ForgeUnavailable, match=r"0\.5 s"):
        workspace.remote_head("main")
    go_on.set()
    assert not [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and runs_git(pid)]


def runs_git(entry: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_ours(int(entry.name)) and b"git-remote-http" in (entry / "cmdline").read_bytes()
    return False


def test_an_old_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\necho git version 2.25.1\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"2\.32"):
        Workspace(tmp_path / "state", "https://example.org/a.git")


def test_a_state_folder_is_for_its_owner_only(local: Workspace, tmp_path: Path) -> None:
    (folder,) = (tmp_path / "state").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert environment()["GIT_CONFIG_GLOBAL"] == "/dev/null"
    local.tidy()


@pytest.mark.parametrize("prefix", ["", "advisor", "/", "../", "-x/", "a//", "refs heads/"])
def test_a_prefix_is_a_folder_of_branches(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(UsageError):
        Workspace(tmp_path / "state", "https://example.org/a.git", prefix=prefix)
