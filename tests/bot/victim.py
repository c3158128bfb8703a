"""The bot as hostile code meets it: a process with a token in its environment, its memory, its files and its servers.

    victim.py KIND FOLDER INTERPRETER

Runs `hostile.py` in a sandbox of that kind and prints as JSON how that ended and what came of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from advisor.bot.sandboxes.sandbox import NOBODY, Limits, Sandbox, find_sandbox, read_result
from advisor.errors import ArtifactError
from advisor.redact import Redactor

TOKEN = os.environ["BOT_TOKEN"]
LOG_BYTES = 64 << 10


class Handler(BaseHTTPRequestHandler):
    """Gives the token to whoever asks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(TOKEN.encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


def serve(name: str) -> int:
    """Start both servers; the port of the one."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind("\0" + name)
    unix.listen()

    def answer() -> None:
        while True:
            client, _ = unix.accept()
            client.sendall(TOKEN.encode())
            client.close()

    threading.Thread(target=answer, daemon=True).start()
    return int(web.server_address[1])


def plant(folder: Path) -> list[Path]:
    """The places where a bot and its owner keep secrets; every file holds the token."""
    home = Path(os.environ["HOME"])
    places = [folder / "state" / "key.pem", folder / "app.pem", folder / "tree" / "inner" / "state.db"]
    places += [home / name for name in (".netrc", ".git-credentials", ".config/gh/hosts.yml", ".ssh/id_ed25519")]
    for path in places:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"secret {TOKEN}\n")
        path.chmod(0o600)
    for closed in (folder / "state", folder / "tree" / "inner", home):
        closed.chmod(0o700)
    return places


def the_sandbox(kind: str) -> Sandbox:
    """As asked for; that of another account is made as it is, because the interpreter here may be root's alone."""
    if kind == "user":
        return Sandbox(kind="user", uid=NOBODY, gid=NOBODY)
    return find_sandbox(kind)


def what_is_readable(out: Path) -> list[str]:
    """Which of the things that hostile code left would be taken for results."""
    taken = []
    for name in (
        "link",
        "folder/key.pem",
        "pipe",
        "sparse",
        "hard",
        "again",
        "none",
        "../app.pem",
        ".",
        "",
        "/etc/passwd",
    ):
        try:
            read_result(out, name, 1 << 20)
            taken.append(name)
        except ArtifactError:
            continue
    return taken


def main() -> None:
    """Let it try, and say what it got."""
    kind, folder, interpreter = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    held = bytearray(f"in memory {TOKEN}".encode())
    secrets = plant(folder)
    out, log = folder / "out", folder / "run.log"
    out.mkdir()
    for path in (folder, folder / "tree"):
        path.chmod(0o711)
    code = folder / "code"
    code.mkdir()
    (code / "hostile.py").write_bytes((Path(__file__).parent / "hostile.py").read_bytes())
    opened = os.open(secrets[0], os.O_RDONLY)
    name = f"advisor-test-{os.getpid()}"
    sleeper = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    outside = [folder, code, folder / "tree", Path.home()]
    if kind != "none":
        outside += [Path("/"), Path("/usr"), Path("/etc"), Path(sys.prefix), Path(__file__).parent]
    told: dict[str, Any] = {
        "pids": [os.getpid(), sleeper.pid],
        "secrets": [str(path) for path in secrets],
        "outside": [str(place) for place in outside],
        "port": serve(name),
        "socket": name,
        "out": str(out),
        "everything": kind == "bubblewrap",
        "harm": kind != "none",
    }
    finished = the_sandbox(kind).run(
        [interpreter, "-B", str(code / "hostile.py"), json.dumps(told)],
        cwd=code,
        writable=[out],
        readable=[folder / "tree"],
        hidden=[folder / "state", folder / "app.pem", folder / "tree" / "inner", Path.home() / ".netrc"],
        environment=dict(os.environ),
        network=kind == "none",
        limits=Limits(seconds=120, log_bytes=LOG_BYTES),
        log=log,
        redact=Redactor.of_machine(extra=(TOKEN,)).text,
    )
    with open(out / "alive", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the daemon lives
    alive = sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    said = {
        "status": finished.status,
        "left_behind": finished.left_behind,
        "found": json.loads(read_result(out, "found.json", 1 << 20)),
        "planted": [str(place) for place in outside if (place / "planted-by-hostile-code").exists()],
        "taken": what_is_readable(out),
        "log": len(log.read_bytes()),
        "alive": alive,
        "held": held.decode() == f"in memory {TOKEN}" and os.fstat(opened).st_size > 0,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
