"""The durable queue: a delivery is on disk before the forge is told so, and its tasks are worked until they are done.

Deliveries that arrive together share one commit, so that a slow disk delays them once and not one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from advisor.bot.tasks import Task, from_json, to_json
from advisor.bot.webhooks.database import Database, Execute
from advisor.errors import AdvisorError, ArtifactError

DAY_S = 86_400.0
ATTEMPTS = 5
_SCHEMA = 1
_PRUNED_AT_ONCE = 1000  # rows per commit: a delivery waits for one of them at most

_TABLES = """
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, received REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX deliveries_received ON deliveries (received);
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'working', 'done', 'failed')),
    forge TEXT NOT NULL, repository TEXT NOT NULL, slot TEXT NOT NULL, document BLOB NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    accepted REAL NOT NULL, started REAL, ended REAL, error TEXT
);
CREATE UNIQUE INDEX one_waits_per_slot ON tasks (forge, repository, slot) WHERE state = 'waiting';
CREATE UNIQUE INDEX one_works_per_repository ON tasks (forge, repository) WHERE state = 'working';
CREATE INDEX tasks_started ON tasks (forge, repository, started);
CREATE INDEX tasks_served ON tasks (forge, repository, ended);
CREATE INDEX tasks_ended ON tasks (ended) WHERE ended IS NOT NULL;
"""

# A repository's turn comes at the later of the time its task was accepted and the time it was last worked for: nobody's
# turn moves back while they wait, however much the others ask for.
_NEXT = """
SELECT id, document, attempts FROM tasks AS task
WHERE state = 'waiting' AND not_before <= :now AND NOT EXISTS (
    SELECT 1 FROM tasks WHERE state = 'working' AND forge = task.forge AND repository = task.repository)
ORDER BY MAX(
    accepted,
    COALESCE((SELECT MAX(started) FROM tasks WHERE forge = task.forge AND repository = task.repository), 0),
    COALESCE((SELECT MAX(ended) FROM tasks WHERE forge = task.forge AND repository = task.repository), 0)
), id
LIMIT 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many tasks may wait, altogether and of one repository; how long finished ones and deliveries are kept."""

    waiting: int = 10_000
    waiting_of_one: int = 500
    kept_s: float = 30 * DAY_S
    deliveries_kept_s: float = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class Accepted:
    """The delivery is on disk: so many of its tasks wait in line, so many took the place of an earlier one."""

    queued: int
    replaced: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The delivery, or another with the same body, has been accepted before."""


@dataclass(frozen=True, slots=True)
class Full:
    """Nothing was accepted: too much waits, altogether or of this repository."""

    scope: Literal["queue", "repository"]


Outcome: TypeAlias = Accepted | Duplicate | Full


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A task to work on now, for the `attempt`-th time."""

    id: int
    task: Task
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How many tasks wait and are worked on, and for how many seconds the oldest has been waiting."""

    waiting: int
    working: int
    oldest_waiting_s: float


@dataclass(slots=True)
class _Entry:
    delivery: tuple[str, str] | None  # id and digest; None for what the bot asks of itself
    tasks: Sequence[Task]
    outcome: Outcome | None = None
    error: AdvisorError | None = None


