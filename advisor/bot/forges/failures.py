"""What an HTTP failure of a forge means, and how long and how to try again; knows no client library."""

from __future__ import annotations

import datetime
import email.utils
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from advisor.errors import ForgeConflict, ForgeError, ForgeMissing, ForgeRefused, ForgeUnavailable
from advisor.redact import Redactor
from advisor.reports.untrusted import clip

Result = TypeVar("Result")

_SHOWN = 500  # characters of a forge's own words
_UNTOLD_LIMIT_S = 60.0  # GitHub's advice where a secondary limit names no time
_LONGEST_S = 30.0  # between two tries, unless the forge asks for more
_DAY_S = 86_400.0


class BadToken(ForgeRefused):
    """The forge does not know the token at all (401), as against one that lacks a right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked of a forge: `action` is method and path, `right` what a token needs for it ("checks: write")."""

    forge: str
    action: str
    right: str = ""

    def __str__(self) -> str:
        return f"{self.forge}: {clip(self.action, 300)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP answer that is no success. Names of headers may be in any case."""

    status: int
    headers: Mapping[str, str]
    text: str


def failure(request: Request, answer: Answer, redactor: Redactor, *, now: float | None = None) -> ForgeError:
    """The error that an answer of 300 or more stands for, with the forge's own words, redacted and made visible.

    `now` is seconds since the epoch, for an answer without a Date header. A redirect means that the repository moved.
    """
    headers = {name.lower(): value for name, value in answer.headers.items()}
    said = own_words(answer.text, redactor)
    told = f"{request} answered {answer.status}" + (f": {said}" if said else "")
    wait_s = _limited(answer.status, headers, said, time.time() if now is None else now)
    if wait_s is not None:
        return ForgeUnavailable(f"{told}; it limits how often it is asked", retry_after_s=wait_s)
    if answer.status in (408, 425) or answer.status >= 500:
        return ForgeUnavailable(told, retry_after_s=_retry_after(headers, time.time() if now is None else now))
    if answer.status == 401:
        return BadToken(f"{told}; the token is wrong, revoked or has expired")
    if answer.status in (402, 403, 407, 451):
        return ForgeRefused(told + (f"; the token needs {request.right}" if request.right else ""))
    if answer.status in (404, 410):
        return ForgeMissing(f"{told}; it is not there, or the token may not see it")
    if answer.status < 400:
        return ForgeMissing(f"{told}; the repository has moved, name it as it is called now")
    return ForgeConflict(told)


def no_answer(request: Request, error: Exception, redactor: Redactor) -> ForgeUnavailable:
    """The error for a request without a whole answer: refused or broken connections, time-outs, unreadable answers."""
    said = clip(redactor.text(str(error)), _SHOWN)
    return ForgeUnavailable(f"{request} got no usable answer: {type(error).__name__}" + (f": {said}" if said else ""))


def own_words(text: str, redactor: Redactor) -> str:
    """What the body of an answer says for people, on one line; empty for a body that is not the forge's JSON."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    shown: str = clip(redactor.text("; ".join(dict.fromkeys(_words(body, 0)))), _SHOWN)
    return shown


def _words(value: Any, depth: int) -> list[str]:
    """The strings under message, error, errors and their like, in that order; a field's name leads its own errors."""
    if isinstance(value, str):
        return [value] if value.strip() else []
    if depth > 4:
        return []
    if isinstance(value, list):
        return [word for item in value[:20] for word in _words(item, depth + 1)]
    if not isinstance(value, dict):
        return []
    known = [key for key in ("message", "error", "error_description", "errors") if key in value]
    if known:
        return [word for key in known for word in _words(value[key], depth + 1)]
    if "code" in value:  # an entry of GitHub's `errors`, which names resource, field and code
        return [" ".join(str(value[key]) for key in ("resource", "field", "code") if value.get(key))]
    if depth == 0:
        return []
    return [f"{key} {word}" for key, item in list(value.items())[:20] for word in _words(item, depth + 1)]


def _limited(status: int, headers: Mapping[str, str], said: str, now: float) -> float | None:
    """Seconds that a rate limit asks to wait; None where the answer is of no rate limit."""
    if status not in (403, 429):
        return None
    after = _retry_after(headers, now)
    if after is not None:
        return after
    for prefix in ("x-ratelimit", "ratelimit"):
        if _number(headers.get(f"{prefix}-remaining")) == 0:
            reset = _number(headers.get(f"{prefix}-reset"))
            return _UNTOLD_LIMIT_S if reset is None else _sane(reset - _date(headers, now) + 1.0)
    if status == 429 or "rate limit" in said.lower() or "abuse detection" in said.lower():
        return _UNTOLD_LIMIT_S
    return None


def _retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds of Retry-After, which is a number or a date."""
    value = headers.get("retry-after")
    if value is None:
        return None
    seconds = _number(value)
    if seconds is not None:
        return _sane(seconds)
    moment = _moment(value)
    return None if moment is None else _sane(moment - _date(headers, now))


def _sane(seconds: float) -> float:
    return min(max(seconds, 0.0), _DAY_S)


def _date(headers: Mapping[str, str], now: float) -> float:
    """The forge's own time, so that a wrong clock here shortens no wait."""
    moment = _moment(headers.get("date", ""))
    return now if moment is None else moment


def _moment(text: str) -> float | None:
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp()


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Tries again what ForgeUnavailable says may work later, as long as the waiting stays within `limit_s` seconds.

    Waits double from `first_s` and are drawn from their upper half, so that jobs that failed together do not return
    together; a forge that names a time is waited for at least as long. Other errors are raised at once.
    """

    limit_s: float = 120.0
    first_s: float = 1.0
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = field(default=random.random, repr=False)

    def call(self, attempt: Callable[[], Result], *, done: Callable[[], Result | None] | None = None) -> Result:
        """The result of `attempt`, tried until it works or patience ends; then raises its ForgeUnavailable.

        `done` belongs to an attempt that must not happen twice: it looks whether the forge did it although it did not
        say so, and is asked before every repetition. What it returns, unless None, is the result.
        """
        began = self.clock()
        tries = 0
        while True:
            try:
                found = done() if tries and done is not None else None
                return attempt() if found is None else found
            except ForgeUnavailable as error:
                tries += 1
                wait_s = self._wait(tries, error)
                if self.clock() - began + wait_s > self.limit_s:
                    raise self._given_up(error, tries) from error
                self.sleep(wait_s)

    def _wait(self, tries: int, error: ForgeUnavailable) -> float:
        backoff_s = min(self.first_s * 2.0 ** min(tries - 1, 30), _LONGEST_S) * (0.5 + 0.5 * self.draw())
        asked_s = error.retry_after_s
        return backoff_s if asked_s is None else max(backoff_s, asked_s)

    def _given_up(self, error: ForgeUnavailable, tries: int) -> ForgeUnavailable:
        after_s = error.retry_after_s
        told = str(error) if tries == 1 else f"{error} (tried {tries} times)"
        told += "" if after_s is None else f"; try again in {math.ceil(after_s)} s"
        return ForgeUnavailable(told, detail=error.detail, retry_after_s=after_s)
