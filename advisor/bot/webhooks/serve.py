"""`advisor bot serve`: the webhook server and its workers, from the start to an orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from advisor.bot.tasks import Task
from advisor.bot.webhooks.events import parse
from advisor.bot.webhooks.inbox import DAY_S, Full, Inbox, Limits
from advisor.bot.webhooks.listener import Listener
from advisor.bot.webhooks.logline import Log
from advisor.bot.webhooks.reception import Read, Reception
from advisor.bot.webhooks.webhook import WINDOW_S, Secrets
from advisor.bot.webhooks.worker import Handle, Worker
from advisor.errors import AdvisorError, UsageError
from advisor.redact import Redactor

Tick: TypeAlias = Callable[[], Sequence[Task]]

_POLL_S = 0.1  # how often the listener looks for clients that are too slow
_SWITCH_S = 0.0005  # a worker that computes hands the interpreter to who answers a delivery ten times sooner
_ANSWER_S = 5.0  # for the requests that are being answered when the server stops


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve. `state` is the folder of the queue; times in seconds, sizes in bytes.

    `window_s` is how old an event may be. A client has `request_s` to get its request across; `connections` at once
    need up to `max_body` of memory each. `grace_s` is how long the end waits for tasks in work. Port 0 takes any free
    one. TLS is the business of the proxy in front.
    """

    state: Path
    secrets: Secrets
    host: str = "127.0.0.1"
    port: int = 8080
    max_body: int = 5 << 20
    window_s: float = WINDOW_S
    connections: int = 64
    request_s: float = 10.0
    workers: int = 1
    grace_s: float = 30.0
    tick_s: float = 600.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot work."""
        if not self.secrets.github and not self.secrets.gitlab:
            raise UsageError("no webhook secret: a server that cannot tell who delivers does not start")
        for name in ("max_body", "window_s", "connections", "request_s", "workers", "tick_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0")


class Server:
    """The listener, the workers and the ticker around one queue; `address` is where it listens."""

    def __init__(self, options: ServeOptions, handle: Handle, tick: Tick | None, read: Read, log: Log) -> None:
        """Open the queue and the port; raises AdvisorError."""
        self._options, self._tick, self._log = options, tick, log
        self._wake = threading.Condition()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        kept_s = max(options.limits.deliveries_kept_s, options.window_s + DAY_S)
        self.inbox = Inbox(options.state, limits=replace(options.limits, deliveries_kept_s=kept_s))
        self._workers = [
            Worker(self.inbox, handle, log, wake=self._wake, name=f"advisor-bot-worker-{number}")
            for number in range(options.workers)
        ]
        reception = Reception(
            inbox=self.inbox,
            secrets=options.secrets,
            read=read,
            wake=self._wake_one,
            is_working=lambda: all(worker.is_alive() for worker in self._workers),
            log=log,
            max_body=options.max_body,
            window_s=options.window_s,
        )
        try:
            self._listener = self._listening(reception)
        except UsageError:
            self.inbox.close()
            raise
        self.address: tuple[str, int] = self._listener.server_address[:2]  # type: ignore[assignment]

    def start(self, ended: Callable[[], None] = lambda: None) -> None:
        """Serve in threads; `ended` is called should the listener fail."""

        def listen() -> None:
            try:
                self._listener.serve_forever(poll_interval=_POLL_S)
            except BaseException as error:  # noqa: BLE001 - raised again where the server is stopped
                self._failure = error
                ended()

        host, port = self.address
        shown = f"[{host}]" if ":" in host else host
        self._log.line("listening", address=f"http://{shown}:{port}", process=os.getpid())
        for worker in self._workers:
            worker.start()
        self._threads = [
            threading.Thread(target=target, name=f"advisor-bot-{name}", daemon=True)
            for name, target in (("listener", listen), ("ticker", self._keep_house))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Answer what has been asked, let tasks end for a while, give back those that do not.

        Raises what made the listener fail, if it did.
        """
        self._log.line("stopping", grace_s=self._options.grace_s)
        self._stopping.set()
        until = time.monotonic() + self._options.grace_s
        for worker in self._workers:
            worker.ask_to_stop()
        self._listener.stop(_ANSWER_S)
        for worker in self._workers:
            worker.stop(until)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.inbox.close()
        self._log.count_refused()
        self._log.line("stopped")
        if self._failure is not None:
            raise self._failure

    def _listening(self, reception: Reception) -> Listener:
        options = self._options
        try:
            return Listener(
                (options.host, options.port),
                reception.respond,
                connections=options.connections,
                request_s=options.request_s,
                report=self._report,
            )
        except (OSError, OverflowError) as error:
            raise UsageError(f"cannot listen on {options.host} port {options.port}: {error}") from error

    def _report(self, what: BaseException | str) -> None:
        if isinstance(what, str):
            self._log.refused(what)
        else:
            self._log.bug("connection", what)

    def _wake_one(self) -> None:
        with self._wake:
            self._wake.notify()

    def _keep_house(self) -> None:
        """What is due now and then: forgetting what is old, and the work that owners have scheduled."""
        while not self._stopping.is_set():
            try:
                if pruned := self.inbox.prune():
                    self._log.line("pruned", rows=pruned)
                if self._tick is not None:
                    self._put(self._tick())
            except AdvisorError as error:
                if not self._stopping.is_set():
                    self._log.line("tick", error=error)
            except Exception as error:  # noqa: BLE001 - a bug costs one tick and not the schedule
                self._log.bug("tick", error)
            self._stopping.wait(self._options.tick_s)

    def _put(self, tasks: Sequence[Task]) -> None:
        if tasks:
            outcome = self.inbox.add(tasks)
            told = "full, nothing queued" if isinstance(outcome, Full) else "queued"
            self._log.line("tick", tasks=len(tasks), outcome=told)
            self._wake_one()


def serve(options: ServeOptions, handle: Handle, tick: Tick | None = None, *, read: Read = parse) -> None:
    """Serve until SIGTERM or SIGINT; to be called in the main thread. The log goes to stderr.

    `handle` does a task and may raise AdvisorError; called in a worker's thread, again for a task that it had not
    ended when the server did. `tick` names, at the start and every `tick_s`, the tasks that owners have scheduled. A
    task that does not end within `grace_s` is left to the next start; its thread ends with the process. Raises
    UsageError where the port or the state folder is taken, OutputError and ArtifactError where the queue cannot be had.
    """
    secrets = (*options.secrets.github, *options.secrets.gitlab)
    log = Log(sys.stderr, Redactor.of_machine(extra=secrets))
    sys.setswitchinterval(_SWITCH_S)
    with _signalled() as (wait, wake):
        server = Server(options, handle, tick, read, log)
        server.start(ended=wake)
        wait()
        server.stop()


@contextlib.contextmanager
def _signalled() -> Iterator[tuple[Callable[[], object], Callable[[], None]]]:
    """(wait, wake): wait for SIGTERM, SIGINT or a call of `wake`; the handlers before are put back.

    A handler interrupts the main thread anywhere, also where it holds a lock: all it does is write to a pipe.
    """
    reading, writing = os.pipe()

    def wake(signum: int = 0, frame: FrameType | None = None) -> None:
        os.write(writing, b"\0")

    before = {number: signal.signal(number, wake) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: os.read(reading, 1), wake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
