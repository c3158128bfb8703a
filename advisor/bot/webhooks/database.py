"""A SQLite database in a folder that one process owns, with the failures of disks told apart from bugs.

WAL mode with `synchronous=FULL`: every commit waits until the log is on the disk. With NORMAL a power failure could
take the last commits with it, although whoever asked for them has been told that they are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from advisor.errors import ArtifactError, OutputError, UsageError

_LOCKED_S = 2.0  # how long to wait for somebody who looks into the database with a tool


class Execute(Protocol):
    """`sqlite3.Connection.execute` inside of a transaction."""

    def __call__(self, statement: str, parameters: Any = ..., /) -> sqlite3.Cursor:
        """Run one statement."""


class Database:
    """The database `NAME.db` of a folder, readable by its owner only; transactions come one after the other.

    A transaction raises OutputError where the disk does not do its part (full, read-only, failing) and ArtifactError
    where the file is damaged; nothing of it has then happened.
    """

    def __init__(self, folder: Path, name: str, *, schema: int, tables: str) -> None:
        """Open it, or make it with `tables`. Raises UsageError when another process has it open."""
        self._path = folder / f"{name}.db"
        self._using = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, _locked(folder, name))
            with self._telling():
                self._connection = stack.enter_context(
                    contextlib.closing(
                        sqlite3.connect(self._path, timeout=_LOCKED_S, isolation_level=None, check_same_thread=False)
                    )
                )
                self._prepare(schema, tables)
            self._close = stack.pop_all().close

    def close(self) -> None:
        """Let the next process have it; what is asked of it later raises OutputError."""
        with self._using:
            self._closed = True
            self._close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Execute]:
        """All of it or nothing; on the disk when the context ends. Not to be nested."""
        with self._using, self._telling():
            if self._closed:
                raise OutputError("the queue has been closed: the server is stopping")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # of a full disk SQLite rolls back by itself
                    self._connection.execute("ROLLBACK")
                raise

    def _prepare(self, schema: int, tables: str) -> None:
        execute = self._connection.execute
        (mode,) = execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise OutputError(f"{self._path.parent} cannot hold the queue: choose a folder on a local disk")
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.executescript(f"BEGIN IMMEDIATE; {tables} PRAGMA user_version = {schema}; COMMIT;")
        elif version != schema:
            raise ArtifactError(
                f"{self._path} has schema {version}, this advisor reads schema {schema}: use the advisor that wrote it"
            )
        (verdict,) = execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(verdict)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What SQLite says of the disk and of the file is the operator's; what it says of our statements is a bug."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"the queue cannot be written: {error}: see to the disk and the rights of {self._path.parent}"
            ) from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:
                raise
            raise self._damaged(error) from error

    def _damaged(self, what: object) -> ArtifactError:
        return ArtifactError(
            f"the queue {self._path} is damaged ({what}): move it away, start again, and let the forge deliver the"
            " events of the last days once more"
        )


def _locked(folder: Path, name: str) -> int:
    """Descriptor that holds the lock, for as long as it is open; the database is there, if only as an empty file."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(folder / f"{name}.db", os.O_RDWR | os.O_CREAT, 0o600))
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise OutputError(f"{folder} cannot hold the queue: {error.strerror}: choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except BlockingIOError as error:
        holder = os.read(lock, 20).decode("ascii", "replace").strip()
        os.close(lock)
        raise UsageError(
            f"{folder} is in use by another server (process {holder}): stop it, or choose another folder"
        ) from error
    except OSError as error:
        os.close(lock)
        raise OutputError(f"{folder} cannot be locked: {error.strerror}: choose another folder") from error
    return lock
