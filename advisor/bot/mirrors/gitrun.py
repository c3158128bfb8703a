"""Runs git so that its arguments alone decide what it does, and tells what went wrong in the words of a forge.

The secret goes to git through a program that git asks for it (GIT_ASKPASS), which reads it from an inherited anonymous
file: it stands in no argument, no environment, no URL and no file of the disk. `/proc/PID/cmdline` is readable by every
account, `/proc/PID/environ` is inherited by whatever git starts and lands in crash reports; an open descriptor is
neither, and is readable in /proc only by the account that could read the memory of the process as well. The program
answers for one origin only, so that a redirect or a submodule of another host gets nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from advisor.bot.mirrors.gitfailure import Done, failure
from advisor.bot.mirrors.gitremote import Remote, followed, secret_forms
from advisor.errors import ForgeConflict, ForgeUnavailable, UsageError
from advisor.redact import REDACTED, Redactor
from advisor.reports.untrusted import visible_line

LOCAL_S = 120.0  # a command without network
NETWORK_S = 600.0
OUTPUT_BYTES = 64 << 20  # more than that on stdout is no answer but an attack
SHOWN_CHARACTERS = 4000  # of stderr, the last ones
_STDERR_BYTES = 1 << 16

_ASKPASS = """\
#!/bin/sh
# Prints what git asks for, for one origin: line 1 of the file is the account, line 2 the secret.
case "$1" in
"Username for '$ADVISOR_ORIGIN': ") line=1 ;;
"Password for '$ADVISOR_SCHEME://"*"@$ADVISOR_HOST': ") line=2 ;;
*) exit 1 ;;
esac
exec sed -n "${line}p" "/proc/self/fd/$ADVISOR_ANSWERS"
"""

# Only these variables of ours reach git: where programs and certificates lie, and the way out of the network.
_KEPT = """
    PATH TMPDIR SSL_CERT_FILE SSL_CERT_DIR GIT_SSL_CAINFO GIT_EXEC_PATH http_proxy https_proxy HTTPS_PROXY all_proxy
    ALL_PROXY no_proxy NO_PROXY
