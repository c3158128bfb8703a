"""The durable queue: what it keeps, what it hands out, and what happens when the disk or the process fails."""

from __future__ import annotations

import datetime
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.bot import tasks
from advisor.bot.tasks import Task, tasks_of
from advisor.bot.webhooks.commands import Command
from advisor.bot.webhooks.event_types import CommandGiven, Ignored, Ping, PullRequestChanged, PullRequestClosed, Pushed
from advisor.bot.webhooks.inbox import ATTEMPTS, DAY_S, Accepted, Duplicate, Full, Inbox, Limits
from advisor.errors import ArtifactError, OutputError, UsageError


class Clock:
    def __init__(self) -> None:
        self.time = 1_790_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(tmp_path: Path, clock: Clock) -> Iterator[Inbox]:
    inbox = Inbox(tmp_path, now=clock)
    yield inbox
    inbox.close()


def examine(number: int = 1, *, repository: str = "octo/nets", sha: str = "a" * 40, at: float | None = None) -> Task:
    occurred = None if at is None else datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    return Task(kind="examine", forge="github", repository=repository, number=number, head_sha=sha, occurred=occurred)


_deliveries = iter(range(10**9))


def accept(inbox: Inbox, *asked: Task):
    number = next(_deliveries)
    return inbox.accept(f"github:{number}", f"digest {number}", asked)


def rows(folder: Path) -> list[tuple]:
    with sqlite3.connect(folder / "inbox.db") as connection:
        found = connection.execute("SELECT id, state, attempts, error FROM tasks ORDER BY id").fetchall()
    connection.close()
    return found


# ------------------------------------------------------------------------------------------------------------ accepting


def test_a_delivery_is_known_by_its_id_and_by_its_body(inbox):
    assert inbox.accept("github:1", "body", [examine()]) == Accepted(1, 0)
    assert inbox.accept("github:1", "another body", [examine(2)]) == Duplicate()
    assert inbox.accept("github:2", "body", [examine(2)]) == Duplicate()
    assert inbox.accept("github:2", "another body", [examine(2)]) == Accepted(1, 0)  # a refused replay poisons nothing
    assert inbox.depth().waiting == 2


def test_what_was_accepted_outlives_the_server(tmp_path):
    with_everything = Task(
        kind="command", forge="gitlab", repository="a/b/c", number=3, branch="b", head_sha="f" * 40, installation=9,
        requested_by="ada", comment=12, verb="optimize", argument="x", on_issue=True,
        occurred=datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.timezone.utc),
    )  # fmt: skip
    inbox = Inbox(tmp_path)
    inbox.accept("gitlab:1", "body", [with_everything])
    inbox.close()
    inbox = Inbox(tmp_path)
    assert inbox.accept("gitlab:1", "body", [with_everything]) == Duplicate()
    assert inbox.claim().task == with_everything
    inbox.close()


def test_the_commit_of_a_delivery_is_on_the_disk(tmp_path):
    """Another connection, which sees what is committed only, sees the task as soon as accept returns."""
    inbox = Inbox(tmp_path)
    accept(inbox, examine())
    assert [row[1] for row in rows(tmp_path)] == ["waiting"]
    assert inbox._database._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert inbox._database._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    inbox.close()


def test_a_later_commit_takes_the_place_of_one_that_waits(inbox, clock):
    accept(inbox, examine(sha="a" * 40))
    clock.time += 5
    accept(inbox, examine(repository="octo/other"))
    clock.time += 5
    assert accept(inbox, examine(sha="b" * 40)) == Accepted(0, 1)
    first = inbox.claim()
    assert (first.task.repository, first.task.head_sha) == ("octo/nets", "b" * 40)  # in the place of the first
    assert inbox.depth().waiting == 1


def test_an_event_that_arrives_late_does_not_replace_a_later_one(inbox, clock):
    accept(inbox, examine(sha="b" * 40, at=clock.time))
    assert accept(inbox, examine(sha="a" * 40, at=clock.time - 60)) == Accepted(0, 1)
    assert inbox.claim().task.head_sha == "b" * 40


