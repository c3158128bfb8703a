"""A clock that only sleeping moves, so that waiting for a forge takes no time."""

from __future__ import annotations


class Clock:
    """`sleep` and `now` in seconds; `slept` are the waits."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def now(self) -> float:
        return sum(self.slept)