""".split()

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.symlinks": "true",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.sshCommand": "false",
    "core.askPass": "",
    "core.logAllRefUpdates": "false",
    "credential.helper": "",
    "submodule.recurse": "false",
    "push.followTags": "false",
    "push.gpgSign": "false",
    "commit.gpgSign": "false",
    "log.showSignature": "false",
    "log.mailmap": "false",
    "http.followRedirects": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "gc.autoDetach": "false",
    "maintenance.autoDetach": "false",
    "init.defaultBranch": "main",
    # What a hostile pack may hold is refused on arrival; what only old versions of git wrote is let through.
    "transfer.fsckObjects": "true",
    **{
        f"fetch.fsck.{kind}": "ignore"
        for kind in (
            "zeroPaddedFilemode missingSpaceBeforeDate badTimezone missingEmail badEmail missingNameBeforeEmail "
            "missingSpaceBeforeEmail zeroPaddedDate badDate badDateOverflow badName"
        ).split()
    },
}
_MOVED = re.compile(r"error: 30[1278]\b|update url base from redirection")
_OLDEST = (2, 32)  # knows GIT_CONFIG_COUNT and GIT_CONFIG_GLOBAL
_HOPS = 3  # redirects within one origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Runs git; `home` is a folder of ours, where git finds an empty home and the program it asks for the secret.

    Nothing of the machine's or the account's configuration counts, no hook or filter or helper runs, nothing is asked
    on a terminal, one transport is allowed, and a redirect is followed only within one origin.
    """

    home: Path
    redactor: Redactor = field(default_factory=Redactor.of_machine)

    def prepare(self) -> None:
        """Write the files that git needs, which several processes may do at once; raises UsageError for an old git."""
        empty = self.home / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.home)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(_ASKPASS)
        Path(name).chmod(0o700)
        Path(name).replace(self.home / "askpass")
        version = re.match(rb"git version (\d+)\.(\d+)", self.run(["version"]).output)
        if version is None or (int(version[1]), int(version[2])) < _OLDEST:
            raise UsageError(
                f"git {_OLDEST[0]}.{_OLDEST[1]} or newer is needed: older ones ignore how the bot restrains it"
            )

    def run(
        self,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        remote: Remote | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        most: int | None = None,
    ) -> Done:
        """Run one command, whatever its status. `remote` allows its transport; `extra` are variables of git.

        Raises ForgeUnavailable when it takes longer than `timeout_s` and ForgeConflict for more than `most` bytes.
        """
        most = OUTPUT_BYTES if most is None else most
        if timeout_s is None:
            timeout_s = LOCAL_S if remote is None else NETWORK_S
        environment = self._environment(remote) | dict(extra or {})
        with self._answers(remote, environment) as descriptors, tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            try:
                process = subprocess.Popen(
                    ["git", *arguments],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    cwd=self.home / "empty",
                    pass_fds=descriptors,
                    start_new_session=True,
                    umask=0o022,
                )
            except FileNotFoundError as error:
                raise UsageError("git is not installed") from error
            output, said, late = _watched(process, timeout_s, most)
        if late:
            raise ForgeUnavailable(f"git {arguments[0]} did not finish within {timeout_s:g} s and was stopped")
        if len(output) > most:
            raise ForgeConflict(f"git {arguments[0]} answered with more than {most:,} bytes")
        return Done(status=process.returncode, output=output, said=self._shown(said, remote))

    def ask(self, arguments: Sequence[str], *, doing: str) -> bytes:
        """The output of a local command that has to succeed; `doing` completes "cannot ..."."""
        done = self.run(arguments)
        if done.status:
            raise failure(doing, done)
        return done.output

    def reach(self, arguments: Sequence[str], *, remote: Remote, timeout_s: float, repository: Path) -> Done:
        """Run a command with network, where `{url}` stands for the remote; redirects within its origin are followed."""
        for _ in range(_HOPS + 1):
            command = [f"--git-dir={repository}", *(remote.url if word == "{url}" else word for word in arguments)]
            done = self.run(command, remote=remote, timeout_s=timeout_s)
            if not done.status or not _MOVED.search(done.said):
                return done
            remote = followed(remote)
        raise ForgeUnavailable(f"{remote.host} redirects more than {_HOPS} times")

    def _environment(self, remote: Remote | None) -> dict[str, str]:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {
            "HOME": str(self.home / "empty"),
            "XDG_CONFIG_HOME": str(self.home / "empty"),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "GIT_EDITOR": "false",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_ALLOW_PROTOCOL": remote.scheme if remote is not None else "none",
            "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
        }
        for number, (name, value) in enumerate(_SETTINGS.items()):
            environment |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
        return environment

    @contextlib.contextmanager
    def _answers(self, remote: Remote | None, environment: dict[str, str]) -> Iterator[tuple[int, ...]]:
        """The anonymous file that the askpass program reads, named in `environment` by its descriptor."""
        if remote is None or remote.credentials is None or remote.scheme == "file":
            yield ()
            return
        user, secret = remote.credentials.user, remote.credentials.secret
        if not secret or any(ord(character) < 32 for character in user + secret):
            raise UsageError("the credentials for git are empty or hold a line break")
        descriptor = os.memfd_create("answers")
        try:
            os.write(descriptor, f"{user}\n{secret}\n".encode())
            environment |= {
                "GIT_ASKPASS": str(self.home / "askpass"),
                "ADVISOR_ORIGIN": f"{remote.scheme}://{remote.host}",
                "ADVISOR_SCHEME": remote.scheme,
                "ADVISOR_HOST": remote.host,
                "ADVISOR_ANSWERS": str(descriptor),
            }
            yield (descriptor,)
        finally:
            os.close(descriptor)

    def _shown(self, said: bytes, remote: Remote | None) -> str:
        text = said.decode("utf-8", "replace").replace("\r", "\n")
        for literal in (
            secret_forms(remote.credentials) if remote is not None and remote.credentials is not None else ()
        ):
            text = text.replace(literal, REDACTED)
        text = self.redactor.text(text)
        return "\n".join(visible_line(line) for line in text.split("\n") if line.strip())[-SHOWN_CHARACTERS:]


def _watched(process: subprocess.Popen[bytes], timeout_s: float, most: int) -> tuple[bytes, bytes, bool]:
    """Stdout, the end of stderr and whether the time ran out; nothing of the process group is left."""
    assert process.stdout is not None and process.stderr is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill(process)

    said: list[bytes] = []
    reader = threading.Thread(target=_keep_end, args=(process.stderr, said), daemon=True)
    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True
    try:
        timer.start()
        reader.start()
        output = process.stdout.read(most + 1)
        if len(output) <= most:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        timer.cancel()
        timer.join()
        _kill(process)  # before it is reaped, so that its id cannot be another's
        process.wait()
    reader.join(5.0)
    process.stdout.close()
    if not reader.is_alive():
        process.stderr.close()
    return output, b"".join(said), late.is_set()


def _keep_end(stream: IO[bytes], said: list[bytes]) -> None:
    while block := os.read(stream.fileno(), _STDERR_BYTES):
        said.append(block)
        if sum(map(len, said)) > 4 * _STDERR_BYTES:
            said[:] = [b"".join(said)[-_STDERR_BYTES:]]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
