"""What `advisor doctor` looks at and says, and the file in which measured devices are kept."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from advisor import calibration, doctor
from advisor.capture.counters import Recording
from advisor.errors import OutputError, ScriptError, UsageError
from advisor.model import Hardware

FIGURES = {
    "device": "Experimental GPU",
    "sm_count": 100,
    "torch": "2.11.0+cu130",
    "measured_flops": {"float16": 4.1e14, "bfloat16": 4e14, "tfloat32": 2e14, "float32": 3e13},
    "measured_bandwidth": 1.5e12,
}
GPU = Hardware(name="Experimental GPU", kind="cuda", sm_count=100)

Interpreter = Callable[..., str]


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """A function that makes a program which prints some lines, whatever it is asked."""

    def make(*lines: object, status: int = 0, error: str = "", first: str = "") -> str:
        path = tmp_path / "python"
        shown = "\n".join(json.dumps(line) if isinstance(line, dict) else str(line) for line in lines)
        (tmp_path / "said").write_text(f"{shown}\n", encoding="utf-8")
        (tmp_path / "error").write_text(error, encoding="utf-8")
        script = f"#!/bin/sh\n{first}\ncat '{tmp_path}/said'\ncat '{tmp_path}/error' >&2\nexit {status}\n"
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of measured devices, in a folder of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "advisor" / "devices.json"


# ------------------------------------------------------------------------------------------------------------- the file


def test_the_file_lies_in_the_users_configuration(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibration.default_path() == kept
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.default_path() == tmp_path / ".config" / "advisor" / "devices.json"


def test_figures_come_back_with_where_they_are_from(kept: Path) -> None:
    calibration.save(kept, "Experimental GPU", 100, {**FIGURES, "date": "2026-11-30"})
    found = calibration.measured(kept, GPU)
    assert (found.measured_flops, found.measured_bandwidth) == (FIGURES["measured_flops"], 1.5e12)
    assert (found.peak_flops, found.hbm_bandwidth) == ({}, None)  # what was reached is no peak
    source = "measured by advisor doctor --calibrate on 2026-11-30"
    assert found.sources == {"measured_flops": source, "measured_bandwidth": source}
    assert calibration.reference(found) == (4e14, f"bfloat16 matmul rate of Experimental GPU, {source}")


def test_nothing_but_the_figures_is_kept(kept: Path) -> None:
    calibration.save(kept, "Experimental GPU", 100, {**FIGURES, "date": "2026-11-30", "host": "somewhere"})
    (entry,) = json.loads(kept.read_text(encoding="utf-8")).values()
    assert set(entry) == {"measured_flops", "measured_bandwidth", "date"}


def test_devices_stand_beside_each_other_and_newer_figures_replace_older(kept: Path) -> None:
    for name, count, rate in (("A", 1, 1e12), ("A", 2, 2e12), ("B", None, 3e12), ("A", 1, 4e12)):
        figures = {"measured_flops": {"bfloat16": rate}, "measured_bandwidth": 1e12, "date": "2026-11-30"}
        calibration.save(kept, name, count, figures)

    def rate_of(name: str, count: int | None) -> float | None:
        found = calibration.measured(kept, Hardware(name=name, kind="cuda", sm_count=count))
        return found.measured_flops.get("bfloat16")

    assert (rate_of("A", 1), rate_of("A", 2), rate_of("B", None)) == (4e12, 2e12, 3e12)
    assert rate_of("A", None) is None and rate_of("C", 1) is None  # a slice of a device is another one


def test_a_device_is_known_by_the_name_it_gives_itself(kept: Path) -> None:
    calibration.save(kept, "NVIDIA H200", 132, {**FIGURES, "date": "2026-11-30"})
    datasheet = Hardware(name="NVIDIA H200 SXM", kind="cuda", sm_count=132)
    assert calibration.measured(kept, datasheet) == datasheet
    assert calibration.measured(kept, datasheet, "NVIDIA H200", 132).measured_bandwidth == 1.5e12


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        json.dumps({"Experimental GPU / 100": 3}),
        *(
            json.dumps({"Experimental GPU / 100": {"measured_flops": flops, "measured_bandwidth": bandwidth}})
            for flops, bandwidth in (
                (3, 1e12),
                ({"bfloat16": "4e14"}, 1e12),
                ({"bfloat16": 4e14}, None),
                ({"bfloat16": -4e14}, 1e12),
                ({"bfloat16": 0}, 1e12),
                ({"bfloat16": True}, 1e12),
                ({"bfloat16": math.nan}, 1e12),
                ({"bfloat16": 4e14}, math.inf),
            )
        ),
    ],
)
def test_a_damaged_file_says_nothing_and_can_be_written_again(kept: Path, text: str) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_text(text, encoding="utf-8")
    assert calibration.measured(kept, GPU) == GPU
    calibration.save(kept, "Experimental GPU", 100, {**FIGURES, "date": "2026-11-30"})
    assert calibration.measured(kept, GPU).measured_bandwidth == 1.5e12


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match=r"cannot write devices\.json: .*: set XDG_CONFIG_HOME") as raised:
        calibration.save(tmp_path / "file" / "devices.json", "A", 1, {**FIGURES, "date": "2026-11-30"})
    assert raised.value.exit_status == 6


@pytest.mark.parametrize(
    ("flops", "rate"),
    [({"float16": 3e14, "float32": 1e13}, 3e14), ({"float32": 1e13}, None), ({}, None)],
)
def test_the_rate_that_stands_in_for_a_peak_is_one_of_16_bits(
    kept: Path, flops: dict[str, float], rate: float | None
) -> None:
    calibration.save(kept, GPU.name, 100, {"measured_flops": flops, "measured_bandwidth": 1.0, "date": "2026-11-30"})
    found = calibration.reference(calibration.measured(kept, GPU))
    assert (found[0] if found else None) == rate


def test_rates_of_the_run_itself_are_no_calibration() -> None:
    """They have no source here and are measured on a device that is busy with something else."""
    assert calibration.reference(Hardware(name="A", kind="cuda", measured_flops={"bfloat16": 1e14})) is None


# --------------------------------------------------------------------------------------------------------------- doctor


def said(checks: Sequence[doctor.Check]) -> dict[str, tuple[bool | None, str]]:
    return {check.name: (check.good, check.says) for check in checks}


CPU = {"torch": "2.13.0+cpu", "cuda": None, "hip": None, "devices": []}


def test_this_machine() -> None:
    pytest.importorskip("torch")
    found = said(doctor.checks())
    names = ["python", "torch", "device", "counters", "ncu", "git", "polars", "networkx"]
    assert list(found) == names
    assert found["python"] == (True, sys.version.split()[0])
    assert found["torch"][0] is True
    assert found["polars"] == (True, "the cache of large traces")
    assert all(says and "\n" not in says and "Traceback" not in says for _, says in found.values())


def test_a_machine_without_a_gpu(interpreter: Interpreter) -> None:
    found = said(doctor.checks(interpreter("a warning", "", CPU)))
    assert found["torch"] == (True, "2.13.0+cpu, CPU build")
    assert found["device"] == (None, "none: scripts run on the CPU, without GPU counters")


def test_a_known_device_has_its_peak(interpreter: Interpreter) -> None:
    facts = {"torch": "2.11.0", "cuda": "13.0", "hip": None, "devices": [["NVIDIA H200", 132]]}
    found = said(doctor.checks(interpreter(facts)))
    assert found["torch"] == (True, "2.11.0, CUDA 13.0")
    assert found["device"] == (True, "NVIDIA H200, dense peak 989.4 TFLOP/s")


def test_an_unknown_device_is_told_what_to_do_until_it_is_calibrated(interpreter: Interpreter, kept: Path) -> None:
    facts = {"torch": "2.11.0", "cuda": None, "hip": "6.4", "devices": [["Experimental GPU", 100]]}
    found = said(doctor.checks(interpreter(facts)))
    assert found["torch"] == (True, "2.11.0, ROCm 6.4")
    advice = "run `advisor doctor --calibrate` or give --peak"
    assert found["device"] == (False, f"Experimental GPU (100 multiprocessors) is not in the table: {advice}")
    calibration.save(kept, "Experimental GPU", 100, {**FIGURES, "date": "2026-11-30"})
    good, says = said(doctor.checks(interpreter(facts)))["device"]
    assert good is True
    assert "400 TFLOP/s: bfloat16 matmul rate of Experimental GPU, measured by" in says


@pytest.mark.parametrize(
    ("lines", "status", "error", "words"),
    [
        (
            (),
            1,
            "Traceback\nModuleNotFoundError: No module named 'torch'\n",
            "No module named 'torch': pip install torch",
        ),
        ((), 1, "", "it printed nothing: pip install torch"),
        ((), 0, "", "printed no answer: pip install torch"),
        (("not JSON",), 0, "", "printed no answer"),
        (("[1]",), 0, "", "printed no answer"),
    ],
)
def test_an_interpreter_without_torch(
    interpreter: Interpreter, lines: tuple[str, ...], status: int, error: str, words: str
) -> None:
    found = said(doctor.checks(interpreter(*lines, status=status, error=error)))
    assert found["torch"][0] is False and words in found["torch"][1]
    assert "device" not in found and "git" in found  # the rest is looked at all the same


@pytest.mark.parametrize("ask", [doctor.checks, lambda python: doctor.calibrate(Path("devices.json"), python)])
def test_no_such_interpreter(ask: Callable[[str], Any]) -> None:
    with pytest.raises(UsageError, match=r"^/nowhere/python cannot be run \(.*\): name an interpreter with --python$"):
        ask("/nowhere/python")


class Sampler:
    """Counters of a device that says what it is told to."""

    recording = Recording(device=None)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> Recording:
        return self.recording


@pytest.mark.parametrize(
    ("device", "missing", "good", "words"),
    [
        ("NVIDIA H200", {}, True, "GPM: SM activity, occupancy, tensor pipe and memory, beside the run"),
        ("NVIDIA H200", {"counters": "the run ended within one window of 0.12 s"}, True, "GPM"),
        ("NVIDIA A100", {"gpm": "the device offers no GPM counters"}, None, "the device offers no GPM counters"),
        (None, {"counters": "install nvidia-ml-py to sample device counters"}, None, "install nvidia-ml-py"),
    ],
)
def test_counters(
    monkeypatch: pytest.MonkeyPatch,
    interpreter: Interpreter,
    device: str | None,
    missing: dict[str, str],
    good: bool | None,
    words: str,
) -> None:
    monkeypatch.setattr(doctor, "Sampler", Sampler)
    monkeypatch.setattr(Sampler, "recording", Recording(device=device, missing=missing))
    found = said(doctor.checks(interpreter(CPU)))["counters"]
    assert found[0] is good and words in found[1]


def test_tools_and_modules_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/opt/ncu" if name == "ncu" else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "polars" else object())
    found = said(doctor.checks(interpreter(CPU)))
    assert found["ncu"] == (True, "per-kernel counters (`advisor optimize --ncu`)")
    assert found["git"] == (None, "not on PATH, for the state of the work tree, patches: install git")
    assert found["polars"] == (False, "missing, needed for the cache of large traces: pip install polars")


# ------------------------------------------------------------------------------------------------------------ calibrate


def test_what_a_device_reached_is_kept(interpreter: Interpreter, kept: Path) -> None:
    found = doctor.calibrate(kept, interpreter("warming up", FIGURES))
    assert {key: found[key] for key in FIGURES} == FIGURES
    assert len(found["date"]) == len("2026-11-30")
    assert calibration.measured(kept, GPU).measured_flops == FIGURES["measured_flops"]


def test_without_a_gpu_nothing_is_kept(interpreter: Interpreter, kept: Path) -> None:
    with pytest.raises(UsageError, match="torch sees no GPU to calibrate") as raised:
        doctor.calibrate(kept, interpreter({"device": None, "torch": "2.13.0+cpu"}))
    assert raised.value.exit_status == 2
    assert not kept.exists()


def test_a_measurement_that_fails_shows_why(interpreter: Interpreter, kept: Path) -> None:
    error = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory\n"
    with pytest.raises(ScriptError, match=r"cannot be measured: torch\.OutOfMemoryError: CUDA out of memory") as raised:
        doctor.calibrate(kept, interpreter(status=1, error=error))
    assert raised.value.detail == error
    assert not kept.exists()


def test_a_measurement_that_hangs_is_ended(
    interpreter: Interpreter, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.2)
    with pytest.raises(ScriptError, match=r"did not answer within 0\.2 s"):
        doctor.calibrate(kept, interpreter(FIGURES, first="exec sleep 60"))
