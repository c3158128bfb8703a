"""Inside the child: calls that build a tensor from a list of NumPy arrays, which torch walks number by number.

The functions are replaced only while a loader fetches a batch: a compiler knows `torch.tensor` by its identity. In the
loop itself the recorder of eager calls hands them over.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType
from typing import Any

import torch

from advisor.capture.hooks import is_our_file, is_user_file, user_frames, user_span

FUNCTIONS = ("tensor", "as_tensor")
CLASSES = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
           "CharTensor", "ByteTensor", "BoolTensor")  # fmt: skip
DEPTH = 3  # lists in lists that are looked into
PLACES = 50  # places kept of one loader
FRAMES = 12  # user frames kept of one call, the innermost
_NOTING = threading.Lock()


@dataclass
class Built:
    """The calls from one place: the host's time in them in seconds, the numbers they took, and what the lists held."""

    name: str
    frames: list[dict[str, Any]]
    calls: int = 0
    seconds: float = 0.0
    elements: int = 0
    arrays: bool = True
    mixed: bool = False
    dtypes: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        """What the lists held, as probe.json says it; `mixed` is a list whose arrays have several types."""
        return {
            "mixed": self.mixed,
            "dtypes": sorted(self.dtypes),
            "results": sorted(self.results),
            "elements": self.elements // max(self.calls, 1),
        }


class Builds:
    """Notes such calls of the user's code; `step` gives the number of the step that is running."""

    def __init__(self, step: Callable[[], int] = lambda: 0) -> None:
        self._step = step
        self._steps: set[int] = set()
        self.found: dict[tuple[str, CodeType, int], Built] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While inside, the functions are those that note; nobody's objects change. Only one at a time does so: fetches
        in another thread, or inside of this one, go on as they are."""
        if not _NOTING.acquire(blocking=False):
            yield
            return
        originals = {name: getattr(torch, name) for name in (*FUNCTIONS, *CLASSES)}
        for name in FUNCTIONS:
            setattr(torch, name, self._noted(f"torch.{name}", originals[name]))
        for name in CLASSES:
            setattr(torch, name, _Class(originals[name], self._noted(f"torch.{name}", originals[name])))
        torch.Tensor.type = _type_of(torch.Tensor.type)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del torch.Tensor.type
            for name, original in originals.items():
                setattr(torch, name, original)
            _NOTING.release()

    def through(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call of the loop and note it where it builds a tensor."""
        self._steps.add(self._step())
        if func is torch.tensor or func is torch.as_tensor:
            return self._noted(f"torch.{func.__name__}", func)(*args, **kwargs)
        return func(*args, **kwargs)

    def describe(self) -> list[dict[str, Any]]:
        """What `through` has seen, in the form of the loop's calls: means over the steps it saw."""
        steps = max(len(self._steps), 1)
        return [
            {
                "name": built.name,
                "frames": built.frames,
                "calls": built.calls,
                "per_step": built.calls / steps,
                "host_us": built.seconds / steps * 1e6,
                "facts": built.facts(),
            }
            for built in self.found.values()
            if built.arrays
        ]

    def _noted(self, name: str, original: Any) -> Callable[..., Any]:
        def build(*args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            if type(data) not in (list, tuple):
                return original(*args, **kwargs)
            begin = time.perf_counter()
            value = original(*args, **kwargs)
            self._note(name, data, value, time.perf_counter() - begin)
            return value

        return build

    def _note(self, name: str, data: Any, value: Any, seconds: float) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and is_our_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or not is_user_file(frame.f_code.co_filename):  # a library's own list
            return
        key = (name, frame.f_code, frame.f_lasti)
        built = self.found.get(key)
        if built is None:
            if len(self.found) >= PLACES:
                return
            places = [user_span(outer) for outer in islice(user_frames(frame), FRAMES)]
            built = self.found[key] = Built(name, places[::-1])
        held = held_arrays(data)
        dtypes = {str(array.dtype) for array in held or ()}
        built.calls += 1
        built.seconds += seconds
        built.elements += value.numel()
        built.arrays = built.arrays and held is not None
        built.mixed = built.mixed or len(dtypes) > 1
        built.dtypes |= dtypes
        built.results.add(str(value.dtype).removeprefix("torch."))


class _Class:
    """Stands in for one of torch's old tensor classes: calls are noted, everything else is the class's own."""

    def __init__(self, original: Any, build: Callable[..., Any]) -> None:
        self._original = original
        self._build = build

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._build(*args, **kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self._original)

    def __eq__(self, other: object) -> bool:
        return other is self._original or other is self

    def __hash__(self) -> int:
        return hash(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _type_of(original: Any) -> Callable[..., Any]:
    """`Tensor.type`, which takes the old classes too."""

    def type_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        given = [arg._original if isinstance(arg, _Class) else arg for arg in args]
        named = {name: arg._original if isinstance(arg, _Class) else arg for name, arg in kwargs.items()}
        return original(tensor, *given, **named)

    return type_of


def held_arrays(data: Any, depth: int = DEPTH) -> list[Any] | None:
    """The arrays that a list and the lists in it hold; None where they hold anything else, single numbers say."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(data) not in (list, tuple) or not data or depth == 0:
        return None
    found: list[Any] = []
    for item in data:
        if type(item) in (numpy.ndarray, numpy.memmap) and item.ndim and item.size and item.dtype.isnative:
            found.append(item)
            continue
        inner = held_arrays(item, depth - 1)
        if inner is None:
            return None
        found += inner
    return found
