"""Setting the bot up by its README: every command and option there is one, a server on either forge answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import fakehub_git
import pytest
from benches import SETTINGS, TRAIN
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from deliveries import github_headers, gitlab_headers, hub_signature, send, time_text
from fakehub import FakeHub
from labbenches import ACCOUNT, NAME, commit
from labbenches import FakeLab as Lab

from advisor.commands.bot import bot
from advisor.config import BotConfig

README = Path(__file__).parents[2] / "samples" / "bot" / "README.md"
SERVE = ("serve", "--webhook-secret-file", "secret")
SECRET = "0123456789abcdef" * 4
HELP = "/advisor optimize"


def blocks() -> list[list[str]]:
    """The command lines of the README that call advisor."""
    text = "\n".join(re.findall(r"(?ms)^```\w*\n(.*?)^```$", README.read_text(encoding="utf-8")))
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("advisor ")]


def test_every_command_and_option_of_the_readme_is_one() -> None:
    lines = blocks()
    assert {line[2] for line in lines} == {"run", "serve"}
    for line in lines:
        command = bot.commands[line[2]]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in line[3:] if word.startswith("--")} <= known, line
    text = README.read_text(encoding="utf-8")
    options = {name for command in bot.commands.values() for parameter in command.params for name in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= options
    keys = set(re.findall(r"(?m)^\| `(\w+)`", text.partition("## Settings")[2].partition("## As a workflow")[0]))
    assert keys <= set(BotConfig.__dataclass_fields__)
    assert [name for name in re.findall(r"\]\(([\w.-]+)\)", text) if not (README.parent / name).is_file()] == []
    titles = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.*)", text)]
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= set(titles)


# ---------------------------------------------------------------------------------------------------------- the servers


@contextmanager
def serving(folder: Path, line: list[str], **instead: str) -> Iterator[tuple[str, int]]:
    """The README's command with our paths, address and port in place of its own; where it listens."""
    words = list(line)
    for option, value in {"state": str(folder / "state"), "sandbox": "none", "port": "0", **instead}.items():
        name = f"--{option.replace('_', '-')}"
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8"))):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield "127.0.0.1", int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()


def idle(address: tuple[str, int]) -> None:
    deadline = time.monotonic() + 60
    while True:
        _, health, _ = send(address, "/healthz", b"", {}, method="GET")
        if not health["waiting"] and not health["working"]:
            return
        assert time.monotonic() < deadline, health
        time.sleep(0.05)


def private(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o600)


