"""Inside the child: who in the user's code calls what a training loop should call rarely, how often and for how long.

The calls are those of functions that no captured graph holds and no operator of a trace names: waits for the device,
the caching allocator, debugging modes, saving, gradients set to zero. Each function is replaced by one that notes the
call and passes it on; only Python's own clock is read.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint

from advisor.capture.compiled import compile_facts
from advisor.capture.hooks import Replacement, is_user_file, user_span

FRAMES = 12  # user frames kept of one call, the innermost
ENTRY = os.path.join(
    os.path.dirname(__file__), "child.py"
)  # runs the script: no frame of the user's lies outside of it
PLACES = 200  # places kept of one run
WRAPPED = "torch.nn.parallel.DistributedDataParallel"
REDUCES = "ddp.reduce"  # a backward pass of a DistributedDataParallel that reduces gradients
CHECKPOINT = "torch.utils.checkpoint.checkpoint"  # called by the user's code
LIBRARY_CHECKPOINT = "library.checkpoint"  # called by a library that the user's code calls
CHECKPOINTING = ("torch.utils.checkpoint", "torch._compile", "torch._dynamo")  # modules between it and who calls it
# Called by every step: seen in a few, known for all.
EVERY_STEP = ("backward", "optimizer.step", "zero_grad", REDUCES, CHECKPOINT, LIBRARY_CHECKPOINT)
EVALUATION = "evaluation"  # from `eval()` to `train()`
Note = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]


@dataclass
class Called:
    """The calls of one function from one place: in which steps, and the host's time in each of them, in seconds."""

    name: str
    frames: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, tuple[int, float]] = field(default_factory=dict)

    def describe(self, steps: range) -> dict[str, Any]:
        """As probe.json holds it: means over `steps`, times in microseconds."""
        inside = [value for step, value in self.steps.items() if step in steps]
        count = max(len(steps), 1)
        return {
            "name": self.name,
            "frames": self.frames,
            "calls": sum(number for number, _ in self.steps.values()),
            "per_step": sum(number for number, _ in inside) / count,
            "host_us": sum(spent for _, spent in inside) / count * 1e6,
            "facts": self.facts,
        }


