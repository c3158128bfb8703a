"""Start the user's script in a child process under a plan, talk to it, and never leave it behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import advisor
from advisor.capture.overlay import VARIABLE
from advisor.errors import AdvisorError, NoStepsError, OutputError, ScriptError, ScriptTimeout
from advisor.session import Spec

SITE = Path(__file__).resolve().parent / "site"
SLICE_S = 0.25  # how often a silent pipe is checked for a child that died while others still hold its end
GRACE_S = 3.0  # from SIGTERM to SIGKILL
TAIL_BYTES = 4000  # of the script's output quoted when it left no traceback
LOG = "output.log"
DROPPED = b"USDT:"  # lines of torch's own tracing set-up

Redact = Callable[[str], str]
_alive: weakref.WeakSet[Child] = weakref.WeakSet()


class Child:
    """One run of the script: its process group, its message channel and its log; use it as a context manager.

    `spec.options` may hold "environment" (extra variables) and "deterministic" (sets CUBLAS_WORKSPACE_CONFIG).
    `step_timeout` is the longest silence in seconds, first step and compilation included, after which the script counts
    as hanging. `redact` is applied to every line of output before it is written and to every text of an error. Raises
    OutputError when the run directory cannot be written.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        interpreter: str = sys.executable,
        redact: Redact = str,
        step_timeout: float = 600.0,
        cwd: str | None = None,
    ) -> None:
        self._redact = redact
        self._step_timeout = step_timeout
        self._buffer = b""
        self._killed_for: str | None = None
        self.out = Path(spec.out)
        child_in, self._to_child = os.pipe()
        self._from_child, child_out = os.pipe()
        self.spec = _with_pipes(spec, child_in, child_out)
        try:
            self._process = self._start(interpreter, cwd)
        except OSError as error:
            os.close(self._to_child)
            os.close(self._from_child)
            raise OutputError(f"cannot start the script: {error.strerror}: {error.filename}") from error
        finally:
            os.close(child_in)
            os.close(child_out)
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()
        _alive.add(self)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    def _start(self, interpreter: str, cwd: str | None) -> subprocess.Popen[bytes]:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "status.json").unlink(missing_ok=True)
        path = self.out / "spec.json"
        self.spec.save(path)
        assert self.spec.inbox is not None and self.spec.outbox is not None
        return subprocess.Popen(
            [interpreter, "-m", "advisor.capture.child", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self.spec.inbox, self.spec.outbox),
            env=child_environment(self.spec, interpreter),
            cwd=cwd,
            start_new_session=True,
        )

    def _copy_output(self) -> None:
        """Append the script's output to the log, line by line, until the pipe closes."""
        assert self._process.stdout is not None
        with (self.out / LOG).open("a", encoding="utf-8") as log:
            for line in self._process.stdout:
                if not line.startswith(DROPPED):
                    log.write(self._redact(line.decode("utf-8", "replace")))
                    log.flush()

    # ------------------------------------------------------------------------------------------------------- messages

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; a child that has gone away is ignored, its status tells the story."""
        try:
            os.write(self._to_child, (json.dumps(message) + "\n").encode())
        except OSError:  # the pipe is broken or closed
            return

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message but heartbeats, None once the child has gone.

        A child silent for `timeout` seconds (the step timeout when None) is killed and ScriptTimeout raised.
        """
        limit = self._step_timeout if timeout is None else timeout
        heard = time.monotonic()
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                heard = time.monotonic()
                message: dict[str, Any] = json.loads(line)
                if message.get("event") != "step":
                    return message
                continue
            if not self._read_more():
                return None
            if time.monotonic() - heard > limit and b"\n" not in self._buffer:
                self._killed_for = f"the script did not reach its next step within {limit:g} s and was stopped"
                self.kill()
                raise self.failure()

    def _read_more(self) -> bool:
        """Read what arrives within a slice of time; False once the child is gone and nothing is left to read."""
        if self._from_child < 0:
            return False
        exited = self._process.poll() is not None
        ready, _, _ = select.select([self._from_child], [], [], 0 if exited else SLICE_S)
        if not ready:
            return not exited
        data = os.read(self._from_child, 1 << 16)
        self._buffer += data
        return bool(data)

    # -------------------------------------------------------------------------------------------------------- the end

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit status, or None when the child still runs after `timeout` seconds."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)
        return status

    def kill(self) -> None:
        """End the child and all it started: SIGTERM, then SIGKILL to the whole group."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self._signal(signal.SIGKILL)  # also what outlived its parent: loader workers, torchrun ranks
        self._process.wait()
        self._reader.join(1.0)
        _alive.discard(self)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # nobody is left in the group
            return

    def close(self) -> None:
        """Kill what still runs and release the pipes."""
        self.kill()
        for descriptor in (self._to_child, self._from_child):
            if descriptor >= 0:
                os.close(descriptor)
        self._to_child = self._from_child = -1

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """How the script ended, as its child wrote it; empty when it left no record."""
        try:
            found: dict[str, Any] = json.loads((self.out / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def output_tail(self) -> str:
        """The last lines the script printed, redacted."""
        try:
            data = (self.out / LOG).read_bytes()
        except OSError:
            return ""
        text = data[-TAIL_BYTES:].decode("utf-8", "replace")
        return text if len(data) <= TAIL_BYTES else text.partition("\n")[2]

    def failure(self) -> AdvisorError:
        """What went wrong, with the script's own traceback or last output as the detail."""
        if self._killed_for is not None:
            return ScriptTimeout(self._killed_for, detail=self.output_tail() or None)
        code = self.wait(GRACE_S)
        error = describe_failure(self.status(), code)
        detail = error.detail or self.output_tail()
        return type(error)(self._redact(str(error)), detail=self._redact(detail) if detail else None)


