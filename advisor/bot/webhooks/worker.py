"""Works off the queue: what becomes of a task when the work on it ends well, badly, or not at all."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from advisor.bot.tasks import Task
from advisor.bot.webhooks.inbox import Claimed, Inbox
from advisor.bot.webhooks.logline import Log
from advisor.errors import AdvisorError, ForgeUnavailable, OutputError
from advisor.reports.untrusted import clip

Result = TypeVar("Result")
Handle: TypeAlias = Callable[[Task], None]

BACK_OFF_S = (60.0, 300.0, 1200.0, 3600.0)  # after the first, second... attempt; together an hour and a half
_LONGEST_S = 86_400.0  # however long a forge asks us to stay away
_IDLE_S = 1.0  # a task whose time has come waits for that long at most
_ERROR = 2000  # characters of an error that are kept


class Worker(threading.Thread):
    """Claims one task after the other and lets `handle` do it.

    ForgeUnavailable and OutputError mean that it may work later; the task waits. Any other AdvisorError is an answer:
    the task has failed. Anything else is a bug: its traceback is logged, the task has failed, the next one is claimed.
    """

    def __init__(
        self, inbox: Inbox, handle: Handle, log: Log, *, wake: threading.Condition, name: str, pause_s: float = 5.0
    ) -> None:
        """`wake` is notified when there may be something to do; `pause_s` is the wait after the disk failed."""
        super().__init__(name=name, daemon=True)
        self._inbox, self._handle, self._log = inbox, handle, log
        self._wake, self._pause_s = wake, pause_s
        self._stopping = threading.Event()
        self._current: Claimed | None = None
        self._current_lock = threading.Lock()  # who takes the current task out decides what becomes of it

    def run(self) -> None:
        """Work until told to stop."""
        while not self._stopping.is_set():
            claimed = self._insist(self._inbox.claim)
            if claimed is None:
                with self._wake:
                    if not self._stopping.is_set():
                        self._wake.wait(_IDLE_S)
                continue
            with self._current_lock:
                self._current = claimed
            self._work(claimed)

    def ask_to_stop(self) -> None:
        """Claim nothing more."""
        self._stopping.set()
        with self._wake:
            self._wake.notify_all()

    def stop(self, until: float) -> None:
        """Wait until a time of the monotonic clock for the task in work; then give it back, to be done again."""
        self.ask_to_stop()
        self.join(max(0.0, until - time.monotonic()))
        abandoned = self._take() if self.is_alive() else None
        if abandoned is not None:
            self._inbox.release(abandoned.id)
            self._log.line("task", id=abandoned.id, outcome="waits for the next start", **_told(abandoned.task))

    def _work(self, claimed: Claimed) -> None:
        started = time.monotonic()
        error: BaseException | None = None
        try:
            self._handle(claimed.task)
        except BaseException as raised:  # noqa: BLE001 - whatever it is, the task has an end and the server goes on
            error = raised
        if self._take() is None:
            return
        if error is not None and not isinstance(error, AdvisorError):
            self._log.bug(f"task {claimed.id}", error)
        outcome = self._insist(lambda: self._settle(claimed, error))
        self._log.line(
            "task",
            id=claimed.id,
            **_told(claimed.task),
            attempt=claimed.attempt,
            seconds=f"{time.monotonic() - started:.1f}",
            outcome=outcome or "not recorded, to be done again",
            error=error,
        )

    def _settle(self, claimed: Claimed, error: BaseException | None) -> str:
        if error is None:
            self._inbox.finish(claimed.id)
            return "done"
        words = clip(self._log.redactor.text(str(error)), _ERROR)
        if isinstance(error, ForgeUnavailable | OutputError):
            seconds = _delay_s(claimed.attempt, error)
            again = self._inbox.retry_later(claimed.id, seconds, words)
            return f"again in {seconds:.0f} s" if again else "failed"
        self._inbox.fail(
            claimed.id, words if isinstance(error, AdvisorError) else f"a bug: {type(error).__name__}: {words}"
        )
        return "failed"

    def _take(self) -> Claimed | None:
        with self._current_lock:
            current, self._current = self._current, None
        return current

    def _insist(self, what: Callable[[], Result]) -> Result | None:
        """Do it, however often the disk refuses; None when told to stop meanwhile."""
        while True:
            try:
                return what()
            except AdvisorError as error:
                self._log.line("queue", error=error)
            if self._stopping.wait(self._pause_s):
                return None


def _delay_s(attempt: int, error: AdvisorError) -> float:
    """Our own back-off, or what the forge asks for where that is longer."""
    own = BACK_OFF_S[min(attempt, len(BACK_OFF_S)) - 1]
    asked = error.retry_after_s if isinstance(error, ForgeUnavailable) else None
    return own if asked is None or math.isnan(asked) else min(max(own, asked), _LONGEST_S)


def _told(task: Task) -> dict[str, object]:
    return {
        "kind": task.kind,
        "forge": task.forge,
        "repository": task.repository,
        "number": task.number,
        "verb": task.verb,
    }
