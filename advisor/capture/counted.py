"""Inside the child: let a profiler outside see one warm step of the user's script and nothing else."""

from __future__ import annotations

import torch

from advisor.session import SessionPlan


class CountedPlan(SessionPlan):
    """Warm up, then run one step between cudaProfilerStart and cudaProfilerStop, then stop. Option: warmup (steps)."""

    def start(self) -> None:
        self.warmup = int(self.session.spec.options["warmup"])

    def step_end(self, step: int) -> None:
        if step == self.warmup:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        elif step > self.warmup:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self.session.stop()
