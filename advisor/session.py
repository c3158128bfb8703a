"""The contract between the command and its child processes: what to run, and the messages that pass between them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from advisor.errors import AdvisorError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run of the user's script in a child process.

    `plan` names the class ("module:Class") that decides what happens at step boundaries; `overlay` maps the absolute
    path of a source file to the file that holds its patched text; `options` belong to the plan. `inbox` and `outbox`
    are inherited file descriptors.
    """

    script: str
    argv: tuple[str, ...]
    root: str
    out: str
    plan: str
    seed: int = 0
    entry: str | None = None
    overlay: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inbox: int | None = None
    outbox: int | None = None

    def save(self, path: Path) -> None:
        """Write the specification as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Spec:
        """Read a specification written by `save`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data["argv"] = tuple(data["argv"])
        return Spec(**data)


class Channel:
    """JSON messages, one a line, over a pair of file descriptors; `receive` gives None at the end of the stream."""

    def __init__(self, inbox: int | None, outbox: int | None) -> None:
        self._in = os.fdopen(inbox, "r", encoding="utf-8") if inbox is not None else None
        self._out = os.fdopen(outbox, "w", encoding="utf-8") if outbox is not None else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; a peer that has gone away is ignored, its process status tells the story."""
        if self._out is None:
            return
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except BrokenPipeError:
            self._out = None

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message."""
        if self._in is None:
            return None
        line = self._in.readline()
        return json.loads(line) if line else None

    def fileno(self) -> int:
        """The descriptor to wait on, for `select`."""
        assert self._in is not None
        return self._in.fileno()

    def close(self) -> None:
        """Close both directions."""
        for stream in (self._in, self._out):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


class Process(Protocol):
    """A running child as the stages see it; `capture.launch.Child` is the real one."""

    @property
    def spec(self) -> Spec:
        """What it runs."""

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message, None once the child has gone; after `timeout` silent seconds a kill and ScriptTimeout."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message to the plan inside the child."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit status, or None when it still runs after `timeout` seconds."""

    def close(self) -> None:
        """End the child and everything it started, release its pipes; may be called again."""

    def status(self) -> dict[str, Any]:
        """How the script ended (`status.json`), empty when the child left no such record."""

    def failure(self) -> AdvisorError:
        """Why the child failed, as an error to raise."""


Spawn: TypeAlias = Callable[[Spec], Process]


class StopScript(BaseException):
    """Raised inside the user's script at a step boundary once everything wanted is recorded."""


class SessionPlan:
    """What a child does around the user's steps; the base class does nothing. Values are torch objects, hence `Any`.

    `session` (set by the runner) offers `channel`, `spec`, `stop()`, `loaders`, `optimizers` and `roots`.
    """

    session: Any = None
    watch_modules = False  # whether `module_call` wraps the outermost module calls from the first step on

    def start(self) -> None:
        """Before the user's script runs, with torch imported and seeded."""

    def batch(self, value: Any) -> Any:
        """A batch leaves a DataLoader; return what the script shall see."""
        return value

    def module_call(self, module: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An outermost module is called; `call(module, *args, **kwargs)` is the original call."""
        return call(module, *args, **kwargs)

    def backward(self, loss: Any) -> None:
        """A backward pass starts from `loss` (detached)."""

    def gradients_ready(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def step_end(self, step: int) -> None:
        """Step number `step` (from 0) has ended: its optimizer has stepped."""

    def failed(self, error: BaseException) -> bool:
        """The script raised. True when what the plan was doing explains it and the records up to here stand."""
        return False

    def finish(self) -> None:
        """The script has ended by itself, or was stopped."""
