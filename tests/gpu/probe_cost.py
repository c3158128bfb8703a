"""What the hooks of a capture cost a training step while no profiler runs, as JSON on standard output.

`python tests/gpu/probe_cost.py [--seconds 10] [--device cuda]` trains two small models in short blocks, with the hooks
and without them in turn, and prints for each the ratio of step times with an interval of 95 %, the host's own time that
the hooks add, and how often N steps wait for the device or copy from it, as a Kineto trace counts them with the hooks
and without. It takes under a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from probed import WORKLOADS, Hooked, Training

BLOCK_S = 0.008  # a stretch of steps with or without the hooks: short, so that what else the machine does is in both
SYNCHRONIZE = torch.cuda.synchronize  # before the hooks are there: a capture notes who calls it
EVENTS = 256  # made before the steps, as a capture does
CUT = 0.1  # of the pairs on either side are left out of a mean
RESAMPLES = 500  # of the pairs, for an interval
TRACED = 20  # steps under the profiler, to count waits
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "aten::item",
         "aten::_local_scalar_dense", "aten::is_nonzero")  # fmt: skip


def synchronize(training: Training) -> None:
    if training.device == "cuda":
        SYNCHRONIZE()


def block(training: Training, count: int) -> tuple[float, float]:
    """Seconds of `count` steps: on the clock, and of this process on its cores."""
    begin, spent = time.perf_counter(), time.process_time()
    training.steps(count)
    synchronize(training)
    return time.perf_counter() - begin, time.process_time() - spent


def lead_in(training: Training) -> None:
    """A step that does not count, in which the interpreter adapts to the functions that were exchanged."""
    training.step()
    synchronize(training)


def compare(hooked: Hooked, training: Training, seconds: float) -> dict[str, Any]:
    """Blocks in turn, the order of a pair alternating; ratios within pairs, of which the mean is told: few blocks are
    long enough for a mark. Only the time of blocks with the hooks brings the next mark nearer."""
    training.steps(30)
    with hooked.without():
        training.steps(30)
        whole, _ = block(training, 30)
    count = max(2, round(BLOCK_S / (whole / 30)))
    hooked.make_events(EVENTS)
    pairs: list[tuple[float, float, float, float]] = []
    gc.collect()
    gc.freeze()
    hooks, left = hooked.session.hooks, 0.0

    def with_hooks() -> tuple[float, float]:
        nonlocal left
        hooks._next_told = math.inf
        lead_in(training)
        hooks._next_told = time.perf_counter() + left
        taken = block(training, count)
        left = hooks._next_told - time.perf_counter()
        return taken

    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs) < 8:
        if len(pairs) % 2:
            on = with_hooks()
        with hooked.without():
            lead_in(training)
            off = block(training, count)
        if not len(pairs) % 2:
            on = with_hooks()
        pairs.append((*on, *off))
    ratios = [on / off for on, _, off, _ in pairs]
    added = sorted((on - off) / count * 1e6 for _, on, _, off in pairs)
    low, high = interval(ratios)
    return {
        "step_ms": statistics.median(off for _, _, off, _ in pairs) / count * 1e3,
        "ratio": trimmed(ratios),
        "low": low,
        "high": high,
        "added_process_us": statistics.median(added),
        "pairs": len(pairs),
        "steps_per_block": count,
    }


def interval(values: list[float]) -> tuple[float, float]:
    """The interval of 95 % of a trimmed mean, from resamples of the values (percentile bootstrap, Efron 1979)."""
    draw = random.Random(0)
    means = sorted(trimmed(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def trimmed(values: list[float]) -> float:
    """The mean without the least and the greatest of the values."""
    ranked, cut = sorted(values), int(CUT * len(values))
    return statistics.fmean(ranked[cut : len(ranked) - cut])


def waits(training: Training) -> dict[str, int]:
    """How often some steps wait for the device or copy from it."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if training.device == "cuda" else [])]
    synchronize(training)
    with profile(activities=activities) as profiler:
        training.steps(TRACED)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = Counter(str(event.get("name")) for event in events if event.get("ph") == "X")
    return {name: n for name, n in sorted(names.items()) if name in WAITS or name.startswith("Memcpy DtoH")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="time per model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    for name, make in WORKLOADS.items():
        hooked = Hooked()
        training = make(given.device)
        found[name] = compare(hooked, training, given.seconds)
        on = waits(training)
        with hooked.without():
            off = waits(training)
        found[name]["waits"] = {"steps": TRACED, "hooks": on, "plain": off}
        hooked.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
