"""`advisor doctor`: what this machine offers the advisor, what is missing and how to get it."""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor import calibration
from advisor.capture.counters import Sampler
from advisor.capture.launch import child_environment
from advisor.errors import ScriptError, UsageError
from advisor.hardware import lookup
from advisor.model import Hardware
from advisor.session import Spec

SECONDS = 300.0  # for torch to load and for the products of every dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at: `good` is None for what is merely told."""

    name: str
    good: bool | None
    says: str


def checks(interpreter: str = sys.executable) -> tuple[Check, ...]:
    """Look at the interpreter, torch, the devices, the counters and the tools."""
    found = [Check(name="python", good=sys.version_info >= (3, 10), says=sys.version.split()[0]), *_torch(interpreter)]
    found.append(_counters())
    found.append(_tool("ncu", "per-kernel counters (`advisor optimize --ncu`)", "comes with the CUDA toolkit"))
    found.append(_tool("git", "the state of the work tree, patches", "install git"))
    for module, use in (("polars", "the cache of large traces"), ("networkx", "the critical path")):
        there = importlib.util.find_spec(module) is not None
        found.append(
            Check(name=module, good=there, says=use if there else f"missing, needed for {use}: pip install {module}")
        )
    return tuple(found)


_ASK = """
import json, torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
                  "devices": [[d.name, d.multi_processor_count] for d in devices]}))
"""


def _asked(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON object that an interpreter prints last. Raises UsageError where it cannot be started, ScriptError."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run ({error.strerror}): name an interpreter with --python") from error
    except subprocess.TimeoutExpired:
        raise ScriptError(f"{command[0]} did not answer within {SECONDS:g} s") from None
    if done.returncode != 0:
        raise ScriptError((done.stderr.strip().splitlines() or ["it printed nothing"])[-1], detail=done.stderr or None)
    try:
        found = json.loads((done.stdout.strip().splitlines() or [""])[-1])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ScriptError(f"{command[0]} printed no answer")
    return found


def _torch(interpreter: str) -> list[Check]:
    try:
        facts = _asked([interpreter, "-c", _ASK])
    except ScriptError as error:
        return [
            Check(name="torch", good=False, says=f"{error}: pip install torch, or name the interpreter with --python")
        ]
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU build"
    found = [Check(name="torch", good=True, says=f"{facts['torch']}, {build}")]
    if not facts["devices"]:
        found.append(Check(name="device", good=None, says="none: scripts run on the CPU, without GPU counters"))
    for name, count in facts["devices"]:
        found.append(_device(name, count))
    return found


def _device(name: str, count: int) -> Check:
    known = lookup(name, count)
    if known is not None:
        peak = known.peak_flops.get("bfloat16") or known.peak_flops.get("float16")
        return Check(
            name="device", good=True, says=f"{name}" + (f", dense peak {peak / 1e12:g} TFLOP/s" if peak else "")
        )
    bare = Hardware(name=name, kind="cuda", sm_count=count)
    rate = calibration.reference(calibration.measured(calibration.default_path(), bare))
    shown = f"{name} ({count} multiprocessors) is not in the table"
    if rate is not None:
        return Check(name="device", good=True, says=f"{shown}; {rate[0] / 1e12:.4g} TFLOP/s: {rate[1]}")
    return Check(name="device", good=False, says=f"{shown}: run `advisor doctor --calibrate` or give --peak")


def _counters() -> Check:
    sampler = Sampler(0, period_s=0.12)
    sampler.start()
    recording = sampler.stop()
    reason = recording.missing.get("gpm") or (recording.missing.get("counters") if recording.device is None else None)
    if reason is not None:
        return Check(name="counters", good=None, says=reason)
    return Check(name="counters", good=True, says="GPM: SM activity, occupancy, tensor pipe and memory, beside the run")


def _tool(name: str, use: str, advice: str) -> Check:
    path = shutil.which(name)
    return Check(
        name=name, good=None if path is None else True, says=use if path else f"not on PATH, for {use}: {advice}"
    )


def calibrate(path: Path, interpreter: str = sys.executable) -> dict[str, Any]:
    """Measure the first visible device and keep the figures; returns them. Raises UsageError without a GPU."""
    with tempfile.TemporaryDirectory(prefix="advisor-calibrate-") as folder:
        spec = Spec(script="", argv=(), root="", out=folder, plan="")
        try:
            found = _asked([interpreter, "-m", "advisor.capture.calibrate"], child_environment(spec, interpreter))
        except ScriptError as error:
            raise ScriptError(f"the device cannot be measured: {error}", detail=error.detail) from None
    if found.get("device") is None:
        raise UsageError("torch sees no GPU to calibrate: check the driver, CUDA_VISIBLE_DEVICES and torch's build")
    found["date"] = datetime.date.today().isoformat()
    calibration.save(path, found["device"], found["sm_count"], found)
    return found
