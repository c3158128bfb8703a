"""Applies the rewrites of findings, one at a time, and compares the losses of training before and after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from examiner import GRAPH_RULES, Answer, Entry

REPLAY = Path(__file__).with_name("replay.py")
SAME = "same losses"
TOLERANCE = 1e-5
"""Largest relative difference of two losses in float32: right rewrites of these exams stay below 3e-6."""


def apply_all(script: Path, answer: Answer, interpreter: str | None = None) -> list[tuple[Entry, str]]:
    """For every finding of a graph rule with a rewrite: "same losses", or what is wrong with the rewrite."""
    rewritten = [entry for entry in answer.findings if entry.diff and entry.rule in GRAPH_RULES]
    if not rewritten:
        return []
    before = losses(script, interpreter)
    return [(entry, apply(script, entry, before, interpreter)) for entry in rewritten]


def apply(script: Path, entry: Entry, before: list[float] | str, interpreter: str | None = None) -> str:
    """Apply one rewrite to a copy of the script's folder and train there."""
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
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(after, before, strict=True))
    return SAME if worst <= TOLERANCE else f"the losses differ by up to {worst:.1e} of themselves"


def losses(script: Path, interpreter: str | None = None) -> list[float] | str:
    """The losses of a script without dropout, or what it failed with."""
    ended = subprocess.run(
        [interpreter or sys.executable, str(REPLAY), script.name],
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode:
        return ended.stderr.strip()[-200:]
    found: list[float] = json.loads(ended.stdout.strip().rpartition("\n")[2])
    return found
