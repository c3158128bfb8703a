"""Git as the fakes of forges use it: real bare repositories, asked on the command line."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "Someone",
    "GIT_AUTHOR_EMAIL": "someone@example.com",
    "GIT_COMMITTER_NAME": "Someone",
    "GIT_COMMITTER_EMAIL": "someone@example.com",
}
_HUNK = re.compile(r"(?m)^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@")


class GitFailed(Exception):
    """Git ended with an error; its words are the message."""


def git(folder: Path, *arguments: str, data: bytes | None = None) -> bytes:
    """The output of a git command in a folder."""
    done = subprocess.run(["git", *arguments], cwd=folder, input=data, capture_output=True, env=_ENVIRONMENT)
    if done.returncode:
        raise GitFailed(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def commit_of(folder: Path, name: str) -> str | None:
    """The commit that a full reference name, branch or hash stands for."""
    for candidate in (f"refs/heads/{name}", name):
        try:
            return git(folder, "rev-parse", "--verify", "--quiet", f"{candidate}^{{commit}}").decode().strip()
        except GitFailed:
            continue
    return None


def heads(folder: Path) -> dict[str, str]:
    """The branches of a repository and their commits."""
    listed = git(folder, "for-each-ref", "--format=%(refname:lstrip=2) %(objectname)", "refs/heads").decode()
    return dict(line.split(" ") for line in listed.splitlines())


def make_bare(folder: Path, branch: str = "main") -> Path:
    """An empty bare repository, writable over HTTP as over a path."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--bare", f"--initial-branch={branch}")
    git(folder, "config", "http.receivepack", "true")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    return folder


def commit(bare: Path, branch: str, files: dict[str, str | bytes | None], *, message: str = "change") -> str:
    """Commit files on top of a branch, which is made where there is none; None removes a file. Returns the commit."""
    parent = commit_of(bare, f"refs/heads/{branch}")
    tree = dict[str, tuple[str, str]]()
    if parent is not None:
        for entry in git(bare, "ls-tree", "-r", "-z", parent).decode().split("\0")[:-1]:
            meta, path = entry.split("\t", 1)
            tree[path] = (meta.split()[0], meta.split()[2])
    for path, text in files.items():
        if text is None:
            del tree[path]
            continue
        data = text.encode() if isinstance(text, str) else text
        tree[path] = ("100644", git(bare, "hash-object", "-w", "--stdin", data=data).decode().strip())
    index = bare / "fake-index"
    index.unlink(missing_ok=True)
    environment = {**_ENVIRONMENT, "GIT_INDEX_FILE": str(index)}
    listing = "".join(f"{mode} {blob}\t{path}\0" for path, (mode, blob) in tree.items()).encode()
    subprocess.run(["git", "update-index", "-z", "--index-info"], cwd=bare, input=listing, env=environment, check=True)
    written = subprocess.run(["git", "write-tree"], cwd=bare, env=environment, check=True, capture_output=True).stdout
    index.unlink(missing_ok=True)
    parents = ["-p", parent] if parent else []
    made = git(bare, "commit-tree", written.decode().strip(), *parents, "-m", message).decode().strip()
    git(bare, "update-ref", f"refs/heads/{branch}", made)
    return made


def merge(bare: Path, base: str, head: str, message: str) -> str:
    """Merge a commit into a branch with a merge commit, which it returns."""
    onto = commit_of(bare, f"refs/heads/{base}")
    assert onto is not None
    tree = git(bare, "merge-tree", "--write-tree", onto, head).decode().split("\n")[0]
    made = git(bare, "commit-tree", tree, "-p", onto, "-p", head, "-m", message).decode().strip()
    git(bare, "update-ref", f"refs/heads/{base}", made)
    return made


def contains(bare: Path, branch: str, commit_hash: str) -> bool:
    """Whether a branch has a commit in its history."""
    try:
        git(bare, "merge-base", "--is-ancestor", commit_hash, f"refs/heads/{branch}")
    except GitFailed:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffFile:
    """A file of `git diff base...head`; `patch` are its hunks, None for a binary file."""

    path: str
    status: str
    previous: str | None
    patch: str | None
    blob: str

    def hunks(self) -> list[range]:
        """The lines of the new text that each hunk shows."""
        return [range(int(h[1]), int(h[1]) + int(h[2] or 1)) for h in _HUNK.finditer(self.patch or "")]


def diff(bare: Path, base: str, head: str) -> list[DiffFile]:
    """The files that differ between the merge base of two commits and the second."""
    whole = git(bare, "diff", "-M", f"{base}...{head}").decode(errors="replace")
    texts = re.split(r"(?m)^diff --git ", whole)[1:]
    words = git(bare, "diff", "--raw", "--no-abbrev", "-z", "-M", f"{base}...{head}").decode().split("\0")
    found = []
    while len(words) > 1:
        meta, first = words.pop(0).split(), words.pop(0)
        renamed = meta[4][0] in "RC"
        path = words.pop(0) if renamed else first
        status = {"A": "added", "D": "removed", "M": "modified", "T": "changed", "R": "renamed", "C": "copied"}[
            meta[4][0]
        ]
        text = texts[len(found)]
        start = text.find("\n@@ ")
        patch = text[start + 1 :].removesuffix("\n") if start >= 0 else None
        found.append(DiffFile(path=path, status=status, previous=first if renamed else None, patch=patch, blob=meta[3]))
    return found
