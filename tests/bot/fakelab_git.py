"""The git side of the fake GitLab: branches, heads of merge requests and their diffs, in real bare repositories."""

from __future__ import annotations

from pathlib import Path

import fakehub_git

Texts = dict[str, tuple[str | None, str | None]]


def branches(bare: Path) -> dict[str, str]:
    """The branches and their commits; GitLab names the default branch even where it is empty."""
    return fakehub_git.heads(bare)


def keep_head(bare: Path, origin: Path, head: str, number: int) -> None:
    """Keep the head of a merge request in the project it goes to, from a fork or not."""
    ref = f"refs/merge-requests/{number}/head"
    if fakehub_git.commit_of(bare, ref) == head:
        return
    if origin != bare:
        fakehub_git.git(bare, "fetch", "--quiet", str(origin), head)
    fakehub_git.git(bare, "update-ref", ref, head)


def texts(bare: Path, target: str, head: str) -> tuple[str, Texts]:
    """The merge base of target branch and head, and what differs since: path -> text before and after."""
    base = fakehub_git.git(bare, "merge-base", target, head).decode().strip()
    found: Texts = {}
    for file in fakehub_git.diff(bare, base, head):
        name = file.path if file.previous is None else f"{file.previous} => {file.path}"
        pair = content(bare, base, file.previous or file.path), content(bare, head, file.path)
        before, after = (None if data is None else data.decode() for data in pair)
        found[name] = before, after
    return base, found


def content(bare: Path, ref: str, path: str) -> bytes | None:
    """A file at a commit or branch."""
    try:
        return fakehub_git.git(bare, "cat-file", "blob", f"{ref}:{path}")
    except fakehub_git.GitFailed:
        return None


def delete_branch(bare: Path, branch: str) -> None:
    """As somebody does on GitLab: merge requests of it stay open."""
    fakehub_git.git(bare, "update-ref", "-d", f"refs/heads/{branch}")
