"""Replays recorded operator calls in a child process and samples the device's counters while each runs alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from advisor.capture.counters import Recording, Sampler, summarise, visible_device
from advisor.capture.launch import child_environment
from advisor.errors import ScriptError
from advisor.model import Metric
from advisor.session import Spec

SECONDS = 0.6  # of each call; half a dozen windows of the counters
START_S = 120.0  # for torch to load and for the first call


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One kind of operator call as a trace records it, one entry per input; `strides` may be shorter than `shapes`."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...] = ()
    concrete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the device's counters said while a call ran alone; `reason` says why there is nothing."""

    call: RecordedCall
    time_us: float | None = None
    counters: tuple[Metric, ...] = field(default=())
    reason: str | None = None


def replay(calls: Sequence[RecordedCall], *, interpreter: str = sys.executable) -> tuple[Replayed, ...]:
    """Replay calls on the first visible device, about a second each. Raises ScriptError when the child does not start.

    Counters that the device does not offer make every entry say so.
    """
    if not calls:
        return ()
    with TemporaryDirectory(prefix="advisor-replay-") as folder:
        work = Path(folder)
        sampler = Sampler(visible_device(os.environ))
        sampler.start()
        try:
            found = run_calls(calls, work, interpreter=interpreter)
        finally:
            recording = sampler.stop()
    return tuple(_replayed(call, item, recording) for call, item in zip(calls, found, strict=True))


def run_calls(
    calls: Sequence[RecordedCall],
    work: Path,
    *,
    interpreter: str = sys.executable,
    prefix: Sequence[str] = (),
    once: bool = False,
) -> list[dict[str, Any]]:
    """Run the calls in a child, with a profiler's command before it or without; one record per call."""
    plan, result = work / "plan.json", work / "result.json"
    asked = {"calls": [dataclasses.asdict(call) for call in calls], "seconds": SECONDS, "once": once}
    plan.write_text(json.dumps(asked), encoding="utf-8")
    spec = Spec(script="", argv=(), root="", out=str(work), plan="")
    command = [*prefix, interpreter, "-m", "advisor.capture.replay", str(plan), str(result)]
    limit = START_S + (60.0 if prefix else 10.0) * len(calls)
    try:
        done = subprocess.run(
            command, env=child_environment(spec, interpreter), capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise ScriptError(f"replaying {len(calls)} operator calls did not end within {limit:g} s") from None
    except OSError as error:
        raise ScriptError(f"operator calls cannot be replayed: {error.strerror}: {command[0]}") from None
    found = _records(result)
    if not found:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ScriptError(f"operator calls cannot be replayed: {last}", detail=done.stderr or None)
    lost = {"reason": "the process that replays calls ended before this one"}
    return [*found, *[lost] * (len(calls) - len(found))]


def _records(result: Path) -> list[dict[str, Any]]:
    """What the child wrote, one record per call it came to; nothing where it ended while it wrote."""
    try:
        found: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return found


def _replayed(call: RecordedCall, item: dict[str, Any], recording: Recording) -> Replayed:
    if "reason" in item:
        return Replayed(call=call, reason=str(item["reason"]))
    counters = summarise(recording.samples, item["begin_s"], item["end_s"])
    gpm = tuple(metric for metric in counters if metric.source == "gpm")
    reason = None if gpm else next(iter(recording.missing.values()), "no window of the counters fell inside")
    return Replayed(call=call, time_us=float(item["time_us"]), counters=gpm, reason=reason)