def _with_pipes(spec: Spec, inbox: int, outbox: int) -> Spec:
    fields = {name: getattr(spec, name) for name in Spec.__dataclass_fields__}
    return Spec(**(fields | {"inbox": inbox, "outbox": outbox}))


def child_environment(spec: Spec, interpreter: str = sys.executable) -> dict[str, str]:
    """The user's environment, the overlay for every Python process of the run, and the variables the plan asks for."""
    environment = dict(os.environ)
    paths = [str(SITE), *filter(None, [environment.get("PYTHONPATH")])]
    home = Path(advisor.__file__).resolve().parent
    if interpreter != sys.executable or home.parent.name not in ("site-packages", "dist-packages"):
        paths.append(str(_package_link(Path(spec.out), home)))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.pop(VARIABLE, None)
    if spec.overlay:
        listing = Path(spec.out) / "overlay.json"
        listing.write_text(json.dumps(dict(spec.overlay)), encoding="utf-8")
        environment[VARIABLE] = str(listing.resolve())
    if spec.options.get("deterministic"):
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    environment |= {str(name): str(value) for name, value in dict(spec.options.get("environment", {})).items()}
    return environment


def _package_link(out: Path, home: Path) -> Path:
    """A folder that offers this package and none of its neighbours, for an interpreter that does not have it."""
    folder = (out / "package").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "advisor"
    if not link.is_symlink():
        link.symlink_to(home, target_is_directory=True)
    return folder


def describe_failure(status: Mapping[str, Any], code: int | None) -> ScriptError:
    """The error a failed child amounts to, from its status record and exit status (negative: killed by that signal)."""
    kind = status.get("status")
    if kind == "raised":
        return _describe_exception(status)
    if kind == "exited":
        told = (str(status.get("code")).strip().splitlines() or ["1"])[0]
        left = f"left with exit status {told}" if told.lstrip("-").isdigit() else f"stopped: {told}"
        return ScriptError(f"the script {left}")
    if kind == "interrupted":
        return ScriptError("the script was interrupted")
    if kind in ("ended", "stopped"):
        steps = int(status.get("steps", 0))
        if steps == 0:
            return NoStepsError("the script ended without an optimizer step: give arguments that make it train")
        return NoStepsError(f"the script ended by itself after {steps} steps: let it train for longer")
    if code is not None and code < 0:
        return ScriptError(_describe_signal(-code))
    if code is None:
        return ScriptError("the script does not answer")
    return ScriptError(f"the script's process ended with exit status {code} and left no record")


def _describe_exception(status: Mapping[str, Any]) -> ScriptError:
    kind, message = str(status.get("kind")), str(status.get("message"))
    detail = str(status.get("traceback", "")) or None
    if status.get("out_of_memory"):
        return ScriptError("the script ran out of memory: use a smaller batch or model", detail=detail)
    if kind == "EOFError":
        return ScriptError("the script reads standard input, which it does not have here", detail=detail)
    first = message.strip().splitlines()[0] if message.strip() else ""
    return ScriptError(f"the script raised {kind}{f': {first}' if first else ''}", detail=detail)


def _describe_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    if number == signal.SIGKILL:
        return "the script was killed by the system (SIGKILL), probably because the machine ran out of memory"
    if number == signal.SIGSEGV:
        return "the script crashed (SIGSEGV) inside a compiled library"
    return f"the script was ended by signal {name}"


@atexit.register
def _close_all() -> None:
    """No orphans, also when the command ends by an error nobody caught."""
    for child in list(_alive):
        child.kill()
