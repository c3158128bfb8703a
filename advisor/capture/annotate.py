"""Inside the child: capture FX graphs with Dynamo and label every operator of one step with the node that called it.

The backend returns an `fx.Interpreter` that runs each node inside `record_function("advisor::<graph>::<node>")`. In
the profile of such a step the kernels nest under the node that launched them; backward kernels follow by the autograd
sequence number. The first execution also records facts about values (is this mask causal?); the profiled one adds
nothing else.
"""

from __future__ import annotations

import json
import math
import operator
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import fx

from advisor import clock
from advisor.capture.hooks import caller_span, portable

MASK_LIMIT = 1 << 28  # elements; a larger value is not inspected
FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+), in (?P<function>.*)$')


class Annotation:
    """Runs the roots under the annotating backend: one step to capture, one to warm up, one under the profiler."""

    def __init__(self, roots: list[Any], out: Path, root: str) -> None:
        self._roots = roots
        self._root = root  # of the project: recorded places are relative to it
        self._out = out
        self._graphs: list[_Recorder] = []
        self._state: set[int] = set()
        self._done = 0
        self._profiler: Any = None
        self._restore: list[tuple[Any, Any]] = []
        self.missing: dict[str, str] = {}

    def begin(self) -> None:
        """Route the next calls of the roots through Dynamo and the annotating backend."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for root in self._roots:
            self._state |= {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        for root in self._roots:
            if isinstance(root, torch._dynamo.eval_frame.OptimizedModule):
                root = root._orig_mod  # annotate what the script compiled
                self.missing["compiled"] = "the script compiles this module; its eager graph was annotated instead"
            inner = getattr(root, "module", root) if type(root).__name__ == "DistributedDataParallel" else root
            previous = inner._compiled_call_impl
            inner._compiled_call_impl = torch.compile(_through(inner), backend=self._backend, dynamic=False)
            self._restore.append((inner, previous))

    def _backend(self, module: fx.GraphModule, _examples: list[Any]) -> Callable[..., Any]:
        recorder = _Recorder(module, len(self._graphs), self._state)
        recorder.document["span"] = caller_span()
        self._graphs.append(recorder)
        return recorder.execute

    def advance(self) -> bool:
        """A step has ended; True once the profiled one is written."""
        self._done += 1
        if self._done == 2:
            self._profiler = torch.profiler.profile(record_shapes=True, activities=_activities())
            self._profiler.start()
        if self._done < 3:
            return False
        clock.synchronize()
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._out / "annotated.json.gz"))
        for inner, previous in self._restore:
            inner._compiled_call_impl = previous
        return True

    def write(self) -> None:
        """Write graph.json: the graphs, the breaks with their reasons, what could not be captured."""
        breaks = [{"reason": reason, "count": count} for reason, count in _counters("graph_break").items()]
        if not self._graphs:
            self.missing["graph"] = "no outermost module call was captured by Dynamo"
        document = {
            "graphs": [recorder.document for recorder in self._graphs],
            "breaks": breaks,
            "missing": self.missing,
        }
        (self._out / "graph.json").write_text(json.dumps(portable(document, self._root)), encoding="utf-8")


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

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("call_function", "call_method", "call_module"):
            with torch.profiler.record_function(f"advisor::{self._index}::{n.name}"):
                value = super().run_node(n)
        else:
            value = super().run_node(n)
        if self._described is not None and isinstance(value, torch.Tensor):
            self._described[n.name] = _describe_value(value)
            if n.op == "placeholder":
                origin = "state" if id(value) in self._state else "input"
                self._described[n.name]["facts"]["origin"] = origin
        return value


def _describe_value(value: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "stride": list(value.stride()) if value.layout is torch.strided else None,
        "device": value.device.type,
        "requires_grad": value.requires_grad,
        "facts": mask_facts(value),
    }


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
    return {
        "name": node.name,
        "op": node.op,
        "target": qualified(node),
        "args": [_describe_argument(arg, order) for arg in node.args],
        "kwargs": {key: _describe_argument(arg, order) for key, arg in node.kwargs.items()},
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
    target: Any = node.target
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


def _describe_argument(arg: Any, order: dict[fx.Node, int]) -> Any:
    if isinstance(arg, fx.Node):
        return {"ref": order[arg]}
    if isinstance(arg, bool) or arg is None or isinstance(arg, (int, str)):
        return arg
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": repr(arg)}
    if isinstance(arg, slice):
        return {"slice": [_describe_argument(part, order) for part in (arg.start, arg.stop, arg.step)]}
    if isinstance(arg, (tuple, list)):
        return {"tuple": [_describe_argument(item, order) for item in arg]}
    if arg is Ellipsis:
        return {"ellipsis": ""}
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.device):
        return {"device": arg.type}
    return {"opaque": f"{type(arg).__module__}.{type(arg).__qualname__}"}
