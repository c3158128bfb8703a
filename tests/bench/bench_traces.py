"""Time `advisor analyze` and its peers on the same traces, interleaved, each in a fresh process, answers compared."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = str(HERE / "peers.py")
SAMPLE_S = 0.05  # between two looks at the memory of a running contender
MIB = 2**20
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
ANSWERS = ("events", "kernels", "kernel_us", "busy_us")
RELATIVE = 1e-6  # agreement asked of a sum of float64 microseconds
HTA_ROUNDING_US = 2.0  # HTA rounds each start up and each end down: less than 2 us of each device event
PACKAGES = {
    "advisor": ("torch-advisor", "msgspec", "numpy", "networkx", "pyarrow", "polars", "isal", "ijson"),
    "hta": ("HolisticTraceAnalysis", "pandas", "numpy", "ijson"),
    "tracelens": ("TraceLens", "pandas", "numpy", "orjson"),
    "json": (),
}


@dataclass(frozen=True)
class Contender:
    """A program that reads and analyses one trace and prints JSON, its answers among them."""

    name: str
    family: str  # whose packages it runs: a key of PACKAGES
    command: tuple[str, ...]  # {file} stands for the trace
    primed: bool = False  # run once, untimed, before it is measured on a file: it looks at a file again
    tolerance_us: float = 0.0  # by which times may differ, per device event


@dataclass
class Run:
    """One measured run. Memory is in MiB; `cpu_s` is of all processes, as is the sum."""

    contender: str
    file: str
    wall_s: float
    cpu_s: float
    peak_rss_mib: float  # of the largest process
    peak_sum_mib: float  # of all processes at one moment; pages that a fork shares count once per process
    processes: int  # alive at one moment
    load_before: float
    status: str  # ok, wrong, failed, timeout or memory
    note: str = ""
    answers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What `measure` saw: the figures of a Run by name, how the command ended, what it wrote."""

    figures: dict[str, Any]
    returncode: int
    stopped: str  # timeout or memory; empty for a command that ended by itself
    stdout: str
    stderr: str


class Memory:
    """Watches the memory of every process of a session, from /proc."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._others: set[str] = set()  # pids that were of another session at the last look
        self.alive: set[str] = set()  # pids of this session at the last look
        self.processes = 1
        self.largest_kib = 0
        self.sum_kib = 0

    def look(self) -> int:
        """Take one sample; returns the KiB that all processes hold now."""
        pids = {pid for pid in os.listdir("/proc") if pid.isdigit()}
        self._others &= pids
        sizes = {pid: size for pid in pids - self._others if (size := self._sizes(pid)) is not None}
        total = sum(resident for resident, _ in sizes.values())
        self.alive = set(sizes)
        self.processes = max(self.processes, len(sizes))
        self.largest_kib = max([self.largest_kib, *(peak for _, peak in sizes.values())])
        self.sum_kib = max(self.sum_kib, total)
        return total

    def _sizes(self, pid: str) -> tuple[int, int] | None:
        """KiB that a process of the session holds and has held at most; None for any other."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != self._session:
                self._others.add(pid)
                return None
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it ended between the listing and the look
            return None
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Vm")}
        return sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)

    def kill(self) -> None:
        """End every process of the session."""
        self.look()
        for pid in self.alive:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def measure(command: Sequence[str], timeout_s: float, limit_mib: float, environment: dict[str, str]) -> Outcome:
    """Run `command` to its end, or until it takes longer or its processes hold more than they may.

    Children of children that outlive their parent come to this process, so that their CPU time is counted too.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        memory, stopped = Memory(process.pid), ""
        with os.fdopen(os.pidfd_open(process.pid)) as ends:
            while not select.select([ends], [], [], SAMPLE_S)[0]:
                held_mib, late = memory.look() / 1024, time.perf_counter() - start > timeout_s
                if late or held_mib > limit_mib:
                    stopped = "timeout" if late else "memory"
                    memory.kill()
        wall_s = time.perf_counter() - start
        largest_kib = _reap(process, memory, start + timeout_s)  # never less than this process's own, held at the fork
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        out.seek(0)
        err.seek(0)
        figures = {
            "wall_s": wall_s,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "peak_rss_mib": max(largest_kib, memory.largest_kib) / 1024,
            "peak_sum_mib": max(largest_kib, memory.sum_kib) / 1024,
            "processes": memory.processes,
        }
        return Outcome(figures, process.returncode, stopped, out.read(), err.read())


def _reap(process: subprocess.Popen[bytes], memory: Memory, deadline: float) -> int:
    """Wait for all children, end those that go on past the deadline, set the return code of `process`.

    Returns the largest resident size that any of them had, in KiB.
    """
    largest_kib = 0
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return largest_kib
        if not pid:
            if time.perf_counter() > deadline:
                memory.kill()
            time.sleep(SAMPLE_S)
            continue
        largest_kib = max(largest_kib, usage.ru_maxrss)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)


def answers_of(contender: Contender, stdout: str) -> dict[str, float]:
    """The values of ANSWERS in a contender's output, as far as it gives them. Raises ValueError where there is none."""
    text = stdout if contender.family == "advisor" else (stdout.strip().splitlines() or [""])[-1]
    document = json.loads(text)
    found = document["files"][0] if contender.family == "advisor" else document
    return {name: found[name] for name in (*ANSWERS, "inside_s") if found.get(name) is not None}


