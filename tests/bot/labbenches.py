"""A desk for tests on GitLab: the real client against the stateful fake, a real bare repository, a recorded run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakehub_git
from benches import SETTINGS, TRAIN, Replay
from fakelab import FakeLab, FakeProject, Json

from advisor.bot.desk import Desk
from advisor.bot.forges.failures import Patience
from advisor.bot.forges.gitlab import GitLab
from advisor.bot.mirrors.workspace import Workspace

NAME = "research/models/trainer"
ACCOUNT = "project_7_bot_0a1b"


@dataclass
class LabBench:
    """Everything a flow test on GitLab looks at."""

    lab: FakeLab
    bare: Path
    desk: Desk
    replay: Replay
    log: list[str]

    @property
    def project(self) -> FakeProject:
        self.lab.sync()
        return self.lab.projects[NAME]

    def commit(self, branch: str, files: Mapping[str, str | None], message: str = "change") -> str:
        """On a branch, which begins at main where it is new."""
        return commit(self.bare, branch, files, message)

    def tip(self, branch: str) -> str | None:
        return fakehub_git.commit_of(self.bare, f"refs/heads/{branch}")

    def text_at(self, branch: str, path: str = "train.py") -> str:
        return fakehub_git.git(self.bare, "show", f"{branch}:{path}").decode()

    def parents(self, branch: str) -> list[str]:
        return fakehub_git.git(self.bare, "log", "-1", "--format=%P", branch).decode().split()

    def proposed(self, state: str = "opened") -> list[Json]:
        """Merge requests from branches of the bot."""
        found = self.project.merges.values()
        return [one for one in found if one["source_branch"].startswith("advisor/") and one["state"] == state]

    def notes(self, number: int) -> list[Json]:
        return self.project.notes.get(number, [])

    def status(self, sha: str) -> Json | None:
        """The latest status of a commit."""
        return next((one for one in reversed(self.project.statuses) if one["sha"] == sha), None)

    def head_of(self, number: int) -> str:
        return str(self.lab._shown(self.project, self.project.merges[number])["sha"])


def commit(bare: Path, branch: str, files: Mapping[str, str | None], message: str = "change") -> str:
    """On a branch of a repository, which begins at main where it is new."""
    if fakehub_git.commit_of(bare, f"refs/heads/{branch}") is None and branch != "main":
        fakehub_git.git(bare, "update-ref", f"refs/heads/{branch}", "refs/heads/main")
    whole: dict[str, Any] = dict(files)
    return fakehub_git.commit(bare, branch, whole, message=message)


@contextmanager
def lab_bench(folder: Path) -> Iterator[LabBench]:
    """A project with the naive script and the bot turned on; the bot has a project access token."""
    bare = fakehub_git.make_bare(folder / "lab" / "trainer.git")
    commit(bare, "main", {"train.py": TRAIN, "advisor.toml": SETTINGS}, "first")
    with FakeLab() as lab:
        project = lab.add(NAME, bare=bare)
        project.members |= {"ada": {"access_level": 30}, "guest": {"access_level": 20}}
        for name in ("ada", "guest"):
            lab.user(name)
        patience = Patience(sleep=lambda seconds: None, limit_s=2.0)
        forge = GitLab(NAME, token=lab.token(ACCOUNT), base_url=lab.url, patience=patience)
        workspace = Workspace(folder / "state", bare.as_uri())
        replay, log = Replay(), list[str]()
        yield LabBench(lab, bare, Desk(forge=forge, workspace=workspace, measure=replay, say=log.append), replay, log)
