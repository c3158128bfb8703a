"""Starts a command under the keeper and takes in what it prints, within limits of time and size."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.bot.sandboxes import keeper
from advisor.bot.sandboxes.logtail import Tail
from advisor.errors import UsageError

KEEPER = (sys.executable, "-I", "-S", "-B", keeper.__file__)
_SLACK_S = 30.0  # for the keeper to end what it watches, past every time it was given


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use: seconds and bytes. At `seconds` it gets SIGTERM, `grace_s` later it is killed.

    `file_bytes` is of any one file; `log_bytes` of the log, the middle of a longer one is left out; `processes` counts
    those of the account, threads included, and binds no code that runs as root; `shm_bytes` and `tmp_bytes` are of
    folders in memory. Folders that are given as writable have no bound besides that of their disk.
    """

    seconds: float
    grace_s: float = 10.0
    file_bytes: int = 16 << 30
    log_bytes: int = 2 << 20
    processes: int = 8192
    nice: int = 5
    shm_bytes: int = 8 << 30
    tmp_bytes: int = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended: status as a shell tells it (128 + the signal), whether time ran out, how long it took.

    `left_behind` is how many processes it had not ended by itself, which are gone now.
    """

    status: int
    timed_out: bool
    seconds: float
    left_behind: int = 0


def watch(
    command: Sequence[str],
    *,
    cwd: Path,
    variables: Mapping[str, str],
    limits: Limits,
    offline: bool,
    wrapped: bool,
    tail: Tail,
) -> Finished:
    """Run a command to its end with nothing but `variables` in its environment; `tail` takes what it prints.

    `offline` cuts the network, `wrapped` says that the command is bubblewrap. Raises UsageError where it never started.
    """
    began = time.monotonic()
    read, write = os.pipe()
    settings: keeper.Settings = {
        "report": write,
        "parent": os.getpid(),
        "seconds": limits.seconds,
        "grace_s": limits.grace_s,
        "nice": limits.nice,
        "file_bytes": limits.file_bytes,
        "processes": limits.processes,
        "offline": offline,
        "wrapped": wrapped,
    }
    try:
        process = subprocess.Popen(
            [*KEEPER, "watch", json.dumps(settings), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(variables),  # nothing else: /proc/1 of a sandbox shows what its first process was started with
            pass_fds=(write,),
            start_new_session=True,
        )
    finally:
        os.close(write)
    try:
        _drain(process, tail, began + limits.seconds + limits.grace_s + _SLACK_S)
        _stop(process)
        told = os.read(read, 1 << 16)
    finally:
        _stop(process)
        os.close(read)
    return _finished(told, tail, time.monotonic() - began)


def _drain(process: subprocess.Popen[bytes], tail: Tail, until: float) -> None:
    """Take in what the command prints until it has ended, at `until` (of the monotonic clock) at the latest."""
    assert process.stdout is not None
    ended = False
    while time.monotonic() < until:
        ready, _, _ = select.select([process.stdout], [], [], 0.0 if ended else 0.1)
        if ready:
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
                return
            tail.add(block)
        elif ended:
            return
        ended = process.poll() is not None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the watcher, which ends what it watches; it is killed only when it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SLACK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _finished(told: bytes, tail: Tail, seconds: float) -> Finished:
    last = tail.text().strip().split("\n")[-1][:500]
    if not told:
        raise UsageError(f"the watcher of the sandbox ended without a report: {last}")
    report = json.loads(told)
    if report["problem"]:
        raise UsageError(f"the sandbox cannot be set up: {report['problem']}")
    if report["status"] == 1 and last.startswith("bwrap: "):
        raise UsageError(f"the sandbox cannot be set up: {last}")
    return Finished(status=report["status"], timed_out=report["late"], seconds=seconds, left_behind=report["left"])
