"""The sample through every stage, for real: its lines found, its patch right, its files untouched until `apply`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
SAMPLE = Path(__file__).parent.parent / "samples" / "nano_gpt"
SMALL = ["--layers", "2", "--width", "96", "--heads", "3", "--block-size", "128", "--batch-size", "4"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for path in SAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path / path.name)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "found"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    return tmp_path


def line_of(text: str, source: str) -> int:
    return next(n for n, line in enumerate(source.splitlines(), start=1) if text in line)


def losses(project: Path, *arguments: str) -> list[float]:
    command = [sys.executable, "train.py", *SMALL, "--steps", "20", "--log-every", "1", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True, env=ONE_THREAD)
    return [float(value) for value in re.findall(r"loss ([0-9.]+)", done.stdout)]


@pytest.mark.slow
def test_the_sample_from_an_unedited_script_to_an_applied_patch(project: Path) -> None:
    """The verdict depends on how quiet the machine is; what is found, proved, kept out of the tree does not."""
    source = (project / "train.py").read_text(encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "advisor",
        "optimize",
        "train.py",
        "--time",
        "150",
        "--no-baselines",
        "--json",
        "--",
    ]
    done = subprocess.run(
        [*command, *SMALL, "--steps", "5000"], cwd=project, capture_output=True, text=True, env=ONE_THREAD, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["outcome"] in ("improved", "inconclusive", "neutral"), report["reasons"]
    assert (project / "train.py").read_text(encoding="utf-8") == source
    found = {f["rule"]: f for f in report["findings"]}
    lines = {
        "naive-attention": line_of("y = att @ v", source),
        "unfused-layernorm": line_of("return self.weight * x + self.bias", source),
        "unfused-gelu": line_of("torch.tanh(", source),
    }
    assert {rule: found[rule]["line"] for rule in lines} == lines
    assert report["linked_share"] > 0.95
    proved = [t for t in report["trials"] if t["numerics"] is not None]
    assert proved
    assert all(t["numerics"]["ok"] for t in proved), [t["numerics"]["reasons"] for t in proved]

    base = losses(project)
    diffs = [found[rule]["diff"] for rule in lines]
    (project / "all.diff").write_text(diffs[0], encoding="utf-8")
    if report["outcome"] == "improved":
        subprocess.run([sys.executable, "-m", "advisor", "apply"], cwd=project, check=True, env=ONE_THREAD)
        assert (project / "train.py").read_text(encoding="utf-8") != source
    else:
        subprocess.run(["git", "apply", "all.diff"], cwd=project, check=True)
    patched = losses(project)
    assert len(base) == len(patched) == 20
    assert max(abs(a - b) for a, b in zip(base, patched, strict=True)) < 2e-4


def test_interrupting_capture_leaves_no_process_and_a_resumable_run(project: Path) -> None:
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--", *SMALL, "--steps", "100000"]
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, text=True, env=ONE_THREAD)
    try:
        deadline = time.monotonic() + 60
        while not list(project.glob(".advisor/runs/*/work/capture/output.log")):
            assert time.monotonic() < deadline, "the script was not started"
            time.sleep(0.1)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted in capture" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(project) not in listing
    (run,) = project.glob(".advisor/runs/*")
    assert (run / "run.json").is_file()
