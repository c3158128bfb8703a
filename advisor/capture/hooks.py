"""Hooks on torch's public entry points: they see loaders, optimizers, backward passes and steps of an unedited script.

No hook adds a device synchronisation; what needs one is read when the script has stopped.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import data as torch_data
from torch.utils.data import dataloader as loader_module

from advisor import clock
from advisor.session import SessionPlan

PICKLE_LIMIT = 64 << 20  # bytes after which a dataset counts as picklable, so that a large one is not copied
LOADER_ARGUMENTS = (
    "batch_size",
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "drop_last",
    "timeout",
)
COMPILED_STEP = (
    "it calls optimizer.step() inside of what it compiles, where no step can be seen: leave that call out of "
    "torch.compile"
)
UNSEEN = 16  # backward passes without the end of a step, once one was compiled, after which none is expected any more
_NO_RANGE = nullcontext()
_now = time.perf_counter
_ABSENT = object()
_HERE = ("/advisor/capture/", "/advisor/verify/", "/advisor/clock.py", "/advisor/session.py")
_LIBRARY = ("site-packages", "dist-packages", "/lib/python3", "<frozen", "<string>")
_traced: list[bool] = []  # whether Dynamo has traced through an optimizer's step


def _trace() -> bool:
    """Note that an optimizer's step is compiled; a constant to Dynamo."""
    _traced.append(True)
    return True


# Called while Dynamo traces, never by what it has compiled.
_note_traced: Callable[[], bool] = torch.compiler.assume_constant_result(_trace)


@functools.lru_cache(maxsize=4096)  # asked for every frame of the stack, several times in a step
def is_user_file(path: str) -> bool:
    """Whether a source file is the user's own, not ours, an installed package or the standard library."""
    plain = path.replace("\\", "/")
    return bool(plain) and not plain.startswith("<") and not any(part in plain for part in (*_HERE, *_LIBRARY))


def is_our_file(path: str) -> bool:
    """Whether a source file belongs to the in-child half of this package."""
    return any(part in path.replace("\\", "/") for part in _HERE)


def portable(value: Any, root: str) -> Any:
    """A document with the path of every place made portable: relative to the root, or inside its package.

    Nothing a run leaves behind names the user's home or machine.
    """
    if isinstance(value, dict):
        made = {key: portable(item, root) for key, item in value.items()}
        if isinstance(value.get("path"), str) and "line" in value:
            made["path"] = _portable_path(value["path"], root)
        return made
    return [portable(item, root) for item in value] if isinstance(value, list) else value


def _portable_path(path: str, root: str) -> str:
    plain = path.replace("\\", "/")
    for marker in ("site-packages/", "dist-packages/"):
        if marker in plain:
            return marker + plain.rsplit(marker, 1)[1]
    if not is_user_file(plain):
        return f"lib/python3/{os.path.basename(plain)}" if not plain.startswith("<") else plain
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(root)).replace(os.sep, "/")
    return inside if not inside.startswith("../") else f"outside/{os.path.basename(plain)}"


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range in the trace of a profiler that runs; nothing otherwise, where even an empty range costs time."""
    return torch.profiler.record_function(name) if torch._C._autograd._profiler_enabled() else _NO_RANGE


def _cudnn_tf32() -> bool:
    """`torch.backends.cudnn.allow_tf32`, which raises where convolutions and recurrent layers differ."""
    try:
        return bool(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:
        return bool(getattr(torch.backends.cudnn, "conv").fp32_precision == "tf32")  # noqa: B009  (absent from old stubs)


def caller_span() -> dict[str, Any] | None:
    """File, line and function of the innermost user frame on the stack, or None."""
    return next((user_span(frame) for frame in user_frames(sys._getframe(1))), None)


def caller_spans() -> list[dict[str, Any]]:
    """The positions of the user's frames on the stack, outermost first."""
    return [user_span(frame) for frame in user_frames(sys._getframe(1))][::-1]


def user_frames(frame: Any) -> Iterator[Any]:
    """The user's frames from `frame` outwards, innermost first."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_span(frame: Any) -> dict[str, Any]:
    """The running call of a frame as a place of probe.json."""
    code = frame.f_code
    return {"path": code.co_filename, "line": frame.f_lineno, "function": code.co_name, "columns": _columns(frame)}


def _columns(frame: Any) -> list[int | None] | None:
    """Exact position (line, end line, column, end column in bytes) of the running call, where Python knows it."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:  # Python 3.10
        return None
    for index, position in enumerate(positions()):
        if index == frame.f_lasti // 2:
            return list(position)
    return None


