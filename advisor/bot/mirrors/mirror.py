"""A bare repository of our own: made whole or not at all, changed by one process at a time, remade when damaged."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from advisor.bot.mirrors.gitfailure import Done, failure
from advisor.bot.mirrors.gitrun import Git
from advisor.errors import ForgeError, ForgeUnavailable, OutputError

_FORM = "1"  # of the mirror's folder; another one is remade
_DAMAGED = re.compile(
    r"object file .* is empty|is corrupt|inflate: data|loose object|packfile .* (?:cannot|does not match|is far too)"
    r"|unable to read (?:tree|sha1|blob)|error reading from|bad (?:config|signature)|pack has bad object"
    r"|mirror\.git/objects/pack/|[Nn]ot a git repository|unresolved deltas|unable to unpack"
    r"|missing (?:blob|tree|commit)"
)


class Mirror:
    """The bare repository in `folder`, which nobody but us uses."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self.folder, self.path = folder, folder / "mirror.git"
        self.git = Git(home=folder / "home")
        self._patience_s = patience_s
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            self.git.prepare()
            with self.locked():
                if not self._usable():
                    self.remake()
        except OSError as error:
            raise OutputError(f"cannot write the bot's state folder: {error.strerror}: {error.filename}") from error

    def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        extra: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Done:
        """Run a local command in the mirror, whatever its status."""
        command = [f"--git-dir={self.path}", *arguments]
        return self.git.run(command, stdin=stdin, extra=extra, timeout_s=timeout_s)

    def ask(self, *arguments: str, doing: str, stdin: bytes = b"", most: int | None = None) -> bytes:
        """The output of a local command that has to succeed; `doing` completes "cannot ..."."""
        done = self.git.run([f"--git-dir={self.path}", *arguments], stdin=stdin, most=most)
        if done.status:
            raise self.failure(doing, done)
        return done.output

    def failure(self, doing: str, done: Done) -> ForgeError:
        """The error for a command that failed; a mirror that shows damage is noted, to be remade before it is used."""
        if self.is_damaged(done):
            (self.folder / "damaged").touch()
            return ForgeUnavailable(
                f"cannot {doing}: the mirror is damaged and will be made anew: fetch again", detail=done.said
            )
        return failure(doing, done)

    @staticmethod
    def is_damaged(done: Done) -> bool:
        """Whether a failed command complains of the mirror rather than of the remote."""
        own = "\n".join(line for line in done.said.split("\n") if not line.startswith(("remote:", "fatal: remote")))
        return done.status != 0 and _DAMAGED.search(own) is not None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the one lock of this mirror; the kernel takes it from a process that dies.

        Raises ForgeUnavailable when another process does not let go of it in time.
        """
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + self._patience_s
            while not _take(descriptor):
                if time.monotonic() > until:
                    raise ForgeUnavailable(f"another process has kept the mirror busy for {self._patience_s:g} s")
                time.sleep(0.05)
            self._sweep()
            if (self.folder / "damaged").exists():
                self.remake()
            yield
        finally:
            os.close(descriptor)

    def remake(self) -> None:
        """An empty mirror in place of whatever is there, under the lock; its name appears only when it is complete."""
        making = Path(tempfile.mkdtemp(prefix="making.", dir=self.folder))
        bare = making / "mirror.git"
        self.git.ask(["init", "--quiet", "--bare", "--template=", str(bare)], doing="make a mirror")
        for name, value in (("advisor.form", _FORM), ("uploadpack.allowAnySHA1InWant", "true")):
            self.git.ask([f"--git-dir={bare}", "config", name, value], doing="make a mirror")
        if os.path.lexists(self.path):
            self.path.rename(making / "old")
        bare.rename(self.path)
        (self.folder / "damaged").unlink(missing_ok=True)
        shutil.rmtree(making)

    def _sweep(self) -> None:
        """Remove what a killed process left: only who holds the lock writes refs and makes mirrors."""
        for leftover in self.folder.glob("making.*"):
            shutil.rmtree(leftover)
        for lock in (*self.path.glob("*.lock"), *self.path.glob("refs/**/*.lock")):
            lock.unlink(missing_ok=True)

    def _usable(self) -> bool:
        if not (self.path / "HEAD").is_file():
            return False
        form = self.run("config", "--get", "advisor.form")
        if form.status or form.output.decode("utf-8", "replace").strip() != _FORM:
            return False
        return not self.run("for-each-ref", "--count=1").status


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
