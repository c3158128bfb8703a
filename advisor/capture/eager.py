"""Inside the child: record the torch calls of the user's code that no captured graph holds, as nodes of one graph.

What Dynamo captures are the calls of modules. The loss in the training loop, clipping and averaging written by hand,
and modules that Dynamo cannot capture run outside of it. A `TorchFunctionMode` sees those calls as the program makes
them, with the same names Dynamo gives its nodes. It passes every call on unchanged, draws no random number, and holds
tensors by weak references only, and only within a step.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from advisor.capture.annotate import describe_argument, describe_value, qualified_function
from advisor.capture.hooks import is_our_file
from advisor.capture.places import CLOSURE, FOREIGN, PLAIN, WRAPPER, kind_of, place_of

NODE_LIMIT = 20_000  # nodes; what a step calls beyond them is not recorded
FACTS_LIMIT = 1 << 22  # elements; a larger value that is no boolean is not looked at for being a mask

# How Dynamo names what the operators of the language become.
OPERATORS = {
    "__getitem__": "getitem", "__setitem__": "setitem", "__invert__": "invert", "__and__": "and_", "__or__": "or_",
    "__xor__": "xor", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__floordiv__": "floordiv", "__mod__": "mod", "__lshift__": "lshift", "__rshift__": "rshift",
}  # fmt: skip
REFLECTED = {
    "__rsub__": "sub", "__rdiv__": "truediv", "__rtruediv__": "truediv", "__rpow__": "pow", "__rmatmul__": "matmul",
    "__rfloordiv__": "floordiv", "__rmod__": "mod", "__rlshift__": "lshift", "__rrshift__": "rshift",
}  # fmt: skip
# Calls that give no tensor and still cost: a value read by the host, or a write.
READS = frozenset(
    [f"method.{name}" for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")]
    + ["method.__format__", "method.__repr__", "method.equal", "method.allclose", "torch.equal", "torch.allclose"]
)
VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


class Name(NamedTuple):
    """What a call is named in the graph; `reflected` operators have their operands the other way round."""

    op: str
    target: str
    reflected: bool = False


class _Known(NamedTuple):
    value: weakref.ref[Any]
    node: int
    item: int | None = None  # the value is this item of the node's result


class EagerRecorder(TorchFunctionMode):
    """Records the calls of one thread between `begin` and `end`; a failure of its own switches it off, never raises.

    `missing` says why calls are absent. `index` is the number of its graph, which its labels carry.
    """

    def __init__(
        self,
        state: Callable[[], dict[int, str]] = dict,
        limit: int = NODE_LIMIT,
        through: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = lambda func, args, kwargs: func(
            *args, **kwargs
        ),
    ) -> None:
        super().__init__()
        self.through = through  # makes the recorded calls
        self._state_of = state
        self._limit = limit
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._kinds: dict[types.CodeType, int] = {}
        self._places: dict[tuple[types.CodeType, int], dict[str, Any]] = {}
        self._paths: dict[int, str] = {}
        self._nodes: list[dict[str, Any]] = []
        self._earlier: list[dict[str, Any]] = []
        self._names: dict[tuple[Any, ...], str] = {}  # place of a call and how often it was reached -> node
        self._serial = 0
        self._broken = False
        self.missing: dict[str, str] = {}
        self.index = 0
        self._start_step(describe=False, label=False, facts=False)

    def _start_step(self, *, describe: bool, label: bool, facts: bool) -> None:
        self._describe, self._label, self._facts = describe, label, facts
        self._known: dict[int, _Known] = {}
        self._gradients: dict[int, weakref.ref[Any]] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
        self._state: dict[int, str] = {}

    # ------------------------------------------------------------------------------------------------- begin and end

    def begin(self, *, describe: bool = False, label: bool = False, facts: bool = True) -> None:
        """Record the step that starts now: `describe` makes the nodes anew, `label` marks calls for the profiler.

        `facts` looks at the values of possible masks, which runs operators of its own.
        """
        if self._broken:
            return
        self._start_step(describe=describe, label=label, facts=facts)
        if describe:
            self._earlier = self._nodes
            self._nodes, self._names, self._serial = [], {}, 0
            self._state = self._state_of()
        self._insert()

    def end(self, *, cut: bool = False) -> None:
        """Stop recording and forget every tensor. A step that was `cut` short does not replace the one before."""
        self._remove()
        if cut and len(self._earlier) > len(self._nodes):
            self._nodes = self._earlier
        self._start_step(describe=False, label=False, facts=False)

    def name_modules(self, root: nn.Module) -> None:
        """Give calls inside a module its paths: for modules that are recorded here because Dynamo cannot."""
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), path)

    def document(self) -> dict[str, Any] | None:
        """The recorded graph in the form of graph.json, None where nothing was recorded."""
        if not self._nodes:
            return None
        return {"index": self.index, "kind": "eager", "training": True, "nodes": self._nodes}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not on the stack of modes inside: Dynamo would trace into it."""
        place = self._remove()
        try:
            yield
        finally:
            if place is not None:
                self._insert(place)

    def _insert(self, place: int = 0) -> None:
        """Put the mode on the stack, below those of the user: they leave in the order in which they came."""
        modes = _take_modes()
        for mode in (*modes[:place], self, *modes[place:]):
            _push_mode(mode)

    def _remove(self) -> int | None:
        """Take the mode off the stack; its place, None where it was not there."""
        modes = _take_modes()
        place = next((number for number, mode in enumerate(modes) if mode is self), None)
        for mode in modes:
            if mode is not self:
                _push_mode(mode)
        return place

    def _fail(self, error: Exception) -> None:
        self._broken = True
        self._nodes, self._names = [], {}
        self.missing["eager"] = f"calls outside of modules were not recorded: {type(error).__name__}: {error}"

    # ------------------------------------------------------------------------------------------------------ the calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass the call on, with a label around it, and describe what it gave."""
        given = kwargs or {}
        call = self._before(func, args, given)
        if call is None:
            return func(*args, **given)
        with call.label():
            value = self.through(func, args, given)
        self._after(call, value)
        return value

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        if self._broken or not (self._describe or self._label):
            return None
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            return None
        try:
            name = name_of(func)
            if name is None:
                return _Call(self, func, None, args, kwargs) if self._describe and args else None
            stack = self._stack(func)
            if stack is None:
                return None
            call = _Call(self, func, name, args, kwargs)
            call.stack = stack
            key = self._key(stack, name)
            if self._describe and len(self._nodes) >= self._limit:
                self._describe = False
                self.missing["eager"] = f"only the first {self._limit:,} calls outside of modules were recorded"
            if self._describe:
                self._serial += 1
                self._names[key] = f"{name.target.rsplit('.', 1)[-1].strip('_')}_{self._serial}"
                self._describe_call(call)
            call.called = self._names.get(key)
            return call
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in here must not reach the user's script
            self._fail(error)
            return None

    def _after(self, call: _Call, value: Any) -> None:
        if not self._describe or self._broken:
            return
        try:
            if call.name is None:
                self._attribute(call, value)
            else:
                self._result(call, value)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def label_of(self, called: str | None) -> str | None:
        """The range a call runs in, None where it is not labelled."""
        return f"advisor::{self.index}::{called}" if self._label and called is not None else None

    # ---------------------------------------------------------------------------------------------------- where it is

    def _stack(self, func: Any) -> list[Any] | None:
        """Frames of the call that are worth telling, innermost first; None where the call is not the loop's own."""
        own = getattr(func, "__code__", None)
        frame: Any = sys._getframe(1)
        found: list[Any] = []
        called_back = in_module = False
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code)
            if kind is None:
                kind = self._kinds[code] = kind_of(code, is_our_file(code.co_filename))
            in_module = in_module or code is _CALL_IMPL
            if not called_back and (kind == FOREIGN or (kind == WRAPPER and not in_module)):
                return None
            called_back = called_back or kind == CLOSURE  # the optimizer's step is around the calls, not they in it
            if kind == PLAIN and not (not found and code is own):
                found.append(frame)
            frame = frame.f_back
        return found

    def _key(self, stack: list[Any], name: Name) -> tuple[Any, ...]:
        """The place of a call, and how often the step has come there before."""
        inner = stack[0] if stack else None
        place = (inner.f_code, inner.f_lasti, name.target) if inner is not None else (None, 0, name.target)
        count = self._seen.get(place, 0)
        self._seen[place] = count + 1
        return (*place, count)

    def _frames(self, stack: list[Any]) -> list[dict[str, Any]]:
        return [self._place(frame) for frame in reversed(stack)]

    def _place(self, frame: Any) -> dict[str, Any]:
        key = (frame.f_code, frame.f_lasti)
        if key not in self._places:
            self._places[key] = place_of(frame)
        return dict(self._places[key])

    def _module(self) -> tuple[str | None, str | None]:
        """Path and class of the innermost module whose call is on the stack."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL_IMPL:
                module = frame.f_locals.get("self")
                cls = type(module)
                return self._paths.get(id(module)), f"{cls.__module__}.{cls.__qualname__}"
            frame = frame.f_back
        return None, None

    # --------------------------------------------------------------------------------------------------------- nodes

    def _describe_call(self, call: _Call) -> None:
        """What has to be read before the call runs: its arguments may be changed by it."""
        assert call.name is not None
        args = tuple(reversed(call.args)) if call.name.reflected else call.args
        given = {key: arg for key, arg in call.kwargs.items() if not _is_default(call.func, key, arg)}
        call.arguments = [describe_argument(arg, self._refer) for arg in args]
        call.keywords = {key: describe_argument(arg, self._refer) for key, arg in given.items()}

    def _refer(self, value: Any) -> dict[str, Any] | None:
        return {"ref": self._node_of(value)} if isinstance(value, torch.Tensor) else None

    def _node_of(self, tensor: Any) -> int:
        """The node that made a tensor; one that came from elsewhere becomes a placeholder."""
        known = self._known.get(id(tensor))
        if known is not None and known.value() is tensor:
            if known.item is None:
                return known.node
            maker = self._nodes[known.node]
            arguments = [{"ref": known.node}, known.item]
            node = self._add(Name("call_function", "operator.getitem"), arguments, {}, maker["frames"], tensor)
            self._nodes[node]["module"], self._nodes[node]["module_class"] = maker["module"], maker["module_class"]
        else:
            node = self._placeholder(tensor)
        self._known[id(tensor)] = _Known(weakref.ref(tensor), node)
        return node

    def _placeholder(self, tensor: Any) -> int:
        node = self._add(Name("placeholder", f"p_{len(self._nodes)}"), [], {}, [], tensor)
        kind = self._kind(tensor)
        facts = {"origin": "input"} if kind is None else {"origin": "state", "kind": kind}
        self._nodes[node]["facts"] = {**self._nodes[node].get("facts", {}), **facts}
        return node

    def _kind(self, tensor: Any) -> str | None:
        gradient = self._gradients.get(id(tensor))
        if gradient is not None and gradient() is tensor:
            return "gradient"
        return self._state.get(id(tensor)) or ("parameter" if isinstance(tensor, nn.Parameter) else None)

    def _add(self, name: Name, args: list[Any], kwargs: dict[str, Any], frames: list[Any], value: Any) -> int:
        index = len(self._nodes)
        node: dict[str, Any] = {
            "name": f"p_{index}" if name.op == "placeholder" else f"item_{index}",
            "op": name.op,
            "target": name.target,
            "args": args,
            "kwargs": kwargs,
            "module": None,
            "module_class": None,
            "frames": frames,
        }
        if isinstance(value, torch.Tensor):
            node |= self._described(value)
        self._nodes.append(node)
        return index

    def _described(self, value: Any) -> dict[str, Any]:
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        looked = self._facts and plain and (value.dtype is torch.bool or value.numel() <= FACTS_LIMIT)
        try:
            return describe_value(value, facts=looked and value.device.type != "meta")
        except RuntimeError:  # values of a transform cannot be read
            return {"dtype": str(value.dtype).removeprefix("torch.")}

    def _result(self, call: _Call, value: Any) -> None:
        """Make the node of a call that ran, unless it only asked for a property."""
        assert call.name is not None and call.stack is not None
        items = _items(value)
        target = call.name.target
        writes = value is None and target.endswith("_") and not target.endswith("__")
        if not items and target not in READS and target != "operator.setitem" and not writes:
            return
        index = self._add(call.name, call.arguments, call.keywords, self._frames(call.stack), value)
        node = self._nodes[index]
        node["name"] = call.called
        node["module"], node["module_class"] = self._module()
        if not torch.is_grad_enabled():
            node["facts"] = {**node.get("facts", {}), "grad_mode": "off"}
        for number, item in enumerate(items):
            alone = isinstance(value, torch.Tensor)
            self._known[id(item)] = _Known(weakref.ref(item), index, None if alone else number)
        if (target == "operator.setitem" or writes) and call.args:
            written = call.args[0]
            for number, item in enumerate(_items(written)):
                alone = isinstance(written, torch.Tensor)
                self._known[id(item)] = _Known(weakref.ref(item), index, None if alone else number)

    def _attribute(self, call: _Call, value: Any) -> None:
        """An attribute that is a tensor: `.data` is the tensor itself, `.grad` belongs to the state."""
        owner = call.args[0]
        if not isinstance(value, torch.Tensor) or value is owner:
            return
        attribute = _attribute_name(call.func)
        if attribute == "data":
            self._known[id(value)] = _Known(weakref.ref(value), self._node_of(owner))
        elif attribute == "grad" and not _holds(self._known, value):
            self._gradients[id(value)] = weakref.ref(value)
        elif attribute in VIEW_ATTRIBUTES:
            stack = self._stack(call.func)
            if stack is not None:
                arguments = [{"ref": self._node_of(owner)}, attribute]
                name = Name("call_function", "builtins.getattr")
                index = self._add(name, arguments, {}, self._frames(stack), value)
                self._nodes[index]["module"], self._nodes[index]["module_class"] = self._module()
                self._known[id(value)] = _Known(weakref.ref(value), index)


class _Call:
    """One call on its way through the recorder; an attribute that is read has no name."""

    __slots__ = ("_recorder", "args", "arguments", "called", "func", "keywords", "kwargs", "name", "stack")

    def __init__(
        self, recorder: EagerRecorder, func: Any, name: Name | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._recorder = recorder
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        self.called: str | None = None  # the name of its node
        self.stack: list[Any] | None = None
        self.arguments: list[Any] = []
        self.keywords: dict[str, Any] = {}

    def label(self) -> AbstractContextManager[Any]:
        """The range the profiler shall see around the call."""
        text = self._recorder.label_of(self.called)
        return nullcontext() if text is None else torch.profiler.record_function(text)


_CALL_IMPL = nn.Module._call_impl.__code__


def _take_modes() -> list[Any]:
    """Take every mode off the stack, outermost first in the result."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    return modes[::-1]


