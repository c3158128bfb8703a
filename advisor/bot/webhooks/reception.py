"""What the server says to a request: who is let in, and when a delivery counts as accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

from advisor.bot.tasks import ForgeKind, tasks_of
from advisor.bot.webhooks import webhook
from advisor.bot.webhooks.event_types import Event, Ignored, Ping
from advisor.bot.webhooks.inbox import Accepted, Duplicate, Full, Inbox, Outcome
from advisor.bot.webhooks.listener import Answer, Request
from advisor.bot.webhooks.logline import Log
from advisor.bot.webhooks.webhook import Refusal, Secrets
from advisor.errors import AdvisorError, UsageError

Read: TypeAlias = Callable[[ForgeKind, Mapping[str, str], bytes], Event | Ignored]

_HOOKS: Mapping[str, ForgeKind] = {"/github": "github", "/gitlab": "gitlab"}
_HEALTH = "/healthz"
_RETRY = {"Retry-After": "60"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """Answers requests. 202 is said of a delivery that is on disk, 200 of one that asks for nothing or came before.

    `read` understands an authentic body and raises UsageError where it is none; `wake` is called when there is
    something to do; `is_working` says whether anybody does it. Sizes in bytes, times in seconds.
    """

    inbox: Inbox
    secrets: Secrets
    read: Read
    wake: Callable[[], None]
    is_working: Callable[[], bool]
    log: Log
    max_body: int
    window_s: float
    now: Callable[[], float] = time.time

    def respond(self, request: Request) -> Answer:
        """The answer to a request; whatever goes wrong has one, and it names no cause that helps an attacker."""
        try:
            return self._routed(request)
        except Refusal as refusal:
            path = request.path if request.path in _HOOKS else None
            self.log.refused(refusal.words, answer=refusal.status.value, path=path)
            headers = (
                {"Allow": refusal.words.partition(" ")[0]} if refusal.status is HTTPStatus.METHOD_NOT_ALLOWED else {}
            )
            return Answer(status=refusal.status, body={"error": refusal.words}, headers=headers)
        except (ConnectionError, TimeoutError):
            raise  # the client's, told by the listener
        except Exception as error:  # noqa: BLE001 - a bug ends one request, and its sender learns that it was lost
            self.log.bug("request", error)
            return Answer(status=HTTPStatus.INTERNAL_SERVER_ERROR, body={"error": "internal error"})

    def _routed(self, request: Request) -> Answer:
        if request.path == _HEALTH:
            _only("GET", request)
            return self._health()
        forge = _HOOKS.get(request.path)
        if forge is None or not self.secrets.of(forge):
            raise Refusal(HTTPStatus.NOT_FOUND, "not found")
        _only("POST", request)
        return self._delivered(forge, request)

    def _delivered(self, forge: ForgeKind, request: Request) -> Answer:
        started = time.monotonic()
        headers = request.headers
        length = webhook.body_length(headers, limit=self.max_body)
        webhook.check_head(forge, headers, self.secrets)
        body = request.read(length)
        webhook.check_body(forge, headers, body, self.secrets, now=self.now())
        try:
            event = self.read(forge, headers, body)
        except UsageError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, "the body is not what its headers say") from error
        answer, particulars = self._heard(forge, event, body)
        seconds = time.monotonic() - started
        tell = partial(self._tell, forge, headers, event, answer, particulars, seconds)
        return replace(answer, then=tell)  # the log may be slow

    def _tell(
        self,
        forge: ForgeKind,
        headers: Mapping[str, str],
        event: Event | Ignored,
        answer: Answer,
        particulars: Mapping[str, object],
        seconds: float,
    ) -> None:
        self.log.line(
            "delivery",
            forge=forge,
            id=event.delivery,
            event=headers.get(f"x-{forge}-event"),
            repository=getattr(event, "repository", None),
            number=getattr(event, "number", None),
            answer=answer.status.value,
            outcome=answer.body.get("status", answer.body.get("error")),
            **particulars,
            ms=round(1e3 * seconds),
        )

    def _heard(self, forge: ForgeKind, event: Event | Ignored, body: bytes) -> tuple[Answer, dict[str, object]]:
        if isinstance(event, Ping):
            return _said("pong"), {}
        if isinstance(event, Ignored):
            return _said("ignored", reason=event.reason), {"reason": event.reason}
        webhook.check_time(event.occurred, now=self.now(), window_s=self.window_s)
        tasks = tasks_of(forge, event)
        if not tasks:
            return _said("ignored", reason="the event asks for nothing"), {}
        try:
            outcome = self.inbox.accept(f"{forge}:{event.delivery}", webhook.digest_of(forge, body), tasks)
        except AdvisorError as error:
            return _unavailable("the delivery cannot be stored"), {"error": error}
        if isinstance(outcome, Accepted):
            self.wake()
            return _answer_to(outcome), {"queued": outcome.queued, "replaced": outcome.replaced}
        return _answer_to(outcome), {}

    def _health(self) -> Answer:
        try:
            depth = self.inbox.depth()
        except AdvisorError as error:
            self.log.refused(str(error), path=_HEALTH)
            return _unavailable("the queue cannot be read")
        if not self.is_working():
            return _unavailable("nobody works on the queue")
        oldest = round(depth.oldest_waiting_s, 1)
        return _said("ok", waiting=depth.waiting, working=depth.working, oldest_waiting_s=oldest)


def _only(method: str, request: Request) -> None:
    if request.method != method:
        raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is the only method here")


def _answer_to(outcome: Outcome) -> Answer:
    if isinstance(outcome, Accepted):
        return Answer(status=HTTPStatus.ACCEPTED, body={"status": "accepted"})
    if isinstance(outcome, Duplicate):
        return _said("duplicate")
    assert isinstance(outcome, Full)
    if outcome.scope == "queue":
        return _unavailable("too much is waiting")
    status = HTTPStatus.TOO_MANY_REQUESTS
    return Answer(status=status, body={"error": "too much of this repository is waiting"}, headers=_RETRY)


def _said(status: str, **more: object) -> Answer:
    return Answer(status=HTTPStatus.OK, body={"status": status, **more})


def _unavailable(words: str) -> Answer:
    return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body={"error": words}, headers=_RETRY)
