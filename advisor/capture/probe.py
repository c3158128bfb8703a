"""Inside the child: record steps, a Kineto trace, the annotated graphs and the loop's loaders and optimizers."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from advisor import clock
from advisor.capture.annotate import Annotation
from advisor.capture.builds import Builds
from advisor.capture.calibrate import measure_rates
from advisor.capture.compiled import Compilations
from advisor.capture.eager import EagerRecorder
from advisor.capture.fetches import Fetches
from advisor.capture.hooks import LoaderRecord, outermost_tensors, portable
from advisor.capture.loopcalls import LoopCalls
from advisor.session import SessionPlan

KERNEL_PACKAGES = ("flash_attn", "liger_kernel", "torchao", "triton")  # distributions whose kernels rules can offer
NOTED_STEPS = 2  # timed ones in which the calls of every step are noted; the median step is to be another
EVENTS = 256  # at most: made before the timed steps
MARKED_S = 0.025  # on a GPU steps that take less share a mark: an event costs the host most of what the hooks do
POSTPONED = 3  # steps at most in which the script compiles and which are not timed; one that always does is
BRIEF_STEPS = 2  # under annotation: one that describes, one under the profiler


class CapturePlan(SessionPlan):
    """Warm up, time steps without a profiler, profile some with Kineto, then run one under annotation, then stop.

    Options: `warmup`, `steps`, `profile_steps` (numbers of steps), `annotate`, `device_rates` (bool).
    `brief` (bool) is for short scripts: after `warmup` steps (1 unless given) two steps under annotation, then up to
    `steps` timed ones (3 unless given), then stop. None is profiled without annotation: trace.json.gz is the trace of
    the annotated step, and `missing` says so under "times". A script that ends before leaves what was recorded by
    then: after `warmup` + 2 steps all but the timed ones, in whose place the annotated step is timed.
    `dynamo` (bool, true unless given): whether modules are captured by Dynamo, or only recorded call by call.
    """

    def start(self) -> None:
        options = self.session.spec.options
        self.brief = bool(options.get("brief", False))
        self.warmup = int(options.get("warmup", 1) if self.brief else options["warmup"])
        steps = int(options.get("steps", 3) if self.brief else options["steps"])
        self.profiled = 0 if self.brief else int(options["profile_steps"])
        first = self.warmup + BRIEF_STEPS if self.brief else self.warmup
        self.timed = range(first, first + steps)
        self.postponed = 0
        self.resting = False
        self.marks: list[Any] = []
        self.marked: list[int] = []  # the step that each of them ends
        self.mark = clock.mark
        self.stand_in: list[Any] = []  # marks around the annotated step, for when no step is timed
        self.losses: list[Any] = []
        self.roots: list[Any] = []
        self.root_calls: list[dict[str, Any]] = []
        self.profiler: Any = None
        self.annotation: Any = None
        self.allocator: dict[str, int] = {}  # its counts before the timed steps
        self.written: dict[str, Any] = {"missing": {}}
        self.compiled = Compilations()
        if self.brief:
            self.session.hooks.watch_modules()
        else:
            self.compiled.resume()
        self.calls = LoopCalls(lambda: self.session.hooks.steps)
        self.calls.install()
        self.session.hooks.on_call = self.calls.on_call
        self.fetches = Fetches()
        self.session.hooks.on_fetch = self.fetches.fetch
        self.builds = Builds(lambda: self.session.hooks.steps)
        self.session.progress(event="phase", name="warm-up")

    # ------------------------------------------------------------------------------------------------------ callbacks

    def module_call(self, module: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """During a warm-up step: note the outermost modules and the shape of a batch."""
        if torch.compiler.is_compiling():  # inside a module that the script compiles: Dynamo traces through
            return call(module, *args, **kwargs)
        if torch.is_grad_enabled():
            if all(module is not known for known in self.roots):
                self.roots.append(module)
            self.root_calls.append(_describe_call(module, args, kwargs))
            self.calls.note("module", {"class": type(module).__qualname__, "training": module.training})
        return call(module, *args, **kwargs)

    def backward(self, loss: Any) -> None:
        if len(self.losses) < 1000:
            self.losses.append(loss)

    def step_end(self, step: int) -> None:
        if self.resting and step < self.timed[-1] and self.compiled.unchanged():
            self._mark(step)
            return
        if self.compiled.step(step) and step in self.timed and self._postpone(step):
            return
        if self.brief:
            self._brief_step_end(step)
            return
        hooks = self.session.hooks
        if step == 0:
            self.compiled.pause(step)
            hooks.watch_modules()
        elif step == 1:
            hooks.unwatch_modules()
            self.compiled.resume()
        last_timed = self.timed[-1]
        if step == self.timed[0] - 1:
            self.allocator = clock.allocator()
            self.mark = clock.marker(min(len(self.timed) + 1, EVENTS))
        if step >= self.timed[0] - 1 and step <= last_timed:
            self._mark(step)
        if step == self.timed[0] - 1:
            self.session.progress(event="phase", name="timing")
        if step == self.timed[0] + NOTED_STEPS - 1 and len(self.timed) > 2 * NOTED_STEPS:
            self._rest(True)
        if step == last_timed:
            self._rest(False)
            now = clock.allocator()
            self.written["allocator"] = {name: now.get(name, count) - count for name, count in self.allocator.items()}
            clock.synchronize()
            self.written["peak_bytes"] = clock.peak_bytes()
            self._start_profiler()
        elif last_timed < step <= last_timed + 1 + self.profiled and self.profiler is not None:
            self._advance_profiler(step - last_timed)
        elif self.annotation is not None and self._advance_annotation():
            self.session.stop()

    def _postpone(self, step: int) -> bool:
        """Time later steps where the script has compiled in this one: no step of a training that goes on."""
        if self.postponed == POSTPONED:
            return False
        self.postponed += 1
        self._rest(False)
        self.timed = range(step + 1, step + 1 + len(self.timed))
        self._mark(step, only=True)
        return True

    def _mark(self, step: int, only: bool = False) -> None:
        """Mark the end of a step, behind the marks so far or in place of them."""
        if only:
            self.marks, self.marked = [], []
        self.marks.append(self.mark())
        self.marked.append(step)

    def _rest(self, rests: bool) -> None:
        """Leave steps untouched but for their marks, or take the hooks up again."""
        self.resting = rests
        if rests:
            self.session.hooks.rest(self.timed[-1], MARKED_S if clock.on_cuda() else 0.0)
            self.calls.rest()
        else:
            self.session.hooks.resume()
            self.calls.resume()

    def _brief_step_end(self, step: int) -> None:
        if step == 0:
            self.session.hooks.unwatch_modules()
            self.compiled.resume()
        if self.annotation is not None:
            begun, ended = self.marks, clock.mark()
            if self._advance_annotation():
                self._annotated_trace_only()
                self.stand_in = [*begun, ended]
                self.compiled.resume()
                self.session.progress(event="phase", name="timing")
            self._mark(step, only=True)
        elif step in self.timed:
            self._mark(step)
            if step == self.timed[-1]:
                clock.synchronize()
                self.written["peak_bytes"] = clock.peak_bytes()
                self.session.stop()
        elif step == self.warmup - 1:
            self._start_annotation()

    def _annotated_trace_only(self) -> None:
        """The annotated step's trace stands in for one of steps without annotation."""
        shutil.copyfile(self.session.out / "annotated.json.gz", self.session.out / "trace.json.gz")
        self.written["missing"]["times"] = "the times of operators are those of one annotated step"

    def failed(self, error: BaseException) -> bool:
        """An error under annotation loses the graph, not the run: the steps before it ran without Dynamo."""
        if self.annotation is None:
            return False
        self.annotation.leave()
        self.annotation = None
        first = (str(error).strip().splitlines() or [""])[0]
        self.written["missing"]["graph"] = f"the annotated run raised {type(error).__name__}: {first}"
        return True

    def finish(self) -> None:
        """Write probe.json; called when the script has ended or was stopped."""
        hooks = self.session.hooks
        self._rest(False)
        self.compiled.pause(hooks.steps)
        if self.compiled.missing is not None:
            self.written["missing"]["breaks"] = self.compiled.missing
        clock.synchronize()
        if self.annotation is not None:  # the script has ended before the annotated step did
            self.annotation.leave()
            self.annotation.write()
            self.written["missing"]["links"] = "the script ended before a step was annotated"
        step_us = self._times() if len(self.marks) > 1 else clock.differences(self.stand_in)
        self.written |= {
            "steps_seen": hooks.steps,
            "backwards": hooks.backwards,
            "step_us": step_us,
            "losses": [float(loss.float().mean()) for loss in self.losses],
            "loaders": hooks.describe_loaders(self.timed),
            "optimizers": hooks.describe_optimizers(),
            "root_calls": self.root_calls,
            "calls": self._describe_calls(),
            "compiled": self.compiled.describe(self.timed),
            "flags": hooks.flags | _host_memory() | _allocator_settings(),
            "device": _describe_device(),
            "software": _describe_software(),
        }
        if self.session.spec.options.get("device_rates", True) and step_us:
            self.session.progress(event="phase", name="device rates")
            self.written["device"] |= measure_rates()
        self._write()
        if self.fetches.fetch_again(hooks.loaders, self._wait_us):
            self.written |= {"loaders": hooks.describe_loaders(self.timed), "calls": self._describe_calls()}
            self._write()

    def _times(self) -> list[float]:
        """The time of every timed step, microseconds; steps that share a mark took their mean."""
        steps = [end - begin for begin, end in itertools.pairwise(self.marked)]
        times = zip(clock.differences(self.marks), steps, strict=True)
        return [us / count for us, count in times for _ in range(count)]

    def _write(self) -> None:
        document = portable(self.written, self.session.spec.root)
        (self.session.out / "probe.json").write_text(json.dumps(document), encoding="utf-8")

    def _describe_calls(self) -> list[dict[str, Any]]:
        fetching = self.fetches.describe(self.session.hooks.loaders, self._wait_us)
        return [*self.calls.describe(self.timed), *self.builds.describe(), *fetching]

    def _wait_us(self, record: LoaderRecord) -> float:
        """The loop's mean wait for a loader in a timed step, in microseconds."""
        inside = [wait for step, wait in record.waits if step in self.timed]
        return sum(inside) / max(len(self.timed), 1) * 1e6

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
        self.compiled.pause(self.session.hooks.steps)
        self.session.progress(event="phase", name="annotated run")
        self.session.hooks.annotated = True
        options = self.session.spec.options
        self.annotation = Annotation(
            self.roots,
            self.session.out,
            self.session.spec.root,
            loop=EagerRecorder(self._state, through=self.builds.through),
            steps=BRIEF_STEPS if self.brief else 3,
            dynamo=bool(options.get("dynamo", True)),
        )
        self.annotation.begin()

    def _state(self) -> dict[int, str]:
        """What every tensor of the modules and optimizers is, by its identity."""
        optimizers = [record.optimizer for record in self.session.hooks.optimizers]
        updated = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        owned = [p for root in self.roots for p in root.parameters()]
        buffers = {id(tensor): "buffer" for root in self.roots for tensor in root.buffers()}
        return buffers | {id(tensor): "parameter" for tensor in (*updated, *owned)}

    def _advance_annotation(self) -> bool:
        """True once the annotated step is written."""
        if not self.annotation.advance():
            return False
        self.annotation.write()
        self.annotation = None
        return True


def _describe_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "training": module.training,
        "inputs": [
            {"shape": [t.size(0)] if t.is_nested else list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for t in outermost_tensors([args, kwargs])
        ],
    }


def _describe_software() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "collectors": ["kineto", "dynamo"],
        "packages": {name: version for name in KERNEL_PACKAGES if (version := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host_memory() -> dict[str, Any]:
    """The memory of the machine, or of the control group that this process may use; nothing where that is not told."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):
        return {}
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = Path("/sys/fs/cgroup", name)
        text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
        found += [int(text)] if text.isdecimal() else []
    return {"host_memory_bytes": min(found)}


def _allocator_settings() -> dict[str, str]:
    """What the environment tells the allocator of the device."""
    settings = [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    told = [text for text in settings if text]
    return {"allocator_settings": ",".join(told)} if told else {}


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
