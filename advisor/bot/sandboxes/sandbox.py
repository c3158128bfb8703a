"""Runs the command that measures hostile code: without the secrets of the bot, in its own folders, for its own time.

Three ways, of which the first two protect:

- `bubblewrap`: namespaces of its own for files, processes, network and IPC. As root the code gets another account too.
- `user`: only another account (root starts it), for containers that allow no namespaces. The kernel then keeps
  `/proc/PID/environ` and `mem` of other accounts closed, and files by their modes; command lines are readable, and so
  is what the world may read. Folders that the world may write (/tmp, /dev/shm) stay writable, and two runs under one
  account can reach each other: give each its own.
- `none`: the rights of this account, all of them; only for code that is trusted.

The kernel itself is trusted. Memory is not bounded: CUDA reserves hundreds of gigabytes of addresses, so RLIMIT_AS
would stop it at once, and control groups are not there for everybody. Hardware counters of a GPU are for the
administrator only on most machines, and out of reach in here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.bot.sandboxes import bubblewrap
from advisor.bot.sandboxes.logtail import Tail
from advisor.bot.sandboxes.watching import KEEPER, Finished, Limits, watch
from advisor.errors import ArtifactError, OutputError, UsageError
from advisor.redact import REDACTED, Redactor
from advisor.reports.untrusted import clip

NOBODY = 65534
_ALLOWED = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|PYTHONHASHSEED|PYTHONUNBUFFERED"
    r"|(?:CUDA|CUDNN|CUBLAS|CUBLASLT|NVIDIA|NCCL|HIP|ROCR|HSA|MIOPEN|OMP|MKL|OPENBLAS|KMP|GOMP)_\w+"
    r"|(?:TORCH|PYTORCH|TRITON)\w*|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ADVICE = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap) and let it make namespaces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A way to run code: `kind` is bubblewrap, user or none. `uid` and `gid` are what it runs as, None for our own.

    `options` is the help text of bubblewrap, by which its version is known; `passed` are further variables that the
    owner of the machine lets through.
    """

    kind: str
    program: str = ""
    options: str = ""
    uid: int | None = None
    gid: int | None = None
    passed: frozenset[str] = frozenset()

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        writable: Sequence[Path],
        hidden: Sequence[Path],
        environment: Mapping[str, str],
        network: bool,
        limits: Limits,
        log: Path,
        redact: Callable[[str], str],
        readable: Sequence[Path] = (),
    ) -> Finished:
        """Run a command to its end, or to the end of its time, with nothing of it left alive.

        It may write in `writable` (folders that are there, reached through no symbolic link; as root they change their
        owner) and sees neither `hidden` nor the homes and temporary folders of the machine, except for `readable`. Of
        `environment` it gets what `allowed_environment` lets through. What it prints goes to `log`, redacted.

        Raises UsageError where the sandbox cannot be set up as asked; how the command fared is in the result.
        """
        view = bubblewrap.View(
            program=command[0],
            cwd=_plain(cwd),
            writable=tuple(dict.fromkeys(map(_plain, writable))),
            readable=tuple(Path(os.path.realpath(path)) for path in readable),
            hidden=tuple(Path(os.path.abspath(path)) for path in hidden),
            network=network,
            shm_bytes=limits.shm_bytes,
            tmp_bytes=limits.tmp_bytes,
        )
        log = Path(os.path.realpath(log.parent), log.name)
        if any(folder in log.parents for folder in view.writable):
            raise UsageError(f"the log {log} lies where the code may write: keep it elsewhere")
        with self._temporary() as temporary:
            variables = allowed_environment(environment, redact, self.passed) | self._own_variables(temporary)
            if self.uid is not None:
                assert self.gid is not None
                for folder in (*view.writable, *([temporary] if temporary is not None else [])):
                    _hand_over(folder, self.uid, self.gid)
            if self.kind == "user":
                self._check_reach(view, command)
            tail = Tail(limits.log_bytes)
            try:
                outside = self.kind == "bubblewrap" or self.uid is not None  # who changes to cwd is further inside
                return watch(
                    self._wrapped(command, view),
                    cwd=Path("/") if outside else view.cwd,
                    variables=variables,
                    limits=limits,
                    offline=self.kind != "bubblewrap" and not network,
                    wrapped=self.kind == "bubblewrap",
                    tail=tail,
                )
            finally:
                _write_log(log, redact(tail.text()))

    def _own_variables(self, temporary: Path | None) -> dict[str, str]:
        folder = str(temporary) if temporary is not None else "/tmp"
        own = {"HOME": folder, "TMPDIR": folder, "GIT_CONFIG_NOSYSTEM": "1"}  # git stops at a file it may not read
        return own | ({"USER": "nobody", "LOGNAME": "nobody"} if self.uid is not None else {})

    def _wrapped(self, command: Sequence[str], view: bubblewrap.View) -> list[str]:
        """The command with what gives up root before it, and what makes the namespaces before that."""
        words = list(command)
        if self.uid is not None:
            words = [*KEEPER, "become", str(self.uid), str(self.gid), str(view.cwd), *words]
        if self.kind != "bubblewrap":
            return words
        return bubblewrap.arguments(
            self.program, view, options=self.options, command=words, dropped=self.uid is not None
        )

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path | None]:
        """A home and temporary folder for one run, where the sandbox has no /tmp of its own."""
        if self.kind == "bubblewrap":
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="advisor-run-", ignore_cleanup_errors=True) as name:
            yield Path(os.path.realpath(name))

    def _check_reach(self, view: bubblewrap.View, command: Sequence[str]) -> None:
        """Try, as the account of the code, what it needs and what it must not reach."""
        program = shutil.which(command[0]) or command[0]
        needed = [program, str(view.cwd), *map(str, (*view.writable, *view.readable))]
        for path in needed:
            if not self._may(path, "-x" if Path(path).is_dir() else "-r"):
                raise UsageError(
                    f"account {self.uid} cannot reach {path}: make it and the folders on the way readable for others "
                    f"(chmod o+rx)"
                )
        for secret in view.hidden:
            inside = any(secret in path.parents for path in (view.cwd, *view.writable, *view.readable))
            if self._may(str(secret), "-r") or (secret.is_dir() and not inside and self._may(str(secret), "-x")):
                raise UsageError(f"account {self.uid} can read {secret}, which is to be hidden: chmod go-rwx it")

    def _may(self, path: str, how: str) -> bool:
        done = subprocess.run(
            ["/bin/sh", "-c", 'test "$1" "$2"', "sh", how, path],
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            env={},
            cwd="/",
        )
        return done.returncode == 0


