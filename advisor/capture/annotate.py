"""Inside the child: capture FX graphs with Dynamo and label every operator of one step with the node that called it.

The backend returns an `fx.Interpreter` that runs each node inside `record_function("advisor::<graph>::<node>")`. In
the profile of such a step the kernels nest under the node that launched them; backward kernels follow by the autograd
sequence number. The first execution also records facts about values (is this mask causal?); the profiled one adds
nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import re
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import fx

from advisor import clock
from advisor.capture.hooks import caller_span, portable

CHECKPOINT = "tag_activation_checkpoint"  # the operator in a graph that runs a part of it again in the backward pass
LEAST_TOKENS = 8  # of a row, from which on it is looked at for being a padded sequence
MASK_LIMIT = 1 << 28  # elements; a larger value is not inspected
FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+), in (?P<function>.*)$')


class Loop(Protocol):
    """Records what the user's code calls outside of the roots; `capture.eager.EagerRecorder` does."""

    index: int
    missing: dict[str, str]

    def begin(self, *, describe: bool = False, label: bool = False, facts: bool = True) -> None: ...
    def end(self, *, cut: bool = False) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def name_modules(self, root: Any) -> None: ...
    def document(self) -> dict[str, Any] | None: ...


class _Root:
    """An outermost module during annotation.

    `calls` counts its calls, `captured` those in which a graph ran, `skipped` the functions inside it that Dynamo left
    to Python as a whole; `graphs` are those captured in it.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.previous = module._compiled_call_impl
        self.calls = 0
        self.captured = 0
        self.skipped = 0
        self.graphs: list[_Recorder] = []


class Annotation:
    """Runs the roots under the annotating backend: one step to capture, one to warm up, one under the profiler.

    With `steps=2` nothing is warmed up. A `loop` records what runs outside of the roots, and the roots of which Dynamo
    left whole functions to Python in the first step, whose calls no graph holds; `dynamo=False` leaves every root to
    it. Roots that Dynamo only cuts into pieces keep its graphs.
    """

    def __init__(
        self, roots: list[Any], out: Path, root: str, *, loop: Loop | None = None, steps: int = 3, dynamo: bool = True
    ) -> None:
        self._modules = roots
        self._root = root  # of the project: recorded places are relative to it
        self._out = out
        self._loop = loop
        self._steps = steps
        self._dynamo = dynamo
        self._graphs: list[_Recorder] = []
        self._state: set[int] = set()
        self._done = 0
        self._taken = 0  # graph numbers
        self._executed = 0
        self._profiler: Any = None
        self._roots: list[_Root] = []
        self._leave: list[Callable[[], None]] = []
        self.missing: dict[str, str] = {}

    def begin(self) -> None:
        """Route the next calls of the roots through Dynamo and the annotating backend."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for module in self._modules:
            self._state |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for module in self._modules:
            self._route(module)
        if self._loop is not None:
            self._quiet_dynamo()
            self._loop.begin(describe=True)

    def _route(self, module: Any) -> None:
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            module = module._orig_mod  # annotate what the script compiled
            self.missing["compiled"] = "the script compiles this module; its eager graph was annotated instead"
        inner = getattr(module, "module", module) if type(module).__name__ == "DistributedDataParallel" else module
        root = _Root(inner)
        self._roots.append(root)
        if not self._dynamo:
            self._leave_to_loop(root, "Dynamo was not asked to")
            return
        compiled = torch.compile(_through(inner), backend=self._backend, dynamic=False)
        inner._compiled_call_impl = compiled if self._loop is None else self._counted(root, compiled)

    def _counted(self, root: _Root, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled call outside of the loop's recorder, which learns whether anything was captured in it."""
        loop = self._loop
        assert loop is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # inside another root: Dynamo traces through
                return root.module._call_impl(*args, **kwargs)
            executed, skipped, graphs = self._executed, _skipped_frames(), len(self._graphs)
            with loop.paused(), torch.compiler.set_stance("default"):
                value = compiled(*args, **kwargs)
            root.calls += 1
            root.captured += self._executed > executed
            root.skipped += _skipped_frames() - skipped
            root.graphs += self._graphs[graphs:]
            return value

        return call

    def _quiet_dynamo(self) -> None:
        """Compiled functions of the script's own run eagerly, so that the loop's recorder sees what they call.

        An error while Dynamo captures leaves that frame uncaptured instead of ending the script.
        """
        stance = torch.compiler.set_stance("force_eager")
        config = torch._dynamo.config
        before = config.suppress_errors

        def leave() -> None:
            config.suppress_errors = before
            stance.__exit__(None, None, None)

        config.suppress_errors = True
        self._leave.append(leave)

    def _leave_to_loop(self, root: _Root, reason: str) -> None:
        """Record a root call by call: the module runs as it is, and the loop's recorder names the modules inside."""
        root.module._compiled_call_impl = None
        if self._loop is not None:
            self._loop.name_modules(root.module)
            self.missing["dynamo"] = f"{type(root.module).__qualname__} was recorded by eager calls: {reason}"

    def _backend(self, module: fx.GraphModule, _examples: list[Any]) -> Callable[..., Any]:
        recorder = _Recorder(module, self._number(), self._state)
        recorder.document["span"] = caller_span()
        self._graphs.append(recorder)

        def execute(*args: Any) -> Any:
            self._executed += 1
            return recorder.execute(*args)

        return execute

    def _number(self) -> int:
        self._taken += 1
        return self._taken - 1

    def advance(self) -> bool:
        """A step has ended; True once the profiled one is written."""
        self._done += 1
        if self._done == self._steps:
            clock.synchronize()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._out / "annotated.json.gz"))
            self._profiler = None
            self.leave()
            return True
        last = self._done == self._steps - 1
        self._next_of_loop(last)
        if last:
            self._profiler = torch.profiler.profile(
                record_shapes=True,
                activities=_activities(),
                schedule=_every_step if self._steps < 3 else None,  # in the only trace there is, the step is marked
            )
            self._profiler.start()
        return False

    def _next_of_loop(self, last: bool) -> None:
        """What the loop's recorder does in the coming step: a root that turns out uncaptured is described anew."""
        if self._loop is None:
            return
        self._loop.end()
        again = False
        if self._done == 1:
            self._loop.index = self._number()
            for root in self._roots:
                if self._dynamo and root.calls and (root.skipped or not root.captured):
                    self._leave_to_loop(root, _why_uncaptured())
                    self._graphs = [graph for graph in self._graphs if graph not in root.graphs]
                    again = True
        self._loop.begin(describe=again, label=last)

    def leave(self) -> None:
        """Put everything back as it was; may be called again."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._loop is not None:
            self._loop.end(cut=self._done < self._steps)
        for root in self._roots:
            root.module._compiled_call_impl = root.previous
        for leave in self._leave:
            leave()
        self._roots, self._leave = [], []

    def write(self) -> None:
        """Write graph.json: the graphs, the breaks with their reasons, what could not be captured."""
        breaks = [{"reason": reason, "count": count} for reason, count in _counters("graph_break").items()]
        graphs = [recorder.document for recorder in self._graphs]
        if self._loop is not None:
            loop = self._loop.document()
            graphs += [loop] if loop is not None else []
            self.missing |= self._loop.missing
        if not graphs:
            self.missing["graph"] = "no outermost module call was captured by Dynamo"
        document = {"graphs": graphs, "breaks": breaks, "missing": self.missing}
        (self._out / "graph.json").write_text(json.dumps(portable(document, self._root)), encoding="utf-8")


def _why_uncaptured() -> str:
    """The first line of Dynamo's first reason."""
    reasons = list(_counters("graph_break")) or list(_counters("unimplemented"))
    first = reasons[0].strip().splitlines() if reasons else []
    return first[0] if first else "Dynamo captured no graph in it"


