"""Every sample trains as its README says, without a GPU: a few steps of the small sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SAMPLES = Path(__file__).parent.parent / "samples"
COMMANDS = {
    "tiny_launch_bound/train.py": ["--steps", "2"],
    "accum_sync/train.py": ["--steps", "2", "--log-every", "1"],
    "vision_habits/train.py": ["--steps", "2", "--log-every", "1"],
    "resnet_loader/train.py": ["--images", "16", "--repeat", "1", "--epochs", "1"],
    "nano_gpt/train_fp32.py": ["--steps", "2", "--log-every", "1", "--layers", "1"],
}


@pytest.mark.parametrize("script", COMMANDS)
def test_a_sample_trains_on_a_cpu(script: str, tmp_path: Path) -> None:
    if script.startswith("resnet"):
        pytest.importorskip("PIL")
    data = ["--data", str(tmp_path / "pictures")] if script.startswith("resnet") else []
    command = [sys.executable, str(SAMPLES / script), "--device", "cpu", *COMMANDS[script], *data]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if script != "tiny_launch_bound/train.py":
        assert "loss" in done.stdout