def find_sandbox(
    wanted: str = "auto", *, uid: int = NOBODY, gid: int = NOBODY, passed: Collection[str] = ()
) -> Sandbox:
    """The sandbox of this machine, tried out. `wanted` is auto, bubblewrap, user or none; `uid` is used by root only.

    auto never ends at none. Raises UsageError that says what to install.
    """
    if wanted not in {"auto", "bubblewrap", "user", "none"}:
        raise UsageError(f"no sandbox is called {wanted!r}: choose auto, bubblewrap, user or none")
    root = os.geteuid() == 0
    if root and 0 in {uid, gid}:
        raise UsageError("hostile code does not run as root: name another uid and gid")
    own = {"uid": uid, "gid": gid} if root else {"uid": None, "gid": None}
    known, why = frozenset(passed), []
    if wanted == "none":
        return Sandbox(kind="none", passed=known)
    if wanted in {"auto", "bubblewrap"}:
        program = shutil.which("bwrap")
        if program is not None:
            options = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
            found = Sandbox(kind="bubblewrap", program=program, options=options, passed=known, **own)
            why.append(_trial(found))
            if not why[-1]:
                return found
        else:
            why.append("bubblewrap is not installed")
    if wanted in {"auto", "user"}:
        found = Sandbox(kind="user", passed=known, **own)
        why.append(_trial(found) if root else "only root can give the code another account")
        if not why[-1]:
            return found
    raise UsageError(f"no sandbox for code that nobody trusts: {'; '.join(why)}; {_ADVICE}")


