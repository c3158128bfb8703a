"""The whole bot in one piece: `advisor bot serve` as a process, signed deliveries, real runs of a naive script.

Real: the server, its queue, git over file://, the sandbox, every measurement and proof. The forge is `FakeHub`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakehub_git
import fakehub_shapes
import prism
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from fakehub import FakeHub
from fakehub_state import Pull, Repo
from handed import NAIVE

from advisor.bot.sandboxes import sandbox
from advisor.errors import UsageError

pytest.importorskip("torch")
NAME = "acme/model"
SECRET = "a-long-secret-of-the-webhook"
TRAIN = (NAIVE / "train.py").read_text(encoding="utf-8")
SETTINGS = (NAIVE / "advisor.toml").read_text(encoding="utf-8")
LONGEST_S = 400.0  # of one task, on a busy machine


class Running:
    """The server, what it was told, and the forge it talks to."""

    def __init__(self, hub: FakeHub, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.hub, self.url, self.process, self.log = hub, url, process, log

    @property
    def repo(self) -> Repo:
        return self.hub.sync(NAME)

    def deliver(self, event: str, payload: Any, delivery: str | None = None) -> tuple[str, Any]:
        """Deliver as GitHub does; the delivery's id and the answer."""
        body = json.dumps(payload).encode()
        delivery = delivery or str(uuid.uuid4())
        headers = {
            "Content-Type": "application/json",
            "X-GitHub-Event": event,
            "X-GitHub-Delivery": delivery,
            "X-Hub-Signature-256": "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest(),
        }
        request = urllib.request.Request(f"{self.url}/github", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return delivery, (answer.status, json.load(answer))

    def idle(self) -> None:
        """Wait until nothing is waiting or being worked on."""
        deadline = time.monotonic() + LONGEST_S
        while True:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=10) as answer:
                health = json.load(answer)
            if not health["waiting"] and not health["working"]:
                return
            assert time.monotonic() < deadline, f"{health}: {self.said()}"
            assert self.process.poll() is None, self.said()
            time.sleep(0.2)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")[-4000:]

    def proposed(self) -> list[Pull]:
        return [p for p in self.repo.pulls.values() if p.head.startswith("advisor/") and p.state == "open"]

    def push(self, branch: str, files: dict[str, str | None]) -> None:
        """Commit, and deliver the push."""
        before = fakehub_git.commit_of(self.repo.bare, branch) or "0" * 40
        after = self.hub.commit(NAME, branch, files)
        self.deliver("push", self.hub.push_event(NAME, branch, before, after))

    def until(self, done: Callable[[], bool], ask: Callable[[], object]) -> None:
        """Ask up to three times for what a busy machine may leave undecided."""
        for _ in range(3):
            ask()
            self.idle()
            if done():
                return
        if "inconclusive" in self.outcomes():
            pytest.skip("the machine was too busy for a verdict")
        pytest.fail(self.said())

    def outcomes(self) -> str:
        """What the dashboard says of the last runs."""
        return " ".join(issue.body or "" for issue in self.repo.issues.values())


@contextmanager
def described(hub: FakeHub, folder: Path) -> Iterator[str]:
    """Where the forge is: behind Prism where it is there, and then every request holds against GitHub's description."""
    if "ADVISOR_PRISM" not in os.environ:
        yield hub.url
        return
    with prism.proxy(fakehub_shapes.CONTRACT, hub.url, folder) as proxy:
        yield proxy.url
    told = [each for each in proxy.violations() if each.startswith("request")]
    assert not told, told


