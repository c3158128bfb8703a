"""Work that is disturbed once, at one call to the forge or the remote after the other, and then done again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakehub_git
import pytest
from benches import NAME, SETTINGS, TRAIN, Bench, bench

from advisor.bot import examining, proposing
from advisor.bot.forges.github import GitHub
from advisor.bot.mirrors.workspace import Workspace
from advisor.errors import ForgeUnavailable

OFF = SETTINGS.replace("[bot]", 'ignore = ["naive-attention"]\n[bot]')
AGAIN = 4  # times that a task is done at most


class Strip:
    """All calls to the forge and the git remote in their order, of which one may fail: the forge or remote is gone."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []  # what, and whether it writes
        self.at, self.late = -1, False

    def torn(self, name: str, writes: bool, do: Callable[[], Any], fail: Callable[[], Any]) -> Any:
        """Do it, unless it is the one: then fail, after it was done where `late`."""
        here = len(self.calls) == self.at
        self.calls.append((name, writes))
        done = do() if not here or self.late else None
        return fail() if here else done


class Remote(Workspace):
    """A workspace whose remote may be gone for one call."""

    def __init__(self, strip: Strip, state: Path, url: str) -> None:
        super().__init__(state, url)
        self.strip = strip

    def _torn(self, name: str, writes: bool, do: Callable[[], Any]) -> Any:
        def fail() -> Any:
            raise ForgeUnavailable("the remote does not answer")

        return self.strip.torn(name, writes, do, fail)

    def fetch(self, *refs: str) -> dict[str, str]:
        found: dict[str, str] = self._torn("fetch", False, lambda: Workspace.fetch(self, *refs))
        return found

    def remote_head(self, branch: str) -> str | None:
        found: str | None = self._torn("ls-remote", False, lambda: Workspace.remote_head(self, branch))
        return found

    def push(self, branch: str, commit: str, *, expected: str | None) -> None:
        self._torn("push", True, lambda: Workspace.push(self, branch, commit, expected=expected))

    def delete(self, branch: str, *, expected: str) -> None:
        self._torn("delete", True, lambda: Workspace.delete(self, branch, expected=expected))


@dataclasses.dataclass(frozen=True)
class Work:
    """What there is before, and the task that is disturbed."""

    before: Callable[[Bench], object]
    task: Callable[[Bench], object]


def _renamed(b: Bench) -> None:
    """The same rule proposes something else now: its finding has another fingerprint."""
    real = b.desk.measure

    def measure(wanted: Any, config: Any) -> bytes:
        document = json.loads(real(wanted, config))
        for proposal in document["scripts"][0]["proposals"]:
            proposal["fingerprint"] = "f" * 12
        return json.dumps(document).encode()

    b.desk = dataclasses.replace(b.desk, measure=measure)


def _proposed(b: Bench) -> None:
    proposing.propose(b.desk)


def _superseded(b: Bench) -> None:
    proposing.propose(b.desk)
    _renamed(b)


def _off(b: Bench) -> None:
    proposing.propose(b.desk)
    b.commit("main", {"advisor.toml": OFF})


def _moved(b: Bench) -> None:
    proposing.propose(b.desk)
    b.commit("main", {"README.md": "hello\n"})


def _pull(b: Bench) -> None:
    b.commit("main", {"train.py": TRAIN.replace("        y = weights @ v\n", "        y = (weights @ v)\n")})
    b.commit("feature", {"train.py": TRAIN})
    b.hub.open_pull(NAME, head="feature")


WORKS = {
    "propose": Work(lambda b: None, lambda b: proposing.propose(b.desk)),
    "supersede": Work(_superseded, lambda b: proposing.propose(b.desk)),
    "close": Work(_off, lambda b: proposing.maintain(b.desk)),
    "rebase": Work(_moved, lambda b: proposing.maintain(b.desk)),
    "examine": Work(_pull, lambda b: examining.examine(b.desk, 1)),
}


@contextmanager
def prepared(folder: Path, work: Work) -> Iterator[tuple[Bench, Strip]]:
    """A bench without patience, on which what is before has been."""
    with bench(folder) as b:
        work.before(b)
        strip, handle = Strip(), b.hub.handle
        gone = (502, dict[str, str](), {"message": "planned failure"})

        def torn(method: str, target: str, headers: dict[str, str], data: bytes) -> Any:
            def do() -> Any:
                return handle(method, target, headers, data)

            # GraphQL is only asked who we are
            return strip.torn(f"{method} {target}", method != "GET" and "graphql" not in target, do, lambda: gone)

        b.hub.handle = torn  # type: ignore[method-assign]
        forge = GitHub(NAME, next(iter(b.hub.tokens)), base_url=b.hub.url, patience_s=0.0, write_gap_s=0.0)
        workspace = Remote(strip, folder / "state", b.repo.clone_url)
        b.desk = dataclasses.replace(b.desk, forge=forge, workspace=workspace)
        yield b, strip


def state(b: Bench) -> dict[str, Any]:
    """All that people see, and the branches."""
    repo = b.repo
    return {
        "branches": {
            name: fakehub_git.git(repo.bare, "rev-parse", f"{name}^{{tree}}") for name in fakehub_git.heads(repo.bare)
        },
        "pulls": [
            (p.number, p.title, p.state, p.base, p.head, sorted(p.labels), _stable(p.body), len(p.review_comments))
            for p in repo.pulls.values()
        ],
        "comments": [(c.number, _stable(c.body)) for c in repo.comments],
        "issues": [(i.title, i.state, _stable(i.body)) for i in repo.issues.values()],
        "checks": [  # those that GitHub shows: of a name and commit the newest
            (c.name, c.status, c.conclusion, c.title, len(c.annotations))
            for c in repo.checks
            if c is repo.check(c.name, c.head_sha)
        ],
    }


def _stable(body: str | None) -> str:
    """Without commits, whose dates are of the test's clock."""
    return re.sub(r"\b[0-9a-f]{12,40}\b", "SHA", body or "")


def insist(b: Bench, work: Work) -> None:
    """Do the task as the queue would: again, where the forge was not there."""
    for _ in range(AGAIN):
        try:
            work.task(b)
        except ForgeUnavailable:
            continue
        return
    raise AssertionError("the task never ended")


@pytest.mark.parametrize("name", list(WORKS))
def test_a_call_that_fails_leaves_no_trace(tmp_path: Path, name: str) -> None:
    """Each that writes, after it was carried out and nobody knows it; to stop before the next one is the same."""
    work = WORKS[name]
    with prepared(tmp_path / "calm", work) as (b, strip):
        work.task(b)
        expected, calls = state(b), strip.calls
    writing = [at for at, (_, writes) in enumerate(calls) if writes]
    for at, late in ((writing[0], False), *((at, True) for at in writing)):
        with prepared(tmp_path / f"{at}-{late}", work) as (b, strip):
            strip.at, strip.late = at, late
            insist(b, work)
            assert state(b) == expected, (calls[at], late)