@cache
def _defaults(func: Any) -> dict[str, Any]:
    """Default values of a Python function: torch hands its functions on with every argument spelled out."""
    if not isinstance(func, types.FunctionType):
        return {}
    return {p.name: p.default for p in inspect.signature(func).parameters.values() if p.default is not p.empty}


def _is_default(func: Any, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, int, float, str, type(None))):
        return False
    defaults = _defaults(func)
    return name in defaults and type(defaults[name]) is type(value) and bool(defaults[name] == value)


def _holds(known: dict[int, _Known], value: Any) -> bool:
    found = known.get(id(value))
    return found is not None and found.value() is value


def _attribute_name(func: Any) -> str | None:
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", None)


def name_of(func: Any) -> Name | None:
    """How Dynamo would name a call of `func`; None for an attribute, which is no call."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return None
    if not getattr(func, "__qualname__", "").startswith(("Tensor.", "TensorBase.")):
        return Name("call_function", qualified_function(func))
    if name in OPERATORS:
        return Name("call_function", f"operator.{OPERATORS[name]}")
    if name in REFLECTED:
        return Name("call_function", f"operator.{REFLECTED[name]}", reflected=True)
    return Name("call_method", "method.unbind" if name == "__iter__" else f"method.{name}")


def _items(value: Any) -> list[Any]:
    """The tensors of a result: itself, those of a sequence, or those a tensor is iterated into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    if type(value) is type(iter(())):
        rows: Any = copy.copy(value)
        return [item for item in rows if isinstance(item, torch.Tensor)]
    return []
