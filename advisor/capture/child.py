"""Inside the child: run the user's script unedited under a plan (`python -m advisor.capture.child SPEC`)."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from advisor.capture import overlay
from advisor.capture.hooks import COMPILED_STEP, Hooks, is_our_file, is_user_file, outermost_tensors
from advisor.session import Channel, SessionPlan, Spec, StopScript


class Session:
    """What a plan may use while the user's script runs."""

    def __init__(self, spec: Spec, plan: SessionPlan) -> None:
        self.spec = spec
        self.plan = plan
        self.channel = Channel(spec.inbox, spec.outbox)
        self.hooks = Hooks(plan)
        self.out = Path(spec.out)
        self.stopped = False
        self._heard = 0.0
        self.hooks.on_step = self.heartbeat

    def heartbeat(self, step: int) -> None:
        """Tell the parent, at most once a second, that the script still takes steps."""
        now = time.monotonic()
        if now - self._heard >= 1.0:
            self._heard = now
            self.channel.send({"event": "step", "step": step})

    def stop(self) -> None:
        """Leave the user's script at this step boundary."""
        self.stopped = True
        raise StopScript

    def progress(self, **message: Any) -> None:
        """Tell the parent where the child is."""
        self.channel.send(message)


def load_plan(name: str) -> SessionPlan:
    """Instantiate the plan class named "module:Class"."""
    module, _, attribute = name.partition(":")
    plan = getattr(importlib.import_module(module), attribute)()
    assert isinstance(plan, SessionPlan)
    return plan


def seed_everything(seed: int) -> None:
    """Seed torch, random and, where it is imported, numpy, before the script gets its turn."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def run(spec: Spec) -> int:
    """Run the script under its plan; the status file `status.json` says how it ended. Returns the exit status."""
    overlay.install(spec.overlay)
    session = Session(spec, load_plan(spec.plan))
    session.plan.session = session
    seed_everything(spec.seed)
    session.hooks.install()
    session.plan.start()
    status: dict[str, Any] = {"status": "ended"}
    try:
        _run_script(session)
    except StopScript:
        status = {"status": "stopped"}
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            status = {"status": "exited", "code": str(leaving.code)}
    except KeyboardInterrupt:
        status = {"status": "interrupted"}
    except BaseException as error:  # noqa: BLE001 - whatever the user's script raises is reported as theirs
        status = {"status": "stopped"} if session.plan.failed(error) else _describe_failure(error)
    if session.stopped and status["status"] != "raised":
        status = {"status": "stopped"}
    if status["status"] == "ended" and session.hooks.compiled_step():
        status = {"status": "exited", "code": COMPILED_STEP}
    status["steps"] = session.hooks.steps
    if status["status"] in ("ended", "stopped"):
        session.plan.finish()
    (session.out / "status.json").write_text(json.dumps(status), encoding="utf-8")
    session.progress(event="end", **status)
    return 0 if status["status"] in ("ended", "stopped") else 3


def _run_script(session: Session) -> None:
    spec = session.spec
    sys.argv = [spec.script, *spec.argv]
    if spec.entry:
        module, _, function = spec.entry.partition(":")
        sys.path.insert(0, os.path.dirname(spec.script) or ".")
        _drive(session, *getattr(importlib.import_module(module), function)())
        return
    sys.path[0] = os.path.dirname(spec.script)  # in place of the folder `-m` put there
    code = compile(overlay.source_of(spec.script, spec.overlay), spec.script, "exec", dont_inherit=True)
    main = type(sys)("__main__")
    main.__file__ = spec.script
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
    names = main.__dict__
    if session.hooks.steps == 0 and all(name in names for name in ("Model", "get_inputs", "get_init_inputs")):
        model = names["Model"](*names["get_init_inputs"]())
        _drive(session, model, tuple(names["get_inputs"]()))


def _drive(session: Session, model: Any, batch: Any, loss: Any = None) -> None:
    """Train a model that came without a loop, until the plan stops it."""
    arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise SystemExit("the model has no trainable parameter: there is no training step to optimize")
    optimizer = torch.optim.SGD(parameters, lr=1e-4)
    for _ in range(session.spec.options.get("drive_steps", 10_000)):
        output = model(*arguments)
        value = loss(output) if loss else sum(t.float().square().mean() for t in outermost_tensors(output))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def _describe_failure(error: BaseException) -> dict[str, Any]:
    """The user's traceback without our frames."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and not is_user_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    report = traceback.TracebackException(type(error), error, frames or error.__traceback__)
    report.stack[:] = [frame for frame in report.stack if not is_our_file(frame.filename)]
    text = "".join(report.format())
    return {
        "status": "raised",
        "kind": type(error).__qualname__,
        "message": str(error),
        "traceback": text,
        "out_of_memory": isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)),
    }


def main() -> None:
    """Entry point of the child process; leaves without running the script's exit handlers a second time."""
    spec = Spec.load(Path(sys.argv[1]))
    status = run(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads and handlers of a stopped script must not hold the process


if __name__ == "__main__":
    main()
