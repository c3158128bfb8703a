"""A real git remote for tests: bare repositories behind `git http-backend` on a loopback port, with Basic auth.

Everything git-like is git's own; what this stands for of a forge is the front door: a token, an answer other than 200,
a redirect, a hook that declines protected branches. Also good for `file://`.
"""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

PEOPLE = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", "Ada"), ("EMAIL", "ada@example.org"), ("DATE", "1700000000 +0000"))
}
_PROTECT = """\
#!/bin/sh
while read -r old new ref; do
    case "$ref" in {pattern})
        echo "GH006: Protected branch update failed for $ref." >&2
        exit 1 ;;
    esac
done
"""


def environment() -> dict[str, str]:
    """For git of the tests: no configuration of the machine or the account."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "LC_ALL": "C",
        **PEOPLE,
    }


def git(folder: Path, *arguments: str, stdin: bytes = b"", extra: Mapping[str, str] | None = None) -> str:
    """What git says in a folder; a failure is a failure of the test."""
    command = ["git", "-C", str(folder), "-c", "init.defaultBranch=main", *arguments]
    done = subprocess.run(command, input=stdin, env=environment() | dict(extra or {}), capture_output=True)
    assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
    return done.stdout.decode().strip()


@dataclass(frozen=True)
class Seen:
    """A request, as it came in."""

    method: str
    path: str
    authorization: str | None


class GitServer:
    """Serves the bare repositories below `root`; `token` None lets everybody in.

    `answer` may be set to a function of the path that gives (status, headers) in place of git, or None.
    """

    def __init__(self, root: Path, *, token: str | None = None, user: str = "x-access-token") -> None:
        self.root, self.token, self.user = root, token, user
        self.seen: list[Seen] = []
        self.answer: Callable[[str], tuple[int, Mapping[str, str]] | None] = lambda _: None
        root.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> GitServer:
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self._http.server_address[1])

    def url(self, name: str, *, host: str = "127.0.0.1") -> str:
        """Over HTTP, without credentials."""
        return f"http://{host}:{self.port}/{name}"

    def create(self, name: str, files: Mapping[str, str] | None = None) -> Path:
        """A bare repository that takes pushes; with `files` on main."""
        bare = self.root / name
        bare.parent.mkdir(parents=True, exist_ok=True)
        git(self.root, "init", "--quiet", "--bare", str(bare))
        git(bare, "config", "http.receivepack", "true")
        if files is not None:
            commit(bare, "refs/heads/main", files)
        return bare

    def protect(self, name: str, pattern: str = "refs/heads/main") -> None:
        """Decline every push to refs that fit a shell pattern, as a forge does for a protected branch."""
        hook = self.root / name / "hooks" / "pre-receive"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(_PROTECT.format(pattern=pattern))
        hook.chmod(0o755)


def commit(
    bare: Path, ref: str, files: Mapping[str, str], *, parent: str | None = None, message: str = "change"
) -> str:
    """Let somebody commit on `parent` (else on what `ref` is at) and set the ref to it, without a work tree."""
    if parent is None:
        found = subprocess.run(
            ["git", "-C", str(bare), "rev-parse", "--verify", "-q", ref],
            env=environment(),
            capture_output=True,
            text=True,
        )
        parent = found.stdout.strip() or None
    index = {"GIT_INDEX_FILE": str(bare / "index.of.tests")}
    git(bare, "read-tree", *([parent] if parent else ["--empty"]), extra=index)
    for path, text in files.items():
        blob = git(bare, "hash-object", "-w", "--stdin", stdin=text.encode())
        git(bare, "update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", extra=index)
    tree = git(bare, "write-tree", extra=index)
    sha = git(bare, "commit-tree", tree, *(["-p", parent] if parent else []), "-m", message)
    git(bare, "update-ref", ref, sha)
    return sha


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: GitServer

    def log_message(self, *_: object) -> None:
        """Quiet; `seen` tells."""

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _serve(self, body: bytes) -> None:
        owner = self.server_of
        owner.seen.append(Seen(self.command, self.path, self.headers.get("Authorization")))
        other = owner.answer(self.path)
        if other is not None:
            self._answer(other[0], other[1], b"")
        elif owner.token is not None and not self._known():
            self._answer(401, {"WWW-Authenticate": 'Basic realm="git"'}, b"")
        else:
            self._answer(*self._backend(body))

    def _known(self) -> bool:
        owner = self.server_of
        pair = base64.b64encode(f"{owner.user}:{owner.token}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {pair}"

    def _backend(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        path, _, query = self.path.partition("?")
        variables = environment() | {
            "GIT_PROJECT_ROOT": str(self.server_of.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "bot",
        }
        said = subprocess.run(["git", "http-backend"], input=body, env=variables, capture_output=True).stdout
        head, _, payload = said.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        return int(fields.pop("Status", "200").split()[0]), fields, payload

    def _answer(self, status: int, headers: Mapping[str, str], payload: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)
