"""Names in a repository that the bot accepts: commit ids, refs, branches, paths of files that it may edit."""

from __future__ import annotations

import datetime
import hashlib
import re
import unicodedata

from advisor.errors import UsageError
from advisor.reports.untrusted import clip

SHA = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"refs/(?:heads|tags|pull|merge-requests|keep-around)/[^\x00-\x20\x7f~^:?*\[\\]+")


class UnfitChange(UsageError):
    """A change that the bot makes to no repository: a path outside of its Python sources, or nothing changed."""


def full_sha(commit: str) -> str:
    """`commit`, where it is a full commit id; raises UsageError."""
    if not SHA.fullmatch(commit):
        raise UsageError(f"not a full commit id: {clip(commit, 120)}")
    return commit


def local_ref(ref: str) -> str:
    """The ref of the mirror for one of the remote: flat, so that `a` and `a/b` do not exclude each other."""
    if SHA.fullmatch(ref):
        return f"refs/commits/{ref}"
    if not _REF.fullmatch(ref) or _unfit_ref(ref):
        raise UsageError(f"not a full ref name or commit id: {clip(ref, 120)}")
    return f"refs/seen/{hashlib.sha256(ref.encode()).hexdigest()[:40]}"


def branch_ref(branch: str) -> str:
    """The full ref name of a branch; raises UsageError."""
    ref = f"refs/heads/{branch}"
    if not _REF.fullmatch(ref) or _unfit_ref(ref):
        raise UsageError(f"not a branch name: {clip(branch, 120)}")
    return ref


def _unfit_ref(ref: str) -> bool:
    parts = ref.split("/")
    bad = any(not part or part.startswith((".", "-")) or part.endswith((".", ".lock")) for part in parts)
    return bad or ".." in ref or "@{" in ref or len(ref) > 240


def plain_parts(path: str) -> tuple[str, ...] | None:
    """The components of a plain relative path; None for anything else."""
    parts = tuple(path.split("/"))
    odd = "\\" in path or any(unicodedata.category(character)[0] in "C" for character in path)
    if odd or any(part in {"", ".", ".."} for part in parts):
        return None
    return parts


def editable(path: str) -> tuple[str, ...]:
    """The components of a path that the bot may write.

    Hidden folders are out as a whole: `.git` in every spelling, `.github` and the like with what CI runs. So are names
    that a file system may take for them: with characters that HFS ignores (those of category C), with blanks or
    dots at the end, streams and short names of NTFS.
    """
    parts = plain_parts(path)
    if parts is None or not path.endswith(".py"):
        raise UnfitChange(f"the bot edits Python files by their plain relative path, not {clip(path, 120)}")
    for part in parts:
        if part.startswith((".", " ")) or part.endswith((".", " ")) or ":" in part or re.search(r"~\d", part):
            raise UnfitChange(f"the bot does not write into {clip(part, 60)}: {clip(path, 120)}")
    return parts


def check_words(message: str, author: tuple[str, str], date: datetime.datetime) -> None:
    """Raise UsageError for what git would refuse in a commit, or change on the quiet."""
    if date.tzinfo is None:
        raise UsageError("the date of a commit needs a time zone")
    if not message.strip() or "\0" in message:
        raise UsageError("the message of a commit is empty or holds a NUL")
    if any(not part.strip() or re.search(r"[<>\x00-\x1f]", part) for part in author):
        raise UsageError("name and address of an author hold no angle brackets and no line breaks, and are not empty")
