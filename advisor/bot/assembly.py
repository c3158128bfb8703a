"""Put the parts of the bot together: a mirror, a sandbox and a forge make a desk, desks make a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from advisor.bot.desk import Desk
from advisor.bot.forge import Forge
from advisor.bot.measuring import Sandboxed
from advisor.bot.mirrors.workspace import Workspace
from advisor.bot.sandboxes import sandbox as sandboxes

SECRET_PLACES = (".netrc", ".config", ".ssh", ".git-credentials", ".aws", ".docker", ".gnupg")


def default_state() -> Path:
    """The folder for mirrors and the queue: `advisor/bot` in the user's state folder (XDG_STATE_HOME)."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "advisor" / "bot"


def desk_of(
    forge: Forge,
    *,
    state: Path,
    sandbox: str = "auto",
    interpreter: str = sys.executable,
    hidden: tuple[Path, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Desk:
    """A desk for a repository: its mirror lies below `state`, what is measured runs in the sandbox.

    `hidden` are further files that the measured code must not see. Raises UsageError where no sandbox works, ForgeError
    where the repository cannot be read.
    """
    repository = forge.repository()
    workspace = Workspace(state / "mirrors", repository.clone_url, forge.credentials)
    home = Path.home()
    measure = Sandboxed(
        workspace=workspace,
        sandbox=sandboxes.find_sandbox(sandbox),
        folder=state / "work",
        hidden=(state / "mirrors", state / "inbox", *(home / place for place in SECRET_PLACES), *hidden),
        environment=sandboxes.allowed_environment(os.environ),
        interpreter=interpreter,
    )
    return Desk(forge=forge, workspace=workspace, measure=measure, say=say)