def _trial(sandbox: Sandbox) -> str:
    """Why the interpreter cannot run in a sandbox; empty when it can."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.realpath(name))
        folder.chmod(0o711)
        out, log = folder / "out", folder / "log"
        out.mkdir()
        try:
            done = sandbox.run(
                [sys.executable, "-I", "-c", "import ctypes, json"],
                cwd=out,
                writable=[out],
                hidden=[],
                environment=os.environ,
                network=True,
                limits=Limits(seconds=60.0),
                log=log,
                redact=lambda text: text,
            )
        except UsageError as error:
            return str(error)
        said = log.read_text(encoding="utf-8").strip().split("\n")[-1]
    return "" if done.status == 0 else f"{sandbox.kind} does not work here: {said or f'status {done.status}'}"


def allowed_environment(
    environ: Mapping[str, str], redact: Callable[[str], str] = lambda text: text, passed: Collection[str] = ()
) -> dict[str, str]:
    """The variables of `environ` that hostile code may have: few, by name, and none that looks like a secret."""
    plain = Redactor()
    allowed = {}
    for name, value in environ.items():
        if _ALLOWED.fullmatch(name) or name in passed:
            shown = (plain.value({name: value})[name], redact(value))
            if not any(REDACTED in text for text in shown):
                allowed[name] = value
    return {"PATH": os.defpath} | allowed


def read_result(folder: Path, name: str, limit: int) -> bytes:
    """A file that hostile code has written below `folder`: a regular one, of `limit` bytes at most, no link on the way.

    Raises ArtifactError for anything else, such as a link to a secret, a pipe that blocks, a second name of a file.
    """
    *folders, last = name.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in (*folders, last)):
        raise ArtifactError(f"not the name of a result: {clip(name, 120)}")
    with contextlib.ExitStack() as opened:
        try:
            at = os.open(folder, _FOLDER)
            opened.callback(os.close, at)
            for part in folders:
                at = os.open(part, _FOLDER, dir_fd=at)
                opened.callback(os.close, at)
            found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            raise ArtifactError(f"no result {clip(name, 120)} was written: {error.strerror}") from error
        opened.callback(os.close, found)
        about = os.fstat(found)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            raise ArtifactError(f"the result {clip(name, 120)} is no file of its own")
        with open(found, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise ArtifactError(f"the result {clip(name, 120)} is larger than {limit:,} bytes")
    return data


def discard(folder: Path) -> None:
    """Remove a folder in which hostile code has written, whatever modes it has given to what is in there."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            inner = os.path.join(place, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder)


# -------------------------------------------------------------------------------------------------------------- details


def _plain(path: Path) -> Path:
    """A folder that is where its path says: a link on the way could lead hostile code, or us, anywhere."""
    if os.path.realpath(path) != os.path.abspath(path):
        raise UsageError(f"{path} is reached through a symbolic link: give the folder itself")
    if not path.is_dir():
        raise UsageError(f"{path} is no folder")
    return Path(os.path.abspath(path))


def _hand_over(folder: Path, uid: int, gid: int) -> None:
    """Make everything in a folder that has no other name elsewhere belong to the account of the code."""
    os.chown(folder, uid, gid, follow_symlinks=False)
    for _, folders, files, at in os.fwalk(folder, follow_symlinks=False):
        for name in folders:
            os.chown(name, uid, gid, dir_fd=at, follow_symlinks=False)
        for name in files:
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_nlink == 1:
                os.chown(name, uid, gid, dir_fd=at, follow_symlinks=False)


def _write_log(log: Path, text: str) -> None:
    try:
        log.unlink(missing_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"cannot write the log of a run: {error.strerror}: {log}") from error