def _skipped_frames() -> int:
    """How many functions Dynamo has looked at and left to Python."""
    frames = _counters("frames")
    return frames.get("total", 0) - frames.get("ok", 0)


def _every_step(_step: int) -> torch.profiler.ProfilerAction:
    return torch.profiler.ProfilerAction.RECORD


def _through(module: Any) -> Callable[..., Any]:
    """The module's call behind a function of ours: Dynamo skips frames of torch's own modules, such as Sequential."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _activities() -> list[Any]:
    found = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(torch.profiler.ProfilerActivity.CUDA)
    return found


def _counters(name: str) -> dict[str, int]:
    return dict(torch._dynamo.utils.counters.get(name, {}))


class _Recorder(fx.Interpreter):
    """Interprets one captured graph, labelling nodes; describes them while it runs for the first time."""

    def __init__(self, module: fx.GraphModule, index: int, state: set[int]) -> None:
        super().__init__(module)
        self._index = index
        self._state = state
        self._described: dict[str, dict[str, Any]] | None = {}
        self._order = {node: position for position, node in enumerate(module.graph.nodes)}
        self.document: dict[str, Any] = {"index": index, "nodes": []}

    def execute(self, *args: Any) -> Any:
        """The compiled function Dynamo calls in place of the captured code."""
        result = self.run(*args)
        if self._described is not None:
            self.document["training"] = torch.is_grad_enabled()
            self.document["nodes"] = [
                _describe_node(node, self._order) | self._described.get(node.name, {})
                for node in self.module.graph.nodes  # type: ignore[union-attr]
            ]
            self._described = None
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it; a checkpoint may write to the buffers that it is passed.

        Dynamo makes inputs of buffers that a function finds in its module. Of its inputs a checkpoint expects that
        nobody writes to them, and BatchNorm counts its batches in one.
        """
        if getattr(target, "__name__", "") != CHECKPOINT:
            return super().call_function(target, args, kwargs)
        with contextlib.ExitStack() as stack:
            for value in args:
                if isinstance(value, torch.Tensor) and id(value) in self._state and not value.requires_grad:
                    stack.enter_context(getattr(torch.autograd, "_unsafe_preserve_version_counter")(value))  # noqa: B009
            return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("call_function", "call_method", "call_module"):
            with torch.profiler.record_function(f"advisor::{self._index}::{n.name}"):
                value = super().run_node(n)
        else:
            value = super().run_node(n)
        if self._described is not None and isinstance(value, torch.Tensor):
            self._described[n.name] = describe_value(value)
            if n.op == "placeholder":
                origin = "state" if id(value) in self._state else "input"
                self._described[n.name]["facts"]["origin"] = origin
        return value