class Replacement:
    """A function of `owner` in whose place another stands, until it is taken off, and again once it is put on.

    What somebody else has set in the meantime stays.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._original = vars(owner).get(name, _ABSENT)  # of a class also what it inherits is replaced
        self.put_on()

    def put_on(self) -> None:
        """Call the replacement from now on."""
        if vars(self._owner).get(self._name, _ABSENT) is self._original:
            setattr(self._owner, self._name, self._function)

    def take_off(self) -> None:
        """Leave the owner as it was before."""
        if vars(self._owner).get(self._name) is not self._function:
            return
        if self._original is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


@dataclass
class LoaderRecord:
    """One DataLoader and the waits for its batches, in seconds, with the step each belonged to.

    `starts` are the waits for the first batch of every pass over it, `through` are the positions in the user's code
    through which a batch is asked for, outermost first, and `facts` are what `Hooks.on_fetch` learns of the fetching,
    until it says `looked_at`.
    """

    span: dict[str, Any] | None
    given: list[str]
    loader: Any
    waits: list[tuple[int, float]] = field(default_factory=list)
    starts: list[tuple[int, float]] = field(default_factory=list)
    draws_global_rng: bool | None = None
    through: list[dict[str, Any]] = field(default_factory=list)
    looked_at: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def fetched(self) -> dict[str, Any] | None:
        """Where the loop asks for a batch."""
        return self.through[-1] if self.through else None


@dataclass
class OptimizerRecord:
    """One optimizer, where it was made, and the keyword arguments it was given."""

    span: dict[str, Any] | None
    given: list[str]
    optimizer: Any


class Hooks:
    """Installs every hook for one session and routes what they see to its plan."""

    def __init__(self, plan: SessionPlan) -> None:
        self.plan = plan
        self.loaders: list[LoaderRecord] = []
        self.optimizers: list[OptimizerRecord] = []
        self.steps = 0
        self.backwards = 0
        self.on_step: Callable[[int], None] | None = None
        self.on_call: Callable[[str], None] | None = None  # "backward" and "optimizer.step", as they are called
        self.on_fetch: Callable[[LoaderRecord, Any, Callable[[], Any]], Any] | None = None  # fetches through the last
        self.check_rng_at_step = 1
        self.quiet = False  # see `rest`
        self.annotated = False  # Dynamo traces for our annotation: what it cannot trace is told by its error
        self.flags: dict[str, Any] = {}
        self._lead: Any = None
        self._stepped: set[int] = set()
        self._backward: Replacement | None = None
        self._rested_at = 0
        self._unseen = 0
        self._rests_until = 0  # the step from which on every end is told again
        self._every_s = self._next_told = 0.0
        self._depth = threading.local()
        self._module_call: Callable[..., Any] | None = None

    # ------------------------------------------------------------------------------------------------- installation

    def install(self) -> None:
        """Install everything that is active from the start."""
        self._hook_constructor(torch_data.DataLoader, self._on_loader)
        self._hook_constructor(Optimizer, self._on_optimizer)
        self._hook_loader_iterators()
        self._hook_backward()
        register_optimizer_step_pre_hook(self._on_optimizer_begin)
        register_optimizer_step_post_hook(self._on_optimizer_end)
        if self.plan.watch_modules:
            self.watch_modules()

    def rest(self, until: int, every_s: float = 0.0) -> None:
        """Leave the steps before `until` as untouched as can be: no profiler runs, the plan wants neither batches nor
        losses, and what every step says alike is known. The waits for a loader, which may come in bursts, are still
        noted, and the ends of steps are told, but only once `every_s` seconds have passed since one was."""
        self.quiet, self._rested_at = True, self.steps
        self._rests_until, self._every_s, self._next_told = until, every_s, _now() + every_s
        if self._backward is not None:
            self._backward.take_off()

    def resume(self) -> None:
        """Hook everything again; of the steps in between, backward passes count as in those before."""
        if not self.quiet:
            return
        self.quiet = False
        if self._backward is not None:
            self._backward.put_on()
        self.backwards += round((self.steps - self._rested_at) * self.backwards / max(self._rested_at, 1))

    def _hook_constructor(self, cls: type, record: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        original: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(original)
        def construct(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            record(this, args, kwargs)

        cls.__init__ = construct  # type: ignore[misc]

    def _on_loader(self, loader: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if all(record.loader is not loader for record in self.loaders):
            self.loaders.append(LoaderRecord(caller_span(), sorted(kwargs), loader))

    def _on_optimizer(self, optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if all(record.optimizer is not optimizer for record in self.optimizers):
            self.optimizers.append(OptimizerRecord(caller_span(), [], optimizer))

    def _hook_loader_iterators(self) -> None:
        make_iterator = torch_data.DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            iterator = make_iterator(loader)
            record = vars(iterator)["_advisor_record"] = self._record_of(loader)
            if self.on_fetch is not None and record is not None and not record.looked_at:
                vars(iterator)["_advisor_drawn"] = random_states()
            return iterator

        torch_data.DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        base = loader_module._BaseDataLoaderIter
        advance = base.__next__
        now = time.perf_counter

        def following(iterator: Any) -> Any:
            if self.quiet and (known := iterator.__dict__.get("_advisor_known")) is not None:
                begin = now()
                batch = advance(iterator)
                known.append((self.steps, now() - begin))
                return batch
            record = vars(iterator).get("_advisor_record")
            if record is not None and self.on_fetch is not None and not record.looked_at:
                return self.plan.batch(
                    self.on_fetch(record, iterator, lambda: self._advance(record, iterator, advance))
                )
            return self.plan.batch(self._advance(record, iterator, advance))

        base.__next__ = following  # type: ignore[method-assign, assignment]

    def _advance(self, record: LoaderRecord | None, iterator: Any, advance: Callable[[Any], Any]) -> Any:
        """The next batch; the wait for it is noted, and in one step whether the fetch drew random numbers."""
        check = record is not None and record.draws_global_rng is None and self.steps == self.check_rng_at_step
        before = random_states() if check else None
        begin = time.perf_counter()
        with named_range("advisor::data"):
            batch = advance(iterator)
        if record is not None:
            record.waits.append((self.steps, time.perf_counter() - begin))
            if "_advisor_begun" not in vars(iterator):
                vars(iterator)["_advisor_begun"] = True
                record.starts.append(record.waits[-1])
            if before is not None and record.loader.num_workers == 0:
                record.draws_global_rng = before != random_states()
            if record.looked_at:  # nothing but the wait is left to note
                vars(iterator)["_advisor_known"] = record.waits
        return batch

    def _record_of(self, loader: Any) -> LoaderRecord | None:
        return next((record for record in self.loaders if record.loader is loader), None)

    def _hook_backward(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self.quiet:  # who has kept this function calls it at rest, too
                original(tensors, *args, **kwargs)
                return
            if self.compiled_step():
                self._unseen += 1
                if self._unseen > UNSEEN:
                    raise SystemExit(COMPILED_STEP)
            first = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
            self.plan.backward(first.detach())
            self.backwards += 1
            self._note_flags()
            if self.on_call is not None:
                self.on_call("backward")
            with named_range("advisor::backward"):
                original(tensors, *args, **kwargs)

        self._backward = Replacement(torch.autograd, "backward", backward)

    def _note_flags(self) -> None:
        """Global numerics settings, read once per step on the host."""
        self.flags = {
            "matmul_precision": clock.matmul_precision(),
            "cudnn_benchmark": torch._C._get_cudnn_benchmark(),
            "cudnn_tf32": _cudnn_tf32(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
        }

    # ------------------------------------------------------------------------------------------------------- modules

    def watch_modules(self) -> None:
        """Route outermost module calls through the plan until `unwatch_modules`."""
        if self._module_call is not None:
            return
        original = nn.Module.__call__
        self._module_call = original

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "value", 0):
                return original(module, *args, **kwargs)
            self._depth.value = 1
            try:
                return self.plan.module_call(module, original, args, kwargs)
            finally:
                self._depth.value = 0

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def unwatch_modules(self) -> None:
        """Restore the class as torch made it, so that timed steps run untouched code."""
        if self._module_call is not None:
            nn.Module.__call__ = self._module_call  # type: ignore[method-assign]
            self._module_call = None

    # --------------------------------------------------------------------------------------------------------- steps

    def _on_optimizer_begin(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Gradients are ready now, or, where a closure computes them inside the step (Lightning), after the closure."""
        if torch.compiler.is_compiling() and not self.annotated:
            _note_traced()
            return None
        if self.quiet:
            return None
        if self.on_call is not None and not self._only_draws(optimizer):
            self.on_call("optimizer.step")
        place = next((i for i, arg in enumerate(args) if i > 0 and callable(arg)), None) if len(args) > 1 else None
        closure = args[place] if place is not None else kwargs.get("closure")
        if closure is None:
            if not self._only_draws(optimizer):
                self.plan.gradients_ready(optimizer)
            return None

        def recorded() -> Any:
            with named_range("advisor::closure"):
                result = closure()
            self.plan.gradients_ready(optimizer)
            return result

        if place is None:
            return args, {**kwargs, "closure": recorded}
        return (*args[:place], recorded, *args[place + 1 :]), kwargs

    def _on_optimizer_end(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """A step ends when the optimizer that stepped first steps again; others belong to the same step. At rest an
        end that is not to be told is only counted."""
        if torch.compiler.is_compiling() and not self.annotated:
            return
        if self.quiet and optimizer is self._lead:
            if self.steps < self._rests_until and _now() < self._next_told:
                self.steps += 1
                return
            self._next_told = _now() + self._every_s
        elif not self.quiet and self._only_draws(optimizer):
            return
        self._stepped.add(id(optimizer))
        if self._lead is None:
            self._lead = optimizer
        if optimizer is self._lead:
            index = self.steps
            self.steps += 1
            if self.on_step is not None:
                self.on_step(index)
            self.plan.step_end(index)

    def _only_draws(self, optimizer: Any) -> bool:
        """Whether a step trains nothing: before any backward pass and without a gradient, to draw a schedule, say."""
        return self.backwards == 0 and not _has_gradients(optimizer)

    def compiled_step(self) -> bool:
        """Whether the script has compiled a step of an optimizer and no end of a step was seen."""
        return bool(_traced) and self.steps == 0

    # ------------------------------------------------------------------------------------------------------ summaries

    def describe_loaders(self, steps: range) -> list[dict[str, Any]]:
        """What was seen of each DataLoader that delivered batches, waits averaged over `steps`."""
        return [_describe_loader(record, steps, self.loaders) for record in self.loaders if record.waits]

    def describe_optimizers(self) -> list[dict[str, Any]]:
        """What was seen of each optimizer that exists."""
        return [
            _describe_optimizer(record) | {"stepped": id(record.optimizer) in self._stepped}
            for record in self.optimizers
        ]


def _has_gradients(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def random_states() -> tuple[bytes, Any, Any]:
    """The state of every global random stream on the host."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (drawn[1].tobytes(), drawn[2]) if drawn is not None else None,
    )


def _describe_loader(record: LoaderRecord, steps: range, others: list[LoaderRecord]) -> dict[str, Any]:
    loader = record.loader
    beside = {
        type(other.loader.dataset).__qualname__
        for other in others
        if other.span == record.span and type(other.loader.dataset) is not type(loader.dataset)
    }
    started = [wait for step, wait in record.starts if step in steps]
    inside = [wait for step, wait in record.waits if step in steps]
    per_step = sum(inside) / len(steps) * 1e6 if inside and len(steps) else None
    return {
        "span": record.span,
        "given": record.given,
        "arguments": {name: _plain(getattr(loader, name, None)) for name in LOADER_ARGUMENTS}
        | {
            "shuffle": isinstance(getattr(loader, "sampler", None), torch_data.RandomSampler),
            "worker_init_fn": loader.worker_init_fn is not None,
            "custom_collate": loader.collate_fn is not torch_data.default_collate,
        },
        "wait_us_per_step": per_step,
        "fetch_us": sum(inside) / len(inside) * 1e6 if inside else None,
        "batches": len(record.waits),
        "dataset": type(loader.dataset).__qualname__,
        "iterable": isinstance(loader.dataset, torch_data.IterableDataset),
        "picklable": _start_method(loader) == "fork" or _picklable((loader.dataset, loader.collate_fn)),
        "draws_global_rng": record.draws_global_rng,
        "fetched": record.fetched,
        "through": record.through,
        "facts": {
            "start_method": _start_method(loader),
            "start_us_per_step": sum(started) / max(len(steps), 1) * 1e6,
            "beside": sorted(beside),
            **record.facts,
        },
    }


def _start_method(loader: Any) -> str:
    """How worker processes would start; a forked one needs nothing pickled."""
    context = loader.multiprocessing_context
    chosen = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


class _Sink:
    """Counts bytes and refuses more than the limit."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self.size > PICKLE_LIMIT:
            raise OverflowError
        return len(data)


def _picklable(value: Any) -> bool:
    try:
        pickle.Pickler(_Sink()).dump(value)
    except OverflowError:
        return True
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError, RuntimeError):
        return False
    return True


def _describe_optimizer(record: OptimizerRecord) -> dict[str, Any]:
    optimizer = record.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    native = next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim"))
    return {
        "span": record.span,
        "given": record.given,
        "kind": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "arguments": {name: _plain(value) for name, value in optimizer.defaults.items()},
        "parameters": len(parameters),
        "elements": sum(p.numel() for p in parameters),
        "devices": sorted({str(p.device.type) for p in parameters}),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "sparse": any(p.grad is not None and p.grad.is_sparse for p in parameters),
        "overrides_step": native is not type(optimizer) and "step" in type(optimizer).__dict__,
        "groups": len(optimizer.param_groups),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return type(value).__qualname__


def outermost_tensors(value: Any) -> Iterator[Any]:
    """Every tensor inside nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from outermost_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from outermost_tensors(item)
