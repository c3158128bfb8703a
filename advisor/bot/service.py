"""What the server does with a task: a desk for its repository, the work, and the schedules that owners have set."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.bot import work
from advisor.bot.assembly import desk_of
from advisor.bot.desk import Desk
from advisor.bot.forge import Forge
from advisor.bot.tasks import Task
from advisor.errors import ArtifactError, ConfigError, OutputError

PERIOD = {"daily": datetime.timedelta(days=1), "weekly": datetime.timedelta(days=7)}
SCHEDULES = "schedules.json"


@dataclass
class Service:
    """`forge_of` gives the forge for the repository (and installation) of a task; `state` holds mirrors and schedules.

    Mirrors are kept from task to task; forges are made anew for each, so that no token outlives its task.
    """

    forge_of: Callable[[Task], Forge]
    state: Path
    sandbox: str
    interpreter: str
    hidden: tuple[Path, ...]
    say: Callable[[str], None]
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.timezone.utc)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, task: Task) -> None:
        """Do a task and note the schedule of its repository; raises AdvisorError."""
        desk = desk_of(
            self.forge_of(task),
            state=self.state,
            sandbox=self.sandbox,
            interpreter=self.interpreter,
            hidden=self.hidden,
            say=self.say,
        )
        self.say(f"{task.repository}: {work.handle(task, desk)}")
        if task.kind in ("maintain", "propose", "command"):
            self._note(task, desk)

    def _note(self, task: Task, desk: Desk) -> None:
        repository = desk.forge.repository()
        try:
            bot = desk.settings(desk.tip(repository.default_branch)).bot
        except ConfigError:  # the examination of the next pull request says so where people look
            return
        with self._schedules() as known:
            name = f"{task.forge} {task.repository}"
            if not bot.enabled or bot.schedule not in PERIOD:
                known.pop(name, None)
                return
            entry = known.setdefault(name, {"asked": self.now().isoformat()})
            entry.update(schedule=bot.schedule, installation=task.installation)

    def tick(self) -> tuple[Task, ...]:
        """The searches that are due; each is noted as asked for, so that the next tick does not ask again."""
        due = []
        with self._schedules() as known:
            for name, entry in known.items():
                asked = datetime.datetime.fromisoformat(entry["asked"])
                if self.now() - asked < PERIOD[entry["schedule"]]:
                    continue
                entry["asked"] = self.now().isoformat()
                forge, _, repository = name.partition(" ")
                kind: Any = forge
                due.append(Task(kind="propose", forge=kind, repository=repository, installation=entry["installation"]))
        return tuple(due)

    @contextlib.contextmanager
    def _schedules(self) -> Iterator[dict[str, dict[str, Any]]]:
        """The schedules by forge and repository; written back where they were changed."""
        path = self.state / SCHEDULES
        with self._lock:
            try:
                text = path.read_text(encoding="utf-8") if path.exists() else "{}"
                known: dict[str, dict[str, Any]] = json.loads(text)
                before = json.dumps(known, indent=1)
            except (OSError, ValueError) as error:
                raise ArtifactError(f"{SCHEDULES} in the state folder cannot be read: {error}: delete it") from error
            yield known
            after = json.dumps(known, indent=1)
            if after == before:
                return
            try:
                beside = path.with_suffix(".new")
                beside.write_text(after, encoding="utf-8")
                os.replace(beside, path)
            except OSError as error:
                raise OutputError(f"cannot write {SCHEDULES} in the state folder: {error.strerror}") from error
