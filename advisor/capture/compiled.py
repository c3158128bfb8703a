"""Inside the child: what Dynamo has compiled for the script itself, where frames broke and which were compiled again.

Only reads what Dynamo keeps for its own logs: it is private, differs between versions, and what is not there is said
to be missing. What is compiled for our own annotation or under our hooks is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch._dynamo

from advisor.capture.hooks import is_our_file, is_user_file

DYNAMO = vars(torch._dynamo.utils)
KEPT = 4096  # compilations that Dynamo is asked to remember; it drops the oldest
REASONS = 20  # different reasons kept of one place
LIMIT = re.compile(r"\b(recompile|cache|cache_size)_?\s?(size )?limit\b.*(exceed|reach)|limit exceeded", re.IGNORECASE)
OURS = "BACKEND_MATCH failure"  # what is left in the cache of a frame that was compiled for our annotation too
RESUMED = re.compile(r"^torch_dynamo_resume_in_(?P<function>.+)_at_\d+$")


@dataclass
class _Frame:
    """One frame that was compiled more than once: why each time, in which step, and the time that took, in seconds."""

    place: dict[str, Any]
    resumes: bool
    limit: bool = False
    reasons: list[str] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)


class Compilations:
    """Reads what Dynamo has noted between `resume` and `pause`; `step` tells it that a step has ended."""

    def __init__(self) -> None:
        self.missing: str | None = None
        self._breaks: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._frames: dict[str, _Frame] = {}
        self._names: dict[str, tuple[str, _Frame]] = {}
        self._seen_breaks = 0
        self._last: Any = None
        self._running = False
        self._seconds = 0.0
        self._stretch = 0  # a number for each time of watching: Dynamo numbers its frames anew after a reset
        remember = getattr(torch._dynamo.utils, "set_compilation_metrics_limit", None)
        if remember is not None:
            remember(KEPT)

    def resume(self) -> None:
        """What is compiled from now on is the script's own."""
        self._running = True
        self._stretch += 1
        self._seen_breaks = len(_breaks() or ())
        metrics = _metrics()
        self._last = metrics[-1] if metrics else None

    def pause(self, step: int) -> None:
        """What is compiled from now on is not the script's own, or not as it compiles it."""
        self.step(step)
        self._running = False

    def step(self, step: int) -> bool:
        """Take what was compiled in a step; whether anything was."""
        if not self._running or self.unchanged():
            return False
        breaks, metrics = _breaks(), _metrics()
        if breaks is None or metrics is None:
            self.missing = "this version of torch does not tell where compiled frames break"
            return False
        if len(breaks) != self._seen_breaks:
            first = self._seen_breaks if self._seen_breaks <= len(breaks) else 0  # the script has reset Dynamo
            for noted in breaks[first:]:
                self._break(str(getattr(noted, "reason", "")), list(getattr(noted, "user_stack", ())))
            self._seen_breaks = len(breaks)
        anything = bool(metrics) and metrics[-1] is not self._last
        if anything:
            for one in _behind(metrics, self._last):
                self._seconds += _spent(one)
                self._compilation(one, step)
        self._last = metrics[-1] if metrics else None
        return anything

    def unchanged(self) -> bool:
        """Whether Dynamo has noted nothing since, told without a copy of all that it keeps."""
        breaks, kept = DYNAMO.get("graph_break_reasons"), DYNAMO.get("_compilation_metrics")
        if breaks is None or kept is None or len(breaks) != self._seen_breaks:
            return False
        return (kept[-1] if kept else None) is self._last

    def describe(self, steps: range) -> dict[str, Any]:
        """As probe.json holds it: breaks with their frames, and recompiled frames with their time per step."""
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for key, found in self._breaks.items():  # the same frames may have been compiled in several stretches
            if key[1:] not in merged or found["count"] > merged[key[1:]]["count"]:
                merged[key[1:]] = found
        return {
            "seconds": self._seconds,
            "breaks": list(merged.values()),
            "recompiles": [_described(frame, steps) for frame in self._frames.values() if frame.reasons or frame.limit],
        }

    def _break(self, reason: str, stack: Iterable[Any], whole: bool = False) -> None:
        places = list(map(_place, stack))
        frames = [place for place in places if not is_our_file(place["path"])]
        if not frames or _in_ours(places):
            return
        innermost = frames[-1]
        key = (self._stretch, innermost["path"], innermost["line"], _first(reason))
        found = self._breaks.setdefault(key, {"reason": _first(reason), "frames": frames, "count": 0, "whole": whole})
        found["count"] += 1
        found["whole"] |= whole
        if len(frames) > len(found["frames"]):
            found["frames"] = frames  # seen through its callers

    def _compilation(self, metrics: Any, step: int) -> None:
        """One compilation: the first of a frame, one more of it, or one that was given up."""
        path, name = getattr(metrics, "co_filename", None), getattr(metrics, "co_name", None)
        number = f"{self._stretch}/{str(getattr(metrics, 'compile_id', None) or '').rpartition('/')[0]}"
        failure = f"{getattr(metrics, 'fail_type', None) or ''} {getattr(metrics, 'fail_reason', None) or ''}".strip()
        if failure and LIMIT.search(failure):
            known = self._frames.get(number)
            if known is not None:
                known.limit = True
            return
        if failure:
            self._given_up(metrics)
        if path is None or name is None or is_our_file(path):
            return
        resumed = RESUMED.match(name)
        place = {"path": path, "line": getattr(metrics, "co_firstlineno", None) or 1, "columns": None}
        place["function"] = resumed["function"] if resumed else name
        frame = self._frames.setdefault(number, _Frame(place, resumed is not None))
        reason = getattr(metrics, "recompile_reason", None)
        if reason and OURS not in str(reason):
            if len(frame.reasons) < REASONS:
                frame.reasons.append(_guard(str(reason)))
            frame.steps.append((step, float(getattr(metrics, "entire_frame_compile_time_s", None) or 0.0)))

    def _given_up(self, metrics: Any) -> None:
        """A frame that is left to Python as a whole, a break in a loop, say; the place is that of the cause."""
        path = getattr(metrics, "fail_user_frame_filename", None)
        line = getattr(metrics, "fail_user_frame_lineno", None)
        if path and line:
            name = getattr(metrics, "co_name", None) or ""
            inside = name if path == getattr(metrics, "co_filename", None) else ""
            frame = {"path": path, "line": line, "function": inside or None, "columns": None}
            self._break(str(getattr(metrics, "fail_reason", "")), [frame], whole=True)


