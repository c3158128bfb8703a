"""Inside the child: record steps, a Kineto trace, the annotated graphs and the loop's loaders and optimizers."""

from __future__ import annotations

import json
from typing import Any

import torch

from advisor import clock
from advisor.capture.annotate import Annotation
from advisor.capture.calibrate import measure_rates
from advisor.capture.hooks import outermost_tensors, portable
from advisor.session import SessionPlan


class CapturePlan(SessionPlan):
    """Warm up, time steps without a profiler, profile some with Kineto, then run one under annotation, then stop.

    Options: warmup, steps, profile_steps (numbers of steps), annotate (bool), device_rates (bool).
    """

    def start(self) -> None:
        options = self.session.spec.options
        self.warmup = int(options["warmup"])
        self.timed = range(self.warmup, self.warmup + int(options["steps"]))
        self.profiled = int(options["profile_steps"])
        self.marks: list[Any] = []
        self.losses: list[Any] = []
        self.roots: list[Any] = []
        self.root_calls: list[dict[str, Any]] = []
        self.profiler: Any = None
        self.annotation: Any = None
        self.written: dict[str, Any] = {"missing": {}}
        self.session.progress(event="phase", name="warm-up")

    # ------------------------------------------------------------------------------------------------------ callbacks

    def module_call(self, module: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """During the second warm-up step: note the outermost modules and the shape of a batch."""
        if torch.is_grad_enabled():
            if all(module is not known for known in self.roots):
                self.roots.append(module)
            self.root_calls.append(_describe_call(module, args, kwargs))
        return call(module, *args, **kwargs)

    def backward(self, loss: Any) -> None:
        if len(self.losses) < 1000:
            self.losses.append(loss)

    def step_end(self, step: int) -> None:
        hooks = self.session.hooks
        if step == 0:
            hooks.watch_modules()
        elif step == 1:
            hooks.unwatch_modules()
        last_timed = self.timed[-1]
        if step >= self.timed[0] - 1 and step <= last_timed:
            self.marks.append(clock.mark())
        if step == self.timed[0] - 1:
            self.session.progress(event="phase", name="timing")
        if step == last_timed:
            clock.synchronize()
            self.written["peak_bytes"] = clock.peak_bytes()
            self._start_profiler()
        elif last_timed < step <= last_timed + 1 + self.profiled and self.profiler is not None:
            self._advance_profiler(step - last_timed)
        elif self.annotation is not None:
            self._advance_annotation()

    def failed(self, error: BaseException) -> bool:
        """An error under annotation loses the graph, not the run: the steps before it ran without Dynamo."""
        if self.annotation is None:
            return False
        self.annotation = None
        first = (str(error).strip().splitlines() or [""])[0]
        self.written["missing"]["graph"] = f"the annotated run raised {type(error).__name__}: {first}"
        return True

    def finish(self) -> None:
        """Write probe.json; called when the script has ended or was stopped."""
        hooks = self.session.hooks
        clock.synchronize()
        step_us = clock.differences(self.marks)
        self.written |= {
            "steps_seen": hooks.steps,
            "backwards": hooks.backwards,
            "step_us": step_us,
            "losses": [float(loss.float().mean()) for loss in self.losses],
            "loaders": hooks.describe_loaders(self.timed),
            "optimizers": hooks.describe_optimizers(),
            "root_calls": self.root_calls,
            "flags": hooks.flags,
            "device": _describe_device(),
            "software": _describe_software(),
        }
        if self.session.spec.options.get("device_rates", True) and step_us:
            self.session.progress(event="phase", name="device rates")
            self.written["device"] |= measure_rates()
        document = portable(self.written, self.session.spec.root)
        (self.session.out / "probe.json").write_text(json.dumps(document), encoding="utf-8")

    # ------------------------------------------------------------------------------------------------------- profiler

    def _start_profiler(self) -> None:
        self.session.progress(event="phase", name="profiling")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.profiled, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.session.out / "trace.json.gz")),
        )
        self.profiler.start()

    def _advance_profiler(self, done: int) -> None:
        clock.synchronize()  # so that the kernels of a step fall inside its range; these steps are not timed
        self.profiler.step()
        if done <= self.profiled:
            return
        self.profiler.stop()
        self.profiler = None
        if not self.session.spec.options.get("annotate", True):
            self.session.stop()
        self._start_annotation()

    def _start_annotation(self) -> None:
        self.session.progress(event="phase", name="annotated run")
        self.annotation = Annotation(self.roots, self.session.out, self.session.spec.root)
        self.annotation.begin()

    def _advance_annotation(self) -> None:
        if self.annotation.advance():
            self.annotation.write()
            self.annotation = None
            self.session.stop()


def _describe_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "training": module.training,
        "inputs": [
            {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for t in outermost_tensors([args, kwargs])
        ],
    }


def _describe_software() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "collectors": ["kineto", "dynamo"],
    }


def _describe_device() -> dict[str, Any]:
    if not clock.on_cuda():
        return {"kind": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "kind": "cuda",
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "count": torch.cuda.device_count(),
    }