def disagreement(answers: dict[str, float], truth: dict[str, float], tolerance_us: float) -> str:
    """What differs from the truth by more than rounding explains, in words; empty if nothing does."""
    wrong = []
    for name in ANSWERS:
        if name not in answers or name not in truth:
            continue
        allowed = 0.0
        if name.endswith("_us"):
            allowed = RELATIVE * abs(truth[name]) + tolerance_us * truth["device_events"]
        if not abs(answers[name] - truth[name]) <= allowed:
            wrong.append(f"{name} is {answers[name]}, not {truth[name]}")
    return "; ".join(wrong)


def run(contender: Contender, file: Path, options: argparse.Namespace, environment: dict[str, str]) -> Run:
    """Measure one contender once on one file and compare its answers with the file's `.truth.json`."""
    command = [part.replace("{file}", str(file)) for part in contender.command]
    load = os.getloadavg()[0]
    outcome = measure(command, options.timeout, options.memory_limit_gib * 1024, environment)
    result = Run(contender.name, file.name, **outcome.figures, load_before=load, status=outcome.stopped or "ok")
    if outcome.stopped:
        return result
    if outcome.returncode:
        result.status = "failed"
        result.note = f"exit {outcome.returncode}: {(outcome.stderr.strip().splitlines() or [''])[-1]}"
        return result
    try:
        result.answers = answers_of(contender, outcome.stdout)
    except (ValueError, LookupError, TypeError) as error:
        result.status, result.note = "failed", f"no answers in its output: {error!r}"
        return result
    truth = Path(f"{file}.truth.json")
    if truth.exists():
        result.note = disagreement(result.answers, json.loads(truth.read_text()), contender.tolerance_us)
        result.status = "wrong" if result.note else "ok"
    return result


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Every contender whose interpreter is given, in the order in which they take turns."""
    analyze = (options.advisor_python, "-m", "advisor", "analyze", "{file}", "--json")
    found = [
        Contender("advisor", "advisor", (*analyze, *options.fresh_flags.split())),
        Contender("advisor-cached", "advisor", analyze, primed=True),
    ]
    if options.hta_python:
        backends = ("ijson_batch_and_compress", "json", "ijson", "ijson_batched")
        for name in backends:
            command = (options.hta_python, PEERS, f"hta-{name}", "{file}")
            found.append(Contender(f"hta-{name}", "hta", command, tolerance_us=HTA_ROUNDING_US))
    if options.tracelens_python:
        found.append(Contender("tracelens", "tracelens", (options.tracelens_python, PEERS, "tracelens", "{file}")))
    found.append(Contender("json", "json", (sys.executable, PEERS, "json", "{file}")))
    wanted = options.only.split(",") if options.only else [contender.name for contender in found]
    if unknown := set(wanted) - {contender.name for contender in found}:
        raise SystemExit(f"no such contender, or no interpreter given for it: {', '.join(sorted(unknown))}")
    return [contender for contender in found if contender.name in wanted]


def without_missing(found: list[Contender]) -> list[Contender]:
    """The contenders less advisor's where this advisor has no `analyze`, with a note on stderr."""
    for contender in found:
        if contender.family == "advisor":
            help_command = [*contender.command[:4], "--help"]
            if subprocess.run(help_command, capture_output=True, check=False).returncode:
                print(f"skipped: {' '.join(help_command[:-1])} does not exist", file=sys.stderr)
                return [other for other in found if other.family != "advisor"]
    return found