def compile_facts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of `torch.compile` or `Module.compile` was given, and where the code begins that it compiles."""
    model = args[0] if args else kwargs.get("model")
    facts: dict[str, Any] = {
        name: kwargs[name] if isinstance(kwargs[name], (bool, str)) else type(kwargs[name]).__name__
        for name in ("dynamic", "mode", "backend", "fullgraph", "options")
        if kwargs.get(name) is not None
    }
    function = getattr(type(model), "forward", None) if isinstance(model, torch.nn.Module) else model
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if isinstance(code, CodeType):
        facts["code"] = {"path": code.co_filename, "line": code.co_firstlineno}
    facts["what"] = str(getattr(type(model) if isinstance(model, torch.nn.Module) else model, "__qualname__", ""))
    return facts


def _breaks() -> list[Any] | None:
    found: list[Any] | None = getattr(torch._dynamo.utils, "graph_break_reasons", None)
    return found


def _metrics() -> list[Any] | None:
    read = getattr(torch._dynamo.utils, "get_compilation_metrics", None)
    found: list[Any] | None = read() if read is not None else None
    return found


def _spent(metrics: Any) -> float:
    """Seconds of one compilation; that of a backward pass, made when it first runs, is noted by itself."""
    forward = getattr(metrics, "entire_frame_compile_time_s", None)
    backward = getattr(metrics, "backward_cumulative_compile_time_us", None)
    return float(forward) if forward is not None else float(backward or 0.0) / 1e6


def _behind(metrics: list[Any], last: Any) -> list[Any]:
    """The compilations after the one that was seen last; all where it has been dropped."""
    place = next((i for i in range(len(metrics) - 1, -1, -1) if metrics[i] is last), -1)
    return metrics[place + 1 :]


def _place(frame: Any) -> dict[str, Any]:
    """A frame summary of Dynamo's as a place of probe.json."""
    if isinstance(frame, dict):
        return frame
    resumed = RESUMED.match(frame.name or "")
    last = getattr(frame, "end_lineno", None) or frame.lineno
    columns = [frame.lineno, last, getattr(frame, "colno", None), getattr(frame, "end_colno", None)]
    return {
        "path": frame.filename,
        "line": frame.lineno,
        "function": resumed["function"] if resumed else frame.name,
        "columns": columns if None not in columns else None,
    }


def _in_ours(places: list[dict[str, Any]]) -> bool:
    """Whether it is one of our hooks, or what that calls, that Dynamo could not go on with: an optimizer's step that
    the script compiles holds them."""
    paths = [str(place["path"]) for place in reversed(places)]
    return next((is_our_file(path) for path in paths if is_our_file(path) or is_user_file(path)), False)


def _first(reason: str) -> str:
    """The first line of a reason, without the addresses and types that differ from one time to the next."""
    line = next((line.strip() for line in reason.strip().splitlines() if line.strip()), "")
    second = re.search(r"^\s*Explanation: (?P<text>.+)$", reason, re.MULTILINE)
    return line if second is None else f"{line}: {second['text']}"


def _guard(reason: str) -> str:
    """The guard that failed: without the number of the compilation, the source behind it and its stack."""
    line = (reason.strip().splitlines() or [""])[0]
    return re.sub(r"\s+#.*$", "", re.sub(r"^\d+/\d+: ", "", line)).strip()


def _described(frame: _Frame, steps: range) -> dict[str, Any]:
    spent = sum(seconds for step, seconds in frame.steps if step in steps)
    return {
        "frame": frame.place,
        "resumes": frame.resumes,
        "limit": frame.limit,
        "count": len(frame.steps),
        "reasons": frame.reasons,
        "host_us": spent / max(len(steps), 1) * 1e6,
    }
