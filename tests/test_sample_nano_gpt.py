"""The sample trains: a few steps of a tiny model print a falling loss."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent.parent / "samples" / "nano_gpt" / "train.py"
TINY = ["--layers", "1", "--heads", "2", "--width", "32", "--block-size", "32", "--batch-size", "8", "--device", "cpu"]

pytest.importorskip("torch")


def losses(*flags: str) -> list[float]:
    """The losses the sample prints; it is run from another folder, as a user may."""
    command = [sys.executable, str(SAMPLE), *TINY, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=SAMPLE.anchor)
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"^step +\d+ \| loss ([\d.]+) \|", done.stdout, re.MULTILINE)]


def test_the_loss_falls() -> None:
    seen = losses("--steps", "40", "--log-every", "10")
    assert len(seen) == 5
    assert seen[0] == pytest.approx(5.55, abs=0.15)  # ln 256: nothing is known yet
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0] - 1


def test_the_same_seed_gives_the_same_losses() -> None:
    flags = ("--steps", "4", "--log-every", "2", "--dropout", "0.1")
    first = losses(*flags)
    assert losses(*flags) == first
    assert losses(*flags, "--seed", "1") != first


@pytest.mark.parametrize("flags", [["--dtype", "bfloat16"], ["--vocab", "1000"], ["--grad-clip", "1.0"]])
def test_every_variant_trains(flags: list[str]) -> None:
    seen = losses("--steps", "20", "--log-every", "10", *flags)
    assert seen[-1] < seen[0]


def test_a_preset_leaves_the_other_flags_in_charge() -> None:
    assert len(losses("--preset", "h200", "--vocab", "256", "--dtype", "float32", "--steps", "2")) == 1


def test_the_sample_knows_nothing_of_us() -> None:
    tree = ast.parse(SAMPLE.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    allowed = {"argparse", "math", "time", "pathlib", "numpy", "torch"}
    assert {name.split(".")[0] for name in names} == allowed
