"""Applies the rewrites of findings, one at a time, and compares losses and gradients of training before and after."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from examiner import GRAPH_RULES, Answer, Entry

Losses = list[tuple[float, float]]  # of every backward pass: the loss, and the norm of the gradient
Original = Callable[[str], "Losses | str"]  # what the script itself trains with in a dtype
REPLAY = Path(__file__).with_name("replay.py")
SAME = "same losses"
TOLERANCE = 1e-5
"""Largest relative difference of two losses, or norms of gradients; what differs by more in float32, where rounding
alone can do that, is compared in float64."""
COMPARED = 4
"""Backward passes compared: after more steps, rounding alone moves a model of large losses further than that."""


def apply_all(script: Path, answer: Answer, interpreter: str | None = None) -> list[tuple[Entry, str]]:
    """For every finding of a graph rule with a rewrite: "same losses", or what is wrong with the rewrite."""
    rewritten = [entry for entry in answer.findings if entry.diff and entry.rule in GRAPH_RULES]
    if not rewritten:
        return []
    before = original(script, interpreter)
    return [(entry, apply(script, entry, before, interpreter)) for entry in rewritten]


def original(script: Path, interpreter: str | None = None) -> Original:
    """The losses of a script as it is, which is run once in each dtype that is asked for."""
    return functools.cache(lambda dtype: losses(script, interpreter, dtype))


def apply(script: Path, entry: Entry, unedited: Original, interpreter: str | None = None) -> str:
    """Apply one rewrite to a copy of the script's folder and train there."""
    before = unedited("float32")
    if isinstance(before, str):
        return f"the script itself: {before}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        shutil.copytree(script.parent, root, ignore=shutil.ignore_patterns(".advisor"))
        put = subprocess.run(["patch", "-p1"], cwd=root, input=entry.diff, capture_output=True, text=True)
        if put.returncode:
            return f"the diff does not apply: {put.stdout.strip()[-200:]}"
        after = losses(root / script.name, interpreter)
        if isinstance(after, str):
            return f"after the rewrite: {after}"
        if len(after) != len(before):
            return f"{len(before)} losses became {len(after)}"
        worst = _difference(after, before)
        if not worst <= TOLERANCE:
            after, before = losses(root / script.name, interpreter, "float64"), unedited("float64")
            if isinstance(after, list) and isinstance(before, list):
                worst = _difference(after, before)
    return SAME if worst <= TOLERANCE else f"losses or gradients differ by up to {worst:.1e} of themselves"


def _difference(new: Losses, old: Losses) -> float:
    passes = zip(new[:COMPARED], old, strict=False)
    return max(abs(n - o) / max(abs(o), 1e-6) for pair in passes for n, o in zip(*pair, strict=True))


def losses(script: Path, interpreter: str | None = None, dtype: str = "float32") -> Losses | str:
    """What a script trains with when nothing is dropped, or what it failed with; `dtype` is the default one."""
    ended = subprocess.run(
        [interpreter or sys.executable, str(REPLAY), script.name, dtype],
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode:
        return ended.stderr.strip()[-200:]
    found: Losses = json.loads(ended.stdout.strip().rpartition("\n")[2])
    return found