@contextmanager
def served(folder: Path) -> Iterator[Running]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    public = key.public_key().public_bytes(kinds[0], serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pem").write_bytes(key.private_bytes(*kinds))
    (folder / "secret").write_text(SECRET, encoding="utf-8")
    for name in ("key.pem", "secret"):
        (folder / name).chmod(0o600)
    log = folder / "server.log"
    with FakeHub(folder / "hub") as hub, log.open("wb") as stream, described(hub, folder) as url:
        hub.add_repository(NAME, permissions={"octocat": "write"})
        hub.commit(NAME, "main", {"train.py": TRAIN, "advisor.toml": SETTINGS}, "first")
        app = hub.add_app("advisor", public.decode())
        command = [sys.executable, "-m", "advisor", "bot", "serve", "--port", "0", "--url", url]
        command += ["--app-id", str(app.id), "--app-key", str(folder / "key.pem"), "--state", str(folder / "state")]
        command += ["--webhook-secret-file", str(folder / "secret")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=stream)
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"http://[0-9.]+:\d+", log.read_text(encoding="utf-8"))):
                assert process.poll() is None, log.read_text(encoding="utf-8")
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield Running(hub, found[0], process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()


@pytest.mark.slow
def test_from_a_delivery_to_a_pull_request_and_to_its_end(tmp_path: Path) -> None:
    try:
        sandbox.find_sandbox("auto")
    except UsageError as error:
        pytest.skip(str(error))
    with served(tmp_path) as server:
        hub = server.hub
        hub.commit(NAME, "feature", {"train.py": TRAIN.replace("lr=1e-3", "lr=2e-3")})
        number = hub.open_pull(NAME, head="feature").number
        opened = hub.pull_event(NAME, number, "opened")
        first, answer = server.deliver("pull_request", opened)
        assert answer[0] == 202
        server.idle()
        (comment,) = server.repo.of(number)
        check = server.repo.check("advisor", server.repo.pulls[number].head_sha)
        assert check is not None, server.said()
        assert check.status == "completed"
        assert "train.py 512" in comment.body
        assert comment.author == "advisor[bot]"

        # on command, a proven rewrite becomes a pull request
        def command() -> None:
            comment = hub.comment(NAME, number, "octocat", "Let us see.\n/advisor optimize\n")
            server.deliver("issue_comment", hub.comment_event(NAME, comment))

        server.until(lambda: bool(server.proposed()), command)
        (pull,) = server.proposed()
        assert pull.author == "advisor[bot]"
        assert "scaled_dot_product_attention" in (pull.body or "")
        assert "What was not verified" in (pull.body or "") or "not verified" in (pull.body or "").lower()
        patched = fakehub_git.git(server.repo.bare, "show", f"{pull.head}:train.py").decode()
        assert "scaled_dot_product_attention" in patched

        # the same delivery again
        before = server.repo.of(number), len(server.repo.checks), len(hub.requests)
        _, answer = server.deliver("pull_request", opened, first)
        assert answer[0] == 200
        _, answer = server.deliver("pull_request", opened)  # replayed under another id
        assert answer[0] == 200
        server.idle()
        assert (server.repo.of(number), len(server.repo.checks), len(hub.requests)) == before

        # a new commit: the comment is edited in place
        hub.commit(NAME, "feature", {"train.py": TRAIN.replace("lr=1e-3", "lr=3e-3")})
        server.deliver("pull_request", hub.pull_event(NAME, number, "synchronize"))
        server.idle()
        ours = [c for c in server.repo.of(number) if c.body.startswith("<!-- advisor:report -->")]
        assert [c.id for c in ours] == [comment.id]
        assert ours[0].edits
        assert server.repo.check("advisor", server.repo.pulls[number].head_sha) is not None

        # the base moves: put on top where nothing that was measured changed, measured again where it did
        server.push("main", {"README.md": "hello\n"})
        server.idle()
        main = fakehub_git.commit_of(server.repo.bare, "main")
        assert fakehub_git.git(server.repo.bare, "log", "-1", "--format=%P", pull.head).decode().strip() == main
        changed = TRAIN.replace('"""A small', '"""One small')
        server.until(
            lambda: any("One small" in at_branch(server, p) for p in server.proposed()),
            lambda: server.push("main", {"train.py": changed, "count.txt": str(time.time())}),
        )
        assert [p.number for p in server.proposed()] == [pull.number]

        # the rule is turned off
        off = SETTINGS.replace("[bot]", 'ignore = ["naive-attention"]\n[bot]')
        server.push("main", {"advisor.toml": off})
        server.idle()
        assert not server.proposed()
        assert any("was turned off" in c.body for c in server.repo.of(pull.number))
        secrets = [SECRET.encode(), *(token.encode() for token in hub.tokens)]
        kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
        assert kept
        told = [path.name for path in (server.log, *kept) for secret in secrets if secret in path.read_bytes()]
        assert not told


def at_branch(server: Running, pull: Pull) -> str:
    return fakehub_git.git(server.repo.bare, "show", f"{pull.head}:train.py").decode()