class LoopCalls:
    """Notes calls of watched functions while a script runs; `step` gives the number of the step that is running."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._found: dict[tuple[Any, ...], Called] = {}
        self._codes: list[Any] = []  # kept, so that no other gets the identity of one in `_found`
        self._depth = 0
        self._rest_from: int | None = None
        self._resting = False
        self._resters: list[Replacement] = []  # of what every step calls
        self._differentiation: Replacement | None = None  # on while something evaluates
        self._evaluating: dict[int, tuple[Called, float]] = {}  # by module: where eval() was called, and when
        self._parallel: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._searched: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Watch everything that is watched."""
        self._watch(torch.cuda, "synchronize", "torch.cuda.synchronize")
        self._watch(torch.cuda, "empty_cache", "torch.cuda.empty_cache")
        self._watch(torch, "save", "torch.save")
        self._watch(torch, "compile", "torch.compile", compile_facts)
        self._watch(torch.nn.Module, "compile", "torch.compile", compile_facts)
        self._watch(torch.autograd.set_detect_anomaly, "__init__", "detect_anomaly", _anomaly)
        self._watch(torch.autograd.detect_anomaly, "__init__", "detect_anomaly", lambda args, kwargs: {"mode": True})
        self._watch(torch.optim.Optimizer, "zero_grad", "zero_grad", _zero_grad, anywhere=True)
        self._watch(torch.nn.Module, "zero_grad", "zero_grad", _zero_grad, anywhere=True)
        self._watch(torch, "use_deterministic_algorithms", "use_deterministic_algorithms", _deterministic)
        self._watch_evaluations()
        self._watch_differentiation()
        self._watch_checkpoints()
        if torch.distributed.is_available():
            self._watch(torch.nn.parallel.DistributedDataParallel, "__init__", WRAPPED, self._wrapped, anywhere=True)

    def rest(self) -> None:
        """Note no longer what every step calls: the steps that follow run torch's own functions."""
        self._rest_from, self._resting = self._step(), True
        for replacement in self._resters:
            replacement.take_off()

    def resume(self) -> None:
        """Note everything again."""
        self._resting = False
        for replacement in self._resters:
            replacement.put_on()

    def on_call(self, name: str) -> None:
        """A backward pass or an optimizer step begins; a backward pass that reduces gradients is noted as such too."""
        self.note(name, depth=2)
        if name != "backward" or not self._parallel:
            return
        for wrapped in list(self._parallel):
            self._note_unused(wrapped)
            # Set by the last forward pass, which alone decides: `no_sync` around a backward pass does nothing.
            if wrapped.require_forward_param_sync:
                self.note(REDUCES, {"modules": len(self._parallel), **_parallel_facts(wrapped)}, depth=2)

    def _note_unused(self, wrapped: Any) -> None:
        """Note whether the last backward pass left parameters out, where the wrapper looks for such.

        What the reducer knows of the parameters that were used is not set before the first backward pass has ended, and
        lies on the device: it is read when the run is described.
        """
        used = getattr(wrapped.reducer, "_get_local_used_map", None)
        if used is None or not wrapped.find_unused_parameters or wrapped.static_graph:
            return
        known = self._searched.get(wrapped)
        if known is None:  # the first backward pass begins
            self._searched[wrapped] = []
        else:
            known.append(used().all())

    def note(
        self, name: str, facts: Mapping[str, Any] | None = None, spent: float = 0.0, depth: int = 1
    ) -> Called | None:
        """Note a call that a hook has seen, made by the innermost user frame above the caller."""
        frames: list[Any] = []  # innermost first
        place: list[Any] = [name]
        frame: Any = sys._getframe(depth)
        while frame is not None and len(frames) < FRAMES:
            code = frame.f_code
            if is_user_file(code.co_filename):
                frames.append(frame)
                place += (id(code), frame.f_lasti)  # the hash of a code object itself is slow
            elif code.co_filename == ENTRY:
                break
            frame = frame.f_back
        if not frames:
            return None
        key = tuple(place)
        called = self._found.get(key)
        if called is None:
            if len(self._found) >= PLACES:
                return None
            self._codes += [frame.f_code for frame in frames]
            called = self._found[key] = Called(name, [user_span(frame) for frame in frames[::-1]], dict(facts or {}))
        step = self._step()
        number, total = called.steps.get(step, (0, 0.0))
        called.steps[step] = (number + 1, total + spent)
        return called

    def describe(self, steps: range) -> list[dict[str, Any]]:
        """All calls, in the order in which their places were first reached."""
        for wrapped in list(self._searched):
            self._note_unused(wrapped)
        searched = [not bool(used) for found in self._searched.values() for used in found]
        changed = sorted({kind for wrapped, sums in self._parallel.items() for kind in _changed(wrapped, sums)})
        for called in self._found.values():
            if called.name == REDUCES:
                called.facts["changed_buffers"] = changed
            elif called.name == WRAPPED:
                called.facts |= {"searched": len(searched), "left_out": sum(searched)}
        end = self._rest_from
        noted = range(steps.start, end) if end is not None and end in steps else steps
        return [called.describe(noted if called.name in EVERY_STEP else steps) for called in self._found.values()]

    def _watch(
        self, owner: Any, attribute: str, name: str, facts: Note | None = None, *, anywhere: bool = False
    ) -> None:
        """Replace a function; calls of it by libraries count only with `anywhere`."""
        original = getattr(owner, attribute)
        rests = name in EVERY_STEP

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._resting and rests:
                return original(*args, **kwargs)
            caller = sys._getframe(1)
            if self._depth or _is_ours(caller) or not (anywhere or is_user_file(caller.f_code.co_filename)):
                return original(*args, **kwargs)
            self._depth += 1  # one function may call another that is watched
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                spent = time.perf_counter() - begin
                self.note(name, facts(args, kwargs) if facts is not None else None, spent, depth=2)

        replacement = Replacement(owner, attribute, watched)
        if rests:
            self._resters.append(replacement)

    def _watch_evaluations(self) -> None:
        """Note where the user's code calls `eval()` and the time until the same module's `train()`."""
        original = torch.nn.Module.train

        @functools.wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            if self._depth or not _by_user(sys._getframe(1)):
                return original(module, mode)
            self._depth += 1  # a module passes the mode on to those inside it
            try:
                return original(module, mode)
            finally:
                self._depth -= 1
                self._turned(module, mode)

        torch.nn.Module.train = train  # type: ignore[method-assign, assignment]

    def _watch_differentiation(self) -> None:
        """Tell evaluations that anybody differentiates in, libraries included."""
        original = getattr(torch.autograd, "_engine_run_backward", None)
        if original is None:
            return

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            for called, _ in self._evaluating.values():
                called.facts["differentiated"] = True
            return original(*args, **kwargs)

        self._differentiation = Replacement(torch.autograd, "_engine_run_backward", run)
        self._differentiation.take_off()

    def _watch_checkpoints(self) -> None:
        """Note what is called through `checkpoint`: below it, because Dynamo knows that function by its identity."""
        functions = torch.utils.checkpoint
        inner = "_checkpoint_without_reentrant_generator"
        if hasattr(functions, inner):
            self._watch_checkpoint(functions, inner, _plain_checkpoint)
        self._watch_checkpoint(functions.CheckpointFunction, "apply", _reentrant_checkpoint)

    def _watch_checkpoint(self, owner: Any, attribute: str, facts: Note) -> None:
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._resting:
                return original(*args, **kwargs)
            name = _checkpointing(sys._getframe(1)) if torch.is_grad_enabled() else None
            found = facts(args, kwargs)
            called = self.note(name, found, depth=2) if name is not None else None
            if called is not None:
                called.facts |= {fact: called.facts[fact] or value for fact, value in found.items()}
            result = original(*args, **kwargs)
            if called is not None and found["reentrant"] and _holds_more(result):
                called.facts["cut_off"] = True
            return result

        self._resters.append(Replacement(owner, attribute, watched))

    def _turned(self, module: Any, mode: bool) -> None:
        if not mode:
            called = self.note(EVALUATION, _modes(), depth=3)
            if called is not None:
                self._evaluating.setdefault(id(module), (called, time.perf_counter()))
                if self._differentiation is not None:
                    self._differentiation.put_on()
        elif id(module) in self._evaluating:
            called, begin = self._evaluating.pop(id(module))
            if not self._evaluating and self._differentiation is not None:
                self._differentiation.take_off()
            number, total = called.steps.get(self._step(), (0, 0.0))
            called.steps[self._step()] = (number, total + time.perf_counter() - begin)

    def _wrapped(self, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A DistributedDataParallel was constructed."""
        if not hasattr(args[0], "require_forward_param_sync"):  # its constructor has raised
            return {}
        self._parallel[args[0]] = {name: _checksum(buffer) for name, buffer in args[0].module.named_buffers()}
        return _parallel_facts(args[0])


def _checkpointing(frame: Any) -> str | None:
    """As what a call of `checkpoint` is noted that stands above a frame; None where Dynamo's graph makes it."""
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(CHECKPOINTING):
        frame = frame.f_back
    if is_user_file(frame.f_code.co_filename):
        return CHECKPOINT
    return None if str(frame.f_globals.get("__name__", "")).startswith("torch._") else LIBRARY_CHECKPOINT


def _plain_checkpoint(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint that is not reentrant: function, preserve_rng_state, context_fn, ..."""
    context = args[2] if len(args) > 2 else kwargs.get("context_fn")
    plain = context is None or context is torch.utils.checkpoint.noop_context_fn
    return {"reentrant": False, "selective": not plain, "draws_anew": not _preserves(args, kwargs), "cut_off": False}


def _reentrant_checkpoint(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a reentrant checkpoint: function, preserve_rng_state, arguments. Without one that needs a gradient, nothing
    inside gets any, and neither do tensors in a list or dictionary that it returns."""
    needed = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args[2:])
    return {"reentrant": True, "selective": False, "draws_anew": not _preserves(args, kwargs), "cut_off": not needed}


def _holds_more(result: Any) -> bool:
    """Whether a result has tensors where a reentrant checkpoint passes no gradient: below its top level."""
    parts = result if isinstance(result, tuple) else (result,)
    return any(isinstance(part, (list, dict, tuple)) for part in parts)


def _preserves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[1] if len(args) > 1 else kwargs.get("preserve_rng_state", True))