def describe_value(value: torch.Tensor, facts: bool = True) -> dict[str, Any]:
    """Shape, dtype, layout and origin of a value, and, with `facts`, what kind of mask its elements make it.

    Nested tensors have no shape that is one of numbers. Elements are read of plain tensors only: sparse ones, those of
    a subclass and those without data have no comparisons, or others.
    """
    plain = value.layout is torch.strided and not value.is_nested
    readable = plain and type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"
    return {
        "shape": None if value.is_nested else list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "stride": list(value.stride()) if plain else None,
        "device": value.device.type,
        "requires_grad": value.requires_grad,
        "facts": _facts(value) if facts and readable else {},
    }


def _facts(value: torch.Tensor) -> dict[str, str]:
    try:
        return mask_facts(value) | padding_facts(value)
    except RuntimeError:  # values of a transform cannot be read
        return {}


def mask_facts(value: torch.Tensor) -> dict[str, str]:
    """What kind of attention mask a value is, by its elements.

    "keep" tells which query-key pairs stay when True (bool) or finite (float) elements are kept: "causal" (key <=
    query, top-left aligned), "all", or "other"; "drop" the same when True elements are dropped; "fill" the additive
    value of dropped pairs. Of a tensor of zeros and ones, "nonzero" and "zero" tell the same. "keep_empty" (and so on)
    is there where some row keeps nothing. Values that need a gradient or have fewer than two dimensions are no masks.
    """
    if value.requires_grad or value.dim() < 2 or value.numel() > MASK_LIMIT or value.numel() == 0:
        return {}
    if value.dtype is torch.bool:
        return _told("keep", value) | _told("drop", ~value)
    if value.is_complex() or value.shape[-1] < 2 or value.shape[-2] < 2:
        return {}
    kept = value == 0
    dropped = value[~kept]
    if dropped.numel() == 0:
        return {"keep": "all"}
    if bool((dropped == 1).all()):
        return _told("nonzero", ~kept) | _told("zero", kept)
    lowest = float(dropped.max())
    if lowest > -1e4 or float(dropped.min()) != lowest:
        return {}
    return _told("keep", kept) | {"fill": repr(lowest)}


def padding_facts(value: torch.Tensor) -> dict[str, str]:
    """How much of a batch of sequences (rows) is padding, where its elements, whole numbers, show that.

    Of zeros and ones, "zeros" is their share where each row changes at most once, as a mask of real tokens does, and
    "real" the one of them with which all rows begin, or end, if they do not do both: no sequence is all padding. Else
    "padded" is the share of what stands at the ends of rows and repeats one element, `padding`, the same in all rows.
    """
    whole = value.dtype in (torch.bool, torch.int32, torch.int64)
    if not whole or value.dim() != 2 or value.shape[1] < LEAST_TOKENS or not 1 < value.numel() <= MASK_LIMIT:
        return {}
    if value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all()):
        changes = (value[:, 1:] != value[:, :-1]).sum(dim=1)
        if not bool(changes.any()) or int(changes.max()) != 1:
            return {}
        alike = [value[0, at] for at in (0, -1) if bool((value[:, at] == value[0, at]).all())]
        real = {"real": str(int(alike[0]))} if len(alike) == 1 else {}
        return {"zeros": f"{float((value == 0).double().mean()):.4f}"} | real
    same = (value == value[:, -1:]).flip(1).long().cumprod(dim=1).sum(dim=1)  # length of the run that ends each row
    runs = (same > 1) & (same < value.shape[1])
    ends = value[runs, -1]
    if ends.numel() == 0 or not bool((ends == ends[0]).all()):
        return {}
    return {"padded": f"{float(same[runs].sum()) / value.numel():.4f}", "padding": str(int(ends[0]))}


