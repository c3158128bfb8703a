"""What a piece of the bot's work needs at hand: the forge, the mirror, a way to measure, and the owner's settings."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from advisor.bot.forge import Forge
from advisor.bot.mirrors.workspace import Workspace
from advisor.config import Config, config_in
from advisor.errors import ConfigError

CONFIGURATION = ("advisor.toml", "pyproject.toml")
MOST_ALONE = 12  # rules measured alone by one measurement, those first that save most


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is to be measured: `base` and `head` are commits of the mirror, `settings` that whose configuration counts.

    `purpose` is examine or propose; `rules` narrows what is looked for, empty for all.
    """

    purpose: str
    base: str
    head: str
    settings: str
    rules: tuple[str, ...] = ()


class Measurer(Protocol):
    """Runs the code of a repository where it can do no harm."""

    def __call__(self, wanted: Measurement, config: Config) -> bytes:
        """What the measuring job wrote, untrusted; raises AdvisorError where it could not be run to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """One repository of one forge at work. `say` gets a line for the log, `now` is aware, in UTC."""

    forge: Forge
    workspace: Workspace
    measure: Measurer
    say: Callable[[str], None] = lambda text: None
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.timezone.utc)

    def settings(self, commit: str) -> Config:
        """The owner's settings at a commit of the base branch; raises ConfigError where they are wrong."""
        with tempfile.TemporaryDirectory() as folder:
            for name in CONFIGURATION:
                data = self.workspace.read(commit, name)
                if data is not None:
                    Path(folder, name).write_bytes(data)
            try:
                return config_in(Path(folder)) or Config()
            except ConfigError as error:  # people know the file by its name in their repository
                raise ConfigError(
                    str(error).replace(f"{Path(folder).resolve()}/", "").replace(f"{folder}/", "")
                ) from None

    def reader(self, commit: str) -> Callable[[str], bytes | None]:
        """Reads the files of a commit."""
        return lambda path: self.workspace.read(commit, path)

    def tip(self, branch: str) -> str:
        """The commit a branch of the remote is at, fetched."""
        ref = f"refs/heads/{branch}"
        self.workspace.fetch(ref)
        found = self.workspace.resolve(ref)
        assert found is not None, f"{branch} was fetched"
        return found

    def author(self) -> tuple[str, str]:
        """Name and address under which the bot commits."""
        account = self.forge.account()
        host = urlsplit(self.workspace.url).hostname or "localhost"
        return account, f"{account}@users.noreply.{host}"