def keys() -> tuple[str, str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    public = key.public_key().public_bytes(kinds[0], serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.private_bytes(*kinds).decode(), public.decode()


def test_a_server_on_github_by_the_readme(tmp_path: Path) -> None:
    pem, public = keys()
    private(tmp_path, secret=SECRET + "\n", key=pem)
    (line,) = [line for line in blocks() if "--app-id" in line]
    with FakeHub(tmp_path / "hub") as hub:
        hub.add_repository("acme/model", permissions={"octocat": "write"})
        hub.commit("acme/model", "main", {"train.py": TRAIN, "advisor.toml": SETTINGS}, "first")
        hub.commit("acme/model", "feature", {"note.py": "x = 1\n"})
        number = hub.open_pull("acme/model", head="feature").number
        app = hub.add_app("advisor", public)
        with serving(tmp_path, line, app_id=str(app.id), app_key="key", url=hub.url) as address:
            comment = hub.comment("acme/model", number, "octocat", "/advisor help")
            body = json.dumps(hub.comment_event("acme/model", comment)).encode()
            headers = github_headers(body, event="issue_comment") | {"X-Hub-Signature-256": hub_signature(body, SECRET)}
            status, _, _ = send(address, "/github", body, headers)
            assert status == 202
            idle(address)
        assert HELP in hub.sync("acme/model").of(number)[-1].body, (tmp_path / "log").read_text(encoding="utf-8")


def test_a_server_on_gitlab_by_the_readme(tmp_path: Path) -> None:
    bare = fakehub_git.make_bare(tmp_path / "trainer.git")
    commit(bare, "main", {"train.py": TRAIN, "advisor.toml": SETTINGS}, "first")
    commit(bare, "feature", {"note.py": "x = 1\n"})
    (line,) = [line for line in blocks() if "serve" in line and "gitlab" in line]
    with Lab() as lab:
        lab.add(NAME, bare=bare).members["ada"] = {"access_level": 30}
        number = lab.open_merge_request(NAME, "ada", source="feature")
        private(tmp_path, secret=SECRET + "\n", token=lab.token(ACCOUNT))
        with serving(tmp_path, line, url=lab.url) as address:
            note = lab.comment(NAME, number, "ada", "/advisor help")
            said: dict[str, Any] = {
                "user": {"username": "ada"},
                "project": {"path_with_namespace": NAME},
                "object_attributes": {
                    "id": note,
                    "note": "/advisor help",
                    "noteable_type": "MergeRequest",
                    "created_at": time_text(),
                },
                "merge_request": {"iid": number},
            }
            headers = gitlab_headers(**{"X-Gitlab-Event": "Note Hook", "X-Gitlab-Token": SECRET})
            status, answer, _ = send(address, "/gitlab", json.dumps(said).encode(), headers)
            assert status == 202, answer
            idle(address)
        notes = lab.projects[NAME].notes[number]
        assert HELP in notes[-1]["body"], (tmp_path / "log").read_text(encoding="utf-8")
        assert notes[-1]["author"]["username"] == ACCOUNT


def test_by_hand_with_the_token_of_a_person(tmp_path: Path) -> None:
    """Who can make no check runs on GitHub: the bot goes on without."""
    with FakeHub(tmp_path / "hub") as hub:
        hub.add_repository("acme/model", permissions={"octocat": "write"})
        hub.commit("acme/model", "main", {"train.py": TRAIN, "advisor.toml": SETTINGS}, "first")
        hub.commit("acme/model", "feature", {"note.py": "x = 1\n"})
        number = hub.open_pull("acme/model", head="feature").number
        hub.commit("acme/model", "main", {"advisor.toml": SETTINGS.replace("train.py 512", "missing.py")})
        given = ["bot", "run", "--repo", "acme/model", "--pr", str(number), "--url", hub.url]
        done = subprocess.run(
            [sys.executable, "-m", "advisor", *given, "--sandbox", "none", "--state", str(tmp_path / "state")],
            env={**os.environ, "ADVISOR_TOKEN": hub.user_token("octocat")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "examined: neutral" in done.stdout
        assert "missing.py" in hub.sync("acme/model").of(number)[-1].body


# ------------------------------------------------------------------------------------------------- what one may forget


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "there is no webhook secret: name a file with --webhook-secret-file"),
        (["serve", "--webhook-secret-file", "short"], "a webhook secret has less than 16 characters"),
        (["serve", "--webhook-secret-file", "binary"], "binary cannot be read as text"),
        ([*SERVE], "there is no token: name a file with --token-file"),
        ([*SERVE, "--app-id", "1"], "--app-id and --app-key belong together"),
        (
            [*SERVE, "--app-id", "1", "--app-key", "short"],
            "private key of the GitHub",
        ),
        (
            [*SERVE, "--app-id", "1", "--app-key", "binary"],
            "cannot be read as text",
        ),
        (
            [*SERVE, "--app-id", "1", "--app-key", "key", "--url", "ftp://x"],
            "must begin with https://",
        ),
        (
            [*SERVE, "--app-id", "1", "--app-key", "key", "--state", "short/x"],
            "the folder of --state cannot be made",
        ),
        ([*SERVE, "--sandbox", "box", "--token-file", "token"], "choose auto"),
        (["run", "--repo", "o/n", "--pr", "1"], "there is no token"),
        (["run", "--repo", "o/n", "--pr", "1", "--token-file", "empty"], "there is no token"),
        (["run", "--repo", "o/n", "--token-file", "token"], "name one piece of work"),
        (["run", "--repo", "o", "--pr", "1", "--token-file", "token"], "is named owner/name"),
        (["run", "--repo", "o/n", "--pr", "1", "--token-file", "token", "--url", "x.y"], "https://HOST/api/v3"),
        (["run", "--forge", "gitlab", "--repo", "o", "--pr", "1", "--token-file", "token"], "like group/project"),
    ],
)
def test_what_was_forgotten_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    private(tmp_path, short="short\n", secret=SECRET, token="glpat-x", empty="", key=keys()[0])
    (tmp_path / "binary").write_bytes(b"\xab\xff\x00" * 9)
    monkeypatch.chdir(tmp_path)
    for name in ("ADVISOR_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN", "ADVISOR_WEBHOOK_SECRET"):
        monkeypatch.delenv(name, raising=False)
    if "--sandbox" not in arguments:
        arguments = [*arguments, "--sandbox", "none"]
    done = CliRunner().invoke(bot, arguments)
    told = done.output + (str(done.exception) if not isinstance(done.exception, SystemExit) else "")
    assert said in told
    assert type(done.exception).__name__ == "UsageError", done.exception


@pytest.mark.parametrize(("forge", "library"), [("github", "github"), ("gitlab", "gitlab")])
def test_a_client_library_that_is_missing_is_named(tmp_path: Path, forge: str, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from advisor.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bot", "run", "--forge", forge, "--repo", "o/n", "--pr", "1"],
        env={**os.environ, "ADVISOR_TOKEN": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'torch-advisor[bot]'" in done.stderr


def test_help_is_there_for_each_command() -> None:
    for name, command in bot.commands.items():
        assert isinstance(command, click.Command)
        assert CliRunner().invoke(bot, [name, "--help"]).exit_code == 0