def test_a_task_in_work_is_not_replaced(inbox):
    accept(inbox, examine(sha="a" * 40))
    first = inbox.claim()
    assert accept(inbox, examine(sha="b" * 40)) == Accepted(1, 0)
    assert inbox.claim() is None  # one of a repository at a time
    inbox.finish(first.id)
    assert inbox.claim().task.head_sha == "b" * 40


def test_other_pull_requests_kinds_and_forges_are_other_tasks(inbox):
    maintain = Task(kind="maintain", forge="github", repository="octo/nets")
    on_branch = Task(kind="maintain", forge="github", repository="octo/nets", branch="main")
    on_gitlab = Task(kind="examine", forge="gitlab", repository="octo/nets", number=1)
    for task in (examine(1), examine(2), maintain, on_branch, on_gitlab):
        assert accept(inbox, task) == Accepted(1, 0)


def command(by: str = "ada", verb: str = "optimize", comment: int = 1) -> Task:
    return Task(
        kind="command", forge="github", repository="octo/nets", number=1, verb=verb, requested_by=by, comment=comment
    )


def test_a_stranger_s_command_does_not_replace_an_owner_s(inbox):
    accept(inbox, command("owner"))
    assert accept(inbox, command("stranger")) == Accepted(1, 0)
    assert accept(inbox, command("owner", "rebase")) == Accepted(1, 0)
    assert accept(inbox, command("owner", comment=2)) == Accepted(0, 1)


def test_the_same_command_twice_in_one_comment_is_one_task(inbox):
    assert accept(inbox, command(), command()) == Accepted(1, 1)


def test_a_full_queue_accepts_nothing_of_a_delivery(tmp_path):
    inbox = Inbox(tmp_path, limits=Limits(waiting=4, waiting_of_one=2))
    accept(inbox, examine(1), examine(2))
    assert inbox.accept("github:x", "x", [examine(3)]) == Full("repository")
    accept(inbox, examine(1, repository="octo/b"), examine(1, repository="octo/c"))
    assert inbox.accept("github:x", "x", [examine(1, repository="octo/d")]) == Full("queue")
    assert accept(inbox, examine(1, sha="c" * 40)) == Accepted(0, 1)  # needs no room
    inbox.claim()
    assert inbox.accept("github:x", "x", [examine(1, repository="octo/d")]) == Accepted(1, 0)  # was not remembered
    inbox.close()


def test_tasks_without_a_delivery(inbox):
    schedule = Task(kind="propose", forge="github", repository="octo/nets")
    assert inbox.add([schedule]) == Accepted(1, 0)
    assert inbox.add([schedule]) == Accepted(0, 1)
    assert inbox.add([]) == Accepted(0, 0)


