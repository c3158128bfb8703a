"""Commits of a repository: fetched, read, made and pushed without a work tree, checked out for code nobody trusts."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import hashlib
import os
import re
import shutil
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from advisor.bot.forge import Credentials
from advisor.bot.mirrors.gitfailure import Done, failure
from advisor.bot.mirrors.gitnames import (
    SHA,
    UnfitChange,
    branch_ref,
    check_words,
    editable,
    full_sha,
    local_ref,
    plain_parts,
)
from advisor.bot.mirrors.gitremote import Remote, checked_url
from advisor.bot.mirrors.gitrun import NETWORK_S
from advisor.bot.mirrors.mirror import Mirror
from advisor.errors import ForgeConflict, ForgeError, ForgeMissing, ForgeRefused, OutputError, UsageError
from advisor.reports.untrusted import clip

Access: TypeAlias = "Credentials | Callable[[], Credentials] | None"

FILE_BYTES = 16 << 20  # of one file that is read
CHECKOUT_BYTES, CHECKOUT_FILES = 4 << 30, 500_000
_REGULAR = {"100644", "100755"}
_STALE = re.compile(r"stale info|fetch first|cannot lock ref|incorrect old value|failed to update ref|already exists")
# The bytes of a checkout are those of the commit, whatever the attributes in the tree say.
_VERBATIM = "* -text -eol -ident -filter -working-tree-encoding\n"


class StaleBranch(ForgeConflict):
    """The branch is not where it was expected: somebody else has pushed, created or deleted it."""


class ProtectedBranch(ForgeRefused):
    """The remote takes the push from nobody like us: a protected branch, a rule set, a hook that declines."""


class Workspace:
    """A bare mirror of the repository at `url`, in a folder of its own below `state`.

    `access` is asked before every command with network, because the token of an installation ends after an hour.
    Only branches below `prefix` are ever written. Several processes may use one mirror: those that change it wait for
    each other `patience_s` seconds at most; a mirror that a crash left half made is made anew.
    """

    def __init__(
        self, state: Path, url: str, access: Access = None, *, prefix: str = "advisor/", patience_s: float = NETWORK_S
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*/(?:[A-Za-z0-9_-]+/)*", prefix):
            raise UsageError(f"the prefix of the bot's branches is words that each end with a slash, not {prefix!r}")
        self.url, self.prefix = checked_url(url), prefix
        self._access, self._patience_s = access, patience_s
        name = hashlib.sha256(self.url.encode()).hexdigest()[:24]
        self._mirror = Mirror(Path(os.path.realpath(state)) / name, patience_s)

    # ---------------------------------------------------------------------------------------------------- from remote

    def fetch(self, *refs: str) -> dict[str, str]:
        """Bring full ref names ("refs/pull/7/head") or full commit ids up to date; the commit of each.

        Raises ForgeMissing for one that the remote lacks (which is then forgotten here too) or does not give out, and
        ForgeConflict for objects that no honest git wrote.
        """
        wanted = {ref: local_ref(ref) for ref in refs}
        with self._mirror.locked():
            specs = [f"+{ref}:{name}" for ref, name in wanted.items() if not self._kept(ref)]
            if specs:
                done = self._fetched(specs)
                if self._mirror.is_damaged(done):
                    self._mirror.remake()
                    done = self._fetched(specs)
                if done.status:
                    self._forget(done, wanted)
                    raise failure("fetch from the repository", done)
            return {ref: self._commit_of(ref) for ref in wanted}

    def remote_head(self, branch: str) -> str | None:
        """The commit of a branch on the remote, now; None where there is none."""
        ref = branch_ref(branch)
        done = self._reach("ls-remote", "--quiet", "--", "{url}", ref)
        if done.status:
            raise failure("list the branches of the repository", done)
        for line in done.output.decode("utf-8", "replace").splitlines():
            sha, _, name = line.partition("\t")
            if name == ref and SHA.fullmatch(sha):
                return sha
        return None

    def push(self, branch: str, commit: str, *, expected: str | None) -> None:
        """Set a branch of the bot to `commit`, if it still is at `expected` (None: if there is none yet).

        A branch that is at `commit` already is no error, so a push of unknown outcome is tried again. Raises
        StaleBranch, ProtectedBranch, or what went wrong on the way.
        """
        self._write(branch, full_sha(commit), expected)

    def delete(self, branch: str, *, expected: str) -> None:
        """Delete a branch of the bot, if it still is at `expected`; one that is gone is no error."""
        try:
            self._write(branch, "", expected)
        except ForgeConflict:
            if self.remote_head(branch) is not None:
                raise

    # ------------------------------------------------------------------------------------------------- what is in here

    def resolve(self, ref: str) -> str | None:
        """The commit of a ref as it was last fetched, or of a commit id that is here; None without it."""
        name = ref if SHA.fullmatch(ref) else local_ref(ref)
        done = self._mirror.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        return done.output.decode("ascii").strip() if not done.status else None

    def merge_base(self, a: str, b: str) -> str | None:
        """The best common ancestor of two commits; None where their histories never meet."""
        done = self._mirror.run("merge-base", full_sha(a), full_sha(b))
        if done.status > 1:
            raise failure("compare two commits", done)
        return done.output.decode("ascii").split("\n")[0] or None

    def read(self, commit: str, path: str) -> bytes | None:
        """The text of a regular file at a commit; None where there is none: also for links, folders and submodules.

        Raises ForgeConflict for more than 16 MiB.
        """
        parts = plain_parts(path)
        entry = self._entry(full_sha(commit), path) if parts is not None else None
        if entry is None or entry[0] not in _REGULAR:
            return None
        return self._mirror.ask("cat-file", "blob", entry[1], doing=f"read {clip(path, 120)}", most=FILE_BYTES)

    def files(self, commit: str, pattern: str) -> tuple[str, ...]:
        """Regular files at a commit whose whole path fits the shell pattern, in which `*` also stands for slashes.

        Names that are not UTF-8 fit none: nothing that the bot writes could name them.
        """
        listed = self._mirror.ask(
            "ls-tree", "-r", "-z", "--full-tree", full_sha(commit), doing="list the files of a commit"
        )
        found = []
        for entry in listed.split(b"\0")[:-1]:
            about, _, name = entry.partition(b"\t")
            with contextlib.suppress(UnicodeDecodeError):
                path = name.decode("utf-8")
                if about[:6].decode("ascii") in _REGULAR and fnmatch.fnmatchcase(path, pattern):
                    found.append(path)
        return tuple(found)

    def committer_of(self, commit: str) -> tuple[str, str]:
        """Name and e-mail address that a commit gives for its committer; anybody can write anything there."""
        _, _, name, email = self._people("--max-count=1", full_sha(commit))[0]
        return name, email

    def authors_since(self, base: str, tip: str) -> tuple[tuple[str, str], ...]:
        """Everybody (name, address) whom the commits of `tip` that are not in `base` name as author or committer."""
        people = self._people(f"{full_sha(base)}..{full_sha(tip)}")
        return tuple(dict.fromkeys(pair for four in people for pair in ((four[0], four[1]), (four[2], four[3]))))

    def date_of(self, commit: str) -> datetime.datetime:
        """When a commit was made, as its committer says; aware."""
        said = self._mirror.ask("show", "--no-patch", "--format=%cI", full_sha(commit), doing="read a commit")
        return datetime.datetime.fromisoformat(said.decode("ascii").strip().replace("Z", "+00:00"))

    def message_of(self, commit: str) -> str:
        """The message of a commit, unchanged."""
        said = self._mirror.ask("show", "--no-patch", "--format=%B", full_sha(commit), doing="read a commit")
        return said.decode("utf-8", "replace").removesuffix("\n")

    def changed_paths(self, a: str, b: str) -> tuple[str, ...]:
        """Paths that differ between two commits: added, removed, edited; a renamed file is both of its names."""
        command = "diff-tree -r -z --no-renames --no-ext-diff --no-textconv --name-only".split()
        said = self._mirror.ask(*command, full_sha(a), full_sha(b), "--", doing="compare two commits")
        return tuple(name.decode("utf-8", "backslashreplace") for name in said.split(b"\0")[:-1])

    # ------------------------------------------------------------------------------------------------------- writing

    def checkout(self, commit: str, into: Path) -> None:
        """A work tree of its own for one commit in `into`, a new folder; for code that nobody trusts.

        It has a repository of depth one with no remote, no hooks and nothing shared with the mirror: what is written
        there stays there. The bytes are those of the commit: no filter runs, no line end changes, no submodule and no
        LFS object is fetched. Symbolic links are made as they are and may point anywhere: whoever reads a file of the
        tree afterwards uses `read` (from the mirror, which knows no links) or `sandbox.read_result`, never `open`.
        Nobody runs git in it once its code has run.
        """
        tree = full_sha(commit)
        self._weigh(tree)
        into.parent.mkdir(parents=True, exist_ok=True)
        try:
            into.mkdir(mode=0o755)
        except OSError as error:
            raise OutputError(f"cannot make the folder of a checkout: {error.strerror}: {into.name}") from error
        try:
            self._fill(tree, into)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise

    def commit(
        self,
        parent: str,
        files: Mapping[str, str | bytes],
        *,
        message: str,
        author: tuple[str, str],
        date: datetime.datetime,
    ) -> str:
        """A commit on `parent` that gives existing Python files new text; the same arguments make the same id.

        Author and committer are the same (name, address). Raises UnfitChange for a path that is not a plain relative
        path of an existing regular `.py` file outside of hidden folders (`.github`), and where nothing changes.
        """
        check_words(message, author, date)
        blobs: dict[tuple[str, ...], str] = {}
        for path, text in files.items():
            parts = editable(path)
            content = text.encode("utf-8") if isinstance(text, str) else text
            stored = self._mirror.ask("hash-object", "-w", "--stdin", stdin=content, doing="store a file")
            blobs[parts] = stored.decode("ascii").strip()
        top = (
            self._mirror.ask("rev-parse", "--verify", f"{full_sha(parent)}^{{tree}}", doing="read a commit")
            .decode()
            .strip()
        )
        tree = self._changed(top, blobs, "")
        if tree == top:
            raise UnfitChange("the commit would change nothing")
        when = f"{int(date.timestamp())} {date:%z}"
        extra = {
            f"GIT_{role}_{part}": value
            for role in ("AUTHOR", "COMMITTER")
            for part, value in (("NAME", author[0]), ("EMAIL", author[1]), ("DATE", when))
        }
        done = self._mirror.run(
            "commit-tree", tree, "-p", parent, "-F", "-", stdin=message.encode("utf-8"), extra=extra
        )
        if done.status:
            raise failure("make a commit", done)
        return done.output.decode("ascii").strip()

    def tidy(self) -> None:
        """Pack what has piled up; for quiet hours, because it may take minutes."""
        with self._mirror.locked():
            done = self._mirror.run("gc", "--auto", "--quiet", timeout_s=NETWORK_S)
            if done.status:
                raise failure("tidy the mirror", done)

    # ------------------------------------------------------------------------------------------------ one step of that

    def _reach(self, *arguments: str) -> Done:
        access = self._access() if callable(self._access) else self._access
        remote = Remote(url=self.url, credentials=access)
        return self._mirror.git.reach(arguments, remote=remote, timeout_s=NETWORK_S, repository=self._mirror.path)

    def _fetched(self, specs: Sequence[str]) -> Done:
        options = "--quiet --no-tags --no-write-fetch-head --no-recurse-submodules --no-auto-maintenance".split()
        return self._reach("fetch", *options, "--", "{url}", *specs)

    def _forget(self, done: Done, wanted: Mapping[str, str]) -> None:
        for ref in re.findall(r"couldn't find remote ref (\S+)", done.said):
            if ref in wanted:
                self._mirror.run("update-ref", "-d", wanted[ref])

    def _kept(self, ref: str) -> bool:
        """Whether a commit id is part of a history that is completely here."""
        if not SHA.fullmatch(ref):
            return False
        done = self._mirror.run("for-each-ref", "--count=1", f"--contains={ref}")
        return not done.status and bool(done.output)

    def _commit_of(self, ref: str) -> str:
        found = self.resolve(ref)
        if found is None:
            raise ForgeMissing(f"{clip(ref, 120)} is no commit")
        return found

    def _write(self, branch: str, commit: str, expected: str | None) -> None:
        ref = branch_ref(branch)
        if not branch.startswith(self.prefix):
            raise UsageError(f"the bot writes only branches below {self.prefix}, not {clip(branch, 120)}")
        lease = f"--force-with-lease={ref}:{full_sha(expected) if expected is not None else ''}"
        done = self._reach("push", "--porcelain", "--no-verify", lease, "--", "{url}", f"{commit}:{ref}")
        if done.status:
            raise _push_failure(branch, done)

    def _entry(self, commit: str, path: str) -> tuple[str, str] | None:
        """Mode and object of exactly one path; folders on the way are folders, never links."""
        listed = self._mirror.ask("ls-tree", "-z", "--full-tree", commit, "--", path, doing="look into a commit")
        for entry in listed.split(b"\0")[:-1]:
            about, _, name = entry.partition(b"\t")
            if name == path.encode("utf-8"):
                mode, _, sha = about.decode("ascii").split()
                return mode, sha
        return None

    def _changed(self, tree: str, blobs: Mapping[tuple[str, ...], str], folder: str) -> str:
        """The tree with the blobs in place of files that it holds; modes and everything else are kept."""
        listed = self._mirror.ask("ls-tree", "-z", tree, doing="look into a commit")
        entries = dict(_named(entry) for entry in listed.split(b"\0")[:-1])
        for name in dict.fromkeys(parts[0] for parts in blobs):
            mode, kind, sha = entries.get(name.encode("utf-8"), ("", "", ""))
            inner = {parts[1:]: blob for parts, blob in blobs.items() if parts[0] == name}
            path = f"{folder}{name}"
            if () in inner:
                if mode not in _REGULAR or len(inner) > 1:
                    raise UnfitChange(f"{clip(path, 120)} is no regular file of the commit")
                sha = inner[()]
            elif kind == "tree":
                sha = self._changed(sha, inner, f"{path}/")
            else:
                raise UnfitChange(f"{clip(path, 120)} is no folder of the commit")
            entries[name.encode("utf-8")] = mode, kind, sha
        lines = (f"{' '.join(about)}\t".encode("ascii") + name + b"\0" for name, about in entries.items())
        return self._mirror.ask("mktree", "-z", stdin=b"".join(lines), doing="write a tree").decode("ascii").strip()

    def _people(self, *which: str) -> list[tuple[str, ...]]:
        form = "--format=%an%x00%ae%x00%cn%x00%ce%x00"
        said = self._mirror.ask("log", form, "--encoding=UTF-8", *which, "--", doing="read who made commits")
        fields = said.decode("utf-8", "replace").split("\0")[:-1]
        return [tuple(part.strip("\n") for part in fields[at : at + 4]) for at in range(0, len(fields), 4)]

    def _weigh(self, commit: str) -> None:
        """Refuse a tree that would fill the disk: a small pack can hold a tree of any size."""
        listed = self._mirror.ask(
            "ls-tree", "-r", "-l", "-z", "--full-tree", commit, doing="list the files of a commit"
        )
        sizes = [entry.partition(b"\t")[0].split()[-1] for entry in listed.split(b"\0")[:-1]]
        total = sum(int(size) for size in sizes if size != b"-")
        if total > CHECKOUT_BYTES or len(sizes) > CHECKOUT_FILES:
            raise ForgeConflict(f"the commit holds {len(sizes):,} files of {total:,} bytes: too large for a checkout")

    def _fill(self, commit: str, into: Path) -> None:
        inner = into / ".git"
        source = Remote(url=f"file://{urllib.parse.quote(str(self._mirror.path))}")
        self._mirror.git.ask(["init", "--quiet", "--template=", str(into)], doing="make a checkout")
        (inner / "info").mkdir(exist_ok=True)
        (inner / "info" / "attributes").write_text(_VERBATIM, encoding="ascii")
        options = "--quiet --depth=1 --no-tags --no-write-fetch-head --no-recurse-submodules".split()
        done = self._mirror.git.run([f"--git-dir={inner}", "fetch", *options, "--", source.url, commit], remote=source)
        if not done.status:
            command = [f"--git-dir={inner}", f"--work-tree={into}", "checkout", "--quiet", "--detach", commit]
            done = self._mirror.git.run(command, timeout_s=NETWORK_S)
        if done.status:
            raise failure("make a checkout", done)


def _named(entry: bytes) -> tuple[bytes, tuple[str, str, str]]:
    about, _, name = entry.partition(b"\t")
    mode, kind, sha = about.decode("ascii").split()
    return name, (mode, kind, sha)


def _push_failure(branch: str, done: Done) -> ForgeError:
    shown = clip(branch, 120)
    for line in done.output.decode("utf-8", "replace").splitlines():
        if line.startswith("!"):
            reason = clip(line.split("\t")[-1], 200)
            if "exists; cannot create" in line + done.said:
                return ForgeConflict(f"cannot push {shown}: a branch stands in its way: {reason}", detail=done.said)
            if _STALE.search(line):
                return StaleBranch(f"cannot push {shown}: somebody else has moved it: {reason}", detail=done.said)
            if "remote rejected" in line:
                return ProtectedBranch(f"cannot push {shown}: the remote declines: {reason}", detail=done.said)
    return failure(f"push {shown}", done)
