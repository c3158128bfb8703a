"""A desk for tests: the real client against the stateful fake, a real bare repository, a recorded measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakehub import FakeHub
from fakehub_state import Comment, Pull, Repo
from handed import NAIVE, RECORDED

from advisor.bot.desk import Desk, Measurement
from advisor.bot.forges.github import GitHub
from advisor.bot.mirrors.workspace import Workspace
from advisor.config import Config
from advisor.errors import AdvisorError

NAME = "acme/model"
TRAIN = (NAIVE / "train.py").read_text(encoding="utf-8")
SETTINGS = (NAIVE / "advisor.toml").read_text(encoding="utf-8")


@dataclass
class Replay:
    """Stands in for a measurement: hands out the recorded one, as if it were of the commits that were asked for.

    `proposes` False hands out one in which nothing is found; `raises` is raised instead, `command` is another one.
    """

    asked: list[Measurement] = field(default_factory=list)
    proposes: bool = True
    raises: AdvisorError | None = None
    command: str | None = None
    change: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, wanted: Measurement, config: Config) -> bytes:
        self.asked.append(wanted)
        if self.raises is not None:
            raise self.raises
        document = json.loads(RECORDED)
        document.update({"base": wanted.base, "head": wanted.head, "purpose": wanted.purpose, **self.change})
        script = document["scripts"][0]
        script["command"] = self.command or script["command"]
        report = script["report"]
        if wanted.purpose == "examine":
            script["rewrites"] = {_print(script): script["proposals"][0]["files"]}
            script["proposals"] = []
            timing = report["timing"]
            script["comparison"] = {
                "outcome": "improved",
                "reasons": report["reasons"],
                "timing": timing,
                "before": None,
                "after": None,
                "environment": report["environment"],
                "hardware": report["hardware"],
            }
        if not self.proposes:
            script["proposals"], script["rewrites"] = [], {}
            report.update(outcome="neutral", findings=[], timing=None, trials=[])
        return json.dumps(document).encode()


def _print(script: Mapping[str, Any]) -> str:
    return str(next(f["fingerprint"] for f in script["report"]["findings"] if f["status"] == "applied"))


@dataclass
class Bench:
    """Everything a flow test looks at."""

    hub: FakeHub
    desk: Desk
    replay: Replay
    log: list[str]

    @property
    def repo(self) -> Repo:
        return self.hub.sync(NAME)

    def commit(self, branch: str, files: Mapping[str, str | None], message: str = "change") -> str:
        return self.hub.commit(NAME, branch, files, message)

    def proposed(self, state: str = "open") -> list[Pull]:
        """Pull requests from branches of the bot."""
        return [p for p in self.repo.pulls.values() if p.head.startswith("advisor/") and p.state == state]

    def comments(self, number: int) -> list[Comment]:
        return self.repo.of(number)


@contextmanager
def bench(folder: Path, files: Mapping[str, str] | None = None) -> Iterator[Bench]:
    """A repository with the naive script and the bot turned on."""
    with FakeHub(folder / "hub") as hub:
        repo = hub.add_repository(NAME, permissions={"octocat": "write", "guest": "read"})
        hub.commit(NAME, "main", {"train.py": TRAIN, "advisor.toml": SETTINGS, **(files or {})}, "first")
        forge = GitHub(NAME, hub.workflow_token(), base_url=hub.url, patience_s=2.0, write_gap_s=0.0)
        workspace = Workspace(folder / "state", repo.clone_url)
        replay, log = Replay(), list[str]()
        yield Bench(hub, Desk(forge=forge, workspace=workspace, measure=replay, say=log.append), replay, log)
