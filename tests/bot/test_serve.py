"""The webhook server over real sockets: who is let in, what is answered, and what outlives a kill."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deliveries import (
    OLD_SECRET,
    SECRET,
    SHA,
    TOKEN,
    deliver,
    github_headers,
    gitlab_headers,
    hub_signature,
    merge_request,
    pull_request,
    send,
)

from advisor.bot.tasks import Task
from advisor.bot.webhooks import listener
from advisor.bot.webhooks.events import parse
from advisor.bot.webhooks.inbox import Limits
from advisor.bot.webhooks.logline import Log
from advisor.bot.webhooks.serve import ServeOptions, Server
from advisor.bot.webhooks.webhook import Secrets
from advisor.bot.webhooks.worker import BACK_OFF_S
from advisor.errors import ForgeRefused, ForgeUnavailable, OutputError, UsageError
from advisor.redact import Redactor

SECRETS = Secrets(github=(OLD_SECRET, SECRET), gitlab=(TOKEN,))


class Running:
    """A server of this process, what it has been told to do, and what it logged."""

    def __init__(self, folder: Path, *, handle=None, tick=None, read=parse, **options) -> None:
        self.done: list[Task] = []
        self.folder = folder
        self.log = io.StringIO()
        self._handle = handle or (lambda task: None)
        self.options = ServeOptions(
            state=folder, port=0, **{"secrets": SECRETS, "grace_s": 5.0, "tick_s": 3600.0, **options}
        )
        log = Log(self.log, Redactor(extra=(*SECRETS.github, *SECRETS.gitlab)))
        self.server = Server(self.options, self._work, tick, read, log)
        self.address = self.server.address
        self.server.start()

    def _work(self, task: Task) -> None:
        self._handle(task)
        self.done.append(task)

    def states(self) -> list[str]:
        return states(self.folder)

    def worked_off(self) -> bool:
        return set(self.states()) <= {"done", "failed"}

    def lines(self, what: str) -> list[str]:
        return [line for line in self.log.getvalue().splitlines() if f"Z {what}" in line]


def states(folder: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(folder / "inbox.db")) as connection:
        return [row[0] for row in connection.execute("SELECT state FROM tasks ORDER BY id")]


def wait_until(holds: Callable[[], object], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def one(**options) -> Running:
        started.append(Running(tmp_path / "state", **options))
        return started[-1]

    yield one
    for running in started:
        running.server.stop()


def raw(address: tuple[str, int], *parts: bytes, pause: float = 0.0, timeout: float = 10.0) -> bytes:
    """What comes back for some bytes, sent part by part; the end of the connection is the end of the answer."""
    with socket.create_connection(address, timeout=timeout) as connection:
        with contextlib.suppress(ConnectionError):  # the server has hung up; what it said before counts
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(65_536):
                answer += more
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def head(*, method: str = "POST", path: str = "/github", version: str = "HTTP/1.1", **headers: str) -> bytes:
    lines = [f"{method} {path} {version}", "Host: bot", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


# ----------------------------------------------------------------------------------------------------------- deliveries


def test_a_delivery_is_acknowledged_and_worked_off(start):
    running = start()
    assert deliver(running.address, pull_request(7), id="abc") == (202, {"status": "accepted"})
    wait_until(lambda: running.done)
    task = running.done[0]
    assert (task.kind, task.forge, task.repository, task.number) == ("examine", "github", "octo/nets", 7)
    assert (task.head_sha, task.installation, task.requested_by) == (SHA, 11, "ada")
    wait_until(running.worked_off)
    (line,) = running.lines("delivery")
    assert "forge=github id=abc event=pull_request repository=octo/nets number=7 answer=202 outcome=accepted" in line
    wait_until(lambda: running.lines("task"))
    assert "kind=examine forge=github repository=octo/nets number=7 attempt=1" in running.lines("task")[0]


def test_a_delivery_of_gitlab(start):
    running = start()
    status, said, _ = send(running.address, "/gitlab", merge_request(), gitlab_headers())
    assert (status, said) == (202, {"status": "accepted"})
    wait_until(lambda: running.done)
    assert (running.done[0].forge, running.done[0].repository) == ("gitlab", "group/sub/nets")


def test_a_ping_and_events_that_ask_for_nothing(start):
    running = start()
    ping = json.dumps({"zen": "Design for failure.", "hook_id": 1}).encode()
    assert deliver(running.address, ping, event="ping") == (200, {"status": "pong"})
    assert deliver(running.address, b"{}", event="star")[1]["status"] == "ignored"
    assert deliver(running.address, pull_request(action="labeled"))[1]["status"] == "ignored"
    assert deliver(running.address, pull_request(action="closed"))[1]["status"] == "ignored"
    assert running.states() == []


def test_a_replay_by_id_by_body_and_by_another_event_name(start):
    running = start()
    body = pull_request()
    assert deliver(running.address, body, id="one") == (202, {"status": "accepted"})
    assert deliver(running.address, body, id="one") == (200, {"status": "duplicate"})
    assert deliver(running.address, body, id="two") == (200, {"status": "duplicate"})
    assert deliver(running.address, pull_request(8), id="one") == (200, {"status": "duplicate"})
    wait_until(running.worked_off)
    assert deliver(running.address, body, id="three") == (200, {"status": "duplicate"})
    assert len(running.states()) == 1


def test_a_replay_after_a_restart(tmp_path):
    body = pull_request()
    for expected in (202, 200):
        running = Running(tmp_path)
        assert deliver(running.address, body)[0] == expected
        running.server.stop()


@pytest.mark.parametrize(("seconds_ago", "status"), [(2 * 86_400, 202), (4 * 86_400, 400), (-240, 202), (-600, 400)])
def test_the_age_of_an_event(start, seconds_ago, status):
    running = start()
    assert deliver(running.address, pull_request(seconds_ago=seconds_ago))[0] == status
    assert len(running.states()) == (status == 202)


def test_a_narrower_window(start):
    running = start(window_s=3600.0)
    assert deliver(running.address, pull_request(seconds_ago=4000))[0] == 400


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "more",
    [
        {"X-Hub-Signature-256": hub_signature(pull_request(), "wrong-secret-0123456789")},
        {"X-Hub-Signature-256": "sha256=" + "0" * 64},
        {"X-Hub-Signature-256": ""},
    ],
)
def test_a_wrong_or_missing_signature(start, more):
    running = start()
    status, said, _ = send(running.address, "/github", (body := pull_request()), github_headers(body) | more)
    assert (status, said) == (401, {"error": "the signature is missing or wrong"})
    assert running.states() == []


def test_the_old_secret_of_an_exchange_still_counts(start):
    running = start()
    body = pull_request()
    headers = github_headers(body) | {"X-Hub-Signature-256": hub_signature(body, OLD_SECRET)}
    assert send(running.address, "/github", body, headers)[0] == 202


def test_a_wrong_or_missing_token_of_gitlab(start):
    running = start()
    for token in ("", "wrong-token-0123456789", SECRET):
        assert send(running.address, "/gitlab", merge_request(), gitlab_headers(**{"X-Gitlab-Token": token}))[0] == 401
    headers = gitlab_headers()
    del headers["X-Gitlab-Token"]
    assert send(running.address, "/gitlab", merge_request(), headers)[0] == 401


def test_an_unsigned_body_is_not_read(start):
    """The answer comes although the body never does."""
    running = start(request_s=30.0)
    started = time.monotonic()
    answer = raw(running.address, head(Content_Type="application/json", Content_Length="1000"), timeout=20)
    assert status_of(answer) == 401 and time.monotonic() - started < 5


def test_an_oversized_body_is_refused_before_it_is_read(start):
    running = start(max_body=1000)
    signed = {"Content_Type": "application/json", "X_Hub_Signature_256": "sha256=" + "0" * 64}
    assert status_of(raw(running.address, head(Content_Length="1001", **signed))) == 413
    assert status_of(raw(running.address, head(Content_Length="99999999999", **signed))) == 413
    assert deliver(running.address, pull_request(note="x" * 1000))[0] == 413


def test_who_sends_a_body_that_nobody_wants_gets_the_answer_and_no_reset(start, monkeypatch):
    monkeypatch.setattr(listener, "_LEFT_S", 10.0)
    running = start(max_body=1000)
    with socket.create_connection(running.address, timeout=10) as connection:
        connection.sendall(head(Content_Type="application/json", Content_Length="500000") + b" " * 100_000)
        assert status_of(connection.recv(100)) == 413
        connection.sendall(b" " * 400_000)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(100):
            pass


def test_who_goes_on_sending_is_hung_up_on(start):
    running = start(max_body=1000)
    with socket.create_connection(running.address, timeout=10) as connection:
        connection.sendall(head(Content_Type="application/json", Content_Length="999999999"))
        with pytest.raises(ConnectionError):
            connection.sendall(b" " * 200_000_000)


def test_a_body_is_asked_for_only_when_it_is_wanted(start):
    running = start()
    body = pull_request()
    headers = github_headers(body) | {"Content-Length": str(len(body)), "Expect": "100-continue"}
    request = head(**{name.replace("-", "_"): value for name, value in headers.items()})
    with socket.create_connection(running.address, timeout=10) as connection:
        connection.sendall(request)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert status_of(connection.recv(1000)) == 202
    unsigned = head(Content_Type="application/json", Content_Length="5", Expect="100-continue")
    assert status_of(raw(running.address, unsigned)) == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "application/json"}, 411),
        ({"Content_Type": "application/json", "Transfer_Encoding": "chunked"}, 411),
        ({"Content_Type": "application/json", "Transfer_Encoding": "chunked", "Content_Length": "5"}, 411),
        ({"Content_Type": "application/json", "Content_Length": "x"}, 400),
        ({"Content_Type": "application/json", "Content_Length": "-5"}, 400),
        ({"Content_Type": "application/json", "Content_Length": "5", "content_length": "6"}, 400),
        ({"Content_Type": "application/x-www-form-urlencoded", "Content_Length": "5"}, 415),
        ({"Content_Length": "5"}, 415),
    ],
)
def test_a_head_that_is_not_a_webhook_s(start, headers, status):
    running = start()
    assert status_of(raw(running.address, head(**headers) + b"5\r\nhello\r\n0\r\n\r\n")) == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/github", 405),
        ("PUT", "/gitlab", 405),
        ("DELETE", "/github", 405),
        ("BREW", "/github", 405),
        ("POST", "/healthz", 405),
        ("GET", "/", 404),
        ("POST", "/", 404),
        ("POST", "/github/", 404),
        ("POST", "/GitHub", 404),
        ("GET", "/../../etc/passwd", 404),
        ("POST", "http://bot/github", 404),
    ],
)
def test_other_methods_and_paths(start, method, path, status):
    running = start()
    answer = raw(running.address, head(method=method, path=path, Content_Length="0"))
    assert status_of(answer) == status
    assert (b"Allow: " in answer) is (status == 405)


def test_a_forge_without_a_secret_has_no_address(start):
    running = start(secrets=Secrets(github=(SECRET,)))
    assert send(running.address, "/gitlab", merge_request(), gitlab_headers())[0] == 404


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"action": 5}', b"[" * 100_000, pull_request(repository="../../etc")],
)
def test_a_signed_body_that_is_no_payload(start, body):
    running = start()
    assert deliver(running.address, body) == (400, {"error": "the body is not what its headers say"})
    assert not running.lines("bug")


def test_a_signed_delivery_without_its_headers(start):
    running = start()
    body = pull_request()
    for name in ("X-GitHub-Event", "X-GitHub-Delivery"):
        headers = github_headers(body)
        del headers[name]
        assert send(running.address, "/github", body, headers)[0] == 400
    hostile = github_headers(body, id="x' OR 1=1 --")
    assert send(running.address, "/github", body, hostile)[0] == 400


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS spoken to a plain port
        b"nonsense\r\n\r\n",
        b"POST /github HTTP/9.9\r\n\r\n",
        b"POST /github HTTP/1.1 and more\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
        b"\r\n\r\n",
        b"\0" * 1000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http(start, request_bytes):
    running = start()
    answer = raw(running.address, request_bytes)
    assert answer == b"" or (400 <= status_of(answer) <= 599 and b"malformed request" in answer)
    assert not running.lines("bug")
    assert deliver(running.address, pull_request())[0] == 202


def test_no_answer_tells_what_the_server_is_made_of(start):
    running = start()
    for request in (head(path="/<script>"), b"nonsense\r\n\r\n", head(method="GET", path="/healthz")):
        answer = raw(running.address, request).lower()
        assert not any(word in answer for word in (b"server:", b"python", b"date:", b"script", b"html"))


def test_health_and_nothing_secret(start):
    busy = threading.Event()
    running = start(handle=lambda task: busy.wait(10))
    status, said, _ = send(running.address, "/healthz", b"", {}, method="GET")
    assert (status, said) == (200, {"status": "ok", "waiting": 0, "working": 0, "oldest_waiting_s": 0.0})
    deliver(running.address, pull_request(1))
    deliver(running.address, pull_request(2))
    wait_until(lambda: "working" in running.states())
    said = send(running.address, "/healthz", b"", {}, method="GET")[1]
    assert (said["waiting"], said["working"]) == (1, 1) and said["oldest_waiting_s"] >= 0
    busy.set()


def test_a_full_queue(start):
    busy = threading.Event()
    running = start(handle=lambda task: busy.wait(10), limits=Limits(waiting=3, waiting_of_one=2))
    deliver(running.address, pull_request(1))
    wait_until(lambda: running.states() == ["working"])
    assert [deliver(running.address, pull_request(number))[0] for number in (2, 3, 4)] == [202, 202, 429]
    other = pull_request(1, repository="octo/b")
    assert [deliver(running.address, pull_request(1, repository=f"octo/{name}"))[0] for name in "bc"] == [202, 503]
    status, said, headers = send(running.address, "/github", (body := pull_request(5)), github_headers(body))
    assert (status, said, headers["retry-after"]) == (503, {"error": "too much is waiting"}, "60")
    busy.set()
    wait_until(running.worked_off)
    assert send(running.address, "/github", body, github_headers(body))[0] == 202  # it was not remembered
    assert deliver(running.address, other)[0] in (200, 202)


def test_a_disk_that_is_full(start):
    running = start()
    connection = running.server.inbox._database._connection
    connection.execute("PRAGMA max_page_count = 1")
    body = pull_request(repository="octo/" + "r" * 400)
    answers = [deliver(running.address, pull_request(n, repository="octo/" + "r" * 400)) for n in range(1, 100)]
    refused = answers.count((503, {"error": "the delivery cannot be stored"}))
    assert refused and refused + answers.count((202, {"status": "accepted"})) == 99
    assert "database or disk is full" in running.log.getvalue()
    connection.execute("PRAGMA max_page_count = 1000000")
    assert deliver(running.address, body)[0] == 202
    wait_until(running.worked_off)
    assert len({task.number for task in running.done}) == 99 - refused + (
        7 not in {t.number for t in running.done[:-1]}
    )


# ----------------------------------------------------------------------------------------------------- slow and many


def test_who_sends_letter_by_letter_is_hung_up_on(start):
    running = start(request_s=1.0)
    started = time.monotonic()
    answer = raw(running.address, *(b"GET /healthz HTTP/1.1\r\nX: ", *([b"a"] * 100)), pause=0.05)
    assert answer == b"" and time.monotonic() - started < 7
    body = pull_request()
    headers = {k.replace("-", "_"): v for k, v in github_headers(body).items()} | {"Content_Length": str(len(body))}
    started = time.monotonic()
    answer = raw(running.address, head(**headers), *(bytes([byte]) for byte in body[:60]), pause=0.05)
    assert b"202" not in answer and time.monotonic() - started < 7
    assert running.states() == []


def test_slow_clients_that_take_every_place_make_room(start):
    running = start(connections=4, request_s=60.0)
    slow = [socket.create_connection(running.address, timeout=10) for _ in range(4)]
    for connection in slow:
        connection.sendall(b"POST /github HTTP/1.1\r\n")
    started = time.monotonic()
    assert deliver(running.address, pull_request())[0] == 202
    assert time.monotonic() - started < 3
    for connection in slow:
        connection.close()


def test_clients_that_vanish_leave_nothing_behind(start):
    running = start(connections=8)
    body = pull_request()
    headers = {k.replace("-", "_"): v for k, v in github_headers(body).items()} | {"Content_Length": str(len(body))}
    for cut in range(0, 400, 10):
        with socket.create_connection(running.address, timeout=10) as connection:
            connection.sendall((head(**headers) + body)[:cut])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets
    assert deliver(running.address, body)[0] == 202
    wait_until(lambda: len(running.server._listener._open) == 0)
    assert not running.lines("bug")


def test_an_answer_that_nobody_waits_for_is_no_lost_delivery(start):
    running = start()
    body = pull_request()
    headers = {k.replace("-", "_"): v for k, v in github_headers(body).items()} | {"Content_Length": str(len(body))}
    with socket.create_connection(running.address, timeout=10) as connection:
        connection.sendall(head(**headers) + body)
    wait_until(lambda: running.done)
    assert deliver(running.address, body) == (200, {"status": "duplicate"})


def test_two_hundred_at_once(start):
    """Every delivery four times, from 200 threads: each is accepted once, and no thread is left over."""
    running = start(connections=16)
    bodies = [pull_request(number, repository=f"octo/{number % 20}") for number in range(1, 201)]
    answers: list[tuple[int, dict]] = []

    def client(number: int) -> None:
        for body in (bodies[number], bodies[(number * 7) % 200], bodies[-number], bodies[(number + 100) % 200]):
            answers.append(deliver(running.address, body))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 800 and {status for status, _ in answers} == {200, 202}
    assert [status for status, _ in answers].count(202) == 200
    wait_until(running.worked_off)
    assert sorted(task.number for task in running.done) == list(range(1, 201))
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "advisor-bot-connection"])


def test_a_flood_of_strangers_is_counted_and_not_written_down(start):
    running = start()
    for _ in range(100):
        assert status_of(raw(running.address, head(path="/admin"))) == 404
    assert len(running.lines("refused")) == 20
    running.server._log.count_refused()
    assert 'more=80 reasons="80 x not found"' in running.lines("refused")[-1]


# -------------------------------------------------------------------------------------------------------------- working


def test_a_delivery_during_the_work_on_its_pull_request(start):
    busy, begun = threading.Event(), threading.Event()

    def handle(task: Task) -> None:
        begun.set()
        busy.wait(10)

    running = start(handle=handle)
    body = pull_request(sha="a" * 40)
    deliver(running.address, body)
    assert begun.wait(10)
    assert deliver(running.address, body) == (200, {"status": "duplicate"})
    for sha in ("b" * 40, "c" * 40):
        assert deliver(running.address, pull_request(sha=sha))[0] == 202
    assert running.states() == ["working", "waiting"]
    busy.set()
    wait_until(running.worked_off)
    assert [task.head_sha for task in running.done] == ["a" * 40, "c" * 40]


def raising(error: BaseException, times: int = 10**6) -> Callable[[Task], None]:
    left = [times]

    def handle(task: Task) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise error

    return handle


@pytest.mark.parametrize("error", [ForgeRefused("GitHub refuses the token"), UsageError("no such script")])
def test_an_answer_that_is_no_is_final(start, error):
    running = start(handle=raising(error))
    deliver(running.address, pull_request())
    wait_until(lambda: running.lines("task"))
    assert running.states() == ["failed"]
    (line,) = running.lines("task")
    assert "outcome=failed" in line and str(error) in line and not running.lines("bug")


@pytest.mark.parametrize(
    ("asked", "waits_s"),
    [(None, BACK_OFF_S[0]), (5.0, BACK_OFF_S[0]), (700.0, 700.0), (1e30, 86_400.0), (float("nan"), BACK_OFF_S[0])],
)
def test_a_forge_that_does_not_answer_is_asked_later(start, asked, waits_s):
    running = start(handle=raising(ForgeUnavailable("no answer", retry_after_s=asked)))
    deliver(running.address, pull_request())
    wait_until(lambda: running.lines("task"))
    assert running.states() == ["waiting"] and f'outcome="again in {waits_s:.0f} s"' in running.lines("task")[0]
    with contextlib.closing(sqlite3.connect(running.folder / "inbox.db")) as connection:
        (not_before,) = connection.execute("SELECT not_before FROM tasks").fetchone()
    assert abs(not_before - time.time() - waits_s) < 10


def test_the_work_s_own_full_disk_is_tried_again(start):
    running = start(handle=raising(OutputError("no space left")))
    deliver(running.address, pull_request())
    wait_until(lambda: running.lines("task"))
    assert running.states() == ["waiting"]


@pytest.mark.parametrize("error", [KeyError("head"), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_a_bug_costs_its_task_and_not_the_server(start, error):
    running = start(handle=raising(error, 1))
    deliver(running.address, pull_request(1))
    deliver(running.address, pull_request(2))
    wait_until(running.worked_off)
    assert running.states() == ["failed", "done"]
    assert running.lines("bug") and "Traceback" in running.log.getvalue()
    assert send(running.address, "/healthz", b"", {}, method="GET")[0] == 200


def test_a_bug_in_reading_is_answered_and_told(start):
    def read(*arguments):
        raise ZeroDivisionError("bad reader")

    running = start(read=read)
    assert deliver(running.address, pull_request()) == (500, {"error": "internal error"})
    assert "ZeroDivisionError: bad reader" in running.log.getvalue()


def test_no_secret_and_no_control_character_reaches_the_log(start):
    running = start(
        handle=raising(UsageError(f"bad\n2026-01-01T00:00:00Z task id=1 {SECRET} {TOKEN} \x1b[2J ghp_{'a' * 36}"))
    )
    deliver(running.address, pull_request())
    send(running.address, "/github", b"{}", github_headers(b"{}") | {"X-Hub-Signature-256": "sha256=" + "1" * 64})
    send(running.address, f"/{TOKEN}", b"{}", {})
    wait_until(lambda: running.lines("task"))
    log = running.log.getvalue()
    assert SECRET not in log and TOKEN not in log and "ghp_a" not in log and "sha256" not in log and "\x1b" not in log
    assert len(running.lines("task")) == 1
    with contextlib.closing(sqlite3.connect(running.folder / "inbox.db")) as connection:
        (error,) = connection.execute("SELECT error FROM tasks").fetchone()
    assert SECRET not in error and "\n" not in error


def test_a_disk_that_fails_while_the_work_ends(start, monkeypatch):
    """What has been done is recorded once the disk is back."""
    running = start()
    worker = running.server._workers[0]
    worker._pause_s = 0.05
    finish, failures = running.server.inbox.finish, iter(range(3))

    def failing(id: int) -> None:
        if next(failures, None) is not None:
            raise OutputError("the queue cannot be written: database or disk is full")
        finish(id)

    monkeypatch.setattr(running.server.inbox, "finish", failing)
    deliver(running.address, pull_request())
    wait_until(running.worked_off)
    assert running.states() == ["done"] and len(running.done) == 1 and len(running.lines("queue")) == 3


def test_what_owners_have_scheduled(start):
    ticks = []

    def tick() -> list[Task]:
        ticks.append(1)
        if len(ticks) == 1:
            raise ForgeUnavailable("no answer")
        if len(ticks) == 2:
            raise KeyError("a bug")
        return [Task(kind="propose", forge="github", repository="octo/nets")]

    running = start(tick=tick, tick_s=0.05)
    wait_until(lambda: running.done)
    assert running.done[0].kind == "propose"
    assert len(running.lines("tick error=")) == 1 and len(running.lines("bug in=tick")) == 1


def test_several_workers(start):
    together = threading.Barrier(3, timeout=10)
    running = start(handle=lambda task: together.wait(), workers=3)
    for name in "abc":
        deliver(running.address, pull_request(repository=f"octo/{name}"))
    wait_until(running.worked_off)
    assert running.states() == ["done"] * 3


# ------------------------------------------------------------------------------------------------------- start and end


def test_a_server_without_secrets_does_not_start(tmp_path):
    with pytest.raises(UsageError, match="no webhook secret"):
        ServeOptions(state=tmp_path, secrets=Secrets())
    with pytest.raises(UsageError, match="workers must be above 0"):
        ServeOptions(state=tmp_path, secrets=SECRETS, workers=0)


def test_a_port_that_is_taken_gives_the_folder_back(start, tmp_path):
    running = start()
    log = Log(io.StringIO(), Redactor())
    for _ in range(2):
        options = ServeOptions(state=tmp_path / "other", secrets=SECRETS, port=running.address[1])
        with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1 port"):
            Server(options, lambda task: None, None, parse, log)


def test_the_end_lets_a_task_end(start):
    begun = threading.Event()

    def handle(task: Task) -> None:
        begun.set()
        time.sleep(0.5)

    running = start(handle=handle)
    deliver(running.address, pull_request())
    assert begun.wait(10)
    running.server.stop()
    assert running.states() == ["done"]
    with pytest.raises(ConnectionError):
        deliver(running.address, pull_request(2))


def test_the_end_gives_back_a_task_that_takes_too_long(start, tmp_path):
    busy, begun = threading.Event(), threading.Event()

    def handle(task: Task) -> None:
        begun.set()
        busy.wait(20)

    running = start(handle=handle, grace_s=0.2)
    deliver(running.address, pull_request())
    assert begun.wait(10)
    running.server.stop()
    assert running.states() == ["waiting"]
    busy.set()
    running.server._workers[0].join(10)
    assert len(running.lines("task")) == 1 and not running.lines("queue")  # its thread says nothing more about it
    again = start()
    wait_until(again.worked_off)
    with contextlib.closing(sqlite3.connect(again.folder / "inbox.db")) as connection:
        assert connection.execute("SELECT state, attempts FROM tasks").fetchall() == [("done", 1)]


SERVER = """
import sys, time
from pathlib import Path
from advisor.bot.webhooks.serve import ServeOptions, serve
from advisor.bot.webhooks.webhook import Secrets
from advisor.errors import AdvisorError
folder, secret, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def handle(task):
    time.sleep(seconds)
    with (folder / "worked.txt").open("a") as file:
        file.write(f"{task.repository} {task.number} {task.head_sha}\\n")

