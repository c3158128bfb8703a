"""Inside the child: keep the script loaded and run blocks of its steps on command, so that two arms can take turns."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from advisor import clock
from advisor.session import SessionPlan
from advisor.verify.timing import stable

MAX_WARMUP_S = 120.0  # after which timing starts although step times still move
LEVEL = 10  # steps on both sides of a comparison of medians, for step times too noisy ever to be stable


class TimedPlan(SessionPlan):
    """Warm up until step times are stable, then run blocks of steps on command and wait between them.

    Answers {"event": "ready"} and, to {"cmd": "block", "steps": n}, {"event": "block", "step_us", "wall_us",
    "peak_bytes"}; {"cmd": "stop"} or a closed channel ends the script; {"event": "ended"} says it ended by itself.
    While it waits it sits in a blocking read inside the optimizer's step. Option: max_warmup_s.
    """

    def start(self) -> None:
        self.max_warmup_s = float(self.session.spec.options.get("max_warmup_s", MAX_WARMUP_S))
        self.begun = time.perf_counter()
        self.last: float | None = None
        self.warming = True
        self.first_step_s: float | None = None
        self.warmup_us: list[float] = []
        self.lead_in = 0  # steps of a block still to run before the measured ones
        self.left = 0
        self.marks: list[Any] = []

    def step_end(self, step: int) -> None:
        if self.warming:
            self._warm_up(step)
            return
        if self.lead_in > 0:
            self.lead_in -= 1
            if self.lead_in == 0:
                self._begin_measuring()
            return
        self.marks.append(clock.mark())
        self.left -= 1
        if self.left == 0:
            self._end_block()

    def finish(self) -> None:
        """Tell the parent when the script came to its end before it was told to stop."""
        if not self.session.stopped:
            self.session.progress(event="ended", steps=self.session.hooks.steps, warm=not self.warming)

    # -------------------------------------------------------------------------------------------------------- warm-up

    def _warm_up(self, step: int) -> None:
        """Time every step with a synchronisation; these times only decide when to begin."""
        clock.synchronize()
        now = time.perf_counter()
        if step == 0:
            self.first_step_s = now - self.begun
        elif self.last is not None:
            self.warmup_us.append((now - self.last) * 1e6)
        self.last = now
        enough = stable(self.warmup_us) or _level(self.warmup_us)
        late = len(self.warmup_us) >= LEVEL and now - self.begun > self.max_warmup_s + (self.first_step_s or 0.0)
        if enough or late:
            self.warming = False
            self.ready()

    def ready(self) -> None:
        """Warm-up is over: say so and wait for work."""
        self.session.progress(
            event="ready",
            warmup_s=time.perf_counter() - self.begun,
            first_step_s=self.first_step_s,
            step_us=statistics.median(self.warmup_us[-20:]),
            steps=self.session.hooks.steps,
            on_cuda=clock.on_cuda(),
        )
        self._hand_over()

    # --------------------------------------------------------------------------------------------------------- blocks

    def _hand_over(self) -> None:
        """Give the device's cached memory back and sleep until the next command."""
        if clock.on_cuda():
            torch.cuda.empty_cache()
        command = self.session.channel.receive()
        if command is None or command.get("cmd") != "block":
            self.session.stop()
        assert command is not None
        self.left = max(1, int(command["steps"]))
        self.lead_in = self._lead_in_steps()
        if self.lead_in == 0:
            self._begin_measuring()

    def _lead_in_steps(self) -> int:
        """Unmeasured steps at the start of a block: to fill the allocator again, use the batches workers have ready."""
        ahead = 0
        for record in self.session.hooks.loaders:
            ahead = max(ahead, record.loader.num_workers * (record.loader.prefetch_factor or 0))
        return max(ahead, 1 if clock.on_cuda() else 0)

    def _begin_measuring(self) -> None:
        clock.synchronize()
        if clock.on_cuda():
            torch.cuda.reset_peak_memory_stats()
        self.marks = [clock.mark()]
        self.wall = time.perf_counter()

    def _end_block(self) -> None:
        clock.synchronize()
        wall_us = (time.perf_counter() - self.wall) * 1e6
        self.block_done(clock.differences(self.marks), wall_us, clock.peak_bytes())
        self._hand_over()

    def block_done(self, step_us: list[float], wall_us: float, peak_bytes: int) -> None:
        """Answer a block command."""
        self.session.progress(event="block", step_us=step_us, wall_us=wall_us, peak_bytes=peak_bytes)


class BaselinePlan(TimedPlan):
    """A resident arm with one global change nobody had to rewrite for.

    Option `variant`: as-found, tf32 (float32 products may use TensorFloat-32; what the script sets is ignored) or
    compile (the outermost modules of the first step are compiled in place).
    """

    def start(self) -> None:
        super().start()
        self.variant = str(self.session.spec.options.get("variant", "as-found"))
        self.roots: list[nn.Module] = []
        if self.variant == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.set_float32_matmul_precision = lambda precision: None
        if self.variant == "compile":
            self.session.hooks.watch_modules()

    def module_call(self, module: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the outermost modules that take part in training."""
        if torch.is_grad_enabled() and all(module is not known for known in self.roots):
            self.roots.append(module)
        return call(module, *args, **kwargs)

    def step_end(self, step: int) -> None:
        if step == 0 and self.variant == "compile":
            self.session.hooks.unwatch_modules()
            for root in self.roots:
                if any(True for _ in root.parameters()):
                    root.compile()
        super().step_end(step)


def _level(times: list[float]) -> bool:
    """Whether the median of the last steps is that of the steps before them."""
    if len(times) < 2 * LEVEL:
        return False
    late, early = statistics.median(times[-LEVEL:]), statistics.median(times[-2 * LEVEL : -LEVEL])
    return abs(late - early) <= 0.1 * early