def test_deliveries_that_come_together_share_a_commit(tmp_path, monkeypatch):
    """A disk that takes 50 ms for a commit, and 40 deliveries at once: 2 s one after the other."""
    inbox = Inbox(tmp_path)
    transaction = inbox._database.transaction
    commits = []

    def slow(*arguments):
        commits.append(1)
        time.sleep(0.05)
        return transaction(*arguments)

    monkeypatch.setattr(inbox._database, "transaction", slow)
    threads = [threading.Thread(target=accept, args=(inbox, examine(number))) for number in range(1, 41)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 1.0 and len(commits) < 20
    monkeypatch.undo()
    assert inbox.depth().waiting == 40
    inbox.close()


# -------------------------------------------------------------------------------------------------------------- working


def test_repositories_take_turns_and_the_oldest_of_each_goes_first(inbox, clock):
    for number in range(1, 4):
        clock.time += 1
        accept(inbox, examine(number, repository="busy/one"))
    clock.time += 1
    accept(inbox, examine(9, repository="quiet/one"))
    order = []
    while claimed := inbox.claim():
        clock.time += 60
        order.append((claimed.task.repository, claimed.task.number))
        inbox.finish(claimed.id)
    assert order == [("busy/one", 1), ("quiet/one", 9), ("busy/one", 2), ("busy/one", 3)]


def test_newcomers_without_end_do_not_starve_who_waits(inbox, clock):
    accept(inbox, examine(1, repository="old/one"))
    inbox.finish(inbox.claim().id)
    clock.time += 1
    accept(inbox, examine(2, repository="old/one"))
    served = []
    for number in range(10):
        clock.time += 1
        accept(inbox, examine(1, repository=f"new/{number}"))
        claimed = inbox.claim()
        served.append(claimed.task.repository)
        inbox.finish(claimed.id)
    assert "old/one" in served[:2]


def test_two_workers_never_have_the_same_repository(inbox):
    accept(inbox, examine(1), examine(2), examine(1, repository="octo/b"))
    assert {inbox.claim().task.repository, inbox.claim().task.repository} == {"octo/nets", "octo/b"}
    assert inbox.claim() is None


def test_a_task_that_waits_for_its_time(inbox, clock):
    accept(inbox, examine())
    assert inbox.retry_later(inbox.claim().id, 60, "rate limit")
    clock.time += 59
    assert inbox.claim() is None
    clock.time += 2
    again = inbox.claim()
    assert again.attempt == 2
    inbox.finish(again.id)


def test_a_later_commit_waits_as_long_as_the_forge_asked(inbox, clock):
    accept(inbox, examine(sha="a" * 40))
    inbox.retry_later(inbox.claim().id, 60, "rate limit")
    accept(inbox, examine(sha="b" * 40))
    assert inbox.claim() is None
    clock.time += 61
    assert inbox.claim().task.head_sha == "b" * 40


def test_a_task_that_would_wait_again_makes_room_for_a_later_one(inbox, clock, tmp_path):
    accept(inbox, examine(sha="a" * 40))
    first = inbox.claim()
    accept(inbox, examine(sha="b" * 40))
    assert inbox.retry_later(first.id, 60, "rate limit")
    assert inbox.claim() is None
    clock.time += 61
    assert inbox.claim().task.head_sha == "b" * 40
    assert rows(tmp_path)[0][1:] == ("done", 1, "task 2 asks for the same and is newer")


def test_attempts_come_to_an_end(inbox, clock, tmp_path):
    accept(inbox, examine())
    again = [inbox.retry_later(inbox.claim().id, 0, "GitHub does not answer") for _ in range(ATTEMPTS)]
    assert again == [True] * (ATTEMPTS - 1) + [False]
    assert inbox.claim() is None
    assert rows(tmp_path)[0][1:] == ("failed", 5, "gave up after 5 attempts: GitHub does not answer")


def test_a_failed_task_keeps_its_reason_and_a_new_delivery_is_a_new_task(inbox, tmp_path):
    accept(inbox, examine())
    inbox.fail(inbox.claim().id, "no such repository")
    assert rows(tmp_path)[0][1:] == ("failed", 1, "no such repository")
    assert accept(inbox, examine()) == Accepted(1, 0)


def test_only_a_task_in_work_can_end(inbox):
    accept(inbox, examine())
    claimed = inbox.claim()
    inbox.finish(claimed.id)
    with pytest.raises(AssertionError):
        inbox.finish(claimed.id)


def test_giving_a_task_back_costs_no_attempt(inbox):
    accept(inbox, examine())
    for _ in range(3 * ATTEMPTS):
        claimed = inbox.claim()
        assert claimed.attempt == 1
        inbox.release(claimed.id)


def test_a_task_in_work_when_the_server_died_waits_again_five_times(tmp_path):
    inbox = Inbox(tmp_path)
    accept(inbox, examine())
    for attempt in range(1, ATTEMPTS + 1):
        assert inbox.claim().attempt == attempt
        inbox.close()
        inbox = Inbox(tmp_path)
    assert inbox.claim() is None
    inbox.close()
    assert rows(tmp_path)[0][1:] == ("failed", 5, "the server ended 5 times while it worked on this")


def test_a_task_that_kills_the_server_does_not_live_on_in_its_successors(tmp_path):
    inbox = Inbox(tmp_path)
    accept(inbox, examine(sha="0" * 40))
    for number in range(1, ATTEMPTS + 1):
        assert inbox.claim().attempt == number
        accept(inbox, examine(sha=str(number) * 40))
        inbox.close()
        inbox = Inbox(tmp_path)
    assert inbox.claim().attempt == ATTEMPTS + 1
    inbox.close()
    Inbox(tmp_path).close()
    assert rows(tmp_path)[-1][1] == "failed"


def test_a_stored_task_that_this_version_cannot_read_fails_and_the_next_one_goes_on(inbox, tmp_path):
    accept(inbox, examine(1))
    accept(inbox, examine(1, repository="octo/b"))
    with sqlite3.connect(tmp_path / "inbox.db") as connection:
        connection.execute("UPDATE tasks SET document = ? WHERE id = 1", (json.dumps({"version": 9, "task": {}}),))
    connection.close()
    assert inbox.claim().task.repository == "octo/b"
    assert rows(tmp_path)[0][1] == "failed"


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_second_server_is_told_who_has_the_folder(tmp_path):
    inbox = Inbox(tmp_path)
    with pytest.raises(UsageError, match=rf"in use by another server \(process {os.getpid()}\)"):
        Inbox(tmp_path)
    inbox.close()
    Inbox(tmp_path).close()


def test_the_lock_goes_with_a_process_that_is_killed(tmp_path):
    code = (
        f"from pathlib import Path; from advisor.bot.webhooks.inbox import Inbox; i = Inbox(Path({str(tmp_path)!r}));"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code + "print('open', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(UsageError, match="in use"):
            Inbox(tmp_path)
        other.kill()
    Inbox(tmp_path).close()


def test_only_the_owner_can_read_the_queue(tmp_path):
    inbox = Inbox(tmp_path / "state")
    accept(inbox, examine())
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state").iterdir())
    inbox.close()


def test_a_full_disk_accepts_nothing_and_loses_nothing(inbox, tmp_path):
    accept(inbox, examine(1))
    connection = inbox._database._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite says of it what it says of a full disk
    big = Task(kind="examine", forge="github", repository="octo/b", number=1, branch="b" * 9000)
    with pytest.raises(OutputError, match=r"cannot be written: database or disk is full: see to the disk"):
        inbox.accept("github:big", "big", [big])
    connection.execute("PRAGMA max_page_count = 1000000")
    assert inbox.accept("github:big", "big", [big]) == Accepted(1, 0)
    assert inbox.depth().waiting == 2


def test_a_disk_that_is_full_while_deliveries_come_together_fails_all_of_them(inbox):
    inbox._database._connection.execute("PRAGMA max_page_count = 1")
    errors = []

    def one(number: int) -> None:
        try:
            accept(inbox, Task(kind="examine", forge="github", repository="o/r", number=number, branch="b" * 9000))
        except OutputError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8
    inbox._database._connection.execute("PRAGMA max_page_count = 1000000")
    assert inbox.depth().waiting == 0
    assert accept(inbox, examine()) == Accepted(1, 0)


def test_a_file_that_cannot_grow_accepts_nothing(tmp_path):
    """The kernel refuses the write (RLIMIT_FSIZE): the real way of a full quota."""
    code = f"""
import resource, signal
from pathlib import Path
from advisor.bot.webhooks.inbox import Inbox
from advisor.bot.tasks import Task
from advisor.errors import OutputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
inbox = Inbox(Path({str(tmp_path)!r}))
inbox.accept("a", "a", [Task(kind="maintain", forge="github", repository="o/a")])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
refused = accepted = 0
for number in range(60):
    try:
        task = Task(kind="maintain", forge="github", repository="o/r", branch=str(number))
        inbox.accept(str(number), str(number), [task])
        accepted += 1
    except OutputError:
        refused += 1
print(accepted, refused)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    accepted, refused = map(int, done.stdout.split())
    assert refused > 0
    inbox = Inbox(tmp_path)
    assert inbox.depth().waiting == 1 + accepted  # what was accepted, and nothing of what was refused
    inbox.close()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another folder"):
        Inbox(tmp_path / "file" / "state")


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\0" + bytes(range(256)) * 40])
def test_a_file_that_is_no_database(tmp_path, content):
    (tmp_path / "inbox.db").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"is damaged .*move it away"):
        Inbox(tmp_path)
    with pytest.raises(ArtifactError):  # and the lock has been given back
        Inbox(tmp_path)
    assert (tmp_path / "inbox.db").read_bytes() == content


def test_a_database_that_is_damaged_at_some_pages(tmp_path):
    inbox = Inbox(tmp_path)
    for number in range(1, 200):
        accept(inbox, examine(number))
    inbox.close()
    content = bytearray((tmp_path / "inbox.db").read_bytes())
    content[4096:-4096] = os.urandom(len(content) - 8192)
    (tmp_path / "inbox.db").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        Inbox(tmp_path)


def test_a_database_that_is_damaged_while_it_is_open(tmp_path):
    inbox = Inbox(tmp_path)
    for number in range(1, 200):
        accept(inbox, examine(number))
    inbox._database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with (tmp_path / "inbox.db").open("r+b") as file:
        file.write(os.urandom((tmp_path / "inbox.db").stat().st_size))
    inbox._database._connection.execute("PRAGMA cache_size = 0")
    inbox._database._connection.execute("PRAGMA shrink_memory")
    with pytest.raises((ArtifactError, OutputError)):
        accept(inbox, examine(1000))
    inbox.close()


def test_a_database_of_another_version(tmp_path):
    Inbox(tmp_path).close()
    with sqlite3.connect(tmp_path / "inbox.db") as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(ArtifactError, match="schema 2, this advisor reads schema 1"):
        Inbox(tmp_path)


def test_a_closed_queue_says_so(tmp_path):
    inbox = Inbox(tmp_path)
    inbox.close()
    with pytest.raises(OutputError, match="server is stopping"):
        inbox.claim()


def test_what_is_old_is_forgotten(inbox, clock, tmp_path):
    inbox.accept("github:1", "one", [examine(1)])
    inbox.finish(inbox.claim().id)
    accept(inbox, examine(2))  # waits, however old it gets
    clock.time += 29 * DAY_S
    assert inbox.prune() == 0
    clock.time += 2 * DAY_S
    assert inbox.prune() == 3
    assert [row[1] for row in rows(tmp_path)] == ["waiting"]
    assert inbox.accept("github:1", "one", [examine(1)]) == Accepted(1, 0)


def test_more_than_one_portion_is_forgotten(inbox, clock):
    for start in range(0, 2500, 50):
        inbox.accept(f"d{start}", f"b{start}", [examine(number, repository="o/r") for number in range(1, 9)])
        for _ in range(8):
            inbox.finish(inbox.claim().id)
    clock.time += 31 * DAY_S
    assert inbox.prune() == 50 + 400
    assert inbox.prune() == 0


def test_a_long_queue_is_handed_out_quickly(tmp_path):
    inbox = Inbox(tmp_path, limits=Limits(waiting=20_000))
    for start in range(100):
        inbox.accept(f"d{start}", f"b{start}", [examine(number, repository=f"o/{start}") for number in range(1, 101)])
    started = time.monotonic()
    for _ in range(10):
        inbox.claim()
    per_claim = (time.monotonic() - started) / 10
    print(f"{1e3 * per_claim:.1f} ms to claim one of 10,000")
    assert per_claim < 0.5
    inbox.close()


def test_any_sequence_of_work_and_death_does_every_task_and_never_two_of_a_repository(tmp_path):
    """A random walk, with a model of what must be done: the newest commit of every pull request."""
    chance, clock = random.Random(6), Clock()
    inbox = Inbox(tmp_path, now=clock)
    newest: dict[tuple[str, int], str] = {}
    worked: dict[tuple[str, int], str] = {}
    claims: list = []
    for step in range(1500):
        clock.time += 1
        action = chance.choices(("accept", "claim", "finish", "later", "die"), (6, 4, 4, 1, 0.1))[0]
        if action == "accept":
            key = (f"o/{chance.randrange(4)}", chance.randrange(1, 4))
            newest[key] = f"{step:040d}"
            accept(inbox, examine(key[1], repository=key[0], sha=newest[key], at=clock.time))
        elif action == "claim" and (claimed := inbox.claim()):
            assert claimed.task.repository not in {other.task.repository for other in claims}
            claims.append(claimed)
        elif action == "finish" and claims:
            claimed = claims.pop(chance.randrange(len(claims)))
            worked[claimed.task.repository, claimed.task.number] = claimed.task.head_sha
            inbox.finish(claimed.id)
        elif action == "later" and claims and claims[-1].attempt < 3:
            inbox.retry_later(claims.pop().id, 5, "later")
        elif action == "die":
            claims.clear()
            inbox.close()
            inbox = Inbox(tmp_path, now=clock)
    for claimed in claims:
        inbox.release(claimed.id)
    clock.time += 100
    while claimed := inbox.claim():
        worked[claimed.task.repository, claimed.task.number] = claimed.task.head_sha
        inbox.finish(claimed.id)
    inbox.close()
    assert "failed" not in {row[1] for row in rows(tmp_path)}
    assert worked == newest


# ---------------------------------------------------------------------------------------------------------------- tasks

ORIGIN = {"delivery": "1", "repository": "octo/nets", "installation": 4, "sender": "ada", "sender_is_bot": False}
BY_BOT = {**ORIGIN, "sender_is_bot": True}
CHANGED = {"number": 7, "change": "opened", "head_sha": "a" * 40, "base_ref": "main", "draft": False}
PUSHED = {"before": "0" * 40, "after": "a" * 40}


@pytest.mark.parametrize(
    ("event", "kinds"),
    [
        (PullRequestChanged(**ORIGIN, **CHANGED, head_ref="faster"), ["examine"]),
        (PullRequestChanged(**BY_BOT, **CHANGED, head_ref="dependency"), ["examine"]),
        (PullRequestChanged(**ORIGIN, **CHANGED, head_ref="advisor/sdpa-1"), ["examine"]),
        (PullRequestChanged(**BY_BOT, **CHANGED, head_ref="advisor/sdpa-1"), []),
        (PullRequestClosed(**ORIGIN, number=7, merged=True, head_ref="advisor/sdpa-1"), ["maintain"]),
        (PullRequestClosed(**ORIGIN, number=7, merged=True, head_ref="faster"), []),
        (Pushed(**ORIGIN, **PUSHED, branch="main", deleted=False), ["maintain"]),
        (Pushed(**ORIGIN, **PUSHED, branch="main", deleted=True), []),
        (Pushed(**BY_BOT, **PUSHED, branch="advisor/sdpa-1", deleted=False), []),
        (Ping(delivery="1"), []),
        (Ignored(delivery="1", reason="-"), []),
    ],
)
def test_what_an_event_asks_for(event, kinds):
    assert [task.kind for task in tasks_of("github", event)] == kinds


def test_an_examination_knows_its_commit_and_where_it_comes_from():
    (task,) = tasks_of("github", PullRequestChanged(**ORIGIN, **CHANGED, head_ref="faster"))
    assert task == Task(
        kind="examine", forge="github", repository="octo/nets", number=7, branch="faster", head_sha="a" * 40,
        installation=4, requested_by="ada",
    )  # fmt: skip


def test_every_command_of_a_comment_is_a_task_and_what_is_unknown_asks_for_help():
    given = (
        Command(verb="optimize", argument="sdpa"),
        Command(verb="rebase", known=False),
        Command(verb="", known=False),
    )
    event = CommandGiven(**ORIGIN, number=7, comment=5, author="ada", is_pull_request=False, commands=given)
    found = tasks_of("gitlab", event)
    assert [(task.kind, task.verb, task.argument, task.comment, task.on_issue) for task in found] == [
        ("command", "optimize", "sdpa", 5, True),
        ("command", "help", None, 5, True),
        ("command", "help", None, 5, True),
    ]


@pytest.mark.parametrize(
    "document", [b"", b"{}", b"\xff", b'{"version": 1}', b'{"version": 1, "task": {"kind": "delete"}}', b"[" * 5000]
)
def test_a_document_that_is_no_task(document):
    with pytest.raises(ArtifactError):
        tasks.from_json(document)