def _told(name: str, kept: torch.Tensor) -> dict[str, str]:
    empty = {} if bool(kept.any(dim=-1).all()) else {f"{name}_empty": "some"}
    return {name: _pattern(kept)} | empty


def _pattern(kept: torch.Tensor) -> str:
    if bool(kept.all()):
        return "all"
    queries, keys = kept.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool, device=kept.device).tril()
    return "causal" if bool((kept == causal).all()) else "other"


def _describe_node(node: fx.Node, order: dict[fx.Node, int]) -> dict[str, Any]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, cls = stack[-1] if stack else (None, None)

    def refer(arg: Any) -> dict[str, Any] | None:
        return {"ref": order[arg]} if isinstance(arg, fx.Node) else None

    return {
        "name": node.name,
        "op": node.op,
        "target": qualified(node),
        "args": [describe_argument(arg, refer) for arg in node.args],
        "kwargs": {key: describe_argument(arg, refer) for key, arg in node.kwargs.items()},
        "module": _module_path(path),
        "module_class": f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else None,
        "frames": parse_frames(node.meta.get("stack_trace") or ""),
    }


def _module_path(path: Any) -> str | None:
    """Dynamo's "L['self']._modules['h']._modules['0'].attn" as "h.0.attn"; the root itself is ""."""
    if not isinstance(path, str):
        return None
    plain = re.sub(r"^L\[['\"]\w+['\"]\]", "", path)
    plain = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", plain)
    plain = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", plain)
    return plain.strip(".")


def parse_frames(stack: str) -> list[dict[str, Any]]:
    """Frames of a Dynamo stack trace, outermost first; `column` comes from the caret line Python 3.11 and newer add."""
    frames: list[dict[str, Any]] = []
    lines = stack.splitlines()
    for number, line in enumerate(lines):
        found = FRAME.match(line)
        if not found:
            continue
        frame: dict[str, Any] = {"path": found["path"], "line": int(found["line"]), "function": found["function"]}
        code = lines[number + 1] if number + 1 < len(lines) else ""
        marks = lines[number + 2] if number + 2 < len(lines) else ""
        if marks.strip() and not marks.strip().strip("^~"):
            frame["text"] = code[4:]
            frame["column"] = len(marks) - len(marks.lstrip()) - 4
            frame["end_column"] = len(marks.rstrip()) - 4
        frames.append(frame)
    return frames


def qualified(node: fx.Node) -> str:
    """A stable name for what a node calls."""
    if node.op == "call_method":
        return f"method.{node.target}"
    if node.op in ("placeholder", "get_attr", "output", "call_module"):
        return str(node.target)
    return qualified_function(node.target)


def qualified_function(target: Any) -> str:
    """A stable name for a function of torch, Python or the user."""
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{target}"
    if module in ("_operator", "operator") or target in vars(operator).values():
        return f"operator.{name}"
    if isinstance(target, (types.BuiltinFunctionType, types.MethodDescriptorType)) and not module:
        for home in (torch.nn.functional, torch, torch._C._nn, torch.Tensor):
            if getattr(home, name, None) is target:
                return f"{getattr(home, '__name__', 'torch.Tensor')}.{name}"
    return f"{module}.{name}" if module else str(name)


def describe_argument(arg: Any, refer: Callable[[Any], dict[str, Any] | None]) -> Any:
    """One argument in the form of graph.json; `refer` gives the reference of what is the result of a node."""
    reference = refer(arg)
    if reference is not None:
        return reference
    if isinstance(arg, bool) or arg is None or isinstance(arg, (int, str)):
        return arg
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": repr(arg)}
    if isinstance(arg, slice):
        return {"slice": [describe_argument(part, refer) for part in (arg.start, arg.stop, arg.step)]}
    if isinstance(arg, (tuple, list)):
        return {"tuple": [describe_argument(item, refer) for item in arg]}
    if arg is Ellipsis:
        return {"ellipsis": ""}
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.device):
        return {"device": arg.type}
    return {"opaque": f"{type(arg).__module__}.{type(arg).__qualname__}"}
