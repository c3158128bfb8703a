"""A process of its own that starts a command nobody trusts, bounds it, and ends with nothing of it left alive.

    keeper.py watch SETTINGS COMMAND...     starts COMMAND and waits; SETTINGS is JSON, see `Settings`
    keeper.py become UID GID CWD COMMAND... gives up every right of root for good and turns into COMMAND

It runs by itself in an isolated interpreter, without the packages of the project: inside a sandbox they may not be
there. Whatever the command leaves behind (a daemon that has forked twice and left its session) becomes a child of the
watcher, which is the reaper of all its descendants, and is killed. It ends by itself when the process that started it
dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TypedDict

_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 36, 38  # of prctl(2)
_NEW_NETWORK = 0x40000000  # of unshare(2)
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 1
_KILL_S = 10.0  # for processes to die of SIGKILL; only what hangs in a driver takes longer
_AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Settings(TypedDict):
    """What the watcher is told: times in seconds, sizes in bytes, descriptors and process ids as numbers."""

    report: int  # where it writes one line of JSON when all is over
    parent: int
    seconds: float
    grace_s: float  # between SIGTERM and SIGKILL
    nice: int
    file_bytes: int
    processes: int
    offline: bool  # cut the network by itself
    wrapped: bool  # the command is a wrapper, which has to outlive what it wraps


def watch(settings: Settings, command: list[str]) -> None:
    """Run the command to its end, or to the end of its time, and report."""
    _prctl(_PDEATHSIG, signal.SIGTERM)
    _prctl(_SUBREAPER, 1)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    if os.getppid() != settings["parent"]:
        return
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        _start(settings, command, write)
    os.close(write)
    problem = b""
    while block := os.read(read, 4096):  # it closes when the command has started
        problem += block
    status, late = _wait(settings, child)
    left = _end_all()
    report = {"status": status, "late": late, "left": left, "problem": problem.decode("utf-8", "replace")}
    os.write(settings["report"], json.dumps(report).encode())


def become(uid: int, gid: int, cwd: str, command: list[str]) -> None:
    """Turn into the command, as that account, in no further group and with no way to more rights."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _prctl(_NO_NEW_PRIVILEGES, 1)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if 0 in (*os.getresuid(), *os.getresgid()) or os.getgroups():
        sys.exit("keeper: still has rights of root")
    try:
        os.chdir(cwd)
        _execute(command)
    except OSError as error:
        print(f"keeper: cannot start {command[0]} in {cwd}: {error}", file=sys.stderr)
        os._exit(127)


def _start(settings: Settings, command: list[str], problems: int) -> None:
    try:
        os.setsid()
        if settings["offline"]:
            _cut_network()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower(resource.RLIMIT_FSIZE, settings["file_bytes"])
        _lower(resource.RLIMIT_NPROC, settings["processes"])
        os.nice(settings["nice"])
        os.set_inheritable(settings["report"], False)
        _execute(command)
    except OSError as error:
        os.write(problems, f"{error.strerror}: {error.filename or command[0]}".encode())
        os._exit(127)


def _execute(command: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which the interpreter ignores, and exec hands on
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (bound, bound))


def _cut_network() -> None:
    """Move to a network of our own, with nothing but a loopback interface."""
    if _libc().unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot cut off the network", "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def _wait(settings: Settings, child: int) -> tuple[int, bool]:
    """The status of the command as a shell tells it, and whether its time ran out; told to stop, it does so at once."""
    late, until = False, time.monotonic() + settings["seconds"]
    while True:
        status = _reap(child)
        if status is not None:
            return status, late
        got = signal.sigtimedwait(_AWAITED, max(0.0, min(until - time.monotonic(), 60.0)))
        told = got is not None and got.si_signo != signal.SIGCHLD
        if not told and time.monotonic() < until:
            continue
        if told or late:
            return 128 + signal.SIGKILL, late
        late, until = True, time.monotonic() + settings["grace_s"]
        for pid in _descendants(spared=child if settings["wrapped"] else None):
            _signal(pid, signal.SIGTERM)


def _reap(child: int) -> int | None:
    """Collect who has ended; the status of the command if it is among them."""
    status = None
    while True:
        pid, code = _ended()
        if pid <= 0:
            return status
        if pid == child:
            value = os.waitstatus_to_exitcode(code)
            status = value if value >= 0 else 128 - value


def _ended() -> tuple[int, int]:
    """A child that has ended and its status; 0 for none that has, -1 for none at all."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return -1, 0


def _end_all() -> int:
    """Kill every descendant; returns how many. They are stopped first, so that fewer start others meanwhile.

    Only "no child is left" says that it is done: whoever loses its parent becomes a child of ours, while a look around
    in /proc misses some that change parents under it.
    """
    killed: set[int] = set()
    until = time.monotonic() + _KILL_S
    while time.monotonic() < until:
        pid = 1
        while pid > 0:
            pid, _ = _ended()
        if pid < 0:
            break
        alive = _descendants()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in alive:
                _signal(each, number)
        killed |= set(alive)
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
    return len(killed)


def _descendants(*, spared: int | None = None) -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                about = Path("/proc", entry, "stat").read_bytes()
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM}:
                    raise
                continue
            state, parent = about.rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(entry)] = int(parent)
    found, generation = [], [os.getpid()]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation]
        found += generation
    return [pid for pid in found if pid != spared]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # gone, or one that has changed its account
        return


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} is refused")


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(json.loads(sys.argv[2]), sys.argv[3:])
    else:
        become(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
