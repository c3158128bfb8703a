"""The log of the server: one redacted line of `key=value` per event, and never so many that they do harm."""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

from advisor.redact import Redactor
from advisor.reports.untrusted import clip, visible_line

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)
_VALUE, _LINE = 400, 2000  # characters that are shown of a value, of a line of a traceback
_REFUSALS, _REFUSALS_S = 20, 60.0  # how many refused requests are told one by one, in how many seconds


@dataclass(slots=True)
class Log:
    """Writes lines to a stream, from any thread. Lines that it does not take are counted, and the server goes on."""

    stream: TextIO
    redactor: Redactor
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _refused: Counter[str] = field(default_factory=Counter)  # those that got no line, by reason
    _lost: int = 0
    _told: int = 0
    _since: float = float("-inf")

    def line(self, what: str, **fields: object) -> None:
        """One line: the time in UTC, what happened, and its particulars; those that are None are left out."""
        shown = [f"{name}={self._value(value)}" for name, value in fields.items() if value is not None]
        self._write(f"{_time()} {' '.join([what, *shown])}\n")

    def bug(self, where: str, error: BaseException) -> None:
        """An exception that nobody expects, with its traceback."""
        lines = self.redactor.text("".join(traceback.format_exception(error))).splitlines()
        shown = "".join(f"    {visible_line(line[:_LINE])}\n" for line in lines)
        self._write(f"{_time()} bug in={where}\n{shown}")

    def refused(self, reason: str, **fields: object) -> None:
        """A request that came to nothing: anybody can send those, so most of a flood are only counted."""
        with self._lock:
            now = time.monotonic()
            is_new_span = now - self._since > _REFUSALS_S
            if is_new_span:
                self._told, self._since = 0, now
            self._told += 1
            tell = self._told <= _REFUSALS
            if not tell:
                self._refused[reason] += 1
        if is_new_span:
            self.count_refused()
        if tell:
            self.line("refused", reason=reason, **fields)

    def count_refused(self) -> None:
        """How many refused requests had no line of their own since the last count."""
        with self._lock:
            counted, self._refused = self._refused, Counter[str]()
        if counted:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in counted.items())
            self.line("refused", more=counted.total(), reasons=reasons)

    def _value(self, value: object) -> str:
        text = clip(self.redactor.text(str(value)), _VALUE)
        return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)

    def _write(self, text: str) -> None:
        with self._lock:
            before = f"{_time()} log lost={self._lost}\n" if self._lost else ""
            try:
                self.stream.write(before + text)
                self.stream.flush()
            except (OSError, ValueError):  # a full disk, a reader that went away, a stream that was closed
                self._lost += 1
            else:
                self._lost = 0


def _time() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
