"""Inside the child: what the dataset, the collate function and the sampler of a loader hold.

Looked at is what fetching in other processes could change: plain values, random generators, and what no two processes
can share.

What the user's own classes and functions reach through their attributes, closures and the globals that they name is
looked at; what libraries hold only as far as random generators and open files are among it.
"""

from __future__ import annotations

import functools
import io
import logging
import random
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils import data as torch_data

from advisor.capture.hooks import is_user_file

DEPTH = 5  # objects in objects that are looked into
FEW = 32  # items of a list that are looked at one by one
MOST = 2_000  # objects that are looked at in all
PLAIN = (bool, int, float, str, bytes, type(None))
HANDLES = ("h5py", "lmdb", "sqlite3", "netCDF4", "cv2", "decord", "psycopg2", "pymongo", "redis")  # of one process only
OPAQUE = (type, ModuleType, torch.nn.Module, logging.Logger, logging.LoggerAdapter, torch_data.DataLoader)
CODE = (FunctionType, MethodType)


class LoaderState:
    """What a loader holds at one time: `data` by its place for the dataset and the collate function, `order` for a
    sampler of the user's own, and `handles`, the kinds of what no two processes can read from."""

    def __init__(self, loader: Any) -> None:
        data, order = _Walk(), _Walk()
        data.look(loader.dataset, "dataset", DEPTH)
        data.look(loader.collate_fn, "collate_fn", DEPTH)
        for name in ("sampler", "batch_sampler"):
            held = getattr(loader, name, None)
            if held is not None and _is_own(type(held)):
                order.look(held, name, DEPTH)
        self.data: dict[str, Any] = {**data.plain, **data.drawn}
        self.order = {place: value for place, value in order.plain.items() if not place.endswith("sampler.epoch")}
        self.handles = sorted(data.handles)


class _Walk:
    """One look at everything that is reached from some objects."""

    def __init__(self) -> None:
        self.plain: dict[str, Any] = {}
        self.drawn: dict[str, Any] = {}
        self.handles: set[str] = set()
        self._seen: set[int] = set()

    def look(self, value: Any, place: str, depth: int, noted: bool = True) -> None:
        """Note a value and what it holds; `noted` says that a change of it is one of the user's data."""
        if _is_on_device(value):
            self.handles.add("something on a GPU")
        if isinstance(value, PLAIN):
            if noted:
                self.plain[place] = value
            return
        if noted:
            self.plain[place] = _token(value)
        if id(value) in self._seen or len(self._seen) >= MOST or depth == 0 or isinstance(value, OPAQUE):
            return
        self._seen.add(id(value))
        state = _generator_state(value)
        if state is not None:
            self.drawn[place] = state
        elif _is_handle(value):
            self.handles.add(_kind(value))
        elif isinstance(value, CODE):
            self._look_at_code(value, place, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.look(part, f"{place}.partial", depth - 1, False)
        elif callable(value) and getattr(type(value), "__self__", None) is not None:
            self.look(value.__self__, f"{place}.self", depth - 1, False)  # a method that is not written in Python
        elif type(value) in (list, tuple, dict):
            if len(value) <= FEW:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(pairs):
                    self.look(item, f"{place}[{key!r}]" if isinstance(key, PLAIN) else place, depth - 1, False)
        else:
            self._look_at_object(value, place, depth)

    def _look_at_object(self, value: Any, place: str, depth: int) -> None:
        own = _is_own(type(value))
        held = getattr(value, "__dict__", None)
        noted = own or isinstance(value, torch_data.Dataset)
        if isinstance(held, dict):
            for name, item in list(held.items()):
                self.look(item, f"{place}.{name}", depth - 1, noted)
        if own:
            for function in _methods(type(value)):
                self._look_at_code(function, f"{place}.{function.__name__}", depth)

    def _look_at_code(self, value: Any, place: str, depth: int) -> None:
        """What a function of the user's has at hand: its owner, its closure and the globals that it names."""
        if isinstance(value, MethodType):
            self.look(value.__self__, f"{place}.self", depth - 1, False)
        function = getattr(value, "__func__", value)
        if not isinstance(function, FunctionType) or not is_user_file(function.__code__.co_filename):
            return
        for given in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(given, f"{place}.default", depth - 1, False)
        for name in _names(function.__code__):
            if name in function.__globals__:
                self._look_at_global(function.__globals__[name], name, depth - 1)
        for cell in function.__closure__ or ():
            try:
                self.look(cell.cell_contents, f"{place}.{id(cell)}", depth - 1)
            except ValueError:  # not assigned yet
                continue

    def _look_at_global(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._seen_once(value, name, depth)
        elif not isinstance(value, OPAQUE):
            self.look(value, name, depth)

    def _seen_once(self, function: FunctionType, name: str, depth: int) -> None:
        if id(function) not in self._seen and depth > 0:
            self._seen.add(id(function))
            self._look_at_code(function, name, depth)


def _token(value: Any) -> Any:
    """What tells that a value was replaced, grew or was written to."""
    if isinstance(value, (list, dict, set, tuple)):
        return id(value), len(value)
    return (id(value), value._version) if isinstance(value, torch.Tensor) and not value.is_inference() else id(value)


def _generator_state(value: Any) -> Any:
    """The state of a random generator of its own, None for everything else; the global ones are looked at elsewhere."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes() if value is not torch.default_generator else None
    if isinstance(value, random.Random):
        return value.getstate() if value is not getattr(random, "_inst", None) else None
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    alone = isinstance(value, numpy.random.RandomState) and value is not getattr(numpy.random.mtrand, "_rand", None)
    return repr(value.get_state()) if alone else None


def _is_handle(value: Any) -> bool:
    """Whether an object reads on from where it stands, in a file that forked processes share or in itself."""
    if isinstance(value, io.IOBase):
        return not value.closed and not any(value is known for known in (sys.stdout, sys.stderr, sys.stdin))
    return type(value).__module__.partition(".")[0] in HANDLES or hasattr(type(value), "__next__")


def _is_on_device(value: Any) -> bool:
    """Whether a value is, or names, what a forked process cannot use."""
    if isinstance(value, (str, torch.device)):
        return str(value).partition(":")[0] == "cuda"
    if isinstance(value, torch.nn.Module):
        return any(p.is_cuda for p in value.parameters())
    return isinstance(value, torch.Tensor) and value.is_cuda


def _kind(value: Any) -> str:
    return "open file" if isinstance(value, io.IOBase) else type(value).__qualname__


def _is_own(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    return path is not None and is_user_file(path)


def _methods(cls: type) -> Iterator[FunctionType]:
    """The functions of a class and of those of the user's that it is made from, but for those that construct it."""
    for owner in cls.__mro__:
        if _is_own(owner):
            for name, value in vars(owner).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, FunctionType) and name != "__init__":
                    yield function


def _names(code: Any) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, type(code)))
    return set(code.co_names).union(*map(_names, inner))