def _modes() -> dict[str, Any]:
    """The modes that an evaluation begins in."""
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu"))
    return {"grad": torch.is_grad_enabled(), "autocast": autocast}


def _parallel_facts(wrapped: Any) -> dict[str, Any]:
    return {
        "processes": wrapped.process_group.size(),
        "static_graph": bool(wrapped.static_graph),
        "find_unused_parameters": bool(wrapped.find_unused_parameters),
        "broadcast_buffers": bool(wrapped.broadcast_buffers),
        "hooks": [getattr(hook, "__qualname__", type(hook).__qualname__) for hook, _ in wrapped._comm_hooks],
    }


def _checksum(buffer: Any) -> Any:
    """The sum of a tensor, left on its device."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return real.detach().sum(dtype=torch.float64)


def _changed(wrapped: Any, sums: Mapping[str, Any]) -> list[str]:
    """The kinds of the modules whose buffers are no longer what they were when they were wrapped."""
    owners = dict(wrapped.module.named_modules())
    return [
        type(owners[name.rpartition(".")[0]]).__qualname__
        for name, buffer in wrapped.module.named_buffers()
        if name not in sums or not torch.equal(_checksum(buffer), sums[name])
    ]


def _by_user(frame: Any) -> bool:
    """Whether the user's code calls, also through a method of torch.nn.Module."""
    while frame is not None and frame.f_globals.get("__name__") == torch.nn.Module.__module__:
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _is_ours(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("advisor.")


def _anomaly(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"mode": bool(args[1] if len(args) > 1 else kwargs.get("mode", True))}


def _deterministic(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"mode": bool(args[0] if args else kwargs.get("mode", True))}


def _zero_grad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"set_to_none": bool(args[1] if len(args) > 1 else kwargs.get("set_to_none", True))}
