"""Asks Nsight Compute for the counters of chosen kernels: of recorded operator calls, or in a step of the script.

Nsight Compute runs a kernel once per group of counters and restores its memory in between. An operator call made again
alone needs little memory and launches the same kernels; only what no such call launches is looked for in the script.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from advisor.capture.launch import child_environment
from advisor.capture.replaying import RecordedCall, run_calls
from advisor.errors import ScriptError, UsageError
from advisor.session import Spec

PLAN = "advisor.capture.counted:CountedPlan"
LAUNCHES = 300  # at most, so that the run ends within minutes
SECONDS = 300.0  # of one step of the script
SECTIONS = ("LaunchStats", "Occupancy")
METRICS = (  # of as few passes as will do: each runs the kernel again
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
)
FORBIDDEN = "ERR_NVGPUCTRPERM"
_CALL = re.compile(r"\(.*$", re.DOTALL)


def find_ncu() -> str:
    """The command; raises UsageError where it is not installed."""
    path = shutil.which("ncu")
    if path is None:
        raise UsageError("ncu is not on PATH: install Nsight Compute (it comes with the CUDA toolkit), or use --replay")
    return path


def function_name(kernel: str) -> str:
    """The function of a demangled kernel name, without return type, namespaces, template and call arguments."""
    plain, depth = [], 0
    for character in kernel.replace("(anonymous namespace)", ""):
        depth += character == "<"
        if depth == 0:
            plain.append(character)
        depth = max(0, depth - (character == ">"))
    return _CALL.sub("", "".join(plain)).rpartition("::")[2].split(" ")[-1].strip()


def command(ncu: str, kernels: Sequence[str], log: Path) -> list[str]:
    """The profiler's command line, to stand before the program's. Clocks are left as they are."""
    names = sorted({re.escape(name) for kernel in kernels if (name := function_name(kernel))})
    metrics = [part for section in SECTIONS for part in ("--section", section)]
    return [
        ncu, "--csv", "--page", "raw", "--log-file", str(log), "--clock-control", "none", "--profile-from-start", "off",
        "--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(names)})$",
        "--launch-count", str(LAUNCHES), *metrics, "--metrics", ",".join(METRICS),
    ]  # fmt: skip


def profile_calls(
    calls: Sequence[RecordedCall], kernels: Sequence[str], log: Path, work: Path, *, interpreter: str = sys.executable
) -> None:
    """Make operator calls once each under the profiler and leave its raw page in `log`; raises ScriptError."""
    try:
        run_calls(calls, work, interpreter=interpreter, prefix=command(find_ncu(), kernels, log), once=True)
    except ScriptError:
        if FORBIDDEN not in _said(log):
            raise
    check(log)


def profile_script(spec: Spec, kernels: Sequence[str], log: Path, *, interpreter: str = sys.executable) -> None:
    """Run one step of a script under the profiler and leave its raw page in `log`; raises ScriptError.

    `spec` names the plan `PLAN`; its output folder takes what the script writes.
    """
    out = Path(spec.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "spec.json"
    spec.save(path)
    program = [interpreter, "-m", "advisor.capture.child", str(path)]
    try:
        subprocess.run(
            [*command(find_ncu(), kernels, log), *program],
            env=child_environment(spec, interpreter),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ScriptError(f"a step under Nsight Compute did not end within {SECONDS:g} s") from None
    check(log)


def _said(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def check(log: Path) -> None:
    """Raise ScriptError, saying what to do, when the profiler recorded nothing."""
    said = _said(log)
    if FORBIDDEN in said:
        raise ScriptError(
            f"this machine forbids its counters to users ({FORBIDDEN}): ask its administrator for "
            "NVreg_RestrictProfilingToAdminUsers=0, or use --replay, which needs no permission"
        )
    if '"Kernel Name"' not in said:
        lines = [line for line in said.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
        raise ScriptError(f"Nsight Compute recorded no kernel: {(lines or ['it printed nothing'])[-1]}")