try:
    secrets = Secrets(github=(secret,))
    serve(ServeOptions(state=folder / "state", secrets=secrets, port=0, workers=2, grace_s=0.5), handle)
except AdvisorError as error:
    sys.exit(f"{error.exit_status}: {error}")
"""


class Process:
    """`serve` in a process of its own."""

    def __init__(self, folder: Path, seconds: float, code: str = SERVER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), SECRET, str(seconds)], stderr=subprocess.PIPE, text=True
        )
        self.log = [self.process.stderr.readline()]
        assert "Z listening" in self.log[0], self.log[0]
        port = self.log[0].split("address=", 1)[1].split(" ")[0].strip('"').rpartition(":")[2]
        self.address = ("127.0.0.1", int(port))
        self.reading = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reading.start()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait(20)
        self.reading.join(10)
        self.process.stderr.close()
        return status


def test_a_killed_server_loses_no_accepted_delivery(tmp_path):
    """SIGKILL again and again while deliveries come in: all that was acknowledged is worked off, and recorded once."""
    accepted: list[tuple[str, int]] = []
    number = 0
    for _ in range(4):
        server = Process(tmp_path, 0.05)
        for _ in range(15):
            number += 1
            repository = f"octo/{number % 3}"
            if deliver(server.address, pull_request(number, repository=repository))[0] == 202:
                accepted.append((repository, number))
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    server = Process(tmp_path, 0.0)
    wait_until(lambda: set(states(tmp_path / "state")) == {"done"}, 30)
    assert server.end(signal.SIGTERM) == 0
    assert len(states(tmp_path / "state")) == len(accepted) == 60
    worked = [line.split() for line in (tmp_path / "worked.txt").read_text().splitlines()]
    assert {(repository, int(number)) for repository, number, _ in worked} == set(accepted)
    assert len(worked) <= 60 + 4 * 2  # each kill interrupts two tasks at most


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_order(tmp_path, number):
    server = Process(tmp_path, 60.0)
    assert deliver(server.address, pull_request())[0] == 202
    wait_until(lambda: states(tmp_path / "state") == ["working"])
    started = time.monotonic()
    assert server.end(number) == 0
    assert time.monotonic() - started < 10
    assert states(tmp_path / "state") == ["waiting"]
    log = "".join(server.log)
    assert "Z stopping" in log and "Z stopped" in log and 'outcome="waits for the next start"' in log
    assert "Traceback" not in log and SECRET not in log


def test_a_second_server_on_the_same_folder_is_refused(tmp_path):
    server = Process(tmp_path, 0.0)
    second = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path), SECRET, "0"], capture_output=True, text=True, timeout=30
    )
    assert second.returncode == 1
    assert second.stderr.startswith(
        f"2: {tmp_path / 'state'} is in use by another server (process {server.process.pid})"
    )
    assert deliver(server.address, pull_request())[0] == 202
    assert server.end(signal.SIGTERM) == 0


def test_a_child_of_a_task_does_not_keep_the_folder_from_the_next_server(tmp_path):
    """SIGKILL leaves the children of a task alone; neither the lock nor the port must go on with them."""
    child = "import subprocess; child = subprocess.Popen(['sleep', '30']); "
    code = SERVER.replace(
        "time.sleep(seconds)", child + "(folder / 'child.txt').write_text(f'{child.pid}\\n'); child.wait()"
    )
    server = Process(tmp_path, 0.0, code)
    assert deliver(server.address, pull_request())[0] == 202
    told = tmp_path / "child.txt"
    wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
    server.process.kill()
    server.process.wait(20)
    try:
        again = Process(tmp_path, 0.0)
        wait_until(lambda: states(tmp_path / "state") == ["done"])
        assert again.end(signal.SIGTERM) == 0
    finally:
        os.kill(int(told.read_text()), signal.SIGKILL)
    server.reading.join(10)
    server.process.stderr.close()


def test_a_listener_that_fails_ends_the_server(tmp_path, monkeypatch):
    running = Running(tmp_path / "state")
    failed = threading.Event()
    log = Log(io.StringIO(), Redactor())
    server = Server(ServeOptions(state=tmp_path / "b", secrets=SECRETS, port=0), lambda task: None, None, parse, log)

    def broken() -> None:
        raise ZeroDivisionError("a bug of the listener")

    monkeypatch.setattr(server._listener, "service_actions", broken)
    server.start(ended=failed.set)
    assert failed.wait(10)
    with pytest.raises(ZeroDivisionError, match="a bug of the listener"):
        server.stop()
    running.server.stop()


def test_a_system_without_threads_costs_one_connection(start, monkeypatch):
    running = start(connections=2)
    begin, failures = threading.Thread.start, iter(range(5))

    def starting(thread: threading.Thread) -> None:
        if thread.name == "advisor-bot-connection" and next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    for _ in range(5):
        assert raw(running.address, head(method="GET", path="/healthz")) == b""
    assert deliver(running.address, pull_request())[0] == 202


def test_a_log_that_takes_nothing_stops_nobody(start, monkeypatch):
    running = start()
    kept = running.server._log.stream
    reading, writing = os.pipe()
    os.close(reading)
    running.server._log.stream = os.fdopen(writing, "w")
    assert deliver(running.address, pull_request())[0] == 202
    wait_until(running.worked_off)
    wait_until(lambda: running.server._log._lost >= 2)
    with contextlib.suppress(BrokenPipeError):
        running.server._log.stream.close()
    running.server._log.stream = kept
    deliver(running.address, pull_request(8))
    wait_until(lambda: running.lines("log lost="))


def test_ipv6(start):
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    running = start(host="::1")
    assert deliver(running.address, pull_request())[0] == 202
    assert "http://[::1]:" in running.lines("listening")[0]


def test_a_keep_alive_client_is_told_that_the_connection_ends(start):
    running = start()
    client = http.client.HTTPConnection(*running.address, timeout=10)
    client.request("GET", "/healthz", headers={"Connection": "keep-alive"})
    answer = client.getresponse()
    assert answer.read() and answer.getheader("Connection") == "close"
    client.close()


def test_the_answer_to_head_has_no_body(start):
    running = start()
    assert raw(running.address, head(method="HEAD", path="/healthz")).endswith(b"\r\n\r\n")


def test_serving_leaves_no_descriptor_behind(start):
    running = start()
    deliver(running.address, pull_request())
    wait_until(lambda: not running.server._listener._open)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        deliver(running.address, pull_request(number + 10))
        raw(running.address, b"nonsense\r\n\r\n")
    wait_until(lambda: not running.server._listener._open)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
