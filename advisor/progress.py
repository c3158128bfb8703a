"""A progress line per stage, on standard error, and the seconds each stage took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

STAGES = ("capture", "ingest", "analyze", "match", "plan", "patch", "verify", "report")


class Progress:
    """Announces stages; on a terminal the running stage shows what it is doing."""

    def __init__(self, console: Console, *, quiet: bool = False, stages: tuple[str, ...] = STAGES) -> None:
        self._console = console
        self._stages = stages
        self._quiet = quiet
        self._status: Status | None = None
        self._note = ""
        self.current: str | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Time one stage and print its line when it ends well."""
        self.current, self._note = name, ""
        begin = time.perf_counter()
        if self._console.is_terminal and not self._quiet:
            self._status = self._console.status(Text(name))
            self._status.start()
        try:
            yield self
        finally:
            self.seconds[name] = time.perf_counter() - begin
            if self._status is not None:
                self._status.stop()
                self._status = None
        self.current = None
        self._line(name)

    def doing(self, what: str) -> None:
        """What the running stage is doing now."""
        if self._status is not None:
            self._status.update(Text(f"{self.current}: {what}"))

    def note(self, text: str) -> None:
        """What the stage found, shown at the end of its line."""
        self._note = text

    def _line(self, name: str) -> None:
        if self._quiet:
            return
        number = f"{self._stages.index(name) + 1}/{len(self._stages)}"
        self._console.print(Text(f"{number} {name:<10}{self.seconds[name]:6.1f} s  {self._note}"), soft_wrap=True)
