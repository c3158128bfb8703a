"""Prism, which holds requests and answers against an OpenAPI description, as a process of a test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PATIENCE_S = 60.0
_VIOLATION = re.compile(r"Violation: (\S+) (.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prism:
    """A running Prism at `url`; `log` is its output."""

    url: str
    log: Path

    def violations(self) -> list[str]:
        """Every violation of the description so far, by a request or by an answer."""
        return [f"{m[1]} {m[2].strip()}" for m in _VIOLATION.finditer(self.log.read_text(encoding="utf-8"))]


def executable() -> list[str]:
    """How to start Prism, the executable that ADVISOR_PRISM names; skips the test where it or node is missing."""
    named = os.environ.get("ADVISOR_PRISM")
    if not named:
        pytest.skip("ADVISOR_PRISM does not name Prism (npm install @stoplight/prism-cli@5.14.2)")
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing")
    if not Path(named).exists():
        pytest.fail(f"ADVISOR_PRISM names no file: {named}")
    return [node, named]


@contextlib.contextmanager
def mock(description: Path, folder: Path) -> Iterator[Prism]:
    """Prism answers by itself, with examples of the description."""
    with _running(["mock"], [str(description)], folder) as prism:
        yield prism


@contextlib.contextmanager
def proxy(description: Path, upstream: str, folder: Path) -> Iterator[Prism]:
    """Prism hands requests on and logs what in them or in the answers violates the description."""
    with _running(["proxy"], [str(description), upstream], folder) as prism:
        yield prism


@contextlib.contextmanager
def _running(verb: list[str], arguments: list[str], folder: Path) -> Iterator[Prism]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"prism-{port}.log"
    command = [*executable(), *verb, "-h", "127.0.0.1", "-p", str(port), *arguments]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            _wait(process, log)
            yield Prism(url=f"http://127.0.0.1:{port}", log=log)
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while "Prism is listening" not in log.read_text(encoding="utf-8"):
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < end, log.read_text(encoding="utf-8")
        time.sleep(0.05)
