"""Fifty deliveries a second for ten seconds, on cores that others keep busy: each is acknowledged within a second."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deliveries import SECRET, deliver, pull_request

DELIVERIES, PER_SECOND, WITHIN_S = 500, 50, 1.0

# The task in work waits for its children, which keep both cores busy, as an optimisation does.
SERVER = """
import sys, time
from pathlib import Path
from advisor.bot.webhooks.serve import ServeOptions, serve
from advisor.bot.webhooks.webhook import Secrets

secrets = Secrets(github=(sys.argv[2],))
serve(ServeOptions(state=Path(sys.argv[1]), secrets=secrets, port=0, grace_s=0.0), lambda task: time.sleep(600))
"""
BUSY = "while True: sum(range(10_000))"


@contextlib.contextmanager
def running(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_deliveries_are_acknowledged_in_time_while_every_core_is_busy(tmp_path: Path):
    bodies = [pull_request(number, repository=f"octo/{number % 40}") for number in range(1, DELIVERIES + 1)]
    server = [sys.executable, "-c", SERVER, str(tmp_path), SECRET]
    busy = [sys.executable, "-c", BUSY]
    with running(server, busy, busy) as (process, *_):
        line = process.stderr.readline()
        address = ("127.0.0.1", int(line.split("address=", 1)[1].split(" ")[0].strip('"').rpartition(":")[2]))
        draining = ThreadPoolExecutor(1).submit(process.stderr.read)  # a log that nobody reads would stop the server
        start = time.monotonic() + 0.2

        def one(number: int) -> tuple[int, float]:
            time.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
            begun = time.monotonic()
            status, _ = deliver(address, bodies[number])
            return status, time.monotonic() - begun

        with ThreadPoolExecutor(64) as clients:
            answers = list(clients.map(one, range(DELIVERIES)))
        took = time.monotonic() - start
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and "bug" not in draining.result()
    times = sorted(seconds for _, seconds in answers)
    p50, p99 = times[DELIVERIES // 2], times[DELIVERIES * 99 // 100]
    rate = f"{DELIVERIES / took:.0f} deliveries/s"
    print(f"{rate}: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, max {1e3 * times[-1]:.1f} ms")
    assert {status for status, _ in answers} == {202}
    assert times[-1] < WITHIN_S
    with contextlib.closing(sqlite3.connect(tmp_path / "inbox.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM deliveries").fetchone() == (DELIVERIES,)
        assert connection.execute("SELECT COUNT(*) FROM tasks WHERE state = 'waiting'").fetchone() == (DELIVERIES,)