def machine() -> dict[str, object]:
    """Processor, cores, memory and interpreter of this machine, without its name."""
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def versions(found: Sequence[Contender]) -> dict[str, object]:
    """Package versions of each family in its interpreter, and the commit of this tree."""
    result: dict[str, object] = {}
    for contender in found:
        packages = PACKAGES[contender.family]
        if packages and contender.family not in result:
            command = [contender.command[0], PEERS, "versions", *packages]
            result[contender.family] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    described = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return result | {"commit": described.stdout.strip() or None}


def measure_all(options: argparse.Namespace, found: Sequence[Contender], keep: Callable[[list[Run]], None]) -> None:
    """Run every contender on every file, `repeat` rounds, all contenders in turn within a round.

    `keep` gets all runs so far after each one. A contender that fails on a file is not run on it again.
    """
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        for file in options.files:
            subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)  # into the page cache, for all
            out = set()
            for contender in found:
                if contender.primed:
                    run(contender, file, options, environment)
            for _ in range(options.repeat):
                for contender in found:
                    if contender.name in out:
                        continue
                    runs.append(run(contender, file, options, environment))
                    print(_line(runs[-1]), file=sys.stderr, flush=True)
                    if runs[-1].status not in ("ok", "wrong"):
                        out.add(contender.name)
                    keep(runs)


def _line(run: Run) -> str:
    head = f"{run.file:<16} {run.contender:<30} {run.wall_s:8.2f} s wall {run.cpu_s:8.2f} s CPU"
    return f"{head} {run.peak_rss_mib:7.0f} MiB  {run.status} {run.note}"


def table(runs: Sequence[Run], baseline: str) -> str:
    """The medians per file and contender; ratios are of wall time and peak memory to the baseline's."""
    rows = [
        f"{'file':<16} {'contender':<30} {'wall s':>8} {'min-max':>13} {'CPU s':>8} {'peak MiB':>9} {'sum MiB':>8} "
        f"{'wall x':>7} {'peak x':>7}  status"
    ]
    groups: dict[tuple[str, str], list[Run]] = {}
    for each in runs:
        groups.setdefault((each.file, each.contender), []).append(each)
    for (file, name), group in groups.items():
        wall, peak = _median(group, "wall_s"), _median(group, "peak_rss_mib")
        base = groups.get((file, baseline))
        ratios = f"{'-':>7} {'-':>7}"
        if base and {run.status for run in (*base, *group)} <= {"ok", "wrong"}:
            ratios = f"{wall / _median(base, 'wall_s'):7.2f} {peak / _median(base, 'peak_rss_mib'):7.2f}"
        extent = f"{min(run.wall_s for run in group):.2f}-{max(run.wall_s for run in group):.2f}"
        rows.append(
            f"{file:<16} {name:<30} {wall:8.2f} {extent:>13} {_median(group, 'cpu_s'):8.2f} {peak:9.0f} "
            f"{_median(group, 'peak_sum_mib'):8.0f} {ratios}  {group[-1].status}"
        )
    return "\n".join(rows) + f"\nmedians; x is the ratio to {baseline}"


def _median(group: Sequence[Run], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in group))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="traces, each with the .truth.json that make_trace.py wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--only", help="comma-separated names of contenders")
    parser.add_argument("--advisor-python", default=sys.executable, help="interpreter that has advisor")
    parser.add_argument("--fresh-flags", default="--no-cache", help="what makes `advisor analyze` ignore its cache")
    parser.add_argument("--hta-python", help="interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--tracelens-python", help="interpreter that has TraceLens")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run (default 900)")
    parser.add_argument("--memory-limit-gib", type=float, default=12.0, help="for one run, all processes (default 12)")
    parser.add_argument("--scratch", help="folder for the cache of the cached look (default: the system's)")
    return parser.parse_args()


def main() -> int:
    """Measure, write the JSON after every run, print the table; 1 if an answer was wrong."""
    options = arguments()
    found = without_missing(contenders(options))
    about = {"machine": machine(), "versions": versions(found), "repeat": options.repeat}
    commands = {each.name: " ".join(each.command[1:]).replace(PEERS, "peers.py") for each in found}
    files = [json.loads(Path(f"{file}.truth.json").read_text()) | {"file": file.name} for file in options.files]
    kept: list[Run] = []

    def keep(runs: list[Run]) -> None:
        kept[:] = runs
        document = about | {"commands": commands, "files": files, "runs": [asdict(each) for each in runs]}
        options.out.write_text(json.dumps(document, indent=1) + "\n")

    measure_all(options, found, keep)
    baseline = "advisor" if any(contender.name == "advisor" for contender in found) else "json"
    print(table(kept, baseline))
    return int(any(each.status == "wrong" for each in kept))


if __name__ == "__main__":
    sys.exit(main())
