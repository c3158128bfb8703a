"""Inside the child: which frames on the stack of a call are worth telling, and where exactly they are."""

from __future__ import annotations

import linecache
from itertools import islice
from types import CodeType
from typing import Any

# What a frame means: part of the program; machinery to leave out; its calls belong to a loader, an optimizer, autograd
# or a compiler; an optimizer calls the training step back; what wraps a module for several devices, whose own calls are
# left out and those of the module are not.
PLAIN, HIDDEN, FOREIGN, CLOSURE, WRAPPER = range(5)
_HIDDEN = (
    "/torch/overrides.py",
    "/torch/_tensor.py",
    "/torch/utils/_contextlib.py",
    "/torch/utils/_device.py",
    "/torch/nn/modules/module.py",
    "/torch/_dynamo/eval_frame.py",  # around a compiled function that runs eagerly here
    "/torch/_dynamo/external_utils.py",
    "/contextlib.py",
)
_FOREIGN = ("/torch/utils/data/", "/torch/autograd/", "/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/",
            "/torch/fx/", "/torch/jit/", "/torch/optim/")  # fmt: skip
_WRAPPER = ("/torch/distributed/", "/torch/nn/parallel/")
_OWN = ("/torch/optim/swa_utils.py", "/torch/autograd/function.py")  # work of the user's loop all the same


def kind_of(code: CodeType, ours: bool) -> int:
    """One of the kinds above; `ours` tells code of this package."""
    path = code.co_filename.replace("\\", "/")
    if ours:
        return CLOSURE if path.endswith("/capture/hooks.py") and code.co_name == "recorded" else HIDDEN
    if path.endswith(_HIDDEN) or path.startswith("<frozen"):
        return HIDDEN
    if path.endswith(_OWN):
        return PLAIN
    if any(part in path for part in _WRAPPER):
        return WRAPPER
    return FOREIGN if any(part in path for part in _FOREIGN) else PLAIN


def place_of(frame: Any) -> dict[str, Any]:
    """A running frame as `parse_frames` gives one of Dynamo's: `column` counts characters from the line's text on."""
    code, line = frame.f_code, frame.f_lineno
    place: dict[str, Any] = {"path": code.co_filename, "line": line, "function": code.co_name}
    positions = getattr(code, "co_positions", None)
    if positions is None:  # Python 3.10
        return place
    first, last, begin, end = next(islice(positions(), frame.f_lasti // 2, None), (None, None, None, None))
    source = linecache.getline(code.co_filename, first).rstrip("\r\n") if first is not None else ""
    if first is None or begin is None or end is None or not source.strip():
        return place
    text = source.strip()
    indent = len(source) - len(source.lstrip())
    place["line"] = first
    place["text"] = text
    place["column"] = _characters(source, begin) - indent
    place["end_column"] = _characters(source, end) - indent if last == first else len(text)
    return place


def _characters(line: str, column: int) -> int:
    return len(line.encode()[:column].decode(errors="ignore"))
