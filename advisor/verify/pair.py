"""The resident pair: two copies of the script stay loaded, each in its own process, and take turns running blocks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from advisor.errors import AdvisorError, NoStepsError, ScriptError
from advisor.model import Timing
from advisor.session import Process, Spawn, Spec
from advisor.verify.timing import Arm, Block, measure_pair

TIMED_PLAN = "advisor.verify.resident:TimedPlan"
START_TIMEOUT_S = 900.0  # import, set-up and compilation up to the first stable steps
MAX_RESTARTS = 50  # of one arm in one race
WARMUP_SHARE = 0.25  # of the time a start may take that may be spent on steps whose times still move


class ResidentArm:
    """One arm of a timing pair over a child process, started when first needed; use it as a context manager.

    A script that ends by itself before all blocks are done is started again, warm-up included, and the block it
    interrupted is run anew. Raises NoStepsError when it ends before a warm-up and one block fit, ScriptError when it
    fails, ScriptTimeout when it hangs; `failed` and `out_of_memory` then tell more.
    """

    def __init__(self, spawn: Spawn, spec: Spec, *, plan: str = TIMED_PLAN, step_timeout: float = 600.0) -> None:
        self._spawn = spawn
        self._spec = dataclasses.replace(spec, plan=plan)
        self._timeout = step_timeout
        self._start_timeout = START_TIMEOUT_S
        self._process: Process | None = None
        self.windows: list[tuple[float, float]] = []  # of every block, seconds of the monotonic clock
        self.restarts = 0
        self.failed = False
        self.out_of_memory = False
        self.on_cuda = False
        self.warmup_s: float | None = None
        self.first_step_s: float | None = None
        self.step_us: float | None = None  # median of the last warm-up steps

    def start(self, timeout: float | None = None) -> None:
        """Start the script and wait until its steps are warm; does nothing when it runs already."""
        if self._process is not None:
            return
        self._start_timeout = timeout if timeout is not None else self._start_timeout
        options = {"max_warmup_s": self._start_timeout * WARMUP_SHARE, **self._spec.options}
        process = self._process = self._spawn(dataclasses.replace(self._spec, options=options))
        message = self._next(process, self._start_timeout)
        if message is None or message["event"] != "ready":
            raise self._failure(message, "before its step times were stable")
        self.warmup_s, self.step_us = float(message["warmup_s"]), float(message["step_us"])
        self.first_step_s, self.on_cuda = float(message["first_step_s"]), bool(message["on_cuda"])

    def run_block(self, steps: int) -> Block:
        """Run a block of measured steps while the other arm waits."""
        while self.restarts <= MAX_RESTARTS:
            fresh = self._process is None
            self.start()
            assert self._process is not None
            begin = time.monotonic()
            self._process.send({"cmd": "block", "steps": steps})
            message = self._next(self._process, self._timeout)
            if message is not None and message["event"] == "block":
                step_us = tuple(float(value) for value in message["step_us"])
                self.windows.append((begin, time.monotonic()))
                return Block(step_us=step_us, wall_us=float(message["wall_us"]), peak_bytes=message["peak_bytes"])
            if fresh or message is None or message["event"] != "ended":
                raise self._failure(message, f"before a warm-up and a block of {steps} steps fitted in")
            self.close()
            self.restarts += 1
        self.failed = True
        raise NoStepsError(f"the script had to be started {MAX_RESTARTS} times: let it train for longer")

    def _next(self, process: Process, timeout: float) -> dict[str, Any] | None:
        """The next message that answers a command; its absence means the child has gone."""
        try:
            while (message := process.receive(timeout)) is not None:
                if message["event"] in ("ready", "block", "ended"):
                    return message
        except ScriptError:
            self.failed = True
            self.close()
            raise
        return None

    def _failure(self, message: dict[str, Any] | None, when: str) -> AdvisorError:
        """What to raise when the script cannot be timed; the process is gone afterwards."""
        assert self._process is not None
        self.failed = True
        if message is not None and message["event"] == "ended":
            steps = message["steps"]
            error: AdvisorError = NoStepsError(
                f"the script ended by itself after {steps} steps, {when}: let it train for longer"
            )
        else:
            self._process.wait(10.0)
            self.out_of_memory = bool(self._process.status().get("out_of_memory"))
            error = self._process.failure()
        self.close()
        return error

    def close(self) -> None:
        """End the process; the arm can be started again."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send({"cmd": "stop"})
            process.wait(2.0)
            process.close()

    def __enter__(self) -> ResidentArm:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


class _Alone:
    """An arm that has the machine to itself: the other one is ended first and started again for its turn."""

    def __init__(self, arm: ResidentArm, other: ResidentArm) -> None:
        self._arm, self._other = arm, other

    def run_block(self, steps: int) -> Block:
        """Run a block in a fresh process."""
        self._other.close()
        return self._arm.run_block(steps)


def race(
    base: ResidentArm,
    candidate: ResidentArm,
    *,
    seconds: float,
    min_quads: int,
    max_quads: int,
    block_s: float = 0.5,
    floor: float = 0.01,
    start_s: float = START_TIMEOUT_S,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Timing:
    """Time two arms against each other for about `seconds`, both kept loaded afterwards where memory holds both.

    Starts count, but leave at least half of the time to blocks. Raises what the arms raise.
    """
    deadline = time.monotonic() + seconds
    alone = False
    while True:
        try:
            if not alone:
                base.start(start_s)
                candidate.start(start_s)
            deadline = max(deadline, time.monotonic() + seconds / 2)
            first: Arm = _Alone(base, candidate) if alone else base
            second: Arm = _Alone(candidate, base) if alone else candidate
            timing = measure_pair(
                first,
                second,
                min_quads=min_quads,
                max_quads=max_quads,
                block_s=block_s,
                deadline=deadline,
                floor=floor,
                on_progress=on_progress,
            )
            break
        except ScriptError:
            if alone or not (base.out_of_memory or candidate.out_of_memory):
                raise
            for arm in (base, candidate):
                arm.close()
                arm.failed = arm.out_of_memory = False
            alone = True
    notes = list(timing.notes)
    if alone:
        notes.append("memory does not hold both scripts: each block ran in a fresh process")
    restarts = base.restarts + candidate.restarts
    if restarts:
        notes.append(f"the script ended by itself and was started again {restarts} times")
    warm = (base.warmup_s or 0.0, candidate.warmup_s or 0.0)
    return dataclasses.replace(timing, warmup_s=warm, notes=tuple(notes))
