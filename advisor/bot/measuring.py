"""Measure commits of a mirror in a sandbox: fresh checkouts, no token, nothing left behind but one file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from advisor.bot import handover
from advisor.bot.desk import MOST_ALONE, Measurement
from advisor.bot.mirrors.workspace import Workspace
from advisor.bot.sandboxes.bubblewrap import interpreter_folders
from advisor.bot.sandboxes.sandbox import Sandbox, discard, read_result
from advisor.bot.sandboxes.watching import Limits
from advisor.config import Config
from advisor.errors import ScriptError, ScriptTimeout
from advisor.redact import Redactor

SLACK = 6.0  # times the time of a search that a measurement of one script may take, besides
START_S = 600.0  # for checkouts, imports, compilation
TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandboxed:
    """A `Measurer` over a sandbox. `folder` is where checkouts are made and removed; `hidden` is what nobody may see.

    `interpreter` runs advisor itself and, where the owner names none, the scripts.
    """

    workspace: Workspace
    sandbox: Sandbox
    folder: Path
    hidden: tuple[Path, ...]
    environment: Mapping[str, str]
    interpreter: str = sys.executable

    def __call__(self, wanted: Measurement, config: Config) -> bytes:
        """Check out, run, read; the folder is gone afterwards. Raises ScriptError where no result was written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="measure-", dir=self.folder))
        work.chmod(0o711)  # another account may go through to its checkouts, and list nothing
        try:
            return self._measured(work, wanted, config)
        finally:
            discard(work)

    def _measured(self, work: Path, wanted: Measurement, config: Config) -> bytes:
        trees = {wanted.base: work / "base", wanted.head: work / "head", wanted.settings: work / "settings"}
        for commit, tree in trees.items():
            self.workspace.checkout(commit, tree)
        out, log = work / "out", work / "measure.log"
        out.mkdir()
        command = [self.interpreter, "-m", "advisor", "bot", "measure", "--purpose", wanted.purpose]
        for name in ("base", "head", "settings"):
            command += [f"--{name}", str(trees[getattr(wanted, name)])]
        command += [f"--rule={rule}" for rule in wanted.rules]
        searches = SLACK if wanted.purpose == "examine" else SLACK + MOST_ALONE
        seconds = START_S + searches * config.bot.time_s * max(1, len(config.bot.scripts))
        finished = self.sandbox.run(
            [*command, "--out", str(out)],
            cwd=out,  # not in a checkout, whose folders python would take for packages
            writable=(*trees.values(), out),
            hidden=self.hidden,
            environment=self.environment,
            network=config.bot.network,
            limits=Limits(seconds=seconds),
            log=log,
            redact=Redactor.of_machine().text,
            readable=tuple(interpreter_folders(self.interpreter)) if self.interpreter != sys.executable else (),
        )
        if finished.timed_out:
            raise ScriptTimeout(f"measuring took longer than {seconds:.0f} s and was stopped", detail=_tail(log, work))
        if finished.status != 0:
            raise ScriptError(f"measuring ended with status {finished.status}", detail=_tail(log, work))
        data = read_result(out, handover.NAME, handover.MOST_BYTES)
        return data.replace(f"{work}/".encode(), b"")  # where it was measured is nobody's business


def _tail(log: Path, work: Path) -> str | None:
    """The end of a log, in which the folder of the measurement, which is nobody's business, is left out."""
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        return None
    return data[-TAIL_BYTES:].decode("utf-8", "replace").replace(f"{work}/", "") or None