class Inbox:
    """The queue in a state folder, for this process alone; every method may be called from any thread.

    Every method raises OutputError where the disk does not do its part (full, read-only, failing) and ArtifactError
    where the database is damaged: what was asked for has then not happened, and may be asked for again.
    """

    def __init__(self, folder: Path, *, limits: Limits | None = None, now: Callable[[], float] = time.time) -> None:
        """Open or make the queue; tasks that were being worked on when the last server ended wait again.

        Raises UsageError when another server has it open.
        """
        self._limits = limits or Limits()
        self._now = now
        self._database = Database(folder, "inbox", schema=_SCHEMA, tables=_TABLES)
        self._entries: list[_Entry] = []
        self._entries_lock = threading.Lock()
        self._committing = threading.Lock()
        try:
            self._recover()
        except AdvisorError:
            self._database.close()
            raise

    def close(self) -> None:
        """Let the next server have it."""
        self._database.close()

    # ------------------------------------------------------------------------------------------------------- accepting

    def accept(self, delivery: str, digest: str, tasks: Sequence[Task]) -> Outcome:
        """Store a delivery and its tasks, all or none of them; they are on disk when this returns."""
        return self._store(_Entry((delivery, digest), tasks))

    def add(self, tasks: Sequence[Task]) -> Outcome:
        """Store tasks that no delivery asked for."""
        return self._store(_Entry(None, tasks))

    def _store(self, entry: _Entry) -> Outcome:
        with self._entries_lock:
            self._entries.append(entry)
        with self._committing:  # whoever comes first commits for all that wait here
            if entry.outcome is None and entry.error is None:
                with self._entries_lock:
                    batch, self._entries = self._entries, []
                self._store_all(batch)
        if entry.error is not None:
            raise entry.error
        assert entry.outcome is not None
        return entry.outcome

    def _store_all(self, batch: list[_Entry]) -> None:
        try:
            with self._database.transaction() as execute:
                outcomes = [self._stored(execute, entry) for entry in batch]
        except AdvisorError as error:
            for entry in batch:
                entry.error = type(error)(str(error))
            return
        for entry, outcome in zip(batch, outcomes, strict=True):
            entry.outcome = outcome

    def _stored(self, execute: Execute, entry: _Entry) -> Outcome:
        if entry.delivery is not None:
            known = execute("SELECT 1 FROM deliveries WHERE id = ? OR digest = ? LIMIT 1", entry.delivery)
            if known.fetchone() is not None:
                return Duplicate()
        added = [task for task in entry.tasks if _waiting_in_slot(execute, task) is None]
        if full := self._full(execute, added):
            return full
        if entry.delivery is not None:
            execute("INSERT INTO deliveries VALUES (?, ?, ?)", (*entry.delivery, self._now()))
        replaced = sum(self._put(execute, task) for task in entry.tasks)
        return Accepted(len(entry.tasks) - replaced, replaced)

    def _full(self, execute: Execute, added: Sequence[Task]) -> Full | None:
        if not added:
            return None
        count = "SELECT COUNT(*) FROM tasks WHERE state = 'waiting'"
        if execute(count).fetchone()[0] + len(added) > self._limits.waiting:
            return Full("queue")
        for task in added:
            of_one = execute(f"{count} AND forge = ? AND repository = ?", (task.forge, task.repository))
            if of_one.fetchone()[0] + len(added) > self._limits.waiting_of_one:
                return Full("repository")
        return None

    def _put(self, execute: Execute, task: Task) -> bool:
        """Add a task, or let it take the place of one that asks for the same and still waits; True for the latter.

        It keeps the place in the line and the time before which the forge does not want to be asked. The forge orders
        nothing it delivers: an event that happened before the one that waits does not replace it.
        """
        found = _waiting_in_slot(execute, task)
        if found is None:
            values = (task.forge, task.repository, task.slot, to_json(task), self._now())
            execute(
                "INSERT INTO tasks (state, forge, repository, slot, document, accepted) VALUES ('waiting',?,?,?,?,?)",
                values,
            )
            return False
        if not _happened_before(task, found[1]):
            execute("UPDATE tasks SET document = ?, attempts = 0, error = NULL WHERE id = ?", (to_json(task), found[0]))
        return True

    # --------------------------------------------------------------------------------------------------------- working

    def claim(self) -> Claimed | None:
        """The next task, now being worked on; None when nothing is due.

        The oldest goes first, one of a repository at a time, and repositories take turns.
        """
        while True:
            with self._database.transaction() as execute:
                found = execute(_NEXT, {"now": self._now()}).fetchone()
                if found is None:
                    return None
                id, document, attempts = found
                execute(
                    "UPDATE tasks SET state = 'working', attempts = ?, started = ? WHERE id = ?",
                    (attempts + 1, self._now(), id),
                )
            try:
                return Claimed(id=id, task=from_json(document), attempt=attempts + 1)
            except ArtifactError as error:
                self.fail(id, str(error))

    def finish(self, id: int) -> None:
        """The task that was claimed is done."""
        self._end(id, "done", None)

    def fail(self, id: int, error: str) -> None:
        """The task that was claimed cannot be done; `error` says why."""
        self._end(id, "failed", error)

    def retry_later(self, id: int, seconds: float, error: str) -> bool:
        """Let a claimed task wait again for some time; False where that was its last attempt, and it has failed."""
        with self._database.transaction() as execute:
            return self._again(execute, id, self._now() + seconds, f"gave up after {ATTEMPTS} attempts: {error}", error)

    def release(self, id: int) -> None:
        """Give a claimed task back as if it had not been claimed."""
        with self._database.transaction() as execute:
            execute("UPDATE tasks SET attempts = attempts - 1 WHERE id = ?", (id,))
            self._again(execute, id, 0.0, "", None)

    def _end(self, id: int, state: str, error: str | None) -> None:
        with self._database.transaction() as execute:
            ended = execute(
                "UPDATE tasks SET state = ?, ended = ?, error = ? WHERE id = ? AND state = 'working'",
                (state, self._now(), error, id),
            )
            assert ended.rowcount == 1, "only a task that is being worked on can end"

    def _again(self, execute: Execute, id: int, not_before: float, given_up: str, error: str | None) -> bool:
        """Let a task that is worked on wait again, unless it has had its attempts or a later one has its slot."""
        attempts, later = execute(
            "SELECT attempts, (SELECT id FROM tasks WHERE state = 'waiting' AND forge = task.forge"
            " AND repository = task.repository AND slot = task.slot) FROM tasks AS task"
            " WHERE id = ? AND state = 'working'",
            (id,),
        ).fetchone()
        if later is not None:
            execute(
                "UPDATE tasks SET not_before = MAX(not_before, ?), attempts = MAX(attempts, ?) WHERE id = ?",
                (not_before, attempts, later),
            )
            ended = ("done", f"task {later} asks for the same and is newer")
        elif attempts >= ATTEMPTS:
            ended = ("failed", given_up)
        else:
            execute("UPDATE tasks SET state='waiting', not_before=?, error=? WHERE id=?", (not_before, error, id))
            return True
        execute("UPDATE tasks SET state = ?, error = ?, ended = ? WHERE id = ?", (*ended, self._now(), id))
        return later is not None

    def _recover(self) -> None:
        given_up = f"the server ended {ATTEMPTS} times while it worked on this"
        with self._database.transaction() as execute:
            for (id,) in execute("SELECT id FROM tasks WHERE state = 'working'").fetchall():
                self._again(execute, id, 0.0, given_up, "the server ended while it worked on this")

    # ---------------------------------------------------------------------------------------------------- housekeeping

    def depth(self) -> Depth:
        """How much there is to do."""
        with self._database.transaction() as execute:
            waiting, oldest = execute("SELECT COUNT(*), MIN(accepted) FROM tasks WHERE state = 'waiting'").fetchone()
            (working,) = execute("SELECT COUNT(*) FROM tasks WHERE state = 'working'").fetchone()
        age = max(0.0, self._now() - oldest) if waiting else 0.0
        return Depth(waiting=waiting, working=working, oldest_waiting_s=age)

    def prune(self) -> int:
        """Forget tasks that ended, and deliveries that came, longer ago than they are kept; returns how many."""
        now, limits = self._now(), self._limits
        doomed = (
            ("DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE ended < ? LIMIT ?)", limits.kept_s),
            (
                "DELETE FROM deliveries WHERE id IN (SELECT id FROM deliveries WHERE received < ? LIMIT ?)",
                limits.deliveries_kept_s,
            ),
        )
        gone = 0
        for statement, kept_s in doomed:
            count = _PRUNED_AT_ONCE
            while count == _PRUNED_AT_ONCE:
                with self._database.transaction() as execute:
                    count = execute(statement, (now - kept_s, _PRUNED_AT_ONCE)).rowcount
                gone += count
        return gone


def _waiting_in_slot(execute: Execute, task: Task) -> tuple[int, bytes] | None:
    found: tuple[int, bytes] | None = execute(
        "SELECT id, document FROM tasks WHERE state = 'waiting' AND forge = ? AND repository = ? AND slot = ?",
        (task.forge, task.repository, task.slot),
    ).fetchone()
    return found


def _happened_before(task: Task, document: bytes) -> bool:
    try:
        other = from_json(document)
    except ArtifactError:  # of another version: claiming it would fail it, so the new one may have its place
        return False
    return task.occurred is not None and other.occurred is not None and task.occurred < other.occurred
